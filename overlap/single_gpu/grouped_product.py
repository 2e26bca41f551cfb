"""The kernels behind `grouped_matmul`: the mainloop over the tiles of all groups.

    rows         out[rows of e] = activation(row_scale · (lhs[rows of e] @ rhs[e]) · column_scale[e] + bias[e])
                 out[rows of e] = Σ_i lefts[i][rows of e] @ rhs_list[i][e]
    contraction  out[e] = lhs[rows of e]ᵀ @ rhs[rows of e]

The rows of a group follow each other, and may begin and end anywhere. Their number is data: the kernels read tables
that XLA computes from the sizes (`kernels/groups.py`). Rows that belong to no group lie behind all groups. In the first
product the communicator warps set these rows of the result to zero; where rows arrive, after they have brought them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.frame.operands import F32, Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels import epilogue, groups, hooks
from overlap.kernels.config import Config, tile_k
from overlap.kernels.grid import GRID_AXIS
from overlap.kernels.groups import ContractedWork, GroupedWork, TileTable
from overlap.kernels.hooks import ByKStep, Hooks, SideBySide, Tile, of_pairs
from overlap.kernels.limits import EPILOGUE_COLUMNS, ZERO_ROWS
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.tile_order import TileOrder
from overlap.kernels.tma.staging import atom, swizzled
from overlap.primitives import wait_stores_read
from overlap.primitives.integers import ceil_div, in_32_bits, quotient
from overlap.primitives.types import GmemRef, Index, ScratchType, Tree

NAME = "overlap_grouped_matmul"


class Arrival(Protocol):
    """How the rows of the left operand come to this device while tiles are multiplied.

    They land in a result of the kernel. In place of them, the left operand is what peers read.

    Attributes:
      arrays: what else the kernel reads, a pytree.
    """

    @property
    def arrays(self) -> Tree: ...
    def flag_shapes(self) -> tuple[tuple[int, ...], ...]: ...
    def smem_types(self, config: Config) -> tuple[ScratchType, ...]: ...
    def hook_in(self, hooks: Hooks, lhs: GmemRef, rows: GmemRef, refs: Refs[Any, Any], config: Config) -> Hooks:
        """Adds the hooks that bring rows from `lhs`, and wait for them. `refs.inputs.arrays` refers to `arrays`."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    lefts: tuple[GmemRef, ...]
    rhs_list: tuple[GmemRef, ...]
    table: TileTable
    zeros: GmemRef  # For rows behind all groups, if they are cleared.
    vectors: epilogue.Vectors
    through: EpilogueOperands | None = None
    arrays: Tree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Results:
    stored: tuple[GmemRef, ...]
    sums: GmemRef = None
    rows: GmemRef = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EpilogueOperands:
    """An epilogue with several results, and what it reads.

    Attributes:
      results: the function, and which of its results are stored or summed.
      addends: [m, n] each, of the results' dtype.
      first_of_sums: in a kernel that sums, where the sums of each group begin, relative to the group's rows.
    """

    results: epilogue.ProgramResults = dataclasses.field(metadata={"static": True})
    addends: tuple[GmemRef, ...] = ()
    first_of_sums: GmemRef = None

    @property
    def boxes(self) -> int:
        """As in `OperandTypes`."""
        return max(self.results.stored, len(self.addends))


def _vectors(operands: Operands, plan: LaunchPlan) -> epilogue.Vectors:
    """Lays out the vectors of the epilogue, in f32: row scales [m], and vectors [groups, n] of each right operand."""
    config = plan.config

    def of_columns(given: Sequence[jax.Array] | None) -> jax.Array | None:
        if given is None:
            return None
        padded = [jnp.pad(x, ((0, 0), (0, -x.shape[1] % config.tile_n))).reshape(-1) for x in given]
        return epilogue.filled(padded, 1)

    rows = None if operands.row_scale is None else jnp.pad(operands.row_scale, (0, config.tile_m))
    biases = operands.biases and [
        jnp.zeros((plan.form.groups, n), F32) if bias is None else bias
        for bias, n in zip(operands.biases, plan.form.widths, strict=True)
    ]
    scalars = epilogue.packed(operands.scalars, plan.program)
    return epilogue.Vectors(rows, of_columns(operands.column_scales), of_columns(biases), scalars)


@in_32_bits
def rows(operands: Operands, plan: LaunchPlan, *, clears: bool) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix.

    Args:
      operands: [m, k] and [groups, k, n], or two of the latter for an activation that takes both products; or several
        pairs with any k, whose products are added.
      plan: the static data.
      clears: whether the rows behind all groups must be zeros; if not, they are undefined.

    Returns:
      [m, n].
    """
    return _launched(operands, plan, clears, None)[0]


@in_32_bits
def rows_through(
    operands: Operands,
    plan: LaunchPlan,
    through: EpilogueOperands | None,
    arrival: Arrival | None = None,
    *,
    clears: bool = False,
) -> tuple[jax.Array, ...]:
    """Multiplies the rows of each group by the group's matrix, with an epilogue of several results or arriving rows.

    Args:
      operands: as for `rows`; of its epilogue biases, and a row scale, which is the vector of rows of `through`.
      plan: the static data. Its activation is applied if there is no `through`.
      through: the epilogue; None: that of `rows`.
      arrival: how the rows of the left operand arrive; None: they are there.
      clears: as for `rows`, of the one result that there is without `through`.

    Returns:
      The results that it stores, [m, n] each; the sums, f32 [m], if there are any; and the rows, [m, k], if they
      arrive. Rows behind all groups are undefined, but for those that are cleared.
    """
    return _launched(operands, plan, clears, through, arrival)


def _launched(
    operands: Operands, plan: LaunchPlan, clears: bool, through: EpilogueOperands | None, arrival: Arrival | None = None
) -> tuple[jax.Array, ...]:
    config = plan.config
    form = plan.form
    sizes = operands.group_sizes
    lefts, rhs_list = operands.lefts, (*operands.rhs_list, *operands.more_rights)
    types = dataclasses.replace(plan.types(operands, form.m, "pull" if arrival else ""), grouped="m")
    m, n = form.m, form.widths[0]
    if through is not None:
        types = dataclasses.replace(types, boxes=through.boxes, addend=bool(through.addends))
    dtype = form.dtype
    out_dtype = form.out_dtype
    columns = ceil_div(types.sides * n, config.tile_n)
    steps = [ceil_div(k, tile_k(dtype)) for k in form.depths]
    table = groups.tiles(sizes, m, columns, config.tile_m, config.order_width)
    most = StreamK.on(plan.target, config, table.first.shape[0], sum(steps))
    zeros = ZERO_ROWS, atom(out_dtype)
    # Swizzled, but not tiled: Mosaic GPU would refuse columns that are no multiple of a tile.
    of_clear = plgpu.SMEM(zeros, out_dtype, transforms=swizzled(out_dtype)[1:]), plgpu.Barrier(num_arrivals=1)
    of_arrival: tuple[ScratchType, ...] = ()
    flags: tuple[tuple[int, ...], ...] = ()
    peers_read: tuple[int, ...] = ()
    if arrival is not None:
        of_arrival = arrival.smem_types(config)
        flags = arrival.flag_shapes()
        peers_read = (0,)  # The left operand, the first one of all inputs.
    smem = of_arrival, of_clear if clears else ()
    kernel = ProductKernel(NAME, plan.target, config, types, most, flags, smem, peers_read)
    place_of_sums = None
    if through is not None and through.results.sums:
        first_of_sums, place_of_sums = groups.tile_rows(sizes, m, config.tile_m)
        through = dataclasses.replace(through, first_of_sums=first_of_sums)
    table = dataclasses.replace(table, ends=table.ends if clears else None)
    of_zeros = jnp.zeros(zeros, out_dtype) if clears else None
    arrays = None if arrival is None else arrival.arrays
    inputs = _Rows(lefts, rhs_list, table, of_zeros, _vectors(operands, plan), through, arrays)
    out_type: GmemRef = jax.ShapeDtypeStruct((m, n), out_dtype)
    out_types = _Results((out_type,) * (1 if through is None else through.results.stored))
    if place_of_sums is not None:
        padded = groups.most_tile_rows(m, sizes.shape[0], config.tile_m) * config.tile_m
        sums: GmemRef = jax.ShapeDtypeStruct((columns * config.tile_n // EPILOGUE_COLUMNS, padded), F32)
        out_types = dataclasses.replace(out_types, sums=sums)
    if arrival is not None:
        arrived: GmemRef = jax.ShapeDtypeStruct((m, form.depths[0]), dtype)
        out_types = dataclasses.replace(out_types, rows=arrived)

    def work_of(inputs: _Rows) -> GroupedWork:
        return GroupedWork(most.tiles, most.k_steps, most.num_ctas, table=inputs.table, columns=columns)

    body_of = functools.partial(_RowsBody, kernel, plan.program, clears, steps, arrival)
    outs = kernel.launch(inputs, out_types, body_of, work_of)
    found = outs.stored
    if place_of_sums is not None:  # Blocks behind column n are left out.
        of_rows = outs.sums.at[: n // EPILOGUE_COLUMNS, place_of_sums].get(mode="promise_in_bounds")
        found = *found, of_rows.sum(axis=0)
    return found if arrival is None else (*found, outs.rows)


@dataclasses.dataclass(frozen=True)
class _RowsBody:
    """The body of the product of rows: its tiles, and where the operands of a tile lie.

    Attributes:
      kernel: the static properties of the kernel.
      program: the activation; None: there is none.
      clears: whether rows behind all groups are set to zero.
      steps: the k steps of each left operand. A tile goes through the left operands one after the other.
      arrival: how the rows of the left operand arrive; None: they are there.
      refs: the kernel's references.
    """

    kernel: ProductKernel
    program: epilogue.Program | None
    clears: bool
    steps: Sequence[int]
    arrival: Arrival | None
    refs: Refs[_Rows, _Results]

    def tile_at(self, index: Index) -> Tile:
        return self.refs.inputs.table[index]

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs
        of_columns = inputs.vectors.column_scale, inputs.vectors.bias, inputs.vectors.row_scale
        has_epilogue = self.program is not None or any(x is not None for x in of_columns)
        hooks = Hooks(
            load_lhs=lambda tile, load: load(of_pairs(inputs.lefts, self.steps)),
            rhs_at=self._rhs_at,
            out_at=lambda tile: self.refs.outputs.stored[0],
            epilogue_at=self._epilogue_at if has_epilogue else None,
            through=None if inputs.through is None else self._through(inputs.through),
            communicate=self._clear if self.clears else None,
        )
        if self.arrival is None:
            return hooks
        rows = self.refs.outputs.rows
        hooks = dataclasses.replace(hooks, load_lhs=lambda tile, load: load(rows), lhs_has_gaps=True)
        of_arrival, _ = self.refs.smem
        refs = dataclasses.replace(self.refs, smem=of_arrival)
        hooks = self.arrival.hook_in(hooks, inputs.lefts[0], rows, refs, self.kernel.config)
        return dataclasses.replace(hooks, communicate=functools.partial(self._after, hooks.communicate))

    def _rhs_at(self, tile: Tile) -> GmemRef | SideBySide | ByKStep:
        of_group = [ref.at[tile.step] for ref in self.refs.inputs.rhs_list]
        return SideBySide(of_group) if self.kernel.types.sides > 1 else of_pairs(of_group, self.steps)

    def _epilogue_at(self, tile: Tile) -> epilogue.Epilogue:
        return epilogue.epilogue(
            self.refs.inputs.vectors,
            self.program,
            self.kernel.mainloop,
            first_column=self._first_column(tile),
            transposed=self.kernel.config.swap_operands,
        )

    def _first_column(self, tile: Tile) -> Index:
        """Where the vectors of a tile's group begin in the vectors of a right operand."""
        tile_n = self.kernel.config.tile_n
        return tile.step * (ceil_div(self.refs.outputs.stored[0].shape[1], tile_n) * tile_n)

    def _through(self, through: EpilogueOperands) -> hooks.SeveralResults:
        results = self.refs.outputs.stored
        sums_gmem = self.refs.outputs.sums

        def sums_at(tile: Tile, rows: pl.Slice, columns: pl.Slice) -> GmemRef:
            first = through.first_of_sums[tile.step] + rows.start
            return sums_gmem.at[quotient(columns.start, EPILOGUE_COLUMNS), pl.ds(first, rows.size)]

        def epilogue_at(tile: Tile) -> hooks.ResultsEpilogue:
            at = functools.partial(sums_at, tile) if through.results.sums else None
            vectors = self.refs.inputs.vectors
            return through.results.epilogue(
                self.kernel.mainloop, results[0].dtype, vectors, self._first_column(tile), at
            )

        return hooks.SeveralResults(through.addends, results, epilogue_at)

    def _after(self, communicate: Callable[[], None] | None) -> None:
        """Runs the work of a communicator warp, then clears."""
        assert communicate is not None
        communicate()
        if self.clears:
            self._clear()

    def _clear(self) -> None:
        """Sets the rows behind all groups to zero: each CTA some boxes of them."""
        (out_gmem,) = self.refs.outputs.stored
        _, (zeros_smem, loaded) = self.refs.smem
        m, n = out_gmem.shape
        box_rows, box_columns = zeros_smem.shape
        first = groups.last_of(self.refs.inputs.table.ends)
        across = ceil_div(n, box_columns)
        cta = lax.axis_index(GRID_AXIS)
        ctas = self.kernel.work.num_ctas
        boxes = quotient(m - first + box_rows - 1, box_rows) * across

        @pl.when(cta < boxes)
        def _some() -> None:
            plgpu.copy_gmem_to_smem(self.refs.inputs.zeros, zeros_smem, loaded)
            plgpu.barrier_wait(loaded)

            @pl.loop(0, quotient(boxes - cta + ctas - 1, ctas))
            def _box(turn: jax.Array) -> None:
                box = cta + turn * ctas
                row = quotient(box, across)
                place = pl.ds(first + row * box_rows, box_rows), pl.ds((box - row * across) * box_columns, box_columns)
                plgpu.copy_smem_to_gmem(zeros_smem, out_gmem.at[place])

            wait_stores_read()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Contraction:
    lhs: GmemRef
    rhs: GmemRef
    groups: GmemRef
    before: GmemRef


@in_32_bits
def contraction(operands: Operands, plan: LaunchPlan) -> jax.Array:
    """Contracts the rows of each group: [m, k] and [m, n] to [groups, k, n]. A group without rows has zeros."""
    config = plan.config
    lhs = operands.lhs
    (rhs,) = operands.rhs_list
    sizes = operands.group_sizes
    (m, k), (_, n) = lhs.shape, rhs.shape
    order = TileOrder.of(k, n, config)
    depth = tile_k(lhs.dtype)
    out_dtype = plan.out_dtype
    types = dataclasses.replace(plan.types(operands, k), grouped="k")
    most = StreamK.on(plan.target, config, sizes.shape[0] * order.tiles, 1)
    kernel = ProductKernel(f"{NAME}_of_rows", plan.target, config, types, most)
    inputs = _Contraction(lhs, rhs, *groups.contractions(sizes, m, order.tiles, depth, most.num_ctas))
    out_type: GmemRef = jax.ShapeDtypeStruct((sizes.shape[0], k, n), out_dtype)

    def work_of(inputs: _Contraction) -> ContractedWork:
        refs = {"groups_gmem": inputs.groups, "before_gmem": inputs.before}
        return ContractedWork(most.tiles, 1, most.num_ctas, **refs, tiles_of_group=order.tiles)

    return kernel.launch(inputs, out_type, functools.partial(_ContractionBody, order, depth), work_of)


@dataclasses.dataclass(frozen=True)
class _ContractionBody:
    """The body of the contraction: its tiles, and where the operands of a tile lie."""

    order: TileOrder
    depth: int
    refs: Refs[_Contraction, GmemRef]

    def tile_at(self, index: Index) -> Tile:
        place = quotient(index, self.order.tiles)
        return Tile(place, *self.order(index - place * self.order.tiles))

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs

        def rows_of(ref: GmemRef, tile: Tile) -> ByKStep:
            first = inputs.groups[groups.FIRST_OF_GROUP, tile.step]
            return ByKStep(lambda k: (ref, first + k * self.depth))

        def last_k(tile: Tile) -> Index:
            of_group = inputs.groups.at[:, tile.step]
            return of_group[groups.ROWS_OF_GROUP] - (of_group[groups.K_STEPS_OF_GROUP] - 1) * self.depth

        return Hooks(
            load_lhs=lambda tile, load: load(rows_of(inputs.lhs, tile)),
            rhs_at=lambda tile: rows_of(inputs.rhs, tile),
            out_at=lambda tile: self.refs.outputs.at[inputs.groups[groups.GROUP, tile.step]],
            last_k_at=last_k,
        )
