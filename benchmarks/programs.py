"""The compiled programs of the harness: inputs, the loop, a single call, the oracle; and what the loop's HLO shows."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.problems import AXIS, OUT, Problem

# Below this a copy inside the loop costs nothing that can be seen.
_COPY_THRESHOLD_BYTES = 1 << 16
# The oracle is not timed: to search for its fastest f32 algorithm would take longer than all that is.
_NO_SEARCH = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def loop_program(
    problem: Problem, call: Callable[[jax.Array, jax.Array], jax.Array], mesh: Mesh, iterations: int
) -> Any:
    """A jitted `((lhs, out), rhs) -> (lhs, out)` that runs `call` `iterations` times, each on the last one's result."""

    def program(state: tuple[jax.Array, jax.Array], rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            lhs, out = state
            # Read from the carried output, not from the product itself: XLA would compute that element apart. Scaled
            # back to the inputs' distribution and clipped, so that nothing grows from iteration to iteration.
            element = out[:1, :1].astype(jnp.float32) * (problem.k**-0.5)
            element = jnp.clip(element, -4.0, 4.0).astype(lhs.dtype)
            lhs = lax.dynamic_update_slice(lhs, element, (0, 0))
            return lhs, call(lhs, rhs)

        return lax.fori_loop(0, iterations, body, state)

    specs = (problem.lhs_spec, OUT)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(specs, problem.rhs_spec), out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def call_program(problem: Problem, call: Callable[[jax.Array, jax.Array], jax.Array], mesh: Mesh) -> Any:
    """The method as a user would call it."""
    specs = (problem.lhs_spec, problem.rhs_spec)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=OUT, check_vma=False))


def copies_in_loops(hlo: str) -> list[str]:
    """The instructions in loop bodies of an optimized module that copy `_COPY_THRESHOLD_BYTES` or more."""
    found = []
    for body in set(re.findall(r"\bwhile\(.*?body=%?([\w.-]+)", hlo)):
        block = re.search(rf"^%?{re.escape(body)} \(.*?^}}", hlo, re.MULTILINE | re.DOTALL)
        for line in block[0].splitlines() if block else ():
            match = re.match(r"\s*(?:ROOT )?%?(?P<name>[\w.-]+) = \(?(?P<type>\w+)\[(?P<dims>[\d,]*)\]", line)
            if match is None or not re.search(r"\bcopy(-start)?\(|wrapped_copy|copy_fusion", line):
                continue
            bits = re.search(r"\d+", match["type"])
            size = int(np.prod([int(dim) for dim in match["dims"].split(",") if dim], dtype=np.int64))
            if size * (int(bits[0]) if bits else 8) // 8 >= _COPY_THRESHOLD_BYTES:
                found.append(f"{match['name']}: {match['type']}[{match['dims']}]")
    return sorted(found)


@functools.cache
def _input_program(problem: Problem, mesh: Mesh) -> Any:
    def generate(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), lax.axis_index(AXIS))
        lhs_key, rhs_key = jax.random.split(key)
        lhs = jax.random.normal(lhs_key, problem.lhs_shape, jnp.float32).astype(problem.element_type)
        rhs = jax.random.normal(rhs_key, problem.rhs_shape, jnp.float32).astype(problem.element_type)
        return lhs, rhs

    out_specs = (problem.lhs_spec, problem.rhs_spec)
    return jax.jit(jax.shard_map(generate, mesh=mesh, in_specs=P(), out_specs=out_specs, check_vma=False))


def inputs(problem: Problem, mesh: Mesh, seed: int) -> tuple[jax.Array, jax.Array]:
    """Normal operands, different on every device, drawn where they are used."""
    return _input_program(problem, mesh)(np.uint32(seed))


def operands_program(problem: Problem, mesh: Mesh, gathered: bool, dtype: Any) -> Any:
    """A jitted function of the inputs that returns them as a method takes them: lhs complete, both in another dtype."""

    def prepare(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        lhs = gather(problem, lhs) if gathered else lhs
        return lhs.astype(dtype or lhs.dtype), rhs.astype(dtype or rhs.dtype)

    specs = (problem.lhs_spec, problem.rhs_spec)
    return jax.jit(jax.shard_map(prepare, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))


def gather(problem: Problem, lhs: jax.Array) -> jax.Array:
    """The complete left operand (inside `shard_map`)."""
    return lax.all_gather(lhs, AXIS, axis=problem.lhs_m_axis, tiled=True)


def reference(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """What the library is compared with: XLA's all-gather, then its dot (inside `shard_map`)."""
    return problem.dot(gather(problem, lhs), rhs)


def error_program(problem: Problem, mesh: Mesh) -> Any:
    """A jitted function of (complete lhs, rhs, out): the relative Frobenius error of `out` against the f32 product."""

    def relative_error(lhs: jax.Array, rhs: jax.Array, out: jax.Array) -> jax.Array:
        # XLA takes the product of two converted f8 operands for an f8 product, unless it cannot see the conversion.
        lhs, rhs = lax.optimization_barrier((lhs.astype(jnp.float32), rhs.astype(jnp.float32)))
        expected = problem.dot(lhs, rhs, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        difference = out.astype(jnp.float32) - expected
        squares = lax.psum(jnp.stack([jnp.sum(difference**2), jnp.sum(expected**2)]), AXIS)
        return jnp.sqrt(squares[0] / squares[1])

    specs = (problem.lhs_spec, problem.rhs_spec, OUT)
    mapped = jax.shard_map(relative_error, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped, compiler_options=_NO_SEARCH)
