"""Activation functions for the tests (one uses every operation that kernels allow), and a case for `assembly.py`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import overlap
from tests.assembly import assembly
from tests.assembly.assembly import Case


def every_operation(y: jax.Array) -> jax.Array:
    """Uses each primitive that `overlap.frame.elementwise` allows inside a kernel, but for those with a formula."""
    z = jnp.where(jnp.round(jnp.sin(y) - jnp.cos(y)) >= 0.5, jnp.tanh(y), lax.logistic(jnp.log(1 + jnp.abs(y))))
    z += jnp.exp2(lax.clamp(-3.0, y, 2.0)) * jnp.exp(-y * y) + jnp.log2(2 + jnp.square(y)) / 3 + lax.rsqrt(1 + y**4)
    z += jnp.sqrt(jnp.abs(y)) + jnp.minimum(y, 3) - jnp.maximum(-y, 1) + (1 + jnp.abs(y)) ** 2
    z += ((y > 0) ^ (y <= 1)).astype(jnp.float32) + (((y != 0) & (y == y)) | (y < 3)).astype(jnp.int32)
    return z + y.astype(jnp.bfloat16)


def capturing(scalar: Any, half: Any, count: Any, flag: Any) -> Any:
    """Returns an activation that captures scalars of four kinds, and uses long formulas."""

    def activation(y: jax.Array) -> jax.Array:
        for i in range(3):
            y = y * jnp.expm1(scalar) + i
        return jax.nn.gelu(jnp.where(flag, y * count, y - half), approximate=False)

    return activation


WITHOUT_SCALARS = {
    "every_operation": every_operation,
    "softplus": jax.nn.softplus,
    "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
}


def assembled(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Returns a product with the activation that `case.config["activation"]` names."""
    from jax.sharding import PartitionSpec as P

    (m, n, k), name = case.shape, case.config["activation"]
    dtypes = ("f32", "bf16", "int32", "bool") if name == "capturing" else ()

    def call(lhs: jax.Array, rhs: jax.Array, *scalars: jax.Array) -> jax.Array:
        activation = capturing(*scalars) if scalars else WITHOUT_SCALARS[name]
        return overlap.matmul(lhs, rhs, activation=activation, implementation="fused")

    mapped = jax.shard_map(call, mesh=mesh, in_specs=jax.sharding.PartitionSpec(), out_specs=P(), check_vma=False)
    structs = [assembly.struct(mesh, shape, case.dtype) for shape in ((m, k), (k, n))]
    return mapped, (*structs, *(assembly.struct(mesh, (), dtype) for dtype in dtypes))
