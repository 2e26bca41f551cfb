"""The programs of a measurement: random operands, one call, a loop of calls, and the error of a result.

They serve the tuner, the demo and the benchmarks. Each is a jitted `jax.shard_map` on a mesh whose only axis is `AXIS`.
"""

from __future__ import annotations

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
from overlap.tuning.operations import AXIS, gather, gathered_first, product, reduce, shapes, specs

Call = Callable[[jax.Array, jax.Array], jax.Array]  # (lhs, rhs) -> out, inside jax.shard_map

# A result may err by twice as much as the unfused product's. The floor is for f32 results, where both errors are
# rounding noise; one tile of depth left out of 28672 errs by 5e-2.
_ERROR_FACTOR, _FLOAT32_ERROR_FLOOR = 2.0, 1e-4
# The oracle is not timed: to search for its fastest f32 algorithm would take longer than all that is.
_NO_SEARCH = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh of these devices along `AXIS`."""
    return jax.make_mesh((len(devices),), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def _mapped(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any, **options: Any) -> Any:
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


# --- Operands ---------------------------------------------------------------------------------------------------------


@functools.cache
def _draw_program(problem: Problem, mesh: Mesh) -> Any:
    def draw(seed: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), lax.axis_index(AXIS)))
        # Normal: on zeros and small integers the same kernels run faster.
        return tuple(
            jax.random.normal(key, shape, jnp.float32).astype(problem.dtype)
            for key, shape in zip(keys, shapes(problem), strict=True)
        )

    return _mapped(draw, mesh, P(), specs(problem)[:2])


def draw_operands(problem: Problem, mesh: Mesh, seed: int) -> tuple[jax.Array, jax.Array]:
    """Normal lhs and rhs, different on every device and drawn there."""
    return _draw_program(problem, mesh)(np.uint32(seed))


@functools.cache
def complete_program(problem: Problem, mesh: Mesh) -> Any:
    """A program of lhs and rhs that returns them with the gathered one complete on every device.

    Its sharding is called the same as the shard's: each device has a copy, as if it were a shard.
    """
    both = specs(problem)[:2]
    return _mapped(functools.partial(gather, problem), mesh, both, both)


# --- What is timed ----------------------------------------------------------------------------------------------------


def call_program(problem: Problem, call: Call, mesh: Mesh) -> Any:
    """A program of one call, as a user would write it."""
    lhs, rhs, out = specs(problem)
    return _mapped(call, mesh, (lhs, rhs), out)


def loop_program(problem: Problem, call: Call, mesh: Mesh, iterations: int) -> Any:
    """A program `((changed, out), fixed) -> (changed, out)` that runs `call` `iterations` times on the devices.

    Each call begins with an element of the result before it written into an operand, in place: a true dependency that
    XLA can neither hoist nor fold into the product. `changed` is the operand that is gathered, since a gather of what
    stays the same could be hoisted; `fixed` is the other one. `changed` and `out` are given away.
    """

    def program(state: tuple[jax.Array, jax.Array], fixed: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            changed, out = state
            # Read from the carried output, not from the product itself: XLA would compute that element apart. Scaled
            # back to the operands' distribution and clipped, so that nothing grows from iteration to iteration.
            element = lax.slice(out, (0,) * out.ndim, (1,) * out.ndim).astype(jnp.float32)
            element = jnp.clip(element * problem.whole[2] ** -0.5, -4.0, 4.0).astype(changed.dtype)
            changed = lax.dynamic_update_slice(changed, element, (0,) * changed.ndim)
            return changed, call(*gathered_first(problem, changed, fixed))

        return lax.fori_loop(0, iterations, body, state)

    lhs, rhs, out = specs(problem)
    changed, fixed = gathered_first(problem, lhs, rhs)
    return _mapped(program, mesh, ((changed, out), fixed), (changed, out), donate_argnums=0)


# --- Is it right ------------------------------------------------------------------------------------------------------


@functools.cache
def error_program(problem: Problem, mesh: Mesh, complete: bool = False) -> Any:
    """A program (lhs, rhs, out) -> the relative error of `out` against the f32 product, in the Frobenius norm.

    With `complete`, the gathered operand comes complete, as from `complete_program`, and products are not summed over
    devices.
    """

    def relative_error(lhs: jax.Array, rhs: jax.Array, out: jax.Array) -> jax.Array:
        if not complete:
            lhs, rhs = gather(problem, lhs, rhs)
        # XLA takes the product of two converted f8 operands for an f8 product, unless it cannot see the conversion.
        lhs, rhs = lax.optimization_barrier((lhs.astype(jnp.float32), rhs.astype(jnp.float32)))
        expected = product(problem, lhs, rhs, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        if not complete:
            expected = reduce(problem, expected)
        difference = out.astype(jnp.float32) - expected
        squares = lax.psum(jnp.stack([jnp.sum(difference**2), jnp.sum(expected**2)]), AXIS)
        return jnp.sqrt(squares[0] / squares[1])

    return _mapped(relative_error, mesh, specs(problem), P(), compiler_options=_NO_SEARCH)


def error_floor(problem: Problem) -> float:
    """The relative error that is allowed in any case: of f32 results, and of sums in f8.

    Hopper's tensor cores keep sums in f8 in 14 bits. Each instruction (32 products and the sum so far) drops what lies
    below 2**-13 of its largest addend. In a simulation of that on normal operands the relative error of the sum is
    0.3 * 2**-13 * sqrt(k) (k = 1024 to 28672). XLA may take instructions that keep more, so twice its error is no bound
    for ours; twice the simulated error is: 6.6e-3 at k = 8192, where one lost tile of 128 x 128 in 8192 x 8192 would be
    1.6e-2.
    """
    if jnp.dtype(problem.dtype).itemsize == 1:
        return 0.6 * 2.0**-13 * math.sqrt(problem.whole[2])
    return _FLOAT32_ERROR_FLOOR if jnp.dtype(problem.out_dtype).itemsize == 4 else 0.0


def error_bound(problem: Problem, unfused_error: float) -> float:
    """The largest relative error of a right result, from that of the unfused product."""
    return max(_ERROR_FACTOR * unfused_error, error_floor(problem))
