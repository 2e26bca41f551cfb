"""Memory to which peers write while a kernel runs: a result, or where each GPU has a process of its own, an operand."""

from __future__ import annotations

import functools

import jax

from overlap.kernels.launch import sealed
from overlap.primitives import addresses
from overlap.primitives.host_mesh import ON_HOST_MESHES


def landing_place(memory: jax.ShapeDtypeStruct, **kind: bool) -> jax.Array:
    """Returns an `addresses.landing_place` of this shape and dtype, traced as a single operation of jax."""
    make = functools.partial(addresses.landing_place, memory.shape, memory.dtype, **kind)
    return sealed(make, "overlap_landing_place", patches=(ON_HOST_MESHES,))()


def lands_in_an_operand() -> bool:
    """Whether peers write to an operand instead of a result: so if each GPU has a process of its own."""
    return jax.process_count() > 1
