"""What `matmul` relies on: orders of sums, CTAs at a time, loads, hooks of the mainloop, traces; emulated."""

from __future__ import annotations

import functools
import itertools
import operator

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import overlap
from overlap.choice import model
from overlap.choice.problem import Problem
from overlap.emulation import DeadlockError, emulate
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.hopper import mainloop
from overlap.kernels.limits import rows_loaded
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.placement import beside_neighbours
from overlap.kernels.product_kernel import ProductKernel
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import tma_store, wait_stores_landed
from overlap.single_gpu import product as single_gpu
from tests.ops.product_cases import in_f32, integers, normal, oracle_of
from tests.ops.single_gpu.products import BF16, F32, Product

WIDE = overlap.Config(tile_n=128)
NARROW = overlap.Config(tile_m=64, tile_n=128, stages=3)
TALL = overlap.Config(tile_m=128, tile_n=64, stages=2)
CUT = overlap.Config(tile_m=128, tile_n=128, stages=3, stream_k=4)
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


# --- Loads and hooks of the mainloop ---


@pytest.mark.parametrize("config", [WIDE, WIDE.replace(stream_k=3)], ids=str)
def test_hooks_see_each_operand_tile_and_the_accumulator(config):
    """A matmul that also forwards its left operand from shared memory, and doubles its result."""
    (m, n, k), cores = (384, 256, 192), 4
    order = TileOrder.of(m, n, config)
    work = StreamK(order.tiles, k // 64, cores, config.stream_k)
    assert work.cuts == (config.stream_k > 1)
    lhs, rhs = integers(4, m, k), integers(5, k, n)

    class Body:
        def __init__(self, refs):
            self.refs = refs

        def tile_at(self, index):
            return Tile(0, *order(index))

        def hooks(self):
            (lhs_gmem, rhs_gmem), (out_gmem, _) = self.refs.inputs, self.refs.outputs
            return Hooks(
                load_lhs=lambda tile, load: load(lhs_gmem),
                rhs_at=lambda tile: rhs_gmem,
                out_at=lambda tile: out_gmem,
                in_smem=self.forward,
                epilogue_at=lambda tile: lambda values, rows, columns, addend: values * 2,
            )

        def forward(self, tile, step, lhs_smem, rhs_smem):
            @pl.when(tile.n == 0)
            def _send():
                rows, columns = pl.ds(tile.m * config.tile_m, config.tile_m), pl.ds(step * 64, 64)
                tma_store(lhs_smem, self.refs.outputs[1].at[rows, columns])
                wait_stores_landed()

    types = jax.ShapeDtypeStruct((m, n), lhs.dtype), jax.ShapeDtypeStruct((m, k), lhs.dtype)
    operands = OperandTypes(m, lhs.dtype, rhs.dtype, lhs.dtype, transport="ring")
    kernel = ProductKernel("forwarding", Target("cpu", "cpu", cores), config, operands, work)
    with emulate(cores=cores) as run:
        out, copy = jax.jit(lambda *operands: kernel.launch(operands, types, Body))(lhs, rhs)
        run.check()
    np.testing.assert_array_equal(in_f32(copy), in_f32(lhs))
    np.testing.assert_array_equal(in_f32(out), in_f32((2 * oracle_of(lhs, rhs)).astype(lhs.dtype)))


def test_calls_outside_jit_trace_their_kernel_once(monkeypatch):
    traced, launch = [], ProductKernel.launch
    monkeypatch.setattr(ProductKernel, "launch", lambda self, *a: traced.append(self.name) or launch(self, *a))
    lhs, rhs = normal(8, 136, 72), normal(9, 72, 136)  # No other test uses these sizes, so the kernel is traced here.
    with emulate(cores=2):
        for _ in range(3):
            overlap.matmul(lhs, rhs, implementation="fused")
    assert traced == ["overlap_matmul"]


@pytest.mark.one_jax
def test_whole_rows_of_swizzle_atoms_are_loaded():
    for m, config, transposed, rows in (
        (1, NARROW, False, 8), (57, NARROW, False, 64), (65, NARROW, False, 64), (65, TALL, False, 72),
        (65, NARROW.replace(tile_m=256), True, 128), (32, TALL, True, 64), (32, NARROW, True, 64),
    ):  # fmt: skip
        assert rows_loaded(config, m, "bfloat16", transposed) == rows


@pytest.mark.parametrize(("m", "loaded", "busy"), [(20, "0:24", {"wg0"}), (65, "0:72", {"wg0", "wg1"})])
def test_no_rows_are_loaded_and_none_multiplied_that_are_not_there(m, loaded, busy):
    one = Product(1, (m, 64, 128), TALL)
    events = one.emulated(one.operands(), record=True)[1].events
    loads = {e.target for e in events if e.kind == "copy" and e.target.startswith("buffers.lhs")}
    assert loads and all(loaded in target for target in loads), loads
    assert {e.thread for e in events if e.kind == "wgmma"} == busy


def test_negative_control_with_a_row_too_few_the_result_is_wrong(monkeypatch):
    """The rest of a stage holds NaN, so that any use of these values shows in the result."""
    monkeypatch.setattr(mainloop, "rows_loaded", lambda *args: rows_loaded(*args) - 8)
    with pytest.raises(AssertionError):
        Product(2, (20, 264, 136), NARROW).check()
