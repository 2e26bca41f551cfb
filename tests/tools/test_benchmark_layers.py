"""Benchmarks of blocks, of layers and of their products: all methods compute the same, and what is wrong is noticed."""

from __future__ import annotations

import collections
import dataclasses

import jax
import pytest
from jax import lax

from benchmarks import backward, block, layer_runs
from overlap.emulation import emulate
from overlap.tuning.programs import mesh_of


def test_the_fused_block_computes_the_same_and_shares_what_it_can():
    """`block.measure` compares the tokens after a turn of the block with its backward pass."""
    with emulate(cores=3, keep=True) as run:
        block.measure(mesh_of(jax.devices()[:2]), (32, 64, 128), True, ("fused", "xla"), rounds=0, turns=1)
        run.check()
    # Forward: one gather and one scatter. Backward: a gather for the last product, and one scatter of the sum of the
    # products that share the first gather.
    assert collections.Counter(launch.name.split("_")[1] for launch in run.launches) == {"all": 2, "matmul": 2}


@pytest.mark.one_jax
def test_a_wrong_block_and_a_wrong_product_are_noticed(monkeypatch):
    right, mesh, sizes = block.mlp, mesh_of(jax.devices()[:2]), layer_runs.MODELS["tiny"]
    monkeypatch.setattr(block, "mlp", lambda how, *a: right(how, *a) * (1.0 if how == "plain" else 1.1) + a[0])
    with pytest.raises(AssertionError, match="chosen differs from XLA"):
        block.measure(mesh, (32, 64, 128), False, ("chosen", "xla"), rounds=1, turns=1)
    (product,) = (product for product in backward.products(sizes, 32) if product.name == "dW of o")
    scaled = lambda dy, h: [1.1 * (h.T @ lax.all_gather(dy, "x", tiled=True))]  # noqa: E731
    product = dataclasses.replace(product, ours={"fused": scaled})
    with pytest.raises(AssertionError, match="fused differs from XLA"):
        backward.measure(product, mesh, ("fused", "xla"), rounds=1, turns=1)
