"""Tests `all_gather_lhs_matmul` under the emulator: numerics, meshes, repeated launches, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests import oracle
from tests.oracle import make_mesh, on_mesh, operands

SMALL = overlap.Config(tile_n=128)


TRANSPORTS = pytest.mark.parametrize("transport", ["pull", "ring"])


def fused(lhs, rhs, transport=None):
    return oracle.fused(lhs, rhs, config=SMALL, transport=transport)


@TRANSPORTS
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_error_within_twice_the_unfused_product(devices, dtype, transport):
    mesh = make_mesh(x=devices)
    with emulate(cores=2, seed=devices):
        measure = oracle.errors(mesh, lambda a, b: fused(a, b, transport))
        for seed in range(2):
            oracle.assert_close(measure(*operands(mesh, (128, 128, 128), dtype, seed)))


@TRANSPORTS
@pytest.mark.parametrize(
    ("cores", "shape", "config"),
    [
        (1, (128, 128, 64), SMALL),  # One CTA does all the work.
        (7, (128, 128, 64), SMALL),  # More CTAs than tiles or chunks.
        (3, (256, 384, 192), SMALL),  # Several row blocks, columns and k steps; k is no multiple of the stages.
        (
            3,
            (256, 256, 320),
            overlap.Config(tile_n=128, stages=3, order_minor="n", order_width=2),
        ),
        (2, (128, 256, 256), overlap.Config(chunk_bytes=256, chunk_buffers=3)),  # Chunks are parts of rows.
        (2, (128, 256, 128), overlap.Config(chunk_bytes=4096, chunk_buffers=1)),
        (2, (200, 264, 136), SMALL),  # Ragged in all dimensions, also inside the shards of the result.
        (3, (131, 8, 1032), overlap.Config(tile_n=64, chunk_bytes=1024)),
        (2, (1, 24, 8), SMALL),
        (
            3,
            (133, 136, 64),
            overlap.Config(tile_n=128, chunk_bytes=2048),
        ),  # Chunks of 16 rows; the last has five.
        (
            3,
            (70, 136, 8 * 37),
            overlap.Config(tile_n=128, chunk_bytes=256),
        ),  # Each row in three parts, one of them shorter.
    ],
)
def test_other_sizes(cores, shape, config, transport):
    mesh = make_mesh(x=2)
    with emulate(cores=cores, seed=1):
        oracle.assert_close(oracle.errors(mesh, lambda a, b: oracle.fused(a, b, config=config, transport=transport))(
            *operands(mesh, shape, jnp.bfloat16, seed=2)))  # fmt: skip


@TRANSPORTS
@pytest.mark.parametrize("axes", [{"data": 2, "x": 2}, {"x": 2, "data": 2}], ids=["minor", "major"])
def test_one_axis_of_a_larger_mesh(axes, transport):
    mesh = make_mesh(**axes)

    def measure(lhs, rhs):
        lhs = lhs * (1 + lax.axis_index("data")).astype(lhs.dtype)
        return oracle.worst(oracle.distance(fused(lhs, rhs, transport), oracle.exact(lhs, rhs)), mesh)

    with emulate(cores=2):
        error = on_mesh(mesh, measure, out_specs=P())(*operands(mesh, (128, 128, 128), jnp.bfloat16, seed=3))
    assert float(error) < 5e-3


def test_repeated_launches_agree_bit_for_bit_by_either_transport():
    mesh = make_mesh(x=3)
    lhs, rhs = operands(mesh, (128, 128, 128), jnp.float16, seed=4)
    results = []
    for transport in ("pull", "ring"):
        launch = on_mesh(mesh, lambda a, b, transport=transport: fused(a, b, transport))
        for seed, completion in enumerate(("late", "eager", "random")):
            with emulate(cores=2, seed=seed, completion=completion):
                results.append(np.asarray(launch(lhs, rhs)))
    assert all((r == results[0]).all() for r in results)


@TRANSPORTS
def test_in_a_loop_beside_another_collective_with_operands_that_change(transport):
    mesh = make_mesh(x=2)

    def body(lhs, rhs):
        def step(lhs, _):
            actual, expected = fused(lhs, rhs, transport), oracle.unfused(lhs, rhs).astype(jnp.float32)
            return -lhs, oracle.worst(oracle.distance(actual, expected), mesh)

        return lax.scan(step, lhs, length=3)[1]

    with emulate(cores=2):
        errors = on_mesh(mesh, body, out_specs=P(None))(*operands(mesh, (128, 128, 128), jnp.bfloat16, seed=5))
    assert float(errors.max()) < 5e-3


@TRANSPORTS
def test_gradients(transport):
    mesh = make_mesh(x=2)

    def loss(op):
        return lambda lhs, rhs: jnp.sum(jnp.sin(op(lhs, rhs).astype(jnp.float32)))

    def body(lhs, rhs):
        ours = jax.grad(loss(lambda a, b: fused(a, b, transport)), argnums=(0, 1))(lhs, rhs)
        theirs = jax.grad(loss(oracle.unfused), argnums=(0, 1))(lhs, rhs)
        return [
            oracle.worst(oracle.distance(a, b.astype(jnp.float32)), mesh) for a, b in zip(ours, theirs, strict=True)
        ]

    lhs, rhs = operands(mesh, (128, 128, 64), jnp.bfloat16, seed=6)
    with emulate(cores=2):
        errors = on_mesh(mesh, body, out_specs=[P(), P()])(lhs * 0.1, rhs * 0.1)
    assert max(map(float, errors)) < 2e-2


def test_the_default_on_a_cpu_is_the_xla_implementation():
    mesh = make_mesh(x=2)
    lhs, rhs = operands(mesh, (100, 50, 30), jnp.float32, seed=7)  # Sizes and a dtype that the kernel does not support.
    result = on_mesh(mesh, lambda a, b: overlap.all_gather_lhs_matmul(a, b, "x"))(lhs, rhs)
    np.testing.assert_allclose(np.asarray(result), np.asarray(lhs) @ np.asarray(rhs), rtol=1e-4, atol=1e-4)


def test_output_dtype():
    mesh = make_mesh(x=2)
    lhs, rhs = operands(mesh, (128, 128, 64), jnp.bfloat16, seed=8)
    with emulate(cores=2):
        result = on_mesh(mesh, lambda a, b: oracle.fused(a, b, config=SMALL, preferred_element_type=jnp.float16))(
            lhs, rhs
        )
    assert result.dtype == jnp.float16
    expected = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    np.testing.assert_allclose(np.asarray(result, np.float32), expected, rtol=2e-3, atol=2e-2)
