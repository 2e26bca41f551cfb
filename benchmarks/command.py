"""What the commands of this folder share: their parser, and the check for GPUs."""

from __future__ import annotations

from typing import Any

from overlap.cli import devices
from overlap.cli.arguments import Parser, WrongArguments


def tool_parser(name: str, doc: str | None, **options: Any) -> Parser:
    """Makes the parser of `python -m benchmarks.NAME`. `doc`: the module's docstring, whose first line --help shows."""
    return Parser(f"python -m benchmarks.{name}", description=(doc or "").partition("\n")[0], **options)


def need_gpus(way_out: str = "run it on GPUs, or add --dry-run to try the harness on CPU devices") -> None:
    """Raises WrongArguments if there is no GPU to measure. `way_out` says what the user can do."""
    if reason := devices.why_no_gpu():
        raise WrongArguments(f"nothing was measured: {reason}; {way_out}")
