"""Products of small integers for the tests of `overlap.matmul`: one trace, several schedules, every bit compared."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import overlap
from overlap.emulation import emulate
from overlap.kernels.config import tile_k
from overlap.kernels.hopper.limits import warpgroup_tile
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target, emulating
from overlap.primitives.integers import ceil_div
from tests.ops.product_cases import handed_over, in_f32, integers, normal, oracle_of

F16, BF16, F32, E4M3, E5M2 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
# Each runs the kernel twice, on the same memory and flags; the first time all operands are NaN.
SCHEDULES = (
    {"completion": "eager", "scheduler": "pct", "laps": 2},
    {"completion": "late", "scheduler": "round_robin", "laps": 2},
    {"completion": "random", "scheduler": "random", "laps": 2},
)


@dataclasses.dataclass(frozen=True)
class Product:
    """One call of `overlap.matmul` with a configuration.

    Attributes:
      cores: the cores of the emulated device.
      shape: m, n, k.
      config: the configuration; None: the library chooses.
      layout: "n" or "t" (transposed) for `lhs` and `rhs`.
      batch: the leading dimensions of `lhs`; `rhs_batch`, `addend_batch`: those of `rhs` and of the addend.
      dtype: of `lhs`; `rhs_dtype`: of `rhs`, if another; `out`: of the result.
      epilogue: whether the call has an addend, a bias, an activation, and a scale for each row and for each column.
      blackwell: whether the emulated device is a Blackwell GPU; otherwise it is a Hopper GPU.
    """

    cores: int
    shape: tuple[int, int, int]
    config: overlap.Config | None
    layout: str = "nn"
    batch: tuple[int, ...] = ()
    rhs_batch: tuple[int, ...] = ()
    addend_batch: tuple[int, ...] = ()
    dtype: Any = BF16
    rhs_dtype: Any = None
    out: Any = F32
    epilogue: bool = False
    blackwell: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        left, right = (letter == "t" for letter in self.layout)
        return {"transpose_lhs": left, "transpose_rhs": right, "preferred_element_type": self.out}

    def operands(self, draw: Any = integers) -> dict[str, Any]:
        """Draws the arrays of the call. Scales are powers of two, so sums of integers stay exact in f32."""
        (m, n, k), (left, right) = self.shape, (letter == "t" for letter in self.layout)
        given = {
            "lhs": draw(1, *self.batch, *((k, m) if left else (m, k)), dtype=self.dtype),
            "rhs": draw(2, *self.rhs_batch, *((n, k) if right else (k, n)), dtype=self.rhs_dtype or self.dtype),
        }
        if self.epilogue:
            given |= {"bias": integers(5, n), "addend": integers(6, *self.addend_batch, m, n)}
            powers = [2.0 ** np.random.default_rng(7).integers(-2, 2, size) for size in ((m, 1), (n,))]
            given |= dict(zip(("lhs_scale", "rhs_scale"), (jnp.asarray(x, F32) for x in powers), strict=True))
        return given

    @functools.cached_property
    def call(self) -> Any:
        """The jitted call, a function of the arrays by name."""
        more = {"activation": jax.nn.relu} if self.epilogue else {}
        return jax.jit(
            lambda given: overlap.matmul(**given, **more, **self.keywords, config=self.config, implementation="fused")
        )

    def exact(self, given: dict[str, Any]) -> np.ndarray:
        more = {"activation": lambda x: np.maximum(x, 0)} if self.epilogue else {}
        return oracle_of(**given, **more, **self.keywords)

    def emulated(self, given: dict[str, Any], **settings: Any) -> tuple[np.ndarray, Any]:
        """Returns the result of one emulated run, and the run."""
        on = emulating("blackwell") if self.blackwell else contextlib.nullcontext()
        with on, emulate(cores=self.cores, **settings) as run:
            result = np.asarray(self.call(given))
            run.check()
        return result, run

    def check(self, settings: dict[str, Any] = SCHEDULES[0]) -> Any:
        """Runs the product under a schedule, and compares every bit of the result. Returns the emulator's `Run`.

        A k step that is left out, taken twice or added to another tile shows in the result.
        """
        given = self.operands()
        result, run = self.emulated(given, **settings)
        assert result.dtype == self.out
        np.testing.assert_array_equal(in_f32(result), in_f32(self.exact(given).astype(self.out)))
        return run

    def check_rounding(self) -> None:
        """Asserts that results for real numbers are hardly further off than the rounded truth: sums are in f32."""
        given = self.operands(normal)
        exact, (result, _) = self.exact(given), self.emulated(given)
        ours, rounded = (np.linalg.norm(in_f32(x) - exact) for x in (result, exact.astype(self.out)))
        assert ours <= 1.02 * rounded + 1e-6 * np.linalg.norm(exact), (ours, rounded)

    # --- What the kernel should do, on Hopper ---

    @property
    def matrices(self) -> tuple[int, int]:
        """How many products are cut into tiles (of batch elements, and pieces of `split_k`), and the rows of each."""
        count = math.prod(self.batch or self.rhs_batch)
        # Batch elements of one right operand are the rows of one matrix, if no part of the epilogue is shared by them.
        is_one = self.layout[0] == "n" and not self.rhs_batch and bool(self.addend_batch or not self.epilogue)
        rows = self.shape[0] * (count if is_one else 1)
        return (1 if is_one else count) * self.config.split_k, rows

    @property
    def work(self) -> StreamK:
        """The work list that the kernel walks."""
        (_, n, k), config, (count, m) = self.shape, self.config, self.matrices
        steps = ceil_div(ceil_div(k, tile_k(self.dtype)), config.split_k)
        tiles = count * ceil_div(m, config.cluster_tile_m) * ceil_div(n, config.tile_n)
        return StreamK.on(Target("cpu", "cpu", self.cores), config, tiles, steps, may_spread=True)

    @property
    def computing(self) -> int:
        """How many warpgroups compute each tile: none computes a half that has no rows."""
        half, _ = warpgroup_tile(self.config)
        return 1 if self.config.in_turn or self.matrices[1] <= half < self.config.tile_m else 2

    @property
    def signals(self) -> int:
        """How many flags are raised: by each warpgroup with sums of a part of a tile, in each CTA of a cluster.

        None by the CTAs of a cluster that compute one tile together.
        """
        ranks = 0 if self.config.ctas_per_tile > 1 else self.config.cluster
        return ranks * self.computing * handed_over(self.work)

    @property
    def wgmmas(self) -> int:
        """How many products of warpgroups are issued, if each tile of each CTA is multiplied once."""
        return self.config.tiles_per_cluster * self.computing * self.work.tiles * self.work.k_steps
