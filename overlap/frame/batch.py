"""`jax.vmap` of any operation: by the kernel's own batch dimension where it has one, else by XLA."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from overlap.choice.choose import is_collecting
from overlap.frame import arguments, by_xla
from overlap.frame.explain import record_as_batched
from overlap.frame.kernel import kernel_of
from overlap.frame.operands import Leaf, Operands, Results
from overlap.frame.operation import LaunchPlan
from overlap.kernels import launch

# The fields of `Operands` for which a kernel may have a batch dimension, with their ranks without it.
_RANKS = {"lhs": 2, "rhs_list": 2, "row_scale": 1, "addends": 2, "lhs_block_scale": 2, "rhs_block_scales": 2}
_RANKS |= {"more_lefts": 2, "passenger": 2}


def batched(
    operands: Operands, is_batched: Operands, axis_size: int, plan: LaunchPlan, fused: Callable[..., Results]
) -> Results:
    """Applies the batching rule of an operation: runs it for all elements that `jax.vmap` maps over.

    Args:
      operands: arrays. Those that `jax.vmap` maps have the mapped dimension in front.
      is_batched: a bool in the place of each array: whether it is mapped.
      axis_size: the size of the mapped dimension.
      plan: of the operation on one element.
      fused: the operation itself, called as `fused(operands, plan)`.

    Returns:
      The results, all with the mapped dimension in front.
    """
    if operands.group_sizes is not None:
        return _one_by_one(operands, is_batched, plan, fused)
    symbolic = arguments.why_symbolic(f"`jax.vmap` over {axis_size} elements", [axis_size])
    if cannot := symbolic or kernel_of(plan.operation).why_not_batched(is_batched, axis_size, plan):
        if plan.must_fuse or not is_collecting():
            launch.leave_to_xla(plan.operation.name, cannot, must_fuse=plan.must_fuse)
        record_as_batched(plan.operation.name, plan.config, cannot)
        return _by_xla(operands, is_batched, axis_size, plan)
    one = jax.tree.map(lambda x, b: jax.ShapeDtypeStruct(x.shape[1:] if b else x.shape, x.dtype), operands, is_batched)
    plan = plan.of(one)
    batch = plan.form.batch
    leading = (axis_size, *(() if batch is None else (batch,)))
    if axis_size == 0:
        return tuple(jnp.zeros((*leading, plan.form.m, n), plan.out_dtype) for n in plan.result_widths), None
    if any(jax.tree.leaves((is_batched.biases, is_batched.column_scales, is_batched.scalars))):
        bare = kernel_of(plan.operation).in_f32(plan)
        if bare is None:
            return _by_xla(operands, is_batched, axis_size, plan)
        return _epilogue_by_xla(operands, is_batched, axis_size, plan, bare, fused)
    together = kernel_of(plan.operation).batched_together

    def fold(x: Leaf, is_mapped: bool, rank: int, *, always: bool) -> Leaf:
        """Folds the mapped dimension into the kernel's batch dimension.

        `rank`: the dimensions of `x` without a batch. `always`: whether it gets a batch even if it is not mapped.
        """
        has_batch = x.ndim - is_mapped > rank
        if not always and (batch is None or not (is_mapped or has_batch)):
            return x
        x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
        if batch is not None and not has_batch:
            x = jnp.broadcast_to(x[:, None], (axis_size, batch, *x.shape[1:]))
        return x.reshape(-1, *x.shape[x.ndim - rank :])

    folded = {}
    for name, rank in _RANKS.items():
        fold_one = functools.partial(fold, rank=rank, always=name in together)
        folded[name] = jax.tree.map(fold_one, getattr(operands, name), getattr(is_batched, name))
    of_all = dataclasses.replace(operands, **folded)
    outs, kept = fused(of_all, plan.of(of_all))

    def unfold(out: jax.Array) -> jax.Array:
        return out.reshape(*leading, *out.shape[-2:])

    return tuple(map(unfold, outs)), None if kept is None else unfold(kept)


def _one_by_one(operands: Operands, is_batched: Operands, plan: LaunchPlan, fused: Callable[..., Results]) -> Results:
    """Computes one product after the other: the groups of each have sizes of their own."""
    leaves, structure = jax.tree.flatten(operands)
    mapped_at = [index for index, mapped in enumerate(jax.tree.leaves(is_batched)) if mapped]

    def one(given: list[jax.Array]) -> Results:
        changed = dict(zip(mapped_at, given, strict=True))
        return fused(jax.tree.unflatten(structure, [changed.get(i, x) for i, x in enumerate(leaves)]), plan)

    return lax.map(one, [leaves[index] for index in mapped_at])


def _by_xla(operands: Operands, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> Results:
    return jax.vmap(plan.by_xla, (_axes(is_batched),), axis_size=axis_size)(operands)


def _axes(is_batched: Operands) -> Operands:
    """Returns `in_axes` for `jax.vmap`: 0 for the mapped arrays, None for the others."""
    return jax.tree.map(lambda b: 0 if b else None, is_batched)


def _epilogue_by_xla(
    operands: Operands,
    is_batched: Operands,
    axis_size: int,
    plan: LaunchPlan,
    bare: LaunchPlan,
    fused: Callable[..., Results],
) -> Results:
    """Computes the products by the kernel and their epilogue by XLA.

    The kernel cannot do the epilogue here, since its vectors and scalars have no batch dimension.

    `bare` is the plan of the products without their epilogue. The other arguments are those of `batched`.
    """
    # Where products move, each device scales its own one before. So the scales then stay with the products.
    scales_first = plan.operation.after.moves

    def of_products(x: Operands) -> Operands:
        matrices = x.matrices
        if not scales_first:
            return matrices
        return dataclasses.replace(matrices, row_scale=x.row_scale, column_scales=x.column_scales)

    def of_epilogue(x: Operands) -> Operands:
        rest = dataclasses.replace(
            x, lhs=None, rhs_list=(None,) * len(x.rhs_list), lhs_block_scale=None, rhs_block_scales=None
        )
        return dataclasses.replace(rest, row_scale=None, column_scales=None) if scales_first else rest

    matrices = of_products(operands)
    is_mapped = any(jax.tree.leaves(of_products(is_batched)))
    if is_mapped:
        products, _ = batched(matrices, of_products(is_batched), axis_size, bare, fused)
    else:
        products, _ = fused(matrices, bare.of(matrices))

    def finish(products: tuple[jax.Array, ...], rest: Operands) -> tuple[jax.Array, ...]:
        return by_xla.finish(products, rest, plan.out_dtype, plan.bound_activation(rest))

    in_axes = 0 if is_mapped else None, of_epilogue(_axes(is_batched))
    return jax.vmap(finish, in_axes=in_axes, axis_size=axis_size)(products, of_epilogue(operands)), None
