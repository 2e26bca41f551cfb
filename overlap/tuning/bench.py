"""Compiles, checks and times the configurations of one problem, for the search.

Each configuration is one compiled program: a loop of calls. The same program is checked and timed. The check compares
the result that the loop leaves behind.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.tuning.operations import call_operation, gathered_first, specs, unfused
from overlap.tuning.programs import Call, call_program, draw_operands, error_program, loop_program, mesh_of
from overlap.tuning.settings import Settings
from overlap.tuning.timing import Loop, iterations_for


class Bench:
    """One problem: its operands, the check of its result, and the arrays that its programs pass on to each other.

    Args:
      problem: what is measured.
      devices: the devices of this process, as many as the problem has.
      settings: how long to measure, and the seed of the operands.
    """

    def __init__(self, problem: Problem, devices: Sequence[Any], settings: Settings) -> None:
        if len(devices) != problem.devices:
            raise ValueError(f"{problem} needs {problem.devices} devices, got {len(devices)}")
        self.problem = problem
        self.settings = settings
        self._seed = settings.seed
        self.iterations = iterations_for(problem, settings.launch_us, 2, settings.max_iterations)
        self.mesh = mesh_of(devices)
        drawn = jax.eval_shape(lambda: draw_operands(problem, self.mesh, settings.seed))
        out = jax.eval_shape(call_program(problem, functools.partial(unfused, problem), self.mesh), *drawn)
        shardings = [NamedSharding(self.mesh, spec) for spec in specs(problem)]
        self._blank = jax.jit(functools.partial(jnp.zeros, out.shape, out.dtype), out_shardings=shardings[2])
        self._error = error_program(problem, self.mesh)
        # The operands are drawn only when they are needed, so that compiling can begin at once.
        self._loop: Loop | None = None
        lhs, rhs, out = (
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
            for array, sharding in zip((*drawn, out), shardings, strict=True)
        )
        changed, fixed = gathered_first(problem, lhs, rhs)
        self._arguments = (changed, out), fixed

    def _call(self, config: Config | None) -> Call:
        implementation = "xla" if config is None else "fused"
        return lambda lhs, rhs: call_operation(self.problem, lhs, rhs, config, implementation)

    # --- What the search calls ----------------------------------------------------------------------------------------

    def compile(self, config: Config | None) -> Any:
        """Compiles the loop of a configuration; None: of XLA's implementation. May be called from any thread."""
        loop = loop_program(self.problem, self._call(config), self.mesh, self.iterations)
        return loop.lower(*self._arguments).compile()

    def error_of(self, program: Any) -> float:
        """The relative error of the result that a program's loop leaves behind.

        Each check draws new operands. So a result that another program has left in memory does not pass.
        """
        loop = self._with_new_operands()
        loop.program = program
        loop.launch()
        return float(self._error(*loop.operands, loop.out))

    def sample_us(self, program: Any) -> float:
        """One sample: the time of one call, in microseconds."""
        return 1e6 * self._ready(program).call_s(self.settings.launches)

    def warm_up(self, program: Any) -> None:
        """Keeps the devices busy until their clocks have settled."""
        loop = self._ready(program)
        loop.load(self.settings.warm_up_s)
        jax.block_until_ready(loop.state)

    def _ready(self, program: Any) -> Loop:
        # A program that failed has consumed its operands, since they are donated.
        loop = self._loop if self._loop is not None and self._loop.state is not None else self._with_new_operands()
        loop.program = program
        return loop

    def _with_new_operands(self) -> Loop:
        out = self._loop.out if self._loop is not None and self._loop.state is not None else self._blank()
        self._loop = None  # Frees the memory of the old operands.
        self._seed += 1
        operands = draw_operands(self.problem, self.mesh, self._seed)
        self._loop = Loop(self.problem, None, self.iterations, operands, out)
        return self._loop
