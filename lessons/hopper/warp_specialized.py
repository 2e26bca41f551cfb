"""Rung 2: warp specialization. One warpgroup copies, two multiply.

The *memory* warpgroup runs as far ahead as the stages allow, and gives most of its registers away. The two *compute*
warpgroups hold the upper and the lower half of a tile twice as wide as before, and share its right operand. The
warpgroups synchronize at two mbarriers per stage:

    full      both operand tiles have landed     (2 arrivals, one per copy; the compute warpgroups wait)
    consumed  nobody reads the stage any more    (2 arrivals, one per compute warpgroup; the memory warpgroup waits)

A compute warpgroup leaves one wgmma in flight. So it gives back the stage of k step k − 1 after it has issued the
product of k step k. This is the delayed release of rung 1, written out.

Gains: copies are issued on time whatever the tensor cores do, and tiles of 128 × 256 move a quarter fewer bytes per
product than 128 × 128. What is left: nothing is multiplied while the output tile is stored, and its buffer takes more
shared memory than a stage. Source: "Software pipelining with Mosaic GPU" in the JAX documentation; CUTLASS's
warp-specialized kernels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lessons.hopper.basic import store_tile
from lessons.hopper.tiling import COMPILER_PARAMS, COMPUTE_WARPGROUPS, M_AXIS, N_AXIS, Tiling
from overlap.primitives.axes import kernel_axis
from overlap.primitives.integers import remainder
from overlap.primitives.types import AccumulatorRef, Axis, BarrierRef, GmemRef, Index, ScratchType, SmemRef

MEMORY_WARPGROUP = COMPUTE_WARPGROUPS
THREAD_AXIS = kernel_axis("warpgroup")
THREADS: dict[str, Any] = {"num_threads": COMPUTE_WARPGROUPS + 1, "thread_name": THREAD_AXIS}
COMPUTE_REGISTERS, MEMORY_REGISTERS = 232, 40
type Store = Callable[[jax.Array, GmemRef, SmemRef], None]  # (values, output, buffer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The shared-memory pipeline: `stages` pairs of operand tiles, with two barriers per stage.

    Attributes:
      lhs_smem: [stages, tile_m, tile_k].
      rhs_smem: [stages, tile_k, tile_n].
      full: barriers: the operand tiles of a stage have landed.
      consumed: barriers: nobody reads a stage any more.
    """

    lhs_smem: SmemRef
    rhs_smem: SmemRef
    full: BarrierRef
    consumed: BarrierRef

    @classmethod
    def types(cls, t: Tiling, stages: int, consumed: ScratchType = None) -> ScratchType:
        """The scratch types of a pipeline; `consumed` is the type of that barrier, if it is not the usual one."""
        return cls(
            lhs_smem=t.smem(stages, t.tile_m, t.tile_k),
            rhs_smem=t.smem(stages, t.tile_k, t.tile_n),
            full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            consumed=consumed or plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages),
        )

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.lhs_smem.shape[0]


def load_tiles(
    operands: tuple[GmemRef, GmemRef],
    tile: tuple[Index, Index],
    pipeline: Pipeline,
    t: Tiling,
    *,
    first: Index = 0,
    shared_by: Axis = None,
) -> None:
    """Loads the operand tiles of an output tile, k step by k step: the memory warpgroup's work.

    Args:
      operands: [m, k] and [k, n].
      tile: row and column of the output tile.
      pipeline: where the operand tiles go.
      t: sizes.
      first: how many stages this CTA has filled before, for other output tiles.
      shared_by: the cluster axis along which CTAs share the right operand (rung 5).
    """
    (lhs_gmem, rhs_gmem), (row, column) = operands, tile
    m_slice, n_slice = pl.ds(row * t.tile_m, t.tile_m), pl.ds(column * t.tile_n, t.tile_n)
    shared = None if shared_by is None else (shared_by,)

    @pl.loop(0, t.k_steps)
    def _k_step(k: jax.Array) -> None:
        stage, k_slice = remainder(first + k, pipeline.stages), pl.ds(k * t.tile_k, t.tile_k)
        full = pipeline.full.at[stage]

        @pl.when(first + k >= pipeline.stages)
        def _wait_until_free() -> None:
            plgpu.barrier_wait(pipeline.consumed.at[stage])

        plgpu.copy_gmem_to_smem(lhs_gmem.at[m_slice, k_slice], pipeline.lhs_smem.at[stage], full)
        plgpu.copy_gmem_to_smem(
            rhs_gmem.at[k_slice, n_slice], pipeline.rhs_smem.at[stage], full, collective_axes=shared
        )


def accumulate_tile(wg_rows: pl.Slice, pipeline: Pipeline, t: Tiling, *, first: Index = 0) -> jax.Array:
    """Returns a compute warpgroup's sums of an output tile, in f32; `wg_rows`: the warpgroup's rows in the tile."""

    def multiply(k: Index, acc: AccumulatorRef) -> None:
        stage = remainder(first + k, pipeline.stages)
        plgpu.barrier_wait(pipeline.full.at[stage])
        plgpu.wgmma(acc, pipeline.lhs_smem.at[stage, wg_rows], pipeline.rhs_smem.at[stage])

    def accumulate(acc: AccumulatorRef) -> jax.Array:
        multiply(0, acc)

        @pl.loop(1, t.k_steps)
        def _k_step(k: jax.Array) -> None:
            multiply(k, acc)
            # Invariant: the wgmma just issued may be in flight; all before it have read their stages.
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(pipeline.consumed.at[remainder(first + k - 1, pipeline.stages)])

        return acc[...]  # Waits for the last wgmma.

    values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((t.wg_tile_m, t.tile_n), jnp.float32))
    plgpu.barrier_arrive(pipeline.consumed.at[remainder(first + t.k_steps - 1, pipeline.stages)])
    return values


def split_roles(memory: Callable[[], None], compute: Callable[[jax.Array], None]) -> None:
    """Runs `memory()` on one warpgroup, and `compute(warpgroup)` on the two others, which get most registers."""
    warpgroup = lax.axis_index(THREAD_AXIS)

    @pl.when(warpgroup == MEMORY_WARPGROUP)
    def _memory() -> None:
        plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")
        memory()

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        compute(warpgroup)


def tile_per_cta(
    t: Tiling, stages: int, out_smem_type: ScratchType, store: Store, name: str
) -> Callable[..., jax.Array]:
    """Makes a kernel in which the CTA at (m, n) of the grid computes that tile; `store` stores a warpgroup's half."""

    def body(lhs_gmem: GmemRef, rhs_gmem: GmemRef, out_gmem: GmemRef, pipeline: Pipeline, out_smem: SmemRef) -> None:
        row, column = lax.axis_index(M_AXIS), lax.axis_index(N_AXIS)

        def compute(warpgroup: Index) -> None:
            values = accumulate_tile(pl.ds(warpgroup * t.wg_tile_m, t.wg_tile_m), pipeline, t)
            rows = pl.ds(row * t.tile_m + warpgroup * t.wg_tile_m, t.wg_tile_m)
            store(values, out_gmem.at[rows, pl.ds(column * t.tile_n, t.tile_n)], out_smem.at[warpgroup])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        split_roles(lambda: load_tiles((lhs_gmem, rhs_gmem), (row, column), pipeline, t), compute)

    return plgpu.kernel(
        body,
        out_type=t.out_type,
        grid=(t.m_tiles, t.n_tiles),
        grid_names=(M_AXIS, N_AXIS),
        **THREADS,
        scratch_types=[Pipeline.types(t, stages), out_smem_type],
        compiler_params=COMPILER_PARAMS,
        kernel_name=name,
    )


def matmul(lhs: jax.Array, rhs: jax.Array, *, tile_n: int = 256, stages: int = 3) -> jax.Array:
    """lhs[m, k] @ rhs[k, n], float16 or bfloat16; sizes are multiples of the tiles."""
    t = Tiling.of(lhs, rhs, tile_n=tile_n)
    out_smem_type = t.smem(COMPUTE_WARPGROUPS, t.wg_tile_m, tile_n)
    return tile_per_cta(t, stages, out_smem_type, store_tile, "ladder_warp_specialized")(lhs, rhs)
