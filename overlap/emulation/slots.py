"""Run-time values in decoded parameters."""

from __future__ import annotations

from typing import Any


class Slot:
    """Stands for a run-time value in decoded parameters: its index in a thread's environment."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


def value_of(x: Any, env: list) -> Any:
    """The value of a decoded parameter: a slot's content or the constant itself."""
    return env[x.index] if type(x) is Slot else x
