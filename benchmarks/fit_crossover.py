"""Fits the distances by which `overlap.choice.crossover` weighs measurements, and says how good its choices are.

    python -m benchmarks.fit_crossover            writes overlap/choice/crossover_distances.json
    python -m benchmarks.fit_crossover --judge    only judges

Each measured pair of times in `crossover.csv` is predicted from the others, those of the same problem on another GPU
left out. The fit makes the errors of these predictions small; the judgement says what choices they lead to.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import optimize

from benchmarks import command
from overlap.choice import crossover
from overlap.choice.crossover import DIFFERENCES, Measured
from overlap.choice.tables import replace
from overlap.cli import ending

# Errors of the logarithm of the ratio above this count less and less.
_NOISE = 0.08
# No products of a batch are measured against XLA. For a doubling of the batch, the mean factor of sizes is taken.
_NOT_FITTED, _SIZES = "batch", crossover.SIZES
# A factor of zero would let a measurement of another problem count as one of this problem.
_LEAST, _MOST = 0.02, 20.0


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The measurements of one operation.

    Attributes:
      measured: the N measurements.
      differences: [N, N, 9] how they differ (`crossover.differences`).
      logs: [N] the logarithms of XLA's time divided by the fused kernel's.
      estimates: [N] what `crossover.estimated_log_ratio` gives for them.
      usable: [N, N] whether the second may predict the first: it is of another problem, and of the same dtype unless
        there is none.
    """

    measured: Sequence[Measured]
    differences: np.ndarray
    logs: np.ndarray
    estimates: np.ndarray
    usable: np.ndarray

    @staticmethod
    def of(measured: Sequence[Measured]) -> Pairs:
        """Returns the pairs of some measurements, all of one operation."""
        apart = np.array([[a.problem != b.problem for b in measured] for a in measured])
        kinds = np.array([crossover.kind(one.problem) for one in measured])
        of_kind = apart & (kinds[:, None] == kinds)
        return Pairs(
            measured,
            np.array([[crossover.differences(a, b) for b in measured] for a in measured]),
            np.array([math.log(one.ratio) for one in measured]),
            np.array([crossover.estimated_log_ratio(one.problem, one.gpu) for one in measured]),
            np.where(of_kind.any(1, keepdims=True), of_kind, apart),
        )

    def predicted(self, factors: np.ndarray) -> np.ndarray:
        """Returns [N] what the measurements of other problems predict for `logs`."""
        distances = np.where(self.usable, self.differences @ factors, np.inf)
        weights = np.exp(distances.min(1, keepdims=True) - distances)
        return self.estimates + weights @ (self.logs - self.estimates) / weights.sum(1)


def by_operation(measured: Iterable[Measured]) -> list[Pairs]:
    """Returns the pairs of each operation of which at least two problems were measured."""
    groups: dict[str, list[Measured]] = {}
    for one in measured:
        groups.setdefault(one.problem.op, []).append(one)
    return [Pairs.of(group) for group in groups.values() if len({one.problem for one in group}) > 1]


def error(groups: Sequence[Pairs], factors: np.ndarray) -> float:
    """Returns the mean error of predictions; large errors count less than quadratically."""
    errors = np.concatenate([pairs.predicted(factors) - pairs.logs for pairs in groups])
    return float(np.mean(np.sqrt(1 + (errors / _NOISE) ** 2) - 1))


def fit(groups: Sequence[Pairs]) -> dict[str, float]:
    """Returns the factor of each difference with which the measurements predict each other best."""
    fitted = [name for name in DIFFERENCES if name != _NOT_FITTED]

    def factors(x: np.ndarray) -> dict[str, float]:
        found = dict(zip(fitted, np.exp(x).tolist(), strict=True))
        return found | {_NOT_FITTED: statistics.mean(found[name] for name in _SIZES)}

    found = optimize.minimize(
        lambda x: error(groups, in_order(factors(x))),
        np.zeros(len(fitted)),
        method="L-BFGS-B",
        bounds=[(math.log(_LEAST), math.log(_MOST))] * len(fitted),
        options={"maxiter": 40},
    )
    return {name: float(f"{value:.3g}") for name, value in factors(found.x).items()}


def in_order(factors: dict[str, float]) -> np.ndarray:
    """Returns the factors in the order of `DIFFERENCES`."""
    return np.array([factors[name] for name in DIFFERENCES])


def judgement(pairs: Pairs, factors: np.ndarray) -> dict[str, float]:
    """Returns how good choices are that are made without the problem's own measurement.

    Returns:
      "best / chosen" and "XLA / chosen": geometric means of the time of the better of both, and of XLA, divided by that
      of what is chosen; with " at 5%" the 5th percentiles of both.
    """
    xla_is_chosen = pairs.predicted(factors) < math.log(crossover.LEAST_GAIN)
    of_chosen = np.where(xla_is_chosen, 0.0, pairs.logs)
    of_best = of_chosen - np.maximum(pairs.logs, 0.0)
    return {
        name + suffix: math.exp(value)
        for name, logs in (("best / chosen", of_best), ("XLA / chosen", of_chosen))
        for suffix, value in (("", np.mean(logs)), (" at 5%", np.quantile(logs, 0.05)))
    }


def _stored() -> dict[str, float]:
    return json.loads(crossover.DISTANCES.read_text(encoding="utf-8"))["factors"]


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("fit_crossover", __doc__)
    parser.add_argument("--judge", action="store_true", help="only judge, fit nothing")
    given = parser.parse_args(None if arguments is None else list(arguments))
    groups = by_operation(crossover.measurements())
    factors = _stored() if given.judge else fit(groups)
    for pairs in groups:
        words = ", ".join(f"{name} {value:.3f}" for name, value in judgement(pairs, in_order(factors)).items())
        print(f"{pairs.measured[0].problem.op}, {len(pairs.measured)} measurements: {words}")
    if not given.judge:
        fitted_to = f"{sum(len(pairs.measured) for pairs in groups)} measurements of crossover.csv"
        replace(crossover.DISTANCES, json.dumps({"fitted to": fitted_to, "factors": factors}, indent=1) + "\n")
        print(f"written to {crossover.DISTANCES}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
