"""Defects of clusters that compute a tile together, each injected by a patch: (program, words of the report, defect).

The programs are in `test_clusters_along_k_protocol.py`. Most defects replace source text of one function. HARMLESS
holds changes that do no harm, with the reason.
"""

from __future__ import annotations

import functools

from overlap.kernels.stream_k import StreamK
from overlap.kernels.tma import cluster_sums, finish, produce, staging
from tests.protocol.scatter_defects import NOTHING
from tests.protocol.test_blackwell_found import slip

exchange = functools.partial(slip, cluster_sums, "finish_in_cluster", used_in=finish)
k_steps = functools.partial(slip, StreamK, "_k_steps_of")
piece = functools.partial(slip, StreamK, "piece")
sums_type = functools.partial(slip, cluster_sums, "cluster_sums_type", used_in=staging)
pieces = functools.partial(slip, produce, "for_each_piece")
loads = functools.partial(slip, produce, "produce")

AWAIT_STORED = "plgpu.barrier_wait(shared.stored.at[wg_tile])"
TELL_STORED = "plgpu.barrier_arrive(shared.stored.at[wg_tile])"
TELL_READ = "plgpu.barrier_arrive(shared.read.at[wg_tile])"
BEFORE_THE_NEXT = "pl.when(piece.ordinal > 0)(lambda: cluster_sums.await_readers(sums))"
AT_THE_END = "plgpu.barrier_wait(shared.read.at[wg_tile])"
ALL_MULTIPLIED, TELL_MULTIPLIED = "plgpu.barrier_wait(shared.multiplied)", "plgpu.barrier_arrive(shared.multiplied)"
STORE = "shared.sums[wg_tile, box] = block(box)"
SHARE = "share(piece.rank, piece.wg_tiles * boxes, ctas)"
OF_ALL = "for cta in range(ctas))"
BEFORE = "num_ctas, ordinal * k_steps"
LOOP = "@pl.loop(jnp.maximum(begin, first), jnp.minimum(end, first + boxes))"


def replace(holder, name, value):
    return lambda patch: patch.setattr(holder, name, value)


# fmt: off
INJECTED = {
    # Barriers.
    "sums not awaited": ("tiles", "race|missed phase", exchange({AWAIT_STORED: "pass"})),
    "sums awaited by the first CTA alone": ("tiles", "race|missed phase",
        exchange({AWAIT_STORED: f"pl.when(piece.rank == 0)(lambda: {AWAIT_STORED})"})),
    "sums not told": ("tiles", "deadlock", exchange({TELL_STORED: "pass"})),
    "sums not told by the last CTA": ("tiles", "deadlock",
        exchange({TELL_STORED: f"pl.when(piece.rank < ctas - 1)(lambda: {TELL_STORED})"})),
    "told before they are stored": ("tiles", "race",
        exchange({TELL_STORED: "pass", f"for box in range(boxes):\n        {STORE}":
            f"{TELL_STORED}\n    for box in range(boxes):\n        {STORE}"})),
    "told to the other warpgroup": ("tiles", "race|missed phase",
        exchange({TELL_STORED: TELL_STORED.replace("[wg_tile]", "[1 - wg_tile]")})),
    "await the other warpgroup": ("tiles", "race|missed phase",
        exchange({AWAIT_STORED: AWAIT_STORED.replace("[wg_tile]", "[1 - wg_tile]")})),
    "one barrier for both warpgroups": ("tiles", "race|missed phase|too early",
        exchange({".at[wg_tile])": ".at[0])"})),
    "two arrivals": ("tiles", "deadlock", sums_type({"num_arrivals=1": "num_arrivals=2"})),
    "stored before the other warpgroup has multiplied": ("one", "race|missed phase",
        exchange({ALL_MULTIPLIED: "pass"})),
    "products not told": ("one", "deadlock", exchange({TELL_MULTIPLIED: "pass"})),
    "products of one warpgroup are enough": ("one", "race|missed phase|too early",
        sums_type({"num_arrivals=wg_tiles": "num_arrivals=1"})),
    "readers not awaited before the next loads": ("tiles", "race|missed phase",
        replace(cluster_sums, "await_readers", NOTHING)),
    "readers awaited before the first loads, too": ("tiles", "deadlock",
        loads({BEFORE_THE_NEXT: "cluster_sums.await_readers(sums)"})),
    "readers of one warpgroup awaited before the next loads": ("tiles", "race|missed phase",
        slip(cluster_sums, "await_readers", {"range(shared.sums.shape[0])": "range(1)"})),
    "readers not awaited at the end": ("tiles", "left the cluster too early|missed phase",
        exchange({AT_THE_END: "pass"})),
    "readers of one tile not awaited": ("one", "left the cluster too early", exchange({AT_THE_END: "pass"})),
    "the first CTA does not await readers at the end": ("one", "left the cluster too early",
        exchange({AT_THE_END: f"pl.when(piece.rank > 0)(lambda: {AT_THE_END})"})),
    "read told before it is read": ("tiles", "race",
        exchange({TELL_READ: "pass", LOOP: f"{TELL_READ}\n    {LOOP}"})),
    "read not told": ("tiles", "deadlock", exchange({TELL_READ: "pass"})),
    "read not told by those who have no box": ("no boxes", "deadlock",
        exchange({TELL_READ: f"pl.when(begin < end)(lambda: {TELL_READ})"})),
    "read told before the last tile is read": ("one", "too early",
        exchange({TELL_READ: "pass", LOOP: f"{TELL_READ}\n    {LOOP}"})),
    # Whose sums are added.
    "own sums alone": ("one", "not equal", exchange({"jnp.int32(cta)": "piece.rank"})),
    "the first CTA's alone": ("one", "not equal", exchange({"jnp.int32(cta)": "jnp.int32(0 * cta)"})),
    "not the last CTA's": ("one", "not equal", exchange({OF_ALL: "for cta in range(ctas - 1))"})),
    "not the first CTA's": ("one", "not equal", exchange({OF_ALL: "for cta in range(1, ctas))"})),
    "sums of the first box": ("tiles", "not equal",
        exchange({"shared.sums.at[wg_tile, number - first]": "shared.sums.at[wg_tile, 0 * number]"})),
    "sums of the first warpgroup": ("tiles", "race|not equal",
        exchange({"shared.sums.at[wg_tile, number": "shared.sums.at[0, number"})),
    "one place for both warpgroups": ("tiles", "race", exchange({STORE: STORE.replace("wg_tile", "0")})),
    "the last box not stored": ("tiles", "not equal",
        exchange({"in range(boxes):": "in range(boxes - 1):"})),
    "the first rows twice": ("blocks", "not equal", exchange({"pl.ds(row, rows)": "pl.ds(0, rows)"})),
    "transposed as it lies": ("swapped", "Out of bound slice",
        exchange({"where[::-1] if piece.transposed else where": "where"})),
    "room for upright sums": ("swapped", "Invalid shape",
        sums_type({"(box_width, rows) if transposed else": "(rows, box_width) if transposed else"})),
    # Who finishes which box.
    "all finish the first share": ("one", "race",
        exchange({SHARE: SHARE.replace("piece.rank", "0 * piece.rank")})),
    "a box finished twice": ("one", "race", exchange({LOOP: LOOP.replace("minimum(end,", "minimum(end + 1,")})),
    "a box never finished": ("one", "not equal",
        exchange({LOOP: LOOP.replace("minimum(end,", "minimum(end - 1,")})),
    "boxes of one warpgroup": ("one", "not equal",
        exchange({SHARE: SHARE.replace("piece.wg_tiles * ", "")})),
    "shares of more CTAs": ("one", "not equal", exchange({SHARE: SHARE.replace("ctas)", "2 * ctas)")})),
    "stored in another box": ("tiles", "race|not equal",
        exchange({"finish(number - first, total)": "finish(0 * number, total)"})),
    # Which k steps a CTA takes.
    "all take the first k steps": ("one", "not equal", piece({"self._k_steps_of(rank,": "self._k_steps_of(0 * rank,"})),
    "a k step twice": ("uneven", "not equal", k_steps({"index * length + smaller(index, longer)": "index * length"})),
    "a k step left out": ("uneven", "not equal", k_steps({"length + choose(index < longer, 1, 0)": "length"})),
    "the last ones are longer": ("uneven", "not equal", k_steps({"index < longer": "index >= longer"})),
    "stages counted for all k steps": ("a k step each", "deadlock",
        piece({BEFORE: "num_ctas, ordinal * self.k_steps"})),
    "stages counted anew": ("tiles", "race",
        piece({BEFORE: "num_ctas, 0 * ordinal * k_steps"})),
    "rank unknown": ("one", "not equal", pieces({", rank(loop.config))": ")"})),
    # Which tiles a cluster has.
    "as many tiles as its index says": ("132 cores", "race",
        slip(StreamK, "pieces", {"self._number(cta)": "cta"})),
}
HARMLESS = {
    # Any CTA may finish any box.
    "the last CTA has the first share": ("one",
        exchange({SHARE: SHARE.replace("piece.rank", "ctas - 1 - piece.rank")})),
    # Then the CTAs with the first shares finish the boxes of both warpgroups. All boxes are finished, and none twice.
    "counted from the first warpgroup": ("one", exchange({"first = wg_tile * boxes": "first = 0 * wg_tile"})),
    # Each CTA waits for the one phase before it arrives at the next, so one barrier could serve both.
    "one barrier for stored and read": ("one", exchange({"shared.read.at": "shared.stored.at"})),
    # Whichever CTA finishes a box commits its own stores, and by the emulator's rules all that it knows of. The kernel
    # does not rely on one CTA's fence for the stores of another.
    "stores not committed": ("tiles", exchange({"plgpu.commit_smem()": "pass"})),
    # Sums of integers are exact in any order; `test_the_same_bits_under_every_schedule` tells orders apart.
    "added from the last to the first": ("tiles", exchange({OF_ALL: "for cta in reversed(range(ctas)))"})),
}
# fmt: on
