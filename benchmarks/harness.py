"""Measures competing methods of one problem side by side: checked first, interleaved, as a device loop and per call.

What is measured, for each method:

- *loop*: `iterations` calls in one program (`lax.fori_loop`). One program is timed, then 1 + `launches` in a row; the
  difference is divided by the calls of `launches` programs. What it costs to begin and to wait, some 100 to 400 µs, is
  in both times and so in no result. Each iteration writes one element of the previous output into an operand, in place:
  a true dependency that XLA can neither hoist nor fold into the matmul. That is one tiny kernel per call, and the
  loop's counter is another; they stay in the times of all methods alike, so that ratios of short calls are nearer to 1
  than those of the calls alone. (Several calls in an iteration would share the counter, but then XLA leaves out what it
  can of all results but the last: the sum of a split product, say.) The same loop around no work is measured too
  (`loop_overhead_us`): what an iteration costs the host, hidden behind a call that takes longer. The compiled program
  is searched for copies of whole operands.
- *wall*: `calls` ordinary calls dispatched one after another and waited for once, per call.
- *first call*: the first `jax.jit(call)(lhs, rhs)` until its result is there: traced, lowered, compiled and run. That
  of XLA's own product is short here: the harness has used the same product before, and XLA's search is behind it.

Every method is compared with an f32 oracle before it is timed and once more on what its timed loop left behind. All
methods take turns within each round, each round in another order, and times are maxima over processes (within a
process a program ends when its slowest device does). Inputs are normal, drawn on the devices from a fresh seed.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from benchmarks.loop_copies import copies_in_loops
from overlap.choice.problem import Problem
from overlap.tuning.operations import unfused
from overlap.tuning.programs import (
    call_program,
    complete_program,
    draw_operands,
    error_bound,
    error_program,
    loop_program,
)
from overlap.tuning.timing import Loop, calls_s, iterations_for

NOT_SERVED = "NOT SERVED"
# About how long one program with a loop runs, and a row of calls.
_LAUNCH_US = 15_000.0


@dataclasses.dataclass(frozen=True)
class Method:
    """One competitor. `call(lhs, rhs)` runs inside `jax.shard_map`; with `gathered` its operands are complete."""

    name: str
    call: Callable[[jax.Array, jax.Array], jax.Array]
    gathered: bool = False
    # What the operands are cast to beforehand, outside of what is timed; None: they stay as they are.
    dtype: Any = None
    # Raises NotImplementedError if the method does not serve the problem: then that is its result, and no error.
    check: Callable[[], Any] = lambda: None
    # Alternatives of which the fastest is kept, for methods that are tuned: (label, call).
    candidates: tuple[tuple[str, Callable[[jax.Array, jax.Array], jax.Array]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much to measure. `iterations` and `calls` that are None follow from the problem: about 15 ms of work."""

    rounds: int = 7
    iterations: int | None = None
    launches: int = 2  # more in the longer of the two times whose difference is taken
    calls: int | None = None
    warmup_s: float = 1.0
    seed: int = 0
    kernel_time: bool = False
    kernel_names: bool = False

    def loop_iterations(self, problem: Problem) -> int:
        """Calls in one program."""
        return self.iterations or iterations_for(problem, _LAUNCH_US, 2, 400)

    def calls_in_a_row(self, problem: Problem) -> int:
        """Calls per wall time."""
        return self.calls or iterations_for(problem, _LAUNCH_US, 3, 100)


@dataclasses.dataclass
class Result:
    """What came out for one method.

    `status` is "ok", or begins with "FAILED" (wrong result), "ERROR" (exception) or "NOT SERVED" (as the method says).
    """

    method: str
    status: str = "ok"
    note: str = ""
    error: float | None = None
    error_bound: float | None = None
    first_call_s: float | None = None
    compile_s: float | None = None
    loop_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    kernel_us: float | None = None
    kernel_names: str = ""
    loop_copies: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the method may be timed."""
        return self.status == "ok"

    @property
    def served(self) -> bool:
        """False if the method itself says that it cannot do this."""
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
    """The methods of one problem on one mesh, from the check to the last round."""

    def __init__(self, problem: Problem, mesh: Mesh, settings: Settings) -> None:
        self.problem, self.mesh, self.settings = problem, mesh, settings
        self.iterations = settings.loop_iterations(problem)
        self.calls = settings.calls_in_a_row(problem)
        reference = call_program(problem, functools.partial(unfused, problem), mesh)
        # Twice, with different inputs: a result left in memory by an earlier run cannot pass for this one's.
        self._checks = [draw_operands(problem, mesh, settings.seed + 1 + i) for i in range(2)]
        error = error_program(problem, mesh)
        self.error_bound = error_bound(problem, max(float(error(*check, reference(*check))) for check in self._checks))
        self.inputs = draw_operands(problem, mesh, settings.seed)
        self.prepared: list[_Prepared] = []
        self.results: list[Result] = []
        self.loop_overhead_us: float | None = None

    def _operands(self, method: Method, operands: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The inputs as the method takes them."""
        if self._complete(method):
            operands = complete_program(self.problem, self.mesh)(*operands)
        return operands if method.dtype is None else _cast(operands, method.dtype)

    def _error(self, method: Method, operands: tuple[jax.Array, jax.Array], out: jax.Array) -> float:
        return float(error_program(self.problem, self.mesh, self._complete(method))(*operands, out))

    def _complete(self, method: Method) -> bool:
        # On one device all operands are complete.
        return method.gathered and self.problem.communicates

    def add(self, method: Method, progress: Callable[[str], None] = lambda _: None) -> Result:
        """Compiles and checks a method; what goes wrong is kept in its result and the session goes on."""
        result = Result(method.name, error_bound=self.error_bound)
        self.results.append(result)
        try:
            prepared = self._prepare(method, result, progress) if self._serves(method, result) else None
        except Exception as error:  # Whatever a competitor raises belongs into the table, not into a traceback.
            result.status = "ERROR " + one_line(error)
            prepared = None
        if not agreed(result.ok) and result.ok:
            result.status = "ERROR in another process"
        if result.ok and prepared is not None:
            self.prepared.append(prepared)
        return result

    @staticmethod
    def _serves(method: Method, result: Result) -> bool:
        try:
            method.check()
        except NotImplementedError as reason:
            result.status = f"{NOT_SERVED}: {' '.join(str(reason).split())}"
        return result.ok

    def _prepare(self, method: Method, result: Result, progress: Callable[[str], None]) -> _Prepared:
        calls = method.candidates or (("", method.call),)
        best: tuple[float, _Prepared] | None = None
        failures = []
        for label, call in calls:
            progress(f"{method.name} {label}".strip())
            candidate = Result(method.name, note=label, error_bound=self.error_bound)
            try:
                prepared = self._prepare_call(dataclasses.replace(method, call=call, candidates=()), candidate)
            except Exception as error:
                if len(calls) == 1:
                    raise
                failures.append(f"{label}: {one_line(error)}")
                continue
            if not candidate.ok:
                failures.append(f"{label}: {candidate.status}")
                best = best or (float("inf"), prepared)
                continue
            seconds = self._time_loop(prepared) if len(calls) > 1 else 0.0
            if best is None or seconds < best[0]:
                best = seconds, prepared
        if best is None:
            raise RuntimeError("; ".join(failures))
        prepared = best[1]
        # The caller holds `result`: fill it in place.
        for field in dataclasses.fields(Result):
            setattr(result, field.name, getattr(prepared.result, field.name))
        if failures:
            result.note = f"{result.note} ({len(failures)} of {len(calls)} candidates failed: {failures[0]})"
        return dataclasses.replace(prepared, result=result)

    def _prepare_call(self, method: Method, result: Result) -> _Prepared:
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
        # Written so that a NaN fails.
        if result.error is None or not result.error <= self.error_bound:
            result.status = f"FAILED{when}: error {result.error:.3g} > {self.error_bound:.3g}"

    # --- Timing ---

    def _time_loop(self, prepared: _Prepared) -> float:
        return prepared.loop.call_s(self.settings.launches)

    def _time_calls(self, prepared: _Prepared) -> float:
        return calls_s(prepared.call, prepared.operands, self.calls)

    def measure_overhead(self) -> None:
        """Times the loop around no work: the element that is written, and the counter."""
        empty = Method("empty", lambda lhs, rhs: lhs[..., :1, :1] * 0.5)
        loop = self._loop(empty, self.inputs, call_program(self.problem, empty.call, self.mesh)(*self.inputs))
        self.loop_overhead_us = 1e6 * float(np.median([loop.call_s(self.settings.launches) for _ in range(3)]))

    def warm_up(self) -> None:
        """Runs the roof (or whatever there is) until clocks and temperatures have settled."""
        self.during_load(self.settings.warmup_s, lambda: None)

    def during_load[T](self, seconds: float, read: Callable[[], T]) -> T:
        """Keeps the devices busy with the roof for about `seconds`, and calls `read` meanwhile."""
        prepared = next((p for p in self.prepared if p.method.gathered), None) or next(iter(self.prepared), None)
        if prepared is None:
            return read()
        prepared.loop.load(seconds)
        answer = read()
        jax.block_until_ready(prepared.loop.state)
        return answer

    def run_round(self, number: int) -> None:
        """Times every method once, in another order in every round.

        Shuffled, not rotated: under a power limit a method inherits the clocks that the one before it has left.
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
        """Checks what the timed loops left behind, and reads kernel times if asked for."""
        for prepared in self.prepared:
            result = prepared.result
            if not result.ok:
                continue
            left_behind = self._error(prepared.method, prepared.loop.operands, prepared.loop.out)
            # Not max(): it may drop a NaN.
            result.error = float(np.max([result.error or 0.0, left_behind]))
            self._judge(result, " after the loop")
            if not (self.settings.kernel_time or self.settings.kernel_names):
                continue
            runs = _kernels(prepared.call, *prepared.operands)
            if runs and self.settings.kernel_time:
                result.kernel_us = 1e3 * float(np.median([max(duration for _, duration in run) for run in runs]))
            if runs and self.settings.kernel_names:
                result.kernel_names = "; ".join(name for name, _ in runs[0])


@functools.partial(jax.jit, static_argnums=1)
def _cast(operands: tuple[jax.Array, jax.Array], dtype: Any) -> tuple[jax.Array, ...]:
    return tuple(operand.astype(dtype) for operand in operands)


def agreed(ok: bool) -> bool:
    """Whether all processes say yes: one that gave up on a method must not leave the others waiting for it."""
    if jax.process_count() == 1:
        return ok
    return bool(np.all(multihost_utils.process_allgather(np.int32(ok))))


def _kernels(call: Callable[..., jax.Array], *operands: jax.Array) -> list[Sequence[tuple[str, float]]]:
    """The kernels (name, ms) of each of five calls, by CUPTI. Empty where there is none."""
    try:
        from jax.experimental.mosaic.gpu import profiler

        measure: Any = profiler.Cupti(finalize=False).measure(call, aggregate=False)
        return [run for _ in range(5) if (run := measure(*operands)[1])]
    except Exception:  # Optional by definition; the columns stay empty.
        return []


def one_line(error: BaseException) -> str:
    """An exception for a cell of a table."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
