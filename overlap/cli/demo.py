"""`python -m overlap demo`: runs both halves of a layer, fused and by XLA. Prints a table and draws a picture.

It runs in one process with all GPUs, or in one process per GPU (launch/mpirun.sh -- python -m overlap demo), where
process 0 prints. Without GPUs the kernels are emulated. The emulator runs all devices in one process, so several
processes without GPUs run only XLA's implementation.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import overlap
from overlap import _compat, _settings
from overlap.choice.problem import Problem
from overlap.cli import picture, tables
from overlap.cli.devices import MOST_EMULATED, why_not_gpus
from overlap.cli.spans import Span, spans_of
from overlap.tuning.operations import call_operation, product
from overlap.tuning.programs import (
    Call,
    call_program,
    complete_program,
    draw_operands,
    error_bound,
    error_program,
    loop_program,
    mesh_of,
)
from overlap.tuning.timing import Loop, calls_s

_EMULATED_DEVICES, _EMULATED_CTAS = 4, 4
# Sizes per device. Emulated, each device has four tiles for each shard: enough to show the order of events.
_ON_GPUS = tuple(
    Problem(op, 1024, 4096, 4096, "float16", "float16") for op in ("all_gather_lhs_matmul", "matmul_reduce_scatter")
)
_EMULATED = tuple(dataclasses.replace(problem, m=256, n=256, k=256) for problem in _ON_GPUS)
_EMULATED_CONFIG = overlap.Config(tile_n=128)
_BY_XLA = {"": "all-gather, then dot", "m": "dot, then reduce-scatter"}
# The relative error of a right float16 product is several times smaller than this.
_FLOAT16_ERROR = 1e-2
# A function that takes a text: what is being done now.
type _Report = Callable[[str], None]
_ITERATIONS, _LAUNCHES, _CALLS, _ROUNDS, _WARM_UP_S = 20, 2, 20, 7, 0.5


@dataclasses.dataclass
class _Row:
    """A row of the table.

    Attributes:
      op: the operation.
      method: "fused", "xla" or "roof".
      what: what runs, in words.
      error: relative error of the result against the f32 product.
      ok: whether the error is small enough.
      loop_us: microseconds of one call in a loop on the devices; None if that was not measured.
      wall_us: microseconds of one call from Python.
    """

    op: str
    method: str
    what: str
    error: float
    ok: bool = True
    loop_us: float | None = None
    wall_us: float | None = None


class _WrongDevices(ValueError):
    """Raised if this machine cannot run as many devices as `--devices` says."""


def run(out: pathlib.Path, *, devices: int | None = None, emulate: bool = False) -> int:
    """Runs the demo.

    Args:
      out: where to write the picture.
      devices: how many devices; None: all GPUs, or 4 emulated devices.
      emulate: whether to emulate even if there are GPUs.

    Returns:
      The exit status: 0; 1 if a result is wrong, or there is no result or no picture; 2 for wrong arguments.
    """
    console, errors = Console(), Console(stderr=True)
    reason = "asked for with --emulate" if emulate else why_not_gpus()
    processes, leads, no_picture = 1, True, ""
    try:
        if not emulate:
            overlap.initialize()
            if jax.distributed.is_initialized():
                processes, leads = jax.process_count(), jax.process_index() == 0
        if processes > 1 and devices is not None:
            raise _WrongDevices(f"--devices is for one process: start as many as you want, not {processes}, with -np")
        console.quiet = errors.quiet = not leads
        with _progress(quiet=not leads) as report:
            if reason is None:
                (rows, count), panels = _run_on_gpus(devices, report), {}
            elif processes > 1:
                (rows, count), panels = _run_by_xla(report), {}
            else:
                rows, count, panels = _run_emulated(devices or _EMULATED_DEVICES, report)
            if all(row.ok for row in rows) and leads and (reason is None or panels):
                # If the picture fails, still show the table.
                try:
                    if reason is None:
                        _picture_by_emulation(count, out, report)
                    else:
                        report("the picture")
                        _draw(panels, out, count)
                except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                    no_picture = f"no picture was written: {error}"
    except _WrongDevices as error:
        _say(errors, str(error))
        return 2
    except (ValueError, NotImplementedError, RuntimeError) as error:
        _say(errors, str(error))
        return 1
    for problem in _ON_GPUS:
        of_one = [row for row in rows if row.op == problem.op]
        _print(console, of_one, count, emulated=reason is not None and processes == 1)
    console.print(_caption(reason, processes), style="italic dim", highlight=False)
    if processes > 1:
        # All processes end together: a process that goes on alone would log a warning about the others.
        multihost_utils.sync_global_devices("the demo's end")
    if not all(row.ok for row in rows):
        _say(errors, "the fused kernel's result is wrong; no picture was written")
        return 1
    if no_picture:
        _say(errors, no_picture)
        return 1
    if reason is not None and processes > 1:
        console.print(f"{processes} processes multiplied together; no picture: nothing was emulated.", highlight=False)
        return 0
    console.print(f"What each device multiplied, added, received and sent when: {out}", soft_wrap=True, highlight=False)
    return 0


def _say(errors: Console, text: str) -> None:
    """Prints why the command fails, as one line."""
    errors.print(f"demo: {' '.join(text.split())}", style="red", soft_wrap=True, markup=False, highlight=False)


def _mesh(devices: int) -> jax.sharding.Mesh:
    available = jax.devices()
    if devices > len(available):
        raise _WrongDevices(f"--devices must be at most {len(available)} on this machine, got {devices}")
    return mesh_of(available[:devices])


def _of(problem: Problem, devices: int) -> Problem:
    """Returns `problem` on `devices` devices, with the same number of rows per device."""
    return dataclasses.replace(problem, devices=devices, m=problem.m * (devices if problem.scattered else 1))


def _methods(problem: Problem, config: overlap.Config) -> dict[str, Call]:
    return {
        "fused": lambda lhs, rhs: call_operation(problem, lhs, rhs, config, "fused"),
        "xla": lambda lhs, rhs: call_operation(problem, lhs, rhs, None, "xla"),
    }


def _run_emulated(devices: int, report: _Report) -> tuple[list[_Row], int, dict[str, list[Span]]]:
    if devices > MOST_EMULATED:
        raise _WrongDevices(f"--devices must be at most {MOST_EMULATED} where they are emulated, got {devices}")
    if _compat.backends_are_initialized():
        raise RuntimeError("the demo sets the number of CPU devices, so it has to run before devices are used")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mesh, rows, panels = _mesh(devices), [], {}
    for problem in (_of(problem, devices) for problem in _EMULATED):
        more, panels[problem.op] = _emulated(problem, mesh, report)
        rows += more
    return rows, devices, panels


def _run_by_xla(report: _Report) -> tuple[list[_Row], int]:
    """XLA's implementation on the CPU devices of all processes."""
    mesh, rows = mesh_of(jax.devices()), []
    for problem in (_of(problem, mesh.size) for problem in _EMULATED):
        report(f"{problem.op}: xla in {jax.process_count()} processes")
        operands, call = draw_operands(problem, mesh, 0), _methods(problem, _EMULATED_CONFIG)["xla"]
        start = time.perf_counter()
        result = call_program(problem, call, mesh)(*operands).block_until_ready()
        wall_us = (time.perf_counter() - start) * 1e6
        error = float(error_program(problem, mesh)(*operands, result))
        rows.append(_Row(problem.op, "xla", _BY_XLA[problem.scattered], error, error < _FLOAT16_ERROR, wall_us=wall_us))
    return rows, mesh.size


def _draw(panels: dict[str, list[Span]], out: pathlib.Path, devices: int) -> None:
    title = f"emulated: {devices} {_settings.emulated_gpu().capitalize()} devices of {_EMULATED_CTAS} CTAs"
    picture.draw(panels, out, devices=devices, title=os.environ.get("OVERLAP_DEMO_TITLE", title))


def _emulated(problem: Problem, mesh: jax.sharding.Mesh, report: _Report) -> tuple[list[_Row], list[Span]]:
    """Runs one operation emulated. Returns its rows of the table, and the spans of its picture."""
    operands, rows = draw_operands(problem, mesh, 0), []
    events: Sequence[overlap.emulation.Event] = ()
    for name, call in _methods(problem, _EMULATED_CONFIG).items():
        report(f"{problem.op}: {name} on {mesh.size} CPU devices")
        start = time.perf_counter()
        once = call_program(problem, call, mesh)
        if name == "fused":
            result, events = _recorded(once, operands)
        else:
            result = once(*operands).block_until_ready()
        wall_us = (time.perf_counter() - start) * 1e6
        what = "one kernel" if name == "fused" else _BY_XLA[problem.scattered]
        error = float(error_program(problem, mesh)(*operands, result))
        rows.append(_Row(problem.op, name, what, error, wall_us=wall_us))
    _judge(rows, problem)
    return rows, spans_of(events, problem.op, mesh.size)


def _recorded(
    program: Callable[..., jax.Array], operands: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, list[overlap.emulation.Event]]:
    """Runs `program` in the emulator. Returns the result and the record of events."""
    # These two settings resemble hardware most: copies complete at random times, and threads take turns.
    settings = {"completion": "random", "scheduler": "round_robin", "record": True}
    with overlap.emulation.emulate(cores=_EMULATED_CTAS, **settings) as emulated:
        result = program(*operands).block_until_ready()
    return result, emulated.events


def _run_on_gpus(devices: int | None, report: _Report) -> tuple[list[_Row], int]:
    devices = devices or len(jax.devices())
    mesh = _mesh(devices)
    rows = [row for problem in _ON_GPUS for row in _on_gpus(_of(problem, devices), mesh, report)]
    return rows, devices


def _on_gpus(problem: Problem, mesh: jax.sharding.Mesh, report: _Report) -> list[_Row]:
    shards = draw_operands(problem, mesh, 0)
    complete = complete_program(problem, mesh)(*shards)
    methods = {name: (call, shards) for name, call in _methods(problem, overlap.Config()).items()}
    methods["roof"] = (functools.partial(product, problem), complete)
    what = {"fused": "one kernel", "xla": "NCCL, then cuBLAS", "roof": "cuBLAS alone, data already gathered"}
    if problem.scattered:
        what |= {"xla": "cuBLAS, then NCCL", "roof": "cuBLAS alone, nothing summed"}
    rows, calls, loops = [], {}, {}
    for name, (call, operands) in methods.items():
        report(f"{problem.op}: {name}: compiling and checking")
        calls[name] = call_program(problem, call, mesh)
        result = calls[name](*operands)
        error = error_program(problem, mesh, name == "roof")(*operands, result)
        rows.append(_Row(problem.op, name, what[name], float(error)))
        loops[name] = Loop(problem, loop_program(problem, call, mesh, _ITERATIONS), _ITERATIONS, operands, result)
        loops[name].compile()
    _judge(rows, problem)
    loops["roof"].load(_WARM_UP_S)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    for _ in range(_ROUNDS):
        report("timing")
        for name, (_, operands) in methods.items():
            times[name].append((loops[name].call_s(_LAUNCHES), calls_s(calls[name], operands, _CALLS)))
    for row in rows:
        row.loop_us, row.wall_us = (1e6 * statistics.median(each) for each in zip(*times[row.method], strict=True))
    return rows


def _picture_by_emulation(devices: int, out: pathlib.Path, report: _Report) -> None:
    """Draws the GPUs' schedule from an emulated run at a small size, since a GPU keeps no record of its copies.

    The emulated run has a process of its own: the number of CPU devices must be set before any device is used.
    """
    report("the picture: the same schedule, emulated")
    title = "the GPUs' schedules, replayed by the emulator at small sizes"
    command = [sys.executable, "-m", "overlap", "demo", "--emulate", "--devices", str(devices), "--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OVERLAP_DEMO_TITLE": title}
    replay = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if replay.returncode != 0:
        last = (replay.stderr.strip().splitlines() or [f"exit status {replay.returncode}"])[-1]
        raise RuntimeError(f"the emulated replay for it failed: {last}")


def _judge(rows: list[_Row], problem: Problem) -> None:
    """Sets `ok` of each row: whether its error is within the bound that follows from the error of XLA's result."""
    allowed = error_bound(problem, next(row.error for row in rows if row.method == "xla"))
    for row in rows:
        row.ok = row.error <= allowed  # False for NaN


def _print(console: Console, rows: list[_Row], devices: int, *, emulated: bool) -> None:
    """Prints the results of one operation."""
    by_name = {row.method: row for row in rows}
    timed = all(row.loop_us is not None for row in rows)
    kind = "emulated CPU devices" if emulated else "CPU devices" if not timed else jax.devices()[0].device_kind
    title = f"{rows[0].op}, {devices} × {kind}"
    times = ("time (meaningless)",) if not timed else ("loop, µs", "call, µs", "XLA / this", "roof / this")
    headings = ("method", "what runs", *times, "error against f32")
    lines: list[list[tables.Cell]] = []
    for row in rows:
        cells: list[tables.Cell] = [row.method, row.what]
        if row.loop_us is None or row.wall_us is None:
            cells.append(Text(f"{(row.wall_us or 0) / 1e6:.2f} s", style="" if timed else "dim"))
        elif row.ok:
            ratios = [(by_name[other].loop_us or 0) / row.loop_us for other in ("xla", "roof")]
            cells += [f"{row.loop_us:.0f}", f"{row.wall_us:.0f}", f"{ratios[0]:.2f}", f"{ratios[1]:.3f}"]
        else:
            cells += ["–"] * 4
        lines.append([*cells, f"{row.error:.2e}" if row.ok else Text(f"{row.error:.2e} FAILED", style="red")])
    tables.show(console, title, headings, lines, text_columns=("method", "what runs"))


def _caption(emulated_because: str | None, processes: int) -> str:
    problem = (_EMULATED if emulated_because else _ON_GPUS)[0]
    text = f"Per device {problem.m} rows, n = {problem.n}, k = {problem.k}, {problem.dtype}. "
    if emulated_because and processes > 1:
        return text + (
            f"No fused kernel ran ({emulated_because}): the emulator runs all devices in one process. The times of CPU "
            "devices say nothing."
        )
    if emulated_because:
        return text + (
            f"Emulated: {emulated_because}. The emulator checks the order of events and the numbers; its time says "
            "nothing about a GPU's."
        )
    return text + "Loop: per run inside one program; call: per call from Python. Medians of 7 interleaved rounds."


@contextmanager
def _progress(*, quiet: bool) -> Iterator[_Report]:
    """Yields a function that shows a text: beside a clock if the output is a terminal, else as a line of its own."""
    console = Console(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        said: list[str] = []

        def report(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal and text not in said:
                console.print(f"… {text}", soft_wrap=True, highlight=False)
            said.append(text)

        yield report
