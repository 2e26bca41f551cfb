"""The grid of all kernels of this library: one CTA on each core, alone or two to a cluster."""

from __future__ import annotations

from typing import Any

from jax import lax

from overlap.kernels.config import Config
from overlap.primitives.axes import kernel_axis

# Clusters (or single CTAs), the CTAs of one cluster, and the warpgroups of a CTA.
GRID_AXIS, RANK_AXIS, THREAD_AXIS = (kernel_axis(name) for name in ("cluster", "rank in the cluster", "warpgroup"))


def rank(config: Config) -> Any:
    """This CTA's place in its cluster."""
    return 0 if config.cluster == 1 else lax.axis_index(RANK_AXIS)


def cta(config: Config) -> Any:
    """This CTA's index on the device."""
    return lax.axis_index(GRID_AXIS) * config.cluster + rank(config)


def own_tile(config: Config, row: Any, column: Any) -> tuple[Any, Any]:
    """This CTA's tile of the cluster's tile (row, column)."""
    place = rank(config)
    along_m, along_n = (config.cluster, 1) if config.cluster_along == "m" else (1, config.cluster)
    return row * along_m + (place if along_m > 1 else 0), column * along_n + (place if along_n > 1 else 0)
