"""The layers of `overlap.layers` as a JAX user writes them without that library: XLA's partitioner communicates.

Products are `x @ w` on global arrays. The weights carry their shardings as metadata, and
`lax.with_sharding_constraint` says how activations lie: between layers their rows are cut along `axis` (sequence
parallelism), inside a layer their features are. XLA derives the gathers, scatters and sums from these. So the layers
are the rival of the fused kernels: `python -m benchmarks step` and `python examples/train.py --compare` build one model
from either module.

Classes, arguments, parameters and initial values are those of `overlap.layers`. There is no `implementation`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

Axis = str | tuple[str, ...] | None


class _Linear(nnx.Linear):
    """An nnx.Linear with sharded parameters and a sharded result. It casts the kernel to `dtype` before the product."""

    def __init__(self, in_features: int, out_features: int, *, kernel: P, bias: P, result: P, **options: Any):
        specs: dict[str, Any] = dict(kernel_metadata={"out_sharding": kernel}, bias_metadata={"out_sharding": bias})
        super().__init__(in_features, out_features, **specs, **options)
        self.result = result


class ColumnParallelLinear(_Linear):
    """Its output features are sharded along `axis`.

    Attributes:
      inside: whether its result is constrained. If not, XLA chooses: for few features and many rows it may gather the
        weights instead of the rows.
    """

    inside = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: str = "tensor",
        fsdp_axis: Axis = None,
        batch_axis: Axis = None,
        **options: Any,
    ):
        kernel = P(fsdp_axis, axis)
        result = P(batch_axis, None, axis)
        super().__init__(in_features, out_features, kernel=kernel, bias=P(axis), result=result, **options)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        # With FSDP and without the constraint, XLA shards the features of the MLP along `fsdp_axis`, as the next kernel
        # is sharded, and moves activations to and fro. They are larger than the kernels.
        y = super().__call__(inputs)
        return lax.with_sharding_constraint(y, self.result) if self.inside else y


class RowParallelLinear(_Linear):
    """Its input features are sharded along `axis`. The rows of its result are."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis: str = "tensor",
        fsdp_axis: Axis = None,
        batch_axis: Axis = None,
        **options: Any,
    ):
        kernel = P(axis, fsdp_axis)
        result = P(batch_axis, axis, None)
        super().__init__(in_features, out_features, kernel=kernel, bias=P(None), result=result, **options)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        y = super().__call__(inputs)
        return lax.with_sharding_constraint(y if residual is None else residual + y, self.result)


class QKVProjection(nnx.Module):
    """Query, key and value of attention. Their heads are sharded along `axis`."""

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        use_bias: bool = False,
        **options: Any,
    ):
        self.head_dim = in_features // num_heads if head_dim is None else head_dim
        kv_features = (num_kv_heads or num_heads) * self.head_dim
        options["use_bias"] = use_bias
        self.query = ColumnParallelLinear(in_features, num_heads * self.head_dim, **options)
        self.key = ColumnParallelLinear(in_features, kv_features, **options)
        self.value = ColumnParallelLinear(in_features, kv_features, **options)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        heads = lambda features: features.reshape(*features.shape[:-1], -1, self.head_dim)  # noqa: E731
        return heads(self.query(x)), heads(self.key(x)), heads(self.value(x))


class OutputProjection(RowParallelLinear):
    """The projection from the heads of attention to features."""

    def __init__(self, num_heads: int, head_dim: int, out_features: int, *, use_bias: bool = False, **options: Any):
        super().__init__(num_heads * head_dim, out_features, use_bias=use_bias, **options)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        return super().__call__(inputs.reshape(*inputs.shape[:-2], -1), residual)


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) · up(x)), as in Llama and Qwen."""

    def __init__(self, in_features: int, hidden_features: int, *, use_bias: bool = False, **options: Any):
        options["use_bias"] = use_bias
        self.gate = ColumnParallelLinear(in_features, hidden_features, **options)
        self.up = ColumnParallelLinear(in_features, hidden_features, **options)
        self.down = RowParallelLinear(hidden_features, in_features, **options)

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x), residual)


class RMSNorm(nnx.RMSNorm):
    """Norm over the features. Its scale is whole on all devices."""

    def __init__(
        self,
        num_features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        axis: str = "tensor",
        fsdp_axis: Axis = None,
        batch_axis: Axis = None,
    ):
        del axis, fsdp_axis, batch_axis  # Rows need no neighbours.
        scale: dict[str, Any] = {"out_sharding": P(None)}
        super().__init__(num_features, dtype=dtype, param_dtype=param_dtype, scale_metadata=scale, rngs=rngs)
