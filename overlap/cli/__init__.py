"""The command line: `python -m overlap demo | doctor | soak | trace | tune`.

To parse a command line, neither rich nor jax is imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import pathlib
import platform
import sys
from collections.abc import Sequence

import overlap
from overlap import _requirements
from overlap.cli import arguments as types
from overlap.cli import ending
from overlap.cli.arguments import DTYPES, LAYOUTS, Parser, new_file, whole_number
from overlap.kernels.operations import TUNED

__all__ = ["main"]

# What --op names: the operations, of which each way to shard the operands counts as one.
OPS = tuple(TUNED)
_STATUSES = (
    "Exit status: 0 if all is well; 1 if something is missing or wrong, or if there is no result; 2 if the arguments "
    "are wrong; 130 after Ctrl-C."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments of the command line; None: the arguments of this process.

    Returns:
      The exit status, see `_STATUSES`.
    """

    def run() -> int:
        arguments = _parser().parse_args(argv)
        if arguments.command == "doctor":
            from overlap.cli import doctor

            return doctor.run(as_json=arguments.json)
        if not _can_run(arguments.command):
            return 1
        from overlap.cli.console import refuse

        try:
            return importlib.import_module(f"overlap.cli.{arguments.command}").run(arguments)
        except (ValueError, NotImplementedError) as error:
            refuse(arguments.command, error)
            return 2

    return ending.run(run)


def _can_run(command: str) -> bool:
    """Whether the library works here and the packages of the command are installed. If not, prints what to do."""
    if reason := _requirements.why_not():
        print(f"{command}: {reason}; {_requirements.SEE_DOCTOR}", file=sys.stderr)
        return False
    if missing := [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]:
        print(f"{command} needs {' and '.join(missing)}: pip install 'overlap[cli]'", file=sys.stderr)
        return False
    return True


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
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    count = whole_number(at_least=1)
    names = ", ".join(DTYPES)

    demo = commands.add_parser(
        "demo",
        help="run the two fused halves of a layer and draw them",
        description="Runs a fused all-gather matmul and a fused matmul reduce-scatter, and the same by XLA. Uses the "
        "visible GPUs; without GPUs, CPU devices emulate them. Prints a table, and draws on which device's rows each "
        "role of each device worked, and when.",
    ).add_argument
    demo("--out", type=new_file, default="overlap-demo.png", help="file for the picture, a PNG (default: %(default)s)")
    demo("--devices", type=count, help="how many devices (default: all visible GPUs; 4 emulated, at most 8)")
    demo("--emulate", action="store_true", help="emulate on the CPU even if there are GPUs")

    doctor = commands.add_parser(
        "doctor",
        help="check this machine and its packages",
        description="Checks what the library needs, and says how to repair what is missing or wrong. It also works "
        "without jax, with a broken jax, and on an old Python.",
        epilog="Exit status: 0 if no line says PROBLEM; 1 if one does; 2 if the arguments are wrong. A line that says "
        "note is not a problem.",
    ).add_argument
    doctor("--json", action="store_true", help="print one JSON object instead of the table")

    soak = commands.add_parser(
        "soak",
        help="run all operations for minutes, in random sequences, and compare every bit",
        description="Runs fused launches of all operations along all axes of several meshes of the visible GPUs, in "
        "random sequences. Some devices are late on purpose, and other collectives run at the same time. Every result "
        "is compared bit for bit. Start it with launch/mpirun.sh for one process per GPU. Without GPUs it is emulated, "
        "to try it out.",
    ).add_argument
    minutes = types.finite_number("minutes", above=0)
    soak("--minutes", type=minutes, default=5.0, help="how long to run (default: %(default)g)")
    soak("--seed", type=whole_number(0), default=0, help="determines what runs, and in which order (default: 0)")
    soak("--first", type=whole_number(0), default=0, help="number of the first program (default: 0)")
    soak("--programs", type=count, help="how many programs to run (default: until the time is over)")
    soak("--steps", type=count, help="launches in each program (default: 200; emulated: 1)")

    tune = commands.add_parser(
        "tune",
        help="measure configurations and keep the fastest",
        description="Measures configurations of an operation, and XLA, for a list of problems. For each problem it "
        "writes the fastest configuration with a right result to a table that later calls use. After an interrupt or "
        "the end of the budget, the results so far are kept. Without GPUs it is emulated, to try it out.",
    ).add_argument
    tune("--op", default="matmul", choices=OPS, help="the operation (default: %(default)s)")
    shapes = "problems, for a collective per shard; each may name its own dtype: 1024x4096x4096:f16"
    tune("--shapes", required=True, metavar="MxNxK,…", type=types.shapes, help=shapes)
    tune("--dtype", default="bfloat16", type=types.dtype, help=f"of the operands: {names} (default: bf16)")
    tune("--out-dtype", type=types.dtype, help="of the result (default: that of the operands; for f8: bf16)")
    layouts = "how the operands are stored, where t means transposed: nn (default), nt, tn, tt, or several as nn,nt"
    tune("--layouts", default=["nn"], type=types.layouts, help=layouts)
    groups = "of a grouped product: how many groups (default: 8); M is then the rows of each"
    tune("--groups", type=count, help=groups)
    tune("--devices", type=count, help="number of devices (default: all visible GPUs, or 2 emulated)")
    tune("--max-configs", type=count, help="most configurations to try per problem (default: 12; emulated: 3)")
    seconds = types.finite_number("seconds", above=0)
    tune("--budget-s", type=seconds, default=float("inf"), help="end after so many seconds, with the results so far")
    tune("--out", type=pathlib.Path, help="the table to write or extend (default: the user's; emulated: none)")
    tune("--force", action="store_true", help="measure problems again that the table already has")
    tune("--dry-run", action="store_true", help="list the configurations that would be tried, and exit")

    trace = commands.add_parser(
        "trace",
        help="record what each role of a kernel does, and when, on all GPUs",
        description="Runs one call of a fused operation with marks in its kernel. Writes when each role of each CTA "
        "waited, loaded, multiplied, stored and copied, with the same clock for all GPUs: a file for ui.perfetto.dev, "
        "and a picture. Without GPUs it is emulated.",
    ).add_argument
    trace("--op", default="all_gather_lhs_matmul", choices=OPS, help="the operation (default: %(default)s)")
    shape = "sizes, for a collective per shard (default: 1024x4096x4096; emulated: 256x256x256)"
    trace("--shape", metavar="MxNxK", type=types.shape, help=shape)
    trace("--dtype", default="bfloat16", type=types.dtype, help=f"of the operands: {names} (default: bf16)")
    trace("--layout", default="nn", choices=LAYOUTS, help="how the operands are stored; t means transposed")
    trace("--groups", type=count, help=groups)
    trace("--devices", type=count, help="number of devices (default: all visible GPUs, or 4 emulated)")
    fields = "fields of overlap.Config, such as tile_n=128,stages=4 (default: what the library chooses)"
    trace("--config", metavar="NAME=VALUE,…", type=types.config_fields, help=fields)
    trace("--emulate", action="store_true", help="emulate on the CPU even if there are GPUs")
    file = "file for ui.perfetto.dev; compressed if it ends with .gz (default: %(default)s)"
    trace("--out", type=new_file, default="overlap-trace.json.gz", help=file)
    trace("--picture", type=new_file, help="file for the picture, a PNG (default: beside the trace)")
    return parser
