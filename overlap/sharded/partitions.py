"""Finds the mesh of a call and the partition of each array, from the arrays' types and the caller's arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from overlap.frame import arguments, mesh_axes
from overlap.frame.signatures import AnyMesh
from overlap.primitives.types import Tree
from overlap.sharded.plan import Axes, Partition


def mesh_of(mesh: Any, operands: Sequence[Any], shardings: Sequence[Any]) -> AnyMesh:
    """The mesh of a call: the `mesh` argument, else the mesh of a sharding, of `jax.set_mesh` or of an operand.

    Inside `jax.shard_map` it is the mesh of that `shard_map`, some of whose axes are manual.

    Raises:
      ValueError: there is no mesh, or two meshes differ.
    """
    enclosing = jax.sharding.get_abstract_mesh()
    found = [("`mesh`", arguments.mesh(mesh))]
    found += [("`mesh` of a sharding", x.mesh) for x in shardings if isinstance(x, NamedSharding)]
    found += [("the mesh of `jax.set_mesh` or `jax.shard_map`", enclosing)]
    for operand in operands:
        # The sharding of an array that is not a tracer also names the devices.
        own = None if isinstance(operand, Tracer) else getattr(operand, "sharding", None)
        found += [("the mesh of an operand", getattr(x, "mesh", None)) for x in (own, mesh_axes.type_sharding(operand))]
    found = [(what, x) for what, x in found if x is not None and x.axis_names]
    if not found:
        raise ValueError(
            "`sharded_matmul` needs a mesh, and neither the operands nor the context have one (`with mesh:` is not "
            "read): pass mesh=…, call it under jax.set_mesh(mesh), or put the operands on a mesh; on one device use "
            "overlap.matmul"
        )
    what, first = found[0]
    for other, x in found[1:]:
        if dict(x.shape) != dict(first.shape):
            raise ValueError(
                f"all that a call names must be on one mesh, got {dict(first.shape)} ({what}) and {dict(x.shape)} "
                f"({other}): put the operands on one mesh, with jax.device_put"
            )
    if enclosing.manual_axes:
        return enclosing
    for other, x in found[1:]:
        if mesh_axes.explicit_axes(x) and x.axis_types != first.axis_types:
            raise ValueError(
                "all that a call names must be on one mesh, with the same types of axes, got "
                f"{first.axis_types} ({what}) and {x.axis_types} ({other}): leave `mesh` out, or move the operands "
                "with jax.device_put"
            )
    # Prefer a mesh that names its devices: with such a mesh, kernels need no barrier of XLA.
    return next((x for _, x in found if isinstance(x, jax.sharding.Mesh) and _alike(x, first)), first)


def _alike(mesh: AnyMesh, other: AnyMesh) -> bool:
    return mesh.axis_types == other.axis_types and mesh.axis_names == other.axis_names


def open_axes(mesh: AnyMesh) -> Axes:
    """The axes of a mesh that are not manual yet."""
    return tuple(axis for axis in mesh.axis_names if axis not in manual_axes(mesh))


def manual_axes(mesh: AnyMesh) -> Axes:
    """The manual axes of a mesh: the axes of the enclosing `jax.shard_map`."""
    return tuple(getattr(mesh, "manual_axes", ()))


def require_not_manual(name: str, sharding: Any, mesh: AnyMesh) -> None:
    """Raises ValueError if a sharding names an axis of the enclosing `jax.shard_map`."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        return
    for axis in itertools.chain(*mesh_axes.axes_of_spec(spec)):
        if axis in manual_axes(mesh):
            raise ValueError(
                f"`{name}` must not name an axis that is manual here, got {axis!r} in {spec}: inside jax.shard_map "
                f"over {manual_axes(mesh)} arrays are a device's parts along it, so leave it out; or call the "
                "collective itself, e.g. overlap.all_gather_lhs_matmul (overlap.explain: leave out its mesh=)"
            )


def given_spec(name: str, sharding: Any) -> PartitionSpec:
    """The `PartitionSpec` of a sharding. Raises ValueError if it is neither a `PartitionSpec` nor a `NamedSharding`."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"`{name}` must be a jax.sharding.PartitionSpec or a NamedSharding, got {arguments.shown(sharding)}: pass "
            "e.g. jax.P(None, 'x')"
        )
    return spec


def given(name: str, sharding: Any, rank: int, mesh: AnyMesh) -> Partition:
    """The partition of an array of `rank` dimensions by a `PartitionSpec` or a `NamedSharding`.

    Raises:
      ValueError: `sharding` is neither of these, has more entries than the array has dimensions, names an axis that
        the mesh does not have, or names an axis twice.
    """
    spec = given_spec(name, sharding)
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ValueError(f"`{name}` must have no unreduced or reduced axes, got {spec}: jax.reshard the operand first")
    if len(spec) > rank:
        raise ValueError(
            f"`{name}` must have at most one entry for each of the {rank} dimensions, got {len(spec)} in {spec}: leave "
            "the others out"
        )
    parts = mesh_axes.axes_of_spec(spec)
    flat = [axis for part in parts for axis in part]
    if any(not isinstance(axis, str) for axis in flat):
        raise ValueError(
            f"`{name}` must name mesh axes or None for each dimension, got {spec}: say how each one is sharded"
        )
    for axis in flat:
        if axis not in mesh.axis_names:
            raise ValueError(
                f"`{name}` must name axes of the mesh, got {axis!r} in {spec}, and the mesh has "
                f"{tuple(mesh.axis_names)}: name one of those"
            )
        if flat.count(axis) > 1:
            raise ValueError(f"`{name}` must name each mesh axis once, got {axis!r} twice in {spec}: leave one out")
    explicit = mesh_axes.explicit_axes(mesh)
    for part in parts:
        in_order = (*[axis for axis in part if axis in explicit], *[axis for axis in part if axis not in explicit])
        if part != in_order:
            raise ValueError(
                f"`{name}` must name Explicit axes before Auto ones in a dimension, since types know only the former, "
                f"got {part} in {spec}: name {in_order}, or make the mesh with axes of one type"
            )
    return (*parts, *[()] * (rank - len(parts)))


def of_operand(name: str, x: Any, sharding: Any, mesh: AnyMesh, sharding_name: str) -> Partition:
    """The partition of an operand: along Explicit axes as its type says, along Auto axes as the caller says.

    Args:
      name: the name of the operand, for messages.
      x: the operand.
      sharding: the sharding that the caller gave; None for none.
      mesh: the mesh of the call.
      sharding_name: the name of the argument `sharding`, for messages.

    Raises:
      ValueError: neither the type nor the caller says how the operand is sharded, or they contradict each other.
    """
    rank = len(x.shape)
    sizes = dict(mesh.shape)
    typed = only(mesh_axes.axes_of_type(x), [axis for axis in sizes if sizes[axis] > 1])
    explicit = mesh_axes.explicit_axes(mesh)
    if sharding is None:
        auto = tuple(axis for axis in open_axes(mesh) if axis not in explicit and sizes[axis] > 1)
        if auto:
            raise ValueError(
                f"`{sharding_name}` must be given, since types do not say how arrays are sharded along Auto axes, here "
                f"{auto}: pass a PartitionSpec, e.g. {sharding_name}=jax.P({', '.join(['None'] * (rank - 1))}, "
                f"{auto[0]!r}); or make the mesh with AxisType.Explicit"
            )
        return typed
    partition = given(sharding_name, sharding, rank, mesh)
    named = only(partition, [axis for axis in explicit if sizes[axis] > 1])
    # The caller may cut the operand further than the type says: that moves no data between devices.
    if any(part != mine[: len(part)] for part, mine in zip(typed, named, strict=True)):
        raise ValueError(
            f"`{sharding_name}` must be as the type of `{name}` says along Explicit axes, or cut it further, got "
            f"{mesh_axes.spec(partition)} and the type says {mesh_axes.spec(typed)}: leave it out, or jax.reshard "
            f"`{name}` first"
        )
    return partition


def along(spec: jax.P, axes: Container[str]) -> jax.P:
    """The partition with only those of its mesh axes that are in `axes`."""
    return mesh_axes.spec(only(mesh_axes.axes_of_spec(spec), axes))


def only(partition: Partition, axes: Container[str]) -> Partition:
    """The partition with only those of its mesh axes that are in `axes`."""
    return tuple(tuple(axis for axis in part if axis in axes) for part in partition)


def typed(x: jax.Array, spec: jax.P, mesh: AnyMesh) -> jax.Array:
    """An array whose type has the partition `spec` along Explicit axes; resharded if that of `x` has another."""
    explicit = mesh_axes.explicit_axes(mesh)
    wanted = along(spec, explicit)
    on_mesh = getattr(getattr(mesh_axes.type_sharding(x), "mesh", None), "axis_names", ())
    if not explicit or (on_mesh and mesh_axes.spec_of_type(x) == wanted):
        return x
    return jax.reshard(x, NamedSharding(mesh, wanted))


def placed(x: jax.Array, spec: jax.P, mesh: AnyMesh) -> jax.Array:
    """An array, sharded as `spec` says: along Explicit axes by its type, along Auto axes by a constraint."""
    explicit = mesh_axes.explicit_axes(mesh)
    auto = [axis for axis in open_axes(mesh) if axis not in explicit]
    x = typed(x, spec, mesh)
    return lax.with_sharding_constraint(x, NamedSharding(mesh, along(spec, auto))) if auto else x


def on_parts(
    function: Callable[[Tree], Tree], mesh: AnyMesh, specs: dict[str, jax.P], out_spec: jax.P
) -> Callable[[dict[str, jax.Array]], Tree]:
    """Returns a function of global arrays, by name, that runs `function` on each device's parts of them.

    It enters `jax.shard_map` over the axes that are not manual yet. So in `function`, which may be a kernel, all are.
    `specs`: the partition of each operand, by name. `out_spec`: that of all results.
    """
    entered = mesh_axes.enter(function, mesh, specs, out_spec, open_axes(mesh))
    # Along Auto axes types say nothing, and `shard_map` itself reshards.
    return lambda operands: entered({name: typed(x, specs[name], mesh) for name, x in operands.items()})


def require_summed(operands: Mapping[str, Any]) -> None:
    """Raises ValueError if the type of an operand has unreduced or reduced axes.

    Unreduced: each device holds a term of a sum over the devices. Reduced: the same holds for the cotangent.
    """
    for name, x in operands.items():
        spec = getattr(mesh_axes.type_sharding(x), "spec", None)
        for kind in ("unreduced", "reduced"):
            if axes := getattr(spec, kind, None):
                raise ValueError(
                    f"the type of `{name}` must have no {kind} axes, got {tuple(sorted(axes))} in {spec}: jax.reshard "
                    f"it first, to a PartitionSpec without {kind}=…"
                )


def require_divisible(name: str, shape: Sequence[int], partition: Partition, mesh: AnyMesh) -> None:
    """Raises ValueError if a dimension of `shape` cannot be cut into equal parts."""
    sizes = dict(mesh.shape)
    for dimension, (size, axes) in enumerate(zip(shape, partition, strict=True)):
        parts = math.prod(sizes[axis] for axis in axes)
        if size % parts:
            up = -(-size // parts) * parts
            raise ValueError(
                f"{name} must be cut into equal parts, got {size} in dimension {dimension} of {tuple(shape)} for "
                f"{parts} devices along {axes}: pad it to {up}, or leave the axis out of its sharding"
            )
