"""How the output tiles are dealt to the CTAs: whole tiles in full waves, the rest cut along k.

132 CTAs that compute one tile each at a time finish 180 tiles no sooner than 264. So of the tiles that are left after
the last full wave, each may be cut into equal parts along k, as many as there are CTAs for:

    48 tiles left, 132 CTAs, 2 parts:    CTA      0        1        2        3     …     95      96 … 131
                                         tile     0        0        1        1     …     47      idle
                                         k     1st half 2nd half 1st half 2nd half    2nd half

Those that share a tile each finish a share of its columns: they hand each other their f32 sums (`PartialSums`) and add
them, always in the same order, so that results are deterministic. They are CTAs in a row, so as many resident ones as a
tile has parts suffice.

Stretches of unequal parts that fill all CTAs exactly (stream-K) were measured too: what the last 5% of the cores save,
the longer chains of sums and the loss of lockstep between tiles that share operands cost again (H200).

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU"
(PPoPP 2023), which this is the fixed-split hybrid of.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.primitives.integers import choose, quotient, remainder, smaller


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of one tile's k steps, carried by one CTA; all are ints or int32 scalars.

    Attributes:
      tile: index of the tile in the tile order.
      k_first: its first k step.
      k_steps: how many.
      before: k steps that this CTA has carried before, over all its pieces.
      parts: into how many parts the tile is cut; 1: it is not.
      part: which of them this is. The CTA before this one carries the part before it, and so on.
      ordinal: how many pieces this CTA has carried before.
    """

    tile: Any
    k_first: Any
    k_steps: Any
    before: Any
    pieces_per_tile: Any = 1
    index_in_tile: Any = 0
    ordinal: Any = 0


@dataclasses.dataclass(frozen=True)
class StreamK:
    """The pieces of each CTA: whole tiles in full waves, then at most one tile or part of what is left.

    Attributes:
      tiles: output tiles of the device.
      k_steps: k steps of each.
      num_ctas: CTAs (or clusters of them) of the grid; each visits its pieces in order.
      most_parts: into how many parts a tile may be cut; 1: none is.
    """

    tiles: int
    k_steps: int
    num_ctas: int
    max_pieces: int = 1

    @staticmethod
    def on(target: Target, config: Config, tiles: int, k_steps: int) -> StreamK:
        """The work of a device whose cores all run a CTA, or as many as fill whole clusters."""
        return StreamK(tiles, k_steps, target.num_cores // config.cluster, config.stream_k)

    @property
    def full_waves(self) -> int:
        """How many whole tiles each CTA computes."""
        return self.tiles // self.num_ctas

    @property
    def left(self) -> int:
        """How many tiles are left after the full waves."""
        return self.tiles % self.num_ctas

    @property
    def pieces_per_tile(self) -> int:
        """Into how many parts each tile that is left is cut: no more than there are CTAs and k steps for."""
        return min(self.max_pieces, self.num_ctas // max(self.left, 1), self.k_steps) if self.left else 1

    @property
    def cuts(self) -> bool:
        """Whether any tile is cut."""
        return self.pieces_per_tile > 1

    @property
    def workers(self) -> int:
        """How many CTAs share what is left."""
        return self.left * self.pieces_per_tile

    def pieces(self, cta: Any) -> Any:
        """How many pieces a CTA carries."""
        return self.full_waves + choose(cta < self.workers, 1, 0)

    def total_k_steps(self, cta: Any) -> Any:
        """How many k steps a CTA carries in all."""
        return self.full_waves * self.k_steps + choose(cta < self.workers, self._cut_k_steps(cta)[1], 0)

    def _cut_k_steps(self, cta: Any) -> tuple[Any, Any]:
        """First k step of the part of a worker, and its length; the first parts may be one step longer."""
        length, longer = divmod(self.k_steps, self.pieces_per_tile)
        index = remainder(cta, self.pieces_per_tile)
        return index * length + smaller(index, longer), length + choose(index < longer, 1, 0)

    def piece(self, cta: Any, ordinal: Any) -> Piece:
        """Piece number `ordinal` of a CTA."""
        whole = Piece(cta + ordinal * self.num_ctas, 0, self.k_steps, ordinal * self.k_steps, ordinal=ordinal)
        if not self.cuts:
            return whole
        tile, (k_first, k_steps) = quotient(cta, self.pieces_per_tile), self._cut_k_steps(cta)
        is_cut = ordinal == self.full_waves
        return Piece(
            tile=choose(is_cut, self.full_waves * self.num_ctas + tile, whole.tile),
            k_first=choose(is_cut, k_first, 0),
            k_steps=choose(is_cut, k_steps, self.k_steps),
            before=whole.before,
            pieces_per_tile=choose(is_cut, self.pieces_per_tile, 1),
            index_in_tile=choose(is_cut, remainder(cta, self.pieces_per_tile), 0),
            ordinal=ordinal,
        )
