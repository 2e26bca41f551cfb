"""The protocol of `all_gather_rhs_matmul`: clean under many schedules; each injected defect is reported."""

import dataclasses
import functools

import pytest
from jax import lax
from jax.experimental import pallas as pl

from overlap import primitives
from overlap.collectives import communicator
from overlap.collectives.gather import rhs_kernel
from overlap.collectives.gather.rhs_schedule import K_STEPS_PER_FLAG, GatherRhsSchedule
from overlap.primitives import PeerGroup, copies, handshake
from overlap.primitives.handshake import Handshake
from overlap.primitives.integers import remainder
from overlap.primitives.waits import wait_for_word
from tests.ops.rhs_cases import ALONG, SMALL
from tests.protocol.protocol_cases import of_weights
from tests.protocol.test_blackwell_found import slip
from tests.protocol.test_protocol import signal_when_only_read

PARTS_OF_ROWS = SMALL.replace(chunk_bytes=192)
NOTHING = lambda *_, **__: None  # noqa: E731


@functools.cache
def clean(along, devices):
    """Returns a kernel that is traced once and shared by all tests that patch nothing."""
    return of_weights(along, SMALL, devices, m=128, shard=(128, 128))


def pull_last(patch, victim, devices):
    """Makes one device's communicators begin after all its peers have pulled everything and signalled this."""
    await_peers = Handshake.await_peers

    def await_late(self):
        await_peers(self)

        @pl.when(lax.axis_index("x") == victim)
        def _stall():
            others = (1 << devices) - 1 - (1 << victim)
            me = self.group.me()
            wait_for_word(
                self.flags.at[handshake._DONE], others, self.group, me, operation=0, role=handshake.stalls.DONE
            )

    patch.setattr(Handshake, "await_peers", await_late)


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
def test_clean(completion, along):
    for seed in range(6):
        clean(along, 2 + seed % 2).run(cores=3, completion=completion, scheduler="pct", seed=seed)


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_is_late(victim, along, monkeypatch):
    pull_last(monkeypatch, victim, devices=3)
    kernel = of_weights(along, SMALL, m=128, shard=(128, 128))
    for completion in ("late", "random"):
        kernel.run(cores=3, completion=completion, scheduler="pct", seed=victim)


def do_not_wait(patch):
    patch.setattr(communicator, "semaphore_wait", NOTHING)


def drop_proxy_fence(patch):
    patch.setattr(communicator, "fence_async_proxy", NOTHING)


def raise_the_flag_before_the_chunk_has_landed(patch):
    patch.setattr(copies, "wait_stores_landed", NOTHING)


def wait_for_one_chunk_only(patch):
    patch.setattr(communicator, "semaphore_wait", lambda flag, value: primitives.semaphore_wait(flag, 1))


def count_too_few(patch):
    target = GatherRhsSchedule.flag_target
    patch.setattr(GatherRhsSchedule, "flag_target", lambda self, *place: target(self, *place) - 1)


def count_too_many(patch):
    target = GatherRhsSchedule.flag_target
    patch.setattr(GatherRhsSchedule, "flag_target", lambda self, *place: target(self, *place) + 1)


def wait_for_the_first_block_only(patch):
    begins = GatherRhsSchedule.begins_block
    patch.setattr(GatherRhsSchedule, "begins_block", lambda self, k: begins(self, k) & (k == 0))


def wait_for_another_shards_flag(patch):
    flag = GatherRhsSchedule.flag
    patch.setattr(GatherRhsSchedule, "flag", lambda self, step, *place: (0, *flag(self, step, *place)[1:]))


def pull_a_chunk_twice(patch):
    chunk = GatherRhsSchedule.chunk
    patch.setattr(GatherRhsSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    pulls = vars(GatherRhsSchedule)["pulled_chunks"].fget
    patch.setattr(GatherRhsSchedule, "pulled_chunks", property(lambda self: pulls(self) - 1))


DEFECTS = [
    do_not_wait,
    drop_proxy_fence,
    signal_when_only_read,
    raise_the_flag_before_the_chunk_has_landed,
    wait_for_one_chunk_only,
    count_too_few,
    count_too_many,
    wait_for_the_first_block_only,
    wait_for_another_shards_flag,
    pull_a_chunk_twice,
    leave_the_last_chunk,
]


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, along, monkeypatch):
    defect(monkeypatch)
    kernel = of_weights(along, SMALL, m=128, shard=(64 * K_STEPS_PER_FLAG + 64, 128))
    report = kernel.report(seeds=10, cores=3, completion="late", scheduler="pct")
    assert report, f"{defect.__name__} was not reported in 10 runs"
    assert "device" in str(report) and "CTA" in str(report) and ".py:" in str(report)


def test_a_part_of_a_tile_that_waits_for_no_block_is_reported(monkeypatch):
    """A CTA that begins in the middle of a tile has not waited for the earlier blocks."""
    wait = rhs_kernel._Body._wait_for_block
    forgets = lambda self, flags, tile, k: wait(self, flags, dataclasses.replace(tile, k_first=0), k)  # noqa: E731
    monkeypatch.setattr(rhs_kernel._Body, "_wait_for_block", forgets)
    kernel = of_weights("k", dataclasses.replace(SMALL, stream_k=4), 2, m=128, shard=(192, 128))
    assert kernel.report(seeds=10, cores=5, completion="late", scheduler="pct")


FLAG, COUNT = "schedule.flag(step, row, column)", "schedule.flag_target(row, column)"
BLOCKS = {  # The shape of a shard, the configuration, and what becomes of some text in `_wait_for_block`.
    "the first row block's flag": ((64 * K_STEPS_PER_FLAG + 64, 128), SMALL, (FLAG, FLAG.replace("row", "0 * row"))),
    "the first column block's flag": ((64, 288), PARTS_OF_ROWS, (FLAG, FLAG.replace("column", "0 * column"))),
    "the first column block's count": ((64, 288), PARTS_OF_ROWS, (COUNT, COUNT.replace("column", "0 * column"))),
    "one of two column blocks": ((64, 288), PARTS_OF_ROWS, ("wait(last_column)", "wait(column)")),
}


@pytest.mark.parametrize(("shard", "config", "changes"), BLOCKS.values(), ids=BLOCKS)
def test_a_wait_for_another_block_is_reported(shard, config, changes, monkeypatch):
    slip(rhs_kernel._Body, "_wait_for_block", dict([changes]))(monkeypatch)
    kernel = of_weights("k", config, 2, m=128, shard=shard)
    assert kernel.report(seeds=10, cores=4, completion="late", scheduler="pct")


def test_another_shard_of_the_left_operand_shows_in_the_numbers(monkeypatch):
    monkeypatch.setattr(GatherRhsSchedule, "shard", lambda self, me, step: step)
    with pytest.raises(AssertionError):
        of_weights("k", SMALL, 2, m=128, shard=(128, 128)).run(cores=3)


@pytest.mark.parametrize("along", ALONG)
def test_a_wrong_peer_shows_in_the_numbers(along, monkeypatch):
    """Reading another peer's shard is not a race, so the numbers must show it."""
    peer = PeerGroup.peer
    monkeypatch.setattr(PeerGroup, "peer", lambda self, distance: peer(self, remainder(3 - distance, 3)))
    with pytest.raises(AssertionError):
        of_weights(along, SMALL, m=128, shard=(128, 128)).run(cores=3)
