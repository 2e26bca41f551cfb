"""Small kernels that run on a cluster of two CTAs. Each takes `defects`, names of rules to break."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.emulation.cases import NO_DEFECTS, WARPGROUP, out_type

PAIR = dict(cluster=(2,), cluster_names=("rank",))
BOTH = plgpu.ClusterBarrier(collective_axes=("rank",))
STEPS, ROWS, COLUMNS = 3, 8, 64


def shared_tiles(x, *, scoped=False, defects=NO_DEFECTS):
    """x[STEPS * ROWS, COLUMNS] -> [2, ROWS, COLUMNS]: each CTA sums all tiles.

    Each tile is loaded once for both: a CTA multicasts its half. `scoped`: each tile has a scope of its own, which has
    the same bytes as the scope before.
    """

    def body(x_gmem, out_gmem, consumed, *buffers):
        rank = lax.axis_index("rank")
        out_gmem[rank] = jnp.zeros((ROWS, COLUMNS), x.dtype)

        def add(step, tile_smem, full):
            @pl.when((rank == 0) | jnp.bool_("one CTA does not load" not in defects))
            def _load():
                tile = x_gmem.at[pl.ds(step * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(tile, tile_smem, full, collective_axes="rank")

            plgpu.barrier_wait(full)
            if "arrival before the read" in defects:
                plgpu.barrier_arrive(consumed)
            out_gmem[rank] = out_gmem[rank] + tile_smem[...]

        @pl.loop(0, STEPS)
        def _step(step):
            if scoped:
                scratch = plgpu.SMEM((ROWS, COLUMNS), x.dtype), plgpu.Barrier()
                pl.run_scoped(functools.partial(add, step), *scratch)
            else:
                add(step, *buffers)
            arrives = (rank == 0) | (step != 0) | jnp.bool_("missing arrival" not in defects)
            if "arrival before the read" not in defects:
                pl.when(arrives)(lambda: plgpu.barrier_arrive(consumed))
            waits = (step + 1 < STEPS) | jnp.bool_("missing last wait" not in defects)
            if "no wait between scopes" not in defects:
                pl.when(waits)(lambda: plgpu.barrier_wait(consumed))

    consumed = plgpu.Barrier() if "refill by own barrier" in defects else BOTH
    buffers = [] if scoped else [plgpu.SMEM((ROWS, COLUMNS), x.dtype), plgpu.Barrier()]
    return plgpu.kernel(
        body, out_type=out_type((2, ROWS, COLUMNS), x.dtype), scratch_types=[consumed, *buffers], **PAIR
    )(x)


def swap_halves(x, *, defects=NO_DEFECTS):
    """Exchanges the halves of x[2 * rows, columns]: each CTA reads its peer's half from shared memory."""
    rows = x.shape[0] // 2

    def body(x_gmem, out_gmem, smem, loaded, met):
        rank = lax.axis_index("rank")
        plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(rank * rows, rows)], smem, loaded)
        plgpu.barrier_wait(loaded)
        if "no wait before the read" not in defects:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)
        out_gmem[pl.ds(rank * rows, rows)] = plgpu.cluster_ref(smem, {"rank": 1 - rank})[...]
        if "no wait after the read" not in defects:
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

    scratch = [plgpu.SMEM((rows, x.shape[1]), x.dtype), plgpu.Barrier(), BOTH]
    return plgpu.kernel(body, out_type=out_type(x.shape, x.dtype), scratch_types=scratch, **PAIR)(x)


def sums(x, *, defects=NO_DEFECTS):
    """x[2, 2, 2, 64, 64] -> x.sum(axis=1): CTA r sends part p of x[round, r] to CTA p, which adds the parts.

    Each CTA receives all parts in one buffer, its own included. Both rounds use the same buffer.
    """

    def body(x_gmem, out_gmem, parts_smem, received, consumed):
        rank = lax.axis_index("rank")
        for i in range(2):
            if i > 0 and "no wait for the reader" not in defects:
                plgpu.barrier_wait(consumed)
            for ahead in range(1 if "one part is not sent" in defects else 2):
                peer = lax.rem(rank + ahead, 2)
                part = plgpu.load(x_gmem.at[i, rank, peer], layout=plgpu.Layout.WGMMA, optimized=False)
                plgpu.async_store_smem(part, parts_smem.at[rank], received, cluster_idx=peer, cluster_dim="rank")
            unheard = i > 0 and "the last round is not awaited" in defects
            waits = jnp.bool_(not unheard) | (rank != 0)
            if "no wait before the read" not in defects:
                pl.when(waits)(lambda: plgpu.barrier_wait(received))
            if not unheard:
                out_gmem[i, rank] = parts_smem[0] + parts_smem[1]
            if i == 0:
                plgpu.barrier_arrive(consumed)

    arrivals = 2 + ("an arrival too many is expected" in defects)
    scratch = [plgpu.SMEM((2, 64, 64), jnp.float32), plgpu.Barrier(num_arrivals=arrivals), BOTH]
    return plgpu.kernel(
        body, out_type=out_type((2, 2, 64, 64)), scratch_types=scratch, compiler_params=WARPGROUP, **PAIR
    )(x)  # fmt: skip
