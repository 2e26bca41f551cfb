"""Assigns output tiles to CTAs: whole tiles in full waves, and the remaining tiles cut into pieces along k.

With `Config.cluster_along="k"`, the CTAs of a cluster divide the k steps of every tile instead (`ctas_per_tile`).

132 CTAs that compute one tile each at a time need as long for 180 tiles as for 264. So each tile that is left after the
last full wave may be cut into equal *pieces* along k, as far as there are CTAs to compute them:

    48 tiles left, 132 CTAs, 2 pieces:    CTA      0        1        2        3     …     95      96 … 131
                                          tile     0        0        1        1     …     47      idle
                                          k     1st half 2nd half 1st half 2nd half    2nd half

The CTAs that share a tile exchange their f32 sums (`PartialSums`). Each then finishes a share of the columns. It adds
the sums always in the same order, so that results are deterministic. The CTAs of a tile have consecutive indices, and
the GPU starts CTAs in the order of their indices. So if as many CTAs run at the same time as a tile has pieces, none
waits for a CTA that cannot start.

Stream-K proper, with unequal pieces that fill all CTAs exactly, was measured too (H200). In the products measured it
used the 5% of the SMs that equal pieces leave idle. But this gained no time: a tile's sums pass through more CTAs,
and tiles that share operands are no longer computed at the same time.

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU"
(PPoPP 2023). This module has the fixed-split hybrid of that paper.
"""

from __future__ import annotations

import dataclasses

from overlap.kernels.config import Config
from overlap.kernels.placement import beside_neighbours, clusters_at_once, spread, spreads
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div, choose, quotient, remainder, smaller
from overlap.primitives.types import Index


@dataclasses.dataclass(frozen=True)
class Piece:
    """Consecutive k steps of one tile (often all of them) that one CTA computes.

    Attributes:
      tile: index of the tile in the tile order.
      k_first: the first k step of the piece.
      k_steps: how many k steps the piece has.
      before: how many k steps this CTA has computed before this piece, in all its earlier pieces.
      pieces_per_tile: how many pieces the tile consists of, for CTAs of different clusters or of one; 1: it is whole.
      index_in_tile: the index of this piece among the pieces of the tile. The CTA before this one computes the piece
        before this one, and so on.
      ordinal: how many pieces this CTA has computed before.
    """

    tile: Index
    k_first: Index
    k_steps: Index
    before: Index
    pieces_per_tile: Index = 1
    index_in_tile: Index = 0
    ordinal: Index = 0


@dataclasses.dataclass(frozen=True)
class StreamK:
    """The pieces of each CTA: whole tiles in full waves, then at most one tile, or piece of a tile, of the rest.

    With clusters, a "CTA" here is a whole cluster, and a tile is the tile of a cluster.

    Attributes:
      tiles: output tiles of the device.
      k_steps: k steps of each tile.
      num_ctas: CTAs (or clusters) of the grid. Each computes its pieces in order.
      max_pieces: into how many pieces a tile may be cut at most; 1: no tile is cut.
      ctas_per_tile: how many CTAs of a cluster divide the k steps of each tile among them. If there are several, tiles
        are not cut in any other way.
      may_spread: whether the tiles of the last wave may be given to CTAs of all GPCs, not to the first CTAs. There
        must be no clusters.
    """

    tiles: int
    k_steps: int
    num_ctas: int
    max_pieces: int = 1
    ctas_per_tile: int = 1
    may_spread: bool = False

    @staticmethod
    def on(target: Target, config: Config, tiles: int, k_steps: int, may_spread: bool = False) -> StreamK:
        """Returns the work of a device with one CTA per SM, on as many SMs as whole clusters can use."""
        clusters = clusters_at_once(target.num_cores, config.cluster)
        may_spread = may_spread and config.cluster == 1
        return StreamK(tiles, k_steps, clusters, config.stream_k, config.ctas_per_tile, may_spread)

    @property
    def full_waves(self) -> int:
        """The number of full waves: every CTA computes this many whole tiles."""
        return self.tiles // self.num_ctas

    @property
    def left(self) -> int:
        """How many tiles are left after the full waves."""
        return self.tiles % self.num_ctas

    @property
    def pieces_per_tile(self) -> int:
        """How many pieces each tile that is left is cut into for CTAs of different clusters; 1: it is not cut.

        No more than there are CTAs and k steps for.
        """
        most = 1 if self.ctas_per_tile > 1 else self.max_pieces
        return min(most, self.num_ctas // max(self.left, 1), self.k_steps) if self.left else 1

    @property
    def cuts(self) -> bool:
        """Whether any tile is cut, so that its CTAs exchange sums through global memory."""
        return self.pieces_per_tile > 1

    @property
    def workers(self) -> int:
        """How many CTAs compute pieces of the tiles that are left."""
        return self.left * self.pieces_per_tile

    @property
    def _spreads(self) -> bool:
        """Whether the tiles of the last wave, all whole, are computed by CTAs of all GPCs."""
        return self.may_spread and not self.cuts and spreads(self.left, self.num_ctas)

    def pieces[I: Index](self, cta: I) -> I:
        """Returns how many pieces a CTA computes."""
        return self.full_waves + choose(self._number(cta) < self.workers, 1, 0)

    def _number[I: Index](self, cta: I) -> I:
        """Returns the number of a CTA or cluster by which the tiles of the last wave are assigned.

        If the CTAs of a cluster divide each tile, clusters are renumbered in all waves, so that clusters of one GPC
        compute adjacent tiles. If the last wave has few tiles, and whole ones, they are spread over the GPCs, since
        what a GPC can load in a given time is limited. Cut tiles are assigned by index, so that the CTAs that share a
        tile start together.
        """
        if self.ctas_per_tile > 1:
            return beside_neighbours(cta, self.ctas_per_tile, self.num_ctas)
        return spread(cta, self.left) if self._spreads else cta

    def total_k_steps[I: Index](self, cta: I) -> I:
        """Returns how many k steps a CTA computes in all its pieces.

        With `ctas_per_tile` above 1 these are the k steps of the cluster's first CTA, which has the most.
        """
        if self.ctas_per_tile > 1:
            of_first = ceil_div(self.k_steps, self.ctas_per_tile)
            return self.full_waves * of_first + choose(self._number(cta) < self.workers, of_first, 0)
        return self.full_waves * self.k_steps + choose(self._number(cta) < self.workers, self._cut_k_steps(cta)[1], 0)

    def _cut_k_steps(self, cta: Index) -> tuple[Index, Index]:
        """Returns first k step and length of a worker's piece."""
        return self._k_steps_of(remainder(cta, self.pieces_per_tile), self.pieces_per_tile)

    def _k_steps_of(self, index: Index, pieces: int) -> tuple[Index, Index]:
        """Returns first k step and length of a piece. The first pieces of a tile may be one k step longer."""
        length, longer = divmod(self.k_steps, pieces)
        return index * length + smaller(index, longer), length + choose(index < longer, 1, 0)

    def piece(self, cta: Index, ordinal: Index, rank: Index = 0) -> Piece:
        """Returns piece number `ordinal` of CTA (or cluster) `cta`.

        With `ctas_per_tile` above 1, `rank` is the index within the cluster of the CTA whose piece is wanted.
        """
        if self.ctas_per_tile > 1:
            k_first, k_steps = self._k_steps_of(rank, self.ctas_per_tile)
            tile = self._number(cta) + ordinal * self.num_ctas
            before = ordinal * k_steps
            return Piece(tile, k_first, k_steps, before, self.ctas_per_tile, rank, ordinal)
        whole = Piece(cta + ordinal * self.num_ctas, 0, self.k_steps, ordinal * self.k_steps, ordinal=ordinal)
        last = self.full_waves * self.num_ctas
        if self._spreads:
            tile = choose(ordinal == self.full_waves, last + self._number(cta), whole.tile)
            return dataclasses.replace(whole, tile=tile)
        if not self.cuts:
            return whole
        tile = quotient(cta, self.pieces_per_tile)
        k_first, k_steps = self._cut_k_steps(cta)
        is_cut = ordinal == self.full_waves
        return Piece(
            tile=choose(is_cut, last + tile, whole.tile),
            k_first=choose(is_cut, k_first, 0),
            k_steps=choose(is_cut, k_steps, self.k_steps),
            before=whole.before,
            pieces_per_tile=choose(is_cut, self.pieces_per_tile, 1),
            index_in_tile=choose(is_cut, remainder(cta, self.pieces_per_tile), 0),
            ordinal=ordinal,
        )
