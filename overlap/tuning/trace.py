"""Records one call of an operation: what each role of each CTA on each device does, and when."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.primitives import marks
from overlap.tuning import clocks
from overlap.tuning.operations import AXIS, call_operation, specs
from overlap.tuning.programs import Call, call_program
from overlap.tuning.timeline import Timeline, timeline

# How many launches run before the launch that is kept. They warm up code and clocks, and let the devices begin
# together.
_AHEAD = 3


@dataclasses.dataclass(frozen=True)
class Trace:
    """One recorded call.

    Attributes:
      timelines: the timeline of each kernel, in the order in which the kernels run.
      same_bits: whether the result has the same bits as the result of a call that is not recorded.
    """

    timelines: list[Timeline]
    same_bits: bool


def record(
    problem: Problem,
    operands: tuple[jax.Array, jax.Array],
    mesh: Mesh,
    config: Config | None,
    capacity: int,
    *,
    emulated: bool = False,
) -> Trace:
    """Runs a fused call with marks, and compares its result with the result of the call without marks.

    Args:
      problem: the operation and its sizes.
      operands: lhs and rhs on the mesh.
      mesh: devices of this process along one axis, `AXIS`.
      config: the configuration of the kernel; None: the library chooses it.
      capacity: how many marks each role has room for.
      emulated: whether CPU devices run the call. Then all devices have the same time, and the first launch is kept.

    Raises:
      NotImplementedError, ValueError: as the operation raises them with implementation="fused".
    """
    call = functools.partial(_call, problem, config)
    expected = jax.block_until_ready(call_program(problem, call, mesh)(*operands))
    run, made = program(problem, call, mesh, capacity)
    for _ in range(0 if emulated else _AHEAD):
        run(*operands)
    result, entries = jax.block_until_ready(run(*operands))
    # Measure the offsets right after the launch: clocks hardly drift in a millisecond.
    one_time = [clocks.Offset(0.0, 0.0)] * mesh.size
    offsets = one_time if emulated or mesh.size == 1 else clocks.offsets(mesh)
    timelines = [
        timeline(name, roles, np.asarray(of_kernel), offsets)
        for (name, roles), of_kernel in zip(made, entries, strict=True)
    ]
    return Trace(timelines, _bits(result) == _bits(expected))


def program(problem: Problem, call: Call, mesh: Mesh, capacity: int) -> tuple[Any, list[tuple[str, dict[int, str]]]]:
    """Makes a program of one call with marks.

    Returns:
      The jitted program, (lhs, rhs) -> (result, entries of each kernel), and a list. When the program has been traced,
      the list has the name and the roles of each kernel.
    """
    made: list[tuple[str, dict[int, str]]] = []

    def recorded(lhs: jax.Array, rhs: jax.Array) -> Any:
        with marks.recording(capacity) as recording:
            result = call(lhs, rhs)
        made[:] = [(kernel.name, kernel.roles) for kernel in recording.kernels]
        return result, [kernel.entries for kernel in recording.kernels]

    lhs, rhs, out = specs(problem)
    mapped = jax.shard_map(recorded, mesh=mesh, in_specs=(lhs, rhs), out_specs=(out, P(AXIS)), check_vma=False)
    return jax.jit(mapped), made


def _call(problem: Problem, config: Config | None, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return call_operation(problem, lhs, rhs, config, "fused")


def _bits(array: jax.Array) -> bytes:
    return np.asarray(array).tobytes()
