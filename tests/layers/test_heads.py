"""The head of a language model: its loss without logits against that of its logits, on meshes of both kinds."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from overlap.emulation import emulate
from tests.layers.layer_cases import AUTO, AXES, BETWEEN, EXPLICIT, draw, make_mesh, put, same

pytestmark = pytest.mark.one_jax


def reference(kernel: jax.Array, x: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of the losses, by logits in float32."""
    z = 8 * jnp.tanh(x @ kernel / 8)
    lse = jax.nn.logsumexp(z[..., :201], axis=-1)
    label = jnp.take_along_axis(z, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    loss = weights * (lse - label + 1e-3 * lse**2)
    return jnp.where(labels == -100, 0, loss).sum()


@pytest.mark.parametrize(("kind", "options", "implementation"), [
    (AUTO, {}, "fused"),
    pytest.param(EXPLICIT, {}, "xla", marks=pytest.mark.slow),
    (EXPLICIT, {"sequence_parallel": False, "fsdp_axis": None}, "fused"),
    pytest.param(AUTO, {"sequence_parallel": False, "batch_axis": None}, "xla", marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_head(kind: Any, options: dict[str, Any], implementation: Any) -> None:
    mesh = make_mesh(2, 2, kind)
    given = AXES | options
    chance = np.random.default_rng()
    labels = chance.integers(0, 201, (4, 16)).astype(np.int32)
    labels[0, :3] = -100
    of_rows = P(given["batch_axis"], given["axis"] if given.get("sequence_parallel", True) else None)
    with jax.set_mesh(mesh), emulate(cores=2, detect_races=False):
        head = layers.CrossEntropyHead(32, 201, soft_cap=8.0, z_loss=1e-3, ignored_label=-100, dtype=jnp.bfloat16,
                                       implementation=implementation, rngs=nnx.Rngs(0), **given)  # fmt: skip
        assert head.kernel.shape == (32, 512)
        x = put(draw(int(chance.integers(1 << 30)), dtype=jnp.bfloat16), mesh, P(*of_rows, None))
        y = put(labels, mesh, of_rows)
        weights = put(chance.random((4, 16), np.float32), mesh, of_rows)
        run = nnx.jit(nnx.value_and_grad(lambda head, x: head.loss(x, y, weights).sum(), argnums=(0, 1)))
        loss, (d_head, d_x) = run(head, x)
        assert same(head.loss(x, y), of_rows)
    kernel = np.asarray(jnp.asarray(np.asarray(head.kernel[...])).astype(jnp.bfloat16), np.float32)
    given = kernel, np.asarray(x, np.float32), labels, np.asarray(weights)
    expected, (e_kernel, e_x) = jax.value_and_grad(reference, argnums=(0, 1))(*map(jnp.asarray, given))
    np.testing.assert_allclose(loss, expected, rtol=5e-3)
    for found, wanted in ((d_head.kernel[...], e_kernel), (d_x, e_x)):
        found, wanted = (np.asarray(value, np.float64) for value in (found, wanted))
        assert np.isfinite(found).all() and np.linalg.norm(found - wanted) <= 2e-2 * np.linalg.norm(wanted)


def test_what_a_head_refuses() -> None:
    mesh = make_mesh(1, 2)
    with jax.set_mesh(mesh):
        head = layers.CrossEntropyHead(32, 64, rngs=nnx.Rngs(0))
        x = put(draw(0), mesh, BETWEEN)
        assert head(x).shape == (4, 16, 64)
        with pytest.raises(ValueError, match=r"CrossEntropyHead: labels must have an entry for each row .* \(4, 8\)"):
            head.loss(x, jnp.zeros((4, 8), jnp.int32))
        with pytest.raises(ValueError, match="`labels` must be from 0 to 63, got 64"):
            head.loss(x, jnp.full((4, 16), 64))
        with pytest.raises(ValueError, match="CrossEntropyHead: `soft_cap` must be None or a positive number"):
            layers.CrossEntropyHead(32, 64, soft_cap=-1.0, rngs=nnx.Rngs(0)).loss(x, jnp.zeros((4, 16), jnp.int32))
        with pytest.raises(ValueError, match="vocabulary must be at least 1"):
            layers.CrossEntropyHead(32, 0, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_logits(kind: Any) -> None:
    """They have the cap, and no token that is padding has the largest one. The kernel fits 1, 2 and 4 devices."""
    x = np.random.default_rng().standard_normal((4, 16, 32)).astype(np.float32)
    for devices in (1, 2, 4):
        mesh = make_mesh(1, devices, kind)
        with jax.set_mesh(mesh):
            head = layers.CrossEntropyHead(32, 201, soft_cap=0.5, rngs=nnx.Rngs(0), **AXES)
            kernel = np.asarray(head.kernel[...], np.float64)
            placed = jax.device_put(x, jax.NamedSharding(mesh, P(AXES["batch_axis"], AXES["axis"], None)))
            logits = np.asarray(nnx.jit(lambda head, x: head(x))(head, placed), np.float64)
        assert kernel.shape == (32, 512) and (logits[..., 201:] == -np.inf).all()
        np.testing.assert_allclose(logits[..., :201], 0.5 * np.tanh(x @ kernel[:, :201] / 0.5), atol=1e-5)
        with jax.set_mesh(mesh):
            assert layers.CrossEntropyHead(32, 128, rngs=nnx.Rngs(0), **AXES).kernel.shape == (32, 128)
