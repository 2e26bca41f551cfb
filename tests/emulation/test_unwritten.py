"""Tests that the emulator reports reads of memory that nobody has written, or that is written only in part."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import ProtocolError
from tests.emulation.cases import TILED, normal
from tests.emulation.cases import out_type as out
from tests.emulation.cases import run_kernel as run


def copied(read):
    """Writes rows 8 to 56 (of 64) of a scratch buffer by the copy engine, then calls `read(scratch, smem, barrier)`."""

    def body(x, o, scratch, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, 48)], scratch.at[pl.ds(8, 48)])
        plgpu.wait_smem_to_gmem(0)
        read(scratch, smem, barrier)
        plgpu.copy_smem_to_gmem(smem, o)
        plgpu.wait_smem_to_gmem(0)

    kinds = out((64, 64), jnp.float16)
    scratch_types = [plgpu.SMEM((64, 64), jnp.float16, transforms=TILED), plgpu.Barrier()]
    return run(body, normal(64, 64, dtype=np.float16), out_type=(kinds, kinds), scratch_types=scratch_types)


def by_copy(rows):
    def read(scratch, smem, barrier):
        target = smem.at[pl.ds(0, rows.stop - rows.start)]
        plgpu.copy_gmem_to_smem(scratch.at[pl.ds(rows.start, rows.stop - rows.start)], target, barrier)
        plgpu.barrier_wait(barrier)

    return read


def by_load(rows):
    return lambda scratch, smem, barrier: pl.debug_print("", scratch[rows.start : rows.stop].sum())


@pytest.mark.parametrize("read", [by_copy, by_load])
def test_only_what_is_wholly_written_can_be_read(read):
    copied(read(slice(8, 56)))
    for rows, how_much in ((slice(0, 8), "none"), (slice(0, 16), "a part"), (slice(48, 64), "a part")):
        words = rf"(?s)nobody has written.*output 1\[{rows.start}:.*got {how_much} of it"
        with pytest.raises(ProtocolError, match=words):
            copied(read(rows))


def product(lhs_part, rhs_part):
    """Computes a 64 × 64 × 64 product after loading only these parts (rows, columns) of lhs and rhs into shared memory.

    Returns the first 8 rows of the product.
    """

    def body(x, o, lhs, rhs, out_smem, barrier):
        for ref, (rows, columns) in ((lhs, lhs_part), (rhs, rhs_part)):
            part = (pl.ds(0, rows), pl.ds(0, columns))
            plgpu.copy_gmem_to_smem(x.at[part], ref.at[part], barrier)
            plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, lhs, rhs)
            plgpu.wgmma_wait(0)
            return acc[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, 8)], o.at[pl.ds(0, 8)])
        plgpu.wait_smem_to_gmem(0)

    x = normal(64, 64, dtype=np.float16)
    operand = plgpu.SMEM((64, 64), jnp.float16, transforms=TILED)
    scratch_types = [operand, operand, plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()]
    return x, run(body, x, out_type=out((64, 64), jnp.float32), scratch_types=scratch_types)


def test_rows_of_the_left_operand_may_be_missing_as_a_whole_and_nothing_else():
    for rows in (64, 24, 8):
        x, y = product((rows, 64), (64, 64))
        np.testing.assert_allclose(y[:8], (x.astype(np.float32) @ x.astype(np.float32))[:8], rtol=1e-5, atol=1e-5)
    whole = (64, 64)
    for lhs, rhs, which in (((24, 32), whole, "left"), (whole, (48, 64), "right"), (whole, (64, 32), "right")):
        with pytest.raises(ProtocolError, match=rf"(?s)wgmma, {which} operand.*got a part of it"):
            product(lhs, rhs)
