"""Transposed tiles: random products, launches in a row, gradients, late peers, and injected defects."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

import overlap
from overlap.emulation import EmulationError, emulate
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import Target
from overlap.kernels.tma import staging
from overlap.single_gpu import product
from overlap.single_gpu.matmul import MATMUL
from tests.ops.product_cases import check_exactly, in_f32, integers, oracle_of
from tests.protocol.protocol_cases import FEW, JOINED, ONE, PULL, WEIGHTS, Kernel, of_rows, of_weights
from tests.protocol.swap_defects import HARMLESS, INJECTED

SWAPPED = overlap.Config(tile_m=72, tile_n=128, stages=2, swap_operands=True)
TURNS = SWAPPED.replace(schedule="pingpong")
COMPLETIONS = ("late", "eager", "random")
BF16 = jnp.bfloat16

# --- Products of one device -------------------------------------------------------------------------------------------


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_random_products(data):
    """Draws any sizes that TMA supports, and tiles with any multiple of 8 rows."""
    m, n, k = data.draw(st.integers(1, 170)), 8 * data.draw(st.integers(1, 34)), 8 * data.draw(st.integers(1, 25))
    tile_n, schedule = data.draw(
        st.sampled_from([(128, "cooperative"), (256, "cooperative"), (64, "pingpong"), (128, "pingpong")])
    )
    config = SWAPPED.replace(
        tile_m=8 * data.draw(st.integers(1, 20)), tile_n=tile_n, schedule=schedule, stages=data.draw(st.integers(2, 3))
    )
    how = {"completion": data.draw(st.sampled_from(COMPLETIONS)), "seed": data.draw(st.integers(0, 9))}
    transpose = data.draw(st.booleans())
    check_exactly(
        (m, n, k), config, cores=2, settings=how, transpose_rhs=transpose, preferred_element_type=BF16,
        bias=integers(5, n),
    )  # fmt: skip


@pytest.mark.parametrize("config", [SWAPPED, TURNS], ids=["together", "in turn"])
def test_launches_in_a_row(config):
    """Runs launches in a row with an odd number of tiles. Barriers must start anew with each launch."""
    xs, w = integers(15, 3, 7 * 72 - 5, 72), integers(16, 72, 72)

    def step(w, x):
        return -w, overlap.matmul(x, w, config=config, implementation="fused", preferred_element_type=BF16)

    with emulate(cores=2) as run:
        _, ys = jax.jit(lambda w, xs: jax.lax.scan(step, w, xs))(w, xs)
        run.check()
    assert run.counts["launches"] == 3
    expected = np.array([1, -1, 1])[:, None, None] * oracle_of(xs, w)
    np.testing.assert_array_equal(in_f32(ys), in_f32(expected.astype(BF16)))


def test_gradients():
    """The configuration applies to the forward product; the derivatives choose their own."""
    lhs, rhs = integers(1, 88, 72), integers(2, 72, 136)

    def loss(implementation, config):
        def of(lhs, rhs):
            y = overlap.matmul(lhs, rhs, config=config, implementation=implementation, preferred_element_type=BF16)
            return jnp.sum(y.astype(jnp.float32))

        return jax.value_and_grad(of, argnums=(0, 1))

    with emulate(cores=2) as run:
        value, ours = jax.jit(loss("fused", SWAPPED.replace(tile_m=24)))(lhs, rhs)
        jax.block_until_ready(ours)
        run.check()
    expected, theirs = loss("xla", None)(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(value), np.asarray(expected))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(in_f32(a), in_f32(b))


def test_a_mapped_batch():
    lhs, rhs = integers(1, 3, 40, 72), integers(2, 72, 136)
    call = lambda x: overlap.matmul(x, rhs, config=TURNS, implementation="fused", preferred_element_type=BF16)  # noqa: E731
    with emulate(cores=2) as run:
        ys = jax.jit(jax.vmap(call))(lhs)
        run.check()
    np.testing.assert_array_equal(in_f32(ys), in_f32(oracle_of(lhs, rhs).astype(BF16)))


# --- Gathers ----------------------------------------------------------------------------------------------------------

ROWS = dataclasses.replace(ONE, m=200)
SCALED, FEW_SCALED = dataclasses.replace(ROWS, scales=("rows",)), dataclasses.replace(FEW, m=40, scales=("rows",))
_SWAP = dict(swap_operands=True, tile_n=128)
GATHERS = {
    "pull": lambda: of_rows(ROWS, PULL.replace(tile_m=72, **_SWAP)),
    "pull, scales": lambda: of_rows(SCALED, PULL.replace(tile_m=72, **_SWAP), 2),
    "joined, scales": lambda: of_rows(FEW_SCALED, JOINED.replace(tile_m=72, swap_operands=True)),
    "weights k": lambda: of_weights("k", WEIGHTS.replace(tile_m=104, swap_operands=True), m=200),
}
SLOW = ("pull", "weights k")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in GATHERS]
)
def test_whoever_is_late(name):
    """`pct` lets one thread of one device fall behind all others, a different one with each seed."""
    kernel = GATHERS[name]()
    for seed, completion in enumerate(COMPLETIONS):
        kernel.run(cores=2, completion=completion, scheduler="pct", seed=seed)


# --- Injected defects -------------------------------------------------------------------------------------------------


def launched(
    config: overlap.Config, shape: tuple[int, int, int], what: str = "", layouts: str = "nn", cores: int = 1
) -> Kernel:
    """Traces a product alone, anew; `what` names an added bias, addend or row scales.

    `layouts` is the operands' layout, "nn" or "nt".
    """
    m, n, k = shape
    plan = LaunchPlan(MATMUL, OperandLayouts(False, layouts == "nt"), BF16, Target("cpu", "cpu", cores), config)
    lhs, rhs = integers(1, m, k), integers(2, *((n, k) if layouts == "nt" else (k, n)))
    power = jnp.asarray(2.0 ** np.random.default_rng(4).integers(-1, 2, m), jnp.float32)
    more = {
        "": {}, "bias": {"biases": (integers(3, n).astype(jnp.float32),)}, "addend": {"addends": (integers(3, m, n),)},
        "scales": {"row_scale": power},
    }[what]  # fmt: skip
    function = jax.jit(lambda more: product.launch(Operands(lhs, (rhs,), **more), plan))
    words = {"bias": "bias", "addend": "addend", "scales": "lhs_scale"}
    given = {"bias": integers(3, n), "addend": integers(3, m, n), "scales": power[:, None]}
    keywords: dict[str, Any] = {words[what]: given[what]} if what else {}
    expected = oracle_of(lhs, rhs, transpose_rhs=layouts == "nt", **keywords).astype(BF16)
    return Kernel(
        lambda: function(more), lambda result: np.testing.assert_array_equal(in_f32(result), in_f32(expected))
    )


# In "square", each warpgroup multiplies 64 × 64 and stores 64 × 64 at a time.
SQUARE = SWAPPED.replace(tile_m=64)
BLOCKS = SWAPPED.replace(tile_m=104)
CUT = BLOCKS.replace(tile_n=256, stream_k=2)
CORES = {"cut": 3, "cut, in turn": 4}  # All others run on one core.
PROGRAMS = {
    "one": lambda: launched(SWAPPED, (200, 264, 192)),
    "square": lambda: launched(SQUARE, (128, 128, 128)),
    "square nt": lambda: launched(SQUARE, (128, 128, 128), layouts="nt"),
    "square bias": lambda: launched(SQUARE, (128, 128, 128), "bias"),
    "square addend": lambda: launched(SQUARE, (128, 128, 128), "addend"),
    "square scales": lambda: launched(SQUARE, (128, 128, 128), "scales"),
    "tall": lambda: launched(SWAPPED.replace(tile_m=128), (128, 128, 128)),
    "blocks": lambda: launched(BLOCKS, (208, 128, 128)),
    "blocks, addend": lambda: launched(BLOCKS, (208, 128, 128), "addend"),
    "blocks, scales": lambda: launched(BLOCKS, (208, 128, 128), "scales"),
    "pieces": lambda: launched(SWAPPED.replace(tile_n=256), (72, 256, 128)),
    # One whole tile, then three CTAs: two with pieces of the last tile, one idle.
    "cut": lambda: launched(CUT, (104, 1024, 256), cores=CORES["cut"]),
    "cut, in turn": lambda: launched(TURNS.replace(stream_k=3), (360, 128, 328), "scales", cores=CORES["cut, in turn"]),
    "few": lambda: launched(SWAPPED, (16, 264, 192)),
    **GATHERS,
}


def run_some(kernel: Kernel, cores: int, seeds: int) -> None:
    for seed in range(seeds):
        scheduler = ("pct", "random")[seed % 2]
        kernel.run(cores=cores, completion=COMPLETIONS[seed % 3], scheduler=scheduler, seed=seed, step_limit=100_000)


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in GATHERS])
def test_programs_without_defects_are_clean(program):
    run_some(PROGRAMS[program](), CORES.get(program, 1), 3)


@pytest.mark.one_jax
@pytest.mark.parametrize(("program", "words", "defect"), INJECTED.values(), ids=INJECTED)
def test_each_injected_defect_is_reported(program, words, defect, monkeypatch):
    """The emulator reports the defect, the result differs from the oracle, or jax cannot make the kernel."""
    kernel = PROGRAMS[program]()
    defect(monkeypatch)
    with pytest.raises((EmulationError, AssertionError, ValueError, TypeError), match=words):
        run_some(kernel, CORES.get(program, 1), 12)


@pytest.mark.one_jax
@pytest.mark.parametrize(("program", "change"), HARMLESS.values(), ids=HARMLESS)
def test_what_does_no_harm(program, change, monkeypatch):
    """Runs the program with the change: the emulator must report nothing. If it ever does, the change is a defect."""
    kernel = PROGRAMS[program]()
    change(monkeypatch)
    run_some(kernel, 1, 4)


# --- Layouts of the operands ------------------------------------------------------------------------------------------


def lowered(config: overlap.Config) -> str:
    plan = LaunchPlan(MATMUL, OperandLayouts(False, False), BF16, Target("gpu", "NVIDIA H200", 132), config)
    types = jax.ShapeDtypeStruct((200, 192), BF16), jax.ShapeDtypeStruct((192, 264), BF16)
    traced = jax.jit(lambda lhs, rhs: product.launch(Operands(lhs, (rhs,)), plan)).trace(*types)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_tiles_may_differ_but_swizzles_may_not(monkeypatch):
    """The left operand's tiles are 8 × 64, the right one's 64 × 64: `_compat.UNEQUAL_TILES`."""
    assert "mosaic_gpu" in lowered(SWAPPED)
    views = staging._views

    def narrower(box, mma, dtype, *rows):
        # Change an operand, not the result, where tiles have 8 rows.
        of_box, of_mma = views(box, mma, dtype, *rows)
        if rows != (staging.SMALL_TILE_ROWS,):
            return of_box, of_mma
        tiling: Any = plgpu.TilingTransform
        swizzle: Any = plgpu.SwizzleTransform
        narrow = tiling((8, 32)), swizzle(64)
        return of_box, plgpu.SMEM(mma, dtype, transforms=narrow)

    monkeypatch.setattr(staging, "_views", narrower)
    with pytest.raises(Exception, match="swizzles of operands"):
        lowered(SWAPPED)
