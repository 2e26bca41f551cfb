"""Measurements on disk: one JSON file per kind of GPU, in the user's cache and shipped with the library.

A file is replaced in one step, so a reader sees the old or the new one, and an interrupted tuning leaves what it has
written before. Two tunings that finish in the same instant can lose one of both results, never the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable
from typing import Any

from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.kernels.target import Target

FORMAT = 1
DIRECTORY_VARIABLE = "OVERLAP_TUNING_DIR"
SHIPPED = pathlib.Path(__file__).parent / "tables"
logger = logging.getLogger("overlap")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The result of tuning one problem.

    Attributes:
      problem: what was tuned.
      kind: the device's name.
      jax: the version of jax.
      config: the fastest configuration whose result was right.
      us: its time per call, in microseconds.
      others: the times of what it was compared with: "xla", "heuristic", and the runners-up by `space.differences`.
      tried: how many configurations were compiled and checked.
      complete: False if the search was cut short.
      date: when, ISO 8601.
    """

    problem: Problem
    kind: str
    jax: str
    config: Config
    us: float
    others: dict[str, float] = dataclasses.field(default_factory=dict)
    tried: int = 0
    complete: bool = True
    date: str = ""

    @property
    def key(self) -> tuple[Problem, str, str]:
        """What there is one entry for."""
        return self.problem, self.kind, self.jax

    def to_json(self) -> dict[str, Any]:
        """The entry as its line in a file."""
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**dataclasses.asdict(rest.pop("problem")), **rest, "config": self.config.fields}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Entry:
        """The inverse of `to_json`; fields of the configuration that are missing have their defaults.

        Raises:
          ValueError, TypeError, KeyError: anything else is missing, unknown or of the wrong kind.
        """
        data = dict(data)
        data.setdefault("block_scaled", False)  # (Tables written before there were such problems lack it.)
        problem = Problem(**{field.name: data.pop(field.name) for field in dataclasses.fields(Problem)})
        if not all(isinstance(size, int) and size > 0 for size in (problem.m, problem.n, problem.k, problem.devices)):
            raise ValueError(f"sizes must be positive ints, got {problem}")
        if not isinstance(data["us"], int | float) or not data["us"] > 0:
            raise ValueError(f"`us` must be a positive number, got {data['us']!r}")
        return cls(problem, **{**data, "config": Config.of(**data["config"])})


def user_directory() -> pathlib.Path | None:
    """Where tunings are kept: `$OVERLAP_TUNING_DIR`, or `overlap/tuning` in the user's cache; None without a home."""
    if chosen := os.environ.get(DIRECTORY_VARIABLE):
        return pathlib.Path(chosen).expanduser()
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    except RuntimeError:
        return None
    return pathlib.Path(cache) / "overlap" / "tuning"


def user_file(kind: str) -> pathlib.Path | None:
    """The user's table for a kind of GPU, whether or not it exists."""
    directory = user_directory()
    return directory and directory / (re.sub(r"\W+", "_", kind.lower()).strip("_") + ".json")


def read(path: pathlib.Path) -> list[Entry]:
    """The entries of a file.

    An entry that this version of the library cannot read (a field that it does not know) is left out with a warning.

    Raises:
      ValueError: the file is no table.
      OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, and this version reads {FORMAT}")
        lines = list(content["entries"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no tuning table ({type(error).__name__}: {error}): move it away, or name another file"
        ) from error
    entries = []
    for line in lines:
        try:
            entries.append(Entry.from_json(line))
        except (ValueError, KeyError, TypeError) as error:
            logger.warning("%s: an entry is ignored, %s: %s", path, type(error).__name__, error)
    return entries


def add(path: pathlib.Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a file, made if need be, in one atomic step.

    Of two entries for one problem the newer one stays, unless it is of an interrupted search and the older one is not.

    Raises:
      ValueError: the file exists and is no table; it is left as it is.
    """
    table = {entry.key: entry for entry in (read(path) if path.exists() else [])}
    for entry in entries:
        old = table.get(entry.key)
        if old is None or entry.complete or not old.complete:
            table[entry.key] = entry
    lines = [json.dumps(table[key].to_json(), sort_keys=True) for key in sorted(table, key=str)]
    replace(path, f'{{"format": {FORMAT}, "entries": [\n' + ",\n".join(lines) + "\n]}\n")


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file, made with its folder if need be, in one atomic step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # As shared tables need it; mkstemp lets nobody else read.
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def find(entries: Iterable[Entry], problem: Problem, target: Target, jax_version: str) -> Entry | None:
    """The entry that serves a problem best: of its bucket, one that the kernel accepts for it, the nearest in size.

    float16 and bfloat16 run at the same rates and serve each other. Entries of the running jax come first. Those of
    another one are better than none: a version moves all times a little, and rarely their order.
    """
    fitting = [
        entry
        for entry in entries
        if entry.kind == target.kind
        and _alike(entry.problem) == _alike(problem)
        and problem.accepts(entry.config, target)
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


def _alike(problem: Problem) -> Problem:
    """What problems that share their entries have in common."""
    dtype, out_dtype = ("float16" if name == "bfloat16" else name for name in (problem.dtype, problem.out_dtype))
    return dataclasses.replace(problem.bucket, dtype=dtype, out_dtype=out_dtype)


def _distance(a: Problem, b: Problem) -> float:
    return sum(abs(math.log(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))


def load(path: pathlib.Path) -> tuple[Entry, ...]:
    """Like `read`, for lookups: remembered until the file changes; a file that is none or broken counts as empty.

    A broken file is reported once, as a warning.
    """
    try:
        status = path.stat()
    except OSError:
        return ()
    return _load(path, status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache(maxsize=64)
def _load(path: pathlib.Path, *version: int) -> tuple[Entry, ...]:
    del version  # Part of the cache's key.
    try:
        return tuple(read(path))
    except (ValueError, OSError) as error:
        logger.warning("the tuning table is ignored: %s", error)
        return ()


def shipped() -> tuple[Entry, ...]:
    """The entries that come with the library."""
    return tuple(entry for path in sorted(SHIPPED.glob("*.json")) for entry in load(path))
