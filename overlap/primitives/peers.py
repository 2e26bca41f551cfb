"""The peers of a kernel: its own position, the others', and references to their memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives.arguments import require_index, require_reference
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import AnyMesh, Axis, GmemRef, Index


@dataclasses.dataclass(frozen=True)
class PeerGroup:
    """The devices along one mesh axis, or along several that count as one, as seen from inside a kernel.

    A kernel names a peer by its *position* in the group, never by a mesh index or a device id, which equal the position
    only if the axis is the whole mesh. `me()` and `peer(distance)` are positions; `remote_ref` and `device_id` take
    positions and turn them into what Pallas needs. A kernel need not know in which order the mesh holds its devices, or
    which devices are on other hosts: `overlap/primitives/host_mesh.py` deals with that.

    Positions along several axes run row-major in the order in which `axis_name` names the axes, whatever their order in
    the mesh. `lax.axis_index` and `lax.all_gather` count, and `PartitionSpec((a, b))` places shards, in the same order.

    Example: `group = PeerGroup.of("x")` inside `jax.shard_map`, then `group.remote_ref(out_gmem, group.peer(1))`.

    Attributes:
      axis_name: the mesh axis along which the kernel communicates, or a tuple of axes.
      mesh_shape: names and sizes of all axes of the enclosing mesh, major to minor.
    """

    axis_name: str | tuple[str, ...]
    mesh_shape: tuple[tuple[str, int], ...]

    @staticmethod
    def of(axis_name: Axis, mesh: AnyMesh | None = None, *, caller: str = "PeerGroup.of") -> PeerGroup:
        """Returns the peers along `axis_name` of the enclosing `jax.shard_map`'s mesh, or of `mesh` if one is given.

        Call it inside `jax.shard_map`, in the kernel's body or where the kernel is made.

        Args:
          axis_name: one mesh axis, or a sequence of axes that count as one; a sequence of one axis is that axis.
          mesh: a mesh to take in place of the enclosing one.
          caller: the function that error messages name.

        Raises:
          ValueError: there is no enclosing `jax.shard_map`, or it has no such axes; no axis is named, or one twice; or
            the enclosing `jax.shard_map` leaves other axes of the mesh to XLA's partitioner.
        """
        # The operations of this library enter the axes that are left, so they call with their own name.
        is_users = mesh is None and caller == "PeerGroup.of"
        axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
        if not axes:
            raise ValueError(f"`axis_name` must name at least one mesh axis, got {axis_name!r}: name the axis")
        is_enclosing = mesh is None
        outside = outside_shard_map(mesh)
        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        names = tuple(mesh.axis_names)
        if outside:
            raise ValueError(
                f"`{caller}` must be called inside `jax.shard_map`, and {outside}: wrap the call that runs the kernel "
                "in jax.shard_map(…, mesh=mesh, in_specs=…, out_specs=…), or give `mesh`"
            )
        for axis in axes:
            if axis not in names:
                whole = "" if len(axes) == 1 else f" in {axes!r}"
                raise ValueError(
                    f"`axis_name` must be an axis of the mesh, or a tuple of them, got {axis!r}{whole} and the mesh "
                    f"has {names}: name one of those"
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
                f"`{caller}` must be called inside `jax.shard_map` over axis {missing[0]!r}, and the manual axes here "
                f"are {manual}: name the axis in `axis_names` of `jax.shard_map`, or leave that argument out"
            )
        sizes = dict(zip(names, mesh.axis_sizes, strict=True))
        left = {axis: size for axis, size in sizes.items() if axis not in manual and size > 1}
        if is_users and left:
            raise ValueError(
                f"`PeerGroup.of` must be called inside `jax.shard_map` over all axes of the mesh, and this one leaves "
                f"{left} to XLA's partitioner, which cannot split a kernel: leave `axis_names` of `jax.shard_map` out, "
                "or call the kernel inside a second `jax.shard_map` over the axes that are left"
            )
        return PeerGroup(axes[0] if len(axes) == 1 else axes, tuple(zip(names, mesh.axis_sizes, strict=True)))

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes of this group, major to minor."""
        sizes = dict(self.mesh_shape)
        names = self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)
        return tuple((name, sizes[name]) for name in names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes of this group, major to minor."""
        return tuple(name for name, _ in self.axes)

    @property
    def places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which axes of the mesh belong to this group, by index, and the sizes of all axes.

        Names are left out, because they may be any objects.
        """
        names = [name for name, _ in self.mesh_shape]
        return tuple(names.index(name) for name, _ in self.axes), tuple(size for _, size in self.mesh_shape)

    @property
    def size(self) -> int:
        """The number of devices in the group."""
        return math.prod(size for _, size in self.axes)

    def me(self) -> jax.Array:
        """Returns this device's position in the group, an int32 scalar."""
        # Mosaic GPU has no device ids on a mesh of one device, so axes of one device are not asked for.
        sizes = {name: size for name, size in self.axes if size > 1}
        if not sizes:
            return jnp.int32(0)
        first, *rest = sizes
        position = lax.axis_index(first)
        for name in rest:
            position = position * sizes[name] + lax.axis_index(name)
        return position

    def peer(self, distance: Index) -> jax.Array:
        """Returns the position `distance` ahead of this device's, an int32 scalar (0 <= distance <= size).

        Raises:
          TypeError: `distance` is not an integer scalar.
          ValueError: `distance` is a Python int that is negative or greater than the group's size.
        """
        require_index("PeerGroup.peer", "distance", distance, "a number of positions ahead", self.size + 1)
        return lax.rem(self.me() + distance, self.size)

    def device_id(self, position: Index) -> Any:
        """Returns Pallas's name for the device at a position: its coordinates along the group's axes.

        Along all other axes the device has the same coordinates as this one.

        Raises:
          TypeError: `position` is not an integer scalar.
          ValueError: `position` is a Python int outside of the group.
        """
        require_index("PeerGroup.device_id", "position", position, "a position in the group", self.size)
        coordinates = {}
        major, _ = self.axes[0]
        for name, size in reversed(self.axes[1:]):
            coordinates[name] = remainder(position, size)
            position = quotient(position, size)
        return {major: position, **coordinates}

    def remote_ref(self, ref: GmemRef, position: Index) -> GmemRef:
        """Returns a reference to the same array (an operand, a result or a semaphore) in a peer's global memory.

        Only asynchronous copies (`tma_load`, `tma_store`) and `atomics.inline` may use the reference. If `position` is
        known only inside the kernel, a copy must be of one contiguous range of an untiled buffer. In a group of one
        device, the result is `ref`.

        Args:
          ref: this device's own reference.
          position: the peer's position in the group: a Python int or an int32 scalar.

        Raises:
          TypeError: `ref` is no reference, or `position` is not an integer scalar.
          ValueError: `position` is a Python int outside of the group.
        """
        wanted = "a reference to global memory"
        require_reference(
            "PeerGroup.remote_ref", "ref", ref, wanted, "pass an operand, a result or a semaphore of the kernel"
        )
        require_index("PeerGroup.remote_ref", "position", position, "a position in the group", self.size)
        return ref if self.size == 1 else plgpu.remote_ref(ref, self.device_id(position))


def outside_shard_map(mesh: AnyMesh | None = None) -> str:
    """Says, for messages, that this code is not inside `jax.shard_map`; empty if it is, or if a mesh is given."""
    enclosing = jax.sharding.get_abstract_mesh()
    if enclosing.manual_axes if mesh is None else mesh.axis_names:
        return ""
    if enclosing.axis_names:
        return "no axis of the mesh is manual here (`jax.set_mesh` alone makes none manual)"
    return "there is no mesh here (`with mesh:` is not read)"


def require_group(caller: str, group: object) -> None:
    """Raises TypeError if the argument `group` of `caller` is no `PeerGroup`."""
    if not isinstance(group, PeerGroup):
        raise TypeError(f"`group` of `{caller}` must be a PeerGroup, got {group!r}: take `PeerGroup.of(axis_name)`")
