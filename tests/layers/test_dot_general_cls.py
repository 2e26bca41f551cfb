"""`layers.make_dot_general_cls` in flax's own layers, of nnx and linen: values, gradients, what runs, and refusals."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import overlap
from overlap import layers
from overlap.emulation import emulate
from tests.layers.layer_cases import AUTO, BETWEEN, EXPLICIT_FIRST, draw, make_mesh, put, same
from tests.layers.sharded_cases import whole

HEADS, HEAD_DIM, FEATURES, HIDDEN, DEPTH = 4, 8, 32, 64, 2
make = functools.partial(layers.make_dot_general_cls, batch_axis="data", fsdp_axis="data")


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, column: Any, row: Any):
        # nnx.Linear has no dot_general_cls=.
        of_linear = [{"dot_general": cls} if cls else {} for cls in (column, row)]
        self.attention = nnx.MultiHeadAttention(
            HEADS, FEATURES, qkv_dot_general_cls=column, out_dot_general_cls=row, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs, **of_linear[0])
        self.heads = nnx.LinearGeneral(FEATURES, (HEADS, HEAD_DIM), dot_general_cls=column, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs, **of_linear[1])
        self.back = nnx.LinearGeneral((HEADS, HEAD_DIM), FEATURES, axis=(-2, -1), dot_general_cls=row, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return x + self.down(jnp.tanh(self.up(x))) + self.back(jnp.tanh(self.heads(x)))


class LinenBlock(linen.Module):
    column: Any = None
    row: Any = None

    @linen.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        column = {"dot_general_cls": self.column}
        row = {"dot_general_cls": self.row}
        attention = linen.MultiHeadDotProductAttention(
            HEADS, qkv_dot_general_cls=self.column, out_dot_general_cls=self.row, name="attention"
        )
        x = x + attention(x)
        up = linen.Dense(HIDDEN, name="up", **column)(x)
        heads = linen.DenseGeneral((HEADS, HEAD_DIM), name="heads", **column)(x)
        down = linen.Dense(FEATURES, name="down", **row)(jnp.tanh(up))
        return x + down + linen.DenseGeneral(FEATURES, axis=(-2, -1), name="back", **row)(jnp.tanh(heads)), None


def drawn() -> dict[str, Any]:
    """Weights of all blocks, stacked, by the names of both models; biases are not zero."""
    chance = np.random.default_rng(0)

    def both(inwards: tuple[int, ...], outwards: tuple[int, ...]) -> dict[str, np.ndarray]:
        fan_in = np.sqrt(np.prod(inwards))
        shapes = {"kernel": (DEPTH, *inwards, *outwards), "bias": (DEPTH, *outwards)}
        return {name: (chance.standard_normal(shape) / fan_in).astype(np.float32) for name, shape in shapes.items()}

    features, heads = (FEATURES,), (HEADS, HEAD_DIM)
    attention = {name: both(features, heads) for name in ("query", "key", "value")} | {"out": both(heads, features)}
    dense = {"up": both(features, (HIDDEN,)), "down": both((HIDDEN,), features)}
    return {"attention": attention, "heads": both(features, heads), "back": both(heads, features), **dense}


def by_numpy(x: np.ndarray, weights: dict[str, Any]) -> np.ndarray:
    """All blocks in float64."""
    x = x.astype(np.float64)
    for i in range(DEPTH):
        at = jax.tree.map(lambda w, i=i: w[i].astype(np.float64), weights)

        def product(x: np.ndarray, w: dict[str, np.ndarray], contracted: int = 1) -> np.ndarray:
            return np.tensordot(x, w["kernel"], contracted) + w["bias"]

        query, key, value = (product(x, at["attention"][name]) for name in ("query", "key", "value"))
        logits = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(HEAD_DIM)
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + product(np.einsum("bhqk,bkhd->bqhd", shares, value), at["attention"]["out"], 2)
        x = x + product(np.tanh(product(x, at["up"])), at["down"]) + product(
            np.tanh(product(x, at["heads"])), at["back"], 2)  # fmt: skip
    return x


def of_nnx(weights: Any, x: jax.Array, column: Any = None, row: Any = None) -> jax.Array:
    """The stacked blocks of nnx, in a scan with remat."""
    graph, _ = nnx.split(nnx.eval_shape(lambda: NnxBlock(nnx.Rngs(0), column, row)))

    @jax.checkpoint
    def run(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graph, state)(x), None

    state = nnx.State(jax.tree.map(nnx.Param, weights))
    return jax.lax.scan(run, x, state)[0]


def of_linen(weights: Any, x: jax.Array, column: Any = None, row: Any = None) -> jax.Array:
    """The stacked blocks of linen, in its own scan with its own remat."""
    block = linen.scan(linen.remat(LinenBlock), variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH)
    out, _ = block(column, row).apply({"params": weights}, x)
    return out


MODELS = {"nnx": of_nnx, "linen": of_linen}
# The kernels as in `make_dot_general_cls`, behind the dimension of the blocks; biases as the results.
COLUMN = {"kernel": P(None, "data", "tensor"), "bias": P(None, "tensor")}
ROW = {"kernel": P(None, "tensor"), "bias": P()}


def shardings(mesh: Any) -> Any:
    def of(path: Any, w: np.ndarray) -> Any:
        *_, layer, name = (entry.key for entry in path)
        spec = (ROW if layer in ("out", "down", "back") else COLUMN)[name]
        return jax.NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(of, drawn())


@EXPLICIT_FIRST
@pytest.mark.parametrize("name", MODELS)
def test_flaxs_own_layers(name: str, kind: Any) -> None:
    """Dense, DenseGeneral and attention, under jit, scan and remat: values of NumPy, gradients of the plain layers."""
    weights = drawn()
    x = draw(1)
    mesh = make_mesh(2, 2, kind)
    classes = make("column", implementation="xla"), make("row", implementation="xla")

    def loss(classes: Any, weights: Any, x: jax.Array) -> Any:
        out = MODELS[name](weights, x, *classes)
        return jnp.mean(out**2), out

    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, plain), expected = run((), weights, x)
    with jax.set_mesh(mesh):
        (_, out), grads = run(classes, jax.device_put(weights, shardings(mesh)), put(x, mesh, BETWEEN))
    assert same(out, BETWEEN)
    for found in (plain, out):
        np.testing.assert_allclose(found, by_numpy(x, weights), rtol=1e-4, atol=1e-4)
    for found, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6, equal_nan=False)


def products(name: str, classes: Any, weights: Any, x: Any) -> Counter[tuple[str, str]]:
    """How often each operation runs by each implementation, by `explain`: a scan's body counts once."""
    found = overlap.explain(functools.partial(MODELS[name], column=classes[0], row=classes[1]), weights, x)
    return Counter((choice.op, choice.implementation) for choice in found)


@pytest.mark.one_jax
@pytest.mark.parametrize(("name", "traces"), [("nnx", 1), ("linen", 2)])  # linen traces a scan's body twice.
def test_which_products_run(name: str, traces: int) -> None:
    """With implementation="fused" each product of a block is a kernel. Without a class the library does nothing."""
    weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16), drawn())
    x = jax.ShapeDtypeStruct((4, 16, FEATURES), jnp.bfloat16)
    with jax.set_mesh(make_mesh(2, 2, AUTO)):
        found = [
            products(name, (make("column", implementation=how), make("row", implementation=how)), weights, x)
            for how in ("fused", "xla")
        ]
        assert products(name, (None, None), weights, x) == Counter()
    # Query, key, value, up and heads gather; out, down and back scatter.
    assert found == [
        {("all_gather_lhs_matmul", how): 5 * traces, ("matmul_reduce_scatter", how): 3 * traces}
        for how in ("fused", "xla")
    ]


@pytest.fixture
def without_single_axes() -> Iterator[None]:
    """Types know no mesh axes of one device, as in MaxText's training."""
    name = "jax_remove_size_one_mesh_axis_from_type"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.mark.one_jax
def test_kernels_of_dense(without_single_axes: None) -> None:
    """Emulated: sums of whole numbers are exact."""
    x, w, back = whole(0, 4, 16, 64), whole(1, 64, 128), whole(2, 128, 64)
    options: Any = {"batch_axis": "data", "implementation": "fused"}
    column, row = (layers.make_dot_general_cls(kind, **options) for kind in ("column", "row"))
    denses: list[Any] = [
        linen.Dense(size, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=cls)
        for size, cls in ((128, column), (64, row))
    ]

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        inside = denses[0].apply({"params": {"kernel": w}}, x)
        return inside, denses[1].apply({"params": {"kernel": back}}, jnp.clip(inside, -3, 3))

    mesh = make_mesh(1, 2)
    with jax.set_mesh(mesh), emulate(cores=2, detect_races=False) as emulated:
        inside, out = run(put(x, mesh, BETWEEN))
    assert emulated.counts["launches"] == 2
    expected = (x @ w).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(inside), expected)
    products = np.clip(expected.astype(np.float32), -3, 3) @ back
    np.testing.assert_allclose(np.asarray(out, np.float32), products, rtol=2**-7, atol=1, equal_nan=False)


# --- What is refused --------------------------------------------------------------------------------------------------

X, W, PLAIN = jnp.ones((4, 16, 32)), jnp.ones((32, 64)), (((2,), (0,)), ((), ()))
# Keywords and operands, the error and its message.
REFUSED: list[tuple[dict[str, Any], Any, type[Exception], str]] = [
    (
        {"axis": ("data", "tensor")},
        (X, W, PLAIN),
        ValueError,
        "^make_dot_general_cls: axis must be one .*: name an axis",
    ),
    ({"axis": "data"}, (X, W, PLAIN), ValueError, "axis must be one mesh axis, .*batch_axis='data': name an axis that"),
    ({"fsdp_axis": "model"}, (X, W, PLAIN), ValueError, "fsdp_axis='model' is no axis of the mesh, .*: name one"),
    ({"sequence_parallel": None}, (X, W, PLAIN), TypeError, "sequence_parallel must be True or False, got None"),
    ({"implementation": "cuda"}, (X, W, PLAIN), ValueError, 'implementation must be "fused", "xla" or None, got'),
    ({"axis": "model"}, (X, W, PLAIN), ValueError, r"axis='model' is no axis of the mesh, which has \{.*: name one"),
    ({}, (X[:, :6], W, PLAIN), ValueError, r"rows \(.*\)=6 must be a multiple of the 4 devices .*pad them, or use seq"),
    ({}, (X[:3], W, PLAIN), ValueError, r"batch \(.*\)=3 must be a multiple of the 2 devices"),
    ({}, (X[0, 0], W, (((0,), (0,)), ((), ()))), ValueError, r"activations must be \[\.\.\., rows, features\], got"),
    ({}, (X, W[:, :6], PLAIN), ValueError, r"`rhs` must be cut into equal parts, got 6 in dimension 1 .*pad it to 8"),
    ({}, (X, W, PLAIN, "highest"), NotImplementedError, "default precision, got 'highest': use lax"),
    ({}, (X, W.astype(jnp.bfloat16), PLAIN), ValueError, "dtype"),
]


@pytest.mark.one_jax
def test_what_is_refused() -> None:
    with jax.set_mesh(make_mesh(2, 4)):
        for options, operands, kind, message in REFUSED:
            with pytest.raises(kind, match=message):
                make("column", **options)()(*operands)
    for parallel in ("columns", P("data")):
        with pytest.raises(ValueError, match=r'parallel must be "column" .* or "row" .*, got .*: name one'):
            layers.make_dot_general_cls(parallel)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"^make_dot_general_cls must know the mesh .*, or give mesh="):
        make("row")()(X, W, PLAIN)
    # nnx.jit compares static attributes, and linen hashes them.
    assert make("row") == make("row") != make("column") and hash(make("row")) == hash(make("row"))
