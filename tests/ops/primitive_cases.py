"""The kernels of examples/all_gather.py and examples/halo_exchange.py, for the tests. Puts examples/ on the path."""

from __future__ import annotations

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import all_gather as gathering
import halo_exchange as stencils

from tests.assembly import assembly
from tests.oracle import make_mesh

KERNELS = {
    "all_gather": (gathering.all_gather, gathering.by_jax),
    "all_gather, handshake": (functools.partial(gathering.all_gather, handshake=True), gathering.by_jax),
    "halo_exchange": (stencils.stencil, stencils.by_jax),
}


def mapped(function, mesh):
    return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)


def program(name, devices, shard):
    """Returns a function that runs the kernel on new data and returns the largest distance from JAX's result.

    JAX's result is complete before the kernel starts. Each device compares its own part right after the kernel: a
    collective in between would wait for the peers, and so hide that the kernel did not.
    """
    mesh = make_mesh(x=devices)
    kernel, by_jax = KERNELS[name]
    expected = jax.jit(mapped(by_jax, mesh))
    distances = jax.jit(mapped(lambda x, wanted: abs(kernel(x) - wanted).max(keepdims=True), mesh))
    sharding = jax.NamedSharding(mesh, P("x"))

    def run(seed):
        x = np.random.default_rng(seed).standard_normal((devices * shard[0], shard[1]), np.float32)
        x = jax.make_array_from_callback(x.shape, sharding, lambda place: x[place])
        return float(jax.jit(jnp.max)(distances(x, jax.block_until_ready(expected(x)))))

    return run


def assembled(function, case, mesh):
    """Returns (function to compile, arguments) for assembly.py. `case.shape`: a shard's sizes, and a zero."""
    rows, columns, _ = case.shape
    x = assembly.struct(mesh, (rows * mesh.size, columns), case.dtype, P("x"))
    return mapped(function, mesh), (x,)


def all_gather(case, mesh):
    return assembled(KERNELS["all_gather"][0], case, mesh)


def all_gather_with_handshake(case, mesh):
    return assembled(KERNELS["all_gather, handshake"][0], case, mesh)


def halo_exchange(case, mesh):
    return assembled(KERNELS["halo_exchange"][0], case, mesh)
