"""Mistakes in a kernel of one device or of several: each is reported by an error that says where, what, and what to do.

Each function with the decorator `reports` is a kernel with one mistake.
"""

import os
import re
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mosaic_emulator import (
    DeadlockError,
    EmulationError,
    ProtocolError,
    RaceError,
    StepLimitError,
    emulate,
    run_sequence,
)
from mosaic_emulator.foundations import source_lines
from tests.emulation.cases import Table, X, put, run_kernel

SMEM = plgpu.SMEM(X.shape, jnp.float32)
LOADING = dict(scratch_types=[SMEM, plgpu.Barrier()])
TWO = dict(num_threads=2, thread_name="wg")
table = Table()
reports = table.reports


def on_two(*scratch, out=(32, 64)):
    return dict(axes={"x": 2}, out=out, scratch_types=list(scratch))


SHARD = plgpu.SMEM((32, 64), jnp.float32)
SQUARE = dict(axes={"x": 2, "y": 2}, out=(32, 64))
ONE_CTA = dict(grid=(1,), grid_names=("c",))
GLOBAL = plgpu.SemaphoreType.REGULAR


def writes_to(device_id, **kwargs):
    def body(x, o):
        computed = jax.tree.map(lambda i: i + 0 * lax.axis_index("x"), device_id)
        plgpu.remote_ref(o, computed, **kwargs)[...] = x[...]

    return body


def signal_the_other():
    plgpu.semaphore_signal(pl.get_global(GLOBAL), device_id={"x": 1 - lax.axis_index("x")})


# ---- kernels of one line ---------------------------------------------------------------------------------------------

for error, words, body, options in (
    (NotImplementedError, "the primitive wait_gmem_to_smem is not emulated (docs/EMULATION.md lists what is not)",
     lambda x, o: plgpu.wait_gmem_to_smem(0), {}),
    (NotImplementedError, "the primitive psum", lambda x, o: put(o, lax.psum(x[...], "x")), on_two()),
    (NotImplementedError, "a multicast_ref can only be the target of copy_smem_to_gmem",
     lambda x, o: put(o, plgpu.multicast_ref(x, "x")[...]), on_two()),
    (NotImplementedError, "increment must be a constant",
     lambda x, o: pl.semaphore_signal(pl.get_global(GLOBAL), lax.axis_index("c") + 1), ONE_CTA),
    (EmulationError, "indices that are arrays (gather and scatter) are not emulated",
     lambda x, o: put(o, x[jnp.arange(64)]), {}),
    (ProtocolError, "input 0[1:65...]: index 1:65 is out of bounds for a dimension of size 64",
     lambda x, o: put(o, x[pl.ds(lax.axis_index("c") + 1, 64)]), ONE_CTA),
    (ProtocolError, "loaded[5...]: index 5:6 is out of bounds",
     lambda x, o, smem, loaded: plgpu.copy_gmem_to_smem(x, smem, loaded.at[lax.axis_index("c") + 5]),
     ONE_CTA | {"scratch_types": [SMEM, plgpu.Barrier(num_barriers=2)]}),
    (ProtocolError, "input 0 of device 0 (gmem) is an input that is not aliased to an output: it must not be written",
     lambda x, o: put(x, jnp.zeros(X.shape, X.dtype)), {}),
    (ValueError, "a grid of no CTAs, got {'c': 0}", lambda x, o: put(o, x[...]), dict(grid=(0,), grid_names=("c",))),
    (ProtocolError, "a device id names the axis 'z', which the mesh {'x': 2, 'y': 2} does not have",
     writes_to({"z": 0}), SQUARE),
    (ProtocolError, "a device id with 1 coordinates for the mesh", writes_to(1), SQUARE),
    (ProtocolError, "the device id 2 is out of range for the mesh axis 'x' of size 2", writes_to({"x": 2}), SQUARE),
    (ProtocolError, "the logical device id 7 is out of range for a mesh of 2 devices",
     writes_to(7, device_id_type=pl.DeviceIdType.LOGICAL), on_two()),
    (ProtocolError, "a device id in a kernel outside jax.shard_map, which runs on one device and has no mesh",
     lambda x, o: pl.semaphore_signal(pl.get_global(GLOBAL), device_id={"x": 1}), {}),
    (ProtocolError, "smem is this CTA's own memory, which other devices cannot reach. Expected: an operand",
     lambda x, o, smem: put(plgpu.remote_ref(smem, {"x": 0}), x[...]), on_two(SHARD)),
    (ProtocolError, "a multicast over the axes ('x',) in the mesh {'x': 2, 'y': 2}: NVLink multicast reaches all",
     lambda x, o: plgpu.multimem_store(x[...], o, "x"), SQUARE),
    (ProtocolError, "which has left the kernel",
     lambda x, o: signal_the_other(), on_two()),
    (ProtocolError, "late signal: device", lambda x, o: signal_the_other(),  # There in time, by chance.
     on_two() | {"settings": {"scheduler": "round_robin"}}),
):  # fmt: skip
    reports(error, words, **options)(body)


# ---- what is not emulated --------------------------------------------------------------------------------------------


@reports(NotImplementedError, "inside a kernel only a map over warps is emulated, got a map over ['Mesh']")
def maps(x, o):
    @pl.kernel(mesh=plgpu.Mesh(grid=(2,), grid_names=("g",)))
    def _inner():
        pass

    _inner()


BY_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


@reports(EmulationError, "the emulator cannot run this: smem: strided slices of tiled memory", out=(32, 64),
         scratch_types=[plgpu.SMEM(X.shape, jnp.float32, transforms=BY_32), plgpu.Barrier()])  # fmt: skip
def strides(x, o, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded)
    plgpu.barrier_wait(loaded)
    o[...] = smem[pl.ds(0, 32, stride=2)]


# ---- barriers, semaphores, bounds, names -----------------------------------------------------------------------------


@reports(DeadlockError, "scratch_types is one CTA's own", grid=(2,), grid_names=("c",),
         scratch_types=[plgpu.SemaphoreType.REGULAR])  # fmt: skip
def meets_at_a_semaphore_of_its_own(x, o, flag):
    plgpu.semaphore_signal(flag)
    plgpu.semaphore_wait(flag, 2, decrement=False)


@reports(DeadlockError, "never launched (CTA 1)", "CTA 0: waits for semaphore of device 0 to reach 2, got 1",
         grid=(2,), grid_names=("c",), settings={"resident": 1})  # fmt: skip
def meets_where_one_cta_fits(x, o):
    meets_at_a_semaphore_of_its_own(x, o, pl.get_global(plgpu.SemaphoreType.REGULAR))


@reports(ProtocolError, "missed phase", scratch_types=[plgpu.Barrier()])
def arrives_twice(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


@reports(ProtocolError, "waited for it differently often", num_threads=1, thread_name="wg", **LOADING)
def waits_for_what_only_a_warp_has_waited_for(x, o, smem, full):
    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 1)
        def _():
            plgpu.copy_gmem_to_smem(x, smem, full)
            plgpu.barrier_wait(full)

    plgpu.barrier_wait(full)


@reports(DeadlockError, "device 0, CTA 0: waits for phase 0 of barrier loaded, got 1 of 2 arrivals",
         scratch_types=[SMEM, plgpu.Barrier(num_arrivals=2)])  # fmt: skip
def expects_too_many_arrivals(x, o, smem, loaded):
    plgpu.copy_gmem_to_smem(x, smem, loaded)
    plgpu.barrier_wait(loaded)


FLAGGED = dict(scratch_types=[plgpu.Barrier(num_arrivals=3, num_barriers=2)], **TWO)


@reports(DeadlockError, "2 threads wait", "warpgroup 0: waits for semaphore[1, 2] of device 0 to reach 5, got 4",
         "warpgroup 1: waits for phase 0 of barrier barrier[1], got 0 of 3 arrivals", **FLAGGED)  # fmt: skip
def waits_for_each_other(x, o, barrier):
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((2, 3)))

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        plgpu.semaphore_wait(flags.at[1, 2], 5)

    @pl.when(lax.axis_index("wg") == 1)
    def _():
        plgpu.semaphore_signal(flags.at[1, 2], 4)
        plgpu.barrier_wait(barrier.at[1])


@reports(StepLimitError, "1000 steps", settings={"step_limit": 1000}, located=False,
         scratch_types=[plgpu.Barrier()])  # fmt: skip
def polls_for_ever(x, o, barrier):
    lax.while_loop(lambda done: ~done, lambda _: plgpu.barrier_test(barrier), False)


# ---- devices --------------------------------------------------------------------------------------------------------


@reports(RaceError, "missing exit handshake", **on_two(SHARD, plgpu.Barrier()))
def leaves_while_its_peer_may_read(x, o, smem, loaded):
    plgpu.copy_gmem_to_smem(plgpu.remote_ref(x, {"x": 1 - lax.axis_index("x")}), smem, loaded)
    plgpu.barrier_wait(loaded)
    o[...] = smem[...]


@reports(ProtocolError, "the wait for semaphore of device ", " has memory scope 'gpu'", " signals of device ",
         **on_two(out=(2, 64)))  # fmt: skip
def waits_at_gpu_scope(x, o):
    flag, other = pl.get_global(plgpu.SemaphoreType.REGULAR), {"x": 1 - lax.axis_index("x")}
    plgpu.remote_ref(o, other)[0] = x[0]
    plgpu.semaphore_signal(flag, device_id=other)
    plgpu.semaphore_wait(flag, memory_scope="gpu")
    o[1] = o[0]


@pytest.mark.parametrize("case", table.cases)
def test_report(case):
    case()


def test_a_fault_in_a_library_is_on_the_line_that_calls_it(monkeypatch, tmp_path):
    (tmp_path / "library.py").write_text("def put(ref, index, row):\n    ref[index] = row\n")
    names = runpy.run_path(str(tmp_path / "library.py"))

    def body(x, o):
        names["put"](o, lax.axis_index("c") + X.shape[0], x[0])

    for libraries, place in (set(), "library.py:2"), ({f"{tmp_path}{os.sep}"}, "test_reports.py:"):
        monkeypatch.setattr(source_lines, "_libraries", libraries)
        with pytest.raises(ProtocolError, match=place) as caught:
            run_kernel(body, X, out=X.shape, grid=(1,), grid_names=("c",))
        assert ("library.py" in str(caught.value)) == (not libraries)


def test_a_mistake_of_the_emulator_itself(monkeypatch):
    def body(x, o):
        o[...] = x[...]

    def broken(*_, **__):
        raise KeyError("lost")

    monkeypatch.setattr("mosaic_emulator.state.memory.View.write", broken)
    with pytest.raises(EmulationError, match="failed, which is most likely a mistake of its own: KeyError: 'lost'"):
        run_kernel(body, X, out=X.shape)


# ---- settings --------------------------------------------------------------------------------------------------------

COUNT = "an integer of at least 1"
SETTINGS = [
    ("seed", "an integer", ("a", 1.0, None)),
    ("cores", COUNT, (True, 0)),
    ("laps", COUNT, (2.0, 0)),
    ("resident", COUNT + " or None", ("2", 0)),
    ("step_limit", COUNT + " or None", (0, 1e6)),
    ("detect_races", "True or False", ("no",)),
    ("record", "True or False", (1,)),
    ("keep", "True or False", (None,)),
    ("completion", "", ("soon",)),
    ("scheduler", "", ("fair",)),
]


@pytest.mark.parametrize(("name", "wanted", "values"), SETTINGS)
def test_wrong_settings(name, wanted, values):
    for value in values:
        words = re.escape(f"`{name}` must be {wanted}, got {value!r}") if wanted else name
        with pytest.raises(ValueError, match=words), emulate(**{name: value}):
            pass
    with emulate(cores=np.int64(2), seed=np.int32(3), laps=np.int64(1)):  # Integers of NumPy are settings.
        pass
    with pytest.raises(ValueError, match="`seed` must be an integer, got 'a'"):
        run_sequence([], seed="a")
