"""The Blackwell ladder: every lesson is exact on integers, has no race under the schedules tried, and assembles."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from benchmarks import current
from overlap.emulation import ProtocolError, RaceError, emulate
from overlap.kernels import blackwell_ladder
from overlap.kernels.blackwell_ladder import (
    GUIDE_UTILIZATION,
    RUNGS,
    dedicated_epilogue,
    persistent,
    tiled_epilogue,
    warp_specialized,
)
from overlap.primitives.integers import remainder
from tests import assembly
from tests.assembly import Case
from tests.product_cases import in_f32, integers

BY_NAME = {rung.name: rung for rung in RUNGS}
COLLECTIVE = ("collective_mma", "persistent", "dedicated_epilogue", "grid_tiling")
PERSISTENT = COLLECTIVE[1:]
every_rung = pytest.mark.parametrize("name", BY_NAME)
every_completion = pytest.mark.parametrize("completion", ["late", "random", "eager"])


@functools.cache
def operands(m: int, n: int, k: int, dtype: Any = jnp.float16) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Draws integer operands. Returns them and their product, which is exact in f32 and then rounded once."""
    lhs, rhs = integers(0, m, k, dtype=dtype), integers(1, k, n, dtype=dtype)
    return lhs, rhs, (in_f32(lhs) @ in_f32(rhs)).astype(dtype)


@functools.cache
def jitted(name: str, **knobs: Any) -> Any:
    """Returns one lesson with these knobs, compiled once and shared by the tests."""
    return jax.jit(functools.partial(BY_NAME[name].matmul, **knobs))


def assert_exact(name: str, shape: tuple[int, int, int], dtype: Any = jnp.float16, **knobs: Any) -> None:
    lhs, rhs, expected = operands(*shape, dtype)
    np.testing.assert_array_equal(np.asarray(jitted(name, **knobs)(lhs, rhs)), expected)


def test_the_lessons_are_listed_once_with_a_sentence_and_the_figure_of_the_guide():
    assert len(BY_NAME) == len(RUNGS) == 7
    assert all(rung.idea.endswith(".") for rung in RUNGS)
    assert set(GUIDE_UTILIZATION) == {*BY_NAME, "cublas"}
    assert "NONE OF THESE KERNELS HAS RUN ON A BLACKWELL GPU" in (blackwell_ladder.__doc__ or "")


# --- Emulated ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A problem of a few tiles, drawn at random."""

    m_tiles: int
    n_tiles: int
    k_steps: int
    cores: int
    stages: int
    dtype: Any
    seed: int

    @classmethod
    def of(cls, seed: int) -> Drawn:
        rng = np.random.default_rng(seed)
        m_tiles, n_tiles, k_steps, clusters, stages = (
            int(rng.integers(low, high)) for low, high in ((1, 4), (1, 5), (1, 10), (1, 5), (2, 5))
        )
        dtype = jnp.float16 if rng.integers(2) else jnp.bfloat16
        return cls(m_tiles, n_tiles, k_steps, 2 * clusters, stages, dtype, seed)

    def __str__(self) -> str:
        return f"{self.m_tiles}x{self.n_tiles}x{self.k_steps} tiles, {self.cores} cores, {self.stages} stages"


FEW = 2
drawn_problems = pytest.mark.parametrize(
    "drawn",
    [pytest.param(Drawn.of(seed), marks=[pytest.mark.slow] if seed >= FEW else []) for seed in range(30)],
    ids=str,
)


@drawn_problems
@every_rung
def test_exact_on_integers(name, drawn):
    tile_m, tile_n = (256 if name in COLLECTIVE else 128), 128
    with emulate(cores=drawn.cores, completion="random", seed=drawn.seed):
        assert_exact(
            name, (drawn.m_tiles * tile_m, drawn.n_tiles * tile_n, drawn.k_steps * 64), drawn.dtype,
            tile_n=tile_n, stages=drawn.stages,
        )  # fmt: skip


@every_completion
@every_rung
def test_no_race_under_any_schedule_tried(name, completion):
    for seed in range(3):
        with emulate(cores=4, completion=completion, scheduler="pct", seed=seed) as run:
            assert_exact(name, (512, 512, 192), tile_n=128, stages=2)
        assert not run.warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in COLLECTIVE])
def test_the_interpreter_of_jax_agrees(name):
    # jax's interpreter supports neither products of two CTAs nor inlined PTX, so `converge_warp` is left out.
    if jax.__version_info__ < (0, 12) and name != "basic":
        pytest.skip("the interpreter of jax 0.11 wants a barrier's last phase to have been waited for")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore")):
        lhs, rhs, expected = operands(256, 256, 320)
        np.testing.assert_array_equal(np.asarray(BY_NAME[name].matmul(lhs, rhs, tile_n=128, stages=2)), expected)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("basic", {}),
        ("basic", {"tile_n": 64, "tile_k": 128, "stages": 2}),
        ("warp_specialized", {"tile_n": 64, "stages": 2}),
        ("warp_specialized", {"tile_n": 256, "stages": 3}),
        ("tiled_epilogue", {"tile_n": 128, "stages": 6}),
        ("tiled_epilogue", {"epilogue_tile_n": 128}),
        ("collective_mma", {"tile_k": 128, "stages": 3}),
        ("persistent", {"epilogue_tile_n": 128, "stages": 2}),
        ("dedicated_epilogue", {"tile_n": 128, "stages": 5}),
        ("grid_tiling", {"tile_n": 128, "minor": "n", "width": 3}),
    ],
    ids=str,
)
def test_knobs(name, knobs):
    with emulate(cores=4, completion="random"):
        assert_exact(name, (512, 512, 256), jnp.bfloat16, **knobs)


@pytest.mark.parametrize(
    ("shapes", "dtype", "words"),
    [
        (((256, 64), (128, 256)), jnp.float16, r"\[m, k\] and \[k, n\]"),
        (((256, 64), (64, 256)), jnp.float32, "float16 or bfloat16"),
        (((256, 60), (60, 256)), jnp.float16, "k must be a positive multiple of 64"),
        (((200, 64), (64, 256)), jnp.float16, "m must be a positive multiple of (128|256)"),
        (((256, 64), (64, 200)), jnp.float16, "n must be a positive multiple of (128|256)"),
    ],
)
@every_rung
def test_wrong_calls_say_so(name, shapes, dtype, words):
    with pytest.raises(ValueError, match=words):
        BY_NAME[name].matmul(*(jnp.zeros(shape, dtype) for shape in shapes))


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"tile_n": 512}, "`tile_n` must be a multiple of (64|128), at most 256"),
        ({"tile_n": 32}, "`tile_n` must be a multiple of (64|128)"),
        ({"tile_k": 32}, "`tile_k` must be a multiple of 64"),
        ({"tile_k": 0}, "tiles must be positive"),
        ({"stages": 1}, "`stages` must be at least 2"),
        ({"epilogue_tile_n": 32}, "`epilogue_tile_n` must be a multiple of 64"),
    ],
    ids=str,
)
@every_rung
def test_wrong_knobs_say_so(name, knobs, words):
    if not knobs.keys() <= inspect.signature(BY_NAME[name].matmul).parameters.keys():
        pytest.skip("this lesson has no such knob")
    with pytest.raises(ValueError, match=words):
        BY_NAME[name].matmul(jnp.zeros((512, 128), jnp.float16), jnp.zeros((128, 512), jnp.float16), **knobs)


# --- Injected defects -------------------------------------------------------------------------------------------------


def run_broken(name: str, completion: Any = "late", seed: int = 0) -> None:
    """Runs a lesson in which a test has replaced a part."""
    lhs, rhs, _ = operands(512, 512, 512)
    with emulate(cores=2, completion=completion, seed=seed):
        jax.jit(functools.partial(BY_NAME[name].matmul, tile_n=128, stages=2))(lhs, rhs).block_until_ready()


def is_race(earlier: str, later: str) -> Any:
    """Expects a race between two accesses; the report names the later access first."""
    return pytest.raises(RaceError, match=f"(?s)race.*{later}.*is not ordered with the earlier.*{earlier}")


@every_completion
def test_a_stage_given_back_before_its_product_is_done_is_a_race(monkeypatch, completion):
    def early(acc_tmem, done, pipeline, t, *, first=0, collective_axis=None):
        @pl.loop(0, t.k_steps)
        def _k_step(k):
            stage = remainder(first + k, pipeline.stages)
            plgpu.barrier_wait(pipeline.full.at[stage])
            plgpu.tcgen05_mma(acc_tmem, pipeline.lhs_smem.at[stage], pipeline.rhs_smem.at[stage], accumulate=k > 0)
            plgpu.barrier_arrive(pipeline.consumed.at[stage])

        plgpu.tcgen05_commit_arrive(done)

    monkeypatch.setattr(warp_specialized, "multiply_tiles", early)
    with is_race("tcgen05 mma, (left|right) operand", "TMA load"):
        run_broken("warp_specialized", completion)


@pytest.mark.parametrize("name", PERSISTENT)
def test_an_accumulator_overwritten_before_it_was_read_is_a_race(monkeypatch, name):
    def too_early(acc_tmem, out_gmem, epilogue_smem, read):
        plgpu.barrier_arrive(read)
        tiled_epilogue.store_epilogue_tiles(acc_tmem, out_gmem, epilogue_smem)

    monkeypatch.setattr(persistent, "store_and_tell", too_early)
    monkeypatch.setattr(dedicated_epilogue, "store_and_tell", too_early)
    with is_race("tensor memory load of own.acc_tmem", "tcgen05 mma, accumulator"):
        run_broken(name)


def test_loads_of_tensor_memory_that_nobody_waited_for_are_a_race(monkeypatch):
    def without_wait(acc_tmem, out_gmem, epilogue_smem, read):
        tiled_epilogue.store_epilogue_tiles(acc_tmem, out_gmem, epilogue_smem)
        plgpu.barrier_arrive(read)

    monkeypatch.setattr(dedicated_epilogue, "store_and_tell", without_wait)
    with is_race("tensor memory load of own.acc_tmem", "tcgen05 mma, accumulator"):
        run_broken("dedicated_epilogue")


def test_one_read_barrier_for_both_halves_runs_ahead(monkeypatch):
    wait, arrive = plgpu.barrier_wait, plgpu.barrier_arrive

    def first(barrier: Any) -> Any:
        return barrier.ref.at[0] if "Cluster" in type(barrier.dtype).__name__ else barrier  # `read` is the only mark.

    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: wait(first(barrier)))
    monkeypatch.setattr(plgpu, "barrier_arrive", lambda barrier: arrive(first(barrier)))
    with pytest.raises(ProtocolError, match=r"cluster barrier own.read.*missed phase"):
        for seed in range(6):
            run_broken("dedicated_epilogue", "eager", seed)


def test_an_epilogue_buffer_written_while_it_is_stored_is_a_race(monkeypatch):
    def without_wait(acc_tmem, out_gmem, epilogue_smem):
        epilogue_tile_n = epilogue_smem.shape[-1]
        for i in range(acc_tmem.shape[1] // epilogue_tile_n):
            columns, buffer_smem = slice(i * epilogue_tile_n, (i + 1) * epilogue_tile_n), epilogue_smem.at[0]
            buffer_smem[...] = plgpu.async_load_tmem(acc_tmem.at[:, columns]).astype(out_gmem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer_smem, out_gmem.at[:, columns])

    monkeypatch.setattr(tiled_epilogue, "store_epilogue_tiles", without_wait)
    with is_race("TMA store", "store of own.out_smem"):
        run_broken("tiled_epilogue")


def test_an_accumulator_read_before_the_products_are_done_is_a_race(monkeypatch):
    def without_wait_for_the_products(acc_tmem, done, pipeline, t, *, first=0, collective_axis=None):
        @pl.loop(0, t.k_steps)
        def _k_step(k):
            stage = remainder(first + k, pipeline.stages)
            plgpu.barrier_wait(pipeline.full.at[stage])
            plgpu.tcgen05_mma(
                acc_tmem,
                pipeline.lhs_smem.at[stage],
                pipeline.rhs_smem.at[stage],
                pipeline.consumed.at[stage],
                accumulate=k > 0,
            )

        plgpu.barrier_arrive(done)

    monkeypatch.setattr(warp_specialized, "multiply_tiles", without_wait_for_the_products)
    with is_race("tcgen05 mma, accumulator", "tensor memory load of own.acc_tmem"):
        run_broken("warp_specialized")


# --- Benchmarked ------------------------------------------------------------------------------------------------------


def test_a_dry_run_of_the_table_has_a_row_for_every_lesson(tmp_path, repository):
    line = [
        sys.executable,
        "-m",
        "benchmarks",
        "ladder",
        "--architecture",
        "blackwell",
        "--dry-run",
        "--methods",
        "ladder,xla",
    ]
    done = subprocess.run(
        [*line, "--out", str(tmp_path)], cwd=repository, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (table,) = current.tables(tmp_path)
    rows = table.rows
    assert [row["method"] for row in rows] == [*BY_NAME, "xla"]
    assert all(row["status"] == "ok" and float(row["roof_over_this"]) > 0 for row in rows)


# --- Assembled --------------------------------------------------------------------------------------------------------


def ladder_case(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """One lesson, as a case for `tests.assembly`."""
    m, n, k = case.shape
    matmul = BY_NAME[case.config["rung"]].matmul
    mapped = jax.shard_map(matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return mapped, (assembly.struct(mesh, (m, k), case.dtype), assembly.struct(mesh, (k, n), case.dtype))


needs_tools = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))


@needs_tools
@every_rung
def test_it_assembles_without_spills(name, tmp_path):
    case = Case("tests.test_blackwell_ladder:ladder_case", 1, (4096, 8192, 4096), "f16", "b200", config={"rung": name})
    (report,) = assembly.assemble_case(case, ptx=str(tmp_path / "ptx"))
    target = assembly.TARGETS["b200"]
    assert report.name == f"blackwell_ladder_{name}"
    assert report.architecture == "sm_100a"
    assert report.spills == 0
    assert report.stack_frame_bytes == 0
    assert report.remarks == ()
    assert report.registers * math.prod(report.threads) <= 65536
    assert report.shared_memory_bytes is not None
    assert report.shared_memory_bytes <= target.shared_memory_per_block_optin
    if name in PERSISTENT:
        assert math.prod(report.grid) == target.core_count
    ptx = (tmp_path / "ptx").read_text()
    group = 2 if name in COLLECTIVE else 1
    assert set(re.findall(r"tcgen05\.mma\.cta_group::(\d)", ptx)) == {str(group)}
    # The arrival after a product of two CTAs counts in both CTAs. A copy by one CTA counts at the leader's barrier.
    assert ("multicast::cluster" in ptx) == (group == 2)
    assert ("complete_tx::bytes.cta_group::2" in ptx) == (group == 2)
    assert "wgmma" not in ptx


@needs_tools
@pytest.mark.slow
def test_the_last_lesson_assembles_for_b300():
    case = Case(
        "tests.test_blackwell_ladder:ladder_case", 1, (4096, 8192, 4096), "bf16", "b300", config={"rung": "grid_tiling"}
    )
    (report,) = assembly.assemble_case(case)
    assert report.architecture == "sm_103a"
    assert report.spills == 0
