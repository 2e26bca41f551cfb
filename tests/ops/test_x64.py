"""With `jax_enable_x64`, as many programs set it: the fused operations run, with the same bits as without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests.ops.product_cases import normal
from tests.oracle import make_mesh

FUSED = {"implementation": "fused"}
LHS, RHS = normal(0, 136, 144), normal(1, 144, 136)


def matmul(config=None, **keywords):
    config = config and overlap.Config(tile_n=128, **config)
    return lambda a, b: overlap.matmul(a, b, config=config, **FUSED, **keywords)


def gather_lhs(config=None, several=False, **keywords):
    config = config and overlap.Config(tile_n=128, **config)

    def call(a, b):
        scale, rhs = jnp.linspace(0.5, 1, a.shape[0])[:, None], (b, b) if several else b  # The scale is float64.
        return overlap.all_gather_lhs_matmul(a, rhs, "x", lhs_scale=scale, config=config, **FUSED, **keywords)

    return call


def gather_rhs(dimension, config=None):
    config = config and overlap.Config(tile_n=128, **config)
    return lambda a, b: overlap.all_gather_rhs_matmul(a, b, "x", dimension=dimension, config=config, **FUSED)


def loss(a, b):
    activation = lambda y: jnp.tanh(y * 0.7) * jnp.float32(2)  # noqa: E731
    y = overlap.matmul(a, b, activation=activation, bias=np.ones(b.shape[1]), lhs_scale=0.01, **FUSED)
    return y.astype(jnp.float32).sum()


CALLS = {
    "plain": matmul(),
    "stream k": matmul({"stream_k": 3}),
    "split k": matmul({"split_k": 3}),
    "cluster": matmul({"cluster": 2, "cluster_along": "k"}),
    "epilogue": matmul(
        lhs_scale=np.ones((136, 1)), rhs_scale=np.float64(0.5), addend=np.ones((136, 136)), activation=jax.nn.gelu
    ),
    "gradient": jax.grad(loss, (0, 1)),
    "vmap": lambda a, b: jax.vmap(matmul(), (0, None))(jnp.stack([a, -a]), b),
}
GATHERS = {
    "pull": (gather_lhs(), (P("x"), P(None, "x"))),
    "ring": (gather_lhs(transport="ring"), (P("x"), P(None, "x"))),
    "joined": (gather_lhs({"tile_m": 64, "joined": True}), (P("x"), P(None, "x"))),
    "several": (gather_lhs({"stream_k": 2}, several=True, return_gathered=True), (P("x"), P())),
    "along n": (gather_rhs(1), (P("x"), P(None, "x"))),
    "along k": (gather_rhs(0, {"stream_k": 2}), (P("x"), P("x"))),
}


def operation(name):
    if name in CALLS:
        return CALLS[name], (LHS, RHS)
    call, specs = GATHERS[name]
    rhs = jnp.concatenate([RHS, RHS], 1)
    lhs, rhs = (LHS[:, :144], RHS) if name == "along k" else (LHS, rhs)
    on_each = lambda a, b: jax.tree.map(lambda y: y[None], call(a, b))  # noqa: E731
    mapped = jax.shard_map(on_each, mesh=make_mesh(x=2), in_specs=specs, out_specs=P("x"), check_vma=False)
    return mapped, (lhs, rhs)


@pytest.mark.parametrize("name", [*CALLS, *GATHERS])
def test_the_same_bits(name):
    call, operands = operation(name)
    results = []
    for is_on in (False, True):
        with jax.enable_x64(is_on), emulate(cores=4):
            results.append(jax.block_until_ready(jax.jit(call)(*operands)))
    for without, having in zip(*map(jax.tree.leaves, results), strict=True):
        assert without.dtype == having.dtype
        a, b = np.asarray(without, np.float32), np.asarray(having, np.float32)
        # XLA's part of a gradient, and scales, may be computed in 64 bits.
        assert np.linalg.norm(a - b) <= (1e-3 if name == "gradient" else 0) * np.linalg.norm(a)


@pytest.mark.parametrize("name", ["epilogue", "pull", "joined", "along n"])
def test_it_lowers_for_cuda(name, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    call, operands = operation(name)
    with jax.enable_x64(True):
        lowered = jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
