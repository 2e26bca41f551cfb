"""Defines the grid of all kernels of this library: one CTA on each SM; two or four CTAs may form a cluster."""

from __future__ import annotations

from jax import lax

from overlap.kernels.config import Config
from overlap.primitives.axes import kernel_axis
from overlap.primitives.types import Index

# The names of the grid's axes: clusters (single CTAs if there are no clusters), CTAs of a cluster, warpgroups of a CTA.
GRID_AXIS, RANK_AXIS, THREAD_AXIS = (kernel_axis(name) for name in ("cluster", "rank in the cluster", "warpgroup"))


def rank(config: Config) -> Index:
    """Returns this CTA's index in its cluster."""
    return 0 if config.cluster == 1 else lax.axis_index(RANK_AXIS)


def cta(config: Config) -> Index:
    """Returns this CTA's index on the device."""
    return lax.axis_index(GRID_AXIS) * config.cluster + rank(config)


def own_row(config: Config, row: Index) -> Index:
    """Returns the row of this CTA's tile, counted in tiles of a CTA; `row` is counted in tiles of a cluster."""
    return row * config.cluster + rank(config) if config.tiles_per_cluster > 1 else row
