"""Tests for two defects of CTA pairs that a review of the Blackwell mainloop found, and for injected defects."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import textwrap

import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import EmulationError
from overlap.kernels.blackwell import mainloop as blackwell
from overlap.kernels.grid import RANK_AXIS, rank
from overlap.kernels.tma import drawn, finish, produce, staging, store
from tests import blackwell_cases, protocol_cases
from tests.blackwell_cases import ONE, PAIR, ROWS, SUMS
from tests.blackwell_defects import NOTHING, change_pieces, within

# Five pairs of tiles. The rows of a shard end in the first tile of its second pair, and have scales of their own.
SHAPE = (1280, 128, 192)
SCALED = dataclasses.replace(ROWS, widths=(136,), scales=("rows",))


def scaled(joined):
    config = PAIR.replace(joined=True, chunk_bytes=1024) if joined else PAIR
    form = dataclasses.replace(SCALED, m=88 if joined else 264)
    return blackwell_cases.on_blackwell(protocol_cases.of_rows(form, config, 3 if joined else 2))


def test_nobody_in_a_pair_falls_two_phases_behind():
    """The emulator runs the kernel with instant copies and products, and one slow warp."""
    kernel = blackwell_cases.launched(PAIR, SHAPE, 2)
    for seed in range(15):
        kernel.run(cores=2, completion="eager", seed=seed)


def test_a_second_multiplier_that_waits_as_well_is_reported(monkeypatch):
    """No other role waits for the second multiplier, so it falls behind and misses a phase of its barrier."""
    multiply = blackwell._multiply

    def both(loop, buffers, tile, piece):
        pl.when(rank(loop.config) == 1)(lambda: blackwell._await_drained(buffers, piece.ordinal))
        multiply(loop, buffers, tile, piece)

    everywhere = plgpu.ClusterBarrier(collective_axes=(RANK_AXIS,), num_barriers=2, orders_tensor_core=True)
    monkeypatch.setattr(blackwell, "_drained", lambda config: everywhere)
    monkeypatch.setattr(blackwell, "_multiply", both)
    report = blackwell_cases.launched(PAIR, SHAPE, 2).report(seeds=12, cores=2, completion="eager")
    assert "missed phase" in str(report)


@pytest.mark.parametrize("joined", [False, True], ids=["pull", "joined"])
def test_scales_of_gathered_rows_are_known_to_both_epilogues(joined, monkeypatch):
    kernel = scaled(joined)
    for seed in range(3):
        kernel.run(cores=4, completion=("eager", "late", "random")[seed], seed=seed)
    monkeypatch.setattr(blackwell, "_await_what_came_with_the_rows", NOTHING)
    assert "is not ordered" in str(scaled(joined).report(cores=4))


# --- Injected defects -------------------------------------------------------------------------------------------------


def slip(holder, name, changes, used_in=None):
    """Returns a defect that replaces text in the source of a function or of a class's method."""

    def patch(monkeypatch):
        function = getattr(holder, name)
        code, scope = textwrap.dedent(inspect.getsource(function)), dict(function.__globals__)
        for old, new in changes.items():
            assert old in code
            code = code.replace(old, new)
        exec(code, scope)
        monkeypatch.setattr(used_in or holder, name, scope[name])

    return patch


def take_turns_by_the_tile(patch):
    change_pieces(patch, lambda piece: dataclasses.replace(piece, ordinal=piece.tile))


def await_parts_of_own_tiles_alone(patch):
    begin = TERMS.begin
    patch.setattr(TERMS, "begin", lambda self: pl.when(self.exchange.is_own(self.tile))(lambda: begin(self)))


def do_not_wait_in_the_second_cta(patch):
    wait = lambda barrier: pl.when(lax.axis_index(RANK_AXIS) == 0)(lambda: plgpu.barrier_wait(barrier))  # noqa: E731
    within(patch, "_store", barrier_wait=wait)


def launched(config, shape, cores):
    return lambda: (blackwell_cases.launched(config, shape, cores), cores)


def exchanged(along, block=(136, 264), config=SUMS):
    return lambda: (blackwell_cases.on_blackwell(protocol_cases.of_sums(along, config, 3, block=block)), 2)


PROGRAMS = {
    "one": launched(ONE, (640, 128, 192), 1),
    "192": launched(ONE.replace(tile_n=192), (640, 400, 192), 2),
    "pair": launched(PAIR, SHAPE, 2),
    "pairs": launched(PAIR, (1280, 200, 192), 4),
    "cut": launched(ONE.replace(stream_k=3), (640, 64, 640), 4),
    "cut pair": launched(PAIR.replace(stream_k=3), (1000, 128, 640), 6),
    "scatter": exchanged("m"),
    "ring": exchanged("ring m", (16, 136)),
    "ring, one load": exchanged("ring m", (16, 64), SUMS.replace(tile_n=64)),
}
MMA, TOLD, TERMS = "    plgpu.tcgen05_mma(", "tell_stored(buffers, piece.", blackwell._Terms
COMMIT = "    plgpu.tcgen05_commit_arrive(buffers.accumulated.at[_turn(piece.ordinal)], collective_axis=pair)\n"
READ = "values = exchange.term_values(self.exchange, self.buffers, term_buffer, 0)\n"
LOAD = "pl.when(load_index + TERM_BUFFERS < self.loads)(lambda: self._load(load_index + TERM_BUFFERS))\n"
issue = functools.partial(slip, blackwell, "_issue_k_step")
WORK, NEXT = "        role(loop, buffers, tile, piece, *more)\n", "        return read("
# fmt: off
INJECTED = {
    "tell after each product": ("pair", "missed phase", issue({MMA: COMMIT + MMA})),
    "begin by the tile's k": ("cut", "nobody has", issue({"k > 0": "piece.k_first + k > 0"})),
    "multiply all of a part": ("cut", "deadlock", slip(blackwell, "_multiply", {"piece.k_": "loop.work.k_"})),
    "wait a tile late": ("one", "accumulators", slip(blackwell, "_await_drained", {">= ACC": "> ACC"})),
    "commit in both": ("pair", "deadlock", slip(blackwell, "_multiply", {"_by_the_first(config, issue)": "issue()"})),
    "tell by tile": ("scatter", "deadlock", slip(blackwell, "_store", {TOLD + "ordinal": TOLD + "tile"})),
    "other columns": (
        "192", "accumulators", slip(blackwell.Buffers, "accumulator", {"self.plan.wg_tile.columns": "128"})
    ),
    "load too early": ("scatter", "term_boxes", slip(TERMS, "__call__", {LOAD: "\n", READ: LOAD + "        " + READ})),
    "refill one late": ("pair", "TMA load, write", slip(produce, "produce", {">= config.stages": "> config.stages"})),
    "same columns": ("pair", "Mismatch", slip(produce, "_operand_loads", {"rhs_start + me *": "rhs_start + 0 *"})),
    "own part": ("pair", "Mismatch", slip(staging, "_load_box", {" - rank * sizes[along]": ""})),
    "a store less": ("one", "TMA store, read", slip(store, "store", {"_stores_read(0)": "_stores_read(1)"}, finish)),
    "mail too early": ("scatter", "missed phase", slip(drawn, "for_each", {WORK: "", NEXT: WORK + NEXT})),
    "turns by tile": ("pairs", "deadlock", take_turns_by_the_tile),
    "load too many": ("ring, one load", "", slip(TERMS, "begin", {"min(TERM_BUFFERS, self.loads)": "TERM_BUFFERS"})),
    "own tiles alone": ("ring", "deadlock", await_parts_of_own_tiles_alone),
    "wait in the first": ("pair", "accumulators", do_not_wait_in_the_second_cta),
    "leave too early": ("pair", "freed too early", lambda patch: patch.setattr(blackwell, "wait_stores_read", NOTHING)),
    "sums in one place": ("cut pair", "race", lambda patch: patch.setattr(finish, "rank", lambda config: 0)),
}
# fmt: on


@pytest.mark.parametrize(("program", "words", "defect"), INJECTED.values(), ids=INJECTED)
def test_each_injected_defect_is_reported(program, words, defect, monkeypatch):
    """Either the emulator reports the defect, or the result differs from the oracle."""
    defect(monkeypatch)
    kernel, cores = PROGRAMS[program]()
    with pytest.raises((EmulationError, AssertionError), match=words):
        for seed in range(12):
            kernel.run(cores=cores, completion=("eager", "late", "random")[seed % 3], seed=seed)
