"""Defects of warpgroups that take turns, each injected by a patch: (program, words of the report, defect).

The programs are in `test_pingpong.py`. Most defects replace source text of one function. HARMLESS holds changes that do
no harm, with the reason.
"""

from __future__ import annotations

import functools

from overlap.kernels.hopper import mainloop as hopper
from overlap.kernels.tma import drawn, exchange, finish, produce, staging, store
from overlap.primitives import wait_stores_read
from tests.scatter_defects import NOTHING, within
from tests.test_blackwell_found import slip
from tests.test_protocol_cut_tiles import move_flags

accumulate = functools.partial(slip, hopper, "_accumulate")
compute = functools.partial(slip, hopper, "_compute")
plan = functools.partial(slip, hopper, "_plan")
run = functools.partial(slip, hopper.Hopper, "run")
whose = functools.partial(slip, hopper, "_compute_own_turns")
part_index = functools.partial(slip, hopper, "_wg_tile_index")
pieces = functools.partial(slip, produce, "for_each_piece")
full_at = functools.partial(slip, staging.Buffers, "full_at")
stores = functools.partial(slip, store, "store", used_in=finish)
exchanged = functools.partial(slip, finish, "_finish_exchanged")

FULL, ONE_FULL = "buffers.full_at(piece, stage)", "buffers.full.at[stage]"
COUNT, BEFORE = "pieces - first + every - 1", "buffers.consumed.at[last]"
IN_STEP = "plgpu.wgmma_wait(1)\n            plgpu.barrier_arrive("
DONE = "plgpu.barrier_arrive(mail.taken.at[remainder(ordinal, MAILBOXES)])"
OWNER = "remainder(ordinal, 2) == (more[0] if more else remainder(ordinal, 2))"


def replace(holder, name, value):
    return lambda patch: patch.setattr(holder, name, value)


def flags(**moves):
    return lambda patch: move_flags(patch, **moves)


def of_the_other_part(worker, rank, part):
    return worker, rank, 1 - part


# fmt: off
INJECTED = {
    # Full and consumed barriers of the pipeline stages.
    "one full barrier for both": ("one", "buffers.lhs", full_at({"self.plan.taking_turns == 1": "True"})),
    "wait at the other's barrier": ("one", "buffers.lhs", accumulate({FULL: ONE_FULL})),
    "fill the other's barrier": ("one", "deadlock", slip(produce, "produce", {FULL: ONE_FULL})),
    "turns by tile": ("two cores", "buffers.lhs", full_at({"piece.ordinal": "piece.tile"})),
    "barriers that overlap": ("one", "buffers.lhs|missed phase", full_at({"* self.stages": "* (self.stages - 1)"})),
    "two arrivals": ("one", "deadlock", plan({"wg_tiles + types.forwards": "2 + types.forwards"})),
    "arrive before it is read": ("one", "TMA load, write", accumulate({"wgmma_wait(1)": "wgmma_wait(2)"})),
    "arrive for this stage": ("one", "deadlock",
        accumulate({IN_STEP + BEFORE: IN_STEP + "buffers.consumed.at[stage]"})),
    "arrive for another stage": ("one", "deadlock",
        accumulate({BEFORE: "buffers.consumed.at[remainder(last + piece.k_steps, config.stages)]"})),
    "count stages anew": ("one", "buffers.lhs|deadlock",
        accumulate({"begin = remainder(piece.before": "begin = remainder(0 * piece.before"})),
    "multiply one stage again and again": ("one", "missed phase|deadlock|race",
        accumulate({"stage = following(last, config.stages)": "stage = last"})),
    "fill one stage again and again": ("one", "deadlock|race",
        slip(produce, "produce", {"return following(stage, config.stages)": "return stage"})),
    "fill from the first stage": ("one", "buffers.lhs|deadlock",
        slip(produce, "produce", {"remainder(piece.before + early,": "remainder(0 * piece.before + early,"})),
    "count own stages alone": ("one", "deadlock", accumulate({"piece.before": "(piece.ordinal // 2 * piece.k_steps)"})),
    "refill one late": ("one", "TMA load, write", slip(produce, "produce", {">= config.stages": "> config.stages"})),
    "forwarder waits at one": ("ring", "deadlock", slip(produce, "forward", {FULL: ONE_FULL})),
    "barriers for one": (
        "one", "race|missed phase|deadlock",
        plan({"taking_turns=COMPUTE_WARPGROUPS if in_turn else 1": "taking_turns=1"}),
    ),
    # Which warpgroup has which tiles.
    "both begin with the first": ("one", "missed phase|wgmma", run({"first=warpgroup": "first=0"})),
    "both have all": ("one", "missed phase|wgmma", run({"every=COMPUTE_WARPGROUPS": "every=1"})),
    "begin one late": ("one", "deadlock", run({"first=warpgroup": "first=warpgroup + 1"})),
    "a tile too few": ("one", "deadlock", pieces({COUNT: "pieces - first"})),
    "a tile too many": ("one", "buffers.full", pieces({COUNT: "pieces - first + every"})),
    "step of one": ("one", "missed phase|TMA load, write", pieces({"turn * every": "turn"})),
    "nobody but the first": (
        "one", "buffers.full", run({"COMPUTE_WARPGROUPS if in_turn else buffers.plan.wg_tiles": "1"})
    ),
    "drawn by the first": ("scatter", "race", whose({"== warpgroup": "== 0"})),
    "drawn by number": ("scatter, two cores", "race", whose({"piece.ordinal": "piece.tile"})),
    # What each warpgroup stores.
    "one epilogue buffer": ("one", "buffers.out", stores({"view.at[output.warpgroup]": "view.at[0]"})),
    "a store less": ("one", "buffers.out", stores({"read(0)": "read(1)"})),
    "one addend barrier": ("addend", "addend_loaded", stores({"output.warpgroup * box_views.shape[0] + box": "box"})),
    "corner by warpgroup": ("one", "out of bounds", part_index({"return 0, 0, 0": "return 0, warpgroup, 0"})),
    "column by warpgroup": ("one", "out of bounds", part_index({"return 0, 0, 0": "return 0, 0, warpgroup"})),
    "leave too early": ("one", "freed too early", replace(hopper, "wait_stores_read", NOTHING)),
    # Tiles cut along k.
    "signal the other part": ("cut", "to reach 1, got 0", flags(signalled=of_the_other_part)),
    "wait for the other part": ("cut", "to reach 1, got 0", flags(awaited=of_the_other_part)),
    # Parts received from peers, and parts sent to peers.
    "told at once": ("scatter", "output 1", replace(exchange, "wait_stores_landed", NOTHING)),
    "told when read": ("scatter", "output 1", replace(exchange, "wait_stores_landed", wait_stores_read)),
    "told later": ("scatter", "output 1",
        replace(hopper, "_tells_later", lambda loop: loop.hooks.exchange is not None)),
    "told of one barrier": ("scatter", "deadlock|missed phase",
        compute({"tell_stored(buffers, piece.ordinal)": "tell_stored(buffers)"})),
    "told by tile": ("scatter, two cores", "deadlock",
        compute({"tell_stored(buffers, piece.ordinal)": "tell_stored(buffers, piece.tile)"})),
    "told before": ("scatter", "output 1", compute({
        "finish(loop, buffers": "exchange.tell_stored(buffers, piece.ordinal); finish(loop, buffers",
        "and not _tells_later(loop)": "and False"})),
    "told of one sent": ("one shot", "deadlock",
        exchanged({"piece.ordinal)\n        if": "0 * piece.ordinal)\n        if"})),
    "one stored barrier": ("scatter", "buffers.stored|output 1",
        plan({"stored_barriers=COMPUTE_WARPGROUPS": "stored_barriers=1"})),
    "announced unseen": ("scatter", "output 1",
        lambda patch: within(patch, exchange, "announce", barrier_wait=NOTHING)),
    "stored by two": ("scatter", "deadlock",
        slip(staging, "buffer_types", {"num_arrivals=plan.wg_tiles": "num_arrivals=2"})),
    "part by warpgroup": ("scatter", "out of bounds", part_index({"return 0, 0, 0": "return warpgroup, 0, 0"})),
    "terms by warpgroup": ("scatter", "out of bounds",
        compute({"buffers, piece, wg_tile_index)": "buffers, piece, warpgroup)"})),
    "boxes by warpgroup": ("scatter", "out of bounds",
        stores({"= output.wg_tile_index *": "= output.warpgroup *"})),
    "terms at one barrier": ("scatter", "missed phase", slip(exchange, "sum_of_terms", {FULL: ONE_FULL})),
    "load terms at one": ("scatter", "deadlock", slip(exchange, "load_terms", {FULL: ONE_FULL})),
    "mail for two": ("scatter", "mail.numbers",
        plan({"(COMPUTE_WARPGROUPS if in_turn else wg_tiles) + 1": "wg_tiles + 1"})),
    "mail for four": ("scatter", "deadlock", plan({"(COMPUTE_WARPGROUPS if in_turn else wg_tiles) + 1": "4"})),
    "mail read by the owner": ("scatter", "deadlock",
        slip(drawn, "for_each", {DONE: f"pl.when({OWNER})(lambda: {DONE})"})),
    "send before peers begin": ("one shot", "too early",
        exchanged({"piece.ordinal < buffers.plan.taking_turns": "piece.ordinal < 0"})),
}
HARMLESS = {
    # Either warpgroup may begin: each has its own buffers, and barriers belong to the tile.
    "the second begins": ("one", run({"first=warpgroup": "first=1 - warpgroup"})),
    # Before the producer loads the second tile, it has waited for all parts of the first. So all peers have begun.
    "only the first waits": ("one shot", exchanged({"< buffers.plan.taking_turns": "< 1"})),
}
# fmt: on
