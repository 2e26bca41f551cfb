"""Checks and times the competing methods of one problem, in turns: in a loop on the devices, and per call from Python.

For each method it measures:

- *loop*: the time of a call in a program of `iterations` calls (`lax.fori_loop`). One program is timed, then
  1 + `launches` programs in a row. The difference is divided by the calls of `launches` programs. The cost of starting
  and waiting, 100 to 400 µs, is in both times, so it is not in the result.

  Before each call, one element of the previous result is written into an operand, in place. So each call depends on
  the one before, and XLA can neither hoist it nor fold the write into the matmul. The write is one tiny kernel per
  call. It is in the times of all methods, so ratios of short calls are nearer to 1 than the ratios of the calls alone.

  A call that communicates is alone in its iteration, together with a kernel for the loop's counter. The host launches
  each of these kernels, so a call cannot take less than the host needs (`loop_overhead_us`). Other calls are eight in
  an iteration, which XLA captures in one CUDA graph (`programs.loop_program`). Results from before 2026-11-24 have one
  call per iteration throughout.

  A loop without a product is measured too. Its time per call is `loop_overhead_us`. The compiled program is searched
  for copies of whole operands.
- *wall*: the time per call of `calls` ordinary calls, dispatched one after another, with one wait at the end.
- *first call*: the time of the first `jax.jit(call)(lhs, rhs)`, with tracing, lowering, compiling and running. For
  XLA's own product it is short, since the harness has used the same product before, and XLA has already searched for
  its algorithm.

Each method is compared with a product in f32: before it is timed, and again on the result that its timed loop leaves
behind. In each round the methods take turns in another random order. A time is the maximum over the processes, and in
each process a program's time ends when its slowest device has ended. Inputs are normally distributed and drawn on the
devices from a new seed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike

from benchmarks.loop_copies import copies_in_loops
from overlap.choice.problem import Problem
from overlap.tuning.operations import unfused
from overlap.tuning.programs import (
    Call,
    call_program,
    complete_program,
    draw_operands,
    error_bound,
    error_program,
    loop_program,
)
from overlap.tuning.timing import Loop, calls_s, iterations_for

NOT_SERVED = "NOT SERVED"
# About how long one program with a loop takes, and about how long a row of ordinary calls takes.
_LAUNCH_US = 15_000.0


@dataclasses.dataclass(frozen=True)
class Method:
    """One method that is measured: a way to compute the problem.

    Attributes:
      name: the name in the tables.
      call: (lhs, rhs) -> out, inside `jax.shard_map`.
      gathered: whether `call` gets operands that are already gathered.
      dtype: the dtype to which the operands are cast before the timing; None: they are not cast.
    """

    name: str
    call: Call
    gathered: bool = False
    dtype: DTypeLike | None = None


@dataclasses.dataclass(frozen=True)
class Settings:
    """Says how much to measure.

    Attributes:
      rounds: how often each method is timed.
      iterations: calls in one program; None: about 15 ms of work.
      launches: how many more programs the second of the two times of *loop* (above) contains than the first.
      calls: ordinary calls in a row; None: about 15 ms of work.
      warmup_s: how long the roof runs before the first round, in seconds.
      seed: the seed of the inputs.
    """

    rounds: int = 7
    iterations: int | None = None
    launches: int = 2
    calls: int | None = None
    warmup_s: float = 1.0
    seed: int = 0

    def loop_iterations(self, problem: Problem) -> int:
        """Returns how many calls one program has."""
        return self.iterations or iterations_for(problem, _LAUNCH_US, 2, 400)

    def calls_in_a_row(self, problem: Problem) -> int:
        """Returns how many ordinary calls are timed in a row."""
        return self.calls or iterations_for(problem, _LAUNCH_US, 3, 100)


@dataclasses.dataclass
class Result:
    """The result of one method.

    Attributes:
      method: the name of the method.
      status: "ok"; or a text that begins with "FAILED" (wrong result), "ERROR" (exception) or "NOT SERVED" (the method
        raised NotImplementedError: it cannot compute the problem, which is no error).
      error: the largest relative error of the method's results.
      error_bound: the largest relative error that a right result may have.
      first_call_s: seconds of the first call.
      compile_s: seconds to compile and check the method.
      loop_us: microseconds of a call in the loop, for each round.
      wall_us: microseconds of an ordinary call, for each round.
      loop_copies: the copies of whole operands in the compiled loop.
    """

    method: str
    status: str = "ok"
    error: float | None = None
    error_bound: float | None = None
    first_call_s: float | None = None
    compile_s: float | None = None
    loop_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    loop_copies: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the result is right so far, so that the method may be timed."""
        return self.status == "ok"

    @property
    def served(self) -> bool:
        """Whether the method can compute the problem."""
        return not self.status.startswith(NOT_SERVED)


@dataclasses.dataclass
class _Prepared:
    method: Method
    result: Result
    call: Callable[..., jax.Array]
    operands: tuple[jax.Array, jax.Array]
    loop: Loop


# --- One problem ------------------------------------------------------------------------------------------------------


class Session:
    """Measures the methods of one problem on one mesh, from the check to the last round."""

    def __init__(self, problem: Problem, mesh: Mesh, settings: Settings) -> None:
        self.problem, self.mesh, self.settings = problem, mesh, settings
        self.iterations = settings.loop_iterations(problem)
        self.calls = settings.calls_in_a_row(problem)
        reference = call_program(problem, functools.partial(unfused, problem), mesh)
        # Check with two different inputs, so that a result that an earlier run has left in memory does not pass.
        self._checks = [draw_operands(problem, mesh, settings.seed + 1 + i) for i in range(2)]
        error = error_program(problem, mesh)
        self.error_bound = error_bound(problem, max(float(error(*check, reference(*check))) for check in self._checks))
        self.inputs = draw_operands(problem, mesh, settings.seed)
        self.prepared: list[_Prepared] = []
        self.results: list[Result] = []
        self.loop_overhead_us: float | None = None

    def _operands(self, method: Method, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns `operands`, gathered and cast as the method needs them."""
        if self._complete(method):
            operands = complete_program(self.problem, self.mesh)(*operands)
        return operands if method.dtype is None else _cast(operands, method.dtype)

    def _error(self, method: Method, operands: tuple[jax.Array, jax.Array], out: jax.Array) -> float:
        return float(error_program(self.problem, self.mesh, self._complete(method))(*operands, out))

    def _complete(self, method: Method) -> bool:
        # On one device nothing is left to gather.
        return method.gathered and self.problem.communicates

    def add(self, method: Method) -> Result:
        """Compiles and checks a method. Errors go into its result, and the session goes on."""
        result, prepared = Result(method.name, error_bound=self.error_bound), None
        self.results.append(result)
        try:
            prepared = self._prepare(method, result)
        except NotImplementedError as reason:
            result.status = f"{NOT_SERVED}: {' '.join(str(reason).split())}"
        except Exception as error:  # Any exception of a method goes into the table.
            result.status = "ERROR " + one_line(error)
        if not agreed(result.ok) and result.ok:
            result.status = "ERROR in another process"
        if result.ok and prepared is not None:
            self.prepared.append(prepared)
        return result

    def _prepare(self, method: Method, result: Result) -> _Prepared:
        call = call_program(self.problem, method.call, self.mesh)
        errors = []
        start = time.perf_counter()
        for check in self._checks:
            operands = jax.block_until_ready(self._operands(method, check))
            called = time.perf_counter()
            out = jax.block_until_ready(call(*operands))
            result.first_call_s = result.first_call_s or time.perf_counter() - called
            errors.append(self._error(method, operands, out))
        result.error = float(np.max(errors))
        self._judge(result)
        operands = self._operands(method, self.inputs)
        loop = self._loop(method, operands, call(*operands))
        if result.ok:
            loop.compile()
            if jax.default_backend() == "gpu":
                result.loop_copies = copies_in_loops(loop.program.as_text() or "")
            result.compile_s = time.perf_counter() - start
        return _Prepared(method, result, call, operands, loop)

    def _loop(self, method: Method, operands: tuple[jax.Array, jax.Array], out: jax.Array) -> Loop:
        program = loop_program(self.problem, method.call, self.mesh, self.iterations)
        return Loop(self.problem, program, self.iterations, operands, out)

    def _judge(self, result: Result, when: str = "") -> None:
        # Written as `not <=`, so that a NaN fails.
        if result.error is None or not result.error <= self.error_bound:
            result.status = f"FAILED{when}: error {result.error:.3g} > {self.error_bound:.3g}"

    # --- Timing ---

    def _time_loop(self, prepared: _Prepared) -> float:
        return prepared.loop.call_s(self.settings.launches)

    def _time_calls(self, prepared: _Prepared) -> float:
        return calls_s(prepared.call, prepared.operands, self.calls)

    def measure_overhead(self) -> None:
        """Times the loop with a method that computes no product, for `loop_overhead_us`.

        This leaves the write of one element into an operand, and a part of the loop's counter.
        """
        empty = Method("empty", lambda lhs, rhs: lhs[..., :1, :1] * 0.5)
        loop = self._loop(empty, self.inputs, call_program(self.problem, empty.call, self.mesh)(*self.inputs))
        self.loop_overhead_us = 1e6 * float(np.median([loop.call_s(self.settings.launches) for _ in range(3)]))

    def warm_up(self) -> None:
        """Runs the roof (or, without one, another method) for `warmup_s` seconds, so that clocks settle."""
        self.during_load(self.settings.warmup_s, lambda: None)

    def during_load[T](self, seconds: float, read: Callable[[], T]) -> T:
        """Keeps the devices busy with the roof for about `seconds`, calls `read` meanwhile, and returns its result."""
        prepared = next((p for p in self.prepared if p.method.gathered), None) or next(iter(self.prepared), None)
        if prepared is None:
            return read()
        prepared.loop.load(seconds)
        answer = read()
        jax.block_until_ready(prepared.loop.state)
        return answer

    def run_round(self, number: int) -> None:
        """Times every method once, in another random order in each round.

        The order is random, not rotated. Under a power limit, a method starts at the GPU clock that the method before
        it has left; with a rotation, that would always be the same method.
        """
        for index in np.random.default_rng([self.settings.seed, number]).permutation(len(self.prepared)):
            prepared = self.prepared[index]
            result = prepared.result
            if not result.ok:
                continue
            try:
                result.loop_us.append(1e6 * self._time_loop(prepared))
                result.wall_us.append(1e6 * self._time_calls(prepared))
            except Exception as error:
                result.status = "ERROR " + one_line(error)

    def finish(self) -> None:
        """Checks the results that the timed loops have left behind."""
        for prepared in self.prepared:
            result = prepared.result
            if not result.ok:
                continue
            left_behind = self._error(prepared.method, prepared.loop.operands, prepared.loop.out)
            # Use np.max, since max() may drop a NaN.
            result.error = float(np.max([result.error or 0.0, left_behind]))
            self._judge(result, " after the loop")


@functools.partial(jax.jit, static_argnums=1)
def _cast(operands: tuple[jax.Array, jax.Array], dtype: DTypeLike) -> tuple[jax.Array, ...]:
    return tuple(operand.astype(dtype) for operand in operands)


def agreed(ok: bool) -> bool:
    """Returns whether `ok` is true in all processes.

    If one process drops a method, all processes drop it. Otherwise the others would wait for that process.
    """
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.int32(ok))))


def one_line(error: BaseException) -> str:
    """Writes an exception as one line, for a cell of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
