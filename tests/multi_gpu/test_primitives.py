"""The kernels of examples/all_gather.py and halo_exchange.py on 2, 4 and 8 GPUs: exact, also if a device is late."""

import pytest

from overlap import primitives as prim
from tests.multi_gpu.late_devices import stall
from tests.ops.primitive_cases import KERNELS, program

LAUNCHES = range(4)  # Several launches in a row, each with its own data.


@pytest.mark.parametrize("shard", [(8, 128), (1024, 2048)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_every_launch_is_exact(devices, name, shard):
    run = program(name, devices, shard)
    assert max(run(seed) for seed in LAUNCHES) <= 1e-5


@pytest.mark.parametrize(("late", "victim"), [("tma_store", 1), ("semaphore_signal_peer", 0)])
@pytest.mark.parametrize("name", KERNELS)
def test_a_device_that_is_late_is_waited_for(devices, name, victim, late, monkeypatch):
    """Makes device `victim` stall before each of its stores, or before it signals that its stores have landed."""
    act = getattr(prim, late)
    monkeypatch.setattr(prim, late, lambda *args: (stall(victim), act(*args)))
    run = program(name, devices, (64, 1024))
    assert max(run(seed) for seed in LAUNCHES) <= 1e-5


@pytest.mark.parametrize("name", ["all_gather", "halo_exchange"])
def test_negative_control_without_the_wait(devices, name, monkeypatch):
    store = prim.tma_store
    monkeypatch.setattr(prim, "tma_store", lambda *args: (stall(1), store(*args)))
    monkeypatch.setattr(prim, "semaphore_wait_peer", lambda *_, **__: None)
    run = program(name, devices, (64, 1024))
    assert not max(run(seed) for seed in LAUNCHES) <= 1e-5
