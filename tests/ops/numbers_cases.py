"""Calls whose numbers tests/ops/test_numbers.py compares bit by bit: forms, ragged sizes, configurations, epilogues."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from overlap import Config
from overlap.collectives.gather.rhs_schedule import K_STEPS_PER_FLAG
from tests.ops.contract import BF16, E4M3, E5M2, EVERY, F16, F32, JOINED, RING, SCALES, SMALL, Call

WIDE = Config(tile_n=128, stages=2)
CUT = Config(tile_n=64, stages=2, stream_k=3)
BANDS = Config(tile_m=64, tile_n=128, stages=2, order_minor="n", order_width=2)
CUT_IN_TWO = Config(tile_n=64, stages=2, stream_k=2)
FINE = Config(tile_n=128, chunk_bytes=512, chunk_buffers=3)
GATHERED = (("return_gathered", True),)
slow = pytest.mark.slow


def gather(*sizes: int, **fields: Any) -> Call:
    return Call("all_gather_lhs_matmul", *sizes, **fields)


GATHERS = [  # devices, cores, call; by either transport
    (2, 1, gather(128, 128, 64, config=WIDE)),  # One CTA does all the work.
    (2, 7, gather(128, 128, 64, config=WIDE)),  # More CTAs than tiles or chunks.
    (2, 3, gather(256, 264, 192, config=Config(tile_n=128, stages=3, order_minor="n", order_width=2), dtype=F16)),
    (2, 2, gather(128, 256, 256, config=Config(chunk_bytes=256, chunk_buffers=3), out=F16)),  # Parts of rows.
    (2, 2, gather(128, 256, 128, config=Config(chunk_bytes=4096, chunk_buffers=1))),
    (2, 3, gather(131, 8, 1032, config=Config(tile_n=64, chunk_bytes=1024))),
    (3, 3, gather(133, 136, 64, config=Config(tile_n=128, chunk_bytes=2048))),  # Chunks of 16 rows; the last of five.
    (3, 3, gather(70, 136, 8 * 37, config=Config(tile_n=128, chunk_bytes=256))),  # Rows in three parts, one shorter.
    (3, 5, gather(200, 0, 72, widths=(136, 8, 72), config=CUT)),  # One right operand is narrower than a tile.
    (3, 5, gather(136, 0, 128, widths=(64, 136), container=tuple, config=BANDS)),
    (2, 9, gather(264, 0, 200, widths=(64, 200), config=CUT_IN_TWO)),
    (1, 3, gather(130, 0, 72, widths=(72, 136), container=tuple, config=CUT)),
    (3, 8, gather(200, 0, 136, widths=(72, 8), keywords=GATHERED, config=CUT)),
    (3, 5, gather(131, 64, 1032, keywords=GATHERED, config=FINE)),
    (2, 9, gather(1, 8, 8, keywords=GATHERED, config=WIDE)),
    (3, 9, gather(72, 0, 72, lead=(2, 2), widths=(136, 8), config=CUT)),
    (3, 5, gather(136, 64, 136, lead=(3,), keywords=GATHERED, config=BANDS)),
    (2, 11, gather(264, 0, 136, lead=(2,), widths=(72,), keywords=GATHERED, config=CUT_IN_TWO)),
    (2, 3, gather(3, 8, 1032, lead=(5,), config=FINE)),
    (1, 3, gather(40, 72, 64, lead=(3,), extras=("lhs_scale",), keywords=GATHERED)),
    (3, 5, gather(136, 0, 72, widths=(72, 200), extras=SCALES, keywords=GATHERED, config=CUT)),
    (3, 5, gather(136, 0, 72, lead=(2,), widths=(64, 136), extras=SCALES, config=BANDS)),
    (2, 15, gather(136, 0, 72, lead=(2,), widths=(8, 136), extras=("rhs_scale",), container=tuple, config=CUT_IN_TWO)),
    (2, 3, gather(72, 64, 72, keywords=(("lhs_scale", 0.5), ("rhs_scale", 4.0)), config=FINE)),
    (2, 3, gather(1, 72, 64, extras=SCALES, config=WIDE)),  # Scales of shape (1, 1).
    (2, 3, gather(136, 0, 72, layout="nt", widths=(72, 8), extras=("bias",), activation=jax.nn.relu, config=WIDE)),
    (3, 5, gather(136, 136, 136, layout="nt", config=BANDS)),
    (2, 3, gather(136, 0, 272, layout="nt", widths=(72, 8), dtype=E4M3, keywords=GATHERED, config=SMALL)),
    (3, 7, gather(72, 0, 144, layout="nt", lead=(2,), widths=(136, 72), dtype=E4M3, rhs_dtype=E5M2, out=F16,
                  extras=SCALES, config=Config(tile_n=64, stages=2, stream_k=2))),
    (2, 4, gather(136, 136, 272, layout="nt", dtype=E5M2, extras=("lhs_scale",), keywords=(("rhs_scale", 0.5),),
                  config=Config(tile_n=64, stages=2))),
]  # fmt: skip

FEW_CUT = JOINED.replace(stages=3, stream_k=3)
FEW_MANY = JOINED.replace(tile_m=128, tile_n=64, order_minor="n", order_width=2)
FEW_FINE = JOINED.replace(chunk_bytes=512, chunk_buffers=3)
FEW: list[Any] = [  # devices, cores, call
    (4, 3, gather(16, 200, 264, config=FEW_CUT)),
    (8, 3, gather(16, 136, 520, config=FEW_CUT)),  # Two rows of tiles.
    (3, 4, gather(50, 72, 136, config=FEW_MANY)),  # A tile contains rows of all three shards.
    (8, 2, gather(3, 72, 1032, config=FEW_FINE)),  # Chunks are parts of rows.
    (2, 7, gather(1, 8, 8, config=JOINED)),  # More CTAs than chunks or tiles.
    (3, 4, gather(100, 136, 72, config=JOINED)),  # Three or five rows of tiles.
    (2, 9, gather(40, 264, 200, config=FEW_CUT)),
    (2, 1, gather(70, 136, 136, config=JOINED, dtype=F16)),  # One CTA does all the work.
    (1, 2, gather(16, 128, 128, config=FEW_CUT)),  # Nothing to gather: a plain product.
    (3, 5, gather(16, 0, 200, widths=(136, 8, 72), config=FEW_CUT)),
    (2, 6, gather(40, 0, 136, widths=(72, 136), container=tuple, keywords=GATHERED, config=FEW_CUT)),
    (4, 3, gather(5, 64, 136, keywords=GATHERED, config=FEW_FINE)),
    (3, 4, gather(24, 0, 136, layout="nt", widths=(72, 64), extras=SCALES, config=JOINED)),
    (3, 4, gather(40, 0, 136, widths=(72, 200), extras=SCALES, keywords=GATHERED, config=JOINED)),
    (4, 3, gather(16, 0, 272, layout="nt", widths=(136, 72), dtype=E4M3, extras=SCALES, keywords=GATHERED,
                  config=FEW_CUT)),
    (2, 3, gather(24, 128, 144, layout="nt", dtype=E5M2, rhs_dtype=E4M3, config=FEW_CUT)),
    (2, 3, gather(1, 72, 72, lead=(4,), config=JOINED)),  # A batch of single rows.
    (3, 4, gather(5, 0, 136, lead=(2, 3), widths=(136, 8), extras=SCALES, keywords=GATHERED, config=FEW_CUT)),
    (2, 3, gather(8, 64, 64, lead=(1, 1), keywords=GATHERED, extras=("bias",), activation=jnp.abs, config=JOINED)),
]  # fmt: skip

WEIGHTS_CONFIGS = [  # cores, config
    (1, WIDE),
    (3, WIDE),
    (7, Config(tile_n=256, stages=3, order_minor="n")),  # More CTAs than chunks.
    (2, Config(tile_n=192, stages=2, chunk_bytes=256, chunk_buffers=3)),  # Chunks are parts of rows.
    (2, Config(tile_n=64, chunk_buffers=1, chunk_bytes=4096)),
    (5, WIDE.replace(stream_k=4)),
]
WEIGHTS_SIZES = [  # m of a device, and the shape of its shard of the weights
    (200, (136, 264)),
    (128, (72 + 64 * K_STEPS_PER_FLAG, 128)),  # Several flags.
    (1, (8, 8)),
    (128, (40, 8 * 37)),  # Chunks of unequal sizes, by rows or by columns.
    (128, (128, 128)),
]
WEIGHTS = [  # Every configuration with every size and dimension; some of them in `make test`.
    pytest.param(
        2 + (i + j) % 2,
        cores,
        Call(f"all_gather_rhs_matmul_{along}", m, n, k, config=config, dtype=(BF16, F16)[i % 2]),
        marks=[] if j == (2 * i + 3 * a) % 5 and (i + a) % 3 else slow,
        id=f"{along} {i} {j}",
    )
    for i, (cores, config) in enumerate(WEIGHTS_CONFIGS)
    for j, (m, (k, n)) in enumerate(WEIGHTS_SIZES)
    for a, along in enumerate("nk")
] + [
    (2, 3, Call("all_gather_rhs_matmul_k", 24, 64, 64, lead=(3, 2), config=WIDE)),
    (3, 3, Call("all_gather_rhs_matmul_k", 200, 264, 136, layout="tn",
                config=Config(tile_n=192, stages=2, chunk_bytes=256, chunk_buffers=3))),
    (2, 3, Call("all_gather_rhs_matmul_k", 8, 8, 12, layout="tn")),  # Less than 16 bytes of each row in a shard.
    (2, 3, Call("all_gather_rhs_matmul_k", 136, 136, 72, layout="tn", config=WIDE.replace(stream_k=3))),
    (3, 3, Call("all_gather_rhs_matmul_n", 200, 72, 136, layout="tn", config=WIDE)),
    (2, 3, Call("all_gather_rhs_matmul_n", 72, 136, 40, layout="tn", config=SMALL.replace(stages=3))),
]  # fmt: skip

BLOCKS = {  # A result of which each of D devices sums rows × columns.
    "m": lambda D, rows, columns: ("matmul_reduce_scatter", rows, columns),
    "n": lambda D, rows, columns: ("matmul_reduce_scatter_n", rows, columns),
    "all m": lambda D, rows, columns: ("matmul_all_reduce", D * rows, columns),
    # One more row, so that the devices cannot cut the rows; the columns are 8 times a prime number.
    "all n": lambda D, rows, columns: ("matmul_all_reduce", rows + (rows % D == 0), D * columns),
    "once": lambda D, rows, columns: ("matmul_all_reduce", rows, columns),
}


def summed(form: str, devices: int, rows: int, columns: int, k: int, **fields: Any) -> Call:
    fields["config"] = fields.get("config", SMALL).replace(one_shot=form == "once")
    if form == "all n" and fields.get("layout", "nn")[0] == "t":  # (Rows that are no multiple of 8 devices' 16 bytes.)
        return Call("matmul_all_reduce", rows, devices * columns, k, **fields)
    return Call(*BLOCKS[form](devices, rows, columns), k, **fields)


SCHEDULES: list[tuple[Config, dict[str, Any]]] = [  # A configuration, and settings of the emulation.
    (SMALL, {"cores": 1}),
    (SMALL, {"cores": 7, "completions": ("random",)}),
    (SMALL, {"cores": 4, "resident": 1, "seed": 3}),
    (SMALL, {"laps": 2, "completions": ("eager",)}),
    (Config(tile_m=128, tile_n=256, stages=3), {"cores": 3}),
    (Config(tile_m=256, tile_n=128, stages=2, order_minor="n"), {}),
    (Config(tile_m=64, tile_n=256, stages=3), {"cores": 2}),
    (Config(tile_m=64, tile_n=128, stages=3, chunk_bytes=1024, chunk_buffers=3), {"cores": 3}),
    (Config(tile_m=64, tile_n=128, stages=2, chunk_bytes=65536, chunk_buffers=1), {}),
]
RAGGED = [  # The fast tier has each configuration with one form, and each form with several configurations.
    pytest.param(
        2 + i % 2,
        summed(form, 2 + i % 2, 136, 264 if form == "m" else 136, 72, config=config, out=(F32, BF16)[i // 2 % 2]),
        settings,
        marks=[] if (i + j) % 5 == 0 or (i == 3 and j == 0) else slow,
        id=f"{form} {i}",
    )
    for i, (config, settings) in enumerate(SCHEDULES)
    for j, form in enumerate(BLOCKS)
]
LAYOUTS = [
    pytest.param(2, summed(form, 2, 72, 68 if form == "all m" else 72, 72, layout=layout, out=F32), {},
                 marks=[] if (i + j) % 3 == 1 else slow, id=f"{form} {layout}")
    for (i, form), (j, layout) in itertools.product(enumerate(BLOCKS), enumerate(("nt", "tn", "tt")))
]  # fmt: skip
TWICE = lambda y: jnp.maximum(2 * y, -1)  # noqa: E731
BY_RING: dict[str, Any] = {"keywords": RING}
KEYWORDS = [
    *((3, summed(form, 3, 72, 40, 24, extras=EVERY, activation=TWICE, out=F32), {}) for form in BLOCKS),
    *((3, summed(form, 3, 40, 40, 24, extras=EVERY, out=F32, **BY_RING), {"completions": ("late", "random")})
      for form in ("m", "n")),
    (2, summed("m", 2, 72, 40, 24, extras=("bias",), out=BF16), {}),
    (2, summed("n", 2, 72, 40, 24, extras=("addend",), activation=jax.nn.relu, out=BF16), {}),
    (2, summed("all n", 2, 72, 40, 24, extras=("lhs_scale",)), {}),
    (2, summed("once", 2, 72, 40, 24, extras=("rhs_scale",)), {}),
    (2, summed("m", 2, 72, 40, 24, extras=EVERY, lead=(1, 2), activation=jax.nn.relu, out=F32), {}),
    (2, summed("n", 2, 72, 40, 24, extras=EVERY, lead=(3,), layout="tn", out=F32), {}),
    (2, summed("all m", 2, 72, 40, 24, extras=EVERY, lead=(1, 2), layout="tn", out=F32), {}),
    (2, summed("once", 2, 72, 40, 24, extras=EVERY, lead=(1, 2), out=F32), {}),
    (2, summed("m", 2, 40, 72, 144, layout="nt", dtype=E4M3, out=F32, extras=SCALES), {}),
    (2, summed("n", 2, 40, 72, 144, layout="nt", dtype=E5M2, rhs_dtype=E4M3, extras=SCALES), {}),
    (2, summed("all n", 2, 24, 40, 144, layout="nt", dtype=E4M3, out=F32, extras=SCALES), {}),
    (2, summed("once", 2, 24, 40, 144, layout="nt", dtype=E5M2, rhs_dtype=E4M3, extras=SCALES), {}),
    *((3, summed(form, 3, 1, 8, 8, dtype=F16), {}) for form in BLOCKS),  # A row or a few columns for each device.
    # The other warpgroup has no rows of the tile to compute or to send.
    (2, summed("once", 2, 1, 72, 24, extras=("bias",), config=Config(tile_m=128, tile_n=64, stages=2)), {}),
    (1, summed("m", 1, 24, 72, 72), {}),
    (1, summed("once", 1, 24, 72, 72), {}),
]  # fmt: skip
# Several pairs of operands whose products are added: of sizes that end inside k steps.
PAIRS = [
    (2, summed("m", 2, 64, 136, 128, pairs=(64, 64), out=F32), {}),
    (3, summed("m", 3, 64, 72, 96, pairs=(8, 72, 16), layout="nt", extras=EVERY, out=F32), {}),
    (2, summed("n", 2, 136, 136, 208, pairs=(72, 136), layout="tn", extras=SCALES, dtype=F16, out=F32), {}),
    (4, summed("m", 4, 64, 128, 144, pairs=(136, 8), lead=(2,), extras=("bias",), activation=jax.nn.relu, out=F32), {}),
    (2, summed("m", 2, 64, 136, 80, pairs=(72, 8), dtype=F16, out=F32, **BY_RING), {}),
    (3, summed("all m", 3, 64, 72, 144, pairs=(64, 72, 8), extras=EVERY, out=F32), {}),
    (4, summed("once", 4, 24, 136, 136, pairs=(72, 64), layout="nt", extras=("addend",), dtype=F16, out=F32), {}),
    (1, summed("m", 1, 64, 72, 80, pairs=(8, 72), layout="tt", extras=EVERY, dtype=F16), {}),
]


def some(cases: list[Any], fast: Any) -> list[Any]:
    """The fast tier has the cases at indices for which `fast` holds."""
    return [case if fast(i) else pytest.param(*case, marks=slow) for i, case in enumerate(cases)]


SUMS = RAGGED + LAYOUTS + some(KEYWORDS, lambda i: i < 7 or i % 2) + some(PAIRS, lambda i: i not in (0, 3))


FEW_ROWS = some(FEW, lambda i: i % 3 != 1)


def by_either(cases: list[tuple[int, int, Call]]) -> list[Any]:
    """Each gather by both transports: the fast tier has most of them once."""
    return [
        pytest.param(devices, cores, call if transport == "pull" else call.but(keywords=(*call.keywords, *RING)),
                     marks=[] if (i % 2 == 0) == (transport == "pull") and i % 4 != 3 else slow, id=f"{transport} {i}")
        for i, (devices, cores, call) in enumerate(cases)
        for transport in ("pull", "ring")
    ]  # fmt: skip


# What XLA computes in the place of a kernel, with sizes, dtypes and leading dimensions that no kernel takes.
BY_XLA = [
    call
    for op in ("matmul", "all_gather_lhs_matmul", "all_gather_rhs_matmul_n", "all_gather_rhs_matmul_k",
               "matmul_reduce_scatter", "matmul_reduce_scatter_n", "matmul_all_reduce")
    for call in (
        Call(op, 10, 6, 5, dtype=F32, extras=EVERY, layout="tt", activation=jax.nn.relu),
        Call(op, 3, 5, 7, dtype=F32, extras=EVERY, lead=(2, 3), rhs_lead=(2, 3) if op != "matmul" else ()),
        Call(op, 3, 5, 7, dtype=E4M3, rhs_lead=(2,), extras=("bias", "addend"), out=BF16),
        Call(op, 0, 6, 5, dtype=BF16, extras=("bias",)),
    )
]  # fmt: skip
