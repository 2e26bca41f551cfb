"""The work of each device: gathers of the weights, one operation of this library, and an epilogue on its result."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Explanation, Implementation
from overlap.frame import by_xla, call
from overlap.frame.activation import BEFORE_ACTIVATION, Activation, on_all
from overlap.frame.explain import settled
from overlap.frame.operands import Operands, accumulator
from overlap.frame.signatures import Arguments
from overlap.kernels.config import Config
from overlap.kernels.operations import GATHER_LHS, MATMUL
from overlap.kernels.varying import axes_of, same_along, varying
from overlap.sharded.plan import ShardingPlan
from overlap.sharded.regather import with_gathered


class _Side(NamedTuple):
    """A right operand, and what is added to its product."""

    rhs: jax.Array
    bias: jax.Array | None = None
    addend: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Product:
    """The product that each device computes from its parts of the operands: everything that is known at tracing.

    Attributes:
      plan: what is communicated.
      transpose_rhs: whether the right operands lie as [n, k].
      out_dtype: the dtype of the results.
      activation: the activation, whose scalars are among the operands; None for none.
      config: `config` as the caller gave it.
      implementation: `implementation` as the caller gave it.
      keep_gathered: whether gathered operands are kept for the backward pass; None: as False, where kernels run.
      why_xla: why only XLA can run, whatever the sizes; empty if a kernel may.
      decided: the decision for the kernels, forward and backward; None: each call is still to be decided.
    """

    plan: ShardingPlan
    transpose_rhs: bool
    out_dtype: DTypeLike
    activation: Activation | None
    config: Config | None
    implementation: Implementation | None
    keep_gathered: bool | None
    why_xla: str = ""
    decided: Explanation | None = None

    def compute(self, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Computes the result for each right operand from a device's parts of the operands. Call it inside `shard_map`.

        Args:
          operands: "lhs"; "rhs[0]", …; and, where they are given, "bias[0]", "addend[0]" and "scalars[0]", ….
        """
        if self.keep_gathered or not self.plan.gathers:
            return self._multiplied(operands | self._whole(operands))
        # Keep only the shards between the passes. The backward pass gathers them again.
        return with_gathered(self._multiplied, self._whole, operands)

    def _whole(self, operands: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The weights that XLA gathers before the operation, by name, gathered."""
        names = [name for name in operands if name.startswith("rhs") and self.plan.gathers]
        return {name: self._gathered(operands[name], operands["lhs"]) for name in names}

    def _multiplied(self, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """The results for operands of which the weights are gathered, but for what the operation itself gathers."""
        first = self._first_of_rows
        lhs = _fold(operands["lhs"], first)
        rows = self._rows_of_result(operands["lhs"].shape)
        scalars = tuple(x for name, x in operands.items() if name.startswith("scalars"))
        sides = []
        for i in range(sum(name.startswith("rhs") for name in operands)):
            addend = operands.get(f"addend[{i}]")
            if addend is not None and first is not None:
                addend = _fold(jnp.broadcast_to(addend, (*rows, addend.shape[-1])), first)
            sides.append(_Side(operands[f"rhs[{i}]"], operands.get(f"bias[{i}]"), addend))
        outs = self._combined(lhs, sides, scalars) if self.combines else self._each(lhs, sides, scalars)
        return tuple(outs) if first is None else tuple(out.reshape(*rows, out.shape[-1]) for out in outs)

    # --- The operation ---

    @property
    def combines(self) -> bool:
        """Whether the activation makes one result of those of all right operands."""
        return self.activation is not None and self.activation.program.arrays > 1

    def _combined(self, lhs: jax.Array, sides: list[_Side], scalars: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Computes the result of an activation of all right operands: in the kernel of the product if there is one.

        Else XLA applies it to products in the results' dtype: in f32 they would cost more than they gain.
        """
        if self.plan.spec in (GATHER_LHS, MATMUL):
            given = self._arguments(lhs, sides, scalars)
            try:
                choice = None if self._is_behind(given) else self._decide(given)
            except NotImplementedError:
                choice = None
            if choice is not None and choice.implementation == "fused":
                result = self._run(given, choice)
                return [result[0] if given.return_gathered else result]
        outs = dataclasses.replace(self, activation=None)._each(lhs, [_Side(side.rhs) for side in sides], ())
        return self._finished([checkpoint_name(x, BEFORE_ACTIVATION) for x in outs], sides, scalars)

    def _each(self, lhs: jax.Array, sides: list[_Side], scalars: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Computes a result for each right operand: by one call where `lhs` is gathered, else by a call for each."""
        calls = [sides] if self.plan.spec is GATHER_LHS else [[side] for side in sides]
        return [out for sides in calls for out in self._called(lhs, sides, scalars)]

    def _called(self, lhs: jax.Array, sides: list[_Side], scalars: tuple[jax.Array, ...]) -> list[jax.Array]:
        given = self._arguments(lhs, sides, scalars)
        choice = self._decide(given)
        finish = choice.implementation == "fused" and self._is_behind(given)
        result = self._run(_bare(given) if finish else given, choice)
        outs = result[0] if given.return_gathered else result
        outs = [outs] if len(sides) == 1 else list(outs)
        return self._finished(outs, sides, scalars) if finish else outs

    def _arguments(self, lhs: jax.Array, sides: list[_Side], scalars: tuple[jax.Array, ...]) -> Arguments:
        """The arguments of a call of the operation."""
        axes = self.plan.axes
        spec = self.plan.spec
        rhs_list, biases, addends = ([*of_each] for of_each in zip(*sides, strict=True))
        one = len(sides) == 1
        return Arguments(
            lhs,
            rhs_list[0] if one else rhs_list,
            axes[0] if len(axes) == 1 else axes,
            bias=biases[0] if one else biases if any(x is not None for x in biases) else None,
            addend=addends[0] if one else addends if any(x is not None for x in addends) else None,
            activation=self.activation,
            scalars=scalars,
            transpose_rhs=self.transpose_rhs,
            preferred_element_type=self.out_dtype,
            config=self.config,
            implementation=self.implementation,
            return_gathered=spec is GATHER_LHS and bool(self.keep_gathered),
        )

    def _is_behind(self, given: Arguments) -> bool:
        """Whether the kernel lacks a part of the epilogue. XLA then applies all of it to the kernel's result."""
        return not {name for name, x in given.epilogue.items() if x is not None} <= {*self.plan.spec.epilogue}

    def _decide(self, given: Arguments) -> Explanation:
        given = _bare(given) if self._is_behind(given) else given
        if self.decided is not None:
            # The kernel runs, also where XLA would be faster in this one of the three products.
            choice = call.explain(self.plan.spec, dataclasses.replace(given, implementation="fused"))
            given_by = {name: getattr(self.decided, name) for name in ("reason", "cause", "ratio")}
            return dataclasses.replace(choice, plan=str(self.plan), **given_by)
        choice = call.explain(self.plan.spec, given)
        if self.why_xla:
            choice = dataclasses.replace(choice, reason=self.why_xla, cause=Cause.NOT_SERVED)
        return dataclasses.replace(choice, plan=str(self.plan))

    def _run(self, given: Arguments, choice: Explanation) -> Any:
        """Runs the operation. `choice`: the decision about it, for `overlap.explain`."""
        if self.decided is not None:
            given = dataclasses.replace(given, config=choice.config)
        with settled(choice):
            return call.run(self.plan.spec, given)

    def _finished(self, outs: list[jax.Array], sides: list[_Side], scalars: tuple[jax.Array, ...]) -> list[jax.Array]:
        """Applies the epilogue to the results of the fused kernel. XLA fuses that of each into one loop."""
        biases, addends = tuple(side.bias for side in sides), tuple(side.addend for side in sides)
        operands = Operands(outs[0], tuple(outs), biases=biases, addends=addends)
        wide = tuple(out.astype(accumulator(out.dtype)) for out in outs)
        activation = self.activation and functools.partial(self.activation, scalars=scalars)
        return list(by_xla.finish(wide, operands, self.out_dtype, activation and on_all(activation, self.combines)))

    # --- The weights ---

    def _dimension_of_rhs(self, dimension: int) -> int:
        """The index in `rhs`, as it lies in memory, of dimension 0 (k) or 1 (n) of [k, n]."""
        return 1 - dimension if self.transpose_rhs else dimension

    def _gathered(self, rhs: jax.Array, lhs: jax.Array) -> jax.Array:
        """Gathers a right operand by XLA, along the axes that the plan gathers before the operation."""
        # Type the shard as varying like `lhs` before the gather. Then its cotangent is scattered before it is summed
        # over other axes, and the product need not change the type of the gathered weights.
        rhs = varying(rhs, sorted(axes_of(lhs)))
        for dimension, axes in self.plan.gathers:
            rhs = lax.all_gather(rhs, axes, axis=self._dimension_of_rhs(dimension), tiled=True)
        common = {axis for _, axes in self.plan.gathers for axis in axes} - axes_of(lhs)
        return same_along(rhs, sorted(common))

    # --- Leading dimensions ---

    @property
    def _first_of_rows(self) -> int | None:
        """The leading dimension that the operation gathers or scatters; None if it is not a leading dimension.

        This dimension and all dimensions behind it are folded into the rows.
        """
        plan = self.plan
        rows = len(self.plan.lhs) - 2
        is_of_rows = (plan.spec is GATHER_LHS or plan.spec.scatters) and plan.dimension < rows
        return plan.dimension if is_of_rows else None

    def _rows_of_result(self, lhs_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the result's dimensions but the last, if one of them is gathered or scattered."""
        rows = list(lhs_shape[:-1])
        if (first := self._first_of_rows) is not None:
            devices = math.prod(lax.axis_size(axis) for axis in self.plan.axes)
            rows[first] = rows[first] * devices if self.plan.spec is GATHER_LHS else rows[first] // devices
        return tuple(rows)


def _bare(given: Arguments) -> Arguments:
    """The arguments of a call, without an epilogue."""
    return dataclasses.replace(given, bias=None, addend=None, activation=None, scalars=None)


def _fold(x: jax.Array, first: int | None) -> jax.Array:
    """Merges the dimensions from `first` up to the rows (the last but one) into one.

    A part of dimension `first` is then a block of rows. None: returns `x` as it is.
    """
    return x if first is None else x.reshape(*x.shape[:first], math.prod(x.shape[first:-1]), x.shape[-1])
