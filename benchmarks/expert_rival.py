"""A layer of experts as a JAX user writes it without this library: tokamax's products of groups, gathers and a scatter.

All devices gather all tokens, sort the routes of their own experts, multiply with `tokamax.ragged_dot`, add the rows of
each token in float32, and scatter the sums. tokamax 0.0.17 has Mosaic kernels for all products, forward and backward.
Its default on Hopper is tiles of 64 x 64 and two stages, so the configuration is set here.

On H100s and H200s the gradients of its weights were wrong (2026-11-28; right on CPUs; why is not known). So its times
with gradients must not be printed as those of a rival before they are right.

Install it beside this library: pip install tokamax==0.0.17. Its import needs xprof, which only its own benchmarks use;
an empty module takes its place.
"""

from __future__ import annotations

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

# block_m, block_n, block_k, stages, width of a band of tiles: those that were fastest of a few on H100s.
CONFIGS = {"tokamax": (128, 128, 64, 4, 8), "tokamax 2": (128, 128, 64, 4, 1), "tokamax 3": (64, 128, 64, 4, 8)}


def layer(
    name: str, experts: int, axis: str, gated: Callable[[jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array, jax.Array, Sequence[jax.Array], jax.Array], jax.Array]:
    """Returns the layer inside `jax.shard_map`: from (x, gates, [w_gate, w_up, w_down], ids) to the sums.

    `name` is a key of `CONFIGS`.
    """
    multiply = _ragged_dot(CONFIGS[name])

    def run(x: jax.Array, gates: jax.Array, weights: Sequence[jax.Array], ids: jax.Array) -> jax.Array:
        w_gate, w_up, w_down = weights
        owned, width = w_gate.shape[0], w_gate.shape[2]
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
        both = jnp.where(filled, multiply(rows, jnp.concatenate([w_gate, w_up], axis=2), sizes), 0)
        out = multiply(gated(both[:, :width], both[:, width:]), w_down, sizes)
        weighted = jnp.where(filled, out, 0).astype(jnp.float32) * jnp.where(
            filled, factors.reshape(-1)[order][:, None], 0
        )
        sums = jnp.zeros(tokens.shape, jnp.float32).at[order // k].add(weighted).astype(x.dtype)
        return lax.psum_scatter(sums, axis, scatter_dimension=0, tiled=True)

    return run


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


def _ragged_dot(config: tuple[int, int, int, int, int]) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns tokamax's product with a configuration, forward and backward; on a CPU, its product by XLA."""
    sys.meta_path.append(_Finder())  # Behind all others: an installed xprof comes first.
    tokamax = importlib.import_module("tokamax")
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
        pull = functools.partial(base.vjp, dlhs_ragged_dot=product, drhs_ragged_dot=product)
        implementation = (kernels.PallasMosaicGpuRaggedDot(config=chosen, vjp=pull),)

    def multiply(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return tokamax.ragged_dot(
            lhs, rhs, group_sizes=sizes, preferred_element_type=lhs.dtype, implementation=implementation
        )

    return multiply
