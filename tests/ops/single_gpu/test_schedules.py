"""What `matmul` relies on between CTAs: orders of sums, CTAs at a time, loads; emulated."""

from __future__ import annotations

import functools
import itertools
import operator

import numpy as np
import pytest

import overlap
from overlap.choice import model
from overlap.choice.problem import Problem
from overlap.emulation import DeadlockError
from overlap.kernels.placement import beside_neighbours
from overlap.kernels.target import Target
from overlap.single_gpu import product as single_gpu
from tests.ops.product_cases import normal
from tests.ops.single_gpu.products import BF16, F32, Product

WIDE = overlap.Config(tile_m=128, tile_n=128, stages=3)
CUT = WIDE.replace(stream_k=4)
TWO = overlap.Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
FOUR = TWO.replace(cluster=4)
SWAPPED_FOUR = FOUR.replace(tile_m=104, swap_operands=True)
TURNS = overlap.Config(tile_m=64, tile_n=128, stages=2, schedule="pingpong")
SCHEDULES = (("late", "pct"), ("eager", "random"), ("random", "round_robin"))


@pytest.mark.parametrize(
    ("cores", "config", "ends"),
    [  # ends: where the pieces of k end, in k steps.
        (9, CUT, None),
        (8, FOUR, [3, 5, 7, 9]),
        (8, SWAPPED_FOUR, None),
    ],
    ids=str,
)
def test_the_same_bits_under_every_schedule(cores, config, ends):
    shape, out = (200, 136, 9 * 64), BF16 if config.swap_operands else F32
    one = Product(cores, shape, config, out=out)
    assert one.work.cuts == (config.stream_k > 1)
    given = one.operands(normal)
    results = [
        one.emulated(given, completion=completion, scheduler=scheduler, seed=seed)[0]
        for seed, (completion, scheduler) in enumerate(SCHEDULES)
    ]
    assert all((result == results[0]).all() for result in results)
    alone = config.replace(cluster=1, stream_k=1)
    if ends is None:
        # In another order the sums differ in their last bits, so these operands can tell orders apart.
        assert (Product(cores, shape, alone, out=out).emulated(given)[0] != results[0]).any()
        return
    # The sums of the pieces, added from the first piece to the last.
    sums = []
    for first, end in itertools.pairwise([0, *ends]):
        steps = slice(64 * first, 64 * end)
        part = Product(cores, (*shape[:2], 64 * (end - first)), alone, out=out)
        sums.append(part.emulated({"lhs": given["lhs"][:, steps], "rhs": given["rhs"][steps]})[0])
    np.testing.assert_array_equal(functools.reduce(operator.add, sums), results[0])


@pytest.mark.parametrize(
    ("cores", "shape", "config", "most", "pieces"),
    [(9, (256, 128, 1024), CUT, 4, 4), (22, (200, 264, 328), FOUR, 4, None)],
    ids=str,
)
def test_as_many_ctas_at_a_time_as_share_a_tile_are_enough(cores, shape, config, most, pieces):
    """CTAs that share a tile wait for each other, and have consecutive numbers. No others wait."""
    one = Product(cores, shape, config)
    assert pieces is None or one.work.pieces_per_tile == pieces
    one.check({"resident": most, "scheduler": "random"})
    if pieces:
        with pytest.raises(DeadlockError, match="CTAs were never launched"):
            one.check({"resident": most - 1})


@pytest.mark.parametrize("tiles", [1, 5])
def test_each_warpgroup_has_every_second_tile(tiles):
    _, run = (one := Product(1, (tiles * 64, 128, 192), TURNS)).emulated(one.operands(), record=True)
    products = [event.thread for event in run.events if event.kind == "wgmma"]
    assert [products.count(thread) for thread in ("wg0", "wg1")] == [3 * ((tiles + 1) // 2), 3 * (tiles // 2)]


def test_products_of_spread_tiles_are_exact_and_the_model_expects_them(monkeypatch):
    """On as many cores as an H200 has, the tiles of the last wave are spread over the GPCs."""
    config, shape, launched = TURNS.replace(schedule="cooperative"), (190, 376, 136), []
    kernel = single_gpu.ProductKernel
    monkeypatch.setattr(single_gpu, "ProductKernel", lambda *args: (launched.append(args[-1]), kernel(*args))[1])
    Product(132, shape, config).check({})
    [work], target = set(launched), Target("cpu", "cpu", 132)
    assert work._spreads and work == model.work_of(config, Problem("matmul", *shape, "bfloat16", "float32"), target)


def test_clusters_of_an_h200():
    """Runs a product on so many cores that clusters are renumbered (`placement.beside_neighbours`). Half are idle."""
    work = (one := Product(132, (3 * 64, 5 * 128, 256), FOUR)).work
    assert work.tiles == 15
    assert any(beside_neighbours(i, FOUR.cluster, work.num_ctas) != i for i in range(work.num_ctas))
    one.check({})
