"""What an operation moves between devices before and after its product: *move · product · move*.

A move says what XLA does in the place of a kernel, what a gradient does (the transpose), and which sizes come out.
Gathers move operands, before the product. Scatters and sums move the product, after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from overlap.frame.operands import Operands, summed_as
from overlap.frame.signatures import Leaf
from overlap.kernels.operations import Dimension, OperandLayouts
from overlap.kernels.varying import axes_of, part_of, same_along, types_tell, varying
from overlap.primitives import PeerGroup

_ONCE = MappingProxyType({"m": 1, "n": 1, "k": 1})


class Move:
    """Moves nothing. The other moves say what they do instead.

    Attributes:
      moves: whether anything moves.
      takes_pairs: whether several products, of as many pairs of operands, may be added before the move.
    """

    moves = False
    takes_pairs = False

    # --- Sizes ---

    @property
    def factors(self) -> Mapping[str, int]:
        """How many times the size of a shard the product of one device has, in m, n and k.

        The shard is that of `lhs` for m, and that of `rhs` for n and k.
        """
        return _ONCE

    @property
    def summed_over(self) -> int:
        """How many devices' products are summed."""
        return 1

    def result_shape(self, name: str, m: int, n: int) -> tuple[int, int]:
        """Rows and columns that a device keeps of a product of these sizes. `name`: the operation, for messages.

        Raises:
          ValueError: the devices cannot have equal blocks of the result.
        """
        return m, n

    # --- Before the product, by XLA ---

    def typed(self, operands: Operands) -> Operands:
        """The operands, typed as varying along the axes of the kernel's peers (`kernels/varying.py`)."""
        return operands

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        """The operands of the product that one device computes."""
        return operands

    def scattered(
        self,
        cotangents: Operands,
        d_kept: jax.Array | None,
        operands: Operands,
        wanted: Operands,
        layouts: OperandLayouts,
    ) -> Operands:
        """The operands' cotangents, given those of the gathered operands: the transpose of `gathered`.

        Args:
          cotangents: of the gathered operands.
          d_kept: the cotangent of the gathered left operand, if it is a result; else None.
          operands: the operands, before they are gathered.
          wanted: which cotangents are wanted, as for `linear.linear_map`.
          layouts: how the operands lie in memory.
        """
        return cotangents

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array:
        """The gathered left operand as a result, typed as the same on all devices of the group."""
        return gathered_lhs

    # --- After the product, by XLA ---

    def sent_as(self, out_dtype: DTypeLike) -> jnp.dtype:
        """The dtype in which products travel, for results of `out_dtype`."""
        return jnp.dtype(out_dtype)

    def reduced(self, product: jax.Array) -> jax.Array:
        """This device's part of the sum of all devices' products."""
        return product

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        """The cotangent of a product from that of this device's part of the result: the transpose of `reduced`."""
        return cotangent

    def gathered_passenger(self, operands: Operands) -> jax.Array | None:
        """The rows of all devices' `Operands.passenger`, if there is one."""
        return None

    def scattered_passenger(self, d_gathered: jax.Array | None, wanted: Operands) -> jax.Array | None:
        """The cotangent of the passenger: the transpose of `gathered_passenger`."""
        return None


NOTHING = Move()


@dataclasses.dataclass(frozen=True)
class Gather(Move):
    """Gathers the shards of an operand: of the left one along its rows (m), or of the right one along n or k."""

    along: Dimension
    group: PeerGroup

    moves = True

    @property
    def factors(self) -> Mapping[str, int]:
        return {**_ONCE, self.along: self.group.size}

    def result_shape(self, name: str, m: int, n: int) -> tuple[int, int]:
        return m * self.factors["m"], n * self.factors["n"]

    def typed(self, operands: Operands) -> Operands:
        if self.along == "m":
            return dataclasses.replace(operands, lhs=varying(operands.lhs, self.group.names))
        rhs_list = tuple(varying(rhs, self.group.names) for rhs in operands.rhs_list)
        return dataclasses.replace(operands, rhs_list=rhs_list)

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        return self._move_shards(operands, layouts, self._gather)

    def scattered(
        self,
        cotangents: Operands,
        d_kept: jax.Array | None,
        operands: Operands,
        wanted: Operands,
        layouts: OperandLayouts,
    ) -> Operands:
        if d_kept is not None and wanted.lhs is not None:
            # The cotangent of the gathered operand may be typed as the same on all devices. Then each device takes its
            # share of that cotangent.
            axes = axes_of(operands.lhs, *operands.rhs_list, cotangents.lhs)
            d_lhs = cotangents.lhs + part_of(d_kept.astype(jnp.float32), axes)
            cotangents = dataclasses.replace(cotangents, lhs=d_lhs)

        def as_sent(x: jax.Array | None, dtype: Leaf) -> jax.Array | None:
            # Cotangents that are summed over devices are sent in the result's dtype, unless that has 8 bits: sums of
            # 8-bit values are too inexact. Those of float16 could overflow.
            return None if x is None else x.astype(summed_as(dtype) if dtype.itemsize > 1 else jnp.bfloat16)

        if self.along == "m":
            cotangents = dataclasses.replace(cotangents, lhs=as_sent(cotangents.lhs, wanted.lhs))
        else:
            rhs_list = tuple(map(as_sent, cotangents.rhs_list, wanted.rhs_list))
            cotangents = dataclasses.replace(cotangents, rhs_list=rhs_list)
        return self._move_shards(cotangents, layouts, self._scatter)

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array:
        # Along other mesh axes its type varies as the type of `lhs` does.
        return same_along(gathered_lhs, {*self.group.names, *(axes_of(gathered_lhs) - axes_of(lhs))})

    def _move_shards(self, operands: Operands, layouts: OperandLayouts, move: Callable[[Leaf, int], Leaf]) -> Operands:
        """Applies `move(array, dimension)` to all sharded arrays; `dimension` is negative: -1 is the last one."""
        if self.along == "m":
            rows = -1 if layouts.transpose_lhs else -2
            # `move` returns None for None.
            row_scale = move(operands.row_scale, -1)
            return dataclasses.replace(operands, lhs=move(operands.lhs, rows), row_scale=row_scale)
        is_last = (self.along == "n") != layouts.transpose_rhs
        rhs_list = tuple(move(rhs, -1 if is_last else -2) for rhs in operands.rhs_list)
        scales = operands.column_scales
        if self.along == "n" and scales is not None:
            scales = tuple(move(x, -1) for x in scales)
        return dataclasses.replace(operands, rhs_list=rhs_list, column_scales=scales)

    def _gather(self, x: Leaf, dimension: int) -> Leaf:
        if x is None or x.shape[dimension] == 0:  # XLA rejects a gather of an empty dimension.
            return x
        return lax.all_gather(x, self.group.axis_name, axis=x.ndim + dimension, tiled=True)

    def _scatter(self, x: Leaf, dimension: int) -> Leaf:
        if x is None or x.shape[dimension] == 0:
            return x
        return lax.psum_scatter(x, self.group.axis_name, scatter_dimension=x.ndim + dimension, tiled=True)


@dataclasses.dataclass(frozen=True)
class Sum(Move):
    """Sums the products of all devices. `along`: each device keeps its block of rows (m) or columns (n); "": all."""

    along: Dimension
    group: PeerGroup

    moves = True
    takes_pairs = True

    @property
    def summed_over(self) -> int:
        return self.group.size

    def typed(self, operands: Operands) -> Operands:
        # All operands may be typed as the same on all devices. The parts differ all the same, so the kernel's results
        # must be typed as varying: they are if one operand is.
        return dataclasses.replace(operands, lhs=varying(operands.lhs, self.group.names))

    def result_shape(self, name: str, m: int, n: int) -> tuple[int, int]:
        if not self.along:
            return m, n
        size = self.group.size
        scattered_size = {"m": m, "n": n}[self.along]
        if scattered_size % size:
            what = "rows of `lhs`" if self.along == "m" else "columns of `rhs`"
            raise ValueError(
                f"`{name}` gives each of the {size} devices the same number of {what}, got {self.along}="
                f"{scattered_size}: pad it to a multiple of {size}"
            )
        return (m // size, n) if self.along == "m" else (m, n // size)

    def sent_as(self, out_dtype: DTypeLike) -> jnp.dtype:
        # Not as float16, in which sums could overflow.
        return summed_as(out_dtype)

    def _dimension(self, product: jax.Array) -> int:
        return product.ndim - (2 if self.along == "m" else 1)

    def reduced(self, product: jax.Array) -> jax.Array:
        if not self.along:
            return lax.psum(varying(product, self.group.names), self.group.axis_name)
        if self.group.size == 1:
            return product
        product = varying(product, self.group.names)
        if product.shape[self._dimension(product)] == 0:
            return product
        dimension = self._dimension(product)
        return lax.psum_scatter(product, self.group.axis_name, scatter_dimension=dimension, tiled=True)

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        if self.along and self.group.size == 1:
            return cotangent
        if self.along:
            return lax.all_gather(cotangent, self.group.axis_name, axis=self._dimension(cotangent), tiled=True)
        # As in jax's own transpose of `psum`. With check_vma=True, types say where values vary: the cotangent of the
        # sum is the same on all devices, and is the cotangent of each part. With check_vma=False, each device has a
        # share of the cotangent, and the shares must be summed.
        if types_tell(self.group.names[0]):
            return varying(cotangent, self.group.names)
        return lax.psum(cotangent, self.group.axis_name)

    def gathered_passenger(self, operands: Operands) -> jax.Array | None:
        rows = operands.passenger
        return rows if rows is None else lax.all_gather(rows, self.group.axis_name, axis=rows.ndim - 2, tiled=True)

    def scattered_passenger(self, d_gathered: jax.Array | None, wanted: Operands) -> jax.Array | None:
        if wanted.passenger is None or d_gathered is None:
            return None
        dimension = d_gathered.ndim - 2
        return lax.psum_scatter(d_gathered, self.group.axis_name, scatter_dimension=dimension, tiled=True)
