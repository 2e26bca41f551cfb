"""A mesh axis may have any name: it never equals a kernel's own axis, and the emulator reports a clash."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate, enable
from overlap.kernels.ladder import RUNGS
from overlap.kernels.target import Target
from tests.ops.product_cases import integers
from tests.oracle import make_mesh

SMALL = overlap.Config(tile_n=64, stages=2)
IN_CLUSTERS = SMALL.replace(cluster=2, cluster_along="k")
JOINED = overlap.Config(tile_m=64, tile_n=128, stages=2, stream_k=2, joined=True)
# Names that our kernels, the ladder's lessons or their readers would give to a kernel's own axes.
NAMES, LESSONS_NAMES = ("cluster", "warpgroup", "rank"), ("cta", "m", "n")


def gather(**keywords):
    return lambda lhs, rhs, axis: overlap.all_gather_lhs_matmul(lhs, rhs, axis, implementation="fused", **keywords)


CALLS = {
    "matmul": lambda lhs, rhs, axis: overlap.matmul(lhs, rhs, config=IN_CLUSTERS, implementation="fused"),
    "pull": gather(config=SMALL),
    "ring": gather(config=SMALL, transport="ring"),
    "joined": gather(config=JOINED),
    "gathered rhs": lambda lhs, rhs, axis: overlap.all_gather_rhs_matmul(
        lhs, rhs, axis, dimension=1, config=SMALL, implementation="fused"
    ),
}
LESSONS = {rung.name: lambda lhs, rhs, axis, rung=rung: rung.matmul(lhs, rhs) for rung in RUNGS}


@pytest.fixture
def modules(monkeypatch):
    """The lowered kernels, as Mosaic GPU's text."""
    texts, lower = [], lowering.lower_unpipelined_jaxpr_to_module

    def keep(*args, **kwargs):
        result = lower(*args, **kwargs)
        texts.append(re.sub(r'dump_basename = "[^"]*"', "", str(result.module)))  # Counts the kernels.
        return result

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", keep)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    return texts


@pytest.mark.parametrize("name", [*CALLS, *LESSONS])
def test_the_compiler_makes_the_same_kernel_whatever_the_axes_are_called(name, modules):
    operand = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    for names in (("x", "y", "z"), LESSONS_NAMES if name in LESSONS else NAMES):
        mesh = make_mesh(**dict.fromkeys(names, 2))
        layer = functools.partial((CALLS | LESSONS)[name], axis=names[0])
        call = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        jax.jit(call).trace(operand, operand).lower(lowering_platforms=("cuda",))
    assert "block_id" in modules[0]
    assert set(modules) == {modules[0]}


@pytest.mark.parametrize("name", ["matmul", "pull", "ring", "joined", "gathered rhs", "cluster_multicast"])
def test_emulated_on_axes_with_the_names_of_the_kernels(name):
    names = ("cluster", "warpgroup")
    lhs, rhs = integers(1, 256, 256), integers(2, 256, 256)

    def run(call):
        mesh = make_mesh(**dict.fromkeys(names, 2))
        shifted = lambda a, b: call(a + lax.axis_index(names[0]), b, names[0])  # noqa: E731
        return jax.jit(jax.shard_map(shifted, mesh=mesh, in_specs=P(), out_specs=P(names), check_vma=False))(lhs, rhs)

    def expected(a, b, axis):
        if name in ("pull", "ring", "joined"):
            return lax.all_gather(a, axis, tiled=True) @ b
        return a @ (lax.all_gather(b, axis, axis=1, tiled=True) if name == "gathered rhs" else b)

    with emulate(cores=4, seed=1):
        out = run((CALLS | LESSONS)[name])
    np.testing.assert_array_equal(np.asarray(out), np.asarray(run(expected)))


# --- A deliberate clash of names --------------------------------------------------------------------------------------


def numbers(grid_name, thread_name):
    """A kernel with two CTAs of two threads each writes its own numbers: [CTAs, threads, (CTA, thread)]."""

    def body(out_gmem):
        cta, thread = lax.axis_index(grid_name), lax.axis_index(thread_name)
        out_gmem[cta, thread, 0], out_gmem[cta, thread, 1] = cta, thread

    return plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((2, 2, 2), jnp.int32), grid=(2,), grid_names=(grid_name,), num_threads=2,
        thread_name=thread_name,
    )()  # fmt: skip


def on_two_devices(function):
    call = jax.shard_map(function, mesh=make_mesh(x=2), in_specs=(), out_specs=P("x"), check_vma=False)
    with emulate(detect_races=False):
        return np.asarray(jax.jit(call)()).reshape(2, 2, 2, 2)


def test_names_of_their_own_count_ctas_and_threads():
    out = on_two_devices(lambda: numbers("cta", "thread"))
    expected = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij"), axis=-1)
    np.testing.assert_array_equal(out, [expected, expected])


@pytest.mark.parametrize("clash", ["grid", "threads"])
def test_the_emulator_takes_the_users_axis_as_the_compiler_does(clash):
    """Each device writes only at its own position, where CTAs or threads should have been counted."""
    names = ("x", "thread") if clash == "grid" else ("cta", "x")
    out = on_two_devices(lambda: numbers(*names))
    axis = 1 if clash == "grid" else 2
    mine = np.stack([np.take(out[device], device, axis - 1) for device in range(2)])
    others = np.stack([np.take(out[device], 1 - device, axis - 1) for device in range(2)])
    np.testing.assert_array_equal(mine[..., axis - 1], [[0, 0], [1, 1]])
    assert not np.isin(others, [0, 1]).any()  # Never written.


def test_the_compiler_takes_the_users_axis(modules):
    enable()
    call = jax.shard_map(
        lambda: numbers("x", "thread"), mesh=make_mesh(x=2), in_specs=(), out_specs=P("x"), check_vma=False
    )
    jax.jit(call).trace().lower(lowering_platforms=("cuda",))
    assert "block_id" not in modules[0]
