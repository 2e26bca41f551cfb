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
from overlap.cli.arguments import Parser, finite_number, new_file, whole_number

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments of the command line; None: the arguments of this process.

    Returns:
      The exit status, see `_STATUSES`.
    """

    def run() -> int:
        arguments = _parser().parse_args(argv)
        return arguments.run(arguments)

    return ending.run(run)


_STATUSES = (
    "Exit status: 0 if all is well; 1 if something is missing or wrong, if there is no result, or if the output cannot "
    "be written; 2 if the arguments are wrong; 130 after Ctrl-C; 143 after SIGTERM."
)


class _Version(argparse.Action):
    """Prints the versions, which are looked up only when the option is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        try:
            jax = f"jax {importlib.metadata.version('jax')}"
        except importlib.metadata.PackageNotFoundError:
            jax = "no jax"
        print(f"overlap {overlap.__version__} ({jax}, Python {platform.python_version()})")
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="python -m overlap",
        description="Commands for the kernels that fuse a collective and a matrix product: a demonstration, a check of "
        "this machine, an endurance test, a tuner, and a tracer.",
        epilog=_STATUSES,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="run the two fused halves of a layer and draw them",
        description="Runs a fused all-gather matmul and a fused matmul reduce-scatter, and the same by XLA. Uses the "
        "visible GPUs; without GPUs, CPU devices emulate them. Prints a table, and draws which shard each device "
        "multiplied, received and sent, and when.",
    )
    demo.add_argument(
        "--out",
        type=new_file,
        default="overlap-demo.png",
        help="file for the picture, a PNG (default: %(default)s)",
    )
    demo.add_argument(
        "--devices",
        type=whole_number(at_least=1),
        help="how many devices (default: all visible GPUs, or 4 emulated devices; at most 8 emulated devices)",
    )
    demo.add_argument("--emulate", action="store_true", help="emulate on the CPU even if there are GPUs")
    demo.set_defaults(run=_demo)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its packages",
        description="Checks what the library needs, and says how to mend what is missing or wrong. It also works "
        "without jax, with a broken jax, and on an old Python.",
        epilog="Exit status: 0 if no line says PROBLEM. 1 if one does: Python or jax is too old or too new, jax cannot "
        "be imported or its packages differ in version, CUDA_VISIBLE_DEVICES or JAX_PLATFORMS make no sense here, jax "
        "does not use the GPUs, GPUs do not reach each other, there are GPUs but no NCCL, NCCL is too old for this "
        "jax, a file that is called NCCL is none, the allocator fails or is unknown, XLA flags break fused kernels, a "
        "variable of overlap is wrong, or the emulated all-gather matmul fails. 2 if the arguments are wrong. A line "
        "that says note is not a problem.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    doctor.set_defaults(run=_doctor)

    soak = commands.add_parser(
        "soak",
        help="run all operations for minutes, in random sequences, and compare every bit",
        description="Runs fused launches of all operations along all axes of several meshes of the visible GPUs, in "
        "random sequences. Some devices are late on purpose, and other collectives run at the same time. Every result "
        "is compared bit for bit. Start it with launch/mpirun.sh for one process per GPU. Without GPUs it is emulated, "
        "to try it out.",
    )
    minutes, any_number = finite_number("minutes", above=0), whole_number(0, 10**6)
    above_0 = whole_number(at_least=1)
    soak.add_argument("--minutes", type=minutes, default=5.0, help="how long to run (default: 5)")
    soak.add_argument(
        "--seed",
        type=whole_number(0, 2**31 - 1),
        default=0,
        help="determines what runs, and in which order (default: 0)",
    )
    soak.add_argument("--first", type=any_number, default=0, help="number of the program to begin with (default: 0)")
    soak.add_argument("--programs", type=above_0, help="how many programs to run (default: until the time is over)")
    soak.add_argument(
        "--steps", type=whole_number(1, 10**6), help="launches in each program (default: 200; emulated: 1)"
    )
    soak.set_defaults(run=_soak)

    tune = commands.add_parser(
        "tune",
        help="measure configurations and keep the fastest",
        description="Measures configurations of an operation, and XLA, for a list of problems. For each problem it "
        "writes the fastest configuration with a right result to a table that later calls use. After an interrupt or "
        "the end of the budget, the results so far are kept. Without GPUs it is emulated, to try it out.",
    )
    tune_arguments.add_arguments(tune)
    tune.set_defaults(run=_tune)

    trace = commands.add_parser(
        "trace",
        help="record what each role of a kernel does, and when, on all GPUs",
        description="Runs one call of a fused operation with marks in its kernel. Writes when each role of each CTA "
        "waited, loaded, multiplied, stored and copied, with the same clock for all GPUs: a file for ui.perfetto.dev, "
        "and a picture. Without GPUs it is emulated.",
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
    """Whether the library works here and the packages of the command are installed. If not, prints what to do."""
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
