"""Calls that `sharded_matmul` refuses before anything is traced: the argument, what came, and a way out."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from tests.layers.sharded_cases import (
    AUTO,
    COLUMNS,
    EXPLICIT,
    MESHES,
    B,
    K,
    M,
    N,
    answer,
    assert_same,
    make_mesh,
    put,
    whole,
)

SMALL = make_mesh(x=2, y=2)
X, W = jax.ShapeDtypeStruct((B, M, K), jnp.float32), jax.ShapeDtypeStruct((K, N), jnp.float32)
HEADS = jax.ShapeDtypeStruct((K, 4, 8), jnp.float32)
OF_HEADS = {"rhs": HEADS, "out_sharding": P("x", None, "y", None)}
GOOD = dict(zip(("lhs_sharding", "rhs_sharding", "out_sharding"), COLUMNS, strict=True), mesh=AUTO)
REFUSED = [
    ({"mesh": None}, r"needs a mesh.*\(`with mesh:` is not read\): pass mesh=….*jax.set_mesh"),
    ({"mesh": "x"}, r"`mesh` must be a jax.sharding.Mesh, got 'x'"),
    ({"out_sharding": jax.NamedSharding(SMALL, COLUMNS[2])}, r"one mesh, got \{'x': 2, 'y': 4\}.*put"),
    ({"lhs_sharding": None}, r"`lhs_sharding` must be given.*\('x', 'y'\).*PartitionSpec.*Explicit"),
    ({"out_sharding": "x"}, r"`out_sharding` must be a jax.sharding.PartitionSpec.*got 'x'"),
    ({"rhs_sharding": P(None, None, "y")}, r"`rhs_sharding` must have at most.*2 dimensions, got 3"),
    ({"rhs_sharding": P("z")}, r"`rhs_sharding`.*got 'z'.*has \('x', 'y'\)"),
    ({"out_sharding": P("x", "x")}, r"`out_sharding` must name each mesh axis once, got 'x' twice"),
    ({"out_sharding": P(P.UNCONSTRAINED)}, r"`out_sharding` must name mesh axes or None"),
    ({"mesh": MESHES["mixed"], "out_sharding": P(("y", "x"))},
     r"`out_sharding` must name Explicit axes before Auto.*got \('y', 'x'\).*: name \('x', 'y'\)"),
    ({"rhs": W.update(shape=(N, K))}, rf"k={K} in lhs.*k={N} in rhs"),
    ({"rhs": W.update(dtype=jnp.bfloat16)}, r"same dtype, got float32 and bfloat16: cast"),
    ({"rhs": W.update(shape=(B, K, N))},
     r"`out_sharding` must have an entry for each.*: 4 to contract 1 or 2 to contract 2, got 3.*stack.*jax.vmap"),
    ({"rhs": [W, HEADS]}, r"all of `rhs`.*same number.*got 2 for `rhs\[0\]` and 3 for `rhs\[1\]`"),
    (OF_HEADS | {"out_sharding": P("x", None, None, "y")},
     r"dimensions 2 to 3 of the result count as one.*the first must be sharded, got \('y',\) in dimension 3"),
    (OF_HEADS | {"rhs_sharding": P(None, None, "y")}, r"dimensions 1 to 2 of `rhs` count as one"),
    (OF_HEADS | {"rhs": [HEADS, HEADS.update(shape=(K, 2, 8))]},
     r"`rhs\[1\]`.*equal parts, got 2 in dimension 1 of \(8, 2, 8\) for 4 devices"),
    (OF_HEADS | {"bias": whole(3, 8, 4)}, r"`bias` must have the shape \(4, 8\), got \(8, 4\)"),
    (OF_HEADS | {"addend": whole(3, M, N)}, r"`addend`.*\(8, 16, 4, 8\) or \(16, 4, 8\), got"),
    ({"lhs": X.update(shape=(B, M, 6, 4)), "rhs": HEADS.update(shape=(4, 6, K))},
     r"`lhs` must end with the dimensions that `rhs` begins with, 2 by.*got \(8, 16, 6, 4\) and \(4, 6, 8\)"),
    (OF_HEADS | {"lhs": X.update(shape=(K,)), "out_sharding": P("y")}, r"`lhs` must have 2 dimensions"),
    ({"lhs": X.update(shape=(B, 6, K))}, r"`lhs`.*equal parts, got 6 in.* 1.*pad it to 8"),
    ({"rhs": W.update(shape=(K, 30))}, r"`rhs`.*got 30 in dimension 1.*4 devices.*to 32"),
    ({"bias": whole(3, K)}, rf"`bias` must have shape \({N},\).*of the result.*: reshape it$"),
    ({"addend": whole(3, N)}, r"`addend`.*shape of the result.*: reshape or broadcast it$"),
    ({"activation": 3}, r"`activation` must be a function"),
    ({"implementation": "pallas"}, r"`implementation` must be None or one of"),
    ({"config": 3}, r"`config` must be None or an overlap.Config"),
    ({"keep_gathered": 1}, r"`keep_gathered` must be True, False or None, got 1"),
    ({"rhs_sharding": [P(None, "y")] * 2}, r"`rhs_sharding`.*list of 1, got a list of 2"),
    ({"lhs": X.update(shape=(B, 0, K))}, r"`lhs` must not be empty, got 0 in dimension 1"),
    ({"rhs": [W, W.update(shape=(K, 0))]}, r"`rhs\[1\]` must not be empty, got 0 in dimension 1"),
    ({"bias": [whole(3, N)]}, r"`bias` must be one array beside a single `rhs`.*give it as it is"),
    ({"rhs": [W], "bias": whole(3, N)}, r"`bias` must be a list with one entry.*got ndarray"),
    ({"rhs": [W, W], "rhs_sharding": [P(None, "y"), P()]}, r"sharded alike, got.*`rhs\[0\]`.*`rhs\[1\]`"),
]  # fmt: skip


@pytest.mark.one_jax
def test_refused():
    for changed, message in REFUSED:
        given = {"lhs": X, "rhs": W} | GOOD | changed
        lhs, rhs = given.pop("lhs"), given.pop("rhs")
        with pytest.raises(ValueError) as error:
            answer(functools.partial(overlap.sharded_matmul, **given), lhs, rhs)
        said, *_ = str(error.value).partition("\n---")  # jax adds a note on its traceback.
        assert re.search(message, said) and re.search(r": [^:]+$", said), (message, said)  # The end is a way out.


def test_arrays_that_are_elsewhere_or_are_none():
    """On one device, types in place of values, or on a mesh with other types of axes."""
    elsewhere = jax.device_put(whole(2, K, N), jax.devices()[1])
    for lhs, rhs, message in (
        (whole(1, B, M, K), elsewhere, r"`rhs` must be on the 8 devices.*put on device .*jax.device_put\(rhs"),
        (X, whole(2, K, N), r"`lhs` must be an array.*overlap.explain"),
        (put(EXPLICIT, whole(1, B, M, K), COLUMNS[0]), whole(2, K, N),
         r"same types of axes, got .*Auto.*Explicit.*: leave `mesh` out"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            overlap.sharded_matmul(lhs, rhs, **GOOD)


def test_what_helps_on_a_mixed_mesh():
    """The way out that the refusal of a scatter behind an Auto axis suggests."""
    mesh, lhs, rhs = MESHES["mixed"], whole(1, 8, K), whole(2, K, N)
    with jax.set_mesh(mesh):
        x, w = put(mesh, lhs, P(None, "x")), put(mesh, rhs, P("x"))
        f = functools.partial(overlap.sharded_matmul, lhs_sharding=P("y", "x"), rhs_sharding=P("x"))
        out = jax.jit(lambda x, w: jax.reshard(f(x, w, out_sharding=P("y")), P("x")))(x, w)
    assert_same(out, lhs @ rhs)


@pytest.mark.one_jax
def test_operands_that_are_not_summed():
    def unreduced(lhs, rhs):
        lhs = jnp.einsum("mk,kn->mn", lhs, rhs, out_sharding=P(None, None, unreduced={"y"}))
        return overlap.sharded_matmul(lhs, jnp.ones((N, N)), out_sharding=P())

    def reduced(lhs, rhs):
        return overlap.sharded_matmul(lhs, jax.reshard(rhs, P(None, None, reduced={"y"})), out_sharding=P())

    for f, said in ((unreduced, r"type of `lhs`.*no unreduced axes"), (reduced, r"type of `rhs`.*no reduced axes")):
        with jax.set_mesh(EXPLICIT), pytest.raises(ValueError, match=rf"{said}.*: jax.reshard"):
            jax.eval_shape(f, put(EXPLICIT, whole(1, M, K), P(None, "y")), put(EXPLICIT, whole(2, K, N), P("y")))


@pytest.mark.one_jax
def test_axes_that_are_manual_already():
    """Inside `jax.shard_map`, operands are parts: this is reported before their sizes are checked."""
    specs = P("y"), P("x", "y"), P(None, "y")
    f = functools.partial(overlap.sharded_matmul, lhs_sharding=specs[0], rhs_sharding=specs[1], out_sharding=specs[2])
    for axes in ({"x", "y"}, {"y"}):
        of_parts = [P(*(axis if axis in axes else None for axis in spec)) for spec in specs]
        mapped = jax.shard_map(f, mesh=AUTO, in_specs=tuple(of_parts[:2]), out_specs=of_parts[2], axis_names=axes)
        with pytest.raises(ValueError, match=r"`lhs_sharding` must not name an axis that is manual here, got 'y'"):
            jax.eval_shape(mapped, X.update(shape=(M, K)), W)


def test_types_and_shardings_that_disagree():
    lhs, rhs = put(EXPLICIT, whole(1, B, M, K), COLUMNS[0]), put(EXPLICIT, whole(2, K, N), P())
    with pytest.raises(NotImplementedError, match=r"float32.*\"xla\""):  # The kernel says what it lacks.
        overlap.sharded_matmul(lhs, rhs, rhs_sharding=COLUMNS[1], out_sharding=COLUMNS[2], implementation="fused")
    with pytest.raises(ValueError, match=r"`lhs_sharding` must be as the type of `lhs` says.*jax.reshard"):
        overlap.sharded_matmul(lhs, rhs, lhs_sharding=P("y"), out_sharding=COLUMNS[2])
    # A whole operand may be split.
    out = overlap.sharded_matmul(lhs, rhs, rhs_sharding=COLUMNS[1], out_sharding=COLUMNS[2])
    assert_same(out, np.asarray(lhs) @ np.asarray(rhs))
