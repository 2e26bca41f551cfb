"""A mesh axis may have any name: it never equals a kernel's own axis, and the emulator reports a clash."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.choice import dispatch
from overlap.emulation import emulate, enable
from overlap.kernels.ladder import RUNGS
from tests.ops.contract import FORMS, H200, JOINED, struct
from tests.oracle import make_mesh

# Names that our kernels, the ladder's lessons or their readers would give to a kernel's own axes.
NAMES, LESSONS_NAMES = ("cluster", "warpgroup", "rank"), ("cta", "m", "n")
CALLS = {
    "joined": FORMS["joined"].but(config=JOINED.replace(stream_k=2)),
    "scatter m": FORMS["scatter m"],
}
LESSONS = {rung.name: rung for rung in RUNGS}


@pytest.fixture
def modules(monkeypatch):
    """The lowered kernels, as Mosaic GPU's text."""
    texts, lower = [], lowering.lower_unpipelined_jaxpr_to_module

    def keep(*args, **kwargs):
        result = lower(*args, **kwargs)
        texts.append(re.sub(r'dump_basename = "[^"]*"', "", str(result.module)))  # Counts the kernels.
        return result

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", keep)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    return texts


@pytest.mark.parametrize("name", [*CALLS, list(LESSONS)[-1]])
def test_the_compiler_makes_the_same_kernel_whatever_the_axes_are_called(name, modules):
    """test_numbers.py runs every form emulated on axes with such names."""
    for names in (("x", "y", "z"), LESSONS_NAMES if name in LESSONS else NAMES):
        mesh = make_mesh(**dict.fromkeys(names, 2))
        if name in LESSONS:
            rung, operand = LESSONS[name], struct(256, 256)
            call = jax.shard_map(rung.matmul, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
            jax.jit(call).trace(operand, operand).lower(lowering_platforms=("cuda",))
            continue
        call = CALLS[name].but(axis=names[0], m=64, n=128)
        types = call.types(2)
        call.program(mesh, types).trace(types).lower(lowering_platforms=("cuda",))
    assert "block_id" in modules[0]
    assert set(modules) == {modules[0]}


# --- A deliberate clash of names --------------------------------------------------------------------------------------


def of_two_devices(grid_name, thread_name):
    """A kernel on two devices; two CTAs of two threads each write their numbers: [CTAs, threads, (CTA, thread)]."""

    def body(out_gmem):
        cta, thread = lax.axis_index(grid_name), lax.axis_index(thread_name)
        out_gmem[cta, thread, 0], out_gmem[cta, thread, 1] = cta, thread

    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((2, 2, 2), jnp.int32), grid=(2,), grid_names=(grid_name,), num_threads=2,
        thread_name=thread_name,
    )  # fmt: skip
    return jax.shard_map(lambda: kernel(), mesh=make_mesh(x=2), in_specs=(), out_specs=P("x"), check_vma=False)


@pytest.mark.parametrize(("axis", "names"), [(1, ("x", "thread")), (2, ("cta", "x"))], ids=["grid", "threads"])
def test_the_emulator_takes_the_users_axis_as_the_compiler_does(axis, names):
    """Each device writes only at its own position, where CTAs or threads should have been counted."""
    with emulate(detect_races=False):
        out = np.asarray(jax.jit(of_two_devices(*names))()).reshape(2, 2, 2, 2)
    mine = np.stack([np.take(out[device], device, axis - 1) for device in range(2)])
    others = np.stack([np.take(out[device], 1 - device, axis - 1) for device in range(2)])
    np.testing.assert_array_equal(mine[..., axis - 1], [[0, 0], [1, 1]])
    assert not np.isin(others, [0, 1]).any()  # Never written.


def test_the_compiler_takes_the_users_axis(modules):
    enable()
    jax.jit(of_two_devices("x", "thread")).trace().lower(lowering_platforms=("cuda",))
    assert "block_id" not in modules[0]
