"""Defines an entry of a tuning table, and the rules that an entry in a file must satisfy.

A table is a file that anyone may edit, copy or truncate. So no value is used before `Entry.from_json` has checked it. A
value that satisfies the rules cannot make a later computation fail: numbers are finite and bounded, and texts are short
and printable.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from overlap._version import __version__
from overlap.choice.problem import LAYOUTS, Problem
from overlap.kernels.config import FLOAT8, FLOAT16, Config
from overlap.kernels.operations import BY_NAME

# Sizes are int32 in a kernel.
LARGEST_SIZE = 2**31 - 1
# A nanosecond and about eleven days, in µs. A time outside this range is a mistake, and the ratio of two such times
# might be 0 or infinite.
LEAST_US, LARGEST_US = 1e-3, 1e12
_TEXT_CHARACTERS = 200
_DTYPES = tuple(dtype.name for dtype in (*FLOAT16, jnp.dtype(jnp.float32), *FLOAT8))


@dataclasses.dataclass(frozen=True)
class Entry:
    """The result of tuning one problem.

    Attributes:
      problem: the problem that was tuned.
      kind: the name of the kind of GPU (`Target.kind`).
      jax: the version of jax that ran; "" if the file does not say.
      config: the fastest configuration whose result was right.
      us: its time per call, in microseconds.
      others: the times per call, in microseconds, of what `config` was compared with. The keys are "xla", "heuristic",
        and for the next best configurations the texts of `space.differences`.
      tried: how many configurations were compiled and checked.
      complete: False if the search was cut short.
      date: when `config` was measured, in ISO 8601.
      overlap: the version of this library that ran; "" if the file does not say.
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
    overlap: str = __version__

    @property
    def key(self) -> tuple[Problem, str, str]:
        """What identifies the entry: a table has at most one entry for each value of this key."""
        return self.problem, self.kind, self.jax

    def supersedes(self, older: Entry | None) -> bool:
        """Whether a table keeps this entry instead of an older one with the same key.

        An entry from a search that was cut short does not replace an entry from a complete search.
        """
        return older is None or self.complete or not older.complete

    def measured_elsewhere(self, jax_version: str) -> str:
        """Returns a text that names the versions that this entry was measured with, if other versions run now; else "".

        Example:
          >>> entry.measured_elsewhere("0.12.0")
          'measured with jax 0.11.2, and 0.12.0 runs'
        """
        versions = ("jax", self.jax, jax_version), ("overlap", self.overlap, __version__)
        return "; ".join(
            f"measured with {name} {then}, and {now} runs" if then else f"measured with an unknown {name}"
            for name, then, now in versions
            # Old tables do not state the version of overlap. If only that is missing, no message is needed.
            if then != now and (then or name == "jax")
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as a JSON object, which is one line of a table's file."""
        rest = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**dataclasses.asdict(rest.pop("problem")), **rest, "config": dataclasses.asdict(self.config)}

    @classmethod
    def from_json(cls, data: Any) -> Entry:
        """Makes an entry from a JSON value, as `to_json` returns it. `data` may be any JSON value.

        Missing fields of the configuration get their defaults.

        Raises:
          ValueError: `data` breaks a rule; the message names the field, what it must be, and what it is.
        """
        if not isinstance(data, dict):
            raise ValueError(f"an entry must be an object, got {_said(data)}")
        if unknown := sorted(data.keys() - _RULES.keys()):
            raise ValueError(f"unknown field {_said(unknown[0])}: a newer version of overlap may have written it")
        if missing := [name for name in _RULES if name not in data and name not in _OPTIONAL]:
            raise ValueError(f"`{missing[0]}` is missing")
        for name, value in data.items():
            _RULES[name].require(name, value)
        values = {**_OPTIONAL, **data, "config": _config(data["config"]), "others": dict(data.get("others", {}))}
        problem = Problem(**{field.name: values.pop(field.name) for field in dataclasses.fields(Problem)})
        return cls(problem, **values)


def name_of(data: Any) -> str:
    """Returns a text with an entry's operation and sizes; "" if they are missing.

    Messages put it after the entry's index in the table.
    """
    names = [data.get(name) for name in ("op", "m", "n", "k")] if isinstance(data, dict) else []
    if not names or not all(isinstance(name, (str, int)) for name in names):
        return ""
    op, *sizes = (_said(name).strip("'") for name in names)
    return f" ({op} {'x'.join(sizes)})"


def _config(fields: dict[str, Any]) -> Config:
    """Makes a configuration from its fields in a file. Raises ValueError if a field breaks a rule."""
    known = vars(Config())
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"`config` has an unknown field {_said(name)}: a newer version of overlap may have it")
        if not (_is_text(value) or (isinstance(value, int) and abs(value) <= LARGEST_SIZE)):
            raise ValueError(f"`config`: `{name}` must be a short text, true, false or an int32, got {_said(value)}")
    try:
        return Config(**fields)
    except ValueError as error:  # It names the field.
        raise ValueError(f"`config`: {error}") from None


def _said(value: Any) -> str:
    """Returns a JSON value as messages show it: on one line and short, even if the value is deeply nested or long."""
    return _SHORT.repr(value)


_SHORT = reprlib.Repr(maxlevel=3, maxdict=3, maxlist=3, maxstring=50, maxlong=30)


# --- The rules --------------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """A condition on a JSON value: `words` states it in a message, `holds` tests it for any JSON value."""

    words: str
    holds: Callable[[Any], bool]

    def require(self, name: str, value: Any) -> None:
        if not self.holds(value):
            raise ValueError(f"`{name}` must be {self.words}, got {_said(value)}")


def _one_of(*names: str) -> _Rule:
    return _Rule(f"one of {', '.join(names)}", lambda value: isinstance(value, str) and value in names)


def _integer(least: int) -> _Rule:
    def holds(value: Any) -> bool:
        # `type(…) is`: True is an instance of int as well.
        return type(value) is int and least <= value <= LARGEST_SIZE

    return _Rule(f"an integer from {least} to {LARGEST_SIZE}", holds)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and LEAST_US <= value <= LARGEST_US


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _TEXT_CHARACTERS and value.isprintable()


def _are_times(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(name) and _is_time(us) for name, us in value.items())


_TIME_WORDS = f"µs from {LEAST_US:g} to {LARGEST_US:g}"
_TEXT = _Rule(f"a text of one line, at most {_TEXT_CHARACTERS} characters", _is_text)
_SWITCH = _Rule("true or false", lambda value: isinstance(value, bool))
_RULES = {
    "op": _one_of(*BY_NAME),
    **dict.fromkeys(("m", "n", "k", "devices", "batch"), _integer(1)),
    **dict.fromkeys(("dtype", "out_dtype"), _one_of(*_DTYPES)),
    "layout": _one_of(*LAYOUTS),
    "block_scaled": _SWITCH,
    "sides": _integer(1),
    "kind": _Rule(f"not empty, and {_TEXT.words}", lambda value: _is_text(value) and bool(value)),
    "jax": _TEXT,
    "overlap": _TEXT,
    "config": _Rule("an object with the fields of an overlap.Config", lambda value: isinstance(value, dict)),
    "us": _Rule(f"a number of {_TIME_WORDS}", _is_time),
    "others": _Rule(f"an object of numbers of {_TIME_WORDS}", _are_times),
    "tried": _integer(0),
    "complete": _SWITCH,
    "date": _TEXT,
}
# Fields that may be missing in an entry written by an older version, and the values that they then get.
_OPTIONAL: dict[str, Any] = {
    "block_scaled": False,
    "sides": 1,
    "jax": "",
    "overlap": "",
    "others": {},
    "tried": 0,
    "complete": True,
    "date": "",
}
assert _RULES.keys() == {field.name for kind in (Problem, Entry) for field in dataclasses.fields(kind)} - {"problem"}
