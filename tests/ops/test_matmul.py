"""`matmul` and the mainloop's hooks, emulated on one CPU device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import overlap
from overlap.emulation import emulate
from overlap.kernels.grid import own_row
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.product_kernel import ProductKernel
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import tma_store, wait_stores_landed
from tests import oracle
from tests.ops.product_cases import in_f32, normal, oracle_of


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    ("cores", "shape", "config"),
    [
        (1, (128, 256, 64), overlap.Config()),
        (2, (384, 256, 448), overlap.Config(tile_n=128)),
        (
            3,
            (256, 384, 128),
            overlap.Config(tile_n=128, stages=2, order_minor="n", order_width=1),
        ),
        (9, (256, 256, 64), overlap.Config(tile_n=128)),
    ],
)
def test_error_within_twice_that_of_xla(cores, shape, config, dtype):
    m, n, k = shape
    lhs, rhs = normal(0, m, k, dtype=dtype), normal(1, k, n, dtype=dtype)
    expected = lhs.astype(jnp.float32) @ rhs.astype(jnp.float32)
    with emulate(cores=cores):
        actual = jax.jit(lambda a, b: overlap.matmul(a, b, config=config, implementation="fused"))(lhs, rhs)
        ours = oracle.distance(actual, expected)
    oracle.assert_close((ours, oracle.distance(oracle.rounded(lhs @ rhs), expected)))


def test_gradients():
    lhs, rhs = normal(2, 128, 64) * 0.1, normal(3, 64, 256) * 0.1

    def loss(a, b, implementation):
        return jnp.sum(jnp.sin(overlap.matmul(a, b, implementation=implementation).astype(jnp.float32)))

    with emulate(cores=2):
        ours = jax.grad(lambda a, b: loss(a, b, "fused"), argnums=(0, 1))(lhs, rhs)
        jax.block_until_ready(ours)
    for a, b in zip(ours, jax.grad(lambda a, b: loss(a, b, "xla"), argnums=(0, 1))(lhs, rhs), strict=True):
        assert float(oracle.distance(a, b.astype(jnp.float32))) < 2e-2


HOOKED = {
    "whole tiles": overlap.Config(tile_n=128),
    "cut tiles": overlap.Config(tile_n=128, stream_k=3),
}


@pytest.mark.parametrize("name", HOOKED)
def test_hooks_see_each_operand_tile_and_the_accumulator(name):
    """A matmul that also forwards its left operand from shared memory, and applies a function to its result."""
    config, (m, n, k) = HOOKED[name], (384, 256, 192)
    cores = 4
    order = TileOrder.of(m, n, config)
    work = StreamK(order.tiles, k // 64, cores, config.stream_k)
    assert work.cuts == (config.stream_k > 1)
    lhs, rhs = normal(4, m, k), normal(5, k, n)

    class Body:
        def __init__(self, refs):
            self.refs = refs

        def tile_at(self, index):
            row, column = order(index)
            return Tile(0, own_row(config, row), column)

        def hooks(self):
            (lhs_gmem, rhs_gmem), (out_gmem, _) = self.refs.inputs, self.refs.outputs
            return Hooks(
                load_lhs=lambda tile, load: load(lhs_gmem),
                rhs_at=lambda tile: rhs_gmem,
                out_at=lambda tile: out_gmem,
                in_smem=self.forward,
                epilogue_at=lambda tile: lambda values, rows, columns, addend: values * 2,
            )

        def forward(self, tile, step, lhs_smem, rhs_smem):
            del rhs_smem
            _, copy_gmem = self.refs.outputs

            @pl.when(tile.n == 0)
            def _send():
                rows, columns = pl.ds(tile.m * config.tile_m, config.tile_m), pl.ds(step * 64, 64)
                tma_store(lhs_smem, copy_gmem.at[rows, columns])
                wait_stores_landed()

    types = jax.ShapeDtypeStruct((m, n), lhs.dtype), jax.ShapeDtypeStruct((m, k), lhs.dtype)
    operands = OperandTypes(m, lhs.dtype, rhs.dtype, lhs.dtype, transport="ring")
    kernel = ProductKernel("forwarding", Target("cpu", "cpu", cores), config, operands, work)
    with emulate(cores=cores) as run:
        out, copy = jax.jit(lambda *operands: kernel.launch(operands, types, Body))(lhs, rhs)
        run.check()
    np.testing.assert_array_equal(np.asarray(copy), np.asarray(lhs))
    np.testing.assert_allclose(in_f32(out), 2 * oracle_of(lhs, rhs), rtol=1e-2, atol=1e-1)


def test_calls_outside_jit_trace_their_kernel_once(monkeypatch):
    traced, launch = [], ProductKernel.launch
    monkeypatch.setattr(ProductKernel, "launch", lambda self, *a: traced.append(self.name) or launch(self, *a))
    lhs, rhs = normal(8, 136, 72), normal(9, 72, 136)  # No other test uses these sizes, so the kernel is traced here.
    with emulate(cores=2):
        for _ in range(3):
            overlap.matmul(lhs, rhs, implementation="fused")
    assert traced == ["overlap_matmul"]


def test_the_default_on_a_cpu_takes_any_shape():
    lhs, rhs = normal(6, 3, 5, dtype=jnp.float32), normal(7, 5, 7, dtype=jnp.float32)
    np.testing.assert_allclose(
        np.asarray(overlap.matmul(lhs, rhs)), np.asarray(lhs) @ np.asarray(rhs), rtol=1e-5, atol=1e-5
    )
