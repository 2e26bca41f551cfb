"""Meshes, operands and NumPy oracles for the tests of products of global arrays."""

import re
from collections import Counter

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap


def make_mesh(kinds=AxisType.Explicit, **axes):
    types = kinds if isinstance(kinds, tuple) else (kinds,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def put(mesh, x, spec):
    return jax.device_put(x, jax.NamedSharding(mesh, spec))


def whole(seed, *shape, dtype=np.float32):
    """Draws small integers. Sums of their products are exact in float32, in any order."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def assert_near(actual, expected, within=1e-2):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert a.shape == b.shape and np.linalg.norm(a - b) <= within * np.linalg.norm(b)


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def answer(op, *args, **kwargs):
    """The answer of `explain` about a function that calls one operation once."""
    (choice,) = overlap.explain(op, *args, **kwargs)
    return choice


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


def relu_product(lhs, rhs, bias, addend, cotangent):
    """relu(lhs @ rhs + bias + addend) and the cotangents of the four operands. The last dimensions are contracted."""
    z = lhs @ rhs + bias + addend
    d, flat = cotangent * (z > 0), lhs.reshape(-1, lhs.shape[-1])
    leading = tuple(range(d.ndim - addend.ndim))
    rows = d.reshape(-1, d.shape[-1])
    return np.maximum(z, 0), (d @ rhs.T, flat.T @ rows, rows.sum(0), d.sum(leading))


def collectives(compiled):
    """How often each collective occurs in a compiled program, with the dtypes of its results."""
    pattern = r" = \(?(\w+)\[\S* .*?(all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute)(?:-start)?\("
    return Counter(re.findall(pattern, compiled.as_text()))
