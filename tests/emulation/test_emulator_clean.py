"""Kernels that keep the rules run without a report, and compute what NumPy computes, under every schedule tried."""

import ml_dtypes
import numpy as np
import pytest

from overlap.emulation import emulate
from tests.emulation import cases

COMPLETIONS = ("late", "random", "eager")


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("name", cases.KERNELS)
def test_clean_under_pct(name, completion):
    run_kernel = cases.KERNELS[name]()
    for seed in range(20):
        with emulate(completion=completion, seed=seed) as run:
            run_kernel()
        assert run.counts["launches"] == 1
        assert run.counts["copies"] > 0


@pytest.mark.parametrize("scheduler", ["random", "round_robin"])
@pytest.mark.parametrize("name", cases.KERNELS)
def test_clean_under_other_schedulers(name, scheduler):
    for seed in range(3):
        with emulate(scheduler=scheduler, completion="random", seed=seed) as run:
            cases.KERNELS[name]()()
        assert not run.warnings


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_ring_on_other_axis_sizes(devices):
    with emulate():
        cases.group(devices=devices)()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_matmul_dtypes(dtype):
    with emulate():
        cases.matmul(dtype=dtype)()


@pytest.mark.parametrize("name", cases.KERNELS)
def test_without_race_detection(name):
    with emulate(detect_races=False):
        cases.KERNELS[name]()()


def test_same_seed_same_run():
    def trace(seed):
        with emulate(seed=seed, completion="random", record=True) as run:
            cases.pull()()
        return [(e.device, e.cta, e.thread, e.kind, e.start, e.end) for e in run.events]

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)
