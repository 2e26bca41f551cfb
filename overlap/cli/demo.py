"""`python -m overlap demo`: the fused all-gather matmul beside XLA's, as a table and a picture."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import overlap
from overlap import _compat
from overlap.cli import measure, picture
from overlap.cli.devices import why_not_gpus
from overlap.cli.spans import spans_of

_EMULATED_DEVICES, _EMULATED_CTAS = 4, 4
# At most what a comparison within the same dtype allows: twice XLA's own error.
_ERROR_FACTOR = 2.0


@dataclasses.dataclass(frozen=True)
class _Problem:
    m_shard: int
    k: int
    n_shard: int
    config: overlap.Config

    def __str__(self) -> str:
        return f"({self.m_shard}, {self.n_shard}, {self.k})"


# The seed's published shape on GPUs; on the CPU four tiles a shard, enough for the order of events to show.
_ON_GPUS = _Problem(1024, 4096, 4096, overlap.Config())
_EMULATED = _Problem(256, 256, 256, overlap.Config(tile_n=128))


@dataclasses.dataclass
class _Row:
    """A line of the table; times in microseconds."""

    method: str
    what: str
    error: float
    ok: bool = True
    loop_us: float | None = None
    wall_us: float | None = None


class _TooManyDevices(ValueError):
    pass


def run(out: pathlib.Path, *, devices: int | None = None, emulate: bool = False) -> int:
    """Runs the demo and returns the exit status: 0 if the fused kernel ran and is right, 2 for wrong arguments."""
    console, errors = Console(), Console(stderr=True)
    if not out.parent.is_dir():
        errors.print(f"--out: there is no folder {out.parent}", style="red")
        return 2
    if devices is not None and devices < 1:
        errors.print(f"--devices must be at least 1, got {devices}", style="red")
        return 2
    reason = "asked for with --emulate" if emulate else why_not_gpus()
    try:
        with _progress() as step:
            if reason is None:
                rows, count = _run_on_gpus(devices, step)
                if all(row.ok for row in rows):
                    _picture_by_emulation(count, out, step)
            else:
                rows, count = _run_emulated(devices or _EMULATED_DEVICES, out, step)
    except _TooManyDevices as error:
        errors.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 2
    except (ValueError, NotImplementedError, RuntimeError) as error:
        errors.print(f"demo: {error}", style="red", markup=False, highlight=False)
        return 1
    console.print(_table(rows, count, reason))
    if not all(row.ok for row in rows):
        errors.print("The fused kernel's result is wrong; no picture was written.", style="red")
        return 1
    console.print(f"Which shard each device multiplied, received and sent when: {out}", soft_wrap=True, highlight=False)
    return 0


def _mesh(devices: int) -> jax.sharding.Mesh:
    available = jax.devices()
    if devices > len(available):
        raise _TooManyDevices(f"--devices must be at most {len(available)} on this machine, got {devices}")
    return jax.make_mesh(
        (devices,), (measure.AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=available[:devices]
    )


def _methods(problem: _Problem) -> dict[str, measure.Call]:
    def fused(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return overlap.all_gather_lhs_matmul(lhs, rhs, measure.AXIS, implementation="fused", config=problem.config)

    def xla(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return overlap.all_gather_lhs_matmul(lhs, rhs, measure.AXIS, implementation="xla")

    return {"fused": fused, "xla": xla}


def _run_emulated(devices: int, out: pathlib.Path, step: Any) -> tuple[list[_Row], int]:
    if _compat.backends_are_initialized():
        raise RuntimeError("the demo sets the number of CPU devices, so it has to run before devices are used")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    problem = _EMULATED
    mesh = _mesh(devices)
    lhs, rhs = measure.make_inputs(mesh, problem.m_shard, problem.k, problem.n_shard)
    rows = []
    events: Any = ()
    for name, call in _methods(problem).items():
        step(f"{name} on {devices} CPU devices")
        start = time.perf_counter()
        if name == "fused":
            result, events = _recorded(call, mesh, lhs, rhs)
        else:
            result = measure.program(call, mesh)(lhs, rhs).block_until_ready()
        wall_us = (time.perf_counter() - start) * 1e6
        what = "one kernel, emulated on the CPU" if name == "fused" else "all-gather, then dot, on the CPU"
        rows.append(_Row(name, what, measure.relative_error(result, lhs, rhs), wall_us=wall_us))
    _judge(rows)
    if all(row.ok for row in rows):
        step("the picture")
        spans = spans_of(events)
        title = f"all_gather_lhs_matmul, emulated: {devices} devices of {_EMULATED_CTAS} CTAs, per shard {problem}"
        picture.draw(spans, out, devices=devices, title=os.environ.get("OVERLAP_DEMO_TITLE", title))
    return rows, devices


def _recorded(
    call: measure.Call, mesh: jax.sharding.Mesh, lhs: jax.Array, rhs: jax.Array
) -> tuple[jax.Array, list[overlap.emulation.Event]]:
    """Runs `call` emulated and returns the result and what happened."""
    # Copies that complete at random moments and threads that take turns look most like hardware.
    settings = {"completion": "random", "scheduler": "round_robin", "record": True}
    with overlap.emulation.emulate(cores=_EMULATED_CTAS, **settings) as emulated:
        result = measure.program(call, mesh)(lhs, rhs).block_until_ready()
    return result, emulated.events


def _run_on_gpus(devices: int | None, step: Any) -> tuple[list[_Row], int]:
    problem, iterations, calls, rounds = _ON_GPUS, 20, 20, 7
    devices = devices or len(jax.devices())
    mesh = _mesh(devices)
    lhs, rhs = measure.make_inputs(mesh, problem.m_shard, problem.k, problem.n_shard)
    gathered = jax.jit(lambda x: x, out_shardings=jax.sharding.NamedSharding(mesh, P()))(lhs)
    methods = {name: (call, lhs, measure.LHS) for name, call in _methods(problem).items()}
    methods["roof"] = (jnp.dot, gathered, P())
    what = {"fused": "one kernel", "xla": "NCCL, then cuBLAS", "roof": "cuBLAS alone, data already gathered"}
    rows, loops, walls = [], {}, {}
    for name, (call, left, spec) in methods.items():
        step(f"{name}: compiling and checking")
        once = measure.program(call, mesh, spec)
        loop = measure.loop_program(call, mesh, iterations, spec)
        result = once(left, rhs).block_until_ready()
        rows.append(_Row(name, what[name], measure.relative_error(result, gathered, rhs)))
        loops[name] = lambda loop=loop, left=left, result=result: loop(left, rhs, result)

        def several(once: Any = once, left: jax.Array = left) -> jax.Array:
            return [once(left, rhs) for _ in range(calls)][-1]

        walls[name] = several
    _judge(rows)
    step("timing")
    tick = lambda: step("timing")  # noqa: E731
    loop_us = measure.time_per_run_us(loops, dict.fromkeys(loops, iterations), rounds, tick, marginal=True)
    wall_us = measure.time_per_run_us(walls, dict.fromkeys(walls, calls), rounds, tick, marginal=False)
    for row in rows:
        row.loop_us, row.wall_us = loop_us[row.method], wall_us[row.method]
    return rows, devices


def _picture_by_emulation(devices: int, out: pathlib.Path, step: Any) -> None:
    """Draws the same schedule from an emulated run at a small size: a GPU keeps no record of its copies.

    In a process of its own, since the emulator's CPU devices are set up before any device is used.
    """
    step("the picture: the same schedule, emulated")
    title = f"all_gather_lhs_matmul: the GPUs' schedule, replayed by the emulator at a small size, {_EMULATED}"
    command = [sys.executable, "-m", "overlap", "demo", "--emulate", "--devices", str(devices), "--out", str(out)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OVERLAP_DEMO_TITLE": title}
    replay = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if replay.returncode != 0:
        raise RuntimeError(f"the emulated replay for the picture failed:\n{replay.stderr.strip()}")


def _judge(rows: list[_Row]) -> None:
    """Marks the rows whose error is above what XLA's own error allows."""
    allowed = _ERROR_FACTOR * next(row.error for row in rows if row.method == "xla")
    for row in rows:
        row.ok = row.error <= allowed  # False for NaN


def _table(rows: list[_Row], devices: int, emulated_because: str | None) -> Table:
    by_name = {row.method: row for row in rows}
    emulated = emulated_because is not None
    kind = "emulated CPU devices" if emulated else jax.devices()[0].device_kind
    problem = _EMULATED if emulated else _ON_GPUS
    caption = f"Per shard (m, n, k) = {problem}, float16. " + (
        f"Emulated: {emulated_because}. The emulator checks the order of events and the numbers; its time says "
        "nothing about a GPU's."
        if emulated
        else "Loop: per run inside one program; call: per call from Python. Medians of 7 interleaved rounds."
    )
    table = Table(
        title=f"all_gather_lhs_matmul, {devices} × {kind}",
        caption=caption, title_justify="left", caption_justify="left",
    )  # fmt: skip
    table.add_column("method")
    table.add_column("what runs")
    if emulated:
        table.add_column("time (meaningless)", justify="right", style="dim")
    else:
        for heading in ("loop, µs", "call, µs", "XLA / this", "roof / this"):
            table.add_column(heading, justify="right")
    table.add_column("error against f32", justify="right")
    for row in rows:
        cells = [row.method, row.what]
        if row.loop_us is None or row.wall_us is None:
            cells.append(f"{(row.wall_us or 0) / 1e6:.2f} s")
        elif row.ok:
            ratios = [(by_name[other].loop_us or 0) / row.loop_us for other in ("xla", "roof")]
            cells += [f"{row.loop_us:.0f}", f"{row.wall_us:.0f}", f"{ratios[0]:.2f}", f"{ratios[1]:.3f}"]
        else:
            cells += ["–"] * 4
        table.add_row(*cells, f"{row.error:.2e}" if row.ok else f"[red]{row.error:.2e} FAILED")
    return table


@contextmanager
def _progress() -> Iterator[Any]:
    """Yields `step(text)`, which says what is being done now; on a terminal with a clock."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        said: list[str] = []

        def step(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal and text not in said:
                console.print(f"… {text}", highlight=False)
            said.append(text)

        yield step
