"""Both ladders of lessons: each rung is exact on integers, has no race under the schedules tried, and refuses nonsense.

Some of the mistakes that the lessons warn of are made here, and the emulator must report them.
"""

from __future__ import annotations

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import environment, methods, report
from benchmarks.harness import Result
from benchmarks.problems import TableProblem
from lessons import blackwell, hopper
from lessons.blackwell import dedicated_epilogue, persistent, tiled_epilogue
from lessons.hopper import cluster_multicast, pipelined, templated_epilogue
from overlap.choice.problem import Problem
from overlap.emulation import ProtocolError, RaceError, emulate
from tests.ops.product_cases import in_f32, integers, normal

LADDERS = {"hopper": hopper.RUNGS, "blackwell": blackwell.RUNGS}
RUNGS = {(which, rung.name): rung for which, rungs in LADDERS.items() for rung in rungs}
every_rung = pytest.mark.parametrize(("which", "name"), RUNGS)
F16, BF16 = jnp.float16, jnp.bfloat16


@functools.cache
def operands(m, n, k, dtype=F16):
    """Draws integer operands. Returns them and their product, which is exact in f32 and then rounded once."""
    lhs, rhs = integers(0, m, k, dtype=dtype), integers(1, k, n, dtype=dtype)
    return lhs, rhs, (in_f32(lhs) @ in_f32(rhs)).astype(dtype)


def assert_exact(which, name, shape, *schedules, cores=4, dtype=F16, **knobs):
    lhs, rhs, expected = operands(*shape, dtype)
    matmul = jax.jit(functools.partial(RUNGS[which, name].matmul, **knobs))
    for settings in schedules or ({"completion": "random"},):
        with emulate(cores=cores, **settings) as run:
            np.testing.assert_array_equal(np.asarray(matmul(lhs, rhs)), expected)
            run.check()
        assert not run.warnings


def test_the_rungs_are_listed_once_with_a_sentence_each():
    assert [len({rung.name for rung in rungs}) for rungs in LADDERS.values()] == [8, 7] and len(RUNGS) == 15
    assert all(rung.idea.endswith(".") for rung in RUNGS.values())
    assert set(blackwell.GUIDE_UTILIZATION) == {*(rung.name for rung in blackwell.RUNGS), "cublas"}
    assert "NONE OF THESE KERNELS HAS RUN ON A BLACKWELL GPU" in (blackwell.__doc__ or "")


@every_rung
def test_exact_and_without_races(which, name):
    # Hopper's rungs have their default sizes, whose pipelines are longer.
    knobs = {"tile_n": 128, "stages": 2} if which == "blackwell" else {}
    schedules = [
        {"completion": completion, "scheduler": "pct", "seed": seed, "laps": 1 + seed // 2}
        for seed, completion in enumerate(("late", "random", "eager"))
    ]
    assert_exact(which, name, (512, 512, 192 if knobs else 320), *schedules, **knobs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@every_rung
def test_drawn_problems(which, name, seed):
    """Also of one tile and one k step."""
    rng = np.random.default_rng(seed)
    m, n, k, clusters = (int(rng.integers(low, high)) for low, high in ((1, 4), (1, 5), (1, 10), (1, 5)))
    shape = (m * 256, n * 256, k * 64) if seed else (256, 256, 64)
    schedule = {"completion": "random", "seed": seed}
    assert_exact(which, name, shape, schedule, cores=2 * clusters, dtype=(F16, BF16)[seed % 2])


KNOBS = [
    ("hopper", "pipelined", {"stages": 2, "in_flight": 0}),
    ("hopper", "pipelined", {"stages": 3, "in_flight": 1, "delay_release": 2}),
    ("hopper", "persistent", {"epilogue_tile_n": 128, "stages": 2}),
    ("hopper", "grid_tiling", {"tile_n": 128, "minor": "n", "width": 3}),
    ("blackwell", "basic", {"tile_n": 64, "tile_k": 128, "stages": 2}),
    ("blackwell", "tiled_epilogue", {"epilogue_tile_n": 128}),
    ("blackwell", "collective_mma", {"tile_k": 128, "stages": 3}),
    ("blackwell", "grid_tiling", {"tile_n": 128, "minor": "n", "width": 3}),
]


@pytest.mark.parametrize(("which", "name", "knobs"), KNOBS, ids=str)
def test_knobs(which, name, knobs):
    assert_exact(which, name, (512, 512, 256), dtype=BF16, **knobs)


def test_an_activation_sees_the_accumulator_before_it_is_rounded():
    lhs, rhs = normal(0, 256, 128, dtype=F16), normal(1, 128, 256, dtype=F16)
    activation = lambda acc: jnp.maximum(acc, 0) ** 2  # noqa: E731
    product = jnp.asarray(in_f32(lhs) @ in_f32(rhs))
    with emulate(cores=2):
        ours = in_f32(jax.jit(functools.partial(templated_epilogue.matmul, activation=activation))(lhs, rhs))
    exact, rounded = in_f32(activation(product)), in_f32(activation(product.astype(F16)))
    assert np.linalg.norm(ours - exact) < np.linalg.norm(rounded - exact)


@pytest.mark.one_jax
@every_rung
def test_wrong_calls_and_knobs_say_so(which, name):
    matmul, zeros = RUNGS[which, name].matmul, lambda *shape, dtype=F16: jnp.zeros(shape, dtype)
    calls = [
        (zeros(256, 64), zeros(128, 256), {}, r"\[m, k\] and \[k, n\]"),
        (zeros(256, 64, dtype=jnp.float32), zeros(64, 256, dtype=jnp.float32), {}, "float16 or bfloat16"),
        (zeros(256, 60), zeros(60, 256), {}, "k must be a positive multiple of 64"),
        (zeros(200, 64), zeros(64, 256), {}, "m must be a positive multiple of (128|256)"),
        (zeros(256, 64), zeros(64, 200), {}, "n must be a positive multiple of (128|256)"),
    ]
    knobs = [
        ({"tile_n": 512}, "`tile_n` must be a multiple of (64|128), at most 256"),
        ({"tile_n": 32}, "`tile_n` must be a multiple of (64|128)"),
        ({"tile_k": 32}, "`tile_k` must be a multiple of 64"),
        ({"tile_k": 0}, "tiles must be positive"),
        ({"stages": 1}, "`stages` must be at least 2"),
        ({"epilogue_tile_n": 32}, "`epilogue_tile_n` must be a multiple of 64"),
    ]
    if which == "blackwell":
        known = inspect.signature(matmul).parameters.keys()
        calls += [(zeros(512, 128), zeros(128, 512), more, words) for more, words in knobs if more.keys() <= known]
    elif name in ("cluster_multicast", "grid_tiling", "templated_epilogue"):
        calls.append((zeros(128, 64), zeros(64, 256), {}, "multiple of 256"))
    for lhs, rhs, more, words in calls:
        with pytest.raises(ValueError, match=words):
            matmul(lhs, rhs, **more)


# --- Mistakes of the lessons ------------------------------------------------------------------------------------------


def is_race(earlier, later):
    """Expects a race between two accesses; the report names the later access first."""
    return pytest.raises(RaceError, match=f"(?s)race.*{later}.*is not ordered with the earlier.*{earlier}")


def test_a_release_that_is_not_delayed_is_a_race():
    lhs, rhs, _ = operands(128, 128, 512)
    with is_race("wgmma", "TMA load, write"), emulate(completion="random"):
        jax.jit(functools.partial(pipelined.matmul, in_flight=1, delay_release=0))(lhs, rhs).block_until_ready()


def test_without_the_last_wait_a_peer_may_be_gone(monkeypatch):
    monkeypatch.setattr(cluster_multicast, "wait_until_peers_are_done", lambda filled, pipeline: None)
    lhs, rhs, _ = operands(256, 256, 128)
    with pytest.raises(ProtocolError, match="left the cluster too early"), emulate(cores=2):
        jax.jit(lambda a, b: cluster_multicast.matmul(a, b))(lhs, rhs).block_until_ready()


def stored_after_it_is_released(acc_tmem, out_gmem, epilogue_smem, read):
    plgpu.barrier_arrive(read)
    tiled_epilogue.store_epilogue_tiles(acc_tmem, out_gmem, epilogue_smem)


def released_before_loads_are_awaited(acc_tmem, out_gmem, epilogue_smem, read):
    tiled_epilogue.store_epilogue_tiles(acc_tmem, out_gmem, epilogue_smem)
    plgpu.barrier_arrive(read)


LOADED = "tensor memory load of own.acc_tmem"
MISTAKES = {  # The rung; the module and the name that are patched, and how; the two accesses of the race.
    "an accumulator read before its products": (
        "warp_specialized", plgpu, "tcgen05_commit_arrive", lambda done, **_: plgpu.barrier_arrive(done),
        "tcgen05 mma, accumulator", LOADED,
    ),
    "an accumulator overwritten before it is read": (
        "persistent", persistent, "store_and_tell", stored_after_it_is_released, LOADED, "tcgen05 mma, accumulator",
    ),
    "loads that nobody waited for": (
        "dedicated_epilogue", dedicated_epilogue, "store_and_tell", released_before_loads_are_awaited, LOADED,
        "tcgen05 mma, accumulator",
    ),
}  # fmt: skip


def run_broken(name, completion="late", seed=0):
    """Runs a lesson for Blackwell in which a test has replaced a part."""
    lhs, rhs, _ = operands(512, 512, 512)
    with emulate(cores=2, completion=completion, seed=seed):
        jax.jit(functools.partial(RUNGS["blackwell", name].matmul, tile_n=128, stages=2))(lhs, rhs).block_until_ready()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_races(mistake, monkeypatch):
    name, module, part, replacement, earlier, later = MISTAKES[mistake]
    monkeypatch.setattr(module, part, replacement)
    with is_race(earlier, later):
        run_broken(name)


def test_one_read_barrier_for_both_halves_runs_ahead(monkeypatch):
    wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive

    def first(barrier):
        return barrier.ref.at[0] if "Cluster" in type(barrier.dtype).__name__ else barrier  # `read` is the only mark.

    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: wait(first(barrier)))
    monkeypatch.setattr(plgpu, "barrier_arrive", lambda barrier: arrive(first(barrier)))
    with pytest.raises(ProtocolError, match=r"cluster barrier own.read.*missed phase"):
        for seed in range(6):
            run_broken("dedicated_epilogue", "eager", seed)


# --- Benchmarked ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", LADDERS)
def test_the_table_has_a_row_for_every_rung(which, monkeypatch):
    monkeypatch.setattr("overlap.emulation.enable", lambda: None)  # It would last beyond this test.
    problem = Problem("matmul", 256, 256, 128, "float16", "float16")
    made = methods.make(problem, ["ladder", "fused", "xla"], [], which)
    assert [method.name for method in made] == [*(rung.name for rung in LADDERS[which]), "fused", "xla"]


@pytest.mark.one_jax
def test_percent_of_peak():
    peak = environment.peak_tflops("NVIDIA H200")
    problem = TableProblem("ladder", 1, 4096, 8192, 4096, "f16")
    half = problem.flops_per_device / (0.5 * 989.4e12) * 1e6
    (row,) = report.Table(problem, [Result("xla", loop_us=[half], wall_us=[half])], peak_tflops=peak).rows()
    assert row["percent_of_peak"] == pytest.approx(50)
    assert environment.peak_tflops("cpu") is None
