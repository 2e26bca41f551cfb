"""Lesson 1: warp specialization inside one warpgroup. Warp 0 copies, warp 1 issues the products.

On Hopper a whole warpgroup issues a product, so copies have a warpgroup of their own. Here one thread issues a
product, so two warps of the same warpgroup are enough (`plgpu.warp_map`). They synchronize at two barriers per stage,
as on Hopper:

    full      both operand tiles have landed           (2 arrivals, one per copy; warp 1 waits)
    consumed  the tensor cores have read the stage     (1 arrival, of the product itself; warp 0 waits)

Warp 1 never waits for a product. It issues all of them, each with its arrival at `consumed`, and after the last one an
arrival at `done`. All four warps wait at `done`, and then store the tile together, since each warp can read only its
own quarter of the lanes of tensor memory.

Gains: copies are issued on time whatever the tensor cores do, and products without a gap. What is left: nothing is
multiplied while the output tile is stored, and its buffer takes the room of a stage. Source: "Writing high-performance
matrix multiplication kernels for Blackwell" in the JAX documentation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.blackwell.tiling import accumulator_type, tiling
from lessons.hopper.basic import store_tile
from lessons.hopper.tiling import COMPILER_PARAMS, M_AXIS, N_AXIS, Tiling
from lessons.hopper.warp_specialized import Pipeline
from overlap.primitives import converge_warp
from overlap.primitives.integers import remainder
from overlap.primitives.types import Axis, BarrierRef, GmemRef, Index, ScratchType, SmemRef, TmemRef

COPY_WARP, MMA_WARP = 0, 1
type Store = Callable[[TmemRef, GmemRef, SmemRef], None]  # (accumulator, output, buffer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory and the barriers of a CTA.

    Attributes:
      pipeline: the stages.
      acc_tmem: the accumulator.
      out_smem: the buffer through which the tile is stored.
      done: barriers: the sum of a tile is complete.
      read: barriers: the accumulator has been read (from lesson 4 on).
    """

    pipeline: Pipeline
    acc_tmem: TmemRef
    out_smem: SmemRef
    done: BarrierRef
    read: BarrierRef = None

    @classmethod
    def types(
        cls, t: Tiling, stages: int, out_smem: ScratchType, *, ctas: int = 1, halves: int = 1, read: ScratchType = None
    ) -> ScratchType:
        """The scratch types of a CTA: its part of `stages` pairs of operand tiles, and `halves` accumulators."""
        pipeline = Pipeline(
            lhs_smem=t.smem(stages, t.tile_m // ctas, t.tile_k),
            rhs_smem=t.smem(stages, t.tile_k, t.tile_n // ctas),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            consumed=plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
        )
        done = plgpu.Barrier(num_barriers=halves, orders_tensor_core=True)
        return cls(pipeline, accumulator_type(t, ctas=ctas, halves=halves), out_smem, done, read)


def load_tiles(
    operands: tuple[GmemRef, GmemRef],
    tile: tuple[Index, Index],
    pipeline: Pipeline,
    t: Tiling,
    *,
    first: Index = 0,
    copy: Callable[..., None] = lambda src, dst, full, dimension: plgpu.copy_gmem_to_smem(src, dst, full),
) -> None:
    """Loads the operand tiles of an output tile, k step by k step: the copy warp's work.

    Args:
      operands: [m, k] and [k, n].
      tile: row and column of the output tile.
      pipeline: where the operand tiles go.
      t: sizes.
      first: how many stages this CTA has filled before, for other output tiles.
      copy: called as `copy(src, dst, full, dimension)`; `dimension` is the dimension along which a cluster shares the
        tile (lesson 3).
    """
    lhs_gmem, rhs_gmem = operands
    m_slice, n_slice = pl.ds(tile[0] * t.tile_m, t.tile_m), pl.ds(tile[1] * t.tile_n, t.tile_n)

    @pl.loop(0, t.k_steps)
    def _k_step(k: jax.Array) -> None:
        stage, k_slice = remainder(first + k, pipeline.stages), pl.ds(k * t.tile_k, t.tile_k)
        full = pipeline.full.at[stage]

        @pl.when(first + k >= pipeline.stages)
        def _wait_until_free() -> None:
            plgpu.barrier_wait(pipeline.consumed.at[stage])

        copy(lhs_gmem.at[m_slice, k_slice], pipeline.lhs_smem.at[stage], full, 0)
        copy(rhs_gmem.at[k_slice, n_slice], pipeline.rhs_smem.at[stage], full, 1)


def multiply_tiles(
    acc_tmem: TmemRef,
    done: BarrierRef,
    pipeline: Pipeline,
    t: Tiling,
    *,
    first: Index = 0,
    collective_axis: Axis = None,
) -> None:
    """Issues all products of an output tile, and an arrival at `done` when its sum is complete: the MMA warp's work.

    `collective_axis`: the cluster axis along which two CTAs compute the product together (lesson 3).
    """

    @pl.loop(0, t.k_steps)
    def _k_step(k: jax.Array) -> None:
        stage = remainder(first + k, pipeline.stages)
        plgpu.barrier_wait(pipeline.full.at[stage])
        plgpu.tcgen05_mma(
            acc_tmem,
            pipeline.lhs_smem.at[stage],
            pipeline.rhs_smem.at[stage],
            pipeline.consumed.at[stage],
            accumulate=k > 0,
            collective_axis=collective_axis,
        )

    plgpu.tcgen05_commit_arrive(done, collective_axis=collective_axis)


def split_warps(copy: Callable[[], None], multiply: Callable[[], None]) -> None:
    """Runs `copy()` on one warp of this warpgroup and `multiply()` on another one, and waits for both."""

    @plgpu.warp_map
    def _roles(warp: jax.Array) -> None:
        pl.when(warp == COPY_WARP)(copy)
        pl.when(warp == MMA_WARP)(multiply)
        converge_warp()


def tile_per_cta(
    t: Tiling, stages: int, out_smem_type: ScratchType, store: Store, name: str
) -> Callable[..., jax.Array]:
    """Makes a kernel in which the CTA at (m, n) of the grid computes that tile; `store` stores its accumulator."""

    def body(lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, own: Memory) -> None:
        row, column = lax.axis_index(M_AXIS), lax.axis_index(N_AXIS)
        split_warps(
            lambda: load_tiles((lhs_gmem, rhs_gmem), (row, column), own.pipeline, t),
            lambda: multiply_tiles(own.acc_tmem, own.done, own.pipeline, t),
        )
        plgpu.barrier_wait(own.done)
        out_slice = (pl.ds(row * t.tile_m, t.tile_m), pl.ds(column * t.tile_n, t.tile_n))
        store(own.acc_tmem, out_gmem.at[out_slice], own.out_smem)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(t.m_tiles, t.n_tiles),
        grid_names=(M_AXIS, N_AXIS),
        scratch_types=[Memory.types(t, stages, out_smem_type)],
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )


def store_accumulator(acc_tmem: TmemRef, out_gmem: GmemRef, out_smem: SmemRef) -> None:
    """Stores the accumulator at once: tensor memory → registers → shared memory → output.

    The store may still be in flight on return.
    """
    store_tile(plgpu.async_load_tmem(acc_tmem), out_gmem, out_smem)


def matmul(lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 128, tile_k: int = 64, stages: int = 4) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = tiling(lhs, rhs, tile_n=tile_n, tile_k=tile_k, stages=stages)
    out_smem_type = t.smem(t.tile_m, tile_n)
    return tile_per_cta(t, stages, out_smem_type, store_accumulator, "blackwell_ladder_warp_specialized")(lhs, rhs)
