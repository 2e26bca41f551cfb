"""Clusters whose CTAs compute one tile together (`Config.cluster_along` "k"), emulated: every bit of the result."""

from __future__ import annotations

import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlap
from overlap.emulation import emulate
from overlap.kernels.placement import beside_neighbours
from tests.ops.product_cases import check, check_exactly, in_f32, integers, normal, oracle_of, work_of

TWO = overlap.Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
FOUR = TWO.replace(cluster=4)
SWAPPED = TWO.replace(tile_m=72, swap_operands=True)
SWAPPED_FOUR = SWAPPED.replace(cluster=4)
BOTH = pytest.mark.parametrize("config", [TWO, FOUR], ids=["2", "4"])
COMPLETIONS, SCHEDULERS = ("late", "eager", "random"), ("pct", "random", "round_robin")
F16, BF16, F32, E4M3 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn

# --- Results ----------------------------------------------------------------------------------------------------------

RAGGED = (200, 264, 328)  # Four rows and three columns of 64 x 128 tiles, and six k steps.
EPILOGUE = dict(
    bias=integers(5, 264), activation=jax.nn.relu, addend=integers(6, 200, 264),
    lhs_scale=jnp.resize(jnp.array([0.5, 1.0, 2.0]), (200, 1)), rhs_scale=jnp.resize(jnp.array([0.5, 2.0]), (264,)),
)  # fmt: skip
NARROW, TRANSPOSED = dict(preferred_element_type=BF16), dict(transpose_rhs=True)
# Results have 32 bits if not said otherwise. Their boxes have 32 columns; those of 16 bits have 64.
CASES = {  # cores, shape, config, further arguments
    "one tile": (2, (64, 128, 320), TWO, {}),
    "one tile, four": (4, (64, 128, 448), FOUR, {}),
    "one tile, more CTAs than boxes": (4, (64, 128, 448), FOUR, NARROW),
    "a k step each": (2, (64, 128, 128), TWO, {}),
    "a k step each, four": (4, (64, 128, 200), FOUR, {}),
    "fewer k steps than stages": (4, (64, 256, 328), TWO.replace(stages=4), {}),
    "idle clusters": (8, (64, 128, 320), TWO, {}),
    "idle clusters, four": (16, (64, 128, 328), FOUR, {}),
    "an idle core": (5, RAGGED, TWO, {}),
    "twelve tiles in turn": (2, RAGGED, TWO, {}),
    "twelve tiles in turn, four": (4, RAGGED, FOUR, {}),
    "two clusters": (5, RAGGED, TWO.replace(stages=3), NARROW),
    "some have a tile more": (10, RAGGED, TWO, NARROW),
    "some have a tile more, four": (22, RAGGED, FOUR, NARROW),
    "few rows": (4, (40, 264, 200), TWO.replace(tile_m=128), {}),
    "few rows, four": (4, (40, 264, 264), FOUR.replace(tile_m=128), NARROW),
    "one row": (2, (1, 136, 200), TWO, {}),
    "64 x 256": (2, RAGGED, TWO.replace(tile_n=256), NARROW),
    "64 x 256, four": (4, RAGGED, FOUR.replace(tile_n=256), {}),
    "128 x 128": (4, RAGGED, TWO.replace(tile_m=128, stages=3), {}),
    "128 x 128, four": (8, RAGGED, FOUR.replace(tile_m=128), NARROW),
    "128 x 192": (4, RAGGED, TWO.replace(tile_m=128, tile_n=192), {}),
    "128 x 192, six boxes for four": (4, RAGGED, FOUR.replace(tile_m=128, tile_n=192), NARROW),
    "256 x 64": (4, (300, 72, 328), FOUR.replace(tile_m=256, tile_n=64), NARROW),
    "two boxes at a time": (4, RAGGED, TWO.replace(tile_n=256), {}),
    "columns first": (4, RAGGED, TWO.replace(order_minor="n", order_width=1), {}),
    "all of the epilogue": (4, RAGGED, TWO, EPILOGUE),
    "all of the epilogue, four": (4, RAGGED, FOUR, EPILOGUE | NARROW),
    "float16": (4, RAGGED, TWO, {"dtype": F16, "preferred_element_type": F16}),
    "float8": (4, (*RAGGED[:2], 400), TWO, {"dtype": E4M3, **TRANSPOSED}),
    "float8, four": (4, (*RAGGED[:2], 656), FOUR, {"dtype": E4M3, **TRANSPOSED, **NARROW}),
    "swapped": (4, RAGGED, SWAPPED, NARROW),
    "swapped, four, [n, k]": (4, RAGGED, SWAPPED_FOUR, NARROW | TRANSPOSED),
    "swapped, one tile": (4, (64, 128, 520), SWAPPED_FOUR, NARROW),
    "swapped, 8 rows": (4, (20, 264, 264), SWAPPED_FOUR.replace(tile_m=8), NARROW),
    "swapped, fewer rows than the tile": (4, (16, 264, 264), SWAPPED_FOUR, NARROW),
    "swapped, 104 x 256": (2, RAGGED, SWAPPED.replace(tile_m=104, tile_n=256), NARROW),
    "swapped, 136 rows": (4, RAGGED, SWAPPED_FOUR.replace(tile_m=136), NARROW | TRANSPOSED),
    "swapped, all of the epilogue": (4, RAGGED, SWAPPED, EPILOGUE | NARROW),
    "swapped, all of the epilogue, four": (4, RAGGED, SWAPPED_FOUR.replace(tile_m=104), EPILOGUE | NARROW),
    "swapped, float16": (2, RAGGED, SWAPPED, {"dtype": F16, "preferred_element_type": F16}),
    "swapped, float8": (4, (*RAGGED[:2], 400), SWAPPED, {"dtype": E4M3, **TRANSPOSED, **NARROW}),
}  # fmt: skip


# Each of these has a case beside it that differs in one thing only.
SLOW = (
    "idle clusters, four", "twelve tiles in turn, four", "some have a tile more", "128 x 128", "two clusters",
    "64 x 256, four", "swapped, 136 rows", "swapped, all of the epilogue", "float8", "few rows, four",
    "fewer k steps than stages", "columns first", "two boxes at a time", "swapped, float16", "one tile, four",
)  # fmt: skip
assert set(SLOW) <= CASES.keys()


@pytest.mark.parametrize(
    ("seed", "case"),
    [
        pytest.param(seed, case, id=case, marks=pytest.mark.slow if case in SLOW else [])
        for seed, case in enumerate(CASES)
    ],
)
def test_every_bit(seed, case):
    """Each case runs with one of nine combinations of completion and scheduler."""
    cores, shape, config, kwargs = CASES[case]
    how = {"completion": COMPLETIONS[seed % 3], "scheduler": SCHEDULERS[seed // 3 % 3], "seed": seed}
    run = check_exactly(shape, config, cores=cores, settings=how, **kwargs)
    # No flag passes through global memory.
    assert run.counts["signals"] == 0


def test_the_cases_have_clusters_with_several_tiles_and_idle_ones():
    """Clusters with several tiles store sums where other CTAs have read those of the tile before."""
    tiles = {}
    for name, (cores, shape, config, _) in CASES.items():
        work = work_of(shape, config, cores)
        tiles[name] = [work.pieces(cluster) for cluster in range(work.num_ctas)]
    assert tiles["idle clusters"] == [1, 0, 0, 0] and tiles["idle clusters, four"] == [1, 0, 0]
    assert tiles["twelve tiles in turn"] == tiles["twelve tiles in turn, four"] == [12]
    assert tiles["two clusters"] == [6, 6]
    assert tiles["some have a tile more"] == [3, 3, 2, 2, 2]
    assert tiles["some have a tile more, four"] == [3, 3, 3, 3]


@pytest.mark.parametrize(("left", "right"), list(itertools.product([False, True], repeat=2)))
def test_all_layouts_on_a_batch(left, right):
    check_exactly((136, 264, 328), FOUR if right else TWO, cores=4, batch=(2,), transpose_lhs=left, transpose_rhs=right)


@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_random_products(data):
    draw = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    m, n = data.draw(st.integers(1, 170)), 8 * data.draw(st.integers(1, 34))
    config = draw(
        TWO, TWO.replace(tile_m=128), TWO.replace(tile_n=256), TWO.replace(tile_m=128, tile_n=192),
        TWO.replace(tile_m=256, tile_n=64), SWAPPED.replace(tile_m=8 * data.draw(st.integers(1, 17))),
    )  # fmt: skip
    config = config.replace(cluster=draw(2, 4))
    k = 8 * data.draw(st.integers(8 * (config.cluster - 1) + 1, 60))
    how = {"completion": draw(*COMPLETIONS), "scheduler": draw(*SCHEDULERS), "seed": data.draw(st.integers(0, 9))}
    out = BF16 if config.swap_operands else draw(BF16, F32)
    check_exactly(
        (m, n, k), config, cores=draw(4, 12), settings=how, transpose_rhs=draw(False, True), bias=integers(5, n),
        preferred_element_type=out,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "dtype"), [(TWO, BF16), (FOUR, F16), (SWAPPED_FOUR, BF16)], ids=["2", "4", "swapped"]
)
def test_error_within_twice_that_of_rounding(config, dtype):
    check(normal(7, 200, 456, dtype=dtype), normal(8, 456, 264, dtype=dtype), config=config, cores=4)


@BOTH
def test_nothing_is_loaded_or_multiplied_twice(config):
    alone = check_exactly((256, 256, 584), config.replace(cluster=1), cores=4).counts
    together = check_exactly((256, 256, 584), config, cores=4).counts
    assert together == alone


@pytest.mark.parametrize(
    ("cores", "shape", "config", "tiles"),
    [
        (132, (12 * 64, 6 * 128, 128), TWO, 72),  # 66 clusters, of which six have two tiles.
        (132, (8 * 64, 4 * 128, 256), FOUR, 32),  # 30 clusters, of which two have two tiles.
        (132, (3 * 64, 5 * 128, 256), FOUR, 15),  # Half of the clusters are idle.
    ],
)
def test_on_an_h200(cores, shape, config, tiles):
    """Runs products on so many cores that clusters are renumbered (`placement.beside_neighbours`)."""
    work = work_of(shape, config, cores)
    assert work.tiles == tiles
    assert any(beside_neighbours(i, config.cluster, work.num_ctas) != i for i in range(work.num_ctas))
    check_exactly(shape, config, cores=cores)


# --- Orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TWO, FOUR, SWAPPED_FOUR.replace(tile_m=104)], ids=["2", "4", "swapped"])
def test_the_same_bits_under_every_schedule(config):
    """Results have the bits of the pieces' sums, added from the first piece to the last."""
    lhs, rhs, out = normal(9, 136, 584), normal(10, 584, 136), BF16 if config.swap_operands else F32

    def product(lhs, rhs, config, **settings):
        with emulate(cores=8, **settings):
            return np.asarray(
                overlap.matmul(lhs, rhs, config=config, implementation="fused", preferred_element_type=out)
            )

    results = [
        product(lhs, rhs, config, completion=completion, scheduler=scheduler, seed=seed)
        for seed, (completion, scheduler) in enumerate(itertools.product(COMPLETIONS, SCHEDULERS))
    ]
    assert all((result == results[0]).all() for result in results)
    alone = config.replace(cluster=1)
    # In another order the sums differ in their last bits, so these operands can tell orders apart.
    assert (product(lhs, rhs, alone) != results[0]).any()
    if out == F32:
        # Ten k steps: 5 and 5, or 3, 3, 2 and 2.
        ends = [5, 10] if config.cluster == 2 else [3, 6, 8, 10]
        pieces = [slice(64 * first, 64 * end) for first, end in itertools.pairwise([0, *ends])]
        sums = [product(lhs[:, piece], rhs[piece], alone) for piece in pieces]
        np.testing.assert_array_equal(functools.reduce(operator.add, sums), results[0])


@pytest.mark.parametrize("config", [TWO, FOUR, SWAPPED], ids=["2", "4", "swapped"])
def test_launches_in_a_row(config):
    """Barriers start anew with each launch; the first cluster has a tile more than the last."""
    xs, w = integers(15, 3, 3 * 64, 328), integers(16, 328, 136)
    out = BF16 if config.swap_operands else F32

    def step(w, x):
        return -w, overlap.matmul(x, w, config=config, implementation="fused", preferred_element_type=out)

    with emulate(cores=8) as run:
        _, ys = jax.jit(lambda w, xs: jax.lax.scan(step, w, xs))(w, xs)
        run.check()
    assert run.counts["launches"] == 3
    expected = np.array([1, -1, 1])[:, None, None] * oracle_of(xs, w)
    np.testing.assert_array_equal(in_f32(ys), in_f32(expected.astype(out)))


@BOTH
def test_laps(config):
    """Runs each launch several times on the same memory; all laps but the last have operands of NaN."""
    for seed, completion in enumerate(COMPLETIONS):
        settings = {"laps": 2, "completion": completion, "seed": seed}
        check_exactly((136, 136, 328), config, cores=8, settings=settings)


@BOTH
def test_one_cluster_at_a_time_is_enough(config):
    """Clusters do not wait for each other."""
    check_exactly(RAGGED, config, cores=22, settings={"resident": config.cluster})


# --- Transformations --------------------------------------------------------------------------------------------------


def test_gradients_of_a_mapped_batch():
    """The configuration applies to the forward product; the derivatives choose their own."""
    lhs, rhs = integers(1, 3, 40, 264), integers(2, 264, 136)

    def loss(implementation, config):
        def of(lhs, rhs):
            call = functools.partial(
                overlap.matmul, config=config, implementation=implementation, preferred_element_type=F32
            )
            return jnp.sum(jax.vmap(lambda x: call(x, rhs))(lhs))

        return jax.value_and_grad(of, argnums=(0, 1))

    with emulate(cores=4) as run:
        value, ours = jax.jit(loss("fused", FOUR))(lhs, rhs)
        jax.block_until_ready(ours)
        run.check()
    expected, theirs = loss("xla", None)(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(value), np.asarray(expected))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(in_f32(a), in_f32(b))


@BOTH
def test_a_mapped_batch(config):
    lhs, rhs = integers(1, 3, 40, 264), integers(2, 264, 136)
    call = lambda x: overlap.matmul(x, rhs, config=config, implementation="fused", preferred_element_type=BF16)  # noqa: E731
    with emulate(cores=4) as run:
        ys = jax.jit(jax.vmap(call))(lhs)
        run.check()
    np.testing.assert_array_equal(in_f32(ys), in_f32(oracle_of(lhs, rhs).astype(BF16)))
