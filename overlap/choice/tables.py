"""Keeps measurements on disk: one JSON file per kind of GPU, in the user's cache and shipped with the library.

Each call of an operation looks up its configuration here, so lookups never raise. An entry that cannot be used is left
out, and a file that is not a table counts as empty; one warning says so. Only tuning raises for a file that is not a
table, since it would overwrite the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import logging
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from overlap._version import __version__
from overlap.choice.problem import Problem
from overlap.kernels.config import FLOAT8, FLOAT16, Config
from overlap.kernels.target import Target

FORMAT = 1
DIRECTORY_VARIABLE = "OVERLAP_TUNING_DIR"
SHIPPED = pathlib.Path(__file__).parent / "tables"
# Sizes are int32 in a kernel.
LARGEST_SIZE = 2**31 - 1
DTYPES = tuple(dtype.name for dtype in (*FLOAT16, jnp.dtype(jnp.float32), *FLOAT8))
type Json = bool | int | float | str | list[Json] | dict[str, Json] | None
logger = logging.getLogger("overlap")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The result of tuning one problem.

    Attributes:
      problem: the problem that was tuned.
      kind: the name of the kind of GPU (`Target.kind`).
      jax: the version of jax that ran.
      config: the fastest configuration whose result was right.
      us: its time per call, in microseconds.
      others: the times per call, in microseconds, of what `config` was compared with. The keys are "xla", "heuristic",
        and for the next best configurations the texts of `space.differences`.
      tried: how many configurations were compiled and checked.
      complete: False if the search was cut short.
      step: what runs the problem, "fused" or "xla", since a whole step with it was measured to be fastest so; "" if the
        times of the problem alone decide.
      date: when `config` was measured, in ISO 8601.
      overlap: the version of this library that ran; "" if the file does not say.

    Raises:
      ValueError: a later computation could fail with one of these values.
    """

    problem: Problem
    kind: str
    jax: str
    config: Config
    us: float
    others: dict[str, float] = dataclasses.field(default_factory=dict)
    tried: int = 0
    complete: bool = True
    step: str = ""
    date: str = ""
    overlap: str = __version__

    def __post_init__(self) -> None:
        problem = self.problem
        numbers = [x for x in vars(self.config).values() if type(x) is int]
        sizes = [problem.m, problem.n, problem.k, problem.devices, problem.batch, problem.sides, *numbers]
        if not all(type(size) is int and 1 <= size <= LARGEST_SIZE for size in sizes):
            raise ValueError(f"sizes must be integers from 1 to {LARGEST_SIZE}, got {sizes}")
        if not {problem.dtype, problem.out_dtype} <= {*DTYPES}:
            raise ValueError(f"dtypes must be of {', '.join(DTYPES)}, got {problem.dtype} and {problem.out_dtype}")
        if type(problem.block_scaled) is not bool:
            raise ValueError(f"`block_scaled` must be true or false, got {problem.block_scaled!r}")
        # A ratio of two times outside of this range might be 0 or infinite.
        if not all(type(us) in (int, float) and 1e-3 <= us <= 1e12 for us in (self.us, *self.others.values())):
            raise ValueError(f"times must be numbers of µs, got {self.us} and {self.others}")
        if self.step not in ("", "fused", "xla"):
            raise ValueError(f'`step` must be "fused", "xla" or "", got {self.step!r}')
        if not all(isinstance(text, str) for text in (self.kind, self.jax, self.date, self.overlap)):
            raise ValueError("`kind`, `jax`, `date` and `overlap` must be texts")

    @property
    def key(self) -> tuple[Problem, str, str]:
        """What identifies the entry: a table keeps one entry for each value of this key."""
        return self.problem, self.kind, self.jax

    def measured_elsewhere(self, jax_version: str) -> str:
        """Returns a text that names the versions that this entry was measured with, if other versions run now; else "".

        Examples:
          >>> entry.measured_elsewhere("0.12.0")
          'measured with jax 0.11.2, and 0.12.0 runs'
        """
        versions = ("jax", self.jax, jax_version), ("overlap", self.overlap, __version__)
        return "; ".join(
            f"measured with {name} {then}, and {now} runs" for name, then, now in versions if then and then != now
        )

    def to_json(self) -> dict[str, Json]:
        """Returns the entry as a JSON object, which is one line of a table's file."""
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**dataclasses.asdict(rest.pop("problem")), **rest, "config": dataclasses.asdict(self.config)}

    @classmethod
    def from_json(cls, data: Json) -> Entry:
        """Makes an entry from a JSON value, as `to_json` returns it.

        Raises:
          ValueError, TypeError, KeyError, AttributeError: it is no entry, or has a value that could not be used.
        """
        if not isinstance(data, dict):
            raise ValueError("an entry must be an object")
        values: dict = dict(data)
        names = [field.name for field in dataclasses.fields(Problem) if field.name in values]
        problem = Problem(**{name: values.pop(name) for name in names})
        return cls(problem, config=Config(**values.pop("config")), **{"overlap": "", **values})


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


# --- Files ------------------------------------------------------------------------------------------------------------


def read(path: pathlib.Path) -> list[Entry]:
    """Returns the entries of a file. One warning says how many of them cannot be used.

    Raises:
      ValueError: the file is not a table.
      OSError: the file cannot be read.
    """
    lines = _lines(path)
    if faults := [f"entries[{i}]: {fault}" for i, (_, fault) in enumerate(lines) if isinstance(fault, str)]:
        logger.warning("%s: %d entries of this tuning table are ignored, the first: %s", path, len(faults), faults[0])
    return [entry for _, entry in lines if isinstance(entry, Entry)]


def _lines(path: pathlib.Path) -> list[tuple[Json, Entry | str]]:
    """Returns the lines of a table, each with its entry, or with a text that says why it cannot be used."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content["entries"], list):
            raise ValueError(f'it must be an object with "format": {FORMAT} and a list "entries"')
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is no tuning table ({error}): move it away, or name another file") from None
    found: list[tuple[Json, Entry | str]] = []
    for line in content["entries"]:
        try:
            found.append((line, Entry.from_json(line)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            found.append((line, str(error)[:200]))
    return found


def load(path: pathlib.Path) -> tuple[Entry, ...]:
    """Returns the entries of a file, like `read`, but caches them until the file changes, and never raises.

    A file that does not exist or is not a table counts as empty. The latter is said once, in a warning.
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
        # Other kinds of files are not opened: a pipe could block.
        return tuple(read(path)) if path.is_file() else ()
    except (ValueError, OSError) as error:
        logger.warning("the tuning table is ignored: %s", error)
        return ()


def add(path: pathlib.Path, entries: Iterable[Entry]) -> None:
    """Adds entries to a file in one atomic step. Makes the file and its folder if they do not exist.

    An entry replaces one with the same key, unless its search was cut short and the older one was complete. Lines of
    the file that this version of the library cannot use stay as they are.

    Raises:
      ValueError: the file exists and is not a table. It is left as it is.
      OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        old = _lines(path) if path.exists() else []
        complete = {entry.key for _, entry in old if isinstance(entry, Entry) and entry.complete}
        new = {entry.key: entry for entry in entries if entry.complete or entry.key not in complete}
        lines = [line for line, entry in old if isinstance(entry, str) or entry.key not in new]
        lines += [entry.to_json() for entry in new.values()]
        texts = ",\n".join(sorted(json.dumps(line, sort_keys=True) for line in lines))
        replace(path, f'{{"format": {FORMAT}, "entries": [\n{texts}\n]}}\n')


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Opens a context that one process and thread at a time is in, for tables of one folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems have no locks. Then two tunings at once may lose results.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def replace(path: pathlib.Path, text: str) -> None:
    """Writes a file in one atomic step; makes its folder if it does not exist.

    Raises:
      OSError: the file cannot be written.
    """
    path = path.resolve()  # If it is a link, replace the file behind it.
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)  # Others may read a table, but not what `tempfile` makes.
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


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
    fitting = (
        entry
        for entry in entries
        if entry.kind == target.kind and _alike(entry.problem) == alike and problem.accepts(entry.config, target)
    )
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


@functools.lru_cache(maxsize=4096)
def _alike(problem: Problem) -> Problem:
    """Returns a canonical form of `problem`: the same for two problems that may use each other's entries."""
    dtype, out_dtype = ("float16" if name == "bfloat16" else name for name in (problem.dtype, problem.out_dtype))
    # Right operands that lie side by side are multiplied as one of their total width is.
    return dataclasses.replace(problem.bucket, dtype=dtype, out_dtype=out_dtype, sides=1)


def _distance(a: Problem, b: Problem) -> float:
    return sum(abs(math.log(x / y)) for x, y in ((a.m, b.m), (a.n, b.n), (a.k, b.k)))
