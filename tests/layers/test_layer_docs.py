"""Checks docs/layers.md: its example in bare JAX runs, and its memory figures are right (its code: tests/docs)."""

from __future__ import annotations

import functools
import importlib
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from overlap import layers
from tests.layers.layer_cases import AXES, BETWEEN, EXPLICIT, assert_near, draw, make_mesh, put

pytestmark = pytest.mark.one_jax


def test_what_the_backward_pass_keeps() -> None:
    """The input and the weights of a column-parallel layer: each device keeps them as shards, or gathered."""
    devices, mesh, states, backs = 2, make_mesh(2, 2, EXPLICIT), {}, {}
    x_bytes = 4 * 16 * 32 * 2 // 2  # All rows of one index along "data".
    kernel_bytes = 32 * 64 * 2 // devices  # All rows of one index along "tensor".
    column = functools.partial(layers.ColumnParallelLinear, 32, 64, use_bias=False, dtype=jnp.bfloat16, **AXES)
    with jax.set_mesh(mesh):
        x = put(draw(0, dtype=jnp.bfloat16), mesh, BETWEEN)
        for how in itertools.product(("fused", "xla"), (False, True)):
            layer = column(implementation=how[0], keep_gathered=how[1], rngs=nnx.Rngs(0))
            graph, states[how] = nnx.split(layer)
            backs[how] = lambda state, graph=graph: jax.vjp(lambda state, x: nnx.merge(graph, state)(x), state, x)[1]
        found = jax.jit(lambda states: {how: backs[how](state) for how, state in states.items()})(states)
    of_each = {
        how: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(back))
        for how, back in found.items()
    }
    assert of_each["fused", False] == (x_bytes + kernel_bytes) // 2
    assert of_each["xla", False] == (x_bytes + kernel_bytes) // 2
    assert of_each["xla", True] == (x_bytes + kernel_bytes) * 3 // 2  # The shards as well.
    # The kernel keeps the shard too.
    assert of_each["fused", True] - x_bytes - kernel_bytes in (0, x_bytes // 2)


@pytest.mark.slow
def test_the_example(repository: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which sizes do not fit. On one device and on four it computes the same."""
    monkeypatch.syspath_prepend(repository / "examples")
    example = importlib.import_module("block_bare_jax")
    for sizes in ((1, 8), (3, 1), (4, 4)):  # Sharded by heads, by batch, by devices.
        with pytest.raises(ValueError, match=r"must divide BATCH=4, tensor=. must divide KV_HEADS=4, on at most 8 dev"):
            example.main(*sizes)
    (loss, grads), (expected, expected_grads) = example.main(2, 2), example.main(1, 1)
    np.testing.assert_allclose(loss, expected, rtol=1e-2)
    assert len(jax.tree.leaves(grads)) == 9
    assert_near(grads, expected_grads, 3e-2)  # In bf16, summed in another order.
