"""Runs the examples of docs/primitives.md on the GPUs of the job, or emulated on CPU devices."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import overlap
from overlap import emulation

AXIS, EMULATED_DEVICES = "x", 4


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line of an example: --devices N."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--devices", type=int, metavar="N", help=f"default: all GPUs, or {EMULATED_DEVICES} emulated")
    return made


def mesh_of(count: int | None) -> jax.sharding.Mesh:
    """A mesh of `count` devices along `AXIS`; None: of all GPUs of the job or, without GPUs, of emulated devices."""
    if count is not None and count < 1:
        raise SystemExit(f"--devices must be at least 1, got {count}")
    jax.config.update("jax_num_cpu_devices", count or EMULATED_DEVICES)
    overlap.initialize()  # Joins the job where each GPU has a process of its own; does nothing in a single process.
    devices = jax.devices()[:count]
    if count is not None and len(devices) != count:
        raise SystemExit(f"--devices must be from 1 to {len(devices)}, the number of GPUs here, got {count}")
    return jax.make_mesh((len(devices),), (AXIS,), devices=devices)


def on_mesh(mesh: jax.sharding.Mesh, function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Makes a function of one shard a jitted function of a global array. The rows of array and result are sharded.

    `check_vma=False` is needed because the results of `plgpu.kernel` have types that do not vary along mesh axes.
    """
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False))


def report(
    name: str,
    kernel: Callable[[jax.Array], jax.Array],
    expected: Callable[[jax.Array], jax.Array],
    mesh: jax.sharding.Mesh,
    shard_shape: tuple[int, int],
) -> int:
    """Runs a kernel three times, each time with other data, compares with JAX, and prints one line.

    Args:
      name: the kernel's name.
      kernel: the function of one shard that runs it.
      expected: a function with the same result, made of JAX's own operations.
      mesh: its only axis is `AXIS`.
      shard_shape: rows and columns of a shard.

    Returns:
      The exit status: 0 if all elements agree to 1e-5, else 1.
    """
    emulated = mesh.devices.flat[0].platform == "cpu"
    shape = mesh.size * shard_shape[0], shard_shape[1]
    draw = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), shape), out_shardings=jax.NamedSharding(mesh, P(AXIS))
    )
    count_wrong = jax.jit(lambda got, wanted: jnp.sum(~(jnp.abs(got - wanted) <= 1e-5)))
    run, by_jax, wrong = on_mesh(mesh, kernel), on_mesh(mesh, expected), 0
    with emulation.emulate() if emulated else contextlib.nullcontext():
        for seed in range(3):
            x: Any = draw(seed)
            wrong += int(count_wrong(run(x), by_jax(x)))
    where = "emulated on the CPU" if emulated else mesh.devices.flat[0].device_kind
    if jax.process_index() == 0:
        print(f"{name}: {mesh.size} devices ({where}), shards of {shard_shape}: 3 launches, {wrong} wrong elements")
    return int(wrong > 0)
