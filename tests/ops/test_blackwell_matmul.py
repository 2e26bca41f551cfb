"""`overlap.matmul` on the emulated Blackwell mainloop: exact on integers for any size, layout, dtype and epilogue."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.choice.dispatch import logger
from overlap.choice.problem import Problem
from overlap.choice.space import candidates, heuristic
from overlap.emulation import emulate
from overlap.kernels.target import current_target, emulating
from tests.ops.blackwell_cases import B200, ONE, PAIR, product
from tests.ops.explained import answer
from tests.ops.product_cases import integers
from tests.oracle import make_mesh

BF16 = jnp.dtype(jnp.bfloat16)


def drawn(seed):
    """Draws a problem and a configuration for it."""
    rng = random.Random(seed)
    shape = rng.randint(1, 40) * 8, rng.randint(1, 40) * 8, rng.randint(1, 50) * 8
    cluster = rng.choice((1, 2))
    f32 = rng.random() < 0.3
    config = overlap.Config(
        tile_m=128, tile_n=rng.choice((64, 128)) * cluster, stages=rng.choice((2, 3, 4)), cluster=cluster,
        stream_k=rng.choice((1, 1, 2, 3)), order_minor=rng.choice("mn"), order_width=rng.choice((1, 3, 8)),
    )  # fmt: skip
    layout = rng.choice(("nn", "nt", "tn", "tt"))
    return shape, config, layout, jnp.float32 if f32 else jnp.bfloat16, rng.choice((2, 3, 5, 8))


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(i, marks=pytest.mark.slow) for i in range(12, 60))])
def test_random_problems_are_exact(seed):
    shape, config, layout, out_dtype, cores = drawn(seed)
    kernel = product(config, shape, layout, out_dtype=out_dtype)
    completion = ("late", "random", "eager")[seed % 3]
    kernel.run(cores=max(cores, config.cluster), completion=completion, seed=seed)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("config", [ONE, PAIR], ids=["one CTA", "pairs"])
def test_eight_bits_in_every_layout(config, layout):
    config = config.replace(tile_n=128 * config.cluster)
    kernel = product(config, (144, 272, 272), layout, jnp.float8_e4m3fn)
    kernel.run(cores=2, completion="random")


@pytest.mark.parametrize("completion", ["late", "random", "eager"])
@pytest.mark.parametrize("config", [ONE, PAIR, PAIR.replace(stream_k=3)], ids=["one CTA", "pairs", "cut pairs"])
def test_no_race_under_any_schedule_tried(config, completion):
    kernel = product(config, (272, 264, 328))
    for seed in range(4):
        kernel.run(cores=6, completion=completion, scheduler="pct", seed=seed)


@functools.cache
def operands():
    lhs, rhs = integers(0, 2, 136, 72), integers(1, 72, 136)
    exact = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    return lhs.astype(BF16), rhs.astype(BF16), exact


@pytest.mark.parametrize("config", [ONE, PAIR, ONE.replace(split_k=2)], ids=["one CTA", "pairs", "split"])
def test_everything_that_an_epilogue_does(config):
    lhs, rhs, exact = operands()
    rows, columns = 2.0 ** integers(2, 136, 1), 2.0 ** integers(3, 136)
    bias, addend = integers(4, 136), integers(5, 2, 136, 136)
    config = config
    call = jax.jit(
        lambda lhs, rhs, **given: overlap.matmul(
            lhs, rhs, config=config, activation=lambda x: jnp.maximum(x, 0) + 1, preferred_element_type=jnp.float32,
            implementation="fused", **given,
        )
    )  # fmt: skip
    given = {"lhs_scale": rows, "rhs_scale": columns, "bias": bias, "addend": addend.astype(jnp.float32)}
    with emulating("blackwell"), emulate(cores=4):
        result = call(lhs, rhs, **given)
    expected = np.maximum(exact * np.asarray(rows) * np.asarray(columns) + np.asarray(bias) + np.asarray(addend), 0) + 1
    np.testing.assert_array_equal(result, expected)


def test_gradients_and_vmap():
    lhs, rhs, exact = operands()
    loss = lambda a, b: overlap.matmul(a, b, config=ONE, implementation="fused").astype(jnp.float32).sum()  # noqa: E731
    with emulating("blackwell"), emulate(cores=4):
        d_lhs, d_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs[0], rhs)
        each = jax.jit(jax.vmap(lambda a: overlap.matmul(a, rhs, config=ONE, implementation="fused")))(lhs)
    np.testing.assert_array_equal(d_lhs, np.broadcast_to(np.asarray(rhs, np.float32).sum(1), d_lhs.shape))
    np.testing.assert_array_equal(d_rhs, np.broadcast_to(np.asarray(lhs[0], np.float32).sum(0)[:, None], d_rhs.shape))
    np.testing.assert_array_equal(np.asarray(each, np.float32), exact)


# --- What is chosen ---------------------------------------------------------------------------------------------------


def test_xla_is_chosen_where_nothing_was_measured(monkeypatch, caplog):
    from overlap.choice import dispatch

    monkeypatch.setattr(dispatch, "current_target", lambda mesh=None: B200)
    struct = jax.ShapeDtypeStruct((4096, 4096), BF16)
    with caplog.at_level("WARNING", logger=logger.name):
        choice = answer(overlap.matmul, struct, struct)
    assert choice.implementation == "xla"
    assert "not measured on this GPU yet" in choice.reason
    assert 'implementation="fused"' in choice.reason
    assert any("not measured on this GPU yet" in record.message for record in caplog.records)


def test_the_model_finds_configurations_of_blackwell():
    large = heuristic(Problem("matmul", 8192, 8192, 8192, "bfloat16", "bfloat16"), B200)
    assert large is not None and (large.tile_m, large.tile_n, large.cluster) == (128, 256, 2)
    few = heuristic(Problem("matmul", 16, 8192, 8192, "bfloat16", "bfloat16"), B200)
    assert few is not None and few.tile_n < 256
    every = candidates(Problem("matmul", 1024, 4096, 4096, "float8_e4m3fn", "bfloat16", layout="nn"), B200)
    assert every and all(config.tile_m == 128 and config.cluster_along == "m" for config in every)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tile_m": 256}, "`tile_m` must be 128 on NVIDIA B200"),
        ({"tile_n": 96}, "`tile_n` must be a multiple of 64"),
        ({"tile_n": 64, "cluster": 2}, "`tile_n` must be a multiple of 128"),
        ({"tile_n": 320}, "at most 256"),
        ({"stages": 1}, "`stages` must be at least 2"),
        ({"stages": 9, "tile_n": 256}, "reduce `stages`"),
    ],
)
def test_wrong_configurations(fields, words):
    config = overlap.Config(**({"tile_m": 128, "tile_n": 128, "stages": 2} | fields))
    with pytest.raises(ValueError, match=words):
        Problem("matmul", 4096, 4096, 4096, "bfloat16", "bfloat16").check(config, B200)


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


def test_pairs_cannot_pass_tiles_on():
    with pytest.raises(ValueError, match="`cluster` must be 1 by the transport 'ring' on Blackwell"):
        Problem("all_gather_lhs_matmul", 4096, 4096, 4096, "bfloat16", "bfloat16", 2).check(PAIR, B200, "ring")


def test_a_cpu_stands_for_either():
    assert current_target().is_hopper and not current_target().is_blackwell
    with emulating("blackwell"):
        assert current_target().is_blackwell and not current_target().is_hopper
    with pytest.raises(ValueError, match="`architecture` must be hopper or blackwell"), emulating("ampere"):  # type: ignore
        pass
