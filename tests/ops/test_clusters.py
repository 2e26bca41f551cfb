"""Two CTAs that share the loads of one operand (`Config.cluster`), emulated."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import DeadlockError, emulate
from tests import oracle
from tests.ops.product_cases import check, check_exactly, check_gathered, handed_over, integers, normal, work_of

SMALL = dict(tile_n=128, cluster=2)
# Three rows and columns of 128 x 128 tiles: the second tile of the last cluster lies wholly outside.
PHANTOM = (260, 264, 200)
BOTH_WAYS = pytest.mark.parametrize("along", ["m", "n"])

SIZES = [  # cores, shape, config
    (2, (256, 128, 320), overlap.Config(**SMALL)),
    (4, (512, 256, 448), overlap.Config(stages=2, **SMALL)),  # Two waves.
    (4, (256, 128, 64), overlap.Config(**SMALL)),  # Fewer k steps than stages, and an idle cluster.
    (3, (256, 256, 192), overlap.Config(stages=3, **SMALL)),  # An idle CTA.
    (5, PHANTOM, overlap.Config(**SMALL)),
    (2, (1, 8, 8), overlap.Config(**SMALL)),
    (2, (100, 136, 72), overlap.Config(order_minor="n", order_width=1, **SMALL)),
    (7, (450, 264, 136), overlap.Config(order_width=1, **SMALL)),
    (2, (130, 264, 136), overlap.Config(tile_m=64, cluster=2, stages=3)),  # Each warpgroup has half of the columns.
    (2, (300, 72, 200), overlap.Config(tile_m=256, tile_n=64, cluster=2, stages=3)),
    (3, (300, 264, 328), overlap.Config(cluster=2, stages=3)),
]


@pytest.mark.parametrize("stream_k", [1, 3])
@BOTH_WAYS
@pytest.mark.parametrize(("cores", "shape", "config"), SIZES)
def test_results_are_exact(cores, shape, config, along, stream_k):
    config = dataclasses.replace(config, cluster_along=along, stream_k=stream_k)
    run = check_exactly(shape, config, cores=cores)
    # Both CTAs of a cluster carry the same pieces, each with two warpgroups.
    assert run.counts["signals"] == 2 * 2 * handed_over(work_of(shape, config, cores))


@BOTH_WAYS
def test_with_split_k(along):
    check_exactly((260, 264, 512), overlap.Config(split_k=2, cluster_along=along, **SMALL), cores=5)


@BOTH_WAYS
@pytest.mark.parametrize(("left", "right"), list(itertools.product([False, True], repeat=2)))
def test_all_layouts_on_a_batch(left, right, along):
    config = overlap.Config(stream_k=3 if left else 1, cluster_along=along, **SMALL)
    check_exactly((264, 264, 328), config, cores=5, batch=(2,), transpose_lhs=left, transpose_rhs=right)


@pytest.mark.parametrize("stream_k", [1, 3])
@BOTH_WAYS
def test_the_whole_epilogue_beside_a_phantom_tile(along, stream_k):
    scales = jnp.resize(jnp.array([0.25, 0.5, 1.0, 2.0]), (264,))
    config = overlap.Config(cluster_along=along, stream_k=stream_k, **SMALL)
    check_exactly(PHANTOM, config, cores=5, addend=integers(5, 260, 264), bias=integers(6, 264),
                  activation=jax.nn.relu, lhs_scale=scales[:260, None], rhs_scale=scales)  # fmt: skip


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float32])
def test_float8(out):
    config = overlap.Config(stream_k=2, **SMALL)
    check_exactly((260, 136, 400), config, cores=4, dtype=jnp.float8_e4m3fn, transpose_rhs=True,
                  preferred_element_type=out)  # fmt: skip


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_error_within_twice_that_of_rounding(dtype):
    config = overlap.Config(stream_k=3, **SMALL)
    check(normal(7, 260, 456, dtype=dtype), normal(8, 456, 264, dtype=dtype), config=config, cores=5)


@pytest.mark.parametrize(("along", "boxes"), [("m", 2), ("n", 1)])
def test_the_common_operand_is_loaded_once_for_both(along, boxes):
    """Each CTA loads half of a box, and both CTAs receive it: the same number of bytes, in twice as many copies."""
    shape, tiles, k_steps = (512, 256, 320), 8, 5
    alone = check_exactly(shape, overlap.Config(**SMALL | {"cluster": 1}), cores=4).counts
    shared = check_exactly(shape, overlap.Config(cluster_along=along, **SMALL), cores=4).counts
    assert shared["bytes"] == alone["bytes"]
    assert shared["copies"] == alone["copies"] + tiles * k_steps * boxes


@pytest.mark.parametrize(("along", "stream_k"), [("m", 1), ("m", 4), ("n", 4)])
def test_the_same_bits_under_every_schedule(along, stream_k):
    lhs, rhs = normal(9, 260, 520), normal(10, 520, 264)

    def product(cluster, **settings):
        config = overlap.Config(stages=3, stream_k=stream_k, cluster_along=along, **SMALL | {"cluster": cluster})
        with emulate(**settings):
            out = overlap.matmul(lhs, rhs, config=config, implementation="fused", preferred_element_type=jnp.float32)
            return np.asarray(out)

    schedules = list(itertools.product(("late", "eager", "random"), ("pct", "random", "round_robin")))
    results = [
        product(2, cores=8, completion=completion, scheduler=scheduler, seed=seed)
        for seed, (completion, scheduler) in enumerate(schedules)
    ]
    assert all((result == results[0]).all() for result in results)
    if stream_k == 1:  # Each tile's k steps are then added in one order, whichever CTA loads them.
        assert (product(1, cores=8) == results[0]).all()


def test_as_many_clusters_at_a_time_as_a_tile_has_parts_are_enough():
    config = overlap.Config(stream_k=3, **SMALL)
    assert work_of((256, 128, 1024), config, 13).pieces_per_tile == 3
    check_exactly((256, 128, 1024), config, cores=13, settings=dict(resident=6))
    with pytest.raises(DeadlockError, match="CTAs were never launched"):
        check_exactly((256, 128, 1024), config, cores=13, settings=dict(resident=5))


@pytest.mark.parametrize("transport", ["pull", "ring"])
@pytest.mark.parametrize(
    ("devices", "cores", "shape", "along", "stream_k"),
    [
        (2, 2, (128, 128, 128), "m", 1),  # One block of rows per shard: each cluster's second tile has no rows.
        (2, 5, (300, 264, 200), "m", 1),
        (2, 5, (300, 264, 200), "n", 1),
        (3, 4, (257, 136, 72), "m", 1),
        (2, 6, (1, 24, 200), "m", 4),
        (2, 4, (300, 264, 328), "m", 3),
        (3, 7, (128, 136, 320), "m", 4),
        (3, 5, (131, 264, 200), "n", 3),
    ],
)
def test_all_gather_with_an_odd_number_of_tiles(devices, cores, shape, along, stream_k, transport):
    config = overlap.Config(stages=3, cluster_along=along, stream_k=stream_k, **SMALL)
    check_gathered(devices, cores, shape, config, transport)


@pytest.mark.parametrize(("cluster", "cores"), [(3, 6), (4, 4), (2, 1)])
def test_clusters_that_there_cannot_be(cluster, cores):
    config = overlap.Config(**SMALL | {"cluster": cluster})
    lhs, rhs = jnp.zeros((128, 64), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16)
    message = f"`cluster` must be 1 or 2, and at most the {cores} cores, got {cluster}"
    with emulate(cores=cores), pytest.raises(ValueError, match=message):
        overlap.matmul(lhs, rhs, config=config, implementation="fused")
    gather = jax.shard_map(lambda a, b: oracle.fused(a, b, config=config), mesh=oracle.make_mesh(x=2),
                           in_specs=(oracle.X, oracle.W), out_specs=P(None, "x"), check_vma=False)  # fmt: skip
    with emulate(cores=cores), pytest.raises(ValueError, match=message):
        jax.eval_shape(gather, lhs, rhs)
