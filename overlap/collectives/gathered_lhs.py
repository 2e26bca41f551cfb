"""What a product with a gathered left operand is given: checked, and brought into the kernel's form.

    out[i] = row_scale · (gathered(lhs) @ rhs[i]) · column_scale[i]

The left operand may have leading dimensions, which are folded into one; there may be several right operands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from overlap.choice.problem import Problem
from overlap.frame import scales, sharded
from overlap.kernels import arguments, hopper
from overlap.kernels.config import Config
from overlap.kernels.staging import Forms
from overlap.kernels.target import Target
from overlap.kernels.varying import axes_of, same_along
from overlap.primitives import Ring
from overlap.primitives.integers import in_32_bits
from overlap.single_gpu import matmul, product

_XLA = 'implementation="xla"'


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What goes into the products on one device; None where there is nothing.

    Attributes:
      lhs: [(batch,) m_shard, k].
      sides: the right operands, [k, n] each, or [n, k] if transposed.
      row_scale: [(batch,) m_shard] in f32, of this device's rows.
      column_scales: [n] in f32 for each right operand.
    """

    lhs: Any
    sides: tuple[Any, ...]
    row_scale: Any = None
    column_scales: tuple[Any, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about the products.

    Attributes:
      ring: along which the left operand is gathered.
      forms: how the operands lie in memory.
      out_dtype: of all results.
      config: the fused kernel's sizes; None: by XLA.
      target: the device.
      returns_gathered: whether the gathered left operand is a result as well.
      transport: how the shards travel in the fused kernel; empty where they do not.
      insists: whether the caller asked for the fused kernel, so that XLA may not run in its place.
    """

    ring: Ring
    forms: Forms
    out_dtype: Any
    config: Config | None
    target: Target
    returns_gathered: bool = False
    transport: str = ""
    insists: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call, and what leads back to the caller's form.

    Attributes:
      operands: in the kernel's form.
      forms: how they lie in memory.
      out_dtype: of all results.
      batch: the leading dimensions of the left operand.
      container: list or tuple if the caller gave several right operands, else None.
    """

    operands: Operands
    forms: Forms
    out_dtype: Any
    batch: tuple[int, ...]
    container: type | None

    @property
    def sizes(self) -> tuple[int, int, tuple[int, ...], int]:
        """Batch (1 if there is none), m_shard, n of each right operand, and k."""
        m_shard, k = self.operands.lhs.shape[-2:]
        widths = tuple(side.shape[0 if self.forms.transpose_rhs else 1] for side in self.operands.sides)
        return math.prod(self.batch), m_shard, widths, k

    def problem(self, op: str, devices: int) -> Problem:
        """The call's sizes, as the choice of a configuration sees them: the right operands as one."""
        batch, m_shard, widths, k = self.sizes
        dtypes = self.operands.lhs.dtype.name, self.out_dtype.name
        layout = "nt" if self.forms.transpose_rhs else "nn"
        return Problem(op, m_shard, sum(widths), k, *dtypes, devices=devices, layout=layout, batch=max(batch, 1))

    def check(self, ring: Ring, config: Config, target: Target, *, forwards: bool = False) -> None:
        """Whether the fused kernel can serve the call. Raises as `Config.check` does.

        `forwards`: the shards are passed on from the operand tiles instead of being pulled in chunks.
        """
        (batch, m_shard, widths, k), lhs, sides = self.sizes, self.operands.lhs, self.operands.sides
        if batch < 1:
            raise NotImplementedError(
                f"the fused kernel needs leading dimensions of at least 1, got {self.batch} in `lhs`: use "
                'implementation="xla"'
            )
        if len({side.dtype for side in sides}) > 1:
            raise NotImplementedError(
                "the fused kernel needs all matrices of `rhs` to have the same dtype, got "
                f'{", ".join(side.dtype.name for side in sides)}: cast them, or use implementation="xla"'
            )
        for index, n in enumerate(widths):
            try:
                config.check(
                    m=m_shard, n=n, k=k, dtype=lhs.dtype, out_dtype=self.out_dtype, target=target, pulls=ring.size > 1,
                    forwards=forwards, m_name="m_shard", transpose_rhs=self.forms.transpose_rhs,
                )  # fmt: skip
            except NotImplementedError as cannot:
                raise NotImplementedError(f"{self._which(index)}{cannot}") from None

    def require_whole(self) -> None:
        """Whether each device holds its operands, whatever the enclosing `shard_map` leaves to XLA's partitioner.

        Raises as `overlap.frame.sharded` does.
        """
        sharded.require_rest_of_one()
        sides = {self._name(index): side for index, side in enumerate(self.operands.sides)}
        sharded.require_whole({"lhs": self.operands.lhs} | sides)

    def _name(self, index: int) -> str:
        return "rhs" if self.container is None else f"rhs[{index}]"

    def _which(self, index: int) -> str:
        return "" if self.container is None else f"`{self._name(index)}`: "

    def restore(self, outs: tuple[jax.Array, ...], gathered: jax.Array | None) -> Any:
        """The results as the caller expects them."""
        shaped = [out.reshape(*self.batch, *out.shape[-2:]) for out in outs]
        result = shaped[0] if self.container is None else self.container(shaped)
        return result if gathered is None else (result, gathered.reshape(*self.batch, *gathered.shape[-2:]))


def normalize(
    lhs: Any, rhs: Any, *, lhs_scale: Any = None, rhs_scale: Any = None, transpose_rhs: bool = False,
    preferred_element_type: Any = None,
) -> Call:  # fmt: skip
    """Checks the arguments and brings them into the kernel's form; arrays may be `jax.ShapeDtypeStruct`s."""
    lhs = arguments.array("lhs", lhs)
    container = type(rhs) if type(rhs) in (list, tuple) else None
    if container is not None and not rhs:
        raise ValueError(f"`rhs` must hold at least one matrix, got an empty {container.__name__}: name the weights")
    names = ["rhs"] if container is None else [f"rhs[{index}]" for index in range(len(rhs))]
    sides = [arguments.array(*pair) for pair in zip(names, (rhs,) if container is None else rhs, strict=True)]
    forms = Forms(transpose_rhs=arguments.flag("transpose_rhs", transpose_rhs))
    out_dtype: Any = None
    for index, side in enumerate(sides):
        try:
            out_dtype = matmul.check_operands(lhs, side, preferred_element_type, forms)
            if len(side.shape) != 2:
                raise ValueError(
                    f"`rhs` must have 2 dimensions, got {len(side.shape)} (shape {tuple(side.shape)}): reshape it"
                )
        except ValueError as wrong:
            if container is None:
                raise
            raise ValueError(f"`rhs[{index}]` of {len(sides)} right operands: {wrong}") from None
    *batch, m_shard, k = lhs.shape
    if not m_shard:
        raise ValueError(f"`lhs` must have at least one row per shard to gather, got shape {tuple(lhs.shape)}")
    widths = [side.shape[0 if forms.transpose_rhs else 1] for side in sides]
    wide = product.accumulator(lhs.dtype)
    row_scale, column_scales = scales.normalize(
        lhs_scale, rhs_scale, (*batch, m_shard), widths[0] if container is None else widths, wide, gathered=True
    )
    folded = (math.prod(batch),) if batch else ()
    operands = Operands(
        arguments.each(lambda x: x.reshape(*folded, m_shard, k), lhs), tuple(sides),
        None if row_scale is None else arguments.each(lambda x: x.reshape(*folded, m_shard), row_scale),
        None if column_scales is None else tuple(column_scales),
    )  # fmt: skip
    return Call(operands, forms, out_dtype, tuple(batch), container)


def filled_columns(column_scales: Any, config: Config) -> Any:
    """The column scales of all right operands, each filled up to whole tiles: a vector."""
    if column_scales is None:
        return None
    return jnp.concatenate([jnp.pad(x, (0, -x.shape[0] % config.cluster_tile[1])) for x in column_scales])


@in_32_bits
def launch(kernel: Callable[[Any, Any], None], inputs: Operands, out_types: Any, plan: Plan, name: str, *,
           told: bool, reads_scales: bool = False) -> Any:  # fmt: skip
    """Runs `kernel(inputs, outputs)` on references to the operands and to outputs of these types; returns those.

    `told`: whether it is told its peers' addresses (`Transport.told`). `reads_scales`: whether it reads those of the
    peers' rows as well as the rows.
    """
    assert plan.config is not None
    leaves, structure = jax.tree.flatten(inputs)
    types, out_structure = jax.tree.flatten(out_types)

    def body(*refs: Any) -> None:
        kernel(
            jax.tree.unflatten(structure, refs[: len(leaves)]), jax.tree.unflatten(out_structure, refs[len(leaves) :])
        )

    # Among the leaves, in the order of the fields of `Operands`.
    of_rows = (0, 1 + len(inputs.sides)) if reads_scales else (0,)
    results = hopper.launch(
        body, out_type=tuple(types), num_ctas=plan.target.num_cores, cluster=plan.config.cluster, name=name,
        peers_read=of_rows if told else (),
    )(*leaves)  # fmt: skip
    return jax.tree.unflatten(out_structure, results)


def same_on_ring(gathered: jax.Array | None, lhs: jax.Array, ring: Ring) -> jax.Array | None:
    """The gathered operand, typed as what it is: the same on all devices of the ring, and elsewhere as the operand."""
    return None if gathered is None else same_along(gathered, {*ring.names, *(axes_of(gathered) - axes_of(lhs))})


def why_not_folded(is_batched: Operands, axis_size: int) -> str | None:
    """Why what `vmap` adds in front of some operands does not fold into the batch of the left one; None if it does."""
    if axis_size < 1:
        return f"the fused kernel takes `jax.vmap` over at least one element, got {axis_size}: use {_XLA}"
    if any(is_batched.sides) or any(is_batched.column_scales or ()):
        return (
            "the fused kernel takes `jax.vmap` over `lhs` and an `lhs_scale` with one value per row only, and here "
            "`rhs`, `rhs_scale` or a scalar `lhs_scale` is mapped as well: pass several right operands as a list, one "
            f"value per row, or use {_XLA}"
        )
    return None


def fold(operands: Operands, is_batched: Operands, axis_size: int) -> Operands:
    """The operands with what `vmap` adds in front of some of them folded into the batch of the left one."""

    def in_front(x: Any, batched: bool, kept: int) -> Any:
        x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
        return x.reshape(-1, *x.shape[x.ndim - kept :])

    rows = operands.row_scale
    return dataclasses.replace(
        operands, lhs=in_front(operands.lhs, is_batched.lhs, 2),
        row_scale=None if rows is None else in_front(rows, is_batched.row_scale, 1),
    )  # fmt: skip
