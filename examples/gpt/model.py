"""The model of examples/train.py: a decoder-only transformer of overlap's layers.

Its code depends only on the names of the mesh's axes.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap.layers import ColumnParallelLinear, GatedMLP, OutputProjection, QKVProjection, RMSNorm

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
# The batch is split along these axes.
BATCH_AXES = (DATA, FSDP)
VOCABULARY = 256  # A token is a byte.


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention. Each device computes whole heads: nothing is communicated.

    XLA's attention keeps the scores [batch, heads, sequence, sequence] of every layer for the backward pass. That is
    most of a step's memory, so cuDNN computes it where it can.
    """
    cudnn = jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16 and query.shape[-1] in (64, 128)
    attention = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if cudnn else "xla"
    )
    heads = P(BATCH_AXES, None, TENSOR, None)
    with jax.named_scope("attention"):
        return jax.shard_map(attention, in_specs=heads, out_specs=heads, check_vma=False)(query, key, value)


class Block(nnx.Module):
    """Attention and MLP, each with a norm before it and a residual connection around both."""

    def __init__(self, sizes: argparse.Namespace, *, rngs: nnx.Rngs, **layer: Any):
        features, head_dim = sizes.features, sizes.features // sizes.heads
        self.attention_norm = RMSNorm(features, rngs=rngs, **layer)
        self.qkv = QKVProjection(features, sizes.heads, rngs=rngs, **layer)
        self.output = OutputProjection(sizes.heads, head_dim, features, rngs=rngs, **layer)
        self.mlp_norm = RMSNorm(features, rngs=rngs, **layer)
        self.mlp = GatedMLP(features, sizes.hidden, rngs=rngs, **layer)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [batch, sequence, features], sharded P(batch axes, tensor, None), to the same shape and sharding."""
        query, key, value = self.qkv(self.attention_norm(x))
        x = self.output(attend(query, key, value), residual=x)
        return self.mlp(self.mlp_norm(x), residual=x)


class GPT(nnx.Module):
    """Embeddings, blocks, a norm, and the logits of the next token.

    Args:
      options: the options of examples/train.py: "layers", "features", "heads", "hidden" and "sequence" are the shapes
        of the parameters, which are float32; "dtype" is that of products and activations.
      rngs: the seed of the parameters. They depend on the seed only, not on the mesh.
    """

    def __init__(self, options: argparse.Namespace, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(options.dtype)
        layer: dict[str, Any] = {
            "dtype": dtype,
            "axis": TENSOR,
            "fsdp_axis": FSDP,
            "batch_axis": BATCH_AXES,
            "implementation": None if options.implementation == "auto" else options.implementation,
        }
        small = nnx.initializers.normal(0.02)
        # The two tables are small, so each device has them whole.
        self.tokens = nnx.Embed(VOCABULARY, options.features, dtype=dtype, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(options.sequence, options.features, dtype=dtype, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(options, rngs=rngs, **layer) for _ in range(options.layers)])
        self.norm = RMSNorm(options.features, rngs=rngs, **layer)
        self.logits = ColumnParallelLinear(options.features, VOCABULARY, use_bias=False, rngs=rngs, **layer)
        self.remat = options.remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Computes, for each token, the logits of the next token.

        Args:
          tokens: int32 [batch, sequence], sharded P(batch axes, None).

        Returns:
          [batch, sequence, vocabulary], sharded P(batch axes, None, tensor).
        """
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        # From here on each device of the tensor axis has a part of every sequence (sequence parallelism).
        x = jax.lax.with_sharding_constraint(x, P(BATCH_AXES, TENSOR, None))
        for number, block in enumerate(self.blocks):
            with jax.named_scope(f"block {number}"):
                x = nnx.remat(Block.__call__)(block, x) if self.remat else block(x)
        return self.logits(self.norm(x))
