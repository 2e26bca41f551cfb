"""Small kernels that use Blackwell's tensor cores. Each takes `defects`, names of rules to break (see `kernels`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.emulation.kernels import NO_DEFECTS

ROWS = 128  # The tile of one CTA has this many rows.
LOAD_WARP, MMA_WARP = 0, 1
MMA_WARPGROUP, STORE_WARPGROUP = 0, 1


def tiled(shape, dtype):
    """Returns shared memory whose layout fits an operand of an mma."""
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
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


def single_product(x, y, *, accumulator=jnp.float32, transposed=False):
    """x @ y by one mma of one warpgroup; `y` is given as [n, k] if it is `transposed`."""
    m, n = x.shape[0], y.shape[0] if transposed else y.shape[1]

    def body(x_gmem, y_gmem, out_gmem, x_smem, y_smem, acc_tmem, loaded, done):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, loaded)
        plgpu.copy_gmem_to_smem(y_gmem, y_smem, loaded)
        plgpu.barrier_wait(loaded)
        right = y_smem.transpose((1, 0)) if transposed else y_smem
        plgpu.tcgen05_mma(acc_tmem, x_smem, right, done, accumulate=False)
        plgpu.barrier_wait(done)
        out_gmem[...] = plgpu.async_load_tmem(acc_tmem)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), accumulator),
        scratch_types=[
            tiled(x.shape, x.dtype),
            tiled(y.shape, y.dtype),
            plgpu.TMEM((m, n), accumulator, packed=False),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(x, y)


def pack_scales(scales):
    """Reorders scales [rows, blocks of k] as the tensor core expects them in shared memory."""
    rows, blocks = scales.shape
    padded = jnp.pad(scales.astype(jnp.float32), ((0, -rows % 128), (0, 0))).astype(scales.dtype)
    tiles = padded.reshape(-1, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(-1, blocks // 4, 32, 16)


def scaled_product(x, y, x_scales, y_scales, *, pair=False):
    """x[m, k] @ y[n, k].T with a scale for each block of k, by one CTA or one pair."""
    (m, k), n = x.shape, y.shape[0]
    ctas, axis = (2, "pair") if pair else (1, None)
    block_m, block_n = m // ctas, n // ctas
    blocks, dtype = x_scales.shape[1], x_scales.dtype
    if block_m == 64:
        left = jnp.concatenate([pack_scales(x_scales[:64]), pack_scales(x_scales[64:])])
        right, right_layout = pack_scales_of_half_rows(y_scales, n), plgpu.TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT
        right_rows = 256
    else:
        left, right, right_layout = pack_scales(x_scales), pack_scales(y_scales), plgpu.TMEMLayout.SCALES_LAYOUT
        right_rows = 128 * right.shape[0]
    left_block = (left.shape[0] // ctas, *left.shape[1:])

    def body(
        x_gmem, y_gmem, left_gmem, right_gmem, out_gmem,
        x_smem, y_smem, left_smem, right_smem, left_tmem, right_tmem, acc_tmem, loaded, met, done,
    ):  # fmt: skip
        rank = lax.axis_index("pair")
        rows = pl.ds(rank * block_m, block_m)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)
        plgpu.copy_gmem_to_smem(y_gmem.at[pl.ds(rank * block_n, block_n)], y_smem, loaded)
        plgpu.copy_gmem_to_smem(left_gmem.at[pl.ds(rank * left_block[0], left_block[0])], left_smem, loaded)
        plgpu.copy_gmem_to_smem(right_gmem, right_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        plgpu.async_copy_scales_to_tmem(left_smem, left_tmem, collective_axis=axis)
        plgpu.async_copy_scales_to_tmem(right_smem, right_tmem, collective_axis=axis)
        plgpu.tcgen05_mma(
            acc_tmem, x_smem, y_smem.transpose((1, 0)), done,
            a_scale=left_tmem, b_scale=right_tmem, accumulate=False, collective_axis=axis,
        )  # fmt: skip
        plgpu.barrier_wait(done)
        out_gmem[rows] = plgpu.async_load_tmem(acc_tmem)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_types=[
            tiled((block_m, k), x.dtype),
            tiled((block_n, k), y.dtype),
            plgpu.SMEM(left_block, dtype),
            plgpu.SMEM(right.shape, dtype),
            plgpu.TMEM((128, blocks), dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT, collective=pair),
            plgpu.TMEM((right_rows, blocks), dtype, layout=right_layout, collective=pair),
            plgpu.TMEM((block_m, n), jnp.float32, collective=pair),
            plgpu.Barrier(num_arrivals=4),
            plgpu.ClusterBarrier(collective_axes=("pair",)),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        cluster=(ctas,),
        cluster_names=("pair",),
    )(x, y, left, right)


def pack_scales_of_half_rows(scales, columns):
    """Reorders scales [columns, blocks of k] of the right operand for a pair of CTAs with 64 rows each."""
    blocks = scales.shape[1]
    parts = columns // 64  # Each half has this many parts of 32 columns.
    split = scales.reshape(2, parts, 32, blocks // 4, 4).transpose(3, 0, 2, 1, 4)
    packed = split.reshape(1, blocks // 4, 64, parts * 4)
    return jnp.concatenate([packed, jnp.zeros((*packed.shape[:3], 16 - parts * 4), scales.dtype)], axis=-1)


def pair_with_operand_in_tensor_memory(x, y, *, defects=NO_DEFECTS):
    """x[256, k] @ y[k, n] by one pair, each CTA with its half of x in tensor memory."""
    (m, k), n = x.shape, y.shape[1]

    def body(x_gmem, y_gmem, out_gmem, x_smem, y_smem, x_tmem, acc_tmem, loaded, met, done):
        rank = lax.axis_index("pair")
        rows = pl.ds(rank * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, loaded)
        plgpu.copy_gmem_to_smem(y_gmem.at[:, pl.ds(rank * (n // 2), n // 2)], y_smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.async_store_tmem(x_tmem, x_smem[...])
        plgpu.commit_tmem()
        plgpu.barrier_arrive(met)
        plgpu.barrier_wait(met)
        plgpu.tcgen05_mma(acc_tmem, x_tmem, y_smem, done, accumulate=False, collective_axis="pair")
        plgpu.barrier_wait(done)
        out_gmem[rows] = plgpu.async_load_tmem(acc_tmem)

    orders = "plain barrier" not in defects
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.float32),
        scratch_types=[
            tiled((ROWS, k), x.dtype),
            tiled((k, n // 2), y.dtype),
            plgpu.TMEM((ROWS, k), x.dtype, packed=True, collective=True),
            plgpu.TMEM((ROWS, n), jnp.float32, collective=True),
            plgpu.Barrier(num_arrivals=2),
            plgpu.ClusterBarrier(collective_axes=("pair",), orders_tensor_core=orders),
            plgpu.Barrier(orders_tensor_core=True),
        ],
        cluster=(2,),
        cluster_names=("pair",),
    )(x, y)
