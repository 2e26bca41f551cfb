"""Compiles kernels to machine code without a GPU: no spills, expected shared memory, every topology lowers."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import jax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.choose import choose_config
from overlap.choice.problem import Problem
from overlap.kernels.hopper.limits import smem_bytes
from tests.assembly import assembly
from tests.assembly.assembly import Case
from tests.assembly.assembly_space import TARGET

plgpu: Any = mosaic_gpu  # The annotated type lacks methods that the object has.
pytestmark = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))


# --- Probes: two kernels of a few lines, to test the helper itself ----------------------------------------------------


def wgmma_probe(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Makes a kernel of one wgmma tile by one warpgroup. With several devices, it sends the result and a flag on."""
    m, n, k = case.shape
    devices = mesh.shape["x"]
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(lhs_gmem, rhs_gmem, out_gmem, lhs_smem, rhs_smem, out_smem, barrier):
        plgpu.copy_gmem_to_smem(lhs_gmem, lhs_smem, barrier)
        plgpu.copy_gmem_to_smem(rhs_gmem, rhs_smem, barrier)
        plgpu.barrier_wait(barrier)

        def multiply(acc):
            plgpu.wgmma(acc, lhs_smem, rhs_smem)
            return acc[...]

        out_smem[...] = pl.run_scoped(multiply, plgpu.ACC((m, n))).astype(out_smem.dtype)
        plgpu.commit_smem()
        if devices == 1:
            plgpu.copy_smem_to_gmem(out_smem, out_gmem)
            plgpu.wait_smem_to_gmem(0)
            return
        flag = pl.get_global(plgpu.SemaphoreType.REGULAR)
        peer = lax.rem(lax.axis_index("x") + 1, devices)
        plgpu.copy_smem_to_gmem(out_smem, plgpu.remote_ref(out_gmem, peer))
        plgpu.wait_smem_to_gmem(0)
        pl.semaphore_signal(flag, 1, device_id=peer)
        pl.semaphore_wait(flag, 1)

    def fn(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((m, n), lhs.dtype),
            scratch_types=[
                plgpu.SMEM((m, k), lhs.dtype, transforms=transforms),
                plgpu.SMEM((k, n), lhs.dtype, transforms=transforms),
                plgpu.SMEM((m, n), lhs.dtype, transforms=transforms),
                plgpu.Barrier(num_arrivals=2),
            ],
            kernel_name="wgmma_probe",
        )(lhs, rhs)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    return mapped, (
        assembly.struct(mesh, (m * devices, k), case.dtype, P("x")),
        assembly.struct(mesh, (k, n), case.dtype),
    )


@pytest.mark.parametrize("devices", [1, 4])
def test_the_helper_reads_back_a_known_kernel(devices: int) -> None:
    (report,) = assembly.assemble_case(Case("tests.assembly.test_assembled:wgmma_probe", devices, (128, 128, 64)))
    assert report.name == "wgmma_probe"
    assert report.architecture == "sm_90a"
    # At least 64 accumulator registers per thread; three tiles and one 8-byte barrier.
    assert 64 < report.registers <= 255
    assert report.spills == 0
    assert report.shared_memory_bytes == 2 * (128 * 64 + 64 * 128 + 128 * 128) + 8
    assert report.grid == (1, 1, 1)
    assert report.threads == (128, 1, 1)


def dies(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    del case, mesh
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def test_the_helper_survives_what_it_assembles(tmp_path) -> None:
    case = Case("tests.assembly.test_assembled:wgmma_probe", 1, (64, 64, 64))
    first = assembly.assemble_case(case)
    with pytest.raises(RuntimeError, match=r"ended(.|\n)*last words"):
        assembly.assemble_case(Case("tests.assembly.test_assembled:dies"))
    # Assemble twice in one process, though Mosaic assembles once; then ask for the code, which was not kept at first.
    assert [assembly.assemble_case(case), assembly.assemble_case(case)] == [first, first]
    assert assembly.assemble_case(case, ptx=str(tmp_path / "ptx")) == first
    assert "wgmma_probe" in (tmp_path / "ptx").read_text()


def test_the_helper_sees_spills() -> None:
    # 192 x 256 f32 accumulators in one warpgroup need 384 registers per thread; the maximum is 255.
    (report,) = assembly.assemble_case(Case("tests.assembly.test_assembled:wgmma_probe", 1, (192, 256, 64)))
    assert report.spills > 0


# --- The library's kernels --------------------------------------------------------------------------------------------


SHAPE = (1024, 4096, 4096)


def check(case: Case, *, pulls: bool) -> assembly.KernelReport:
    """Assembles the one kernel of a case and asserts what must hold for every configuration."""
    (report,) = assembly.assemble_case(case)
    target = assembly.TARGETS[case.target]
    assert report.spills == 0
    assert report.stack_frame_bytes == 0
    # Any remark of ptxas costs time: serialized wgmma, for example, or an ignored setmaxnreg.
    assert report.remarks == ()
    assert report.registers * math.prod(report.threads) <= 65536
    # One CTA per SM, all resident: otherwise a persistent kernel with flags between its CTAs hangs.
    assert math.prod(report.grid) <= target.core_count
    dtype = assembly.dtype_of(case.dtype)
    problem = Problem(case.op, *case.shape, dtype, dtype, devices=case.mesh.get("x", case.devices) if pulls else 1)
    config = overlap.Config(**case.config) if case.config else choose_config(problem, TARGET)[0]
    assert report.shared_memory_bytes == smem_bytes(config, dtype, "pull" if pulls else "")
    assert report.shared_memory_bytes + report.static_shared_memory_bytes <= target.shared_memory_per_block_optin
    return report


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_all_gather_lhs_matmul_assembles_without_spills(devices: int, dtype: str) -> None:
    check(Case("all_gather_lhs_matmul", devices, SHAPE, dtype), pulls=devices > 1)


@pytest.mark.parametrize(("devices", "dtype"), [(1, "f16"), (1, "bf16"), (8, "f16")])
def test_matmul_assembles_without_spills(devices: int, dtype: str) -> None:
    check(Case("matmul", devices, SHAPE, dtype), pulls=False)


@pytest.mark.parametrize(
    "config",
    [
        {"tile_n": 128, "stages": 6},
        {"tile_n": 192, "stages": 3},
        {"stages": 3},
        {"chunk_bytes": 4096, "chunk_buffers": 4, "order_minor": "n"},
    ],
    ids=lambda config: ",".join(f"{name}={value}" for name, value in config.items()),
)
def test_other_configs_use_the_shared_memory_they_announce(config: dict[str, Any]) -> None:
    check(Case("all_gather_lhs_matmul", 4, (1024, 3 * 1024, 4096), config=config), pulls=True)


@pytest.mark.parametrize("shape", [(1001, 4096, 512), (1001, 4096, 8 * 1009)], ids=["rows", "columns"])
def test_uneven_chunks_assemble_without_spills(shape: tuple[int, int, int]) -> None:
    (report,) = assembly.assemble_case(Case("all_gather_lhs_matmul", 4, shape))
    assert report.spills == 0 and report.stack_frame_bytes == 0 and report.remarks == ()


@pytest.mark.parametrize(
    ("mesh", "hosts"),
    [
        ({"data": 2, "x": 4}, 1),
        ({"x": 4, "data": 2}, 1),
        ({"x": 16}, 1),
        ({"data": 2, "x": 8}, 2),
        ({"data": 4, "x": 4}, 2),
    ],
    ids=["minor axis", "major axis", "16 of one host", "one host of 2x8", "half a host of 2x8"],
)
def test_it_assembles_on_larger_meshes(mesh: dict[str, int], hosts: int) -> None:
    check(Case("all_gather_lhs_matmul", math.prod(mesh.values()), SHAPE, mesh=mesh, hosts=hosts), pulls=True)


@pytest.mark.parametrize(
    ("devices", "processes", "op", "fields"),
    [
        (4, 1, "matmul_reduce_scatter", {"tile_m": 128, "tile_n": 256, "stages": 4}),
        (8, 1, "matmul_reduce_scatter", {"tile_m": 128, "tile_n": 128, "stages": 4, "epilogue": "all"}),
        (4, 4, "matmul_reduce_scatter_n", {"tile_m": 128, "tile_n": 256, "stages": 4, "epilogue": "all"}),
    ],
)
def test_sums_by_ring_assemble_without_spills(devices: int, processes: int, op: str, fields: dict[str, Any]) -> None:
    config = {"op": op, "out": "bfloat16", "transport": "ring", **fields}
    case = Case(
        "tests.assembly.assembly_products:scattered", devices, (4096, 4096, 2048), config=config, processes=processes
    )
    report = assembly.assemble_case(case)[-1]
    assert (report.spills, report.stack_frame_bytes, report.remarks) == (0, 0, ())
    of_config = {name: value for name, value in fields.items() if name != "epilogue"}
    # The ring uses only one of the chunk buffers that a configuration asks for.
    assert report.shared_memory_bytes <= smem_bytes(overlap.Config(**of_config), "bfloat16", "push")


def test_a_config_that_does_not_fit_is_refused_before_it_is_assembled() -> None:
    with pytest.raises(RuntimeError, match="shared memory"):
        assembly.assemble_case(Case("all_gather_lhs_matmul", 4, SHAPE, config={"stages": 5}))
