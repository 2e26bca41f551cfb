"""Where a fused operation enters the mainloop: what it says about each tile, and what it wants to see of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

# The most rows of the blocks of values that an epilogue is called with.
BLOCK_ROWS = 128
# And the fewest, but for the last ones of a tile that has another number of rows.
LEAST_BLOCK_ROWS = 64
Epilogue = Callable[[jax.Array, Any, Any, jax.Array | None], jax.Array]


@dataclasses.dataclass(frozen=True)
class Tile:
    """One output tile on its way through the mainloop; all indices are int32 scalars.

    Attributes:
      step: which operands the tile comes from, as the tile order numbers them (shard, batch element, or just 0).
      m: tile row within the left operand, and within the output.
      n: tile column within the right operand, and within the output.
      k_first: the first k step of the tile, if the contraction is split into tiles of their own. In hooks, the first
        one that this CTA carries of it.
      side: which of several right operands it is a tile of.
      batch: which batch element, where `step` says something else.
    """

    step: Any
    m: Any
    n: Any
    k_first: Any = 0
    side: Any = 0
    batch: Any = 0


@dataclasses.dataclass(frozen=True)
class OneOf:
    """References of which a tile uses one. A kernel can choose among references only by a branch for each.

    Attributes:
      refs: the references, alike but for their sizes.
      which: the index of the one that is meant, an int32 scalar.
    """

    refs: Sequence[Any]
    which: Any


@dataclasses.dataclass(frozen=True)
class ByKStep:
    """An operand whose k steps lie in several places.

    Attributes:
      where: called by the producer in its k loop, once the slot is free: from the index of a k step within the tile to
        the reference (or `OneOf`) that holds it, and the step's first k there. It may wait for the data.
    """

    where: Callable[[Any], tuple[Any, Any]]


def at_k_step(operand: Any, step: Any, tile_k: int) -> tuple[Any, Any]:
    """Where k step `step` of an operand lies: its reference (or `OneOf`), and the step's first k there."""
    return operand.where(step) if isinstance(operand, ByKStep) else (operand, step * tile_k)


def with_reference(choice: Any, use: Callable[[Any], None]) -> None:
    """Calls `use` with a reference, or with the one that a `OneOf` means."""
    if not isinstance(choice, OneOf):
        use(choice)
    elif len(choice.refs) == 1:
        use(choice.refs[0])
    else:
        for index, ref in enumerate(choice.refs):
            pl.when(choice.which == index)(lambda ref=ref: use(ref))


@dataclasses.dataclass(frozen=True)
class Boxes:
    """A tile that lies in memory as the mainloop stores and loads it, box after box.

    Attributes:
      ref: [boxes, rows, columns]. Boxes may have fewer rows than the mainloop's; what is missing counts as zero.
      first: the index of the tile's first box.
    """

    ref: Any
    first: Any


@dataclasses.dataclass(frozen=True)
class DirectSends:
    """How the compute warpgroups send the part that they have computed of a tile to all peers, from shared memory.

    There a box is one piece of memory, so it travels as it lies there: references are [boxes, elements].

    Attributes:
      peers: how many there are.
      before: called by a compute warpgroup before it sends the first part: wait here until the peers may be sent to.
      to_peer: from a tile and a number from 1 to `peers` to where the part goes on a peer.
    """

    peers: int
    before: Callable[[], None]
    to_peer: Callable[[Tile, Any], Boxes]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """For products that several devices compute a part of each: parts of peers' tiles go out, parts of own ones come.

    Attributes:
      terms: how many parts come of each tile to which any are added.
      is_own: whether a tile is one of this device's results. To that the parts of the others are added, before it is
        finished (`Hooks.epilogue_at`) and stored (`Hooks.out_at`). Any other one is a part of a peer's.
      part_at: from a peer's tile to where it is stored.
      term_at: from a tile and the index of a part that is added to it, to where that lies.
      await_terms: called by the producer before it loads the parts that are added to a tile: wait for them here.
      part_stored: called by the forwarder warp when a peer's tile has landed where `part_at` says.
      part_epilogue_at: from a peer's tile to what is done to it before it is stored; None: nothing.
      sends: for results that all devices compute: every tile is an own one as well as a part of the same tile of all
        peers, and its sum has nothing but terms (its own part is one of them). None: own tiles and parts differ.
      own_stored: called by the forwarder warp when an own tile has landed where `Hooks.out_at` says; None: not called.
      part_has_terms: whether parts of the others are added to a peer's tile, too, before it is stored; None: never.
    """

    terms: int
    is_own: Callable[[Tile], Any]
    part_at: Callable[[Tile], Boxes]
    term_at: Callable[[Tile, Any], Boxes]
    await_terms: Callable[[Tile], None]
    part_stored: Callable[[Tile], None]
    part_epilogue_at: Callable[[Tile], Epilogue] | None = None
    own_stored: Callable[[Tile], None] | None = None
    direct_sends: DirectSends | None = None
    part_has_terms: Callable[[Tile], Any] | None = None

    def has_terms(self, tile: Tile) -> Any:
        """Whether parts of the others are added to a tile."""
        if self.part_has_terms is None:
            return self.is_own(tile)
        return jnp.logical_or(self.is_own(tile), self.part_has_terms(tile))


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """Where the scales of blocks of a tile lie, [tiles, k steps, words] as `block_scales.packed` returns them.

    Attributes:
      lhs: of the tile's rows, a reference or a `OneOf`.
      lhs_tile: which tile they are of there.
      rhs: of its columns, likewise.
      rhs_tile: which tile these are of there.
    """

    lhs: Any
    lhs_tile: Any
    rhs: Any
    rhs_tile: Any


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Where a fused operation enters the mainloop (the pipeline callbacks).

    Attributes:
      before_load: called by the producer before it loads the operand tiles of a `Tile`: wait for data here.
      before_lhs: called by the producer before it loads the left operand of a `Tile`; of a CTA's first tile, as much of
        the right operand is then on its way as there are slots for: wait here for what only the left one depends on.
      load_lhs: called by the producer as `load_lhs(tile, load)`; it calls `load(ref)` with the reference that holds the
        tile's rows (under `pl.when` if there are several such), or with a `ByStep`.
      rhs_at: from a tile to the reference that holds its columns, or to a `OneOf` or a `ByStep`.
      out_at: from a tile to the [rows, n] reference that it is stored to, or to a `OneOf`.
      communicate: the communicator warp's whole work; called once.
      before_forwarding: called by the forwarder warp once, before it sees its first operand tile. Needs `in_smem`.
      in_smem: called by the forwarder warp as `in_smem(tile, k, lhs_smem, rhs_smem)` while both operand tiles of k step
        `k` are in shared memory, as the boxes that TMA has brought: [rows, k] if the operand's rows run along k, else
        [boxes, k, width]. It must not return before its copies have read them (`wait_stores_read`).
      piece_done: called by the forwarder warp as `piece_done(tile, parts)` when `in_smem` has seen all k steps of a
        tile that this CTA carries; `parts`: into how many parts it is cut, of which this is one. Needs `in_smem`.
      addend_at: from a tile to a [rows, n] reference of the output's dtype that the epilogue is to have as well.
      epilogue_at: from a tile to its epilogue. That is called as `epilogue(values, rows, columns, addend)` with f32
        values of the product, at most `BLOCK_ROWS` rows of them, the (traced) slices of the output that they are for,
        and the addend's values there (or None); it returns what is stored. The sum of the parts of an `Exchange` is an
        addend. With `Config.swap_operands` all values are transposed: [columns, rows].
      exchange: for products of which peers compute a part. Needs tiles that are drawn (`Loop.counter`).
      block_scales_at: from a tile to where the scales of its blocks lie; None: it has none. Those of the rows are here
        when the rows are (`before_load`).
    """

    load_lhs: Callable[[Tile, Callable[[Any], None]], None]
    rhs_at: Callable[[Tile], Any]
    out_at: Callable[[Tile], Any]
    before_load: Callable[[Tile], None] | None = None
    before_lhs: Callable[[Tile], None] | None = None
    communicate: Callable[[], None] | None = None
    before_forwarding: Callable[[], None] | None = None
    in_smem: Callable[[Tile, Any, Any, Any], None] | None = None
    piece_done: Callable[[Tile, Any], None] | None = None
    addend_at: Callable[[Tile], Any] | None = None
    epilogue_at: Callable[[Tile], Epilogue] | None = None
    exchange: Exchange | None = None
    block_scales_at: Callable[[Tile], BlockScales] | None = None
