"""Tensor-parallel layers for flax.nnx, with the communication hidden behind the products. They need the extra `flax`.

    column parallel   ColumnParallelLinear, GatedMLP's gate and up, QKVProjection     gathers rows, then multiplies
    row parallel      RowParallelLinear, GatedMLP's down, OutputProjection            multiplies, then scatters the sums
    expert parallel   ExpertMLP: a router, and a gated MLP for each expert            gathers rows, scatters the sums
    between them      RMSNorm, LayerNorm                                              on rows that are sharded
    vocabulary        CrossEntropyHead: the loss of each token, without logits        gathers rows
    for flax's own    ShardedDotGeneral, make_dot_general_cls                         as their `dot_general[_cls]=`
    checkpoints       load_weights, saved_weights, open_checkpoint                    of Hugging Face's models

Activations are [batch, sequence, features]. Between layers the sequence is sharded along the tensor-parallel mesh axis
(sequence parallelism). Inside a layer the features (or heads) are sharded along it. Each layer calls
`overlap.sharded_matmul` on global arrays, so a model of these layers has no `shard_map`.

Parameters have the names and shapes of those of nnx.Linear and of nnx's norms, so checkpoints can be exchanged with an
unfused model. docs/layers.md is the guide. `Parallel` has the keywords that all layers share.
"""

from __future__ import annotations

from overlap import _requirements

if _reason := _requirements.why_not():
    raise ImportError(f"overlap.layers cannot be loaded: {_reason}; {_requirements.SEE_DOCTOR}")
try:
    import flax.nnx  # noqa: F401  The imports below need flax. Import it here first, for a message that says how to install it.
except ImportError as _error:
    raise ImportError(
        f"overlap.layers needs flax >= 0.12.12, which cannot be imported ({_requirements.in_one_line(_error)}): "
        "pip install 'overlap[flax]'"
    ) from _error

from overlap.layers.attention import OutputProjection, QKVProjection
from overlap.layers.dot_general import ShardedDotGeneral, make_dot_general_cls
from overlap.layers.experts import ExpertMLP
from overlap.layers.heads import CrossEntropyHead
from overlap.layers.linear import ColumnParallelLinear, RowParallelLinear
from overlap.layers.mlp import GatedMLP
from overlap.layers.norms import LayerNorm, RMSNorm
from overlap.layers.parallel import Options, Parallel
from overlap.layers.routers import RouterReport, Routes, SelectionBias, SigmoidTopK, SoftmaxTopK, TopKSoftmax
from overlap.layers.weights import load_weights, open_checkpoint, saved_weights

__all__ = [
    "ColumnParallelLinear",
    "CrossEntropyHead",
    "ExpertMLP",
    "GatedMLP",
    "LayerNorm",
    "Options",
    "OutputProjection",
    "Parallel",
    "QKVProjection",
    "RMSNorm",
    "RouterReport",
    "Routes",
    "RowParallelLinear",
    "SelectionBias",
    "ShardedDotGeneral",
    "SigmoidTopK",
    "SoftmaxTopK",
    "TopKSoftmax",
    "load_weights",
    "make_dot_general_cls",
    "open_checkpoint",
    "saved_weights",
]
