"""The mesh of a launch: its devices, and the device that a device id stands for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ..foundations.equations import AxisName, Environment, JaxObject, Scalar, value_of
from ..foundations.errors import ProtocolError


class Mesh:
    """The devices of one launch.

    A device has a number, which is the same in all launches of a sequence. A kernel computes with positions in the
    mesh; a device's position may differ from launch to launch.

    Attributes:
        shape: the size of each axis.
        devices: for each position, row-major, the number of the device there.
        coordinates: for each position, row-major, its coordinates.
    """

    def __init__(self, shape: dict[AxisName, int], devices: tuple[int, ...]):
        self.shape, self.devices = shape, devices
        self.coordinates = list(itertools.product(*(range(size) for size in shape.values())))
        self._position = {device: position for position, device in enumerate(devices)}

    def place(self, device: int) -> tuple[int, ...]:
        """A device's coordinates in the mesh."""
        return self.coordinates[self._position[device]]

    def multicast_devices(self, axes: AxisName | Sequence[AxisName]) -> tuple[int, ...]:
        """Returns the devices that a multicast operation over the mesh axes `axes` reaches: all devices of the mesh.

        Raises:
            ProtocolError: `axes` are not the axes of the mesh, all of them.
        """
        names = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
        if set(names) != set(self.shape):
            raise ProtocolError(
                f"a multicast over the axes {names} in the mesh {self.shape}: NVLink multicast reaches all devices of "
                "a mesh. Expected: collective_axes names all axes of the mesh, and no others"
            )
        return self.devices

    def logical_device(self, own: int, device_id: JaxObject, id_type: JaxObject, env: Environment) -> int:
        """Returns the device that a device id stands for in a thread of the device `own` with the environment `env`.

        Raises:
            ProtocolError: the mesh has no such axis or position.
        """

        def value(x: Scalar) -> int:
            return int(value_of(x, env))

        sizes = self.shape
        if device_id is None:
            return own
        if not sizes and getattr(id_type, "name", "MESH") != "LOGICAL":
            raise ProtocolError(
                "a device id in a kernel outside jax.shard_map, which runs on one device and has no mesh"
            )
        if isinstance(device_id, dict):
            place = dict(zip(sizes, self.place(own)))
            for names, x in device_id.items():
                index = value(x)
                for axis in reversed(names if isinstance(names, tuple) else (names,)):
                    if axis not in sizes:
                        raise ProtocolError(
                            f"a device id names the axis {axis!r}, which the mesh {sizes} does not have"
                        )
                    index, place[axis] = divmod(index, sizes[axis]) if isinstance(names, tuple) else (0, index)
            parts = list(place.values())
        elif getattr(id_type, "name", "MESH") == "LOGICAL":
            logical = value(device_id)
            if not 0 <= logical < len(self.coordinates):
                raise ProtocolError(
                    f"the logical device id {logical} is out of range for a mesh of {len(self.coordinates)} devices"
                )
            return self.devices[logical]
        else:
            parts = [value(x) for x in (device_id if isinstance(device_id, (tuple, list)) else (device_id,))]
            if len(parts) != len(sizes):
                raise ProtocolError(
                    f"a device id with {len(parts)} coordinates for the mesh {sizes}. Expected: one per axis, or a "
                    "dict from axes to coordinates"
                )
        logical = 0
        for part, (axis, size) in zip(parts, sizes.items()):
            if not 0 <= part < size:
                raise ProtocolError(f"the device id {part} is out of range for the mesh axis {axis!r} of size {size}")
            logical = logical * size + part
        return self.devices[logical]
