"""The two linear layers of tensor parallelism, and the products that all layers are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import initializers
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import overlap
from overlap.layers.checks import check_dtypes, check_features, check_residual, check_sizes
from overlap.layers.parallel import Options, Parallel

_KERNEL_INIT, _BIAS_INIT = initializers.lecun_normal(), initializers.zeros_init()
_FEATURES = "pad the features, or shard along fewer devices"


class _ParallelLinear(Parallel, nnx.Linear):
    """What both have in common: an nnx.Linear whose parameters are sharded."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        preferred_element_type: DTypeLike | None = None,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        bias_init: nnx.Initializer = _BIAS_INIT,
        rngs: nnx.Rngs,
        name: str | None = None,
        **options: Unpack[Options],
    ):
        Parallel.__init__(self, name=name, **options)
        check_sizes(self.title, in_features=in_features, out_features=out_features)
        check_dtypes(self.title, dtype=dtype, param_dtype=param_dtype, preferred_element_type=preferred_element_type)
        rows, columns = spec = self.kernel_spec()
        self.divides("in_features", in_features, rows, _FEATURES)
        self.divides("out_features", out_features, columns, _FEATURES)
        nnx.Linear.__init__(
            self, in_features, out_features, use_bias=use_bias, dtype=dtype, param_dtype=param_dtype,
            preferred_element_type=preferred_element_type, kernel_init=kernel_init, bias_init=bias_init, rngs=rngs,
            kernel_metadata=self.metadata(spec), bias_metadata=self.metadata(self.bias_spec()),
        )  # fmt: skip

    def kernel_spec(self) -> P:
        raise NotImplementedError

    def bias_spec(self) -> P:
        raise NotImplementedError


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are sharded: the rows of its input are gathered while they are multiplied.

    kernel: [in_features, out_features], P(fsdp_axis, axis); bias: [out_features], P(axis); both named, shaped and drawn
    as nnx.Linear's.

    Args:
      in_features: features of the input, a multiple of the devices along `fsdp_axis`.
      out_features: features of the result, a multiple of the devices along `axis`.
      use_bias: whether a bias is added; by default True, as in nnx.Linear.
      dtype: in which the product is computed, accumulated in float32; None: that of input and parameters.
      param_dtype: of the parameters (float32), which are cast to `dtype` before they travel.
      preferred_element_type: dtype of the result, and of what is summed over devices; None: `dtype`.
      kernel_init, bias_init: initializers; by default nnx.Linear's.
      rngs: random keys, as for nnx.Linear.
      name, **options: see `Parallel`.

    Raises:
      TypeError: features that are no whole numbers, or a dtype that is none.
      ValueError: the mesh has no such axes, or their devices do not divide the features; features below 1; a dtype
        that is not one of floating-point numbers.
    """

    def kernel_spec(self) -> P:
        return P(self.fsdp_axis, self.axis)

    def bias_spec(self) -> P:
        return P(self.axis)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Computes inputs @ kernel + bias.

        Args:
          inputs: [..., rows, in_features], sharded P(batch_axis, axis, None); without sequence parallelism
            P(batch_axis, None, None).

        Returns:
          [..., rows, out_features], sharded P(batch_axis, None, axis).

        Raises:
          TypeError: what is given is no array.
          ValueError: it has other features, or a residual another shape than the result; the devices along `axis` do
            not divide the rows, or those along `batch_axis` the batch; or as `overlap.sharded_matmul`.
        """
        with jax.named_scope(self.name):
            return column_parallel(inputs, [self])[0]


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are sharded: the sums over the devices are scattered while they are computed.

    kernel: [in_features, out_features], P(axis, fsdp_axis); bias: [out_features], on all devices; both named, shaped
    and drawn as nnx.Linear's. Arguments and errors are those of `ColumnParallelLinear`; here the devices along `axis`
    must divide `in_features`, and those along `fsdp_axis` `out_features`.
    """

    def kernel_spec(self) -> P:
        return P(self.axis, self.fsdp_axis)

    def bias_spec(self) -> P:
        return P(None)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes inputs @ kernel + bias + residual.

        Args:
          inputs: [..., rows, in_features], sharded P(batch_axis, None, axis), as a column-parallel layer returns it.
          residual: [..., rows, out_features], sharded as the result: what is added to the sum. The kernel does that
            itself, which spares a pass over the result, if the residual has the result's dtype.

        Returns:
          [..., rows, out_features], sharded P(batch_axis, axis, None), by a reduce-scatter; without sequence
          parallelism P(batch_axis, None, None), by an all-reduce.

        Raises:
          TypeError: what is given is no array.
          ValueError: it has other features, or a residual another shape than the result; the devices along `axis` do
            not divide the rows, or those along `batch_axis` the batch; or as `overlap.sharded_matmul`.
        """
        with jax.named_scope(self.name):
            check_features(self.title, inputs, "in_features", self.in_features)
            check_residual(self.title, residual, (*inputs.shape[:-1], self.out_features))
            lhs, out = self.inside(inputs.shape), self.between(inputs.shape)
            return _products(inputs, [self], lhs, out, residual)[0]


def column_parallel(inputs: jax.Array, layers: Sequence[ColumnParallelLinear]) -> list[jax.Array]:
    """What each of several layers makes of the same inputs, which are gathered once. The first one's options count."""
    first = layers[0]
    check_features(first.part_of or first.name, inputs, "in_features", first.in_features)
    return _products(inputs, layers, first.between(inputs.shape), first.inside(inputs.shape))


def _products(
    inputs: jax.Array, layers: Sequence[_ParallelLinear], lhs: P, out: P, residual: jax.Array | None = None
) -> list[jax.Array]:
    """inputs @ kernel + bias of each layer, by one call. `jax.checkpoint` knows each result by its layer's name."""
    first, count = layers[0], len(layers)
    kernels = [layer.kernel[...] for layer in layers]
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    promoted: Any = first.promote_dtype((inputs, *kernels, *biases), dtype=first.dtype)
    # A residual of another dtype, such as float32 beside a product in bf16, keeps it: as x + layer(inputs) would.
    is_alike = residual is not None and residual.dtype == (first.preferred_element_type or promoted[0].dtype)
    outs = overlap.sharded_matmul(
        promoted[0], list(promoted[1 : count + 1]),
        lhs_sharding=lhs, rhs_sharding=first.kernel_spec(), out_sharding=out, mesh=first.mesh,
        bias=None if first.bias is None else list(promoted[count + 1 :]),
        addend=[residual] if is_alike else None,
        preferred_element_type=first.preferred_element_type, keep_gathered=first.keep_gathered,
        implementation=first.implementation,
    )  # fmt: skip
    if residual is not None and not is_alike:
        outs = [outs[0] + residual]
    return [checkpoint_name(y, layer.name) for y, layer in zip(outs, layers, strict=True)]
