"""The values of a thread, and how decoded parameters name them.

A thread's *environment* is a list with one entry for each variable of the decoded kernel. The decoder knows an entry
by its index in that list, an `int`. Decoded parameters hold an `Entry` where the value is known only when the thread
runs.
"""

from __future__ import annotations

from typing import Any


class Entry:
    """An entry of a thread's environment, as a part of decoded parameters."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


def value_of(x: Any, env: list[Any]) -> Any:
    """The value of a decoded parameter: that of an `Entry` in the environment `env`, or the constant itself."""
    return env[x.index] if type(x) is Entry else x
