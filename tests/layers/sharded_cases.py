"""Meshes and operands for the tests of sharded operands."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def make_mesh(kinds=AxisType.Explicit, **axes):
    types = kinds if isinstance(kinds, tuple) else (kinds,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def put(mesh, x, spec):
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


def assert_near(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= 1e-2 * np.linalg.norm(b)


# --- For `sharded_matmul` ---------------------------------------------------------------------------------------------

SIZES = {"x": 2, "y": 4}
B, M, K, N = 8, 16, 8, 24
AUTO, EXPLICIT = make_mesh(AxisType.Auto, **SIZES), make_mesh(**SIZES)
MESHES = {
    "auto": AUTO,
    "explicit": EXPLICIT,
    "mixed": make_mesh((AxisType.Explicit, AxisType.Auto), **SIZES),
}
COLUMNS = P("x", "y"), P(None, "y"), P("x", None, "y")


def whole(seed, *shape, dtype=np.float32):
    """Draws small integers. Sums of their products are exact in float32, in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def reference(lhs, rhs, bias=0.0, addend=0.0, activation=lambda z: z):
    return activation(jnp.einsum("bmk,kn->bmn", lhs, rhs, precision="highest") + bias + addend)


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
