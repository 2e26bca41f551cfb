"""`python -m overlap trace`: records what each role of each CTA on each GPU does, and when, in one fused call."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import jax
from rich.console import Console

from overlap import _compat, _settings, emulation
from overlap.choice import dispatch
from overlap.choice.problem import Problem, default_out_dtype
from overlap.cli import tables, trace_files
from overlap.cli.arguments import new_file
from overlap.cli.devices import MOST_EMULATED, why_not_gpus
from overlap.kernels.config import Config, default_config
from overlap.kernels.operations import BY_NAME
from overlap.primitives.marks import Work
from overlap.tuning import trace
from overlap.tuning.operations import require_layout
from overlap.tuning.programs import draw_operands, mesh_of
from overlap.tuning.timeline import Timeline

_ON_GPUS, _EMULATED = (1024, 4096, 4096), (256, 256, 256)
_EMULATED_DEVICES, _EMULATED_CTAS = 4, 4
# In the emulator tiles are small, so that each CTA has several.
_EMULATED_TILE_N = 128
# Above this number of operations, an emulated call takes more than about a minute.
_QUICKLY_EMULATED = 2e10
# How many marks each role has room for: more than in the largest problems of the benchmarks.
_CAPACITY = 2048


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 0; 1 if the result is wrong; 2 for wrong arguments."""
    console, errors = Console(), Console(stderr=True)
    try:
        picture = _picture(arguments)
        emulated_because = "asked for with --emulate" if arguments.emulate else why_not_gpus()
        problem, config = _problem(arguments, emulated_because), _config(arguments.config)
        mesh = _mesh(problem, arguments, emulated_because)
        problem = dataclasses.replace(problem, devices=mesh.size)
        errors.print(f"… {problem} on {_kind(mesh)}", soft_wrap=True, markup=False, highlight=False)
        if emulated_because is not None and problem.flops_per_device * problem.devices > _QUICKLY_EMULATED:
            usual = "x".join(map(str, _EMULATED))
            note = f"trace: emulated, this size takes minutes or hours; without --shape it is {usual}"
            errors.print(note, style="yellow", soft_wrap=True, markup=False, highlight=False)
        recorded = _record(problem, mesh, config, emulated_because)
    except (ValueError, NotImplementedError) as error:
        errors.print(f"trace: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2
    if not recorded.same_bits:
        errors.print("The recorded call's result differs from an ordinary one's. Nothing was written.", style="red")
        return 1
    trace_files.write_trace(recorded.timelines, arguments.out)
    for timeline in recorded.timelines:
        _print(console, timeline, mesh)
        _remarks(console, timeline, emulated_because)
    trace_files.draw(recorded.timelines[0], picture, f"{problem} ({_kind(mesh)})")
    console.print(
        f"The trace, for https://ui.perfetto.dev: {arguments.out}; its picture: {picture}",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    return 0


def _picture(arguments: argparse.Namespace) -> pathlib.Path:
    """The file for the picture: `--picture`, or a file beside the trace."""
    if arguments.picture is not None:
        if arguments.picture.resolve() == arguments.out.resolve():
            raise ValueError(f"--picture must be another file than --out, got {arguments.picture} for both")
        return arguments.picture
    name = arguments.out.name.removesuffix(".gz").removesuffix(".json")
    if name.endswith(".png"):
        raise ValueError(f"--out names the trace, a JSON file, got {arguments.out}: --picture names the picture")
    try:
        return new_file(str(arguments.out.with_name(f"{name}.png")))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"the picture beside --out: {error}; or name another file with --picture") from error


def _problem(arguments: argparse.Namespace, emulated_because: str | None) -> Problem:
    """The problem that the arguments describe, with `devices` not set yet."""
    if arguments.op not in BY_NAME:
        raise ValueError(f"--op must be one of {', '.join(BY_NAME)}, got {arguments.op!r}")
    require_layout(arguments.op, arguments.layout, "--layout")
    if arguments.op == "matmul" and arguments.devices not in (None, 1):
        raise ValueError(f"--devices is for a collective, and matmul runs on one device, got {arguments.devices}")
    if emulated_because is not None and (arguments.devices or 1) > MOST_EMULATED:
        raise ValueError(f"--devices must be at most {MOST_EMULATED} where they are emulated, got {arguments.devices}")
    m, n, k = arguments.shape or (_ON_GPUS if emulated_because is None else _EMULATED)
    out_dtype = default_out_dtype(arguments.dtype)
    return Problem(arguments.op, m, n, k, arguments.dtype, out_dtype, layout=arguments.layout)


def _config(fields: dict[str, int | str | bool] | None) -> Config | None:
    """A configuration with these fields; None if none are given."""
    if fields is None:
        return None
    known = Config().fields
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"--config: overlap.Config has no field {name!r}; it has {', '.join(known)}")
        if type(value) is not type(known[name]):
            raise ValueError(f"--config: {name} must be of the type of {known[name]!r}, got {value!r}")
    return Config.of(**fields)


def _mesh(problem: Problem, arguments: argparse.Namespace, emulated_because: str | None) -> jax.sharding.Mesh:
    if emulated_because is not None and not _compat.backends_are_initialized():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices or _EMULATED_DEVICES)
    if jax.process_count() > 1:
        raise ValueError("a trace is of one process with all GPUs: run it without mpirun or srun")
    available = jax.devices()
    wanted = 1 if problem.op == "matmul" else arguments.devices or len(available)
    if wanted > len(available):
        raise ValueError(f"--devices must be at most {len(available)} on this machine, got {wanted}")
    return mesh_of(available[:wanted])


def _record(
    problem: Problem, mesh: jax.sharding.Mesh, config: Config | None, emulated_because: str | None
) -> trace.Trace:
    operands = draw_operands(problem, mesh, 0)
    if emulated_because is None:
        return trace.record(problem, operands, mesh, config, _CAPACITY)
    # These two settings resemble hardware most: copies complete at random times, and threads take turns.
    with emulation.emulate(cores=_EMULATED_CTAS, completion="random", scheduler="round_robin") as emulated:
        config = config or default_config(problem.dtype).replace(tile_n=_EMULATED_TILE_N)
        recorded = trace.record(problem, operands, mesh, config, _CAPACITY, emulated=True)
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
    ("wait for operands", ("compute", "multiplier"), Work.AWAIT_OPERANDS),
    ("store", ("compute", "epilogue"), Work.STORE),
    ("producer waits for rows", ("producer",), Work.AWAIT_ROWS),
    ("copies between GPUs", ("communicator",), Work.COPY),
)


def _print(console: Console, timeline: Timeline, mesh: jax.sharding.Mesh) -> None:
    """Prints for each device when it began and ended, and what its roles spend their time on."""
    title = f"{timeline.kernel}, {_kind(mesh)}"
    headings = ["device", f"begins, {timeline.unit}", f"ends, {timeline.unit}", *(name for name, _, _ in _COLUMNS)]
    rows = [_row(timeline, device) for device in range(timeline.devices)]
    tables.show(console, title, headings, rows)


def _row(timeline: Timeline, device: int) -> list[str]:
    digits = 0 if timeline.unit == "steps" else 1
    of_device = [span for span in timeline.spans if span.device == device]
    begin, end = min(span.start for span in of_device), max(span.end for span in of_device)
    cells = [str(device), f"{begin:.{digits}f}", f"{end:.{digits}f}"]
    for _, roles, work in _COLUMNS:
        share = max(timeline.share(device, role, work) for role in roles)
        cells.append(f"{share:.0%}" if share else "–")
    return cells


def _remarks(console: Console, timeline: Timeline, emulated_because: str | None) -> None:
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
    console.print(text, style="italic dim", highlight=False)
