"""Mistakes in how a kernel of one device uses memory: missing waits and fences, and reads of what nobody has written.

Each function with the decorator `reports` is a kernel with one mistake.
"""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator import ProtocolError, RaceError
from tests.emulation.cases import HALF, TILED, Table, X, run_kernel

SMEM, OPERAND = plgpu.SMEM(X.shape, jnp.float32), plgpu.SMEM(X.shape, jnp.float16, transforms=TILED)
LOADING = dict(scratch_types=[SMEM, plgpu.Barrier()])
MULTIPLYING = dict(x=HALF, scratch_types=[OPERAND, plgpu.Barrier()])
TWO = dict(num_threads=2, thread_name="wg")
table = Table()
reports = table.reports


# ---- waits that are missing ------------------------------------------------------------------------------------------


@reports(RaceError, "race on tile_smem:", "of tile_smem (smem)", **LOADING)
def copies_unseen(x_gmem, out_gmem, tile_smem, loaded):
    plgpu.copy_gmem_to_smem(x_gmem, tile_smem, loaded)
    plgpu.copy_smem_to_gmem(tile_smem, out_gmem.at[:])


@reports(RaceError, "race on tiles[0]:", scratch_types=[[SMEM, plgpu.Barrier()]])
def copies_unseen_of_a_list(x, o, tiles):
    copies_unseen(x, o, *tiles)


@reports(RaceError, "race on smem", scratch_types=[SMEM])
def waits_for_too_few_stores(x, o, smem):
    smem[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, o)
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    smem[...] = x[...]
    plgpu.wait_smem_to_gmem(0)


@reports(ProtocolError, "freed too early:\n  TMA store, read", **LOADING)
def leaves_before_its_store_has_read(x, o, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.copy_smem_to_gmem(smem, o)


@reports(RaceError, "missing proxy fence", "commit_smem", "warp 3", **TWO, **LOADING)
def stores_what_another_warpgroup_has_not_committed(x, o, smem, full):
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _():
        smem[...] = x[...]
        plgpu.barrier_arrive(full)

    @pl.when(wg == 1)
    def _():
        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 3)
            def _():
                plgpu.barrier_wait(full)
                plgpu.copy_smem_to_gmem(smem, o)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@reports(RaceError, "union group", out=(2,), **TWO, scratch_types=[plgpu.RefUnion(SMEM, OPERAND)])
def uses_both_views_of_a_union(x, o, union):
    first, second = union
    wg = lax.axis_index("wg")

    @pl.when(wg == 0)
    def _():
        first[...] = x[...]
        o[0] = first[...].sum()

    @pl.when(wg == 1)
    def _():
        second[...] = jnp.full(X.shape, 2, jnp.float16)
        o[1] = second[...].astype(jnp.float32).sum()


def accumulate(use):
    """Returns a kernel that multiplies what it has loaded by itself, and what `use(acc, x, smem, loaded)` returns."""

    def body(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        plgpu.barrier_wait(loaded)

        def scope(acc):
            plgpu.wgmma(acc, smem, smem)
            return use(acc, x, smem, loaded)

        o[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), jnp.float32))

    body.__name__ = use.__name__
    return body


@reports(ProtocolError, "is read while 1 wgmma", **MULTIPLYING)
@accumulate
def reads_an_accumulator_too_early(acc, x, smem, loaded):
    return plgpu.wgmma_accumulator_load(acc, wait_n=1)


@reports(RaceError, "TMA load, write", "is not ordered with the earlier read\n  wgmma", **MULTIPLYING)
@accumulate
def refills_what_a_product_reads(acc, x, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded)
    plgpu.barrier_wait(loaded)
    plgpu.wgmma_wait(0)
    return acc[...]


# ---- memory that nobody has written ----------------------------------------------------------------------------------


def partly_written(left, right):
    """Returns a kernel that multiplies 64 x 64 operands of which only the first (rows, columns) are loaded."""

    def multiplies_what_is_not_all_there(x, o, lhs, rhs, loaded):
        for ref, (rows, columns) in ((lhs, left), (rhs, right)):
            part = (pl.ds(0, rows), pl.ds(0, columns))
            plgpu.copy_gmem_to_smem(x.at[part], ref.at[part], loaded)
            plgpu.barrier_wait(loaded)

        def multiply(acc):
            plgpu.wgmma(acc, lhs, rhs)
            return acc[...]

        o[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))

    return multiplies_what_is_not_all_there


# Whole rows of the left operand may be missing; the library's kernels do that where rows end.
for left, right, which in (((24, 32), (64, 64), "left"), ((64, 64), (48, 64), "right"), ((64, 64), (64, 32), "right")):
    reports(ProtocolError, "nobody has written", f"wgmma, {which} operand", "got a part of it", x=HALF,
            scratch_types=[OPERAND, OPERAND, plgpu.Barrier()])(partly_written(left, right))  # fmt: skip


def written_between(first, last, by_copy):
    """Returns a kernel that reads rows `first` to `last` of a buffer of which rows 8 to 56 have been written."""

    def reads_what_nobody_has_written(x, o, scratch, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, 48)], scratch.at[pl.ds(8, 48)])
        plgpu.wait_smem_to_gmem(0)
        if by_copy:
            rows = pl.ds(first, last - first)
            plgpu.copy_gmem_to_smem(scratch.at[rows], smem.at[pl.ds(0, last - first)], loaded)
            plgpu.barrier_wait(loaded)
        else:
            pl.debug_print("", scratch[first:last].sum())
        o[...] = smem[...]

    return reads_what_nobody_has_written


for by_copy in (False, True):
    for first, last, how_much in ((0, 8, "none"), (0, 16, "a part"), (48, 64, "a part")):
        reports(ProtocolError, "nobody has written", f"output 1[{first}:", f"got {how_much} of it", **LOADING,
                out=[X.shape, X.shape])(written_between(first, last, by_copy))  # fmt: skip


def test_what_is_wholly_written_can_be_read():
    for by_copy in (False, True):
        run_kernel(written_between(8, 56, by_copy), X, out=[X.shape, X.shape], **LOADING)


@pytest.mark.parametrize("case", table.cases)
def test_report(case):
    case()
