"""Who am I, who is my peer, and how is its memory named: positions along one or several axes of a mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives.integers import quotient, remainder


@dataclasses.dataclass(frozen=True)
class PeerGroup:
    """The devices along one mesh axis, or along several as if they were one, seen from inside a kernel.

    A kernel never uses a mesh index as a device id: the two agree only while the axis is the whole mesh. It asks for
    `me()` and `peer(distance)`, which are positions on the ring, and hands those back to `remote` and `device_id`,
    which turn them into whatever the framework wants. In what order the mesh holds its devices, and which of them are
    on other hosts, is no concern of a kernel: see `overlap/primitives/clique.py`.

    Positions along several axes run row-major in the order in which `axis_name` names them, whatever their order in the
    mesh: as `lax.axis_index` and `lax.all_gather` count, and as `PartitionSpec((a, b))` places shards.

    Attributes:
      axis_name: the mesh axis along which the kernel communicates, or a tuple of axes.
      mesh_shape: names and sizes of all axes of the enclosing mesh, major to minor.
    """

    axis_name: str | tuple[str, ...]
    mesh_shape: tuple[tuple[str, int], ...]

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the ring's own axes, major to minor."""
        sizes = dict(self.mesh_shape)
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        return tuple((name, sizes[name]) for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the ring's own axes, major to minor."""
        return tuple(name for name, _ in self.axes)

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which of the mesh's axes are the ring's, and the sizes of all: no names, which may be any objects."""
        names = [name for name, _ in self.mesh_shape]
        return tuple(names.index(name) for name, _ in self.axes), tuple(size for _, size in self.mesh_shape)

    @property
    def size(self) -> int:
        """How many devices are on the ring."""
        return math.prod(size for _, size in self.axes)

    def me(self) -> Any:
        """This device's position on the ring, an int32 scalar."""
        (first, _), *rest = self.axes
        position = lax.axis_index(first)
        for name, size in rest:
            position = position * size + lax.axis_index(name)
        return position

    def peer(self, distance: Any) -> Any:
        """The position `distance` steps ahead of this device (0 <= distance <= size), an int32 scalar."""
        return lax.rem(self.me() + distance, self.size)

    def device_id(self, position: Any) -> Any:
        """The framework's name for the device at a position: its coordinates on these axes; the others are mine."""
        coordinates, (major, _) = {}, self.axes[0]
        for name, size in reversed(self.axes[1:]):
            coordinates[name], position = remainder(position, size), quotient(position, size)
        return {major: position, **coordinates}

    def remote(self, ref: Any, position: Any) -> Any:
        """A reference to the peer's copy of a global-memory `ref` (an operand, an output or a flag).

        Only asynchronous copies may use it (rows of an untiled buffer if `position` is known on the device alone).
        """
        return plgpu.remote_ref(ref, self.device_id(position))
