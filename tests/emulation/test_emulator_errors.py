"""Tests the messages for users' mistakes: each names kernel, device, CTA and source line, and says what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate, run_sequence
from tests.emulation.cases import make_mesh, normal, out_type, place, run_kernel, sharded

X = normal(64, 64)
SMEM = plgpu.SMEM(X.shape, jnp.float32)
WHERE = r"device \d, CTA 0, at .*test_emulator_errors.py:\d+"


def message_of(body, expected, *, mesh=None, out=X.shape, **kwargs):
    """Runs a kernel on X that must raise an error of type `expected`, and returns the error's message."""
    with pytest.raises(expected) as caught:
        if mesh is None:
            run_kernel(body, X, out_type=out_type(out), **kwargs)
        else:
            kernel = plgpu.kernel(body, out_type=out_type((32, 64)), **kwargs)
            with emulate():
                np.asarray(sharded(kernel, mesh, P("x"), P("x"))(place(X, mesh, P("x"))))
    message = str(caught.value)
    for raw in ("object at 0x", "Effect", "Var(", "Slot", "Traceback"):
        assert raw not in message
    return message


def check(words, body, expected=ProtocolError, **kwargs):
    message = message_of(body, expected, **kwargs)
    assert words in message and re.match(WHERE, message), message
    assert f"[kernel {body.__name__!r}; repeat with emulate(" in message


# ---- what the emulator lacks -----------------------------------------------------------------------------------------


def test_a_primitive_that_is_not_emulated():
    def body(x, o):
        plgpu.wait_gmem_to_smem(0)

    message = message_of(body, NotImplementedError)
    assert message.startswith("kernel 'body': at ") and "test_emulator_errors.py" in message
    assert "the primitive wait_gmem_to_smem is not emulated (docs/EMULATION.md lists what is not)" in message


def test_a_collective_of_jax_in_a_kernel():
    def body(x, o):
        o[...] = lax.psum(x[...], "x")

    assert "the primitive psum" in message_of(body, NotImplementedError, mesh=make_mesh(x=2))


def test_a_map_that_is_not_over_warps():
    def body(x, o):
        @pl.kernel(mesh=plgpu.Mesh(grid=(2,), grid_names=("g",)))
        def _inner():
            pass

        _inner()

    words = "inside a kernel only a map over warps is emulated, got a map over ['Mesh']"
    assert words in message_of(body, NotImplementedError)


def test_what_is_refused_when_it_runs_says_where():
    def gather(x, o):
        o[...] = x[jnp.arange(64)]

    def strided(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        plgpu.barrier_wait(loaded)
        o[...] = smem[pl.ds(0, 32, stride=2)]

    check("indices that are arrays (gather and scatter) are not emulated", gather, EmulationError)
    tiled = plgpu.SMEM(X.shape, jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)))
    words = "the emulator cannot run this: smem: strided slices of tiled memory are not emulated"
    check(words, strided, EmulationError, out=(32, 64), scratch_types=[tiled, plgpu.Barrier()])


def test_a_mistake_of_the_emulator_itself(monkeypatch):
    def body(x, o):
        o[...] = x[...]

    def broken(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr("overlap.emulation.state.memory.View.write", broken)
    check("the emulator failed, which is most likely a mistake of its own: KeyError: 'lost'", body, EmulationError)


# ---- barriers, bounds ------------------------------------------------------------------------------------------------


def test_a_barrier_with_too_many_arrivals_expected():
    def body(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded)
        plgpu.barrier_wait(loaded)

    message = message_of(body, DeadlockError, scratch_types=[SMEM, plgpu.Barrier(num_arrivals=2)])
    assert "device 0, CTA 0: waits for phase 0 of barrier loaded, got 1 of 2 arrivals" in message
    assert "test_emulator_errors.py" in message


def test_a_reference_out_of_bounds():
    def element(x, o):
        o[...] = x[pl.ds(lax.axis_index("c") + 1, 64)]

    def barrier(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded.at[lax.axis_index("c") + 5])

    grid = {"grid": (1,), "grid_names": ("c",)}
    check("input 0[1:65...]: index 1:65 is out of bounds for a dimension of size 64", element, **grid)
    scratch = [SMEM, plgpu.Barrier(num_barriers=2)]
    check("loaded[5...]: index 5:6 is out of bounds", barrier, scratch_types=scratch, **grid)


def test_a_write_to_an_input():
    def body(x, o):
        x[...] = jnp.zeros(X.shape, X.dtype)

    check("input 0 of device 0 (gmem) is an input that is not aliased to an output", body)


def copy_unseen(x_gmem, out_gmem, tile_smem, loaded):
    plgpu.copy_gmem_to_smem(x_gmem, tile_smem, loaded)
    plgpu.copy_smem_to_gmem(tile_smem, out_gmem.at[:])


def test_scratch_has_the_names_of_parameters():
    def tiles_in_a_list(x, o, tiles):
        copy_unseen(x, o, *tiles)

    scratch = [SMEM, plgpu.Barrier()]
    message = message_of(copy_unseen, RaceError, scratch_types=scratch)
    assert message.startswith("race on tile_smem:") and "of tile_smem (smem)" in message
    assert message_of(tiles_in_a_list, RaceError, scratch_types=[scratch]).startswith("race on tiles[0]:")


def test_a_grid_of_no_ctas():
    def body(x, o):
        o[...] = x[...]

    message = message_of(body, ValueError, grid=(0,), grid_names=("c",))
    assert message == "kernel 'body': a grid of no CTAs, got {'c': 0} (a cluster needs as many `cores` as CTAs)"


# ---- devices and axes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_id", "words"),
    [
        ({"z": 0}, "a device id names the axis 'z', which the mesh {'x': 2, 'y': 2} does not have"),
        (1, "a device id with 1 coordinates for the mesh {'x': 2, 'y': 2}. Expected: one per axis, or a dict"),
        ({"x": 2}, "the device id 2 is out of range for the mesh axis 'x' of size 2"),
    ],
)
def test_device_ids(device_id, words):
    def body(x, o):
        computed = jax.tree.map(lambda i: i + 0 * lax.axis_index("x"), device_id)
        plgpu.remote_ref(o, computed)[...] = x[...]

    check(words, body, mesh=make_mesh(x=2, y=2))


def test_a_logical_device_id():
    def body(x, o):
        plgpu.remote_ref(o, jnp.int32(7), device_id_type=pl.DeviceIdType.LOGICAL)[...] = x[...]

    check("the logical device id 7 is out of range for a mesh of 2 devices", body, mesh=make_mesh(x=2))


def test_a_device_id_without_a_mesh():
    def body(x, o):
        pl.semaphore_signal(pl.get_global(plgpu.SemaphoreType.REGULAR), device_id={"x": 1})

    check("a device id in a kernel outside jax.shard_map, which runs on one device and has no mesh", body)


def test_memory_that_peers_cannot_reach():
    def body(x, o, smem):
        plgpu.remote_ref(smem, {"x": 0})[...] = x[...]

    words = "smem is this CTA's own memory, which other devices cannot reach. Expected: an operand or result"
    check(words, body, mesh=make_mesh(x=2), scratch_types=[plgpu.SMEM((32, 64), jnp.float32)])


def test_a_wrong_collective_axis():
    def body(x, o, smem, loaded):
        plgpu.copy_gmem_to_smem(x, smem, loaded, collective_axes="q")

    scratch = {"scratch_types": [SMEM, plgpu.Barrier()]}
    check("'q' is no axis of the cluster: it has ['r']", body, cluster=(2,), cluster_names=("r",), **scratch)
    check("in a kernel without clusters", body, **scratch)


def test_a_multicast_over_a_part_of_the_mesh():
    def body(x, o):
        plgpu.multimem_store(x[...], o, "x")

    words = "a multicast over the axes ('x',) in the mesh {'x': 2, 'y': 2}: NVLink multicast reaches all devices"
    check(words, body, mesh=make_mesh(x=2, y=2))


def test_a_multicast_reference_that_is_read():
    def body(x, o):
        o[...] = plgpu.multicast_ref(x, "x")[...]

    words = "a multicast_ref can only be the target of copy_smem_to_gmem, as on the GPU"
    assert words in message_of(body, NotImplementedError, mesh=make_mesh(x=2))


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("seed", "a", "an integer"),
        ("seed", 1.0, "an integer"),
        ("seed", None, "an integer"),
        ("cores", True, "an integer of at least 1"),
        ("laps", 2.0, "an integer of at least 1"),
        ("resident", "2", "an integer of at least 1 or None"),
        ("resident", 0, "an integer of at least 1 or None"),
        ("step_limit", 0, "an integer of at least 1 or None"),
        ("step_limit", 1e6, "an integer of at least 1 or None"),
        ("detect_races", "no", "True or False"),
        ("record", 1, "True or False"),
        ("keep", None, "True or False"),
    ],
)
def test_wrong_settings(name, value, wanted):
    with (
        pytest.raises(ValueError, match=re.escape(f"`{name}` must be {wanted}, got {value!r}")),
        emulate(**{name: value}),
    ):
        pass


def test_integers_of_numpy_are_settings():
    with emulate(cores=np.int64(2), seed=np.int32(3), laps=np.int64(1)):
        pass


def test_a_sequence_with_a_wrong_seed():
    with pytest.raises(ValueError, match="`seed` must be an integer, got 'a'"):
        run_sequence([], seed="a")
