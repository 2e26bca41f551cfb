"""Calls with block scales (mxfp8): exact by XLA in all operations, in the emulated kernel of Blackwell, in the frame.

Injected defects of the kernel's scales must show. Gathered scales: tests/ops/test_block_scales_gathered.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import crossover, dispatch, space, tables
from overlap.choice.problem import Problem
from overlap.emulation import EmulationError, emulate
from overlap.kernels.blackwell import limits, scales
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import emulating
from overlap.tuning import operations
from tests import oracle
from tests.ops.block_scale_cases import BLOCK, E4M3, E5M2, E8M0, F32, Product, config
from tests.ops.explained import answer
from tests.ops.product_cases import B200, H200, in_f32

# --- By XLA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "batch", "both"),
    [("km", "nk", (2,), True), ("mk", "kn", (2, 3), False)],
)
def test_by_xla(left, right, batch, both):
    product = Product(5, 32, 48, 96, left=left, right=right, batch=batch, both=both)
    np.testing.assert_array_equal(product(), product.exact)
    assert jax.eval_shape(lambda: product(preferred_element_type=None)).dtype == jnp.bfloat16
    types = jax.tree.map(jax.typeof, (product.lhs, product.rhs, product.scales))
    lhs, rhs, given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), types)
    with emulating("blackwell"):
        explained = answer(overlap.matmul, lhs, rhs, implementation="fused", **product.transposes, **given)
    assert explained.implementation == "fused" and explained.config.tile_n <= 128


COLLECTIVES = [  # The operation, its keywords, specs of both operands (k is the second dimension), the result's spec.
    (overlap.all_gather_lhs_matmul, {}, P("x", None), P("x", None), P(None, "x")),
    (overlap.all_gather_rhs_matmul, dict(dimension=0), P("x", None), P("x", None), P("x", None)),
    (overlap.all_gather_rhs_matmul, dict(dimension=1), P("x", None), P(None, "x"), P("x", None)),
    (overlap.matmul_reduce_scatter, dict(dimension=0), P(None, "x"), P(None, "x"), P("x", None)),
    (overlap.matmul_reduce_scatter, dict(dimension=1), P(None, "x"), P(None, "x"), P(None, "x")),
    (overlap.matmul_all_reduce, {}, P(None, "x"), P(None, "x"), P()),
]


@pytest.mark.parametrize(("operation", "keywords", "lhs", "rhs", "out"), COLLECTIVES)
def test_collectives_by_xla(operation, keywords, lhs, rhs, out):
    product = Product(6, 32, 64, 256)
    specs = dict(lhs=lhs, rhs=rhs, lhs_scale=lhs, rhs_scale=rhs)

    def call(arrays, **more):
        arrays = dict(arrays)
        left, right = arrays.pop("lhs"), arrays.pop("rhs")
        return operation(left, right, "x", transpose_rhs=True, **arrays, **F32, **keywords, **more)

    def mapped(**more):
        one = functools.partial(call, **more)
        return jax.jit(jax.shard_map(one, mesh=oracle.make_mesh(x=2), in_specs=(specs,), out_specs=out))

    arrays = dict(lhs=product.lhs, rhs=product.rhs, **product.scales)
    np.testing.assert_array_equal(mapped()(arrays), product.exact)
    # The 8-bit values and their scales travel, not the numbers that they represent.
    text = mapped().lower(arrays).as_text()
    gathers = re.findall(r'"stablehlo.all_gather"[^\n]*: \(tensor<[^>]*x(\w+)>', text)
    assert set(gathers) <= {"ui8", "f8E4M3FN", "f8E5M2"} and len(gathers) in (0, 2)
    if operation is not overlap.all_gather_lhs_matmul:
        refused = f"`{operation.__name__}` takes no `lhs_scale` and .* of blocks yet"
        with pytest.raises(NotImplementedError, match=refused):
            mapped(implementation="fused")(arrays)


# --- The kernel, emulated ---------------------------------------------------------------------------------------------

SIZES = [  # cores, shape, configuration, what else differs
    (2, (200, 192, 416), config(tile_n=64), dict(dtypes=(E4M3, E4M3))),
    (3, (1, 16, 1056), config(stages=2), {}),
    (4, (130, 144, 288), config(order_minor="n"), dict(dtypes=(E5M2, E5M2))),
    (4, (513, 144, 160), config(cluster=2, stages=2), {}),
    (4, (384, 144, 544), config(stream_k=3, cluster=2), dict(dtypes=(E5M2, E4M3))),
    (4, (64, 144, 544), config(split_k=5), {}),
    (2, (144, 272, 160), config(), dict(batch=(2,))),
    (2, (144, 144, 160), config(), dict(batch=(2,), right="kn")),
    (2, (144, 144, 160), config(), dict(batch=(2,), left="km", right="kn", both=True)),
]


@pytest.mark.parametrize(("cores", "shape", "config", "more"), SIZES)
def test_results_are_exact(cores, shape, config, more):
    Product(0, *shape, **more).check(cores, dict(laps=2), config=config)


def test_with_an_epilogue():
    product, bias = Product(3, 136, 144, 160), jnp.arange(144.0) - 70
    with emulating("blackwell"), emulate(cores=2):
        out = product("fused", bias=bias, addend=jnp.ones((136, 144)), activation=jax.nn.relu, config=config())
    np.testing.assert_array_equal(out, np.maximum(product.exact + np.asarray(bias) + 1, 0))


# --- Defects, each injected by a patch --------------------------------------------------------------------------------


def loads(change):
    """Scales are loaded of another (tile, k step), or into another stage."""

    def inject(patch, load=scales.load):
        patch.setattr(scales, "load", lambda loop, buffers, *where: load(loop, buffers, *change(loop, *where)))

    return inject


def swapped(patch, to_tensor_memory=scales.to_tensor_memory):
    def other(*args):
        given = to_tensor_memory(*args)
        return dict(a_scale=given["b_scale"], b_scale=given["a_scale"])

    patch.setattr(scales, "to_tensor_memory", other)


def of_the_peer_not_awaited(patch):
    """The first CTA of a pair does not wait for the scales that the second one loads."""

    def copy(*args, leader_tracked=None, collective_axes=None, **rest):
        shared = dict(leader_tracked=leader_tracked, collective_axes=collective_axes)
        is_replicated = leader_tracked is plgpu.CopyPartition.REPLICATED
        plgpu.copy_gmem_to_smem(*args, **rest, **({} if is_replicated else shared))

    patch.setattr(scales, "plgpu", types.SimpleNamespace(**{**vars(plgpu), "copy_gmem_to_smem": copy}))


DEFECTS = {  # The defect, the size of a cluster, whether the emulator reports it; otherwise the result is wrong.
    "of another step": (loads(lambda loop, tile, k_step, stage: (tile, k_step + 1, stage)), 1, False),
    "of another row of tiles": (
        loads(lambda loop, tile, *rest: (dataclasses.replace(tile, m=tile.m + 1), *rest)), 2, False),
    "into a stage that is still read": (
        loads(lambda loop, tile, k_step, stage: (tile, k_step, jax.lax.rem(stage + 1, loop.config.stages))), 1, True),
    # The barrier of a stage counts only the copies of the operand tiles.
    "not awaited": (lambda patch: patch.setattr(scales, "COPIES", 0), 2, True),
    "swapped": (swapped, 1, False),
    "of the peer, not awaited": (of_the_peer_not_awaited, 2, True),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_reported(name, monkeypatch):
    defect, cluster, reported = DEFECTS[name]
    defect(monkeypatch)
    with pytest.raises(EmulationError if reported else AssertionError):
        Product(4, 384, 128, 320).check(2, config=config(cluster=cluster, stages=2))


# --- The frame --------------------------------------------------------------------------------------------------------


def by_either(function):
    """Calls the jitted `function(implementation)` with XLA and with the emulated kernel, and compares the results."""
    expected = jax.jit(functools.partial(function, "xla"))()
    with emulating("blackwell"), emulate(cores=2):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(functools.partial(function, "fused"))(), expected)
    return expected


@pytest.mark.parametrize("mapped", ["lhs lhs_scale", "rhs rhs_scale", "lhs lhs_scale rhs_scale bias"])
def test_vmap(mapped):
    elements, biases = [Product(seed, 40, 64, 96) for seed in (8, 9)], np.arange(64.0) * np.array([[1.0], [2.0]])
    arrays = {name: getattr(elements[0], name) for name in ("lhs", "rhs", "lhs_scale", "rhs_scale")}
    arrays |= {"bias": jnp.asarray(biases[0], jnp.float32)}
    for name in mapped.split():
        both = biases if name == "bias" else [np.asarray(getattr(x, name)) for x in elements]
        arrays[name] = jnp.asarray(np.stack(both), arrays[name].dtype)
    axes = {name: 0 if name in mapped.split() else None for name in arrays}

    def of_one(arrays, how):
        return overlap.matmul(**arrays, implementation=how, transpose_rhs=True, **F32)

    out = by_either(lambda how: jax.vmap(functools.partial(of_one, how=how), in_axes=(axes,))(arrays))
    wide = lambda x, scale: in_f32(x) * np.repeat(in_f32(scale), BLOCK, -1)  # noqa: E731
    for i in range(2):
        one = {name: x if axes[name] is None else x[i] for name, x in arrays.items()}
        exact = wide(one["lhs"], one["lhs_scale"]) @ wide(one["rhs"], one["rhs_scale"]).T + in_f32(one["bias"])
        np.testing.assert_array_equal(out[i], exact)


def test_gradients():
    product = Product(10, 24, 48, 96)
    weights = np.random.default_rng(11).integers(-1, 2, (24, 48)).astype(np.float32)
    weights[:, 4:] = 0

    def loss(lhs, rhs, lhs_scale, how):
        out = overlap.matmul(
            lhs, rhs, lhs_scale=lhs_scale, rhs_scale=product.rhs_scale, implementation=how, **product.transposes, **F32
        )
        return (out * weights).sum()

    operands = product.lhs, product.rhs, product.lhs_scale

    def derivatives(how):
        forward = jax.jvp(lambda x: loss(x, *operands[1:], how), operands[:1], operands[:1])
        return jax.grad(loss, (0, 1))(*operands, how), forward

    (d_lhs, d_rhs), (value, slope) = by_either(derivatives)
    assert (d_lhs.dtype, d_rhs.dtype) == (E4M3, E5M2) and value == slope == (product.exact * weights).sum()
    of_left, of_right = (np.repeat(in_f32(x), BLOCK, -1) for x in (product.lhs_scale, product.rhs_scale))
    for found, exact in (
        (d_lhs, weights @ (in_f32(product.rhs) * of_right) * of_left),
        (d_rhs, weights.T @ (in_f32(product.lhs) * of_left) * of_right),
    ):
        np.testing.assert_array_equal(in_f32(found), in_f32(exact.astype(found.dtype)))
    for how in ("xla", "fused"):
        with emulating("blackwell"), emulate(), pytest.raises(TypeError, match="have no derivative: apply"):
            jax.grad(loss, 2)(*operands, how)


@pytest.mark.one_jax
def test_sharded_operands():
    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    product = Product(12, 48, 96, 64)
    for name, axis in (("lhs", "x"), ("lhs_scale", "x"), ("rhs", "y"), ("rhs_scale", "y")):
        setattr(product, name, jax.device_put(getattr(product, name), jax.NamedSharding(explicit, P(axis))))
    for how in ("xla", "fused"):
        with emulating("blackwell"), emulate(cores=2), jax.set_mesh(explicit):
            result = product(how)
        assert result.sharding.spec == P("x", "y") or how == "xla"
        np.testing.assert_array_equal(result, product.exact)


# --- The choice -------------------------------------------------------------------------------------------------------


def test_wrong_configurations_and_devices():
    product = Product(14, 128, 256, 128)
    with emulating("blackwell"), pytest.raises(ValueError, match=r"`tile_n` must be at most 128 .* got 256"):
        product("fused", config=config(tile_n=256))
    sizes = OperandTypes(128, E4M3, E4M3, jnp.bfloat16, OperandLayouts(False, True), block_scaled=True)
    with pytest.raises(
        ValueError, match=r"needs 520 columns of tensor memory, and there are 512: reduce `stages` .33."
    ):
        limits.check_config(sizes, config(stages=33), B200)
    with pytest.raises(NotImplementedError, match=r'Hopper take no block scales: .*implementation="xla", which runs'):
        product("fused")


def test_xla_runs_what_the_kernel_cannot(monkeypatch):
    product, unaligned = Product(16, 128, 128, 128), Product(16, 128, 120, 128, right="kn")

    def reason(kind, product):
        monkeypatch.setattr(dispatch, "target", lambda mesh=None: kind)
        explained = answer(overlap.matmul, product.lhs, product.rhs, **product.scales, **product.transposes)
        assert explained.implementation == "xla" and explained.config is None
        return explained.reason

    assert "the tensor cores of Hopper take no block scales" in reason(H200, product)
    assert "needs the rows of rhs to be multiples of 16 bytes, got n=120" in reason(B200, unaligned)
    assert reason(B200, product) == crossover.NOTHING_MEASURED.reason


@pytest.mark.one_jax
def test_a_configuration_is_found():
    sizes = ((4096, 4096, 4096), "nn"), ((16, 8192, 8192), "nt"), ((320, 272, 288), "tn"), ((320, 272, 288), "tt")
    for shape, layout in sizes:
        problem = Problem("matmul", *shape, "float8_e4m3fn", "bfloat16", layout=layout, block_scaled=True)
        found = space.candidates(problem, B200)
        assert found and all(x.tile_n <= 128 and problem.accepts(x, B200) for x in found)
        assert not space.candidates(problem, H200)
        assert str(problem).endswith("with scales of blocks") and problem.bucket.block_scaled


def test_tables_and_the_tuner_know_such_problems():
    problem = Problem("matmul", 128, 128, 128, "float8_e4m3fn", "bfloat16", layout="nt", block_scaled=True)
    entry = tables.Entry(problem, "NVIDIA B200", jax.__version__, config(), 1.0)
    assert tables.Entry.from_json(entry.to_json()) == entry
    before = {name: value for name, value in entry.to_json().items() if name != "block_scaled"}
    assert not tables.Entry.from_json(before).problem.block_scaled
    product = Product(15, 128, 128, 128)
    with emulating("blackwell"), emulate():
        out = operations.call_operation(problem, product.lhs, product.rhs, config(), "fused")
    unscaled = overlap.matmul(product.lhs, product.rhs, transpose_rhs=True)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(unscaled, np.float32))


# --- Wrong calls ------------------------------------------------------------------------------------------------------


def ones(*shape, dtype=E8M0):
    return jnp.ones(shape, dtype)


BF16, F4, F32_ = jnp.bfloat16, jnp.float4_e2m1fn, jnp.float32
WRONG = [  # What differs from a right product of 24 × 40 × 96, and the message.
    (dict(lhs_scale=ones(24, 2)), r"`lhs_scale` of .* must have shape \(24, 3\), .* got \(24, 2\): reshape it"),
    (dict(rhs_scale=ones(3, 40)), r"`rhs_scale` of .* must have shape \(40, 3\), .* got \(3, 40\)"),
    (dict(lhs_scale=ones()), r"must have shape \(24, 3\), .* got \(\): .* cast it to float32 if it scales rows"),
    (dict(lhs_scale=ones(24, 3, dtype=F32_)), r"`lhs_scale` of shape \(24, 3\) .* must have dtype float8_e8m0fnu"),
    (dict(rhs_scale=None), r"both be of blocks or neither, got nothing as `rhs_scale`: .* shape \(40, 3\), ones"),
    (dict(lhs_scale=2.0), r"must both be of blocks or neither, got 2.0 as `lhs_scale`"),
    (dict(lhs=ones(24, 100, dtype=E4M3), rhs=ones(40, 100, dtype=E4M3)),
     r"k must be a multiple of 32, got k=100 in `lhs` \(24, 100\): pad both operands with zeros to k=128"),
    (dict(lhs=ones(24, 96, dtype=BF16), rhs=ones(40, 96, dtype=BF16)),
     "scales blocks of float8_e4m3fn or float8_e5m2, got `lhs` of dtype bfloat16: cast one of them"),
    (dict(lhs=ones(24, 96, dtype=F4), rhs=ones(40, 96, dtype=F4)), "got `lhs` of dtype float4_e2m1fn: cast one"),
    (dict(rhs_scale=[ones(40, 3)]), "`rhs_scale`"),
    (dict(lhs_scale=ones(24, 6, dtype=E4M3)), r"\(24, 6\) scales blocks of 16 .* \(nvfp4\), and only blocks of 32"),
]  # fmt: skip


def test_wrong_calls():
    product = Product(13, 24, 40, 96)
    for changes, message in WRONG:
        with pytest.raises(ValueError, match=message):
            overlap.matmul(**dict(lhs=product.lhs, rhs=product.rhs, **product.scales) | changes, transpose_rhs=True)
