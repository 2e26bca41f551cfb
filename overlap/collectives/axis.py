"""Finds and checks the mesh axes of a call before anything is traced."""

from __future__ import annotations

import jax

from overlap.frame.signatures import AnyMesh, AxisName
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, windows
from overlap.primitives.clique import Clique, several_hosts
from overlap.primitives.peers import outside_shard_map


def peer_group_of(op: str, axis_name: AxisName, mesh: AnyMesh | None = None, *, more: str = "") -> PeerGroup:
    """Returns the devices along `axis_name` of the enclosing `jax.shard_map`'s mesh, or of `mesh` if one is given.

    Args:
      op: the operation's name, for messages.
      axis_name: one axis, or a tuple of axes that count as one; a tuple of one axis is that axis.
      mesh: a mesh to use in place of the enclosing one.
      more: further arguments that a call needs, for messages.

    Raises:
      ValueError: there is no enclosing `shard_map`, or its mesh lacks one of the axes; or `axis_name` is an empty
        tuple, or names an axis twice.
    """
    if outside := outside_shard_map(mesh):
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map`, and {outside}: wrap the call, e.g. "
            f"jax.shard_map(lambda x, w: overlap.{op}(x, w, {axis_name!r}{more}), mesh=mesh, in_specs=…, out_specs=…); "
            "`overlap.explain` takes mesh=…"
        )
    return PeerGroup.of(axis_name, mesh, caller=op)


def untried(group: PeerGroup, mesh: AnyMesh | None = None) -> str | None:
    """Returns the reason not to choose a fused kernel for `group` unless the caller asks for one; None: no reason."""
    if group.size > 1 and several_hosts(mesh):
        return (
            "the GPUs are on several hosts, where the fused kernels have not run yet: "
            'implementation="fused" runs them, along axes that lie within a host'
        )
    return None


def require_peers(group: PeerGroup, target: Target, mesh: AnyMesh | None) -> None:
    """Checks that the GPUs of `group` can address each other's memory.

    Args:
      group: the devices.
      target: the hardware that the kernel is for.
      mesh: the mesh with its devices, if the caller is `explain`. Inside `jax.shard_map` the devices are not known (the
        mesh is None or abstract). They are then checked when the kernel is lowered.

    Raises:
      NotImplementedError: the GPUs cannot address each other's memory; or, in a job of several processes, no address
        space is left to map peers' memory.
    """
    if group.size == 1 or target.platform != "gpu":
        return
    windows.require_shared_memory()
    if isinstance(mesh, jax.sharding.Mesh):
        clique = Clique.of(mesh, frozenset(name for name, _ in group.axes))
        assert clique is not None
        clique.require_known_ids()
