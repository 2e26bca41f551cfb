"""The ladder: every rung computes the product, has no race under the schedules tried, and assembles without spills."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import current, environment, report
from benchmarks.harness import Result
from benchmarks.problems import TableProblem
from overlap.emulation import ProtocolError, RaceError, emulate
from overlap.kernels.ladder import RUNGS, cluster_multicast, pipelined, templated_epilogue
from tests import assembly, oracle
from tests.assembly import Case
from tests.product_cases import normal

BY_NAME = {rung.name: rung for rung in RUNGS}
every_rung = pytest.mark.parametrize("name", BY_NAME)


@functools.cache
def operands(m: int, n: int, k: int, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draws normally distributed operands. Returns them and their product in fp32."""
    lhs, rhs = normal(0, m, k, dtype=dtype), normal(1, k, n, dtype=dtype)
    return lhs, rhs, lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)


def test_the_rungs_are_listed_once_with_a_sentence_each():
    assert len(BY_NAME) == len(RUNGS) == 8
    assert all(rung.idea.endswith(".") for rung in RUNGS)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("cores", "shape"), [(1, (256, 256, 64)), (2, (256, 512, 320)), (4, (512, 512, 128)), (6, (512, 768, 448))]
)
@every_rung
def test_error_within_twice_that_of_xla(name, cores, shape, dtype):
    lhs, rhs, expected = operands(*shape, dtype)
    with emulate(cores=cores):
        ours = oracle.distance(jax.jit(BY_NAME[name].matmul)(lhs, rhs), expected)
        jax.block_until_ready(ours)
    oracle.assert_close((ours, oracle.distance(oracle.rounded(lhs @ rhs), expected)))


@pytest.mark.parametrize("completion", ["late", "random", "eager"])
@every_rung
def test_no_race_under_any_schedule_tried(name, completion):
    lhs, rhs, expected = operands(512, 512, 384, jnp.float16)
    matmul = jax.jit(BY_NAME[name].matmul)
    for seed in range(6):
        with emulate(cores=4, completion=completion, scheduler="pct", seed=seed) as run:
            out = np.asarray(matmul(lhs, rhs), np.float32)
        np.testing.assert_allclose(out, expected, rtol=2e-3, atol=5e-2)
        assert not run.warnings


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("basic", {"tile_m": 64, "tile_n": 64}),
        ("pipelined", {"stages": 2, "in_flight": 0}),
        ("pipelined", {"stages": 3, "in_flight": 1, "delay_release": 2}),
        ("warp_specialized", {"tile_n": 128, "stages": 2}),
        ("tiled_epilogue", {"tile_n": 128, "stages": 6}),
        ("persistent", {"epilogue_tile_n": 128, "stages": 2}),
        ("cluster_multicast", {"tile_n": 128, "stages": 5}),
        ("grid_tiling", {"tile_n": 128, "minor": "n", "width": 3}),
        ("templated_epilogue", {"tile_n": 128}),
    ],
    ids=str,
)
def test_knobs(name, knobs):
    lhs, rhs, expected = operands(512, 512, 256, jnp.bfloat16)
    with emulate(cores=4, completion="random"):
        out = np.asarray(jax.jit(lambda a, b: BY_NAME[name].matmul(a, b, **knobs))(lhs, rhs), np.float32)
    np.testing.assert_allclose(out, expected, rtol=1e-2, atol=2e-1)


@pytest.mark.parametrize(
    "activation", [jax.nn.silu, lambda acc: jnp.maximum(acc, 0) ** 2], ids=["silu", "relu squared"]
)
def test_an_activation_sees_the_accumulator_before_it_is_rounded(activation):
    lhs, rhs, exact = operands(256, 256, 128, jnp.float16)
    with emulate(cores=2):
        out = jax.jit(lambda a, b: templated_epilogue.matmul(a, b, activation=activation))(lhs, rhs)
        ours = oracle.distance(out, activation(exact))
        jax.block_until_ready(ours)
    rounded_before = oracle.distance(activation(oracle.rounded(lhs @ rhs)), activation(exact))
    assert ours < rounded_before


def test_a_release_that_is_not_delayed_is_a_race():
    lhs, rhs, _ = operands(128, 128, 512, jnp.float16)
    for completion in ("late", "random", "eager"):
        with (
            pytest.raises(RaceError, match=r"(?s)TMA load, write.*earlier read.*wgmma"),
            emulate(completion=completion),
        ):
            jax.jit(lambda a, b: pipelined.matmul(a, b, in_flight=1, delay_release=0))(lhs, rhs).block_until_ready()


def test_without_the_last_wait_a_peer_may_be_gone(monkeypatch):
    monkeypatch.setattr(cluster_multicast, "wait_until_peers_are_done", lambda filled, pipeline: None)
    lhs, rhs, _ = operands(256, 256, 128, jnp.float16)
    with pytest.raises(ProtocolError, match="left the cluster too early"), emulate(cores=2):
        jax.jit(lambda a, b: cluster_multicast.matmul(a, b))(lhs, rhs).block_until_ready()


@pytest.mark.parametrize(
    ("shapes", "dtype", "words"),
    [
        (((128, 64), (128, 128)), jnp.float16, r"\[m, k\] and \[k, n\]"),
        (((128, 64), (64, 128)), jnp.float32, "float16 or bfloat16"),
        (((128, 60), (60, 256)), jnp.float16, "k must be a positive multiple of 64"),
        (((100, 64), (64, 256)), jnp.float16, "m must be a positive multiple of 128"),
    ],
)
@every_rung
def test_wrong_calls_say_so(name, shapes, dtype, words):
    with pytest.raises(ValueError, match=words):
        BY_NAME[name].matmul(*(jnp.zeros(shape, dtype) for shape in shapes))


def test_a_cluster_needs_pairs_of_tile_rows():
    with pytest.raises(ValueError, match="multiple of 256"):
        cluster_multicast.matmul(jnp.zeros((128, 64), jnp.float16), jnp.zeros((64, 256), jnp.float16))


# --- Benchmarked ------------------------------------------------------------------------------------------------------


def test_a_dry_run_of_the_table_has_a_row_for_every_rung(tmp_path, repository):
    line = [sys.executable, "-m", "benchmarks", "ladder", "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(line, cwd=repository, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (table,) = current.tables(tmp_path)
    rows = table.rows
    assert [row["method"] for row in rows] == [*BY_NAME, "fused", "xla"]
    assert all(row["status"] == "ok" and float(row["roof_over_this"]) > 0 for row in rows)
    assert all(row["percent_of_peak"] == "" for row in rows)  # The CPU has no data-sheet figures.


def test_percent_of_peak():
    peak = environment.peak_tflops("NVIDIA H200")
    problem = TableProblem("ladder", 1, 4096, 8192, 4096, "f16")
    half = problem.flops_per_device / (0.5 * 989.4e12) * 1e6
    (row,) = report.Table(problem, [Result("xla", loop_us=[half], wall_us=[half])], peak_tflops=peak).rows()
    assert row["percent_of_peak"] == pytest.approx(50)
    assert environment.peak_tflops("cpu") is None


# --- Assembled --------------------------------------------------------------------------------------------------------


def ladder_case(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """One rung, as a case for `tests.assembly`."""
    m, n, k = case.shape
    matmul = BY_NAME[case.config["rung"]].matmul
    mapped = jax.shard_map(matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return mapped, (assembly.struct(mesh, (m, k), case.dtype), assembly.struct(mesh, (k, n), case.dtype))


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@every_rung
def test_it_assembles_without_spills(name):
    case = Case("tests.test_ladder:ladder_case", 1, (4096, 8192, 4096), "f16", config={"rung": name})
    (report,) = assembly.assemble_case(case)
    assert report.name == f"ladder_{name}"
    assert report.architecture == "sm_90a"
    assert report.spills == 0
    assert report.stack_frame_bytes == 0
    assert report.remarks == ()
    assert report.registers * math.prod(report.threads) <= 65536
    assert report.shared_memory_bytes is not None
    assert report.shared_memory_bytes <= assembly.TARGETS["h200"].shared_memory_per_block_optin
    if name not in ("basic", "pipelined", "warp_specialized", "tiled_epilogue"):
        assert math.prod(report.grid) == assembly.TARGETS["h200"].core_count
