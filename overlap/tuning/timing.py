"""One problem on the devices: what is compiled, whether its result is right, how long it takes.

A configuration is one compiled program: a loop of calls on the device, each of which reads an element of the result
before it, so that XLA can neither hoist nor drop a call. The same program is checked and timed, and what is checked is
what the loop left behind.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.tuning.operations import AXIS, OPERATIONS, shapes

# A result may err by twice as much as XLA's. The floor is for f32 results, where both errors are rounding noise; one
# tile of depth left out of 28672 errs by 5e-2.
ERROR_FACTOR, ERROR_FLOOR = 2.0, 1e-4
# Of a sum of f8 products, which Hopper's tensor cores keep in some 14 bits while XLA may take another way; times √k.
FLOAT8_ERROR_FLOOR = 0.6 * 2.0**-13
# A difference of two times that is less than this part of a program in the longer one is noise: it is measured again.
_LEAST_SHARE, _TRIES = 0.1, 5
# For the length of a loop only: what an H200 reaches, in operations and bytes per microsecond.
_FLOPS_PER_US, _BYTES_PER_US, _CALL_US = 700e6, 4e6, 5.0


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long is measured.

    Attributes:
      launch_us: about how long one program runs; sets the length of its loop.
      max_iterations: the longest loop.
      launches: programs per sample, behind one that is not counted; 0 where times say nothing: one program, as it is.
      warm_up_s: how long the devices work before the first sample.
    """

    launch_us: float = 10_000.0
    max_iterations: int = 64
    launches: int = 2
    warm_up_s: float = 1.0

    @staticmethod
    def emulated() -> Effort:
        """For CPU devices, where a time says nothing: two calls, so that the loop is a loop."""
        return Effort(0.0, 2, 0, 0.0)

    def iterations(self, problem: Problem) -> int:
        """Calls per loop."""
        call_us = _CALL_US + max(problem.flops_per_device / _FLOPS_PER_US, problem.bytes_per_device / _BYTES_PER_US)
        return min(max(math.ceil(self.launch_us / call_us), 2), self.max_iterations)


def marginal_s(seconds: Callable[[int], float], count: int) -> float:
    """Seconds that each of `count` launches of a program adds to one before them.

    What it costs to begin and to wait for the last one, some 100 µs, is in both times and so in no result. One launch
    goes ahead of each pair of times, so that what ran before (another program, an idle gap) is in neither.

    Args:
      seconds: how long so many launches in a row take, until the last is done.
      count: at least 1.
    """
    average = math.nan
    for _ in range(_TRIES):
        seconds(1)
        short, long = seconds(1), seconds(1 + count)
        average = long / (1 + count)
        if (marginal := (long - short) / count) >= _LEAST_SHARE * average:
            return marginal
    return average  # With that cost in it: rather too long than too short.


class Bench:
    """The operands of one problem, an oracle, and one state that all its programs hand on to each other."""

    def __init__(self, problem: Problem, devices: Sequence[Any], effort: Effort, seed: int = 0) -> None:
        if len(devices) != problem.devices:
            raise ValueError(f"{problem} needs {problem.devices} devices, got {len(devices)}")
        self.problem, self.effort = problem, effort
        self.operation = OPERATIONS[problem.op]
        self.iterations = effort.iterations(problem)
        self.error_bound = math.nan  # Nothing passes before XLA's error is known.
        auto = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((problem.devices,), (AXIS,), axis_types=auto, devices=devices)
        op = self.operation
        self._prepare = self._map(self._signed, (op.lhs_spec, P()), op.lhs_spec)
        self._oracle = self._map(self._in_f32, (op.lhs_spec, op.rhs_spec), op.out_spec)
        self._compare = self._map(self._relative_error, (op.lhs_spec, op.rhs_spec, op.out_spec, op.out_spec, P()), P())
        self.lhs, self.rhs = self._map(self._draw, (P(),), (op.lhs_spec, op.rhs_spec))(np.uint32(seed))
        self._expected = self._oracle(self.lhs, self.rhs)
        self._blank = self._map(lambda out: out.astype(problem.out_dtype), (op.out_spec,), op.out_spec)
        self._state: tuple[jax.Array, jax.Array] | None = None
        self._checks = seed

    @property
    def error_floor(self) -> float:
        """The relative error that is allowed in any case."""
        if jnp.dtype(self.problem.dtype).itemsize > 1:
            return ERROR_FLOOR
        return FLOAT8_ERROR_FLOOR * math.sqrt(self.problem.k)

    # --- Programs: each of these runs inside shard_map ----------------------------------------------------------------

    def _map(self, function: Any, in_specs: Any, out_specs: Any, **kwargs: Any) -> Any:
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, **kwargs)

    def _draw(self, seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), lax.axis_index(AXIS)))
        # Normal: on zeros and small integers the same kernels run faster.
        return tuple(
            jax.random.normal(key, shape, jnp.float32).astype(self.problem.dtype)
            for key, shape in zip(keys, shapes(self.problem), strict=True)
        )

    def _in_f32(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        # Else XLA sees through the casts, and multiplies f8 operands as such.
        lhs, rhs = lax.optimization_barrier((lhs.astype(jnp.float32), rhs.astype(jnp.float32)))
        with jax.default_matmul_precision("highest"):
            return self.operation.call(self.problem, lhs, rhs, None, "xla")

    def _signs(self, seed: jax.Array) -> jax.Array:
        rows = self.problem.devices * self.problem.m
        return jnp.where(jax.random.bernoulli(jax.random.key(seed), shape=(rows,)), 1.0, -1.0)

    @property
    def _lhs_rows_axis(self) -> int:
        return -1 if self.problem.transpose_lhs else -2

    def _signed(self, lhs: jax.Array, seed: jax.Array) -> jax.Array:
        """Rows with random signs: what another run left in memory then cannot pass for this one's result."""
        m = self.problem.m
        first = lax.axis_index(AXIS) * m if self.operation.lhs_spec else 0
        signs = lax.dynamic_slice(self._signs(seed), (first,), (m,)).astype(jnp.float32)
        shape = (m,) if self.problem.transpose_lhs else (m, 1)
        return (lhs.astype(jnp.float32) * signs.reshape(shape)).astype(lhs.dtype)

    def _relative_error(
        self, lhs: jax.Array, rhs: jax.Array, out: jax.Array, expected: jax.Array, seed: jax.Array
    ) -> jax.Array:
        """‖out − signs · expected‖ / ‖expected‖, with the rows that the loop changed computed anew."""
        signs, blocks, m = self._signs(seed), self.problem.devices, self.problem.m
        if tuple(self.operation.out_spec)[:1] == (AXIS,):  # Each device has rows of its own, not those of all.
            signs, blocks = lax.dynamic_slice(signs, (lax.axis_index(AXIS) * m,), (m,)), 1
        expected = expected * signs[:, None]
        changed = self._in_f32(lax.slice_in_dim(lhs, 0, 1, axis=lhs.ndim + self._lhs_rows_axis), rhs)
        rows = jnp.arange(blocks) * m
        expected = expected.at[..., rows, :].set(changed)
        squares = jnp.stack([jnp.sum((out.astype(jnp.float32) - expected) ** 2), jnp.sum(expected**2)])
        squares = lax.psum(squares, AXIS)
        return jnp.sqrt(squares[0] / squares[1])

    def _loop(self, config: Config | None) -> Any:
        implementation = "xla" if config is None else "fused"

        def program(state: tuple[jax.Array, jax.Array], rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
            def body(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                lhs, out = state
                element = lax.slice(out, (0,) * out.ndim, (1,) * out.ndim).astype(jnp.float32)
                # Back to the operands' distribution, so that nothing grows from call to call.
                element = jnp.clip(element * self.problem.k**-0.5, -4.0, 4.0).astype(lhs.dtype)
                lhs = lax.dynamic_update_slice(lhs, element, (0,) * lhs.ndim)
                return lhs, self.operation.call(self.problem, lhs, rhs, config, implementation)

            return lax.fori_loop(0, self.iterations, body, state)

        specs = (self.operation.lhs_spec, self.operation.out_spec)
        return self._map(program, (specs, self.operation.rhs_spec), specs, donate_argnums=0)

    # --- What the search calls ----------------------------------------------------------------------------------------

    def compile(self, config: Config | None) -> Any:
        """The compiled loop of a configuration, or of XLA's implementation (None). May be called from any thread."""
        out = jax.ShapeDtypeStruct(
            self._expected.shape, jnp.dtype(self.problem.out_dtype), sharding=self._expected.sharding
        )
        return self._loop(config).lower((self.lhs, out), self.rhs).compile()

    def error_of(self, program: Any) -> float:
        """The relative error of what a program's loop leaves behind, on operands that no other check has had."""
        self._checks += 1
        seed = np.uint32(self._checks)
        _, out = self._current_state()
        self._run(program, (self._prepare(self.lhs, seed), out))
        return float(self._compare(*self._left_behind(), seed))

    def sample_us(self, program: Any) -> float:
        """The time of one call, from one sample."""

        def seconds(launches: int) -> float:
            start = time.perf_counter()
            for _ in range(launches):
                self._run(program, self._current_state())
            jax.block_until_ready(self._state)
            return time.perf_counter() - start

        count = self.effort.launches
        return 1e6 * (marginal_s(seconds, count) if count else seconds(1)) / self.iterations

    def warm_up(self, program: Any) -> None:
        """Keeps the devices busy until their clocks have settled."""
        end = time.perf_counter() + self.effort.warm_up_s
        while time.perf_counter() < end:
            jax.block_until_ready(self._run(program, self._current_state()))

    def _current_state(self) -> tuple[jax.Array, jax.Array]:
        if self._state is None:
            self._state = (self._prepare(self.lhs, np.uint32(self._checks)), self._blank(self._expected))
        return self._state

    def _left_behind(self) -> tuple[jax.Array, ...]:
        lhs, out = self._current_state()
        return lhs, self.rhs, out, self._expected

    def _run(self, program: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        self._state = None  # Given away; if the program fails, there is none.
        new = self._state = program(state, self.rhs)
        return new
