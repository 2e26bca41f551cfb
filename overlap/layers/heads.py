"""The head of a language model: a linear layer whose cross-entropy is computed without its logits."""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.loss.linear_cross_entropy import check_labels
from overlap.kernels.varying import axes_of, same_along
from overlap.layers.checks import check_array, check_features, check_sizes
from overlap.layers.linear import ColumnParallelLinear
from overlap.layers.parallel import (
    LinearOptions,
    Options,
    Parallel,
    devices_along,
    mesh_in_use,
    names_in,
    placed,
    spec_between_layers,
)
from overlap.sharded import partitions

# Each device must have a multiple of `_LEAST` columns, so that kernels can load its rows. A vocabulary that is no
# multiple of `_UNIT` is padded to one of `_UNIT * _UNIT / _LEAST`: equal parts of it for 1, 2, 4 or 8 devices, so that
# checkpoints fit all of these.
_LEAST = 8
_UNIT = 64


class CrossEntropyHead(ColumnParallelLinear):
    """A column-parallel layer from features to logits, and its cross-entropy by `overlap.linear_cross_entropy`.

    Called, it returns logits, with the soft cap, as `ColumnParallelLinear` does. `loss` computes the loss of each token
    without them.

    kernel: [in_features, vocabulary], sharded P(fsdp_axis, axis). If the vocabulary is no multiple of 64, the kernel
    has more columns, up to a multiple of 512 (of 64 for each device, if their number does not divide that). `loss`
    leaves them out, and logits are −∞ there.

    Args:
      in_features: features of the input.
      vocabulary: how many entries the vocabulary has.
      soft_cap, z_loss, ignored_label: see `overlap.linear_cross_entropy`.
      use_bias: whether a bias is added; by default False.
      name, **options: as for `ColumnParallelLinear`.

    Raises:
      TypeError, ValueError: for the reasons of `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        vocabulary: int,
        *,
        soft_cap: float | None = None,
        z_loss: float = 0.0,
        ignored_label: int | None = None,
        use_bias: bool = False,
        name: str = "CrossEntropyHead",
        **options: Unpack[LinearOptions],
    ):
        check_sizes(name, in_features=in_features, vocabulary=vocabulary)
        of_mesh: Any = {key: value for key, value in options.items() if key in Options.__annotations__}
        Parallel.__init__(self, name=name, **of_mesh)
        devices = devices_along(self, self.axis)
        columns = vocabulary
        for unit, parts in ((_UNIT * _UNIT // _LEAST, _UNIT), (devices * _UNIT, devices * _LEAST)):
            columns = -(-columns // unit) * unit if columns % parts else columns
        super().__init__(in_features, columns, use_bias=use_bias, name=name, **options)
        self.vocabulary = vocabulary
        self.soft_cap = soft_cap
        self.z_loss = z_loss
        self.ignored_label = ignored_label

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Computes logits: [..., rows, in_features] to [..., rows, columns of the kernel].

        Shardings are those of `ColumnParallelLinear`.
        """
        logits = super().__call__(inputs)
        if self.soft_cap is not None:
            logits = jnp.tanh(logits / self.soft_cap) * self.soft_cap
        if self.vocabulary == self.out_features:
            return logits
        sharding = jax.typeof(logits).sharding
        column = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1, out_sharding=sharding)
        return jnp.where(column < self.vocabulary, logits, -jnp.inf)

    def loss(self, inputs: jax.Array, labels: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Computes the cross-entropy of each token.

        Args:
          inputs: [..., rows, in_features], sharded as between layers.
          labels: integers [..., rows], sharded as the rows of `inputs`.
          weights: [..., rows], factors of the losses.

        Returns:
          float32 [..., rows], sharded as `labels`.
        """
        check_features(self.title, inputs, "in_features", self.in_features)
        spec = spec_between_layers(self, inputs.shape)
        promoted: Any = dtypes.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
        parts = dict(zip(("x", "kernel"), promoted, strict=True)) | {"labels": labels, "weights": weights}
        parts["bias"] = None if self.bias is None else self.bias[...]
        parts = {name: value for name, value in parts.items() if value is not None}
        specs = {"x": spec, "kernel": self.kernel_spec, "bias": self.bias_spec}
        specs |= dict.fromkeys(("labels", "weights"), P(*spec[:-1]))
        for name in ("labels", "weights"):
            if name not in parts:
                continue
            check_array(self.title, name, parts[name])
            if (found := tuple(parts[name].shape)) != (wanted := tuple(inputs.shape[:-1])):
                raise ValueError(
                    f"{self.title}: {name} must have an entry for each row of the input, {wanted}, got shape {found}: "
                    "reshape them"
                )
        check_labels(labels, self.vocabulary, self.ignored_label)
        with jax.named_scope(self.name):
            parts = {name: placed(self, jnp.asarray(value), specs[name], name) for name, value in parts.items()}
            specs = {name: specs[name] for name in parts}
            run = partitions.on_parts(self._of_parts, mesh_in_use(self), specs, P(*spec[:-1]))
            try:
                return run(parts)
            except (ValueError, NotImplementedError) as wrong:
                raise type(wrong)(f"{self.title}: {wrong}") from wrong

    def _of_parts(self, parts: dict[str, jax.Array]) -> jax.Array:
        """The losses of this device's tokens."""
        x = parts["x"]
        kernel = parts["kernel"]
        if axes := names_in(self.fsdp_axis):
            # Where the tokens are the same along an axis of FSDP, so is the loss, and its type must say so.
            kernel = same_along(lax.all_gather(kernel, axes, tiled=True), set(axes) - axes_of(x))
        found = overlap.linear_cross_entropy(
            x.reshape(-1, x.shape[-1]), kernel, parts["labels"].reshape(-1), self.axis,
            gather=self.sequence_parallel, bias=parts.get("bias"), soft_cap=self.soft_cap, z_loss=self.z_loss,
            ignored_label=self.ignored_label, vocabulary_size=self.vocabulary,
            weights=parts["weights"].reshape(-1) if "weights" in parts else None, implementation=self.implementation,
        )  # fmt: skip
        return found.reshape(parts["labels"].shape)
