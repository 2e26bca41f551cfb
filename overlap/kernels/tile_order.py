"""In which order the tiles of an m × n grid are visited: bands, so that what is in L2 is used again."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from overlap.kernels.config import Config
from overlap.primitives.integers import ceil_div, choose, quotient, remainder


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """A snake through bands of `width` tile rows or columns.

    The minor dimension runs fastest and the band is `width` tiles wide along it: with `minor="m"`, a band holds
    `width` tile rows, and the walk goes down those rows, then one column on. Every second band is walked backwards, so
    that it begins with the operand tiles with which the one before it ended.

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
        """The order of an m × n result's tiles; a tile is that of a whole cluster."""
        rows, columns = config.cluster_tile
        return TileOrder(ceil_div(m, rows), ceil_div(n, columns), config.order_minor, config.order_width)

    @property
    def tiles(self) -> int:
        """Tiles of the grid."""
        return self.m_tiles * self.n_tiles

    def __call__(self, index: Any) -> tuple[Any, Any]:
        """Tile row and column of step `index` (an int or an int32 scalar, 0 ≤ index < tiles)."""
        minor_tiles, major_tiles = (self.m_tiles, self.n_tiles) if self.minor == "m" else (self.n_tiles, self.m_tiles)
        width = min(self.width, minor_tiles)
        full_bands, rest = divmod(minor_tiles, width)
        band = quotient(index, width * major_tiles)
        within = index - band * (width * major_tiles)
        major, minor = quotient(within, width), remainder(within, width)
        if rest:
            in_rest = band == full_bands
            # The same number as `within`. Of two divisions of one number the compiler makes one by whichever divisor it
            # is, which is no multiplication any more but a call of a function.
            in_last = index - full_bands * (width * major_tiles)
            major = choose(in_rest, quotient(in_last, rest), major)
            minor = choose(in_rest, remainder(in_last, rest), minor)
        major = choose(remainder(band, 2) == 1, major_tiles - 1 - major, major)
        minor = band * width + minor
        return (minor, major) if self.minor == "m" else (major, minor)
