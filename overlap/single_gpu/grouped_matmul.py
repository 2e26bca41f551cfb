"""`grouped_matmul`: each group of rows times a matrix of its own, as a layer of experts multiplies its tokens.

There are two products, and each is the derivative of the other:

    rows         out[rows of e] = lhs[rows of e] @ rhs[e]          [m, k], [groups, k, n] -> [m, n]
    contraction  out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]         [m, k], [m, n] -> [groups, k, n]

The cotangent of a left operand that several right operands share is a sum of products of rows, which one kernel
computes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from overlap.choice import dispatch, space
from overlap.choice.choose import choose_config
from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Asked, Explanation, Implementation
from overlap.choice.problem import Problem
from overlap.frame import activation as activations
from overlap.frame import arguments, by_xla, call, mesh_axes, primitive, products
from overlap.frame.explain import record
from overlap.frame.form import Form
from overlap.frame.normalize import normalize
from overlap.frame.operands import F32, Operands, Results, accumulator
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.signatures import AnyArray, Arguments, Leaf, Scale
from overlap.kernels import groups, launch, limits, operations
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import Target
from overlap.kernels.varying import alike
from overlap.primitives.integers import ceil_div
from overlap.single_gpu import grouped_product

NAME = operations.GROUPED.function
_LEAST = Config(tile_n=128, stages=2)


@dataclasses.dataclass(frozen=True)
class OfGroups(Operation):
    """What both products have in common. Derivatives run the kernels, or XLA's operation for groups, to any order."""

    has_own_derivatives = True

    def problem(self, form: Form) -> Problem:
        # The sizes of the groups are data. The model is asked for the time of equal groups.
        assert form.groups is not None
        sides = len(form.widths) if self.combines else 1
        m, k = form.m, form.k
        if self.spec.groups == "m":
            m = max(ceil_div(m, form.groups), 1)
        else:
            k = max(ceil_div(k, form.groups), 1)
        return Problem(
            op=self.spec.name,
            m=m,
            n=form.widths[0] * sides,
            k=k,
            dtype=form.dtype.name,
            out_dtype=form.out_dtype.name,
            layout=form.layouts.name,
            batch=form.groups,
            sides=sides,
        )

    def check_form(self, form: Form, rhs_dtype: DTypeLike, config: Config, target: Target) -> None:
        """Raises, as `limits.check` does, if the kernel cannot compute a product of this form."""
        limits.check_groups(config)
        by_rows, sides = self.spec.groups == "m", len(form.widths) if self.combines else 1
        if sides > 2:
            raise NotImplementedError(
                f"the kernel takes at most two right operands, got {sides}: make several calls, or use "
                'implementation="xla"'
            )
        if form.dtype in FLOAT8 and not by_rows:
            raise NotImplementedError('8-bit operands cannot be contracted along rows: use implementation="xla"')
        if form.dtype in FLOAT8 and not form.layouts.transpose_rhs:
            raise NotImplementedError(
                "the fused kernel reads matrices of 8 bits as [groups, n, k] only, got transpose_rhs=False: store them "
                'so and pass transpose_rhs=True, or use implementation="xla"'
            )
        dtypes = form.dtype, rhs_dtype, form.out_dtype
        types = OperandTypes(form.m, *dtypes, form.layouts, sides=sides, grouped=self.spec.groups)
        names = ("m", "n", "k") if by_rows else ("k", "n", "m")
        sizes = dict(zip("mnk", zip(names, (form.m, form.widths[0], form.k), strict=True), strict=True))
        zeros_bytes = limits.ZEROS_BYTES if by_rows else 0
        limits.check(mainloop_of(target), types, sizes, config, target, beside_bytes=zeros_bytes)

    def plan(self, operands: Operands, layouts: OperandLayouts, dtype: DTypeLike, like: LaunchPlan) -> LaunchPlan:
        """Returns the plan of a product of a derivative: by the kernel, if that of `like` ran and it can serve it."""
        form = Form.of(operands, layouts, dtype)
        return LaunchPlan(self, form, like.target, self._config(form, operands.rhs_list[0].dtype, like), None,
                          like.must_fuse)  # fmt: skip

    def _config(self, form: Form, rhs_dtype: DTypeLike, like: LaunchPlan) -> Config | None:
        if like.chosen is None or 0 in (form.m, form.k, *form.widths):
            return None

        def check(config: Config, target: Target) -> None:
            self.check_form(form, rhs_dtype, config, target)

        problem, target = self.problem(form), like.target
        # Only products of rows can be tuned, by their public function.
        found = choose_config(problem, target) if self.spec.groups == "m" else (_LEAST, "heuristic")
        if self.spec.groups == "k" and (config := space.heuristic(problem, target)) is not None:
            found = config, "heuristic"
        config, _ = dispatch.first_that_fits(*found, problem, target, check)
        try:
            check(config, target)
        except (ValueError, NotImplementedError):
            return None
        return config

    def computed(self, operands: Operands, layouts: OperandLayouts, dtype: DTypeLike, like: LaunchPlan) -> jax.Array:
        """Runs a product of a derivative."""
        (out,), _ = primitive.fused(operands, self.plan(operands, layouts, dtype, like))
        return out

    def backward(self, operands: Operands, layouts: OperandLayouts, wanted: DTypeLike, like: LaunchPlan) -> jax.Array:
        """Runs a product of the backward pass, with a result of the dtype that is wanted."""
        # Kernels take operands of one dtype, and contract none of 8 bits along rows.
        narrow = like.form.dtype if like.form.dtype not in FLOAT8 else jnp.dtype(jnp.bfloat16)
        cast = jax.tree.map(lambda x: x.astype(narrow), dataclasses.replace(operands, group_sizes=None))
        operands = dataclasses.replace(cast, group_sizes=operands.group_sizes)
        out = self.computed(operands, layouts, F32 if wanted in FLOAT8 else wanted, like)
        if like.chosen is not None:
            pairs = f" of {len(operands.lefts)} pairs" if operands.more_lefts else ""
            shapes = f"to {'x'.join(map(str, out.shape))}{pairs} {narrow.name}"
            why = "the kernels of the forward pass serve this product"
            record(Explanation(NAME, "fused", None, why, Cause.PREDICTED, like.target, plan="backward pass",
                               shapes=shapes))  # fmt: skip
        return out.astype(wanted)

    def typed(self, operands: Operands) -> Operands:
        return alike(operands)

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        if plan.chosen is None:
            return by_xla.products(operands, plan.layouts, plan.out_dtype, plan.kernel_activation(operands)), None
        leaves, structure = jax.tree.flatten(operands)

        def kernel(*leaves: jax.Array) -> jax.Array:
            return self.by_kernel(jax.tree.unflatten(structure, leaves), plan)

        def otherwise(*leaves: jax.Array) -> jax.Array:
            given = jax.tree.unflatten(structure, leaves)
            return by_xla.products(given, plan.layouts, plan.out_dtype, plan.kernel_activation(given))[0]

        return (launch.sealed(kernel, NAME, None if plan.must_fuse else otherwise)(*leaves),), None

    def by_kernel(self, operands: Operands, plan: LaunchPlan) -> jax.Array:
        """Runs the kernel."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class GroupedMatmul(OfGroups):
    """The operation `grouped_matmul`: the product of rows.

    Attributes:
      combines: as in `Operation`.
      clears: whether the rows behind all groups must be zeros in the result, and in the cotangent of `lhs`. The kernel
        leaves them undefined if nobody reads them.
    """

    combines: bool = False
    clears: tuple[bool, bool] = (True, True)

    spec = operations.GROUPED

    @property
    def takes_lists(self) -> bool:
        return self.combines

    @property
    def apart(self) -> GroupedMatmul:
        return dataclasses.replace(self, combines=False)

    def check(self, call: Call, config: Config, target: Target) -> None:
        self.check_form(call.form, call.operands.rhs_list[0].dtype, config, target)
        mesh_axes.require_no_partitioner_axes()

    def typed(self, operands: Operands) -> Operands:
        sizes = groups.clipped(operands.group_sizes, operands.lhs.shape[0])
        return alike(dataclasses.replace(operands, group_sizes=sizes))

    def by_kernel(self, operands: Operands, plan: LaunchPlan) -> jax.Array:
        if 0 in (*operands.lhs.shape, *operands.rhs_list[0].shape):
            return jnp.zeros((plan.form.m, plan.form.widths[0]), plan.out_dtype)
        return grouped_product.rows(operands, plan, clears=self.clears[0])

    def before_activation(self, plan: LaunchPlan) -> LaunchPlan:
        dtype = plan.out_dtype if self.combines else accumulator(plan.form.dtype)
        form = dataclasses.replace(plan.form, out_dtype=dtype, widths=plan.form.widths[:1])
        bare = dataclasses.replace(plan, operation=self.apart, form=form, activation=None)
        return dataclasses.replace(bare, chosen=self.apart._config(form, form.dtype, plan))

    def of_tangents(self, plan: LaunchPlan) -> Callable[[Operands], Results]:
        bare = self.before_activation(dataclasses.replace(plan, activation=None))

        def of_operands(operands: Operands) -> Results:
            how = plan if plan.activation is None and not operands.has_epilogue else bare
            rights = (*operands.rhs_list, *operands.more_rights)
            lefts = operands.lefts * (len(rights) if len(operands.lefts) == 1 else 1)
            outs: list[Leaf] = [_bilinear(how, operands.group_sizes, *pair) for pair in zip(lefts, rights, strict=True)]
            outs = [sum(outs[1:], outs[0])] if operands.more_lefts else outs
            wide = accumulator(plan.form.dtype)
            values = tuple(z.astype(wide) for z in outs)
            return by_xla.finish(values, operands, plan.out_dtype, plan.bound_activation(operands)), None

        return of_operands

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        whole: Operands,
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, None]:
        g, *more_gs = gs
        rhs, *more_rights = whole.rhs_list
        pairs = Operands(g, (rhs,), group_sizes=whole.group_sizes, more_lefts=tuple(more_gs),
                         more_rights=tuple(more_rights))  # fmt: skip
        layouts = OperandLayouts(transpose_rhs=not plan.layouts.transpose_rhs)
        of_out, of_lhs = self.clears
        operation = GroupedMatmul(clears=(of_lhs, of_out))
        return operation.backward(pairs, layouts, dtype, plan), None

    def rhs_cotangent(self, pair: Operands, g: jax.Array, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        rows = (g, pair.lhs) if plan.layouts.transpose_rhs else (pair.lhs, g)
        return _contracted(*rows, pair, dtype, plan)

    def times(self, pair: Operands, layouts: OperandLayouts, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        return self.apart.computed(pair, layouts, dtype, plan)


@dataclasses.dataclass(frozen=True)
class Contraction(OfGroups):
    """The contraction of the rows of each group, a product of the backward pass."""

    spec = operations.CONTRACTION

    def by_kernel(self, operands: Operands, plan: LaunchPlan) -> jax.Array:
        if 0 in (*operands.lhs.shape, *operands.rhs_list[0].shape):
            return jnp.zeros((plan.form.groups, plan.form.m, plan.form.n), plan.out_dtype)
        return grouped_product.contraction(operands, plan)

    def of_tangents(self, plan: LaunchPlan) -> Callable[[Operands], Results]:
        return lambda operands: ((_bilinear(plan, operands.group_sizes, operands.lhs, operands.rhs_list[0]),), None)

    # The result g is [groups, k, n]: the cotangents of both operands are products of rows with it.

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        whole: Operands,
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, None]:
        pair = Operands(whole.rhs_list[0], (gs[0],), group_sizes=whole.group_sizes)
        return GroupedMatmul().backward(pair, OperandLayouts(transpose_rhs=True), dtype, plan), None

    def rhs_cotangent(self, pair: Operands, g: jax.Array, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        of_rhs = Operands(pair.lhs, (g,), group_sizes=pair.group_sizes)
        return GroupedMatmul().backward(of_rhs, OperandLayouts(), dtype, plan)


def _contracted(lhs: jax.Array, rhs: jax.Array, like: Operands, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
    pair = Operands(lhs, (rhs,), group_sizes=like.group_sizes)
    return Contraction().backward(pair, OperandLayouts(transpose_lhs=True), dtype, plan)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bilinear(plan: LaunchPlan, sizes: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A product without an epilogue, which forward mode differentiates by products of the same kind."""
    operands = Operands(lhs, (rhs,), group_sizes=sizes)
    (out,), _ = primitive.fused(operands, plan)
    return out


def _bilinear_jvp(plan: LaunchPlan, primals: tuple[jax.Array, ...], tangents: tuple[Leaf, ...]) -> tuple[Leaf, Leaf]:
    sizes, lhs, rhs = primals
    _, d_lhs, d_rhs = tangents
    pairs = [pair for pair in ((d_lhs, rhs), (lhs, d_rhs)) if not any(isinstance(x, SymbolicZero) for x in pair)]
    parts: list[Leaf] = [_bilinear(plan, sizes, *pair) for pair in pairs]
    out: Leaf = _bilinear(plan, *primals)
    return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)


_bilinear.defjvp(_bilinear_jvp, symbolic_zeros=True)


def prepare(given: Arguments, clears: tuple[bool, bool] = (True, True)) -> tuple[GroupedMatmul, Call]:
    """Checks the arguments of `grouped_matmul`. Returns the operation and the checked call."""
    clears = (True, True) if launch.checks_numbers() else clears
    operation = GroupedMatmul(activations.takes_all(given.activation, given.rhs), clears)
    return operation, normalize(operation, given)


def run(given: Arguments, clears: tuple[bool, bool] = (True, True)) -> jax.Array:
    """Does what `grouped_matmul` does; the rows behind all groups are zeros only where `GroupedMatmul.clears` says so.

    A function that no kernel can compute is applied by XLA to the values of the kernel: XLA's own product takes long.
    """
    arguments.require_values(**given.arrays)
    call.check_choice(given)
    operation, checked = prepare(given, clears)
    asked = Asked(given.config, given.implementation)
    if not checked.not_elementwise or given.implementation == "fused":
        return call.run_prepared(operation, checked, asked)
    operands = dataclasses.replace(checked.operands, group_sizes=_clipped(checked.operands))
    form = dataclasses.replace(checked.form, out_dtype=accumulator(checked.form.dtype), widths=checked.form.widths[:1])
    names = tuple(name for name in checked.given if name != "activation")
    bare = dataclasses.replace(
        checked, form=form, by_xla=None, container=None, given=names, combines=False, not_elementwise=""
    )
    values = [
        call.run_prepared(operation.apart, dataclasses.replace(bare, operands=operands.for_rhs(index)), asked)
        for index in range(len(operands.rhs_list))
    ]
    after: Any = products.of(operands).guarded(checked.by_xla)
    return after(values)[0].astype(checked.form.out_dtype)


def _clipped(operands: Operands) -> jax.Array:
    return groups.clipped(operands.group_sizes, operands.lhs.shape[0])


def grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    group_sizes: AnyArray,
    *,
    bias: AnyArray | Sequence[AnyArray] | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes activation(lhs_scale · (lhs[rows of e] @ rhs[e]) · rhs_scale[e] + bias[e]) for each group e of rows.

    The rows of a group follow each other: first the `group_sizes[0]` rows of group 0, then those of group 1, and so on.
    The sizes are data, may be zero, and may differ from call to call without anything being compiled again.

    Args:
      lhs: [m, k]. float16, bfloat16, or float8 (e4m3fn, e5m2); by XLA any floating-point dtype.
      rhs: [groups, k, n], or [groups, n, k] with `transpose_rhs` (float8 needs it). Same dtype as `lhs` (float8 kinds
        may be mixed). Or a list or tuple of such arrays, if `activation` takes an array for each; `bias` and
        `rhs_scale` are then lists, too.
      group_sizes: integers [groups]: how many rows each group has. Rows behind all groups may hold anything; their
        results are zero. If the sizes add up to more than m, the last groups have fewer rows. A negative size counts
        as 0.
      bias: [groups, n], added to each row of the group.
      activation: as in `matmul`, but a function that no kernel can compute is applied by XLA to the products.
      lhs_scale: a factor of the product, in float32: a scalar, or [m, 1], one value per row.
      rhs_scale: a factor of the product, in float32: a scalar, or [groups, n], one value per column of each group.
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32.
      transpose_rhs: whether `rhs` is stored transposed. The kernel reads it as it lies, without a copy.
      config: tile sizes of the kernel; by default the model chooses, as for equal groups.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla" (`jax.lax.ragged_dot`, which lets a NaN
        among the weights of one group into the results of all), or None to choose: the kernel wherever it can serve the
        call on a Hopper GPU.

    Returns:
      [m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes, the activation or the config are wrong.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why. Or,
        outside of `jax.shard_map`, rows, groups or k are sharded along Explicit mesh axes.

    Works under `jax.jit` and `lax.scan`, inside `jax.shard_map` (each device multiplies its own rows), and under
    `jax.vmap`, which computes one product after the other. Outside of `jax.shard_map`, `rhs`, `bias` and `rhs_scale`
    may be sharded along n over Explicit mesh axes, as is the result then. It has derivatives of any order. The backward
    pass runs two kernels: the same product for `lhs`, and for `rhs` one that contracts the rows of each group. If `rhs`
    is a list, one kernel adds the products for `lhs` in float32, and each entry has a contraction. Cotangents are
    rounded to the operands' dtype (bfloat16 for float8) before they are multiplied. With an activation, a bias or
    scales the products are kept in float32 for the backward pass; in the dtype of the result if the activation takes
    several.

    Example:
      >>> tokens, experts = jnp.ones((6, 64), jnp.bfloat16), jnp.ones((3, 64, 128), jnp.bfloat16)
      >>> overlap.grouped_matmul(tokens, experts, jnp.array([4, 0, 2])).shape
      (6, 128)

    Source: the grouped products of CUTLASS and of "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts"
    (Gale et al., MLSys 2023). That tiles of all groups are numbered together is also how DeepGEMM deals them out.
    """
    given = Arguments(
        lhs,
        rhs,
        group_sizes=group_sizes,
        bias=bias,
        activation=activation,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        config=config,
        implementation=implementation,
    )
    operation = GroupedMatmul(activations.takes_all(activation, rhs))
    return mesh_axes.on_each_device(operation, given, run)
