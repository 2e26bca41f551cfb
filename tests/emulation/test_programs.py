"""Tests kernels inside whole programs: jit, loops, collectives, meshes, aliases, and the context manager `emulate`."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap import emulation
from overlap.emulation import RaceError, emulate
from tests.emulation import cases, kernels

ROWS, COLUMNS = cases.ROWS, cases.COLUMNS


def test_scan_and_psum_around_the_kernel():
    mesh = cases.make_mesh(x=4)
    group = kernels.ring_push(4, ROWS, COLUMNS)

    def step(x):
        def iterate(carry, _):
            whole = group(carry)
            return carry + lax.psum(whole.sum(), "x") * 1e-5, whole[:1]

        return lax.scan(iterate, x, None, length=5)

    x = np.arange(4 * ROWS * COLUMNS, dtype=np.float32).reshape(4 * ROWS, COLUMNS) / 1e3
    with emulate() as run:
        carry, firsts = cases.sharded(step, mesh, P("x"), (P("x"), P(None, "x")))(cases.place(x, mesh, P("x")))
        carry, firsts = np.asarray(carry), np.asarray(firsts)
    assert run.counts["launches"] == 5
    expected, rows = x, []
    for _ in range(5):
        rows.append(np.broadcast_to(expected[:1], (4, COLUMNS)))
        expected = expected + np.float32(4 * expected.sum() * 1e-5)
    np.testing.assert_allclose(carry, expected, rtol=1e-4)
    np.testing.assert_allclose(firsts, rows, rtol=1e-4)


@pytest.mark.parametrize("axis", ["a", "b"])
def test_one_axis_of_a_mesh_of_two(axis):
    mesh = cases.make_mesh(a=2, b=2)
    group = kernels.ring_push(2, ROWS, COLUMNS, axis=axis)
    other = "b" if axis == "a" else "a"
    x = np.random.default_rng(0).standard_normal((4 * ROWS, COLUMNS)).astype(np.float32)
    spec = P((other, axis))
    with emulate():
        y = np.asarray(cases.sharded(group, mesh, spec, spec)(cases.place(x, mesh, spec)))
    groups = x.reshape(2, 1, 2 * ROWS, COLUMNS)
    np.testing.assert_array_equal(y, np.broadcast_to(groups, (2, 2, 2 * ROWS, COLUMNS)).reshape(-1, COLUMNS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # jax 0.12 will drop the logical form
@pytest.mark.parametrize("form", ["dict", "tuple", "logical"])
def test_forms_of_device_ids(form):
    # Every device writes its logical id to the device opposite in both axes.
    mesh = cases.make_mesh(a=2, b=3)

    def body(out, smem):
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR)
        a, b = lax.axis_index("a"), lax.axis_index("b")
        to_a, to_b = 1 - a, 2 - b
        ids = {"dict": {"b": to_b, "a": to_a}, "tuple": (to_a, to_b), "logical": to_a * 3 + to_b}
        kind = {"device_id_type": pl.DeviceIdType.LOGICAL} if form == "logical" else {}
        smem[...] = jnp.full((32,), a * 3 + b, jnp.int32)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(out, ids[form], **kind))
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(arrived, device_id=ids[form], **kind)
        pl.semaphore_wait(arrived)

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((32,), jnp.int32), scratch_types=[plgpu.SMEM((32,), jnp.int32)]
    )
    with emulate():
        y = np.asarray(cases.sharded(kernel, mesh, (), P(("a", "b")))())
    assert y[::32].tolist() == [5, 4, 3, 2, 1, 0]


def test_aliased_and_donated_input():
    def body(ref):
        ref[...] = ref[...] + 1

    @jax.jit
    def call(x):
        ref = jax.new_ref(x)
        plgpu.kernel(body, out_type=())(ref)
        plgpu.kernel(body, out_type=())(ref)
        return ref[...]

    x = jnp.arange(64, dtype=jnp.float32)
    with emulate() as run:
        y = np.asarray(call(x))
        z = np.asarray(jax.jit(call, donate_argnums=0)(jnp.asarray(y)))
    np.testing.assert_array_equal(x, np.arange(64))
    np.testing.assert_array_equal(y, np.arange(64) + 2)
    np.testing.assert_array_equal(z, np.arange(64) + 4)
    assert run.counts["launches"] == 4


def test_a_mesh_in_the_context_and_results_that_nobody_keeps():
    mesh = cases.make_mesh(x=3)
    x = cases.place(cases.shards(), mesh, P("x"))
    group = jax.shard_map(kernels.ring_push(3, ROWS, COLUMNS), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with jax.set_mesh(mesh):
        kernel = jax.jit(group)
        with emulate() as run:
            for _ in range(5):
                kernel(x)
    assert run.counts["launches"] == 5


def test_vmap_and_no_jit():
    x = np.random.default_rng(0).standard_normal((2, 128, 128)).astype(np.float16)
    with emulate() as run:
        y = np.asarray(jax.vmap(kernels.pipelined_matmul(128, 128, 128, 1))(x, x), np.float32)
    np.testing.assert_allclose(y, x.astype(np.float32) @ x.astype(np.float32), rtol=2e-2, atol=6e-2)
    assert run.counts["launches"] == 1


def test_launches_do_not_see_each_other():
    # Semaphores start at zero and outputs as NaN, in every launch.
    def body(out):
        flag = pl.get_global(plgpu.SemaphoreType.REGULAR)
        plgpu.semaphore_signal(flag)
        plgpu.semaphore_wait(flag, 1, decrement=False)
        out[0] = pl.semaphore_read(flag)

    kernel = jax.jit(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((2,), jnp.int32)))
    with emulate():
        assert [np.asarray(kernel()).tolist() for _ in range(3)] == [[1, np.iinfo(np.int32).min]] * 3


def test_cores_take_part_in_tracing_and_seeds_do_not():
    traces = []

    @jax.jit
    def call():
        traces.append(emulation.core_count())

        def body(out):
            out[lax.axis_index("core")] = jnp.int32(1)

        cores = emulation.core_count()
        kernel = plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((8,), jnp.int32), grid=(cores,), grid_names=("core",))
        return kernel()

    for seed in range(2):
        for cores in (2, 3):
            with emulate(cores=cores, seed=seed):
                assert (np.asarray(call()) == 1).sum() == cores
    assert traces == [2, 3]
    assert emulation.core_count() == 4


def test_record_names_who_did_what():
    with emulate(record=True) as run:
        cases.ring()()
    kinds = {e.kind for e in run.events}
    assert kinds == {"copy", "remote_copy", "signal", "wait"}
    remote = [e for e in run.events if e.kind == "remote_copy"]
    assert len(remote) == 12
    assert all(e.peer == (e.device + 1) % 4 and e.start <= e.end for e in remote)
    assert {e.target.split(" of ")[0] for e in remote} == {f"output 0[{i}:{i + 4}, 0:64]" for i in (0, 4, 8, 12)}
    with emulate() as silent:
        cases.ring()()
    assert silent.events == []


def test_check_raises_inside_the_context():
    with pytest.raises(RaceError) as caught, emulate() as run:
        mesh = cases.make_mesh(x=3)
        kernel = cases.sharded(kernels.ring_push(3, ROWS, COLUMNS, {"dropped wait"}), mesh, P("x"), P("x"))
        kernel(cases.place(cases.shards(), mesh, P("x")))
        run.check()
        pytest.fail("unreachable")
    assert caught.value is run.errors[0]


OUTSIDE = """
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
from jax.sharding import PartitionSpec as P
from overlap import emulation
from tests.emulation import cases, kernels

emulation.enable()
mesh = cases.make_mesh(x=3)
x = cases.place(cases.shards(), mesh, P("x"))
good = cases.sharded(kernels.ring_push(3, 4, 64), mesh, P("x"), P("x"))
bad = cases.sharded(kernels.ring_push(3, 4, 64, {"missing fence"}), mesh, P("x"), P("x"))
expected = np.tile(cases.shards(), (3, 1))
np.testing.assert_array_equal(np.asarray(good(x)), expected)
try:
    bad(x).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    assert "missing proxy fence" in str(error), error
else:
    raise AssertionError("no error")
np.testing.assert_array_equal(np.asarray(good(x)), expected)
for _ in range(3):
    with emulation.emulate() as run:
        y = good(x)
    assert run.counts["launches"] == 1
    np.testing.assert_array_equal(np.asarray(y), expected)
print("passed")
"""


def test_outside_a_context_faults_surface_where_the_result_is_used(repository):
    # In a process of its own: on jax 0.11 such a fault spoils `jax.effects_barrier` for good.
    done = subprocess.run([sys.executable, "-c", OUTSIDE], cwd=repository, capture_output=True, text=True, check=False)
    assert done.stdout == "passed\n", done.stderr[-3000:]


def test_an_error_of_the_caller_passes_through_and_a_counter_that_nobody_awaits_is_a_warning():
    def body(x, out):
        plgpu.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR))
        out[0] = x[0]

    kernel = jax.jit(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct((1,), jnp.float32)))
    with pytest.raises(KeyError, match="mine"), emulate() as run:
        kernel(np.ones(1, np.float32)).block_until_ready()
        raise KeyError("mine")
    assert any("never waited for" in warning for warning in run.warnings)
