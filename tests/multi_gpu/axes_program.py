"""Runs fused calls along different axes of one mesh, one after the other, on devices that are late: for tests on GPUs.

The command runs them once, prints how many results were wrong, and exits. A test uses it as a negative control, so it
may also end with an error:

    python -m tests.multi_gpu.axes_program [--one-key] [--seed S] [--programs apart]
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from tests.oracle import make_mesh

ROWS, COLUMNS, DEPTH = 128, 256, 256
LATE_US = (0, 0, 0, 100, 1000, 5000, 20000)


def spin(microseconds):
    """Keeps this device busy for about that long, and returns a zero that depends on that work."""
    turns = (microseconds * 0.06).astype(jnp.int32)  # Each takes about 18 µs.
    return lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.zeros((), jnp.float32))


def wrong_results(axis, steps, late_us, whole, weights, **options):
    """Inside `shard_map`: counts how many of `steps` products along `axis` are wrong on this device.

    `late_us`: how late this device is in the first step. `whole`: [D · ROWS, DEPTH], the gathered operand, the same on
    all devices. All sums are whole numbers that the dtypes used here represent exactly.
    """
    me, size = lax.axis_index(axis), lax.axis_size(axis)
    whole = whole[: size * ROWS]

    def step(i, wrong):
        late = spin(jnp.where(i == 0, late_us, 0))
        now = jnp.roll(whole, i, axis=1)
        shard = lax.dynamic_slice(now, (me * ROWS, 0), (ROWS, DEPTH)) + late.astype(whole.dtype)
        out = overlap.all_gather_lhs_matmul(shard, weights, axis, implementation="fused", **options)
        return wrong + jnp.any(out != now @ weights).astype(jnp.int32)

    return lax.fori_loop(0, steps, step, jnp.int32(0))


def operands(seed):
    chance = np.random.default_rng(seed)
    whole = chance.integers(-1, 2, (8 * ROWS, DEPTH)).astype(jnp.bfloat16)
    return jnp.asarray(whole), jnp.asarray(chance.integers(-1, 2, (DEPTH, COLUMNS)).astype(jnp.bfloat16))


@functools.cache
def program(mesh, axes, steps):
    """A jitted function of (late_us [devices, len(axes)], whole, weights): loops along each of `axes` in turn."""

    def run(late_us, whole, weights):
        wrong = jnp.int32(0)
        for turn, axis in enumerate(axes):
            # The operand depends on the previous loop, as with consecutive layers.
            wrong += wrong_results(axis, steps, late_us[0, turn] + 0 * wrong, whole, weights)
        return lax.psum(wrong, mesh.axis_names)

    every = tuple(mesh.axis_names)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(every), P(), P()), out_specs=P(), check_vma=False))


def count_wrong(mesh, seed, repeats, *, apart=False, steps=6):
    """Counts wrong products along both axes of a mesh in turn, until some are.

    All loops are in one program, or each in a program of its own.
    """
    chance, names = np.random.default_rng(seed), mesh.axis_names
    sharded = jax.NamedSharding(mesh, P(tuple(names)))
    whole, weights = (jax.device_put(np.asarray(x), jax.NamedSharding(mesh, P())) for x in operands(seed))
    wrong = 0
    for _ in range(repeats):
        axes = tuple(names[i] for i in chance.permutation(len(names)))
        late = chance.choice(LATE_US, (mesh.size, len(axes))).astype(np.float32)
        programs = [((axis,), late[:, i : i + 1]) for i, axis in enumerate(axes)] if apart else [(axes, late)]
        results = []
        for part, of_part in programs:
            given = jax.make_array_from_callback(of_part.shape, sharded, lambda index, values=of_part: values[index])
            results.append(program(mesh, part, steps)(given, whole, weights))
        wrong += sum(int(jax.device_get(x)) for x in results)
        if wrong:
            break
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one-key", action="store_true", help="as it was: the same ready flag whoever talks to whom")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.one_key:
        from overlap.primitives import handshake

        handshake._key = lambda context, group, only: [0x5EED, 1, 2, 3]
    overlap.initialize()
    side = 2
    mesh = make_mesh(x=side, y=jax.device_count() // side)
    wrong = count_wrong(mesh, arguments.seed, arguments.repeats, apart=arguments.apart)
    print(f"{wrong} wrong", flush=True)


if __name__ == "__main__":
    main()
