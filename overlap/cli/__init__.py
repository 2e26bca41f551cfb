"""The command line: `python -m overlap demo | doctor | soak | trace | tune`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import pathlib
import platform
import sys
from collections.abc import Sequence

import overlap
from overlap import _requirements
from overlap.cli import ending, trace_arguments, tune_arguments
from overlap.cli.arguments import finite_number, new_file, whole_number

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: see `_STATUSES`."""

    def run() -> int:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)

    return ending.run(run)


_STATUSES = (
    "Exit status: 0 if all is well; 1 if something is missing, wrong or has no result, or the output cannot be "
    "written; 2 if the arguments are wrong; 130 after Ctrl-C, 143 after SIGTERM."
)


class _Version(argparse.Action):
    """Prints the versions; what they are is asked only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            jax = f"jax {importlib.metadata.version('jax')}"
        except importlib.metadata.PackageNotFoundError:
            jax = "no jax"
        print(f"overlap {overlap.__version__} ({jax}, Python {platform.python_version()})")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m overlap",
        description="Fused collective + matmul kernels: a demonstration, a check-up, an endurance test, a tuner, and "
        "a trace of what a kernel does when.",
        epilog=_STATUSES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions, and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="run the fused all-gather matmul and draw it",
        description="Runs the fused all-gather matmul on the visible GPUs, or else emulated on CPU devices, beside "
        "what XLA makes of the same program; prints a table and draws which shard each device multiplied and moved "
        "when.",
    )
    demo.add_argument(
        "--out", type=new_file, default="overlap-demo.png", help="the picture, a PNG (default: %(default)s)"
    )
    demo.add_argument(
        "--devices",
        type=whole_number(at_least=1),
        help="number of devices (default: all visible GPUs, or 4 emulated; at most 8 emulated)",
    )
    demo.add_argument("--emulate", action="store_true", help="run emulated on the CPU even if there are GPUs")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its packages",
        description="Checks what the library needs and says what to do about what is missing or wrong. It answers "
        "whatever is wrong: without jax, with a broken one, on an old Python.",
        epilog="Exit status: 0 if no line says PROBLEM. 1 if one does: Python or jax is too old or too new, jax cannot "
        "be imported or its packages differ in version, CUDA_VISIBLE_DEVICES or JAX_PLATFORMS make no sense here, jax "
        "does not use the GPUs, GPUs do not reach each other, NCCL is missing beside GPUs, too old for this jax or no "
        "NCCL, the allocator fails or is unknown, XLA flags break fused kernels, a variable of overlap is wrong, or "
        "the emulated all-gather matmul fails. 2 if the arguments are wrong. A note is no problem.",
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
    minutes, any_number = finite_number("minutes", above=0), whole_number(0, 10**6)
    above_0 = whole_number(at_least=1)
    soak.add_argument("--minutes", type=minutes, default=5.0, help="how long (default: 5)")
    soak.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        help="what runs in which order follows from it (default: 0)",
    )
    soak.add_argument(
        "--first", type=any_number, default=0, help="begin with this program of the sequence (default: 0)"
    )
    soak.add_argument("--programs", type=above_0, help="stop after so many (default: when the time is over)")
    soak.add_argument(
        "--steps", type=whole_number(1, 10**6), help="launches in each program (default: 200, emulated 1)"
    )
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
    if not _can_run("demo", "rich", "matplotlib"):
        return 1
    from overlap.cli import demo

    return demo.run(pathlib.Path(arguments.out), devices=arguments.devices, emulate=arguments.emulate)


def _tune(arguments: argparse.Namespace) -> int:
    if not _can_run("tune", "rich"):
        return 1
    from overlap.cli import tune

    return tune.run(arguments)


def _trace(arguments: argparse.Namespace) -> int:
    if not _can_run("trace", "rich", "matplotlib"):
        return 1
    from overlap.cli import trace

    return trace.run(arguments)


def _soak(arguments: argparse.Namespace) -> int:
    if not _can_run("soak", "rich"):
        return 1
    from overlap.cli import soak

    return soak.run(arguments)


def _can_run(command: str, *packages: str) -> bool:
    """Whether the library works here and the command's own packages are installed; if not, a line says what to do."""
    if reason := _requirements.why_not():
        print(f"{command}: {reason}; {_requirements.SEE_DOCTOR}", file=sys.stderr)
        return False
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        print(f"{command} needs {' and '.join(missing)}: pip install 'overlap[cli]'", file=sys.stderr)
        return False
    return True


def _doctor(arguments: argparse.Namespace) -> int:
    from overlap.cli import doctor

    return doctor.run(as_json=arguments.json)
