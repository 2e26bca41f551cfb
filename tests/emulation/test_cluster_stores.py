"""`async_store_smem`, the store from registers to shared memory of a CTA of the cluster: where and when it lands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import emulate
from tests.emulation.cases import COMPLETIONS, normal, out_type

TILE = (64, 64)
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def run_cluster(body, *args, size=2, settings=None, **kwargs):
    kwargs = dict(cluster=(size,), cluster_names=("rank",), compiler_params=WARPGROUP) | kwargs
    with emulate(**(settings or {})) as run:
        results = jax.tree.map(np.asarray, jax.jit(lambda *xs: plgpu.kernel(body, **kwargs)(*xs))(*args))
    return results, run


def send(value, ref, barrier, to, **keywords):
    plgpu.async_store_smem(value, ref, barrier, cluster_idx=to, cluster_dim="rank", **keywords)


# ---- one store -------------------------------------------------------------------------------------------------------

ONE_TILE = [plgpu.SMEM(TILE, jnp.float32), plgpu.Barrier()]


def to_the_other(body, *args, scratch=(), out=(2, *TILE), **kwargs):
    return run_cluster(body, *args, out_type=out_type(out), scratch_types=[*ONE_TILE, *scratch], **kwargs)[0]


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_a_store_lands_some_time_after_the_call(completion):
    def body(o, smem, barrier):
        send(jnp.ones(TILE), smem, barrier, lax.axis_index("rank"))
        o[lax.axis_index("rank")] = smem[...]
        plgpu.barrier_wait(barrier)

    landed = [
        not np.isnan(to_the_other(body, settings=dict(completion=completion, detect_races=False, seed=seed))).any()
        for seed in range(6)
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


@pytest.mark.parametrize(
    ("atomic", "dtype"), [(name, (jnp.int32, jnp.uint32)[i % 2]) for i, name in enumerate(ATOMICS)]
)
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
