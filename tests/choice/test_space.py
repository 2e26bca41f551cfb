"""The configurations that are tried and chosen, and the times that the model predicts for them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.choice import model, space
from overlap.choice.problem import Problem, bucket
from overlap.kernels.config import Config
from overlap.kernels.hopper import limits
from overlap.kernels.target import Target
from tests.choice.tuning_cases import H200, SHAPES, problem

H100, B200 = Target("gpu", "NVIDIA H100 80GB HBM3", 132), Target("gpu", "NVIDIA B200", 148)
TWO = Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
DEEP = ["64x384x9152", "8x512x16384", "128x1024x8192"]  # Few tiles and many k steps.


def test_kernels_that_crowd_registers_are_no_candidates():
    """Each clause at its edge (`hopper/limits.py`)."""
    gather, total = (problem(SHAPES[1], devices=8, op=op) for op in ("all_gather_lhs_matmul", "matmul_reduce_scatter"))
    small, swapped = Config(tile_m=64, tile_n=64, stages=2, schedule="pingpong"), Config(tile_m=64, swap_operands=True)
    for of, config, crowded in (
        (gather, small, True),
        (gather, small.replace(tile_n=128), False),
        (gather, swapped.replace(stream_k=2), True),
        (gather, swapped, False),
        (total, Config(tile_m=256), True),
        (total, Config(tile_m=128), False),
        (total, Config(tile_m=128, schedule="pingpong"), True),
        (total, Config(tile_m=64, tile_n=256, schedule="pingpong"), True),
        (total, Config(tile_m=64, tile_n=128, schedule="pingpong"), False),
    ):
        types = of.types(config, of.transport(config))
        assert limits.crowds_registers(types, 200, config, H200) == crowded, (of.op, config)


def test_candidates_are_valid_few_and_different():
    for shape, devices in ((SHAPES[0], 1), (SHAPES[1], 8), (SHAPES[2], 8), (SHAPES[3], 1)):
        of = problem(shape, devices=devices, op="matmul" if devices == 1 else "all_gather_lhs_matmul")
        configs = space.candidates(of, H200)
        assert 20 < len(configs) == len(set(configs)) < 1000
        for config in configs:
            of.check(config, H200)
        assert len({(config.tile_m, config.tile_n) for config in configs}) > 2
        assert devices == 1 or len({config.chunk_bytes for config in configs}) > 1
        assert configs[0] == space.heuristic(of, H200)


def test_deep_products_of_few_tiles_try_clusters_along_k_and_others_do_not():
    for shape, target in ((DEEP[0], H100), (DEEP[0], H200)):
        of = problem(shape)
        found = [config for config in space.candidates(of, target) if config.ctas_per_tile > 1]
        assert {config.cluster for config in found} == {2, 4}
        assert {config.swap_operands for config in found} == {False, True}
        for config in found:
            assert of.accepts(config, target) and not space.spills(config)
            # All tiles are computed at the same time.
            tiles = -(-of.m // config.tile_m) * -(-of.n // config.tile_n)
            assert tiles <= {2: 66, 4: 30}[config.cluster]
    # Large products and batches, fewer than two k steps for each CTA, Blackwell, collectives.
    for of, target in (
        (problem("8192x8192x8192"), H200), (problem(DEEP[0], batch=200), H200), (problem("64x384x192"), H200),
        (problem(DEEP[0]), B200), (problem("64x512x9152", op="all_gather_lhs_matmul", devices=4), H200),
        (problem("64x512x9152", op="matmul_all_reduce", devices=4), H200),
    ):  # fmt: skip
        found = space.candidates(of, target)
        assert found and not [config for config in found if config.ctas_per_tile > 1]


def test_the_heuristic_knows_the_usual_cases():
    def chosen(shape, **fields):
        config = space.heuristic(problem(shape, **fields), H200)
        assert config is not None
        return config

    # Large problem: a large tile, and warpgroups that take turns, or the tile with the most work per byte.
    large = chosen("8192x8192x8192")
    assert large.tile_m * large.tile_n >= 128 * 128 and large.split_k == 1
    # 3.4 waves of the largest tiles: the last wave is cut, or avoided by tiles of half the size or with other rows.
    config = chosen("4096x3584x8192")
    assert config.stream_k > 1 or config.swap_operands or config.in_turn
    assert chosen("4096x4096x4096").stream_k == 1
    # Small k: one warpgroup stores while the other multiplies.
    assert chosen("4096x32768x512").schedule == "pingpong"
    # Three tiles and deep k: the CTAs of a cluster compute a tile together.
    assert chosen("64x384x9152").ctas_per_tile == 4
    # 32 tiles on 132 cores: the contraction is split, but not in a collective.
    config = chosen("1024x1024x14336")
    assert config.split_k > 1 or config.ctas_per_tile > 1
    assert chosen("1024x1024x14336", devices=2).split_k == 1
    # Few rows: the rest of a tile is not loaded. So take the narrowest tile that fills the cores, without cutting.
    config = chosen("64x8192x8192")
    assert (config.tile_m, config.tile_n, config.split_k) == (128, 64, 1)


_sizes = st.builds(
    lambda blocks, odd: max(blocks * 64 + odd, 1), st.integers(0, 130), st.sampled_from([0, 0, 0, 1, 8, -3])
)
_problems = st.builds(
    Problem, st.just("matmul"), _sizes, _sizes, _sizes,
    st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float32"]), st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from([1, 1, 2, 8]), st.sampled_from(["nn", "nt", "tn", "tt"]), st.sampled_from([1, 1, 3]),
)  # fmt: skip
_targets = st.builds(Target, st.just("gpu"), st.just("NVIDIA H200"), st.integers(1, 148), st.integers(40_000, 232_448))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(_problems, _targets)
def test_the_heuristic_serves_what_any_configuration_serves(of, target):
    chosen = space.heuristic(of, target)
    if chosen is not None:
        of.check(chosen, target)
        assert model.predicted_us(chosen, of, target) > 0
        return
    names = ("tile_m", "tile_n", "stages")
    every = {**space.SHAPE, **space.FINE, "stages": space.STAGES}
    for values in itertools.product(*(every[name] for name in names)):
        config = Config(**dict(zip(names, values, strict=True)))
        assert not of.accepts(config, target), config


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_buckets_are_monotone_and_an_eighth_wide(a, b):
    assert a <= bucket(a) == bucket(bucket(a))
    assert bucket(a) <= max(16, a * 9 / 8)
    assert (bucket(a) <= bucket(b)) or a > b


# --- The model --------------------------------------------------------------------------------------------------------


def us(shape, config, target=H200, **fields):
    return model.predicted_us(config, problem(shape, **fields), target)


def test_the_model_counts_waves_and_partial_tiles():
    def waves(m, n, **fields):
        return model.waves(Config(tile_m=128, tile_n=128, **fields), problem(f"{m}x{n}x4096"), H200)

    assert waves(128 * 132, 128) == 1
    assert waves(128 * 132 + 1, 128) == 2
    assert waves(1, 1, split_k=133) == 2
    assert waves(128 * 198, 128) == 2
    assert waves(128 * 198, 128, stream_k=2) == 1.5
    one, two = (us(f"{m}x4096x4096", Config()) for m in (1024, 1152))
    # In the second wave few cores draw little power, and run at higher clocks.
    assert one * 1.5 < two < one * 2
    # Two tiles along m, the second nearly without rows: slower than two full tiles.
    narrow = Config(tile_n=64, stages=8)
    assert us("136x8192x8192", narrow) > 1.2 * us("256x8192x8192", narrow)
    # Half a tile is not padded: only half of it is loaded.
    assert us("64x8192x8192", narrow) < us("128x8192x8192", narrow)
    # A tile for each shard loads the weights from memory for each shard, unless they stay in the L2.
    apart = Config(tile_m=64, tile_n=128, stages=8)
    together = apart.replace(joined=True, stream_k=2)
    gathered = {"op": "all_gather_lhs_matmul", "devices": 2}
    assert us("16x8192x8192", apart, **gathered) > 1.5 * us("16x8192x8192", together, **gathered)
    assert us("16x4096x4096", apart, **gathered) < 1.2 * us("16x4096x4096", together, **gathered)


def test_more_work_takes_longer():
    for config in (Config(tile_n=256), Config(schedule="pingpong", tile_n=128)):
        assert us("4096x4096x4096", config) < us("8192x4096x4096", config) < us("8192x4096x8192", config)
        # For small k, the time of the stores counts; with the pingpong schedule it is hidden.
        short, long = (us("8192x8192x512", config), us("8192x8192x1024", config))
        assert short < long and (long < 1.85 * short) == (config.schedule == "cooperative")
    for ctas in (2, 4):
        times = [us(f"64x384x{k}", TWO.replace(cluster=ctas)) for k in (1024, 2048, 4096, 16384)]
        assert times == sorted(times) and len(set(times)) == 4
    # Deep products take less time with more CTAs per tile, if all tiles are computed at the same time with every number
    # of CTAs. But the exchange of sums costs time.
    swapped = [TWO.replace(tile_m=rows, swap_operands=True) for rows in (16, 8, 72)]
    cases = (DEEP[0], TWO.replace(tile_n=256)), *zip(DEEP, (TWO,) * 3), *zip(DEEP, swapped)
    for (shape, config), target in itertools.product(cases, (H200, H100)):
        times = [us(shape, config.replace(cluster=ctas), target) for ctas in (1, 2, 4)]
        assert times == sorted(times, reverse=True) and times[2] < 0.7 * times[0]
    one, *more = (us("64x384x256", TWO.replace(cluster=ctas)) for ctas in (1, 2, 4))
    assert one < min(more)


def test_clusters_along_k_need_cores_and_k_steps():
    for k, cores, ctas, said in (
        (320, 8, 3, r"`cluster` must be 1, 2 or 4 with cluster_along='k'.*8 cores.*got 3"),
        (320, 3, 4, r"`cluster` must be 1, 2 or 4.*at most the 3 cores.*got 4"),
        (64, 8, 2, r"k=64 has 1 k steps of 64, fewer than the 2 CTAs of a cluster .*: reduce `cluster`, or leave it"),
        (192, 8, 4, r"k=192 has 3 k steps of 64, fewer than the 4 CTAs of a cluster .*: reduce `cluster`, or leave it"),
    ):
        target = Target("gpu", "NVIDIA H200", cores)
        with pytest.raises((ValueError, NotImplementedError), match=said):
            problem(f"64x128x{k}").check(TWO.replace(cluster=ctas), target)
