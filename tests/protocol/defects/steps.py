"""Defects of several statements, or of a kind that `source` does not make: the table `steps.csv`, and its kernels.

Each row changes the text of one function; rows of one name are one defect. `kernels` names kernels of `kernels.KERNELS`
and of PROGRAMS, separated by "|". The group "harmless" holds changes that must not be reported, and why.
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
from collections.abc import Callable

import overlap
from tests.protocol.defects.kernels import KERNELS
from tests.protocol.exact import BF16, Kernel, on_blackwell
from tests.protocol.protocol_cases import (
    JOINED,
    ONE_SHOT,
    PULL,
    SPREAD,
    SUMS,
    SUMS_BY_RING,
    Form,
    of_product,
    of_rows,
    of_sums,
    of_weights,
)

# The function below `overlap`, the text in it, and the new text.
type Change = tuple[str, str, str]
_PLAIN = overlap.Config(tile_n=64, stages=2)
_SMALL = overlap.Config(tile_n=128, stages=2)
_TILE = overlap.Config(tile_m=64, tile_n=128, stages=2)
_TURNS = _TILE.replace(schedule="pingpong")
_SWAP = _TILE.replace(swap_operands=True)
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
    "ring, cut": (lambda: of_rows(_CUT_LEFT, _PLAIN.replace(stream_k=3), 2, "ring"), 13),
    "ring, wave": (
        lambda: of_rows(Form(200, (72, 136), 200, container=list), _PLAIN.replace(stream_k=3), 3, "ring"), 7),
    "ring, rows": (lambda: of_rows(Form(200, (136,), 136), _PLAIN, 3, "ring"), 3),
    "ring, batch": (
        lambda: of_rows(Form(72, (72,), 136, (2,), gathered=True), _PLAIN.replace(stream_k=3), 3, "ring"), 5),
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
assert not PROGRAMS.keys() & KERNELS.keys()


@dataclasses.dataclass(frozen=True)
class Steps:
    """A row of the table, or several of one name: the kernels to run, why it does no harm, and the changes."""

    kernels: tuple[str, ...]
    why: str
    changes: tuple[Change, ...]


def read() -> dict[str, dict[str, Steps]]:
    """Returns the table: of each group, the defects by their names."""
    groups: dict[str, dict[str, Steps]] = {}
    plain = lambda text: text.replace("\\n", "\n")  # noqa: E731
    with (pathlib.Path(__file__).parent / "steps.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rows, change = groups.setdefault(row["group"], {}), (row["function"], plain(row["old"]), plain(row["new"]))
            before = rows[row["name"]].changes if row["name"] in rows else ()
            rows[row["name"]] = Steps(tuple(row["kernels"].split("|")), row["why"], (*before, change))
    return groups


HANDSHAKE = "primitives.handshake.Handshake."

# --- Devices and CTAs that are late ---------------------------------------------------------------------------------

_LAX = "__import__('jax').lax"
_PALLAS = "__import__('jax.experimental.pallas', fromlist=['when'])"
_MOSAIC = "__import__('jax.experimental.pallas.mosaic_gpu', fromlist=['kernel'])"
_LOWERED = "wait_for_word(self.flags.at[0], _LOWERED, self.group, self.group.me(), operation=0, role=stalls.BEGUN)"
# On each device, CTA 0's communicator begins when the other CTAs have lowered the ready flag.
BEGIN_LATE: Change = (
    HANDSHAKE + "_begin", "marks.now(Work.AWAIT_PEERS)", f"pl.when(self.cta == 0)(lambda: {_LOWERED})"
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
    return [(HANDSHAKE + "_raise", raised, "\n        ".join(lines))]


def _done(flags: str, victim: int, devices: int = 3) -> str:
    """Returns code by which a device waits until all its peers are done. `done` has a bit for each peer."""
    others, done = (1 << devices) - 1 - (1 << victim), 7
    wait = f"{_MOSAIC}.semaphore_wait({flags}.at[{done}], {others}, decrement=False)"
    return f"{_PALLAS}.when({_LAX}.axis_index('x') == {victim})(lambda: {wait})"


def copy_late(victim: int) -> list[Change]:
    """A device copies only when its peers have copied everything and have said that they are done."""
    begun = "wait_within_device(self.flags.at[_BEGUN], self.looks)"
    return [(HANDSHAKE + "await_peers", begun, f"{begun}\n        {_done('self.flags', victim)}")]


def send_parts_late(victim: int) -> list[Change]:
    begun = "        fence_async_proxy()\n"
    return [(HANDSHAKE + "await_peers_by_warpgroup", begun, f"{begun}        {_done('self.flags', victim)}\n")]


def send_strips_late(victim: int) -> list[Change]:
    line = "chunks, buffers_smem = self.others\n"
    return [
        (
            "collectives.communicator.Communicator._copy_others",
            line,
            f"{line}        {_done('self.flags[0]', victim)}\n",
        )
    ]
