"""The protocol of `all_gather_rhs_matmul`: clean under many schedules, and each seeded defect is reported."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

from overlap import primitives
from overlap.collectives import all_gather_rhs_matmul as op
from overlap.collectives.rhs_schedule import STEPS_PER_FLAG, GatherRhsSchedule
from overlap.emulation import EmulationError, emulate
from overlap.kernels import hopper
from overlap.primitives import Ring, copies, handshake
from overlap.primitives.integers import remainder
from tests.oracle import make_mesh
from tests.product_cases import oracle_of
from tests.rhs_cases import ALONG, SMALL, fused, mapped, product
from tests.test_protocol import signal_when_only_read

NOTHING = lambda *_, **__: None  # noqa: E731


def launch(along, *, devices=2, shard=(128, 128), config=SMALL, cores=3, **settings):
    with emulate(cores=cores, **settings):  # Traced anew each time: what a test has replaced must be in the kernel.
        return mapped(make_mesh(x=devices), along, fused(along, config))(*product(devices, along, 128, shard))


def pull_last(patch, victim, devices):
    """The communicators of one device begin when all its peers have pulled everything and said so."""
    make, pull, made = op.shared_flags, op.pull_chunks, []

    def shared_flags(*shapes, **kwargs):
        made.append(make(*shapes, **kwargs))
        return made[-1]

    def pull_late(count, plan, **kwargs):
        from_peers = made[-1][1].at[handshake._DONE]
        late = lax.axis_index("x") == victim
        pl.when(late)(lambda: primitives.wait_at_least(from_peers, devices - 1, from_peer=True))
        pull(count, plan, **kwargs)

    patch.setattr(op, "shared_flags", shared_flags)
    patch.setattr(op, "pull_chunks", pull_late)


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
def test_clean(completion, along):
    for seed in range(6):
        launch(along, devices=2 + seed % 2, completion=completion, scheduler="pct", seed=seed)


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_is_late(victim, along, monkeypatch):
    pull_last(monkeypatch, victim, devices=3)
    lhs, rhs = product(3, along, 128, (128, 128))
    for completion in ("late", "random"):
        result = launch(along, devices=3, completion=completion, scheduler="pct", seed=victim)
        np.testing.assert_array_equal(np.asarray(result), oracle_of(lhs, rhs).astype(jnp.bfloat16))


def do_not_wait(patch):
    patch.setattr(op, "wait_at_least", NOTHING)


def drop_proxy_fence(patch):
    patch.setattr(op, "fence_async_proxy", NOTHING)


def raise_the_flag_before_the_chunk_has_landed(patch):
    patch.setattr(copies, "wait_stores_landed", NOTHING)


def drop_handshake(patch):
    patch.setattr(op, "exit_handshake", NOTHING)


def wait_for_one_chunk_only(patch):
    patch.setattr(op, "wait_at_least", lambda flag, value: primitives.wait_at_least(flag, 1))


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
    pulls = vars(GatherRhsSchedule)["pulls"].fget
    patch.setattr(GatherRhsSchedule, "pulls", property(lambda self: pulls(self) - 1))


DEFECTS = [
    do_not_wait,
    drop_proxy_fence,
    signal_when_only_read,
    raise_the_flag_before_the_chunk_has_landed,
    drop_handshake,
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
    reports = []
    for seed in range(10):
        try:
            launch(
                along, devices=3, shard=(64 * STEPS_PER_FLAG + 64, 128), completion="late", scheduler="pct", seed=seed
            )
        except EmulationError as report:
            reports.append(str(report))
            break
    assert reports, f"{defect.__name__} was not reported in 10 runs"
    assert "device" in reports[0] and "CTA" in reports[0] and ".py:" in reports[0]


@pytest.mark.parametrize("name", ["first", "straddles", "lhs shard"])
def test_defects_of_special_cases(name, monkeypatch):
    along, settings = "k", {}
    if name == "first":  # A CTA that begins in the middle of a tile has waited for no block before.
        monkeypatch.setattr(op, "_Tile", lambda *args, first, **kwargs: hopper.Tile(*args, **kwargs))
        monkeypatch.setattr(hopper.Tile, "first", 0, raising=False)
        settings = {"config": dataclasses.replace(SMALL, stream_k=4), "cores": 5, "shard": (192, 128)}
    elif name == "straddles":
        monkeypatch.setattr(GatherRhsSchedule, "straddles", False)
        settings = {"config": dataclasses.replace(SMALL, chunk_bytes=192), "shard": (64, 288)}
    else:
        monkeypatch.setattr(GatherRhsSchedule, "shard", lambda self, me, step: step)
    wrong = []
    for seed in range(10):
        try:
            result = launch(along, completion="late", scheduler="pct", seed=seed, **settings)
        except EmulationError as report:
            wrong.append(str(report))
            break
        expected = oracle_of(*product(2, along, 128, settings.get("shard", (128, 128))))
        if not np.array_equal(np.asarray(result), expected.astype(jnp.bfloat16)):
            wrong.append("numbers")
            break
    assert wrong and (name == "lhs shard") == (wrong[0] == "numbers")


def test_a_wrong_peer_shows_in_the_numbers(monkeypatch):
    """Reading another peer's shard is no race, so it is the numbers that have to tell."""
    peer = Ring.peer
    monkeypatch.setattr(Ring, "peer", lambda self, distance: peer(self, remainder(3 - distance, 3)))
    for along in ALONG:
        expected = oracle_of(*product(3, along, 128, (128, 128))).astype(jnp.bfloat16)
        assert not np.array_equal(np.asarray(launch(along, devices=3)), expected)
