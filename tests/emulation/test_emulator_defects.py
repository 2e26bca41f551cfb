"""Tests that the emulator reports each injected defect, with its kind and with words that name the culprit."""

import pytest

from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests.emulation import cases

DATA, PROXY, EXIT = "data", "proxy", "exit"

# kernel, defect, error, kind of race, words in some message
DEFECTS = [
    ("ring", "dropped wait", RaceError, DATA, "output 0"),
    ("ring", "early signal", RaceError, DATA, "TMA store, write"),
    ("ring", "read-only wait", RaceError, DATA, "TMA store, write"),
    ("ring", "wrong peer", ProtocolError, None, "nobody has written"),
    ("ring", "missing fence", RaceError, PROXY, "fence.proxy.async"),
    ("pull", "missing handshake", RaceError, EXIT, "missing exit handshake"),
    ("pull", "short handshake", RaceError, EXIT, "missing exit handshake"),
    ("pull", "per-CTA semaphore", DeadlockError, None, "scratch_types is one CTA's own"),
    ("pull", "missing fence", RaceError, PROXY, "fence.proxy.async"),
    ("pull", "no store wait", RaceError, DATA, "chunk_smem"),
    ("pull", "read-only wait", RaceError, DATA, "output 0"),
    ("pull", "missing commit", RaceError, PROXY, "commit_smem"),
    ("matmul", "early reuse", RaceError, DATA, "_smem["),
    ("matmul", "dropped wait", RaceError, DATA, "lhs_smem["),
    ("matmul", "arrive before wgmma ends", RaceError, DATA, "wgmma"),
    ("matmul", "missing commit", RaceError, PROXY, "commit_smem"),
    ("matmul", "left too early", ProtocolError, None, "freed too early"),
]


def faults(run_kernel, **settings):
    """Runs a kernel once and returns all faults that the emulator finds."""
    with pytest.raises(EmulationError) as caught, emulate(**settings) as run:
        run_kernel()
    assert caught.value is run.errors[0]
    return run.errors


@pytest.mark.parametrize("completion", ["late", "random", "eager"])
@pytest.mark.parametrize(("name", "defect", "error", "kind", "words"), DEFECTS)
def test_reported_under_every_seed(name, defect, error, kind, words, completion):
    run_kernel = cases.KERNELS[name](defects=frozenset({defect}))
    for seed in range(3):
        errors = faults(run_kernel, seed=seed, completion=completion)
        matching = [e for e in errors if type(e) is error and words in str(e) and getattr(e, "kind", None) == kind]
        assert matching, [str(e) for e in errors]
        assert f"seed={seed}" in str(matching[0])
        assert "device " in str(matching[0])
        assert "kernels.py" in str(matching[0])


def test_counter_shared_by_rounds_needs_a_slow_thread():
    run_kernel = cases.pull(defects=frozenset({"shared counter"}))
    reported = 0
    for seed in range(20):
        try:
            with emulate(seed=seed):
                run_kernel()
        except RaceError as error:
            reported += error.kind == DATA
    assert reported >= 10


def test_double_arrival():
    run_kernel = cases.matmul(defects=frozenset({"double arrival"}))
    for seed in range(5):
        for error in faults(run_kernel, seed=seed)[:1]:
            assert isinstance(error, (RaceError, ProtocolError))
            assert "lhs_smem" in str(error) or "rhs_smem" in str(error) or "missed phase" in str(error)


def test_grid_larger_than_what_fits():
    (error,) = faults(cases.pull(), resident=1)
    assert isinstance(error, DeadlockError)
    message = str(error)
    assert "never launched (CTA 1)" in message
    for device in range(cases.DEVICES):
        assert f"device {device}, CTA 0, warpgroup 0: waits for semaphore" in message
    assert "to reach 8, got 4" in message


def test_grid_that_takes_turns_without_waiting_for_each_other():
    with emulate(resident=1):
        cases.matmul()()
