"""Times many configurations of many problems on one GPU, to fit and to judge the model of `overlap.choice`.

    python -m benchmarks.configurations --tasks tasks.jsonl --out times.csv --workers 14

Compiling takes far longer than measuring. It would disturb the measurement, because a process that launches short
kernels must not wait for a CPU core. So several processes first compile all configurations. Then they take turns on the
GPU: the process that holds the lock measures all configurations of a problem that it has compiled, interleaved. With
several GPUs (`--gpus`) each process uses one of them.

Each line of the task file has a problem, its configurations, and whether to measure XLA's product as well. XLA's
product is compiled while the lock is held, since XLA searches for an algorithm on the GPU. Results are checked against
XLA's. The CSV is written problem by problem, so a run that ends early keeps its results. Its column `calls` says how
many calls an iteration of the loops made (`programs.calls_per_iteration`). Files without this column had one; their
times below about 17 µs contain what the host took to launch kernels.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import json
import multiprocessing
import os
import pathlib
import queue
import random
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command
from overlap import _cuda
from overlap.choice.problem import Problem
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, finite_number, new_file, whole_number
from overlap.kernels.config import Config
from overlap.tuning.operations import call_operation, gathered_first, product, shapes
from overlap.tuning.programs import calls_per_iteration, loop_program, mesh_of
from overlap.tuning.timing import Loop, iterations_for

PROBLEM_FIELDS = ("op", "m", "n", "k", "dtype", "out_dtype", "layout")
XLA = "xla"
FIELDS: tuple[str, ...] = (*PROBLEM_FIELDS, "config", "us", "spread", "samples", "launch_ms", "calls", "status")
# _WARM_UP_S: how long the GPU works before the first sample that counts; the clock depends on the temperature.
# _MOST_ITERATIONS: the largest number of calls in one program.
_WARM_UP_S, _MOST_ITERATIONS = 0.15, 2000
# How long a process waits until the others have compiled.
_PATIENCE_S = 600.0
# The largest relative difference to XLA's result, by the bytes of an operand's element. Two right results of 16-bit
# operands, each rounded once, differ by half of this bound. With 8-bit operands, XLA's sums may keep more bits than
# ours.
_MOST_DIFFERENCE = {2: 0.005, 1: 0.02}


@dataclasses.dataclass(frozen=True)
class Task:
    """A problem, the configurations to time, and whether to time XLA's product as well."""

    problem: Problem
    configs: tuple[Config, ...]
    with_xla: bool = False

    def to_json(self) -> str:
        """Returns the task as JSON, which is one line of a task file."""
        fields = {name: getattr(self.problem, name) for name in PROBLEM_FIELDS}
        return json.dumps({"problem": fields, "configs": [changed(c) for c in self.configs], "xla": self.with_xla})

    @staticmethod
    def from_json(line: str) -> Task:
        """Reads a task from `line`, as `to_json` writes it."""
        given = json.loads(line)
        configs = tuple(Config(**fields) for fields in given["configs"])
        return Task(Problem(**given["problem"]), configs, given["xla"])


def changed(config: Config) -> dict[str, Any]:
    """Returns the fields of `config` whose values differ from the defaults (`Config()`), with these values."""
    usual = vars(Config())
    return {name: value for name, value in vars(config).items() if value != usual[name]}


@functools.cache
def _random_numbers(count: int, dtype: str) -> jax.Array:
    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: jax.Array, count: int) -> jax.Array:
        return jax.random.normal(key, (count,), jnp.bfloat16).astype(dtype)

    return draw(jax.random.key(0), count)


@dataclasses.dataclass
class _Compiled:
    """The compiled programs of a task.

    The operands are made only when the task is measured, so that they take no memory before.

    Attributes:
      task: the task.
      iterations: calls in each program.
      programs: the compiled loops, by the name of the configuration.
      status: the errors of configurations that did not compile, by the name of the configuration.
    """

    task: Task
    iterations: int
    programs: dict[str, Any]
    status: dict[str, str]


class _Worker:
    """Does the work of one process: compiles the configurations of tasks, and measures them.

    Args:
      pool_elements: how many random numbers the operands are cut from.
      samples: how often each program is timed.
      launch_ms: about how long one program runs. At the power limit the GPU's clock depends for about 10 ms on what ran
        before.
    """

    def __init__(self, pool_elements: int, samples: int, launch_ms: float) -> None:
        self.pool_elements, self.samples, self.launch_ms = pool_elements, samples, launch_ms
        self.mesh = mesh_of(jax.devices()[:1])

    def _operands(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        """Cuts both operands from one array of random numbers.

        To draw operands for each shape would need a program for each shape, which takes long to compile.
        """
        pool = _random_numbers(self.pool_elements, problem.dtype)
        (lm, lk), (rk, rn) = shapes(problem)
        return pool[: lm * lk].reshape(lm, lk), pool[-rk * rn :].reshape(rk, rn)

    def _program(self, problem: Problem, config: Config | None, iterations: int) -> Any:
        implementation = XLA if config is None else "fused"
        operands = [jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes(problem)]
        changed, fixed = gathered_first(problem, *operands)
        out = jax.ShapeDtypeStruct((problem.m, problem.n), problem.out_dtype)
        one = lambda lhs, rhs: call_operation(problem, lhs, rhs, config, implementation)  # noqa: E731
        return loop_program(problem, one, self.mesh, iterations).lower((changed, out), fixed).compile()

    def compile(self, task: Task) -> _Compiled:
        """Compiles all configurations of a task."""
        iterations = iterations_for(task.problem, 1000 * self.launch_ms, 2, _MOST_ITERATIONS)
        compiled = _Compiled(task, iterations, {}, {})
        for config in task.configs:
            name = json.dumps(changed(config))
            try:
                compiled.programs[name] = self._program(task.problem, config, compiled.iterations)
            except Exception as error:
                compiled.status[name] = f"error: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return compiled

    def prepare(self, compiled: _Compiled) -> tuple[Loop, jax.Array, Any]:
        """Makes the arguments of `measure`: a loop, the right result, and a program that compares a result with it."""
        problem = compiled.task.problem
        operands, out = self._operands(problem), jnp.zeros((problem.m, problem.n), problem.out_dtype)
        loop = Loop(problem, None, compiled.iterations, operands, out)
        expected = self._expected(problem, *operands)
        return loop, expected, _difference_program().lower(out, expected).compile()

    def measure(self, compiled: _Compiled, loop: Loop, expected: jax.Array, difference: Any) -> list[dict[str, Any]]:
        """Measures the programs of a task and checks their results. Returns rows of the CSV."""
        problem, programs, status = compiled.task.problem, compiled.programs, compiled.status
        if compiled.task.with_xla:
            programs[XLA] = self._program(problem, None, compiled.iterations)
        samples: dict[str, list[float]] = {name: [] for name in programs}
        chance = random.Random(0)
        for turn in range(self.samples):
            for name in chance.sample(sorted(programs), len(programs)):
                loop.program = programs[name]
                if turn == 0:
                    loop.launch()
                    error = float(difference(loop.out, expected))
                    limit = _MOST_DIFFERENCE[problem.itemsize]
                    status[name] = "ok" if error <= limit else f"wrong: {error:.2g} from XLA's result"
                # With 0, the plain time of a program is taken. It contains the cost of starting, about 1% in all times.
                samples[name].append(1e6 * loop.call_s(0))
            if turn == 0:
                loop.load(_WARM_UP_S)
        return [self._row(problem, name, result, samples.get(name)) for name, result in status.items()]

    def _expected(self, problem: Problem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False})
        def expected(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            in_f32 = dataclasses.replace(problem, out_dtype="float32")
            return product(in_f32, lhs, rhs).astype(problem.out_dtype)

        return expected(lhs, rhs)

    def _row(self, problem: Problem, name: str, status: str, times: list[float] | None) -> dict[str, Any]:
        row = {field: getattr(problem, field) for field in PROBLEM_FIELDS}
        calls = calls_per_iteration(problem, self.mesh)
        row |= {"config": name, "launch_ms": self.launch_ms, "calls": calls, "status": status}
        if times is None:
            return row | {"us": "nan", "spread": "nan", "samples": 0}
        us = statistics.median(times)
        return row | {"us": f"{us:.4g}", "spread": f"{(max(times) - min(times)) / us:.3f}", "samples": len(times)}


@functools.cache
def _difference_program() -> Any:
    def difference(out: jax.Array, expected: jax.Array) -> jax.Array:
        # Leave out the first row of the result: the loop has changed an element of an operand, and so this row.
        out, expected = out[1:].astype(jnp.float32), expected[1:].astype(jnp.float32)
        return jnp.sqrt(jnp.sum(jnp.square(out - expected)) / jnp.sum(jnp.square(expected)))

    return jax.jit(difference)


@dataclasses.dataclass(frozen=True)
class _Shared:
    """The queues, the barrier and the locks that the processes share.

    Attributes:
      tasks: the queue of tasks.
      results: the queue of rows; None from a process that has ended.
      compiled: the barrier that all processes pass together, when all have compiled their tasks.
      locks: a lock for each GPU; the process that holds it measures there.
    """

    tasks: multiprocessing.Queue[Task]
    results: multiprocessing.Queue[list[dict[str, Any]] | None]
    compiled: threading.Barrier
    locks: Sequence[contextlib.AbstractContextManager[object]]


def _work(number: int, shared: _Shared, pool_elements: int, samples: int, launch_ms: float) -> None:
    gpu = number % len(shared.locks)
    if len(shared.locks) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
    try:
        worker, mine = _Worker(pool_elements, samples, launch_ms), []
        while True:
            try:
                task = shared.tasks.get(timeout=1)
            except queue.Empty:
                break
            mine.append(worker.compile(task))
        began = time.monotonic()
        with contextlib.suppress(threading.BrokenBarrierError):
            shared.compiled.wait(_PATIENCE_S)
        print(
            f"process {number}: {len(mine)} tasks; waited {time.monotonic() - began:.1f} s for the others", flush=True
        )
        for compiled in mine:
            try:
                prepared = worker.prepare(compiled)
                with shared.locks[gpu]:
                    shared.results.put(worker.measure(compiled, *prepared))
            except Exception:
                traceback.print_exc()
            compiled.programs.clear()
    finally:
        shared.results.put(None)


def measure(
    tasks: Sequence[Task],
    out: pathlib.Path,
    *,
    workers: int,
    samples: int,
    launch_ms: float,
    gpus: int,
    budget_s: float,
) -> int:
    """Measures all tasks, or as many as the time allows.

    Args:
      tasks: the tasks.
      out: the CSV to write.
      workers: how many processes, at most.
      samples: how often each program is timed.
      launch_ms: about how long one program runs, in milliseconds.
      gpus: how many GPUs to use.
      budget_s: the time in seconds after which no more results are taken.

    Returns:
      How many rows were written.
    """
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(tasks))
    locks = [context.Lock() for _ in range(gpus)]
    shared = _Shared(context.Queue(), context.Queue(), context.Barrier(workers), locks)
    for task in tasks:
        shared.tasks.put(task)
    largest = max(max(t.problem.m * t.problem.k, t.problem.n * t.problem.k) for t in tasks)
    processes = [
        context.Process(target=_work, args=(number, shared, largest, samples, launch_ms), daemon=True)
        for number in range(workers)
    ]
    for process in processes:
        process.start()
    deadline, running, written = time.monotonic() + budget_s, len(processes), 0
    with out.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        while running and time.monotonic() < deadline:
            try:
                rows = shared.results.get(timeout=5)
            except queue.Empty:
                continue
            if rows is None:
                running -= 1
                continue
            writer.writerows(rows)
            file.flush()
            written += len(rows)
    for process in processes:
        process.terminate()
    return written


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("configurations", __doc__)
    parser.add_argument(
        "--tasks", type=pathlib.Path, required=True, help="the task file: one task in each line, as JSON"
    )
    parser.add_argument("--out", type=new_file, required=True, help="the CSV to write")
    parser.add_argument("--workers", type=whole_number(1), default=14, help="processes that compile")
    parser.add_argument("--gpus", type=whole_number(1), default=1, help="how many GPUs to use")
    parser.add_argument(
        "--samples", type=whole_number(1), default=6, help="how often each program is timed; the median counts"
    )
    parser.add_argument(
        "--launch-ms",
        type=finite_number("milliseconds", at_least=1),
        default=60.0,
        help="about how long one program runs; below about 50 the clocks depend on the program before",
    )
    parser.add_argument(
        "--budget-s",
        type=finite_number("seconds", at_least=0),
        default=480.0,
        help="after this time, in seconds, no more results are taken",
    )
    given = parser.parse_args(None if arguments is None else list(arguments))
    try:
        tasks = [Task.from_json(line) for line in given.tasks.read_text(encoding="utf-8").splitlines() if line]
    except (KeyError, TypeError, ValueError) as error:
        raise WrongArguments(f"configurations: `--tasks` {given.tasks} is no task file: {error!r}") from None
    if not tasks:
        raise WrongArguments(f"configurations: `--tasks` {given.tasks} is empty")
    command.need_gpus("it needs GPUs")
    if given.gpus > (there := len(_cuda.visible_gpus())):
        raise WrongArguments(f"configurations: `--gpus` must be at most {there} here, got {given.gpus}")
    written = measure(
        tasks,
        given.out,
        workers=given.workers,
        samples=given.samples,
        launch_ms=given.launch_ms,
        gpus=given.gpus,
        budget_s=given.budget_s,
    )
    print(f"{written} rows", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
