"""`matmul` of operands whose types say how they are sharded, as on an Explicit mesh, which `jax.make_mesh` makes.

A kernel runs on one device, on operands that lie there. Where the types say along which mesh axes the operands are
sharded, the call enters `jax.shard_map` over these axes by itself, if no device then needs what another one holds:

    batch, m, n    may be sharded, each along axes of its own. All operands and the result are then cut alike; one that
                   is whole along such a dimension is cut first, which moves nothing between devices
    k              may not: each device would have a part of every sum

Inside, each device's part is a `matmul` of its own, which chooses its implementation by the sizes of that part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from overlap.kernels.varying import axes_of

_WAYS_OUT = (
    "jax.reshard an operand first, or call it inside jax.shard_map, where the collectives of this library (and "
    "lax.psum for a sharded k) say what is communicated"
)
Axes = tuple[str, ...]


def explicit_axes(mesh: Any) -> Axes:
    """The axes of a mesh along which the types of arrays say how they are sharded."""
    types = zip(mesh.axis_names, mesh.axis_types or (), strict=False)
    return tuple(name for name, kind in types if kind == AxisType.Explicit)


def rest_of(mesh: Any) -> Axes:
    """The axes that are left to enter `shard_map` over: all that are not manual yet, if XLA's partitioner has none.

    Axes of type Auto are the partitioner's, unless they have a single device each.
    """
    sizes = dict(mesh.shape)
    auto = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
    alone = all(sizes[name] == 1 for name in auto)
    return (*explicit_axes(mesh), *(auto if alone else ()))


def mesh_of(*operands: Any) -> Any:
    """The mesh of the operands' types, if it has Explicit axes; else None."""
    for operand in operands:
        mesh = getattr(type_sharding(operand), "mesh", None)
        if mesh is not None and explicit_axes(mesh):
            return mesh
    return None


def type_sharding(operand: Any) -> Any:
    """The sharding that the type of an operand says; None if it is no array of jax."""
    if isinstance(operand, (jax.Array, jax.ShapeDtypeStruct)):
        return getattr(jax.typeof(operand), "sharding", None)
    return None


def enter(
    function: Callable[[Any], Any], mesh: Any, in_specs: Any, out_spec: jax.P, axes: Iterable[str] | None = None
) -> Callable[[Any], Any]:
    """`function` of a tree of operands inside `jax.shard_map` over all axes of `mesh` that are left to enter.

    Args:
      function: from each device's parts to its part of the result.
      mesh: the mesh.
      in_specs: of the operands: one for all, or a dictionary as they are.
      out_spec: of all results.
      axes: those to enter instead.
    """
    outer = getattr(mesh, "manual_axes", ())
    # A nested one must check what the enclosing one does. If that has `check_vma=True`, positions are typed as varying.
    checks = not outer or bool(axes_of(lax.axis_index(outer[0])))
    rest, every = set(rest_of(mesh) if axes is None else axes), set(mesh.axis_names) - set(outer)

    def mapped(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        # All of them are not named: jax then leaves those out that `jax.vmap` is over.
        names = set() if rest == every else rest
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=names, check_vma=checks
        )

    run = mapped(function, (in_specs,), out_spec)
    if not outer:
        return run

    def cotangents(operands: Any, of_results: Any) -> Any:
        if checks or not isinstance(in_specs, dict):
            (found,) = jax.vjp(function, operands)[1](of_results)
            return found
        # Without types jax does not know of an operand that several parts of the result come from; nor that a sum over
        # devices is the same on all of them, so that each has a share of its cotangent.
        cut, in_out = set().union(*map(_axes_in, in_specs.values())), _axes_in(out_spec)
        sharers = math.prod(mesh.shape[axis] for axis in cut - in_out)
        shares = of_results if sharers == 1 else jax.tree.map(lambda d: d / sharers, of_results)
        (found,) = jax.vjp(function, operands)[1](shares)
        uncut = {name: tuple((cut | in_out) - _axes_in(spec)) for name, spec in in_specs.items()}
        return {name: lax.psum(d, uncut[name]) if uncut[name] else d for name, d in found.items()}

    # jax 0.11 and 0.12 cannot lower the gradient of a nested one if it keeps anything but its operands until then.
    nested = jax.custom_vjp(run)
    nested.defvjp(
        lambda operands: (run(operands), operands),
        lambda operands, of_results: (mapped(cotangents, (in_specs, out_spec), in_specs)(operands, of_results),),
    )
    return nested


def _axes_in(spec: jax.P) -> set[str]:
    return {axis for part in spec if part for axis in (part if isinstance(part, tuple) else (part,))}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a call is cut.

    Attributes:
      mesh: the mesh.
      axes: for each name of a dimension ("m", "n", a batch dimension's index), the axes that it is sharded along.
      names: for each operand, the names of its dimensions.
    """

    mesh: Any
    axes: dict[Any, Axes]
    names: dict[str, tuple[Any, ...]]

    def spec(self, names: tuple[Any, ...]) -> jax.P:
        """The partition of an array whose dimensions have these names."""
        return spec(self.axes.get(name, ()) for name in names)

    def call(self, function: Callable[..., Any], operands: dict[str, Any], out: tuple[Any, ...]) -> Any:
        """`function(**operands)` on each device's parts; `out`: the names of the result's dimensions.

        Raises:
          NotImplementedError: inside `jax.vmap` over a dimension that is sharded, whose axes jax does not let anyone
            enter.
        """
        specs = {name: self.spec(self.names[name]) for name in operands}
        whole = [name for name, x in operands.items() if spec_of_type(x) != specs[name]]

        def of_part(parts: dict[str, Any]) -> Any:
            if left := explicit_axes(jax.sharding.get_abstract_mesh()):
                raise NotImplementedError(
                    f"the fused kernel does not take `jax.vmap` over a dimension that is sharded, here over {left}: "
                    'give that dimension as a leading one instead, or use implementation="xla"'
                )
            return function(**parts)

        def run(operands: dict[str, Any]) -> Any:
            cut = {name: jax.reshard(operands[name], jax.NamedSharding(self.mesh, specs[name])) for name in whole}
            return enter(of_part, self.mesh, specs, self.spec(out))(operands | cut)

        # Outside `jax.jit` only a jitted function brings an array of one device to the mesh.
        return (jax.jit(run) if whole else run)(operands)


def has_mesh(x: Any) -> bool:
    """Whether the type of an operand is that of an array on a mesh."""
    return bool(getattr(getattr(type_sharding(x), "mesh", None), "axis_names", ()))


def require_summed(operands: dict[str, Any]) -> None:
    """Raises ValueError if the type of an operand says that it is a part of a sum over devices, or its cotangent is."""
    for name, x in operands.items():
        spec = getattr(type_sharding(x), "spec", None)
        for kind in ("unreduced", "reduced"):
            if axes := getattr(spec, kind, None):
                raise ValueError(
                    f"the type of `{name}` must have no {kind} axes, got {tuple(sorted(axes))} in {spec}: jax.reshard "
                    f"it first, to a PartitionSpec without {kind}=…"
                )


def axes_of_type(x: Any) -> tuple[Axes, ...]:
    """For each dimension of an operand, the axes along which its type says that it is sharded."""
    parts = tuple(getattr(type_sharding(x), "spec", None) or ())
    along = (part if isinstance(part, tuple) else () if part is None else (part,) for part in parts)
    return (*along, *[()] * (len(x.shape) - len(parts)))


def spec_of_type(x: Any) -> jax.P:
    """The partition that an operand's type says, with an entry for each dimension."""
    return spec(axes_of_type(x))


def spec(along: Iterable[Axes]) -> jax.P:
    """The `PartitionSpec` of an array whose dimensions are sharded along these axes."""
    return jax.P(*(axes[0] if len(axes) == 1 else axes or None for axes in along))


def layout_of(mesh: Any, operands: dict[str, Any], names: dict[str, tuple[Any, ...]]) -> Layout:
    """How a product is cut so that no device needs what another one holds.

    Args:
      mesh: that of the operands' types.
      operands: arrays, by name.
      names: for each operand, the names of its dimensions: "m", "n", "k" or the index of a batch dimension; None for
        one of size 1.

    Raises:
      NotImplementedError: one operand is sharded along k. XLA gathers it.
      ValueError: a type has unreduced or reduced axes; or the types do not say how the result is sharded: both operands
        are sharded along k, two operands are cut differently along the same dimension, or two dimensions along the
        same axis.
    """
    require_summed(operands)
    axes: dict[Any, Axes] = {}
    said: dict[Any, list[str]] = {}
    for name, x in operands.items():
        for dimension, part in zip(names[name], spec_of_type(x), strict=True):
            along = part if isinstance(part, tuple) else () if part is None else (part,)
            if not along or dimension is None:
                continue
            if axes.setdefault(dimension, along) != along:
                raise ValueError(
                    f"`{said[dimension][0]}` and `{name}` must be sharded alike along {_said(dimension)}, got "
                    f"{axes[dimension]} and {along}: {_WAYS_OUT}"
                )
            said.setdefault(dimension, []).append(name)
    if len(said.get("k", ())) == 1:
        # XLA gathers that operand, whatever else the axis cuts.
        raise NotImplementedError(
            f"the fused kernel needs all of k on each device, and `{said['k'][0]}` is sharded along it over "
            f'{axes["k"]}: {_WAYS_OUT}; or use implementation="xla", which gathers it'
        )
    users: dict[str, Any] = {}
    for dimension, along in axes.items():
        for axis in along:
            other = users.setdefault(axis, dimension)
            if other != dimension:
                raise ValueError(
                    f"a mesh axis must cut one dimension of a product, and {axis!r} cuts {_said(other)} of "
                    f"`{said[other][0]}` and {_said(dimension)} of `{said[dimension][0]}`: {_WAYS_OUT}"
                )
    if "k" in axes and len(said["k"]) > 1:
        raise ValueError(
            f"`lhs` and `rhs` must not both be sharded along k, got {axes['k']}: each device would have a part of "
            f"every sum, and nothing says whether they are to be added. {_WAYS_OUT}"
        )
    return Layout(mesh, axes, names)


def _said(dimension: Any) -> str:
    return dimension if isinstance(dimension, str) else f"leading dimension {dimension}"


# ---- Inside a shard_map over some axes -------------------------------------------------------------------------------


def require_rest_of_one() -> None:
    """Raises NotImplementedError inside a `shard_map` that leaves axes of several devices to XLA's partitioner.

    It decides after the kernel is built what the devices along these axes hold, and it cannot split a kernel.
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


def require_whole(operands: dict[str, Any]) -> None:
    """Raises NotImplementedError if a type says that an operand is sharded over axes that are not entered yet."""
    for name, x in operands.items():
        if spec := [part for part in spec_of_type(x) if part is not None]:
            raise NotImplementedError(
                f"the fused kernel needs operands that are whole along the mesh axes that are not manual, and `{name}` "
                f"is sharded over {spec}: leave `axis_names` out of jax.shard_map, call it inside a second "
                'jax.shard_map over the other axes, or use implementation="xla"'
            )


def on_the_rest(function: Callable[[Any], Any], operands: Any) -> Any:
    """`function(operands)` inside `shard_map` over the axes left to enter, along which the operands are whole."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or not rest_of(mesh):
        return function(operands)
    return enter(function, mesh, jax.P(), jax.P())(operands)
