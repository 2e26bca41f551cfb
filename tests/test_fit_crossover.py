"""The fit of the distances between measurements of fused and XLA, and the judgement of the choices."""

import json
import math
import random

import numpy as np
import pytest

from benchmarks import fit_crossover
from overlap.choice import crossover
from overlap.choice.crossover import Measured
from overlap.choice.problem import Problem


def drawn(count, log_ratio):
    """Measurements of random problems, for which `log_ratio` is given the logarithms of m, n and k."""
    chance = random.Random(1)
    found = {}
    for _ in range(count):
        logs = [chance.uniform(6, 13) for _ in range(3)]
        m, n, k = (64 * max(round(2**x / 64), 1) for x in logs)
        problem = Problem("matmul", m, n, k, "bfloat16", "bfloat16", layout=chance.choice(["nn", "nt"]))
        found[problem] = Measured(problem, 100.0, 100.0 * math.exp(log_ratio(*logs)))
    return tuple(found.values())


@pytest.fixture
def of_depth(monkeypatch):
    """Measurements in which only k matters."""
    measured = drawn(60, lambda _m, _n, k: math.sin(k) / 3)
    monkeypatch.setattr(crossover, "measurements", lambda: measured)
    return measured


def test_what_matters_counts_most(of_depth, tmp_path, monkeypatch, capsys):
    stored = tmp_path / "distances.json"
    stored.write_text(json.dumps({"factors": dict.fromkeys(crossover.DIFFERENCES, 1.0)}))
    monkeypatch.setattr(crossover, "DISTANCES", stored)
    groups = fit_crossover.by_operation(of_depth)
    before = fit_crossover.error(groups, np.ones(len(crossover.DIFFERENCES)))
    assert fit_crossover.main(["--judge"]) == 0 and "written" not in capsys.readouterr().out
    assert fit_crossover.main([]) == 0 and "matmul, " in capsys.readouterr().out
    factors = json.loads(stored.read_text())["factors"]
    assert factors.keys() == set(crossover.DIFFERENCES)
    assert factors["k"] > 4 * max(factors["rows"], factors["n"], factors["layout"])
    assert fit_crossover.error(groups, fit_crossover.in_order(factors)) < before / 2


def test_each_is_predicted_as_if_it_was_not_measured(of_depth, monkeypatch):
    """By the library's own function, with the measurement itself taken away."""
    predicted = fit_crossover.Pairs.of(of_depth).predicted(np.array(crossover._factors()))
    for index in (0, 7, 30):
        others = tuple(one for one in of_depth if one is not of_depth[index])
        monkeypatch.setattr(crossover, "measurements", lambda others=others: others)
        problem = of_depth[index].problem
        expected = crossover.expected_ratio(problem, "h200", crossover.neighbours(problem))
        assert math.isclose(math.exp(predicted[index]), expected, rel_tol=1e-9)


def test_the_judgement_counts_what_is_lost(of_depth):
    pairs, factors = fit_crossover.Pairs.of(of_depth), np.array(crossover._factors())
    found = fit_crossover.judgement(pairs, factors)
    chosen = [
        one.xla_us if math.exp(log) < crossover.LEAST_GAIN else one.fused_us
        for one, log in zip(of_depth, pairs.predicted(factors), strict=True)
    ]
    assert len(set(chosen)) > 2
    best = [min(one.xla_us, one.fused_us) / us for one, us in zip(of_depth, chosen, strict=True)]
    assert math.isclose(found["best / chosen"], math.exp(np.mean(np.log(best))))
    assert math.isclose(
        found["XLA / chosen at 5%"],
        math.exp(np.quantile(np.log([one.xla_us / us for one, us in zip(of_depth, chosen, strict=True)]), 0.05)),
    )


def test_the_shipped_distances_choose_well():
    """Uses stored measurements, so the result does not depend on this machine."""
    groups = {pairs.measured[0].problem.op: pairs for pairs in fit_crossover.by_operation(crossover.measurements())}
    found = fit_crossover.judgement(groups["matmul"], np.array(crossover._factors()))
    assert found["best / chosen"] >= 0.97 and found["best / chosen at 5%"] >= 0.85
    assert found["XLA / chosen"] >= 1.02 and found["XLA / chosen at 5%"] >= 0.93
