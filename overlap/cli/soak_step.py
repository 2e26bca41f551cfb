"""A training step for `python -m overlap soak`: one program of kernels, products by XLA, and XLA's collectives.

The operands are global arrays under `jax.jit`. Kernels gather or sum along one axis of the mesh. Along the others the
batch and the weights are sharded (FSDP): XLA gathers weights and scatters their cotangents, beside kernels or not. The
results and all gradients are compared.

All operands are −1, 0 or 1. The cotangent is zero but for a few elements. So all values that are rounded to bfloat16
before they are added to others are whole numbers far below 256, which are exact (of the largest, the terms of the sum
over the devices, the standard deviation is 30).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.cli.soak_programs import Axis, exact, gated, spin
from overlap.primitives.integers import ceil_div

# In how many rows of the cotangent, and how many columns of these, elements are not zero.
_ROWS = 8
_COLUMNS = 4


@dataclasses.dataclass(frozen=True)
class Step:
    """A gated MLP beside one more product, forward and backward.

    Attributes:
      name: the name in messages.
      rows: of each device.
      hidden: features of the rows, or as many more as the devices along the other axes divide.
      width: features inside the MLP, of each device.
    """

    name: str
    rows: int = 64
    hidden: int = 48
    width: int = 40


STEP = Step("step")


@functools.cache
def program(case: Step, mesh: Mesh, axis: Axis, steps: int) -> Callable[..., jax.Array]:
    """As `soak_programs.program`, for a step whose kernels run along `axis`."""
    along = (axis,) if isinstance(axis, str) else axis
    others = tuple(name for name in mesh.axis_names if name not in along)
    batch = others or None
    size = math.prod(mesh.shape[name] for name in along)
    copies = mesh.size // size
    unit = math.lcm(8, copies)  # Rows of 16 bytes or a multiple.
    hidden = ceil_div(case.hidden, unit) * unit
    features = size * case.width
    between = P(batch, along)
    inside = P(batch, None, along)
    # Of the rows, and of the weights of gate, up, down and the product beside them.
    shapes = (
        (copies, size * case.rows, hidden),
        (hidden, features),
        (hidden, features),
        (features, hidden),
        (hidden,) * 2,
    )
    specs = between, P(batch, along), P(batch, along), P(along, batch), P(None, batch)
    every = tuple(mesh.axis_names)
    on_parts = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    def step(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
        def product(lhs: jax.Array, rhs: Any, of_lhs: P, of_rhs: P, out: P, **options: Any) -> Any:
            given = dict(lhs_sharding=of_lhs, rhs_sharding=of_rhs, out_sharding=out, mesh=mesh)
            return overlap.sharded_matmul(lhs, rhs, **given, **options)

        h = product(x, [gate, up], between, specs[1], inside, activation=gated, implementation="fused")
        beside = product(x, own, between, specs[4], between, implementation="xla")
        return product(h, down, inside, specs[3], between, implementation="fused"), beside

    def dense(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, own: jax.Array) -> tuple[jax.Array, ...]:
        flat = x.reshape(-1, hidden)
        h = gated(exact(flat, gate), exact(flat, up))
        return tuple(exact(*pair).astype(x.dtype).reshape(x.shape) for pair in ((h, down), (flat, own)))

    def with_gradients(f: Callable[..., tuple[jax.Array, ...]], given: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        *operands, cotangent = given
        outs, pull = jax.vjp(f, *operands)
        return (*outs, *pull((cotangent,) * len(outs)))

    def drawn(first: jax.Array, second: jax.Array) -> list[jax.Array]:
        """All operands, and the cotangent of the result."""
        pools = first, second, second, first, second, first
        # Each array starts at another number of a pool.
        *arrays, cotangent = (
            jnp.resize(jnp.roll(pool, 977 * i), shape).astype(jnp.bfloat16)
            for i, (pool, shape) in enumerate(zip(pools, (*shapes, shapes[0]), strict=True))
        )
        rows = jnp.arange(copies * size * case.rows)
        columns = jnp.arange(hidden)
        is_there = (rows % (len(rows) // _ROWS) == 0)[:, None] & (columns % (hidden // _COLUMNS) == 0)
        return [*arrays, jnp.where(is_there.reshape(shapes[0]), cotangent, 0)]

    def placed(x: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def wrong(found: Sequence[jax.Array], expected: Sequence[jax.Array]) -> jax.Array:
        """How many results differ, on this device, from its part of what is expected."""
        return sum(
            (jnp.any(a != b).astype(jnp.int32) for a, b in zip(found, expected, strict=True)), jnp.zeros(1, jnp.int32)
        )

    def run(late_us: jax.Array, period: jax.Array, *pools: jax.Array) -> jax.Array:
        def launch(i: jax.Array, count: jax.Array) -> jax.Array:
            # Each device has all operands, and computes all of what is expected, without communication.
            whole = [placed(x, P()) for x in drawn(*(jnp.roll(pool, i) for pool in pools))]
            expected = on_parts(functools.partial(with_gradients, dense), in_specs=(P(),), out_specs=P())(whole)
            given = [placed(x, spec) for x, spec in zip(whole, (*specs, between), strict=True)]
            late = jnp.where(i % period == period - 1, late_us, 0.0)
            delayed = on_parts(
                lambda x, late: x + spin(late[0]).astype(x.dtype), in_specs=(between, P(every)), out_specs=between
            )
            given[0] = delayed(given[0], late)
            found = with_gradients(step, given)
            of_all = (between, between, *specs)
            return count + on_parts(wrong, in_specs=(of_all, of_all), out_specs=P(every))(found, expected)

        return lax.fori_loop(0, steps, launch, placed(jnp.zeros(mesh.size, jnp.int32), P(every))).sum()

    return jax.jit(run)
