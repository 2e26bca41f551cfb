"""The devices of a collective, and whether kernels may talk to them."""

from __future__ import annotations

import jax

from overlap.frame.explain import explained_mesh
from overlap.frame.signatures import AxisName
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, windows
from overlap.primitives.host_mesh import HostMesh, several_hosts
from overlap.primitives.peers import outside_shard_map


def peer_group_of(op: str, axis_name: AxisName, *, more: str = "") -> PeerGroup:
    """Returns the devices along `axis_name` of the enclosing `jax.shard_map`'s mesh.

    Args:
      op: the operation's name, for messages.
      axis_name: one axis, or a tuple of axes that count as one; a tuple of one axis is that axis.
      more: further arguments that a call needs, for messages.

    Raises:
      ValueError: there is no enclosing `shard_map`, or its mesh lacks one of the axes; or `axis_name` is an empty
        tuple, or names an axis twice.
    """
    if outside := outside_shard_map():
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map`, and {outside}: wrap the call, e.g. "
            f"jax.shard_map(lambda x, w: overlap.{op}(x, w, {axis_name!r}{more}), mesh=mesh, in_specs=…, out_specs=…); "
            "`overlap.explain` takes mesh=…"
        )
    return PeerGroup.of(axis_name, caller=op)


def require_peers(group: PeerGroup, target: Target) -> None:
    """Raises NotImplementedError if kernels of these devices cannot read and write the memory of their peers."""
    if group.size == 1 or target.platform != "gpu":
        return
    windows.require_shared_memory()
    # Only the mesh of `explain` has devices. Inside `jax.shard_map` they are checked when the kernel is lowered.
    if isinstance(mesh := explained_mesh(), jax.sharding.Mesh):
        host_mesh = HostMesh.of(mesh, frozenset(name for name, _ in group.axes))
        assert host_mesh is not None
        host_mesh.require_known_ids()


def untried(group: PeerGroup) -> str | None:
    """Returns the reason not to choose a kernel with peers unless the caller asks for it; None: there is none."""
    if group.size > 1 and several_hosts(explained_mesh()):
        return (
            "the GPUs are on several hosts, where the fused kernels have not run yet: "
            'implementation="fused" runs them, along axes that lie within a host'
        )
    return None
