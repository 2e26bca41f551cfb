"""The mesh axes of a call: found and checked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

from overlap import _settings
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, windows
from overlap.primitives.clique import Clique, several_hosts


def peer_group_of(op: str, axis_name: Any, mesh: Any = None) -> PeerGroup:
    """The devices along `axis_name` of the enclosing `jax.shard_map`'s mesh, or of `mesh` if one is given.

    Args:
      op: the operation's name, for messages.
      axis_name: one axis, or a tuple of axes that count as one; a tuple of one axis is that axis.
      mesh: a mesh to use in place of the enclosing one.

    Raises:
      ValueError: there is no enclosing `shard_map`, or its mesh lacks one of the axes; or `axis_name` is an empty
        tuple, or names an axis twice.
    """
    axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not axes:
        raise ValueError(f"`axis_name` must name at least one mesh axis, got {axis_name!r}: name the axis")
    is_enclosing = mesh is None
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    names = tuple(mesh.axis_names)
    if not names:
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map`, and there is no mesh here: wrap the call, e.g. "
            f"jax.shard_map(lambda x, w: overlap.{op}(x, w, {axis_name!r}), mesh=mesh, in_specs=…, out_specs=…); "
            "`overlap.explain` takes mesh=…"
        )
    for axis in axes:
        if axis not in names:
            whole = "" if len(axes) == 1 else f" in {axes!r}"
            raise ValueError(
                f"`axis_name` must be an axis of the mesh, or a tuple of them, got {axis!r}{whole} and the mesh has "
                f"{names}: name one of those"
            )
    repeated = [axis for axis in names if axes.count(axis) > 1]
    if repeated:
        raise ValueError(
            f"`axis_name` must name each mesh axis once, got {repeated[0]!r} {axes.count(repeated[0])} times in "
            f"{axes!r}: leave the repetition out"
        )
    manual = tuple(getattr(mesh, "manual_axes", names))
    missing = [axis for axis in axes if axis not in manual]
    if is_enclosing and missing:
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map` over axis {missing[0]!r}, and the manual axes here are "
            f"{manual}: name the axis in `axis_names` of `jax.shard_map`, or leave that argument out"
        )
    return PeerGroup(axes[0] if len(axes) == 1 else axes, tuple(zip(names, mesh.axis_sizes, strict=True)))


def untried(group: PeerGroup, mesh: Any = None) -> str | None:
    """The reason not to choose a fused kernel for `group` unless the caller asks for it; None if there is none."""
    if group.size > 1 and several_hosts(mesh):
        return (
            "the GPUs are on several hosts, where the fused kernels have not run yet: "
            'implementation="fused" runs them, along axes that lie within a host'
        )
    return None


def require_peers(group: PeerGroup, target: Target, mesh: Any) -> None:
    """Checks that the GPUs of `group` can address each other's memory.

    Args:
      group: the devices.
      target: the hardware that the kernel is for.
      mesh: the mesh, whose devices only `explain` knows beforehand. Inside `jax.shard_map` it is None or abstract, and
        the lowering does the check.

    Raises:
      NotImplementedError: they cannot; or, in a job of several processes, there is no room left to map peers' memory.
      RuntimeError: the environment variable OVERLAP_WAIT_TIMEOUT_S is wrong.
    """
    if group.size == 1:
        return
    _settings.wait_timeout_s()  # Read it now, so that a wrong value raises here and not while the kernel is traced.
    if target.platform != "gpu":
        return
    windows.require_room()
    if isinstance(mesh, jax.sharding.Mesh):
        clique = Clique.of(mesh, frozenset(name for name, _ in group.axes))
        assert clique is not None
        clique.require_known_ids()
