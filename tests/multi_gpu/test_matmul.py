"""`matmul` on one GPU: random sizes, dtypes, forms, epilogues and configs against the f32 oracle; repeatable.

OVERLAP_RANDOM_CASES sets how many random cases there are (each compiles two programs).
"""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import overlap
from overlap.choice.problem import Problem
from overlap.choice.space import candidates
from overlap.kernels.target import current_target
from tests import oracle

CASES = int(os.environ.get("OVERLAP_RANDOM_CASES", "12"))
pytestmark = pytest.mark.gpus(1)


def random_case(seed):
    """Draws sizes from 1 to some thousands, a form, a dtype and an epilogue that the kernel supports."""
    rng = np.random.default_rng(seed)
    dtype = [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2][rng.choice(4, p=[0.4, 0.4, 0.1, 0.1])]
    is_f8 = jnp.dtype(dtype).itemsize == 1
    left, right = (False, True) if is_f8 else (bool(rng.integers(2)), bool(rng.integers(2)))
    m, n, k = (int(2 ** rng.uniform(0, 12.5)) for _ in range(3))
    unit = 16 // jnp.dtype(dtype).itemsize
    round_up = lambda size, unit: -(-size // unit) * unit  # noqa: E731
    n = round_up(n, 8)
    m = round_up(m, unit) if left else m
    k = round_up(k, unit) if right or not left else k
    batch = (int(rng.integers(1, 4)),) if rng.random() < 0.2 else ()
    out = [None, jnp.float32, jnp.bfloat16][rng.integers(3)]
    extras = {name for name in ("bias", "addend", "lhs_scale", "activation") if rng.random() < 0.25}
    return dtype, left, right, m, n, k, batch, out, extras


def random_config(seed, dtype, left, right, m, n, k, batch, out):
    """Returns None (the library chooses) for every third case, else draws any valid configuration."""
    if seed % 3 == 0:
        return None
    layout = "nt"[left] + "nt"[right]
    out = out or (jnp.bfloat16 if jnp.dtype(dtype).itemsize == 1 else dtype)
    names = jnp.dtype(dtype).name, jnp.dtype(out).name
    configs = candidates(Problem("matmul", m, n, k, *names, layout=layout, batch=math.prod(batch)), current_target())
    return configs[np.random.default_rng(seed).integers(len(configs))]


def test_operands_that_are_slices_of_arrays():
    """XLA hands kernels addresses inside these arrays, and Mosaic GPU refuses some (`kernels/launch.py`)."""
    chance = np.random.default_rng(0)
    shapes = (150, 200), (400, 264), (1000,), (400, 1), (300, 264)
    arrays = [jnp.asarray(chance.integers(-3, 4, s), jnp.bfloat16) for s in shapes]
    arrays = [x.astype(jnp.float32) if x.ndim == 1 or x.shape[1] == 1 else x for x in arrays]

    def run(lhs, rhs, bias, scale, addend, implementation):
        given = {"bias": bias[3:267], "lhs_scale": scale[7:135], "addend": addend[5:133]}
        return overlap.matmul(lhs[3:131], rhs[72:272], implementation=implementation, **given)

    fused, by_xla = (jax.jit(run, static_argnums=5)(*arrays, name) for name in ("fused", "xla"))
    assert (fused == by_xla).all()


@pytest.mark.parametrize("seed", range(CASES))
def test_random(seed):
    *case, extras = random_case(seed)
    dtype, left, right, m, n, k, batch, out = case
    config = random_config(seed, *case)
    keys = jax.random.split(jax.random.key(seed), 5)
    lhs = jax.random.normal(keys[0], (*batch, *((k, m) if left else (m, k)))).astype(dtype)
    rhs = jax.random.normal(keys[1], (*batch, *((n, k) if right else (k, n)))).astype(dtype)
    given = {}
    if "bias" in extras:
        given["bias"] = k**0.5 * jax.random.normal(keys[2], (n,))
    if "addend" in extras:
        given["addend"] = (k**0.5 * jax.random.normal(keys[3], (*batch, m, n))).astype(out or jnp.bfloat16)
    if "lhs_scale" in extras:
        given["lhs_scale"] = jnp.exp(jax.random.normal(keys[4], (m, 1)))
    if "activation" in extras:
        given["activation"] = jax.nn.relu

    def call(implementation, config=None):
        return jax.jit(
            lambda a, b: overlap.matmul(
                a, b, transpose_lhs=left, transpose_rhs=right, preferred_element_type=out,
                implementation=implementation, config=config, **given,
            )
        )  # fmt: skip

    a = jnp.swapaxes(lhs, -1, -2) if left else lhs
    b = jnp.swapaxes(rhs, -1, -2) if right else rhs
    exact = jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    exact = exact * given.get("lhs_scale", 1.0) + given.get("bias", 0.0)
    exact = exact + jnp.asarray(given.get("addend", 0.0), jnp.float32)
    exact = jax.nn.relu(exact) if "activation" in extras else exact
    fused = call("fused", config)
    first = fused(lhs, rhs)
    # The addend is converted to the dtype of the result. If the conversion rounds, XLA's form rounds too.
    theirs = oracle.distance(call("xla")(lhs, rhs), exact)
    rounding = oracle.distance(exact.astype(first.dtype), exact)
    # The tensor cores truncate f32 sums, and add f8 products with about 14 bits. XLA may use other instructions.
    floor = 2e-3 if jnp.dtype(dtype).itemsize == 1 else 1e-5
    assert float(oracle.distance(first, exact)) <= 2 * max(float(theirs), float(rounding)) + floor
    again = fused(lhs, rhs)
    assert bool(jax.jit(lambda x, y: jnp.array_equal(x, y, equal_nan=True))(first, again))


SWAPPED = [
    (overlap.Config(swap_operands=True, tile_m=136, tile_n=256, stages=3), jnp.bfloat16),
    (overlap.Config(swap_operands=True, tile_m=160, tile_n=256, stages=3), jnp.float16),
    (overlap.Config(swap_operands=True, tile_m=256, tile_n=128, stages=3), jnp.bfloat16),
    (overlap.Config(swap_operands=True, tile_m=8, tile_n=128, stages=4), jnp.bfloat16),
    (overlap.Config(swap_operands=True, schedule="pingpong", tile_m=80, tile_n=256, stages=4), jnp.bfloat16),
    (overlap.Config(swap_operands=True, schedule="pingpong", tile_m=240, tile_n=64, stages=4), jnp.bfloat16),
    (overlap.Config(swap_operands=True, tile_m=152, tile_n=128, stages=4), jnp.float8_e4m3fn),
    (overlap.Config(swap_operands=True, tile_m=160, tile_n=256, stages=3, stream_k=3), jnp.bfloat16),
    (overlap.Config(swap_operands=True, schedule="pingpong", tile_m=104, tile_n=128, stages=4,
                    stream_k=2), jnp.float16),
]  # fmt: skip


ALONG_K = [
    (overlap.Config(cluster=2, cluster_along="k", tile_m=64, tile_n=128, stages=4), jnp.bfloat16),
    (overlap.Config(cluster=4, cluster_along="k", tile_m=128, tile_n=192, stages=2), jnp.float16),
    (overlap.Config(cluster=4, cluster_along="k", tile_m=64, tile_n=256, stages=3), jnp.float8_e4m3fn),
    (overlap.Config(cluster=2, cluster_along="k", tile_m=72, tile_n=128, stages=6, swap_operands=True), jnp.bfloat16),
    (overlap.Config(cluster=4, cluster_along="k", tile_m=8, tile_n=128, stages=6, swap_operands=True), jnp.float16),
]


@pytest.mark.parametrize(
    ("config", "dtype", "rows"),
    [(*case, (1, 72, 1000)[i % 3]) for i, case in enumerate(SWAPPED + ALONG_K)],
    ids=str,
)
def test_transposed_tiles_and_clusters_along_k(config, dtype, rows):
    """Runs products of integers (all sums are exact) with all epilogue operands and cut tiles of rows.

    With 1000 rows there are more tiles than clusters, which then store sums where other CTAs have read others.
    """
    rng = np.random.default_rng(rows)
    draw = lambda *shape: rng.integers(-2, 3, shape).astype(np.float32)  # noqa: E731
    n, k, transpose_rhs = 1032, 656, jnp.dtype(dtype).itemsize == 1
    lhs, rhs, bias, addend = draw(rows, k), draw(k, n), draw(n), draw(rows, n)
    lhs_scale, rhs_scale = 2.0 ** rng.integers(-1, 2, (rows, 1)), 2.0 ** rng.integers(-1, 2, n)
    exact = np.maximum(lhs_scale * (lhs @ rhs) * rhs_scale + bias + addend, 0).astype(np.float32)
    out = jnp.float16 if dtype == jnp.float16 else jnp.bfloat16
    result = overlap.matmul(
        jnp.asarray(lhs, dtype), jnp.asarray(rhs.T if transpose_rhs else rhs, dtype), transpose_rhs=transpose_rhs,
        lhs_scale=jnp.asarray(lhs_scale, jnp.float32), rhs_scale=jnp.asarray(rhs_scale, jnp.float32),
        bias=jnp.asarray(bias), addend=jnp.asarray(addend, out), activation=jax.nn.relu, preferred_element_type=out,
        config=config, implementation="fused",
    )  # fmt: skip
    np.testing.assert_array_equal(np.asarray(result, np.float32), np.asarray(exact.astype(out), np.float32))


def test_gradients_and_vmap(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 2)
    lhs, rhs = jax.random.normal(keys[0], (3, 264, 520), dtype), jax.random.normal(keys[1], (520, 136), dtype)

    def loss(lhs, rhs, implementation):
        y = jax.vmap(
            lambda x: overlap.matmul(x, rhs, activation=jnp.tanh, lhs_scale=0.02, implementation=implementation)
        )(lhs)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    ours, theirs = (
        jax.jit(jax.grad(lambda a, b, name=name: loss(a, b, name), argnums=(0, 1)))(lhs, rhs)
        for name in ("fused", "xla")
    )
    for a, b in zip(ours, theirs, strict=True):
        assert float(oracle.distance(a, b.astype(jnp.float32))) < 2e-2
