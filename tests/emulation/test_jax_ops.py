"""Runs JAX's own Mosaic GPU kernels (`jax.experimental.pallas.ops.gpu`) unpatched; checks results and known reports.

docs/EMULATION.md ("JAX's own kernels") has a table of the same results. A run without `reports` must be free of
reports. The pipelines have more steps than stages, so that they refill their shared memory, except where a test says
otherwise.
"""

import contextlib
import functools
import importlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.emulation import EmulationError, emulate
from tests.emulation.cases import make_mesh, normal, place, sharded

pytestmark = pytest.mark.all_cases
COMPLETIONS = ("late", "random", "eager")
TILES = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "max_concurrent_steps": 2}

# Reports of the emulator about some of these kernels.
NO_FENCE = r"race \(missing proxy fence\) on output 1:\n  TMA load, read"
OTHER_ROUND = r"race on output 1:\n  TMA (load, read|store, write)"
REFILLED = r"race on .*smem_refs.*:\n  TMA load, write .*\n  is not ordered with the earlier read\n  (wgmma|TMA store)"
UNFINISHED_STORE = "freed too early:\n  TMA store, read"
TWO_ANSWERS = "cluster launch control|try_cancel|query_cluster_cancel"
ACCUMULATOR = "race on ref_kwargs|tensor memory load of ref"


@pytest.fixture
def ops(monkeypatch):
    """Imports one of JAX's modules. JAX's modules import its test utilities without need, and these require absl."""
    monkeypatch.setitem(sys.modules, "jax._src.test_util", types.ModuleType("jax._src.test_util"))
    return lambda name: importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}")


def wide(x):
    return np.asarray(x).astype(np.float32)


def half(*shape, seed=0):
    return normal(*shape, dtype=np.float16, seed=seed)


def run(function, *args, reports=(), **settings):
    """Runs a jitted function, asserts that the emulator reports exactly `reports`, and returns the results."""
    with pytest.raises(EmulationError) if reports else contextlib.nullcontext(), emulate(**settings) as found:
        out = jax.tree.map(np.asarray, jax.jit(function)(*args))
    messages = [str(error) for error in found.errors]
    for report in reports:
        assert any(re.search(report, message) for message in messages), messages
    for message in messages:
        assert any(re.search(report, message) for report in reports), message
    assert found.counts["launches"]
    return out


def assert_close(out, expected, atol=6e-2):
    np.testing.assert_allclose(wide(out), wide(expected), rtol=2e-2, atol=atol)


# ---- Hopper ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "cluster", "adds", "completion"),
    [("N", None, True, "late"), ("M", None, False, "random"), ("N", "M", False, "late"), ("M", "N", False, "eager")],
)
def test_hopper_matmul(ops, split, cluster, adds, completion):
    module = ops("hopper_matmul_mgpu")
    config = module.TuningConfig(
        **TILES,
        wg_dimension=module.MatmulDimension[split],
        cluster_dimension=cluster and module.MatmulDimension[cluster],
    )
    x, y, c = half(256, 256), half(256, 256, seed=1), half(256, 256, seed=2) if adds else None
    out = run(lambda *xs: module.matmul(*xs, config), x, y, c, cores=2, completion=completion)
    assert_close(out, wide(x) @ wide(y) + (wide(c) if adds else 0))


@pytest.mark.parametrize("cluster", [None, "N"])
def test_hopper_mixed_type_matmul(ops, cluster):
    module = ops("hopper_mixed_type_matmul_mgpu")
    config = module.TuningConfig(
        **TILES,
        wg_dimension=module.MatmulDimension.M,
        cluster_dimension=cluster and module.MatmulDimension[cluster],
    )
    x, y = np.random.default_rng(0).integers(-5, 5, (128, 256), np.int8), half(256, 128, seed=1)
    out = run(lambda x, y: module.mixed_matmul_kernel(x, y, out_dtype=jnp.float16, config=config), x, y, cores=2)
    assert_close(out, wide(x) @ wide(y), atol=0.2)


def attention_operands(kv_length):
    return half(1, 128, 2, 64), half(1, kv_length, 1, 64, seed=1), half(1, kv_length, 1, 64, seed=2)


@pytest.mark.parametrize(
    ("function", "causal", "completion"),
    [
        ("attention", False, "late"),
        ("attention", True, "random"),
        ("attention_with_pipeline_emitter", False, "eager"),
    ],
)
def test_attention(ops, function, causal, completion):
    module = ops("attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2, causal=causal)
    q, k, v = attention_operands(256)
    out = run(lambda *xs: getattr(module, function)(*xs, config), q, k, v, completion=completion)
    assert_close(out, module.attention_reference(q, k, v, causal=causal), atol=1e-2)


def test_derivatives_of_attention(ops):
    module = ops("attention_mgpu")
    config = module.TuningConfig(
        block_q=64, block_kv=64, max_concurrent_steps=2, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
    )

    def gradients(function):
        return jax.grad(lambda *xs: function(*xs).astype(jnp.float32).sum(), argnums=(0, 1, 2))

    operands = attention_operands(192)
    out = run(gradients(lambda *xs: module.attention(*xs, config)), *operands)
    for own, expected in zip(out, gradients(module.attention_reference)(*operands)):
        assert_close(own, expected, atol=5e-2)


# Both kernels let products run on into the next k step (`delay_release=1`), and do not wait for the product before the
# last. With no more k steps than stages, no stage is refilled.


@pytest.mark.parametrize(("transpose", "k", "reports"), [(False, 128, []), (False, 256, [REFILLED]), (True, 128, [])])
def test_ragged_dot(ops, transpose, k, reports):
    module = ops("ragged_dot_mgpu")
    x, y, sizes = half(128, k), half(2, k, 128, seed=1), np.array([50, 78], np.int32)
    kernel = functools.partial(
        module.ragged_dot, block_m=64, block_n=64, block_k=64, max_concurrent_steps=2, grid_block_n=1,
        transpose_rhs=transpose,
    )  # fmt: skip
    right = y.transpose(0, 2, 1) if transpose else y
    completion = "eager" if reports else "late"
    out = run(
        lambda x, y, sizes: kernel(x, y, group_sizes=sizes), x, right, sizes, completion=completion, reports=reports
    )
    assert_close(out, lax.ragged_dot(wide(x), wide(y), sizes))


@pytest.mark.parametrize(("rows", "reports"), [(78, []), (206, [REFILLED])])
def test_transposed_ragged_dot(ops, rows, reports):
    module = ops("transposed_ragged_dot_mgpu")
    sizes = np.array([50, 0, rows], np.int32)
    x, y = half(50 + rows, 64), half(50 + rows, 64, seed=1)
    kernel = functools.partial(
        module.transposed_ragged_dot, block_m=64, block_n=64, block_k=64, max_concurrent_steps=2, grid_block_n=1
    )
    completion = "eager" if reports else "late"
    out = run(
        lambda x, y, sizes: kernel(x, y, group_sizes=sizes),
        x,
        y,
        sizes,
        cores=2,
        completion=completion,
        reports=reports,
    )
    assert_close(out, module.ref_transposed_ragged_dot(jnp.asarray(wide(x)), jnp.asarray(wide(y)), sizes))


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "m", "reports"),
    [(1, 64, [NO_FENCE]), (1, 128, [NO_FENCE, REFILLED]), (2, 64, [NO_FENCE, OTHER_ROUND])],
    ids=["one tile", "several tiles", "several CTAs"],
)
def test_collective_matmul(ops, cores, m, reports):
    module, devices, n, k = ops("collective_matmul_mgpu"), jax.device_count(), 128, 192
    mesh = make_mesh(x=devices)
    x, y = half(devices * m, k), half(k, devices * n, seed=1)
    kernel = functools.partial(
        module.all_gather_lhs_matmul, axis_name="x", config=module.TuningConfig(**TILES), dtype=jnp.float16
    )
    function = sharded(kernel, mesh, (P("x"), P(None, "x")), P(None, "x"))
    operands = place(x, mesh, P("x")), place(y, mesh, P(None, "x"))
    # With several CTAs a race makes the numbers wrong when copies complete late.
    out = run(function, *operands, cores=cores, completion="eager", seed=1, reports=reports)
    if cores == 1:
        assert_close(out, wide(x) @ wide(y))


@pytest.mark.parametrize(("dimension", "dtype"), [(0, np.float32), (1, np.int32)])
def test_all_gather(ops, dimension, dtype):
    mesh, devices = make_mesh(x=4), 4
    x = np.arange(64 * 32, dtype=dtype).reshape(64, 32)
    kernel = functools.partial(ops("all_gather_mgpu").all_gather, axis_name="x", gather_dimension=dimension)
    spec = P("x") if dimension == 0 else P(None, "x")
    out = run(sharded(kernel, mesh, spec, P("x")), place(x, mesh, spec), cores=2, completion="random")
    np.testing.assert_array_equal(out.reshape(devices, *x.shape), np.broadcast_to(x, (devices, *x.shape)))


@pytest.mark.parametrize(
    ("dimension", "reduction", "dtype"), [(0, "add", np.float16), (1, "max", np.float16), (None, "xor", np.int32)]
)
def test_reduce_scatter(ops, dimension, reduction, dtype):
    mesh = make_mesh(x=4)
    x = np.random.default_rng(0).integers(-100, 100, (4, 32, 64)).astype(dtype)
    kernel = functools.partial(
        ops("reduce_scatter_mgpu").reduce_scatter, axis_name="x", scatter_dimension=dimension, reduction=reduction
    )
    function = sharded(lambda x: kernel(x[0]), mesh, P("x"), P(None, "x") if dimension else P("x"))
    out = run(function, place(x, mesh, P("x")), cores=2)
    reduced = {"add": np.add, "max": np.maximum, "xor": np.bitwise_xor}[reduction].reduce(x, axis=0)
    np.testing.assert_array_equal(out, np.tile(reduced, (4, 1)) if dimension is None else reduced)


# ---- Blackwell -------------------------------------------------------------------------------------------------------


def blackwell_matmul(module, *, collective):
    x, y = half(512, 256), half(256, 256, seed=1)
    config = module.TuningConfig(**{**TILES, "tile_m": 128}, collective=collective)

    def check(**settings):
        assert_close(run(lambda x, y: module.matmul_kernel(x, y, config), x, y, **settings), wide(x) @ wide(y))

    return check


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_blackwell_matmul(ops, completion):
    check = blackwell_matmul(ops("blackwell_matmul_mgpu"), collective=False)
    check(cores=3, completion=completion, reports=[UNFINISHED_STORE])


def test_blackwell_matmul_of_pairs(ops, monkeypatch):
    check = blackwell_matmul(ops("blackwell_matmul_mgpu"), collective=True)
    check(cores=4, reports=[TWO_ANSWERS, UNFINISHED_STORE])
    # If only one CTA of a pair asks for the next tile, instead of both, only the other report remains.
    loop = functools.partial(plgpu.dynamic_scheduling_loop, cluster_axes=("x",))
    monkeypatch.setattr(plgpu, "dynamic_scheduling_loop", loop)
    check(cores=2, scheduler="round_robin", reports=[UNFINISHED_STORE])


@pytest.mark.parametrize(("completion", "cores"), [*((c, 4) for c in COMPLETIONS), ("late", 2)])
def test_blackwell_ragged_dot(ops, completion, cores):
    module = ops("blackwell_ragged_dot_mgpu")
    x, y, sizes = half(512, 192), half(3, 192, 128, seed=1), np.array([100, 300, 112], np.int32)
    config = module.TuningConfig(
        **{**TILES, "tile_m": 128}, collective=True, grid_tile_width=1,
        grid_minor_dim=ops("blackwell_matmul_mgpu").MatmulDimension.N,
    )  # fmt: skip
    # After two tiles in a row, the second CTA's accumulator is overwritten too early: its epilogue signals only its own
    # CTA, not the CTA that issues the products.
    reports = [] if cores == 4 else [ACCUMULATOR]
    out = run(
        lambda *xs: module.ragged_dot_kernel(*xs, config), x, y, sizes, cores=cores, completion=completion,
        reports=reports,
    )  # fmt: skip
    if not reports:
        assert_close(out, lax.ragged_dot(wide(x), wide(y), sizes))
