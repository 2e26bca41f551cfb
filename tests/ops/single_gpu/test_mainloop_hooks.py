"""The hooks of the Hopper mainloop, which rows it loads, and how often a kernel is traced; emulated."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import overlap
from overlap.emulation import emulate
from overlap.kernels.hooks import Hooks, Tile
from overlap.kernels.hopper import mainloop
from overlap.kernels.limits import rows_loaded
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.product_kernel import ProductKernel
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import tma_store, wait_stores_landed
from tests.ops.product_cases import in_f32, integers, normal, oracle_of
from tests.ops.single_gpu.products import Product

WIDE = overlap.Config(tile_n=128)
NARROW = overlap.Config(tile_m=64, tile_n=128, stages=3)
TALL = overlap.Config(tile_m=128, tile_n=64, stages=2)


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        (WIDE, 4),
        (WIDE.replace(stream_k=3), 4),
    ],
    ids=str,
)
def test_hooks_see_each_operand_tile_and_the_accumulator(config, groups):
    """A matmul that also forwards its left operand from shared memory, and doubles its result."""
    (m, n, k), cores = (384, 256, 192), groups * config.cluster
    order = TileOrder.of(m, n, config)
    work = StreamK(order.tiles, k // 64, groups, config.stream_k)
    assert work.cuts == (config.stream_k > 1)
    lhs, rhs = integers(4, m, k), integers(5, k, n)

    class Body:
        def __init__(self, refs):
            self.refs = refs

        def tile_at(self, index):
            return Tile(0, *order(index))

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
            @pl.when(tile.n == 0)
            def _send():
                rows, columns = pl.ds(tile.m * config.tile_m, config.tile_m), pl.ds(step * 64, 64)
                tma_store(lhs_smem, self.refs.outputs[1].at[rows, columns])
                wait_stores_landed()

    types = jax.ShapeDtypeStruct((m, n), lhs.dtype), jax.ShapeDtypeStruct((m, k), lhs.dtype)
    operands = OperandTypes(m, lhs.dtype, rhs.dtype, lhs.dtype, transport="ring")
    kernel = ProductKernel("forwarding", Target("cpu", "cpu", cores), config, operands, work)
    with emulate(cores=cores) as run:
        out, copy = jax.jit(lambda *operands: kernel.launch(operands, types, Body))(lhs, rhs)
        run.check()
    np.testing.assert_array_equal(in_f32(copy), in_f32(lhs))
    np.testing.assert_array_equal(in_f32(out), in_f32((2 * oracle_of(lhs, rhs)).astype(lhs.dtype)))


def test_calls_outside_jit_trace_their_kernel_once(monkeypatch):
    traced, launch = [], ProductKernel.launch
    monkeypatch.setattr(ProductKernel, "launch", lambda self, *a: traced.append(self.name) or launch(self, *a))
    lhs, rhs = normal(8, 136, 72), normal(9, 72, 136)  # No other test uses these sizes, so the kernel is traced here.
    with emulate(cores=2):
        for _ in range(3):
            overlap.matmul(lhs, rhs, implementation="fused")
    assert traced == ["overlap_matmul"]


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("m", "config", "transposed", "rows"),
    [
        (1, NARROW, False, 8),
        (16, NARROW, False, 16),
        (57, NARROW, False, 64),
        (65, NARROW, False, 64),
        (65, TALL, False, 72),
        (65, NARROW.replace(tile_m=256), True, 128),
        (32, TALL, True, 64),
        (32, NARROW, True, 64),
    ],
)
def test_whole_rows_of_swizzle_atoms_are_loaded(m, config, transposed, rows):
    assert rows_loaded(config, m, "bfloat16", transposed) == rows


@pytest.mark.parametrize(("m", "loaded", "busy"), [(20, "0:24", {"wg0"}), (65, "0:72", {"wg0", "wg1"})])
def test_no_rows_are_loaded_and_none_multiplied_that_are_not_there(m, loaded, busy):
    one = Product(1, (m, 64, 128), TALL)
    events = one.emulated(one.operands(), record=True)[1].events
    loads = {e.target for e in events if e.kind == "copy" and e.target.startswith("buffers.lhs")}
    assert loads and all(loaded in target for target in loads), loads
    assert {e.thread for e in events if e.kind == "wgmma"} == busy


def test_negative_control_with_a_row_too_few_the_result_is_wrong(monkeypatch):
    """The rest of a stage holds NaN, so that any use of these values shows in the result."""
    monkeypatch.setattr(mainloop, "rows_loaded", lambda *args: rows_loaded(*args) - 8)
    with pytest.raises(AssertionError):
        Product(2, (20, 264, 136), NARROW).check()
