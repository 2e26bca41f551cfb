"""The column-parallel and the row-parallel linear layer, and the call that computes the products of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import initializers
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import overlap
from overlap.layers.checks import check_dtypes, check_features, check_flags, check_residual, check_sizes
from overlap.layers.parallel import Options, Parallel, divides, metadata, spec_between_layers, spec_inside_layer

KERNEL_INIT, BIAS_INIT = initializers.lecun_normal(), initializers.zeros_init()
_FEATURES = "pad the features, or shard along fewer devices"


class _ParallelLinear(Parallel, nnx.Linear):
    """An nnx.Linear whose parameters are sharded. Subclasses say how."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        preferred_element_type: DTypeLike | None = None,
        kernel_init: nnx.Initializer = KERNEL_INIT,
        bias_init: nnx.Initializer = BIAS_INIT,
        rngs: nnx.Rngs,
        name: str | None = None,
        **options: Unpack[Options],
    ):
        Parallel.__init__(self, name=name, **options)
        check_sizes(self.title, in_features=in_features, out_features=out_features)
        check_flags(self.title, use_bias=use_bias)
        check_dtypes(self.title, dtype=dtype, param_dtype=param_dtype, preferred_element_type=preferred_element_type)
        rows, columns = spec = self.kernel_spec
        divides(self, "in_features", in_features, rows, _FEATURES)
        divides(self, "out_features", out_features, columns, _FEATURES)
        nnx.Linear.__init__(
            self,
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            preferred_element_type=preferred_element_type,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rngs=rngs,
            kernel_metadata=metadata(self, spec),
            bias_metadata=metadata(self, self.bias_spec),
        )

    @property
    def kernel_spec(self) -> P:
        """The partition of the kernel."""
        raise NotImplementedError

    @property
    def bias_spec(self) -> P:
        """The partition of the bias."""
        raise NotImplementedError


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer whose output features are sharded. The rows of its input are gathered while they are multiplied.

    kernel: [in_features, out_features], sharded P(fsdp_axis, axis). bias: [out_features], sharded P(axis). Both have
    the names, shapes and initial values of nnx.Linear's.

    Args:
      in_features: features of the input, a multiple of the devices along `fsdp_axis`.
      out_features: features of the result, a multiple of the devices along `axis`.
      use_bias: whether a bias is added; by default True, as in nnx.Linear.
      dtype: dtype of the product's operands; None: that of input and parameters, promoted. Sums are in float32.
      param_dtype: dtype of the parameters, float32 by default. They are cast to `dtype` before they are gathered.
      preferred_element_type: dtype of the result, and of products that are summed over devices; None: `dtype`.
      kernel_init, bias_init: initializers; by default nnx.Linear's.
      rngs: random keys, as for nnx.Linear.
      name, **options: see `Parallel`.

    Raises:
      TypeError: a number of features is no whole number, or a dtype is no dtype.
      ValueError: an axis is not in the mesh, or its devices do not divide the features; a number of features is below
        1; a dtype is not floating-point.
    """

    @property
    def kernel_spec(self) -> P:
        return P(self.fsdp_axis, self.axis)

    @property
    def bias_spec(self) -> P:
        return P(self.axis)

    def __call__(self, inputs: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Computes inputs @ kernel + bias.

        Args:
          inputs: [..., rows, in_features], sharded as between layers.

        Returns:
          [..., rows, out_features], sharded P(batch_axis, None, axis).

        Raises:
          TypeError, ValueError: see `Parallel`.
        """
        with jax.named_scope(self.name):
            return column_parallel(inputs, [self])[0]


class RowParallelLinear(_ParallelLinear):
    """A linear layer whose input features are sharded. The sums over the devices are scattered while they are computed.

    kernel: [in_features, out_features], sharded P(axis, fsdp_axis). bias: [out_features], whole on all devices. Both
    have the names, shapes and initial values of nnx.Linear's.

    Arguments and errors are those of `ColumnParallelLinear`, but here the devices along `axis` must divide
    `in_features`, and those along `fsdp_axis` must divide `out_features`.
    """

    @property
    def kernel_spec(self) -> P:
        return P(self.axis, self.fsdp_axis)

    @property
    def bias_spec(self) -> P:
        return P(None)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, inputs: jax.Array, residual: jax.Array | None = None
    ) -> jax.Array:
        """Computes inputs @ kernel + bias + residual.

        Args:
          inputs: [..., rows, in_features], sharded P(batch_axis, None, axis), as a column-parallel layer returns it.
          residual: [..., rows, out_features], sharded as the result, to which it is added. If it has the result's
            dtype, the kernel adds it, which saves a pass over the result.

        Returns:
          [..., rows, out_features], sharded as between layers: by a reduce-scatter, or without sequence parallelism
          by an all-reduce.

        Raises:
          TypeError, ValueError: see `Parallel`.
        """
        with jax.named_scope(self.name):
            check_features(self.title, inputs, "in_features", self.in_features)
            check_residual(self.title, residual, (*inputs.shape[:-1], self.out_features))
            lhs_spec, out_spec = spec_inside_layer(self, inputs.shape), spec_between_layers(self, inputs.shape)
            return _products(inputs, [self], lhs_spec, out_spec, residual)[0]


def column_parallel(
    inputs: jax.Array, layers: Sequence[ColumnParallelLinear], activation: Callable[..., jax.Array] | None = None
) -> list[jax.Array]:
    """Returns the result of each layer. The layers have the same inputs, which are gathered once.

    The options of the first layer (mesh, axes, …) count for all. An `activation` of as many arrays as there are layers
    makes one result of theirs, the only one in the list.
    """
    first = layers[0]
    check_features(first.part_of or first.name, inputs, "in_features", first.in_features)
    lhs_spec, out_spec = spec_between_layers(first, inputs.shape), spec_inside_layer(first, inputs.shape)
    return _products(inputs, layers, lhs_spec, out_spec, activation=activation)


def _products(
    inputs: jax.Array,
    layers: Sequence[_ParallelLinear],
    lhs: P,
    out: P,
    residual: jax.Array | None = None,
    activation: Callable[..., jax.Array] | None = None,
) -> list[jax.Array]:
    """inputs @ kernel + bias for each layer, by one call. Each result has its layer's name for `jax.checkpoint`.

    An `activation` of all makes one result of them, named "hidden".
    """
    first = layers[0]
    count = len(layers)
    kernels = [layer.kernel[...] for layer in layers]
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    promoted: Any = first.promote_dtype((inputs, *kernels, *biases), dtype=first.dtype)
    title = first.title if count == 1 else first.part_of
    if first.implementation == "fused" and promoted[0].dtype.itemsize > 2:
        raise NotImplementedError(
            f"{title}: the fused kernel multiplies 16-bit and 8-bit operands, got {promoted[0].dtype}: build the layer "
            'with dtype=jnp.bfloat16, to which it then casts, or use implementation="xla"'
        )
    # A residual of another dtype (such as float32 beside a product in bf16) is added after the product, so that the sum
    # has the dtype that x + layer(inputs) would have.
    is_alike = residual is not None and residual.dtype == (first.preferred_element_type or promoted[0].dtype)
    try:
        outs = overlap.sharded_matmul(
            promoted[0],
            list(promoted[1 : count + 1]),
            lhs_sharding=lhs,
            rhs_sharding=first.kernel_spec,
            out_sharding=out,
            mesh=first.mesh,
            bias=None if first.bias is None else list(promoted[count + 1 :]),
            addend=[residual] if is_alike else None,
            activation=activation,
            preferred_element_type=first.preferred_element_type,
            keep_gathered=first.keep_gathered,
            implementation=first.implementation,
        )
    except (ValueError, NotImplementedError) as wrong:
        raise type(wrong)(f"{title}: {wrong}") from wrong
    if activation is not None:
        return [checkpoint_name(outs, "hidden")]  # pyright: ignore[reportArgumentType]
    if residual is not None and not is_alike:
        outs = [outs[0] + residual]
    return [checkpoint_name(y, layer.name) for y, layer in zip(outs, layers, strict=True)]
