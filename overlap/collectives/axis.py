"""The mesh axis of a call: found and checked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

from overlap.primitives import Ring


def ring_of(op: str, axis_name: Any, mesh: Any = None) -> Ring:
    """The ring along `axis_name` of the enclosing `jax.shard_map`, or of `mesh` if one is given.

    Raises:
      ValueError: no enclosing `shard_map`, or one without such an axis.
      NotImplementedError: a tuple of axes.
    """
    if isinstance(axis_name, (tuple, list)):
        if len(axis_name) != 1:
            raise NotImplementedError(
                f"`axis_name` must be one mesh axis, got {axis_name!r}: name one axis, or merge them in the mesh"
            )
        (axis_name,) = axis_name
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    names = tuple(mesh.axis_names)
    if not names:
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map`, and there is no mesh here: wrap the call, e.g. "
            f"jax.shard_map(lambda x, w: overlap.{op}(x, w, {axis_name!r}), mesh=mesh, in_specs=…, out_specs=…, "
            "check_vma=False)"
        )
    if axis_name not in names:
        raise ValueError(f"`axis_name` must be an axis of the mesh, got {axis_name!r} and the mesh has {names}")
    manual = getattr(mesh, "manual_axes", names)
    if isinstance(mesh, jax.sharding.AbstractMesh) and axis_name not in manual:
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map` over axis {axis_name!r}, and the manual axes here are "
            f"{tuple(manual)}: name the axis in `axis_names` of `jax.shard_map`, or leave that argument out"
        )
    return Ring(axis_name, tuple(zip(names, mesh.axis_sizes, strict=True)))


def require_all_manual() -> None:
    """Raises NotImplementedError if the enclosing `shard_map` leaves axes to the partitioner.

    The kernel's peers are devices, and the partitioner would be free to run it with other operands than they hold.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rest = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
    if rest:
        raise NotImplementedError(
            f"the fused kernel needs all mesh axes to be manual, and {rest} are not: leave `axis_names` out of "
            'jax.shard_map, or use implementation="xla"'
        )
