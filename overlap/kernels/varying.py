"""Reads and changes the mesh axes along which a value varies, as its type names them in `jax.shard_map`.

With `check_vma=True`, jax's default, the type of each value names the manual axes along which it *varies*. Along the
other axes the value is the same on all devices. From these types jax derives the type of every result, and the sums
over devices that a gradient needs. With `check_vma=False` the types name no axis, and the functions of this module
leave values as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from overlap.primitives.types import Axis, Tree


def axes_of(*values: Tree) -> frozenset[Axis]:
    """Returns the manual axes that at least one of these values varies along."""
    types = (getattr(jax.typeof(value), "manual_axis_type", None) for value in values)
    return frozenset().union(*(own.varying for own in types if own is not None))


def types_tell(axis: Axis) -> bool:
    """Returns whether types name the axes along which values vary, as with `check_vma=True`; `axis`: a manual one.

    If they do, the type of a device's index along `axis` names that axis.
    """
    return axis in axes_of(lax.axis_index(axis))


def varying(value: Tree, axes: Iterable[Axis]) -> Tree:
    """Returns the value, typed as varying along `axes` as well. Its gradient is then summed along these axes."""
    missing = tuple(axis for axis in axes if axis not in axes_of(value))
    return lax.pcast(value, missing, to="varying") if missing else value


def alike(tree: Tree) -> Tree:
    """Returns the values, all typed as varying along each axis that at least one of them varies along."""
    axes = sorted(axes_of(*jax.tree.leaves(tree)), key=str)
    return jax.tree.map(lambda value: varying(value, axes), tree)


def summed_like(cotangent: jax.Array, operand: Tree) -> jax.Array:
    """Returns a cotangent, summed along the axes along which the type of its operand does not vary.

    The sum is needed because an operand that is the same on several devices contributes to the result of each of them.
    """
    wanted = operand.manual_axis_type.varying
    axes = tuple(sorted(axes_of(cotangent) - wanted, key=str))
    # A cotangent may also vary along fewer axes than its operand.
    return varying(lax.psum(cotangent, axes) if axes else cotangent, wanted)


def part_of(cotangent: jax.Array, axes: Iterable[Axis]) -> jax.Array:
    """Returns one device's part of a cotangent that may be the same on all devices along some of `axes`.

    Use it where the parts of all devices are summed afterwards. A cotangent that is the same on all devices would
    otherwise be counted once for each device.
    """
    common = tuple(axis for axis in axes if axis not in axes_of(cotangent))
    return varying(cotangent, common) / lax.axis_size(common) if common else cotangent


def same_along(value: jax.Array, axes: Iterable[Axis]) -> jax.Array:
    """Returns the value, typed as equal on all devices along `axes`.

    Use it for values that the caller knows to be equal on these devices, e.g. because they were gathered along `axes`.
    """
    known = tuple(axis for axis in axes if axis in axes_of(value))
    return same_along_p.bind(value, axes=known) if known else value


same_along_p = Primitive("overlap_same_along")
same_along_p.def_impl(lambda value, *, axes: value)
mlir.register_lowering(same_along_p, lambda context, value, *, axes: [value])
batching.defvectorized(same_along_p)


@same_along_p.def_abstract_eval
def _abstract(aval: Any, *, axes: tuple[Axis, ...]) -> Any:
    own = aval.manual_axis_type
    return aval.update(manual_axis_type=own.update(varying=own.varying - frozenset(axes)))


def _transpose(cotangent: jax.Array, value: Tree, *, axes: tuple[Axis, ...]) -> list[jax.Array]:
    return [part_of(cotangent, axes)]


ad.deflinear2(same_along_p, _transpose)
