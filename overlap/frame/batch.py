"""`jax.vmap` of any operation: as the kernel's own batch where it has one, else by XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from overlap.frame import by_xla
from overlap.frame.operands import LaunchPlan, Operands, Results, in_f32, sizes
from overlap.kernels import launch

# Dimensions of each field without a batch, of those that a kernel may have a batch of.
_RANKS = {"lhs": 2, "rhs_list": 2, "row_scale": 1, "addends": 2, "lhs_block_scale": 2, "rhs_block_scales": 2}


def batched(
    operands: Operands, is_batched: Operands, axis_size: int, plan: LaunchPlan, fused: Callable[..., Any]
) -> Results:
    """The operation on operands with a further leading dimension where `is_batched`; `fused`: the operation itself."""
    if cannot := plan.operation.why_not_folded(is_batched, axis_size, plan):
        launch.leave_to_xla(plan.operation.name, cannot, insists=plan.insists)
        return _by_xla(operands, is_batched, axis_size, plan)
    one = jax.tree.map(lambda x, b: jax.ShapeDtypeStruct(x.shape[1:] if b else x.shape, x.dtype), operands, is_batched)
    batch, m, widths, _ = sizes(one, plan.layouts)
    leading = (axis_size, *(() if batch is None else (batch,)))
    if axis_size == 0:
        return tuple(jnp.zeros((*leading, m, n), plan.out_dtype) for n in widths), None
    if any(jax.tree.leaves((is_batched.biases, is_batched.column_scales, is_batched.scalars))):
        bare = in_f32(one, plan)
        if bare.config is None:
            return _by_xla(operands, is_batched, axis_size, plan)
        return _epilogue_by_xla(operands, is_batched, axis_size, plan, bare, fused)
    together = plan.operation.batched_together
    folded = {name: _folded(name, operands, is_batched, axis_size, batch, name in together) for name in _RANKS}
    outs, kept = fused(dataclasses.replace(operands, **folded), plan)
    unfold = lambda out: out.reshape(*leading, *out.shape[-2:])  # noqa: E731
    return tuple(map(unfold, outs)), None if kept is None else unfold(kept)


def _by_xla(operands: Operands, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> Results:
    of_one = lambda operands: by_xla.whole(operands, plan, plan.applied(operands))  # noqa: E731
    return jax.vmap(of_one, (_axes(is_batched),), axis_size=axis_size)(operands)


def _axes(is_batched: Any) -> Any:
    return jax.tree.map(lambda b: 0 if b else None, is_batched)


def _folded(
    name: str, operands: Operands, is_batched: Operands, axis_size: int, batch: int | None, together: bool
) -> Any:
    """A field with what `vmap` adds in front folded into the batch; `together`: even where it adds nothing."""

    def fold(x: Any, batched: bool) -> Any:
        rank = _RANKS[name]
        has_inner = x.ndim - batched > rank
        if not (batched or has_inner or together) or (batch is None and not together):
            return x
        x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        if batch is not None and not has_inner:
            x = jnp.broadcast_to(x[:, None], (axis_size, batch, *x.shape[1:]))
        return x.reshape(-1, *x.shape[x.ndim - rank :])

    return jax.tree.map(fold, getattr(operands, name), getattr(is_batched, name))


def _epilogue_by_xla(
    operands: Operands,
    is_batched: Operands,
    axis_size: int,
    plan: LaunchPlan,
    bare: LaunchPlan,
    fused: Callable[..., Any],
) -> Any:
    """The vectors have no batch in the kernel: the products by the kernel (`bare`), their epilogue by XLA."""
    axis, nothing = None, dict[str, Any](lhs=None, rhs_list=(None,) * len(operands.rhs_list))
    nothing |= dict(lhs_block_scale=None, rhs_block_scales=None)
    matrices, is_batched_matrices = operands.matrices, is_batched.matrices
    if plan.operation.reduces:
        # Each device's product has scales of its own, before the sum.
        scales = ("row_scale", "column_scales")
        matrices, is_batched_matrices = (
            dataclasses.replace(x.matrices, **{name: getattr(x, name) for name in scales})
            for x in (operands, is_batched)
        )
        nothing |= dict.fromkeys(scales)
    if any(jax.tree.leaves(is_batched_matrices)):
        (products, _), axis = batched(matrices, is_batched_matrices, axis_size, bare, fused), 0
    else:
        products, _ = fused(matrices, bare)
    rest, axes = (dataclasses.replace(x, **nothing) for x in (operands, _axes(is_batched)))
    finish = lambda products, rest: by_xla.finish(products, rest, plan.out_dtype, plan.applied(rest))  # noqa: E731
    return jax.vmap(finish, in_axes=(axis, axes), axis_size=axis_size)(products, rest), None
