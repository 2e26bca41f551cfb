"""Decides how a product of global arrays and its backward pass run: by kernels in `shard_map`, or plainly by XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from overlap.choice.crossover import LEAST_GAIN, Cause
from overlap.choice.dispatch import Explanation, quietly
from overlap.choice.session import explaining
from overlap.frame.explain import recorded
from overlap.sharded.plan import ShardingPlan

Operands = dict[str, jax.Array]
# The causes of a decision that rests on times of single products.
_TIMED = (Cause.MEASURED, Cause.PREDICTED)
_OF_WEIGHTS = "in a step XLA gathers weights while it multiplies others, so a gather of weights is left to XLA"


def decide(
    runs: Callable[[Explanation | None], Callable[[Operands], object]], operands: Operands, plan: ShardingPlan
) -> Explanation:
    """Returns the decision about a product and its backward pass together.

    A product has three products of equal size: its own, and those for the cotangents of its two operands. The kernels
    run if all three together should take less time. Those that no kernel computes count as equal.

    Args:
      runs: returns the product inside `shard_map`, with its own decision, or with that which is given. It is traced,
        not run, and no kernel is built.
      operands: arrays, by name.
      plan: what is communicated.
    """
    forward = _decisions(lambda: jax.eval_shape(runs(None), operands))
    # A decision for another reason than times, such as a call that no kernel serves, is one about both passes.
    untimed = [choice for choice in forward if choice.cause not in _TIMED]
    if untimed:
        return untimed[0]
    first = forward[0]
    if plan.spec.gathers_rhs:
        return _by_xla(first, _OF_WEIGHTS, Cause.PREDICTED)
    # Only behind a kernel is the backward pass decided: behind a product by XLA, XLA computes it.
    run = runs(dataclasses.replace(first, implementation="fused"))

    def both_passes(operands: Operands) -> None:
        outs, pull = jax.vjp(run, operands)
        pull(outs)

    both = _decisions(lambda: jax.eval_shape(both_passes, operands))
    backward = [choice for choice in both if choice.plan != first.plan]
    ratio = _together(forward, backward)
    least = 1.0 if plan.spec.transports else LEAST_GAIN
    reason = f"{first.reason}; forward and backward together {ratio:.2f} x"
    if ratio < least:
        return _by_xla(first, reason, Cause.PREDICTED)
    return dataclasses.replace(first, implementation="fused", reason=reason)


def _decisions(trace: Callable[[], object]) -> list[Explanation]:
    with explaining(object()), quietly(), recorded() as found:
        trace()
    return found


def _together(forward: Sequence[Explanation], backward: Sequence[Explanation]) -> float:
    """XLA's time over the kernels' for the three products of a call."""
    ratios = [choice.ratio if choice.cause in _TIMED else 1.0 for choice in (*forward, *backward)]
    products = max(3 * len(forward), len(ratios))
    return (sum(ratios) + products - len(ratios)) / products


def _by_xla(choice: Explanation, reason: str, cause: Cause) -> Explanation:
    of_call = {"plan": choice.plan, "shapes": choice.shapes, "ratio": choice.ratio}
    return Explanation(choice.op, "xla", None, reason, cause, choice.target, **of_call)
