"""Layers of experts on GPUs, and `grouped_matmul` on one: right to rounding, the same bits each time, no NaN let in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

HIDDEN, WIDTH, EXPERTS, SLOTS, TOKENS = 512, 384, 16, 4, 300


def gated(gate, up):
    return jax.nn.silu(gate) * up


def routes(kind, tokens):
    chance = np.random.default_rng(tokens)
    if kind == "to few":
        return np.tile(np.arange(SLOTS, dtype=np.int32), (tokens, 1))
    return np.array([chance.permutation(EXPERTS)[:SLOTS] for _ in range(tokens)], np.int32)


def layer(implementation, x, ids, gates, w_gate, w_up, w_down):
    routing = overlap.route(ids, EXPERTS, "x")
    h = overlap.all_gather_lhs_grouped_matmul(
        x, [w_gate, w_up], routing, "x", activation=gated, implementation=implementation
    )
    return overlap.grouped_matmul_reduce_scatter(h, w_down, gates, routing, "x", implementation=implementation)


def dense(x, ids, gates, w_gate, w_up, w_down):
    """Every expert of every token, in f32."""
    x, w_gate, w_up, w_down = (a.astype(jnp.float32) for a in (x, w_gate, w_up, w_down))
    with jax.default_matmul_precision("highest"):
        hidden = gated(jnp.einsum("th,ehi->tei", x, w_gate), jnp.einsum("th,ehi->tei", x, w_up))
        outs = jnp.einsum("tei,eih->teh", hidden, w_down)
        chosen = (ids[..., None] == jnp.arange(EXPERTS)).astype(jnp.float32)
        return jnp.einsum("tke,tk,teh->th", chosen, gates, outs)


@pytest.mark.parametrize("kind", ["drawn", "to few"])
def test_a_layer_and_its_gradients(devices, kind):
    mesh, tokens = make_mesh(x=devices), devices * TOKENS
    shapes = (tokens, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    x, *weights = (0.1 * jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate(shapes))
    ids, gates = jnp.asarray(routes(kind, tokens)), jax.random.uniform(jax.random.key(9), (tokens, SLOTS))

    def of(implementation):
        mapped = jax.shard_map(
            functools.partial(layer, implementation), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
        )
        return mapped if implementation else dense

    def results(implementation):
        def run(x, gates, *weights):
            f = lambda *moved: of(implementation)(moved[0], ids, moved[1], *moved[2:])  # noqa: E731
            out, pull = jax.vjp(f, x, gates, *weights)
            return out, pull(out)

        return [np.asarray(a, np.float32) for a in jax.tree.leaves(jax.jit(run)(x, gates, *weights))]

    fused, again, by_xla, exact = (results(name) for name in ("fused", "fused", "xla", None))
    for ours, twice, rival, right in zip(fused, again, by_xla, exact, strict=True):
        np.testing.assert_array_equal(ours, twice)
        off, allowed = (np.linalg.norm(a - right) / np.linalg.norm(right) for a in (ours, rival))
        assert off <= 2 * allowed + 1e-3, (off, allowed)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("sizes", [(1000, 0, 513, 1, 64, 700), (0, 0, 3000), (7,) * 100], ids=str)
def test_products_of_groups(sizes):
    """With integers, sums are exact; the library chooses the configurations."""
    chance = np.random.default_rng(0)
    m, k, n = sum(sizes) + 77, 1032, 520
    integers = lambda *shape: jnp.asarray(chance.integers(-2, 3, shape), jnp.bfloat16)  # noqa: E731
    lhs, rhs, g = integers(m, k), integers(len(sizes), k, n), integers(m, n)
    lhs = lhs.at[sum(sizes) :].set(jnp.nan)

    @jax.jit
    def run(lhs, rhs, g, sizes):
        product = functools.partial(overlap.grouped_matmul, group_sizes=sizes, implementation="fused",
                                    preferred_element_type=jnp.float32)  # fmt: skip
        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(g.astype(jnp.float32))

    given = lhs, rhs, g, jnp.asarray(sizes)
    outs = [run(*given) for _ in range(3)]
    wide = [np.asarray(a, np.float32) for a in given[:3]]
    first, dtypes = [np.asarray(a, np.float32) for a in outs[0]], [a.dtype for a in outs[0]]
    for end, size, group in zip(np.cumsum(sizes), sizes, range(len(sizes)), strict=True):
        rows = slice(end - size, end)
        exact = wide[0][rows] @ wide[1][group], wide[2][rows] @ wide[1][group].T, wide[0][rows].T @ wide[2][rows]
        rounded = [right.astype(dtype).astype(np.float32) for right, dtype in zip(exact, dtypes, strict=True)]
        for ours, right in zip((first[0][rows], first[1][rows], first[2][group]), rounded, strict=True):
            np.testing.assert_array_equal(ours, right)
    assert not first[0][sum(sizes) :].any() and not first[1][sum(sizes) :].any()
    assert all(
        (np.asarray(a) == np.asarray(b)).all() for other in outs[1:] for a, b in zip(outs[0], other, strict=True)
    )
