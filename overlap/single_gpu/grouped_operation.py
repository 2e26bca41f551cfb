"""Products of groups of rows as a primitive of JAX: by the kernels or by XLA, with derivatives of any order.

There are two products, and each is the derivative of the other:

    rows         out[rows of e] = lhs[rows of e] @ rhs[e]          [m, k], [groups, k, n] -> [m, n]
    contraction  out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]         [m, k], [m, n] -> [groups, k, n]

Both are linear in each operand. So the tangent of a product is one product for each operand that moves, and the
transpose of a product is a product again: one primitive and two rules suffice. The product of rows may also have an
epilogue, which one kernel computes where nothing is differentiated. Its derivative is that of the bare product in
float32 and of the epilogue as XLA computes it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from overlap import emulation
from overlap.choice.dispatch import Implementation
from overlap.frame.activation import BEFORE_ACTIVATION, Activation, on_all
from overlap.frame.explain import record
from overlap.frame.linear import Wanted, linear_map
from overlap.frame.operands import F32, Leaf, Structure, accumulator
from overlap.kernels import epilogue, groups, launch
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.target import Target
from overlap.kernels.varying import alike
from overlap.single_gpu import grouped_choice, grouped_product
from overlap.single_gpu.grouped_product import GroupedPlan

NAME = "grouped_matmul"
_grouped_p = Primitive("overlap_grouped_matmul")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grouped:
    """The arrays of a product of groups. A field is None if the call has no such array.

    Attributes:
      lhs: [m, k].
      rhs_list: the right operands, [groups, k, n] each, or [groups, n, k] if transposed; of a contraction [m, n].
      sizes: int32 [groups].
      row_scale: float32 [m].
      column_scales: for each right operand float32 [groups, n].
      biases: for each right operand float32 [groups, n].
      scalars: the scalars that the activation captures.
    """

    lhs: Leaf
    rhs_list: tuple[Leaf, ...]
    sizes: Leaf
    row_scale: Leaf = None
    column_scales: tuple[Leaf, ...] | None = None
    biases: tuple[Leaf, ...] | None = None
    scalars: tuple[Leaf, ...] = ()

    @property
    def has_epilogue(self) -> bool:
        """Whether the product has scales or biases."""
        return any(x is not None for x in (self.row_scale, self.column_scales, self.biases))


@dataclasses.dataclass(frozen=True)
class Product:
    """What is static in a product.

    Attributes:
      kind: which of the two products.
      transpose_rhs: whether the right operands of a product of rows are [groups, n, k].
      out_dtype: of the result.
      implementation: "fused" or "xla".
      target: the device.
      config: of the kernel; None: one is chosen.
      must_fuse: whether the caller asked for the kernel.
      activation: None: there is none.
      clears: of a product of rows, whether the rows behind all groups must be zeros in the result, and in the cotangent
        of `lhs`. The kernel leaves them undefined if nobody reads them.
    """

    kind: Literal["rows", "contraction"]
    transpose_rhs: bool
    out_dtype: jnp.dtype
    implementation: Implementation
    target: Target
    config: Config | None = None
    must_fuse: bool = False
    activation: Activation | None = None
    clears: tuple[bool, bool] = (True, True)

    def like(
        self,
        kind: Literal["rows", "contraction"],
        out_dtype: DTypeLike,
        transpose_rhs: bool = False,
        clears: tuple[bool, bool] = (True, True),
    ) -> Product:
        """Returns a product without an epilogue that is computed in the same way."""
        changed = {"kind": kind, "out_dtype": jnp.dtype(out_dtype), "transpose_rhs": transpose_rhs, "clears": clears}
        return dataclasses.replace(self, **changed, config=None, activation=None)

    def shape(self, lhs: tuple[int, ...], rhs: tuple[int, ...], groups: int) -> tuple[int, ...]:
        """Returns the shape of the result."""
        if self.kind == "contraction":
            return groups, lhs[1], rhs[1]
        return lhs[0], rhs[1 if self.transpose_rhs else 2]


@dataclasses.dataclass(frozen=True)
class _Static:
    product: Product
    operands: Structure


def run(operands: Grouped, product: Product) -> jax.Array:
    """Returns the product of checked operands."""
    if product.target.platform == "cpu" and product.implementation == "fused":
        emulation.enable()
    leaves, structure = jax.tree.flatten(alike(operands))
    return _grouped_p.bind(*leaves, static=_Static(product, structure))


def _bare(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, product: Product, *, backward: bool = False) -> jax.Array:
    """Returns a product of a derivative: by XLA if no kernel can serve its sizes, as in other operations."""
    served = product
    if product.implementation == "fused":
        try:
            grouped_choice.check(lhs, (rhs,), sizes, product, None)
        except NotImplementedError:
            served = dataclasses.replace(product, implementation="xla")
    out = run(Grouped(lhs, (rhs,), sizes), served)
    if backward and served.implementation == "fused":
        record(grouped_choice.explanation(product, out.shape, lhs.dtype))
    return out


@_grouped_p.def_abstract_eval
def _type(*leaves: Leaf, static: _Static) -> Leaf:
    operands, product = jax.tree.unflatten(static.operands, leaves), static.product
    like, (groups,) = operands.lhs, operands.sizes.shape
    shape = product.shape(like.shape, operands.rhs_list[0].shape, groups)
    sharding = jax.NamedSharding(like.sharding.mesh, jax.P(*[None] * len(shape)))
    return like.update(shape=shape, dtype=product.out_dtype, weak_type=False, sharding=sharding)


@_grouped_p.def_impl
def _compiled(*leaves: jax.Array, static: _Static) -> jax.Array:
    with jax.disable_jit(False):
        return _jitted(*leaves, static=static)


@functools.partial(jax.jit, static_argnames="static")
def _jitted(*leaves: jax.Array, static: _Static) -> jax.Array:
    return _grouped_p.bind(*leaves, static=static)


# --- What is computed ---


def _evaluate(*leaves: jax.Array, static: _Static) -> jax.Array:
    product = static.product
    if product.implementation == "xla":
        return by_xla(jax.tree.unflatten(static.operands, leaves), product)

    def kernel(*leaves: jax.Array) -> jax.Array:
        return _by_kernel(jax.tree.unflatten(static.operands, leaves), product)

    def otherwise(*leaves: jax.Array) -> jax.Array:
        return by_xla(jax.tree.unflatten(static.operands, leaves), product)

    return launch.sealed(kernel, NAME, None if product.must_fuse else otherwise)(*leaves)


mlir.register_lowering(_grouped_p, mlir.lower_fun(_evaluate, multiple_results=False), inline=False)


def _by_kernel(operands: Grouped, product: Product) -> jax.Array:
    lhs, rhs_list, sizes = operands.lhs, operands.rhs_list, operands.sizes
    if 0 in (*lhs.shape, *rhs_list[0].shape):
        return jnp.zeros(product.shape(lhs.shape, rhs_list[0].shape, sizes.shape[0]), product.out_dtype)
    config = product.config or grouped_choice.config_of(operands.lhs, rhs_list, sizes, product)
    program = None if product.activation is None else product.activation.program
    plan = GroupedPlan(product.transpose_rhs, product.out_dtype, config, product.target, program, product.clears[0])
    if product.kind == "contraction":
        return grouped_product.contraction(lhs, rhs_list[0], sizes, plan)
    vectors = grouped_product.vectors(operands.row_scale, operands.column_scales, operands.biases, config)
    vectors = dataclasses.replace(vectors, scalars=epilogue.packed(operands.scalars, program))
    return grouped_product.rows(lhs, rhs_list, sizes, vectors, plan)


def by_xla(operands: Grouped, product: Product) -> jax.Array:
    """Computes a product with XLA's own operation for groups of rows."""
    lhs, sizes = operands.lhs, operands.sizes
    wide = accumulator(lhs.dtype)
    if product.kind == "contraction":
        return _ragged(lhs, operands.rhs_list[0], sizes, ((0,), (0,)), []).astype(product.out_dtype)
    contracting = ((1,), (2 if product.transpose_rhs else 1,))
    products = [_ragged(lhs, rhs, sizes, contracting, [0]).astype(wide) for rhs in operands.rhs_list]
    return with_epilogue(products, operands, product)


def _ragged(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, contracting: tuple[tuple[int], tuple[int]], grouped: list[int]
) -> jax.Array:
    if lhs.dtype in FLOAT8:
        lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    numbers = lax.RaggedDotDimensionNumbers((contracting, ((), ())), [0], grouped)
    # XLA multiplies rows of other groups by zero instead of leaving them out, so none of them may hold a NaN.
    lhs = cleared(lhs, sizes)
    rhs = rhs if grouped else cleared(rhs, sizes)
    return lax.ragged_dot_general(lhs, rhs, sizes, numbers, preferred_element_type=accumulator(lhs.dtype))


def with_epilogue(products: Sequence[jax.Array], operands: Grouped, product: Product) -> jax.Array:
    """Returns the result of a product of rows from the bare products with each right operand, by XLA."""
    values = scaled(products, operands)
    if product.activation is not None:
        activation = on_all(functools.partial(product.activation, scalars=operands.scalars), len(values) > 1)
        values = activation(filled(values, operands.sizes))
    (out,) = values
    if operands.has_epilogue or product.activation is not None:
        out = cleared(out, operands.sizes)
    return out.astype(product.out_dtype)


def scaled(products: Sequence[jax.Array], operands: Grouped) -> Sequence[jax.Array]:
    """Returns the bare products times their scales, plus their biases."""
    values, nothing = [], [None] * len(products)
    in_groups = _in_groups(operands.sizes, products[0].shape[0])
    rows = None if operands.row_scale is None else jnp.where(in_groups, operands.row_scale[:, None], 1)
    for z, scale, bias in zip(products, operands.column_scales or nothing, operands.biases or nothing, strict=True):
        z = z if rows is None else z * rows
        z = z if scale is None else z * _of_rows(scale, operands.sizes, z.shape[0])
        values.append(z if bias is None else z + _of_rows(bias, operands.sizes, z.shape[0]))
    return values


def filled(values: Sequence[jax.Array], sizes: jax.Array) -> list[jax.Array]:
    """Gives rows of no group the values of a row that counts, before an activation.

    At zero, an activation may have no finite derivative, which times a cotangent of zero is no number.
    """
    return [jnp.where(_in_groups(sizes, z.shape[0]), z, lax.stop_gradient(z[:1])) for z in values]


def cleared(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sets the rows behind all groups to zero."""
    return jnp.where(_in_groups(sizes, rows.shape[0]), rows, jnp.zeros_like(rows))


def _in_groups(sizes: jax.Array, m: int) -> jax.Array:
    """Which rows belong to a group, [m, 1]."""
    return (jnp.arange(m, dtype=jnp.int32) < sizes.sum(dtype=jnp.int32))[:, None]


def _of_rows(of_groups: jax.Array, sizes: jax.Array, m: int) -> jax.Array:
    """Returns for each row the vector of its group: [groups, n] to [m, n].

    The transpose sums the rows of each group in one product, which always adds in the same order.
    """
    _, ends = groups.bounds(sizes, m)
    group = jnp.minimum((jnp.arange(m)[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32), sizes.shape[0] - 1)

    def forward(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        return [operands[0][residuals[0]]]

    def transpose(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array]:
        rows = ad.instantiate_zeros(cotangents[0])
        own = (residuals[0][None, :] == jnp.arange(of_groups.shape[0])[:, None]).astype(rows.dtype)
        # What is no number in one group must not reach the others, as zero times it would.
        is_number = jnp.isfinite(rows)
        total, others = (
            lax.dot(own, part, precision=lax.Precision.HIGHEST)
            for part in (jnp.where(is_number, rows, 0), jnp.where(is_number, 0, 1).astype(rows.dtype))
        )
        return [jnp.where(others > 0, jnp.nan, total)]

    (out,) = linear_map(forward, transpose, [group], [of_groups])
    return out


# --- Derivatives ---


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Leaf], *, static: _Static) -> tuple[jax.Array, Leaf]:
    operands, product = jax.tree.unflatten(static.operands, primals), static.product
    if not (operands.has_epilogue or product.activation is not None or len(operands.rhs_list) > 1):
        lhs, (rhs,), sizes = operands.lhs, operands.rhs_list, operands.sizes
        moved = jax.tree.unflatten(static.operands, tangents)
        total: Leaf = None
        for tangent, pair in ((moved.lhs, (moved.lhs, rhs)), (moved.rhs_list[0], (lhs, moved.rhs_list[0]))):
            if not isinstance(tangent, ad.Zero):
                part = _bare(*pair, sizes, product)
                total = part if total is None else total + part
        out = _grouped_p.bind(*primals, static=static)
        return out, ad.Zero(jax.typeof(out).to_tangent_aval()) if total is None else total

    moved_at = [i for i, x in enumerate(tangents) if not isinstance(x, ad.Zero)]

    def of_moved(*given: jax.Array) -> jax.Array:
        changed = dict(zip(moved_at, given, strict=True))
        return _apart(jax.tree.unflatten(static.operands, [changed.get(i, x) for i, x in enumerate(primals)]), product)

    return jax.jvp(of_moved, [primals[i] for i in moved_at], [tangents[i] for i in moved_at])


def _apart(operands: Grouped, product: Product) -> jax.Array:
    """The same result from bare products and an epilogue by XLA, which have derivatives.

    The products are in float32. If an activation takes several, they have the dtype of the result, as in other
    operations: they are what a layer keeps for its backward pass.
    """
    dtype = product.out_dtype if len(operands.rhs_list) > 1 else accumulator(operands.lhs.dtype)
    bare = product.like("rows", dtype, product.transpose_rhs, product.clears)
    products = [_bare(operands.lhs, rhs, operands.sizes, bare) for rhs in operands.rhs_list]
    wide = accumulator(operands.lhs.dtype)
    products = [checkpoint_name(z, BEFORE_ACTIVATION).astype(wide) for z in products]
    return with_epilogue(products, operands, product)


def _transposed(cotangent: Leaf, *leaves: Leaf, static: _Static) -> list[Leaf]:
    operands, product = jax.tree.unflatten(static.operands, leaves), static.product
    lhs, (rhs,), sizes = operands.lhs, operands.rhs_list, operands.sizes
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in leaves]
    of_lhs = ad.is_undefined_primal(lhs)
    wanted, other = (lhs.aval.dtype, rhs) if of_lhs else (rhs.aval.dtype, lhs)
    # The kernels multiply operands of one dtype, and contract none of 8 bits along rows.
    narrow = jnp.dtype(jnp.bfloat16) if other.dtype in FLOAT8 else other.dtype
    g, other = cotangent.astype(narrow), other.astype(narrow)
    out_dtype = F32 if wanted in FLOAT8 else wanted
    of_result, of_cotangent = product.clears
    if product.kind == "rows" and of_lhs:
        clears = of_cotangent, of_result
        pair, of_pair = (g, other), product.like("rows", out_dtype, not product.transpose_rhs, clears)
    elif product.kind == "rows":
        pair = (g, other) if product.transpose_rhs else (other, g)
        of_pair = product.like("contraction", out_dtype)
    else:  # out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]
        pair, of_pair = (other, g), product.like("rows", out_dtype, of_lhs)
    found = _bare(*pair, sizes, of_pair, backward=True).astype(wanted)
    return [found, None, None] if of_lhs else [None, found, None]


def _batched(leaves: Sequence[jax.Array], dims: Sequence[int | None], *, static: _Static) -> tuple[jax.Array, int]:
    """One product after the other: the sizes of the groups of each are its own."""
    moved_at = [i for i, dim in enumerate(dims) if dim is not None]
    in_front = [jnp.moveaxis(leaves[i], dims[i] or 0, 0) for i in moved_at]

    def one(given: list[jax.Array]) -> jax.Array:
        changed = dict(zip(moved_at, given, strict=True))
        values = jax.tree.unflatten(static.operands, [changed.get(i, x) for i, x in enumerate(leaves)])
        return run(values, static.product)

    return lax.map(one, in_front), 0


ad.primitive_jvps[_grouped_p] = _jvp
ad.primitive_transposes[_grouped_p] = _transposed
batching.primitive_batchers[_grouped_p] = _batched
