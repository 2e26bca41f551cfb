"""The search on a bench with known times, and the real bench, emulated."""

from __future__ import annotations

import dataclasses
import importlib
import re
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.choice import space, tables
from overlap.choice.problem import Problem
from overlap.emulation import emulate
from overlap.emulation.entry.sequence import World
from overlap.kernels.config import Config
from overlap.kernels.target import current_target
from overlap.tuning import bench as bench_module
from overlap.tuning import search
from overlap.tuning.bench import Bench
from overlap.tuning.settings import Settings
from overlap.tuning.stop import Stop
from tests.choice.tuning_cases import H200, SHAPES, bench, problem

__all__ = ["bench"]

# The module itself: the package has an attribute of the same name.
autotune = importlib.import_module("overlap.tuning.autotune")


# --- The search, on a bench with known times --------------------------------------------------------------------------


def find(of=None, **options):
    settings = Settings(**{"max_configs": 24, "workers": 4, **options.pop("settings", {})})
    return search.search(of or problem(), H200, [None], settings, stop=Stop(**options))


def times(of=None):
    """Returns a time for each configuration: the 18th candidate is the fastest."""
    configs = space.candidates(of or problem(), H200)
    return {config: 100.0 + abs(i - 17) for i, config in enumerate(configs)}, configs


def test_the_fastest_is_found_and_losers_are_dropped_early(bench):
    table, configs = times()
    bench.us_of = staticmethod(table.__getitem__)
    outcome = find()
    assert outcome.result is not None
    assert outcome.result.config == configs[17]
    assert outcome.complete
    assert (outcome.result.us, outcome.result.others["xla"], outcome.result.others["heuristic"]) == (100.0, 95.0, 117.0)
    assert {space.differences(configs[index]) for index in (16, 18)} <= outcome.result.others.keys()
    assert outcome.result.tried == 24 == len(set(bench.compiled)) - 1
    counts = sorted(bench.samples[config] for config in configs[:24])
    assert counts[0] == 1 + 1  # Dropped after the first halving.
    assert counts[-1] == 1 + 3 + 5  # Waves, halvings (24, 12, 6), finals.
    assert sum(count > 4 for count in counts) == 5  # Four finalists, and the heuristic's choice.


def test_what_is_hopeless_is_timed_once(bench):
    table, configs = times()
    bench.us_of = staticmethod(lambda config: 1000.0 if config == configs[2] else table[config])
    find()
    assert bench.samples[configs[2]] == 1


def test_wrong_results_and_failures_do_not_count(bench):
    table, configs = times()
    bench.us_of = staticmethod(table.__getitem__)
    bench.wrong = staticmethod(lambda config: config == configs[17])

    def hook(what, config):
        if (what, config) in (("compile", configs[16]), ("sample", configs[18])):
            raise RuntimeError("no room\nfor this")

    bench.hook = staticmethod(hook)
    outcome = find()
    assert outcome.result is not None
    assert outcome.result.config in (configs[15], configs[19])
    status = {trial.config: trial.status for trial in outcome.trials}
    assert status[configs[17]].startswith("wrong: relative error nan")
    assert status[configs[16]] == status[configs[18]] == "error: RuntimeError: no room for this"
    assert configs[17] not in bench.samples  # This candidate is not even timed.


def test_a_result_that_goes_wrong_under_timing_does_not_count(bench):
    table, configs = times()
    bench.us_of = staticmethod(table.__getitem__)
    bench.wrong = staticmethod(lambda config: config == configs[17] and bench.samples.get(config, 0) > 5)
    outcome = find()
    assert outcome.result is not None
    assert outcome.result.config in (configs[16], configs[18])


def test_if_all_are_wrong_there_is_no_result(bench):
    bench.wrong = staticmethod(lambda config: True)
    outcome = find()
    assert outcome.result is None
    assert "no configuration came through: wrong" in outcome.note


@pytest.mark.parametrize(("what", "count"), [("sample", 10), ("sample", 40), ("compile", 15), ("check", 20)])
def test_an_interrupt_keeps_what_was_measured(bench, what, count):
    table, _ = times()
    bench.us_of = staticmethod(table.__getitem__)
    calls = []

    def hook(at, config):
        calls.append(config)
        if at == what and config is not None and len(calls) > count:
            raise KeyboardInterrupt

    bench.hook = staticmethod(hook)
    outcome = find(settings={"workers": 1} if what == "compile" else {})
    assert outcome.interrupted
    assert not outcome.complete
    assert outcome.result is not None
    assert not outcome.result.complete
    measured = [trial for trial in outcome.trials if trial.config and trial.samples_us]
    furthest = max(trial.survived for trial in measured)
    best = min((trial for trial in measured if trial.survived == furthest), key=lambda trial: trial.us)
    assert outcome.result.config == best.config


def test_the_end_of_the_budget_ends_the_search_after_the_first_wave(bench):
    bench.us_of = staticmethod(times()[0].__getitem__)
    outcome = find(deadline=time.monotonic() - 1)
    assert outcome.result is not None
    assert (outcome.complete, outcome.interrupted, outcome.result.complete) == (False, False, False)
    assert len(bench.compiled) == 1 + 4


def test_the_time_that_is_left_is_shared_by_the_problems_that_are_left(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])
    now, given = [1000.0], []
    monkeypatch.setattr(autotune.time, "monotonic", lambda: now[0])

    def searched(of, *_, stop, **__):
        given.append(stop.deadline - now[0])
        now[0] += 30.0 if len(given) == 1 else 80.0
        return search.Outcome(of)

    monkeypatch.setattr(autotune, "search", searched)
    outcomes = autotune.tune([problem(s) for s in SHAPES[:4]], H200, Settings(4, budget_s=100), None)
    assert given == pytest.approx([25, 70 / 3])
    assert [outcome.note for outcome in outcomes] == ["", "", *["the budget was spent before its turn"] * 2]


def test_an_interrupted_tuning_is_resumed(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])
    path, problems = tmp_path / "table.json", [problem(shape) for shape in SHAPES[:4]]
    started = []

    def hook(what, config):
        if what == "warm up":
            started.append(what)
        if len(started) == 3 and what == "sample" and config is not None:
            hook.left -= 1
            if not hook.left:
                raise KeyboardInterrupt

    hook.left = 9
    bench.hook = staticmethod(hook)
    outcomes = autotune.tune(problems, H200, Settings(8, workers=4), path)
    assert [outcome.interrupted for outcome in outcomes] == [False, False, True]
    saved = {e.problem.shape: e.complete for e in tables.read(path)}
    assert saved == dict(zip(SHAPES[:3], [True, True, False], strict=True))
    # On a second run, complete results stay and the rest is measured.
    bench.hook = staticmethod(lambda what, config: started.append(what) if what == "warm up" else None)
    started.clear()
    outcomes = autotune.tune(problems, H200, Settings(8, workers=4), path)
    assert [outcome.note for outcome in outcomes] == ["already measured", "already measured", "", ""]
    assert all(outcome.result for outcome in outcomes)
    assert len(started) == 2
    assert all(e.complete for e in tables.read(path))
    autotune.tune(problems[:1], H200, Settings(8, workers=4, force=True), path)
    assert len(started) == 3
    # A configuration that no kernel supports (from a hand-edited table) is not a result.
    path.write_text(re.sub(r'"tile_m": \d+', '"tile_m": 100', path.read_text()))
    (again,) = autotune.tune(problems[:1], H200, Settings(8, workers=4), path)
    assert (again.note, len(started)) == ("", 4)
    assert [e.config.tile_m == 100 for e in tables.read(path)].count(False) == 1


def test_one_problem_that_fails_does_not_end_the_others(bench, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])
    failed = []

    def hook(what, config):
        if what == "warm up" and not failed:
            failed.append(config)
            raise RuntimeError("out of memory")

    bench.hook = staticmethod(hook)
    outcomes = autotune.tune([problem(shape) for shape in SHAPES[:2]], H200, Settings(4, workers=4), None)
    assert [outcome.note for outcome in outcomes] == ["error: RuntimeError: out of memory", ""]
    assert outcomes[1].result is not None


# --- The real bench, emulated -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of",
    [
        Problem("matmul", 128, 256, 128, "bfloat16", "bfloat16"),
        Problem("matmul", 128, 128, 128, "float16", "float32", layout="tn"),
        Problem("matmul", 128, 128, 64, "float16", "float16", batch=2),
        Problem("all_gather_lhs_matmul", 128, 128, 128, "float16", "float16", devices=2),
        Problem("all_gather_lhs_matmul", 128, 256, 128, "bfloat16", "bfloat16", devices=2, layout="nt"),
        Problem("all_gather_rhs_matmul_n", 128, 128, 128, "float16", "float16", devices=2),
        Problem("all_gather_rhs_matmul_k", 128, 128, 128, "float16", "float16", devices=3),
    ],
    ids=str,
)
def test_the_bench_tells_right_from_wrong(of, monkeypatch):
    bench = Bench(of, jax.devices()[: of.devices], Settings.for_platform("cpu"))
    xla, config = bench.compile(None), Config(tile_n=128, stages=2)
    baseline = bench.error_of(xla)
    assert 0 < baseline < 1e-2 if of.out_dtype != "float32" else baseline < 1e-5
    ours = bench.compile(config)
    assert bench.error_of(ours) <= max(2 * baseline, 1e-4)
    assert bench.sample_us(ours) > 0
    assert bench.error_of(ours) <= max(2 * baseline, 1e-4)

    def spoiled(*args):
        out = bench_call(*args)
        if args[-1] == "xla":  # The oracle stays right.
            return out
        return out.at[..., -1, -8:].set(0)

    bench_call = bench_module.call_operation
    monkeypatch.setattr(bench_module, "call_operation", spoiled)
    assert bench.error_of(bench.compile(config)) > max(2 * baseline, 1e-4)


def test_an_old_result_cannot_pass_for_a_new_one():
    """A kernel that writes nothing would leave in memory what another kernel has computed."""
    of = Problem("matmul", 128, 256, 128, "bfloat16", "bfloat16")
    bench = Bench(of, jax.devices()[:1], Settings.for_platform("cpu"))
    xla = bench.compile(None)
    bench.error_of(xla)
    idle = jax.jit(lambda state, rhs: (state[0], state[1]))
    assert bench.error_of(idle) > 0.5


def test_every_call_of_the_loop_depends_on_the_one_before():
    of = Problem("matmul", 8, 8, 16, "bfloat16", "bfloat16")
    bench = Bench(
        of, jax.devices()[:1], dataclasses.replace(Settings.for_platform("cpu"), max_iterations=3, launch_us=1e9)
    )
    assert bench.iterations == 3
    loop = bench._ready(bench.compile(None))
    lhs, rhs, out = (np.array(x, np.float32) for x in (*loop.operands, loop.out))
    for _ in range(3):
        lhs[0, 0] = float(jnp.bfloat16(np.clip(out[0, 0] / 4, -4, 4)))
        out = np.asarray(jnp.asarray(lhs @ rhs, jnp.bfloat16), np.float32)
    loop.launch()
    np.testing.assert_allclose(np.asarray(loop.operands[0], np.float32), lhs, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(np.asarray(loop.out, np.float32), out, rtol=2e-2, atol=2e-2)


# --- Emulated launches that outlast the search ------------------------------------------------------------------------


LARGE, TINY = (Problem("matmul", size, size, size, "bfloat16", "bfloat16") for size in (1024, 64))


@pytest.fixture
def launches(monkeypatch):
    """`running` is set when the search first launches a kernel of ours; `stopped` lists launches that were stopped."""
    seen = types.SimpleNamespace(running=threading.Event(), stopped=[], checked=[])
    error_of, execute = Bench.error_of, World.execute

    def checking(self, program):
        seen.checked.append(program)
        if len(seen.checked) == 2:  # The first one is XLA's.
            seen.running.set()
        return error_of(self, program)

    def executing(self, *arguments):
        try:
            return execute(self, *arguments)
        except KeyboardInterrupt:
            seen.stopped.append(self)
            raise

    monkeypatch.setattr(Bench, "error_of", checking)
    monkeypatch.setattr(World, "execute", executing)
    return seen


def emulated(of, stop=None):
    return search.search(of, current_target(), jax.devices()[:1], Settings.for_platform("cpu", 1), stop=stop or Stop())


def end_when_running(launches, end):
    threading.Thread(target=lambda: launches.running.wait(60) and end()).start()


def test_ctrl_c_ends_an_emulated_launch(launches):
    end_when_running(launches, (stop := Stop()).interrupt)
    outcome = emulated(LARGE, stop)
    assert launches.stopped
    assert outcome.result is None and not outcome.complete and outcome.note.endswith("ended before the first one")
    assert outcome.interrupted
    assert [trial.status for trial in outcome.trials] == ["ok"]  # XLA; what was stopped is neither wrong nor an error.


def test_a_search_stops_no_launches_but_its_own(launches):
    """Neither those of another thread, nor later ones of the `emulate` context that it runs in."""
    ones, results, over = jnp.ones((256, 256), jnp.bfloat16), [], threading.Event()
    product = jax.jit(lambda x: overlap.matmul(x, x, implementation="fused"))

    def others():
        while not over.is_set() or not results:
            results.append(np.asarray(product(ones), np.float32))

    with emulate(cores=2):
        thread = threading.Thread(target=others)
        thread.start()
        end_when_running(launches, (stop := Stop()).interrupt)
        outcome = emulated(LARGE, stop)
        over.set()
        thread.join()
        assert launches.stopped and outcome.result is None and not outcome.complete
        assert emulated(TINY).result is not None
    assert all((result == 256).all() for result in results)
