"""`overlap.matmul` with each field of `Config`, on both architectures: every bit of products of integers, emulated.

Each case differs from its neighbours in what it may break: how tiles are cut, who loads, multiplies and stores them.
"""

from __future__ import annotations

import random

import pytest

import overlap
from overlap.choice.problem import Problem
from overlap.kernels.target import Target
from tests.ops.single_gpu.products import BF16, E4M3, E5M2, F16, F32, SCHEDULES, Product

Config = overlap.Config
WIDE = Config(tile_m=128, tile_n=128, stages=2)
NARROW = Config(tile_m=64, tile_n=128, stages=2)  # Each warpgroup has half of the columns.
TURNS = NARROW.replace(schedule="pingpong")
SWAPPED = NARROW.replace(tile_m=72, swap_operands=True)
IN_TURN = SWAPPED.replace(schedule="pingpong")
TWO = NARROW.replace(cluster=2, cluster_along="k")
FOUR = TWO.replace(cluster=4)
SWAPPED_FOUR = FOUR.replace(tile_m=72, swap_operands=True)

RAGGED = (136, 200, 264)  # Three rows and two columns of 64 × 128 tiles, and five k steps; none is whole.
FULL = dict(epilogue=True)
NT, TN, TT = dict(layout="nt"), dict(layout="tn"), dict(layout="tt")
NARROW_OUT = dict(out=BF16)

CASES = {
    # Tiles, stages, the order of tiles.
    "the default": (1, (130, 264, 136), Config(), {}),
    "one element": (2, (1, 8, 8), WIDE.replace(stages=4), {}),
    "columns first": (4, (264, 392, 72), WIDE.replace(order_minor="n", order_width=3), {}),
    # Layouts, dtypes, leading dimensions, the epilogue.
    "epilogue": (2, RAGGED, WIDE.replace(stages=3), FULL | NARROW_OUT),
    "epilogue, [k, m]": (2, RAGGED, WIDE, FULL | TN | dict(dtype=F16, out=F16)),
    "epilogue, [k, m] and [n, k]": (2, RAGGED, WIDE.replace(tile_m=256, tile_n=64), FULL | TT),
    "float8": (2, (130, 136, 400), WIDE, dict(dtype=E4M3, rhs_dtype=E5M2, out=F16) | NT | FULL),
    "batch": (3, (80, 136, 136), NARROW, dict(batch=(3,))),
    "batch of all": (2, (130, 136, 136), WIDE, dict(batch=(2, 2), rhs_batch=(2, 2), addend_batch=(2, 2)) | FULL),
    "batch of lhs and the addend": (2, (72, 136, 136), WIDE, dict(batch=(3,), addend_batch=(3,)) | FULL),
    "batch, one addend for all": (2, (72, 136, 136), WIDE, dict(batch=(2,)) | FULL),
    # Few rows: no more rows are loaded or multiplied than there are.
    "few rows": (2, (16, 264, 200), NARROW, {}),
    "rows for one warpgroup": (3, (33, 264, 200), WIDE.replace(tile_n=64), NT),
    # Tiles cut along k.
    "split k": (5, (72, 136, 264), NARROW.replace(split_k=5), dict(batch=(2,), rhs_batch=(2,)) | FULL | NARROW_OUT),
    "cut, more pieces than k steps": (9, (128, 128, 328), WIDE.replace(stream_k=9), {}),
    "cut, after full waves": (2, (384, 384, 200), WIDE.replace(stream_k=2, stages=3), {}),
    "cut, half of the columns": (6, (64, 512, 320), NARROW.replace(tile_n=256, stream_k=3), NARROW_OUT),
    "cut, epilogue": (5, (136, 264, 328), WIDE.replace(stream_k=3, stages=3), FULL | TT),
    "cut, float8": (9, (130, 136, 656), WIDE.replace(stream_k=4), dict(dtype=E5M2, out=F16) | NT),
    "cut, few rows": (7, (24, 264, 520), WIDE.replace(stream_k=3), {}),
    "not cut": (2, (256, 128, 448), WIDE.replace(stream_k=4), {}),
    # Warpgroups that take turns.
    "turns": (2, RAGGED, TURNS, FULL),
    "turns, 128 x 128": (1, RAGGED, TURNS.replace(tile_m=128), TT | NARROW_OUT),
    "turns, few rows": (2, (16, 520, 200), TURNS.replace(tile_m=128), NARROW_OUT),
    "turns, cut": (5, RAGGED, TURNS.replace(stream_k=3), FULL),
    # Transposed tiles.
    "swapped": (2, RAGGED, SWAPPED, FULL),
    "swapped, 8 rows": (2, (20, 264, 200), SWAPPED.replace(tile_m=8), {}),
    "swapped, 256 rows": (1, (300, 264, 136), SWAPPED.replace(tile_m=256), dict(dtype=F16, out=F16)),
    "swapped, turns": (2, RAGGED, IN_TURN.replace(tile_m=136, stages=3), FULL | NT),
    "swapped, cut": (5, (200, 264, 520), SWAPPED.replace(tile_m=136, stream_k=2), FULL | NT),
    # CTAs of a cluster that compute one tile together.
    "along k, four": (4, RAGGED, FOUR, FULL | NARROW_OUT),
    "along k, some have a tile more": (22, RAGGED, FOUR, NARROW_OUT),
    "along k, few rows": (4, (40, 264, 200), TWO.replace(tile_m=128), {}),
    "along k, 256 x 64": (4, (300, 72, 328), FOUR.replace(tile_m=256, tile_n=64), NARROW_OUT),
    "along k, [k, m] and [n, k]": (4, (136, 264, 328), FOUR, TT | dict(batch=(2,))),
    "along k, swapped, four": (4, RAGGED, SWAPPED_FOUR, NT | FULL),
    "along k, swapped, 8 rows": (4, (20, 264, 264), SWAPPED_FOUR.replace(tile_m=8), {}),
}  # fmt: skip
ONE, PAIR = WIDE.replace(tile_n=64), WIDE.replace(cluster=2)
ON_BLACKWELL = {
    "one CTA": (2, (272, 136, 200), ONE, FULL),
    "one CTA, 256 columns": (3, (136, 264, 328), ONE.replace(tile_n=256, stages=3), NT),
    "pairs": (6, (520, 264, 328), PAIR.replace(order_minor="n", order_width=1), FULL | TN),
    "pairs, few rows": (2, (8, 136, 72), PAIR.replace(stages=3), TT),
    "cut": (7, (136, 264, 328), ONE.replace(stream_k=3), FULL),
    "cut pairs": (8, (272, 264, 328), PAIR.replace(stream_k=3), NARROW_OUT),
    "float8, [k, m] and [n, k]": (2, (144, 272, 272), ONE.replace(tile_n=128), dict(dtype=E4M3) | TT),
    "pairs, float8": (2, (144, 272, 272), PAIR.replace(tile_n=256), dict(dtype=E4M3) | TN),
    "pairs, float8, [n, k]": (4, (144, 272, 272), PAIR.replace(tile_n=256), dict(dtype=E5M2, out=BF16) | NT),
}


def product_of(case, **more):
    cores, shape, config, options = case
    out = {"out": BF16} if config.swap_operands else {}  # Transposed tiles need a result of 16 bits.
    return Product(cores, shape, config, **out | options, **more)


@pytest.mark.parametrize("name", CASES)
def test_every_bit(name):
    product = product_of(CASES[name])
    run = product.check(SCHEDULES[list(CASES).index(name) % len(SCHEDULES)])
    assert product.work.cuts == any(part.startswith("cut") for part in name.split(", "))
    # Only CTAs that share a tile raise flags, and nothing is multiplied twice.
    launches = SCHEDULES[0]["laps"]
    assert (run.counts["signals"], run.counts["wgmmas"]) == (launches * product.signals, launches * product.wgmmas)
    if not product.epilogue and product.dtype in (BF16, F16):
        product.check_rounding()


@pytest.mark.parametrize("name", ON_BLACKWELL)
def test_every_bit_on_blackwell(name):
    product = product_of(ON_BLACKWELL[name], blackwell=True)
    run = product.check(SCHEDULES[list(ON_BLACKWELL).index(name) % len(SCHEDULES)])
    assert (run.counts["signals"] > 0) == ("cut" in name)
    if not product.epilogue and product.dtype == BF16:
        product.check_rounding()


def drawn(seed):
    """Draws a product whose configuration the kernel takes, of any kind."""
    rng, blackwell = random.Random(seed), seed % 4 == 3
    cores, cut = rng.choice((2, 3, 5, 8)), rng.choice((1, 1, 2, 3))
    while True:
        shape = rng.randint(1, 40) * 8, rng.randint(1, 40) * 8, rng.randint(1, 50) * 8
        kind = {"tile_m": 128} if blackwell else rng.choice(({}, {}, TURNS_ALONE, SWAP_ALONE, TURNS_ALONE | SWAP_ALONE))
        fields = {
            "tile_m": 8 * rng.randint(1, 20) if "swap_operands" in kind else rng.choice((64, 128, 256)),
            "tile_n": rng.choice((64, 128, 192, 256)), "stages": rng.choice((2, 3, 4)),
            "cluster": rng.choice((1, 2, 4)), "cluster_along": rng.choice("mk"), "stream_k": cut,
            "order_minor": rng.choice("mn"), "order_width": rng.choice((1, 3, 8)),
        }  # fmt: skip
        config, layout = Config(**fields | kind), rng.choice(("nn", "nt", "tn", "tt"))
        dtype, out = rng.choice((BF16, F16, E4M3)), rng.choice((BF16, F32))
        target = Target("cpu", "cpu as NVIDIA B200" if blackwell else "cpu", cores)
        names = dtype.dtype.name, out.dtype.name
        if Problem("matmul", *shape, *names, layout=layout).accepts(config, target):
            return Product(cores, shape, config, layout, dtype=dtype, out=out, epilogue=rng.random() < 0.3,
                           blackwell=blackwell)  # fmt: skip


TURNS_ALONE, SWAP_ALONE = {"schedule": "pingpong"}, {"swap_operands": True}


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 160))])
def test_drawn_products(seed):
    product = drawn(seed)
    run = product.check({"completion": ("late", "random", "eager")[seed % 3], "scheduler": "pct", "seed": seed})
    if not product.blackwell:
        assert (run.counts["signals"], run.counts["wgmmas"]) == (product.signals, product.wgmmas)
