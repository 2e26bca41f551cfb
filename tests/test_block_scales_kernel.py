"""Block scales in the Blackwell kernel: emulated and exact, with injected defects; the choice; assembled."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import overlap
from overlap.choice import crossover, dispatch, space, tables
from overlap.choice.problem import Problem
from overlap.emulation import EmulationError, emulate
from overlap.kernels import target
from overlap.kernels.blackwell import limits, scales
from overlap.kernels.limits import RESERVED_BYTES
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts
from overlap.kernels.target import emulating
from overlap.tuning import operations
from tests import assembly
from tests.block_scale_cases import E4M3, E5M2, Product, config
from tests.explained import answer

B200, H200 = target.Target("gpu", "NVIDIA B200", 148), target.Target("gpu", "NVIDIA H200", 132)

# --- The kernel, emulated ---------------------------------------------------------------------------------------------

SIZES = [  # cores, shape, config
    (1, (128, 128, 128), config(stages=2)),
    (2, (300, 272, 32), config()),
    (2, (200, 192, 416), config(tile_n=64)),
    (3, (1, 16, 1056), config(stages=2)),
    (4, (130, 400, 288), config(order_minor="n")),
    (2, (300, 272, 288), config(cluster=2)),
    (4, (513, 144, 608), config(cluster=2, stages=2)),
    (3, (260, 144, 544), config(stream_k=3)),
    (4, (384, 144, 544), config(stream_k=3, cluster=2)),
    (4, (64, 144, 544), config(split_k=5)),
]


@pytest.mark.parametrize(("cores", "shape", "config"), SIZES)
def test_results_are_exact(cores, shape, config):
    Product(0, *shape).check(cores, config=config)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(["mk", "km"], ["nk", "kn"])))
def test_all_layouts_on_a_batch(left, right):
    Product(1, 144, 272, 288, left=left, right=right, batch=(2,), both=left == "km").check(config=config())


@pytest.mark.parametrize("dtypes", list(itertools.product([E4M3, E5M2], repeat=2)))
def test_dtypes(dtypes):
    Product(2, 128, 128, 160, dtypes=dtypes).check(config=config())


def test_with_an_epilogue():
    product, bias = Product(3, 136, 144, 160), jnp.arange(144.0) - 70
    with emulating("blackwell"), emulate(cores=2):
        out = product("fused", bias=bias, addend=jnp.ones((136, 144)), activation=jax.nn.relu, config=config())
    np.testing.assert_array_equal(out, np.maximum(product.exact + np.asarray(bias) + 1, 0))


def drawn(seed):
    """Draws a shape and a configuration."""
    chance = np.random.default_rng(seed)
    m, n, k = int(chance.integers(1, 420)), 16 * int(chance.integers(1, 20)), 32 * int(chance.integers(1, 24))
    cluster = int(chance.integers(1, 3))
    sizes = dict(tile_n=128 if cluster == 2 else int(chance.choice([64, 128])), stages=int(chance.integers(2, 5)))
    return (m, n, k), config(cluster=cluster, stream_k=int(chance.integers(1, 3)), **sizes)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_drawn_shapes_and_schedules(seed, completion):
    shape, drawn_config = drawn(seed)
    settings = dict(completion=completion, seed=seed)
    Product(seed, *shape).check(2 * (1 + seed % 2), settings, config=drawn_config)


# --- Defects, each injected by a patch --------------------------------------------------------------------------------


def of_another_step(patch):
    load = scales.load
    patch.setattr(
        scales, "load", lambda loop, buffers, tile, k_step, stage: load(loop, buffers, tile, k_step + 1, stage)
    )


def of_another_row_of_tiles(patch):
    load = scales.load
    beside = lambda tile: dataclasses.replace(tile, m=tile.m + 1)  # noqa: E731
    patch.setattr(scales, "load", lambda loop, buffers, tile, *rest: load(loop, buffers, beside(tile), *rest))


def into_a_stage_that_is_still_read(patch):
    """The scales go to the next stage, whose product may still be running."""
    load = scales.load

    def early(loop, buffers, tile, k_step, stage):
        load(loop, buffers, tile, k_step, jax.lax.rem(stage + 1, loop.config.stages))

    patch.setattr(scales, "load", early)


def not_awaited(patch):
    """The barrier of a stage counts only the copies of the operand tiles."""
    patch.setattr(scales, "COPIES", 0)


def swapped(patch):
    to_tensor_memory = scales.to_tensor_memory

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


DEFECTS = of_another_step, of_another_row_of_tiles, into_a_stage_that_is_still_read, not_awaited, swapped


@pytest.mark.parametrize(("defect", "cluster"), [*itertools.product(DEFECTS, [1, 2]), (of_the_peer_not_awaited, 2)])
def test_a_defect_is_reported(defect, cluster, monkeypatch):
    jax.clear_caches()
    defect(monkeypatch)
    try:
        of_order = defect in (into_a_stage_that_is_still_read, not_awaited, of_the_peer_not_awaited)
        with pytest.raises(EmulationError if of_order else AssertionError):
            Product(4, 384, 128, 640).check(2, config=config(cluster=cluster, stages=2))
    finally:
        jax.clear_caches()


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


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (16, 8192, 8192), (320, 272, 288)])
def test_a_configuration_is_found(shape, layout):
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


# --- Assembled --------------------------------------------------------------------------------------------------------

ASSEMBLED = [
    ("cta_group::1", dict(layout="nt", stages=5)),
    ("cta_group::2", dict(layout="nt", stages=6, cluster=2, epilogue="all", out="float32")),
    ("cta_group::1", dict(layout="tn", stages=3, batch=[3])),
]


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(("group", "options"), ASSEMBLED, ids=str)
def test_assembled(group, options, tmp_path):
    fields = {name: getattr(config(), name) for name in ("tile_m", "tile_n")}
    case = assembly.Case(
        "tests.assembly_products:product", 1, (4096, 4096, 4096), "float8_e4m3fn", "b200",
        config={**fields, **options, "block_scales": True},
    )  # fmt: skip
    (report,) = assembly.assemble_case(case, ptx=str(tmp_path / "ptx"))
    assert f"tcgen05.mma.{group}.kind::mxf8f6f4.block_scale.scale_vec::1X" in (tmp_path / "ptx").read_text()
    sizes = overlap.Config(**fields, **{name: x for name, x in options.items() if name in ("stages", "cluster")})
    out_dtype = options.get("out", "bfloat16")
    needed = limits.smem_bytes(sizes, out_dtype, block_scaled=True)
    assert needed <= report.shared_memory_bytes <= needed + RESERVED_BYTES
    assert report.remarks == () and (report.architecture, report.spills, report.stack_frame_bytes) == ("sm_100a", 0, 0)
