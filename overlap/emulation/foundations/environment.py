"""How decoded parameters refer to the values of a thread.

A thread's *environment* is a list with one entry for each variable of the decoded kernel. While the kernel is decoded,
an `int` stands for an entry: its index in the list. In decoded parameters, an `Entry` stands for a value that is known
only when the thread runs.
"""

from __future__ import annotations

from typing import Any

# The values of a thread: numbers, arrays, and the buffers and barriers that references stand for.
Environment = list[Any]


class Entry:
    """The index of an entry of a thread's environment, in decoded parameters."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


# A decoded parameter that is a scalar: a constant, or the entry of a value.
Scalar = int | Entry


def value_of(x: Scalar, env: Environment) -> int:
    """Returns the value of a decoded parameter: the value in `env` if it is an `Entry`, else the constant itself."""
    return env[x.index] if type(x) is Entry else x  # pyright: ignore[reportReturnType]
