"""Activations of several right operands, which make one result of them: emulated, differentiated, assembled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import overlap
from tests import assembly


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def assembled(case: assembly.Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """For `tests.assembly`: the gated product of a device's operands or, on several devices, of gathered rows.

    `case.config` has fields of `Config`, and "trains": the kernel then keeps the values before the activation;
    "scales": all vectors of the epilogue; "right": the weights are [n, k].
    """
    options = dict(case.config)
    trains, scales, right = (options.pop(name, False) for name in ("trains", "scales", "right"))
    (m, n, k), size = case.shape, mesh.shape["x"]
    lhs, side, vector = P("x", None), P("x", None) if right else P(None, "x"), P("x")
    structs = [assembly.struct(mesh, (size * m, k), case.dtype, lhs)]
    structs += [assembly.struct(mesh, (size * n, k) if right else (k, size * n), case.dtype, side)] * 2
    structs += [assembly.struct(mesh, (size * n,), "f32", vector)] * 4
    structs += [assembly.struct(mesh, (size * m, 1), "f32", lhs)]
    config = overlap.Config.of(**options) if options else None

    def call(x: jax.Array, *rest: jax.Array) -> jax.Array:
        *weights, a, b, c, d, rows = rest
        more: dict[str, Any] = dict(bias=(a, b), rhs_scale=(c, d), lhs_scale=rows) if scales else {}
        more |= dict(activation=swiglu, config=config, implementation="fused", transpose_rhs=right)
        if size == 1:
            return overlap.matmul(x, tuple(weights), **more)
        return overlap.all_gather_lhs_matmul(x, tuple(weights), "x", **more)

    def both(*operands: jax.Array) -> Any:
        return jax.jvp(call, operands, jax.tree.map(jnp.zeros_like, operands))[0] if trains else call(*operands)

    specs = (lhs, side, side, *[vector] * 4, lhs)
    return jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False), tuple(structs)
