"""Warpgroups that take turns (`Config.schedule`): exact results, clean protocols; each injected defect is reported."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.emulation import EmulationError, emulate
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import PLAIN
from overlap.kernels.target import Target
from overlap.single_gpu import product
from overlap.single_gpu.matmul import MATMUL
from tests.ops.blackwell_cases import B200
from tests.ops.product_cases import check_exactly, in_f32, integers, oracle_of, work_of
from tests.protocol.pingpong_defects import HARMLESS, INJECTED
from tests.protocol.protocol_cases import FEW, JOINED, ONE, PULL, SUMS, WEIGHTS, Kernel, of_rows, of_sums, of_weights

H200 = Target("gpu", "NVIDIA H200", 132)
TURNS = overlap.Config(tile_m=64, tile_n=128, stages=2, schedule="pingpong")
COMPLETIONS = ("late", "eager", "random")
BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn

# --- Products of one device -------------------------------------------------------------------------------------------

EPILOGUE = dict(
    bias=integers(5, 264), activation=jax.nn.relu, addend=integers(6, 200, 264),
    lhs_scale=jnp.resize(jnp.array([0.5, 1.0, 2.0]), (200, 1)), rhs_scale=jnp.resize(jnp.array([0.5, 2.0]), (264,)),
)  # fmt: skip
LAYOUTS = [dict(transpose_lhs=left, transpose_rhs=right) for left, right in itertools.product((False, True), repeat=2)]
RAGGED = (200, 264, 328)
CASES = {  # cores, shape, config, further arguments
    "64 x 128": (2, RAGGED, TURNS, {}),
    "64 x 256": (2, RAGGED, TURNS.replace(tile_n=256), {}),
    "128 x 128": (1, RAGGED, TURNS.replace(tile_m=128), {}),
    "128 x 64": (2, RAGGED, TURNS.replace(tile_m=128, tile_n=64), {}),
    "64 x 64": (3, RAGGED, TURNS.replace(tile_n=64, stages=5), {}),
    "64 x 192": (1, RAGGED, TURNS.replace(tile_n=192, stages=3), {}),
    "cut": (4, (320, 128, 584), TURNS.replace(stream_k=3), {}),
    "cut after three tiles": (4, (13 * 64, 128, 328), TURNS.replace(stream_k=3), {}),
    "four epilogue buffers of 32": (1, RAGGED, TURNS, {}),
    "one tile": (2, (64, 128, 200), TURNS, {}),
    "fewer tiles than cores": (5, (65, 128, 200), TURNS, {}),
    "one k step": (1, (*RAGGED[:2], 40), TURNS.replace(stages=4), {}),
    "fewer k steps than stages": (2, (*RAGGED[:2], 136), TURNS.replace(stages=5), {}),
    "few rows": (2, (16, 520, 200), TURNS.replace(tile_m=128), {}),
    "batch": (2, (80, 264, 200), TURNS, {"batch": (3,)}),
    "split k": (2, (72, 136, 360), TURNS.replace(split_k=3), {}),
    "all of the epilogue": (2, RAGGED, TURNS, EPILOGUE),
    "all of the epilogue, cut": (5, RAGGED, TURNS.replace(stream_k=3), EPILOGUE),
    "bfloat16": (2, (200, 264, 72), TURNS, {"preferred_element_type": BF16}),
    "float8": (2, (*RAGGED[:2], 400), TURNS, {"dtype": E4M3, "transpose_rhs": True}),
    **{f"layout {i}": (2, RAGGED, TURNS.replace(tile_m=128), layout) for i, layout in enumerate(LAYOUTS)},
}


@pytest.mark.parametrize("case", CASES)
def test_every_bit(case):
    cores, shape, config, kwargs = CASES[case]
    assert ("cut" in case) == work_of(shape, config, cores).cuts
    for seed, completion in enumerate(("eager", "random")):
        settings = {"completion": completion, "scheduler": ("pct", "random")[seed], "seed": seed}
        check_exactly(shape, config, cores=cores, settings=settings, **kwargs)


def test_launches_in_a_row():
    """The first warpgroup has four of the seven tiles: barriers start anew with each launch."""
    xs, w = integers(15, 3, 7 * 64, 200), integers(16, 200, 200)

    def step(w, x):
        y = overlap.matmul(x, w, config=TURNS, implementation="fused", preferred_element_type=jnp.float32)
        return -w, y

    with emulate(cores=2) as run:
        _, ys = jax.jit(lambda w, xs: jax.lax.scan(step, w, xs))(w, xs)
        run.check()
    assert run.counts["launches"] == 3
    np.testing.assert_array_equal(np.asarray(ys), np.array([1, -1, 1])[:, None, None] * oracle_of(xs, w))


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_each_has_every_second_tile(tiles):
    lhs, rhs = integers(1, tiles * 64, 192), integers(2, 192, 128)
    with emulate(cores=1, record=True) as run:
        overlap.matmul(lhs, rhs, config=TURNS, implementation="fused")
    products = [event.thread for event in run.events if event.kind == "wgmma"]
    for thread, own in (("wg0", (tiles + 1) // 2), ("wg1", tiles // 2)):
        assert products.count(thread) == 3 * own


# --- Operations of several devices ------------------------------------------------------------------------------------

PULL, JOINED, WEIGHTS, SUMS = (
    config.replace(schedule="pingpong") for config in (PULL.replace(tile_m=64), JOINED, WEIGHTS, SUMS)
)
TALL = SUMS.replace(tile_m=128, stages=3, chunk_bytes=4096)
TOGETHER = TALL.replace(tile_m=256, stages=2, schedule="cooperative")
ROWS = dataclasses.replace(ONE, m=200)
SEVERAL = dataclasses.replace(ROWS, scales=("rows", "columns"), gathered=True, widths=(64, 136), container=list)
FUSED = {
    "pull": lambda: of_rows(ROWS, PULL),
    "pull, several": lambda: of_rows(SEVERAL, PULL, 2),
    "pull, cut": lambda: of_rows(dataclasses.replace(ROWS, k=264), PULL.replace(stream_k=3), 2),
    "joined": lambda: of_rows(FEW, JOINED),
    "ring": lambda: of_rows(ROWS, PULL, 3, "ring"),
    "ring, cut": lambda: of_rows(dataclasses.replace(ROWS, k=264), PULL.replace(stream_k=3), 2, "ring"),
    "weights n": lambda: of_weights("n", WEIGHTS, m=200),
    "weights k": lambda: of_weights("k", WEIGHTS, m=200),
    "scatter m": lambda: of_sums("m", SUMS),
    "scatter m, few rows of a tile": lambda: of_sums("m", TALL, 2, block=(136, 136)),
    "scatter m, batch": lambda: of_sums("m", SUMS, 2, batch=2),
    "scatter n": lambda: of_sums("n", SUMS, block=(72, 72)),
    "scatter n, f32": lambda: of_sums("n", SUMS, 2, block=(72, 72), k=640, dtype=jnp.float32),
    "ring m": lambda: of_sums("ring m", SUMS),
    "ring n": lambda: of_sums("ring n", SUMS, block=(72, 72)),
    "spread m": lambda: of_sums("spread m", SUMS, 2, block=(72, 136)),
    "spread n": lambda: of_sums("spread n", SUMS, block=(16, 72)),
    "one shot": lambda: of_sums("one shot", SUMS, block=(72, 136)),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operations_are_clean(name):
    kernel = FUSED[name]()
    # First fast copies with many tiles per CTA; then other settings.
    kernel.run(cores=1, completion="eager", scheduler="pct", seed=1)
    kernel.run(cores=3, completion="random", scheduler="random", seed=2)


@pytest.mark.parametrize("name", ["scatter m", "ring m", "one shot"])
def test_one_cta_at_a_time_is_enough(name):
    """CTAs draw their tiles, so a CTA that has not started holds no tile."""
    FUSED[name]().run(cores=3, resident=1, scheduler="pct", completion="random")


@pytest.mark.parametrize("config", [TALL, TOGETHER], ids=["in turn", "together"])
def test_one_shot_of_fewer_rows_than_a_block(config):
    """16 of a part's 128 rows arrive; the block of the other rows is not read. One warpgroup does all of a tile."""
    of_sums("one shot", config, 2, block=(16, 136)).run(cores=1)


# --- Injected defects -------------------------------------------------------------------------------------------------


def launched(config: overlap.Config, shape: tuple[int, int, int], cores: int, addend: bool = False) -> Kernel:
    """Traces the kernel of a plain product anew; `overlap.matmul` would reuse an earlier trace."""
    (m, n, k), plan = shape, LaunchPlan(MATMUL, PLAIN, jnp.float32, Target("cpu", "cpu", cores), config)
    lhs, rhs, more = integers(1, m, k), integers(2, k, n), integers(3, m, n) if addend else None
    function = jax.jit(lambda *given: product.launch(Operands(lhs, (rhs,), addends=given or None), plan))
    expected = oracle_of(lhs, rhs, addend=more if addend else 0.0)
    return Kernel(
        lambda: function(*([more] if addend else [])),
        lambda result: np.testing.assert_array_equal(in_f32(result), expected),
    )


# Three k steps in two stages: each tile begins in a different stage than the previous tile.
PROGRAMS = {  # cores, kernel
    "one": (1, lambda: launched(TURNS, (320, 128, 192), 1)),
    "two cores": (2, lambda: launched(TURNS, (640, 128, 192), 2)),
    "addend": (1, lambda: launched(TURNS, (320, 128, 192), 1, addend=True)),
    "cut": (4, lambda: launched(TURNS.replace(stream_k=3), (320, 128, 328), 4)),
    "ring": (1, lambda: of_rows(ROWS, PULL, 2, "ring")),
    "scatter": (1, lambda: of_sums("m", SUMS.replace(stages=3), 2, block=(72, 136))),
    "scatter, two cores": (2, lambda: of_sums("m", SUMS.replace(stages=3), 2, block=(72, 136))),
    "one shot": (2, lambda: of_sums("one shot", SUMS, 2, block=(72, 136))),
}


def run_some(kernel: Kernel, cores: int, seeds: int) -> None:
    for seed in range(seeds):
        scheduler = ("pct", "random")[seed % 2]
        kernel.run(cores=cores, completion=COMPLETIONS[seed % 3], scheduler=scheduler, seed=seed, step_limit=100_000)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_without_defects_are_clean(program):
    cores, kernel = PROGRAMS[program]
    run_some(kernel(), cores, 3)


@pytest.mark.parametrize(("program", "words", "defect"), INJECTED.values(), ids=INJECTED)
def test_each_injected_defect_is_reported(program, words, defect, monkeypatch):
    """Either the emulator reports the defect, or the result differs from the oracle."""
    defect(monkeypatch)
    cores, kernel = PROGRAMS[program]
    with pytest.raises((EmulationError, AssertionError), match=words):
        run_some(kernel(), cores, 12)


@pytest.mark.parametrize(("program", "change"), HARMLESS.values(), ids=HARMLESS)
def test_what_does_no_harm(program, change, monkeypatch):
    """Runs the program with the change: the emulator must report nothing. If it ever does, the change is a defect."""
    change(monkeypatch)
    cores, kernel = PROGRAMS[program]
    run_some(kernel(), cores, 4)


# --- Limits -----------------------------------------------------------------------------------------------------------


def check_limits(target: Target, config: overlap.Config) -> None:
    mainloop_of(target).check_config(OperandTypes(512, BF16, BF16, BF16), config, target)


@pytest.mark.parametrize(
    ("target", "fields", "words"),
    [
        (H200, {"tile_m": 256}, "`tile_m` must be at most 128 with schedule='pingpong'.*got 256"),
        (H200, {"tile_m": 128, "tile_n": 256}, "128 × 256 .*needs 256 registers.*160 is the most: reduce `tile_m`"),
        (H200, {"tile_m": 128, "tile_n": 192}, "needs 192 registers"),
        (H200, {"tile_n": 96}, "`tile_n` must be a multiple of 64"),
        (H200, {"tile_n": 256, "stages": 6}, "bytes of shared memory"),
        (B200, {"tile_m": 128}, "`schedule` must be 'cooperative' on NVIDIA B200.*got 'pingpong': leave it out"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(target, fields, words):
    with pytest.raises(ValueError, match=words):
        check_limits(target, TURNS.replace(**fields))


def test_what_fits_half_a_tile_each_may_not_fit_a_whole_one():
    check_limits(H200, TURNS.replace(tile_m=128))
    check_limits(H200, TURNS.replace(tile_n=256))
    check_limits(H200, TURNS.replace(tile_m=128, tile_n=256, schedule="cooperative"))
    check_limits(B200, TURNS.replace(tile_m=128, schedule="cooperative"))


@pytest.mark.parametrize("schedule", ["x", None, 1, "Pingpong", ("pingpong",)])
def test_unknown_schedules(schedule):
    with pytest.raises(ValueError, match="`schedule` must be 'cooperative' or 'pingpong', got"):
        overlap.Config(schedule=schedule)


def test_a_given_configuration_that_cannot_run_is_an_error_of_the_call():
    lhs, rhs = jnp.zeros((256, 64), BF16), jnp.zeros((64, 256), BF16)
    with pytest.raises(ValueError, match="at most 128 with schedule='pingpong'"), emulate():
        overlap.matmul(lhs, rhs, config=TURNS.replace(tile_m=256), implementation="fused")
