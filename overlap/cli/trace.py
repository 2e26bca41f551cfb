"""`python -m overlap trace`: records what each role of each CTA on each GPU does, and when, in one fused call."""

from __future__ import annotations

import argparse
from typing import Any

import jax

from overlap import _settings, emulation
from overlap.choice import dispatch
from overlap.choice.problem import Problem, default_out_dtype
from overlap.cli import trace_files
from overlap.cli.arguments import WrongArguments, groups_of
from overlap.cli.console import console, refuse, show
from overlap.cli.devices import start
from overlap.kernels.config import Config
from overlap.kernels.operations import TUNED
from overlap.primitives.marks import Work
from overlap.tuning import trace
from overlap.tuning.programs import draw_operands, mesh_of
from overlap.tuning.timeline import Timeline

_ON_GPUS = (1024, 4096, 4096)
_EMULATED = (256, 256, 256)
_EMULATED_CTAS = 4
# In the emulator tiles are small, so that each CTA has several.
_EMULATED_TILE_N = 128
# Above this number of operations, an emulated call takes more than about a minute.
_QUICKLY_EMULATED = 2e10


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 0; 1 if the result is wrong; 2 for wrong arguments."""
    out = console()
    errors = console(stderr=True)
    name = arguments.out.name.removesuffix(".gz").removesuffix(".json").removesuffix(".png")
    picture = arguments.picture or arguments.out.with_name(f"{name}.png")
    if picture.resolve() == arguments.out.resolve():
        raise WrongArguments(f"trace: --picture must be another file than --out, got {picture} for both")
    alone = not TUNED[arguments.op].transports
    if alone and arguments.devices not in (None, 1):
        op = arguments.op
        raise ValueError(f"--devices is for a collective, and {op} runs on one device, got {arguments.devices}")
    groups = groups_of(arguments)
    config = _config(arguments.config)
    devices, emulated_because = start("trace", arguments.devices, emulate=arguments.emulate)
    if jax.process_count() > 1:
        raise ValueError("a trace is of one process with all GPUs: run it without mpirun or srun")
    mesh = mesh_of(devices[:1] if alone else devices)
    m, n, k = arguments.shape or (_ON_GPUS if emulated_because is None else _EMULATED)
    out_dtype = default_out_dtype(arguments.dtype)
    problem = Problem(arguments.op, m, n, k, arguments.dtype, out_dtype, mesh.size, arguments.layout, groups)
    errors.print(f"… {problem} on {_kind(mesh)}")
    if emulated_because is not None and problem.flops_per_device * problem.devices > _QUICKLY_EMULATED:
        usual = "x".join(map(str, _EMULATED))
        note = f"trace: emulated, this size takes minutes or hours; without --shape it is {usual}"
        errors.print(note, style="yellow")
    recorded = _record(problem, mesh, config, emulated_because)
    if not recorded.same_bits:
        refuse("trace", "the recorded call's result differs from an ordinary one's; nothing was written")
        return 1
    trace_files.write_trace(recorded.timelines, arguments.out)
    for timeline in recorded.timelines:
        show(out, f"{timeline.kernel}, {_kind(mesh)}", *_table(timeline))
        out.print(_remarks(timeline, emulated_because), style="italic dim")
    trace_files.draw(recorded.timelines[:1], picture, f"{problem} ({_kind(mesh)})")
    out.print(f"The trace, for https://ui.perfetto.dev: {arguments.out}; its picture: {picture}")
    return 0


def _config(fields: dict[str, Any] | None) -> Config | None:
    """A configuration with these fields; None if none are given."""
    try:
        return None if fields is None else Config(**fields)
    except TypeError:
        raise ValueError(f"--config: overlap.Config has the fields {', '.join(vars(Config()))}") from None


def _record(
    problem: Problem, mesh: jax.sharding.Mesh, config: Config | None, emulated_because: str | None
) -> trace.Trace:
    operands = draw_operands(problem, mesh, 0)
    if emulated_because is None:
        return trace.record(problem, operands, mesh, config, trace_files.CAPACITY)
    # These two settings resemble hardware most: copies complete at random times, and threads take turns.
    with emulation.emulate(cores=_EMULATED_CTAS, completion="random", scheduler="round_robin") as emulated:
        config = config or Config(tile_n=_EMULATED_TILE_N)
        recorded = trace.record(problem, operands, mesh, config, trace_files.CAPACITY, emulated=True)
    emulated.check()
    return recorded


def _kind(mesh: jax.sharding.Mesh) -> str:
    target = dispatch.target(mesh)
    if target.platform == "gpu":
        return f"{mesh.size} × {target.kind}"
    return f"{mesh.size} emulated {_settings.emulated_gpu().capitalize()} devices of {_EMULATED_CTAS} CTAs"


# Columns of the table: heading, the roles that do this work (on Hopper, on Blackwell), and the work.
_COLUMNS = (
    ("multiply", ("compute", "multiplier"), Work.MULTIPLY),
    ("wait for loads", ("compute", "multiplier"), Work.AWAIT_OPERANDS),
    ("store", ("compute", "epilogue"), Work.STORE),
    ("wait for rows", ("producer",), Work.AWAIT_ROWS),
    ("copy", ("communicator",), Work.COPY),
)


def _table(timeline: Timeline) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a table: when each device began and ended, and what its roles spent their time on."""
    headings = ["device", f"begins {timeline.unit}", f"ends {timeline.unit}", *(name for name, _, _ in _COLUMNS)]
    digits = 0 if timeline.unit == "steps" else 1
    rows = []
    for device in range(timeline.devices):
        of_device = [span for span in timeline.spans if span.device == device]
        begin, end = min(span.start for span in of_device), max(span.end for span in of_device)
        cells = [str(device), f"{begin:.{digits}f}", f"{end:.{digits}f}"]
        for _, roles, work in _COLUMNS:
            share = max(timeline.share(device, role, work) for role in roles)
            cells.append(f"{share:.0%}" if share else "–")
        rows.append(cells)
    return headings, rows


def _remarks(timeline: Timeline, emulated_because: str | None) -> str:
    if emulated_because is not None:
        text = f"Emulated: {emulated_because}. The order of events is a GPU's, the times are not."
    else:
        text = (
            "Each share is of the time of all CTAs from the first mark to the last. Marks cost a little time: compare "
            "with a time that was measured without them."
        )
        if timeline.devices > 1:
            text += f" The GPUs' clocks agree to ± {timeline.clock_error:.2f} µs."
    if timeline.missing:
        text += f" {timeline.missing} marks had no room: the last spans of some roles are missing."
    return text
