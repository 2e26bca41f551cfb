"""Tiles that the tensor cores compute transposed (`Config.swap_operands`): exact for any multiple of 8 rows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import overlap
from overlap.choice import space
from overlap.choice.problem import Problem
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import Target
from overlap.kernels.tma import finish
from tests.ops.blackwell_cases import B200
from tests.ops.product_cases import check_exactly, integers
from tests.protocol.protocol_cases import FEW, JOINED, ONE, PULL, WEIGHTS, of_rows, of_weights

H200 = Target("gpu", "NVIDIA H200", 132)
SWAPPED = overlap.Config(tile_m=72, tile_n=128, stages=2, swap_operands=True)
TURNS = SWAPPED.replace(schedule="pingpong")
BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn

# --- Products of one device -------------------------------------------------------------------------------------------

RAGGED = (200, 264, 328)
EPILOGUE = dict(
    bias=integers(5, 264), activation=jax.nn.relu, addend=integers(6, 200, 264),
    lhs_scale=jnp.resize(jnp.array([0.5, 1.0, 2.0]), (200, 1)), rhs_scale=jnp.resize(jnp.array([0.5, 2.0]), (264,)),
)  # fmt: skip
TRANSPOSED = dict(transpose_rhs=True)
CASES = {  # cores, shape, config, further arguments
    "72 x 128": (2, RAGGED, SWAPPED, {}),
    "72 x 128, [n, k]": (2, RAGGED, SWAPPED, TRANSPOSED),
    "8 x 128": (2, (20, 264, 200), SWAPPED.replace(tile_m=8), {}),
    "104 x 256": (1, RAGGED, SWAPPED.replace(tile_m=104, tile_n=256), {}),
    "160 x 256": (1, RAGGED, SWAPPED.replace(tile_m=160, tile_n=256), TRANSPOSED),
    "256 x 128": (1, (300, 264, 136), SWAPPED.replace(tile_m=256), {}),
    "40 x 64, in turn": (2, RAGGED, TURNS.replace(tile_m=40, tile_n=64, stages=5), {}),
    "136 x 128, in turn": (1, RAGGED, TURNS.replace(tile_m=136, stages=3), TRANSPOSED),
    "columns first": (2, RAGGED, SWAPPED.replace(order_minor="n", order_width=4), {}),
    "two boxes at a time": (2, RAGGED, SWAPPED.replace(tile_n=256), {}),
    "one tile": (2, (64, 128, 200), SWAPPED, {}),
    "one k step": (1, (*RAGGED[:2], 40), SWAPPED.replace(stages=4), {}),
    "few rows": (2, (16, 520, 200), SWAPPED, {}),
    "batch": (2, (80, 264, 200), SWAPPED, {"batch": (3,)}),
    "all of the epilogue": (2, RAGGED, SWAPPED, EPILOGUE),
    "all of the epilogue, in turn": (2, RAGGED, TURNS, EPILOGUE),
    "cut": (7, (200, 264, 520), SWAPPED.replace(stream_k=3), {}),
    "cut, [n, k], all of the epilogue": (
        5,
        (200, 264, 520),
        SWAPPED.replace(tile_m=136, stream_k=2),
        EPILOGUE | TRANSPOSED,
    ),
    "cut, 200 x 256": (3, (200, 264, 520), SWAPPED.replace(tile_m=160, tile_n=256, stream_k=3), {}),
    "cut, many pieces": (6, (136, 128, 520), SWAPPED.replace(tile_m=136, stream_k=8), {}),
    "cut, in turn": (4, (200, 264, 520), TURNS.replace(stream_k=3), EPILOGUE | TRANSPOSED),
    "cut, few rows": (7, (20, 264, 520), SWAPPED.replace(stream_k=3), TRANSPOSED),
    "cut, two boxes at a time": (3, (72, 256, 520), SWAPPED.replace(tile_n=256, stream_k=3), {}),
    "cut, batch": (7, (64, 128, 520), SWAPPED.replace(stream_k=4), {"batch": (3,)}),
    "float16": (2, (200, 264, 72), SWAPPED, {"dtype": jnp.float16, "preferred_element_type": jnp.float16}),
    "float8": (2, (*RAGGED[:2], 400), SWAPPED, {"dtype": E4M3, **TRANSPOSED}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_bit(case):
    cores, shape, config, kwargs = CASES[case]
    for seed, completion in enumerate(("eager", "random")):
        settings = {"completion": completion, "scheduler": ("pct", "random")[seed], "seed": seed}
        run = check_exactly(shape, config, cores=cores, settings=settings, **{"preferred_element_type": BF16} | kwargs)
        # CTAs that share a tile raise flags; no others do.
        assert (run.counts["signals"] > 0) == (config.stream_k > 1)


# --- Gathers ----------------------------------------------------------------------------------------------------------

ROWS = dataclasses.replace(ONE, m=200)
SEVERAL = dataclasses.replace(ROWS, scales=("rows", "columns"), gathered=True, widths=(64, 136), container=list)
_SWAP = dict(swap_operands=True, tile_n=128)
FUSED = {
    "pull": lambda: of_rows(ROWS, PULL.replace(tile_m=72, **_SWAP)),
    "pull, in turn": lambda: of_rows(ROWS, PULL.replace(tile_m=104, schedule="pingpong", **_SWAP), 2),
    "pull, several": lambda: of_rows(SEVERAL, PULL.replace(tile_m=40, **_SWAP), 2),
    "joined": lambda: of_rows(FEW, JOINED.replace(tile_m=24, swap_operands=True)),
    "joined, several": lambda: of_rows(
        dataclasses.replace(FEW, scales=("rows", "columns"), widths=(64, 136), container=list),
        JOINED.replace(tile_m=16, swap_operands=True),
    ),
    "joined, scales, 120 rows": lambda: of_rows(
        dataclasses.replace(FEW, m=40, scales=("rows",)), JOINED.replace(tile_m=72, swap_operands=True)
    ),
    "pull, cut": lambda: of_rows(dataclasses.replace(SEVERAL, k=264), PULL.replace(tile_m=104, stream_k=3, **_SWAP), 2),
    "joined, cut": lambda: of_rows(
        dataclasses.replace(FEW, m=40, k=264, scales=("rows",)),
        JOINED.replace(tile_m=72, swap_operands=True, stream_k=3),
    ),
    "weights k, cut": lambda: of_weights(
        "k", WEIGHTS.replace(tile_m=104, swap_operands=True, stream_k=3), 2, m=200, shard=(192, 64)
    ),
    "weights n": lambda: of_weights("n", WEIGHTS.replace(tile_m=104, swap_operands=True), m=200),
    "weights k": lambda: of_weights("k", WEIGHTS.replace(tile_m=104, swap_operands=True), m=200),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operations_are_clean(name, monkeypatch):
    shared, together = [], finish.finish_together
    monkeypatch.setattr(finish, "finish_together", lambda *args: (shared.append(name), together(*args))[-1])
    kernel, cuts = FUSED[name](), name.endswith("cut")
    kernel.run(cores=8 if cuts else 1, completion="eager", scheduler="pct", seed=1)
    assert bool(shared) == cuts
    kernel.run(cores=10 if cuts else 3, completion="random", scheduler="random", seed=2)


# --- Limits -----------------------------------------------------------------------------------------------------------


def check_limits(target: Target, config: overlap.Config, **changes: object) -> None:
    sizes = dataclasses.replace(OperandTypes(512, BF16, BF16, BF16), **changes)
    mainloop_of(target).check_config(sizes, config, target)


@pytest.mark.parametrize(
    ("target", "fields", "sizes", "words"),
    [
        (H200, {"tile_m": 76}, {}, "`tile_m` must be a multiple of 8 and at most 256 with `swap_operands`, got 76"),
        (H200, {"tile_m": 264}, {}, "at most 256 with `swap_operands`, got 264"),
        (H200, {"tile_n": 64}, {}, "`tile_n` must be a multiple of 128"),
        (H200, {"tile_n": 192}, {}, "`tile_n` must be a multiple of 128"),
        (H200, {"tile_m": 168, "tile_n": 256}, {}, "168 × 256 .* needs 168 registers .*160 is the most"),
        (H200, {"split_k": 2}, {}, "`split_k` must be 1 with `swap_operands`, got 2: leave one of them out"),
        (H200, {}, {"out_dtype": jnp.dtype(jnp.float32)}, "`swap_operands` needs a result of 16 bits, got float32"),
        (H200, {}, {"layouts": OperandLayouts(True, False)}, "needs `lhs` as .m, k., got transpose_lhs=True"),
        (H200, {}, {"transport": "ring"}, "`swap_operands` must be False with transport='ring', got True"),
        (H200, {}, {"transport": "push"}, "`swap_operands` must be False where results are exchanged"),
        (B200, {}, {}, "`swap_operands` must be False on NVIDIA B200, got True: leave it out"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(target, fields, sizes, words):
    with pytest.raises(ValueError, match=words):
        check_limits(target, SWAPPED.replace(**fields), **sizes)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_a_switch_is_true_or_false(value):
    with pytest.raises(ValueError, match="`swap_operands` must be True or False, got"):
        overlap.Config(swap_operands=value)


# --- The search -------------------------------------------------------------------------------------------------------


def swapped(problem: Problem) -> list[overlap.Config]:
    return [config for config in space.candidates(problem, H200) if config.swap_operands]


def test_rows_are_chosen_so_that_the_last_tile_is_full():
    """For 1192 rows, 9 tiles of 136 rows give one wave of 126 tiles; 128 × 192 gives 100 tiles, each a third larger."""
    rows = {config.tile_m for config in swapped(Problem("matmul", 1192, 1792, 6464, "bfloat16", "bfloat16"))}
    assert {136, 152, 240} <= rows
    # For each number of tiles along m, the fewest rows that suffice.
    assert all(-(-1192 // row) != -(-1192 // (row - 8)) for row in rows)


def test_tiles_of_the_last_wave_are_cut():
    """Cuts tiles for one device. In gathers, some kernels with cut tiles have no register left, so none is tried."""
    of_one = swapped(Problem("matmul", 160, 22720, 11776, "bfloat16", "bfloat16"))
    assert {1, 2} <= {config.stream_k for config in of_one} and {config.split_k for config in of_one} == {1}
    gathered = swapped(Problem("all_gather_lhs_matmul", 512, 4096, 4096, "bfloat16", "bfloat16", devices=4))
    assert {config.stream_k for config in gathered} == {1}


@pytest.mark.parametrize(
    "problem",
    [
        Problem("matmul", 1192, 1792, 6464, "bfloat16", "bfloat16", layout="tn"),
        Problem("matmul", 1192, 1792, 6464, "bfloat16", "float32"),
        Problem("matmul_reduce_scatter", 1024, 4096, 4096, "bfloat16", "bfloat16", devices=4),
    ],
    ids=str,
)
def test_where_it_cannot_be_it_is_not_tried(problem):
    assert not swapped(problem) and space.candidates(problem, H200)
