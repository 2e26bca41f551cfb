"""Operands whose types say how they are sharded, as on a mesh with Explicit axes, which `jax.make_mesh` makes.

A kernel runs on one device, on operands that lie there. If the types say along which mesh axes the operands are
sharded, `matmul` enters `jax.shard_map` over these axes by itself, provided that no device then needs data of another
one:

    batch, m, n    may be sharded, each along axes of its own. All operands and the result are then cut alike. If an
                   operand is whole along such a dimension, it is cut first, which moves nothing between devices
    k              must not be sharded: each device would have a part of every sum

Inside, each device's part is a `matmul` of its own, which chooses its implementation by the sizes of that part.

The last part of this file is for calls inside a `shard_map` that is over some axes of the mesh only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
from jax import lax
from jax.sharding import AxisType

from overlap.frame.signatures import AnyMesh, Leaf
from overlap.kernels.varying import axes_of
from overlap.primitives.types import Tree

_WAYS_OUT = (
    "jax.reshard an operand first, or call it inside jax.shard_map, where the collectives of this library (and "
    "lax.psum for a sharded k) say what is communicated"
)
Axes = tuple[str, ...]
# A dimension of a product: "m", "n", "k", or the index of a batch dimension; None for one of size 1.
Dimension = str | int | None


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
    if isinstance(operand, (jax.Array, jax.ShapeDtypeStruct)):
        return getattr(jax.typeof(operand), "sharding", None)
    return None


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
    # A nested `shard_map` must have the `check_vma` of the enclosing one. With `check_vma=True`, the type of a device's
    # index says that it varies.
    checks = not outer or bool(axes_of(lax.axis_index(outer[0])))
    rest, every = set(enterable_axes(mesh) if axes is None else axes), set(mesh.axis_names) - set(outer)

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
        if checks or not isinstance(in_specs, dict):
            (found,) = jax.vjp(function, operands)[1](of_results)
            return found
        # Without `check_vma`, jax knows neither which operands are the same on several devices, so that their
        # cotangents must be summed over these, nor which results are the same on several devices, so that each device
        # must take a share of their cotangent. Both follow from the partitions.
        cut, in_out = set().union(*map(_axes_in, in_specs.values())), _axes_in(out_spec)
        sharers = math.prod(mesh.shape[axis] for axis in cut - in_out)
        shares = of_results if sharers == 1 else jax.tree.map(lambda d: d / sharers, of_results)
        (found,) = jax.vjp(function, operands)[1](shares)
        uncut = {name: tuple((cut | in_out) - _axes_in(spec)) for name, spec in in_specs.items()}
        return {name: lax.psum(d, uncut[name]) if uncut[name] else d for name, d in found.items()}

    # jax 0.11 and 0.12 cannot lower the gradient of a nested `shard_map` that saves anything but its operands for the
    # backward pass. So save the operands, and run the forward pass again.
    nested = jax.custom_vjp(run)
    nested.defvjp(
        lambda operands: (run(operands), operands),
        lambda operands, of_results: (mapped(cotangents, (in_specs, out_spec), in_specs)(operands, of_results),),
    )
    return nested


def _axes_in(spec: jax.P) -> set[str]:
    return {axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))}


@dataclasses.dataclass(frozen=True)
class ProductSharding:
    """How a product is cut among the devices of a mesh.

    A dimension of the product is named "m", "n", "k", or by the index of a batch dimension.

    Attributes:
      mesh: the mesh.
      axes: for each sharded dimension, the mesh axes that it is sharded along.
      names: for each operand, the names of its dimensions; None for one of size 1.
    """

    mesh: AnyMesh
    axes: dict[Dimension, Axes]
    names: dict[str, tuple[Dimension, ...]]

    def spec(self, names: tuple[Dimension, ...]) -> jax.P:
        """The partition of an array whose dimensions have these names."""
        return spec(self.axes.get(name, ()) for name in names)

    def call(self, function: Callable[..., Tree], operands: dict[str, Leaf], out: tuple[Dimension, ...]) -> Tree:
        """Runs `function(**operands)` on each device's parts; `out`: the names of the result's dimensions.

        Raises:
          NotImplementedError: inside `jax.vmap` over a dimension that is sharded. jax does not let a `shard_map` enter
            the axes of that dimension.
        """
        specs = {name: self.spec(self.names[name]) for name in operands}
        whole = [name for name, x in operands.items() if spec_of_type(x) != specs[name]]

        def of_part(parts: dict[str, Leaf]) -> Tree:
            if left := explicit_axes(jax.sharding.get_abstract_mesh()):
                raise NotImplementedError(
                    f"the fused kernel does not take `jax.vmap` over a dimension that is sharded, here over {left}: "
                    'give that dimension as a leading one instead, or use implementation="xla"'
                )
            return function(**parts)

        def run(operands: dict[str, Leaf]) -> Tree:
            cut = {name: jax.reshard(operands[name], jax.NamedSharding(self.mesh, specs[name])) for name in whole}
            return enter(of_part, self.mesh, specs, self.spec(out))(operands | cut)

        # An array that lies on one device is brought to the mesh by `jax.jit` only.
        return (jax.jit(run) if whole else run)(operands)


def has_mesh(x: Leaf) -> bool:
    """Whether the type of an operand is that of an array on a mesh."""
    return bool(getattr(getattr(type_sharding(x), "mesh", None), "axis_names", ()))


def require_summed(operands: dict[str, Leaf]) -> None:
    """Raises ValueError if the type of an operand has unreduced or reduced axes.

    Unreduced: each device holds a term of a sum over the devices. Reduced: the same holds for the cotangent.
    """
    for name, x in operands.items():
        spec = getattr(type_sharding(x), "spec", None)
        for kind in ("unreduced", "reduced"):
            if axes := getattr(spec, kind, None):
                raise ValueError(
                    f"the type of `{name}` must have no {kind} axes, got {tuple(sorted(axes))} in {spec}: jax.reshard "
                    f"it first, to a PartitionSpec without {kind}=…"
                )


def axes_of_type(x: Leaf) -> tuple[Axes, ...]:
    """For each dimension of an operand, the axes along which its type says that it is sharded."""
    parts = tuple(getattr(type_sharding(x), "spec", None) or ())
    along = (part if isinstance(part, tuple) else () if part is None else (part,) for part in parts)
    return (*along, *[()] * (len(x.shape) - len(parts)))


def spec_of_type(x: Leaf) -> jax.P:
    """The partition that an operand's type says, with an entry for each dimension."""
    return spec(axes_of_type(x))


def spec(along: Iterable[Axes]) -> jax.P:
    """The `PartitionSpec` of an array whose dimensions are sharded along these axes."""
    return jax.P(*(axes[0] if len(axes) == 1 else axes or None for axes in along))


def product_sharding(
    mesh: AnyMesh, operands: dict[str, Leaf], names: dict[str, tuple[Dimension, ...]]
) -> ProductSharding:
    """Returns how a product is cut so that no device needs data of another one.

    Args:
      mesh: the mesh of the operands' types.
      operands: arrays, by name.
      names: see `ProductSharding`.

    Raises:
      NotImplementedError: one operand is sharded along k. XLA gathers it.
      ValueError: a type has unreduced or reduced axes; or the types do not say how the result is sharded: both operands
        are sharded along k, two operands are cut differently along the same dimension, or two dimensions along the
        same axis.
    """
    require_summed(operands)
    axes: dict[Dimension, Axes] = {}
    cut_by: dict[Dimension, list[str]] = {}
    for name, x in operands.items():
        for dimension, part in zip(names[name], spec_of_type(x), strict=True):
            along = part if isinstance(part, tuple) else () if part is None else (part,)
            if not along or dimension is None:
                continue
            if axes.setdefault(dimension, along) != along:
                raise ValueError(
                    f"`{cut_by[dimension][0]}` and `{name}` must be sharded alike along {_named(dimension)}, got "
                    f"{axes[dimension]} and {along}: {_WAYS_OUT}"
                )
            cut_by.setdefault(dimension, []).append(name)
    if len(cut_by.get("k", ())) == 1:
        # XLA gathers that operand, even if the same axis cuts another dimension.
        raise NotImplementedError(
            f"the fused kernel needs all of k on each device, and `{cut_by['k'][0]}` is sharded along it over "
            f'{axes["k"]}: {_WAYS_OUT}; or use implementation="xla", which gathers it'
        )
    users: dict[str, Dimension] = {}
    for dimension, along in axes.items():
        for axis in along:
            other = users.setdefault(axis, dimension)
            if other != dimension:
                raise ValueError(
                    f"a mesh axis must cut one dimension of a product, and {axis!r} cuts {_named(other)} of "
                    f"`{cut_by[other][0]}` and {_named(dimension)} of `{cut_by[dimension][0]}`: {_WAYS_OUT}"
                )
    if "k" in axes and len(cut_by["k"]) > 1:
        raise ValueError(
            f"`lhs` and `rhs` must not both be sharded along k, got {axes['k']}: each device would have a part of "
            f"every sum, and nothing says whether they are to be added. {_WAYS_OUT}"
        )
    return ProductSharding(mesh, axes, names)


def _named(dimension: Dimension) -> str:
    return dimension if isinstance(dimension, str) else f"leading dimension {dimension}"


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
