"""Defines the hooks: functions of a fused operation that the mainloop calls for each tile and for each event."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.kernels.config import tile_k
from overlap.primitives.types import GmemRef, Index, Predicate, SmemRef

# An epilogue is called with at most this many rows of values at a time.
BLOCK_ROWS = 128
# An epilogue is called with at least this many rows, except for the last rows of a tile if its number of rows is not a
# multiple of this.
LEAST_BLOCK_ROWS = 64
# The values of some rows and columns of a tile; if the tile has columns of several right operands (`SideBySide`), the
# values of each of them.
type Values = jax.Array | tuple[jax.Array, ...]
# epilogue(values, rows, columns, addend): see `Hooks.epilogue_at`.
type Epilogue = Callable[[Values, pl.Slice, pl.Slice, jax.Array | None], jax.Array]
# results_epilogue(values, rows, columns, addends): see `SeveralResults`.
type ResultsEpilogue = Callable[
    [Callable[[int, int], tuple[jax.Array, ...]], pl.Slice, pl.Slice, Callable[[], Sequence[jax.Array]]],
    Iterator[Mapping[int, jax.Array]],
]


@dataclasses.dataclass(frozen=True)
class Tile:
    """One output tile on its way through the mainloop; all indices are int32 scalars.

    Attributes:
      step: the number by which the tile order names the operands of the tile: the step of a shard, or the index of a
        batch element, or 0 if there is only one pair of operands.
      m: tile row within the left operand, and within the output.
      n: tile column within the right operand, and within the output.
      k_first: the tile's first k step, if `Config.split_k` cuts the contraction into tiles of their own. In hooks: the
        first k step of this tile that this CTA computes.
      side: the index of the tile's right operand, if there are several.
      batch: the index of the batch element, if `step` is the step of a shard.
      row_offset: how many rows below tile row `m` the tile begins, if its rows are those of a group, which begins
        anywhere (`kernels/groups.py`).
      rows: how many rows of such a tile are stored, since the rows after them belong to another group; None: all that
        the output has.
    """

    step: Index
    m: Index
    n: Index
    k_first: Index = 0
    side: Index = 0
    batch: Index = 0
    row_offset: Index = 0
    rows: Index | None = None


@dataclasses.dataclass(frozen=True)
class OneOf:
    """Several references, of which a tile uses one. A kernel needs a branch for each, since it cannot index references.

    Attributes:
      refs: the references. They may differ only in their sizes.
      which: the index of the reference that the tile uses, an int32 scalar.
    """

    refs: Sequence[GmemRef]
    which: Index


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Several right operands of one width. Each tile takes the same columns of all of them (`OperandTypes.sides`).

    In the tile, SIDE_COLUMNS columns of the first are followed by the same columns of the next, and so on. So each
    warpgroup tile of enough columns has the values of all right operands for the same columns.

    Attributes:
      refs: the references.
    """

    refs: Sequence[GmemRef]


@dataclasses.dataclass(frozen=True)
class ByKStep:
    """An operand whose k steps lie in several places.

    Attributes:
      where: called by the producer in its k loop, once the stage is free, with the index of a k step within the tile.
        Returns the reference (or `OneOf`) that holds the k step, and the k at which it begins there. It may wait for
        the data.
    """

    where: Callable[[Index], tuple[GmemRef | OneOf, Index]]


def of_pairs(refs: Sequence[GmemRef], steps: Sequence[int]) -> GmemRef | ByKStep:
    """Returns an operand of a tile, given the references that hold it for each pair.

    Where k of a pair is no multiple of a k step's, its last step is filled up with zeros, as at the end of any operand.
    """
    if len(refs) == 1:
        return refs[0]

    def where(k_step: Index) -> tuple[OneOf, Index]:
        which, first = jnp.int32(0), jnp.int32(0)
        for pair, start in enumerate(itertools.accumulate(steps[:-1]), 1):
            which = jnp.where(k_step >= start, pair, which)
            first = jnp.where(k_step >= start, start, first)
        return OneOf(refs, which), (k_step - first) * tile_k(refs[0].dtype)

    return ByKStep(where)


def at_k_step(operand: GmemRef | OneOf | ByKStep, k_step: Index, depth: int) -> tuple[GmemRef | OneOf, Index]:
    """Returns the reference (or `OneOf`) that holds a k step of an operand, and the k at which it begins there."""
    return operand.where(k_step) if isinstance(operand, ByKStep) else (operand, k_step * depth)


def with_reference(choice: GmemRef | OneOf, use: Callable[[GmemRef], None]) -> None:
    """Calls `use` with a reference or, for a `OneOf`, with the reference that it selects."""
    if not isinstance(choice, OneOf):
        use(choice)
    elif len(choice.refs) == 1:
        use(choice.refs[0])
    else:
        for index, ref in enumerate(choice.refs):
            pl.when(choice.which == index)(lambda ref=ref: use(ref))


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A tile stored in global memory box after box, in the order in which the mainloop stores and loads boxes.

    Attributes:
      ref: [boxes, rows, columns]. The boxes may have fewer rows than the mainloop's boxes. Loads fill the missing rows
        with zeros, and stores leave them out.
      first: the index of the tile's first box.
    """

    ref: GmemRef
    first: Index


@dataclasses.dataclass(frozen=True)
class DirectSends:
    """How the compute warpgroups send their part of a tile to all peers, directly from shared memory.

    A box is contiguous in shared memory and is copied byte for byte. So the references are [boxes, elements].

    Attributes:
      peers: the number of peers.
      rows: how many rows of a box are sent. Further rows of the box lie beyond the result.
      before: called by a compute warpgroup before it sends its first part: wait here until the peers may be written to.
      to_peer: a function from a tile and a number from 1 to `peers`, which selects a peer, to the place on that peer to
        which the part is sent.
    """

    peers: int
    rows: int
    before: Callable[[], None]
    to_peer: Callable[[Tile, Index], Boxes]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The hooks of products that are summed over devices, each of which computes a *part* of every tile.

    Each tile of the result is an own tile of one device, which finishes its sum. A device sends its parts of the peers'
    tiles to the peers. The parts that it receives are the *terms* of its own tiles.

    Attributes:
      terms: how many terms each tile has for which `has_terms` is true.
      is_own: whether a tile is one of this device's results. The terms are added to an own tile before it is finished
        (`Hooks.epilogue_at`) and stored (`Hooks.out_at`). Every other tile is a part of a peer's tile.
      part_at: a function from a peer's tile to where this device's part of it is stored.
      term_at: a function from a tile and the index of a term to where the term lies.
      await_terms: called by the producer before it loads the terms of a tile: wait for them here.
      part_stored: called by the forwarder warp when a part of a peer's tile has landed where `part_at` says.
      part_epilogue_at: a function from a peer's tile to what is done to its part before it is stored; None: nothing.
      direct_sends: for results that all devices compute: every tile is an own tile and also a part of the same tile of
        all peers. Its sum consists of terms only; this device's own part is one of them. None: own tiles and parts of
        peers' tiles are different tiles.
      own_stored: called by the forwarder warp when an own tile has landed where `Hooks.out_at` says; None: not called.
      part_has_terms: whether terms are also added to a part of a peer's tile, before it is stored; None: never.
    """

    terms: int
    is_own: Callable[[Tile], Predicate]
    part_at: Callable[[Tile], Boxes]
    term_at: Callable[[Tile, Index], Boxes]
    await_terms: Callable[[Tile], None]
    part_stored: Callable[[Tile], None]
    part_epilogue_at: Callable[[Tile], Epilogue] | None = None
    own_stored: Callable[[Tile], None] | None = None
    direct_sends: DirectSends | None = None
    part_has_terms: Callable[[Tile], Predicate] | None = None

    def has_terms(self, tile: Tile) -> Predicate:
        """Whether a tile has terms: parts of other devices that are added to it."""
        if self.part_has_terms is None:
            return self.is_own(tile)
        return jnp.logical_or(self.is_own(tile), self.part_has_terms(tile))


@dataclasses.dataclass(frozen=True)
class SeveralResults:
    """An epilogue with several addends or results, all [rows, n] and of the output's dtype (`OperandTypes.boxes`).

    It takes neither swapped operands nor an `Exchange`, nor tiles that several CTAs share.

    Attributes:
      addends: what the epilogue reads.
      results: what it stores.
      epilogue_at: a function from a tile to its epilogue. The epilogue is called for a block of rows and columns as
        `epilogue(values, rows, columns, addends)`: `values(first, size)` returns the f32 values of some of its columns,
        a tuple with those of each side. `addends()` loads the addends of the block. It yields results by their index,
        some at a time, since all of them together need many registers. A result overwrites the addend of its index, so
        the addends are loaded again for what is yielded next.
    """

    addends: Sequence[GmemRef]
    results: Sequence[GmemRef]
    epilogue_at: Callable[[Tile], ResultsEpilogue]


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """Where the block scales of a tile lie: [tiles, k steps, words] as `block_scales.packed` returns them.

    Attributes:
      lhs: the scales of the left operand, a reference or a `OneOf`.
      lhs_tile: the index of the tile's rows in `lhs`.
      rhs: the scales of the right operand, a reference or a `OneOf`.
      rhs_tile: the index of the tile's columns in `rhs`.
    """

    lhs: GmemRef | OneOf
    lhs_tile: Index
    rhs: GmemRef | OneOf
    rhs_tile: Index


@dataclasses.dataclass(frozen=True)
class Hooks:
    """The functions of a fused operation that the mainloop's roles call.

    Attributes:
      load_lhs: called by the producer as `load_lhs(tile, load)`. It calls `load(ref)` with the reference that holds the
        tile's rows (under `pl.when` if there are several such references), or with a `ByKStep`.
      rhs_at: a function from a tile to the reference that holds its columns, or to a `OneOf`, a `SideBySide` or a
        `ByKStep`.
      out_at: a function from a tile to the [rows, n] reference that it is stored to, or to a `OneOf`.
      before_load: called by the producer before it loads the operand tiles of a `Tile`: wait for data here.
      before_lhs: called by the producer before it loads the left operand of a `Tile`: wait here for data that only the
        left operand needs. For a CTA's first tile, the producer has by then started to load as many k steps of the
        right operand as there are stages.
      communicate: the whole work of the communicator warp; called once.
      before_forwarding: called by the forwarder warp once, before it sees its first operand tile. Needs `in_smem`.
      in_smem: called by the forwarder warp as `in_smem(tile, k, lhs_smem, rhs_smem)` while both operand tiles of k step
        `k` are in shared memory. They are the boxes that TMA has loaded: [rows, k] if the operand's rows run along k,
        else [boxes, k, width]. `in_smem` must not return before its copies have read them (`wait_stores_read`).
      piece_done: called by the forwarder warp as `piece_done(tile, pieces_per_tile)` when `in_smem` has seen all k
        steps of this CTA's piece of a tile. Needs `in_smem`.
      addend_at: a function from a tile to a [rows, n] reference of the output's dtype: an addend for the epilogue.
      epilogue_at: a function from a tile to its epilogue. The epilogue is called as `epilogue(values, rows, columns,
        addend)` with f32 values of the product, at most `BLOCK_ROWS` rows of them; the (traced) slices of the output
        that the values are for; and the addend's values there, or None. It returns what is stored. The sum of the terms
        of an `Exchange` is part of the addend. With `Config.swap_operands` all values are transposed: [columns, rows].
      through: in place of `epilogue_at` and `out_at`, an epilogue with several addends or results.
      exchange: for products of which the peers compute parts. Needs tiles that are drawn (`Loop.counter`).
      block_scales_at: a function from a tile to where its block scales lie; None: there are none. The scales of rows
        must have arrived when the rows have (`before_load`).
      lhs_has_gaps: whether a tile may load rows of the left operand, among those that it does not have, that nobody has
        written.
      last_k_at: a function from a tile to how many rows of the last k step of its operands, stored as [k, m] and
        [k, n], belong to its contraction. The others count as zeros. None: all belong to it.
    """

    load_lhs: Callable[[Tile, Callable[[GmemRef | OneOf | ByKStep], None]], None]
    rhs_at: Callable[[Tile], GmemRef | OneOf | SideBySide | ByKStep]
    out_at: Callable[[Tile], GmemRef | OneOf]
    before_load: Callable[[Tile], None] | None = None
    before_lhs: Callable[[Tile], None] | None = None
    communicate: Callable[[], None] | None = None
    before_forwarding: Callable[[], None] | None = None
    in_smem: Callable[[Tile, Index, SmemRef, SmemRef], None] | None = None
    piece_done: Callable[[Tile, Index], None] | None = None
    addend_at: Callable[[Tile], GmemRef] | None = None
    epilogue_at: Callable[[Tile], Epilogue] | None = None
    through: SeveralResults | None = None
    exchange: Exchange | None = None
    block_scales_at: Callable[[Tile], BlockScales] | None = None
    lhs_has_gaps: bool = False
    last_k_at: Callable[[Tile], Index] | None = None
