"""The search on a bench with known times, and the real bench, emulated."""

from __future__ import annotations

import dataclasses
import importlib
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from mosaic_emulator.entry.sequence import World
from overlap.choice import space, tables
from overlap.choice.problem import Problem
from overlap.emulation import emulate
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


def find(**options):
    settings = Settings(**{"max_configs": 24, "workers": 4, **options.pop("settings", {})})
    return search.search(problem(), H200, [None], settings, stop=Stop(**options))


@pytest.fixture
def configs(bench):
    """The candidates; the 18th one is the fastest."""
    found = space.candidates(problem(), H200)
    bench.us_of = staticmethod({config: 100.0 + abs(i - 17) for i, config in enumerate(found)}.__getitem__)
    return found


def test_the_fastest_is_found_and_losers_are_dropped_early(bench, configs):
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
    # An interrupt takes the best of those that came furthest.
    assert {trial.survived for trial in outcome.trials} == {0, 1, 2, 3}
    # What is hopeless is timed once.
    known = bench.us_of
    bench.us_of = staticmethod(lambda config: 1000.0 if config == configs[2] else known(config))
    find()
    assert bench.samples[configs[2]] == 1


def test_wrong_results_and_failures_do_not_count(bench, configs):
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

    bench.hook = staticmethod(lambda what, config: None)
    # A result goes wrong under timing; or all are wrong.
    bench.wrong = staticmethod(lambda config: config == configs[17] and bench.samples.get(config, 0) > 5)
    outcome = find()
    assert outcome.result is not None and outcome.result.config in (configs[16], configs[18])
    bench.wrong = staticmethod(lambda config: True)
    outcome = find()
    assert outcome.result is None and "no configuration came through: wrong" in outcome.note
    # A failed last check of XLA: its time would be infinite, which no table may hold.
    bench.wrong, checks = staticmethod(lambda config: False), []

    def lost(what, config):
        checks.extend([what] * (what == "check" and config is None))
        if len(checks) == 2:
            raise RuntimeError("lost")

    bench.hook = staticmethod(lost)
    outcome = find(settings={"max_configs": 4})
    assert outcome.result is not None and "xla" not in outcome.result.others


def test_an_interrupt_keeps_what_was_measured(bench, configs):
    """So does the end of the budget, which ends the search after the first wave."""
    for what, count in (("sample", 10), ("sample", 40), ("compile", 15), ("check", 20)):
        calls = []

        def hook(at, config, what=what, count=count, calls=calls):
            calls.append(config)
            if at == what and config is not None and len(calls) > count:
                raise KeyboardInterrupt

        bench.hook = staticmethod(hook)
        outcome = find(settings={"workers": 1} if what == "compile" else {})
        assert outcome.interrupted and not outcome.complete
        assert outcome.result is not None and not outcome.result.complete
        measured = [trial for trial in outcome.trials if trial.config and trial.samples_us]
        furthest = max(trial.survived for trial in measured)
        best = min((trial for trial in measured if trial.survived == furthest), key=lambda trial: trial.us)
        assert outcome.result.config == best.config
    bench.hook = staticmethod(lambda what, config: None)
    outcome = find(deadline=time.monotonic() - 1)
    assert outcome.result is not None
    assert (outcome.complete, outcome.interrupted, outcome.result.complete) == (False, False, False)
    assert len(bench.compiled) == 1 + 4


# --- Several problems -------------------------------------------------------------------------------------------------


@pytest.fixture
def one_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [None])


def tune(shapes, path, **options):
    return autotune.tune([problem(shape) for shape in shapes], H200, Settings(8, workers=4, **options), path)


def test_the_time_that_is_left_is_shared_by_the_problems_that_are_left(monkeypatch, one_device):
    now, given = [1000.0], []
    monkeypatch.setattr(autotune.time, "monotonic", lambda: now[0])

    def searched(of, *_, stop, **__):
        given.append(stop.deadline - now[0])
        now[0] += 30.0 if len(given) == 1 else 80.0
        return search.Outcome(of)

    monkeypatch.setattr(autotune, "search", searched)
    outcomes = tune(SHAPES[:4], None, budget_s=100)
    assert given == pytest.approx([25, 70 / 3])
    assert [outcome.note for outcome in outcomes] == ["", "", *["the budget was spent before its turn"] * 2]


def test_an_interrupted_tuning_is_resumed(bench, tmp_path, one_device):
    path, started, left = tmp_path / "table.json", [], [9]

    def hook(what, config):
        if what == "warm up":
            started.append(what)
        if len(started) == 3 and what == "sample" and config is not None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

    bench.hook = staticmethod(hook)
    outcomes = tune(SHAPES[:4], path)
    assert [outcome.interrupted for outcome in outcomes] == [False, False, True]
    saved = {e.problem.shape: e.complete for e in tables.read(path)}
    assert saved == dict(zip(SHAPES[:3], [True, True, False], strict=True))
    # On a second run, complete results stay and the rest is measured.
    bench.hook = staticmethod(lambda what, config: started.append(what) if what == "warm up" else None)
    started.clear()
    outcomes = tune(SHAPES[:4], path)
    assert [outcome.note for outcome in outcomes] == ["already measured", "already measured", "", ""]
    assert all(outcome.result for outcome in outcomes)
    assert len(started) == 2
    assert all(e.complete for e in tables.read(path))
    tune(SHAPES[:1], path, force=True)
    assert len(started) == 3
    # A configuration that no kernel supports (from a hand-edited table) is not a result.
    path.write_text(re.sub(r'"tile_m": \d+', '"tile_m": 100', path.read_text()))
    (again,) = tune(SHAPES[:1], path)
    assert (again.note, len(started)) == ("", 4)
    assert [e.config.tile_m == 100 for e in tables.read(path)].count(False) == 1


def test_one_problem_that_fails_does_not_end_the_others(bench, one_device):
    failed = []

    def hook(what, config):
        if what == "warm up" and not failed:
            failed.append(config)
            raise RuntimeError("out of memory")

    bench.hook = staticmethod(hook)
    first, second = tune(SHAPES[:2], None)
    assert (first.note, second.note) == ("error: RuntimeError: out of memory", "") and second.result is not None


# --- The real bench, emulated -----------------------------------------------------------------------------------------

BENCHED = [
    Problem("matmul", 128, 128, 64, "float16", "float32", layout="tn"),
    Problem("all_gather_lhs_matmul", 128, 128, 64, "bfloat16", "bfloat16", devices=2, layout="nt"),
]


@pytest.mark.parametrize("of", BENCHED, ids=str)
def test_the_bench_tells_right_from_wrong(of, monkeypatch):
    bench = Bench(of, jax.devices()[: of.devices], Settings.for_platform("cpu"))
    xla, config = bench.compile(None), Config(tile_n=128, stages=2)
    baseline = bench.error_of(xla)
    assert 0 < baseline < 1e-2 if of.out_dtype != "float32" else baseline < 1e-5
    ours = bench.compile(config)
    assert bench.error_of(ours) <= max(2 * baseline, 1e-4)
    assert bench.sample_us(ours) > 0
    assert bench.error_of(ours) <= max(2 * baseline, 1e-4)
    # A program that writes nothing would leave in memory what another one has computed.
    assert bench.error_of(jax.jit(lambda state, rhs: (state[0], state[1]))) > 0.5
    known = bench_module.call_operation

    def spoiled(problem, lhs, rhs, config, implementation):
        out = known(problem, lhs, rhs, None, "xla")
        return out if implementation == "xla" else out.at[..., -1, -8:].set(0)  # The oracle stays right.

    monkeypatch.setattr(bench_module, "call_operation", spoiled)
    assert bench.error_of(bench.compile(config)) > max(2 * baseline, 1e-4)


def test_every_call_of_the_loop_depends_on_the_one_before():
    of, settings = Problem("matmul", 8, 8, 16, "bfloat16", "bfloat16"), Settings.for_platform("cpu")
    bench = Bench(of, jax.devices()[:1], dataclasses.replace(settings, max_iterations=3, launch_us=1e9))
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


def test_ctrl_c_stops_the_launches_of_the_search_and_no_others(monkeypatch):
    """Neither those of another thread, nor later ones of the `emulate` context that the search runs in."""
    running, stopped, checked, error_of, execute = threading.Event(), [], [], Bench.error_of, World.execute

    def checking(self, program):
        checked.append(program)
        if len(checked) == 2:  # The first one is XLA's, the second one a kernel of ours.
            running.set()
        return error_of(self, program)

    def executing(self, *arguments):
        try:
            return execute(self, *arguments)
        except KeyboardInterrupt:
            stopped.append(self)
            raise

    def emulated(size, stop):
        of, settings = Problem("matmul", size, size, size, "bfloat16", "bfloat16"), Settings.for_platform("cpu", 1)
        return search.search(of, current_target(), jax.devices()[:1], settings, stop=stop)

    monkeypatch.setattr(Bench, "error_of", checking)
    monkeypatch.setattr(World, "execute", executing)

    ones, results, over, stop = jnp.ones((128, 128), jnp.bfloat16), [], threading.Event(), Stop()
    product = jax.jit(lambda x: overlap.matmul(x, x, implementation="fused"))

    def others():
        while not over.is_set() or not results:
            results.append(np.asarray(product(ones), np.float32))

    with emulate(cores=2):
        thread = threading.Thread(target=others)
        thread.start()
        threading.Thread(target=lambda: running.wait(60) and stop.interrupt()).start()
        outcome = emulated(1024, stop)
        over.set()
        thread.join()
        assert stopped and outcome.result is None and not outcome.complete and outcome.interrupted
        assert outcome.note.endswith("ended before the first one")
        # XLA's trial alone: what was stopped is neither wrong nor an error.
        assert [trial.status for trial in outcome.trials] == ["ok"]
        assert emulated(64, Stop()).result is not None
    assert all((result == 128).all() for result in results)
