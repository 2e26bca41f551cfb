"""The library's kernels are exact and clean under many schedules: any order of threads, CTAs, devices and copies.

Each schedule says when copies complete, which thread runs next, how many CTAs run at once, and how many launches share
memory and flags. `make test` runs each kernel under some of the schedules, `make test-all` under all.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from overlap.collectives import communicator
from overlap.collectives.gather.ring import RingTransport
from overlap.collectives.rows import chunks, row_kernels
from overlap.emulation import DeadlockError
from overlap.kernels.blackwell import mainloop as blackwell
from overlap.primitives import PeerGroup, handshake
from tests.oracle import make_mesh
from tests.protocol import protocol_cases
from tests.protocol.defects import source, steps
from tests.protocol.defects.kernels import KERNELS, ONE_AT_A_TIME, kind
from tests.protocol.exact import Kernel, on_blackwell
from tests.protocol.expert_cases import ARRIVING, of_arriving, of_moved_rows
from tests.protocol.protocol_cases import (
    FEW,
    JOINED,
    ONE,
    ONE_SHOT,
    PULL,
    SPREAD,
    SUMS,
    SUMS_BY_RING,
    WEIGHTS,
    Form,
    clean,
    of_rows,
    of_sums,
    of_weights,
)

TALL = PULL.replace(tile_m=128, tile_n=128, stages=3)
MORE = {
    "joined, cut": (lambda: of_rows(Form(24, (136, 128), 200, gathered=True, container=list),
                                    JOINED.replace(stages=3, stream_k=3)), 7),
    "joined, thin": (lambda: of_rows(Form(3, (136, 128), 200, scales=("rows", "columns"), container=list), JOINED), 9),
    "joined, no scales read": (lambda: of_rows(dataclasses.replace(FEW, scales=("columns",)), JOINED), 2),
    "pull, scales of a batch": (lambda: of_rows(Form(200, (64,), 72, (2,), scales=("rows",)), PULL), 3),
    "pull, 8 devices": (lambda: clean("pull", 8), 2),
    "pull, swapped, plain": (
        lambda: of_rows(Form(200, (64,), 136), PULL.replace(tile_m=72, tile_n=128, swap_operands=True)), 2),
    "rhs k, swapped": (lambda: of_weights("k", WEIGHTS.replace(tile_m=104, swap_operands=True), m=200), 2),
    "ring, gathered": (lambda: of_rows(Form(136, (72, 64), 136, gathered=True, container=list), PULL, 3, "ring"), 3),
    "ring, 2 devices": (lambda: of_rows(Form(136, (72,), 136), PULL, 2, "ring"), 3),
    "scatter, whole boxes": (lambda: of_sums("m", TALL, 2, block=(136, 136)), 2),
    "scatter, many k steps": (lambda: of_sums("m", devices=2, block=(16, 264), k=640, dtype=jnp.float32), 2),
    "scatter n, batch": (lambda: of_sums("n", devices=2, batch=2, block=(72, 72)), 2),
    "scatter, parts of rows": (lambda: of_sums("m", SUMS.replace(chunk_bytes=64), 2, block=(8, 72)), 2),
    "scatter n, 6 devices": (lambda: of_sums("n", devices=6, block=(16, 72)), 2),  # The terms are added in a loop.
    "scatter, x of two axes": (lambda: of_sums("m", devices=2, mesh=make_mesh(x=2, y=2)), 2),
    "scatter, y of two axes": (lambda: of_sums("m", devices=2, mesh=make_mesh(x=2, y=2), axis="y"), 2),
    "scatter, scales": (lambda: of_sums("n", devices=2, block=(72, 72), row_scale=True), 2),
    "ring, sums, 4 devices": (lambda: of_sums("ring n", devices=4, block=(16, 72)), 2),
    "spread, whole strips": (lambda: of_sums("spread m", TALL, 2, block=(136, 136)), 2),
    "spread, a row": (lambda: of_sums("spread m", devices=2, block=(1, 136)), 2),
    "spread, strips of a row": (lambda: of_sums(SPREAD, SUMS.replace(chunk_bytes=64), 2, block=(8, 72)), 2),
    # Transposed, since otherwise the rows of all batch elements count as one.
    "spread, batch": (lambda: of_sums(SPREAD, devices=2, batch=2, block=(24, 72), transpose_lhs=True), 2),
    "one shot, whole boxes": (lambda: of_sums(ONE_SHOT, TALL, 2, block=(136, 136)), 2),
    "one shot, a row": (lambda: of_sums(ONE_SHOT, devices=2, block=(1, 136)), 2),
    "one shot, batch": (lambda: of_sums(ONE_SHOT, devices=2, batch=2, transpose_lhs=True), 2),
    "one shot, f32": (lambda: of_sums(ONE_SHOT, devices=2, dtype=jnp.float32), 2),
    "one shot, 6 devices": (lambda: of_sums(ONE_SHOT, devices=6, block=(16, 72)), 2),
    "joined, in turn": (lambda: of_rows(FEW, JOINED.replace(schedule="pingpong")), 2),
    "blackwell, spread": (lambda: on_blackwell(of_sums(SPREAD, SUMS.replace(tile_m=128), block=(16, 72))), 2),
    "blackwell, rhs n": (
        lambda: on_blackwell(of_weights("n", WEIGHTS.replace(tile_m=128, tile_n=64))), 2),
    "blackwell, gather by ring": (
        lambda: on_blackwell(of_rows(Form(136, (64,), 136), PULL.replace(tile_m=128), 3, "ring")), 2),
    # Positions of 6 slots are padded. The waits of an epilogue are those of its rows.
    "arriving, swapped": (
        lambda: of_arriving(3, 45, 320, ARRIVING.replace(tile_m=56, swap_operands=True, schedule="pingpong"),
                            slots=6, dtype=jnp.float16), 2),
    "arriving, a buffer": (
        lambda: of_arriving(2, 45, 320, ARRIVING.replace(chunk_buffers=2, chunk_bytes=640), clears=False), 2),
    "blackwell, arriving": (
        lambda: on_blackwell(of_arriving(3, 45, 320, ARRIVING.replace(tile_m=128, tile_n=64), block=128,
                                         activation=jax.nn.relu)), 2),
    "blackwell, several": (lambda: on_blackwell(of_rows(Form(136, (64, 136), 136, scales=("rows", "columns"),
                                                             container=list), PULL.replace(tile_m=128))), 2),
}  # fmt: skip
ALL = KERNELS | steps.PROGRAMS | MORE
SCHEDULES = [
    {"completion": completion, "scheduler": scheduler, "laps": laps}
    for (completion, scheduler), laps in zip(
        itertools.product(("late", "eager", "random"), ("pct", "random")), (2, 1, 2, 2, 1, 3), strict=True
    )
]


def _cases():
    for number, name in enumerate(ALL):
        # tests/ops run products of one device each time.
        is_fast = (name in KERNELS and kind(name) != "matmul") or "batch" in name or (name in MORE and number % 5 == 0)
        fast = [number % len(SCHEDULES)] if is_fast else []
        for schedule in range(len(SCHEDULES)):
            yield pytest.param(name, schedule, marks=[] if schedule in fast else pytest.mark.slow)


@functools.cache
def _made(name: str) -> Kernel:
    return ALL[name][0]()


@pytest.mark.parametrize(("name", "schedule"), list(_cases()))
def test_clean(name, schedule):
    _made(name).run(cores=ALL[name][1], seed=10 + schedule, **SCHEDULES[schedule])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("joined", ONE_SHOT, "rows added") else pytest.mark.slow)
        for name in sorted(ONE_AT_A_TIME & protocol_cases.KERNELS.keys())
    ],
)
def test_any_number_of_ctas_suffices(name):
    """As when another kernel occupies the other cores."""
    for resident in (1, 3):
        completion = ("late", "eager", "random")[resident % 3]
        clean(name).run(cores=4, resident=resident, completion=completion, seed=resident, laps=2)


def test_the_ring_needs_all_ctas():
    """The CTA that multiplies rows also forwards them."""
    assert RingTransport.needs_all_ctas
    # Two rows of three tiles. The second row begins at the last of four CTAs, and all other CTAs come to need its rows.
    kernel = of_rows(Form(136, (192,), 136), PULL.replace(order_minor="n", order_width=3), transport="ring")
    kernel.run(cores=4, laps=2)
    report = kernel.report(seeds=1, cores=4, resident=2)
    assert isinstance(report, DeadlockError) and "were never launched" in str(report)


@pytest.mark.parametrize("name", ["pull", "joined", pytest.param("rhs k", marks=pytest.mark.slow)])
def test_as_many_ctas_suffice_as_a_tile_has_parts(name):
    """Fewer do not, which shows that tiles were cut."""
    cut = {
        "pull": lambda: of_rows(Form(72, (256,), 192), PULL.replace(tile_n=256, stream_k=3), 2),
        "joined": lambda: of_rows(Form(16, (264,), 192), JOINED.replace(tile_n=256, stream_k=3), 2),
        "rhs k": lambda: of_weights("k", WEIGHTS.replace(stream_k=3), 2, shard=(96, 136)),
    }  # fmt: skip
    kernel = cut[name]()
    for resident in (3, 4):
        kernel.run(cores=6, resident=resident, seed=resident, laps=2)
    assert isinstance(kernel.report(seeds=1, cores=6, resident=2), DeadlockError)


# --- Devices and CTAs that are late -----------------------------------------------------------------------------------

LATE = {
    "raises late": (steps.raise_late, ("pull", "scatter m", "ring", ONE_SHOT, SUMS_BY_RING)),
    "copies late": (steps.copy_late, ("pull", "rhs n", "rhs k", "scatter m", "joined", "passenger")),
    "raises late, rows": (steps.raise_late, ("rows added", "rows copied", "rows multiplied")),
    "copies rows late": (steps.copy_late, ("rows copied", "rows multiplied")),
    "copies late, arriving": (steps.copy_late, ("arriving",)),
    "sends strips late": (steps.send_strips_late, (SPREAD,)),
    "sends parts late": (steps.send_parts_late, (ONE_SHOT,)),
}


@pytest.mark.parametrize(
    ("how", "name", "victim"),
    [
        pytest.param(how, name, victim, marks=[] if victim == place % 2 * 2 and place < 3 else pytest.mark.slow)
        for how, (_, names) in LATE.items()
        for place, name in enumerate(names)
        for victim in (0, 2)
    ],
)
def test_clean_if_a_device_is_late(how, name, victim):
    make = (lambda: of_sums(name)) if name in (SUMS_BY_RING, SPREAD) else KERNELS[name][0]
    with source.rewritten(*LATE[how][0](victim)):
        kernel = make()
        for seed, completion in enumerate(("late", "random")):
            kernel.run(cores=2, completion=completion, scheduler="pct", seed=seed, laps=1 + seed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[] if n in ("pull", "scatter m", "rows added") else pytest.mark.slow)
        for n in ("pull", "joined", "rhs n", "rhs k", "scatter m", "ring", SPREAD, "rows added", "rows copied")
    ],
)
def test_clean_if_a_cta_begins_when_all_is_over(name):
    with source.rewritten(steps.BEGIN_LATE):
        kernel = KERNELS[name][0]()
        for seed in range(2):
            kernel.run(cores=2, laps=3, seed=seed)


# --- What cannot be seen in the results -------------------------------------------------------------------------------


def test_the_own_rows_are_copied_while_peers_begin(monkeypatch):
    order, copy, awaits = [], communicator.Communicator._copy, communicator.Handshake.await_peers
    names = {True: "own", False: "peers"}
    copies = lambda self, chunks, *args: order.append(names[chunks is self.own]) or copy(self, chunks, *args)  # noqa: E731
    monkeypatch.setattr(communicator.Communicator, "_copy", copies)
    monkeypatch.setattr(communicator.Handshake, "await_peers", lambda self: order.append("wait") or awaits(self))
    of_rows(FEW, JOINED).run(cores=2)
    assert order[:3] == ["own", "wait", "peers"]


@pytest.mark.parametrize("processes", [1, 2])
def test_kernels_of_rows_are_told_the_addresses_that_peers_access(processes, monkeypatch):
    """Then the table precedes the flags."""
    told, flags, params = [], chunks.shared_semaphores, chunks.addresses.Params
    monkeypatch.setattr(row_kernels, "lands_in_an_operand", lambda: processes > 1)
    monkeypatch.setattr(chunks, "shared_semaphores", lambda *s, told: noted(told) or flags(*s, told=told))
    monkeypatch.setattr(chunks.addresses, "Params", lambda **given: noted(given["peers_read"]) or params(**given))

    def noted(what):
        told.append(what)

    for name, place in {"copied": 1, "added": 1, "multiplied": 2}.items():
        told.clear()
        jax.make_jaxpr(of_moved_rows(name, 2, 2, 128, gated=name == "added").call)()
        # The place of "tokens", or of "landing" behind "gates", among the operands in the order of their names.
        assert told == ([False] if name == "added" and processes == 1 else [(place,), True]), name


def test_no_signal_but_the_flags_and_no_more_of_them_than_pieces_need():
    run = of_rows(Form(200, (136,), 136), PULL, 3, "ring").run(cores=3, record=True)
    # Three devices: two row blocks in two steps, and one neighbour that has begun.
    assert run.counts["signals"] == (2 * 2 + 1) * 3


def test_who_waits_too_long_names_the_device_whose_rows_are_missing(monkeypatch):
    peer, asked, waited = PeerGroup.peer, [], []
    monkeypatch.setattr(PeerGroup, "peer", lambda self, distance: asked.append(distance) or peer(self, distance))
    monkeypatch.setattr(handshake.Handshake, "wait_for", lambda *_: waited.append(asked[-1]))
    assert of_rows(ONE, PULL, 3, "ring").report(seeds=1, cores=2)
    assert waited and set(waited) == {1}


@pytest.mark.parametrize("joined", [False, True], ids=["pull", "joined"])
def test_scales_of_gathered_rows_are_known_to_both_epilogues_of_a_pair(joined, monkeypatch):
    monkeypatch.setattr(blackwell, "_await_what_came_with_the_rows", lambda *_: None)
    config = PULL.replace(tile_m=128, tile_n=128, cluster=2, joined=joined)
    form = Form(88 if joined else 264, (136,), 136, scales=("rows",))
    report = on_blackwell(of_rows(form, config, 3 if joined else 2)).report(cores=4)
    assert "is not ordered" in str(report)
