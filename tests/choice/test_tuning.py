"""`overlap.autotune` finds and measures calls; `python -m overlap tune` refuses what is wrong, and loses no results."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import logging
import re
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from mosaic_emulator.foundations import interrupt
from overlap.choice import choose, tables
from overlap.choice.choose import Session
from overlap.choice.crossover import Cause
from overlap.choice.problem import Problem
from overlap.cli import _parser, main
from overlap.cli import tune as command
from overlap.frame.explain import recorded
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning import progress, step
from overlap.tuning.search import Outcome
from overlap.tuning.stop import stopped_by_ctrl_c
from tests import oracle
from tests.choice import tuning_cases
from tests.choice.tuning_cases import H200, bench, no_tables

pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
__all__ = ["bench", "no_tables"]
pytestmark = [pytest.mark.usefixtures("no_tables"), pytest.mark.one_jax]
# The module itself: the package has an attribute of the same name.
autotune = importlib.import_module("overlap.tuning.autotune")


# --- `overlap.autotune` -----------------------------------------------------------------------------------------------

SMALL = Problem("matmul", 128, 128, 128, "bfloat16", "bfloat16")


def layer(x, w):
    return overlap.matmul(x, w, implementation="fused")


def answer(*args, **kwargs):
    return overlap.explain(overlap.matmul, *args, **kwargs)[0]


def operands(devices=1):
    return jnp.ones((128 * devices, 128), jnp.bfloat16), jnp.ones((128, 128 * devices), jnp.bfloat16)


def test_calls_are_found_wherever_they_are(caplog):
    """Collecting changes no explanation, warns of nothing, and does not fail where calls run."""
    (x, w), seen = operands(), []
    mapped = oracle.on_mesh(oracle.make_mesh(x=2), layer, (P("x", None), P()), P("x", None))

    def scanned(x, w):
        return jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, length=2)[0]

    def asks(x, w):
        seen.append(answer(x, w).implementation)
        return overlap.matmul(x, w)

    def compiles(x, w):
        jax.jit(overlap.matmul).lower(*[jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)] * 2).compile()
        return overlap.matmul(x, w)

    inner = jax.jit(layer)
    jax.eval_shape(inner, x, w)  # Traced before; `autotune` must see it again.
    for fn, args in ((inner, (x, w)), (scanned, (x, w)), (mapped, (operands(2)[0], w)), (compiles, (x, w))):
        assert SMALL in autotune.problems_of(fn, *args)
    assert autotune.problems_of(asks, x, w) == [SMALL] and seen == ["xla"]
    assert autotune.problems_of(lambda x, w: layer(x, w) + layer(2 * x, w), x, w) == [SMALL]
    gather = lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused")  # noqa: E731
    assert autotune.problems_of(oracle.on_mesh(oracle.make_mesh(x=2), gather), *operands(2)) == [
        dataclasses.replace(SMALL, op="all_gather_lhs_matmul", devices=2)
    ]
    # The products of a gradient where XLA would run by default. After tuning the fused kernel may run, and these then.
    x, w = jnp.ones((128, 192), jnp.bfloat16), jnp.ones((192, 256), jnp.bfloat16)
    found = autotune.problems_of(jax.grad(lambda x, w: overlap.matmul(x, w).astype(jnp.float32).sum(), (0, 1)), x, w)
    assert {(p.m, p.n, p.k, p.layout) for p in found} == {
        (128, 256, 192, "nn"), (128, 192, 256, "nt"), (192, 256, 128, "tn")
    }  # fmt: skip
    assert answer(x, w).implementation == "xla"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_autotune_writes_its_results_and_its_context_uses_them(tmp_path, caplog):
    caplog.set_level(logging.INFO, "overlap")
    (x, w), path, parts, jitted = operands(), tmp_path / "table.json", [], jax.jit(layer)
    before = jitted(x, w)
    result = autotune.autotune(layer, x, w, max_configs=2, path=path, progress=lambda text, part: parts.append(part))
    assert [e.problem for e in tables.read(path)] == list(result.configs) == [SMALL]
    assert str(result).startswith("matmul 128x128x128 bfloat16:\n") and "XLA" in str(result)
    assert parts == sorted(parts) and parts[-1] == 1.0
    fused = {"implementation": "fused"}
    assert answer(x, w, **fused).source == "heuristic"  # Tables of emulated times are not consulted.
    assert answer(x, w, config=Config(stages=3, tile_n=128), **fused).source == "given"
    with result:
        np.testing.assert_array_equal(np.asarray(jitted(x, w)), np.asarray(before))
        assert jitted._cache_size() == 2  # Traced again.
        explained = answer(x, w, **fused)
        assert (explained.config, explained.source) == (result.configs[SMALL], "tuned")
    assert answer(x, w, **fused).source == "heuristic"
    assert autotune.autotune(layer, x, w, path=path).outcomes[0].note == "already measured"
    said = [record for record in caplog.records if record.message.startswith("autotune: ")]
    assert said[0].levelname == "WARNING"
    assert "run emulated" in said[0].message and "up to 2 configurations of 1 problem" in said[0].message
    path.unlink()
    with jax.set_mesh(jax.make_mesh((1, 2), ("data", "tensor"))):  # As users of layers have it.
        tuning = autotune.autotune(layer, x, w, path=path, max_configs=1, save=False)
    assert tuning.configs and tuning.path is None and not path.exists()


def test_autotune_says_what_is_wrong(monkeypatch):
    x, w = operands()
    for fn, keywords, said in (
        (jnp.dot, {}, "makes no call of an operation of this library that leaves `config` open"),
        (layer, {"max_configs": 0}, "`max_configs` must be None or an integer of at least 1, got 0"),
        *((layer, {"budget_s": budget_s}, "`budget_s` must be seconds, more than 0, got ")
          for budget_s in (-1, 0, float("nan"), "soon", True)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            autotune.autotune(fn, x, w, **keywords)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match=r"tune in a single process .* OVERLAP_TUNING_DIR"):
        autotune.autotune(layer, x, w)


def test_progress_without_a_terminal_is_a_line_for_each_problem(monkeypatch):
    said, clock = [], itertools.count()  # Each look at the clock returns one second more.
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    for every_s in (1000, 0):
        with progress.shown(said.append, every_s=every_s) as report:
            for text, fraction in (("1x1x1: XLA", 0), ("1x1x1: compiling", 0.1), ("2x2x2: XLA", 0.5)):
                report(text, fraction)
    assert said == ["  0% 1x1x1: XLA", " 50% 2x2x2: XLA", "  0% 1x1x1: XLA", " 10% 1x1x1: compiling", " 50% 2x2x2: XLA"]


# --- The command ------------------------------------------------------------------------------------------------------

SHAPES = ["128x128x64", "128x128x128", "128x128x192"]


def tune(*arguments):
    """Runs the command in this process and returns its status."""
    try:
        return main(["tune", *map(str, arguments)])
    except SystemExit as refused:  # Refused by the parser.
        return refused.code


def tune_all(*arguments):
    return tune("--shapes", ",".join(SHAPES), *arguments)


def test_the_command_tunes_emulated(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "table.json"
    arguments = ["--op", "all_gather_lhs_matmul", "--devices", 2, "--shapes", "128x128x64:f16", "--out", out]
    assert tune(*arguments, "--max-configs", 2) == 0
    (found,) = tables.read(out)
    assert (found.problem.shape, found.problem.dtype, found.problem.devices) == ("128x128x64", "float16", 2)
    assert found.tried == 2 and found.complete and found.kind == "cpu" and {"xla", "heuristic"} <= set(found.others)
    printed = capsys.readouterr().out
    for said in ("TFLOP/s", "XLA ", "128x128x64 float16 on 2 devices", "Emulated", str(out)):
        assert said in printed
    assert tune(*arguments) == 0
    assert capsys.readouterr().out.count("already measured") == 1
    arguments = ["--op", "grouped_matmul", "--groups", 3, "--shapes", "24x128x64", "--max-configs", 1, "--out", out]
    assert tune(*arguments) == 0
    assert "grouped_matmul 3 × 24x128x64 bfloat16" in capsys.readouterr().out
    (problem,) = (entry.problem for entry in tables.read(out) if entry.problem.spec.groups)
    assert (problem.m, problem.batch) == (24, 3)
    # A dry run lists the configurations that would be tried.
    assert tune("--shapes", "4096x8192x4096", "--layouts", "nn,nt", "--dry-run", "--max-configs", 5) == 0
    printed = capsys.readouterr().out
    assert printed.count("NVIDIA H200") == 2 and printed.count("128x128 ") >= 2 and "predicted" in printed


WRONG = [
    *((f"--shapes={value}", f"argument --shapes: must be MxNxK.* from 1 to 2147483647, got '{value.split(',')[-1]}'")
      for value in ("12x13", "0x1x1", "-1x1x1", "1x1x1.5", "1x1x1,", "1x1x2147483648", "1x1x\u0967")),
    ("--shapes=1x1x1:int8", "argument --shapes: a dtype must be one of f16, .*, got 'int8'"),
    ("--dtype=zz", "argument --dtype: a dtype must be one of f16, .*, got 'zz'"),
    ("--layouts=nn,mn", "argument --layouts: must name some of nn, nt, tn, tt, got 'mn'"),
    ("--budget-s=0", "argument --budget-s: must be a finite number of seconds above 0, got 0"),
    ("--op=conv", "argument --op: invalid choice: 'conv'"),
    ("--groups=2", "--groups is for grouped_matmul, got 2 for matmul: leave it out"),
    ("--devices=9", "tune: --devices must be at most 8 where they are emulated, got 9"),
    ("--op=matmul_reduce_scatter --devices=2 --shapes=15x64x64", "m of matmul_reduce_scatter must be a multiple of"),
    ("--op=matmul_reduce_scatter_n --devices=2 --shapes=64x63x64", "n of matmul_reduce_scatter_n must be a mult"),
    ("--op=all_gather_rhs_matmul_n --layouts=nt", "--layouts must be one of nn, tn for all_gather_rhs_matmul_n, got"),
]  # fmt: skip


def test_the_command_says_what_is_wrong(capsys):
    for line, said in WRONG:
        assert tune("--shapes=1x1x1", *line.split(" ")) == 2, line
        captured = capsys.readouterr()
        assert re.search(said, " ".join(captured.err.split())), captured.err
        assert not captured.out and len(captured.err) < 1000
    assert tune("--dry-run", "--shapes", "64x64x64:f8_e4m3fn") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the tensor cores read 8-bit operands only with k along their rows" in said
    # A problem that is named twice is one.
    parsed = _parser().parse_args(["tune", "--shapes", "1x2x3,1x2x3:f16, 1x2x3:bf16", "--layouts", "nn,nn"])
    assert list(map(str, command._problems(parsed, 1))) == ["matmul 1x2x3 bfloat16", "matmul 1x2x3 float16"]


def test_what_cannot_be_written_is_refused_by_name_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(autotune, "search", lambda *_, **__: pytest.fail("it measures"))
    (tmp_path / "text").write_text("some text")
    for place in ("no/table.json", "", "text"):
        path = tmp_path / place
        why = "is no tuning table" if place == "text" else "must be a file that can be written, got "
        assert tune_all("--out", path) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("tune: ") and why in captured.err and str(path) in captured.err
        assert not captured.out
        with pytest.raises(ValueError, match=why):
            overlap.autotune(layer, *operands(), path=path)
        assert [path.name for path in tmp_path.iterdir()] == ["text"]
    # The user's table is looked at before as well.
    file = autotune.result_file(H200, None)
    assert file == tables.user_file(H200.kind) and file.parent.is_dir()
    assert autotune.result_file(Target("cpu", "cpu", 4), None) is None
    (tmp_path / "file").touch()
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.raises(ValueError, match=r"nvidia_h200\.json cannot be written, and nothing has been .* OVERLAP_TUN"):
        autotune.result_file(H200, None)
    monkeypatch.setattr(tables, "user_directory", lambda: None)
    with pytest.raises(ValueError, match="there is no home directory"):
        autotune.result_file(H200, None)


def test_an_unexpected_error_loses_nothing_and_a_full_disk_ends_the_tuning(bench, tmp_path, capsys, monkeypatch):
    """Each with what was found before. Faults of the table are said while tuning, and kept."""
    searched, out = autotune.search, tmp_path / "table.json"
    out.write_text(json.dumps({"format": 1, "entries": ["no entry"]}))

    def breaks(of, *rest, **options):
        if of.shape == SHAPES[1]:
            raise RuntimeError("the runtime is gone")
        return searched(of, *rest, **options)

    def full(path, entries):
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(autotune, "search", breaks)
        with pytest.raises(RuntimeError, match="the runtime is gone"):
            tune_all("--out", out)
    assert SHAPES[0] in capsys.readouterr().out
    assert [e.problem.shape for e in tables.read(out)] == SHAPES[:1]
    assert len(json.loads(out.read_text())["entries"]) == 2
    monkeypatch.setattr(tables, "add", full)
    assert tune_all("--out", out) == 1
    said = capsys.readouterr()
    assert SHAPES[1] in said.out and said.err.endswith("table.json: No space left on device\n")


def test_ctrl_c_ends_the_command_with_what_was_found(bench, tmp_path, capsys):
    out, started, sampled = tmp_path / "table.json", [], []

    def hook(what, config):
        started.extend([what] * (what == "warm up"))
        sampled.extend([config] * (len(started) == 2 and what == "sample" and config is not None))
        if len(sampled) == 2:
            started.append("the signal")
            signal.raise_signal(signal.SIGINT)

    bench.hook = staticmethod(hook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert tune_all("--out", out) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().out
    assert "Interrupted: 1 problems were not begun" in said and f"The results are in {out}" in said
    assert {e.problem.shape: e.complete for e in tables.read(out)} == {SHAPES[0]: True, SHAPES[1]: False}
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_ctrl_c_is_noticed_the_second_one_raises_and_a_handler_of_the_programs_own_stays(capfd):
    came, before = [], signal.getsignal(signal.SIGINT)
    own = lambda *_: came.append("own")  # noqa: E731
    try:
        for handler in (signal.default_int_handler, interrupt._handle):
            signal.signal(signal.SIGINT, handler)
            with pytest.raises(KeyboardInterrupt), stopped_by_ctrl_c() as stop:
                assert not stop.interrupted
                signal.raise_signal(signal.SIGINT)
                assert stop.interrupted
                assert "Ctrl-C again ends it at once" in capfd.readouterr().err
                signal.raise_signal(signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, own)
        with stopped_by_ctrl_c() as stop:
            signal.raise_signal(signal.SIGINT)
            assert (came, stop.interrupted) == (["own"], False)
    finally:
        signal.signal(signal.SIGINT, before)


# --- The whole function -----------------------------------------------------------------------------------------------


def test_a_whole_function_runs_by_kernels_by_xla_and_by_choice():
    """With their backward passes, and on copies of what it donates. A way that fails has no time."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    seen: list[set[str]] = []

    def loss(x, w):
        with recorded() as found:
            out, pull = jax.vjp(lambda x, w: overlap.sharded_matmul(x, w, out_sharding=P(None, "x")), x, w)
            grads = pull(out)
        seen.append({choice.implementation for choice in found})
        return grads

    x, w = (
        jax.device_put(jnp.ones((128, 128), jnp.bfloat16), jax.NamedSharding(mesh, at))
        for at in (P("x", None), P(None, "x"))
    )
    problems = autotune.problems_of(loss, x, w)
    assert {problem.op for problem in problems} == {"all_gather_lhs_matmul", "matmul_reduce_scatter"}
    ms = step.times_ms(jax.jit(loss, donate_argnums=0), (x, w), {}, problems, Session())
    assert set(ms) == {"", "fused", "xla"} and all(value > 0 for value in ms.values())
    # Collected first; then each way is traced once. On a CPU the choice is XLA.
    assert seen[1:] == [{"xla"}, {"fused"}, {"xla"}] and not x.is_deleted()

    def fails(x):
        if choose.settled(problems[0]) == "fused":
            raise NotImplementedError("no memory")
        return x

    assert set(step.times_ms(fails, (x,), {}, problems, Session())) == {"", "xla"}
    assert not step.can_run(((jax.ShapeDtypeStruct((2,), jnp.float32), x), {})) and step.can_run((x, {"n": 3}))


@pytest.mark.parametrize(
    ("ms", "way"),
    [
        ({"": 10.0, "fused": 9.0, "xla": 9.5}, "fused"),
        ({"": 10.0, "fused": 11.0, "xla": 9.8}, "xla"),
        ({"": 10.0, "fused": 9.95, "xla": 12.0}, ""),
        ({"fused": 9.0, "xla": 8.0}, "xla"),
        ({}, ""),
    ],
)
def test_the_fastest_way_is_the_verdict_of_all_problems(ms, way, monkeypatch):
    """The table keeps it, whatever the times of single products say; and the object inside `with`, too."""
    path = tuning_cases.write(tuning_cases.line(), tuning_cases.line(tuning_cases.problem("8192x8192x8192")))
    outcomes = [Outcome(found.problem, result=found) for found in tables.read(path)]
    monkeypatch.setattr(step, "times_ms", lambda *_: ms)
    tuning = autotune.of_whole(autotune.Tuning(outcomes, path), layer, operands(), {})
    assert [found.step for found in tables.read(path)] == [way] * 2
    for found in outcomes:
        said = choose.verdict(found.problem, H200)
        # Without a verdict the times count, which are those of a faster kernel.
        assert (said.xla_runs, said.cause is Cause.IN_STEP) == (way == "xla", bool(way))
        with tuning:
            assert choose.verdict(found.problem, H200).xla_runs == (way == "xla")
    assert ("the whole function: " in str(tuning)) == bool(ms)
    again = autotune.of_whole(tuning, layer, operands(), {})
    assert again.step_ms == ms


class Late:
    """As if jitted. Its results are there later than its calls return, and the first call takes longest."""

    lower = None
    clock = 0.0
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return types.SimpleNamespace(block_until_ready=self.wait)

    def wait(self):
        self.clock += [1.0, 0.001, 0.005, 0.002, 0.004, 0.003][(self.calls - 1) // 3]


def test_times_are_medians_of_finished_calls_after_the_first(monkeypatch):
    run = Late()
    monkeypatch.setattr(step, "time", types.SimpleNamespace(perf_counter=lambda: run.clock))
    ms = step.times_ms(run, (jnp.ones(2),), {}, [], Session())
    assert ms == pytest.approx({"": 3.0, "fused": 3.0, "xla": 3.0})


@pytest.mark.parametrize("error", [NotImplementedError, jax.errors.JaxRuntimeError])
def test_a_way_that_fails_has_no_time(error):
    def fails(x):
        if choose.settled(SMALL) == "fused":
            raise error("no memory")
        return x

    assert set(step.times_ms(fails, (jnp.ones(2),), {}, [SMALL], Session())) == {"", "xla"}


def test_kernels_are_measured_as_they_were_tuned():
    seen, tuned = [], Config(stages=3, tile_n=128)

    def product(x, w):
        with recorded() as found:
            out = overlap.matmul(x, w)
        seen.append([choice.config for choice in found])
        return out

    step.times_ms(product, operands(), {}, [SMALL], Session({SMALL: tuned}))
    assert seen == [[None], [tuned], [None]]


def test_on_gpus_the_function_is_measured_if_all_arguments_are_arrays(monkeypatch):
    monkeypatch.setattr(autotune, "tune", lambda problems, *_, **__: [Outcome(p) for p in problems])
    monkeypatch.setattr(step, "times_ms", lambda *_: {"": 2.0, "xla": 1.0})
    run = lambda x, w, scale=None: layer(x, w)  # noqa: E731
    x, w = operands()
    assert not autotune.autotune(run, x, w, save=False).step_ms
    monkeypatch.setattr(autotune.dispatch, "target", lambda: H200)
    monkeypatch.setattr(autotune, "problems_of", lambda *_, **__: [SMALL])
    assert autotune.autotune(run, x, w, save=False).step_ms == {"": 2.0, "xla": 1.0}
    assert not autotune.autotune(run, x, w, scale=jax.ShapeDtypeStruct((), jnp.float32), save=False).step_ms


@pytest.mark.parametrize("way", ["fused", "xla"])
def test_a_verdict_beside_a_failed_problem_and_without_a_file(way, monkeypatch):
    """A problem that no configuration ran gets the verdict for XLA only."""
    path, words = tuning_cases.write(tuning_cases.line()), {"fused": "by kernels", "xla": "by XLA"}[way]
    (found,) = tables.read(path)
    failed = Outcome(tuning_cases.problem("128x8192x8192"), note="no configuration ran")
    monkeypatch.setattr(step, "times_ms", lambda *_: {"": 3.0, way: 1.0})
    for where in (path, None):
        before = autotune.Tuning([Outcome(found.problem, result=found), failed], where)
        tuning = autotune.of_whole(before, layer, operands(), {})
        with tuning:
            assert (choose.verdict(failed.problem, H200).cause is Cause.IN_STEP) == (way == "xla")
        assert str(tuning).endswith(f"the whole function: the choice 3.00 ms, all {words} 1.00 ms")
    said = choose.verdict(found.problem, H200).reason
    assert f"fastest {words} alone" in said and str(path) in said
