"""Calls whose numbers tests/ops/test_numbers.py compares bit by bit: forms, ragged sizes, configurations, epilogues.

single_gpu/test_configurations.py has the fields of `Config` in `matmul`; here are those that meet a transport.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from overlap import Config
from overlap.collectives.gather.rhs_schedule import K_STEPS_PER_FLAG
from overlap.kernels.operations import BY_NAME
from tests.ops.contract import BF16, E4M3, E5M2, EVERY, F16, F32, JOINED, RING, SCALES, SMALL, Call, GroupedCall

WIDE = Config(tile_n=128, stages=2)
CUT = Config(tile_n=64, stages=2, stream_k=3)
BANDS = Config(tile_m=64, tile_n=128, stages=2, order_minor="n", order_width=2)
FINE = Config(tile_n=128, chunk_bytes=512, chunk_buffers=3)
TURNS = Config(tile_m=64, tile_n=64, stages=2, schedule="pingpong")
SWAPPED = Config(tile_m=104, tile_n=128, stages=2, swap_operands=True)
GATHERED = (("return_gathered", True),)
slow = pytest.mark.slow


def gather(*sizes: int, **fields: Any) -> Call:
    return Call("all_gather_lhs_matmul", *sizes, **fields)


GATHERS = [  # devices, cores, call; by either transport
    (2, 1, gather(136, 264, 136, config=BANDS, dtype=F16)),  # One CTA does all the work.
    (2, 9, gather(1, 8, 8, extras=SCALES, keywords=GATHERED, config=WIDE)),  # More CTAs than tiles or chunks.
    (2, 2, gather(128, 136, 256, config=Config(tile_n=128, chunk_bytes=256, chunk_buffers=3))),  # Parts of rows.
    # Chunks of 16 rows; the last of five.
    (3, 3, gather(133, 136, 64, config=Config(tile_n=128, chunk_bytes=2048, chunk_buffers=1))),
    # Rows in three parts, one shorter.
    (3, 3, gather(70, 136, 8 * 37, keywords=GATHERED, config=Config(tile_n=128, chunk_bytes=256))),
    (3, 5, gather(200, 0, 72, widths=(136, 8, 72), config=CUT)),  # One right operand is narrower than a tile.
    (2, 9, gather(72, 0, 72, lead=(2, 2), widths=(136, 8), container=tuple, keywords=GATHERED, config=CUT)),
    (2, 3, gather(3, 8, 1032, lead=(5,), config=FINE)),
    (1, 3, gather(40, 0, 64, lead=(3,), widths=(72, 136), extras=("lhs_scale",), keywords=GATHERED, config=CUT)),
    (3, 5, gather(136, 0, 72, widths=(72, 200), extras=SCALES, keywords=GATHERED, config=CUT)),
    (2, 5, gather(136, 0, 72, lead=(2,), widths=(64, 136), extras=("rhs_scale",), container=tuple, config=BANDS)),
    (2, 3, gather(136, 0, 72, layout="nt", widths=(72, 8), extras=("bias",), activation=jax.nn.relu, config=WIDE)),
    (3, 7, gather(72, 0, 144, layout="nt", lead=(2,), widths=(136, 72), dtype=E4M3, rhs_dtype=E5M2, out=F16,
                  extras=SCALES, config=CUT)),
    (2, 4, gather(136, 136, 272, layout="nt", dtype=E5M2, extras=("lhs_scale",),
                  keywords=(("rhs_scale", 0.5), *GATHERED), config=Config(tile_n=64, stages=2))),
    (2, 7, gather(200, 136, 264, config=TURNS.replace(stream_k=3))),  # Warpgroups take turns, and tiles are cut.
    (3, 2, gather(200, 64, 136, keywords=GATHERED, config=TURNS)),
    # One CTA shares a tile with others; fewer rows than a tile.
    (2, 10, gather(128, 128, 320, config=WIDE.replace(stream_k=8))),
    (2, 2, gather(20, 136, 136, keywords=GATHERED, config=Config(tile_m=128, tile_n=64, stages=2))),
    (3, 2, gather(1, 72, 72, extras=("lhs_scale",), config=CUT)),  # The scale of one row is no scalar.
]  # fmt: skip
TRANSPOSED = [  # Tiles that are multiplied transposed: not by the ring.
    (2, 2, gather(200, 0, 136, widths=(64, 136), extras=SCALES, keywords=GATHERED, config=SWAPPED.replace(tile_m=40))),
    (2, 2, gather(200, 64, 136, config=SWAPPED.replace(schedule="pingpong"))),
    (2, 7, Call("all_gather_rhs_matmul_k", 200, 64, 192, config=SWAPPED.replace(stream_k=3))),
    (2, 2, Call("all_gather_rhs_matmul_n", 200, 64, 64, config=SWAPPED)),
]

FEW_CUT = JOINED.replace(stages=3, stream_k=3)
FEW_MANY = JOINED.replace(tile_m=128, tile_n=64, order_minor="n", order_width=2)
FEW_FINE = JOINED.replace(chunk_bytes=512, chunk_buffers=3)
FEW: list[Any] = [  # devices, cores, call
    pytest.param(8, 3, gather(16, 136, 520, config=FEW_CUT), marks=slow),  # Two rows of tiles.
    (3, 4, gather(50, 72, 136, config=FEW_MANY)),  # A tile contains rows of all three shards.
    (4, 2, gather(3, 72, 1032, config=FEW_FINE)),  # Chunks are parts of rows.
    (2, 7, gather(1, 8, 8, config=JOINED)),  # More CTAs than chunks or tiles.
    (3, 1, gather(100, 136, 72, config=JOINED, dtype=F16)),  # Five rows of tiles; one CTA does all the work.
    (1, 2, gather(16, 0, 128, widths=(72, 128), config=FEW_CUT)),  # Nothing to gather: a plain product.
    (3, 5, gather(16, 0, 200, widths=(136, 8, 72), container=tuple, keywords=GATHERED, config=FEW_CUT)),
    (3, 4, gather(24, 0, 272, layout="nt", widths=(136, 72), dtype=E4M3, rhs_dtype=E5M2, extras=SCALES,
                  keywords=GATHERED, config=FEW_CUT)),
    (2, 3, gather(1, 72, 72, lead=(4,), config=JOINED)),  # A batch of single rows.
    (3, 4, gather(5, 0, 136, lead=(2, 3), widths=(136, 8), extras=SCALES, keywords=GATHERED, config=FEW_CUT)),
    (2, 10, gather(40, 136, 264, extras=("lhs_scale",),
                   config=JOINED.replace(tile_m=72, stream_k=3, swap_operands=True))),
    (2, 2, gather(16, 136, 136, config=JOINED.replace(schedule="pingpong"))),
    (2, 3, gather(8, 64, 64, lead=(1, 1), layout="nt", extras=("bias",), activation=jnp.abs, config=JOINED)),
]  # fmt: skip

WEIGHTS_CONFIGS = [  # cores, config
    (1, WIDE),
    (3, WIDE),
    (7, Config(tile_n=256, stages=3, order_minor="n")),  # More CTAs than chunks.
    (2, Config(tile_n=192, stages=2, chunk_bytes=256, chunk_buffers=3)),  # Chunks are parts of rows.
    (2, Config(tile_n=64, chunk_buffers=1, chunk_bytes=4096)),
    (5, WIDE.replace(stream_k=4)),
    (2, WIDE.replace(tile_m=64, schedule="pingpong")),
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
    (3, 3, Call("all_gather_rhs_matmul_k", 72, 136, 136, lead=(3, 2), config=WIDE)),
    (2, 3, Call("all_gather_rhs_matmul_k", 8, 8, 12, layout="tn")),  # Less than 16 bytes of each row in a shard.
    (2, 3, Call("all_gather_rhs_matmul_k", 136, 136, 72, layout="tn", config=WIDE.replace(stream_k=3))),
    (3, 3, Call("all_gather_rhs_matmul_n", 200, 72, 136, layout="tn", config=WIDE)),
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
    (SMALL.replace(schedule="pingpong"), {}),
]
RAGGED = [  # The fast tier has each configuration with one form, and each form with several configurations.
    pytest.param(
        2,
        summed(form, 2, 136, 264 if form == "m" else 136, 72, config=config, out=(F32, BF16)[i // 2 % 2]),
        settings,
        marks=[] if (i + j) % 5 == 0 or config.in_turn else slow,
        id=f"{form} {i}",
    )
    for i, (config, settings) in enumerate(SCHEDULES)
    for j, form in enumerate(BLOCKS)
]
TWICE = lambda y: jnp.maximum(2 * y, -1)  # noqa: E731
BY_RING: dict[str, Any] = {"keywords": RING}
# Layouts of both operands go with the other keywords: "tn" where rows are cut, "nt" where columns are.
LAYOUT = {"m": "tn", "n": "nt", "all m": "tt", "all n": "nt", "once": "tn"}
KEYWORDS = [
    *((2, summed(form, 2, 72, 72, 24, layout=layout, extras=EVERY, activation=TWICE, out=F32), {})
      for form, layout in LAYOUT.items()),
    *((3, summed(form, 3, 40, 40, 24, extras=EVERY, out=F32, config=config, **BY_RING), {"completions": ("random",)})
      for form, config in (("m", SMALL.replace(schedule="pingpong")), ("n", SMALL))),
    (3, summed("once", 3, 72, 40, 24, extras=EVERY, activation=TWICE, out=F32), {}),
    (2, summed("m", 2, 72, 40, 24, extras=EVERY, lead=(1, 2), activation=jax.nn.relu, out=F32), {}),
    (2, summed("n", 2, 72, 40, 24, extras=EVERY, lead=(3,), layout="tn", out=F32), {}),
    pytest.param(2, summed("all m", 2, 72, 40, 24, extras=EVERY, lead=(1, 2), layout="tn", out=F32), {}, marks=slow),
    (2, summed("once", 2, 72, 40, 24, extras=EVERY, lead=(1, 2), layout="tn", out=F32), {}),
    # One keyword each, and operands of 8 bits.
    (2, summed("m", 2, 40, 72, 144, layout="nt", dtype=E4M3, extras=("bias",)), {}),
    (2, summed("n", 2, 40, 72, 144, layout="nt", dtype=E5M2, rhs_dtype=E4M3, extras=("addend",), out=F32), {}),
    (2, summed("all n", 2, 24, 40, 144, layout="nt", dtype=E4M3, out=F32, extras=("lhs_scale",)), {}),
    (2, summed("once", 2, 24, 40, 144, layout="nt", dtype=E5M2, rhs_dtype=E4M3, extras=("rhs_scale",)), {}),
    # A row or a few columns for each device.
    *(pytest.param(3, summed(form, 3, 1, 8, 8, dtype=F16), {}, marks=slow if form.startswith("all") else [])
      for form in BLOCKS),
    # The other warpgroup has no rows of the tile to compute or to send: alone, and in turn.
    (2, summed("once", 2, 16, 136, 72, config=Config(tile_m=128, tile_n=128, stages=3, schedule="pingpong")), {}),
    (2, summed("once", 2, 1, 72, 24, extras=("bias",), config=Config(tile_m=128, tile_n=64, stages=2)), {}),
    (1, summed("m", 1, 24, 72, 72), {}),
    (1, summed("once", 1, 24, 72, 72), {}),
]  # fmt: skip
# Several pairs of operands whose products are added: of sizes that end inside k steps.
PAIRS = [
    (3, summed("m", 3, 64, 72, 96, pairs=(8, 72, 16), layout="nt", extras=EVERY, out=F32), {}),
    (2, summed("n", 2, 136, 136, 208, pairs=(72, 136), layout="tn", extras=SCALES, dtype=F16, out=F32), {}),
    (2, summed("m", 2, 64, 136, 80, pairs=(72, 8), lead=(2,), dtype=F16, out=F32, **BY_RING), {}),
    (2, summed("all m", 2, 64, 72, 144, pairs=(64, 72, 8), extras=("bias",), activation=jax.nn.relu, out=F32), {}),
    (2, summed("once", 2, 24, 136, 136, pairs=(72, 64), layout="nt", extras=("addend",), dtype=F16, out=F32), {}),
    (1, summed("m", 1, 64, 72, 80, pairs=(8, 72), layout="tt", extras=EVERY, dtype=F16), {}),
]
SUMS = RAGGED + KEYWORDS + PAIRS


def by_either(cases: list[tuple[int, int, Call]]) -> list[Any]:
    """Each gather by both transports: the fast tier has each once."""
    return [
        pytest.param(devices, cores, call if transport == "pull" else call.but(keywords=(*call.keywords, *RING)),
                     marks=[] if (i % 2 == 0) == (transport == "pull") else slow, id=f"{transport} {i}")
        for i, (devices, cores, call) in enumerate(cases)
        for transport in ("pull", "ring")
    ]  # fmt: skip


# What XLA computes in the place of a kernel, with sizes, dtypes and leading dimensions that no kernel takes.
BY_XLA = [
    call
    for i, op in enumerate(op for op, spec in BY_NAME.items() if not spec.groups)
    for call in (
        Call(op, 10, 6, 5, dtype=F32, extras=EVERY, lead=(2, 3), rhs_lead=(2, 3) if op != "matmul" else (),
             layout=("tn", "nt")[i % 2], activation=jax.nn.relu),
        Call(op, 3, 5, 7, dtype=E4M3, rhs_lead=(2,), extras=("bias", "addend"), out=BF16),
        Call(op, 0, 6, 5, dtype=BF16, extras=("bias",)),
    )
]  # fmt: skip

# --- Groups of rows ---

GROUPS, TO_ROWS, TO_TOKENS = "grouped_matmul", "all_gather_lhs_grouped_matmul", "grouped_matmul_reduce_scatter"
OF_GROUPS = ("lhs_scale", "rhs_scale", "bias")
TWO_SIDES: dict[str, Any] = {"widths": (136, 136), "activation": lambda gate, up: jnp.maximum(gate, 0) * up}
BY_GROUP = [  # The GPU, devices, and the call. test_grouped_kernels.py has configurations and sizes of groups.
    *(pytest.param(gpu, 1, call, marks=slow if gpu == "blackwell" and i % 2 else [])
      for gpu in ("hopper", "blackwell")
      for i, call in enumerate((
          GroupedCall(GROUPS, 120, 136, 80, None, extras=OF_GROUPS, activation=jax.nn.relu, out=F32),
          GroupedCall(GROUPS, 120, 136, 80, None, layout="nt", dtype=E4M3, rhs_dtype=E5M2, out=F32, extras=OF_GROUPS),
          GroupedCall(GROUPS, 150, 0, 72, None, layout="nt", extras=OF_GROUPS, out=F32, **TWO_SIDES),
          GroupedCall(GROUPS, 9, 64, 200, None, groups=1),
      ))),
    ("hopper", 1, GroupedCall(GROUPS, 30, 64, 8, SWAPPED.replace(tile_m=40), groups=20)),
    # Rows in several parts, more tokens than a block in which routes are counted, and experts that drop some.
    ("hopper", 2, GroupedCall(TO_ROWS, 6, 0, 192, None, capacity=4, extras=("bias",), **TWO_SIDES)),
    ("hopper", 1, GroupedCall(TO_ROWS, 150, 40, 128, capacity=9, layout="nt", activation=jnp.abs, slots=1, out=F32)),
    ("hopper", 2, GroupedCall(TO_ROWS, 1, 40, 320, slots=4, groups=2)),  # All experts, of which each has one token.
    ("hopper", 2, GroupedCall(TO_ROWS, 6, 40, 128, to="last", extras=("bias",), activation=jnp.exp)),
    ("hopper", 2, GroupedCall(TO_ROWS, 6, 40, 128, to="none")),
    ("hopper", 2, GroupedCall(TO_TOKENS, 6, 192, 40, extras=("bias",), capacity=4, groups=4, slots=3)),
    ("hopper", 1, GroupedCall(TO_TOKENS, 11, 160, 40, layout="nt", extras=("bias",), out=F32, axis=None)),
    ("hopper", 2, GroupedCall(TO_TOKENS, 6, 128, 40, to="last", dtype=F16)),
    ("hopper", 2, GroupedCall(TO_TOKENS, 6, 128, 40, to="none", extras=("bias",))),
    ("hopper", 4, GroupedCall(TO_TOKENS, 3, 128, 40, slots=1, groups=2)),
]  # fmt: skip
GROUPS_BY_XLA = [
    GroupedCall(GROUPS, 40, 6, 5, None, dtype=F32, extras=OF_GROUPS, activation=jax.nn.relu),
    GroupedCall(GROUPS, 40, 8, 16, None, layout="nt", dtype=E4M3, extras=OF_GROUPS, out=BF16),
    GroupedCall(GROUPS, 40, 0, 5, None, dtype=F32, widths=(6, 6, 6), activation=lambda a, b, c: a * b + c),
    GroupedCall(TO_ROWS, 6, 0, 6, None, dtype=F32, extras=("bias",), layout="nt", capacity=4, **TWO_SIDES),
    GroupedCall(TO_ROWS, 1, 5, 6, None, dtype=BF16, slots=4, groups=2, out=F32),
    GroupedCall(TO_TOKENS, 6, 6, 5, None, dtype=BF16, extras=("bias",), layout="nt", slots=3, out=F32),
]  # fmt: skip
