"""What each device does: gathers of the weights, one operation of this library, and what is applied to its result."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from overlap.choice.dispatch import Explanation
from overlap.collectives import all_gather_matmul, all_gather_rhs_matmul, matmul_all_reduce, matmul_reduce_scatter
from overlap.frame import by_xla, call
from overlap.frame.activation import Activation
from overlap.frame.operands import Operands, accumulator
from overlap.kernels.config import Config
from overlap.kernels.varying import axes_of, same_along, same_along_p, varying
from overlap.sharded.plan import ShardingPlan
from overlap.single_gpu import matmul

# How each operation brings a call into the frame's form, and the keywords of the epilogue that its fused kernel takes.
_OPERATIONS: dict[str, tuple[Callable[..., Any], frozenset[str]]] = {
    "matmul": (matmul.prepare, matmul.Matmul.epilogue),
    "all_gather_lhs_matmul": (all_gather_matmul.prepare, all_gather_matmul.AllGatherLhs.epilogue),
    "all_gather_rhs_matmul": (all_gather_rhs_matmul.prepare, all_gather_rhs_matmul.AllGatherRhs.epilogue),
    "matmul_reduce_scatter": (matmul_reduce_scatter.prepare, matmul_reduce_scatter.MatmulReduceScatter.epilogue),
    "matmul_all_reduce": (matmul_all_reduce.prepare, matmul_all_reduce.MatmulAllReduce.epilogue),
}


@dataclasses.dataclass(frozen=True)
class Product:
    """What is static about a product of each device's parts.

    Attributes:
      plan: what is communicated.
      transpose_rhs: whether the right operands lie as [n, k].
      out_dtype: of the results.
      activation: of each result, with the scalars that it captures as operands; None for none.
      config: as the caller gave it.
      implementation: likewise.
      keep_gathered: whether what was gathered is kept for the backward pass.
    """

    plan: ShardingPlan
    transpose_rhs: bool
    out_dtype: Any
    activation: Activation | None
    config: Config | None
    implementation: str | None
    keep_gathered: bool

    def compute(self, operands: dict[str, Any], said: list[Explanation] | None = None) -> tuple[jax.Array, ...]:
        """The result of each right operand, from a device's parts of the operands; to be called inside `shard_map`.

        Args:
          operands: "lhs"; "rhs[0]", …; and, where they are given, "bias[0]", "addend[0]" and "scalars[0]", ….
          said: takes what was decided.
        """
        run = functools.partial(self._compute, said=said)
        along = {axis for _, axes in self.plan.gathers for axis in axes}
        if self.plan.operation == "all_gather_rhs_matmul":
            along |= {*self.plan.axes}
        if along and not self.keep_gathered:
            # Between the passes each device keeps its shards alone; the backward pass gathers them again.
            run = jax.checkpoint(run, policy=_saves_all_but_gathers(frozenset(along)))
        return run(operands)

    def _compute(self, operands: dict[str, Any], said: list[Explanation] | None) -> tuple[jax.Array, ...]:
        plan = self.plan
        rhs_list = [x for name, x in operands.items() if name.startswith("rhs")]
        scalars = tuple(x for name, x in operands.items() if name.startswith("scalars"))
        lhs = operands["lhs"]
        shape = lhs.shape
        lhs = _fold(lhs, self._first_of_rows)
        rhs_list = [self._gathered(x, lhs, plan.gathers) for x in rhs_list]
        epilogues = [
            {name: x for name in ("bias", "addend") if (x := operands.get(f"{name}[{i}]")) is not None}
            for i in range(len(rhs_list))
        ]
        for i, epilogue in enumerate(epilogues):
            if "addend" in epilogue:
                epilogue["addend"] = self._fold_addend(epilogue["addend"], shape)
            if self.activation is not None:
                epilogues[i] |= {"activation": self.activation, "scalars": scalars}
        if plan.operation == "all_gather_lhs_matmul":
            outs = self._together(lhs, rhs_list, epilogues, said)
        else:
            outs = [self._one(lhs, rhs, epilogue, said) for rhs, epilogue in zip(rhs_list, epilogues, strict=True)]
        return tuple(self._unfold(out, shape) for out in outs)

    # --- The operation ---

    def _together(
        self, lhs: jax.Array, rhs_list: list[jax.Array], epilogues: list[dict[str, Any]], said: Any
    ) -> list[jax.Array]:
        """All right operands by one gather."""
        single = len(rhs_list) == 1

        def together(each: list[Any]) -> Any:
            return each[0] if single else each

        given = dict(lhs=lhs, rhs=together(rhs_list), return_gathered=self.keep_gathered)
        epilogue = {name: x for name, x in epilogues[0].items() if name in ("activation", "scalars")}
        for name in ("bias", "addend"):
            if any(name in of_one for of_one in epilogues):
                epilogue[name] = together([of_one.get(name) for of_one in epilogues])
        by_xla = self._decide(given, epilogue, said).implementation == "xla"
        result = self._run(given | epilogue if by_xla else given)
        outs = result[0] if self.keep_gathered else result
        outs = [outs] if single else outs
        if by_xla or not epilogue:
            return outs
        return [self._finished(out, of_one) for out, of_one in zip(outs, epilogues, strict=True)]

    def _one(self, lhs: jax.Array, rhs: jax.Array, epilogue: dict[str, Any], said: Any) -> jax.Array:
        plan = self.plan
        given: dict[str, Any] = dict(lhs=lhs, rhs=rhs)
        if plan.operation == "all_gather_rhs_matmul":
            given["gather_dimension"] = self._dimension_of_rhs(plan.dimension)
        if plan.operation == "matmul_reduce_scatter":
            given["scatter_dimension"] = 1 if plan.dimension == len(plan.out) - 1 else 0
        choice = self._decide(given, epilogue, said)
        if choice.implementation == "fused" and self._is_behind(epilogue):
            return self._finished(self._run(given), epilogue)
        if choice.implementation == "xla" and plan.operation == "all_gather_rhs_matmul":
            # The same, but gathered here, so that what is gathered is known not to be kept.
            gathered = self._gathered(rhs, lhs, ((plan.dimension, plan.axes),))
            whole = dataclasses.replace(
                self, plan=ShardingPlan(plan.lhs, plan.rhs, plan.out), implementation="xla", config=None
            )
            return whole._run(dict(lhs=lhs, rhs=gathered) | epilogue)
        return self._run(given | epilogue)

    def _is_behind(self, epilogue: dict[str, Any]) -> bool:
        """Whether the fused kernel lacks a part of an epilogue, so that all of it is applied to the kernel's result."""
        return not epilogue.keys() - {"scalars"} <= _OPERATIONS[self.plan.operation][1]

    def _decide(self, given: dict[str, Any], epilogue: dict[str, Any], said: Any) -> Explanation:
        inside = {} if self._is_behind(epilogue) else epilogue
        choice = call.explain(_OPERATIONS[self.plan.operation][0], **given, **inside, **self._keywords)
        if said is not None:
            said.append(choice)
        return choice

    def _run(self, given: dict[str, Any]) -> Any:
        return call.run(_OPERATIONS[self.plan.operation][0], **given, **self._keywords)

    @property
    def _keywords(self) -> dict[str, Any]:
        axes = self.plan.axes
        return {
            **({"axis_name": axes[0] if len(axes) == 1 else axes} if axes else {}),
            "transpose_rhs": self.transpose_rhs,
            "preferred_element_type": self.out_dtype,
            "config": self.config,
            "implementation": self.implementation,
        }

    def _finished(self, out: jax.Array, epilogue: dict[str, Any]) -> jax.Array:
        """An epilogue that the fused kernel does not take, applied to its result: XLA makes one loop of it."""
        added = {
            f"{name}{plural}": (epilogue[name],)
            for name, plural in (("bias", "es"), ("addend", "s"))
            if name in epilogue
        }
        operands = Operands(out, (out,), **added)
        wide = out.astype(accumulator(out.dtype))
        applied = self.activation and functools.partial(self.activation, scalars=epilogue["scalars"])
        return by_xla.finish((wide,), operands, self.out_dtype, applied)[0]

    # --- The weights ---

    def _dimension_of_rhs(self, dimension: int) -> int:
        """Of [k, n], as it lies in memory."""
        return 1 - dimension if self.transpose_rhs else dimension

    def _gathered(self, rhs: jax.Array, lhs: jax.Array, gathers: Any) -> jax.Array:
        """Weights gathered by XLA."""
        if not gathers:
            return rhs
        # Typed as they will be multiplied: so their cotangent is scattered before it is summed over other axes, and
        # the product takes what was gathered as it is.
        rhs = varying(rhs, sorted(axes_of(lhs)))
        for dimension, axes in gathers:
            rhs = lax.all_gather(rhs, axes, axis=self._dimension_of_rhs(dimension), tiled=True)
        common = {axis for _, axes in gathers for axis in axes} - axes_of(lhs)
        return same_along(rhs, sorted(common))

    # --- Leading dimensions ---

    @property
    def _first_of_rows(self) -> int | None:
        """The first of the leading dimensions that are taken as rows, since it is gathered or scattered; else None."""
        plan, rows = self.plan, len(self.plan.lhs) - 2
        is_of_rows = plan.operation in ("all_gather_lhs_matmul", "matmul_reduce_scatter") and plan.dimension < rows
        return plan.dimension if is_of_rows else None

    def _fold_addend(self, addend: jax.Array, lhs_shape: tuple[int, ...]) -> jax.Array:
        first = self._first_of_rows
        if first is not None and addend.ndim < len(lhs_shape):
            leading = list(lhs_shape[:-2])
            leading[first] = self._size_of_result(leading[first])
            addend = jnp.broadcast_to(addend, (*leading, *addend.shape))
        return _fold(addend, first)

    def _size_of_result(self, size: int) -> int:
        """Of the dimension that is gathered or scattered."""
        devices = math.prod(lax.axis_size(axis) for axis in self.plan.axes)
        return size * devices if self.plan.operation == "all_gather_lhs_matmul" else size // devices

    def _unfold(self, out: jax.Array, lhs_shape: tuple[int, ...]) -> jax.Array:
        first = self._first_of_rows
        if first is None:
            return out
        rows = list(lhs_shape[:-1])
        rows[first] = self._size_of_result(rows[first])
        return out.reshape(*rows, out.shape[-1])


def _fold(x: jax.Array, first: int | None) -> jax.Array:
    """With the dimensions from `first` to the rows as rows: a part of the first one is then a block of them."""
    return x if first is None else x.reshape(*x.shape[:first], math.prod(x.shape[first:-1]), x.shape[-1])


@functools.cache
def _saves_all_but_gathers(axes: frozenset[str]) -> Callable[..., bool]:
    """A policy of `jax.checkpoint`: everything is kept but what was gathered along these axes."""

    def saves(primitive: Any, *_: Any, **parameters: Any) -> bool:
        # (What comes of `same_along` is what it was given.)
        if primitive is lax.all_gather_p:
            return not axes.intersection(parameters["axis_name"])
        return primitive is not same_along_p

    return saves
