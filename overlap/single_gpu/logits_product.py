"""Products with the matrix of a vocabulary, whose results, the logits, are never stored.

    z = cap(lhs @ rhs + bias), one row for each token, one column for each entry of the vocabulary

    statistics   log Σ exp z for each row and block of columns, and z at the row's label: two f32 tables [blocks, rows];
                 if asked for, the share exp z has of its block's sum, in 16 bits
    cotangent    dz = (p · exp(z − lse) + q · [the column is the label]) · cap′: of a chunk of the columns, 16 bits
    summed       total + dz @ rhsᵀ of a chunk of the columns, in f32

Each block of 64 columns of a tile has an entry of its own in the tables, which XLA adds in a fixed order. So the sums
are the same in every run. The other two products read a chunk of the columns of `rhs` where it lies.

Shape legend: m: tokens; n: columns of the chunk; k: features.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from overlap.kernels import epilogue, hooks, limits
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import Config, tile_k
from overlap.kernels.grid import own_row
from overlap.kernels.hooks import ByKStep, Hooks, Tile, Values
from overlap.kernels.limits import EPILOGUE_COLUMNS
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.product_kernel import ProductKernel, Refs
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives.integers import ceil_div, in_32_bits, quotient
from overlap.primitives.types import GmemRef, Index

F32 = jnp.float32
NAME = "overlap_linear_cross_entropy"
# Stands for −∞ in columns that do not count. It is finite, so that a block of such columns makes no NaN.
FAR = -1e30
# For each row of some columns: the largest z, Σ exp(z − largest), and z at the label.
type _Part = tuple[jax.Array, jax.Array, jax.Array]
_LOG2_E = 1.4426950408889634
# So many columns an epilogue computes at a time. With jax 0.12 a kernel has fewer registers (docs/DESIGN.md).
WIDTH = 64 if jax.__version_info__ < (0, 12) else 32
# Whether there are registers to compute shares as well.
HAS_SHARES = WIDTH == EPILOGUE_COLUMNS
# The configurations that are tried for each kernel, the fastest on an H100 first.
_WIDE = Config(tile_m=128, tile_n=256, stages=4)
_NARROW = Config(tile_m=128, tile_n=128, stages=5)
_LEAST = Config(tile_m=128, tile_n=128, stages=2)
OF_STATISTICS = (Config(tile_m=128, tile_n=128, stages=6, schedule="pingpong"), _WIDE, _NARROW, _LEAST)
OF_COTANGENT = (_WIDE, _NARROW, _LEAST)
# The same, where the derivative of a soft cap needs registers as well.
OF_CAPPED_COTANGENT = OF_COTANGENT if WIDTH == EPILOGUE_COLUMNS else OF_COTANGENT[1:]
OF_SUM = (dataclasses.replace(_WIDE, order_minor="n", order_width=4), _NARROW, _LEAST)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What is static about the logits of a device.

    Attributes:
      transposed: whether the matrix is [vocabulary, features] instead of [features, vocabulary].
      soft_cap: c of cap(z) = c · tanh(z / c); None: cap(z) = z.
      is_cut: whether the last columns of the matrix may not belong to the vocabulary.
    """

    transposed: bool = False
    soft_cap: float | None = None
    is_cut: bool = False

    def size(self, w: GmemRef) -> int:
        """The number of the matrix's columns."""
        return w.shape[0] if self.transposed else w.shape[1]

    def capped(self, z: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns cap(z), and its derivative; None for a derivative of 1."""
        if self.soft_cap is None:
            return z, None
        t = jnp.tanh(z * (1 / self.soft_cap))
        return t * self.soft_cap, 1 - t * t


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Vectors with an entry for each token. Those after `labels` are for the cotangent, and none for the sum.

    Attributes:
      labels: the column of each token's label, int32; a negative number if the label is no column of this device.
      lse: log Σ exp z.
      of_sum, of_label: p and q, the cotangents of `lse` and of z at the label.
    """

    labels: GmemRef = None
    lse: GmemRef = None
    of_sum: GmemRef = None
    of_label: GmemRef = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logits:
    """The operands of a product.

    Attributes:
      x: [m, k]; of the sum dz, [m, columns of the chunk].
      w: the matrix, whole: [k, columns], or transposed.
      place: int32 [2]: the first column of the chunk, and how many columns belong to the vocabulary.
      rows: what the epilogue reads for each token.
      bias: [columns].
      total: f32 [m, k], to which the sum is added.
    """

    x: GmemRef
    w: GmemRef
    place: GmemRef
    rows: Rows = Rows()
    bias: GmemRef = None
    total: GmemRef = None


def in_whole_rows(columns: int, dtype: DTypeLike) -> int:
    """Returns columns for dz, at least so many, whose rows the copy engine can read."""
    unit = limits.TMA_ROW_BYTES // jnp.dtype(dtype).itemsize
    return ceil_div(columns, unit) * unit


def check(
    x: GmemRef, w: GmemRef, vocabulary: Vocabulary, columns: int, config: Config, target: Target, sums: bool = False
) -> OperandTypes:
    """Returns the types of a product, for a chunk of so many columns. Raises, as `limits.check` does, if none runs.

    `x` and `w` may be types. `sums`: the product is `summed`.
    """
    # The right operand of the sum is wᵀ: its rows run along what the sum contracts, unless w is transposed.
    layouts = OperandLayouts(transpose_rhs=vocabulary.transposed != sums)
    types = OperandTypes(x.shape[0], x.dtype, w.dtype, F32 if sums else x.dtype, layouts, addend=sums)
    of_tokens = ("the tokens", x.shape[0])
    of_features = ("H", x.shape[1])
    of_columns = "the columns of a chunk", in_whole_rows(columns, x.dtype)
    sizes = {"m": of_tokens, "n": of_features if sums else of_columns, "k": of_columns if sums else of_features}
    if config.swap_operands or max(config.stream_k, config.split_k, config.cluster) > 1:
        raise ValueError(
            "`config` must have swap_operands=False, and `stream_k`, `split_k` and `cluster` of 1, in "
            f"`linear_cross_entropy`, got {config}: leave them out"
        )
    limits.check(mainloop_of(target), types, sizes, config, target)
    if (row_bytes := w.shape[1] * w.dtype.itemsize) % limits.TMA_ROW_BYTES:
        raise NotImplementedError(
            f"the copy engine needs the rows of w to be multiples of {limits.TMA_ROW_BYTES} bytes, got {row_bytes}: "
            'pad them, and pass `vocabulary_size`, or use implementation="xla"'
        )
    return types


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the three products, with what is static about it."""

    vocabulary: Vocabulary
    config: Config
    target: Target

    @in_32_bits
    def statistics(self, given: Logits, keeps: bool = False) -> tuple[jax.Array, ...]:
        """Returns log Σ exp z, and z at the label or zero for a label that is no column: f32 [m] each.

        If it `keeps` them, it also returns shares of blocks, [m, columns as of `in_whole_rows`], of the dtype of x, and
        log Σ exp z of each block, f32 [blocks, m].
        """
        config = self.config
        m = given.x.shape[0]
        n = self.vocabulary.size(given.w)
        tiles = ceil_div(m, config.tile_m), ceil_div(n, config.tile_n)
        shape = tiles[1] * config.tile_n // EPILOGUE_COLUMNS, tiles[0] * config.tile_m
        table: GmemRef = jax.ShapeDtypeStruct(shape, F32)
        shares: GmemRef = jax.ShapeDtypeStruct((m, in_whole_rows(n, given.x.dtype)), given.x.dtype)
        lse, at_label, *kept = self._launched(given, n, (table, table, shares) if keeps else (table, table))
        of_blocks = lse[: ceil_div(n, EPILOGUE_COLUMNS), :m]
        found = jax.nn.logsumexp(of_blocks, axis=0), at_label[:, :m].sum(axis=0)
        return (*found, *kept, of_blocks) if keeps else found

    @in_32_bits
    def cotangent(self, given: Logits, columns: int) -> jax.Array:
        """Returns the cotangent of the product, before `cap`, of so many columns from `place[0]` on: [m, columns].

        `columns` is as `in_whole_rows` returns it. Columns behind the last one of w are zero (`Vocabulary.is_cut`).
        """
        out: GmemRef = jax.ShapeDtypeStruct((given.x.shape[0], columns), given.x.dtype)
        return self._launched(given, columns, (out,))[0]

    @in_32_bits
    def summed(self, total: jax.Array, dz: jax.Array, w: jax.Array, place: jax.Array) -> jax.Array:
        """Returns total + dz @ wᵀ for the columns of w from `place[0]` on, as many as dz has: f32 [m, k]."""
        out: GmemRef = jax.ShapeDtypeStruct(total.shape, F32)
        return self._launched(Logits(dz, w, place, total=total), dz.shape[1], (out,))[0]

    def _launched(self, given: Logits, columns: int, out_types: tuple[GmemRef, ...]) -> tuple[jax.Array, ...]:
        config = self.config
        m, k = given.x.shape
        sums = given.total is not None
        n = out_types[0].shape[1] if sums else columns
        of_types = jax.ShapeDtypeStruct((m, n), given.x.dtype) if sums else given.x
        types = check(of_types, given.w, self.vocabulary, columns, config, self.target, sums)
        order = TileOrder.of(m, n, config)
        work = StreamK.on(self.target, config, order.tiles, ceil_div(k, tile_k(given.x.dtype)))
        # Pad the vectors to whole tiles. A tile of the last chunk may reach beyond the last column, too.
        rows = jax.tree.map(lambda vector: jnp.pad(vector, (0, -m % config.tile_m)), given.rows)
        bias = None if given.bias is None else jnp.pad(given.bias.astype(F32), (0, config.tile_n))
        kernel = ProductKernel(NAME, self.target, config, types, work)
        body_of = functools.partial(_Body, kernel, order, columns, self.vocabulary)
        return kernel.launch(dataclasses.replace(given, rows=rows, bias=bias), out_types, body_of)


@dataclasses.dataclass(frozen=True)
class _Body:
    """The body of all kernels: where a chunk of columns lies, and the epilogue.

    Attributes:
      kernel: the static properties of the kernel.
      order: the order of the tiles.
      columns: the columns of the chunk.
      vocabulary: what is static about the logits.
      refs: the kernel's references.
    """

    kernel: ProductKernel
    order: TileOrder
    columns: int
    vocabulary: Vocabulary
    refs: Refs[Logits, tuple[GmemRef, ...]]

    def tile_at(self, index: Index) -> Tile:
        row, column = self.order(index)
        return Tile(0, own_row(self.kernel.config, row), column)

    def hooks(self) -> Hooks:
        inputs = self.refs.inputs
        of_rows = inputs.rows
        return Hooks(
            load_lhs=lambda tile, load: load(inputs.x),
            rhs_at=lambda tile: self._chunk(inputs.w),
            out_at=lambda tile: self.refs.outputs[0],
            addend_at=None if inputs.total is None else lambda tile: inputs.total,
            epilogue_at=None if of_rows.lse is None else lambda tile: self._cotangent,
            through=self._through if len(self.refs.outputs) > 1 else None,
        )

    @property
    def _through(self) -> hooks.SeveralResults:
        return hooks.SeveralResults((), self.refs.outputs[2:], lambda tile: self._statistics)

    def _chunk(self, rhs_gmem: GmemRef) -> GmemRef | ByKStep:
        """The chunk of the right operand. A load beyond it reads what follows, and zeros behind the last column."""
        if self.columns >= self.vocabulary.size(rhs_gmem):
            return rhs_gmem
        if self.refs.inputs.total is not None:
            # What follows the chunk is multiplied by the zeros behind the last column of dz.
            return ByKStep(lambda k_step: (rhs_gmem, self._first + k_step * tile_k(rhs_gmem.dtype)))
        chunk = pl.ds(self._first, self.columns)
        return rhs_gmem.at[chunk] if self.vocabulary.transposed else rhs_gmem.at[:, chunk]

    @property
    def _first(self) -> Index:
        """The first column of the chunk."""
        return 0 if self.columns >= self.vocabulary.size(self.refs.inputs.w) else self.refs.inputs.place[0]

    def _logits(self, values: jax.Array, columns: pl.Slice) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Returns z of some columns of the chunk, the columns' numbers in `w`, and cap′ or None."""
        shape = values.shape
        first = columns.start + self._first
        bias_gmem = self.refs.inputs.bias
        if bias_gmem is not None:
            values = values + self.kernel.mainloop.broadcast_vector(bias_gmem, pl.ds(first, columns.size), shape, 1)
        z, slope = self.vocabulary.capped(values)
        numbers = lax.broadcasted_iota(jnp.int32, shape, 1) + first
        if self.vocabulary.is_cut or self.columns % self.kernel.config.tile_n:
            counted = self.refs.inputs.place[1]
            z = jnp.where(numbers < counted, z, FAR)
        return z, numbers, slope

    def _statistics(
        self,
        values: Callable[[int, int], tuple[jax.Array, ...]],
        rows: pl.Slice,
        columns: pl.Slice,
        addends: Callable[[], Sequence[jax.Array]],
    ) -> Iterator[dict[int, jax.Array]]:
        """The epilogue of the first product (`hooks.SeveralResults`): the tables, and perhaps shares."""
        parts = [
            (values(first, WIDTH)[0], pl.ds(columns.start + first, WIDTH))
            for first in range(0, EPILOGUE_COLUMNS, WIDTH)
        ]
        largest, total, at_label = functools.reduce(_merged, [self._of_part(sums, rows, at) for sums, at in parts])
        lse = largest + jnp.log(total)
        place = quotient(columns.start, EPILOGUE_COLUMNS), rows
        of_block, of_label, *kept = self.refs.outputs
        for table_gmem, entries in ((of_block, lse), (of_label, at_label)):
            epilogue.store_in_registers_order(entries, table_gmem.at[place])
        if not kept:
            yield {}
            return
        # With biases of −∞, all logits of a block may be −∞. To compute z again takes no registers.
        below = jnp.maximum(lse, FAR)
        shares = []
        for sums, at in parts:
            z, *_ = self._logits(sums, at)
            share = jnp.exp2((z - lax.broadcast_in_dim(below, z.shape, (0,))) * _LOG2_E)
            shares.append(share.astype(kept[0].dtype))
        yield {0: shares[0] if len(shares) == 1 else lax.concatenate(shares, 1)}

    def _of_part(self, sums: jax.Array, rows: pl.Slice, columns: pl.Slice) -> _Part:
        """Returns for each row the largest z of some columns, Σ exp(z − largest), and z at the label."""
        z, numbers, _ = self._logits(sums, columns)
        labels = self.kernel.mainloop.broadcast_vector(self.refs.inputs.rows.labels, rows, z.shape, 0)
        at_label = jnp.where(numbers == labels, z, 0.0).sum(axis=1)
        # With biases of −∞, all logits of a part may be −∞.
        largest = jnp.maximum(z.max(axis=1), FAR)
        from_largest = z - lax.broadcast_in_dim(largest, z.shape, (0,))
        return largest, jnp.exp2(from_largest * _LOG2_E).sum(axis=1), at_label

    def _cotangent(self, values: Values, rows: pl.Slice, columns: pl.Slice, addend: jax.Array | None) -> jax.Array:
        """The epilogue of the second product (`Hooks.epilogue_at`)."""
        assert not isinstance(values, tuple)
        of_row = self.refs.inputs.rows
        height, width = values.shape
        parts = []
        for first in range(0, width, WIDTH):
            part = lax.slice(values, (0, first), (height, first + WIDTH))
            z, numbers, slope = self._logits(part, pl.ds(columns.start + first, WIDTH))
            labels, lse, of_sum, of_label = (
                self.kernel.mainloop.broadcast_vector(vector_gmem, rows, z.shape, 0)
                for vector_gmem in (of_row.labels, of_row.lse, of_row.of_sum, of_row.of_label)
            )
            dz = jnp.exp2((z - lse) * _LOG2_E) * of_sum + jnp.where(numbers == labels, of_label, 0.0)
            parts.append((dz if slope is None else dz * slope).astype(self.refs.outputs[0].dtype))
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)


def _merged(a: _Part, b: _Part) -> _Part:
    """Returns what `_of_part` finds in the columns of two parts."""
    largest = jnp.maximum(a[0], b[0])
    total = a[1] * jnp.exp2((a[0] - largest) * _LOG2_E) + b[1] * jnp.exp2((b[0] - largest) * _LOG2_E)
    return largest, total, a[2] + b[2]
