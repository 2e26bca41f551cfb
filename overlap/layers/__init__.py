"""Tensor-parallel flax.nnx layers whose communication hides behind the matrix products. They need the extra `flax`.

    column parallel   ColumnParallelLinear, GatedMLP's gate and up, QKVProjection     gathers rows, then multiplies
    row parallel      RowParallelLinear, GatedMLP's down, OutputProjection            multiplies, then scatters the sums
    between them      RMSNorm, LayerNorm                                              on rows that are sharded
    for nnx.Linear    ShardedDotGeneral                                               as its `dot_general=`

Activations between layers are [batch, sequence, features] with the sequence sharded along the tensor-parallel mesh axis
(sequence parallelism), inside a layer with the features (or heads) sharded along it. Each layer calls
`overlap.sharded_matmul` on global arrays, so a model of these layers has no `shard_map`. Parameters are those of
nnx.Linear and the like, in names and shapes, so checkpoints interchange with an unfused model. docs/layers.md is the
guide; `Parallel` has the keywords that all layers share.
"""

from __future__ import annotations

from overlap import _requirements

if _reason := _requirements.why_not():
    raise ImportError(f"overlap.layers cannot be loaded: {_reason}; {_requirements.SEE_DOCTOR}")
try:
    import flax.nnx  # noqa: F401  What follows needs it; here alone is said how to get it.
except ImportError as _error:
    raise ImportError(
        f"overlap.layers needs flax >= 0.12.12, which cannot be imported ({_requirements.in_one_line(_error)}): "
        "pip install 'overlap[flax]'"
    ) from _error

from overlap.layers.attention import OutputProjection, QKVProjection
from overlap.layers.dot_general import ShardedDotGeneral
from overlap.layers.linear import ColumnParallelLinear, RowParallelLinear
from overlap.layers.mlp import GatedMLP
from overlap.layers.norms import LayerNorm, RMSNorm
from overlap.layers.parallel import Options, Parallel

__all__ = [
    "ColumnParallelLinear",
    "GatedMLP",
    "LayerNorm",
    "Options",
    "OutputProjection",
    "Parallel",
    "QKVProjection",
    "RMSNorm",
    "RowParallelLinear",
    "ShardedDotGeneral",
]
