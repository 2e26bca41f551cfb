"""Small kernels that use Blackwell's tensor cores. Some take `defects`, names of rules to break."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.emulation.cases import NO_DEFECTS, out_type

ROWS, TILE = 128, 64  # The rows of one CTA's accumulator, and its columns; TILE is also the size of a k step.


def tiled(shape, dtype):
    """Returns shared memory whose layout fits an operand of an mma."""
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))
    )


def matmul(x, y, *, pair=False, defects=NO_DEFECTS):
    """x[ROWS, k] @ y[k, n] by a CTA, or twice the rows by a pair: a warp loads, one multiplies, a warpgroup stores."""
    ctas, axis = (2, "pair") if pair else (1, None)
    (m, k), n = x.shape, y.shape[1]
    assert m == ROWS * ctas
    tiles, k_steps = n // TILE, k // TILE

    def body(x_gmem, y_gmem, out_gmem, x_smem, y_smem, out_smem, acc_tmem, loaded, consumed, mma_done, told, stored):
        rank, wg = lax.axis_index("pair"), lax.axis_index("wg")

        def load(source, target, split):
            if pair and "own barrier" in defects:
                half = source.shape[split] // 2
                own = [pl.ds(0, size) for size in source.shape]
                own[split] = pl.ds(rank * half, half)
                plgpu.copy_gmem_to_smem(source.at[tuple(own)], target, loaded)
                return
            tracking = plgpu.CopyPartition.PARTITIONED(split) if pair else None
            plgpu.copy_gmem_to_smem(source, target, loaded, collective_axes=axis, leader_tracked=tracking)

        def load_all():
            @pl.loop(0, tiles * k_steps)
            def _step(step):
                waits = (step > 0) & jnp.bool_("early refill" not in defects)
                pl.when(waits)(lambda: plgpu.barrier_wait(consumed))
                k_slice = pl.ds(lax.rem(step, k_steps) * TILE, TILE)
                load(x_gmem.at[:, k_slice], x_smem, 0)
                load(y_gmem.at[k_slice, pl.ds(lax.div(step, k_steps) * TILE, TILE)], y_smem, 1)

        def multiply_all():
            @pl.loop(0, tiles)
            def _tile(tile):
                waits = (tile > 0) & jnp.bool_("early overwrite" not in defects)
                pl.when(waits)(lambda: plgpu.barrier_wait(stored))

                @pl.loop(0, k_steps)
                def _step(k_step):
                    if "no wait for operands" not in defects:
                        plgpu.barrier_wait(loaded)
                    plgpu.tcgen05_mma(
                        acc_tmem, x_smem, y_smem, consumed, collective_axis=axis,
                        accumulate=jnp.bool_("no reset" in defects) | (k_step > 0),
                    )  # fmt: skip

                plgpu.tcgen05_commit_arrive(mma_done, collective_axis=None if "commit of one" in defects else axis)
                if "told by a plain barrier" in defects:
                    plgpu.barrier_wait(mma_done)
                    plgpu.barrier_arrive(told)

            if "early overwrite" not in defects:
                plgpu.barrier_wait(stored)

        @pl.when(wg == 0)
        def _mma():
            @plgpu.warp_map
            def _warp(warp):
                issuer = rank == (1 if "issued by the other" in defects else 0)
                pl.when(warp == 0)(load_all)
                pl.when((warp == 1) & issuer)(multiply_all)

        @pl.when(wg == 1)
        def _store():
            @pl.loop(0, tiles)
            def _tile(tile):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                if "early epilogue" not in defects:
                    plgpu.barrier_wait(told if "told by a plain barrier" in defects else mma_done)
                out_smem[...] = plgpu.async_load_tmem(acc_tmem).astype(out_smem.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[pl.ds(rank * ROWS, ROWS), pl.ds(tile * TILE, TILE)])
                if "no wait for the load" not in defects:
                    plgpu.wait_load_tmem()
                plgpu.barrier_arrive(stored)

            plgpu.wait_smem_to_gmem(0)

    orders = plgpu.Barrier(orders_tensor_core=True)
    stored = plgpu.Barrier(orders_tensor_core="plain barrier" not in defects)
    if pair and "own epilogue" not in defects:
        stored = plgpu.ClusterBarrier(
            collective_axes=("pair",), orders_tensor_core="plain barrier" not in defects, leader_tracked=True
        )
    return plgpu.kernel(
        body, out_type=out_type((m, n)), cluster=(ctas,), cluster_names=("pair",), num_threads=2, thread_name="wg",
        scratch_types=[
            tiled((ROWS, TILE), x.dtype), tiled((TILE, TILE // ctas), y.dtype), tiled((ROWS, TILE), jnp.float32),
            plgpu.TMEM((ROWS, TILE), jnp.float32, collective=pair),
            plgpu.Barrier(num_arrivals=2), orders, orders, plgpu.Barrier(), stored,
        ],
    )(x, y)  # fmt: skip


def single_product(x, y, *, left="smem", pair=False, accumulator=jnp.float32, transposed=False, defects=NO_DEFECTS):
    """x @ y by one mma of one warpgroup, or of a pair of CTAs with half of the rows and half of the columns each.

    `left`: where x lies: in shared memory ("smem"), in tensor memory, stored there ("tmem"), or copied ("copied").
    `transposed`: y is given as [n, k].
    """
    ctas, axis = (2, "pair") if pair else (1, None)
    (m, k), n = x.shape, y.shape[0] if transposed else y.shape[1]
    rows, columns = m // ctas, n // ctas

    def body(x_gmem, y_gmem, out_gmem, x_smem, y_smem, x_tmem, acc_tmem, loaded, met, done):
        rank = lax.axis_index("pair")
        own, of_y = pl.ds(rank * rows, rows), pl.ds(rank * columns, columns)
        plgpu.copy_gmem_to_smem(x_gmem.at[own], x_smem, loaded)
        plgpu.copy_gmem_to_smem(y_gmem.at[of_y] if transposed else y_gmem.at[:, of_y], y_smem, loaded)
        plgpu.barrier_wait(loaded)
        if left == "copied":
            plgpu.async_copy_smem_to_tmem(x_smem, x_tmem)
        elif left == "tmem":
            plgpu.async_store_tmem(x_tmem, x_smem[...])
            if "missing commit" not in defects:
                plgpu.commit_tmem()
        if pair:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
        right = y_smem.transpose((1, 0)) if transposed else y_smem
        plgpu.tcgen05_mma(
            acc_tmem, x_smem if left == "smem" else x_tmem, right, done, accumulate=False, collective_axis=axis
        )
        plgpu.barrier_wait(done)
        out_gmem[own] = plgpu.async_load_tmem(acc_tmem)
        if "reused at once" in defects:
            plgpu.async_store_tmem(acc_tmem, jnp.zeros((rows, n), accumulator))
            plgpu.commit_tmem()

    of_left = plgpu.TMEM((ROWS, TILE), jnp.float32) if left == "smem" else plgpu.TMEM(
        (rows, k), x.dtype, packed=True, collective=pair)  # fmt: skip
    met = plgpu.ClusterBarrier(collective_axes=("pair",), orders_tensor_core="plain barrier" not in defects)
    return plgpu.kernel(
        body, out_type=out_type((m, n), accumulator), cluster=(ctas,), cluster_names=("pair",),
        scratch_types=[
            tiled((rows, k), x.dtype), tiled((columns, k) if transposed else (k, columns), y.dtype), of_left,
            plgpu.TMEM((rows, n), accumulator, packed=False, collective=pair),
            plgpu.Barrier(num_arrivals=2), met, plgpu.Barrier(orders_tensor_core=True),
        ],
    )(x, y)  # fmt: skip


def pack_scales(scales):
    """Reorders scales [rows, blocks of k] as the tensor core expects them in shared memory."""
    rows, blocks = scales.shape
    padded = jnp.pad(scales.astype(jnp.float32), ((0, -rows % 128), (0, 0))).astype(scales.dtype)
    tiles = padded.reshape(-1, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(-1, blocks // 4, 32, 16)


def pack_scales_of_half_rows(scales, columns):
    """Reorders scales [columns, blocks of k] of the right operand for a pair of CTAs with 64 rows each."""
    blocks = scales.shape[1]
    parts = columns // 64  # Each half has this many parts of 32 columns.
    split = scales.reshape(2, parts, 32, blocks // 4, 4).transpose(3, 0, 2, 1, 4)
    packed = split.reshape(1, blocks // 4, 64, parts * 4)
    return jnp.concatenate([packed, jnp.zeros((*packed.shape[:3], 16 - parts * 4), scales.dtype)], axis=-1)


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
        body, out_type=out_type((m, n)), cluster=(ctas,), cluster_names=("pair",),
        scratch_types=[
            tiled((block_m, k), x.dtype), tiled((block_n, k), y.dtype),
            plgpu.SMEM(left_block, dtype), plgpu.SMEM(right.shape, dtype),
            plgpu.TMEM((128, blocks), dtype, layout=plgpu.TMEMLayout.SCALES_LAYOUT, collective=pair),
            plgpu.TMEM((right_rows, blocks), dtype, layout=right_layout, collective=pair),
            plgpu.TMEM((block_m, n), jnp.float32, collective=pair),
            plgpu.Barrier(num_arrivals=4), plgpu.ClusterBarrier(collective_axes=("pair",)),
            plgpu.Barrier(orders_tensor_core=True),
        ],
    )(x, y, left, right)  # fmt: skip
