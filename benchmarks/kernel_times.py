"""Where the time of a program goes: its kernels on one GPU, summed by name, from a trace of jax's profiler."""

from __future__ import annotations

import collections
import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax

_LONGEST_NAME = 90


def of_trace(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Traces `run`, which takes `steps` steps and waits for their end. Returns what JSON can hold.

    Returns:
      "wall_us": from the start of the first kernel to the end of the last one, for each step. "kernels": name,
      microseconds and launches for each step, the longest first. Both are of the first GPU, empty without GPUs.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            run()
        (path,) = pathlib.Path(folder).rglob("perfetto_trace.json.gz")
        with gzip.open(path, "rt", encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    return summed(events, steps)


def summed(events: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Sums the kernels in the events of a trace, see `of_trace`."""
    names = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == "process_name"}
    gpus = sorted(pid for pid, name in names.items() if "GPU" in name)
    kernels = [each for each in events if gpus and each.get("pid") == gpus[0] and _is_kernel(each)]
    total: collections.Counter[str] = collections.Counter()
    launches: collections.Counter[str] = collections.Counter()
    for each in kernels:
        name = each["name"][:_LONGEST_NAME]
        total[name] += each["dur"]
        launches[name] += 1
    start = min((each["ts"] for each in kernels), default=0.0)
    end = max((each["ts"] + each["dur"] for each in kernels), default=0.0)
    found = [[name, us / steps, launches[name] / steps] for name, us in total.most_common()]
    return {"wall_us": (end - start) / steps, "kernels": found}


def _is_kernel(event: dict[str, Any]) -> bool:
    """Whether an event is of a kernel or a copy. Others on the same rows name the modules and operations of XLA."""
    arguments = event.get("args", {})
    is_launched = "hlo_op" in arguments or "correlation_id" in arguments
    return event.get("ph") == "X" and bool(event.get("dur")) and is_launched


def text(title: str, found: dict[str, Any], most: int = 30) -> str:
    """Returns a table of the kernels that take the most time, as text."""
    busy = sum(us for _, us, _ in found["kernels"])
    lines = [f"{title}: {found['wall_us']:.0f} µs a step, kernels {busy:.0f} µs (the first GPU)"]
    lines += [f"{us:10.1f} µs  x{launches:6.1f}  {name}" for name, us, launches in found["kernels"][:most]]
    return "\n".join(lines)
