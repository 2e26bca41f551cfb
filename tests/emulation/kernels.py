"""Three small kernels, each with switches that break one rule of synchronization.

A *defect* is a name in `defects`. Without defects the kernel is correct, and the tests demand that the emulator reports
nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

NO_DEFECTS = frozenset()


def fence_proxy_async() -> None:
    """Has the effect of `fence.proxy.async`, for which jax has no public function."""

    def fence(ctx):
        del ctx
        mgpu_utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    plgpu.inline_mgpu()(fence)()


def ring_push(axis_size: int, rows: int, columns: int, defects=NO_DEFECTS, axis: str = "x"):
    """All-gather by pushing to the right-hand neighbour: [rows, columns] -> [axis_size * rows, columns]."""

    def body(x_gmem, out_gmem, smem, barrier):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((axis_size,)))
        me = lax.axis_index(axis)
        right = lax.rem(me + (2 if "wrong peer" in defects else 1), axis_size)

        def shard_rows(ref, shard):
            return ref.at[pl.ds(shard * rows, rows), :]

        for step in range(axis_size):
            shard = lax.rem(me - step + axis_size, axis_size)
            if step == 0:
                plgpu.copy_gmem_to_smem(x_gmem, smem, barrier)
            else:
                if "dropped wait" not in defects:
                    plgpu.semaphore_wait(arrived.at[step], decrement=False)
                if "missing fence" not in defects:
                    fence_proxy_async()
                plgpu.copy_gmem_to_smem(shard_rows(out_gmem, shard), smem, barrier)
            plgpu.barrier_wait(barrier)
            if step == 0:
                plgpu.copy_smem_to_gmem(smem, shard_rows(out_gmem, me))
            if step < axis_size - 1:
                plgpu.copy_smem_to_gmem(smem, shard_rows(plgpu.remote_ref(out_gmem, {axis: right}), shard))
                if "early signal" in defects:
                    plgpu.semaphore_signal(arrived.at[step + 1], device_id={axis: right})
                    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only="read-only wait" in defects)
                    plgpu.semaphore_signal(arrived.at[step + 1], device_id={axis: right})
            else:
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    return lambda x: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((axis_size * rows, columns), x.dtype),
        scratch_types=[plgpu.SMEM((rows, columns), x.dtype), plgpu.Barrier()],
    )(x)


def pull_exchange(axis_size: int, rows: int, columns: int, cores: int, defects=NO_DEFECTS, axis: str = "x"):
    """All-gather by pulling: [rows, columns] -> ([axis_size * rows, columns], and the same rows times 2).

    Each CTA pulls every `cores`-th row of every shard and consumes one block of all columns of every shard.
    """
    chunks = rows // cores
    assert rows % cores == 0

    def body(x_gmem, gathered, doubled, chunk_smem, tile_smem, pulled, loaded, *scoped):
        flags = plgpu.SemaphoreType.REGULAR((axis_size,))
        ready = scoped[0] if "per-CTA semaphore" in defects else pl.get_global(flags)
        left = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me, cta, wg = lax.axis_index(axis), lax.axis_index("cta"), lax.axis_index("wg")

        @pl.when(wg == 0)
        def _communicate():
            @pl.loop(0, axis_size)
            def _shard(s):
                peer = lax.rem(me + s, axis_size)

                @pl.loop(0, chunks)
                def _chunk(c):
                    row = c * cores + cta
                    source = plgpu.remote_ref(x_gmem, {axis: peer})
                    plgpu.copy_gmem_to_smem(source.at[pl.ds(row, 1), :], chunk_smem, pulled)
                    plgpu.barrier_wait(pulled)
                    plgpu.copy_smem_to_gmem(chunk_smem, gathered.at[pl.ds(peer * rows + row, 1), :])
                    if "no store wait" not in defects:
                        plgpu.wait_smem_to_gmem(0, wait_read_only="read-only wait" in defects)
                    flag = 0 if "shared counter" in defects else s
                    plgpu.semaphore_signal(ready.at[flag], memory_scope="gpu")

            if "missing handshake" not in defects:
                for peer in range(axis_size):
                    plgpu.semaphore_signal(left, device_id={axis: peer})
                wanted = axis_size * cores - ("short handshake" in defects)
                plgpu.semaphore_wait(left, wanted, decrement=False)

        @pl.when(wg == 1)
        def _consume():
            width = columns // cores

            @pl.loop(0, axis_size)
            def _shard(s):
                peer = lax.rem(me + s, axis_size)
                if "shared counter" in defects:
                    plgpu.semaphore_wait(ready.at[0], rows * (s + 1), decrement=False)
                else:
                    plgpu.semaphore_wait(ready.at[s], rows, decrement=False)
                if "missing fence" not in defects:
                    fence_proxy_async()
                here = (pl.ds(peer * rows, rows), pl.ds(cta * width, width))
                plgpu.copy_gmem_to_smem(gathered.at[here], tile_smem, loaded)
                plgpu.barrier_wait(loaded)
                tile_smem[...] = tile_smem[...] * 2
                if "missing commit" not in defects:
                    plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(tile_smem, doubled.at[here])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def run(x):
        out = jax.ShapeDtypeStruct((axis_size * rows, columns), x.dtype)
        scoped = [plgpu.SemaphoreType.REGULAR((axis_size,))] if "per-CTA semaphore" in defects else []
        return plgpu.kernel(
            body,
            out_type=(out, out),
            scratch_types=[
                plgpu.SMEM((1, columns), x.dtype),
                plgpu.SMEM((rows, columns // cores), x.dtype),
                plgpu.Barrier(),
                plgpu.Barrier(),
                *scoped,
            ],
            grid=(cores,),
            grid_names=("cta",),
            num_threads=2,
            thread_name="wg",
        )(x)

    return run


def pipelined_matmul(m: int, n: int, k: int, cores: int, defects=NO_DEFECTS, tile=(128, 128, 64), stages: int = 2):
    """lhs[m, k] @ rhs[k, n] on one device, by persistent CTAs with a producer warp and two compute warpgroups."""
    tile_m, tile_n, tile_k = tile
    m_tiles, n_tiles, k_steps = m // tile_m, n // tile_n, k // tile_k
    wg_m = tile_m // 2
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(lhs, rhs, out, lhs_smem, rhs_smem, out_smem, full, empty):
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        tiles = m_tiles * n_tiles
        my_tiles = lax.div(tiles - cta + cores - 1, cores)

        @pl.when(wg == 2)
        def _memory():
            plgpu.set_max_registers(40, action="decrease")

            @plgpu.warp_map
            def _warp(warp):
                @pl.when(warp == 0)
                def _produce():
                    @pl.loop(0, my_tiles)
                    def _tile(i):
                        t = cta + i * cores
                        mi, ni = lax.div(t, n_tiles), lax.rem(t, n_tiles)

                        @pl.loop(0, k_steps)
                        def _step(ki):
                            step = i * k_steps + ki
                            slot = lax.rem(step, stages)
                            if "early reuse" not in defects:

                                @pl.when(step >= stages)
                                def _():
                                    plgpu.barrier_wait(empty.at[slot])

                            here = pl.ds(mi * tile_m, tile_m), pl.ds(ki * tile_k, tile_k)
                            plgpu.copy_gmem_to_smem(lhs.at[here], lhs_smem.at[slot], full.at[slot])
                            here = pl.ds(ki * tile_k, tile_k), pl.ds(ni * tile_n, tile_n)
                            plgpu.copy_gmem_to_smem(rhs.at[here], rhs_smem.at[slot], full.at[slot])

        @pl.when(wg < 2)
        def _compute():
            plgpu.set_max_registers(232, action="increase")

            @pl.loop(0, my_tiles)
            def _tile(i):
                t = cta + i * cores
                mi, ni = lax.div(t, n_tiles), lax.rem(t, n_tiles)

                def accumulate(acc):
                    @pl.loop(0, k_steps)
                    def _step(ki):
                        slot = lax.rem(i * k_steps + ki, stages)
                        if "dropped wait" not in defects:
                            plgpu.barrier_wait(full.at[slot])
                        plgpu.wgmma(acc, lhs_smem.at[slot, pl.ds(wg * wg_m, wg_m)], rhs_smem.at[slot])
                        if "arrive before wgmma ends" in defects:
                            plgpu.barrier_arrive(empty.at[slot])
                            plgpu.wgmma_wait(0)
                        else:
                            plgpu.wgmma_wait(0)
                            plgpu.barrier_arrive(empty.at[slot])
                            if "double arrival" in defects:
                                plgpu.barrier_arrive(empty.at[slot])

                    return acc[...]

                result = pl.run_scoped(accumulate, plgpu.ACC((wg_m, tile_n), jnp.float32))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                mine = out_smem.at[wg]
                mine[...] = result.astype(out.dtype)
                if "missing commit" not in defects:
                    plgpu.commit_smem()
                here = pl.ds(mi * tile_m + wg * wg_m, wg_m), pl.ds(ni * tile_n, tile_n)
                plgpu.copy_smem_to_gmem(mine, out.at[here])

            if "left too early" not in defects:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def run(lhs, rhs):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((m, n), lhs.dtype),
            scratch_types=[
                plgpu.SMEM((stages, tile_m, tile_k), lhs.dtype, transforms=transforms),
                plgpu.SMEM((stages, tile_k, tile_n), rhs.dtype, transforms=transforms),
                plgpu.SMEM((2, wg_m, tile_n), lhs.dtype),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
                plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            ],
            grid=(cores,),
            grid_names=("cta",),
            num_threads=3,
            thread_name="wg",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )(lhs, rhs)

    return run
