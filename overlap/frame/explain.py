"""`explain`: which implementation each call in a function would run, and why, without running it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np

from overlap.choice.choose import is_collecting
from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Explanation, quietly
from overlap.choice.session import explaining, session
from overlap.choice.space import differences
from overlap.frame import arguments
from overlap.frame.signatures import AnyMesh
from overlap.kernels.config import Config
from overlap.kernels.target import Target

_found: ContextVar[list[Explanation] | None] = ContextVar("found", default=None)
_mesh: ContextVar[AnyMesh | None] = ContextVar("mesh", default=None)


def explained_mesh() -> AnyMesh | None:
    """Returns the mesh that `explain` was given. It may have devices, which a mesh inside `jax.shard_map` has not."""
    return _mesh.get()


class Explanations(tuple[Explanation, ...]):
    """What `explain` returns: an `Explanation` for each call, in order. Printed, it is a table; equal rows are one."""

    def __str__(self) -> str:
        if not self:
            return "no call of an operation of this library"
        rows = [("calls", "operation", "m x n x k", "runs", "config", "why")]
        rows += [(f"{count}", *_row(choice)) for choice, count in Counter(self).items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _row(choice: Explanation) -> tuple[str, ...]:
    config = f"{differences(choice.config)} ({choice.source})" if choice.config else ""
    why = f"{choice.plan}: {choice.why}" if choice.plan else choice.why
    return choice.op, choice.shapes, choice.implementation, config, why


@contextlib.contextmanager
def recorded() -> Iterator[list[Explanation]]:
    """Collects the decisions about all calls that are traced inside the block."""
    found: list[Explanation] = []
    token = _found.set(found)
    try:
        yield found
    finally:
        _found.reset(token)


def record(choice: Explanation) -> None:
    """Adds a decision, if decisions are collected."""
    if (found := _found.get()) is not None:
        found.append(choice)


def record_backward(
    op: str, target: Target, reason: str, shapes: str, config: Config | None = None, source: str = ""
) -> None:
    """Adds the decision that a kernel computes a product of a backward pass."""
    record(
        Explanation(op, "fused", config, reason, Cause.PREDICTED, target, source, plan="backward pass", shapes=shapes)
    )


def record_as_batched(op: str, config: Config, reason: str) -> None:
    """Corrects a decision for the kernel: `jax.vmap` maps over the call in a way that the kernel cannot, so XLA runs.

    The call is the last one of this operation with this configuration. It is not always the last call: where a jitted
    function is mapped, all calls in it are decided first.
    """
    found = _found.get() or []
    for index, choice in reversed([*enumerate(found)]):
        if (choice.op, choice.implementation, choice.config) == (op, "fused", config):
            found[index] = Explanation(
                op, "xla", None, reason, Cause.NOT_SERVED, choice.target, plan=choice.plan, shapes=choice.shapes
            )
            return


@contextlib.contextmanager
def settled(choice: Explanation) -> Iterator[None]:
    """Adds a decision, and none for the calls inside the block, which carry it out."""
    record(choice)
    token = _found.set(None)
    try:
        with quietly():
            yield
    finally:
        _found.reset(token)


def explain(fn: Callable[..., Any], *args: Any, mesh: AnyMesh | None = None, **kwargs: Any) -> Explanations:
    """Says what each call of an operation in `fn(*args, **kwargs)` would run, with what configuration, and why.

    `fn` is traced, not run, and no kernel is built. Calls inside `jit`, `shard_map` and `scan` are found, each as often
    as it is traced: the body of a `scan` once. With `fn = jax.grad(loss)` the products of the backward pass that a
    kernel can compute are found, too; what is not listed, XLA computes.

    Args:
      fn: a function of arrays: an operation of this library, a layer, a whole loss, or the gradient of one.
      *args: the arguments of `fn`. Arrays may be `jax.ShapeDtypeStruct`s.
      mesh: traces `fn` as inside `jax.shard_map` over all axes of this mesh, so that arrays are a device's parts. So
        collectives can be explained by themselves. With a `jax.sharding.AbstractMesh` that has an `abstract_device`,
        the answers are for that kind of GPU, on any machine. To explain global arrays on such a mesh, use
        `jax.sharding.use_abstract_mesh`.
      **kwargs: keyword arguments of `fn`.

    Returns:
      A tuple of `Explanation`s in the order of the calls. Printing it gives a table.

    Raises:
      ValueError: `fn` is no function, or `mesh` no mesh.
      Whatever `fn` raises: the errors of the calls in it, for example.

    Examples:
      >>> x, w = jax.ShapeDtypeStruct((1024, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
      >>> print(overlap.explain(overlap.all_gather_lhs_matmul, x, w, "x", mesh=mesh))
      >>> loss = lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x").sum()
      >>> print(overlap.explain(jax.grad(loss), x, w, mesh=mesh))  # the backward pass, too
    """
    arguments.function("fn", fn)
    arguments.mesh(mesh)
    leaves, structure = jax.tree.flatten((args, kwargs))
    # What is traced: the arrays among the leaves, by their place. Names of axes, NumPy arrays of texts and other values
    # are passed as they are.
    traced: dict[int, Any] = {}
    for place, leaf in enumerate(leaves):
        kind = arguments.without_mesh(leaf)
        if isinstance(kind, jax.ShapeDtypeStruct):
            # With `mesh`, the own sharding of an array does not count: it stands for a device's part.
            traced[place] = kind if mesh is not None or isinstance(leaf, np.ndarray) else leaf

    def run(arrays: dict[int, jax.Array]) -> tuple[()]:
        args, kwargs = jax.tree.unflatten(structure, [arrays.get(place, leaf) for place, leaf in enumerate(leaves)])
        fn(*args, **kwargs)
        return ()

    if mesh is not None:
        run = jax.shard_map(run, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    token = _mesh.set(mesh)
    # While `overlap.autotune` collects problems, calls choose the kernel; this is about the usual choice. A new value
    # of `explaining` has jitted functions traced again.
    try:
        with session(None) if is_collecting() else contextlib.nullcontext(), explaining(object()), recorded() as found:
            jax.eval_shape(run, traced)
    finally:
        _mesh.reset(token)
    return Explanations(found)
