"""What the emulator reads of jax's equations. jax publishes the classes, but not the types of their parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np


class ArrayType(Protocol):
    """The type of a value or of a reference in a kernel: a `ShapedArray`, or what a reference refers to."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...


class Atom(Protocol):
    """A variable or a literal of a jaxpr."""

    @property
    def aval(self) -> ArrayType: ...


class Equation(Protocol):
    """An equation of a jaxpr: an application of a primitive."""

    @property
    def primitive(self) -> Any: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def effects(self) -> Iterable[Any]: ...
    @property
    def source_info(self) -> Any: ...
