"""Meshes of the first devices, and programs on them. This module does not import the library."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

X, W, Y = P("x", None), P(None, "x"), P(None, "x")


def make_mesh(**axes: int) -> Mesh:
    """Returns a mesh over the first devices, in jax's order."""
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def on_mesh(mesh: Mesh, f: Any, in_specs: Any = (X, W), out_specs: Any = Y, **options: Any) -> Any:
    """Returns `f` under jit and `shard_map`."""
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)
