"""Who am I, who is my peer, and how is its memory named: positions along one axis of a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """The devices along one named mesh axis, seen from inside a kernel.

    A kernel never uses a mesh index as a device id: the two agree only while the axis is the whole mesh and its devices
    are in order. It asks for `me()` and `peer(distance)`, which are positions on the ring, and hands those back to
    `remote` and `device_id`, which turn them into whatever the framework wants.

    Attributes:
      axis_name: the mesh axis along which the kernel communicates.
      mesh_shape: names and sizes of all axes of the enclosing mesh, major to minor.
    """

    axis_name: str
    mesh_shape: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """How many devices are on the ring."""
        return dict(self.mesh_shape)[self.axis_name]

    def me(self) -> Any:
        """This device's position on the ring, an int32 scalar."""
        return lax.axis_index(self.axis_name)

    def peer(self, distance: Any) -> Any:
        """The position `distance` steps ahead of this device (0 <= distance <= size), an int32 scalar."""
        return lax.rem(self.me() + distance, self.size)

    def device_id(self, position: Any) -> Any:
        """The framework's name for the device at a position: its coordinate on this axis; the others are mine."""
        return {self.axis_name: position}

    def remote(self, ref: Any, position: Any) -> Any:
        """A reference to the peer's copy of a global-memory `ref` (an operand, an output or a flag).

        Only asynchronous copies may use it (rows of an untiled buffer if `position` is known on the device alone).
        """
        return plgpu.remote_ref(ref, self.device_id(position))
