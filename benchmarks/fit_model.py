"""Fits the rates of the model of `overlap.choice` to measurements, or judges how much time the model's choices lose.

    python -m benchmarks.fit_model                fits rates_h200.json to files of benchmarks/model/h200
    python -m benchmarks.fit_model --judge        judges the model on benchmarks/model/h200/held_out.csv.xz, and the
                                                  choice of XLA on overlap/choice/crossover.csv, each problem left out

With `--gpu h100` it does the same for an H100.

The measurements come from `benchmarks.configurations`, and are stored compressed (`xz -9e FILE.csv`). The model shall
find the fastest configuration of a problem. So the fit gives more weight to the ratios of times within a problem than
to the times themselves.
"""

from __future__ import annotations

import collections
import csv
import dataclasses
import json
import lzma
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from benchmarks import command
from benchmarks.configurations import PROBLEM_FIELDS, XLA
from benchmarks.model_tasks import TARGETS, add_gpu
from overlap.choice import crossover, model, rates, space
from overlap.choice.problem import Problem
from overlap.choice.rates import Rates
from overlap.choice.tables import replace
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments
from overlap.kernels.config import Config
from overlap.kernels.target import Target

# For each GPU a folder. `held_out.csv.xz` is for the judgement. The model is fitted to no file whose name begins with
# `held_out`. The times of a problem in a file are from one session. Times of different sessions are not compared, since
# GPUs differ by some percent.
FOLDER = pathlib.Path(__file__).parent / "model"
_HELD_OUT = "held_out.csv.xz"
# If there is this file, the choices and the fastest configurations of `_HELD_OUT` were measured a second time. The
# fastest of many measured times is too short by chance; its second time is not.
_AGAIN = "held_out_again.csv.xz"
# For each fitted rate its start value, and the largest factor by which the fitted value may differ from the start
# value. All other rates do not appear in plain products, or are known from the data sheet. The rates of power are hard
# to tell apart, so they may change by small factors only. `in_turn` may change little for another reason: the samples
# are so short that the GPU's clock still depends on the configurations that ran before. A product at the power limit
# that is measured alone gains less by `in_turn` (harness, 2026-11-23: 8192³ takes 2% longer than with the cooperative
# schedule).
FREE = {
    "step_cycles": (40.0, 5.0),
    "l2_bytes_per_cycle": (75.0, 1.6),
    "group_bytes_per_cycle": (35.0, 3.0),
    "unaligned_lines": (2.2, 1.8),
    "overlap_exponent": (5.0, 1.8),
    "empty_row_cycles": (5.0, 4.0),
    "store_bytes_per_cycle": (90.0, 4.0),
    "store_wait_cycles": (340.0, 3.0),
    "tile_cycles": (1200.0, 4.0),
    "in_turn": (1.0, 1.1),
    "hbm_bytes_per_us": (4.5e6, 1.2),
    "load_latency_cycles": (900.0, 2.0),
    "sum_bytes_per_us": (1.0e7, 16.0),
    "flag_cycles": (5900.0, 3.0),
    "add_bytes_per_cycle": (27.0, 3.0),
    "launch_us": (3.0, 2.0),
    "next_launch_us": (2.0, 4.0),
    "multiplied_per_us": (700e6, 2.0),
    "loaded_per_us": (3e7, 4.0),
    "clock_exponent": (0.4, 2.0),
}
# Replaces entries of FREE: an H100's memory has 3.35 TB/s, an H200's 4.8.
FREE_OF = {"h100": {"hbm_bytes_per_us": (3.1e6, 1.1)}}
# XLA's time measured alone, divided by XLA's time in `benchmarks.configurations` with programs of less than
# _LONG_LAUNCH_MS. In the latter, XLA's product runs after our kernels, which draw more power, so that the clock is
# lower. For 12 products, the harness, whose samples are six times as long, measured a 3% lower XLA / fused (2026-11-23,
# H200).
XLA_BY_ITSELF, _LONG_LAUNCH_MS = 0.97, 50.0
# Files without the column `launch_ms` were measured with programs of this length.
_USUAL_LAUNCH_MS = 12.0
# Of files without the column `calls`, whose loops made one call per iteration. The GPU then waits this long between
# calls: the median of the differences to eight calls per iteration, for 385 configurations of 16 to 60 µs on an H200
# (1.6) and 207 on an H100 (1.9). The times of shorter calls are those of the host, so problems whose fastest
# configuration takes less than _LEAST_ALONE_US are left out.
_ALONE_US, _LEAST_ALONE_US = {"h200": 1.6, "h100": 1.9}, 18.0
# The weight of the mean time of a problem's configurations, relative to the weight of their ratios.
_WEIGHT_OF_ALL = 0.3
# A choice of the kernel is a loss if XLA's time over the kernel's is below this.
LOSS = 0.98
# Relative errors above this are taken for noise: in the fit, their weight falls with their size.
_NOISE = 0.05


class Times(collections.defaultdict[Problem, dict[Config | None, float]]):
    """Times in microseconds, by problem and configuration. The key None stands for XLA's product.

    Attributes:
      target: the GPU that was measured.
      weights: for each problem how much its times count in the fit: the square root of how long each was measured, in
        units of `_USUAL_LAUNCH_MS`.
      short: the problems whose programs took less than `_LONG_LAUNCH_MS`.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(dict)
        self.target = target
        self.weights: dict[Problem, float] = {}
        self.short: set[Problem] = set()


def _rows(path: pathlib.Path) -> Iterator[dict[str, str]]:
    opened = lzma.open if path.suffix == ".xz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def load(path: pathlib.Path, gpu: str = "h200") -> Times:
    """Reads the times in a file (CSV, or CSV compressed by xz), measured on a GPU of `TARGETS`.

    Configurations that failed are left out.
    """
    times, alone = Times(TARGETS[gpu]), set[Problem]()
    for row in _rows(path):
        given: dict[str, Any] = {name: row[name] for name in PROBLEM_FIELDS}
        given |= {name: int(row[name]) for name in ("m", "n", "k")}
        fields: dict[str, Any] = {} if row["config"] == XLA else json.loads(row["config"])
        # Clusters along m and n are no longer there.
        if fields.get("cluster", 1) > 1 and fields.get("cluster_along", "m") != "k":
            continue
        config = None if row["config"] == XLA else Config(**fields)
        if row["status"] == "ok":
            problem = Problem(**given)
            launch_ms = float(row.get("launch_ms", _USUAL_LAUNCH_MS))
            if launch_ms < _LONG_LAUNCH_MS:
                times.short.add(problem)
            by_itself = XLA_BY_ITSELF if config is None and problem in times.short else 1.0
            times[problem][config] = float(row["us"]) * by_itself - (0.0 if "calls" in row else _ALONE_US[gpu])
            times.weights[problem] = math.sqrt(int(row["samples"]) * launch_ms / _USUAL_LAUNCH_MS)
            if "calls" not in row:
                alone.add(problem)
    for problem in alone:
        ours = (us for config, us in times[problem].items() if config is not None)
        if min(ours, default=0.0) < _LEAST_ALONE_US - _ALONE_US[gpu]:
            del times[problem]
    return times


def held_out(gpu: str) -> pathlib.Path:
    """Returns the file for the judgement of the model of a GPU."""
    return FOLDER / gpu / _HELD_OUT


def fitted_to(gpu: str) -> list[pathlib.Path]:
    """Returns the files that the model of a GPU is fitted to."""
    return sorted(path for path in (FOLDER / gpu).glob("*.csv.xz") if not path.name.startswith("held_out"))


# --- The fit ----------------------------------------------------------------------------------------------------------


def _residuals(times: Times, with_rates: Rates) -> list[float]:
    residuals = []
    for problem, of_problem in times.items():
        logs = [
            math.log(us / model.predicted_us(config, problem, times.target, with_rates))
            for config, us in of_problem.items()
            if config is not None
        ]
        # More weight for long times, where a wrong choice costs more, and for problems measured for longer.
        weight = min(1.0, 0.3 + statistics.median(of_problem.values()) / 150.0) * times.weights[problem]
        middle = statistics.median(logs)
        residuals += [weight * (x - middle) for x in logs]
        residuals.append(_WEIGHT_OF_ALL * weight * middle * math.sqrt(len(logs)))
    return residuals


def fit(sessions: Sequence[Times], others: Rates) -> Rates:
    """Returns the rates that fit the times of all sessions best. Only the rates in `FREE` differ from `others`."""
    free = FREE | FREE_OF.get(rates.measured_gpu(sessions[0].target), {})
    names = list(free)
    first, room = np.log(list(free.values())).T

    def at(x: np.ndarray) -> Rates:
        return dataclasses.replace(others, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    found = optimize.least_squares(
        lambda x: np.concatenate([_residuals(times, at(x)) for times in sessions]),
        first,
        bounds=(first - room, first + room),
        loss="soft_l1",
        f_scale=_NOISE,
        diff_step=0.01,
        max_nfev=30,
    )
    return at(found.x)


def _rounded(with_rates: Rates) -> dict[str, float]:
    return {
        name: float(f"{value:.4g}")
        for name, value in dataclasses.asdict(with_rates).items()
        if not isinstance(value, bool)
    }


# --- The judgement ----------------------------------------------------------------------------------------------------


def losses(times: Times, with_rates: Rates | None = None) -> dict[Problem, tuple[float, Config]]:
    """Returns for each problem the loss by the model's choice, and the chosen configuration.

    The model chooses among the measured configurations. The loss is (time of the choice / time of the fastest
    configuration) - 1.
    """
    result = {}
    for problem, of_problem in times.items():
        measured = {config: us for config, us in of_problem.items() if config is not None}
        chosen = min(measured, key=lambda config: space.expected_us(config, problem, times.target, with_rates))
        result[problem] = measured[chosen] / min(measured.values()) - 1, chosen
    return result


def losses_again(times: Times, again: Times, with_rates: Rates | None = None) -> list[float]:
    """Returns (time of the model's choice / time of the fastest configuration) - 1, both measured a second time.

    Which configuration is the fastest was found in `times`. Problems of which not both were measured again are left
    out.
    """
    result = []
    for problem, (_, chosen) in losses(times, with_rates).items():
        fastest = min((c for c in times[problem] if c is not None), key=lambda c, of=times[problem]: of[c])
        second = again.get(problem, {})
        if chosen in second and fastest in second:
            result.append(second[chosen] / second[fastest] - 1)
    return result


def _at(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def judgement(times: Times, with_rates: Rates | None = None) -> str:
    """Says in words how much time the model's choices lose, and how the library's choices compare with XLA."""
    lost = losses(times, with_rates)
    parts = [loss for loss, _ in lost.values()]
    lines = [
        f"{len(times)} problems: the model's choice takes longer than the best of the search by "
        f"{100 * statistics.mean(parts):.1f}% in the mean, {100 * _at(parts, 0.95):.1f}% at the 95th percentile, "
        f"{100 * max(parts):.1f}% at most"
    ]
    pairs = {p: (of[None], of[lost[p][1]]) for p, of in times.items() if None in of}
    if pairs:
        gpu = rates.measured_gpu(times.target)
        chosen = {p: xla if crossover.verdict(p, gpu).xla_runs else fused for p, (xla, fused) in pairs.items()}
        lines.append(_ratios("XLA / fused", {p: xla / fused for p, (xla, fused) in pairs.items()}))
        lines.append(_ratios("XLA / what the library chooses", {p: xla / chosen[p] for p, (xla, _) in pairs.items()}))
        lines.append(_ratios("best of both / what it chooses", {p: min(both) / chosen[p] for p, both in pairs.items()}))
    return "\n".join(lines)


def left_out(gpu: str, communicates: bool) -> dict[Problem, tuple[float, float]]:
    """Chooses for each measured problem of a GPU by the measurements of all others.

    Args:
      gpu: the GPU.
      communicates: True for the collectives, False for plain products.

    Returns:
      For each problem XLA's time over that of what is chosen, and over the kernel's.
    """
    rows = [row for row in crossover.measurements() if (row.gpu, row.problem.communicates) == (gpu, communicates)]
    xla_runs = [crossover.verdict(row.problem, gpu, left_out=True).xla_runs for row in rows]
    return {row.problem: (1.0 if xla else row.ratio, row.ratio) for row, xla in zip(rows, xla_runs)}


def judgement_of_choices(gpu: str) -> str:
    """Says in words how much the choice between the kernel and XLA gains, each measured problem left out in turn.

    The losses are counted, and those of collectives listed: the kernel is chosen, though XLA is more than 2% faster.
    """
    lines = []
    for name, communicates in (("collectives", True), ("matmul", False)):
        found = left_out(gpu, communicates)
        lost = sorted((gain, str(problem)) for problem, (gain, _) in found.items() if gain < LOSS)
        lines.append(f"{name}, {len(found)} problems, each left out, {len(lost)} losses:")
        lines += [f"    {gain:.3f} {problem}" for gain, problem in lost if communicates]
        if found:
            lines.append(_ratios("  XLA / what is chosen", {problem: gain for problem, (gain, _) in found.items()}))
            lines.append(_ratios("  XLA / the kernel", {problem: ratio for problem, (_, ratio) in found.items()}))
    return "\n".join(lines)


def _ratios(name: str, ratios: dict[Problem, float]) -> str:
    values = list(ratios.values())
    return (
        f"{name}: geometric mean {math.exp(statistics.mean(map(math.log, values))):.3f}, "
        f"5th percentile {_at(values, 0.05):.3f}, least {min(values):.3f} ({min(ratios, key=lambda p: ratios[p])})"
    )


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("fit_model", __doc__)
    add_gpu(parser)
    parser.add_argument("--judge", action="store_true", help="only judge, fit nothing")
    parser.add_argument(
        "--times", type=pathlib.Path, help="a CSV with other measurements than those in benchmarks/model"
    )
    given = parser.parse_args(None if arguments is None else list(arguments))
    sessions = []
    for path in [given.times] if given.times else [held_out(given.gpu)] if given.judge else fitted_to(given.gpu):
        try:
            times = load(path, given.gpu)
        except (KeyError, TypeError, ValueError) as error:
            raise WrongArguments(f"fit_model: {path} holds no times of benchmarks.configurations: {error!r}") from None
        if not times:
            raise WrongArguments(f"fit_model: {path} holds no times")
        print(judgement(times), flush=True)
        sessions.append(times)
    if given.judge:
        if not given.times and (path := FOLDER / given.gpu / _AGAIN).exists():
            parts = losses_again(sessions[0], load(path, given.gpu))
            if parts:
                print(
                    f"measured again, {len(parts)} problems: the choice takes longer than the fastest by "
                    f"{100 * statistics.mean(parts):.1f}% in the mean, {100 * _at(parts, 0.95):.1f}% at the 95th "
                    "percentile"
                )
        print(judgement_of_choices(given.gpu))
        return 0
    found = fit(sessions, rates.rates_of(TARGETS[given.gpu]))
    for times in sessions:
        print(judgement(times, found))
    problems = len(set().union(*sessions))
    kind, file = TARGETS[given.gpu].kind, rates.file_of(given.gpu)
    replace(
        file, json.dumps({"fitted to": f"{problems} problems on an {kind}", "rates": _rounded(found)}, indent=1) + "\n"
    )
    print(f"written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
