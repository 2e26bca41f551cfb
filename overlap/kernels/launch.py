"""Makes a kernel one operation of jax, whose inside jax sees only when the operation is lowered.

`sealed(kernel)` binds a primitive of this library whose parameter is the traced kernel. The primitive's rules tell jax
how to treat any kernel inside a program:

    types      The results vary along the mesh axes that any operand varies along (`varying.py`). The kernel itself is
               traced on types without such axes, because Mosaic GPU refuses references that have them.
    vmap       Refused. It would add an axis to the grid, and a persistent kernel with counted flags would then hang.
    patches    The changes of jax that the kernel needs are made before it is lowered for a GPU (`overlap/_compat/`).
    slices     An operand that is a slice of an array may not begin at any address (`_kept_apart`).
    lowering   Where each device runs the kernel on operands of its own, the kernel is lowered. Elsewhere, in a program
               of several devices outside `jax.shard_map`, XLA's partitioner would silently run the whole kernel on
               every device. There the same operation as XLA computes it, `otherwise`, is lowered instead, or the call
               is refused.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

from overlap import _compat
from overlap.kernels import ahead
from overlap.kernels.varying import alike
from overlap.primitives.types import Tree

_logger = logging.getLogger("overlap")
_said: set[tuple[str, str]] = set()
# Of the addresses of a kernel's operands, in bytes.
_ALIGNMENT = 256
_kernel_p = Primitive("overlap_kernel")
_kernel_p.multiple_results = True


def sealed(
    kernel: Callable[..., Tree],
    name: str,
    otherwise: Callable[..., Tree] | None = None,
    patches: tuple[_compat.Patch, ...] = (),
) -> Callable[..., Tree]:
    """Returns a function that computes the same as `kernel`, as one operation of jax.

    Args:
      kernel: a function from trees of arrays to a tree of arrays.
      name: the kernel's name, for messages.
      otherwise: a function that computes the same by XLA, in operations that XLA can partition, with results of the
        same shapes and dtypes. None: the caller asked for the kernel, so a call that cannot run it is refused.
      patches: the changes of jax that the kernel needs on a GPU.
    """

    def run(*operands: Tree) -> Tree:
        plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), operands)
        # Inside `jax.disable_jit()`, jax would unroll the loops of the kernel.
        with jax.disable_jit(False):
            traced, types = jax.make_jaxpr(kernel, return_shape=True)(*plain)
            by_xla = None if otherwise is None or _all_manual() else jax.make_jaxpr(otherwise)(*plain)
        results = _kernel_p.bind(
            *jax.tree.leaves(alike(operands)), kernel=traced, otherwise=by_xla, name=name, patches=patches
        )
        return jax.tree.unflatten(jax.tree.structure(types), results)

    return run


def checks_numbers() -> bool:
    """Whether jax looks for NaN or infinity in each result (`jax_debug_nans`): no result may then have undefined rows.

    jax reads these settings when a program runs, and this function when it is traced. So they must be set before.
    """
    return jax.config.jax_debug_nans or jax.config.jax_debug_infs


def leave_to_xla(op: str, reason: str, *, must_fuse: bool) -> None:
    """Warns, once for each reason, that XLA runs in the kernel's place.

    It is called for reasons that are found only after the fused kernel has been chosen, e.g. when the program is
    lowered.

    Args:
      op: the name of the operation.
      reason: why the kernel cannot run.
      must_fuse: whether the caller asked for the kernel.

    Raises:
      NotImplementedError: the caller asked for the kernel.
    """
    if must_fuse:
        raise NotImplementedError(reason)
    if (op, reason) not in _said:
        _said.add((op, reason))
        _logger.warning("%s: xla: %s", op, reason)


def _all_manual() -> bool:
    """Whether this code is inside a `jax.shard_map` over all axes of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and set(mesh.manual_axes) == set(mesh.axis_names)


@_kernel_p.def_abstract_eval
def _types(*operands: Any, kernel: Any, otherwise: Any, name: str, patches: Any) -> list[Any]:
    del otherwise, name, patches
    if not operands:
        return kernel.out_avals
    like = operands[0]

    def typed(aval: Any) -> Any:
        sharding = jax.NamedSharding(like.sharding.mesh, jax.P(*[None] * len(aval.shape)))
        return aval.update(sharding=sharding, manual_axis_type=like.manual_axis_type)

    return [typed(aval) for aval in kernel.out_avals]


@_kernel_p.def_impl
def _run(*operands: Any, **params: Any) -> Any:
    # A kernel can run only as part of a compiled program, so compile also inside `jax.disable_jit()`.
    with jax.disable_jit(False):
        return jax.jit(lambda *operands: _kernel_p.bind(*operands, **params))(*operands)


def _batch(operands: Any, dims: Any, *, name: str, **_: Any) -> Any:
    raise NotImplementedError(
        f'{name} does not support `jax.vmap` yet: fold the batch into the rows of `lhs`, or use implementation="xla"'
    )


batching.primitive_batchers[_kernel_p] = _batch


def _why_not_on_each_device(context: Any) -> str | None:
    """Returns why a kernel lowered in this context would not run on each device's own operands; None if it would."""
    if hasattr(context, "manual_axes"):
        rest = {axis: size for axis, size in context.mesh.shape.items() if axis not in context.manual_axes}
        if math.prod(rest.values()) > 1:
            return f"the fused kernel is inside a jax.shard_map that leaves the mesh axes {rest} to XLA's partitioner"
        return None
    if (devices := getattr(context, "num_devices", 1)) > 1:
        return f"the fused kernel is in a program for {devices} devices, outside of jax.shard_map"
    return None


def _lower(context: Any, *operands: Any, kernel: Any, otherwise: Any, name: str, patches: Any) -> Any:
    lowered = kernel
    if reason := _why_not_on_each_device(context.module_context.axis_context):
        reason += (
            ", and the partitioner cannot split it: call it inside jax.shard_map over all axes of the mesh, or use "
            'implementation="xla"'
        )
        leave_to_xla(name, reason, must_fuse=otherwise is None)
        lowered = otherwise
    elif "cuda" in context.module_context.platforms:
        _compat.apply(*patches, *_compat.equal_texts())

    def run(*operands: jax.Array) -> Any:
        return jaxpr_as_fun(lowered)(*map(_kept_apart, operands))

    # Lower the kernel with the types that it was traced on.
    within = context.replace(avals_in=lowered.in_avals, avals_out=lowered.out_avals)
    with _compat.without_locations(), ahead.assembling(context.module_context):
        return mlir.lower_fun(run, multiple_results=True)(within, *operands)


def _kept_apart(operand: jax.Array) -> jax.Array:
    """Makes XLA copy the operand if it is a slice that may begin at an address that Mosaic GPU refuses.

    XLA hands a kernel that reads a contiguous slice of an array the address in that array, and Mosaic GPU wants a
    multiple of 256 bytes. Such a slice has whole rows: entries of the first dimension that has several. A barrier
    keeps XLA from seeing the slice. It costs nothing where there is none.
    """
    _, *row = itertools.dropwhile(lambda size: size == 1, (*operand.shape, 2))
    is_aligned = math.prod(row[:-1]) * operand.dtype.itemsize % _ALIGNMENT == 0
    return operand if is_aligned else lax.optimization_barrier(operand)


mlir.register_lowering(_kernel_p, _lower)
