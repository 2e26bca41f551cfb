"""Products of groups of rows as a primitive of JAX: by the kernels or by XLA, with derivatives of any order.

There are two products, and each is the derivative of the other:

    rows         out[rows of e] = lhs[rows of e] @ rhs[e]          [m, k], [groups, k, n] -> [m, n]
    contraction  out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]         [m, k], [m, n] -> [groups, k, n]

Both are linear in each operand. So the tangent of a product is one product for each operand that moves, and the
transpose of a product is a product again: one primitive and two rules suffice. The product of rows may also have an
epilogue, which one kernel computes where nothing is differentiated. Its derivative is that of the bare product in
float32 and of the epilogue as XLA computes it.

An epilogue may take the products of one left operand with several right ones. The cotangent of the left operand is then
a sum of products of rows, which one kernel computes:

    rows         out[rows of e] = Σ_i lefts[i][rows of e] @ rhs_list[i][e]
"""

from __future__ import annotations

import dataclasses
import functools
import operator
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
from overlap.frame.activation import BEFORE_ACTIVATION, Activation
from overlap.frame.explain import record
from overlap.frame.linear import Wanted, linear_map
from overlap.frame.operands import F32, Leaf, Structure, accumulator, named_arrays
from overlap.frame.primitive import require_same_devices
from overlap.kernels import epilogue, launch
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.target import Target
from overlap.kernels.varying import alike
from overlap.single_gpu import grouped_choice, grouped_product
from overlap.single_gpu.grouped_by_xla import by_xla, with_epilogue
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
      more_lefts: [m, k] each. If there are any, each right operand has a left one of its own, and their products are
        added, without an epilogue.
    """

    lhs: Leaf
    rhs_list: tuple[Leaf, ...]
    sizes: Leaf
    row_scale: Leaf = None
    column_scales: tuple[Leaf, ...] | None = None
    biases: tuple[Leaf, ...] | None = None
    scalars: tuple[Leaf, ...] = ()
    more_lefts: tuple[Leaf, ...] = ()

    @property
    def lefts(self) -> tuple[Leaf, ...]:
        """The left operands."""
        return self.lhs, *self.more_lefts

    @property
    def named(self) -> list[tuple[str, Leaf]]:
        """Each array that is given, after the name of the argument that it comes from."""
        return named_arrays(self)

    @property
    def sides(self) -> int:
        """How many right operands have columns of their own in each tile: all, unless their products are added."""
        return 1 if self.more_lefts else len(self.rhs_list)

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


def _bare(operands: Grouped, product: Product, *, backward: bool = False) -> jax.Array:
    """Returns a product of a derivative: by XLA if no kernel can serve its sizes, as in other operations."""
    served = product
    if product.implementation == "fused":
        try:
            grouped_choice.check(operands, product, None)
        except NotImplementedError:
            served = dataclasses.replace(product, implementation="xla")
    out = run(operands, served)
    if backward and served.implementation == "fused":
        record(grouped_choice.explanation(operands, product, out.shape))
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
    require_same_devices(jax.tree.unflatten(static.operands, leaves).named)
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
    config = product.config or grouped_choice.config_of(operands, product)
    program = None if product.activation is None else product.activation.program
    plan = GroupedPlan(product.transpose_rhs, product.out_dtype, config, product.target, program, product.clears[0])
    if product.kind == "contraction":
        return grouped_product.contraction(lhs, rhs_list[0], sizes, plan)
    vectors = grouped_product.vectors(operands.row_scale, operands.column_scales, operands.biases, config)
    vectors = dataclasses.replace(vectors, scalars=epilogue.packed(operands.scalars, program))
    return grouped_product.rows(operands.lefts, rhs_list, sizes, vectors, plan)


# --- Derivatives ---


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Leaf], *, static: _Static) -> tuple[jax.Array, Leaf]:
    product = static.product
    operands, moved = (jax.tree.unflatten(static.operands, leaves) for leaves in (primals, tangents))
    if operands.has_epilogue or product.activation is not None:
        return _with_epilogue_jvp(operands, moved, product)
    parts = []
    for lhs, rhs, d_lhs, d_rhs in zip(operands.lefts, operands.rhs_list, moved.lefts, moved.rhs_list, strict=True):
        for left, right in ((d_lhs, rhs), (lhs, d_rhs)):
            if not (isinstance(left, ad.Zero) or isinstance(right, ad.Zero)):
                parts.append(_bare(Grouped(left, (right,), operands.sizes), product))
    out = _grouped_p.bind(*primals, static=static)
    return out, functools.reduce(operator.add, parts) if parts else ad.Zero(jax.typeof(out).to_tangent_aval())


def _with_epilogue_jvp(operands: Grouped, moved: Grouped, product: Product) -> tuple[jax.Array, Leaf]:
    """The same result and its tangent from bare products and an epilogue by XLA, which have derivatives.

    The products are in float32. If an activation takes several, they have the dtype of the result, as in other
    operations: they are what a layer keeps for its backward pass.
    """
    lhs, sizes, wide = operands.lhs, operands.sizes, accumulator(operands.lhs.dtype)
    dtype = product.out_dtype if operands.sides > 1 else wide
    bare = product.like("rows", dtype, product.transpose_rhs, product.clears)
    products = [_bare(Grouped(lhs, (rhs,), sizes), bare) for rhs in operands.rhs_list]
    products = [checkpoint_name(z, BEFORE_ACTIVATION) for z in products]
    of_products: list[Leaf] = [
        rhs if isinstance(rhs, ad.Zero) else _bare(Grouped(lhs, (rhs,), sizes), bare) for rhs in moved.rhs_list
    ]
    if not isinstance(moved.lhs, ad.Zero):
        of_lhs = _products_of(moved.lhs, operands.rhs_list, sizes, bare)
        both = zip(of_lhs, of_products, strict=True)
        of_products = [x if isinstance(more, ad.Zero) else x + more for x, more in both]
    # The epilogue as a function of the products and of its own operands.
    values, structure = jax.tree.flatten((products, dataclasses.replace(operands, lhs=None, rhs_list=())))
    directions = structure.flatten_up_to((of_products, dataclasses.replace(moved, lhs=None, rhs_list=())))
    moved_at = [i for i, x in enumerate(directions) if not isinstance(x, ad.Zero)]

    def of_moved(*given: jax.Array) -> jax.Array:
        changed = dict(zip(moved_at, given, strict=True))
        products, vectors = jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(values)])
        return with_epilogue([z.astype(wide) for z in products], vectors, product)

    return jax.jvp(of_moved, [values[i] for i in moved_at], [directions[i] for i in moved_at])


def _products_of(lhs: jax.Array, rhs_list: Sequence[jax.Array], sizes: jax.Array, product: Product) -> list[jax.Array]:
    """Returns the bare products of rows with each right operand, whose transpose is one sum of products."""

    def forward(residuals: Sequence[jax.Array], operands: Sequence[jax.Array]) -> list[jax.Array]:
        sizes, *rhs_list = residuals
        return [_bare(Grouped(operands[0], (rhs,), sizes), product) for rhs in rhs_list]

    def transpose(
        residuals: Sequence[jax.Array], wanted: Sequence[Wanted], cotangents: Sequence[Leaf]
    ) -> list[jax.Array]:
        (dtype,), (sizes, *rhs_list) = wanted, residuals
        assert dtype is not None
        pairs = list(zip(cotangents, rhs_list, strict=True))
        pairs = [(g, rhs) for g, rhs in pairs if not isinstance(g, ad.Zero)] or pairs[:1]
        gs, rhs_list = zip(*((ad.instantiate_zeros(g), rhs) for g, rhs in pairs), strict=True)
        return [_lhs_cotangent(gs, rhs_list, sizes, product, dtype)]

    return linear_map(forward, transpose, [sizes, *rhs_list], [lhs])


def _lhs_cotangent(
    gs: Sequence[jax.Array], rhs_list: Sequence[jax.Array], sizes: jax.Array, product: Product, wanted: jnp.dtype
) -> jax.Array:
    """The cotangent of the left operand of products of rows, given those of the products: Σ_i g_i @ rhs_i[e]ᵀ."""
    narrow = _narrow(rhs_list[0].dtype)
    (g, *more), rights = [g.astype(narrow) for g in gs], tuple(rhs.astype(narrow) for rhs in rhs_list)
    out_dtype, (of_out, of_lhs) = F32 if wanted in FLOAT8 else wanted, product.clears
    of_sum = product.like("rows", out_dtype, not product.transpose_rhs, (of_lhs, of_out))
    return _bare(Grouped(g, rights, sizes, more_lefts=tuple(more)), of_sum, backward=True).astype(wanted)


def _narrow(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype in which a cotangent is multiplied by an operand, as kernels take operands of one dtype only.

    It has no 8 bits, since no kernel contracts such operands along rows.
    """
    return jnp.dtype(jnp.bfloat16) if dtype in FLOAT8 else dtype


def _transposed(cotangent: Leaf, *leaves: Leaf, static: _Static) -> list[Leaf]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in leaves]
    operands, product = jax.tree.unflatten(static.operands, leaves), static.product
    pairs = zip(operands.lefts, operands.rhs_list, strict=True)
    found = [_cotangents(cotangent, lhs, rhs, operands.sizes, product) for lhs, rhs in pairs]
    (of_lhs, *of_more), of_rights = zip(*found, strict=True)
    return [of_lhs, *of_rights, None, *of_more]  # In the order of the fields of `Grouped`; None is that of the sizes.


def _cotangents(cotangent: jax.Array, lhs: Leaf, rhs: Leaf, sizes: jax.Array, product: Product) -> tuple[Leaf, Leaf]:
    """The cotangents of a pair of operands, of which at most one is to be found; None for the other."""
    of_lhs = ad.is_undefined_primal(lhs)
    if not (of_lhs or ad.is_undefined_primal(rhs)):
        return None, None
    wanted, other = (lhs.aval.dtype, rhs) if of_lhs else (rhs.aval.dtype, lhs)
    if product.kind == "rows" and of_lhs:
        return _lhs_cotangent([cotangent], [rhs], sizes, product, wanted), None
    narrow = _narrow(other.dtype)
    g, other = cotangent.astype(narrow), other.astype(narrow)
    out_dtype = F32 if wanted in FLOAT8 else wanted
    if product.kind == "rows":
        pair = (g, other) if product.transpose_rhs else (other, g)
        of_pair = product.like("contraction", out_dtype)
    else:  # out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]
        pair, of_pair = (other, g), product.like("rows", out_dtype, of_lhs)
    found = _bare(Grouped(pair[0], (pair[1],), sizes), of_pair, backward=True).astype(wanted)
    return (found, None) if of_lhs else (None, found)


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
