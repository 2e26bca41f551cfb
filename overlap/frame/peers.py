"""Whether kernels may talk to the other devices of a group."""

from __future__ import annotations

import jax

from overlap.frame.explain import explained_mesh
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, windows
from overlap.primitives.host_mesh import HostMesh, several_hosts


def require_peers(group: PeerGroup, target: Target) -> None:
    """Raises NotImplementedError if the devices cannot address each other's memory, or none of it can be mapped."""
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
