"""Forms of calls that `tests/assembly` does not have, assembled for GPUs: they need no stack, and the right memory.

Several right operands, the gathered operand, leading dimensions and scales; few rows; transposed rows; the backward
pass; several axes, hosts and processes.
"""

import math

import jax.numpy as jnp
import pytest

import overlap
from overlap.kernels.hopper.limits import smem_bytes
from tests.assembly import assembly
from tests.assembly.assembly import Case

pytestmark = pytest.mark.skipif(bool(assembly.unavailable_reason()), reason=str(assembly.unavailable_reason()))
slow = pytest.mark.slow
GATHER, N, K = "all_gather_lhs_matmul", "all_gather_rhs_matmul_n", "all_gather_rhs_matmul_k"
EVERYTHING = {
    "call": GATHER,
    "widths": "4096+1024+1024",
    "extras": "lhs_scale+rhs_scale",
    "lead": "2x2",
    "gathered": True,
}
FEW = {"call": GATHER, "joined": True, "tile_m": 64}
FEW_SIDES = FEW | {"widths": "1024+256+256", "extras": "lhs_scale+rhs_scale", "gathered": True}
CASES = [  # devices, dtype, shape, what is given
    (4, "bf16", (1024, 4096, 4096), EVERYTHING | {"stream_k": 2}),
    (4, "float8_e4m3fn", (1024, 4096, 4096), EVERYTHING | {"ring": True, "stream_k": 2, "layout": "nt"}),
    (4, "bf16", (3, 1024, 4096), FEW_SIDES | {"tile_n": 256, "stream_k": 6, "lead": "2x2"}),
    (8, "bf16", (512, 4096, 4096), {"call": N, "tile_n": 192, "stages": 4, "order_minor": "n"}),
    (2, "bf16", (1024, 4096, 2048), {"call": K, "stream_k": 2}),
]
MORE = [
    (4, "f16", (1024, 4096, 4096), {"call": GATHER, "widths": "4096+1024+1024"}),
    (4, "bf16", (1000, 4096, 4104), EVERYTHING | {"layout": "nt"}),
    (4, "float8_e4m3fn", (1024, 4096, 4096), EVERYTHING | {"stream_k": 2, "layout": "nt"}),
    (4, "f16", (1024, 4096, 4096), {"call": GATHER, "gathered": True, "ring": True}),
    (4, "bf16", (1024, 4096, 4096), EVERYTHING | {"ring": True, "stream_k": 2}),
    (4, "bf16", (1000, 4096, 4104), EVERYTHING | {"ring": True, "layout": "nt"}),
    (2, "bf16", (16, 8192, 8192), FEW | {"tile_n": 256, "stream_k": 4}),
    (4, "bf16", (16, 4096, 4096), FEW | {"tile_n": 128, "stages": 8, "stream_k": 4}),
    (8, "f16", (32, 1024, 4096), FEW | {"tile_m": 128, "tile_n": 128, "stages": 5, "stream_k": 8}),
    (4, "bf16", (64, 4096, 4104), FEW | {"tile_m": 256, "tile_n": 128, "stages": 3}),
    (4, "f16", (16, 1024, 4096), FEW_SIDES | {"tile_n": 256, "stream_k": 8, "layout": "nt"}),
    (8, "float8_e4m3fn", (16, 1024, 4096), FEW_SIDES | {"stream_k": 8, "layout": "nt"}),
    (8, "bf16", (512, 4096, 512), {"call": K}), (8, "bf16", (4096, 512, 4096), {"call": N}),
    (4, "bf16", (1000, 4128, 1032), {"call": K, "tile_n": 192, "stages": 4, "order_minor": "n"}),
    (2, "bf16", (2048, 2048, 4096), {"call": N, "stream_k": 2}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "dtype", "shape", "given"), [*CASES, *(pytest.param(*case, marks=slow) for case in MORE)], ids=str
)
def test_no_spills(devices, dtype, shape, given):
    case = Case("tests.ops.assembled_cases:assembled", devices, shape, dtype, config=given)
    (report,) = assembly.assemble_case(case)
    assert report.spills == 0 and report.stack_frame_bytes == 0 and not report.remarks
    assert report.architecture == "sm_90a"
    assert report.name == f"overlap_{given['call']}" + ("_joined" if given.get("joined") else "")
    fields = {name: x for name, x in given.items() if name in vars(overlap.Config())}
    if given["call"] in (N, K) and fields:
        assert report.shared_memory_bytes <= smem_bytes(overlap.Config(**fields), jnp.bfloat16, "pull") + 1024


@pytest.mark.parametrize(("target", "processes"), [("h200", 2), pytest.param("b200", 1, marks=slow)])
def test_a_gradient(target, processes):
    shape = 4096, 14336, 8192
    case = Case("tests.assembly.assembly_products:gradient", 2, shape, "bf16", target, processes=processes)
    report = assembly.assemble_case(case)[-1]
    assert (report.name, report.spills, report.stack_frame_bytes) == ("overlap_matmul_reduce_scatter_m", 0, 0)


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, pytest.param({"a": 2, "b": 3}, marks=slow)], ids=str)
@pytest.mark.parametrize("transport", ["pull", pytest.param("ring", marks=slow)])
def test_both_axes_in_reverse_of_permuted_devices(sizes, transport):
    """The kernel needs no more registers or shared memory than along one axis."""
    devices = math.prod(sizes.values())
    along_one = Case("tests.ops.assembled_cases:assembled", devices=devices,
                     config={"call": GATHER, "ring": transport == "ring"})  # fmt: skip
    along_both = Case(
        "tests.ops.mesh_cases:reversed_axes_of_permuted_devices", mesh=sizes, config={"transport": transport}
    )
    (one,), (both,) = assembly.assemble_case(along_one), assembly.assemble_case(along_both)
    assert both.spill_store_bytes == both.spill_load_bytes == 0 and both.architecture == "sm_90a"
    assert both.shared_memory_bytes == one.shared_memory_bytes and both.registers == one.registers


@pytest.mark.slow
def test_turning_ranks_into_positions_costs_no_registers():
    (alone,) = assembly.assemble_case(Case(GATHER, devices=4))
    (of_two,) = assembly.assemble_case(Case(GATHER, devices=8, mesh={"data": 2, "x": 4}, hosts=2))
    assert of_two.spills == 0 and of_two.registers == alone.registers
    assert of_two.shared_memory_bytes == alone.shared_memory_bytes
