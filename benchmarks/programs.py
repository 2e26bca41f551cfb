"""The compiled programs of the harness: inputs, the loop, a single call, the oracle; and what the loop's HLO shows."""

from __future__ import annotations

import dataclasses
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

AXIS = "x"
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16}
LHS, RHS, OUT = P(AXIS, None), P(None, AXIS), P(None, AXIS)
# Below this a copy inside the loop costs nothing that can be seen.
_COPY_THRESHOLD_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """An all-gather matmul by its sizes per shard: (m, k) gathered along the mesh axis, times (k, n)."""

    op: str
    devices: int
    m: int
    n: int
    k: int
    dtype: str

    @property
    def shape(self) -> str:
        """The sizes per shard, as in the tables and on the command line."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops_per_device(self) -> float:
        """Floating-point operations of one device."""
        return 2.0 * self.devices * self.m * self.n * self.k

    @property
    def received_bytes_per_device(self) -> float:
        """Bytes that one device receives from the others."""
        return float((self.devices - 1) * self.m * self.k * jnp.dtype(DTYPES[self.dtype]).itemsize)


def loop_program(call: Callable[[jax.Array, jax.Array], jax.Array], mesh: Mesh, iterations: int) -> Any:
    """A jitted `((lhs, out), rhs) -> (lhs, out)` that runs `call` `iterations` times, each on the last one's result."""

    def program(state: tuple[jax.Array, jax.Array], rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            lhs, out = state
            # Read from the carried output, not from the product itself: XLA would compute that element apart. Scaled
            # back to the inputs' distribution and clipped, so that nothing grows from iteration to iteration.
            element = out[:1, :1].astype(jnp.float32) * (rhs.shape[0] ** -0.5)
            element = jnp.clip(element, -4.0, 4.0).astype(lhs.dtype)
            lhs = lax.dynamic_update_slice(lhs, element, (0, 0))
            return lhs, call(lhs, rhs)

        return lax.fori_loop(0, iterations, body, state)

    specs = (LHS, OUT)
    mapped = jax.shard_map(program, mesh=mesh, in_specs=(specs, RHS), out_specs=specs, check_vma=False)
    return jax.jit(mapped, donate_argnums=0)


def call_program(call: Callable[[jax.Array, jax.Array], jax.Array], mesh: Mesh) -> Any:
    """The method as a user would call it."""
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(LHS, RHS), out_specs=OUT, check_vma=False))


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
def _input_program(mesh: Mesh, m: int, n: int, k: int, dtype: str) -> Any:
    def generate(seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), lax.axis_index(AXIS))
        lhs_key, rhs_key = jax.random.split(key)
        lhs = jax.random.normal(lhs_key, (m, k), jnp.float32).astype(DTYPES[dtype])
        rhs = jax.random.normal(rhs_key, (k, n), jnp.float32).astype(DTYPES[dtype])
        return lhs, rhs

    return jax.jit(jax.shard_map(generate, mesh=mesh, in_specs=P(), out_specs=(LHS, RHS), check_vma=False))


def inputs(problem: Problem, mesh: Mesh, seed: int) -> tuple[jax.Array, jax.Array]:
    """Normal operands, different on every device, drawn where they are used."""
    return _input_program(mesh, problem.m, problem.n, problem.k, problem.dtype)(np.uint32(seed))


def gather(lhs: jax.Array) -> jax.Array:
    """The complete left operand (inside `shard_map`)."""
    return lax.all_gather(lhs, AXIS, tiled=True)


def reference(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """What the library is compared with: XLA's all-gather, then its dot (inside `shard_map`)."""
    return jnp.dot(gather(lhs), rhs)


def relative_error(lhs: jax.Array, rhs: jax.Array, out: jax.Array) -> jax.Array:
    """The relative Frobenius error of `out` against the f32 product of complete operands (inside `shard_map`)."""
    expected = jnp.dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    difference = out.astype(jnp.float32) - expected
    squares = lax.psum(jnp.stack([jnp.sum(difference**2), jnp.sum(expected**2)]), AXIS)
    return jnp.sqrt(squares[0] / squares[1])
