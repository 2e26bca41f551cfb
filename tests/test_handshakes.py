"""Launches in a row without a barrier between them: clean, and each seeded defect of the handshakes is reported."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

import overlap
from overlap.collectives import all_gather_rhs_matmul, joined, pull
from overlap.emulation import EmulationError, emulate
from overlap.primitives import handshake, wait_at_least
from tests import oracle, several_sides_cases
from tests.handshake_cases import WAITS, act_first, leave_out, without_waiting_for
from tests.oracle import make_mesh, operands
from tests.product_cases import oracle_of
from tests.rhs_cases import SMALL, fused, mapped, product
from tests.several_sides_cases import Form

CONFIG = overlap.Config(tile_n=64, stages=2)
FEW = Form(24, (136,), 136, container=None)
JOINED = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True, chunk_bytes=256)
NOTHING = lambda *_, **__: None  # noqa: E731


def tiles_of_their_own(devices, transport="pull"):
    mesh = make_mesh(x=devices)
    measure = oracle.errors(mesh, lambda a, b: oracle.fused(a, b, config=CONFIG, transport=transport))
    oracle.assert_close(measure(*operands(mesh, (192, 64, 128), jnp.bfloat16, seed=1)))


def joined_rows(devices):
    mesh, arrays = make_mesh(x=devices), several_sides_cases.operands(FEW, devices)
    call = several_sides_cases.call(FEW, implementation="fused", config=JOINED)
    results = several_sides_cases.on_mesh(FEW, mesh, call)(*several_sides_cases.put(FEW, mesh, arrays))
    several_sides_cases.assert_exact(FEW, arrays, results)


def weights(devices, along):
    lhs, rhs = product(devices, along, 64, (128, 128))
    out = mapped(make_mesh(x=devices), along, fused(along, SMALL))(lhs, rhs)
    assert (out == oracle_of(lhs, rhs).astype(out.dtype)).all()


KERNELS = {
    "lhs": (pull, tiles_of_their_own),
    "joined": (joined, joined_rows),
    "rhs n": (all_gather_rhs_matmul, lambda devices: weights(devices, "n")),
    "rhs k": (all_gather_rhs_matmul, lambda devices: weights(devices, "k")),
}
ALL = pytest.mark.parametrize("kernel", KERNELS)


@ALL
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_clean(kernel, devices):
    for seed, completion in enumerate(("late", "eager", "random")):
        with emulate(cores=2, completion=completion, seed=seed, laps=3):
            KERNELS[kernel][1](devices)


@pytest.mark.parametrize("scheduler", ["pct", "random"])
@pytest.mark.parametrize("seed", range(15))
def test_clean_under_many_schedules(seed, scheduler):
    with emulate(cores=1 + seed % 3, completion="random", scheduler=scheduler, seed=seed, laps=4):
        tiles_of_their_own(3)


@pytest.mark.parametrize("victim", [0, 2])
@ALL
def test_clean_if_a_device_begins_late(kernel, victim, monkeypatch):
    """It raises its beacon only when its own CTAs have seen all others'."""

    def stall(beacon):
        begun = beacon.ref.at[handshake._BEGUN]
        pl.when(lax.axis_index("x") == victim)(lambda: wait_at_least(begun, 1))

    act_first(monkeypatch, handshake._raise, stall)
    with emulate(cores=2, laps=2):
        KERNELS[kernel][1](3)


def test_more_peers_than_ctas():
    with emulate(cores=2, laps=2):
        tiles_of_their_own(8)


def test_the_ring_has_the_framework_s_barrier():
    with emulate(cores=2, laps=3):
        tiles_of_their_own(3, transport="ring")


def lower_after_telling(patch):
    do, wait, lowers = handshake._act, handshake.wait_at_least, handshake._lower
    kept = []

    def keep(act, flag):
        if act is lowers:
            kept.append(flag)
        else:
            do(act, flag)

    def wait_then_lower(flag, value, *, from_peer=False):
        wait(flag, value, from_peer=from_peer)
        if kept:  # The last wait.
            do(lowers, kept.pop())

    patch.setattr(handshake, "_act", keep)
    patch.setattr(handshake, "wait_at_least", wait_then_lower)


def begin_at_once(patch):
    patch.setattr(handshake, "_await_count", lambda count: None)
    do = handshake._act
    patch.setattr(handshake, "_act", lambda act, flag: None if act is None else do(act, flag))


def begin_when_all_but_one_have(patch):
    await_count = handshake._await_count
    patch.setattr(handshake, "_await_count", lambda count: await_count(count - 1))


def begin_without_a_fence(patch):
    do = handshake._act
    patch.setattr(handshake, "_await_count", lambda count: count)
    patch.setattr(
        handshake, "_act", lambda act, flag: wait_at_least(flag, act) if isinstance(act, int) else do(act, flag)
    )


def look_at_the_own_beacon(patch):
    do, awaits = handshake._act, handshake._await
    patch.setattr(handshake, "_act", lambda act, flag: do(act, flag.ref.at[0] if act is awaits else flag))


def tell_the_wrong_peer(patch):
    tell = handshake.signal_peer
    patch.setattr(handshake, "signal_peer", lambda flag, ring, position: tell(flag, ring, ring.peer(1)))


DEFECTS = [
    leave_out("_raise"),
    leave_out("_await"),
    leave_out("_lower"),
    lower_after_telling,
    *map(without_waiting_for, WAITS),
    begin_at_once,
    begin_when_all_but_one_have,
    begin_without_a_fence,
    look_at_the_own_beacon,
    tell_the_wrong_peer,
]


def is_reported(run):
    for seed in range(18):
        try:
            # Only where copies are fast can a thread fall behind them.
            with emulate(cores=2, completion=("eager", "late", "random")[seed % 3], seed=seed, laps=3):
                run(3)
        except EmulationError:
            return True
    return False


@ALL
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, kernel, monkeypatch):
    defect(monkeypatch)
    assert is_reported(KERNELS[kernel][1])


@ALL
@pytest.mark.parametrize("one", ["entry_handshake", "exit_handshake"])
def test_each_kernel_needs_both(one, kernel, monkeypatch):
    where, run = KERNELS[kernel]
    monkeypatch.setattr(where, one, NOTHING)
    assert is_reported(run)
