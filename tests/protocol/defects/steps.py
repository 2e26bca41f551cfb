"""Defects of several statements, or of a kind that `source` does not make: (kernel, changed text) for each.

A change is (function below `overlap`, old text, new text). The kernels are those of `kernels` and PROGRAMS.
"""

from __future__ import annotations

from collections.abc import Callable

import overlap
from tests.protocol.defects.kernels import KERNELS
from tests.protocol.protocol_cases import (
    BF16, FEW, JOINED, ONE, ONE_SHOT, PULL, SPREAD, SUMS, SUMS_BY_RING, Form, Kernel, of_product, of_rows, of_sums,
    of_weights, on_blackwell,
)  # fmt: skip

type Change = tuple[str, str, str]
_PLAIN = overlap.Config(tile_n=64, stages=2)
_SMALL = overlap.Config(tile_n=128, stages=2)
_TILE = overlap.Config(tile_m=64, tile_n=128, stages=2)
_TURNS = _TILE.replace(schedule="pingpong")
_SWAP = _TILE.replace(swap_operands=True)
_CUT = overlap.Config(tile_n=128, stages=2, stream_k=8, cluster=2)
_B200 = overlap.Config(tile_m=128, tile_n=64, stages=2, chunk_bytes=4096)
_PAIR = _B200.replace(tile_n=128, cluster=2)
_CUT_LEFT = Form(136, (64,), 200)
# Kernels beside those of `KERNELS`: how each is made, and the number of cores of a device.
PROGRAMS: dict[str, tuple[Callable[[], Kernel], int]] = {
    "uneven rows": (lambda: of_rows(Form(133, (64,), 64), _PLAIN.replace(chunk_bytes=2048), 2), 3),
    "uneven columns": (lambda: of_rows(Form(70, (64,), 8 * 37), _PLAIN.replace(chunk_bytes=256), 2), 3),
    "pull, few chunks": (
        lambda: of_rows(Form(128, (64, 64), 192, scales=("rows",), container=list),
                        _PLAIN.replace(chunk_bytes=65536)), 6),
    "joined, few chunks": (lambda: of_rows(Form(24, (136, 128), 200, scales=("rows", "columns"), container=list),
                                           JOINED.replace(chunk_bytes=65536)), 6),
    "joined, tiles": (
        lambda: of_rows(Form(24, (136, 128), 200, gathered=True, container=list), JOINED.replace(chunk_bytes=256)), 3),
    "joined, swapped": (
        lambda: of_rows(Form(40, (136,), 136, scales=("rows",)), JOINED.replace(tile_m=72, swap_operands=True)), 2),
    "pull, swapped": (
        lambda: of_rows(Form(200, (64,), 136, scales=("rows",)),
                        PULL.replace(tile_m=72, tile_n=128, swap_operands=True), 2), 2),
    "rhs n, blocks": (lambda: of_weights("n", _SMALL, m=128, shard=(576, 128)), 3),
    "rhs k, blocks": (lambda: of_weights("k", _SMALL, m=128, shard=(576, 128)), 3),
    "rhs k, cut": (lambda: of_weights("k", _SMALL.replace(stream_k=4), 2, m=128, shard=(192, 128)), 5),
    "rhs k, parts": (lambda: of_weights("k", _SMALL.replace(chunk_bytes=192), 2, m=128, shard=(64, 288)), 4),
    "rhs k, pairs": (
        lambda: of_weights("k", _PLAIN.replace(cluster=2, cluster_along="n"), 2, m=128, shard=(64, 136)), 4),
    "ring, cut": (lambda: of_rows(_CUT_LEFT, _PLAIN.replace(stream_k=3), 2, "ring"), 13),
    "ring, wave": (
        lambda: of_rows(Form(200, (72, 136), 200, container=list), _PLAIN.replace(stream_k=3), 3, "ring"), 7),
    "ring, rows": (lambda: of_rows(Form(200, (136,), 136), _PLAIN, 3, "ring"), 3),
    "ring, along n": (
        lambda: of_rows(Form(136, (136,), 136), _PLAIN.replace(cluster=2, cluster_along="n"), 3, "ring"), 4),
    "ring, batch": (
        lambda: of_rows(Form(72, (72,), 136, (2,), gathered=True), _PLAIN.replace(stream_k=3), 3, "ring"), 5),
    "cut clusters": (lambda: of_product((384, 128, 448), _CUT), 12),
    "pull, cut clusters": (lambda: of_rows(Form(128, (128,), 320), _CUT, 2), 9),
    "pull, along n": (lambda: of_rows(Form(128, (128,), 192), _CUT.replace(cluster_along="n"), 2), 9),
    "scatter, stages": (lambda: of_sums("m", SUMS.replace(stages=8), 2), 1),
    "scatter, 3 stages": (lambda: of_sums("m", SUMS.replace(stages=3)), 2),
    "spread, tiles": (lambda: of_sums(SPREAD, SUMS.replace(stages=3)), 2),
    "spread, bias": (lambda: of_sums(SPREAD, devices=2, block=(16, 72), bias=True), 2),
    "one shot, scale": (lambda: of_sums(ONE_SHOT, devices=2, row_scale=True), 2),
    "ring, sums, few": (lambda: of_sums(SUMS_BY_RING, _TILE, block=(16, 72)), 2),
    "scatter, in turn": (lambda: of_sums("m", SUMS.replace(schedule="pingpong")), 2),
    "one shot, in turn": (lambda: of_sums(ONE_SHOT, SUMS.replace(schedule="pingpong")), 2),
    "pingpong, odd": (lambda: of_product((200, 264, 192), _TURNS), 1),
    "square": (lambda: of_product((128, 128, 128), _SWAP, out=BF16, extras=("lhs_scale",)), 1),
    "blocks": (lambda: of_product((208, 128, 128), _SWAP.replace(tile_m=104), out=BF16, extras=("lhs_scale",)), 1),
    "few rows": (lambda: of_product((16, 264, 192), _SWAP.replace(tile_m=72), out=BF16), 1),
    "pieces": (lambda: of_product((72, 256, 128), _SWAP.replace(tile_m=72, tile_n=256), out=BF16), 1),
    "cut, swapped": (
        lambda: of_product((104, 1024, 256), _SWAP.replace(tile_m=104, tile_n=256, stream_k=2), out=BF16), 3),
    "blackwell, cut": (lambda: on_blackwell(of_product((640, 64, 640), _B200.replace(stream_k=3), out=BF16)), 4),
    "blackwell, pairs": (lambda: on_blackwell(of_product((1280, 200, 192), _PAIR, out=BF16)), 4),
    "blackwell, cut pair": (lambda: on_blackwell(of_product((1000, 128, 640), _PAIR.replace(stream_k=3), out=BF16)), 6),
    "blackwell, scatter": (
        lambda: on_blackwell(of_sums("m", _B200.replace(tile_n=128), block=(136, 264))), 2),
    "blackwell, ring": (
        lambda: on_blackwell(of_sums(SUMS_BY_RING, _B200.replace(tile_n=128), block=(16, 136))), 2),
    "blackwell, ring, one load": (lambda: on_blackwell(of_sums(SUMS_BY_RING, _B200, block=(16, 64))), 2),
}  # fmt: skip
assert FEW and ONE and not PROGRAMS.keys() & KERNELS.keys()

H, PULLS = "primitives.handshake.Handshake.", ("pull", "joined", "rhs n", "rhs k")
ALL = (*PULLS, "scatter m", "ring")
COMMUNICATOR = "collectives.communicator.Communicator."
BLOCK = "collectives.communicator.wait_for_block"
GATHER, RING = "collectives.gather.", "collectives.gather.ring."
ROWS, WEIGHTS = GATHER + "lhs_schedule.AllGatherSchedule.", GATHER + "rhs_schedule.GatherRhsSchedule."
JOIN, OF_WEIGHTS = GATHER + "joined_schedule.JoinedSchedule.", GATHER + "rhs_kernel._Body."
SUM, SHOT = "collectives.reduce.blocks_kernel._Body.", "collectives.reduce.one_shot_kernel._Body."
PARTS, STRIPS = "collectives.reduce.blocks_schedule.ReduceScatterSchedule.", "collectives.reduce.blocks_schedule.Strips."
HOPPER, BLACKWELL, TMA = "kernels.hopper.mainloop.", "kernels.blackwell.mainloop.", "kernels.tma."
TOGETHER, IN_CLUSTER = "kernels.partial_sums.finish_together", "kernels.tma.cluster_sums.finish_in_cluster"
LOOK, DRAW = "primitives.waits.look_until", "primitives.atomics.draw"
DRAWN = "inline(_draw(end), [counter], previous, returns=True)"
WORD = "wait_for_word(self.flags.at[flag], expected, group, peer, operation=self._number, role=role"
RAISED, STORED = "self._flag(_ARRIVED, step, tile)", "semaphore_signal(self._flag(_STORED, tile.step, tile))"
BESIDE = "dataclasses.replace(tile, n=1 - tile.n)"
AWAITED = f"handshake.wait_for(stalls.TERMS, {RAISED}, 1, schedule.sender(self.me, step))"
FULL, OF_STAGE = "buffers.full_at(piece, stage)", "buffers.full.at[stage]"
OTHER = "jax.lax.rem(receiver(step) + 1, group.size)"
FLAG, COUNT = "schedule.flag(step, row, column)", "schedule.flag_target(row, column)"
HAND_OVER = "    hand_over(partial.at(me, pl.ds(first_row, rows), pl.ds(first_column, columns)))\n"
RAISE = "    semaphore_signal(partial.flags.at[me, piece.rank, piece.wg_tile_index])\n"
FINISH, DRAINED = "    finish(loop, buffers, tile, piece, sums)\n", "    _tell_drained(buffers, piece.ordinal)\n"
COMMIT = "plgpu.tcgen05_commit_arrive(buffers.accumulated.at[_turn(piece.ordinal)], collective_axis=pair)"
GIVE, MMA_END = "        buffers.consumed.at[stage],\n", "**scales.to_tensor_memory(buffers.scales, stage, pair),\n    )"
LOAD = "            pl.when(load_index + TERM_BUFFERS < self.loads)(lambda: self._load(load_index + TERM_BUFFERS))\n"
READ = "            values = exchange.term_values(self.exchange, self.buffers, term_buffer, 0)\n"
WORK = "        role(loop, buffers, tile, piece, *more)\n"
DONE = "        plgpu.barrier_arrive(mail.taken.at[remainder(ordinal, MAILBOXES)])\n"
BEGIN = "begin = remainder(piece.before, config.stages)"
TOLD, AWAIT_TOLD = "plgpu.barrier_arrive(shared.stored.at[wg_tile])", "plgpu.barrier_wait(shared.stored.at[wg_tile])"
STORE, SHARE = "        shared.sums[wg_tile, box] = block(box)\n", "share(piece.rank, piece.wg_tiles * boxes, ctas)"
SUM_READ, LOOP = "    plgpu.barrier_arrive(shared.read.at[wg_tile])\n", "    @pl.loop(jnp.maximum(begin, first), jnp.minimum(end"
OPERAND_SLICE = "rhs_mma.at[stage], wg_n_index"
LAX, PALLAS = "__import__('jax').lax", "__import__('jax.experimental.pallas', fromlist=['when'])"
MOSAIC = "__import__('jax.experimental.pallas.mosaic_gpu', fromlist=['kernel'])"

# --- Devices and CTAs that are late ---------------------------------------------------------------------------------

LOWERED = "wait_for_word(self.flags.at[0], _LOWERED, self.group, self.group.me(), operation=0, role=stalls.BEGUN)"
# On each device, CTA 0's communicator begins when the other CTAs have lowered the ready flag.
BEGIN_LATE: Change = (
    H + "_begin", "marks.now(Work.AWAIT_PEERS)", f"pl.when(self.cta == 0)(lambda: {LOWERED})"
)  # fmt: skip


def raise_late(victim: int) -> list[Change]:
    """A device raises its ready flag only after its own CTAs have seen all peers' ready flags."""
    raised = "atomics.inline(self._raise_code, [self.flags.at[0]])"
    seen = "semaphore_wait(self.flags.at[_BEGUN], self.looks)"
    lines = [
        "late = jax.lax.axis_index('x') == " + str(victim),
        f"pl.when(late & (self.cta == 0))(lambda: ({seen}, {raised}, None)[-1])",
        f"pl.when(jax.lax.axis_index('x') != {victim})(lambda: {raised})",
    ]
    return [(H + "_raise", raised, "\n        ".join(lines))]


def _done(flags: str, victim: int, devices: int = 3) -> str:
    """Returns code by which a device waits until all its peers are done. `done` has a bit for each peer."""
    others, done = (1 << devices) - 1 - (1 << victim), 7
    wait = f"{MOSAIC}.semaphore_wait({flags}.at[{done}], {others}, decrement=False)"
    return f"{PALLAS}.when({LAX}.axis_index('x') == {victim})(lambda: {wait})"


def copy_late(victim: int) -> list[Change]:
    """A device copies only when its peers have copied everything and have said that they are done."""
    begun = "wait_within_device(self.flags.at[_BEGUN], self.looks)"
    return [(H + "await_peers", begun, f"{begun}\n        {_done('self.flags', victim)}")]


def send_parts_late(victim: int) -> list[Change]:
    begun = "        fence_async_proxy()\n"
    return [(H + "await_peers_by_warpgroup", begun, f"{begun}        {_done('self.flags', victim)}\n")]


def send_strips_late(victim: int) -> list[Change]:
    line = "(chunks, buffers_smem), counter = self.others, self.flags[1].at[0]\n"
    return [(COMMUNICATOR + "_copy_others", line, f"{line}        {_done('self.flags[0]', victim)}\n")]


# --- Defects ----------------------------------------------------------------------------------------------------------

# The names of the kernels of a defect, of which `make test` runs the first; and the changes.
# fmt: off
HANDSHAKES: dict[str, tuple[str | tuple[str, ...], *tuple[Change, ...]]] = {
    "raised again when late": (ALL, BEGIN_LATE, (H + "_raise_code",
        "atom.relaxed.sys.global.cas.b32 before, [$0], 0,", "st.relaxed.sys.global.b32 [$0],")),
    "look for nobody": (ALL, (H + "_begin", "self.looks, look)[0]", "self.looks, lambda item: None)[0]")),
    "look at the own ready flag": (ALL, (H + "_look", "peer), ready_flag], group", "group.me()), ready_flag], group")),
    "look for the same peer": (PULLS, (H + "_look", "item + 1 if", "0 * item + 1 if")),
    "look at the other neighbour": (("ring", "ring, sums"), (H + "_look", "else self.only)", "else group.size - self.only)")),
    "tell before looking": (ALL, (H + "_look", "        atomics.inline(self._look_code",
        "        atomics.set_bit_at_peer(self.flags.at[_SEEN], group, peer, group.me())\n        atomics.inline(self._look_code")),
    "begin when all but one have": (("pull", "rhs n", "scatter m"), (H + "await_peers", "self.looks)", "self.looks - 1)")),
    "begin when all but one have, by warpgroup": (ONE_SHOT, (H + "await_peers_by_warpgroup", "self.looks)", "self.looks - 1)")),
    "seen by another": (ALL, (H + "_look", "_SEEN], group, peer,", "_SEEN], group, group.peer(1 + 0 * group.me()),") , (H + "_look", "_BEGUN])", "_BEGUN])")),
    "seen by the wrong bit": (ALL, (H + "_look", "group, peer, group.me())", "group, peer, peer)")),
    "each number twice": (ALL, (DRAW, DRAWN, f"{DRAWN} // 2")),
    "one number again and again": (ALL, (DRAW, DRAWN, f"{DRAWN} * 0")),
    "stop drawing too early": (PULLS, (DRAW, "_draw(end)", "_draw(end - 1)")),
    "dealt beforehand": (("pull", "joined", "rhs k", "scatter m"), (DRAW, DRAWN,
        f"{LAX}.axis_index(__import__('overlap.kernels.grid', fromlist=['x']).GRID_AXIS)"
        " if isinstance(previous, int) else previous + 2")),
    "all but one done": (ALL, (H + "_wait", WORD, WORD.replace(
        "expected,", "expected & (expected - 1) if flag == _DONE else expected,") + ", at_least=flag == _DONE")),
    "the other neighbour done": ("ring", (H + "_wait", "group.peer(distance) for", "group.peer(group.size - distance) for")),
    "lowered after telling": (ALL, (H + "_speak", "        atomics.inline(self._lower_code, [flags.at[0]])\n", ""),
        (H + "_speak", "stalls.DONE, ())", "stalls.DONE, ()); atomics.inline(self._lower_code, [flags.at[0]])"),
        (H + "_speak", "stalls.DONE, both)", "stalls.DONE, both); atomics.inline(self._lower_code, [flags.at[0]])")),
    "done to the wrong peer": (ALL, (H + "_speak", "group.peer(distance), group.me())", "group.me(), group.me())")),
    "done by the wrong bit": (ALL, (H + "_speak", "group.peer(distance), group.me())",
        "group.peer(distance), group.peer(distance))")),
    "speak when the first has completed": ((*PULLS, SPREAD), (H + "leave", "before + completed == self.transfers", "before == 0")),
    "speak before the transfers": ((*PULLS, SPREAD), (H + "leave", "marks.now(Work.LEAVE)", "return"),
        (H + "await_peers", "_BEGUN], self.looks)", "_BEGUN], self.looks); pl.when(self.cta == 0)(self._speak)")),
    "count when they begin": (PULLS, (COMMUNICATOR + "run", "carried += self._copy(self.peers, number, first,",
        "self._copy(dataclasses.replace(self.peers, source=lambda *place: (handshake.leave(1),"
        " self.peers.source(*place))[1]), number, first,")),
    "signal within the GPU": (("scatter m", ONE_SHOT, "ring"), ("primitives.semaphores.semaphore_signal_peer",
        "device_id=device_id", "device_id=device_id, memory_scope='gpu'")),
    "scales are no transfers": (("pull, few chunks", "joined, few chunks"), (COMMUNICATOR + "run", "= self.scale_transfers + self", "= self"),
        (COMMUNICATOR + "run", "number, carried = each_drawn(", "number, _ = each_drawn(")),
    "scales are not carried": (("pull, few chunks", "joined, few chunks"), (COMMUNICATOR + "run", "number, carried = each_drawn(", "number, _ = each_drawn(")),
    "strips are no transfers": (SPREAD, (COMMUNICATOR + "run", "self.peers.count + others", "self.peers.count")),
}
GATHERS: dict[str, tuple[str | tuple[str, ...], *tuple[Change, ...]]] = {
    "another peer": (("pull", "rhs n", "rhs k"), ("primitives.peers.PeerGroup.peer", "self.me() + distance", "self.me() + self.size - distance")),
    "a chunk twice": ("pull", (ROWS + "chunk", "quotient(index, self.chunks)", "quotient(index := index - remainder(index, 2), self.chunks)")),
    "a chunk twice, joined": ("joined, tiles", (JOIN + "chunk", "quotient(index,", "quotient(index := index - remainder(index, 2),")),
    "a chunk twice, weights": (("rhs n", "rhs k"), (WEIGHTS + "chunk", "before = quotient(index,", "before = quotient(index := index - remainder(index, 2),")),
    "one flag for all rounds": ("pull", (ROWS + "flag", "step - 1, batch", "0 * step, batch")),
    "one chunk is enough": (("pull", "rhs k", "joined"), (BLOCK, "semaphore_wait(flag, times)", "semaphore_wait(flag, 1)")),
    "the fence before the wait": (("pull", "joined", SPREAD), (BLOCK, "semaphore_wait(flag, times)\n    fence_async_proxy()",
        "fence_async_proxy()\n    semaphore_wait(flag, times)")),
    "all chunks are whole": (("uneven rows", "uneven columns"), ("primitives.copies.Chunking.lacks", "if self.shard_rows %", "return 0 * row\n        if self.shard_rows %")),
    "the short rows left": ("uneven rows", ("primitives.copies.Chunking.row_groups", "ceil_div(self.shard_rows, self.rows)", "self.shard_rows // self.rows")),
    "the short columns left": ("uneven columns", ("primitives.copies.Chunking.chunks_per_row_group", "ceil_div(self.shard_cols, self.cols)", "self.shard_cols // self.cols")),
    "scales not counted": ("pull, scales", (ROWS + "flag_target", " + self.scaled", "")),
    "scales not counted, joined": ("joined, scales", (JOIN + "flag_target", " + scale_transfers", "")),
    "scales where the own ones belong": ("joined, scales", (GATHER + "joined_kernel._pull_scales", "group.me(), step, row)", "group.me(), 0 * step, row)")),
    "each shard has tiles of its own": ("joined", (JOIN + "flag_target", "(flags,) = self.flags_shape", "return self.chunking.chunks")),
    "the flag of the row within the shard": ("joined, tiles", (JOIN + "flag", "quotient(row,", "quotient(remainder(row, self.chunking.shard_rows),")),
    "own chunks from the peers' counter": ("joined", (COMMUNICATOR + "_copy_own", "self.flags[1].at[0]", "self.flags[0].at[8]")),
    "no flags for the own rows": ("joined", (GATHER + "joined_kernel._Body._communicate", "lhs_gmem.at[place],\n            destination,\n            landed,", "lhs_gmem.at[place],\n            destination,\n            lambda *_: None,")),
    "shards in the order of steps": ("joined", (JOIN + "row", "remainder(me + step, self.devices)", "step")),
    "a stage too many": ("joined", (TMA + "produce.produce", "jnp.minimum(piece.k_steps, config.stages)", "jnp.minimum(piece.k_steps, config.stages + 1)")),
    "ahead for every tile": ("joined, tiles", (TMA + "produce.produce", "jnp.where(piece.before == 0, ", "jnp.where(piece.before >= 0, ")),
    "the first block only": (("rhs n, blocks", "rhs k, blocks"), (WEIGHTS + "begins_block", "remainder(within, K_STEPS_PER_FLAG) == 0", "k_step == 0")),
    "another shard's flag": (("rhs n, blocks", "rhs k, blocks"), (WEIGHTS + "flag", "step - 1,", "0 * step,")),
    "no wait in a part": ("rhs k, cut", (OF_WEIGHTS + "_wait_for_block", "k_step == tile.k_first", "k_step == 0")),
    "the first row block's flag": ("rhs k, blocks", (OF_WEIGHTS + "_wait_for_block", FLAG, FLAG.replace("row", "0 * row"))),
    "the first column block's flag": ("rhs k, parts", (OF_WEIGHTS + "_wait_for_block", FLAG, FLAG.replace("column", "0 * column"))),
    "the first column block's count": ("rhs k, parts", (OF_WEIGHTS + "_wait_for_block", COUNT, COUNT.replace("column", "0 * column"))),
    "one of two column blocks": ("rhs k, parts", (OF_WEIGHTS + "_wait_for_block", "wait(last_column)", "wait(column)")),
    "columns that there are not": ("rhs k, pairs", (OF_WEIGHTS + "_wait_for_block", "column < schedule.chunking.shard_cols", "True")),
    "another shard of the left operand": ("rhs k", (WEIGHTS + "shard", "remainder(me + step, self.devices)", "step")),
    "rows of a tile below the last row": ("pull, cut clusters", (GATHER + "transport.Shards.wait_for_rows", "jnp.logical_and(tile.step > 0, tile.m < self.schedule.row_blocks)", "tile.step > 0")),
    "one rank waits for both": ("pull, along n", (BLOCK, "semaphore_wait(flag, times)",
        f"{PALLAS}.when({LAX}.axis_index(__import__('overlap.kernels.grid', fromlist=['x']).RANK_AXIS) == 0)(lambda: semaphore_wait(flag, times))")),
}
RINGS: dict[str, tuple[str | tuple[str, ...], *tuple[Change, ...]]] = {
    "one store unread": ("ring", (RING + "_pass_on", "wait_stores_read()", "wait_stores_read(1)")),
    "a part too few": ("ring, cut", (RING + "RingTransport.hook_in", "shards.tile_pieces,", "shards.tile_pieces - 1,")),
    "a part too many": ("ring", (RING + "RingTransport.hook_in", "shards.tile_pieces,", "shards.tile_pieces + 1,")),
    "wait as for this device": ("ring", (RING + "RingTransport.hook_in", "handshake.wait_for(\n                stalls.ROWS, ", "(lambda word, parts, _: __import__('overlap.primitives', fromlist=['x']).semaphore_wait(word, parts))(\n                ")),
    "rows without a proxy fence": ("ring", (LOOK, '"THERE:", *fences,', '"THERE:", *(fences[:1] if role == stalls.ROWS else fences),')),
    "a tile as one part": ("ring, wave", (RING + "_announce", "previous, shards.tile_pieces)", "previous, 1)")),
    "a part as a whole tile": ("ring, cut", (RING + "_announce", "previous, 1)", "previous, shards.tile_pieces)")),
    "signal the device after": ("ring", (RING + "_announce", "peer(shards.group.size - 1)", "peer(1)")),
    "signal before the first k step": ("ring", (RING + "RingTransport.hook_in", "_: _pass_on(shards, tile, k_step, lhs_smem),",
        "_: (pl.when(k_step == 0)(lambda: _announce(shards, tile, 1, row_flags)), _pass_on(shards, tile, k_step, lhs_smem))[-1],"),
        (RING + "RingTransport.hook_in", "tile, pieces: _announce(shards, tile, pieces, row_flags)", "*_: None")),
    "one flag for all steps": ("ring", (GATHER + "transport.Shards.flag", "self.schedule.flag(step,", "self.schedule.flag(0 * step + 1,")),
    "one flag for all row blocks": ("ring, rows", (GATHER + "transport.Shards.flag", "tile.m * self.config.tile_m", "0 * tile.m")),
    "a row block forgotten": ("ring, rows", (ROWS + "passes_on", "(m < self.row_blocks)", "(m < self.row_blocks) & (m != 1)")),
    "the first step forgotten": ("ring", (ROWS + "passes_on", "(side == 0)", "(step > 0) & (side == 0)")),
    "from every column": ("ring, rows", (ROWS + "passes_on", "& (n == 0)", "")),
    "from every side": ("ring, wave", (ROWS + "passes_on", "(side == 0) & ", "")),
    "both ranks pass on": ("ring, along n", (ROWS + "passes_on", "(n == 0)", "(n < 2)")),
    "k steps of a part from zero": ("ring, cut", (TMA + "produce.forward", "tile.k_first + piece.k_first + k", "k")),
    "batch elements in one place": ("ring, batch", (RING + "_pass_on", "tile.batch, there", "0 * tile.batch, there")),
    "stages of the own CTA": (("cluster m", "cluster n", "ring, along n"), (HOPPER + "_consumed", "if not config.shares_loads:", "if True:")),
    "half of the arrivals": ("cluster m", (HOPPER + "_consumed", "num_arrivals=arrivals", "num_arrivals=arrivals // 2")),
    "rows of another peer": ("ring", (RING + "_pass_on", "group.peer(group.size - 1)", "group.peer(1)"), (RING + "_announce", "peer(shards.group.size - 1)", "peer(1)"),
        (RING + "RingTransport.hook_in", "only=group.size - 1", "only=1"), (RING + "RingTransport.hook_in", "group.peer(1)", "group.peer(group.size - 1)")),
}
SUMMED: dict[str, tuple[str | tuple[str, ...], *tuple[Change, ...]]] = {
    "another tile announced": ("scatter m", (SUM + "hooks", f"part_stored=lambda tile: {STORED}", f"part_stored=lambda tile: {STORED.replace('step, tile', f'step, {BESIDE}')}")),
    "another tile's terms": (("scatter m", "ring, sums"), (SUM + "_await_terms", RAISED, RAISED.replace("step, tile", f"step, {BESIDE}"))),
    "another tile's boxes": (("scatter m", "ring, sums"), (SUM + "hooks", "tile.step, term), tile),", f"tile.step, term), {BESIDE}),")),
    "signal another peer": (("scatter m", "ring, sums"), (SUM + "_communicate", "arrived_there, group, receiver(step))", f"arrived_there, group, {OTHER})")),
    "send to another peer": (("scatter m", "ring, sums"), (SUM + "_communicate", "terms_gmem, receiver(step))", f"terms_gmem, {OTHER})")),
    "send to another slot": (("scatter m", "ring, sums"), (SUM + "_communicate", "receiver(step)), step, *where)", "receiver(1 - step)), 1 - step, *where)")),
    "the part of another step": ("scatter m", (SUM + "_communicate", "within(parts_gmem, step,", "within(parts_gmem, 1 - step,")),
    "a chunk twice": ("scatter m", (PARTS + "chunk", "_row_of_all(quotient(index,", "_row_of_all(quotient(index := index - remainder(index, 2),")),
    "the first term only": ("scatter m", (SUM + "_await_terms", "(tile.step, term)", "(tile.step, 0 * term)")),
    "the first term for all": ("scatter m", (SUM + "hooks", "(tile.step, term), tile", "(tile.step, 0 * term), tile")),
    "terms as of this device": ("scatter m", (SUM + "_await_terms", AWAITED, f"communicator.wait_for_block({RAISED}, 1)")),
    "terms without a proxy fence": (("scatter m", "ring, sums"), (LOOK, '"THERE:", *fences,', '"THERE:", *(fences[:1] if role == stalls.TERMS else fences),')),
    "terms acquired within the GPU": (("scatter m", ONE_SHOT), (LOOK, '"THERE:", *fences,', '"THERE:", *(("fence.acquire.gpu;", fences[1]) if role == stalls.TERMS else fences),')),
    "terms not acquired": ("scatter m", (LOOK, '"THERE:", *fences,', '"THERE:", *(fences[1:] if role == stalls.TERMS else fences),')),
    "a stage of terms too few": ("scatter, 3 stages", (TMA + "drawn.deal", "filled = _turn(loop, buffers, number, ordinal, before)", "filled = _turn(loop, buffers, number, ordinal, before); filled = filled - jnp.minimum(exchange.term_stages(loop, buffers, tile), 1)")),
    "terms in no stage": ("scatter, stages", (TMA + "exchange.term_stages", "return jnp.where(", "return 0 * jnp.where(")),
    "terms of every tile": ("scatter, stages", (TMA + "exchange.term_stages", "_exchange(loop).has_terms(tile), box", "True, box")),
    "a tile drawn twice": ("scatter m", (TMA + "drawn.deal", "number, ordinal, before = state", "number, ordinal, before = state; number = jnp.where(number == 1, 0, number)")),
    "each tile drawn twice": ("scatter m", (TMA + "drawn.deal", "number, ordinal, before = state", "number, ordinal, before = state; number = number // 2")),
    "own tiles first": (("scatter m", "ring, sums"), (PARTS + "tile", "step, row, n = self._row_of_all(index)", "step, row, n = self._row_of_all(index); step = self.last_step - step")),
    "mail given back first": ("scatter m", (TMA + "drawn.for_each", DONE, ""), (TMA + "drawn.for_each", WORK, DONE + WORK)),
    "mail given back by the owner": ("scatter, in turn", (TMA + "drawn.for_each", DONE, f"        pl.when(remainder(ordinal, 2) == (more[0] if more else remainder(ordinal, 2)))(lambda: {DONE.strip()})\n")),
    "one place for a batch": ("scatter, batch, f32", (PARTS + "index_in_block", "batch * m_tiles", "0 * batch")),
    "to the peer on the other side": ("scatter m", (SUM + "_communicate", "schedule.receiver(self.me, step)", "schedule.receiver(self.me, schedule.last_step - 1 - step)")),
    "the own block for all": ("scatter m", (SUM + "_block", "self.schedule.block(self.me, tile.step) if", "self.me if")),
    "to the device behind": ("ring, sums", (PARTS + "receiver", "me + self.devices - 1", "me + 1")),
    "without the own part": ("ring, sums", (SUM + "_communicate", "stored.at[step, schedule.tile_of_row(row)]", "stored.at[jnp.maximum(step - 1, 0), schedule.tile_of_row(row)]")),
    "the sum of another step": ("ring, sums", (SUM + "_await_terms", RAISED, "self._flag(_ARRIVED, jnp.maximum(step - 1, 0), tile)")),
    "terms of own tiles only": ("ring, sums", (SUM + "_await_terms", AWAITED, f"pl.when(tile.step == schedule.last_step)(lambda: {AWAITED})")),
    "own tiles' terms counted": ("ring, sums", ("kernels.hooks.Exchange.has_terms", "if self.part_has_terms is None:", "if True:")),
    "a chunk held": ("ring, sums, few", ("collectives.reduce.blocks_kernel.launch", "replace(chunk_buffers=1)", "replace(chunk_buffers=2)")),
    "not added before sending": ("ring, sums", (PARTS + "adds_before_sending", "self.uses_ring and self.devices > 2", "False")),
    "own tiles not announced": ("spread, tiles", (SUM + "hooks", f"else lambda tile: {STORED}", "else lambda tile: None")),
    "another own tile": ("spread, tiles", (SUM + "hooks", f"else lambda tile: {STORED}", f"else lambda tile: {STORED.replace('step, tile', f'step, {BESIDE}')}")),
    "a peer's tile awaited": ("spread, tiles", (SUM + "_results", "self.schedule.last_step", "self.schedule.last_step - 1")),
    "strips before parts": ("spread, tiles", (SUM + "_communicate", "self.passenger is not None,", "True,")),
    "strips are whole": ("spread, tiles", ("primitives.copies.copy_chunks", "IN_BOUNDS if send is None else None", "IN_BOUNDS")),
    "all strips to one peer": (SPREAD, (SUM + "_results", "group.peer(distance)", "group.peer(1)")),
    "whole rows": ("spread, tiles", (STRIPS + "last_cols", "self.block[1] % self.cols or self.cols", "self.cols")),
    "the receiver's block": (SPREAD, (SUM + "_results", "self._own_block(there,", "dataclasses.replace(self, me=group.peer(distance))._own_block(there,")),
    "the bias of the first block": ("spread, bias", (SUM + "_epilogue_at", "bias.at[self.me]", "bias.at[0 * self.me]")),
    "sums scaled, not parts": ("one shot, scale", (SHOT + "hooks", "of_part=True)) if self._has_scales else None", "of_part=False)) if self._has_scales else None")),
    "the receiver's place": (ONE_SHOT, (SHOT + "_at_peer", "there.at[self.me]", "there.at[self.group.peer(distance)]")),
    "another tile's place": (ONE_SHOT, (SHOT + "_at_peer", "self._first_box(tile)", f"self._first_box({BESIDE})")),
    "all parts to one peer": (ONE_SHOT, (SHOT + "_at_peer", "self.group.peer(distance)", "self.group.peer(1)")),
    "the flag of another tile": (ONE_SHOT, (SHOT + "_announce", "self._index_of(tile)", f"self._index_of({BESIDE})")),
    "the flag of the receiver": (ONE_SHOT, (SHOT + "_announce", "semaphore_signal_peer(flag,", "semaphore_signal_peer(self.refs.flags[0].at[group.peer(distance), self._index_of(tile)],")),
    "the terms of another tile": (ONE_SHOT, (SHOT + "_await_terms", "self._index_of(tile)", f"self._index_of({BESIDE})")),
    "one term for all": (ONE_SHOT, (SHOT + "_term_at", "self._landing.at[position]", "self._landing.at[0 * position]")),
}
MAINLOOPS: dict[str, tuple[str | tuple[str, ...], *tuple[Change, ...]]] = {
    # Tiles that several CTAs compute.
    "the flag before the sums": ("stream k", (TOGETHER, HAND_OVER + RAISE, RAISE + HAND_OVER)),
    "the next worker's flag": ("cut clusters", (TOGETHER, RAISE, RAISE.replace("at[me", "at[lax.rem(me + 1, 6)"))),
    "the other warpgroup's flag": ("cut clusters", (TOGETHER, "worker, piece.rank, piece.wg_tile_index", "worker, piece.rank, 1 - piece.wg_tile_index")),
    "the other rank's flag": ("cut clusters", (TOGETHER, "worker, piece.rank,", "worker, 1 - piece.rank,")),
    "one flag for both warpgroups": ("cut clusters", (TOGETHER, "piece.rank, piece.wg_tile_index]", "piece.rank, 0 * piece.wg_tile_index]")),
    "one flag for both ranks": ("cut clusters", (TOGETHER, "piece.rank, piece.wg_tile_index]", "0 * piece.rank, piece.wg_tile_index]")),
    "one flag for all workers": ("stream k", (TOGETHER, "flags.at[me,", "flags.at[0 * me,"), (TOGETHER, "flags.at[worker,", "flags.at[0 * worker,")),
    "one place for two workers": ("stream k", ("kernels.partial_sums.PartialSums.at", "self.sums.at[worker,", "self.sums.at[worker // 2,")),
    "one place for both ranks": (("cut clusters", "blackwell, cut pair"), (TMA + "finish._store_share", "own_rank * loop.config.tile_m + row", "row")),
    "the last part left out": ("stream k", ("kernels.partial_sums._total", "range(pieces)", "range(pieces - 1)")),
    "sums of the first block": ("cut, swapped", (TOGETHER, "first_row + row, rows)", "first_row, rows)")),
    "sums of the first box": ("cut, swapped", (TOGETHER, "index * piece.box_width", "0 * index")),
    "the first part's share": ("stream k", (TOGETHER, "share(piece.index,", "share(0 * piece.index,")),
    "stages counted anew": ("stream k", ("kernels.stream_k.StreamK.piece", "before=whole.before,", "before=0 * whole.before,")),
    "no cut tiles at the end": ("cut clusters", ("kernels.stream_k.StreamK.total_k_steps", "if self.ctas_per_tile > 1:", "return self.full_waves * self.k_steps\n        if self.ctas_per_tile > 1:")),
    "half of a shared load": ("cluster m", (TMA + "staging._load_box", "    plgpu.copy_gmem_to_smem(operand_gmem.at[box_slice], box_smem, barrier=load.barrier, **sharing)",
        "    copy = lambda: plgpu.copy_gmem_to_smem(operand_gmem.at[box_slice], box_smem, barrier=load.barrier, **sharing)\n"
        f"    copy() if load.shared_by is None else {PALLAS}.when({LAX}.axis_index(load.shared_by) == 0)(copy)")),
    # Clusters along k.
    "the first CTA alone waits": ("cluster k", (IN_CLUSTER, AWAIT_TOLD, f"pl.when(piece.rank == 0)(lambda: {AWAIT_TOLD})")),
    "the last CTA says nothing": ("cluster k", (IN_CLUSTER, TOLD, f"pl.when(piece.rank < ctas - 1)(lambda: {TOLD})")),
    "told before stored": ("cluster k", (IN_CLUSTER, f"    {TOLD}\n", ""), (IN_CLUSTER, "    for box in range(boxes):\n" + STORE, f"    {TOLD}\n    for box in range(boxes):\n" + STORE)),
    "the other warpgroup told": ("cluster k, blocks", (IN_CLUSTER, TOLD, TOLD.replace("[wg_tile]", "[1 - wg_tile]"))),
    "readers of one warpgroup": ("cluster k", (TMA + "cluster_sums.await_readers", "range(shared.sums.shape[0])", "range(1)")),
    "told before read": ("cluster k", (IN_CLUSTER, SUM_READ, ""), (IN_CLUSTER, LOOP, SUM_READ + LOOP)),
    "own sums alone": ("cluster k", (IN_CLUSTER, "jnp.int32(cta)", "piece.rank")),
    "not the last CTA's": ("cluster k", (IN_CLUSTER, "for cta in range(ctas))", "for cta in range(ctas - 1))")),
    "all finish the first share": ("cluster k", (IN_CLUSTER, SHARE, SHARE.replace("piece.rank", "0 * piece.rank"))),
    "boxes of one warpgroup": ("cluster k, blocks", (IN_CLUSTER, SHARE, SHARE.replace("piece.wg_tiles * ", ""))),
    "shares of more CTAs": ("cluster k", (IN_CLUSTER, SHARE, SHARE.replace("ctas)", "2 * ctas)"))),
    "the last k steps are longer": ("stream k", ("kernels.stream_k.StreamK._k_steps_of", "index < longer", "index >= longer")),
    "rank unknown": ("cluster k", (TMA + "produce.for_each_piece", ", rank(loop.config))", ")")),
    # Warpgroups that take turns.
    "the other's barrier awaited": ("pingpong", (HOPPER + "_accumulate", FULL, OF_STAGE)),
    "the other's barrier filled": ("pingpong", (TMA + "produce.produce", FULL, OF_STAGE)),
    "turns by tile": ("pingpong", (TMA + "staging.Buffers.full_at", "piece.ordinal", "piece.tile")),
    "barriers that overlap": ("pingpong", (TMA + "staging.Buffers.full_at", "* self.stages", "* (self.stages - 1)")),
    "arrive for this stage": (("pingpong", "matmul"), (HOPPER + "_accumulate", "buffers.consumed.at[last])\n            return", "buffers.consumed.at[stage])\n            return")),
    "begin in the first stage": ("pingpong, odd", (HOPPER + "_accumulate", BEGIN, BEGIN.replace("piece", "0 * piece"))),
    "count own stages alone": ("pingpong, odd", (HOPPER + "_accumulate", BEGIN, BEGIN.replace("piece.before", "piece.ordinal // 2 * piece.k_steps"))),
    "one stage again and again": ("pingpong", (HOPPER + "_accumulate", "stage = following(last, config.stages)", "stage = last")),
    "fill from the first stage": ("pingpong, odd", (TMA + "produce.produce", "remainder(piece.before + early,", "remainder(0 * piece.before + early,")),
    "both begin with the first": ("pingpong", (HOPPER + "Hopper.run", "first=warpgroup", "first=0")),
    "both have all tiles": ("pingpong", (HOPPER + "Hopper.run", "every=COMPUTE_WARPGROUPS", "every=1")),
    "a tile too few": ("pingpong", (TMA + "produce.for_each_piece", "pieces - first + every - 1", "pieces - first")),
    "a tile too many": ("pingpong", (TMA + "produce.for_each_piece", "pieces - first + every - 1", "pieces - first + every")),
    "nobody but the first": ("pingpong", (HOPPER + "Hopper.run", "COMPUTE_WARPGROUPS if in_turn else buffers.plan.wg_tiles", "1")),
    "drawn by number": ("scatter, in turn", (HOPPER + "_compute_own_turns", "piece.ordinal", "piece.tile")),
    "addends at one barrier": ("pingpong", (TMA + "store.store", "output.warpgroup * box_views.shape[0] + box", "box")),
    "corner by warpgroup": ("pingpong", (HOPPER + "_wg_tile_index", "return 0, 0, 0", "return 0, warpgroup, 0")),
    "told later": ("scatter, in turn", (HOPPER + "_tells_later", " and not loop.config.in_turn", "")),
    "told by tile": (("scatter, in turn", "blackwell, scatter"), (HOPPER + "_compute", "tell_stored(buffers, piece.ordinal)", "tell_stored(buffers, piece.tile)"),
        (BLACKWELL + "_store", "tell_stored(buffers, piece.ordinal)", "tell_stored(buffers, piece.tile)")),
    "told before it is stored": ("scatter, in turn", (HOPPER + "_compute", FINISH, "    exchange.tell_stored(buffers, piece.ordinal)\n" + FINISH),
        (HOPPER + "_compute", "and not _tells_later(loop):", "and False:")),
    "one stored barrier": ("scatter, in turn", (HOPPER + "_plan", "stored_barriers=COMPUTE_WARPGROUPS if in_turn else 1", "stored_barriers=1")),
    "terms at one barrier": ("scatter, in turn", (TMA + "exchange.sum_of_terms", FULL, OF_STAGE)),
    "boxes by warpgroup": ("scatter, in turn", (TMA + "store.store", "output.wg_tile_index *", "output.warpgroup *")),
    "send before peers begin": (("one shot, in turn", ONE_SHOT), (TMA + "finish._finish_exchanged", "piece.ordinal < buffers.plan.taking_turns", "piece.ordinal < 0")),
    # Transposed tiles.
    "left as it lies": ("square", (HOPPER + "_accumulate", "= not layouts.transpose_rhs, not layouts.transpose_lhs", "= layouts.transpose_rhs, not layouts.transpose_lhs")),
    "both the left half": ("swapped", (HOPPER + "_accumulate", OPERAND_SLICE, OPERAND_SLICE.replace("wg_n", "0 * wg_n"))),
    "halves exchanged": ("swapped", (HOPPER + "_accumulate", OPERAND_SLICE, OPERAND_SLICE.replace("wg_n", "1 - wg_n"))),
    "rows of the first block": ("blocks", (HOPPER + "_compute", "slice(row, row + rows)", "slice(0, rows)")),
    "no last block": ("blocks", (TMA + "store.store", "range(0, wg_m, block_rows)", "range(0, wg_m // block_rows * block_rows, block_rows)")),
    "columns of the first piece": ("pieces", (TMA + "finish._store_all", "rows, first + columns.start", "rows, columns.start")),
    "fewer rows than are loaded": ("few rows", (HOPPER + "_plan", "rows = loaded if", "rows = loaded - 8 if")),
    "scales of the first block": ("blocks", (TMA + "store.store", "pl.ds(first_row + above, rows)", "pl.ds(first_row, rows)")),
    "the epilogue is not told": ("square", ("single_gpu.product._Body._epilogue_at", "transposed=swapped", "transposed=False")),
    "row scales along columns": ("pull, swapped", (GATHER + "lhs_kernel._Body._epilogue_at", "1 if config.swap_operands else 0", "0")),
    "row scales along columns, joined": ("joined, swapped", (GATHER + "joined_kernel._Body._epilogue_at", "1 if swapped else 0", "0")),
    "scales of the rows above": ("joined, swapped", (JOIN + "read_rows", "return ", "return 72 or ")),
    # The Blackwell mainloop.
    "add to what was there": ("blackwell", (BLACKWELL + "_issue_k_step", "accumulate=k > 0", "accumulate=True")),
    "begin by the tile's k": ("blackwell, cut", (BLACKWELL + "_issue_k_step", "k > 0", "piece.k_first + k > 0")),
    "stages given back at once": (("blackwell", "blackwell, pair", "blackwell, ring"), (BLACKWELL + "_issue_k_step", GIVE, ""), (BLACKWELL + "_issue_k_step", MMA_END, MMA_END + "\n    plgpu.barrier_arrive(buffers.consumed.at[stage])")),
    "stages never given back": ("blackwell", (BLACKWELL + "_issue_k_step", GIVE, "")),
    "stages given back twice": ("blackwell", (BLACKWELL + "_issue_k_step", MMA_END, MMA_END + "\n    plgpu.tcgen05_commit_arrive(buffers.consumed.at[stage])")),
    "the next stage given back": ("blackwell", (BLACKWELL + "_issue_k_step", GIVE, GIVE.replace("[stage]", "[following(stage, config.stages)]"))),
    "complete before the last product": ("blackwell", (BLACKWELL + "_multiply", f"        {COMMIT}\n", ""), (BLACKWELL + "_multiply", "        lax.fori_loop(0,", f"        {COMMIT}\n        lax.fori_loop(0,")),
    "complete after each product": ("blackwell, pair", (BLACKWELL + "_issue_k_step", "    plgpu.tcgen05_mma(", f"    {COMMIT}\n    plgpu.tcgen05_mma(")),
    "all k steps of a tile": ("blackwell, cut", (BLACKWELL + "_multiply", "piece.k_steps", "loop.work.k_steps")),
    "the last product left out": ("blackwell", (BLACKWELL + "_multiply", "piece.k_steps", "piece.k_steps - 1")),
    "stages counted anew for each tile": ("blackwell", (BLACKWELL + "_multiply", "remainder(piece.before", "remainder(0 * piece.before")),
    "one accumulator": ("blackwell", (BLACKWELL + "Buffers.accumulator", "_turn(piece.ordinal) *", "0 *")),
    "one turn": ("blackwell", (BLACKWELL + "_turn", "remainder(ordinal, ACCUMULATORS)", "0 * ordinal")),
    "drained before reading": ("blackwell", (BLACKWELL + "_store", FINISH + DRAINED, DRAINED + FINISH)),
    "the other one drained": ("blackwell", (BLACKWELL + "_store", DRAINED, DRAINED.replace("ordinal", "ordinal + 1"))),
    "tensor memory out of order": ("blackwell", (BLACKWELL + "_drained", ", orders_tensor_core=True)", ")")),
    "one CTA told": ("blackwell, pair", (BLACKWELL + "_multiply", ", collective_axis=pair)", ")")),
    "the own epilogue alone": ("blackwell, pair", (BLACKWELL + "_drained", "if config.cluster == 1:", "if True:")),
    "both CTAs commit": ("blackwell, pair", (BLACKWELL + "_multiply", "_by_the_first(config, issue)", "issue()")),
    "both CTAs wait": ("blackwell, pair", (BLACKWELL + "_drained", ', "leader_tracked": True', ""), (BLACKWELL + "_multiply", "    _by_the_first(config, issue)",
        "    pl.when(rank(config) == 1)(lambda: _await_drained(buffers, piece.ordinal))\n    _by_the_first(config, issue)")),
    "the first CTA waits": ("blackwell, pair", (BLACKWELL + "_store", "plgpu.barrier_wait(buffers.accumulated.at[_turn(piece.ordinal)])", "pl.when(rank(loop.config) == 0)(lambda: plgpu.barrier_wait(buffers.accumulated.at[_turn(piece.ordinal)]))")),
    "turns by tile, pairs": ("blackwell, pairs", (BLACKWELL + "_multiply", "pair = RANK", "piece, pair = dataclasses.replace(piece, ordinal=piece.tile), RANK")),
    "the same columns": ("blackwell, pair", (TMA + "produce._operand_loads", "rhs_start + me *", "rhs_start + 0 *")),
    "the own part of a box": ("blackwell, pair", (TMA + "staging._load_box", " - rank * sizes[along]", "")),
    "terms loaded too early": ("blackwell, scatter", (BLACKWELL + "_Terms.__call__", LOAD, ""), (BLACKWELL + "_Terms.__call__", READ, LOAD + READ)),
    "too many loads": ("blackwell, ring, one load", (BLACKWELL + "_Terms.begin", "min(TERM_BUFFERS, self.loads)", "TERM_BUFFERS")),
    "terms of own tiles alone": ("blackwell, ring", (BLACKWELL + "_Terms.begin", "self.exchange.await_terms(self.tile)", "pl.when(self.exchange.is_own(self.tile))(lambda: self.exchange.await_terms(self.tile))")),
    "one barrier of stored tiles": ("blackwell, scatter", (BLACKWELL + "_plan", "stored_barriers=staging.MAILBOXES", "stored_barriers=1")),
    "a reader less": ("blackwell, scatter", (BLACKWELL + "_plan", "mail_readers=3", "mail_readers=2")),
}
# fmt: on
GROUPS = {"handshakes": HANDSHAKES, "gathers": GATHERS, "rings": RINGS, "sums": SUMMED, "mainloops": MAINLOOPS}

# --- Changes that do no harm in these kernels -------------------------------------------------------------------------

# fmt: off
HARMLESS: dict[str, tuple[str, str, *tuple[Change, ...]]] = {
    "begin without a proxy fence": ("scatter m", "the wait for the tile of a part has one too",
        ("primitives.waits.wait_within_device", '"fence.acquire.gpu;", "fence.proxy.async.global;"', '"fence.acquire.gpu;"')),
    "speak when the first has completed": ("scatter m", "own tiles wait for all that peers write here",
        *HANDSHAKES["speak when the first has completed"][1:]),
    "speak before the transfers": ("scatter m", "own tiles wait for all that peers write here",
        *HANDSHAKES["speak before the transfers"][1:]),
    "count when they begin": ("scatter m", "own tiles wait for all that peers write here",
        *HANDSHAKES["count when they begin"][1:]),
    "a transfer too few": (ONE_SHOT, "tiles wait for all that peers write here",
        (H + "leave", "== self.transfers", "== self.transfers - 1")),
    "terms without a proxy fence": (ONE_SHOT, "the wait for the own part has one too",
        *SUMMED["terms without a proxy fence"][1:]),
    "mail given back before it is computed": ("scatter m", "no role is two tiles ahead of the warp that announces tiles",
        (TMA + "drawn.for_each", DONE, "        plgpu.barrier_arrive(mail.taken.at[remainder(ordinal, MAILBOXES)]) if role is exchange.announce else None\n"),
        (TMA + "drawn.for_each", WORK, "        plgpu.barrier_arrive(mail.taken.at[remainder(ordinal, MAILBOXES)]) if role is not exchange.announce else None\n" + WORK)),
    "the last CTA has the first share": ("cluster k", "any CTA may finish any box",
        (IN_CLUSTER, SHARE, SHARE.replace("piece.rank", "ctas - 1 - piece.rank"))),
    "shares from the first warpgroup": ("cluster k", "all boxes are finished, and none twice",
        (IN_CLUSTER, "first = wg_tile * boxes", "first = 0 * wg_tile")),
    "one barrier for stored and read": ("cluster k", "each CTA waits for one phase before it arrives at the next",
        (IN_CLUSTER, "shared.read.at", "shared.stored.at")),
    "added from the last to the first": ("cluster k", "sums of integers are exact in any order",
        (IN_CLUSTER, "for cta in range(ctas))", "for cta in reversed(range(ctas)))")),
    "the second warpgroup begins": ("pingpong", "each has its own buffers, and barriers belong to the tile",
        (HOPPER + "Hopper.run", "first=warpgroup", "first=1 - warpgroup")),
    "the first alone waits": ("one shot, in turn", "the producer waits for all parts of a tile before it loads the next",
        (TMA + "finish._finish_exchanged", "< buffers.plan.taking_turns", "< 1")),
    "all rows at once": ("blocks", "the height of the blocks that are stored only affects registers",
        (HOPPER + "_plan", "wg_n, WGMMA_M,", "wg_n, loaded,")),
    "tiles of 64 rows": ("square", "tiles with more rows work where they fit",
        (HOPPER + "_plan", "staging.SMALL_TILE_ROWS if config.swap_operands else tile_rows", "tile_rows")),
}
# fmt: on
