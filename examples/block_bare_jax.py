"""A transformer block in JAX alone: `overlap.sharded_matmul` on global arrays under jax.jit. No flax, no shard_map.

[JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8] python examples/block_bare_jax.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import overlap

FEATURES, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BATCH, ROWS = 64, 8, 4, 16, 128, 4, 32
BETWEEN, INSIDE = P("data", "tensor", None), P("data", None, "tensor")  # Activations: rows sharded, features sharded.
COLUMN, ROW = P("data", "tensor"), P("tensor", "data")  # Weights: along "data" by FSDP, along "tensor" for this layer.
SHAPES = {
    "query": ((FEATURES, HEADS * HEAD_DIM), COLUMN),
    "key": ((FEATURES, KV_HEADS * HEAD_DIM), COLUMN),
    "value": ((FEATURES, KV_HEADS * HEAD_DIM), COLUMN),
    "out": ((HEADS * HEAD_DIM, FEATURES), ROW),
    "gate": ((FEATURES, HIDDEN), COLUMN),
    "up": ((FEATURES, HIDDEN), COLUMN),
    "down": ((HIDDEN, FEATURES), ROW),
}
Weights = dict[str, jax.Array]


def init(key: jax.Array) -> Weights:
    keys = jax.random.split(key, len(SHAPES))
    weights = {
        name: jax.reshard(jax.random.normal(k, shape, jnp.float32) / shape[0] ** 0.5, spec)
        for k, (name, (shape, spec)) in zip(keys, SHAPES.items(), strict=True)
    }
    return weights | {"norm1": jnp.ones(FEATURES), "norm2": jnp.ones(FEATURES)}


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32**2, axis=-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def heads(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], -1, HEAD_DIM)


def block(weights: Weights, x: jax.Array, implementation: Any = None) -> jax.Array:
    def product(x: jax.Array, *names: str, out: P, residual: jax.Array | None = None) -> list[jax.Array]:
        rhs = [weights[name].astype(x.dtype) for name in names]  # Cast before they are gathered.
        addend = None if residual is None else [residual]
        return overlap.sharded_matmul(x, rhs, out_sharding=out, addend=addend, implementation=implementation)

    query, key, value = map(heads, product(norm(x, weights["norm1"]), "query", "key", "value", out=INSIDE))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    (x,) = product(attended.reshape(*attended.shape[:-2], -1), "out", out=BETWEEN, residual=x)
    gate, up = product(norm(x, weights["norm2"]), "gate", "up", out=INSIDE)
    return product(jax.nn.silu(gate) * up, "down", out=BETWEEN, residual=x)[0]


@jax.jit
def loss_and_grads(weights: Weights, x: jax.Array) -> tuple[jax.Array, Weights]:
    return jax.value_and_grad(lambda weights: jnp.mean(block(weights, x).astype(jnp.float32) ** 2))(weights)


def main(data: int = 1, tensor: int | None = None) -> tuple[jax.Array, Weights]:
    count = jax.device_count()
    tensor = tensor or min(KV_HEADS, count)
    if BATCH % data or KV_HEADS % tensor or data * tensor > count:
        raise ValueError(f"{data=} must divide {BATCH=}, {tensor=} must divide {KV_HEADS=}, on at most {count} devices")
    # The axes of jax.make_mesh are Explicit: types say how arrays are sharded.
    with jax.set_mesh(jax.make_mesh((data, tensor), ("data", "tensor"))):
        x = jax.reshard(jax.random.normal(jax.random.key(1), (BATCH, ROWS, FEATURES), jnp.bfloat16), BETWEEN)
        return loss_and_grads(jax.jit(init)(jax.random.key(0)), x)  # Under jit no device ever holds whole weights.


if __name__ == "__main__":
    loss, grads = main()
    print(f"loss {loss:.4f}, gradient of the gate's weights {jnp.linalg.norm(grads['gate']):.4f}")
