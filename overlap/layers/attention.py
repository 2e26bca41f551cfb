"""The projections around attention: query, key and value by one gather, and the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import jax

from overlap.layers.checks import check_array, check_sizes
from overlap.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from overlap.layers.parallel import Layer, LinearOptions, Options, Parallel, divides

_HEADS = "shard along fewer devices"


class QKVProjection(Layer):
    """Query, key and value of attention, by one gather and one call. The heads are sharded along `axis`.

    `query`, `key` and `value` are `ColumnParallelLinear`s: query of [in_features, num_heads · head_dim], key and value
    of [in_features, num_kv_heads · head_dim]. A model with three nnx.Linear of these names has the same checkpoint.

    Each device has whole groups of heads that share a key and a value (grouped-query attention), so attention needs no
    communication.

    Args:
      in_features: features of the input.
      num_heads: heads of the query, a multiple of the devices along `axis`, and of num_kv_heads.
      num_kv_heads: heads of key and of value, a multiple of the devices along `axis`; by default num_heads.
      head_dim: features of a head; by default in_features / num_heads.
      use_bias: whether query, key and value have a bias (Qwen's have one).
      name: what profiles and the HLO's metadata call this layer.
      **options: as for `ColumnParallelLinear`.

    Raises:
      ValueError: an axis is not in the mesh, or its devices do not divide the heads; num_kv_heads does not divide
        num_heads; num_heads does not divide in_features, and no head_dim is given.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        use_bias: bool = False,
        name: str = "QKVProjection",
        **options: Unpack[LinearOptions],
    ):
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_sizes(name, in_features=in_features, num_heads=num_heads, num_kv_heads=kv_heads)
        if num_heads % kv_heads:
            way_out = max(heads for heads in range(1, kv_heads + 1) if num_heads % heads == 0)
            raise ValueError(
                f"{name}: num_heads={num_heads} must be a multiple of num_kv_heads={kv_heads}: give num_kv_heads="
                f"{way_out}, for example"
            )
        if head_dim is None and in_features % num_heads:
            raise ValueError(f"{name}: in_features={in_features} is no multiple of {num_heads=}: give head_dim=")
        self.name = name
        self.head_dim = in_features // num_heads if head_dim is None else head_dim
        check_sizes(name, head_dim=self.head_dim)
        _check_heads(name, options, "num_heads", num_heads)
        _check_heads(name, options, "num_kv_heads", kv_heads, ", or repeat the heads of key and value")
        options["part_of"] = name

        def linear(name: str, heads: int) -> ColumnParallelLinear:
            features = heads * self.head_dim
            return ColumnParallelLinear(in_features, features, use_bias=use_bias, name=name, **options)

        self.query = linear("query", num_heads)
        self.key, self.value = linear("key", kv_heads), linear("value", kv_heads)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes query, key and value.

        Args:
          x: [..., rows, in_features], sharded as between layers (`Parallel`).

        Returns:
          The query, [..., rows, num_heads, head_dim], and key and value, [..., rows, num_kv_heads, head_dim] each. All
          are sharded P(batch_axis, None, axis, None), as jax.nn.dot_product_attention takes them.
        """
        with jax.named_scope(self.name):
            query, key, value = column_parallel(x, [self.query, self.key, self.value])
            return self._heads(query), self._heads(key), self._heads(value)

    def _heads(self, features: jax.Array) -> jax.Array:
        return features.reshape(*features.shape[:-1], -1, self.head_dim)


class OutputProjection(RowParallelLinear):
    """The projection from the heads of attention to features, a `RowParallelLinear`.

    kernel: [num_heads · head_dim, out_features], P(axis, fsdp_axis).

    Args:
      num_heads: number of heads, a multiple of the devices along `axis`.
      head_dim: features of a head.
      out_features: features of the result.
      use_bias: whether a bias is added.
      name, **options: as for `RowParallelLinear`.

    Raises:
      ValueError: an axis is not in the mesh, or its devices do not divide the heads or features.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        out_features: int,
        *,
        use_bias: bool = False,
        name: str | None = None,
        **options: Unpack[LinearOptions],
    ):
        title = type(self).__name__ if name is None else name
        check_sizes(title, num_heads=num_heads, head_dim=head_dim, out_features=out_features)
        _check_heads(title, options, "num_heads", num_heads)
        super().__init__(num_heads * head_dim, out_features, use_bias=use_bias, name=name, **options)
        self.num_heads = num_heads
        self.head_dim = head_dim

    def __call__(self, inputs: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Computes the features.

        Args:
          inputs: [..., rows, num_heads, head_dim], sharded P(batch_axis, None, axis, None), as attention returns it.
          residual: [..., rows, out_features], sharded as the result, to which it is added.

        Returns:
          [..., rows, out_features], sharded as between layers (`Parallel`).
        """
        check_array(self.title, "the input", inputs)
        heads = self.num_heads, self.head_dim
        if inputs.ndim < 3 or inputs.shape[-2:] != heads:
            raise ValueError(
                f"{self.title}: the input must be [..., rows, num_heads, head_dim] with (num_heads, head_dim)={heads}, "
                f"as attention returns it, got shape {tuple(inputs.shape)}: reshape(*x.shape[:-1], {heads[0]}, "
                f"{heads[1]}) splits features into heads"
            )
        return super().__call__(inputs.reshape(*inputs.shape[:-2], -1), residual)


def _check_heads(layer: str, options: Mapping[str, Any], what: str, heads: int, further: str = "") -> None:
    """Raises ValueError if the devices do not divide the heads; `further`: another remedy to name in the message."""
    parallel = Parallel(name=layer, **{key: options[key] for key in Options.__annotations__ if key in options})
    divides(parallel, what, heads, parallel.axis, _HEADS + further)
