"""Tests Blackwell's tensor cores: products of one CTA and of pairs, and the reports when a rule is broken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests.emulation import tensor_kernels
from tests.emulation.cases import normal
from tests.emulation.kernels import NO_DEFECTS

COMPLETIONS = ("late", "random", "eager")
M, N, K = 256, 128, 128
X, Y = normal(M, K, dtype=np.float16), normal(K, N, dtype=np.float16, seed=1)


@functools.cache
def product(pair, defects=NO_DEFECTS):
    kernel = jax.jit(tensor_kernels.matmul(M, N, K, pair=pair, defects=defects))
    expected = X.astype(np.float32) @ Y.astype(np.float32)
    return lambda: np.testing.assert_allclose(np.asarray(kernel(X, Y)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("pair", [False, True], ids=["one CTA", "pair"])
def test_clean_under_every_schedule_tried(pair, completion):
    for scheduler, seeds in (("pct", 8), ("random", 2), ("round_robin", 1)):
        for seed in range(seeds):
            with emulate(completion=completion, scheduler=scheduler, seed=seed) as run:
                product(pair)()
    tiles = M // (128 * (1 + pair)) * (N // 64)
    assert run.counts["mmas"] == tiles * (K // 64)


DATA, TENSOR = "data", "tensor"
# For each: (whether a pair computes, defect, error, kind of race, words in some message).
DEFECTS = [
    (False, "early refill", RaceError, DATA, "TMA load, write"),
    (True, "early refill", RaceError, DATA, "TMA load, write"),
    (False, "no wait for operands", RaceError, DATA, "tcgen05 mma, left operand"),
    (True, "own barrier", RaceError, DATA, "CTA 1"),
    (False, "early epilogue", RaceError, DATA, "tensor memory load"),
    (True, "early epilogue", RaceError, DATA, "tensor memory load"),
    (True, "early overwrite", RaceError, DATA, "tcgen05 mma, accumulator"),
    (False, "no wait for the load", RaceError, DATA, "Expected: wait_load_tmem()"),
    (True, "own epilogue", RaceError, DATA, "tcgen05 mma, accumulator"),
    (False, "no reset", ProtocolError, None, "nobody has written"),
    (False, "plain barrier", RaceError, TENSOR, "orders_tensor_core=True"),
    (True, "plain barrier", RaceError, TENSOR, "orders_tensor_core=True"),
    (False, "told by a plain barrier", RaceError, TENSOR, "tensor memory load"),
    (True, "commit of one", ProtocolError, None, "a commit without collective_axis"),
    (True, "issued by the other", DeadlockError, None, "mma_done"),
]


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("pair", "defect", "error", "kind", "words"), DEFECTS)
def test_defects_are_reported_under_every_seed(pair, defect, error, kind, words, completion):
    for seed in range(2):
        with pytest.raises(EmulationError), emulate(completion=completion, seed=seed) as run:
            product(pair, frozenset({defect}))()
        matching = [e for e in run.errors if type(e) is error and words in str(e) and getattr(e, "kind", None) == kind]
        assert matching, [str(e) for e in run.errors]
        assert "tensor_kernels.py" in str(matching[0])


# ---- operands in tensor memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_copy", [False, True], ids=["stored", "copied"])
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_an_operand_in_tensor_memory(dtype, by_copy):
    x, y = normal(128, 64, dtype=dtype), normal(64, 64, dtype=dtype, seed=1)
    kernel = jax.jit(tensor_kernels.operand_in_tensor_memory(128, 64, 64, dtype, by_copy=by_copy))
    for completion in COMPLETIONS:
        with emulate(completion=completion):
            out = np.asarray(kernel(x, y))
        np.testing.assert_allclose(out, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("defect", "words"),
    [("missing commit", "Expected: commit_tmem()"), ("reused at once", "Expected: wait_load_tmem()")],
)
def test_stores_and_loads_are_waited_for(defect, words):
    x, y = normal(128, 64, dtype=np.float16), normal(64, 64, dtype=np.float16, seed=1)
    kernel = jax.jit(tensor_kernels.operand_in_tensor_memory(128, 64, 64, np.float16, defects=frozenset({defect})))
    for completion in COMPLETIONS:
        with pytest.raises(RaceError, match="race on") as caught, emulate(completion=completion):
            kernel(x, y).block_until_ready()
        assert words in str(caught.value)


def test_a_pair_with_an_operand_in_tensor_memory():
    x, y = normal(256, 64, dtype=np.float16), normal(64, 128, dtype=np.float16, seed=1)
    run = tensor_kernels.pair_with_operand_in_tensor_memory
    for completion in COMPLETIONS:
        with emulate(completion=completion):
            out = np.asarray(jax.jit(run)(x, y))
        np.testing.assert_allclose(out, x.astype(np.float32) @ y.astype(np.float32), rtol=1e-4, atol=1e-4)
    plain = jax.jit(functools.partial(run, defects=frozenset({"plain barrier"})))
    with pytest.raises(RaceError, match="tensor memory store of x_tmem") as caught, emulate():
        plain(x, y).block_until_ready()
    assert caught.value.kind == TENSOR


def test_jax_refuses_a_commit_on_a_barrier_that_does_not_order_the_tensor_core():
    def body(out, barrier):
        plgpu.tcgen05_commit_arrive(barrier)

    with pytest.raises(ValueError, match="orders_tensor_core"):
        jax.jit(
            lambda: plgpu.kernel(
                body, out_type=jax.ShapeDtypeStruct((1,), jnp.float32), scratch_types=[plgpu.Barrier()]
            )()
        )()
