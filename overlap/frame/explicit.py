"""Calls on arrays that are sharded along Explicit mesh axes: one product for each device; see `sharded`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from overlap.choice import dispatch
from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Explanation
from overlap.frame import activation as activations
from overlap.frame import arguments, call, sharded
from overlap.frame.explain import settled
from overlap.frame.normalize import normalize
from overlap.frame.operands import Leaf, accumulator
from overlap.frame.operation import Operation
from overlap.frame.signatures import AnyMesh, Arguments
from overlap.kernels import launch
from overlap.kernels.block_scales import SCALE_DTYPE
from overlap.kernels.operations import OperationSpec

_SCALES = ("lhs_scale", "rhs_scale")


def run(spec: OperationSpec, given: Arguments) -> Any:
    """Runs a call of an operation that communicates nothing: on each device's shards, if types say how these lie."""
    arguments.require_values(**given.arrays)
    call.check_choice(given)
    operation = Operation(spec)
    if (mesh := sharded.mesh_of(*jax.tree.leaves(given.arrays))) is not None:
        try:
            return _cut(operation, mesh, given)(functools.partial(call.run, spec))
        except NotImplementedError as cannot:
            if given.implementation == "fused":
                raise
            if given.implementation is None:
                if dispatch.target().platform != "cpu":
                    launch.leave_to_xla(operation.name, str(cannot), must_fuse=False)
                given = dataclasses.replace(given, implementation="xla")
            with settled(Explanation(operation.name, "xla", None, str(cannot), Cause.NOT_SERVED, dispatch.target())):
                return call.run(spec, given)
    return call.run(spec, given)


def _cut(
    operation: Operation, mesh: AnyMesh, given: Arguments
) -> Callable[[Callable[[Arguments], jax.Array]], jax.Array]:
    """Cuts a call on sharded global arrays into one product for each device.

    Args:
      operation: the operation.
      mesh: the mesh of the operands' types.
      given: the arguments of the call.

    Returns:
      A function that takes a function `run` of arguments. It calls `run` on the shards of each device, and returns the
      global result.

    Raises:
      ValueError, NotImplementedError: as raised by `normalize` for the whole call, and by `sharded.product_sharding`.
    """
    if type(given.rhs) in (list, tuple):
        raise NotImplementedError(
            "the fused kernel takes one `rhs` on arrays that are sharded along Explicit axes, got a "
            f'{type(given.rhs).__name__}: call it inside `jax.shard_map`, or use implementation="xla"'
        )
    arrays = {name: x for name, x in given.arrays.items() if x is not None}
    operands = {name: arguments.array(name, x) for name, x in arrays.items() if name not in _SCALES}
    wide = accumulator(operands["lhs"].dtype)
    blocks = {name for name in _SCALES if getattr(arrays.get(name), "dtype", None) == SCALE_DTYPE}
    for name in _SCALES:
        if name in arrays:
            scale = arrays[name]
            operands[name] = arguments.array(name, scale) if name in blocks else arguments.factor(name, scale, wide)

    def bare_types() -> dict[str, Leaf]:
        """Types without a mesh. They suffice to check the whole call."""
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in operands.items()}

    if given.config is not None:
        bare = normalize(operation, dataclasses.replace(given, **bare_types(), activation=None))
        operation.require_config(bare, given.config)
    traced = given
    if given.activation is not None:
        # Scalars that the activation captures are passed through the `shard_map` as operands, like the others.
        applied, scalars = activations.traced(given.activation, wide)
        traced = dataclasses.replace(given, activation=applied)
        operands |= {f"scalars[{i}]": scalar for i, scalar in enumerate(scalars)}

    def of_call(shards: dict[str, Leaf]) -> Arguments:
        named = {name: x for name, x in shards.items() if "[" not in name}
        return dataclasses.replace(traced, **named, scalars=tuple(x for name, x in shards.items() if "[" in name))

    jax.eval_shape(lambda shards: normalize(operation, of_call(shards)).operands, bare_types())
    batch = tuple(range(max(operands["lhs"].ndim, operands["rhs"].ndim) - 2))
    matrices = {
        "lhs": ("k", "m") if given.transpose_lhs else ("m", "k"),
        "rhs": ("n", "k") if given.transpose_rhs else ("k", "n"),
        "addend": ("m", "n"),
    }
    # Block scales have the dimensions of their operand.
    matrices |= {name: matrices[name.removesuffix("_scale")] for name in blocks}

    def dimensions(name: str, x: jax.Array) -> tuple[sharded.Dimension, ...]:
        if name in matrices:
            return (*batch[: x.ndim - 2], *matrices[name])
        # Scales and the bias lie along the rows or the columns. A scalar factor has size 1 in all dimensions.
        *leading, last = ("m", None) if name == "lhs_scale" else (None, "n")
        own = (*batch[: max(x.ndim - 2, 0)], *leading, last)
        own = own[len(own) - x.ndim :]
        return tuple(None if size == 1 else along for size, along in zip(x.shape, own, strict=True))

    layout = sharded.product_sharding(mesh, operands, {name: dimensions(name, x) for name, x in operands.items()})
    return lambda run: layout.call(lambda **shards: run(of_call(shards)), operands, (*batch, "m", "n"))
