"""The demo's measurements: is it right, and how long does it take. The real harness is in benchmarks/."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap.tuning.timing import marginal_s

AXIS = "x"
_WARM_UP_S = 0.5
_MARGINAL_RUNS = 2
LHS, RHS, OUT = P(AXIS, None), P(None, AXIS), P(None, AXIS)
Call = Callable[[jax.Array, jax.Array], jax.Array]  # what runs inside jax.shard_map


def make_inputs(mesh: Mesh, m_shard: int, k: int, n_shard: int) -> tuple[jax.Array, jax.Array]:
    """Normal float16 operands, sharded: lhs by rows, rhs by columns."""
    size = mesh.shape[AXIS]

    def draw(key: int, shape: tuple[int, int], spec: P) -> jax.Array:
        def program() -> jax.Array:
            return jax.random.normal(jax.random.key(key), shape, jnp.float32).astype(jnp.float16)

        return jax.jit(program, out_shardings=NamedSharding(mesh, spec))()

    return draw(0, (size * m_shard, k), LHS), draw(1, (k, size * n_shard), RHS)


def program(call: Call, mesh: Mesh, lhs_spec: P = LHS) -> Any:
    """The jitted program around `call`."""
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(lhs_spec, RHS), out_specs=OUT, check_vma=False))


def loop_program(call: Call, mesh: Mesh, iterations: int, lhs_spec: P = LHS) -> Any:
    """A jitted program that runs `call` `iterations` times on the device, each run depending on the one before."""

    def looped(lhs: jax.Array, rhs: jax.Array, out: jax.Array) -> jax.Array:
        def body(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            lhs, out = carry
            # One element of the last result goes into the operand, in place: XLA can then neither hoist nor drop a run.
            lhs = lax.dynamic_update_slice(lhs, jnp.clip(out[:1, :1], -1, 1).astype(lhs.dtype), (0, 0))
            return lhs, call(lhs, rhs)

        return lax.fori_loop(0, iterations, body, (lhs, out))[1]

    return jax.jit(jax.shard_map(looped, mesh=mesh, in_specs=(lhs_spec, RHS, OUT), out_specs=OUT, check_vma=False))


def relative_error(out: jax.Array, lhs: jax.Array, rhs: jax.Array, chunk_rows: int = 1024) -> float:
    """Frobenius norm of the difference to the float32 product, relative to the product's; in chunks of rows."""
    mesh = lhs.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    everywhere = jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, P()))

    @jax.jit
    def squares(out_rows: jax.Array, lhs_rows: jax.Array, rhs: jax.Array) -> jax.Array:
        exact = jnp.dot(lhs_rows.astype(jnp.float32), rhs.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        return jnp.stack([jnp.sum((out_rows.astype(jnp.float32) - exact) ** 2), jnp.sum(exact**2)])

    total = np.zeros(2)
    lhs = everywhere(lhs)
    for start in range(0, lhs.shape[0], chunk_rows):
        rows = slice(start, start + chunk_rows)
        total += np.asarray(squares(out[rows], lhs[rows], rhs), np.float64)
    return float(np.sqrt(total[0] / total[1]))


def time_per_run_us(
    runs: Mapping[str, Callable[[], jax.Array]],
    repeats: Mapping[str, int],
    rounds: int,
    tick: Callable[[], None],
    *,
    marginal: bool,
) -> dict[str, float]:
    """Median time of each run in microseconds, the runs taking turns.

    Args:
      runs: by name; each starts work on the devices and returns an array to wait for.
      repeats: by how much to divide a run's time.
      rounds: how many times each is measured.
      tick: called after each round.
      marginal: whether to measure what a run adds to one before it, without the cost of beginning and waiting.
    """

    def seconds(run: Callable[[], jax.Array], count: int) -> float:
        start = time.perf_counter()
        last = [run() for _ in range(count)][-1]
        last.block_until_ready()
        return time.perf_counter() - start

    times: dict[str, list[float]] = {name: [] for name in runs}
    # Compiled, and at the clocks that the work itself settles at.
    begin = time.perf_counter()
    while time.perf_counter() - begin < _WARM_UP_S:
        for run in runs.values():
            run().block_until_ready()
    for _ in range(rounds):
        for name, run in runs.items():
            one = marginal_s(functools.partial(seconds, run), _MARGINAL_RUNS) if marginal else seconds(run, 1)
            times[name].append(one / repeats[name] * 1e6)
        tick()
    return {name: statistics.median(samples) for name, samples in times.items()}
