"""Meshes and operands of the tests of sharded operands."""

import jax
import numpy as np
from jax.sharding import AxisType


def make_mesh(kinds=AxisType.Explicit, **axes):
    types = kinds if isinstance(kinds, tuple) else (kinds,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def put(mesh, x, spec):
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


def assert_near(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)
