"""The mesh of a kernel on this host: which GPUs it can talk to, and by which numbers.

A kernel names a peer by its position in the mesh, counted row-major over all axes: `axis_index` in a kernel, a remote
reference and a remote signal all use positions. On the way to a GPU a position is translated three times:

1. Mosaic GPU takes it as a *rank*: the index into a table with the addresses of all peers.
2. XLA fills that table: one rank for each entry of the list of ids in the kernel's custom call (`xla_replica_ids`), in
   the order of the list.
3. XLA takes an entry of the list as a *partition of the program* (group mode "flattened id"), and finds its GPU in the
   program's device assignment, which is the mesh's own order of devices.

**Devices in any order.** The list that makes ranks equal to positions is 0, 1, 2, … for every mesh, however its devices
are permuted, in one process and in one process per GPU. jax 0.11 and 0.12 list the ids of the *devices* instead, and
refuse a mesh where the two lists differ. For an abstract mesh jax 0.11 lists nothing, and the kernel fails when it
runs. So this library puts 0, 1, 2, … in place of jax's list.

**Several hosts.** jax takes all devices of the mesh as peers, but GPUs of different hosts cannot address each other.
Here the peers are the part of the mesh that lies on this process's own host: a smaller mesh, which Mosaic gets in place
of the whole one. So each host compiles a module of its own, with a list of its own. The list is *reversed*, for this
reason: XLA lists the devices of its own collectives in ascending order, for all hosts together. It refuses a list of
the same devices in the same order for one host alone. So with several hosts ranks run in the opposite order to
positions, and the lowering converts between them.

jax calls a host a *partition* (`partition_index`), which is not the partition of step 3. jax tells hosts apart by the
boot id of the operating system, unless JAX_PARTITION_INDEX names the partition.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from overlap import _compat
from overlap.primitives import addresses
from overlap.primitives.types import AnyMesh, Axis, LoweringContext

_WAY_OUT = 'or use implementation="xla"'


class _Ranked:
    """Wraps a device for Mosaic GPU: `id` is `number`; all other attributes are those of the wrapped device."""

    def __init__(self, number: int, device: Any) -> None:
        self.id = number
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def __hash__(self) -> int:
        return hash((self.id, self._device))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ranked) and (self.id, self._device) == (other.id, other._device)


@dataclasses.dataclass(frozen=True)
class HostMesh:
    """The devices that a kernel on one of them can talk to.

    Attributes:
      mesh: the mesh of these devices, for Mosaic GPU: their ids in it are 0, 1, 2, …
      positions: the position in the enclosing mesh of each rank's device: XLA's list.
      device_ids: the devices' own ids.
      is_mirrored: whether rank 0 is the last position in `mesh`.
      knows_devices: whether these are the devices on which the kernel will run, in this order.
    """

    mesh: jax.sharding.Mesh
    positions: tuple[int, ...]
    device_ids: tuple[int, ...]
    is_mirrored: bool
    knows_devices: bool = True

    @staticmethod
    def of(mesh: AnyMesh, axes: frozenset[Hashable]) -> HostMesh | None:
        """Returns this host's part of a mesh, for a kernel whose peers lie along `axes`; None if it has no peers.

        Raises:
          NotImplementedError: an axis leads to other hosts, or the devices of this host do not form a mesh.
        """
        if not axes.intersection(mesh.axis_names):
            return None
        if not isinstance(mesh, jax.sharding.Mesh):
            if several_hosts():
                raise NotImplementedError(
                    f"an abstract mesh of {mesh.size} devices does not say which of them are on this host, and the job "
                    f"has several: give jax.shard_map a mesh of devices, {_WAY_OUT}"
                )
            # The order of the devices does not matter here, but the number of their processes does.
            devices = jax.devices() if mesh.size == jax.device_count() else range(mesh.size)
            abstract = _of_one_host(np.array(devices, dtype=object).reshape(mesh.axis_sizes), mesh.axis_names)
            return dataclasses.replace(abstract, knows_devices=False)
        host = _own_host(mesh)
        is_here = np.vectorize(lambda device: host_of(device) == host, otypes=[bool])(mesh.devices)
        if is_here.all():
            return _of_one_host(mesh.devices, mesh.axis_names)
        counts = [len(np.unique(indices)) for indices in np.nonzero(is_here)]
        if np.prod(counts) != is_here.sum():
            raise NotImplementedError(
                f"the {is_here.sum()} devices of this host do not form a block of the mesh {dict(mesh.shape)}, so its "
                "axes do not lead from one to the other: arrange the mesh host by host "
                f"(jax.experimental.mesh_utils.create_hybrid_device_mesh), {_WAY_OUT}"
            )
        within = dict(zip(mesh.axis_names, counts, strict=True))
        outside = [name for name in mesh.axis_names if name in axes and within[name] < mesh.shape[name]]
        if outside:
            raise NotImplementedError(
                f"the peers of the kernel along {outside[0]!r} are on several hosts ({mesh.shape[outside[0]]} devices, "
                f"{within[outside[0]]} of them here), and it cannot reach the memory of others: lay that axis within a "
                f"host, {_WAY_OUT}"
            )
        # A kernel's peers cannot lie along an axis that leads to other hosts. So an axis is left out if one device of
        # it is on this host.
        kept = [name for name in mesh.axis_names if within[name] > 1 or name in axes]
        here = mesh.devices[is_here].reshape([within[name] for name in kept])
        positions = tuple(map(int, np.flatnonzero(is_here)))
        return HostMesh(_numbered(here, kept), positions[::-1], tuple(d.id for d in here.flat), is_mirrored=True)

    def require_known_ids(self) -> None:
        """Raises NotImplementedError unless XLA can be told of these devices.

        The list of positions serves a second purpose: with it the custom call declares to XLA the ids of the
        *devices*, as a set. That is right if the ids are a permutation of the positions. Otherwise it contradicts what
        XLA declares for its own collectives over the mesh, and the program fails.
        """
        ids = sorted(self.device_ids)
        expected = sorted(self.positions)
        if ids != expected:
            how = (
                "arrange the mesh host by host, in the order of jax.devices()"
                if self.is_mirrored
                else "let CUDA_VISIBLE_DEVICES name the GPUs of the mesh alone"
            )
            raise NotImplementedError(
                f"a kernel that talks to its peers needs devices {expected} at these places of the mesh, in any order, "
                f"and got {ids}: {how}, {_WAY_OUT}"
            )


def _of_one_host(devices: np.ndarray, names: Sequence[Axis]) -> HostMesh:
    """Returns a whole mesh, which is on one host. For an abstract mesh, numbers may stand for the devices."""
    ids = tuple(getattr(device, "id", device) for device in devices.flat)
    return HostMesh(_numbered(devices, names), tuple(range(devices.size)), ids, is_mirrored=False)


def _numbered(devices: np.ndarray, names: Sequence[Axis]) -> jax.sharding.Mesh:
    numbered = np.empty(devices.size, dtype=object)
    numbered[:] = [_Ranked(number, device) for number, device in enumerate(devices.flat)]
    return jax.sharding.Mesh(numbered.reshape(devices.shape), tuple(names))


def _own_host(mesh: jax.sharding.Mesh) -> int:
    """Identifies the host whose devices this process may use: its own, as `host_of` names it.

    If the mesh describes another machine, for which this process only compiles, the result names that machine.
    """
    attached = set(jax.local_devices())
    own = [device for device in mesh.devices.flat if device in attached]
    if own:
        return host_of(own[0])
    # The devices of a compile-only topology know their process and have no partition.
    if len({device.process_index for device in mesh.devices.flat}) > 1:
        raise NotImplementedError(
            f"a program with a fused kernel cannot be compiled ahead of time for {mesh.size} devices of several hosts, "
            f"since each host needs one of its own: compile it there, {_WAY_OUT}"
        )
    return host_of(mesh.devices.flat[0])


def host_of(device: Any) -> int:
    """Returns the number that jax gives to the host of a device. All CPU devices have the same number."""
    return getattr(device, "partition_index", 0)


def several_hosts(mesh: AnyMesh | None = None) -> bool:
    """Whether the devices of a mesh are on several hosts. For an abstract mesh, or None: the devices of this job."""
    devices = mesh.devices.flat if isinstance(mesh, jax.sharding.Mesh) else jax.devices()
    return len({host_of(device) for device in devices}) > 1


def device_ids(context: LoweringContext) -> tuple[int, ...] | None:
    """Returns the ids of the devices of a kernel's mesh, in order; None if they are not known yet.

    Call it in the kernel's inline code. The ids are not known for an abstract mesh and in an exported program. Then jax
    runs a barrier over all devices before the kernel.
    """
    return context.device_ids if hasattr(context, "device_ids") else _compat.device_ids()


# The change of jax that a kernel with peers needs: Pallas lowers kernels for the mesh of this host.
ON_HOST_MESHES = _compat.kernels_on_host_meshes(HostMesh.of, addresses)
