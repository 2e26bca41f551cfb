"""The operands of a product, in the common form into which `normalize` brings the arguments of every operation.

The product is computed as follows. Terms and factors that a call does not give are left out:

    out[i] = activation(row_scale · (lhs @ rhs[i]) · column_scale[i] + bias[i] + addend[i])

An activation may also take the values of all right operands, and make one result of them (`Operation.combines`).
Operations that sum over devices may also sum the products of further pairs (`Operands.more_lefts`, `more_rights`):
there lhs @ rhs is the sum of all of them. 8-bit operands may have scales of blocks: before the product, each 32
elements along k are multiplied by their scale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from overlap.frame import arguments
from overlap.frame.signatures import Leaf
from overlap.kernels.operations import OperandLayouts

F32 = jnp.dtype(jnp.float32)
# How arrays are nested (`jax.tree_util.PyTreeDef`, which is no type to a type checker).
type Structure = Any
# What callers call the fields of `Operands`, where the names differ.
_GIVEN_AS = {
    "rhs_list": "rhs",
    "row_scale": "lhs_scale",
    "column_scales": "rhs_scale",
    "biases": "bias",
    "addends": "addend",
    "scalars": "activation",
    "lhs_block_scale": "lhs_scale",
    "rhs_block_scales": "rhs_scale",
    "more_lefts": "lhs",
    "more_rights": "rhs",
}
# A result for each right operand, and the gathered left operand if the caller asked for it, or the gathered passenger.
Results = tuple[tuple[jax.Array, ...], jax.Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """The arrays of a product on one device. A field is None if the call has no such array.

    Attributes:
      lhs: [(batch,) m, k], or [(batch,) k, m] if transposed.
      rhs_list: the right operands, [(batch,) k, n] each, or [(batch,) n, k] if transposed.
      row_scale: [(batch,) m] in f32.
      column_scales: for each right operand [n] in f32.
      biases: for each right operand [n] in f32, added to each row, or None if that operand has no bias.
      addends: for each right operand [(batch,) m, n], added to the product, or None if that operand has no addend.
      scalars: the scalars that the activation captures, of any dtypes.
      lhs_block_scale: the left operand's scales of blocks, shaped as `lhs`, but with k / 32 in place of k.
      rhs_block_scales: for each right operand its scales of blocks, shaped as it, but with k / 32 in place of k. Given
        if and only if `lhs_block_scale` is.
      more_lefts: left operands of further products, which are added to the first: [(batch,) m, k] each, as `lhs`.
      more_rights: their right operands, [k, n] each, as the first.
      group_sizes: int32 [groups], the rows of each group. `rhs_list` are then [groups, k, n] each, or [groups, n, k] if
        transposed, and vectors of columns are [groups, n]. There is no batch. None: the rows are no groups.
      passenger: [(batch,) rows, columns], of the dtype of `lhs`: an array that has no part in the product. The kernel
        gathers its rows meanwhile, since it leaves the links idle at first; the second of the `Results`.
    """

    lhs: Leaf
    rhs_list: tuple[Leaf, ...]
    row_scale: Leaf = None
    column_scales: tuple[Leaf, ...] | None = None
    biases: tuple[Leaf, ...] | None = None
    addends: tuple[Leaf, ...] | None = None
    scalars: tuple[Leaf, ...] = ()
    lhs_block_scale: Leaf = None
    rhs_block_scales: tuple[Leaf, ...] | None = None
    more_lefts: tuple[Leaf, ...] = ()
    more_rights: tuple[Leaf, ...] = ()
    group_sizes: Leaf = None
    passenger: Leaf = None

    @property
    def named(self) -> list[tuple[str, Leaf]]:
        """Each array that is given, after the name of the argument that it comes from."""
        with_fields = [(keystr(path[:1], simple=True), x) for path, x in tree_leaves_with_path(self)]
        return [(_GIVEN_AS.get(field, field), x) for field, x in with_fields]

    @property
    def matrices(self) -> Operands:
        """The operands of the product alone, without those of its epilogue."""
        scales = {name: getattr(self, name) for name in ("lhs_block_scale", "rhs_block_scales")}
        more = {"more_lefts": self.more_lefts, "more_rights": self.more_rights, "group_sizes": self.group_sizes}
        return Operands(self.lhs, self.rhs_list, **scales, **more)

    @property
    def lefts(self) -> tuple[Leaf, ...]:
        """The left operands of all products that are added."""
        return self.lhs, *self.more_lefts

    @property
    def rights(self) -> tuple[Leaf, ...]:
        """The right operands of all products that are added."""
        return self.rhs_list[0], *self.more_rights

    @property
    def pairs(self) -> list[tuple[Leaf, Leaf]]:
        """The operands of each product: one left operand with all right ones, or the pairs whose products are added."""
        rights = (*self.rhs_list, *self.more_rights)
        lefts = self.lefts if self.more_lefts else (self.lhs,) * len(rights)
        return list(zip(lefts, rights, strict=True))

    @property
    def has_epilogue(self) -> bool:
        """Whether the product has an epilogue, apart from an activation."""
        return any(x is not None for x in (self.row_scale, self.column_scales, self.biases, self.addends))

    @property
    def is_scaled(self) -> bool:
        """Whether the product has scales of rows or columns."""
        return self.row_scale is not None or self.column_scales is not None

    @property
    def is_block_scaled(self) -> bool:
        """Whether the operands have scales of blocks."""
        return self.lhs_block_scale is not None

    def for_rhs(self, index: int) -> Operands:
        """Returns the operands of the product with right operand `index`."""
        rhs, *vectors = self.per_rhs[index]
        scales, biases, addends = (None if x is None else (x,) for x in vectors)
        return dataclasses.replace(
            self,
            rhs_list=(rhs,),
            column_scales=scales,
            biases=biases,
            addends=addends,
            rhs_block_scales=self.rhs_block_scales and (self.rhs_block_scales[index],),
        )

    @property
    def per_rhs(self) -> list[tuple[Leaf, Leaf, Leaf, Leaf]]:
        """For each right operand: (rhs, column scale, bias, addend), with None for each of these that it lacks."""
        nothing = (None,) * len(self.rhs_list)
        columns = [x or nothing for x in (self.column_scales, self.biases, self.addends)]
        return list(zip(self.rhs_list, *columns, strict=True))


def rhs_names(container: type | None, count: int, name: str = "rhs") -> list[str]:
    """The right operands' names for messages: `rhs`, or `rhs[0]`, `rhs[1]`, … if the caller gave several."""
    return [name] if container is None else [f"{name}[{index}]" for index in range(count)]


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype in which sums and epilogues are computed, for operands of dtype `dtype`."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32)


def summed_as(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype in which XLA adds values of `dtype` over devices: float32 for float16, which could overflow."""
    return F32 if jnp.dtype(dtype) == jnp.float16 else jnp.dtype(dtype)


def to_rank(x: jax.Array, rank: int) -> jax.Array:
    """Returns `x` with dimensions of size 1 in front, so that it has `rank` dimensions.

    jax would add them itself, but the setting `jax_numpy_rank_promotion` may forbid that.
    """
    return lax.expand_dims(x, range(rank - x.ndim)) if x.ndim < rank else x


def can_fold(operands: Operands, layouts: OperandLayouts) -> bool:
    """Whether the leading dimension of the left operand can be folded into its rows. Arrays may be types."""
    addend, *_ = operands.addends or (None,)
    of_rhs = (*operands.rhs_list, *(operands.rhs_block_scales or ()), *operands.more_rights)
    if len(operands.lhs.shape) == 2 or layouts.transpose_lhs or any(len(x.shape) > 2 for x in of_rhs):
        return False
    return addend is None or len(addend.shape) > 2


def as_rows(operands: Operands, layouts: OperandLayouts) -> Operands:
    """Returns operands with leading dimensions folded into the rows if that is possible; else the operands as given.

    A tile can then have rows of several batch elements. Arrays may be types.
    """
    return folded(operands) if can_fold(operands, layouts) else operands


def folded(operands: Operands) -> Operands:
    """Returns operands with the leading dimensions of the left operand folded into its rows. Arrays may be types.

    Its scales, the addends and further left operands are folded alike.
    """
    spread = with_scales_of_all_rows(operands)
    rows = math.prod(operands.lhs.shape[:-1])

    def fold(x: Leaf, *last: int) -> Leaf:
        return None if x is None else arguments.each(lambda x: x.reshape(rows, *last), x)

    def fold_matrix(x: Leaf) -> Leaf:
        return None if x is None else fold(x, x.shape[-1])

    return dataclasses.replace(
        spread,
        lhs=fold_matrix(spread.lhs),
        row_scale=fold(spread.row_scale),
        addends=spread.addends and tuple(map(fold_matrix, spread.addends)),
        lhs_block_scale=fold_matrix(spread.lhs_block_scale),
        more_lefts=tuple(map(fold_matrix, spread.more_lefts)),
    )


def with_scales_of_all_rows(operands: Operands) -> Operands:
    """Returns operands whose left scales, of rows or of blocks, have all leading dimensions of the left operand.

    Arrays may be types.
    """
    leading = operands.lhs.shape[:-1]

    def spread(x: Leaf, *last: int) -> Leaf:
        return None if x is None else arguments.each(lambda x: jnp.broadcast_to(x, (*leading, *last)), x)

    blocks = operands.lhs_block_scale
    of_blocks = None if blocks is None else spread(blocks, blocks.shape[-1])
    return dataclasses.replace(operands, row_scale=spread(operands.row_scale), lhs_block_scale=of_blocks)
