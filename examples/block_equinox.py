"""A transformer block in equinox: modules that call `overlap.sharded_matmul` on arrays of an Explicit mesh.

[JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8] python examples/block_equinox.py
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import overlap

FEATURES, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BATCH, ROWS = 64, 8, 4, 16, 128, 4, 32
BETWEEN, INSIDE = P("data", "tensor", None), P("data", None, "tensor")  # Activations: rows sharded, features sharded.
COLUMN, ROW = P("data", "tensor"), P("tensor", "data")  # Weights: along "data" by FSDP, along "tensor" for this layer.


def draw(key: jax.Array, rows: int, columns: int, spec: P) -> jax.Array:
    return jax.reshard(jax.random.normal(key, (rows, columns)) / rows**0.5, spec)


class Column(eqx.Module):
    """Several column-parallel weights. Their products share one gather of the rows."""

    weights: list[jax.Array]

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        return overlap.sharded_matmul(x, [w.astype(x.dtype) for w in self.weights], out_sharding=INSIDE)


def row_parallel(x: jax.Array, weight: jax.Array, residual: jax.Array) -> jax.Array:
    """The product, summed over the devices and scattered by rows, plus the residual."""
    return overlap.sharded_matmul(x, weight.astype(x.dtype), out_sharding=BETWEEN, addend=residual)


class Block(eqx.Module):
    """Norm, attention, norm and gated MLP."""

    norms: list[eqx.nn.RMSNorm]
    qkv: Column
    out: jax.Array
    gate_up: Column
    down: jax.Array

    def __init__(self, key: jax.Array):
        keys = iter(jax.random.split(key, 7))
        self.norms = [eqx.nn.RMSNorm(FEATURES, use_bias=False) for _ in range(2)]
        self.qkv = Column([draw(next(keys), FEATURES, n * HEAD_DIM, COLUMN) for n in (HEADS, KV_HEADS, KV_HEADS)])
        self.out = draw(next(keys), HEADS * HEAD_DIM, FEATURES, ROW)
        self.gate_up = Column([draw(next(keys), FEATURES, HIDDEN, COLUMN) for _ in range(2)])
        self.down = draw(next(keys), HIDDEN, FEATURES, ROW)

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = (y.reshape(*y.shape[:-1], -1, HEAD_DIM) for y in self.qkv(jax.vmap(jax.vmap(self.norms[0]))(x)))
        attended = jax.nn.dot_product_attention(*parts, is_causal=True)
        x = row_parallel(attended.reshape(*attended.shape[:-2], -1), self.out, x)
        gate, up = self.gate_up(jax.vmap(jax.vmap(self.norms[1]))(x))
        return row_parallel(jax.nn.silu(gate) * up, self.down, x)


@eqx.filter_jit
@eqx.filter_value_and_grad
def loss_and_grads(block: Block, x: jax.Array) -> jax.Array:
    return jnp.mean(block(x).astype(jnp.float32) ** 2)


def main(data: int = 1, tensor: int | None = None) -> tuple[jax.Array, Block]:
    count = jax.device_count()
    tensor = tensor or min(KV_HEADS, count)
    if BATCH % data or KV_HEADS % tensor or data * tensor > count:
        raise ValueError(f"{data=} must divide {BATCH=}, {tensor=} must divide {KV_HEADS=}, on at most {count} devices")
    with jax.set_mesh(jax.make_mesh((data, tensor), ("data", "tensor"))):
        x = jax.reshard(jax.random.normal(jax.random.key(1), (BATCH, ROWS, FEATURES), jnp.bfloat16), BETWEEN)
        return loss_and_grads(eqx.filter_jit(Block)(jax.random.key(0)), x)


if __name__ == "__main__":
    print(f"loss {main()[0]:.4f}")
