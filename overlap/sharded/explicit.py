"""`matmul` and `grouped_matmul` of arrays that are sharded along Explicit mesh axes: one product for each device.

A kernel runs on one device, on operands that lie there. On a mesh with Explicit axes, which `jax.make_mesh` makes, the
types of arrays say along which axes they are sharded. These calls enter `jax.shard_map` over the axes by themselves,
provided that no device then needs data of another one:

    batch, m, n    may be sharded, each along axes of its own. All operands and the result are then cut alike. If an
                   operand is whole along such a dimension, it is cut first, which moves nothing between devices
    k              must not be sharded: each device would have a part of every sum

The rows of a grouped product, and its groups, must not be sharded either: a device does not know which of its rows
belong to which group. Inside, each device's part is a call of its own, which chooses its implementation by its sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from overlap.choice import dispatch
from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Explanation
from overlap.frame import activation as activations
from overlap.frame import arguments, call, mesh_axes
from overlap.frame.explain import settled
from overlap.frame.kernel import kernel_of
from overlap.frame.mesh_axes import Axes
from overlap.frame.normalize import normalize
from overlap.frame.operands import Leaf, accumulator
from overlap.frame.operation import Operation
from overlap.frame.signatures import AnyMesh, Arguments
from overlap.kernels import launch
from overlap.kernels.block_scales import SCALE_DTYPE
from overlap.sharded import partitions

# A dimension of a product: "m", "n", "k", "groups", or the index of a batch dimension; None for one of size 1.
type Dimension = str | int | None
_SCALES = ("lhs_scale", "rhs_scale")
_WAYS_OUT = (
    "jax.reshard an operand first, or call it inside jax.shard_map, where the collectives of this library (and "
    "lax.psum for a sharded k) say what is communicated"
)


def run(operation: Operation, given: Arguments, mesh: AnyMesh, of_part: Callable[[Arguments], jax.Array]) -> Any:
    """Runs a call of an operation that communicates nothing.

    Args:
      operation: the operation.
      given: the arguments of the call.
      mesh: the mesh of the operands, which has Explicit axes.
      of_part: runs a call on one device's parts. If the operands must not be cut, it runs the whole call by XLA.
    """
    arguments.require_values(**given.arrays)
    call.check_choice(given)
    try:
        return _on_parts(operation, given, mesh, of_part)
    except NotImplementedError as cannot:
        if operation.spec.groups and isinstance(cannot, activations.NotElementwise):
            raise mesh_axes.outside_shard_map(operation.name, mesh) from None
        if operation.spec.groups or given.implementation == "fused":
            raise
        if given.implementation is None:
            if dispatch.target().platform != "cpu":
                launch.leave_to_xla(operation.name, str(cannot), must_fuse=False)
            given = dataclasses.replace(given, implementation="xla")
        with settled(Explanation(operation.name, "xla", None, str(cannot), Cause.NOT_SERVED, dispatch.target())):
            return of_part(given)


def _on_parts(operation: Operation, given: Arguments, mesh: AnyMesh, of_part: Callable[[Arguments], jax.Array]) -> Any:
    """Runs a call on each device's parts of its operands.

    Raises:
      ValueError, NotImplementedError: as raised by `normalize` for the whole call, and by `_axes_of`.
    """
    # Types without a mesh suffice to check the whole call. A configuration is checked before the activation is called.
    types: dict[str, Leaf] = jax.tree.map(arguments.without_mesh, given.arrays)
    whole = normalize(operation, dataclasses.replace(given, **types, activation=None))
    if given.config is not None:
        kernel_of(operation).require_config(whole, given.config)
    wide = accumulator(whole.form.dtype)
    arrays = {name: x for name, x in given.arrays.items() if x is not None}
    if given.activation is not None:
        applied, scalars = activations.traced(given.activation, wide, len(given.rhs) if operation.combines else 1)
        # Scalars that the activation captures are passed through the `shard_map` as operands, like the others.
        given = dataclasses.replace(given, activation=applied)
        arrays["scalars"] = scalars
    leaves, structure = jax.tree.flatten_with_path(arrays)
    operands = {f"{kind.key}{keystr(tuple(rest))}": _array(kind.key, x, wide) for (kind, *rest), x in leaves}
    names = {name: _dimensions(operation, given, name, x, whole.batch) for name, x in operands.items()}
    partitions.require_summed(operands)
    axes = _axes_of(operation, mesh, operands, names)
    specs = {name: mesh_axes.spec(axes.get(along, ()) for along in names[name]) for name in operands}
    uncut = [name for name, x in operands.items() if mesh_axes.spec_of_type(x) != specs[name]]

    def of_parts(parts: dict[str, Leaf]) -> jax.Array:
        if left := mesh_axes.explicit_axes(jax.sharding.get_abstract_mesh()):
            if operation.spec.groups:
                raise mesh_axes.outside_shard_map(operation.name, mesh)
            raise NotImplementedError(
                f"the fused kernel does not take `jax.vmap` over a dimension that is sharded, here over {left}: "
                'give that dimension as a leading one instead, or use implementation="xla"'
            )
        named = jax.tree.unflatten(structure, [parts[name] for name in operands])
        return of_part(dataclasses.replace(given, **named))

    def on_parts(operands: dict[str, Leaf]) -> jax.Array:
        cut = {name: partitions.typed(operands[name], specs[name], mesh) for name in uncut}
        out = mesh_axes.spec(axes.get(along, ()) for along in (*range(len(whole.batch)), "m", "n"))
        return mesh_axes.enter(of_parts, mesh, specs, out)(operands | cut)

    # An array that lies on one device is brought to the mesh by `jax.jit` only.
    return (jax.jit(on_parts) if uncut else on_parts)(operands)


def _array(kind: str, x: Leaf, wide: jnp.dtype) -> jax.Array:
    """An operand as an array of jax. Factors are widened here, so that their cotangents are summed in all bits."""
    is_factor = kind in _SCALES and getattr(x, "dtype", None) != SCALE_DTYPE
    return arguments.factor(kind, x, wide) if is_factor else jnp.asarray(x)


def _dimensions(
    operation: Operation, given: Arguments, name: str, x: Leaf, batch: tuple[int, ...]
) -> tuple[Dimension, ...]:
    """The names of an operand's dimensions."""
    kind = name.split("[")[0]
    groups = "groups" if operation.spec.groups else None
    leading = (groups,) if groups else tuple(range(len(batch)))
    matrices = {
        "lhs": ("k", "m") if given.transpose_lhs else ("m", "k"),
        "rhs": ("n", "k") if given.transpose_rhs else ("k", "n"),
        "addend": ("m", "n"),
    }
    if x.dtype == SCALE_DTYPE:  # Scales of blocks have the dimensions of their operand.
        kind = kind.removesuffix("_scale")
    vectors = {"lhs_scale": ("m", None), "rhs_scale": (groups, "n"), "bias": (groups, "n"), "group_sizes": (groups,)}
    own = (*leading, *(matrices | vectors).get(kind, ()))
    own = own[len(own) - x.ndim :]
    if kind in matrices:
        return own
    # A scalar factor has size 1 in all dimensions.
    return tuple(None if size == 1 else along for size, along in zip(x.shape, own, strict=True))


def _axes_of(
    operation: Operation, mesh: AnyMesh, operands: dict[str, Leaf], names: dict[str, tuple[Dimension, ...]]
) -> dict[Dimension, Axes]:
    """Returns the mesh axes that each dimension of a product is cut along, so that no device needs another one's data.

    Args:
      operation: the operation.
      mesh: the mesh.
      operands: arrays, by name.
      names: for each operand, the names of its dimensions.

    Raises:
      NotImplementedError: one operand is sharded along k, and XLA gathers it; or a grouped product is not only sharded
        along n.
      ValueError: the types do not say how the result is sharded: both operands are sharded along k, two operands are
        cut differently along the same dimension, or two dimensions along the same axis.
    """
    # For each sharded dimension the axes, and the operand that names them first.
    cut: dict[Dimension, tuple[Axes, str]] = {}
    with_k = []
    users = {}
    for name, x in operands.items():
        for dimension, part in zip(names[name], mesh_axes.axes_of_type(x), strict=True):
            several = tuple(axis for axis in part if mesh.shape[axis] > 1)
            if several and operation.spec.groups and dimension != "n":
                raise mesh_axes.outside_shard_map(operation.name, mesh)
            # Axes of one device cut nothing, but the type of the result names them.
            along = several if dimension in ("k", "groups") else part
            if not along or dimension is None:
                continue
            axes, first = cut.setdefault(dimension, (along, name))
            if axes != along:
                raise ValueError(
                    f"`{first}` and `{name}` must be sharded alike along {_named(dimension)}, got {axes} and {along}: "
                    f"{_WAYS_OUT}"
                )
            with_k += [name] if dimension == "k" else []
    if len(with_k) == 1:
        # XLA gathers that operand, even if the same axis cuts another dimension.
        raise NotImplementedError(
            f"the fused kernel needs all of k on each device, and `{with_k[0]}` is sharded along it over "
            f'{cut["k"][0]}: {_WAYS_OUT}; or use implementation="xla", which gathers it'
        )
    if with_k:
        raise ValueError(
            f"`lhs` and `rhs` must not both be sharded along k, got {cut['k'][0]}: each device would have a part of "
            f"every sum, and nothing says whether they are to be added. {_WAYS_OUT}"
        )
    for dimension, (axes, name) in cut.items():
        for axis in axes:
            other = users.setdefault(axis, dimension)
            if other != dimension:
                raise ValueError(
                    f"a mesh axis must cut one dimension of a product, and {axis!r} cuts {_named(other)} of "
                    f"`{cut[other][1]}` and {_named(dimension)} of `{name}`: {_WAYS_OUT}"
                )
    return {dimension: axes for dimension, (axes, _) in cut.items()}


def _named(dimension: Dimension) -> str:
    return dimension if isinstance(dimension, str) else f"leading dimension {dimension}"
