"""Mistakes with clusters, tensor memory and NVLink multicast: each is reported by an error that says where and what.

Each function with the decorator `reports` is a kernel with one mistake.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator import ProtocolError, RaceError
from tests.emulation.cases import WARPGROUP, Table, X, finish, put, run_kernel

SMEM = plgpu.SMEM(X.shape, jnp.float32)
LOADING = dict(scratch_types=[SMEM, plgpu.Barrier()])
PAIR = dict(cluster=(2,), cluster_names=("rank",))
STORES = LOADING | PAIR | dict(compiler_params=WARPGROUP)
TWO = dict(num_threads=2, thread_name="wg")
table = Table()
reports = table.reports


def load(x, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="rank")


def send(value, ref, barrier, to, **keywords):
    plgpu.async_store_smem(value, ref, barrier, cluster_idx=to, cluster_dim="rank", **keywords)


def own_rows(o):
    return o.at[pl.ds(lax.axis_index("x") * 16, 16)]


NO_CLUSTER, OTHER_AXIS, THREE = dict(cluster=(), cluster_names=()), {"cluster_names": ("r",)}, {"cluster": (3,)}
TMEM = plgpu.TMEM((128, 64), jnp.float32)
WIDE = [plgpu.TMEM((128, 256), jnp.float32), plgpu.TMEM((128, 512), jnp.float16, packed=True),
        plgpu.TMEM((64, 128), jnp.float32)]  # fmt: skip
IN_TMEM = dict(scratch_types=[TMEM], out=(128, 64))
ALL = dict(axes={"x": 4}, out=(64, 64), scratch_types=[plgpu.SMEM((16, 64), jnp.float32)])

for error, words, body, options in (
    (ProtocolError, "'rank' is no axis of the cluster: it has ['r']", lambda x, o, *refs: load(x, *refs),
     LOADING | PAIR | OTHER_AXIS),
    (ProtocolError, "in a kernel without clusters", lambda x, o, *refs: load(x, *refs), LOADING),
    (ProtocolError, "cannot be cut into 3 equal parts", lambda x, o, *refs: load(x, *refs), LOADING | PAIR | THREE),
    (ProtocolError, "'rank' = 2 is no place in a cluster", lambda x, o, *refs: send(x[...], *refs, 2), STORES),
    (ProtocolError, "'rank' is no axis of the cluster: it has ['r']", lambda x, o, *refs: send(x[...], *refs, 2),
     STORES | OTHER_AXIS),
    (ProtocolError, "'rank' = 2 in a kernel without clusters", lambda x, o, *refs: send(x[...], *refs, 2),
     STORES | NO_CLUSTER),
    (ProtocolError, "shared memory freed too early",
     lambda x, o, *refs: send(x[...], *refs, lax.axis_index("rank")), STORES),
    (ProtocolError, "uses 576 columns of tensor memory, 576 of them in this scope", lambda x, o, *refs: None,
     dict(scratch_types=WIDE, located=False)),
    (ProtocolError, "nobody has written", lambda x, o, tmem: put(o, plgpu.async_load_tmem(tmem)), IN_TMEM),
    (ProtocolError, "only whole warpgroups access tensor memory",
     lambda x, o, tmem: plgpu.warp_map(lambda _: put(o, plgpu.async_load_tmem(tmem))), IN_TMEM),
    (ProtocolError, "tensor memory freed too early:\n  tensor memory store",
     lambda x, o: pl.run_scoped(lambda tmem: plgpu.async_store_tmem(tmem, jnp.zeros((128, 64), jnp.float32)), TMEM),
     dict(out=(128, 64))),
    (ProtocolError, "has left the kernel. Expected: device ",
     lambda x, o, smem: plgpu.multimem_store(x[...], own_rows(o), "x"), ALL),
    (ProtocolError, "waits for something",
     lambda x, o, smem: (plgpu.multimem_store(x[...], own_rows(o), "x"), finish(enough=3))[0], ALL),
    (RaceError, "race on output 0:\n  multimem store",
     lambda x, o, smem: (plgpu.multimem_store(x[...], o.at[:16], "x"), finish())[0], ALL),
):  # fmt: skip
    reports(error, words, **options)(body)


# ---- clusters --------------------------------------------------------------------------------------------------------


@reports(ProtocolError, "no place in a cluster", scratch_types=[SMEM], **PAIR)
def reads_outside_the_cluster(x, o, smem):
    smem[...] = x[...]
    o[...] = plgpu.cluster_ref(smem, {"rank": lax.axis_index("rank") + 2})[...]


@reports(ProtocolError, "no allocation that a cluster shares", **PAIR, **TWO)
def loads_into_a_private_scope(x, o):
    def scope(smem, full):
        plgpu.copy_gmem_to_smem(x, smem, full, collective_axes="rank")
        plgpu.barrier_wait(full)

    pl.run_scoped(scope, SMEM, plgpu.Barrier())


ARRIVING = dict(out=(32,), scratch_types=[plgpu.ClusterBarrier(collective_axes=("rank",))], **PAIR)


def slowly(o, act):
    """CTA 0 acts when CTA 1 has long ended."""

    @pl.when(lax.axis_index("rank") == 0)
    def _act():
        for i in range(20):
            o[i] = jnp.float32(i)
        act()


IN_ORDER = {"scheduler": "round_robin"}
for settings in (IN_ORDER, {"seed": 1}):
    reports(ProtocolError, "left the cluster too early", settings=settings, **ARRIVING)(
        lambda x, o, barrier: slowly(o, lambda: plgpu.barrier_arrive(barrier)))  # fmt: skip
for settings in (IN_ORDER, IN_ORDER | {"detect_races": False}):
    reports(ProtocolError, "left the cluster too early", settings=settings, **STORES)(
        lambda x, o, smem, barrier: slowly(o.at[0], lambda: send(x[...], smem, barrier, 1)))  # fmt: skip


@reports(ProtocolError, "2 arrivals in phase 0, expected 1", **STORES)
def stores_once_too_often(x, o, smem, barrier):
    for half in range(2):
        rows = pl.ds(half * 32, 32)
        send(x[rows], smem.at[rows], barrier, 1 - lax.axis_index("rank"))
    plgpu.barrier_wait(barrier)


@reports(RaceError, "missing proxy fence", **STORES)
def stores_what_has_landed_without_a_fence(x, o, smem, barrier):
    send(x[...], smem, barrier, 1 - lax.axis_index("rank"))
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(smem, o)
    plgpu.wait_smem_to_gmem(0)


@reports(RaceError, "async store, atomic add", x=np.ones(X.shape, np.int32), **STORES | {"scratch_types":
         [plgpu.SMEM(X.shape, jnp.int32), plgpu.Barrier(num_arrivals=2)]})  # fmt: skip
def stores_beside_an_atomic_store(x, o, smem, barrier):
    first = lax.axis_index("rank") == 0
    lax.cond(first, lambda: send(x[...], smem, barrier, 0, atomic="add"), lambda: send(x[...], smem, barrier, 0))
    pl.when(first)(lambda: plgpu.barrier_wait(barrier))


@reports(RaceError, "TMA load, write", **STORES | {"scratch_types": [*STORES["scratch_types"], plgpu.Barrier()]})
def stores_where_a_load_lands(x, o, smem, barrier, loaded):
    pl.when(lax.axis_index("rank") == 0)(lambda: send(x[...], smem, barrier, 1))

    @pl.when(lax.axis_index("rank") == 1)
    def _load():
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        plgpu.barrier_wait(barrier)
        plgpu.barrier_wait(loaded)
        o[...] = smem[...]


@reports(
    RaceError, "output 0", x=X[:8], out=(2,), scratch_types=[plgpu.SMEM((8, 64), X.dtype), plgpu.Barrier()], **PAIR
)
def takes_a_multicast_copy_for_a_message(x, o, tile, full):
    rank = lax.axis_index("rank")
    pl.when(rank == 0)(lambda: put(o.at[0], jnp.float32(1)))
    load(x, tile, full)
    plgpu.barrier_wait(full)
    pl.when(rank == 1)(lambda: put(o.at[1], o[0] + 1))


@pytest.mark.parametrize(
    ("words", "shape", "dtype", "barrier", "into", "keywords"),
    [
        ("with a ClusterBarrier", X.shape, jnp.float32, plgpu.ClusterBarrier(collective_axes=("rank",)), None, {}),
        ("to a cluster_ref", X.shape, jnp.float32, plgpu.Barrier(), {"rank": 1}, {}),
        ("a multiple of 128 bytes", (3, 8), jnp.float32, plgpu.Barrier(), None, {}),
        ("integers only", X.shape, jnp.float32, plgpu.Barrier(), None, {"atomic": "add"}),
        ("integers only", X.shape, jnp.int16, plgpu.Barrier(), None, {"atomic": "add"}),
        ("in one warp", X.shape, jnp.float32, plgpu.Barrier(), None, {}),
    ],
)
def test_stores_that_mosaic_does_not_compile(words, shape, dtype, barrier, into, keywords):
    def body(o, smem, barrier):
        store = lambda _=None: send(  # noqa: E731
            jnp.ones(shape, dtype), smem if into is None else plgpu.cluster_ref(smem, into), barrier, 0, **keywords
        )
        plgpu.warp_map(store) if words == "in one warp" else store()

    with pytest.raises(NotImplementedError, match=words):
        run_kernel(body, out=(1,), **STORES | {"scratch_types": [plgpu.SMEM(shape, dtype), barrier]})


# ---- tensor memory, multicast ----------------------------------------------------------------------------------------


@reports(ProtocolError, "tensor memory freed too early:\n  tensor memory load", out=(128, 64))
def leaves_a_scope_before_its_load_ends(x, o):
    def scope(tmem):
        plgpu.async_store_tmem(tmem, jnp.zeros((128, 64), jnp.float32))
        plgpu.commit_tmem()
        o[...] = plgpu.async_load_tmem(tmem)

    for _ in range(2):
        pl.run_scoped(scope, plgpu.TMEM((128, 64), jnp.float32))


@reports(RaceError, "may leave the kernel before\n  TMA store, write", **ALL)
def multicasts_and_waits_for_the_read_alone(x, o, smem):
    smem[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, plgpu.multicast_ref(own_rows(o), "x"))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    finish()


@reports(ProtocolError, "nobody has written:\n  multimem load", **ALL)
def reduces_what_nobody_has_written(x, o, smem):
    o[:16] = plgpu.multimem_load_reduce(o.at[16:32], collective_axes="x", reduction_op="add")
    finish()


@pytest.mark.parametrize("case", table.cases)
def test_report(case):
    case()
