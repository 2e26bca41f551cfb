"""Copies and stores between the CTAs of a cluster, and between devices: NVLink multicast, forms of device ids.

Each function with the decorator `gives` is a kernel.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from mosaic_emulator import emulate
from tests.emulation.cases import COMPLETIONS, WARPGROUP, Table, X, finish, normal, out_type, run_kernel, wide
from tests.meshes import make_mesh, on_mesh

table = Table()
gives = table.gives
GRID = dict(cluster=(2, 2), cluster_names=("r", "c"))


@gives(np.broadcast_to(np.pad(X[48:], [(0, 8), (0, 0)]).reshape(2, 1, 12, 64), (2, 2, 12, 64)), X, out=(2, 2, 12, 64),
       scratch_types=[plgpu.SMEM((12, 64), jnp.float32), plgpu.Barrier()], **GRID)  # fmt: skip
def multicasts_along_one_of_two_axes_over_the_edge(x, o, tile, full):
    r, c = lax.axis_index("r"), lax.axis_index("c")
    plgpu.copy_gmem_to_smem(x.at[pl.ds(48 + 12 * r, 12)], tile, full, collective_axes=("c",))
    plgpu.barrier_wait(full)
    o[r, c] = tile[...]


PARTS = normal(2, 2, 64, 64)


@gives([np.broadcast_to(PARTS.transpose(1, 0, 2, 3), (2, 2, 2, 64, 64)), np.ones((2, 2))], PARTS,
       out=[(2, 2, 2, 64, 64), (2, 2)], compiler_params=WARPGROUP, **GRID,
       scratch_types=[plgpu.SMEM((2, 128, 64), jnp.float32), plgpu.Barrier(num_arrivals=2, num_barriers=3)]
)  # fmt: skip
def stores_along_one_of_two_axes_and_tells_what_it_has_done_before(x, o, said, smem, barrier):
    r, c = lax.axis_index("r"), lax.axis_index("c")
    said[r, c] = jnp.float32(1)
    for to in range(2):
        plgpu.async_store_smem(
            x[r, c], smem.at[r, pl.ds(0, 64)], barrier.at[1], cluster_idx=to, cluster_dim="r", optimized=False
        )
    plgpu.barrier_wait(barrier.at[1])
    o[r, c] = smem[:, :64] * said[1 - r, c]


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_a_store_to_a_cta_lands_some_time_after_the_call(completion):
    def body(o, smem, barrier):
        rank = lax.axis_index("rank")
        plgpu.async_store_smem(jnp.ones((64, 64)), smem, barrier, cluster_idx=rank, cluster_dim="rank")
        o[rank] = smem[...]
        plgpu.barrier_wait(barrier)

    def run(seed):
        settings = dict(completion=completion, detect_races=False, seed=seed)
        return run_kernel(
            body, out=(2, 64, 64), cluster=(2,), cluster_names=("rank",), compiler_params=WARPGROUP, settings=settings,
            scratch_types=[plgpu.SMEM((64, 64), jnp.float32), plgpu.Barrier()],
        )  # fmt: skip

    landed = {not np.isnan(run(seed)).any() for seed in range(6)}
    assert landed == {"late": {False}, "random": {False, True}, "eager": {True}}[completion]


OPERATIONS = {"add": np.add, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
              "xor": np.bitwise_xor}  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_atomic_stores_of_all_ctas_meet_in_one_place(number):
    atomic, dtype = list(OPERATIONS)[number], (jnp.int32, jnp.uint32)[number % 2]

    def body(x, o, smem, barrier, ready):
        rank = lax.axis_index("rank")
        smem[...] = x[2]
        plgpu.barrier_arrive(ready)
        plgpu.barrier_wait(ready)
        plgpu.async_store_smem(x[rank], smem, barrier, cluster_idx=1, cluster_dim="rank", atomic=atomic)

        @pl.when(rank == 1)
        def _receive():
            plgpu.barrier_wait(barrier)
            o[...] = smem[...]

    x = np.random.default_rng(1).integers(0, 2**32, (3, 64, 64), np.uint32).astype(dtype)
    y = run_kernel(
        body, x, cluster=(2,), cluster_names=("rank",), compiler_params=WARPGROUP, out=out_type((64, 64), dtype),
        settings={"completion": COMPLETIONS[number % 3]}, scratch_types=[
            plgpu.SMEM((64, 64), dtype), plgpu.Barrier(num_arrivals=2), plgpu.ClusterBarrier(collective_axes=("rank",)),
        ],
    )  # fmt: skip
    np.testing.assert_array_equal(y, OPERATIONS[atomic].reduce(x, dtype=x.dtype))


# ---- NVLink multicast, device ids ------------------------------------------------------------------------------------

FOUR = np.arange(4 * 8 * 64, dtype=np.float32).reshape(32, 64)
OF_DEVICES = FOUR.reshape(4, 8, 64)


def own_rows(o):
    return o.at[pl.ds(lax.axis_index("x") * 8, 8)]


@gives(np.tile(FOUR, (4, 1)), FOUR, out=(32, 64), axes={"x": 4})
def multicasts_by_threads(x, o):
    plgpu.multimem_store(x[...], own_rows(o), "x")
    finish()


@gives(np.tile(FOUR, (4, 1)), FOUR, out=(32, 64), axes={"x": 4}, scratch_types=[plgpu.SMEM((8, 64), jnp.float32)])
def multicasts_by_tma(x, o, smem):
    smem[...] = x[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, plgpu.multicast_ref(own_rows(o), "x"))
    plgpu.wait_smem_to_gmem(0)
    finish()


def reduces(reduction, function, dtype):
    x = (10 * normal(32, 64)).astype(dtype)
    parts = x.reshape(4, 8, 64)
    expected = function.reduce(parts if dtype == np.int32 else parts.astype(np.float32), axis=0).astype(dtype)

    @gives(np.tile(expected, (4, 1)), x, out=out_type((8, 64), dtype), axes={"x": 4})
    def reduces_over_devices(x, o):
        o[...] = plgpu.multimem_load_reduce(x, collective_axes="x", reduction_op=reduction)
        finish()


for operation in (("add", np.add, np.float32), ("add", np.add, jnp.bfloat16), ("min", np.minimum, np.float16),
                  ("xor", np.bitwise_xor, np.int32)):  # fmt: skip
    reduces(*operation)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jax 0.12 will drop the logical form.
def test_devices_of_a_mesh_of_two_axes():
    """Each device reduces over all; then it writes its logical id to the device opposite in both axes."""

    def body(x, o, ids, smem):
        o[...] = plgpu.multimem_load_reduce(x, collective_axes=("x", "y"), reduction_op="add")
        arrived, a, b = pl.get_global(plgpu.SemaphoreType.REGULAR((3,))), lax.axis_index("x"), lax.axis_index("y")
        smem[...] = jnp.full((32,), a * 2 + b, jnp.int32)
        plgpu.commit_smem()
        forms = {"y": 1 - b, "x": 1 - a}, (1 - a, 1 - b), (1 - a) * 2 + 1 - b
        for i, device in enumerate(forms):
            kind = {"device_id_type": pl.DeviceIdType.LOGICAL} if i == 2 else {}
            plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(ids, device, **kind).at[i])
            plgpu.wait_smem_to_gmem(0)
            pl.semaphore_signal(arrived.at[i], device_id=device, **kind)
            pl.semaphore_wait(arrived.at[i])
        finish(("x", "y"), 3)

    kernel = plgpu.kernel(
        body, out_type=[out_type((8, 64)), out_type((3, 32), jnp.int32)],
        scratch_types=[plgpu.SMEM((32,), jnp.int32)],
    )  # fmt: skip
    spec = P(("x", "y"))
    with emulate():
        total, ids = on_mesh(make_mesh(x=2, y=2), kernel, spec, spec)(FOUR)
        np.testing.assert_array_equal(wide(total).reshape(4, 8, 64), [OF_DEVICES.sum(axis=0)] * 4)
        np.testing.assert_array_equal(np.asarray(ids).reshape(4, 3, 32)[..., 0], np.repeat([[3], [2], [1], [0]], 3, 1))


@pytest.mark.all_cases
@pytest.mark.parametrize("case", table.cases)
def test_a_kernel_gives_what_it_must(case):
    case()
