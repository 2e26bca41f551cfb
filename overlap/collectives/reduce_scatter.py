"""What operations that sum products over the devices of a mesh axis have in common."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.collectives import scattered
from overlap.collectives.axis import require_peers, untried
from overlap.collectives.backward import backward
from overlap.frame import sharded
from overlap.frame.normalize import Call
from overlap.frame.operands import Operands, Plan, Results, sizes
from overlap.frame.operation import Operation
from overlap.kernels import limits
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.target import Target
from overlap.kernels.varying import varying
from overlap.primitives import Ring
from overlap.single_gpu.matmul import MATMUL

_XLA = 'use implementation="xla"'


@dataclasses.dataclass(frozen=True)
class ReduceScatter(Operation):
    """Products summed over the devices, of which each keeps a block of rows (m) or of columns (n).

    Attributes:
      ring: the devices.
      along: in which dimension of the product the sum is scattered.
    """

    ring: Ring
    along: Literal["m", "n"]

    reduces = True
    epilogue = frozenset({"lhs_scale", "rhs_scale", "bias", "activation", "addend"})
    batched_together = frozenset({"lhs"})

    @property
    def summed_over(self) -> int:
        return self.ring.size

    def result_shape(self, m: int, n: int) -> tuple[int, int]:
        size = self.ring.size
        scattered_size = {"m": m, "n": n}[self.along]
        if scattered_size % size:
            what = "rows of `lhs`" if self.along == "m" else "columns of `rhs`"
            raise ValueError(
                f"`{self.name}` gives each of the {size} devices the same number of {what}, got {self.along}="
                f"{scattered_size}: pad it to a multiple of {size}"
            )
        return (m // size, n) if self.along == "m" else (m, n // size)

    # --- The choice ---

    def problem(self, operands: Operands, layouts: OperandLayouts, out_dtype: Any) -> Problem:
        batch, m, (n,), k = sizes(operands, layouts)
        dtypes = operands.lhs.dtype.name, jnp.dtype(out_dtype).name
        op = self.name if self.along == "m" else f"{self.name}_{self.along}"
        return Problem(op, m, n, k, *dtypes, self.ring.size, layouts.name, max(batch or 1, 1))  # pyright: ignore[reportArgumentType]

    def circumstances(self, call: Call, mesh: Any) -> dispatch.Circumstances:
        def scratch_bytes(config: Config, target: Target) -> int:
            if self.ring.size == 1:
                return 0
            plan = Plan(self, call.layouts, call.out_dtype, target, config)
            return scattered.scratch_bytes(call.operands, plan, self.ring.size, self.along)

        return dispatch.Circumstances(untried=untried(self.ring, mesh), scratch_bytes=scratch_bytes)

    def check(self, call: Call, config: Config, target: Target, mesh: Any) -> None:
        operands, (batch, m, (n,), k) = call.operands, call.sizes
        if len(operands.rhs_list[0].shape) > 2:
            raise NotImplementedError(
                f"the fused kernel takes leading dimensions of `lhs` only, and `rhs` has {call.batch}: {_XLA}"
            )
        if batch == 0:
            raise NotImplementedError(
                f"the fused kernel needs leading dimensions of at least 1, got {call.batch} in `lhs`: {_XLA}"
            )
        (block_m, block_n), transport = self.result_shape(m, n), "push" if self.ring.size > 1 else ""
        names = {"m": "m", "n": "n", self.along: f"{self.along} / {self.ring.size}"}
        checked = limits.Sizes(
            block_m, block_n, k, operands.lhs.dtype, call.out_dtype, call.layouts, transport, names["m"], names["n"]
        )
        limits.check(checked, config, target)
        require_peers(self.ring, target, mesh)
        if mesh is None:
            sharded.require_rest_of_one()
            sharded.require_whole({"lhs": operands.lhs, "rhs": operands.rhs_list[0]})

    # --- The kernel ---

    def launch(self, operands: Operands, plan: Plan) -> Results:
        if self.ring.size == 1:
            return MATMUL.launch(operands, dataclasses.replace(plan, operation=MATMUL))
        out = scattered.launch(operands, plan, self.ring, self.along)
        return (out if operands.lhs.ndim > 2 else out[0],), None

    def typed(self, operands: Operands) -> Operands:
        # What the kernel is given may be the same on all devices; the result is not.
        return dataclasses.replace(operands, lhs=varying(operands.lhs, self.ring.names))

    def why_not_folded(self, is_batched: Operands, axis_size: int) -> str | None:
        if axis_size < 1:
            return f"the fused kernel takes `jax.vmap` over at least one element, got {axis_size}: {_XLA}"
        if any((*is_batched.rhs_list, *(is_batched.column_scales or ()))):
            return (
                "the fused kernel takes `jax.vmap` over `lhs`, an `lhs_scale` with one value per row and what follows "
                f"the sum, and here `rhs`, `rhs_scale` or a scalar `lhs_scale` is mapped: {_XLA}"
            )
        return None

    # --- The same by XLA, and the backward pass ---

    def reduced(self, product: jax.Array) -> jax.Array:
        if self.ring.size == 1:
            return product
        product = varying(product, self.ring.names)
        dimension = product.ndim - (2 if self.along == "m" else 1)
        if product.shape[dimension] == 0:
            return product
        return lax.psum_scatter(product, self.ring.axis_name, scatter_dimension=dimension, tiled=True)

    def spread_and_times(
        self, cotangent: jax.Array, rhs: jax.Array, dtype: Any, plan: Plan
    ) -> tuple[jax.Array, jax.Array] | None:
        # Each of the two operations is the other's backward pass.
        from overlap.collectives import all_gather_matmul

        if self.along != "m" or plan.layouts.transpose_lhs or cotangent.dtype != rhs.dtype or rhs.ndim > 2:
            return None
        gather = all_gather_matmul.AllGatherLhs(self.ring, "m", returns_gathered=True)
        return backward(gather, cotangent, rhs, dtype, plan)

    def spread(self, cotangent: jax.Array) -> jax.Array:
        if self.ring.size == 1:
            return cotangent
        dimension = cotangent.ndim - (2 if self.along == "m" else 1)
        return lax.all_gather(cotangent, self.ring.axis_name, axis=dimension, tiled=True)
