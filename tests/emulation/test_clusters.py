"""Clusters: when they start, the arrivals that their barriers expect, and multicast loads that are cut in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.emulation import DeadlockError, ProtocolError, RaceError, emulate
from tests.emulation import cluster_kernels
from tests.emulation.cases import TILED, normal, out_type, run_kernel

STEPS, ROWS, COLUMNS = 5, 8, 64
X = normal(STEPS * ROWS, COLUMNS)
TOTAL = X.reshape(STEPS, ROWS, COLUMNS).sum(0)


def test_a_cluster_is_launched_as_a_whole():
    kernel = jax.jit(cluster_kernels.shared_tiles(STEPS, ROWS, COLUMNS, clusters=3))
    for resident in (2, 3, 5, 6):
        with emulate(resident=resident):
            np.testing.assert_allclose(np.asarray(kernel(X)), [[TOTAL, 2 * TOTAL]] * 3, rtol=1e-5, atol=1e-5)
    with pytest.raises(ProtocolError, match="a cluster of 2 CTAs cannot be launched where 1 fit"), emulate(resident=1):
        kernel(X).block_until_ready()


def test_a_cluster_does_not_start_where_a_part_of_it_fits():
    def body(o):
        met = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_signal(met)
        plgpu.semaphore_wait(met, 4, decrement=False)
        o[lax.axis_index("cluster"), lax.axis_index("rank")] = jnp.int32(1)

    kwargs = dict(out_type=out_type((2, 2), jnp.int32), grid=(2,), grid_names=("cluster",), cluster=(2,))
    kwargs |= {"cluster_names": ("rank",)}
    assert run_kernel(body, settings={"resident": 4}, **kwargs).tolist() == [[1, 1], [1, 1]]
    with pytest.raises(DeadlockError, match="2 CTAs were never launched"):
        run_kernel(body, settings={"resident": 3}, **kwargs)


@pytest.mark.parametrize(
    ("axes", "arrivals"), [(("r",), 2), (("c",), 3), (("r", "c"), 4), ((("r", "c"),), 6), ((("c", "r"),), 6)], ids=str
)
def test_a_cluster_barrier_takes_arrivals_along_its_axes(axes, arrivals):
    def body(o, barrier):
        @pl.when(jnp.bool_(True))
        def _():
            plgpu.barrier_arrive(barrier)

        plgpu.barrier_wait(barrier)
        o[lax.axis_index("r"), lax.axis_index("c")] = lax.axis_index("r") * 3 + lax.axis_index("c")

    barrier = plgpu.ClusterBarrier(collective_axes=axes)
    kwargs = dict(out_type=out_type((2, 3), jnp.int32), cluster=(2, 3), cluster_names=("r", "c"))
    np.testing.assert_array_equal(run_kernel(body, scratch_types=[barrier], **kwargs), np.arange(6).reshape(2, 3))

    def one_short(o, barrier):
        first = (lax.axis_index("r") == 0) & (lax.axis_index("c") == 0)

        @pl.when(jnp.logical_not(first))
        def _():
            plgpu.barrier_arrive(barrier)

        plgpu.barrier_wait(barrier)

    with pytest.raises(DeadlockError, match=f"got {arrivals - 1} of {arrivals} arrivals"):
        run_kernel(one_short, scratch_types=[barrier], **kwargs)


def test_arrivals_on_a_leaders_barrier_count_there_alone():
    def body(o, barrier):
        plgpu.barrier_arrive(barrier)

        @pl.when(lax.axis_index("rank") == 0)
        def _():
            plgpu.barrier_wait(barrier)
            o[0] = 7

    barrier = plgpu.ClusterBarrier(collective_axes=("rank",), leader_tracked=True)
    kwargs = dict(out_type=out_type((1,), jnp.int32), cluster=(4,), cluster_names=("rank",))
    assert run_kernel(body, scratch_types=[barrier], **kwargs).tolist() == [7]


def multicast(x, smem, out_shape, *, cluster=(2,), names=("rank",), axes=("rank",), rows=None, offset=0):
    """Loads the same tile of x into every CTA by multicast. Each CTA writes the tile to its place in the output."""

    def body(x_gmem, o, tile, full):
        place = tuple(lax.axis_index(name) for name in names)
        # Rows differ between CTAs that do not share a copy.
        start = offset + sum(place[names.index(n)] * rows for n in names if n not in axes) if rows else offset
        source = x_gmem.at[pl.ds(start + jnp.int32(0), tile.shape[0])]
        plgpu.copy_gmem_to_smem(source, tile, full, collective_axes=axes)
        plgpu.barrier_wait(full)
        o[place] = tile[...]

    return run_kernel(
        body, x, out_type=out_type((*cluster, *out_shape), x.dtype), scratch_types=[smem, plgpu.Barrier()],
        cluster=cluster, cluster_names=names,
    )  # fmt: skip


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize(
    ("shape", "transforms"), [((16, 128), ()), ((16, 128), TILED), ((8, 256), TILED), ((1, 64), ())], ids=str
)
def test_a_multicast_copy_arrives_whole_however_it_is_cut(shape, transforms, cluster):
    x = normal(*shape, dtype=np.float16)
    y = multicast(x, plgpu.SMEM(shape, jnp.float16, transforms=transforms), shape, cluster=(cluster,))
    np.testing.assert_array_equal(y, np.broadcast_to(x, (cluster, *shape)))


def test_a_multicast_copy_along_one_of_two_axes():
    x = normal(16, 64)
    smem = plgpu.SMEM((8, 64), jnp.float32)
    y = multicast(x, smem, (8, 64), cluster=(2, 2), names=("r", "c"), axes=("c",), rows=8)
    np.testing.assert_array_equal(y, np.broadcast_to(x.reshape(2, 1, 8, 64), (2, 2, 8, 64)))


def test_a_multicast_copy_that_reaches_over_the_edge_reads_zeros_there():
    x = normal(13, 64)
    y = multicast(x, plgpu.SMEM((8, 64), jnp.float32), (8, 64), offset=8)
    np.testing.assert_array_equal(y[:, :5], np.broadcast_to(x[8:], (2, 5, 64)))
    assert (y[:, 5:] == 0).all()


def test_a_multicast_copy_tells_the_peer_of_nothing_but_itself():
    def body(x_gmem, o, tile, full, *, wait):
        rank = lax.axis_index("rank")

        @pl.when(rank == 0)
        def _write():
            o[0] = jnp.float32(1)

        plgpu.copy_gmem_to_smem(x_gmem, tile, full, collective_axes="rank")
        plgpu.barrier_wait(full)
        if wait is not None:
            plgpu.barrier_arrive(wait)
            plgpu.barrier_wait(wait)

        @pl.when(rank == 1)
        def _read():
            o[1] = o[0] + 1

    kwargs = dict(out_type=out_type((2,)), cluster=(2,), cluster_names=("rank",))
    scratch = [plgpu.SMEM((8, 64), jnp.float32), plgpu.Barrier()]
    with pytest.raises(RaceError, match="output 0"):
        run_kernel(lambda *refs: body(*refs, wait=None), normal(8, 64), scratch_types=scratch, **kwargs)
    both = plgpu.ClusterBarrier(collective_axes=("rank",))
    y = run_kernel(
        lambda *refs: body(*refs[:-1], wait=refs[-1]), normal(8, 64), scratch_types=[*scratch, both], **kwargs
    )
    assert y.tolist() == [1, 2]
