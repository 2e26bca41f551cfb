"""Orders the tiles of an m × n grid in bands, so that tiles computed at the same time share operands in the L2."""

from __future__ import annotations

import dataclasses
from typing import Literal

from overlap.kernels.config import Config
from overlap.primitives.integers import ceil_div, choose, quotient, remainder
from overlap.primitives.types import Index


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """An order that runs forwards and backwards in turn through bands of `width` tile rows or columns.

    The minor dimension runs fastest, and a band is `width` tiles wide along it. With `minor="m"` a band has `width`
    tile rows: the order goes down these rows in one column, then down the next column. Every second band is visited
    backwards, so that it begins with the operand tiles with which the band before it ended.

    Attributes:
      m_tiles: tile rows of the grid.
      n_tiles: tile columns of the grid.
      minor: the dimension that runs fastest, "m" or "n".
      width: tiles per band along the minor dimension; the last band may be narrower.
    """

    m_tiles: int
    n_tiles: int
    minor: Literal["m", "n"] = "m"
    width: int = 8

    @staticmethod
    def of(m: int, n: int, config: Config) -> TileOrder:
        """Returns the order of the tiles of an m × n result; a pair of CTAs (`Config.cluster`) has one tile here."""
        m_tiles, n_tiles = ceil_div(m, config.cluster_tile_m), ceil_div(n, config.tile_n)
        return TileOrder(m_tiles, n_tiles, config.order_minor, config.order_width)

    @property
    def tiles(self) -> int:
        """How many tiles the grid has."""
        return self.m_tiles * self.n_tiles

    def __call__[I: Index](self, index: I) -> tuple[I, I]:
        """Returns row and column of the tile that is visited as number `index`, 0 ≤ index < tiles."""
        minor_tiles, major_tiles = (self.m_tiles, self.n_tiles) if self.minor == "m" else (self.n_tiles, self.m_tiles)
        width = min(self.width, minor_tiles)
        full_bands, rest = divmod(minor_tiles, width)
        band = quotient(index, width * major_tiles)
        within = index - band * (width * major_tiles)
        major, minor = quotient(within, width), remainder(within, width)
        if rest:
            in_rest = band == full_bands
            # In the last band this is the same number as `within`. It is computed anew, because the compiler merges two
            # divisions of one value into one division by a selected divisor. That is no longer a multiplication by a
            # constant, but a function call.
            in_last = index - full_bands * (width * major_tiles)
            major = choose(in_rest, quotient(in_last, rest), major)
            minor = choose(in_rest, remainder(in_last, rest), minor)
        major = choose(remainder(band, 2) == 1, major_tiles - 1 - major, major)
        minor = band * width + minor
        return (minor, major) if self.minor == "m" else (major, minor)
