"""`python -m overlap demo`: runs both halves of a layer, fused and by XLA. Prints a table and draws a picture.

It runs in one process with all GPUs, or in one process per GPU (launch/mpirun.sh -- python -m overlap demo), where
process 0 prints and nothing is drawn. Without GPUs the kernels are emulated. The emulator runs all devices in one
process, so several processes without GPUs run only XLA's implementation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils
from rich.console import Console
from rich.text import Text

import overlap
from overlap import _settings, emulation
from overlap.choice.problem import Problem
from overlap.cli import trace_files
from overlap.cli.arguments import WrongArguments
from overlap.cli.console import console, progress_bar, refuse, show
from overlap.cli.devices import start
from overlap.tuning import trace
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
from overlap.tuning.timeline import Timeline
from overlap.tuning.timing import Loop, calls_s

_OPS = "all_gather_lhs_matmul", "matmul_reduce_scatter"
# m, n and k per device. Emulated, each device has four tiles for each shard: enough to show the order of events.
_ON_GPUS = (1024, 4096, 4096)
_EMULATED = (256, 256, 256)
_EMULATED_CTAS = 4
_EMULATED_CONFIG = overlap.Config(tile_n=128)
_ITERATIONS = 20
_LAUNCHES = 2
_CALLS = 20
_ROUNDS = 7
_WARM_UP_S = 0.5


@dataclasses.dataclass
class _Row:
    """A row of the table.

    Attributes:
      method: "fused", "xla" or "roof".
      what: what runs, in words.
      error: relative error of the result against the f32 product.
      ok: whether the error is small enough.
      call_us: microseconds of one call from Python.
      loop_us: microseconds of one call in a loop on the GPUs; 0 on CPU devices.
    """

    method: str
    what: str
    error: float
    ok: bool
    call_us: float
    loop_us: float = 0.0


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo.

    Returns:
      The exit status: 0; 1 if a result is wrong, or there is no result; 2 for wrong arguments.
    """
    alone = leads = True
    if not arguments.emulate:
        try:
            overlap.initialize()
        except RuntimeError as error:
            refuse("demo", error)
            return 1
        if jax.distributed.is_initialized():
            alone = jax.process_count() == 1
            leads = jax.process_index() == 0
    if arguments.devices is not None and not alone:
        raise WrongArguments("demo: --devices is for one process: start as many as you want with -np")
    devices, emulated_because = start("demo", arguments.devices, emulate=arguments.emulate)
    mesh = mesh_of(devices)
    emulator = contextlib.nullcontext()
    if emulated_because is not None and alone:
        # These two settings resemble hardware most: copies complete at random times, and threads take turns.
        emulator = emulation.emulate(cores=_EMULATED_CTAS, completion="random", scheduler="round_robin")
    out = console(quiet=not leads)
    tables = list[list[_Row]]()
    timelines = list[Timeline]()
    config = overlap.Config() if emulated_because is None else _EMULATED_CONFIG
    with emulator, progress_bar(console(stderr=True, quiet=not leads)) as bar:
        task = bar.add_task("starting", total=None)
        for problem in _problems(mesh, _ON_GPUS if emulated_because is None else _EMULATED):
            methods = _methods(problem, config)
            if emulated_because is not None and not alone:
                del methods["fused"]
            bar.update(task, description=problem.op)
            tables.append(_measured(problem, methods, mesh, timed=emulated_because is None))
            if alone and all(row.ok for row in tables[-1]):
                bar.update(task, description=f"{problem.op}: recording a call")
                shards = draw_operands(problem, mesh, 0)
                emulated = emulated_because is not None
                recorded = trace.record(problem, shards, mesh, config, trace_files.CAPACITY, emulated=emulated)
                timelines += recorded.timelines[:1]
    kind = jax.devices()[0].device_kind if emulated_because is None else "CPU devices"
    if emulated_because is not None and alone:
        kind = f"emulated {_settings.emulated_gpu().capitalize()} devices of {_EMULATED_CTAS} CTAs"
    for op, rows in zip(_OPS, tables, strict=True):
        _print(out, f"{op}, {mesh.size} × {kind}", rows)
    out.print(_caption(emulated_because, alone), style="italic dim")
    if not alone:
        # All processes end together: a process that goes on alone would log a warning about the others.
        multihost_utils.sync_global_devices("the demo's end")
    if not all(row.ok for rows in tables for row in rows):
        refuse("demo", "a result is wrong; no picture was written")
        return 1
    if not alone:
        out.print(f"{jax.process_count()} processes multiplied together; one process alone also draws a picture.")
        return 0
    trace_files.draw(timelines, arguments.out, f"{mesh.size} × {kind}", by_shard=True)
    out.print(f"What each device multiplied, stored and copied when: {arguments.out}")
    return 0


def _problems(mesh: jax.sharding.Mesh, sizes: tuple[int, int, int]) -> list[Problem]:
    m, n, k = sizes
    # The rows of a reduce-scatter's product are those of all devices together.
    rows = m, m * mesh.size
    return [Problem(op, of_op, n, k, "float16", "float16", mesh.size) for op, of_op in zip(_OPS, rows, strict=True)]


def _methods(problem: Problem, config: overlap.Config) -> dict[str, Call]:
    return {
        "fused": lambda lhs, rhs: call_operation(problem, lhs, rhs, config, "fused"),
        "xla": lambda lhs, rhs: call_operation(problem, lhs, rhs, None, "xla"),
    }


def _measured(problem: Problem, methods: dict[str, Call], mesh: jax.sharding.Mesh, *, timed: bool) -> list[_Row]:
    """Checks each method. If `timed`, times them too, and cuBLAS alone on data that is already gathered ("roof")."""
    # Short names: the table must fit into 80 columns.
    steps = "matmul, sum" if problem.scattered else "gather, matmul"
    what = {"fused": "fused: one kernel", "xla": f"xla: {steps}", "roof": "cuBLAS alone"}
    shards = draw_operands(problem, mesh, 0)
    calls = {**methods, "roof": functools.partial(product, problem)} if timed else methods
    rows = list[_Row]()
    loops = dict[str, Loop]()
    programs: dict[str, tuple[Any, tuple[jax.Array, jax.Array]]] = {}
    for name, call in calls.items():
        operands = complete_program(problem, mesh)(*shards) if name == "roof" else shards
        program = call_program(problem, call, mesh)
        began = time.perf_counter()
        result = program(*operands).block_until_ready()
        seconds = time.perf_counter() - began
        error = float(error_program(problem, mesh, name == "roof")(*operands, result))
        rows.append(_Row(name, what[name], error, True, 1e6 * seconds))
        programs[name] = program, operands
        if timed:
            loops[name] = Loop(problem, loop_program(problem, call, mesh, _ITERATIONS), _ITERATIONS, operands, result)
            loops[name].compile()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    if timed:
        loops["roof"].load(_WARM_UP_S)
    for _ in range(_ROUNDS):
        for name, loop in loops.items():
            times[name].append((loop.call_s(_LAUNCHES), calls_s(*programs[name], _CALLS)))
    allowed = error_bound(problem, next(row.error for row in rows if row.method == "xla"))
    for row in rows:
        row.ok = row.error <= allowed  # False for NaN.
        if timed:
            row.loop_us, row.call_us = (1e6 * statistics.median(each) for each in zip(*times[row.method], strict=True))
    return rows


def _print(out: Console, title: str, rows: Sequence[_Row]) -> None:
    timed = all(row.loop_us for row in rows)
    times = ("loop µs", "call µs", "XLA/this", "cuBLAS/this") if timed else ("time (meaningless)",)
    loop_us = {row.method: row.loop_us for row in rows}
    lines = []
    for row in rows:
        cells = [f"{row.call_us / 1e6:.2f} s"]
        if timed:
            ratios = f"{loop_us['xla'] / row.loop_us:.2f}", f"{loop_us['roof'] / row.loop_us:.3f}"
            cells = [f"{row.loop_us:.0f}", f"{row.call_us:.0f}", *ratios] if row.ok else ["–"] * 4
        error = Text(f"{row.error:.2e}") if row.ok else Text(f"{row.error:.2e} FAILED", style="red")
        lines.append([row.what, *cells, error])
    show(out, title, ("what runs", *times, "error"), lines, texts=1)


def _caption(emulated_because: str | None, alone: bool) -> str:
    m, n, k = _ON_GPUS if emulated_because is None else _EMULATED
    text = f"Per device {m} rows, n = {n}, k = {k}, float16. "
    if emulated_because is None:
        return (
            f"{text}Loop: per run inside one program; call: per call from Python. Medians of {_ROUNDS} rounds. cuBLAS "
            "alone: on data that is already gathered, or without the sum. Errors against the product in f32."
        )
    if alone:
        return f"{text}Emulated: {emulated_because}. This checks results; its times say nothing about a GPU's."
    return f"{text}No fused kernel ran ({emulated_because}): the emulator runs all devices in one process."
