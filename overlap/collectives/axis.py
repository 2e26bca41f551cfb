"""The mesh axes of a call: found and checked before anything is traced."""

from __future__ import annotations

from typing import Any

import jax

from overlap import _settings
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, windows
from overlap.primitives.clique import Clique, several_hosts


def peer_group_of(op: str, axis_name: Any, mesh: Any = None) -> PeerGroup:
    """The ring along `axis_name` of the enclosing `jax.shard_map`, or of `mesh` if one is given.

    Args:
      op: the operation's name, for messages.
      axis_name: one axis, or a tuple of axes that count as one; a tuple of one axis is that axis.
      mesh: a mesh that takes the place of the enclosing one.

    Raises:
      ValueError: no enclosing `shard_map`, or one without such axes; no axis at all, or one twice.
    """
    if not (jax.sharding.get_abstract_mesh() if mesh is None else mesh).axis_names:
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map`, and there is no mesh here: wrap the call, e.g. "
            f"jax.shard_map(lambda x, w: overlap.{op}(x, w, {axis_name!r}), mesh=mesh, in_specs=…, out_specs=…); "
            "`overlap.explain` takes mesh=…"
        )
    return PeerGroup.of(axis_name, mesh, caller=op)


def untried(group: PeerGroup, mesh: Any = None) -> str | None:
    """Why a kernel along `ring` is not chosen unless it is asked for; None if nothing speaks against it."""
    if group.size > 1 and several_hosts(mesh):
        return (
            "the GPUs are on several hosts, where the fused kernels have not run yet: "
            'implementation="fused" runs them, along axes that lie within a host'
        )
    return None


def require_peers(group: PeerGroup, target: Target, mesh: Any) -> None:
    """Raises NotImplementedError if the GPUs of `mesh` cannot talk to each other along `ring`.

    Only `explain` knows the mesh's devices beforehand; inside `jax.shard_map` it is for the lowering to find out. And
    in a job of several processes a program must be told where its peers' memory is.
    """
    if group.size == 1:
        return
    _settings.wait_timeout_s()  # It is part of the kernel, and wrong before that is traced.
    if target.platform != "gpu":
        return
    windows.require_room()
    if isinstance(mesh, jax.sharding.Mesh):
        clique = Clique.of(mesh, frozenset(name for name, _ in group.axes))
        assert clique is not None
        clique.require_known_ids()
