"""`jax.vmap` of the fused collectives, emulated: the same bits as without `vmap`, or a refusal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests import oracle
from tests.oracle import make_mesh
from tests.product_cases import normal

H200 = Target("gpu", "NVIDIA H200", 132)
TILES = overlap.Config(tile_n=128)
# One product over the few rows of all shards.
JOINED = overlap.Config(tile_m=64, tile_n=128, joined=True)
BF16 = jnp.bfloat16


def gather_lhs(lhs, rhs, config=TILES, **keywords):
    return overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused", config=config, **keywords)


def on_mesh(body, *arguments, devices=2):
    """Returns the results of `body` on every device, with the same arguments on every device."""
    everywhere = oracle.on_mesh(
        make_mesh(x=devices), lambda *args: jax.tree.map(lambda x: x[None], body(*args)), in_specs=P(), out_specs=P("x")
    )
    with emulate(cores=3):
        return jax.tree.map(lambda x: np.asarray(x, np.float32), everywhere(*arguments))


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def own(x):
    """Draws different values on every device, so that a misplaced shard shows."""
    return x * (1 + jax.lax.axis_index("x")).astype(x.dtype)


@pytest.mark.parametrize(
    ("devices", "config"), [(1, TILES), (2, TILES), (2, JOINED)], ids=["one device", "tiles", "joined"]
)
def test_over_the_left_operand(devices, config):
    lhs, rhs = normal(0, 3, 24, 64), normal(1, 64, 136)

    def mapped(lhs, rhs):
        return jax.vmap(lambda x: gather_lhs(own(x), rhs, config))(lhs)

    def one_by_one(lhs, rhs):
        return jnp.stack([gather_lhs(own(x), rhs, config) for x in lhs])

    assert_same(on_mesh(mapped, lhs, rhs, devices=devices), on_mesh(one_by_one, lhs, rhs, devices=devices))


@pytest.mark.parametrize("config", [TILES, JOINED], ids=["tiles", "joined"])
def test_twice_over_a_batch_with_several_right_sides_and_the_gathered_operand(config):
    lhs, sides = normal(0, 2, 3, 2, 16, 64), (normal(1, 64, 72), normal(2, 64, 136))

    def mapped(lhs, sides):
        inner = jax.vmap(lambda x: gather_lhs(own(x), sides, config, return_gathered=True), in_axes=1, out_axes=1)
        return jax.vmap(inner)(lhs)

    def leading(lhs, sides):
        return gather_lhs(own(lhs), sides, config, return_gathered=True)

    assert_same(on_mesh(mapped, lhs, sides), on_mesh(leading, lhs, sides))


@pytest.mark.parametrize("config", [TILES, JOINED], ids=["tiles", "joined"])
@pytest.mark.parametrize("axes", [(None, 0), (0, 0), (0, None)], ids=str)
def test_over_the_scale_of_rows(axes, config):
    lhs, rhs, scale = normal(0, 3, 24, 64), normal(1, 64, 136), normal(2, 3, 24, 1, dtype=jnp.float32)
    lhs, scale = (x if axis == 0 else x[0] for x, axis in zip((lhs, scale), axes, strict=True))
    columns = normal(3, 136, dtype=jnp.float32)

    def one(x, s, rhs):
        return gather_lhs(own(x), rhs, config, lhs_scale=own(s), rhs_scale=columns)

    def mapped(lhs, rhs, scale):
        return jax.vmap(lambda x, s: one(x, s, rhs), in_axes=axes)(lhs, scale)

    def one_by_one(lhs, rhs, scale):
        return jnp.stack(
            [
                one(*(x if axis is None else x[i] for x, axis in zip((lhs, scale), axes, strict=True)), rhs)
                for i in range(3)
            ]
        )

    assert_same(on_mesh(mapped, lhs, rhs, scale), on_mesh(one_by_one, lhs, rhs, scale))


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_gradients_of_each(wrapped):
    """`vmap` of `grad`, also for operands that are not mapped: each element then has its own gradient.

    Inside `jax.jit`, `vmap` maps over the operation of the backward pass. The kernel cannot always do that, and it is
    not the call for which the user asked for the kernel. So XLA runs.
    """
    lhs, rhs = normal(0, 2, 16, 64), normal(1, 64, 72)

    def of(implementation):
        gather = wrapped(lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation=implementation))

        def loss(x, w):
            return jnp.sum(jnp.sin(gather(x, w).astype(jnp.float32)))

        return lambda lhs, rhs: jax.vmap(jax.grad(loss, (0, 1)), in_axes=(0, None))(lhs, rhs)

    for ours, theirs in zip(*(on_mesh(of(name), lhs, rhs) for name in ("fused", "xla")), strict=True):
        assert np.linalg.norm(ours - theirs) < 2e-2 * np.linalg.norm(theirs)


@pytest.mark.parametrize("dimension", [0, 1])
def test_of_gathered_weights(dimension):
    shard = (32, 72) if dimension == 0 else (64, 40)
    lhs, rhs = normal(0, 2, 3, 24, 64), normal(1, *shard)

    def call(x, w):
        return overlap.all_gather_rhs_matmul(
            own(x), own(w), "x", dimension=dimension, implementation="fused", config=TILES
        )

    def one_by_one(lhs, rhs):
        return jnp.stack([jnp.stack([call(x, rhs) for x in xs]) for xs in lhs])

    twice = jax.vmap(jax.vmap(call, in_axes=(0, None)), in_axes=(1, None), out_axes=1)
    mapped = on_mesh(lambda lhs, rhs: twice(lhs, rhs), lhs, rhs)
    assert_same(mapped, on_mesh(one_by_one, lhs, rhs))


REST = {
    "rhs": lambda op, lhs, rhs: jax.vmap(lambda w: op("lhs", lhs[0], w))(rhs),
    "scale of columns": lambda op, lhs, rhs: jax.vmap(lambda s: op("lhs", lhs[0], rhs[0], rhs_scale=s))(jnp.ones(3)),
    "scale of all": lambda op, lhs, rhs: jax.vmap(lambda s: op("lhs", lhs[0], rhs[0], lhs_scale=s))(jnp.ones(3)),
    "nothing": lambda op, lhs, rhs: jax.vmap(lambda x: op("lhs", x, rhs[0]))(lhs[:0]),
    "gathered weights": lambda op, lhs, rhs: jax.vmap(lambda w: op("rhs", lhs[0], w))(rhs),
    "nothing with gathered weights": lambda op, lhs, rhs: jax.vmap(lambda x: op("rhs", x, rhs[0]))(lhs[:0]),
}


@pytest.mark.parametrize("body", REST.values(), ids=REST)
def test_over_anything_else_it_is_refused_if_asked_for_and_left_to_xla_if_not(body, monkeypatch):
    def on_two(implementation):
        def op(kind, lhs, rhs, **keywords):
            if kind == "lhs":
                return overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation=implementation, **keywords)
            return overlap.all_gather_rhs_matmul(lhs, rhs, "x", dimension=1, implementation=implementation)

        mapped = jax.shard_map(
            lambda lhs, rhs: body(op, lhs, rhs), mesh=make_mesh(x=2), in_specs=P(), out_specs=P(), check_vma=False
        )
        shapes = (3, 1024, 4096), (3, 4096, 4096)
        return jax.jit(mapped).trace(*(jax.ShapeDtypeStruct(shape, BF16) for shape in shapes))

    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    with pytest.raises(NotImplementedError, match=r"vmap.*xla"):
        on_two("fused")
    chosen, asked = on_two(None), on_two("xla")
    assert chosen.out_info.shape == asked.out_info.shape
    assert "mosaic_gpu" not in chosen.lower(lowering_platforms=("cuda",)).as_text()
