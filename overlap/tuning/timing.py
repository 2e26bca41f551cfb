"""Measures how long a call takes: in a loop on the devices, without the cost of starting a program, or from Python.

The tuner, the demo and the benchmarks take all their times here. With several processes, a time is the maximum over the
processes. So all processes have the same numbers, and decide the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from overlap.choice.problem import Problem
from overlap.tuning.operations import gathered_first

# _LEAST_SHARE: if the difference of two times is less than this fraction of a program's average time in the longer run,
# the difference is noise, and both times are measured again, up to _TRIES times.
_LEAST_SHARE = 0.1
_TRIES = 5
# What an H200 reaches per microsecond, and the least time of a call. Only used to choose the length of loops.
_FLOPS_PER_US = 700e6
_BYTES_PER_US = 4e6
_CALL_US = 10.0
# The copy is jitted, so that it works for arrays that span processes.
_copy = jax.jit(jnp.copy)


def expected_us(problem: Problem) -> float:
    """About how long a call takes on a fast GPU, in microseconds. Only used to choose the length of loops."""
    return _CALL_US + max(problem.flops_per_device / _FLOPS_PER_US, problem.bytes_per_device / _BYTES_PER_US)


def iterations_for(problem: Problem, launch_us: float, least: int, most: int) -> int:
    """How many calls take about `launch_us` microseconds, but at least `least` and at most `most`."""
    return min(max(math.ceil(launch_us / expected_us(problem)), least), most)


def elapsed_s(launch: Callable[[], None], outputs: Callable[[], Any], count: int) -> float:
    """Calls `launch` `count` times. Returns the seconds until the outputs of the last launch are computed."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("timing")
    start = time.perf_counter()
    for _ in range(count):
        launch()
    jax.block_until_ready(outputs())
    seconds = time.perf_counter() - start
    if jax.process_count() == 1:
        return seconds
    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))


def marginal_s(seconds: Callable[[int], float], count: int) -> float:
    """Seconds that each of `count` launches of a program adds to one launch.

    It times one launch, and then 1 + `count` launches in a row. The cost of starting, and of waiting for the last
    launch, is 100 to 400 µs. Both times contain this cost, so their difference does not. An untimed launch goes ahead
    of each pair of times, so that neither time contains what ran before (another program, or an idle gap).

    Args:
      seconds: a function of the number of launches in a row. It returns how long they take, until the last is done.
      count: at least 1.
    """
    average = math.nan
    for _ in range(_TRIES):
        seconds(1)
        short, long = seconds(1), seconds(1 + count)
        average = long / (1 + count)
        if (marginal := (long - short) / count) >= _LEAST_SHARE * average:
            return marginal
    return average  # Contains the cost of starting: rather too long than too short.


def calls_s(call: Callable[..., jax.Array], operands: tuple[jax.Array, jax.Array], count: int) -> float:
    """Seconds per call of `count` ordinary calls, dispatched one after another, with one wait at the end."""
    last: list[jax.Array] = []

    def launch() -> None:
        last[:] = [call(*operands)]

    # One untimed launch, so that the time does not contain what ran before (another method, or an idle gap).
    elapsed_s(launch, lambda: last, 1)
    return elapsed_s(launch, lambda: last, count) / count


class Loop:
    """A `programs.loop_program`, and the arrays that each of its launches passes on to the next.

    Attributes:
      program: the loop. It may be replaced by another loop of the same problem, which continues with the same arrays.
      state: (the operand that changes, the result). None after a launch that failed, since both were donated.
    """

    def __init__(
        self, problem: Problem, program: Any, iterations: int, operands: tuple[jax.Array, jax.Array], out: jax.Array
    ) -> None:
        """Prepares launches.

        Args:
          problem: of each call in the loop.
          program: a function ((changed operand, result), fixed operand) -> (changed operand, result).
          iterations: the number of calls in one launch.
          operands: (lhs, rhs). The loop writes to one of them between its calls: to the gathered one, or to `lhs`.
          out: memory for the result.
        """
        self._problem = problem
        self.program = program
        self._iterations = iterations
        changed, self._fixed = gathered_first(problem, *operands)
        # A launch donates `state`. The copy keeps the caller's operand valid.
        self.state: tuple[jax.Array, jax.Array] | None = (_copy(changed), out)

    @property
    def operands(self) -> tuple[jax.Array, jax.Array]:
        """(lhs, rhs) as the last launch left them."""
        assert self.state is not None
        return gathered_first(self._problem, self.state[0], self._fixed)

    @property
    def out(self) -> jax.Array:
        """The result of the last call."""
        assert self.state is not None
        return self.state[1]

    def compile(self) -> None:
        """Compiles `program` now, not at its first launch."""
        self.program = self.program.lower(self.state, self._fixed).compile()

    def launch(self) -> None:
        """Starts the program, and does not wait for it."""
        state = self.state
        self.state = None
        self.state = self.program(state, self._fixed)

    def call_s(self, launches: int) -> float:
        """Measures the seconds of one call: by `marginal_s` of `launches` programs; with 0, by timing one program."""

        def seconds(count: int) -> float:
            return elapsed_s(self.launch, lambda: self.state, count)

        return (marginal_s(seconds, launches) if launches else seconds(1)) / self._iterations

    def load(self, seconds: float) -> None:
        """Starts work of about `seconds` on the devices, without waiting, so that clocks and temperatures settle."""
        if seconds > 0:
            program_s = self.call_s(1) * self._iterations
            # Count launches instead of reading a clock, so that all processes do the same.
            for _ in range(int(seconds / max(program_s, 1e-6))):
                self.launch()
