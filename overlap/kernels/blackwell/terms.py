"""Loads the parts of a tile that peers have computed (`Hooks.exchange`), and sums them: for Blackwell's epilogue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.blackwell.limits import TERM_BUFFERS
from overlap.kernels.hooks import Tile
from overlap.kernels.mainloop import Loop
from overlap.kernels.stream_k import Piece
from overlap.kernels.tma import exchange
from overlap.primitives import marks
from overlap.primitives.integers import remainder
from overlap.primitives.marks import Work
from overlap.primitives.types import Index

if TYPE_CHECKING:
    from overlap.kernels.blackwell.mainloop import Buffers


class Terms:
    """Loads and sums the terms of one tile: box after box, and for each box the parts of one peer after the other."""

    def __init__(self, loop: Loop, buffers: Buffers, tile: Tile, piece: Piece) -> None:
        assert loop.hooks.exchange is not None
        self.loop = loop
        self.buffers = buffers
        self.exchange = loop.hooks.exchange
        self.tile = tile
        self.piece = piece
        self.loads = exchange.box_count(buffers) * self.exchange.terms

    def begin(self) -> None:
        """Waits until all terms of the tile have arrived, and starts the first loads."""
        marks.now(Work.AWAIT_ROWS, self.tile.step, self.piece.tile)
        self.exchange.await_terms(self.tile)
        marks.now(Work.STORE, self.tile.step, self.piece.tile)
        for load_index in range(min(TERM_BUFFERS, self.loads)):
            self._load(load_index)

    def _load(self, load_index: Index) -> None:
        term_buffer = remainder(load_index, TERM_BUFFERS)
        exchange.load_term(
            self.loop, self.buffers, self.tile, load_index, term_buffer, self.buffers.term_loaded.at[term_buffer]
        )

    def _await_all_threads(self, term_buffer: Index) -> None:
        """Waits until all threads have read a box, so that the next box may be loaded into its buffer."""
        plgpu.barrier_arrive(self.buffers.term_added.at[term_buffer])
        plgpu.barrier_wait(self.buffers.term_added.at[term_buffer])

    def __call__(self, index: int) -> list[jax.Array]:
        """Returns the sum of the terms of box `index`: values for each block of rows."""

        def term(number: Index) -> list[jax.Array]:
            load_index = index * self.exchange.terms + number
            term_buffer = remainder(load_index, TERM_BUFFERS)
            plgpu.barrier_wait(self.buffers.term_loaded.at[term_buffer])
            values = exchange.term_values(self.exchange, self.buffers, term_buffer, 0)
            self._await_all_threads(term_buffer)
            pl.when(load_index + TERM_BUFFERS < self.loads)(lambda: self._load(load_index + TERM_BUFFERS))
            return values

        return exchange.summed(self.exchange.terms, term)
