"""How the output tiles are dealt to the CTAs, the last partial wave cut along k (stream-K).

132 CTAs that compute one tile each at a time finish 140 tiles no sooner than 264. So the tiles that are left after the
last full wave are not dealt out whole: their k steps, laid end to end, are cut into equal stretches, one per *worker*:

    tile      |      0      |      1      |      2      |      each `k_steps` long
    worker    |    0    |    1    |    2    |    3    |      worker c carries [begin(c), begin(c + 1))

The worker that begins a tile (k = 0) finishes it: it adds the parts of the workers behind it, always in the same order,
so that results are deterministic. Each worker carries the end of a tile *before* the beginning of the next, so what
others wait for is computed first, and nobody who waits is waited for.

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU"
(PPoPP 2023); this is its "data-parallel + one-tile" hybrid.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap.primitives.integers import choose, larger, quotient, smaller


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of one tile's k steps, carried by one CTA; all are ints or int32 scalars.

    Attributes:
      tile: index of the tile in the tile order.
      k_first: its first k step; 0 for the CTA that finishes the tile.
      k_steps: how many.
      before: k steps that this CTA has carried before, over all its pieces.
      last_worker: the last CTA that carries a part of this tile; the parts behind the first are those of the CTAs
        after the one that finishes it, up to this one.
    """

    tile: Any
    k_first: Any
    k_steps: Any
    before: Any
    last_worker: Any


@dataclasses.dataclass(frozen=True)
class StreamK:
    """The pieces of each CTA: whole tiles in full waves, then its stretch of what is left.

    Attributes:
      tiles: output tiles of the device.
      k_steps: k steps of each.
      num_ctas: CTAs (or clusters of them) of the grid; each visits its pieces in order.
      most_parts: into how many parts a tile may be cut; 1: none is.
    """

    tiles: int
    k_steps: int
    num_ctas: int
    most_parts: int = 1

    @property
    def full_waves(self) -> int:
        """How many whole tiles each CTA computes."""
        return self.tiles // self.num_ctas

    @property
    def left(self) -> int:
        """How many tiles are left after the full waves."""
        return self.tiles % self.num_ctas

    @property
    def workers(self) -> int:
        """How many CTAs share what is left: at least one per tile, and none without a k step."""
        return min(self.num_ctas, self.left * min(self.most_parts, self.k_steps))

    @property
    def cuts(self) -> bool:
        """Whether any tile is cut."""
        return self.workers > self.left

    @property
    def _stretch(self) -> tuple[int, int]:
        """Length of a worker's stretch, and how many workers carry one step more."""
        return divmod(self.left * self.k_steps, max(self.workers, 1))

    def _begin(self, worker: Any) -> Any:
        length, longer = self._stretch
        return worker * length + smaller(worker, longer)

    def _worker(self, step: Any) -> Any:
        """The worker whose stretch holds a step."""
        length, longer = self._stretch
        in_longer = longer * (length + 1)
        return choose(step < in_longer, quotient(step, length + 1), longer + quotient(step - in_longer, length))

    def pieces(self, cta: Any) -> Any:
        """How many pieces a CTA carries."""
        if not self.cuts:
            return quotient(self.tiles + self.num_ctas - 1 - cta, self.num_ctas)
        first = quotient(self._begin(cta), self.k_steps)
        last = quotient(self._begin(cta + 1) - 1, self.k_steps)
        return self.full_waves + choose(cta < self.workers, last - first + 1, 0)

    def total_steps(self, cta: Any) -> Any:
        """How many k steps a CTA carries in all."""
        if not self.cuts:
            return self.pieces(cta) * self.k_steps
        stretch = choose(cta < self.workers, self._begin(cta + 1) - self._begin(cta), 0)
        return self.full_waves * self.k_steps + stretch

    def piece(self, cta: Any, ordinal: Any) -> Piece:
        """Piece number `ordinal` of a CTA."""
        whole = Piece(cta + ordinal * self.num_ctas, 0, self.k_steps, ordinal * self.k_steps, cta)
        if not self.cuts:
            return whole
        begin, end = self._begin(cta), self._begin(cta + 1)
        # A stretch is no longer than a tile, so it touches at most two.
        tile = quotient(begin, self.k_steps) + (ordinal - self.full_waves)
        tile_begin = tile * self.k_steps
        first = larger(begin, tile_begin)
        last = smaller(end, tile_begin + self.k_steps)
        cut = Piece(
            tile=self.full_waves * self.num_ctas + tile,
            k_first=first - tile_begin,
            k_steps=last - first,
            before=self.full_waves * self.k_steps + first - begin,
            last_worker=self._worker(tile_begin + self.k_steps - 1),
        )
        if not self.full_waves:
            return cut
        fields = [field.name for field in dataclasses.fields(Piece)]
        is_cut = ordinal >= self.full_waves
        return Piece(**{name: choose(is_cut, getattr(cut, name), getattr(whole, name)) for name in fields})
