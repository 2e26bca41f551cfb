"""The programs of a measurement: random operands, one call, a loop of calls, and the error of a result.

The tuner, the demo and the benchmarks use them. Each is a jitted `jax.shard_map` on a mesh whose only axis is `AXIS`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap.choice.problem import Problem
from overlap.tuning.operations import AXIS, gather, gathered_first, product, shapes, specs, unfused

Call = Callable[[jax.Array, jax.Array], jax.Array]  # (lhs, rhs) -> out, inside jax.shard_map

# A result may have twice the error of the unfused product. With f32 results both errors are rounding noise; there, an
# error up to the floor is allowed. (A result that lacks one k step of 28672 elements along k has an error of 5e-2.)
_ERROR_FACTOR = 2.0
_FLOAT32_ERROR_FLOOR = 1e-4
# The f32 product with which results are compared is not timed. A search for its fastest f32 algorithm would take longer
# than everything that is timed.
_NO_SEARCH = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
# How many calls that do not communicate are in an iteration of a loop on a GPU.
_CALLS_CAPTURED = 8


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh of these devices whose only axis is `AXIS`."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def _mapped(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


# --- Operands ---------------------------------------------------------------------------------------------------------


@functools.cache
def _draw_program(problem: Problem, mesh: Mesh) -> Any:
    def draw(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), lax.axis_index(AXIS)))
        # Draw from a normal distribution: on zeros and small integers the same kernels run faster.
        return tuple(
            jax.random.normal(key, shape, jnp.float32).astype(problem.dtype)
            for key, shape in zip(keys, shapes(problem), strict=True)
        )

    return _mapped(draw, mesh, P(), specs(problem)[:2])


def draw_operands(problem: Problem, mesh: Mesh, seed: int) -> tuple[jax.Array, jax.Array]:
    """Draws normally distributed lhs and rhs on the devices, different on each device."""
    return _draw_program(problem, mesh)(np.uint32(seed))


@functools.cache
def complete_program(problem: Problem, mesh: Mesh) -> Any:
    """Makes a program (lhs, rhs) -> (lhs, rhs) that gives every device the whole of the operand to be gathered.

    On its results a product can be measured without the gather: as fast as if communication took no time. The results
    have the same specs as the operands. The gathered array is larger by the number of devices, since each device's
    shard of it is a full copy.
    """
    both = specs(problem)[:2]
    return _mapped(functools.partial(gather, problem), mesh, both, both)


# --- What is timed ----------------------------------------------------------------------------------------------------


def call_program(problem: Problem, call: Call, mesh: Mesh) -> Any:
    """Makes a program of one call, as a user would write it."""
    lhs, rhs, out = specs(problem)
    return _mapped(call, mesh, (lhs, rhs), out)


def calls_per_iteration(problem: Problem, mesh: Mesh) -> int:
    """How many calls an iteration of a problem's `loop_program` makes.

    The host needs 6 to 16 µs to launch the kernels of an iteration, so no call that is alone can be seen to take less.
    XLA captures five or more kernels that follow each other in a CUDA graph, which the host launches as one. So on GPUs
    an iteration makes eight calls. But calls that communicate are alone: XLA's own collectives are never captured.
    """
    return 1 if problem.communicates or mesh.devices.flat[0].platform == "cpu" else _CALLS_CAPTURED


def loop_program(problem: Problem, call: Call, mesh: Mesh, iterations: int) -> Any:
    """Makes a program `((changed, out), fixed) -> (changed, out)` that runs `call` `iterations` times on the devices.

    Before each call, an element of the previous result is written into an operand, in place. So each call depends on
    the previous call, and XLA can neither hoist it nor fold the write into the product. `changed` is the gathered
    operand, since XLA could hoist the gather of an operand that does not change. `fixed` is the other operand.
    `changed` and `out` are donated.

    An iteration of the loop makes `calls_per_iteration` calls.
    """
    together = calls_per_iteration(problem, mesh)

    def program(state: tuple[jax.Array, jax.Array], fixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            changed, out = state
            # Read the element from the loop's state, not from the product itself: else XLA would compute it separately.
            # Scale it back to the distribution of the operands and clip it, so that numbers do not grow.
            element = lax.slice(out, (0,) * out.ndim, (1,) * out.ndim).astype(jnp.float32)
            element = jnp.clip(element * problem.whole[2] ** -0.5, -4.0, 4.0).astype(changed.dtype)
            changed = lax.dynamic_update_slice(changed, element, (0,) * changed.ndim)
            operands = gathered_first(problem, changed, fixed)
            if together == 1:
                return changed, call(*operands)
            # The barriers keep XLA from sharing work among the calls, and from computing only the element that is read.
            return changed, lax.optimization_barrier(call(*lax.optimization_barrier(operands)))

        return lax.fori_loop(0, iterations, body, state, unroll=together)

    lhs, rhs, out = specs(problem)
    changed, fixed = gathered_first(problem, lhs, rhs)
    return _mapped(program, mesh, ((changed, out), fixed), (changed, out), donate_argnums=0)


# --- Whether a result is right ----------------------------------------------------------------------------------------


@functools.cache
def error_program(problem: Problem, mesh: Mesh, complete: bool = False) -> Any:
    """Makes a program (lhs, rhs, out) -> the relative error of `out` against the f32 product, in the Frobenius norm.

    With `complete`, the operands come from `complete_program`, and the product is not summed over the devices.
    """

    def relative_error(lhs: jax.Array, rhs: jax.Array, out: jax.Array) -> jax.Array:
        # The barrier hides the conversion from XLA, which else computes a product of converted f8 operands in f8.
        lhs, rhs = lax.optimization_barrier((lhs.astype(jnp.float32), rhs.astype(jnp.float32)))
        in_f32 = dataclasses.replace(problem, out_dtype="float32", block_scaled=False)
        with jax.default_matmul_precision("highest"):
            expected = (product if complete else unfused)(in_f32, lhs, rhs)
        difference = out.astype(jnp.float32) - expected
        squares = lax.psum(jnp.stack([jnp.sum(difference**2), jnp.sum(expected**2)]), AXIS)
        return jnp.sqrt(squares[0] / squares[1])

    return _mapped(relative_error, mesh, specs(problem), P(), compiler_options=_NO_SEARCH)


def error_floor(problem: Problem) -> float:
    """The relative error that is allowed even if XLA's error is smaller. Above 0 for f8 operands and for f32 results.

    For f8 operands, Hopper's tensor cores keep sums in 14 bits. Each instruction (32 products and the sum so far) drops
    what lies below 2**-13 of its largest addend. In a simulation on normally distributed operands, the relative error
    of the sum is 0.3 * 2**-13 * sqrt(k) (k = 1024 to 28672). XLA may use instructions that keep more bits, so twice its
    error is no bound for our kernels. Twice the simulated error is a bound: 6.6e-3 at k = 8192, where one lost tile of
    128 x 128 in 8192 x 8192 would give 1.6e-2.
    """
    if jnp.dtype(problem.dtype).itemsize == 1:
        return 0.6 * 2.0**-13 * math.sqrt(problem.whole[2])
    return _FLOAT32_ERROR_FLOOR if jnp.dtype(problem.out_dtype).itemsize == 4 else 0.0


def error_bound(problem: Problem, unfused_error: float) -> float:
    """The largest relative error of a right result, given the error of the unfused product."""
    return max(_ERROR_FACTOR * unfused_error, error_floor(problem))
