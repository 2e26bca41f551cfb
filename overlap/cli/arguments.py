"""The parser of all commands, and types of options: argparse names the option whose text a type refuses.

This module imports no jax.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

from overlap.kernels.operations import LAYOUTS, TUNED

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f8_e4m3fn": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}
# Kernels use int32 for sizes.
LARGEST_SIZE = 2**31 - 1
# Groups of a grouped product for which the command line names no number.
_GROUPS = 8
_SHAPE = re.compile(r"([0-9]{1,10})x([0-9]{1,10})x([0-9]{1,10})(?::(.*))?", re.DOTALL)

Shape = tuple[int, int, int, "str | None"]  # m, n, k and a dtype


class Parser(argparse.ArgumentParser):
    """A parser whose options must be written in full: `--layer` does not stand for `--layers`."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)


class WrongArguments(SystemExit):
    """Raised if arguments do not fit together. `overlap.cli.ending` prints the message and exits with status 2."""


def whole_number(at_least: int, at_most: int = LARGEST_SIZE) -> Callable[[str], int]:
    """A type that reads a whole number from `at_least` to `at_most`."""

    def read(text: str) -> int:
        number = int(text)
        if not at_least <= number <= at_most:
            raise argparse.ArgumentTypeError(f"must be from {at_least} to {at_most}, got {text}")
        return number

    read.__name__ = "whole number"  # If `int` refuses the text, argparse says "invalid whole number value".
    return read


def finite_number(of: str, *, above: float | None = None, at_least: float | None = None) -> Callable[[str], float]:
    """A type that reads a finite number. `of` names the unit, such as "seconds"."""

    def read(text: str) -> float:
        number = float(text)
        if abs(number) == float("inf") or not (at_least is None or number >= at_least):
            raise argparse.ArgumentTypeError(f"must be a finite number of {of}, at least {at_least or 0:g}, got {text}")
        if not (above is None or number > above):
            raise argparse.ArgumentTypeError(f"must be a finite number of {of} above {above:g}, got {text}")
        return number

    read.__name__ = f"number of {of}"
    return read


def new_file(text: str) -> pathlib.Path:
    """Reads the path of a file to write, in a folder that exists."""
    path = pathlib.Path(text)
    folder = path.absolute().parent
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file, got the folder {text!r}")
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}: name another file")
    return path


def dtype(text: str) -> str:
    """Reads a dtype. Returns its full name."""
    if text not in DTYPES and text not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"a dtype must be one of {', '.join(DTYPES)}, got {text!r}")
    return DTYPES.get(text, text)


def shapes(text: str) -> list[Shape]:
    """Reads m, n, k and, if one is given, the dtype of each problem: "1024x4096x4096,128x128x128:f16"."""
    found: list[Shape] = []
    for part in text.split(","):
        match = _SHAPE.fullmatch(part.strip())
        m, n, k = map(int, match.groups()[:3]) if match else (0, 0, 0)
        if match is None or not all(1 <= size <= LARGEST_SIZE for size in (m, n, k)):
            raise argparse.ArgumentTypeError(
                f"must be MxNxK or MxNxK:DTYPE, several with commas, each size from 1 to {LARGEST_SIZE}, got {part!r}: "
                "e.g. 4096x8192x4096"
            )
        found.append((m, n, k, None if match[4] is None else dtype(match[4])))
    return found


def shape(text: str) -> tuple[int, int, int]:
    """Reads m, n and k of one problem."""
    first, *others = shapes(text)
    if others or first[3] is not None:
        raise argparse.ArgumentTypeError(f"must be one MxNxK, got {text!r}: e.g. 1024x4096x4096")
    return first[:3]


def layouts(text: str) -> list[str]:
    """Reads layouts. Returns each layout once."""
    named = [part.strip() for part in text.split(",")]
    if unknown := [part for part in named if part not in LAYOUTS]:
        raise argparse.ArgumentTypeError(f"must name some of {', '.join(LAYOUTS)}, got {unknown[0]!r}")
    return list(dict.fromkeys(named))


def config_fields(text: str) -> dict[str, int | str | bool]:
    """Reads names and values of fields of `overlap.Config`: "tile_n=128,stages=4"."""
    found: dict[str, int | str | bool] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"must be NAME=VALUE, several with commas, got {part!r}: e.g. tile_n=128")
        is_number = value.removeprefix("-").isdecimal()
        found[name] = int(value) if is_number else {"true": True, "false": False}.get(value.lower(), value)
    return found


def groups_of(arguments: argparse.Namespace) -> int:
    """The number of groups of a grouped product: `--groups`, or 8. It is 1 for other operations.

    Raises:
      ValueError: `--groups` is given for another operation.
    """
    if TUNED[arguments.op].groups:
        return arguments.groups or _GROUPS
    if arguments.groups is not None:
        raise ValueError(f"--groups is for grouped_matmul, got {arguments.groups} for {arguments.op}: leave it out")
    return 1
