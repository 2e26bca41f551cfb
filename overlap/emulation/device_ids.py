"""Device ids: which device of the mesh a remote reference or a signal means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ProtocolError
from .slots import value_of

if TYPE_CHECKING:
    from .machine import Thread


def multicast_devices(thread: Thread, axes: Any) -> tuple[int, ...]:
    """The devices that a multicast operation of `thread` over the mesh axes `axes` reaches: all of the mesh."""
    machine = thread.machine
    names = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    if set(names) != set(machine.mesh_shape):
        raise ProtocolError(
            f"a multicast over the axes {names} in the mesh {machine.mesh_shape}: NVLink multicast reaches all devices "
            "of a mesh. Expected: collective_axes names all axes of the mesh, and no others"
        )
    return machine.devices


def logical_device(thread: Thread, device_id: Any, id_type: Any, env: list) -> int:
    """The device that a device id, which speaks of positions in the mesh, means to `thread`."""

    def value(x: Any) -> int:
        return int(value_of(x, env))

    machine = thread.machine
    sizes = machine.mesh_shape
    if device_id is None:
        return thread.device
    if not sizes and getattr(id_type, "name", "MESH") != "LOGICAL":
        raise ProtocolError("a device id in a kernel outside jax.shard_map, which runs on one device and has no mesh")
    if isinstance(device_id, dict):
        own = dict(zip(sizes, machine.place(thread.device)))
        for names, x in device_id.items():
            index = value(x)
            for axis in reversed(names if isinstance(names, tuple) else (names,)):
                if axis not in sizes:
                    raise ProtocolError(f"a device id names the axis {axis!r}, which the mesh {sizes} does not have")
                index, own[axis] = divmod(index, sizes[axis]) if isinstance(names, tuple) else (0, index)
        parts = list(own.values())
    elif getattr(id_type, "name", "MESH") == "LOGICAL":
        logical = value(device_id)
        if not 0 <= logical < len(machine.coordinates):
            raise ProtocolError(
                f"the logical device id {logical} is out of range for a mesh of {len(machine.coordinates)} devices"
            )
        return machine.devices[logical]
    else:
        parts = [value(x) for x in (device_id if isinstance(device_id, (tuple, list)) else (device_id,))]
        if len(parts) != len(sizes):
            raise ProtocolError(
                f"a device id with {len(parts)} coordinates for the mesh {sizes}. Expected: one per axis, or a dict "
                "from axes to coordinates"
            )
    logical = 0
    for part, (axis, size) in zip(parts, sizes.items()):
        if not 0 <= part < size:
            raise ProtocolError(f"the device id {part} is out of range for the mesh axis {axis!r} of size {size}")
        logical = logical * size + part
    return machine.devices[logical]
