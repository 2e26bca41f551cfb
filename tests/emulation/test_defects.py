"""Small kernels run without a report where they keep the rules; each broken rule is reported, with its culprit."""

import functools
import itertools

import jax
import numpy as np
import pytest

from mosaic_emulator import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests.emulation import cases, cluster_kernels, tensor_kernels
from tests.emulation.cases import COMPLETIONS, normal


def _kernel(make, *operands, expected, **options):
    def with_defects(defects):
        kernel = jax.jit(functools.partial(make, **options, defects=defects))
        return lambda: np.testing.assert_allclose(kernel(*operands), expected, rtol=1e-4, atol=1e-4)

    return with_defects


def _product(make, m, n, k, **options):
    x, y = normal(m, k, dtype=np.float16), normal(k, n, dtype=np.float16, seed=1)
    return _kernel(make, x, y, expected=x.astype(np.float32) @ y.astype(np.float32), **options)


TILES, PARTS = normal(3 * 8, 64), np.random.default_rng(0).integers(-9, 9, (2, 2, 2, 64, 64)).astype(np.float32)
TOTAL = [TILES.reshape(3, 8, 64).sum(0)] * 2
KERNELS = {
    "ring": cases.ring,
    "shared tiles": _kernel(cluster_kernels.shared_tiles, TILES, expected=TOTAL),
    "scopes": _kernel(cluster_kernels.shared_tiles, TILES, expected=TOTAL, scoped=True),
    "swap": _kernel(cluster_kernels.swap_halves, TILES, expected=np.roll(TILES, 12, axis=0)),
    "sums": _kernel(cluster_kernels.sums, PARTS, expected=PARTS.sum(axis=1)),
    "one CTA": _product(tensor_kernels.matmul, 128, 128, 128),
    "pair": _product(tensor_kernels.matmul, 256, 128, 128, pair=True),
    "operand in tmem": _product(tensor_kernels.single_product, 128, 64, 64, left="tmem"),
    "operand copied to tmem": _product(tensor_kernels.single_product, 128, 64, 64, left="copied"),
    "pair, operand in tmem": _product(tensor_kernels.single_product, 256, 128, 64, left="tmem", pair=True),
}


@functools.cache
def kernel_of(name, *defects):
    """Returns a function that runs a kernel with these defects and compares its result with NumPy's."""
    return KERNELS[name](frozenset(defects))


# How often some kernels copy, or multiply, in each launch. A multicast load lands in both CTAs.
COUNTS = {"shared tiles": {"copies": 2 * 2 * 3, "bytes": 6 * 8 * 64 * 4}, "sums": {"copies": 8}, "pair": {"mmas": 4}}


@pytest.mark.parametrize("name", KERNELS)
def test_clean_under_every_schedule_tried(name):
    for seed, (completion, scheduler) in enumerate(itertools.product(COMPLETIONS, ("pct", "random"))):
        laps = 1 + seed % 2
        with emulate(completion=completion, scheduler=scheduler, seed=seed, laps=laps) as run:
            kernel_of(name)()
        assert run.counts["launches"] and not run.warnings
        counts = COUNTS.get(name, {})
        assert {key: run.counts[key] for key in counts} == {key: laps * n for key, n in counts.items()}
    with emulate(detect_races=False):
        kernel_of(name)()


DATA, PROXY, TENSOR = "data", "proxy", "tensor"
# kernel, defect, error, kind of race, words in one message
DEFECTS = [
    ("ring", "dropped wait", RaceError, DATA, "output 0"),
    ("ring", "early signal", RaceError, DATA, "TMA store, write"),
    ("ring", "read-only wait", RaceError, DATA, "TMA store, write"),
    ("ring", "wrong peer", ProtocolError, None, "nobody has written"),
    ("ring", "missing fence", RaceError, PROXY, "fence.proxy.async"),
    ("shared tiles", "refill by own barrier", RaceError, DATA, "multicast TMA load, write"),
    ("shared tiles", "arrival before the read", RaceError, DATA, "not ordered with the earlier read"),
    ("shared tiles", "missing arrival", DeadlockError, None, "cluster barrier consumed, got 1 of 2 arrivals"),
    ("shared tiles", "one CTA does not load", DeadlockError, None, "bytes outstanding"),
    ("shared tiles", "missing last wait", ProtocolError, None, "left the cluster too early"),
    ("scopes", "no wait between scopes", RaceError, DATA, "multicast TMA load, write"),
    ("swap", "no wait before the read", RaceError, DATA, "TMA load, write"),
    ("swap", "no wait after the read", ProtocolError, None, "left the cluster too early"),
    ("sums", "no wait before the read", RaceError, DATA, "async store|is not ordered with the earlier"),
    ("sums", "no wait for the reader", RaceError, DATA, "async store|is not ordered with the earlier"),
    ("sums", "one part is not sent", DeadlockError, None, "arrivals and 0 bytes outstanding"),
    ("sums", "an arrival too many is expected", DeadlockError, None, "barrier received, got 2 of 3 arrivals"),
    ("sums", "the last round is not awaited", ProtocolError, None, "left the cluster too early"),
    ("one CTA", "early refill", RaceError, DATA, "TMA load, write"),
    ("pair", "early refill", RaceError, DATA, "TMA load, write"),
    ("one CTA", "no wait for operands", RaceError, DATA, "tcgen05 mma, left operand"),
    ("pair", "own barrier", RaceError, DATA, "CTA 1"),
    ("one CTA", "early epilogue", RaceError, DATA, "tensor memory load"),
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


@pytest.mark.parametrize(("name", "defect", "error", "kind", "words"), DEFECTS)
def test_each_defect_is_reported_under_every_seed(name, defect, error, kind, words):
    # The kind `...` stands for any; `|` separates words of which one is enough.
    for seed, completion in enumerate(COMPLETIONS):
        with pytest.raises(EmulationError) as caught, emulate(seed=seed, completion=completion) as run:
            kernel_of(name, defect)()
        assert caught.value is run.errors[0]
        alike = [e for e in run.errors if isinstance(e, error) and kind in (..., getattr(e, "kind", None))]
        texts = [str(e) for e in alike if any(each in str(e) for each in words.split("|"))]
        assert texts, [str(found) for found in run.errors]
        assert f"seed={seed}" in texts[0] and "device " in texts[0] and "CTA" in texts[0]
        assert "kernels.py" in texts[0] or "cases.py" in texts[0]


def test_the_same_seed_gives_the_same_run_and_events_say_who_did_what():
    def events(seed):
        with emulate(seed=seed, completion="random", record=True) as run:
            kernel_of("ring")()
        return run.events

    def shape(events):
        return [(e.device, e.cta, e.thread, e.kind, e.start, e.end) for e in events]

    assert shape(events(3)) == shape(events(3)) != shape(events(4))
    assert {event.kind for event in events(3)} == {"copy", "remote_copy", "signal", "wait"}
    remote = [event for event in events(3) if event.kind == "remote_copy"]
    assert len(remote) == 12 and all(e.peer == (e.device + 1) % 4 and e.start <= e.end for e in remote)
    assert {e.target.split(" of ")[0] for e in remote} == {f"output 0[{i}:{i + 4}, 0:64]" for i in (0, 4, 8, 12)}
    with emulate() as silent:
        kernel_of("ring")()
    assert silent.events == []


def test_a_fault_outranks_the_wrong_number_that_it_causes():
    with pytest.raises(EmulationError, match="nobody has written") as caught, emulate():
        kernel_of("ring", "wrong peer")()  # This call raises inside the context, because it finds NaN.
    assert isinstance(caught.value.__cause__, AssertionError)
    assert np.isfinite(cases.SHARDS).all()
