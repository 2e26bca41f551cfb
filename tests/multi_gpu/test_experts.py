"""Layers of experts on GPUs, and `grouped_matmul` on one: right to rounding, the same bits each time, no NaN let in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

HIDDEN, WIDTH, EXPERTS, SLOTS, TOKENS = 576, 384, 16, 4, 300


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


def dense(dtype, x, ids, gates, w_gate, w_up, w_down):
    """Every expert of every token, with operands of a dtype."""
    x, w_gate, w_up, w_down = (a.astype(dtype) for a in (x, w_gate, w_up, w_down))
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    with jax.default_matmul_precision("highest"):
        hidden = gated(product("th,ehi->tei", x, w_gate), product("th,ehi->tei", x, w_up))
        outs = product("tei,eih->teh", hidden.astype(dtype), w_down).astype(dtype).astype(jnp.float32)
        chosen = (ids[..., None] == jnp.arange(EXPERTS)).astype(jnp.float32)
        return jnp.einsum("tke,tk,teh->th", chosen, gates, outs).astype(dtype)


@pytest.mark.parametrize("kind", ["drawn", "to few"])
def test_a_layer_and_its_gradients(devices, kind):
    """Against the same in float32; a layer of dense products in bfloat16 says what error is allowed."""
    mesh, tokens, chance = make_mesh(x=devices), devices * TOKENS, np.random.default_rng(7)
    shapes = (tokens, HIDDEN), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    x, *weights = (0.1 * chance.standard_normal(shape, np.float32) for shape in shapes)
    x, *weights = (a.astype(jnp.bfloat16) for a in (x, *weights))
    ids, gates = routes(kind, tokens), chance.random((tokens, SLOTS), np.float32)
    fused = jax.shard_map(
        functools.partial(layer, "fused"), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False
    )

    def results(call):
        def run(x, gates, *weights):
            out, pull = jax.vjp(lambda x, gates, *weights: call(x, ids, gates, *weights), x, gates, *weights)
            return out, pull(out)

        compiled = jax.jit(run, out_shardings=jax.NamedSharding(mesh, P()))
        return [[np.asarray(a, np.float32) for a in jax.tree.leaves(compiled(x, gates, *weights))] for _ in range(3)]

    first, *again = results(fused)
    rivals, exact = (results(functools.partial(dense, dtype))[0] for dtype in (jnp.bfloat16, jnp.float32))
    for ours, *others, rival, right in zip(first, *again, rivals, exact, strict=True):
        for twice in others:
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
