"""Tests left operands with fewer rows than a tile: the kernel loads only existing rows, and no other values count."""

import dataclasses

import jax.numpy as jnp
import pytest

import overlap
from overlap.emulation import emulate
from overlap.kernels.hopper import mainloop
from overlap.kernels.limits import rows_loaded
from tests import oracle
from tests.ops import several_sides_cases
from tests.ops.product_cases import check_exactly, integers
from tests.ops.several_sides_cases import Form

NARROW = overlap.Config(tile_m=64, tile_n=128, stages=3)
TALL = overlap.Config(tile_m=128, tile_n=64, stages=2)
HIGH = overlap.Config(tile_m=256, tile_n=128, stages=2)
E4M3 = jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("m", "config", "transposed", "rows"),
    [
        (1, NARROW, False, 8),
        (16, NARROW, False, 16),
        (57, NARROW, False, 64),
        (65, NARROW, False, 64),
        (65, TALL, False, 72),
        (65, HIGH, True, 128),
        (32, TALL, True, 64),
        (32, NARROW, True, 64),
    ],
)
def test_whole_rows_of_swizzle_atoms_are_loaded(m, config, transposed, rows):
    assert rows_loaded(config, m, "bfloat16", transposed) == rows


CASES = [  # cores, shape, config, what else
    (2, (16, 264, 200), NARROW, {}),
    (2, (1, 8, 8), NARROW, {}),  # Fewer k steps than stages.
    (3, (33, 264, 200), TALL, {"transpose_rhs": True}),
    (3, (72, 136, 136), HIGH, {}),
    (7, (24, 264, 520), dataclasses.replace(NARROW, stream_k=3), {}),
    (5, (24, 264, 520), dataclasses.replace(TALL, split_k=3), {}),
    (3, (16, 136, 200), NARROW, {"batch": (3,)}),
    (3, (16, 136, 272), NARROW, {"dtype": E4M3, "transpose_rhs": True}),
    # Rows are contiguous along m: whole boxes are left out.
    (3, (16, 136, 200), TALL, {"transpose_lhs": True}),
    (3, (136, 136, 200), HIGH, {"transpose_lhs": True, "transpose_rhs": True}),
]


@pytest.mark.parametrize(("cores", "shape", "config", "kwargs"), CASES, ids=str)
@pytest.mark.parametrize("completion", ["late", "random"])
def test_every_bit(cores, shape, config, kwargs, completion):
    check_exactly(shape, config, cores=cores, settings={"completion": completion, "seed": 3}, **kwargs)


@pytest.mark.parametrize("transport", ["pull", "ring"])
@pytest.mark.parametrize("config", [NARROW, TALL], ids=str)
def test_shards_that_fill_no_tile(transport, config):
    form = Form(20, (136, 264), 200, (2,), gathered=True, scales=("rows", "columns"))
    mesh, arrays = oracle.make_mesh(x=3), several_sides_cases.operands(form, 3)
    body = several_sides_cases.call(form, implementation="fused", config=config, transport=transport)
    with emulate(cores=5, completion="late", seed=1):
        results = several_sides_cases.on_mesh(form, mesh, body)(*several_sides_cases.put(form, mesh, arrays))
    several_sides_cases.assert_exact(form, arrays, results)


def record(shape, config):
    m, n, k = shape
    with emulate(cores=1, record=True) as run:
        overlap.matmul(integers(1, m, k), integers(2, k, n), config=config, implementation="fused")
    return run.events


@pytest.mark.parametrize(("m", "loaded", "busy"), [(20, "0:24", {"wg0"}), (65, "0:72", {"wg0", "wg1"})])
def test_no_rows_are_loaded_and_none_multiplied_that_are_not_there(m, loaded, busy):
    events = record((m, 64, 128), TALL)
    loads = {e.target for e in events if e.kind == "copy" and e.target.startswith("buffers.lhs")}
    assert loads and all(loaded in target for target in loads), loads
    assert {e.thread for e in events if e.kind == "wgmma"} == busy


def test_negative_control_with_a_row_too_few_the_result_is_wrong(monkeypatch):
    """The rest of a stage holds NaN, so that any use of these values shows in the result."""
    monkeypatch.setattr(mainloop, "rows_loaded", lambda *args: rows_loaded(*args) - 8)
    with pytest.raises(AssertionError):
        check_exactly((20, 264, 136), NARROW, cores=2)
