"""`explain`: which implementation a call would run, and why, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from overlap.choice.choose import is_collecting
from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Explanation
from overlap.choice.session import session
from overlap.collectives.backward import explained
from overlap.collectives.operations import PUBLIC
from overlap.frame import arguments
from overlap.frame.signatures import Arguments
from overlap.kernels.target import Target
from overlap.sharded import checks, matmul


def explain(op: Callable[..., Any], *args: Any, with_backward: bool = False, **kwargs: Any) -> Explanation:
    """Says which implementation `op(*args, **kwargs)` would run, with what configuration, and why.

    Args:
      op: a public operation, e.g. `overlap.all_gather_lhs_matmul`, or a functools.partial of one.
      *args: the operation's arguments, arrays or `jax.ShapeDtypeStruct`s: per shard, or global for `sharded_matmul`.
      with_backward: whether to explain the backward pass too (of a collective operation), which is traced for that.
      **kwargs: the operation's keywords. Outside `jax.shard_map` the collectives also need `mesh=`: the decision is
        then for the devices of that mesh.

    Returns:
      An `Explanation`. Its string is one line, and one more for each operation of the backward pass.

    Raises:
      ValueError: `op` is no operation of this library, or the call itself would raise it.
      NotImplementedError: the call itself would raise it.
      TypeError: `op` has no such argument, or an argument is missing.

    Example:
      >>> x, w = jax.ShapeDtypeStruct((1024, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
      >>> print(overlap.explain(overlap.all_gather_lhs_matmul, x, w, "x", mesh=mesh))
    """
    while isinstance(op, functools.partial):
        op, args, kwargs = op.func, (*op.args, *args), {**op.keywords, **kwargs}
    public = next((public for public in PUBLIC.values() if public.function is op), None)
    is_sharded = op is matmul.sharded_matmul
    if public is None and not is_sharded:
        names = [f"overlap.{name}" for name in (*PUBLIC, checks.NAME)]
        raise ValueError(f"`op` must be one of {names}, got {arguments.shown(op)}: pass the function itself")
    signature = inspect.signature(op)
    arguments.bound(f"overlap.{op.__name__}", signature, args, kwargs, more=("mesh",))
    arguments.mesh(kwargs.get("mesh"))
    named = dict(zip(signature.parameters, args, strict=False)) | kwargs
    # While `overlap.autotune` collects problems, calls choose the kernel; this is about the usual choice.
    with session(None) if is_collecting() else contextlib.nullcontext():
        if public is None:
            choice = matmul.explain(matmul.ShardedArguments(**named))
        else:
            choice = public.explain(Arguments(**named))
        if not arguments.flag("with_backward", with_backward):
            return choice
        if is_sharded:
            raise ValueError(
                f"`with_backward` must be False for {op.__name__}, whose products run inside `jax.shard_map`: explain "
                "the operation that its own explanation names, on a device's part of the arrays"
            )
        return dataclasses.replace(choice, backward=_of_backward_pass(op, args, kwargs, choice.target))


def _of_backward_pass(
    op: Callable[..., Any], args: Any, kwargs: dict[str, Any], target: Target
) -> tuple[Explanation, ...]:
    """Traces the backward pass of a call of arrays or their types, and returns what its operations would run."""
    mesh, kwargs = kwargs.get("mesh"), {name: value for name, value in kwargs.items() if name != "mesh"}
    leaves, structure = jax.tree.flatten((args, kwargs))
    places = [
        index for index, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))
    ]

    def gradient(*arrays: jax.Array) -> Any:
        given = dict(zip(places, arrays, strict=True))

        def run(*arrays: jax.Array) -> Any:
            moved = given | dict(zip(places, arrays, strict=True))
            args, kwargs = jax.tree.unflatten(structure, [moved.get(index, leaf) for index, leaf in enumerate(leaves)])
            return op(*args, **kwargs)

        outs, pull = jax.vjp(run, *arrays)
        return pull(jax.tree.map(jnp.zeros_like, outs))

    mapped = gradient
    if mesh is not None:
        mapped = jax.shard_map(gradient, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with explained() as found:
        jax.eval_shape(mapped, *(jax.ShapeDtypeStruct(leaves[index].shape, leaves[index].dtype) for index in places))
    if found or op is PUBLIC["matmul"].function:  # The products of `matmul` run its kernel, and communicate nothing.
        return tuple(found)
    reason = "no kernel communicates in it"
    return (Explanation(op.__name__, "xla", None, reason, Cause.NOT_SERVED, target, plan="backward pass"),)
