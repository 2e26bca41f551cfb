"""Which configurations with clusters along k are refused, which are tried, and how long they are expected to take."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import space
from overlap.choice.model import predicted_us
from overlap.choice.problem import Problem
from overlap.emulation import emulate
from overlap.kernels.target import Target, emulating
from tests import oracle
from tests.ops.blackwell_cases import B200
from tests.ops.product_cases import integers

TWO = overlap.Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
FOUR = TWO.replace(cluster=4)
H200, H100 = Target("gpu", "NVIDIA H200", 132), Target("gpu", "NVIDIA H100 80GB HBM3", 132)

# --- Refusals ---------------------------------------------------------------------------------------------------------


def product(config: overlap.Config, k: int = 320, **kwargs: object) -> jax.Array:
    lhs, rhs = jnp.zeros((64, k), jnp.bfloat16), jnp.zeros((k, 128), jnp.bfloat16)
    return overlap.matmul(lhs, rhs, config=config, implementation="fused", **kwargs)


LEAVE_OUT = "leave it out of `config`, or leave `cluster_along` out"
WRONG = [  # cores, config, what the message says
    (8, TWO.replace(cluster=3), ["`cluster` must be 1, 2 or 4 with cluster_along='k'", "at most the 8 cores", "got 3"]),
    (16, TWO.replace(cluster=8), ["`cluster` must be 1, 2 or 4 with cluster_along='k'", "got 8"]),
    (3, FOUR, ["`cluster` must be 1, 2 or 4", "at most the 3 cores", "got 4"]),
    (1, TWO, ["`cluster` must be 1, 2 or 4", "at most the 1 cores", "got 2"]),
    (8, TWO.replace(cluster_along="m"), ["`cluster` needs cluster_along='k'", "got cluster=2 and 'm'"]),
    (8, TWO.replace(schedule="pingpong"),
     ["`schedule` must be 'cooperative' with cluster_along='k', got 'pingpong'", LEAVE_OUT]),
    (8, TWO.replace(stream_k=2), ["`stream_k` must be 1 with cluster_along='k', got 2", LEAVE_OUT]),
    (8, FOUR.replace(split_k=3), ["`split_k` must be 1 with cluster_along='k', got 3", LEAVE_OUT]),
    (8, TWO.replace(tile_m=128, tile_n=256, stages=5), ["shared memory", "`tile_n` (256)"]),
]  # fmt: skip


@pytest.mark.parametrize(("cores", "config", "fragments"), WRONG, ids=str)
def test_configurations_that_there_cannot_be(cores, config, fragments):
    with emulate(cores=cores), pytest.raises(ValueError) as caught:
        product(config)
    for fragment in fragments:
        assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("k", "config", "words"),
    [
        (64, TWO, "k=64 has 1 k steps of 64, fewer than the 2 CTAs of a cluster"),
        (192, FOUR, "k=192 has 3 k steps of 64, fewer than the 4 CTAs of a cluster"),
    ],
)
def test_each_needs_a_k_step(k, config, words):
    words = re.escape(words) + ".*" + re.escape("(cluster_along='k'): reduce `cluster`, or leave it out of `config`")
    with emulate(cores=8), pytest.raises(NotImplementedError, match=words):
        product(config, k)


def test_a_dimension_that_there_is_not():
    with pytest.raises(ValueError, match=r"`cluster_along` must be .*got 'x'"):
        overlap.Config(cluster_along="x")


COLLECTIVES = [
    (overlap.all_gather_lhs_matmul, {}, P("x"), P(None, "x"), P(None, "x")),
    (overlap.all_gather_rhs_matmul, {"dimension": 0}, P(), P("x"), P()),
    (overlap.matmul_reduce_scatter, {}, P(None, "x"), P("x"), P("x")),
    (overlap.matmul_all_reduce, {}, P(None, "x"), P("x"), P()),
]


@pytest.mark.parametrize("config", [TWO, FOUR], ids=["2", "4"])
@pytest.mark.parametrize(
    ("operation", "keywords", "of_lhs", "of_rhs", "of_result"),
    COLLECTIVES,
    ids=[row[0].__name__ for row in COLLECTIVES],
)
def test_collectives_refuse_them(operation, keywords, of_lhs, of_rhs, of_result, config):
    def call(lhs, rhs):
        return operation(lhs, rhs, "x", config=config, implementation="fused", **keywords)

    mapped = jax.shard_map(call, mesh=oracle.make_mesh(x=2), in_specs=(of_lhs, of_rhs), out_specs=of_result,
                           check_vma=False)  # fmt: skip
    operands = integers(1, 256, 512), integers(2, 512, 512)
    words = "cluster_along='k' can be used only in `matmul`: leave `cluster` and `cluster_along` out of `config`"
    where_drawn = "`cluster` and `stream_k` must be 1 where results are exchanged"
    with emulate(cores=8), pytest.raises(ValueError, match=f"{re.escape(words)}|{re.escape(where_drawn)}"):
        jax.eval_shape(mapped, *operands)


@pytest.mark.parametrize("config", [TWO.replace(tile_m=128), FOUR.replace(tile_m=128)], ids=["2", "4"])
def test_blackwell_refuses_them(config):
    words = "can be used only on Hopper, and this device is .*NVIDIA B200: leave `cluster` and `cluster_along` out"
    with emulate(cores=8), emulating("blackwell"), pytest.raises(ValueError, match=words):
        product(config)


# --- The search -------------------------------------------------------------------------------------------------------

# Few tiles and many k steps: (m, n, k).
DEEP = [(64, 384, 9152), (8, 512, 16384), (128, 1024, 8192), (200, 520, 4096), (16, 4096, 2048)]


def along_k(problem: Problem, target: Target = H200) -> list[overlap.Config]:
    return [config for config in space.candidates(problem, target) if config.ctas_per_tile > 1]


@pytest.mark.parametrize(("sizes", "target"), [*((sizes, H200) for sizes in DEEP), (DEEP[0], H100)])
def test_deep_products_of_few_tiles_try_them(sizes, target):
    problem = Problem("matmul", *sizes, "bfloat16", "bfloat16")
    found = along_k(problem, target)
    assert {config.cluster for config in found} == {2, 4} and {config.swap_operands for config in found} == {
        False,
        True,
    }
    for config in found:
        assert problem.accepts(config, target) and not space.spills(config)
        # All tiles are computed at the same time.
        tiles = -(-problem.m // config.tile_m) * -(-problem.n // config.tile_n)
        assert tiles <= {2: 66, 4: 30}[config.cluster]


def test_the_fewest_rows_are_tried_first():
    """64 x 384 x 9152 has 3 tiles of 64 x 128: without clusters along k, hardly any core is at work."""
    problem = Problem("matmul", 64, 384, 9152, "bfloat16", "bfloat16")
    assert space.heuristic(problem, H200) in along_k(problem)


@pytest.mark.parametrize(
    ("problem", "target"),
    [
        (Problem("matmul", 8192, 8192, 8192, "bfloat16", "bfloat16"), H200),
        (Problem("matmul", 64, 384, 9152, "bfloat16", "bfloat16", batch=200), H200),
        (Problem("matmul", 64, 384, 192, "bfloat16", "bfloat16"), H200),  # Fewer than two k steps for each CTA.
        (Problem("matmul", 64, 384, 9152, "bfloat16", "bfloat16"), B200),
        *(
            (Problem(name, 64, 512, 9152, "bfloat16", "bfloat16", devices=4), H200)
            for name in (
                "all_gather_lhs_matmul",
                "all_gather_rhs_matmul_n",
                "matmul_reduce_scatter",
                "matmul_all_reduce",
            )
        ),
    ],
    ids=str,
)
def test_where_they_cannot_help_they_are_not_tried(problem, target):
    assert not along_k(problem, target) and space.candidates(problem, target)


# --- The model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [H200, H100], ids=["H200", "H100"])
@pytest.mark.parametrize(
    ("sizes", "configs"),
    [
        (DEEP[0], [TWO, TWO.replace(tile_m=128), TWO.replace(tile_n=256), TWO.replace(tile_m=16, swap_operands=True)]),
        (DEEP[1], [TWO, TWO.replace(tile_m=8, swap_operands=True)]),
        (DEEP[2], [TWO, TWO.replace(tile_m=128), TWO.replace(tile_m=72, swap_operands=True)]),
    ],
)
def test_deep_products_take_less_time_with_more_ctas_per_tile(sizes, configs, target):
    """All tiles are computed at the same time with every number of CTAs."""
    problem = Problem("matmul", *sizes, "bfloat16", "bfloat16")
    for config in configs:
        us = [predicted_us(config.replace(cluster=ctas), problem, target) for ctas in (1, 2, 4)]
        assert us == sorted(us, reverse=True) and us[2] < 0.7 * us[0]


def test_the_exchange_costs_time():
    """With few k steps, the CTAs take longer to add their sums than one CTA takes to multiply."""
    problem = Problem("matmul", 64, 384, 256, "bfloat16", "bfloat16")
    us = [predicted_us(TWO.replace(cluster=ctas), problem, H200) for ctas in (1, 2, 4)]
    assert us[0] < min(us[1:])


def test_more_work_takes_longer():
    depths = (1024, 2048, 4096, 16384)
    for config in (TWO, FOUR):
        us = [predicted_us(config, Problem("matmul", 64, 384, k, "bfloat16", "bfloat16"), H200) for k in depths]
        assert all(a < b for a, b in itertools.pairwise(us))
