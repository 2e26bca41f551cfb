"""The gated MLP: gate and up share one gather, and down scatters its sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import jax

from overlap.frame.activation import takes_all
from overlap.layers.checks import check_activation, check_features, check_residual, check_sizes
from overlap.layers.linear import ColumnParallelLinear, RowParallelLinear, column_parallel
from overlap.layers.parallel import Layer, LinearOptions


def silu(x: jax.Array) -> jax.Array:
    """jax.nn.silu. That function itself cannot be pickled, nor could a layer that has it as an attribute."""
    return jax.nn.silu(x)


def gated(activation: Callable[..., jax.Array]) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The function of gate and up: `activation` itself if it takes two arrays, else activation(gate) · up."""
    return activation if takes_all(activation, (None, None)) else lambda gate, up: activation(gate) * up


class GatedMLP(Layer):
    """down(activation(gate(x)) · up(x)), as in Llama and Qwen.

    `gate` and `up` are `ColumnParallelLinear`s of [in_features, hidden_features], and share one gather. `down` is a
    `RowParallelLinear` of [hidden_features, out_features]. A model with three nnx.Linear of these names has the same
    checkpoint.

    Args:
      in_features: features of the input.
      hidden_features: features between gate and down, a multiple of the devices along `axis`.
      out_features: features of the result; by default `in_features`.
      activation: an elementwise function of gate, by default jax.nn.silu. Or one of both gate and up, in place of
        activation(gate) · up.
      use_bias: whether each product has a bias.
      name: what profiles and the HLO's metadata call this layer.
      **options: as for `ColumnParallelLinear`.

    Raises:
      TypeError: the activation is no function; or for the reasons of `ColumnParallelLinear`.
      ValueError: for the reasons of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        *,
        activation: Callable[..., jax.Array] = silu,
        use_bias: bool = False,
        name: str = "GatedMLP",
        **options: Unpack[LinearOptions],
    ):
        self.name = name
        self.activation = activation
        part_of = options.get("part_of")
        self.title = f"{part_of}.{name}" if part_of else name  # In error messages, as of `Parallel`.
        out_features = in_features if out_features is None else out_features
        check_activation(self.title, activation, most=2)
        check_sizes(self.title, in_features=in_features, hidden_features=hidden_features, out_features=out_features)
        options["part_of"] = self.title
        self.gate = ColumnParallelLinear(in_features, hidden_features, use_bias=use_bias, name="gate", **options)
        self.up = ColumnParallelLinear(in_features, hidden_features, use_bias=use_bias, name="up", **options)
        self.down = RowParallelLinear(hidden_features, out_features, use_bias=use_bias, name="down", **options)

    def __call__(self, x: jax.Array, residual: jax.Array | None = None) -> jax.Array:
        """Computes down(activation(gate(x)) · up(x)) + residual.

        Args:
          x: [..., rows, in_features], sharded as between layers (`Parallel`).
          residual: [..., rows, out_features], sharded as the result, to which it is added.

        Returns:
          [..., rows, out_features], sharded as `x`.
        """
        check_features(self.title, x, "in_features", self.gate.in_features)
        check_residual(self.title, residual, (*x.shape[:-1], self.down.out_features))
        with jax.named_scope(self.name):
            with jax.named_scope("gate_up"):
                (hidden,) = column_parallel(x, [self.gate, self.up], gated(self.activation))
            return self.down(hidden, residual)
