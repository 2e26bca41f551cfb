"""Small kernels for the tensor cores of Blackwell, each with switches that break one rule (see `kernels`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.emulation.kernels import NO_DEFECTS

ROWS = 128  # of a tile of one CTA
LOAD_WARP, MMA_WARP = 0, 1
MMA_WARPGROUP, STORE_WARPGROUP = 0, 1


def tiled(shape, dtype):
    """Shared memory for an operand of an mma."""
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    return plgpu.SMEM(
        shape,
        dtype,
        transforms=(plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle)),
    )


def matmul(m, n, k, *, pair=False, tile_n=64, tile_k=64, stages=2, defects=NO_DEFECTS):
    """x[m, k] @ y[k, n] on one CTA or one pair, tile after tile: one warp loads, one multiplies, a warpgroup stores."""
    ctas = 2 if pair else 1
    axis = "pair" if pair else None
    tile_m, block_n = ROWS * ctas, tile_n // ctas
    n_tiles, k_steps = n // tile_n, k // tile_k
    tiles = m // tile_m * n_tiles

    def body(x_gmem, y_gmem, out_gmem, x_smem, y_smem, out_smem, acc_tmem, loaded, consumed, mma_done, told, stored):
        rank = lax.axis_index("pair")
        wg = lax.axis_index("wg")

        def places(tile):
            return lax.div(tile, n_tiles), lax.rem(tile, n_tiles)

        def load(source, target, stage, split):
            if pair and "own barrier" in defects:
                cut = [pl.ds(rank * (size // 2), size // 2) if d == split else slice(None)
                       for d, size in enumerate(source.shape)]  # fmt: skip
                plgpu.copy_gmem_to_smem(source.at[tuple(cut)], target.at[stage], loaded.at[stage])
                return
            tracking = plgpu.CopyPartition.PARTITIONED(split) if pair else None
            plgpu.copy_gmem_to_smem(
                source, target.at[stage], loaded.at[stage], collective_axes=axis, leader_tracked=tracking
            )

        def load_all():
            @pl.loop(0, tiles * k_steps)
            def _step(step):
                mi, ni = places(lax.div(step, k_steps))
                stage, k_slice = lax.rem(step, stages), pl.ds(lax.rem(step, k_steps) * tile_k, tile_k)

                @pl.when((step >= stages) & jnp.bool_("early refill" not in defects))
                def _wait():
                    plgpu.barrier_wait(consumed.at[stage])

                load(x_gmem.at[pl.ds(mi * tile_m, tile_m), k_slice], x_smem, stage, 0)
                load(y_gmem.at[k_slice, pl.ds(ni * tile_n, tile_n)], y_smem, stage, 1)

        def multiply_all():
            @pl.loop(0, tiles)
            def _tile(tile):
                @pl.when((tile > 0) & jnp.bool_("early overwrite" not in defects))
                def _wait():
                    plgpu.barrier_wait(stored)

                @pl.loop(0, k_steps)
                def _step(k_step):
                    stage = lax.rem(tile * k_steps + k_step, stages)
                    if "no wait for operands" not in defects:
                        plgpu.barrier_wait(loaded.at[stage])
                    plgpu.tcgen05_mma(
                        acc_tmem,
                        x_smem.at[stage],
                        y_smem.at[stage],
                        consumed.at[stage],
                        accumulate=jnp.bool_("no reset" in defects) | (k_step > 0),
                        collective_axis=axis,
                    )

                plgpu.tcgen05_commit_arrive(mma_done, collective_axis=None if "commit of one" in defects else axis)
                if "told by a plain barrier" in defects:
                    plgpu.barrier_wait(mma_done)
                    plgpu.barrier_arrive(told)

            if "early overwrite" not in defects:
                plgpu.barrier_wait(stored)

        @pl.when(wg == MMA_WARPGROUP)
        def _mma():
            @plgpu.warp_map
            def _warp(warp):
                pl.when(warp == LOAD_WARP)(load_all)
                issuer = rank == (1 if "issued by the other" in defects else 0)
                pl.when((warp == MMA_WARP) & issuer)(multiply_all)

        @pl.when(wg == STORE_WARPGROUP)
        def _store():
            @pl.loop(0, tiles)
            def _tile(tile):
                mi, ni = places(tile)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if "told by a plain barrier" in defects:
                    plgpu.barrier_wait(told)
                elif "early epilogue" not in defects:
                    plgpu.barrier_wait(mma_done)
                out_smem[...] = plgpu.async_load_tmem(acc_tmem).astype(out_smem.dtype)
                plgpu.commit_smem()
                rows = pl.ds(mi * tile_m + rank * ROWS, ROWS)
                plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[rows, pl.ds(ni * tile_n, tile_n)])
                if "no wait for the load" not in defects:
                    plgpu.wait_load_tmem()
                plgpu.barrier_arrive(stored)

            plgpu.wait_smem_to_gmem(0)

    orders = "plain barrier" not in defects
    if pair and "own epilogue" not in defects:
        stored = plgpu.ClusterBarrier(collective_axes=("pair",), orders_tensor_core=orders, leader_tracked=True)
    else:
        stored = plgpu.Barrier(orders_tensor_core=orders)

    def run(x, y):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
            scratch_types=[
                tiled((stages, ROWS, tile_k), x.dtype),
                tiled((stages, tile_k, block_n), y.dtype),
                tiled((ROWS, tile_n), jnp.float32),
                plgpu.TMEM((ROWS, tile_n), jnp.float32, collective=pair),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_barriers=stages, orders_tensor_core=True),
                plgpu.Barrier(orders_tensor_core=True),
                plgpu.Barrier(),
                stored,
            ],
            cluster=(ctas,),
            cluster_names=("pair",),
            num_threads=2,
            thread_name="wg",
        )(x, y)

    return run


def operand_in_tensor_memory(m, n, k, dtype, *, by_copy=False, defects=NO_DEFECTS):
    """x[m, k] @ y[k, n] by one warpgroup, with x in tensor memory: stored there, or copied from shared memory."""

    def body(x_gmem, y_gmem, out_gmem, x_smem, y_smem, x_tmem, acc_tmem, loaded, done):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
        plgpu.copy_gmem_to_smem(y_gmem, y_smem, loaded)
        plgpu.barrier_wait(loaded)
        if by_copy:
            plgpu.async_copy_smem_to_tmem(x_smem, x_tmem)
        else:
            plgpu.async_store_tmem(x_tmem, x_smem[...])
            if "missing commit" not in defects:
                plgpu.commit_tmem()
        plgpu.tcgen05_mma(acc_tmem, x_tmem, y_smem, accumulate=False)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        out_gmem[...] = plgpu.async_load_tmem(acc_tmem)
        if "reused at once" in defects:
            plgpu.async_store_tmem(acc_tmem, jnp.zeros((m, n), jnp.float32))
            plgpu.commit_tmem()

    def run(x, y):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
            scratch_types=[
                tiled((m, k), dtype),
                tiled((k, n), dtype),
                plgpu.TMEM((m, k), dtype, packed=True),
                plgpu.TMEM((m, n), jnp.float32),
                plgpu.Barrier(num_arrivals=2),
                plgpu.Barrier(orders_tensor_core=True),
            ],
        )(x, y)

    return run
