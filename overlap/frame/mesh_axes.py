"""The axes of a mesh that types name, and those over which `jax.shard_map` can still be entered.

A kernel runs on one device, on operands that lie there: inside a `shard_map` over all axes. This file has what calls
need there. Calls on global arrays, outside of it, are cut into one for each device by `overlap.sharded`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
from jax import lax
from jax.sharding import AxisType

from overlap.frame.signatures import AnyMesh, Leaf
from overlap.kernels.varying import types_tell
from overlap.primitives.types import Tree

Axes = tuple[str, ...]


def explicit_axes(mesh: AnyMesh) -> Axes:
    """The axes of a mesh along which the types of arrays say how they are sharded."""
    types = zip(mesh.axis_names, mesh.axis_types or (), strict=False)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def enterable_axes(mesh: AnyMesh) -> Axes:
    """The axes over which `shard_map` can still be entered: the Explicit ones, and Auto ones if each has one device.

    Auto axes of several devices belong to XLA's partitioner.
    """
    sizes = dict(mesh.shape)
    auto = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
    alone = all(sizes[name] == 1 for name in auto)
    return (*explicit_axes(mesh), *(auto if alone else ()))


def mesh_of(*operands: Leaf) -> AnyMesh | None:
    """Returns the mesh of the operands' types if that mesh has Explicit axes; else None."""
    for operand in operands:
        mesh = getattr(type_sharding(operand), "mesh", None)
        if mesh is not None and explicit_axes(mesh):
            return mesh
    return None


def type_sharding(operand: Leaf) -> jax.sharding.Sharding | None:
    """The sharding in the type of an operand; None if the operand is not an array of jax."""
    is_array = isinstance(operand, (jax.Array, jax.ShapeDtypeStruct))
    return getattr(jax.typeof(operand), "sharding", None) if is_array else None


def enter(
    function: Callable[[Tree], Tree],
    mesh: AnyMesh,
    in_specs: jax.P | dict[str, jax.P],
    out_spec: jax.P,
    axes: Iterable[str] | None = None,
) -> Callable[[Tree], Tree]:
    """Returns `function`, run inside `jax.shard_map` over axes of `mesh`. The returned function is differentiable.

    Args:
      function: maps a tree of a device's parts of the operands to the device's part of the result.
      mesh: the mesh. Some of its axes may be manual already.
      in_specs: the partition of all operands; or, if the operands are a dictionary, a dictionary of partitions.
      out_spec: the partition of all results.
      axes: the axes to enter; by default `enterable_axes(mesh)`.
    """
    outer = getattr(mesh, "manual_axes", ())
    # A nested `shard_map` must have the `check_vma` of the enclosing one.
    checks = not outer or types_tell(outer[0])
    rest = set(enterable_axes(mesh) if axes is None else axes)
    every = set(mesh.axis_names) - set(outer)

    def mapped(function: Callable[..., Tree], in_specs: Tree, out_specs: Tree) -> Callable[..., Tree]:
        # If all axes are entered, name none of them: jax then leaves out the axes that `jax.vmap` maps over.
        names = set() if rest == every else rest
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=checks
        )

    run = mapped(function, (in_specs,), out_spec)
    if not outer:
        return run

    def cotangents(operands: Tree, of_results: Tree) -> Tree:
        _, pull = jax.vjp(function, operands)
        if checks or not isinstance(in_specs, dict):
            (found,) = pull(of_results)
            return found
        # Without `check_vma`, jax knows neither which operands are the same on several devices, so that their
        # cotangents must be summed over these, nor which results are the same on several devices, so that each device
        # must take a share of their cotangent. Both follow from the partitions.
        axes_of_operand = {name: set(itertools.chain(*axes_of_spec(spec))) for name, spec in in_specs.items()}
        axes_of_operands = set().union(*axes_of_operand.values())
        axes_of_result = set(itertools.chain(*axes_of_spec(out_spec)))
        sharers = math.prod(mesh.shape[axis] for axis in axes_of_operands - axes_of_result)
        # The cotangents of integers are float0, which cannot be divided.
        shares = jax.tree.map(lambda d: d if sharers == 1 or d.dtype == jax.dtypes.float0 else d / sharers, of_results)
        (found,) = pull(shares)
        summed = {name: tuple((axes_of_operands | axes_of_result) - axes) for name, axes in axes_of_operand.items()}
        return {name: lax.psum(d, summed[name]) if summed[name] else d for name, d in found.items()}

    # jax 0.11 and 0.12 cannot lower the gradient of a nested `shard_map` that saves anything but its operands for the
    # backward pass. So save the operands, and run the forward pass again.
    def forward(operands: Tree) -> tuple[Tree, Tree]:
        return run(operands), operands

    def backward(operands: Tree, of_results: Tree) -> tuple[Tree]:
        return (mapped(cotangents, (in_specs, out_spec), in_specs)(operands, of_results),)

    nested = jax.custom_vjp(run)
    nested.defvjp(forward, backward)
    return nested


def axes_of_spec(spec: jax.P) -> tuple[Axes, ...]:
    """For each entry of a `PartitionSpec`, the axes that it names."""
    return tuple(part if isinstance(part, tuple) else () if part is None else (part,) for part in spec)


def axes_of_type(x: Leaf) -> tuple[Axes, ...]:
    """For each dimension of an operand, the axes along which its type says that it is sharded."""
    parts = axes_of_spec(getattr(type_sharding(x), "spec", None) or jax.P())
    return (*parts, *[()] * (len(x.shape) - len(parts)))


def spec_of_type(x: Leaf) -> jax.P:
    """The partition that an operand's type says, with an entry for each dimension."""
    return spec(axes_of_type(x))


def spec(along: Iterable[Axes]) -> jax.P:
    """The `PartitionSpec` of an array whose dimensions are sharded along these axes."""
    return jax.P(*(axes[0] if len(axes) == 1 else axes or None for axes in along))


# ---- Global arrays ---------------------------------------------------------------------------------------------------


def outside_shard_map(name: str, mesh: AnyMesh) -> NotImplementedError:
    """The refusal of a grouped product of global arrays that would have to communicate. `name`: of the operation."""
    return NotImplementedError(
        f"`{name}` on a mesh with Explicit axes must be called inside jax.shard_map, where each device multiplies its "
        f"own rows, got operands on {dict(mesh.shape)} outside of it: wrap the call, or use overlap.layers.ExpertMLP"
    )


def require_one_device(name: str, operands: Sequence[Leaf], implementation: str | None) -> None:
    """Raises NotImplementedError for operands on a mesh with Explicit axes: XLA does not shard such a product.

    A kernel can run if the mesh has one device. `name` is that of the operation, for the message.
    """
    mesh = mesh_of(*operands) or jax.sharding.get_abstract_mesh()
    if explicit_axes(mesh) and not mesh.manual_axes and not (implementation == "fused" and mesh.size == 1):
        raise outside_shard_map(name, mesh)


# ---- Inside a shard_map over some axes -------------------------------------------------------------------------------


def require_no_partitioner_axes() -> None:
    """Raises NotImplementedError inside a `shard_map` that leaves axes of several devices to XLA's partitioner.

    The partitioner decides after the kernel is built what the devices along these axes hold, and cannot split a kernel.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return
    types = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    rest = tuple(name for name, size, kind in types if kind == AxisType.Auto and size > 1)
    if rest:
        raise NotImplementedError(
            f"the fused kernel needs all mesh axes to be manual, and {rest} are left to XLA's partitioner, which "
            "cannot split a kernel: leave `axis_names` out of jax.shard_map, or call it inside a second jax.shard_map "
            'over the other axes, or use implementation="xla"'
        )


def require_whole(operands: dict[str, Leaf]) -> None:
    """Raises NotImplementedError if an operand's type says that it is sharded over axes that are not manual."""
    for name, x in operands.items():
        if spec := [part for part in spec_of_type(x) if part is not None]:
            raise NotImplementedError(
                f"the fused kernel needs operands that are whole along the mesh axes that are not manual, and `{name}` "
                f"is sharded over {spec}: leave `axis_names` out of jax.shard_map, call it inside a second "
                'jax.shard_map over the other axes, or use implementation="xla"'
            )


def in_enterable_axes(function: Callable[[Tree], Tree], operands: Tree) -> Tree:
    """Runs `function(operands)` inside a `shard_map` over the axes that can still be entered.

    Operands and results are whole along these axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or not enterable_axes(mesh):
        return function(operands)
    return enter(function, mesh, jax.P(), jax.P())(operands)
