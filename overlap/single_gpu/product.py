"""The kernel behind `matmul`: the mainloop over batch elements, tiles and pieces of k, with an epilogue.

    out[b] = activation(row_scale[b] · (lhs[b] @ rhs[b]) · column_scale + bias + addend[b])

An operand without the batch dimension is used for all batch elements. With `Config.split_k` > 1 each piece of k is
computed as a tile of its own, and the f32 result of the piece is stored in a buffer of its own. XLA adds the pieces,
always in the same order, and applies the epilogue.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from overlap.frame import by_xla
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels import block_scales, epilogue
from overlap.kernels.config import tile_k
from overlap.kernels.grid import own_row
from overlap.kernels.hooks import BlockScales, Hooks, SideBySide, Tile
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.integers import ceil_div, in_32_bits, quotient, remainder
from overlap.primitives.types import GmemRef, Index

NAME = "overlap_matmul"


@in_32_bits
def launch(operands: Operands, plan: LaunchPlan) -> jax.Array:
    """Runs the kernel on checked operands. Returns [(batch,) m, n]."""
    config = plan.config
    split = config.split_k
    form = plan.form
    batch, m, n, k = form.batch, form.m, form.widths[0], form.k
    batches = batch or 1
    types = plan.types(operands, m)
    order = TileOrder.of(m, types.sides * n, config)
    k_steps = ceil_div(ceil_div(k, tile_k(types.dtype)), split)
    work = StreamK.on(plan.target, config, batches * split * order.tiles, k_steps, may_spread=True)
    out_dtype = jnp.dtype(jnp.float32 if split > 1 else plan.out_dtype)
    given = operands if split == 1 else operands.matrices
    kernel = ProductKernel(NAME, plan.target, config, plan.types(given, m, out_dtype=out_dtype), work)
    leading = (batches * split,) if batch is not None or split > 1 else ()
    inputs = _Inputs(_matrices(given, out_dtype, plan), _vectors(given, plan) if split == 1 else epilogue.Vectors())
    out_type: GmemRef = jax.ShapeDtypeStruct((*leading, m, n), out_dtype)
    out = kernel.launch(inputs, out_type, functools.partial(_Body, kernel, order, k_steps, plan.program))
    if split == 1:
        return out
    product = out.reshape(batches, split, m, n).sum(axis=1)
    product = product if batch is not None else product[0]
    return by_xla.finish((product,), operands, plan.out_dtype, plan.kernel_activation(operands))[0]


def _matrices(operands: Operands, out_dtype: jnp.dtype, plan: LaunchPlan) -> Operands:
    """The operands that the mainloop loads. The addend gets the result's dtype: both use the same epilogue buffers."""
    addends = operands.addends
    config = plan.config
    layouts = plan.layouts
    matrices = dataclasses.replace(
        operands.matrices, addends=None if addends is None else tuple(x.astype(out_dtype) for x in addends)
    )
    if operands.rhs_block_scales is None:
        return matrices
    left, (right,) = block_scales.of_tiles(
        operands.lhs_block_scale, operands.rhs_block_scales, layouts, (config.tile_m, config.tile_n)
    )
    return dataclasses.replace(matrices, lhs_block_scale=left, rhs_block_scales=(right,))


def _vectors(operands: Operands, plan: LaunchPlan) -> epilogue.Vectors:
    rows = plan.config.cluster_tile_m
    scale = operands.row_scale
    if scale is not None:
        scale = jnp.pad(scale, ((0, 0),) * (scale.ndim - 1) + ((0, -scale.shape[-1] % rows),))
    return plan.vectors(operands, scale)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The kernel's operands: what the mainloop loads, and the vectors of the epilogue."""

    matrices: Operands
    vectors: epilogue.Vectors


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel's body: its tile order, and where the operands of a tile lie.

    Attributes:
      kernel: the static properties of the kernel.
      order: the order of the tiles of one batch element, or of one piece of k of a batch element.
      k_steps: how many k steps each tile has.
      program: the activation; None: there is none.
      refs: the kernel's references.
    """

    kernel: ProductKernel
    order: TileOrder
    k_steps: int
    program: epilogue.Program | None
    refs: Refs[_Inputs, GmemRef]

    def tile_at(self, index: Index) -> Tile:
        config = self.kernel.config
        # `result` is the index of the batch element. With `split_k` > 1 it is batch element · split_k + piece.
        result = quotient(index, self.order.tiles)
        row, column = self.order(index - result * self.order.tiles)
        piece = remainder(result, config.split_k)
        return Tile(result, own_row(config, row), column, k_first=piece * self.k_steps)

    def hooks(self) -> Hooks:
        matrices = self.refs.inputs.matrices
        out_gmem = self.refs.outputs
        addends = matrices.addends
        return Hooks(
            load_lhs=lambda tile, load: load(self._of_batch(matrices.lhs, tile)),
            rhs_at=self._rhs_at,
            out_at=lambda tile: out_gmem.at[tile.step] if len(out_gmem.shape) == 3 else out_gmem,
            addend_at=None if addends is None else lambda tile: self._of_batch(addends[0], tile),
            epilogue_at=self._epilogue_at if self.kernel.config.split_k == 1 else None,
            block_scales_at=self._block_scales_at if self.kernel.types.block_scaled else None,
        )

    def _rhs_at(self, tile: Tile) -> GmemRef | SideBySide:
        refs = [self._of_batch(ref, tile) for ref in self.refs.inputs.matrices.rhs_list]
        return refs[0] if self.kernel.types.sides == 1 else SideBySide(refs)

    def _block_scales_at(self, tile: Tile) -> BlockScales:
        matrices = self.refs.inputs.matrices
        assert matrices.rhs_block_scales is not None
        left = self._of_batch(matrices.lhs_block_scale, tile, rank=3)
        right = self._of_batch(matrices.rhs_block_scales[0], tile, rank=3)
        return BlockScales(left, tile.m, right, tile.n)

    def _of_batch(self, ref: GmemRef, tile: Tile, rank: int = 2) -> GmemRef:
        """Selects the batch element of a tile in `ref`. An operand of `rank` dimensions serves all batch elements."""
        return ref.at[quotient(tile.step, self.kernel.config.split_k)] if len(ref.shape) > rank else ref

    def _epilogue_at(self, tile: Tile) -> epilogue.Epilogue:
        vectors = self.refs.inputs.vectors
        scale = vectors.row_scale
        of_tile = dataclasses.replace(vectors, row_scale=None if scale is None else self._of_batch(scale, tile, 1))
        swapped = self.kernel.config.swap_operands
        return epilogue.epilogue(of_tile, self.program, self.kernel.mainloop, transposed=swapped)
