"""How long a call takes: in a loop on the devices, without what a program costs to begin, or from Python, as it is.

The tuner, the demo and the benchmarks take all their times here. In several processes a time is the maximum over them,
so that all of them decide alike what to do next.
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

# A difference of two times that is less than this part of a program in the longer one is noise: it is measured again.
_LEAST_SHARE, _TRIES = 0.1, 5
# For the length of a loop only: what an H200 reaches, in operations and bytes per microsecond, and the least of a call.
_FLOPS_PER_US, _BYTES_PER_US, _CALL_US = 700e6, 4e6, 10.0
# A program and not an eager operation, so that it serves arrays that span processes.
_copy = jax.jit(jnp.copy)


def expected_us(problem: Problem) -> float:
    """About how long a call takes on a fast GPU. Sets the length of loops, and nothing else."""
    return _CALL_US + max(problem.flops_per_device / _FLOPS_PER_US, problem.bytes_per_device / _BYTES_PER_US)


def iterations_for(problem: Problem, launch_us: float, least: int, most: int) -> int:
    """How many calls take about `launch_us`."""
    return min(max(math.ceil(launch_us / expected_us(problem)), least), most)


def elapsed_s(launch: Callable[[], None], outputs: Callable[[], Any], count: int) -> float:
    """Seconds from the first of `count` launches until the last one's outputs are there."""
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
    """Seconds that each of `count` launches of a program adds to one before them.

    What it costs to begin and to wait for the last one, some 100 to 400 µs, is in both times and so in no result. One
    launch goes ahead of each pair of times, so that what ran before (another program, an idle gap) is in neither.

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


def calls_s(call: Callable[..., jax.Array], operands: tuple[jax.Array, jax.Array], count: int) -> float:
    """Seconds of each of `count` ordinary calls, dispatched one after another and waited for once."""
    last: list[jax.Array] = []

    def launch() -> None:
        last[:] = [call(*operands)]

    # One launch ahead, so that what ran before (another method, an idle gap) is not in the measurement.
    elapsed_s(launch, lambda: last, 1)
    return elapsed_s(launch, lambda: last, count) / count


class Loop:
    """A compiled `programs.loop_program`, and what each of its launches hands on to the next.

    Attributes:
      program: the loop; another one of the same problem may take its place and go on with the same arrays.
      state: (the operand that changes, the result); None after a launch that failed, to which it was given away.
    """

    def __init__(
        self, problem: Problem, program: Any, iterations: int, operands: tuple[jax.Array, jax.Array], out: jax.Array
    ) -> None:
        self._problem, self.program, self._iterations = problem, program, iterations
        changed, self._fixed = gathered_first(problem, *operands)
        # A launch gives away what it changes; the operands stay the caller's.
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
        """Compiles `program`, now instead of at the first launch."""
        self.program = self.program.lower(self.state, self._fixed).compile()

    def launch(self) -> None:
        """Begins one program, without waiting for it."""
        state, self.state = self.state, None
        self.state = self.program(state, self._fixed)

    def call_s(self, launches: int) -> float:
        """Seconds of one call, from the difference of 1 + `launches` programs to one; with 0, of one as it is."""

        def seconds(count: int) -> float:
            return elapsed_s(self.launch, lambda: self.state, count)

        return (marginal_s(seconds, launches) if launches else seconds(1)) / self._iterations

    def load(self, seconds: float) -> None:
        """Gives the devices work for about so long, without waiting: until clocks and temperatures have settled."""
        if seconds > 0:
            program_s = self.call_s(1) * self._iterations
            # A count, not a clock, so that all processes do the same.
            for _ in range(int(seconds / max(program_s, 1e-6))):
                self.launch()
