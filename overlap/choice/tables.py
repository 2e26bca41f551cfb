"""Keeps measurements on disk: one JSON file per kind of GPU, in the user's cache and shipped with the library.

Each call of an operation looks up its configuration here, so lookups never raise. An entry that breaks a rule
(`table_entry`) is left out, and a file that is not a table counts as empty. Both are reported once, in a warning that
names the file and the entry. Only tuning raises for a file that is not a table, since it would overwrite the file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from overlap.choice import table_files
from overlap.choice.problem import Problem
from overlap.choice.table_entry import Entry, name_of
from overlap.choice.table_files import replace
from overlap.kernels.target import Target

__all__ = ["Entry", "Table", "add", "find", "load", "parse", "read", "replace", "shipped_files", "text_of", "user_file"]

FORMAT = 1
DIRECTORY_VARIABLE = "OVERLAP_TUNING_DIR"
SHIPPED = pathlib.Path(__file__).parent / "tables"
# An entry has about 700 bytes. A file larger than this is not a table, and reading it would delay the first call.
LARGEST_BYTES = 16 * 2**20
_FAULTS_SHOWN = 4
logger = logging.getLogger("overlap")


@dataclasses.dataclass(frozen=True)
class Table:
    """The content of a table's file.

    Attributes:
      entries: the entries that satisfy the rules, one for each key.
      faults: for each of the other entries, a text that says what is wrong with it.
      unread: entries that break a rule, as JSON values. They are written back unchanged: a newer version of the library
        may be able to read them.
    """

    entries: tuple[Entry, ...] = ()
    faults: tuple[str, ...] = ()
    unread: tuple[Any, ...] = ()


def user_directory() -> pathlib.Path | None:
    """Returns the folder of the user's tables: `$OVERLAP_TUNING_DIR`, or `overlap/tuning` in the user's cache.

    Returns None if the variable is not set and the user has no home.
    """
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        # Unlike `Path.expanduser`, this does not raise for `~name` if there is no such user.
        return pathlib.Path(os.path.expanduser(chosen))
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        return None
    return pathlib.Path(cache) / "overlap" / "tuning"


def user_file(kind: str) -> pathlib.Path | None:
    """Returns the path of the user's table for a kind of GPU, whether or not it exists; None if there is no folder."""
    directory = user_directory()
    return directory and directory / (re.sub(r"\W+", "_", kind.lower()).strip("_") + ".json")


def shipped_files() -> list[pathlib.Path]:
    """Returns the paths of the tables that come with the library."""
    return sorted(SHIPPED.glob("*.json"))


# --- Reading ----------------------------------------------------------------------------------------------------------


def parse(path: pathlib.Path) -> Table:
    """Reads a table's file. Faults are returned in the `Table`, not logged.

    Raises:
      ValueError: the file is not a table.
      OSError: the file cannot be read.
    """
    try:
        content = json.loads(table_files.read_text(path, LARGEST_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it must be an object with the fields `format` and `entries`")
        version, lines = content.get("format"), content.get("entries")
        if type(version) is not int or version != FORMAT:
            raise ValueError(f"its `format` must be {FORMAT}, the one that this version of overlap reads")
        if not isinstance(lines, list):
            raise ValueError("its `entries` must be a list")
    except RecursionError:
        raise ValueError(_no_table(path, "it nests too deep")) from None
    except ValueError as error:
        raise ValueError(_no_table(path, str(error))) from error
    return _table(lines)


def _no_table(path: pathlib.Path, why: str) -> str:
    return f"{path} is no tuning table ({why}): move it away, or name another file"


def _table(lines: Sequence[Any]) -> Table:
    kept: dict[Any, tuple[int, Entry]] = {}
    faults, unread = [], []
    for index, line in enumerate(lines):
        try:
            entry = Entry.from_json(line)
        except ValueError as error:
            faults.append(f"entries[{index}]{name_of(line)}: {error}")
            unread.append(line)
            continue
        if entry.key not in kept:
            kept[entry.key] = index, entry
            continue
        used, older = kept[entry.key]
        unused = index
        if entry.supersedes(older):
            kept[entry.key], used, unused = (index, entry), index, used
        faults.append(f"entries[{unused}]{name_of(lines[unused])}: entries[{used}] is for the same, and is used")
    return Table(tuple(entry for _, entry in kept.values()), tuple(faults), tuple(unread))


def read(path: pathlib.Path) -> list[Entry]:
    """Returns the entries of a file that satisfy the rules. One warning names the other entries, which are left out.

    Raises:
      ValueError: the file is not a table.
      OSError: the file cannot be read.
    """
    table = parse(path)
    if faults := table.faults:
        more = f"; and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
        verb = "is" if len(faults) == 1 else "are"
        first = "; ".join(faults[:_FAULTS_SHOWN])
        logger.warning("the tuning table %s: %d of its entries %s ignored: %s%s", path, len(faults), verb, first, more)
    return list(table.entries)


def load(path: pathlib.Path) -> tuple[Entry, ...]:
    """Returns the entries of a file, like `read`, but caches them until the file changes, and never raises.

    A file that does not exist or is not a table counts as empty. Faults are reported once, in a warning.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return ()
    except OSError as error:
        _report(str(error))
        return ()
    return _load(path, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=64)
def _load(path: pathlib.Path, *version: int) -> tuple[Entry, ...]:
    del version  # Part of the cache's key.
    try:
        return tuple(read(path))
    except (ValueError, OSError) as error:
        _report(str(error))
        return ()


@functools.lru_cache(maxsize=64)
def _report(error: str) -> None:
    """Logs a warning, once for each text.

    The cache of `_load` does not prevent repeated warnings if `path` is a folder: its modification time, which is part
    of the cache's key, changes with every file in it.
    """
    logger.warning("the tuning table is ignored: %s", error)


# --- Writing ----------------------------------------------------------------------------------------------------------


def add(path: pathlib.Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a file in one atomic step, under a lock. Makes the file and its folder if they do not exist.

    Of two entries with the same key the newer one is kept, unless its search was cut short and the older entry is from
    a complete search. Lines of the file that this version of the library cannot read stay as they are.

    Raises:
      ValueError: the file exists and is not a table (it is left as it is); or an entry breaks a rule.
      OSError: the file cannot be written.
    """
    entries = list(entries)
    for entry in entries:
        Entry.from_json(entry.to_json())
    path = table_files.target_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with table_files.locked(path):
        old = parse(path) if path.exists() else Table()
        table = {entry.key: entry for entry in old.entries}
        for entry in entries:
            if entry.supersedes(table.get(entry.key)):
                table[entry.key] = entry
        try:
            text = text_of(table.values(), old.unread)
        except RecursionError:
            raise ValueError(_no_table(path, "it nests too deep")) from None
        replace(path, text)


def text_of(entries: Iterable[Entry], unread: Iterable[Any] = ()) -> str:
    """Returns the text of a table: one line per entry, in an order that does not depend on when entries were added."""
    lines = [json.dumps(entry.to_json(), sort_keys=True) for entry in sorted(entries, key=lambda entry: str(entry.key))]
    lines += [json.dumps(line, sort_keys=True) for line in unread]
    return f'{{"format": {FORMAT}, "entries": [\n' + ",\n".join(lines) + "\n]}\n"


# --- Looking up -------------------------------------------------------------------------------------------------------


def find(entries: Iterable[Entry], problem: Problem, target: Target, jax_version: str) -> Entry | None:
    """Returns the entry that fits a problem best; None if none fits.

    An entry fits if it is for this kind of GPU and for the problem's bucket (`Problem.bucket`), and if the kernel
    accepts its configuration for the problem. float16 and bfloat16 run at the same rates, so they share entries. Of the
    entries that fit, an entry measured with the running version of jax is preferred, then one of the same dtype, then
    the nearest in size, then one from a complete search. An entry measured with another version of jax is better than
    none: another version changes all times a little, but rarely their order.
    """
    alike = _alike(problem)
    fitting = [
        entry
        for entry in entries
        if entry.kind == target.kind and _alike(entry.problem) == alike and _accepts(problem, entry, target)
    ]
    return min(
        fitting,
        key=lambda entry: (
            entry.jax != jax_version,
            entry.problem.dtype != problem.dtype,
            _distance(entry.problem, problem),
            not entry.complete,
        ),
        default=None,
    )


def _accepts(problem: Problem, entry: Entry, target: Target) -> bool:
    """Whether the kernel accepts an entry's configuration for a problem. If not for the entry's own, that is logged."""
    if problem.accepts(entry.config, target):
        return True
    if entry.problem == problem:
        try:
            problem.check(entry.config, target)
        except (ValueError, NotImplementedError) as error:
            _report_unusable(problem, str(error))
    return False


@functools.lru_cache(maxsize=64)
def _report_unusable(problem: Problem, error: str) -> None:
    """Logs a warning, once for each problem and text."""
    logger.warning("the tuning table's entry for %s is ignored: its `config` cannot run: %s", problem, error)


@functools.lru_cache(maxsize=4096)
def _alike(problem: Problem) -> Problem:
    """Returns a canonical form of `problem`: the same for two problems that may use each other's entries."""
    dtype, out_dtype = ("float16" if name == "bfloat16" else name for name in (problem.dtype, problem.out_dtype))
    # Right operands that lie side by side are multiplied as one of their total width is.
    return dataclasses.replace(problem.bucket, dtype=dtype, out_dtype=out_dtype, sides=1)


def _distance(a: Problem, b: Problem) -> float:
    return sum(abs(math.log(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))
