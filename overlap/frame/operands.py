"""What goes into a product, in the one form that all operations bring a call into.

A product computes this, without the parts that it is not given:

    out[i] = activation(row_scale · (lhs @ rhs[i]) · column_scale[i] + bias[i] + addend[i])

Operands of 8 bits may have scales of blocks: each 32 elements along k are then multiplied by one before the product.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from overlap.choice.choose import choose_config
from overlap.frame import arguments
from overlap.frame.activation import Activation
from overlap.kernels import epilogue
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.target import Target

if TYPE_CHECKING:
    from overlap.frame.operation import Operation

F32 = jnp.dtype(jnp.float32)
# Of each right operand, and the gathered left one if it is asked for.
Results = tuple[tuple[jax.Array, ...], jax.Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a product on one device; None where there is nothing.

    Attributes:
      lhs: [(batch,) m, k], or [(batch,) k, m] if transposed.
      rhs_list: the right operands, [(batch,) k, n] each, or [(batch,) n, k] if transposed.
      row_scale: [(batch,) m] in f32.
      column_scales: [n] in f32 for each right operand.
      biases: [n] in f32 for each right operand, added to each row.
      addends: [(batch,) m, n] for each right operand, added to the product.
      scalars: what the activation captures, each of a dtype of its own.
      lhs_block_scale: as `lhs`, with k / 32 in place of k.
      rhs_block_scales: likewise for each right operand; both or neither.
    """

    lhs: Any
    rhs_list: tuple[Any, ...]
    row_scale: Any = None
    column_scales: tuple[Any, ...] | None = None
    biases: tuple[Any, ...] | None = None
    addends: tuple[Any, ...] | None = None
    scalars: tuple[Any, ...] = ()
    lhs_block_scale: Any = None
    rhs_block_scales: tuple[Any, ...] | None = None

    @property
    def matrices(self) -> Operands:
        """The product alone, without what belongs to its epilogue."""
        scales = {name: getattr(self, name) for name in ("lhs_block_scale", "rhs_block_scales")}
        return Operands(self.lhs, self.rhs_list, **scales)

    @property
    def has_epilogue(self) -> bool:
        """Whether anything is done to the product but for an activation."""
        return any(x is not None for x in (self.row_scale, self.column_scales, self.biases, self.addends))

    @property
    def is_scaled(self) -> bool:
        """Whether the product has scales."""
        return self.row_scale is not None or self.column_scales is not None

    @property
    def is_block_scaled(self) -> bool:
        """Whether the operands have scales of blocks."""
        return self.lhs_block_scale is not None

    def of_one(self, index: int) -> Operands:
        """Those of one right operand."""
        rhs, *of_rhs = self.of_each[index]
        scales, biases, addends = (None if x is None else (x,) for x in of_rhs)
        blocks = self.rhs_block_scales and (self.rhs_block_scales[index],)
        of_rhs = dict(column_scales=scales, biases=biases, addends=addends, rhs_block_scales=blocks)
        return dataclasses.replace(self, rhs_list=(rhs,), **of_rhs)

    @property
    def of_each(self) -> list[tuple[Any, Any, Any, Any]]:
        """For each right operand: itself, its column scale, bias and addend."""
        nothing = (None,) * len(self.rhs_list)
        columns = [x or nothing for x in (self.column_scales, self.biases, self.addends)]
        return list(zip(self.rhs_list, *columns, strict=True))


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """What is static about a product.

    Attributes:
      operation: which one it is, with what is special about this call of it.
      layouts: how the operands lie in memory.
      out_dtype: of the results.
      target: the device.
      config: the fused kernel's sizes; None: by XLA.
      activation: of f32 values; None for none.
      insists: whether the caller asked for the fused kernel, so that XLA may not run in its place.
    """

    operation: Operation
    layouts: OperandLayouts
    out_dtype: Any
    target: Target
    config: Config | None
    activation: Activation | None = None
    insists: bool = False

    def applied(self, operands: Operands) -> Callable[[jax.Array], jax.Array] | None:
        """The activation with the scalars that it captures, as JAX sees it; None for none."""
        activation = self.activation
        return None if activation is None else lambda values: activation(values, operands.scalars)

    @property
    def program(self) -> epilogue.Program | None:
        """What a kernel computes of the activation; None for none."""
        return None if self.activation is None else self.activation.program

    def computed(self, operands: Operands) -> Callable[[jax.Array], jax.Array] | None:
        """The activation by that program, which has no rules of derivatives; None for none."""
        program = self.program
        if program is None:
            return None
        scalars = [x.astype(dtype) for x, dtype in zip(operands.scalars, program.scalars, strict=True)]
        return lambda values: program(values, scalars)

    def types(self, operands: Operands, m: int, out_dtype: Any = None, **more: Any) -> OperandTypes:
        """What the mainloop must know of the operands; `m`: of how many rows a tile may take some."""
        dtypes = operands.lhs.dtype, operands.rhs_list[0].dtype, jnp.dtype(out_dtype or self.out_dtype)
        has_addend, scaled = operands.addends is not None, operands.is_block_scaled
        return OperandTypes(m, *dtypes, self.layouts, addend=has_addend, block_scaled=scaled, **more)

    def vectors(self, operands: Operands, row_scale: Any = None) -> epilogue.Vectors:
        """What the epilogue reads, filled up to whole tiles; `row_scale` is so already."""
        assert self.config is not None
        _, unit = self.config.cluster_tile
        scales, biases = epilogue.filled(operands.column_scales, unit), epilogue.filled(operands.biases, unit)
        return epilogue.Vectors(row_scale, scales, biases, epilogue.packed(operands.scalars, self.program))


def accumulator(dtype: Any) -> jnp.dtype:
    """The dtype in which products of operands are summed, and everything behind them is computed."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32)


def sizes(operands: Operands, layouts: OperandLayouts) -> tuple[int | None, int, tuple[int, ...], int]:
    """Batch (None if no operand has that dimension), m, n of each right operand, and k."""
    m, k = layouts.m_k(operands.lhs.shape)
    widths = tuple(layouts.k_n(rhs.shape)[1] for rhs in operands.rhs_list)
    blocks = (operands.lhs_block_scale, *(operands.rhs_block_scales or ()))
    ranks = [(x, 2) for x in (operands.lhs, *operands.rhs_list, *(operands.addends or ()), *blocks)]
    if operands.row_scale is not None:
        ranks.append((operands.row_scale, 1))
    batches = {x.shape[0] for x, rank in ranks if x is not None and len(x.shape) > rank}
    return next(iter(batches), None), m, widths, k


def as_rows(operands: Operands, layouts: OperandLayouts) -> Operands:
    """Without leading dimensions, where they can be more rows: tiles are then full of them. Arrays may be types."""
    lhs, (rhs,), rows = operands.lhs, operands.rhs_list, operands.row_scale
    (addend,) = operands.addends or (None,)
    of_rhs = (rhs, *(operands.rhs_block_scales or ()))
    if len(lhs.shape) == 2 or layouts.transpose_lhs or any(len(x.shape) > 2 for x in of_rhs):
        return operands
    if addend is not None and len(addend.shape) == 2:
        return operands
    if rows is not None:
        rows = arguments.each(lambda x: jnp.broadcast_to(x, lhs.shape[:-1]), rows)
    blocks = operands.lhs_block_scale
    if blocks is not None:
        blocks = arguments.each(lambda x: jnp.broadcast_to(x, (*lhs.shape[:-1], x.shape[-1])), blocks)

    def folded(x: Any, *last: int) -> Any:
        shape = math.prod(lhs.shape[:-1]), *last
        return None if x is None else arguments.each(lambda x: x.reshape(shape), x)

    return dataclasses.replace(
        operands, lhs=folded(lhs, lhs.shape[-1]), row_scale=folded(rows),
        addends=None if addend is None else (folded(addend, addend.shape[-1]),),
        lhs_block_scale=None if blocks is None else folded(blocks, blocks.shape[-1]),
    )  # fmt: skip


def in_f32(operands: Operands, plan: LaunchPlan) -> LaunchPlan:
    """The plan of the same without the activation and in f32; its `config` is None if no kernel can do that.

    f32 results take more shared memory and registers, so the configuration of the call may not do. Arrays may be types.
    """
    problem, config = plan.operation.problem(operands, plan.layouts, F32), plan.config
    assert config is not None
    if not problem.accepts(config, plan.target):
        config, _ = choose_config(problem, plan.target)
    if not problem.accepts(config, plan.target):
        config = None
    return dataclasses.replace(plan, activation=None, out_dtype=F32, config=config)
