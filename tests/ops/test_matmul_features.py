"""Features of `matmul` beyond lhs @ rhs, emulated: forms, epilogues, batches, f8, split k, transformations."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap.emulation import emulate
from overlap.frame import primitive
from overlap.single_gpu.matmul import Matmul
from tests import oracle
from tests.ops.product_cases import check, in_f32, normal

FORMS = list(itertools.product([False, True], repeat=2))
F8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(("left", "right"), FORMS)
def test_forms(left, right, dtype):
    lhs, rhs = normal(0, *((192, 256) if left else (256, 192)), dtype=dtype), normal(1, 192, 256, dtype=dtype)
    check(lhs, rhs.T if right else rhs, transpose_lhs=left, transpose_rhs=right)


TILES = [
    overlap.Config(tile_m=64, tile_n=128, stages=6),
    overlap.Config(tile_m=64, tile_n=256),
    overlap.Config(tile_m=256, tile_n=128),
    overlap.Config(tile_m=256, tile_n=64, stages=3),
    overlap.Config(tile_m=128, tile_n=192),
    overlap.Config(tile_m=128, tile_n=128, stages=5),
]


@pytest.mark.parametrize(("left", "right"), [(False, False), (True, True)])
@pytest.mark.parametrize("config", TILES, ids=lambda c: f"{c.tile_m}x{c.tile_n}")
def test_tiles(config, left, right):
    m, n, k = 256, 2 * config.tile_n, 128
    lhs, rhs = normal(2, *((k, m) if left else (m, k))), normal(3, *((n, k) if right else (k, n)))
    check(lhs, rhs, config=config, transpose_lhs=left, transpose_rhs=right)


RAGGED = [(1, 8, 8), (16, 40, 72), (130, 264, 136), (257, 136, 200)]


@pytest.mark.parametrize("shape", RAGGED, ids=str)
@pytest.mark.parametrize(("left", "right"), FORMS)
def test_ragged(shape, left, right):
    m, n, k = shape
    m += -m % 8 if left else 0  # The rows of an operand have multiples of 16 bytes.
    lhs, rhs = normal(40, *((k, m) if left else (m, k))), normal(41, *((n, k) if right else (k, n)))
    rows, addend = jnp.exp(normal(42, m, 1, dtype=jnp.float32)), normal(43, m, n)
    extra = dict(bias=normal(44, n, dtype=jnp.float32), addend=addend, lhs_scale=rows)
    extra |= dict(transpose_lhs=left, transpose_rhs=right)
    check(lhs, rhs, config=overlap.Config(tile_n=128), limit=6e-3, **extra)


def test_ragged_in_k_alone_and_in_a_batch():
    check(normal(45, 67, 64), normal(46, 67, 72), transpose_lhs=True, config=overlap.Config(tile_n=64))
    check(normal(47, 2, 130, 72), normal(48, 2, 72, 264), config=overlap.Config(tile_m=64, tile_n=128))
    check(normal(49, 20, 144, dtype=F8[0]), normal(50, 40, 144, dtype=F8[1]), transpose_rhs=True, limit=6e-3)


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize(("left", "right"), list(itertools.product(F8, repeat=2)))
def test_float8(left, right, out):
    lhs, rhs = normal(4, 128, 256, dtype=left), normal(5, 256, 256, dtype=right)
    rows, columns = jnp.exp(normal(6, 128, 1, dtype=jnp.float32)), jnp.exp(normal(7, 256, dtype=jnp.float32))
    keywords = dict(lhs_scale=rows, rhs_scale=columns, transpose_rhs=True, preferred_element_type=out)
    check(lhs, rhs, limit=6e-3, **keywords)


def test_float8_wants_k_along_its_rows():
    lhs, rhs = normal(8, 128, 128, dtype=F8[0]), normal(9, 128, 256, dtype=F8[0])
    with pytest.raises(NotImplementedError, match="transpose_rhs=True"):
        overlap.matmul(lhs, rhs, implementation="fused")


EPILOGUES = {
    "bias": dict(bias=normal(10, 256, dtype=jnp.float32)),
    "addend": dict(addend=normal(11, 256, 256)),
    "scalars": dict(lhs_scale=0.5, rhs_scale=0.3),
    "rows": dict(lhs_scale=jnp.exp(normal(12, 256, 1, dtype=jnp.float32))),
    "activation": dict(activation=jax.nn.relu),
    "all": dict(
        bias=normal(13, 256), addend=normal(14, 256, 256), activation=jnp.tanh, preferred_element_type=jnp.float32,
        lhs_scale=jnp.exp(normal(15, 256, 1, dtype=jnp.float32)),
        rhs_scale=0.1 * jnp.exp(normal(16, 1, 256, dtype=jnp.float32)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", EPILOGUES)
def test_epilogues(name, split):
    limit = (
        6e-3 if name in ("all", "activation", "addend") else None
    )  # The addend is converted to the result's dtype; tanh is approximate.
    config = overlap.Config(tile_n=128, split_k=split)
    check(normal(17, 256, 256), normal(18, 256, 256), config=config, limit=limit, **EPILOGUES[name])


@pytest.mark.parametrize("split", [1, 2, 4])
def test_split_k_is_deterministic(split):
    lhs, rhs = normal(19, 128, 512), normal(20, 512, 128)
    config = overlap.Config(tile_m=64, tile_n=128, split_k=split)
    first = check(lhs, rhs, config=config, cores=3)
    for seed, completion in enumerate(("eager", "random")):
        with emulate(cores=2, seed=seed, completion=completion):
            again = jax.jit(lambda a, b: overlap.matmul(a, b, config=config, implementation="fused"))(lhs, rhs)
        assert (np.asarray(again) == np.asarray(first)).all()


SMALL = overlap.Config(tile_n=128, stages=2)


@pytest.mark.parametrize(
    ("lhs_batch", "rhs_batch", "addend_batch"),
    [((3,), (3,), ()), ((3,), (), (3,)), ((), (2,), ()), ((2, 2), (2, 2), (2, 2))],
)
def test_leading_dimensions(lhs_batch, rhs_batch, addend_batch):
    lhs, rhs = normal(21, *lhs_batch, 128, 128), normal(22, *rhs_batch, 128, 128)
    check(lhs, rhs, addend=normal(23, *addend_batch, 128, 128), config=SMALL, limit=6e-3)


def test_leading_dimensions_are_more_rows_where_they_can_be():
    """A token of each of many sequences takes one tile, not one tile per sequence."""
    lhs, rhs, addend = normal(24, 24, 1, 128), normal(25, 128, 128), normal(26, 24, 1, 128)
    scale = jnp.exp(normal(27, 24, 1, 1, dtype=jnp.float32))
    work = []
    for given in (lhs, lhs[:, 0]):
        with emulate(cores=2) as run:
            overlap.matmul(given, rhs, config=SMALL, implementation="fused")
        work.append(run.counts["wgmmas"])
    assert work[0] == work[1] > 0
    check(lhs, rhs, addend=addend, lhs_scale=scale, activation=jax.nn.relu, config=SMALL, limit=6e-3)
    # An addend that all elements share cannot be part of one matrix of all rows.
    check(lhs, rhs, addend=addend[0], lhs_scale=scale[0], config=SMALL, limit=6e-3)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 1)])
@pytest.mark.parametrize("inner", [(), (2,)])
def test_vmap(axes, inner):
    def operand(seed, axis):
        x = normal(seed, *inner, 128, 128)
        return x if axis is None else jnp.stack([x * (i + 1) for i in range(3)], axis=axis)

    lhs, rhs = operand(24, axes[0]), operand(25, axes[1])
    bias = normal(26, 3, 128)

    def call(implementation):
        return jax.vmap(
            lambda a, b, c: overlap.matmul(
                a, b, bias=c, activation=jnp.abs, config=SMALL, implementation=implementation
            ),
            in_axes=(*axes, 0),
        )(lhs, rhs, bias)

    with emulate(cores=2):
        actual = call("fused")
        assert float(oracle.distance(actual, call("xla").astype(jnp.float32))) < 5e-3


def test_a_config_is_for_the_forward_pass_and_for_each_element_of_a_vmap(monkeypatch):
    """The docstring of `matmul` says which configurations run."""
    given, found, launch = overlap.Config(tile_n=128, stages=3), [], Matmul.launch

    def record(self, operands, plan):
        found.append(plan.config)
        return launch(self, operands, plan)

    monkeypatch.setattr(Matmul, "launch", record)
    lhs, rhs = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    product = functools.partial(overlap.matmul, implementation="fused", config=given)
    jax.eval_shape(jax.vmap(product, in_axes=(0, None)), jax.ShapeDtypeStruct((3, *lhs.shape), lhs.dtype), rhs)
    assert found == [given] * len(found) and found
    found.clear()
    primitive.tracer_of.cache_clear()
    jax.eval_shape(jax.grad(lambda *operands: product(*operands).sum(), argnums=(0, 1)), lhs, rhs)
    assert found[0] == given and len(found) > 2 and given not in found[-2:]


@pytest.mark.parametrize(("left", "right"), FORMS)
def test_gradients(left, right):
    lhs, rhs = 0.1 * normal(27, 128, 256), 0.1 * normal(28, 256, 128)
    lhs, rhs = lhs.T if left else lhs, rhs.T if right else rhs
    extra = dict(
        bias=normal(29, 128), addend=normal(30, 128, 128), lhs_scale=jnp.exp(normal(31, 128, 1, dtype=jnp.float32)),
        rhs_scale=0.5,
    )  # fmt: skip

    def loss(lhs, rhs, extra, implementation):
        y = overlap.matmul(
            lhs, rhs, transpose_lhs=left, transpose_rhs=right, activation=jnp.tanh, implementation=implementation,
            config=SMALL if implementation == "fused" else None, **extra,
        )  # fmt: skip
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    with emulate(cores=2):
        ours = jax.grad(lambda *a: loss(*a, "fused"), argnums=(0, 1, 2))(lhs, rhs, extra)
        jax.block_until_ready(ours)
    theirs = jax.grad(lambda *a: loss(*a, "xla"), argnums=(0, 1, 2))(lhs, rhs, extra)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert float(oracle.distance(a, b.astype(jnp.float32))) < 3e-2


def test_under_scan_and_jit():
    xs, w = normal(32, 3, 128, 128), normal(33, 128, 128)
    with emulate(cores=2):
        step = lambda carry, x: (carry, overlap.matmul(x, carry, config=SMALL, implementation="fused"))  # noqa: E731
        _, ys = jax.jit(lambda w, xs: jax.lax.scan(step, w, xs))(w, xs)
        assert float(oracle.distance(ys, in_f32(xs) @ in_f32(w))) < 5e-3


WRONG = [
    (dict(bias=np.zeros(128, np.float32)), ["`bias`", "(256,)", "(128,)"]),
    (dict(addend=np.zeros((128, 128), np.float32)), ["`addend`", "(128, 256)", "(128, 128)"]),
    (dict(lhs_scale=np.zeros((256,), np.float32)), ["`lhs_scale`", "(128, 1)", "(256,)", "`rhs_scale`"]),
    (dict(rhs_scale=np.zeros((128, 1), np.float32)), ["`rhs_scale`", "(1, 256)", "(128, 1)", "`lhs_scale`"]),
    (dict(rhs_scale=[1.0]), ["`rhs_scale`", "list of 1"]),
    (dict(lhs_scale=(1.0, 2.0)), ["`lhs_scale`", "a real number or an array", "(1.0, 2.0)"]),
    (dict(bias=[1.0, 2.0]), ["`bias`", "array", "list"]),
    (dict(activation="relu"), ["`activation`", "'relu'"]),
    (dict(transpose_lhs=True), ["contraction", "k=128", "k=64"]),
]


@pytest.mark.parametrize(("kwargs", "fragments"), WRONG)
def test_wrong_calls(kwargs, fragments):
    with pytest.raises(ValueError) as caught:
        overlap.matmul(normal(34, 128, 64), normal(35, 64, 256), **kwargs)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_an_empty_batch_is_left_to_xla():
    lhs, rhs = jnp.zeros((0, 128, 64), jnp.bfloat16), jnp.zeros((0, 64, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="batch of at least 1"):
        overlap.matmul(lhs, rhs, implementation="fused")
    assert overlap.matmul(lhs, rhs).shape == (0, 128, 128)


def test_leading_dimensions_that_differ():
    with pytest.raises(ValueError, match="leading dimensions"):
        overlap.matmul(normal(36, 2, 128, 64), normal(37, 3, 64, 256))
