"""Summarizes all problems of a run: the geometric mean and the minimum of the ratios of each method.

The methods are summarized for each dtype and layout. A ratio is the time of the roof / the method's time, or the time
of the library's bf16 kernel / the method's time. The minimum shows the problem for which the method is worst. A mean is
over the measured problems. Problems that a method cannot compute, that failed, or for which no time was left are not in
the mean. The summary says how many problems these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

ALL = "all"
# Columns with ratios of times: the roof's time / the method's, and the time of our kernel in bf16 / the method's.
_RATIOS = {"roof": "roof_over_this", "bf16": "bf16_over_this"}
COLUMNS = (
    "method",
    "dtype",
    "layout",
    "problems",
    "measured",
    "not_served",
    "failed",
    "roof_geomean",
    "roof_min",
    "roof_min_at",
    "bf16_geomean",
    "bf16_min",
    "bf16_min_at",
)
HEADINGS = (
    "method",
    "dtype",
    "layout",
    "measured",
    "not served",
    "failed",
    "roof/this geomean",
    "minimum",
    "at",
    "bf16/this geomean",
    "minimum",
)


def summarize(rows: Sequence[Mapping[str, Any]], roof: str) -> list[dict[str, Any]]:
    """Returns a row for each method, dtype and layout, and a row for all layouts together of each method and dtype.

    `rows` are the rows of all tables. The method `roof` is left out, because its ratio to itself is always 1.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for layout_of in (lambda row: row["layout"], lambda _: ALL):
        for row in rows:
            if row["method"] != roof:
                groups.setdefault((row["method"], row["dtype"], layout_of(row)), []).append(row)
    return [_group(*key, members) for key, members in groups.items()]


def _group(method: str, dtype: str, layout: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if row["status"] == "ok"]
    not_served = sum(row["status"].startswith("NOT SERVED") for row in rows)
    result: dict[str, Any] = dict.fromkeys(COLUMNS)
    result |= {"method": method, "dtype": dtype, "layout": layout, "problems": len(rows), "measured": len(measured)}
    result |= {"not_served": not_served, "failed": len(rows) - len(measured) - not_served}
    for name, column in _RATIOS.items():
        with_ratio = [row for row in measured if row[column] is not None]
        if not with_ratio:
            continue
        worst = min(with_ratio, key=lambda row: row[column])
        result[f"{name}_geomean"] = math.exp(math.fsum(math.log(row[column]) for row in with_ratio) / len(with_ratio))
        result[f"{name}_min"] = worst[column]
        result[f"{name}_min_at"] = f"{worst['shape']} {worst['layout']}"
    return result


def texts(row: Mapping[str, Any]) -> list[str]:
    """Writes the cells of a row, in the order of `HEADINGS`."""

    def number(name: str) -> str:
        return "–" if row[name] is None else f"{row[name]:.3f}"

    counts = [f"{row['measured']} of {row['problems']}", str(row["not_served"]), str(row["failed"])]
    ratios = [number("roof_geomean"), number("roof_min"), row["roof_min_at"] or "–"]
    return [row["method"], row["dtype"], row["layout"], *counts, *ratios, number("bf16_geomean"), number("bf16_min")]


def remarks(rows: Sequence[Mapping[str, Any]], left_out: Sequence[str]) -> list[str]:
    """Writes lines that name the problems that failed, and the problems that were left out for want of time."""
    failed = [
        f"{row['method']} failed: {row['shape']} {row['dtype']} {row['layout']}: {row['status']}"
        for row in rows
        if row["status"] != "ok" and not row["status"].startswith("NOT SERVED")
    ]
    return [*failed, *(f"left out for want of time: {problem}" for problem in left_out)]
