"""Small kernels that run on clusters of CTAs. Each takes `defects`, names of rules to break (see `kernels`)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.emulation.kernels import NO_DEFECTS

CLUSTER = 2


def shared_tiles(steps: int, rows: int, columns: int, clusters: int = 2, defects=NO_DEFECTS, slots: int = 2):
    """x[steps * rows, columns] -> [clusters, CLUSTER, rows, columns]: CTA `rank` sums all tiles, times rank + 1.

    Each tile is loaded once per cluster: a CTA's memory thread multicasts its share of it to both.
    """

    def body(x_gmem, out_gmem, tiles_smem, out_smem, full, consumed):
        cluster, rank, wg = lax.axis_index("cluster"), lax.axis_index("rank"), lax.axis_index("wg")

        def load():
            @pl.loop(0, steps)
            def _step(step):
                slot = lax.rem(step, slots)

                @pl.when(step >= slots)
                def _wait():
                    plgpu.barrier_wait(consumed.at[slot])

                @pl.when((rank == 0) | jnp.bool_("one CTA does not load" not in defects))
                def _copy():
                    tile = x_gmem.at[pl.ds(step * rows, rows)]
                    plgpu.copy_gmem_to_smem(tile, tiles_smem.at[slot], full.at[slot], collective_axes="rank")

        def add():
            def step_sum(step, total):
                slot = lax.rem(step, slots)
                plgpu.barrier_wait(full.at[slot])
                if "arrival before the read" in defects:
                    plgpu.barrier_arrive(consumed.at[slot])
                    return total + tiles_smem[slot]
                total += tiles_smem[slot]

                @pl.when((rank == 0) | (step != 0) | jnp.bool_("missing arrival" not in defects))
                def _arrive():
                    plgpu.barrier_arrive(consumed.at[slot])

                return total

            return lax.fori_loop(0, steps, step_sum, jnp.zeros((rows, columns), jnp.float32))

        @pl.when(wg == 0)
        def _memory():
            load()
            if "missing last wait" not in defects:
                for fill in range(max(steps, slots), steps + slots):
                    plgpu.barrier_wait(consumed.at[fill % slots])

        @pl.when(wg == 1)
        def _compute():
            out_smem[...] = add() * (rank + 1).astype(jnp.float32)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[cluster, rank])
            plgpu.wait_smem_to_gmem(0)

    own = plgpu.Barrier(num_barriers=slots)
    both = plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=slots)

    def run(x):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((clusters, CLUSTER, rows, columns), x.dtype),
            scratch_types=[
                plgpu.SMEM((slots, rows, columns), x.dtype),
                plgpu.SMEM((rows, columns), x.dtype),
                plgpu.Barrier(num_barriers=slots),
                own if "refill by own barrier" in defects else both,
            ],
            grid=(clusters,),
            grid_names=("cluster",),
            cluster=(CLUSTER,),
            cluster_names=("rank",),
            num_threads=2,
            thread_name="wg",
        )(x)

    return run


def swap_halves(rows: int, columns: int, defects=NO_DEFECTS):
    """x[CLUSTER * rows, columns] -> x with its halves exchanged: each CTA reads its peer's half from shared memory."""

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

    return lambda x: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types=[
            plgpu.SMEM((rows, columns), x.dtype),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("rank",)),
        ],
        cluster=(CLUSTER,),
        cluster_names=("rank",),
    )(x)


def scope_in_a_loop(rounds: int, rows: int, columns: int, defects=NO_DEFECTS):
    """x[rounds * rows, columns] -> [CLUSTER, rows, columns]: the sum of the tiles. Each tile has its own scope."""

    def body(x_gmem, out_gmem, done):
        rank = lax.axis_index("rank")
        out_gmem[rank] = jnp.zeros((rows, columns), x_gmem.dtype)

        @pl.loop(0, rounds)
        def _round(i):
            def scope(smem, full):
                plgpu.copy_gmem_to_smem(x_gmem.at[pl.ds(i * rows, rows)], smem, full, collective_axes="rank")
                plgpu.barrier_wait(full)
                out_gmem[rank] = out_gmem[rank] + smem[...]

            pl.run_scoped(scope, plgpu.SMEM((rows, columns), x_gmem.dtype), plgpu.Barrier())
            # The next scope has the same bytes, and the peer's copy may write them.
            if "no wait between scopes" not in defects:
                plgpu.barrier_arrive(done)
                plgpu.barrier_wait(done)

    return lambda x: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((CLUSTER, rows, columns), x.dtype),
        scratch_types=[plgpu.ClusterBarrier(collective_axes=("rank",))],
        cluster=(CLUSTER,),
        cluster_names=("rank",),
    )(x)


TILE = (64, 64)


def sums(size, rounds, defects=NO_DEFECTS):
    """x[rounds, size, size, *TILE] -> x.sum(axis=1): CTA r sends part p of x[round, r] to CTA p, which adds the parts.

    Each CTA receives all parts in one buffer, its own included. Every round uses the same buffer.
    """

    def body(x_gmem, out_gmem, parts_smem, received, consumed):
        rank = lax.axis_index("rank")

        @pl.loop(0, rounds)
        def _round(i):
            if "no wait for the reader" not in defects:

                @pl.when(i > 0)
                def _wait():
                    plgpu.barrier_wait(consumed)

            for ahead in range(size - 1 if "one part is not sent" in defects else size):
                peer = lax.rem(rank + ahead, size)
                part = plgpu.load(x_gmem.at[i, rank, peer], layout=plgpu.Layout.WGMMA, optimized=False)
                plgpu.async_store_smem(part, parts_smem.at[rank], received, cluster_idx=peer, cluster_dim="rank")

            unheard = "the last round is not awaited" in defects

            @pl.when(((i + 1 < rounds) | (rank != 0) | jnp.bool_(not unheard))
                     & jnp.bool_("no wait before the read" not in defects))  # fmt: skip
            def _wait_for_parts():
                plgpu.barrier_wait(received)

            @pl.when((i + 1 < rounds) | jnp.bool_(not unheard))
            def _add():
                total = functools.reduce(jnp.add, [parts_smem[sender] for sender in range(size)])
                out_gmem[i, rank] = total

            @pl.when(i + 1 < rounds)
            def _arrive():
                plgpu.barrier_arrive(consumed)

    arrivals = size + ("an arrival too many is expected" in defects)
    return lambda x: plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rounds, size, *TILE), jnp.float32),
        scratch_types=[
            plgpu.SMEM((size, *TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=arrivals),
            plgpu.ClusterBarrier(collective_axes=("rank",)),
        ],
        cluster=(size,),
        cluster_names=("rank",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(x)
