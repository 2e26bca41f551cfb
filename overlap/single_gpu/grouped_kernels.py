"""The kernels of `grouped_matmul`: what they take, what they launch, and the products of their derivatives.

There are two products, and each is the derivative of the other:

    rows         out[rows of e] = lhs[rows of e] @ rhs[e]          [m, k], [groups, k, n] -> [m, n]
    contraction  out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]         [m, k], [m, n] -> [groups, k, n]

The cotangent of a left operand that several right operands share is a sum of products of rows, which one kernel
computes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from overlap.choice import dispatch, space
from overlap.choice.choose import choose_config
from overlap.choice.problem import Problem
from overlap.choice.session import explaining
from overlap.frame import by_xla, mesh_axes, primitive
from overlap.frame.explain import record_backward
from overlap.frame.form import Form
from overlap.frame.kernel import Kernel
from overlap.frame.operands import F32, Operands, Results, accumulator
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.signatures import Leaf
from overlap.kernels import groups, limits
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import CONTRACTION, GROUPED, OperandLayouts
from overlap.kernels.target import Target
from overlap.kernels.varying import alike
from overlap.primitives.integers import ceil_div
from overlap.single_gpu import grouped_product
from overlap.single_gpu.grouped_product import Arrival, EpilogueOperands

NAME = GROUPED.function
# What is tried first where the epilogue has addends, of which the model of times knows nothing: tiles that leave
# registers and shared memory for them, with many stages. On an H100, other tiles took up to 1.3 times as long.
_WITH_ADDENDS = Config(tile_m=128, tile_n=128, stages=5)
# Where rows arrive. More and larger buffers were not faster, and take a stage (4 × H200).
_CHUNKS_OF_ARRIVALS = {"chunk_buffers": 2, "chunk_bytes": 4096}


class GroupsKernel(Kernel):
    """What both products have in common. Derivatives run the kernels, or XLA's operation for groups, to any order."""

    def problem(self, form: Form) -> Problem:
        # The sizes of the groups are data. The model is asked for the time of equal groups.
        assert form.groups is not None
        sides = len(form.widths) if self.operation.combines else 1
        n = form.widths[0] * sides
        if self.operation.spec.groups == "m":
            m = max(ceil_div(form.m, form.groups), 1)
            return self.problem_of_sizes(form, m, n, form.k, batch=form.groups, sides=sides)
        k = max(ceil_div(form.k, form.groups), 1)
        return self.problem_of_sizes(form, form.m, n, k, batch=form.groups, sides=sides)

    def check_form(
        self, form: Form, rhs_dtype: DTypeLike, config: Config, target: Target, boxes: int = 1, addend: bool = False,
        arrives: bool = False,
    ) -> None:  # fmt: skip
        """Raises, as `limits.check` does, if the kernel cannot compute a product of this form.

        `boxes` and `addend` are those of `OperandTypes`, and `arrives` says whether rows arrive meanwhile.
        """
        limits.check_groups(config)
        by_rows = self.operation.spec.groups == "m"
        sides = len(form.widths) if self.operation.combines else 1
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
        grouped = self.operation.spec.groups
        dtypes = form.dtype, rhs_dtype, form.out_dtype
        more = {"sides": sides, "grouped": grouped, "boxes": boxes, "addend": addend}
        types = OperandTypes(form.m, *dtypes, form.layouts, "pull" if arrives else "", **more)
        # A contraction of rows runs in the backward pass. What it contracts, its k, is called m by the caller.
        m_name, k_name = ("m", "k") if by_rows else ("k", "m")
        sizes = {"m": (m_name, form.m), "n": ("n", form.widths[0]), "k": (k_name, form.k)}
        # Zeros for rows that are cleared. The words that a communicator keeps beside its chunks take less than these.
        beside = by_rows + (arrives and self.operation.clears[0])
        limits.check(mainloop_of(target), types, sizes, config, target, beside_bytes=beside * limits.ZEROS_BYTES)

    def plan(self, operands: Operands, layouts: OperandLayouts, dtype: DTypeLike, like: LaunchPlan) -> LaunchPlan:
        """Returns the plan of a product in the derivative of the product whose plan is `like`.

        The kernel runs if it ran for `like`, and takes these operands; else XLA.
        """
        form = Form.of(operands, layouts, dtype)
        config = self._config(form, operands.rhs_list[0].dtype, like)
        return LaunchPlan(self.operation, form, like.target, config, activation=None, must_fuse=like.must_fuse)

    def _config(
        self, form: Form, rhs_dtype: DTypeLike, like: LaunchPlan, boxes: int = 1, addend: bool = False,
        arrives: bool = False,
    ) -> Config | None:  # fmt: skip
        """Returns the kernel's configuration for a product in the derivative of that of `like`; None: XLA runs."""
        if like.chosen is None or 0 in (form.m, form.k, *form.widths):
            return None

        def check(config: Config, target: Target) -> None:
            self.check_form(form, rhs_dtype, config, target, boxes, addend)

        problem = self.problem(form)
        target = like.target
        if self.operation.spec.groups == "m":
            first, source = choose_config(problem, target)
        else:
            # No table has an entry for a contraction of rows: only the public function, a product of rows, is tuned.
            first, source = space.heuristic(problem, target), "heuristic"
        if first is None:
            return None
        if addend:
            first = dataclasses.replace(_WITH_ADDENDS, order_minor=first.order_minor, order_width=first.order_width)
        chosen = dispatch.first_that_fits(first, source, problem, target, check)
        if chosen.refusal is not None or not arrives:
            return chosen.config if chosen.refusal is None else None

        def check_arriving(config: Config, target: Target) -> None:
            self.check_form(form, rhs_dtype, config, target, boxes, addend, arrives=True)

        for config in _beside_chunks(chosen.config, lambda: space.candidates(problem, target)):
            if dispatch.checked(config, source, target, check_arriving).refusal is None:
                return config
        return None

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
            record_backward(NAME, like.target, "the kernels of the forward pass serve this product", shapes)
        return out.astype(wanted)

    def typed(self, operands: Operands) -> Operands:
        return alike(operands)

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        if plan.chosen is None:
            return by_xla.products(operands, plan.layouts, plan.out_dtype, plan.kernel_activation(operands)), None
        if 0 in (*operands.lhs.shape, *operands.rhs_list[0].shape):
            return (jnp.zeros(self.result_shape(plan.form), plan.out_dtype),), None
        return (self.sealed(self.runner(plan), NAME, operands, plan),), None

    def result_shape(self, form: Form) -> tuple[int, ...]:
        """Returns the shape of the result."""
        raise NotImplementedError

    def runner(self, plan: LaunchPlan) -> Callable[[Operands], jax.Array]:
        """Returns the function that runs the kernel on operands."""
        raise NotImplementedError


def _beside_chunks(config: Config, others: Callable[[], Iterable[Config]]) -> Iterator[Config]:
    """Yields what is tried where rows arrive: this configuration, the same with a stage less, and others.

    Not with fewer stages if operands are swapped: such tiles then spill, by a register or two.
    """
    yield config.replace(**_CHUNKS_OF_ARRIVALS)
    if not config.swap_operands and config.stages > 2:
        yield config.replace(stages=config.stages - 1, **_CHUNKS_OF_ARRIVALS)
    for other in others():
        if not (config.swap_operands and config.replace(stages=other.stages) == other):
            yield other.replace(**_CHUNKS_OF_ARRIVALS)


@dataclasses.dataclass(frozen=True)
class Through:
    """The kernel of a product with several results, or of rows that arrive (`RowsOfGroups.through`)."""

    plan: LaunchPlan

    def __call__(
        self, operands: Operands, how: EpilogueOperands | None, arrival: Arrival | None
    ) -> tuple[jax.Array, ...]:
        form = self.plan.form
        sizes = groups.clipped(operands.group_sizes, form.m)
        operands = dataclasses.replace(operands, group_sizes=sizes)
        if explaining.value is not None:  # Only types are wanted.
            stored = (jnp.zeros((form.m, form.widths[0]), form.out_dtype),) * (1 if how is None else how.results.stored)
            sums = (jnp.zeros(form.m, F32),) if how is not None and how.results.sums else ()
            rows = () if arrival is None else (jnp.zeros((form.m, form.k), form.dtype),)
            return stored + sums + rows
        clears = how is None and self.plan.operation.clears[0]
        return _through(self.plan, clears, *alike((operands, how, arrival)))


class RowsOfGroups(GroupsKernel):
    """The kernel of `grouped_matmul`: the product of rows."""

    @property
    def apart(self) -> RowsOfGroups:
        """The kernel of products that no activation combines."""
        return RowsOfGroups(self.operation.apart)

    def check(self, call: Call, config: Config, target: Target) -> None:
        self.check_form(call.form, call.operands.rhs_list[0].dtype, config, target)
        mesh_axes.require_no_partitioner_axes()

    def typed(self, operands: Operands) -> Operands:
        sizes = groups.clipped(operands.group_sizes, operands.lhs.shape[0])
        return alike(dataclasses.replace(operands, group_sizes=sizes))

    def result_shape(self, form: Form) -> tuple[int, ...]:
        return form.m, form.widths[0]

    def runner(self, plan: LaunchPlan) -> Callable[[Operands], jax.Array]:
        return functools.partial(grouped_product.rows, plan=plan, clears=self.operation.clears[0])

    def through(
        self,
        operands: Operands,
        layouts: OperandLayouts,
        like: LaunchPlan,
        how: EpilogueOperands | None,
        arriving: int | None = None,
    ) -> Through | None:
        """Returns the kernel of a product with several results, of the dtype of `like`; None if there is none.

        The operands may be types. The kernel takes them, and the same epilogue; if `how` is None, the activation of
        `like`. `arriving`: how many rows arrive. The left operand is then what arrives, and the kernel takes an
        arrival, too, and returns the rows as well.
        """
        if arriving is not None:
            operands = dataclasses.replace(
                operands, lhs=jax.ShapeDtypeStruct((arriving, operands.lhs.shape[1]), operands.lhs.dtype)
            )
        form = Form.of(operands, layouts, like.out_dtype)
        if how is not None and form.widths[0] % limits.EPILOGUE_COLUMNS:  # Sums would count columns there are not.
            return None
        boxes = 1 if how is None else how.boxes
        addend = how is not None and bool(how.addends)
        config = self._config(form, operands.rhs_list[0].dtype, like, boxes, addend, arriving is not None)
        if config is None:
            return None
        plan = LaunchPlan(self.operation, form, like.target, config, like.activation if how is None else None)
        return Through(plan.without_function)

    def before_activation(self, plan: LaunchPlan) -> LaunchPlan:
        apart = self.apart
        dtype = plan.out_dtype if self.operation.combines else accumulator(plan.form.dtype)
        form = dataclasses.replace(plan.form, out_dtype=dtype, widths=plan.form.widths[:1])
        config = apart._config(form, form.dtype, plan)
        return dataclasses.replace(plan, operation=apart.operation, form=form, chosen=config, activation=None)

    def of_tangents(self, plan: LaunchPlan) -> Callable[[Operands], Results]:
        def of_operands(operands: Operands) -> Results:
            has_epilogue = plan.activation is not None or operands.has_epilogue
            bare = self.before_activation(plan) if has_epilogue else plan
            outs: list[Leaf] = [_bilinear(bare, operands.group_sizes, *pair) for pair in operands.pairs]
            if operands.more_lefts:
                outs = [functools.reduce(operator.add, outs)]
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
        of_out, of_lhs = self.operation.clears
        transposed = Operation(GROUPED, clears=(of_lhs, of_out))
        return RowsOfGroups(transposed).backward(pairs, layouts, dtype, plan), None

    def rhs_cotangent(self, pair: Operands, g: jax.Array, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        rows = (g, pair.lhs) if plan.layouts.transpose_rhs else (pair.lhs, g)
        of_rhs = Operands(rows[0], (rows[1],), group_sizes=pair.group_sizes)
        return Contraction(Operation(CONTRACTION)).backward(of_rhs, OperandLayouts(transpose_lhs=True), dtype, plan)

    def times(self, pair: Operands, layouts: OperandLayouts, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        return self.apart.computed(pair, layouts, dtype, plan)


class Contraction(GroupsKernel):
    """The kernel that contracts the rows of each group, in the backward pass."""

    def result_shape(self, form: Form) -> tuple[int, ...]:
        assert form.groups is not None
        return form.groups, form.m, form.n

    def runner(self, plan: LaunchPlan) -> Callable[[Operands], jax.Array]:
        return functools.partial(grouped_product.contraction, plan=plan)

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
        return RowsOfGroups(Operation(GROUPED)).backward(pair, OperandLayouts(transpose_rhs=True), dtype, plan), None

    def rhs_cotangent(self, pair: Operands, g: jax.Array, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        of_rhs = Operands(pair.lhs, (g,), group_sizes=pair.group_sizes)
        return RowsOfGroups(Operation(GROUPED)).backward(of_rhs, OperandLayouts(), dtype, plan)


@functools.partial(jax.jit, static_argnums=(0, 1))  # Equal kernels are traced once, and lowered once per program.
def _through(
    plan: LaunchPlan, clears: bool, operands: Operands, how: EpilogueOperands | None, arrival: Arrival | None
) -> tuple[jax.Array, ...]:
    # A kernel has no batch: under `jax.vmap` it runs for one element after the other.
    @sequential_vmap
    def run(operands: Operands, how: EpilogueOperands | None, arrival: Arrival | None) -> tuple[jax.Array, ...]:
        return grouped_product.rows_through(operands, plan, how, arrival, clears=clears)

    return run(operands, how, arrival)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _bilinear(plan: LaunchPlan, sizes: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """A product without an epilogue, which forward mode differentiates by products of the same kind."""
    operands = Operands(lhs, (rhs,), group_sizes=sizes)
    (out,), _ = primitive.fused(operands, plan.of(operands))
    return out


def _bilinear_jvp(plan: LaunchPlan, primals: tuple[jax.Array, ...], tangents: tuple[Leaf, ...]) -> tuple[Leaf, Leaf]:
    sizes, lhs, rhs = primals
    _, d_lhs, d_rhs = tangents
    out: Leaf = _bilinear(plan, sizes, lhs, rhs)
    terms: list[Leaf] = []
    if not isinstance(d_lhs, SymbolicZero):
        terms.append(_bilinear(plan, sizes, d_lhs, rhs))
    if not isinstance(d_rhs, SymbolicZero):
        terms.append(_bilinear(plan, sizes, lhs, d_rhs))
    return out, functools.reduce(operator.add, terms) if terms else jnp.zeros_like(out)


_bilinear.defjvp(_bilinear_jvp, symbolic_zeros=True)
