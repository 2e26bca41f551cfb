"""The command line: `python -m overlap demo | doctor | soak | tune`."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import platform
import sys
from collections.abc import Sequence

import jax

import overlap
from overlap.cli import trace_arguments, tune_arguments

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: see `_STATUSES`."""
    arguments = _parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read the output has enough (`| head`). Python would try to write the rest when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


_STATUSES = (
    "Exit status: 0 if all is well; 1 if something is missing, wrong or has no result; 2 if the arguments are wrong; "
    "130 after Ctrl-C."
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlap",
        description="Fused collective + matmul kernels: a demonstration, a check-up, an endurance test, a tuner.",
        epilog=_STATUSES,
    )
    version = f"overlap {overlap.__version__} (jax {jax.__version__}, Python {platform.python_version()})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="run the fused all-gather matmul and draw it",
        description="Runs the fused all-gather matmul on the visible GPUs, or else emulated on CPU devices, beside "
        "what XLA makes of the same program; prints a table and draws which shard each device multiplied and moved "
        "when.",
    )
    demo.add_argument("--out", type=pathlib.Path, default=pathlib.Path("overlap-demo.png"), help="the picture, a PNG")
    demo.add_argument("--devices", type=int, help="number of devices (default: all visible GPUs, or 4 emulated)")
    demo.add_argument("--emulate", action="store_true", help="run emulated on the CPU even if there are GPUs")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its packages",
        description="Checks what the kernels need and says what to do about what is missing. Exit status 0 if the "
        "fused all-gather matmul can run here, on GPUs or emulated.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object, for programs")
    doctor.set_defaults(run=_doctor)

    soak = commands.add_parser(
        "soak",
        help="run all operations for long, in random sequences, and compare every bit",
        description="Runs fused launches of all operations along all axes of several meshes of the visible GPUs, in "
        "random sequences, with devices that are late and other collectives beside them, and compares every result "
        "bit for bit. Under launch/mpirun.sh as one process per GPU. Without GPUs emulated, to try it out.",
    )
    soak.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    soak.add_argument("--seed", type=int, default=0, help="what runs in which order follows from it (default: 0)")
    soak.add_argument("--first", type=int, default=0, help="begin with this program of the sequence (default: 0)")
    soak.add_argument("--programs", type=int, help="stop after so many (default: when the time is over)")
    soak.add_argument("--steps", type=int, help="launches in each program (default: 200, emulated 1)")
    soak.set_defaults(run=_soak)

    tune = commands.add_parser(
        "tune",
        help="measure configurations and keep the fastest",
        description="Measures the configurations of an operation for a list of problems against XLA, on the GPUs or, "
        "to try it out, emulated, and writes the fastest whose result is right to a table that later calls use. "
        "What was found before an interrupt or the end of the budget is kept.",
    )
    tune_arguments.add_arguments(tune)
    tune.set_defaults(run=_tune)

    trace = commands.add_parser(
        "trace",
        help="record what each part of a kernel does when, on all GPUs",
        description="Runs one call of a fused operation with marks in its kernel, and writes when each role of each "
        "CTA waited, loaded, multiplied, stored and copied, on all GPUs by one clock: a file for ui.perfetto.dev, and "
        "a picture. Without GPUs emulated.",
    )
    trace_arguments.add_arguments(trace)
    trace.set_defaults(run=_trace)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"demo needs {' and '.join(missing)}: pip install 'overlap[cli]'", file=sys.stderr)
        return 1
    from overlap.cli import demo

    return demo.run(arguments.out, devices=arguments.devices, emulate=arguments.emulate)


def _tune(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("rich") is None:
        print("tune needs rich: pip install 'overlap[cli]'", file=sys.stderr)
        return 1
    from overlap.cli import tune

    return tune.run(arguments)


def _trace(arguments: argparse.Namespace) -> int:
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"trace needs {' and '.join(missing)}: pip install 'overlap[cli]'", file=sys.stderr)
        return 1
    from overlap.cli import trace

    return trace.run(arguments)


def _soak(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("rich") is None:
        print("soak needs rich: pip install 'overlap[cli]'", file=sys.stderr)
        return 1
    from overlap.cli import soak

    return soak.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from overlap.cli import doctor

    return doctor.run(as_json=arguments.json)
