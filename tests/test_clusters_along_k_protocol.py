"""Clusters along k: programs with injected defects, which the emulator or the result reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.emulation import EmulationError
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels.operations import PLAIN
from overlap.kernels.target import Target
from overlap.single_gpu import product
from overlap.single_gpu.matmul import MATMUL
from tests.along_k_defects import HARMLESS, INJECTED
from tests.product_cases import in_f32, integers, oracle_of
from tests.protocol_cases import Kernel

TWO = overlap.Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="k")
SWAPPED = TWO.replace(tile_m=72, swap_operands=True)
COMPLETIONS = ("late", "eager", "random")
F32, BF16 = jnp.float32, jnp.bfloat16


def launched(config: overlap.Config, shape: tuple[int, int, int], cores: int, out: object = F32) -> Kernel:
    """Traces a product alone, anew."""
    m, n, k = shape
    plan = LaunchPlan(MATMUL, PLAIN, out, Target("cpu", "cpu", cores), config)
    lhs, rhs = integers(1, m, k), integers(2, k, n)
    expected = oracle_of(lhs, rhs).astype(out)
    function = jax.jit(lambda: product.launch(Operands(lhs, (rhs,)), plan))
    return Kernel(function, lambda result: np.testing.assert_array_equal(in_f32(result), in_f32(expected)))


FEW_ROWS = TWO.replace(tile_m=128, tile_n=64)  # Of 64 rows, each tile has one warpgroup tile.
# All k steps are those of one CTA, times the number of CTAs. Three k steps in two stages: each tile begins in a
# different stage than the previous tile.
PROGRAMS = {  # config, rows, columns, k steps of a CTA, dtype of the result
    "one": (TWO, 64, 128, 2, F32),
    "tiles": (TWO, 64, 3 * 128, 3, F32),
    "a k step each": (TWO.replace(stages=3), 64, 4 * 128, 1, F32),
    "uneven": (TWO, 64, 128, 1.5, F32),
    "no boxes": (FEW_ROWS, 64, 64, 2, BF16),
    "blocks": (TWO.replace(tile_m=256, tile_n=64), 256, 64, 2, F32),
    "swapped": (SWAPPED, 100, 128, 2, BF16),
    "132 cores": (TWO, 8 * 64, 9 * 128, 1, F32),
}


def program(name: str, ctas: int) -> Kernel:
    config, rows, columns, k_steps, out = PROGRAMS[name]
    k, cores = int(k_steps * ctas) * 64, _cores(name, ctas)
    return launched(config.replace(cluster=ctas), (rows, columns, k), cores, out)


def _cores(name: str, ctas: int) -> int:
    return 132 if name == "132 cores" else ctas


def run_some(kernel: Kernel, cores: int, seeds: int) -> None:
    for seed in range(seeds):
        scheduler = ("pct", "random")[seed % 2]
        kernel.run(cores=cores, completion=COMPLETIONS[seed % 3], scheduler=scheduler, seed=seed, step_limit=100_000)


# The defects of the barriers with both sizes.
BOTH = (
    "sums not awaited", "sums not told", "readers not awaited before the next loads", "readers not awaited at the end",
    "read told before it is read", "read told before the last tile is read",
)  # fmt: skip
assert set(BOTH) <= INJECTED.keys()


def with_two_and_four(cases: dict[str, tuple], both: Iterable[str] = ()) -> Callable[..., pytest.MarkDecorator]:
    """Gives each case to a test with clusters of two and of four CTAs; one of the two is slow, but not of `both`."""
    of_case = [
        pytest.param(*case, ctas, id=f"{name}-{ctas}", marks=[] if in_turn or name in both else pytest.mark.slow)
        for number, (name, case) in enumerate(cases.items())
        for ctas, in_turn in ((2, number % 2 == 0), (4, number % 2 == 1))
    ]
    return functools.partial(pytest.mark.parametrize, argvalues=of_case)


# `test_on_an_h200` runs the program of 132 cores without defects.
@with_two_and_four({name: (name,) for name in PROGRAMS if name != "132 cores"}, both=["tiles"])(("name", "ctas"))
def test_programs_without_defects_are_clean(name, ctas):
    run_some(program(name, ctas), ctas, 6)


@pytest.mark.one_jax
@with_two_and_four(INJECTED, BOTH)(("name", "words", "defect", "ctas"))
def test_each_injected_defect_is_reported(name, words, defect, ctas, monkeypatch):
    """The emulator reports the defect, the result differs from the oracle, or jax cannot make the kernel."""
    kernel = program(name, ctas)
    defect(monkeypatch)
    with pytest.raises((EmulationError, AssertionError, ValueError, TypeError), match=words):
        run_some(kernel, _cores(name, ctas), 12)


@pytest.mark.one_jax
@with_two_and_four(HARMLESS)(("name", "change", "ctas"))
def test_what_does_no_harm(name, change, ctas, monkeypatch):
    """Runs the program with the change: the emulator must report nothing. If it ever does, the change is a defect."""
    kernel = program(name, ctas)
    change(monkeypatch)
    run_some(kernel, _cores(name, ctas), 4)
