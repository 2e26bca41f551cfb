"""Checks of a call of `sharded_matmul` that need no plan: the types of its arguments, sizes, and devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.core import Tracer

from overlap.frame import arguments
from overlap.frame.activation import takes_all
from overlap.frame.normalize import normalize
from overlap.frame.operation import Call, Operation
from overlap.frame.signatures import AnyMesh, Arguments
from overlap.kernels.operations import MATMUL
from overlap.sharded.dimensions import Dimensions

NAME = "sharded_matmul"


# The product of global arrays. It is never run: `normalize` uses it to check arguments.
_WHOLE = dataclasses.replace(MATMUL, function=NAME)


def arrays(lhs: Any, rhs: Any, bias: Any, addend: Any) -> dict[str, Any]:
    """The arguments, by name, as arrays of JAX or types of arrays. Arrays of NumPy are converted by `jnp.asarray`.

    Raises:
      ValueError: an argument is no array, or `bias` or `addend` is a list beside a single `rhs`.
    """
    several = type(rhs) in (list, tuple)
    found = {"lhs": arguments.array("lhs", lhs)}
    for name, given in (("rhs", rhs), ("bias", bias), ("addend", addend)):
        if given is None and name != "rhs":
            found[name] = None
        elif several and isinstance(given, (list, tuple)):
            entries = [
                None if x is None and name != "rhs" else arguments.array(f"{name}[{i}]", x) for i, x in enumerate(given)
            ]
            found[name] = entries if name != "rhs" else type(rhs)(entries)
        elif several:
            found[name] = given  # Left as it is: `normalize` raises, and says that it must be a list.
        elif isinstance(given, (list, tuple)):
            raise ValueError(
                f"`{name}` must be one array beside a single `rhs`, got a {type(given).__name__} of {len(given)}: give "
                "it as it is, not in a list"
            )
        else:
            found[name] = arguments.array(name, given)
    return found


def whole_call(given: dict[str, Any], activation: Any, preferred: Any, dimensions: Dimensions) -> Call:
    """Checks sizes and dtypes of the global arrays `given`, and returns the checked call.

    The check uses types without a mesh, in which the dimensions are merged that count as one.
    """
    several = type(given["rhs"]) in (list, tuple)
    if dimensions.k > 1 or dimensions.n > 1:
        _check_groups(given, dimensions)

    def bare(name: str, x: Any) -> Any:
        if type(x) in (list, tuple):
            return type(x)(bare(name, entry) for entry in x)
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        return jax.ShapeDtypeStruct(dimensions.merged(name, x.shape), x.dtype) if is_array else x

    # An argument that is not a list, and should be one, stays as the caller gave it, so that the message can show it.
    types = {
        name: bare(name, x) if not several or name == "lhs" or type(x) in (list, tuple) else x
        for name, x in given.items()
    }
    operation = Operation(_WHOLE, takes_parts=False, combines=takes_all(activation, given["rhs"]))
    transposed = dimensions.transpose_rhs
    whole = normalize(operation, Arguments(**types, preferred_element_type=preferred, transpose_rhs=transposed))
    for name, x in zip(("lhs", *whole.names), (given["lhs"], *_each(given["rhs"])), strict=True):
        if 0 in x.shape:
            raise ValueError(
                f"`{name}` must not be empty, got 0 in dimension {x.shape.index(0)} of {tuple(x.shape)}: leave the "
                "call out (the product is zeros where k is 0, else empty too), or pad the dimension with zeros"
            )
    if activation is not None:
        arguments.function("activation", activation)
    return whole


def _check_groups(given: dict[str, Any], dimensions: Dimensions) -> None:
    """Raises ValueError if arrays differ in a dimension that is merged with others into one k or one n.

    After merging this would not be seen: 4 heads of 32 and 2 heads of 64 are both 128 columns.
    """
    lhs = tuple(given["lhs"].shape)
    rows = lhs[: -dimensions.k]
    for i, rhs in enumerate(_each(given["rhs"])):
        index = f"[{i}]" if type(given["rhs"]) in (list, tuple) else ""
        k, n = dimensions.k_n(rhs.shape)
        if lhs[-dimensions.k :] != k:
            raise ValueError(
                f"`lhs` must end with the dimensions that `rhs{index}` "
                f"{'ends' if dimensions.transpose_rhs else 'begins'} with, {dimensions.k} by the number of entries of "
                f"`out_sharding`, got {lhs} and {tuple(rhs.shape)}: transpose one of them, or name each dimension of "
                "the result once in `out_sharding`"
            )
        for name, shapes in (("bias", [n]), ("addend", [(*rows, *n), (*rows[-1:], *n)])):
            entries = _each(given[name])
            x = entries[i] if i < len(entries) else None
            if x is not None and tuple(x.shape) not in shapes:
                raise ValueError(
                    f"`{name}{index}` must have the shape {' or '.join(map(str, dict.fromkeys(shapes)))}, got "
                    f"{tuple(x.shape)}: reshape it"
                )


def _each(given: Any) -> list[Any]:
    """The entries of an argument: those of a list or tuple, or the argument itself."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def require_on_mesh(operands: dict[str, Any], mesh: AnyMesh) -> None:
    """Raises ValueError if the caller has put an array on other devices than those of the mesh.

    If an operand is a tracer, nothing is checked: the other arrays are then constants of the traced program, and jax
    puts constants on the mesh.
    """
    if any(isinstance(x, Tracer) for x in operands.values()):
        return
    for name, x in operands.items():
        if not isinstance(x, jax.Array) or not x.committed:
            continue
        own = x.sharding.device_set
        of_mesh = set(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None
        if len(own) != mesh.size or (of_mesh is not None and own != of_mesh):
            where = f"device {next(iter(own))}" if len(own) == 1 else f"{len(own)} devices"
            raise ValueError(
                f"`{name}` must be on the {mesh.size} devices of the mesh, got an array that was put on {where}: move "
                f"it, with jax.device_put({name}, jax.NamedSharding(mesh, …))"
            )
