"""The parser of all commands, and types of command-line options that check a number, a file or a folder.

Use a type as `parser.add_argument("--devices", type=whole_number(at_least=1))`. If the value is wrong, argparse prints
the option's name and the message of the type, and ends with exit status 2. This module imports only the standard
library.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib
import stat
import tempfile
from collections.abc import Callable
from typing import Any


class Parser(argparse.ArgumentParser):
    """A parser whose options must be written in full: `--layer` does not stand for `--layers`."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, allow_abbrev=False, **options)


class WrongArguments(SystemExit):
    """Raised if arguments do not fit together. `overlap.cli.ending` prints the message and exits with status 2."""


def whole_number(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """A type that reads a whole number from `at_least` to `at_most`."""
    limits = f"a whole number, at least {at_least}" + ("" if at_most is None else f" and at most {at_most}")

    def read(text: str) -> int:
        try:
            # Python refuses to read numbers of more than 4300 digits, and no number here needs more than 40.
            number = int(text) if len(text) <= 40 else None
        except ValueError:
            number = None
        if number is None or number < at_least or (at_most is not None and number > at_most):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {_shown(text)}")
        return number

    return read


def finite_number(of: str, *, above: float | None = None, at_least: float | None = None) -> Callable[[str], float]:
    """A type that reads a finite number. `of` names the unit, such as "seconds"."""
    limits = f"a finite number of {of}" + (f", at least {at_least:g}" if above is None and at_least is not None else "")
    limits += "" if above is None else f" above {above:g}"

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        wrong = not math.isfinite(number) or (above is not None and number <= above)
        if wrong or (at_least is not None and number < at_least):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {_shown(text)}")
        return number

    return read


def one_of(*names: str) -> Callable[[str], str]:
    """A type that reads one of these names."""

    def read(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {_shown(text)}")
        return text

    return read


def new_file(text: str) -> pathlib.Path:
    """Reads the path of a file to write, in a folder that exists. Tries to write there, and leaves nothing behind."""
    path = _no_other_file(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}: make it first")
    _try_to_write(path.resolve().parent, text)
    return path


def new_file_with_folders(text: str) -> pathlib.Path:
    """Reads the path of a file to write; the command makes its folder later. Leaves nothing behind."""
    path = _no_other_file(text)
    _try_to_write(path.resolve().parent, text)
    return path


def new_folder(text: str) -> pathlib.Path:
    """Reads the path of a folder to write to; the command makes it later if there is none. Leaves nothing behind."""
    path = pathlib.Path(text)
    _try_to_write(path.resolve(), text)
    return path


def old_file(text: str) -> pathlib.Path:
    """Reads the path of a file that exists and can be read."""
    path = pathlib.Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must name a file, got the folder {_shown(text)}")
        with path.open("rb"):
            return path
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {_shown(text)}: {_reason(error)}") from None


def old_folder(text: str) -> pathlib.Path:
    """Reads the path of a folder that exists."""
    path = pathlib.Path(text)
    try:
        if path.is_dir():
            return path
        reason = "it is a file" if path.exists() else "there is no such folder"
    except OSError as error:
        reason = _reason(error)
    raise argparse.ArgumentTypeError(f"must name a folder, got {_shown(text)}: {reason}")


def _no_other_file(text: str) -> pathlib.Path:
    """Reads a path where nothing exists, or a file that may be replaced."""
    path = pathlib.Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"must name a file, got the folder {_shown(text)}")
        if not path.exists():
            return path
        mode = path.stat().st_mode
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {_shown(text)}: {_reason(error)}") from None
    if not stat.S_ISREG(mode):
        raise argparse.ArgumentTypeError(f"must name a file, got {_shown(text)}, which is a device or a pipe")
    # Root may write any file. But a file that is marked read-only must not be replaced.
    if not mode & 0o222 or not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is read-only: name another file, or chmod u+w it")
    return path


def _try_to_write(folder: pathlib.Path, text: str) -> None:
    """Raises ArgumentTypeError if no file can be written in `folder`, or in the nearest folder above it that exists."""
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir():
            raise argparse.ArgumentTypeError(f"cannot write to {_shown(text)}: {folder} is no folder")
        # Permissions, a read-only file system and /proc each refuse in another way. So try it: make a file, remove it.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".overlap-", suffix=".tmp"):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write to {_shown(text)}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 200 else repr(text[:200]) + "..."
