"""`jax.vmap` of the fused collectives: the same bits as without, or a refusal; emulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests import oracle
from tests.oracle import make_mesh

TILES = overlap.Config(tile_n=128)
# Few rows of all shards as one product.
JOINED = overlap.Config(tile_m=64, tile_n=128, joined=True)
BF16 = jnp.bfloat16


def normal(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def gather_lhs(lhs, rhs, config=TILES, **keywords):
    return overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused", config=config, **keywords)


def on_mesh(body, *arguments, devices=2):
    """The results of `body` with the same arguments on every device, of every device."""
    everywhere = oracle.on_mesh(
        make_mesh(x=devices), lambda *args: jax.tree.map(lambda x: x[None], body(*args)), in_specs=P(), out_specs=P("x")
    )
    with emulate(cores=3):
        return jax.tree.map(lambda x: np.asarray(x, np.float32), everywhere(*arguments))


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("config", [TILES, JOINED], ids=["tiles", "joined"])
@pytest.mark.parametrize("devices", [1, 2])
def test_over_the_left_operand(devices, config):
    config = TILES if devices == 1 else config
    lhs, rhs = normal(0, 3, 24, 64), normal(1, 64, 136)

    def mapped(lhs, rhs):
        return jax.vmap(lambda x: gather_lhs(x * (1 + jax.lax.axis_index("x")), rhs, config))(lhs)

    def one_by_one(lhs, rhs):
        return jnp.stack([gather_lhs(x * (1 + jax.lax.axis_index("x")), rhs, config) for x in lhs])

    assert_same(on_mesh(mapped, lhs, rhs, devices=devices), on_mesh(one_by_one, lhs, rhs, devices=devices))


def test_twice_over_a_batch_with_several_right_sides_and_the_gathered_operand():
    lhs, sides = normal(0, 2, 3, 2, 16, 64), (normal(1, 64, 72), normal(2, 64, 136))

    def mapped(lhs, sides):
        inner = jax.vmap(lambda x: gather_lhs(x, sides, return_gathered=True), in_axes=1, out_axes=1)
        return jax.vmap(inner)(lhs)

    def leading(lhs, sides):
        return gather_lhs(lhs, sides, return_gathered=True)

    assert_same(on_mesh(mapped, lhs, sides), on_mesh(leading, lhs, sides))


@pytest.mark.parametrize("of_lhs", [None, 0])
def test_over_the_scale_of_rows(of_lhs):
    lhs, rhs, scale = normal(0, 3, 24, 64), normal(1, 64, 136), normal(2, 3, 24, 1, dtype=jnp.float32)
    lhs = lhs if of_lhs == 0 else lhs[0]
    columns = normal(3, 136, dtype=jnp.float32)

    def mapped(lhs, rhs, scale):
        return jax.vmap(lambda x, s: gather_lhs(x, rhs, scale=(s, columns)), in_axes=(of_lhs, 0))(lhs, scale)

    def one_by_one(lhs, rhs, scale):
        return jnp.stack(
            [gather_lhs(lhs if of_lhs is None else lhs[i], rhs, scale=(s, columns)) for i, s in enumerate(scale)]
        )

    assert_same(on_mesh(mapped, lhs, rhs, scale), on_mesh(one_by_one, lhs, rhs, scale))


def test_gradients_of_each():
    """`vmap` of `grad`: also the gradient of what is not mapped, of which each element then has one."""
    lhs, rhs = normal(0, 2, 16, 64), normal(1, 64, 72)

    def of(implementation):
        def loss(x, w):
            out = overlap.all_gather_lhs_matmul(x, w, "x", implementation=implementation)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        return lambda lhs, rhs: jax.vmap(jax.grad(loss, (0, 1)), in_axes=(0, None))(lhs, rhs)

    for ours, theirs in zip(*(on_mesh(of(name), lhs, rhs) for name in ("fused", "xla")), strict=True):
        assert np.linalg.norm(ours - theirs) < 2e-2 * np.linalg.norm(theirs)


@pytest.mark.parametrize("gather_dimension", [0, 1])
def test_of_gathered_weights(gather_dimension):
    shard = (32, 72) if gather_dimension == 0 else (64, 40)
    lhs, rhs = normal(0, 3, 24, 64), normal(1, *shard)

    def call(x, w):
        return overlap.all_gather_rhs_matmul(
            x, w, "x", gather_dimension=gather_dimension, implementation="fused", config=TILES
        )

    def one_by_one(lhs, rhs):
        return jnp.stack([call(x, rhs) for x in lhs])

    mapped = on_mesh(lambda lhs, rhs: jax.vmap(call, in_axes=(0, None))(lhs, rhs), lhs, rhs)
    assert_same(mapped, on_mesh(one_by_one, lhs, rhs))


@pytest.mark.parametrize(
    "body",
    [
        lambda lhs, rhs: jax.vmap(lambda w: gather_lhs(lhs[0], w))(rhs),
        lambda lhs, rhs: jax.vmap(lambda s: gather_lhs(lhs[0], rhs[0], scale=s))(jnp.ones(3)),
        lambda lhs, rhs: jax.vmap(
            lambda w: overlap.all_gather_rhs_matmul(lhs[0], w, "x", gather_dimension=1, implementation="fused")
        )(rhs),
    ],
    ids=["rhs", "scale of columns", "gathered weights"],
)
def test_over_anything_else_is_refused_with_the_way_out(body):
    mapped = jax.shard_map(body, mesh=make_mesh(x=2), in_specs=P(), out_specs=P(), check_vma=False)
    shapes = (3, 128, 64), (3, 64, 256)
    with pytest.raises(NotImplementedError, match=r"vmap.*xla"):
        jax.eval_shape(mapped, *(jax.ShapeDtypeStruct(shape, BF16) for shape in shapes))
