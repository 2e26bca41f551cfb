"""What the emulator reads of jax's equations, and how their decoded parameters refer to the values of a thread.

jax publishes the classes of equations, but not the types of their parts.

A thread's *environment* is a list with one entry for each variable of the decoded kernel. While the kernel is decoded,
an `int` stands for an entry: its index in the list. In decoded parameters, an `Entry` stands for a value that is known
only when the thread runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jax.extend import core as jex_core

# An object of jax whose class is private or has no types: a mesh, a pytree of references, an equation's parameter.
JaxObject = Any
# A step of jax's way from a reference to a part of it. The classes are private: the emulator knows their names.
Transform = Any
AxisName = Hashable
# The values of a thread: numbers, arrays, and the buffers and barriers that references stand for.
Environment = list[Any]


class ArrayType(Protocol):
    """The type of a value or of a reference in a kernel: a `ShapedArray`, or what a reference refers to."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
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
    def primitive(self) -> jex_core.Primitive: ...
    @property
    def params(self) -> Mapping[str, JaxObject]: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def effects(self) -> object: ...
    @property
    def source_info(self) -> JaxObject: ...


class Jaxpr(Protocol):
    """A function as a list of equations."""

    @property
    def eqns(self) -> Sequence[Equation]: ...
    @property
    def invars(self) -> Sequence[Atom]: ...
    @property
    def outvars(self) -> Sequence[Atom]: ...
    @property
    def constvars(self) -> Sequence[Atom]: ...


def argument_names(jaxpr: Jaxpr) -> list[str]:
    """The names of a function's arguments in the user's source, as far as jax knows them."""
    names = list(getattr(getattr(jaxpr, "debug_info", None), "arg_names", None) or ())
    names += [""] * (len(jaxpr.invars) - len(names))
    return [name or f"scratch {i}" for i, name in enumerate(names)]


def open_jaxpr(jaxpr: JaxObject) -> Jaxpr:
    """Returns a jaxpr without its constants: of a `ClosedJaxpr` the jaxpr inside, else the jaxpr itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def space_of(aval: JaxObject) -> str:
    """The memory space of a reference's type, such as ``"smem"``."""
    return str(getattr(aval.memory_space, "value", aval.memory_space))


def is_semaphore(aval: ArrayType) -> bool:
    """Whether a reference's type is an array of semaphores, whose dtype is one of jax's own."""
    return "semaphore" in str(getattr(aval.dtype, "name", aval.dtype))


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
