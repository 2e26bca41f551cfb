"""Where in the user's source an instruction comes from, for messages and events."""

from __future__ import annotations

import os
import re

from jax.extend import source_info_util

from .equations import Equation

# Folders of functions that kernels call. Reports name the line of the call.
_libraries: set[str] = set()
_MOST_FRAMES = 100


def name_callers_of(folder: str) -> None:
    """Makes reports name the line that calls a function of this folder, in place of a line in the folder.

    `overlap.primitives` calls this when it is imported.
    """
    _libraries.add(f"{folder}{os.sep}")


def lines_of(eqn: Equation | None) -> list[str]:
    """Returns the lines in which an equation was traced, jax's own left out, innermost first."""
    if eqn is None:
        return []
    text = source_info_util.summarize(eqn.source_info, num_frames=_MOST_FRAMES)
    # Of each function's name, keep the part behind the last dot.
    return [re.sub(r"\((?:[^()]*\.)?([^().]+)\)$", r"(\1)", line) for line in reversed(text.splitlines())]


class Instruction:
    """The origin of an instruction in the kernel's source."""

    __slots__ = ("_source", "eqn", "index", "name")

    def __init__(self, index: int, name: str, eqn: Equation | None):
        self.index, self.name, self.eqn = index, name, eqn
        self._source: str | None = None

    @property
    def source(self) -> str:
        if self._source is None:
            frames = lines_of(self.eqn)
            # The kernel's own line, not the line in a primitive that the kernel calls; then the primitive's name.
            libraries = tuple(_libraries)
            own = next((i for i, frame in enumerate(frames) if not frame.startswith(libraries)), 0)
            primitive = frames[own - 1].rpartition("(")[2].removesuffix(")") if own else ""
            self._source = ": ".join(filter(None, (*frames[own : own + 1], primitive, self.name)))
        return self._source

    @property
    def scope(self) -> str:
        """The named scopes around the instruction."""
        return str(self.eqn.source_info.name_stack) if self.eqn is not None else ""
