"""A layer of experts as a JAX user writes it without this library: tokamax's products of groups, gathers and a scatter.

All devices gather all tokens, sort the routes of their own experts, multiply with `tokamax.ragged_dot`, add the rows of
each token in float32, and scatter the sums. tokamax 0.0.17 has Mosaic kernels for all products, forward and backward.
Its default on Hopper is tiles of 64 x 64 and two stages, so the configuration is set here. The product that makes the
gradients of weights always takes tiles of 64 rows: with 128 they were wrong by many orders of magnitude, with 64 they
agreed with XLA's (2026-11-28, with jax 0.11.2 on an H200).

Install it beside this library: pip install tokamax==0.0.17. Its import needs xprof, which only its own benchmarks use;
an empty module takes its place.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# block_m, block_n, block_k, stages, width of a band of tiles: those that were fastest of a few on H100s.
CONFIGS = {"tokamax": (128, 128, 64, 4, 8), "tokamax 2": (128, 128, 64, 4, 1), "tokamax 3": (64, 128, 64, 4, 8)}
_ROWS_OF_WEIGHTS = 64


def layer(
    name: str, axis: str, gated: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array, Sequence[jax.Array], jax.Array], jax.Array]:
    """Returns the layer inside `jax.shard_map`: from (x, gates, [w_gate_up, w_down], ids) to the sums.

    `name` is a key of `CONFIGS`. `w_gate_up` has both matrices of an expert side by side.
    """
    multiply = _ragged_dot(CONFIGS[name])

    def run(x: jax.Array, gates: jax.Array, weights: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
        w_gate_up, w_down = weights
        owned, width = w_down.shape[:2]
        tokens, chosen, factors = (lax.all_gather(value, axis, tiled=True) for value in (x, ids, gates))
        k = ids.shape[1]
        own = chosen.reshape(-1) - lax.axis_index(axis) * owned
        group = jnp.where((own >= 0) & (own < owned), own, owned)
        count = len(tokens) * min(k, owned)
        order = jnp.argsort(group, stable=True)[:count]
        sizes = jnp.bincount(group, length=owned + 1)[:owned].astype(jnp.int32)
        # tokamax leaves rows behind all groups undefined, in gradients too.
        filled = (jnp.arange(count) < sizes.sum())[:, None]
        rows = jnp.where(filled, tokens[order // k], 0)
        both = jnp.where(filled, multiply(rows, w_gate_up, sizes), 0)
        out = multiply(gated(both[:, :width], both[:, width:]), w_down, sizes)
        weighted = jnp.where(filled, out, 0).astype(jnp.float32) * jnp.where(
            filled, factors.reshape(-1)[order][:, None], 0
        )
        sums = jnp.zeros(tokens.shape, jnp.float32).at[order // k].add(weighted).astype(x.dtype)
        return lax.psum_scatter(sums, axis, scatter_dimension=0, tiled=True)

    return run


def of_module(mlp: Any, x: jax.Array, residual: jax.Array, axis: str, x_spec: P) -> jax.Array:
    """Computes what an `overlap.layers.ExpertMLP` with the default router does, from its parameters, in bfloat16.

    Args:
      mlp: the layer. Only its parameters are used.
      x, residual: global arrays [batch, rows, features].
      axis: the mesh axis of the experts.
      x_spec: how x is sharded.
    """
    router, gate, up, down = (part.kernel[...] for part in (mlp.router, mlp.gate, mlp.up, mlp.down))
    w_gate_up = jnp.concatenate([gate, up], axis=2).astype(jnp.bfloat16)
    run = layer("tokamax", axis, lambda gate, up: jax.nn.silu(gate) * up)

    def local(x: jax.Array, router: jax.Array, *weights: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        chances = jax.nn.softmax(rows.astype(jnp.float32) @ router, axis=-1)
        gates, ids = lax.top_k(chances, mlp.experts_per_token)
        gates /= gates.sum(axis=-1, keepdims=True)
        return run(rows, gates, weights, ids).reshape(x.shape)

    of_experts = P(axis, None, None)
    specs = x_spec, P(), of_experts, of_experts
    mapped = jax.shard_map(local, in_specs=specs, out_specs=x_spec, check_vma=False)
    return residual + mapped(x, router, w_gate_up, down.astype(jnp.bfloat16))


class _Empty(types.ModuleType):
    """A module in which every name is an empty object."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return types.SimpleNamespace()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module for xprof."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_xprof = name.partition(".")[0] == "xprof"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_xprof else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def tokamax() -> Any:
    """Imports tokamax."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # Behind all others: an installed xprof comes first.
    return importlib.import_module("tokamax")


def _ragged_dot(config: tuple[int, int, int, int, int]) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns tokamax's product with a configuration, forward and backward; on a CPU, its product by XLA."""
    library = tokamax()
    implementation: Any = "xla"
    if jax.default_backend() == "gpu":
        kernels = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu")
        common = importlib.import_module("tokamax._src.ops.ragged_dot.pallas_mosaic_gpu_common")
        base = importlib.import_module("tokamax._src.ops.ragged_dot.base")
        block_m, block_n, block_k, stages, width = config
        chosen = common.Config(
            block_m=block_m, block_n=block_n, block_k=block_k, num_stages=stages, split_k=1, persistent=False,
            grid_minor_dim=common.MatmulDimension.M, grid_tile_width=width,
        )  # fmt: skip
        product = kernels.PallasMosaicGpuRaggedDot(config=chosen)
        of_weights = kernels.PallasMosaicGpuRaggedDot(config=dataclasses.replace(chosen, block_m=_ROWS_OF_WEIGHTS))
        pull = functools.partial(base.vjp, dlhs_ragged_dot=product, drhs_ragged_dot=of_weights)
        implementation = (kernels.PallasMosaicGpuRaggedDot(config=chosen, vjp=pull),)

    def multiply(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return library.ragged_dot(
            lhs, rhs, group_sizes=sizes, preferred_element_type=lhs.dtype, implementation=implementation
        )

    return multiply
