"""The model that ranks configurations: the data it is fitted to, the loss of its choices, and how both are measured."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import statistics

import numpy as np
import pytest

from benchmarks import configurations, fit_model, model_tasks
from benchmarks.configurations import Task
from overlap.choice import crossover, model, rates
from overlap.choice.problem import Problem
from overlap.choice.rates import H200, Rates
from overlap.kernels.config import Config

TARGET = model_tasks.TARGETS["h200"]
GPUS = pytest.mark.parametrize("gpu", model_tasks.TARGETS)


def drawn(count: int, seed: int = 0, **given: float | bool) -> list[Problem]:
    chance = random.Random(seed)
    wanted = {"aligned": 0.85, "few_rows": 0.1, "bfloat16_only": False} | given
    return [model_tasks.draw_problem(chance, **wanted) for _ in range(count)]  # pyright: ignore[reportArgumentType]


# --- Measurements -----------------------------------------------------------------------------------------------------


def test_tasks_are_drawn_from_the_whole_space_and_can_run():
    problems = drawn(60)
    assert {p.layout for p in problems} == {"nn", "nt", "tn", "tt"}
    assert {p.itemsize for p in problems} == {1, 2} and min(p.m for p in problems) < 64
    assert all(2.0 * p.m * p.n * p.k <= model_tasks.MOST_FLOPS for p in problems)
    assert all(row % 128 == 0 for p in drawn(30, aligned=1.0) for row in p.row_bytes)
    chance = random.Random(1)
    tasks = [Task(p, model_tasks.draw_configs(chance, p, TARGET)) for p in problems[:5]]
    for task in tasks:
        assert 5 <= len(task.configs) == len(set(task.configs)) <= 14
        assert all(task.problem.accepts(config, TARGET) for config in task.configs)
        assert Task.from_json(task.to_json()) == task
    assert {config.schedule for task in tasks for config in task.configs} == {"cooperative", "pingpong"}


def test_the_command_draws_the_same_for_a_seed(tmp_path):
    texts = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        out = tmp_path / name
        model_tasks.main(["--seed", str(seed), "--problems", "1", "--judge", "--configs", "4", "--out", str(out)])
        texts.append(out.read_text())
    assert texts[0] == texts[1] != texts[2]
    (task,) = map(Task.from_json, texts[0].splitlines())
    assert task.with_xla and 4 <= len(task.configs) <= 10


def test_a_problem_is_compiled_measured_and_checked(monkeypatch):
    monkeypatch.setattr(configurations, "_WARM_UP_S", 0.0)
    problem = Problem("matmul", 128, 128, 128, "bfloat16", "bfloat16", layout="nt")
    good = Config(tile_m=64, tile_n=64, stages=2, schedule="pingpong")
    task = Task(problem, (good, Config(tile_n=512)), with_xla=True)
    worker = configurations._Worker(128 * 128, samples=2, launch_ms=0.0)
    compiled = worker.compile(task)
    loop, expected, difference = worker.prepare(compiled)
    rows = {row["config"]: row for row in worker.measure(compiled, loop, expected, difference)}
    (wrong,) = {json.dumps(configurations.changed(Config(tile_n=512)))} & rows.keys()
    assert rows[wrong]["status"].startswith("error: ValueError") and rows[wrong]["us"] == "nan"
    others = [row for name, row in rows.items() if name != wrong]
    assert len(others) == 2 and all(row["status"] == "ok" and row["samples"] == 2 for row in others)
    assert all(row.keys() == set(configurations.FIELDS) and row["calls"] == 1 for row in rows.values())
    assert all(float(row["us"]) > 0 for row in others)
    # A configuration whose result differs from XLA's has no time.
    again = worker.measure(worker.compile(task), loop, expected + 1, difference)
    assert all(row["status"].startswith("wrong") for row in again if row["config"] != wrong)


# --- The fit ----------------------------------------------------------------------------------------------------------


def synthetic(with_rates: Rates, noise: float = 0.03) -> fit_model.Times:
    """Returns the times that a device with the given rates would take."""
    times, chance = fit_model.Times(TARGET), random.Random(5)
    for problem in drawn(12, 7, aligned=1.0, few_rows=0.0, bfloat16_only=True):
        for config in model_tasks.draw_configs(chance, problem, TARGET):
            us = model.predicted_us(config, problem, TARGET, with_rates)
            times[problem][config] = us * chance.lognormvariate(0.0, noise)
        times.weights[problem] = 3.0
    return times


def test_the_fit_finds_the_rates_of_a_device(monkeypatch):
    free = {"tile_cycles": (2000.0, 3.0), "l2_bytes_per_cycle": (75.0, 1.6), "launch_us": (5.0, 1.5)}
    monkeypatch.setattr(fit_model, "FREE", free)
    true = dataclasses.replace(H200, tile_cycles=4000.0, l2_bytes_per_cycle=55.0, launch_us=4.0)
    found = fit_model.fit([synthetic(true)], H200)
    for name in free:
        assert abs(np.log(getattr(found, name) / getattr(true, name))) < 0.15, name
    assert found.step_cycles == H200.step_cycles


# --- The loss of the choices ------------------------------------------------------------------------------------------


@functools.cache
def held_out(gpu: str) -> fit_model.Times:
    return fit_model.load(fit_model.held_out(gpu), gpu)


@functools.cache
def losses(gpu: str):
    return fit_model.losses(held_out(gpu))


@GPUS
def test_the_rates_are_all_there_and_fitted_to_other_problems(gpu):
    fitted = json.loads(rates.file_of(gpu).read_text())["rates"]
    names = {field.name for field in dataclasses.fields(Rates)}
    assert names - fitted.keys() == {"overlaps_epilogue", "measured"} and fitted.keys() <= names
    assert all(value > 0 for value in fitted.values())
    assert fit_model.FREE.keys() <= fitted.keys()
    problems = set().union(*(fit_model.load(path, gpu) for path in fit_model.fitted_to(gpu)))
    assert len(problems) >= 140 and len(held_out(gpu)) >= 30
    assert not problems & held_out(gpu).keys()
    assert all(None in of_problem for of_problem in held_out(gpu).values())


@GPUS
def test_choices_lose_little_on_problems_that_the_model_has_not_seen(gpu):
    """Uses stored measurements, so the result depends on the model and not on this machine."""
    lost = [loss for loss, _ in losses(gpu).values()]
    assert statistics.mean(lost) <= {"h200": 0.03, "h100": 0.045}[gpu] and fit_model._at(lost, 0.95) <= 0.13


def test_the_judgement_is_printed():
    text = fit_model.judgement(held_out("h100"))
    assert len(text.splitlines()) == 4 and f"{len(held_out('h100'))} problems" in text


@GPUS
def test_what_is_chosen_is_seldom_slower_than_xla_and_not_far_behind_the_better_of_both(gpu):
    """Asked for are a mean of at least 1.00 of XLA, and a 5th percentile of at least 0.95."""
    of_xla, of_best = [], []
    for problem, (_, config) in losses(gpu).items():
        xla, fused = held_out(gpu)[problem][None], held_out(gpu)[problem][config]
        us = xla if crossover.verdict(problem, gpu).xla_runs else fused
        of_xla.append(xla / us)
        of_best.append(min(xla, fused) / us)
    assert statistics.geometric_mean(of_xla) >= 1.0 and fit_model._at(of_xla, 0.05) >= 0.95
    assert statistics.mean(of_best) >= 0.96 and fit_model._at(of_best, 0.05) >= 0.85


def test_choices_that_are_measured_again_lose_less():
    """The fastest of many measured times is too short by chance. Measured again, it is so no more."""
    again = fit_model.load(fit_model.FOLDER / "h200" / fit_model._AGAIN, "h200")
    parts = fit_model.losses_again(held_out("h200"), again)
    assert len(parts) >= 50 and statistics.mean(parts) <= 0.02
    # By hand: one problem, its two configurations measured twice.
    problem, (first, second) = Problem("matmul", 64, 64, 64, "bfloat16", "bfloat16"), (Config(), Config(tile_n=64))
    made = {name: fit_model.Times(TARGET) for name in ("once", "twice")}
    made["once"][problem] |= {first: 10.0, second: 9.0}
    assert fit_model.losses_again(made["once"], made["twice"]) == []
    made["twice"][problem] |= {first: 8.0, second: 10.0}
    chosen = fit_model.losses(made["once"])[problem][1]
    assert fit_model.losses_again(made["once"], made["twice"]) == [made["twice"][problem][chosen] / 10.0 - 1]
