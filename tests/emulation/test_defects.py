"""Small kernels run without a report where they keep the rules; each broken rule is reported, with its culprit."""

import ml_dtypes
import numpy as np
import pytest

from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests.emulation import cases
from tests.emulation.cases import COMPLETIONS, KERNELS, kernel_of

# How often some kernels copy (in each launch), or multiply.
COUNTS = {
    "shared tiles": {"copies": 4 * 11, "bytes": 4 * 6 * 8 * 64 * 4},  # A load lands in both CTAs.
    "sums of 2": {"copies": 8},
    "sums of 4": {"copies": 32},
    "one CTA": {"mmas": 8},
    "pair": {"mmas": 4},
}
MORE = [pytest.param(False, id="few seeds"), pytest.param(True, id="many seeds", marks=pytest.mark.slow)]


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", KERNELS)
def test_clean_under_every_schedule_tried(name, more):
    for completion in COMPLETIONS:
        for scheduler, seeds in (("pct", 15 if more else 2), ("random", 3 if more else 1), ("round_robin", 1)):
            for seed in range(seeds):
                laps = 1 + (seed + (scheduler == "random")) % 2
                with emulate(completion=completion, scheduler=scheduler, seed=seed, laps=laps) as run:
                    kernel_of(name)()
                assert run.counts["launches"] and not run.warnings
                counts = COUNTS.get(name, {})
                assert {key: run.counts[key] for key in counts} == {key: laps * n for key, n in counts.items()}
    with emulate(detect_races=False):
        kernel_of(name)()


DATA, PROXY, EXIT, TENSOR = "data", "proxy", "exit", "tensor"
# kernel, defect, error, kind of race, words in one message
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
    ("matmul", "double arrival", EmulationError, ..., "_smem|missed phase"),
    ("shared tiles", "refill by own barrier", RaceError, DATA, "multicast TMA load, write"),
    ("shared tiles", "arrival before the read", RaceError, DATA, "not ordered with the earlier read"),
    ("shared tiles", "missing arrival", DeadlockError, None, "cluster barrier consumed[0], got 1 of 2 arrivals"),
    ("shared tiles", "one CTA does not load", DeadlockError, None, "bytes outstanding"),
    ("shared tiles", "missing last wait", ProtocolError, None, "left the cluster too early"),
    ("swap", "no wait before the read", RaceError, DATA, "TMA load, write"),
    ("swap", "no wait after the read", ProtocolError, None, "left the cluster too early"),
    ("scopes", "no wait between scopes", RaceError, DATA, "multicast TMA load, write"),
    ("sums of 2", "no wait before the read", RaceError, DATA, "async store|is not ordered with the earlier"),
    ("sums of 4", "no wait for the reader", RaceError, DATA, "async store|is not ordered with the earlier"),
    ("sums of 4", "one part is not sent", DeadlockError, None, "arrivals and 0 bytes outstanding"),
    ("sums of 2", "an arrival too many is expected", DeadlockError, None, "barrier received, got 2 of 3 arrivals"),
    ("sums of 2", "the last round is not awaited", ProtocolError, None, "left the cluster too early"),
    ("one CTA", "early refill", RaceError, DATA, "TMA load, write"),
    ("pair", "early refill", RaceError, DATA, "TMA load, write"),
    ("one CTA", "no wait for operands", RaceError, DATA, "tcgen05 mma, left operand"),
    ("pair", "own barrier", RaceError, DATA, "CTA 1"),
    ("one CTA", "early epilogue", RaceError, DATA, "tensor memory load"),
    ("pair", "early epilogue", RaceError, DATA, "tensor memory load"),
    ("pair", "early overwrite", RaceError, DATA, "tcgen05 mma, accumulator"),
    ("one CTA", "no wait for the load", RaceError, DATA, "Expected: wait_load_tmem()"),
    ("pair", "own epilogue", RaceError, DATA, "tcgen05 mma, accumulator"),
    ("one CTA", "no reset", ProtocolError, None, "nobody has written"),
    ("one CTA", "plain barrier", RaceError, TENSOR, "orders_tensor_core=True"),
    ("pair", "plain barrier", RaceError, TENSOR, "orders_tensor_core=True"),
    ("one CTA", "told by a plain barrier", RaceError, TENSOR, "tensor memory load"),
    ("pair", "commit of one", ProtocolError, None, "a commit without collective_axis"),
    ("pair", "issued by the other", DeadlockError, None, "mma_done"),
    ("operand in tmem", "missing commit", RaceError, ..., "Expected: commit_tmem()"),
    ("operand in tmem", "reused at once", RaceError, ..., "Expected: wait_load_tmem()"),
    ("pair, operand in tmem", "plain barrier", RaceError, TENSOR, "tensor memory store of x_tmem"),
]


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize(("name", "defect", "error", "kind", "words"), DEFECTS)
def test_each_defect_is_reported_under_every_seed(name, defect, error, kind, words, more):
    # The kind `...` stands for any; `|` separates words of which one is enough.
    for seed, completion in enumerate(COMPLETIONS * (4 if more else 1)):
        with pytest.raises(EmulationError) as caught, emulate(seed=seed, completion=completion) as run:
            kernel_of(name, defect)()
        assert caught.value is run.errors[0]
        texts = [
            str(found)
            for found in run.errors
            if isinstance(found, error) and kind in (..., getattr(found, "kind", None))
        ]
        texts = [text for text in texts if any(each in text for each in words.split("|"))]
        assert texts, [str(found) for found in run.errors]
        assert f"seed={seed}" in texts[0] and "device " in texts[0] and "CTA" in texts[0] and "kernels.py" in texts[0]


def test_a_counter_shared_by_rounds_needs_a_slow_thread():
    reported = 0
    for seed in range(8):
        try:
            with emulate(seed=seed):
                kernel_of("pull", "shared counter")()
        except RaceError as error:
            reported += error.kind == DATA
    assert reported >= 3


def test_a_grid_larger_than_what_fits():
    with pytest.raises(DeadlockError) as caught, emulate(resident=1):
        kernel_of("pull")()
    message = str(caught.value)
    assert "never launched (CTA 1)" in message and "to reach 4, got 2" in message
    for device in range(cases.DEVICES):
        assert f"device {device}, CTA 0, warpgroup 0: waits for semaphore" in message
    with emulate(resident=1):  # These CTAs do not wait for each other.
        kernel_of("matmul")()


@pytest.mark.parametrize("devices", [1, 2])
def test_the_ring_on_other_axis_sizes(devices):
    with emulate():
        cases.ring(devices=devices)()


def test_bfloat16():
    with emulate():
        cases.matmul(dtype=ml_dtypes.bfloat16)()
        cases.tensor_operand((), dtype=ml_dtypes.bfloat16)()


def test_the_same_seed_gives_the_same_run():
    def trace(seed):
        with emulate(seed=seed, completion="random", record=True) as run:
            kernel_of("pull")()
        return [(e.device, e.cta, e.thread, e.kind, e.start, e.end) for e in run.events]

    assert trace(3) == trace(3)
    assert trace(3) != trace(4)


def test_a_fault_outranks_the_wrong_number_that_it_causes():
    with pytest.raises(EmulationError, match="nobody has written") as caught, emulate():
        kernel_of("ring", "wrong peer")()  # This call raises inside the context, because it finds NaN.
    assert isinstance(caught.value.__cause__, AssertionError)
    assert np.isfinite(cases.shards()).all()
