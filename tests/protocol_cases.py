"""Helpers of the protocol tests: a small instance of each fused kernel, its exact result, and repeated runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.problem import Problem
from overlap.emulation import EmulationError, emulate
from tests import several_sides_cases
from tests.oracle import make_mesh, on_mesh
from tests.product_cases import integers, oracle_of
from tests.rhs_cases import fused, mapped, product
from tests.scatter_cases import ALONG
from tests.several_sides_cases import Form

# With these chunks, each CTA copies several chunks of each peer's shard.
PULL = overlap.Config(tile_n=64, stages=2, chunk_bytes=4096)
JOINED = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True, chunk_bytes=1024)
WEIGHTS = overlap.Config(tile_n=128, stages=2, chunk_bytes=1024)
# With this configuration, a tile has two boxes, and each box has several chunks.
SUMS = overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_bytes=1024)
# Names of `matmul_all_reduce` kernels for `of_sums`. SPREAD sums blocks of columns; "spread m" sums blocks of rows.
SPREAD, ONE_SHOT = "spread n", "one shot"
# The name for `of_sums` of a reduce-scatter whose partial sums travel from device to device.
SUMS_BY_RING = "ring m"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is traced only once: when `call` first runs. Patches that are active then stay in the kernel.

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


def of_rows(form: Form, config: overlap.Config, devices: int = 3, transport: str | None = None) -> Kernel:
    """Returns the kernel of a call of `all_gather_lhs_matmul`."""
    mesh, arrays = make_mesh(x=devices), several_sides_cases.operands(form, devices)
    given = several_sides_cases.put(form, mesh, arrays)
    body = several_sides_cases.call(form, implementation="fused", config=config, transport=transport)
    function = several_sides_cases.on_mesh(form, mesh, body)
    return Kernel(lambda: function(*given), lambda results: several_sides_cases.assert_exact(form, arrays, results))


def of_weights(
    along: str, config: overlap.Config = WEIGHTS, devices: int = 3, *, m: int = 64, shard: tuple[int, int] = (64, 64)
) -> Kernel:
    """Returns the kernel of a call of `all_gather_rhs_matmul`."""
    lhs, rhs = product(devices, along, m, shard)
    function = mapped(make_mesh(x=devices), along, fused(along, config))

    def check(result: Any) -> None:
        expected = oracle_of(lhs, rhs).astype(jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(result, np.float32), expected.astype(np.float32))

    return Kernel(lambda: function(lhs, rhs), check)


def of_sums(
    along: str,
    config: overlap.Config = SUMS,
    devices: int = 3,
    *,
    block: tuple[int, int] = (16, 136),
    k: int = 72,
    batch: int | None = None,
    dtype: Any = jnp.bfloat16,
    mesh: Any = None,
    axis: str = "x",
) -> Kernel:
    """Returns the kernel of a call of `matmul_reduce_scatter` or `matmul_all_reduce`, and how to check its result.

    `along` is "m", "n", "ring m" or "ring n" for `matmul_reduce_scatter`, and "spread m", "spread n" or "one shot" for
    `matmul_all_reduce`. `block` is the (rows, columns) of the block that each device sums; `k` is the number of columns
    of `lhs` on each device. The check compares the results of all devices with the exact product.
    """
    mesh, (rows, columns), dimension = mesh or make_mesh(x=devices), block, along[-1]
    if by_ring := along.startswith("ring"):
        along = dimension
    m, n = devices * rows if dimension == "m" else rows, devices * columns if dimension == "n" else columns
    lhs, rhs = integers(0, *([batch] if batch else []), m, devices * k), integers(1, devices * k, n)
    keywords = {"preferred_element_type": dtype, "implementation": "fused"}
    leading = [None] if batch else []
    if everywhere := along not in ALONG:
        keywords["config"] = config.replace(one_shot=along == ONE_SHOT)
        problem = Problem("matmul_all_reduce", m, n, k, "bfloat16", "bfloat16", devices)
        assert along == ONE_SHOT or problem.scattered == dimension
    else:
        transport = "ring" if by_ring else None
        keywords |= {"config": config, "dimension": ALONG.index(along), "transport": transport}

    def summed(a: jax.Array, b: jax.Array) -> jax.Array:
        if everywhere:
            return overlap.matmul_all_reduce(a, b, axis, **keywords)[None]
        return overlap.matmul_reduce_scatter(a, b, axis, **keywords)

    in_specs, of_result = P(*leading, None, axis), (axis, None) if along == "m" else (None, axis)
    out_specs = P(axis) if everywhere else P(*leading, *of_result)
    function = on_mesh(mesh, summed, (in_specs, P(axis, None)), out_specs)

    def check(result: Any) -> None:
        # k is small, so parts are exact in bfloat16.
        expected = oracle_of(lhs, rhs).astype(dtype).astype(np.float32)
        expected = np.broadcast_to(expected, (devices, *expected.shape)) if everywhere else expected
        np.testing.assert_array_equal(np.asarray(result, np.float32), expected)

    return Kernel(lambda: function(lhs, rhs), check)


ONE = Form(72, (64,), 136, container=None)
FEW = Form(16, (136,), 136, container=None)
KERNELS: dict[str, Callable[[int], Kernel]] = {
    "pull": lambda devices: of_rows(ONE, PULL, devices),
    "pull, scales": lambda devices: of_rows(dataclasses.replace(ONE, scales=("rows",)), PULL, devices),
    "pull, gathered": lambda devices: of_rows(dataclasses.replace(ONE, gathered=True), PULL, devices),
    "joined": lambda devices: of_rows(FEW, JOINED, devices),
    "joined, scales": lambda devices: of_rows(dataclasses.replace(FEW, scales=("rows",)), JOINED, devices),
    "rhs n": lambda devices: of_weights("n", devices=devices),
    "rhs k": lambda devices: of_weights("k", devices=devices),
    "scatter m": lambda devices: of_sums("m", devices=devices),
    "scatter n": lambda devices: of_sums("n", devices=devices),
    SPREAD: lambda devices: of_sums(SPREAD, devices=devices, block=(16, 72)),
    ONE_SHOT: lambda devices: of_sums(ONE_SHOT, devices=devices),
    "ring": lambda devices: of_rows(ONE, PULL, devices, "ring"),
}


@functools.cache
def clean(name: str, devices: int = 3) -> Kernel:
    """Returns a kernel of `KERNELS`, traced once and shared by all tests that patch nothing."""
    return KERNELS[name](devices)
