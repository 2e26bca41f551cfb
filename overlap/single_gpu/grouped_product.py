"""The kernel behind `grouped_matmul`: the mainloop over the tiles of all groups."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.kernels import groups
from overlap.kernels.config import Config, tile_k
from overlap.kernels.groups import ContractedWork, GroupedWork
from overlap.kernels.hooks import ByKStep, Hooks, Tile
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.integers import ceil_div, in_32_bits, quotient
from overlap.primitives.types import GmemRef, Index

NAME = "overlap_grouped_matmul"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Inputs:
    lhs: GmemRef
    rhs: GmemRef
    table: GmemRef
    counts: GmemRef


@in_32_bits
def launch(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    transpose_rhs: bool,
    out_dtype: DTypeLike,
    config: Config,
    target: Target,
) -> jax.Array:
    """Runs the kernel. Returns [m, n]: the rows of group e times rhs[e]."""
    layouts = OperandLayouts(transpose_rhs=transpose_rhs)
    (m, k), (_, n) = lhs.shape, layouts.k_n(rhs.shape)
    table, counts = groups.tile_rows(sizes, m, config.tile_m)
    types = OperandTypes(m, lhs.dtype, rhs.dtype, jnp.dtype(out_dtype), layouts, grouped=True)
    columns, k_steps = ceil_div(n, config.tile_n), ceil_div(k, tile_k(lhs.dtype))
    # The grid, as for as many tiles as there can be.
    work = StreamK.on(target, config, table.shape[1] * columns, k_steps)
    kernel = ProductKernel(NAME, target, config, types, work)
    out_type: GmemRef = jax.ShapeDtypeStruct((m, n), out_dtype)
    return kernel.launch(_Inputs(lhs, rhs, table, counts), out_type, functools.partial(_Body, work, columns))


@dataclasses.dataclass(frozen=True)
class _Body:
    most: StreamK
    columns: int
    refs: Refs[_Inputs, GmemRef]

    @property
    def work(self) -> GroupedWork:
        return GroupedWork(self.refs.inputs.counts, self.columns, self.most.k_steps, self.most.num_ctas)

    def tile_at(self, index: Index) -> Tile:
        return groups.tile_at(self.refs.inputs.table, self.columns, index)

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs
        return Hooks(
            load_lhs=lambda tile, load: load(inputs.lhs),
            rhs_at=lambda tile: inputs.rhs.at[tile.step],
            out_at=lambda tile: self.refs.outputs,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Contracted:
    lhs: GmemRef
    rhs: GmemRef
    groups: GmemRef
    before: GmemRef


@in_32_bits
def contract(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, out_dtype: DTypeLike, config: Config, target: Target
) -> jax.Array:
    """Runs the kernel. Returns [groups, k, n]: for each group, its rows of `lhs`, [m, k], transposed, times those of `rhs`."""
    (m, k), (_, n) = lhs.shape, rhs.shape
    order = TileOrder.of(k, n, config)
    types = OperandTypes(k, lhs.dtype, rhs.dtype, jnp.dtype(out_dtype), OperandLayouts(transpose_lhs=True))
    depth = tile_k(lhs.dtype)
    work = StreamK.on(target, config, sizes.shape[0] * order.tiles, 1)
    kernel = ProductKernel(NAME + "_of_rows", target, config, types, work)
    table, before = groups.contractions(sizes, m, order.tiles, depth, work.num_ctas)
    out_type: GmemRef = jax.ShapeDtypeStruct((sizes.shape[0], k, n), out_dtype)
    return kernel.launch(
        _Contracted(lhs, rhs, table, before), out_type, functools.partial(_ContractedBody, order, depth, work.num_ctas)
    )


@dataclasses.dataclass(frozen=True)
class _ContractedBody:
    order: TileOrder
    depth: int
    num_ctas: int
    refs: Refs[_Contracted, GmemRef]

    @property
    def work(self) -> ContractedWork:
        inputs = self.refs.inputs
        return ContractedWork(inputs.groups, inputs.before, self.order.tiles, self.num_ctas)

    def tile_at(self, index: Index) -> Tile:
        group = quotient(index, self.order.tiles)
        return Tile(group, *self.order(index - group * self.order.tiles))

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs

        def rows_of(ref: GmemRef, tile: Tile) -> ByKStep:
            start = inputs.groups[0, tile.step]
            return ByKStep(lambda k: (ref, start + k * self.depth))

        def last_k(tile: Tile) -> Index:
            return inputs.groups[1, tile.step] - (inputs.groups[2, tile.step] - 1) * self.depth

        return Hooks(
            load_lhs=lambda tile, load: load(rows_of(inputs.lhs, tile)),
            rhs_at=lambda tile: rows_of(inputs.rhs, tile),
            out_at=lambda tile: self.refs.outputs.at[tile.step],
            last_k_at=last_k,
        )
