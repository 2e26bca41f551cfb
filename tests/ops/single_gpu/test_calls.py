"""Calls of `overlap.matmul` that are mapped; which configurations run, and which are tried."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.choice.problem import Problem
from overlap.choice.space import candidates
from overlap.emulation import emulate
from overlap.frame import primitive
from overlap.kernels.target import emulating
from overlap.single_gpu.matmul import MatmulKernel
from tests.ops.explained import answer
from tests.ops.product_cases import H200, in_f32, integers, oracle_of
from tests.ops.single_gpu.products import BF16
from tests.oracle import make_mesh

FOUR = overlap.Config(tile_m=64, tile_n=128, stages=2, cluster=4, cluster_along="k")
ON_BLACKWELL = overlap.Config(tile_m=128, tile_n=64, stages=2)


def test_vmap_along_another_dimension():
    lhs, bias = integers(24, 2, 72, 136), integers(26, 3, 72)
    rhs = jnp.stack([integers(25, 136, 72) * (i + 1) for i in range(3)], axis=1)

    def mapped(implementation):
        one = lambda rhs, bias: overlap.matmul(lhs, rhs, bias=bias, activation=jnp.abs, implementation=implementation)  # noqa: E731
        return jax.jit(jax.vmap(one, (1, 0)))(rhs, bias)

    with emulate(cores=2):
        np.testing.assert_array_equal(in_f32(mapped("fused")), in_f32(mapped("xla")))


@pytest.mark.parametrize("config", [FOUR, ON_BLACKWELL], ids=["along k", "on Blackwell"])
def test_a_mapped_batch(config):
    lhs, rhs = integers(1, 3, 40, 264), integers(2, 264, 136)
    call = lambda x: overlap.matmul(x, rhs, config=config, implementation="fused")  # noqa: E731
    with emulating("hopper" if config is FOUR else "blackwell"), emulate(cores=4):
        ys = jax.jit(jax.vmap(call))(lhs)
    np.testing.assert_array_equal(in_f32(ys), in_f32(oracle_of(lhs, rhs).astype(BF16)))


def test_a_config_is_for_the_forward_pass_and_for_each_element_of_a_vmap(monkeypatch):
    """The docstring of `matmul` says which configurations run."""
    config, found, launch = overlap.Config(tile_n=128, stages=3), [], MatmulKernel.launch
    monkeypatch.setattr(MatmulKernel, "launch", lambda self, x, plan: found.append(plan) or launch(self, x, plan))
    lhs, rhs = jax.ShapeDtypeStruct((128, 64), BF16), jax.ShapeDtypeStruct((64, 128), BF16)
    product = functools.partial(overlap.matmul, implementation="fused", config=config)
    jax.eval_shape(jax.vmap(product, in_axes=(0, None)), jax.ShapeDtypeStruct((3, *lhs.shape), lhs.dtype), rhs)
    assert [plan.config for plan in found] == [config] * len(found) and found
    found.clear()
    primitive.tracer_of.cache_clear()
    jax.eval_shape(jax.grad(lambda *operands: product(*operands).sum(), argnums=(0, 1)), lhs, rhs)
    # The backward pass has a product for each operand, of cotangents in the operands' dtype.
    assert [plan.config == config for plan in found] == [True, False, False]
    assert [plan.out_dtype for plan in found] == [BF16] * 3


# --- What is chosen on Blackwell --------------------------------------------------------------------------------------


def test_a_ring_is_chosen_without_pairs():
    """A problem does not name its transport, and the best configuration for pulling uses pairs."""
    lhs, rhs = jax.ShapeDtypeStruct((512, 256), BF16), jax.ShapeDtypeStruct((256, 512), BF16)
    with emulating("blackwell"):
        given = overlap.all_gather_lhs_matmul, lhs, rhs, "x"
        by = {
            transport: answer(*given, mesh=make_mesh(x=2), transport=transport, implementation="fused").config
            for transport in ("pull", "ring")
        }
    assert (by["pull"].cluster, by["ring"].cluster) == (2, 1)


# --- Which transposed tiles are tried ---------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_transposed_tiles_are_chosen_so_that_the_last_one_is_full():
    """For 1192 rows, 9 tiles of 136 rows give one wave of 126 tiles; 128 × 192 gives 100 tiles, each a third larger."""
    tried = lambda *sizes, **more: [x for x in candidates(Problem(*sizes, **more), H200) if x.swap_operands]  # noqa: E731
    rows = {config.tile_m for config in tried("matmul", 1192, 1792, 6464, "bfloat16", "bfloat16")}
    assert {136, 152, 240} <= rows
    # For each number of tiles along m, the fewest rows that suffice.
    assert all(-(-1192 // row) != -(-1192 // (row - 8)) for row in rows)
    # Tiles of the last wave are cut for one device. In gathers, some such kernels have no register left.
    of_one = tried("matmul", 160, 22720, 11776, "bfloat16", "bfloat16")
    assert {1, 2} <= {config.stream_k for config in of_one} and {config.split_k for config in of_one} == {1}
    gathered = tried("all_gather_lhs_matmul", 512, 4096, 4096, "bfloat16", "bfloat16", devices=4)
    assert {config.stream_k for config in gathered} == {1}
