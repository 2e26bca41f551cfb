"""Configurations and problems that a kernel refuses: an error that names the field, what it got, and the way out."""

from __future__ import annotations

import pytest

import overlap
from overlap.choice.problem import Problem
from overlap.kernels.target import Target, current_target, emulating
from tests.ops.product_cases import B200, H200

Config = overlap.Config
pytestmark = pytest.mark.one_jax

TURNS = Config(tile_m=64, tile_n=128, stages=2, schedule="pingpong")
SWAPPED = Config(tile_m=72, tile_n=128, stages=2, swap_operands=True)
TWO = Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
SMALL = Config(tile_m=128, tile_n=128, stages=2)
GATHER, SCATTER = dict(op="all_gather_lhs_matmul"), dict(op="matmul_reduce_scatter")
RING, TN = GATHER | dict(transport="ring"), dict(layout="tn")
LEAVE_OUT = "leave it out of `config`"
CONFIGURATIONS = [  # target, configuration, what else differs from a product of 4096 × 4096 × 4096, the message's words
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
    (H200, SMALL.replace(cluster=2), SCATTER, ["`cluster` and `stream_k` must be 1", "exchanged", "got 2 and 1"]),
    (H200, SMALL.replace(stream_k=2), SCATTER, ["`cluster` and `stream_k` must be 1", "got 1 and 2", "leave them out"]),
    (H200, TURNS.replace(tile_m=256), {}, ["`tile_m` must be at most 128 with schedule='pingpong'", "got 256"]),
    (H200, TURNS.replace(tile_m=128, tile_n=192), {}, ["128 × 192", "needs 192 registers", "`schedule`"]),
    (H200, TURNS.replace(tile_n=96), {}, ["`tile_n` must be a multiple of 64", "got 96"]),
    (H200, SWAPPED.replace(tile_m=76), {}, ["`tile_m` must be a multiple of 8 and at most 256", "got 76"]),
    (H200, SWAPPED.replace(tile_m=264), {}, ["at most 256 with `swap_operands`", "got 264"]),
    (H200, SWAPPED.replace(tile_n=64), {}, ["`tile_n` must be a multiple of 128"]),
    (H200, SWAPPED.replace(tile_m=168, tile_n=256), {}, ["168 × 256", "needs 168 registers", "160 is the most"]),
    (H200, SWAPPED.replace(split_k=2), {}, ["`split_k` must be 1 with `swap_operands`", "leave one of them out"]),
    (H200, SWAPPED, {"out_dtype": "float32"}, ["`swap_operands` needs a result of 16 bits", "got float32"]),
    (H200, SWAPPED, TN, ["`swap_operands` needs `lhs` as [m, k]", "got transpose_lhs=True", "out of `config`"]),
    (H200, SWAPPED, RING, ["`swap_operands` must be False with transport='ring'", "got True"]),
    (H200, SWAPPED, SCATTER, ["`swap_operands` must be False where results are exchanged", "got True"]),
    (H200, TWO.replace(schedule="pingpong"), {}, ["`schedule` must be 'cooperative' with", "='k'", LEAVE_OUT]),
    (H200, TWO.replace(stream_k=2), {}, ["`stream_k` must be 1 with cluster_along='k'", "got 2", LEAVE_OUT]),
    (H200, TWO, GATHER, ["cluster_along='k' can be used only in `matmul`", "leave `cluster` and `cluster_along` out"]),
    (H200, TWO.replace(tile_m=128, tile_n=256, stages=5), {}, ["bytes of shared memory", "`tile_n` (256)"]),
    (B200, SMALL.replace(cluster=4), {}, ["`cluster` must be 1 or 2", "got 4"]),
    (B200, SMALL.replace(tile_m=256), {}, ["`tile_m` must be 128 on NVIDIA B200", "got 256"]),
    (B200, SMALL.replace(tile_n=64, cluster=2), {}, ["`tile_n` must be a multiple of 128", "cluster=2", "got 64"]),
    (B200, SMALL.replace(tile_n=320), {}, ["`tile_n` must be a multiple of 64", "at most 256", "got 320"]),
    (B200, SMALL.replace(cluster=2), RING, ["`cluster` must be 1 by the transport 'ring'", "got 2", LEAVE_OUT]),
    (B200, TWO.replace(tile_m=128), {}, ["cluster_along='k' can be used only on Hopper", "NVIDIA B200"]),
    (B200, SMALL.replace(stages=1), {}, ["`stages` must be at least 2", "got 1"]),
    (B200, SMALL.replace(stages=9, tile_n=256), {}, ["bytes of shared memory", "reduce `stages` (9)"]),
    (B200, SMALL.replace(schedule="pingpong"), {}, ["`schedule` must be 'cooperative' on NVIDIA B200", "got 'ping"]),
    (B200, SWAPPED, {}, ["`swap_operands` must be False on NVIDIA B200", "got True", LEAVE_OUT]),
]  # fmt: skip
PROBLEMS = [  # Which the kernel cannot serve, and XLA can; test_refusals.py of tests/ops has the rest.
    (H200, SMALL, dict(out_dtype="float64"), ["writes float16, bfloat16 or float32", "=float64", "leave it out"]),
    (H200, SMALL, GATHER | dict(out_dtype="float32"), ["`preferred_element_type`=float32"]),
    (H200, SMALL, dict(m=100) | TN, ["rows of lhs to be multiples of 16 bytes", "m=100", "pad m to a multiple of 8"]),
    (H200, SMALL, dict(k=320, layout="nt", n=4), ["rows of the result", "n=4", "pad n to a multiple of 8"]),
    (H200, SMALL.replace(split_k=3), dict(k=256), ["`split_k` must divide the 4 k steps of k=256", "a divisor"]),
    (H200, TWO.replace(cluster=4), dict(k=192),
     ["k=192 has 3 k steps of 64", "the 4 CTAs of a cluster", "reduce `cluster`"]),
]  # fmt: skip
REFUSED = [(ValueError, *row) for row in CONFIGURATIONS] + [(NotImplementedError, *row) for row in PROBLEMS]


def check(target, config, **more):
    transport, op = more.pop("transport", ""), more.pop("op", "matmul")
    sizes = dict(m=4096, n=4096, k=4096, dtype="bfloat16", out_dtype="bfloat16", devices=1 if op == "matmul" else 2)
    Problem(op, **sizes | more).check(config, target, transport)


@pytest.mark.parametrize(("error", "target", "config", "more", "words"), REFUSED, ids=[row[-1][0] for row in REFUSED])
def test_refused(error, target, config, more, words):
    with pytest.raises(error) as caught:
        check(target, config, **more)
    assert not [word for word in words if word not in str(caught.value)], caught.value


def test_what_is_just_small_enough():
    for config in (TURNS.replace(tile_m=128), TURNS.replace(tile_n=256), Config(tile_m=128, tile_n=256, stages=4),
                   SWAPPED.replace(tile_m=160, tile_n=256), SWAPPED.replace(tile_m=256), TWO.replace(cluster=4),
                   SMALL.replace(tile_m=256, stages=4), SMALL.replace(tile_n=192, stages=5)):  # fmt: skip
        check(H200, config)
    for config in (SMALL.replace(tile_n=256, stages=4), SMALL.replace(tile_n=256, cluster=2, stages=6)):
        check(B200, config)


def test_a_cpu_stands_for_either():
    assert current_target().is_hopper and not current_target().is_blackwell
    with emulating("blackwell"):
        assert current_target().is_blackwell and not current_target().is_hopper
    with pytest.raises(ValueError, match="`architecture` must be hopper or blackwell"), emulating("ampere"):  # type: ignore
        pass
