"""Tests TMA copies over the edge of an array: a load fills the outside, a store drops it, and a promise is checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import ProtocolError, RaceError, emulate
from tests.emulation.cases import TILED, normal, out_type, run_kernel

MODES = plgpu.OOBFillMode
BOX = (16, 64)


def dynamic(value):
    """Returns an index that is known only when the kernel runs. Tracing would refuse a static index out of bounds."""
    return lax.axis_index("core") + jnp.int32(value)


def load(x, start, *, box=BOX, mode=None, slices=None, transforms=()):
    """Loads a box of x at `start` with TMA and returns its contents. `slices` selects a part of the box to load."""

    def body(x_gmem, o, smem, barrier):
        source = x_gmem.at[tuple(pl.ds(dynamic(first), size) for first, size in zip(start, box))]
        source = source if slices is None else source.at[slices]
        plgpu.copy_gmem_to_smem(source, smem, barrier, oob_mode=mode)
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    shape = box if slices is None else tuple(s.size for s in slices)
    scratch = [plgpu.SMEM(shape, x.dtype, transforms=transforms), plgpu.Barrier()]
    return run_kernel(
        body, x, out_type=out_type(shape, x.dtype), grid=(1,), grid_names=("core",), scratch_types=scratch
    )


def window(x, start, box=BOX):
    """Returns the contents that `load` must return, from NumPy: the part of a large zero-padded array."""
    padded = np.pad(x, [(64, 256)] * x.ndim)
    return padded[tuple(slice(64 + first, 64 + first + size) for first, size in zip(start, box))]


@pytest.mark.parametrize(
    ("shape", "start"),
    [
        ((40, 64), (32, 0)),  # The box begins inside, but is larger than the rest.
        ((5, 64), (0, 0)),  # the box is larger than the dimension
        ((5, 24), (0, 0)),  # the box is larger than both dimensions
        ((40, 72), (24, 64)),  # a corner
        ((40, 64), (-4, 0)),  # before the beginning
        ((5, 24), (-3, -8)),  # on all sides
        ((40, 64), (48, 0)),  # nothing at all
    ],
    ids=str,
)
def test_a_load_fills_zeros_outside(shape, start):
    x = normal(*shape, dtype=np.float16)
    np.testing.assert_array_equal(load(x, start, mode=MODES.ZEROS if start[0] == 32 else None), window(x, start))


def test_a_load_of_a_slice_and_into_a_tiled_and_swizzled_buffer_over_the_edge():
    x, box = normal(100, 200, dtype=np.float16), (64, 128)
    np.testing.assert_array_equal(load(x, (64, 128), box=box, transforms=TILED), window(x, (64, 128), box))
    x = normal(24, 64)
    for first in (4, 12):
        y = load(x, (16, 0), slices=(pl.ds(first, 4), pl.ds(32, 32)))
        np.testing.assert_array_equal(y, window(x, (16 + first, 32), (4, 32)))


def test_what_is_undefined_outside_is_not_zero():
    x = normal(40, 64)
    y = load(x, (32, 0), mode=MODES.UNDEFINED)
    np.testing.assert_array_equal(y[:8], x[32:])
    assert np.isnan(y[8:]).all()


@pytest.mark.parametrize(("shape", "start"), [((40, 64), (32, 0)), ((5, 64), (0, 0)), ((40, 64), (-4, 0))], ids=str)
def test_a_promise_is_checked(shape, start):
    with pytest.raises(ProtocolError, match="out of bounds for a dimension of size"):
        load(normal(*shape), start, mode=MODES.PROMISE_IN_BOUNDS)
    inside = normal(64, 64)
    np.testing.assert_array_equal(load(inside, (48, 0), mode=MODES.PROMISE_IN_BOUNDS), inside[48:])


def store(x, shape, starts, *, reduction=None, start_values=None):
    """Stores x over the edge of an array of `shape`, one CTA per entry of `starts`."""
    rows, columns = x.shape

    def body(x_gmem, o, smem):
        smem[...] = x_gmem[...]
        plgpu.commit_smem()
        for core, (row, column) in enumerate(starts):

            @pl.when(lax.axis_index("core") == core)
            def _store(row=row - core, column=column - core):
                box = o.at[pl.ds(dynamic(row), rows), pl.ds(dynamic(column), columns)]
                plgpu.copy_smem_to_gmem(smem, box, reduction_op=reduction)

        plgpu.wait_smem_to_gmem(0)

    kwargs = dict(grid=(len(starts),), grid_names=("core",), scratch_types=[plgpu.SMEM(x.shape, x.dtype)])
    if start_values is None:
        return run_kernel(body, x, out_type=out_type(shape, x.dtype), **kwargs)

    def in_place(x, values):
        target = jax.new_ref(values)
        plgpu.kernel(body, out_type=(), **kwargs)(x, target)
        return target[...]

    with emulate():
        return np.asarray(jax.jit(in_place)(x, start_values))


@pytest.mark.parametrize(
    ("shape", "start"), [((40, 64), (32, 0)), ((5, 64), (0, 0)), ((5, 24), (-3, -8)), ((40, 72), (24, 64))], ids=str
)
def test_a_store_drops_what_is_outside(shape, start):
    x = normal(*BOX)
    y = store(x, shape, [start])
    expected = np.full((256, 256), np.nan, np.float32)
    expected[64 + start[0] :, 64 + start[1] :][: BOX[0], : BOX[1]] = x
    np.testing.assert_array_equal(y, expected[64 : 64 + shape[0], 64 : 64 + shape[1]])


def test_a_reduction_drops_what_is_outside():
    x, values = normal(*BOX), normal(20, 64, seed=1)
    y = store(x, values.shape, [(8, 0)], reduction="add", start_values=values)
    np.testing.assert_allclose(y, values + np.pad(x[:12], [(8, 0), (0, 0)]), rtol=1e-6)


def test_only_what_is_inside_can_race():
    x = normal(*BOX)
    # One box begins at row 8. The other begins 8 rows before the array and ends at row 8: no race is reported. If the
    # boxes share one row, a race is reported.
    y = store(x, (24, 64), [(8, 0), (-8, 0)])
    np.testing.assert_array_equal(y, np.concatenate([x[8:], x]))
    with pytest.raises(RaceError, match=r"output 0\[7:23"):
        store(x, (24, 64), [(7, 0), (-8, 0)])
    # Boxes may overlap beyond the edge, since nothing is written there.
    store(x, (8, 64), [(0, 0), (8, 0), (10, 0)])
