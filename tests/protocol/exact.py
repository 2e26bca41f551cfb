"""Kernels with exact results, and repeated runs of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from overlap.emulation import EmulationError, emulate
from overlap.kernels.target import emulating

BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is traced only once: when `call` first runs. Defects that are active then stay in the kernel.

    Attributes:
      call: runs the kernel on its own operands.
      check: raises AssertionError if the result is not exact.
    """

    call: Callable[[], Any]
    check: Callable[[Any], None]

    def run(self, **settings: Any) -> Any:
        """Emulates one run and checks that the result is exact. `settings`: keywords of `emulate`."""
        with emulate(**settings) as run:
            result = self.call()
            run.check()
        self.check(result)
        return run

    def report(self, seeds: int = 18, step_limit: int = 500_000, **settings: Any) -> EmulationError | None:
        """Runs the kernel with several seeds (and values of `completion`, if not given). Returns the first error."""
        for seed in range(seeds):
            # A thread can fall behind the copies only if these are fast ("eager").
            varied = {"completion": ("eager", "late", "random")[seed % 3]} | settings
            try:
                with emulate(seed=seed, step_limit=step_limit, **varied):
                    jax.block_until_ready(self.call())
            except EmulationError as report:
                return report
        return None


def integers(seed: int, *shape: int, dtype: Any = BF16, most: int = 3) -> np.ndarray:
    """Draws small integers. Their products are exact in f32, in any order of summation."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(dtype)


def in_f32(x: Any) -> np.ndarray:
    """Returns the values of an array of any dtype."""
    return np.asarray(x).astype(np.float32)


def equals(expected: Any, dtype: Any) -> Callable[[Any], None]:
    """Returns a check that compares every bit with arrays that are rounded to `dtype`."""

    def check(results: Any) -> None:
        for result, exact in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(in_f32(result), in_f32(exact.astype(dtype)))

    return check


def on_blackwell(kernel: Kernel) -> Kernel:
    """Returns the same kernel, traced for a Blackwell GPU."""

    def call() -> Any:
        with emulating("blackwell"):
            return kernel.call()

    return dataclasses.replace(kernel, call=call)
