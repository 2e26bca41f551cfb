"""Norms of activations whose rows are sharded. Each device has all features of its rows, so nothing is communicated.

The parameters of a norm are the same on all devices. The gradient of a parameter is a sum over all rows, so over all
devices: XLA adds that all-reduce, of [features] values.
"""

from __future__ import annotations

from typing import Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import initializers
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from overlap.layers.checks import check_dtypes, check_features, check_sizes
from overlap.layers.parallel import Options, Parallel, metadata, placed, spec_between_layers

_ONES, _ZEROS = initializers.ones_init(), initializers.zeros_init()


class _Norm(Parallel):
    """What both norms have in common. The second base of a norm is that of flax."""

    num_features: int

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalizes [..., rows, num_features], sharded P(batch_axis, axis, None); so is the result.

        Raises:
          TypeError: `x` is no array.
          ValueError: `x` has another number of features; or, on an Explicit mesh, its type has another sharding.
        """
        check_features(self.title, x, "num_features", self.num_features)
        with jax.named_scope(self.name):
            return super().__call__(placed(self, x, spec_between_layers(self, x.shape)), mask=mask)


class RMSNorm(_Norm, nnx.RMSNorm):
    """Root-mean-square norm over the features.

    scale: [num_features], whole on all devices. Checkpoints can be exchanged with nnx.RMSNorm.

    Args:
      num_features: features of the input.
      epsilon: added to the mean square.
      dtype: dtype of the result; None: that of input and parameters, promoted. The norm is computed in float32.
      param_dtype: dtype of the parameters.
      use_scale: whether to multiply by a scale.
      scale_init: initializer of the scale.
      rngs: random keys.
      name, **options: see `Parallel`. A norm has no products, so `implementation` and `keep_gathered` change nothing.

    Raises:
      TypeError, ValueError: an axis is not in the mesh; or sizes or dtypes are wrong, as for `ColumnParallelLinear`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        scale_init: nnx.Initializer = _ONES,
        rngs: nnx.Rngs,
        name: str | None = None,
        **options: Unpack[Options],
    ):
        Parallel.__init__(self, name=name, **options)
        check_sizes(self.title, num_features=num_features)
        check_dtypes(self.title, dtype=dtype, param_dtype=param_dtype)
        nnx.RMSNorm.__init__(
            self,
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_scale=use_scale,
            scale_init=scale_init,
            rngs=rngs,
            scale_metadata=metadata(self, P(None)),
        )


class LayerNorm(_Norm, nnx.LayerNorm):
    """Norm by mean and variance over the features.

    scale, bias: [num_features] each, whole on all devices. Checkpoints can be exchanged with nnx.LayerNorm.

    Arguments and errors are those of `RMSNorm`, and two more arguments: `use_bias`, whether to add a bias, and
    `bias_init`, its initializer.
    """

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        use_bias: bool = True,
        scale_init: nnx.Initializer = _ONES,
        bias_init: nnx.Initializer = _ZEROS,
        rngs: nnx.Rngs,
        name: str | None = None,
        **options: Unpack[Options],
    ):
        Parallel.__init__(self, name=name, **options)
        check_sizes(self.title, num_features=num_features)
        check_dtypes(self.title, dtype=dtype, param_dtype=param_dtype)
        nnx.LayerNorm.__init__(
            self,
            num_features,
            epsilon=epsilon,
            dtype=dtype,
            param_dtype=param_dtype,
            use_scale=use_scale,
            use_bias=use_bias,
            scale_init=scale_init,
            bias_init=bias_init,
            rngs=rngs,
            scale_metadata=metadata(self, P(None)),
            bias_metadata=metadata(self, P(None)),
        )
