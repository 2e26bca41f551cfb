"""`overlap.autotune` and `python -m overlap tune`, emulated."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import choose, tables
from overlap.choice.problem import Problem
from overlap.cli import _parser, main
from overlap.emulation.foundations import interrupt
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning import progress
from overlap.tuning.stop import stopped_by_ctrl_c
from tests.explained import answer
from tests.tuning_cases import no_tables

__all__ = ["no_tables"]
pytestmark = [pytest.mark.usefixtures("no_tables"), pytest.mark.one_jax]
autotune = importlib.import_module("overlap.tuning.autotune")


# --- autotune ---------------------------------------------------------------------------------------------------------

SMALL = Problem("matmul", 128, 128, 128, "bfloat16", "bfloat16")


def layer(x, w):
    """Chooses its configuration as `overlap.matmul` does once dispatch asks `choose_config`."""
    (m, k), n = x.shape, w.shape[1]
    config, source = choose.choose_config(
        Problem("matmul", m, n, k, str(x.dtype), str(x.dtype)), Target("cpu", "cpu", 4)
    )
    layer.seen.append((config, source))
    return overlap.matmul(x, w, config=config, implementation="fused")


layer.seen = []


def operands(devices=1):
    return jnp.ones((128 * devices, 128), jnp.bfloat16), jnp.ones((128, 128 * devices), jnp.bfloat16)


def test_calls_are_found_wherever_they_are():
    x, w = operands()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P("x", None), P()), out_specs=P("x", None), check_vma=False)

    def scanned(x, w):
        return jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, length=2)[0]

    inner = jax.jit(layer)
    inner(x, w)  # Traced before; `autotune` must see it again.
    for fn, args in (
        (layer, (x, w)), (inner, (x, w)), (jax.jit(lambda x, w: inner(x, w) + 1), (x, w)), (scanned, (x, w)),
        (jax.jit(mapped), (operands(2)[0], w)),
        (jax.grad(lambda x, w: layer(x, w).astype(jnp.float32).sum()), (x, w)),
    ):  # fmt: skip
        assert SMALL in autotune.problems_of(fn, *args)
    assert autotune.problems_of(lambda x, w: layer(x, w) + layer(2 * x, w), x, w) == [SMALL]


def test_the_products_of_a_gradient_are_found_where_xla_would_run_by_default():
    """After tuning the fused kernel may run, and then its backward products do, too."""
    x, w = jnp.ones((128, 192), jnp.bfloat16), jnp.ones((192, 256), jnp.bfloat16)
    assert answer(overlap.matmul, x, w).implementation == "xla"
    loss = lambda x, w: overlap.matmul(x, w).astype(jnp.float32).sum()  # noqa: E731
    found = autotune.problems_of(jax.grad(loss, (0, 1)), x, w)
    assert {(p.m, p.n, p.k, p.layout) for p in found} == {
        (128, 256, 192, "nn"), (128, 192, 256, "nt"), (192, 256, 128, "tn")
    }  # fmt: skip
    assert answer(overlap.matmul, x, w).implementation == "xla"


def test_collecting_neither_changes_explanations_nor_warns_nor_fails_where_calls_run(caplog):
    caplog.set_level(logging.INFO, "overlap")
    x, w = operands()
    seen = []

    def asks(x, w):
        seen.append(answer(overlap.matmul, x, w).implementation)
        return overlap.matmul(x, w)

    def compiles(x, w):
        jax.jit(overlap.matmul).lower(X, X).compile()
        return overlap.matmul(x, w)

    X = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert autotune.problems_of(asks, x, w) == [SMALL] and seen == ["xla"]
    assert SMALL in autotune.problems_of(compiles, x, w)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    pairs = jax.shard_map(
        jax.vmap(lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x")),
        mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False,
    )  # fmt: skip
    autotune.problems_of(pairs, *(jnp.stack([a, a]) for a in (x, w)))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_autotune_writes_its_results_and_its_context_uses_them(tmp_path):
    x, w = operands()
    path = tmp_path / "table.json"
    jitted = jax.jit(layer)
    before = jitted(x, w)
    seen = []
    result = autotune.autotune(layer, x, w, max_configs=2, path=path, progress=lambda text, part: seen.append(part))
    assert [e.problem for e in tables.read(path)] == [SMALL]
    assert list(result.configs) == [SMALL]
    assert str(result).startswith("matmul 128x128x128 bfloat16: ")
    assert "XLA" in str(result)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    layer.seen.clear()
    with result:
        np.testing.assert_array_equal(np.asarray(jitted(x, w)), np.asarray(before))
    assert layer.seen == [(result.configs[SMALL], "tuned")]
    jax.jit(lambda x, w: layer(x, w))(x, w)
    assert layer.seen[-1][1] == "heuristic"  # Outside of `autotune`; tables of emulated times are not consulted.
    assert autotune.autotune(layer, x, w, path=path).outcomes[0].note == "already measured"


def test_autotune_says_what_is_wrong(monkeypatch):
    x, w = operands()
    with pytest.raises(ValueError, match="makes no call of an operation of this library that leaves `config` open"):
        autotune.autotune(jnp.dot, x, w)
    with pytest.raises(ValueError, match="`max_configs` must be None or an integer of at least 1, got 0"):
        autotune.autotune(layer, x, w, max_configs=0)
    for budget_s in (-1, 0, float("nan"), "soon", True):
        with pytest.raises(ValueError, match="`budget_s` must be seconds, more than 0, got "):
            autotune.autotune(layer, x, w, budget_s=budget_s)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match=r"tune in a single process .* OVERLAP_TUNING_DIR"):
        autotune.autotune(layer, x, w)


def test_the_operations_ask_and_are_tuned(tmp_path, caplog):
    caplog.set_level(logging.INFO, "overlap")
    x, w = operands()
    fn = lambda x, w: overlap.matmul(x, w, implementation="fused")  # noqa: E731
    assert answer(overlap.matmul, x, w, implementation="fused").source == "heuristic"
    given = answer(overlap.matmul, x, w, implementation="fused", config=Config(stages=3, tile_n=128))
    assert given.source == "given"
    with overlap.autotune(jax.jit(fn), x, w, max_configs=2, path=tmp_path / "t.json") as result:
        explained = answer(overlap.matmul, x, w, implementation="fused")
        assert (explained.config, explained.source) == (result.configs[SMALL], "tuned")
    said = [record for record in caplog.records if record.message.startswith("autotune: ")]
    assert [record.levelname for record in said] == ["WARNING", "INFO"]
    assert "run emulated" in said[0].message and "up to 2 configurations of 1 problem" in said[0].message
    assert said[1].message == "autotune:   0% 128x128x128: XLA"  # Before anything is compiled.
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    gather = jax.shard_map(
        lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused"),
        mesh=mesh, in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"), check_vma=False,
    )  # fmt: skip
    assert autotune.problems_of(jax.jit(gather), *operands(2)) == [
        dataclasses.replace(SMALL, op="all_gather_lhs_matmul", devices=2)
    ]


def test_progress_without_a_terminal_is_a_line_for_each_problem_and_now_and_then(monkeypatch):
    said, clock = [], itertools.count()  # Each look at the clock returns one second more.
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.shown(said.append, every_s=1000) as report:
        for text, fraction in (("1x1x1: XLA", 0), ("1x1x1: compiling", 0.1), ("2x2x2: XLA", 0.5)):
            report(text, fraction)
    assert said == ["  0% 1x1x1: XLA", " 50% 2x2x2: XLA"]
    said.clear()
    with progress.shown(said.append, every_s=0) as report:
        for fraction in (0.2, 0.3):
            report("1x1x1: checking 128x128x64", fraction)
    assert said == [f" {part} 1x1x1: checking 128x128x64" for part in ("20%", "30%")]


@pytest.mark.parametrize("handler", [signal.default_int_handler, interrupt._handle])
def test_ctrl_c_is_noticed_and_the_second_one_raises(handler, capfd):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), stopped_by_ctrl_c() as stop:
            assert not stop.interrupted
            signal.raise_signal(signal.SIGINT)
            assert stop.interrupted
            assert "Ctrl-C again ends it at once" in capfd.readouterr().err
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


# --- The command ------------------------------------------------------------------------------------------------------


def command(repository, *arguments, **environment):
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository), "COLUMNS": "200"} | environment
    return [sys.executable, "-m", "overlap", "tune", *map(str, arguments)], env


def tune(repository, *arguments, **environment):
    pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
    line, env = command(repository, *arguments, **environment)
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=250, check=False)


def test_the_command_tunes_emulated(repository, tmp_path):
    out = tmp_path / "table.json"
    arguments = ["--op", "all_gather_lhs_matmul", "--devices", 2, "--shapes", "128x128x128:f16,128x128x64"]
    process = tune(repository, *arguments, "--max-configs", 2, "--out", out)
    assert process.returncode == 0, process.stderr
    entries = {e.problem.shape: e for e in tables.read(out)}
    assert {shape: e.problem.dtype for shape, e in entries.items()} == {
        "128x128x128": "float16",
        "128x128x64": "bfloat16",
    }
    assert all(
        e.tried == 2 and e.complete and e.kind == "cpu" and {"xla", "heuristic"} <= set(e.others)
        for e in entries.values()
    )
    for said in ("TFLOP/s", "XLA / this", "128x128x64 bfloat16 on 2 devices", "Emulated", str(out)):
        assert said in process.stdout
    again = tune(repository, *arguments, "--out", out)
    assert again.stdout.count("already measured") == 2


def test_the_command_keeps_what_it_has_when_interrupted(repository, tmp_path):
    pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
    out = tmp_path / "table.json"
    line, env = command(repository, "--shapes", "128x128x64,1024x512x512", "--max-configs", 2, "--out", out)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # The tests may run as a shell's background job; the command would inherit its ignored SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for _ in range(600):  # Until the first problem is in the table.
            if out.exists() or process.poll() is not None:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "128x128x64" in stdout
    assert tables.read(out)[0].problem.shape == "128x128x64"
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_the_command_lists_without_measuring(repository):
    process = tune(repository, "--shapes", "4096x8192x4096", "--layouts", "nn,nt", "--dry-run", "--max-configs", 5)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("NVIDIA H200") == 2
    assert process.stdout.count("128x128 ") >= 2
    assert "predicted" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--shapes", "64x64x64:f8_e4m3fn"], 0, "the tensor cores read 8-bit operands only with k along their rows"),
        (["--op", "matmul_reduce_scatter", "--shapes", "15x64x64", "--devices", "2"], 2,
         "tune: --shapes: m of matmul_reduce_scatter must be a multiple of the 2 devices"),
        (["--op", "matmul_reduce_scatter_n", "--shapes", "64x63x64", "--devices", "2"], 2,
         "n of matmul_reduce_scatter_n must be a multiple of the 2 devices"),
        (["--op", "all_gather_rhs_matmul_n", "--shapes", "64x64x64", "--layouts", "nt"], 2,
         "tune: --layouts must be one of nn, tn for all_gather_rhs_matmul_n, got nt"),
    ],
)  # fmt: skip
def test_why_there_is_nothing_to_tune(arguments, status, said, capsys):
    assert len(jax.devices()) == 8
    assert main(["tune", "--dry-run", *arguments]) == status
    printed = capsys.readouterr()
    assert said in " ".join((printed.out + printed.err).split())


_SHAPES = "argument --shapes: must be MxNxK or MxNxK:DTYPE, several with commas, each size from 1 to 2147483647, got "
_DTYPES = "a dtype must be one of f16, bf16, f32, f8_e4m3fn, f8_e5m2, got "


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            ("--shapes", value, f"{_SHAPES}'{value.split(',')[-1]}'")
            for value in ("12x13", "0x1x1", "-1x1x1", "1x1x1.5", "1x1x1,", "1x1x2147483648", "1x1x\u0967")
        ),
        ("--shapes", "1x1x1:int8", f"argument --shapes: {_DTYPES}'int8'"),
        ("--dtype", "zz", f"argument --dtype: {_DTYPES}'zz'"),
        ("--layouts", "nn,mn", "argument --layouts: must name some of nn, nt, tn, tt, got 'mn'"),
        ("--budget-s", "0", "argument --budget-s: must be a finite number of seconds above 0, got 0"),
        ("--op", "conv", "argument --op: invalid choice: 'conv'"),
        ("--devices", "9", "tune: --devices must be at most 8 where they are emulated, got 9"),
    ],
)
def test_the_command_says_what_is_wrong(name, value, said, capsys):
    pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")

    try:
        status = main(["tune", "--shapes", "1x1x1", f"{name}={value}"])
    except SystemExit as refused:  # Refused by the parser.
        status = refused.code
    assert status == 2
    captured = capsys.readouterr()
    assert said in " ".join(captured.err.split())
    assert not captured.out and len(captured.err) < 1000


def test_a_problem_named_twice_is_one():
    from overlap.cli import tune as command_tune

    parsed = _parser().parse_args(["tune", "--shapes", "1x2x3,1x2x3:f16, 1x2x3:bf16", "--layouts", "nn,nn"])
    assert [str(problem) for problem in command_tune._problems(parsed, 1)] == [
        "matmul 1x2x3 bfloat16",
        "matmul 1x2x3 float16",
    ]
