"""What `matmul` and its configurations refuse: an error that names the argument, what it got, and the way out."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.choice.problem import Problem
from overlap.emulation import emulate
from overlap.kernels.target import Target, current_target, emulating
from tests.ops.product_cases import B200, normal

Config, CPU, H200 = overlap.Config, Target("cpu", "cpu", 8), Target("gpu", "NVIDIA H200", 132)
pytestmark = pytest.mark.one_jax

# --- Configurations ---------------------------------------------------------------------------------------------------

TURNS = Config(tile_m=64, tile_n=128, stages=2, schedule="pingpong")
SWAPPED = Config(tile_m=72, tile_n=128, stages=2, swap_operands=True)
TWO = Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
SMALL = Config(tile_m=128, tile_n=128, stages=2)
GATHER, SCATTER = dict(op="all_gather_lhs_matmul"), dict(op="matmul_reduce_scatter")
RING, TN = dict(op="all_gather_lhs_matmul", transport="ring"), dict(layout="tn")
LEAVE_OUT = "leave it out of `config`"
REFUSED = [  # target, configuration, what else differs from a product of 4096 × 4096 × 4096, what the message says
    (H200, Config(tile_m=96), {}, ["`tile_m` must be 64, 128 or 256", "swap_operands=True", "got 96"]),
    (H200, SMALL.replace(tile_m=64, tile_n=64), {}, ["`tile_n` must be a multiple of 128", "got 64", "'pingpong'"]),
    (H200, SMALL.replace(tile_n=320), {}, ["`tile_n` must be", "at most 256", "got 320"]),
    (H200, SMALL.replace(stages=1), {}, ["`stages` must be at least 2", "got 1"]),
    (H200, Config(tile_m=256, tile_n=256), {}, ["256 × 256", "needs 256 registers", "160 is the most", "`tile_n`"]),
    (H200, SMALL.replace(stages=9), {}, ["bytes of shared memory", "reduce `stages` (9)"]),
    (H200, SMALL.replace(chunk_bytes=1000), {}, ["`chunk_bytes` must be a multiple of 16", "got 1000"]),
    (H200, SMALL.replace(split_k=2, stream_k=2), {}, ["`split_k` must be 1 with stream_k=2", "got 2", LEAVE_OUT]),
    (H200, SMALL.replace(split_k=2), GATHER, ["`split_k` must be 1 in a fused collective", "got 2", LEAVE_OUT]),
    (H200, SMALL.replace(cluster=2), {}, ["on Hopper", "`cluster` needs cluster_along='k'", "cluster=2", "'m'"]),
    (H200, TWO.replace(cluster=3), {}, ["`cluster` must be 1, 2 or 4", "at most the 132 cores", "got 3"]),
    (Target("cpu", "cpu", 1), TWO, {}, ["`cluster` must be", "at most the 1 cores", "got 2"]),
    (B200, SMALL.replace(cluster=4), {}, ["`cluster` must be 1 or 2", "got 4"]),
    (H200, SMALL.replace(cluster=2), SCATTER, ["`cluster` and `stream_k` must be 1", "exchanged", "got 2 and 1"]),
    (H200, SMALL.replace(stream_k=2), SCATTER, ["`cluster` and `stream_k` must be 1", "got 1 and 2", "leave them out"]),
    (H200, TURNS.replace(tile_m=256), {}, ["`tile_m` must be at most 128 with schedule='pingpong'", "got 256"]),
    (H200, TURNS.replace(tile_m=128, tile_n=256), {}, ["128 × 256", "256 registers", "160 is the most", "`schedule`"]),
    (H200, TURNS.replace(tile_m=128, tile_n=192), {}, ["needs 192 registers"]),
    (H200, TURNS.replace(tile_n=96), {}, ["`tile_n` must be a multiple of 64", "got 96"]),
    (H200, TURNS.replace(tile_n=256, stages=6), {}, ["bytes of shared memory"]),
    (H200, SWAPPED.replace(tile_m=76), {}, ["`tile_m` must be a multiple of 8 and at most 256", "got 76"]),
    (H200, SWAPPED.replace(tile_m=264), {}, ["at most 256 with `swap_operands`", "got 264"]),
    (H200, SWAPPED.replace(tile_n=64), {}, ["`tile_n` must be a multiple of 128"]),
    (H200, SWAPPED.replace(tile_n=192), {}, ["`tile_n` must be a multiple of 128"]),
    (H200, SWAPPED.replace(tile_m=168, tile_n=256), {}, ["168 × 256", "needs 168 registers", "160 is the most"]),
    (H200, SWAPPED.replace(split_k=2), {}, ["`split_k` must be 1 with `swap_operands`", "leave one of them out"]),
    (H200, SWAPPED, {"out_dtype": "float32"}, ["`swap_operands` needs a result of 16 bits", "got float32"]),
    (H200, SWAPPED, TN, ["`swap_operands` needs `lhs` as [m, k]", "got transpose_lhs=True", "out of `config`"]),
    (H200, SWAPPED, RING, ["`swap_operands` must be False with transport='ring'", "got True"]),
    (H200, SWAPPED, SCATTER, ["`swap_operands` must be False where results are exchanged", "got True"]),
    (H200, TWO.replace(cluster=8), {}, ["`cluster` must be 1, 2 or 4 with cluster_along='k'", "got 8"]),
    (H200, TWO.replace(schedule="pingpong"), {}, ["`schedule` must be 'cooperative' with", "='k'", LEAVE_OUT]),
    (H200, TWO.replace(stream_k=2), {}, ["`stream_k` must be 1 with cluster_along='k'", "got 2", LEAVE_OUT]),
    (H200, TWO, GATHER, ["cluster_along='k' can be used only in `matmul`", "leave `cluster` and `cluster_along` out"]),
    (H200, TWO.replace(tile_m=128, tile_n=256, stages=5), {}, ["bytes of shared memory", "`tile_n` (256)"]),
    (B200, SMALL.replace(tile_m=256), {}, ["`tile_m` must be 128 on NVIDIA B200", "got 256"]),
    (B200, SMALL.replace(tile_n=96), {}, ["`tile_n` must be a multiple of 64", "got 96"]),
    (B200, SMALL.replace(tile_n=64, cluster=2), {}, ["`tile_n` must be a multiple of 128", "cluster=2", "got 64"]),
    (B200, SMALL.replace(tile_n=320), {}, ["at most 256", "got 320"]),
    (B200, SMALL.replace(cluster=2), RING, ["`cluster` must be 1 by the transport 'ring'", "got 2", LEAVE_OUT]),
    (B200, TWO.replace(tile_m=128), {}, ["cluster_along='k' can be used only on Hopper", "NVIDIA B200"]),
    (B200, SMALL.replace(stages=1), {}, ["`stages` must be at least 2", "got 1"]),
    (B200, SMALL.replace(stages=9, tile_n=256), {}, ["bytes of shared memory", "reduce `stages` (9)"]),
    (B200, SMALL.replace(schedule="pingpong"), {}, ["`schedule` must be 'cooperative' on NVIDIA B200", "got 'ping"]),
    (B200, SWAPPED, {}, ["`swap_operands` must be False on NVIDIA B200", "got True", LEAVE_OUT]),
]  # fmt: skip


def check(target, config, **more):
    transport, op = more.pop("transport", ""), more.pop("op", "matmul")
    sizes = dict(m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16", devices=1 if op == "matmul" else 2)
    Problem(op, **sizes | more).check(config, target, transport)


def asserts_words(caught, words):
    assert not [word for word in words if word not in str(caught.value)], caught.value


@pytest.mark.parametrize(("target", "config", "more", "words"), REFUSED, ids=lambda x: x[0] if type(x) is list else "")
def test_configurations(target, config, more, words):
    with pytest.raises(ValueError) as caught:
        check(target, config, **more)
    asserts_words(caught, words)


PROBLEMS = [
    (SMALL, dict(dtype="float32"), ["float16, bfloat16", "got float32 operands", "cast them"]),
    (SMALL, dict(out_dtype="float64"), ["writes float16, bfloat16 or float32", "=float64", "leave it out"]),
    (SMALL, dict(dtype="float8_e4m3fn"), ["8-bit operands only with k along their rows", "transpose_rhs=True"]),
    (SMALL, GATHER | dict(out_dtype="float32"), ["`preferred_element_type`=float32"]),
    (SMALL, dict(m=0), ["needs m to be at least 1", "got m=0", 'implementation="xla"']),
    (SMALL, dict(k=100), ["rows of lhs to be multiples of 16 bytes", "k=100", "pad k to a multiple of 8"]),
    (SMALL, dict(m=100) | TN, ["rows of lhs", "m=100", "pad m"]),
    (SMALL, dict(n=100), ["rows of rhs", "n=100", "pad n"]),
    (SMALL, dict(k=320, layout="nt", n=4), ["rows of the result", "n=4", "pad n to a multiple of 8"]),
    (SMALL.replace(split_k=3), dict(k=256), ["`split_k` must divide the 4 k steps of k=256", "a divisor"]),
    (TWO.replace(cluster=4), dict(k=192), ["k=192 has 3 k steps of 64", "the 4 CTAs of a cluster", "reduce `cluster`"]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "more", "words"), PROBLEMS, ids=lambda x: x[0] if type(x) is list else "")
def test_products_that_the_kernel_cannot_serve(config, more, words):
    with pytest.raises(NotImplementedError) as caught:
        check(H200, config, **more)
    asserts_words(caught, words)


def test_what_is_just_small_enough():
    for config in (TURNS.replace(tile_m=128), TURNS.replace(tile_n=256), Config(tile_m=128, tile_n=256, stages=4),
                   SWAPPED.replace(tile_m=160, tile_n=256), SWAPPED.replace(tile_m=256), TWO.replace(cluster=4),
                   SMALL.replace(tile_m=256, stages=4), SMALL.replace(tile_n=192, stages=5)):  # fmt: skip
        check(H200, config)
    for config in (SMALL.replace(tile_n=256, stages=4), SMALL.replace(tile_n=256, cluster=2, stages=6)):
        check(B200, config)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("schedule", ["x", None, 1, "Pingpong", ("pingpong",)], "'cooperative' or 'pingpong'"),
        ("cluster_along", ["x", None, 2], "'m' or 'k'"),
        ("order_minor", ["k", True], "'m' or 'n'"),
        ("swap_operands", [1, "yes", None], "True or False"),
        ("joined", [1], "True or False"),
        ("one_shot", [0], "True or False"),
        ("tile_m", [0, -64, 64.0, "64", True], "an int of at least 1"),
        ("stages", [None], "an int of at least 1"),
    ],
)
def test_values_of_fields(name, values, words):
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be {words}, got {re.escape(repr(value))}"):
            Config(**{name: value})


# --- Calls ------------------------------------------------------------------------------------------------------------

ZEROS = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
CALLS = [  # arguments of a product of 128 × 256 × 64, what the message says
    (dict(bias=ZEROS(128)), ["`bias`", "(256,)", "(128,)"]),
    (dict(addend=ZEROS(128, 128)), ["`addend`", "(128, 256)", "(128, 128)"]),
    (dict(lhs_scale=ZEROS(256)), ["`lhs_scale`", "(128, 1)", "(256,)", "`rhs_scale`"]),
    (dict(rhs_scale=ZEROS(128, 1)), ["`rhs_scale`", "(1, 256)", "(128, 1)", "`lhs_scale`"]),
    (dict(rhs_scale=[1.0]), ["`rhs_scale`", "list of 1"]),
    (dict(lhs_scale=(1.0, 2.0)), ["`lhs_scale`", "a real number or an array", "(1.0, 2.0)"]),
    (dict(bias=[1.0, 2.0]), ["`bias`", "array", "list"]),
    (dict(activation="relu"), ["`activation`", "'relu'"]),
    (dict(transpose_lhs=True), ["contraction", "k=128", "k=64"]),
    (dict(lhs=normal(0, 2, 128, 64), rhs=normal(1, 3, 64, 256)), ["leading dimensions"]),
    # A configuration that the caller gives is not replaced by another.
    (dict(config=TURNS.replace(tile_m=256)), ["at most 128 with schedule='pingpong'"]),
    (dict(config=TWO.replace(cluster=3)), ["`cluster` must be 1, 2 or 4", "got 3"]),
]


@pytest.mark.parametrize(("arguments", "words"), CALLS, ids=lambda x: "-".join(x) if type(x) is dict else "")
def test_calls(arguments, words):
    given = {"lhs": normal(34, 128, 64), "rhs": normal(35, 64, 256)} | arguments
    with pytest.raises(ValueError) as caught, emulate(cores=2):
        overlap.matmul(**given, **({"implementation": "fused"} if "config" in arguments else {}))
    asserts_words(caught, words)


def test_an_empty_batch_is_left_to_xla():
    lhs, rhs = jnp.zeros((0, 128, 64), jnp.bfloat16), jnp.zeros((0, 64, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="batch of at least 1"):
        overlap.matmul(lhs, rhs, implementation="fused")
    assert overlap.matmul(lhs, rhs).shape == (0, 128, 128)


def test_a_cpu_stands_for_either():
    assert current_target().is_hopper and not current_target().is_blackwell
    with emulating("blackwell"):
        assert current_target().is_blackwell and not current_target().is_hopper
    with pytest.raises(ValueError, match="`architecture` must be hopper or blackwell"), emulating("ampere"):  # type: ignore
        pass
