"""Tests `async_store_smem`: stores from registers to shared memory of a CTA of the cluster, and broken protocols."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests.emulation.cases import normal, out_type
from tests.emulation.kernels import NO_DEFECTS

COMPLETIONS = ("late", "random", "eager")
TILE = (64, 64)
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def run_cluster(body, *args, size=2, settings=None, **kwargs):
    kwargs = dict(cluster=(size,), cluster_names=("rank",), compiler_params=WARPGROUP) | kwargs
    with emulate(**(settings or {})) as run:
        results = jax.tree.map(np.asarray, jax.jit(lambda *xs: plgpu.kernel(body, **kwargs)(*xs))(*args))
    return results, run


def send(value, ref, barrier, to, **keywords):
    plgpu.async_store_smem(value, ref, barrier, cluster_idx=to, cluster_dim="rank", **keywords)


# ---- the sum of all CTAs' parts, in rounds ---------------------------------------------------------------------------


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
                send(part, parts_smem.at[rank], received, peer)

            if "no wait before the read" not in defects:
                if "the last round is not awaited" in defects:

                    @pl.when((i + 1 < rounds) | (rank != 0))
                    def _wait_for_parts():
                        plgpu.barrier_wait(received)
                else:
                    plgpu.barrier_wait(received)

            @pl.when((i + 1 < rounds) | jnp.bool_("the last round is not awaited" not in defects))
            def _add():
                total = functools.reduce(jnp.add, [parts_smem[sender] for sender in range(size)])
                out_gmem[i, rank] = total

            @pl.when(i + 1 < rounds)
            def _arrive():
                plgpu.barrier_arrive(consumed)

    arrivals = size + ("an arrival too many is expected" in defects)
    return lambda x: plgpu.kernel(
        body,
        out_type=out_type((rounds, size, *TILE)),
        scratch_types=[
            plgpu.SMEM((size, *TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=arrivals),
            plgpu.ClusterBarrier(collective_axes=("rank",)),
        ],
        cluster=(size,),
        cluster_names=("rank",),
        compiler_params=WARPGROUP,
    )(x)


@functools.cache
def case(size, rounds, defects=NO_DEFECTS):
    kernel = jax.jit(sums(size, rounds, defects))
    x = np.random.default_rng(0).integers(-9, 9, (rounds, size, size, *TILE)).astype(np.float32)
    return lambda: np.testing.assert_array_equal(np.asarray(kernel(x)), x.sum(axis=1))


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("size", "rounds"), [(1, 2), (2, 1), (2, 3), (4, 1), (4, 3)])
def test_all_parts_arrive_under_every_schedule_tried(size, rounds, completion):
    for scheduler, seeds in (("pct", 8), ("random", 3), ("round_robin", 1)):
        for seed in range(seeds):
            with emulate(completion=completion, scheduler=scheduler, seed=seed, laps=1 + seed % 2) as run:
                case(size, rounds)()
            assert run.counts["copies"] == rounds * size * size * (1 + seed % 2)
            assert not run.warnings


DEFECTS = [
    ("no wait before the read", RaceError, ("async store", "is not ordered with the earlier")),
    ("no wait for the reader", RaceError, ("async store", "is not ordered with the earlier")),
    ("one part is not sent", DeadlockError, ("barrier received", "arrivals and 0 bytes outstanding")),
    ("an arrival too many is expected", DeadlockError, ("barrier received, got {0} of {1} arrivals",)),
    ("the last round is not awaited", ProtocolError, ("left the cluster too early", "async store")),
]


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("defect", "error", "words"), DEFECTS)
def test_defects_are_reported_under_every_seed(defect, error, words, size, completion):
    for seed in range(4):
        with pytest.raises(EmulationError), emulate(completion=completion, seed=seed) as run:
            case(size, 2, frozenset({defect}))()
        words = [each.format(size, size + 1) for each in words]
        matching = [e for e in run.errors if type(e) is error and all(each in str(e) for each in words)]
        assert matching, [str(e) for e in run.errors]
        assert "test_emulator_cluster_stores.py" in str(matching[0])


def test_a_deadlock_names_the_barrier_to_which_nobody_sends():
    def body(o, smem, barrier):
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    with pytest.raises(DeadlockError, match=r"waits for phase 0 of barrier barrier, got 0 of 1 arrivals"):
        run_cluster(body, out_type=out_type(TILE), scratch_types=[plgpu.SMEM(TILE, jnp.float32), plgpu.Barrier()])


# ---- one store -------------------------------------------------------------------------------------------------------

ONE_TILE = [plgpu.SMEM(TILE, jnp.float32), plgpu.Barrier()]


def to_the_other(body, *args, scratch=(), out=(2, *TILE), **kwargs):
    return run_cluster(body, *args, out_type=out_type(out), scratch_types=[*ONE_TILE, *scratch], **kwargs)[0]


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("fenced", [True, False])
def test_what_has_landed_is_stored_by_tma_after_a_proxy_fence(fenced, completion):
    def body(x, o, smem, barrier):
        rank = lax.axis_index("rank")
        send(x[rank], smem, barrier, 1 - rank)
        plgpu.barrier_wait(barrier)
        if fenced:
            plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, o.at[rank])
        plgpu.wait_smem_to_gmem(0)

    x = normal(2, *TILE)
    if fenced:
        np.testing.assert_array_equal(to_the_other(body, x, settings={"completion": completion}), x[::-1])
    else:
        with pytest.raises(RaceError, match="missing proxy fence"):
            to_the_other(body, x, settings={"completion": completion})


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_a_store_lands_some_time_after_the_call(completion):
    def body(o, smem, barrier):
        send(jnp.ones(TILE), smem, barrier, lax.axis_index("rank"))
        o[lax.axis_index("rank")] = smem[...]
        plgpu.barrier_wait(barrier)

    landed = [
        not np.isnan(to_the_other(body, settings=dict(completion=completion, detect_races=False, seed=seed))).any()
        for seed in range(20)
    ]
    assert set(landed) == {"late": {False}, "random": {False, True}, "eager": {True}}[completion]


def test_a_store_tells_what_its_sender_has_done_before():
    def body(x, o, smem, barrier):
        @pl.when(lax.axis_index("rank") == 0)
        def _send():
            o[0] = x[0] * 2
            send(x[1], smem, barrier, 1)

        @pl.when(lax.axis_index("rank") == 1)
        def _receive():
            plgpu.barrier_wait(barrier)
            o[1] = o[0] + smem[...]

    x = normal(2, *TILE)
    np.testing.assert_array_equal(to_the_other(body, x), [2 * x[0], 2 * x[0] + x[1]])


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("first", [True, False])
def test_a_store_races_with_a_tma_load_at_the_destination(first, completion):
    def body(x, o, smem, barrier, loaded):
        @pl.when(lax.axis_index("rank") == 0)
        def _send():
            send(x[1], smem, barrier, 1)

        @pl.when(lax.axis_index("rank") == 1)
        def _load():
            if first:
                plgpu.copy_gmem_to_smem(x.at[0], smem, loaded)
            plgpu.barrier_wait(barrier)
            plgpu.commit_smem()
            if not first:
                plgpu.copy_gmem_to_smem(x.at[0], smem, loaded)
            plgpu.barrier_wait(loaded)
            o[...] = smem[...]

    x = normal(2, *TILE)
    keywords = dict(scratch=[plgpu.Barrier()], out=TILE, settings={"completion": completion})
    if first:
        with pytest.raises(RaceError, match="TMA load, write"):
            to_the_other(body, x, **keywords)
    else:
        np.testing.assert_array_equal(to_the_other(body, x, **keywords), x[0])


@pytest.mark.parametrize("detect_races", [True, False])
def test_a_store_to_a_cta_that_has_ended(detect_races):
    def body(o, smem, barrier):
        @pl.when(lax.axis_index("rank") == 0)
        def _send():
            for i in range(20):
                o[0, 0, i] = jnp.float32(i)
            send(jnp.ones(TILE), smem, barrier, 1)

    settings = {"scheduler": "round_robin", "detect_races": detect_races}
    with pytest.raises(ProtocolError, match="left the cluster too early"):
        to_the_other(body, settings=settings)


def test_a_store_to_oneself_must_be_awaited_before_the_end():
    def body(o, smem, barrier, *, wait):
        send(jnp.ones(TILE), smem, barrier, lax.axis_index("rank"))
        if wait:
            plgpu.barrier_wait(barrier)
            o[lax.axis_index("rank")] = smem[...]

    assert (to_the_other(functools.partial(body, wait=True)) == 1).all()
    with pytest.raises(ProtocolError, match="shared memory freed too early"):
        to_the_other(functools.partial(body, wait=False))


def test_an_arrival_too_many():
    def body(o, smem, barrier):
        for half in range(2):
            send(jnp.ones((32, 64)), smem.at[pl.ds(half * 32, 32)], barrier, 1 - lax.axis_index("rank"))
        plgpu.barrier_wait(barrier)
        o[lax.axis_index("rank")] = smem[...]

    with pytest.raises(ProtocolError, match="2 arrivals in phase 0, expected 1"):
        to_the_other(body)


def test_a_store_along_one_of_two_axes_to_a_part_of_the_buffer():
    def body(x, o, smem, barrier):
        r, c = lax.axis_index("r"), lax.axis_index("c")
        for to in range(2):
            plgpu.async_store_smem(
                x[r, c], smem.at[r, pl.ds(0, 64)], barrier.at[1], cluster_idx=to, cluster_dim="r", optimized=False
            )
        plgpu.barrier_wait(barrier.at[1])
        o[r, c] = smem[:, :64]

    x = normal(2, 3, *TILE)
    y, _ = run_cluster(
        body, x, out_type=out_type((2, 3, 2, *TILE)), cluster=(2, 3), cluster_names=("r", "c"),
        scratch_types=[plgpu.SMEM((2, 128, 64), jnp.float32), plgpu.Barrier(num_arrivals=2, num_barriers=3)],
    )  # fmt: skip
    np.testing.assert_array_equal(y, np.broadcast_to(x.transpose(1, 0, 2, 3), (2, 3, 2, *TILE)))


def test_each_warpgroup_arrives_once():
    def body(o, smem, barrier):
        rank, wg = lax.axis_index("rank"), lax.axis_index("wg")
        send(jnp.full(TILE, wg + 1, jnp.float32), smem.at[wg], barrier, 1 - rank)
        plgpu.barrier_wait(barrier)
        o[rank, wg] = smem[0] + smem[1]

    y, run = run_cluster(
        body, out_type=out_type((2, 2, *TILE)), num_threads=2, thread_name="wg",
        scratch_types=[plgpu.SMEM((2, *TILE), jnp.float32), plgpu.Barrier(num_arrivals=2)], settings={"record": True},
    )  # fmt: skip
    assert (y == 3).all()
    copies = [event for event in run.events if event.kind == "copy"]
    assert len(copies) == 4 and all(e.source == "registers" and "smem" in e.target for e in copies)


# ---- atomic ----------------------------------------------------------------------------------------------------------

ATOMICS = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
           "xor": np.bitwise_xor}  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32])
@pytest.mark.parametrize("atomic", ATOMICS)
def test_atomic_stores_of_all_ctas_meet_in_one_place(atomic, dtype):
    def body(x, o, smem, barrier, ready):
        rank = lax.axis_index("rank")
        smem[...] = x[4]
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        send(x[rank], smem, barrier, 2, atomic=atomic)

        @pl.when(rank == 2)
        def _receive():
            plgpu.barrier_wait(barrier)
            o[...] = smem[...]

    x = np.random.default_rng(1).integers(0, 2**32, (5, *TILE), np.uint32).astype(dtype)
    for completion in COMPLETIONS:
        y, _ = run_cluster(
            body, x, size=4, out_type=out_type(TILE, dtype), settings={"completion": completion},
            scratch_types=[
                plgpu.SMEM(TILE, dtype), plgpu.Barrier(num_arrivals=4), plgpu.ClusterBarrier(collective_axes=("rank",)),
            ],
        )  # fmt: skip
        np.testing.assert_array_equal(y, ATOMICS[atomic].reduce(x, dtype=x.dtype))


def test_an_atomic_store_races_with_a_plain_one():
    def body(o, smem, barrier):
        rank = lax.axis_index("rank")
        one = jnp.ones(TILE, jnp.int32)
        lax.cond(
            rank == 0,
            lambda: send(one, smem, barrier, 0, atomic="add"),
            lambda: send(one, smem, barrier, 0),
        )

        @pl.when(rank == 0)
        def _receive():
            plgpu.barrier_wait(barrier)
            o[...] = smem[...]

    scratch = [plgpu.SMEM(TILE, jnp.int32), plgpu.Barrier(num_arrivals=2)]
    with pytest.raises(RaceError, match="async store, atomic add"):
        run_cluster(body, out_type=out_type(TILE, jnp.int32), scratch_types=scratch)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [2, -1])
def test_a_destination_outside_the_cluster(to):
    def body(o, smem, barrier):
        send(jnp.ones(TILE), smem, barrier, to + 0 * lax.axis_index("rank"))

    with pytest.raises(ProtocolError, match=f"'rank' = {to} is no place in a cluster"):
        to_the_other(body)


def test_a_kernel_without_that_axis_or_without_clusters():
    def body(o, smem, barrier):
        send(jnp.ones(TILE), smem, barrier, 0)

    with pytest.raises(ProtocolError, match=r"'rank' is no axis of the cluster: it has \['r'\]"):
        to_the_other(body, cluster_names=("r",))
    with pytest.raises(ProtocolError, match="'rank' = 0 in a kernel without clusters"):
        to_the_other(body, cluster=(), cluster_names=())


def refused(match, shape=TILE, *, dtype=jnp.float32, barrier=None, into=lambda ref: ref, **keywords):
    def body(o, smem, barrier):
        send(jnp.ones(shape, dtype), into(smem), barrier, 0, **keywords)

    scratch = [plgpu.SMEM(shape, dtype), barrier or plgpu.Barrier()]
    with pytest.raises(NotImplementedError, match=match):
        run_cluster(body, out_type=out_type((1,)), scratch_types=scratch)


def test_what_mosaic_does_not_compile_is_refused():
    refused("with a ClusterBarrier", barrier=plgpu.ClusterBarrier(collective_axes=("rank",)))
    refused("to a cluster_ref", into=lambda ref: plgpu.cluster_ref(ref, {"rank": 1}))
    refused("a multiple of 128 bytes", (3, 8))
    for dtype in (jnp.float32, jnp.float16, jnp.int16):
        refused("integers only", dtype=dtype, atomic="add")


def test_a_warp_alone_cannot_store():
    def body(o, smem, barrier):
        @plgpu.warp_map
        def _warps(_):
            send(jnp.ones(TILE), smem, barrier, 0)

    with pytest.raises(NotImplementedError, match="in one warp"):
        to_the_other(body)
