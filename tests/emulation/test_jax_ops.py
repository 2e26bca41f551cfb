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

from mosaic_emulator import EmulationError, emulate
from tests.emulation.cases import COMPLETIONS, normal, wide
from tests.meshes import make_mesh, on_mesh

pytestmark = pytest.mark.all_cases
TILES = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "max_concurrent_steps": 2}
BLOCKS = dict(block_m=64, block_n=64, block_k=64, max_concurrent_steps=2, grid_block_n=1)

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


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def half(*shape, seed=0):
    return normal(*shape, dtype=np.float16, seed=seed)


def run(function, *args, expected=None, atol=6e-2, reports=(), **settings):
    """Runs a function, and asserts that the emulator reports exactly `reports`, and else that the result is right."""
    with pytest.raises(EmulationError) if reports else contextlib.nullcontext(), emulate(**settings) as found:
        out = jax.tree.map(np.asarray, jax.jit(function)(*args))
    messages = [str(error) for error in found.errors]
    for report in reports:
        assert any(re.search(report, message) for message in messages), messages
    for message in messages:
        assert any(re.search(report, message) for report in reports), message
    assert found.counts["launches"]
    for own, wanted in zip(jax.tree.leaves(out), jax.tree.leaves(expected)):
        np.testing.assert_allclose(wide(own), wide(wanted), rtol=2e-2, atol=atol)


# ---- Hopper ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "cluster", "adds", "completion"),
    [("N", None, 1, "late"), ("M", "N", 0, "eager"), slow("M", None, 0, "random"), slow("N", "M", 0, "late")],
)
def test_hopper_matmul(ops, split, cluster, adds, completion):
    module = ops("hopper_matmul_mgpu")
    along = module.MatmulDimension
    config = module.TuningConfig(**TILES, wg_dimension=along[split], cluster_dimension=cluster and along[cluster])
    x, y, c = half(256, 192), half(192, 256, seed=1), half(256, 256, seed=2) if adds else None
    expected = wide(x) @ wide(y) + (wide(c) if adds else 0)
    run(lambda *xs: module.matmul(*xs, config), x, y, c, cores=2, completion=completion, expected=expected)


@pytest.mark.parametrize("cluster", ["N", slow(None)])
def test_hopper_mixed_type_matmul(ops, cluster):
    module = ops("hopper_mixed_type_matmul_mgpu")
    along = module.MatmulDimension
    config = module.TuningConfig(**TILES, wg_dimension=along.M, cluster_dimension=cluster and along[cluster])
    x, y = np.random.default_rng(0).integers(-5, 5, (128, 256), np.int8), half(256, 128, seed=1)
    call = functools.partial(module.mixed_matmul_kernel, out_dtype=jnp.float16, config=config)
    run(call, x, y, cores=2, expected=wide(x) @ wide(y), atol=0.2)


def attention_operands(kv_length):
    return half(1, 128, 2, 64), half(1, kv_length, 1, 64, seed=1), half(1, kv_length, 1, 64, seed=2)


@pytest.mark.parametrize(
    ("function", "causal", "completion"),
    [
        ("attention", True, "random"),
        ("attention_with_pipeline_emitter", False, "eager"),
        slow("attention", False, "late"),
    ],
)
def test_attention(ops, function, causal, completion):
    module = ops("attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2, causal=causal)
    q, k, v = attention_operands(192)
    expected = module.attention_reference(q, k, v, causal=causal)
    call = functools.partial(getattr(module, function), config=config)
    run(call, q, k, v, completion=completion, expected=expected, atol=1e-2)


@pytest.mark.slow
def test_derivatives_of_attention(ops):
    module = ops("attention_mgpu")
    blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = module.TuningConfig(**blocks, max_concurrent_steps=2)

    def gradients(function):
        return jax.grad(lambda *xs: function(*xs).astype(jnp.float32).sum(), argnums=(0, 1, 2))

    operands = attention_operands(192)
    expected = gradients(module.attention_reference)(*operands)
    run(gradients(lambda *xs: module.attention(*xs, config)), *operands, expected=expected, atol=5e-2)


# Both kernels let products run on into the next k step (`delay_release=1`), and do not wait for the product before the
# last. With no more k steps than stages, no stage is refilled.


@pytest.mark.parametrize(
    ("transpose", "k", "reports"), [(True, 128, []), (False, 256, [REFILLED]), slow(False, 128, [])]
)
def test_ragged_dot(ops, transpose, k, reports):
    x, y, sizes = half(128, k), half(2, k, 128, seed=1), np.array([50, 78], np.int32)
    kernel = functools.partial(ops("ragged_dot_mgpu").ragged_dot, **BLOCKS, transpose_rhs=transpose)
    run(
        lambda x, y, sizes: kernel(x, y, group_sizes=sizes), x, y.transpose(0, 2, 1) if transpose else y, sizes,
        completion="eager" if reports else "late", reports=reports, expected=lax.ragged_dot(wide(x), wide(y), sizes),
    )  # fmt: skip


def test_transposed_ragged_dot(ops):
    module = ops("transposed_ragged_dot_mgpu")
    sizes, x, y = np.array([50, 0, 206], np.int32), half(256, 64), half(256, 64, seed=1)
    kernel = functools.partial(module.transposed_ragged_dot, **BLOCKS)
    run(
        lambda x, y, sizes: kernel(x, y, group_sizes=sizes), x, y, sizes, cores=2, reports=[REFILLED],
        completion="eager",
        expected=module.ref_transposed_ragged_dot(jnp.asarray(wide(x)), jnp.asarray(wide(y)), sizes),
    )  # fmt: skip


# ---- several devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "m", "reports"),
    [(2, 64, [NO_FENCE, OTHER_ROUND]), slow(1, 64, [NO_FENCE]), slow(1, 128, [NO_FENCE, REFILLED])],
    ids=["several CTAs", "one tile", "several tiles"],
)
def test_collective_matmul(ops, cores, m, reports):
    module, devices, n, k = ops("collective_matmul_mgpu"), jax.device_count(), 128, 192
    x, y = half(devices * m, k), half(k, devices * n, seed=1)
    config = module.TuningConfig(**TILES)
    kernel = functools.partial(module.all_gather_lhs_matmul, axis_name="x", config=config, dtype=jnp.float16)
    function = on_mesh(make_mesh(x=devices), kernel, (P("x"), P(None, "x")), P(None, "x"))
    # With several CTAs a race makes the numbers wrong when copies complete late.
    expected = wide(x) @ wide(y) if cores == 1 else None
    run(function, x, y, cores=cores, completion="eager", seed=1, reports=reports, expected=expected)


@pytest.mark.parametrize(("dimension", "dtype"), [(1, np.int32), slow(0, np.float32)])
def test_all_gather(ops, dimension, dtype):
    x = np.arange(64 * 32, dtype=dtype).reshape(64, 32)
    kernel = functools.partial(ops("all_gather_mgpu").all_gather, axis_name="x", gather_dimension=dimension)
    function = on_mesh(make_mesh(x=4), kernel, P("x") if dimension == 0 else P(None, "x"), P("x"))
    run(function, x, cores=2, completion="random", expected=np.tile(x, (4, 1)), atol=0)


@pytest.mark.parametrize(
    ("dimension", "reduction", "dtype"), [(1, "max", np.float16), (None, "xor", np.int32), slow(0, "add", np.float16)]
)
def test_reduce_scatter(ops, dimension, reduction, dtype):
    x = np.random.default_rng(0).integers(-100, 100, (4, 32, 64)).astype(dtype)
    kernel = functools.partial(
        ops("reduce_scatter_mgpu").reduce_scatter, axis_name="x", scatter_dimension=dimension, reduction=reduction
    )
    out_specs = P(None, "x") if dimension else P("x")
    function = on_mesh(make_mesh(x=4), lambda x: kernel(x[0]), P("x"), out_specs)
    reduced = {"add": np.add, "max": np.maximum, "xor": np.bitwise_xor}[reduction].reduce(x, axis=0)
    expected = np.tile(reduced, (4, 1)) if dimension is None else reduced
    run(function, x, cores=2, expected=expected, atol=0)


# ---- Blackwell -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pair", "settings", "reports"),
    [
        (False, {"cores": 3}, [UNFINISHED_STORE]),
        *(slow(False, {"cores": 3, "completion": completion}, [UNFINISHED_STORE]) for completion in COMPLETIONS[1:]),
        (True, {"cores": 4}, [TWO_ANSWERS, UNFINISHED_STORE]),
        (True, {"cores": 2, "scheduler": "round_robin"}, [UNFINISHED_STORE]),
    ],
)
def test_blackwell_matmul(ops, monkeypatch, pair, settings, reports):
    module, x, y = ops("blackwell_matmul_mgpu"), half(512, 256), half(256, 256, seed=1)
    config = module.TuningConfig(**{**TILES, "tile_m": 128}, collective=pair)
    if pair and len(reports) == 1:
        # If only one CTA of a pair asks for the next tile, instead of both, only the other report remains.
        loop = functools.partial(plgpu.dynamic_scheduling_loop, cluster_axes=("x",))
        monkeypatch.setattr(plgpu, "dynamic_scheduling_loop", loop)
    run(lambda x, y: module.matmul_kernel(x, y, config), x, y, reports=reports, expected=wide(x) @ wide(y), **settings)


@pytest.mark.parametrize(
    ("completion", "cores"), [("late", 4), ("late", 2), *(slow(completion, 4) for completion in COMPLETIONS[1:])]
)
def test_blackwell_ragged_dot(ops, completion, cores):
    module = ops("blackwell_ragged_dot_mgpu")
    x, y, sizes = half(512, 192), half(3, 192, 128, seed=1), np.array([100, 300, 112], np.int32)
    config = module.TuningConfig(
        **{**TILES, "tile_m": 128}, collective=True, grid_tile_width=1,
        grid_minor_dim=ops("blackwell_matmul_mgpu").MatmulDimension.N,
    )  # fmt: skip
    # After two tiles in a row, the second CTA's accumulator is overwritten too early: its epilogue signals only its own
    # CTA, not the CTA that issues the products.
    run(
        lambda *xs: module.ragged_dot_kernel(*xs, config), x, y, sizes, cores=cores, completion=completion,
        reports=[] if cores == 4 else [ACCUMULATOR],
        expected=lax.ragged_dot(wide(x), wide(y), sizes) if cores == 4 else None,
    )  # fmt: skip
