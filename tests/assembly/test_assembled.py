"""Every kind of kernel compiled to machine code without a GPU: nothing spills, and memory is used as `limits` says.

Most kernels come from the classes of `space` (Hopper) and `blackwell`, which hold all that can be chosen; `ROWS` has
the kernels and forms beside these. Every run assembles a few classes with each operation, value and feature;
`make test-all` assembles all pairs of values.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

import overlap
from lessons import blackwell as blackwell_lessons
from lessons import hopper as hopper_lessons
from overlap.kernels.blackwell import limits as blackwell_limits
from overlap.kernels.hopper import limits
from overlap.kernels.limits import RESERVED_BYTES
from tests.assembly import assembly, blackwell, members, registers, space
from tests.assembly.assembly import Assembler, Case, assemble_case
from tests.assembly.registers import Registers
from tests.assembly.report import KernelReport
from tests.assembly.targets import TARGETS

plgpu: Any = mosaic_gpu  # The annotated type lacks methods that the object has.
pytestmark = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))


def all_but_slow(kernels: Any, fast: Any) -> Any:
    slow = [pytest.mark.slow, pytest.mark.one_jax]
    marked = [pytest.param(kernel, marks=[] if kernel in fast else slow) for kernel in kernels]
    return pytest.mark.parametrize("kernel", marked, ids=str)


_assembled: dict[str, tuple[list[KernelReport], str]] = {}


def ptx_of(case: Case) -> tuple[list[KernelReport], str]:
    """Returns the reports and the PTX of a case."""
    if (key := repr(case)) not in _assembled:
        with tempfile.NamedTemporaryFile("r", suffix=".ptx") as code:
            _assembled[key] = assemble_case(case, ptx=code.name), code.read()
    return _assembled[key]


# --- Classes ----------------------------------------------------------------------------------------------------------

CORE, EVERY = space.core(), sorted({*space.core(), *space.pairwise(), *space.cover()})


@all_but_slow(EVERY, CORE)
def test_hopper(kernel):
    member = next(members.members(kernel))
    (report,), code = ptx_of(member.case)
    assert members.faults(member, report, code) == []


@all_but_slow(blackwell.every(), blackwell.core())
def test_blackwell(kernel):
    member = next(blackwell.members(kernel))
    (report,), code = ptx_of(member.case)
    assert blackwell.faults(member, report, code) == []


@all_but_slow([kernel for kernel in EVERY if kernel.pulls], [next(k for k in CORE if k.op == space.ONE_SHOT)])
def test_where_each_gpu_has_a_process_of_its_own(kernel):
    """With a process per GPU, a kernel reads peers' addresses from a table, which another kernel writes before."""
    member = next(members.members(kernel))
    (*landing, told, report), code = ptx_of(dataclasses.replace(member.case, processes=member.case.devices))
    *_, of_the_first, of_the_second = (".version" + part for part in code.split(".version"))
    # Landing buffers of parts, and results that peers write.
    places = (kernel.op in space.SUMS) + (kernel.op == space.SPREAD)
    # XLA may merge two equal kernels.
    assert {kernel.name for kernel in landing} == ({"overlap_landing_place"} if places else set())
    assert len(landing) <= places
    assert told.name == "overlap_tell_addresses" and told.spills == 0 and "trap" not in of_the_first
    assert members.faults(member, report, of_the_second) == [] and "@differ trap" in of_the_second


# --- Other kernels and forms ------------------------------------------------------------------------------------------

ROWS: list[Any] = []


def row(label: str, case: Case, *, slow: bool = False, **expected: Any) -> None:
    """Adds a row: what is assembled, and what is expected of the last kernel.

    name: of the kernel. words, not_words: in the PTX. smem: the bytes, or the least and the most. full: whether each
    core has one CTA. spills: the most bytes that the kernel may spill. every: that no kernel before it spills, too.
    """
    ROWS.append(pytest.param(case, expected, id=label, marks=[pytest.mark.slow] if slow else []))


def announced(case: Case, transport: Any = "") -> int:
    """Returns the shared memory that `limits` announces for a configuration."""
    fields = {field.name for field in dataclasses.fields(overlap.Config)}
    config = overlap.Config(**{name: value for name, value in case.config.items() if name in fields})
    return limits.smem_bytes(config, case.config.get("out", assembly.dtype_of(case.dtype)), transport)


LADDER, GATHER, SHAPE = (4096, 8192, 4096), "all_gather_lhs_matmul", (1024, 4096, 4096)
for rung in hopper_lessons.RUNGS:
    single = rung.name in ("basic", "pipelined", "warp_specialized", "tiled_epilogue")
    row(f"rung {rung.name}", Case("ladder", 1, LADDER, config={"rung": rung.name}),
        slow=rung is not hopper_lessons.RUNGS[-1], name=f"ladder_{rung.name}", full=not single)  # fmt: skip
for rung in blackwell_lessons.RUNGS:
    pair = rung.name in ("collective_mma", "persistent", "dedicated_epilogue", "grid_tiling")
    # The arrival after a product of two CTAs counts in both CTAs. A copy by one CTA counts at the leader's barrier.
    of_pairs, of_one = (
        ("tcgen05.mma.cta_group::2", "multicast::cluster", "complete_tx::bytes.cta_group::2"),
        ("tcgen05.mma.cta_group::1",),
    )
    row(f"Blackwell rung {rung.name}", Case("ladder", 1, LADDER, "f16", "b200", {"rung": rung.name}),
        slow=rung is not blackwell_lessons.RUNGS[-1], name=f"blackwell_ladder_{rung.name}",
        full=pair and rung.name != "collective_mma", words=of_pairs if pair else of_one,
        not_words=("wgmma", *(of_one if pair else of_pairs)))  # fmt: skip
row("Blackwell rung for B300", Case("ladder", 1, LADDER, "bf16", "b300", {"rung": "grid_tiling"}), slow=True)

for number, (kernel, target, devices) in enumerate((
    ("all_gather_with_handshake", "b200", 4), ("halo_exchange", "h200", 2), ("all_gather", "h200", 4),
    ("all_gather_with_handshake", "h200", 4), ("halo_exchange", "b200", 4), ("halo_exchange", "h200", 1),
)):  # fmt: skip
    row(f"example {kernel} on {devices} {target}",
        Case(f"tests.ops.primitive_cases:{kernel}", devices, (64, 1024, 0), "f32", target),
        name=kernel.removesuffix("_with_handshake"), slow=number > 1)  # fmt: skip

for group, given in (
    ("cta_group::2", dict(layout="nt", stages=6, cluster=2, epilogue="all", out="float32")),
    ("cta_group::1", dict(layout="nt", stages=5)), ("cta_group::1", dict(layout="tn", stages=3, batch=[3])),
):  # fmt: skip
    sizes = {"tile_m": 128, "tile_n": 128, "stages": given["stages"], "cluster": given.get("cluster", 1)}
    least = blackwell_limits.smem_bytes(overlap.Config(**sizes), given.get("out", "bfloat16"), block_scaled=True)
    row(f"block scales {group} {given['layout']}",
        Case("matmul", 1, (4096,) * 3, "float8_e4m3fn", "b200", {**sizes, **given, "block_scales": True}),
        slow="cluster" not in given, smem=(least, least + RESERVED_BYTES),
        words=(f"tcgen05.mma.{group}.kind::mxf8f6f4.block_scale.scale_vec::1X",))  # fmt: skip
row("gathered block scales", slow=True, words=("block_scale",), case=Case(
    GATHER, 4, SHAPE, "float8_e4m3fn", "b200", {"layout": "nt", "out": "bfloat16", "block_scales": True}, processes=4,
))  # fmt: skip

for number, (name, target, spills) in enumerate((
    # With more columns at a time, softplus spills 80 bytes and the exact GELU 1612.
    ("capturing", "h200", 0), ("softplus", "b200", 0), ("exact_gelu", "b200", 64), ("exact_gelu", "h200", 64),
    # `every_operation` captures too many values; no real program has this many.
    ("capturing", "b200", 64), ("every_operation", "h200", 2**20),
)):  # fmt: skip
    row(f"activation {name} on {target}",
        Case("tests.ops.activation_cases:assembled", 1, (4096, 8192, 4096), "bf16", target, {"activation": name}),
        slow=number > 1, spills=spills)  # fmt: skip
IN_TURN, SWAPPED = {"schedule": "pingpong"}, {"swap_operands": True}
for number, (dtype, config) in enumerate((
    ("bf16", dict(tile_m=128, tile_n=256, stages=4, gated=True)),
    ("bf16", dict(tile_m=160, tile_n=128, stages=5, **IN_TURN, **SWAPPED)),
    ("bf16", dict(tile_m=128, tile_n=128, stages=6, contracts=True, **IN_TURN)),
    # What is chosen for the gradient of x in a gated product of Qwen3-30B's sizes.
    ("bf16", dict(tile_m=160, tile_n=128, stages=5, pairs=True, transpose_rhs=True, **IN_TURN, **SWAPPED)),
    ("bf16", dict(tile_m=128, tile_n=256, stages=4, contracts=True)),
    ("float8_e4m3fn", dict(tile_m=128, tile_n=256, stages=4, transpose_rhs=True)),
    ("bf16", dict(tile_m=128, tile_n=128, stages=6, transpose_rhs=True, **IN_TURN)),
    ("f16", dict(tile_m=256, tile_n=128, stages=4, contracts=True)),
    ("bf16", dict(tile_m=160, tile_n=256, stages=3, **SWAPPED)),
)):  # fmt: skip
    row(f"groups {dtype} {config}", Case("grouped_matmul", 1, (65536, 1544, 2048), dtype, config=config),
        slow=number > 3)  # fmt: skip
for number, (dtype, config) in enumerate((
    ("bf16", dict(tile_n=256, stages=4, gated=True)),
    ("bf16", dict(tile_n=128, stages=6, contracts=True)),
    ("float8_e4m3fn", dict(tile_n=256, stages=4, transpose_rhs=True)),
    ("f16", dict(tile_n=256, stages=4, contracts=True)),
    ("bf16", dict(tile_n=64, stages=8)),
)):  # fmt: skip
    row(f"groups on Blackwell {dtype} {config}", slow=number > 1, words=("tcgen05.mma.cta_group::1",),
        case=Case("grouped_matmul", 1, (65536, 1544, 2048), dtype, "b200", {"tile_m": 128, **config}),
        not_words=("wgmma",))  # fmt: skip
# Epilogues with several results (`hooks.SeveralResults`): the largest tiles within the limits, on each architecture.
LESS = jax.__version_info__ < (0, 12)
for number, (through, target, config) in enumerate((
    ("values", "h200", dict(tile_m=128, tile_n=256 if LESS else 128, stages=3)),
    ("cotangent", "h200", dict(tile_m=128, tile_n=128, stages=5)),
    ("cotangent", "b200", dict(tile_m=128, tile_n=128, stages=5)),
    ("values", "b200", dict(tile_m=128, tile_n=256, stages=3)),
    ("cotangent", "h200", dict(tile_m=64, tile_n=128, stages=6, **IN_TURN)),
    ("values", "h200", dict(tile_m=64, tile_n=128, stages=5, **IN_TURN)),
    ("cotangent", "h200", dict(tile_m=64, tile_n=256, stages=4)),
    ("cotangent", "b200", dict(tile_m=128, tile_n=64, stages=6)),
)):  # fmt: skip
    case = Case("grouped_matmul", 1, (65536, 768, 2048), "bf16", target,
                config | {"through": through, "transpose_rhs": through == "cotangent"})  # fmt: skip
    row(f"groups, {through} on {target} {config}", case, slow=number > 2, full=False)
# The loss without logits: its forward kernel, and with "cotangent" also both of the backward pass, by chunks.
HEAD = (8192, 131072, 4096)
LOSS = {"name": "overlap_linear_cross_entropy"}
for number, (target, dtype, config) in enumerate((
    ("h200", "bf16", dict(cotangent=True, cap=True, transposed=True)), ("b200", "bf16", dict(cotangent=True)),
    ("h200", "bf16", dict(cotangent=True, cap=True, transposed=True, chunk=16384)),
    ("h200", "f16", dict(cotangent=True, chunk=16384)), ("b200", "bf16", dict(cotangent=True, chunk=16384)),
    ("h200", "f16", dict(cotangent=True)), ("b200", "bf16", dict(cotangent=True, cap=True, transposed=True)),
    ("b200", "bf16", dict(cotangent=True, cap=True, transposed=True, chunk=16384)),
    ("h200", "bf16", dict(cap=True)), ("h200", "bf16", dict(tile_m=64, tile_n=256, stages=5, **IN_TURN)),
    ("h200", "bf16", dict(tile_m=256, tile_n=128, stages=4)), ("b200", "bf16", dict(cap=True)),
)):  # fmt: skip
    case = Case("linear_cross_entropy", 1 if number else 4, HEAD, dtype, target, config)
    row(f"loss on {target} {dtype} {config}", case, slow=number > 2, every=True, **LOSS)
# Several of these CTAs run on a core, and none waits for another one.
for number, (kernel, target, features, processes) in enumerate((
    ("added", "h200", 2880, 2), ("copied", "h200", 2048, 1), ("products", "b200", 2880, 1), ("added", "h200", 2048, 1),
    ("products", "h200", 2880, 1), ("added", "b200", 7168, 1), ("copied", "h200", 2880, 2),
    ("products", "h200", 16384, 2),
)):  # fmt: skip
    case = Case("expert_rows", 2, (8192, features, 8), "bf16", target, {"kernel": kernel}, processes=processes)
    row(f"rows {kernel} of {features} on {target}, {processes}", case, slow=number > 2, full=False,
        name="overlap_products_of_rows" if kernel == "products" else f"overlap_{kernel}_rows", smem=(0, 112 << 10),
        **{"words" if processes > 1 else "not_words": ("@differ trap",)})  # fmt: skip
# All kernels of a layer whose tokens arrive while they are multiplied.
for number, (target, shape, processes) in enumerate((
    ("h200", (8192, 2048, 768, 128, 8), 1), ("b200", (8192, 2048, 768, 128, 8), 1),
    ("h200", (4096, 7168, 2048, 64, 6), 2), ("b200", (4096, 7168, 2048, 64, 6), 2),
)):  # fmt: skip
    case = Case("expert_layer", 4, shape, "bf16", target, processes=processes)
    row(f"experts on {target}, {shape}", case, slow=number > 1, every=True, full=False, name="overlap_grouped_matmul")
# With jax 0.12 (`KernelReport.ignores_setmaxnreg`) a gated kernel with all vectors may spill.
VECTORS = {"epilogue": "all"} if jax.__version_info__ < (0, 12) else {}
row("gated", Case(GATHER, 2, (4096, 14336, 8192), "bf16", config={"gated": True, **VECTORS}))
row("gated by a pair on Blackwell", slow=True, words=("tcgen05.mma.cta_group::2",), case=Case(
    GATHER, 2, (4096, 14336, 8192), "bf16", "b200",
    {"gated": True, "epilogue": "all", "tile_m": 128, "tile_n": 256, "stages": 4, "cluster": 2}))  # fmt: skip
row("gradient of two", Case("gradient", 2, (4096, 14336, 8192), "bf16", processes=2),
    name="overlap_matmul_reduce_scatter_m")  # fmt: skip
row("gradient of two on Blackwell", Case("gradient", 2, (4096, 14336, 8192), "bf16", "b200"), slow=True,
    name="overlap_matmul_reduce_scatter_m")  # fmt: skip

SIDES = {"widths": [1024, 256, 256], "epilogue": "all", "return_gathered": True, "joined": True, "stream_k": 6}
JOINED = "overlap_all_gather_lhs_matmul_joined"
row("joined, several sides, a batch", Case(GATHER, 4, (3, 1024, 4096), "bf16", config=SIDES | {
    "tile_m": 64, "tile_n": 128, "batch": [2, 2]}), name=JOINED)  # fmt: skip
row("joined, float8", Case(GATHER, 8, (16, 1024, 4096), "float8_e4m3fn", config=SIDES | {
    "tile_m": 64, "layout": "nt", "out": "bfloat16"}), slow=True, name=JOINED)  # fmt: skip
MANY = {"widths": [4096, 1024, 1024], "epilogue": "all", "return_gathered": True, "batch": [2, 2]}
for transport in ("ring", "pull"):
    row(f"{transport}, several sides", Case(GATHER, 4, SHAPE, "bf16", config=MANY | {
        "transport": transport, "stream_k": 2}), slow=True)  # fmt: skip
    row(f"{transport}, several transposed sides", Case(GATHER, 4, (1000, 4096, 4104), "bf16", config=MANY | {
        "transport": transport, "layout": "nt"}), slow=True)  # fmt: skip
    row(f"{transport}, several sides of float8", Case(GATHER, 4, SHAPE, "float8_e4m3fn", config=MANY | {
        "transport": transport, "stream_k": 2, "layout": "nt", "out": "bfloat16"}), slow=True)  # fmt: skip
    row(f"{transport}, reversed axes of reversed devices", Case(GATHER, mesh={"a": 2, "b": 3}, config={
        "transport": transport, "reverse": True}), slow=True)  # fmt: skip
for devices, m, config in (
    (4, 1000, {"tile_n": 128, "stages": 6}), (2, 384, {"stream_k": 4}),
    (4, 1024, {"tile_m": 64, "stages": 5}), (8, 1024, {"stages": 4}), (3, 384, {"stream_k": 4}),
):  # fmt: skip
    case = Case(GATHER, devices, (m, 4096 if m > 384 else 1024, 4096), config=config | {"transport": "ring"})
    row(f"ring {devices} {config}", case, smem=announced(case, "ring"), slow=m != 1000)
for devices, processes, op, config in (
    (4, 4, "matmul_reduce_scatter_n", {"tile_m": 64, "tile_n": 128, "stages": 4}),
    (8, 1, "matmul_reduce_scatter", {"tile_m": 128, "tile_n": 128, "stages": 4, "epilogue": "all"}),
):
    case = Case("summed", devices, (4096, 4096, 2048), processes=processes,
                config={"op": op, "out": "bfloat16", "transport": "ring", **config})  # fmt: skip
    # The ring uses only one of the chunk buffers that a configuration asks for.
    row(f"sums by ring {op} {devices}", case, smem=(0, announced(case, "push")), slow=processes == 1)

TOPOLOGIES = {
    "2 hosts of 4": ("b200", {"hosts": 2, "mesh": {"data": 2, "x": 4}}),
    "2 x 4": ("b200", {"mesh": {"data": 2, "x": 4}}),
    "a process per GPU": ("b200", {"processes": 8, "devices": 8}),
    "half a host of 2x8": ("h200", {"hosts": 2, "mesh": {"data": 4, "x": 4}}),
    "the major axis": ("h200", {"mesh": {"x": 4, "data": 2}}),
    "16 devices": ("h200", {"mesh": {"x": 16}}),
}
for label, (target, topology) in TOPOLOGIES.items():
    case = Case(GATHER, target=target, config={"tile_m": 128, "tile_n": 256, "stages": 3}, **topology)
    row(f"{label} {target}", case, slow=label != "2 hosts of 4")

row("chosen for B300", Case("matmul", 1, LADDER, target="b300"), slow=True)
for devices, op in ((1, "matmul"), (2, GATHER), (3, GATHER), (8, GATHER)):
    row(f"chosen {devices}", Case(op, devices, SHAPE, "bf16"), slow=True)
for config in ({"tile_n": 192, "stages": 3}, {"chunk_bytes": 4096, "chunk_buffers": 4, "order_minor": "n"}):
    case = Case(GATHER, 4, (1024, 3072, 4096), config=config)
    row(f"configured {config}", case, slow=True, smem=announced(case, "pull"))
for name in ("bias", "addend", "scales", "relu"):  # The classes have none, or all at once.
    row(f"epilogue {name}", Case("matmul", 1, (1024, 1536, 2048), config={"epilogue": name}), slow=True)
for shape, dtype, config in (
    ((4097, 4104, 4104), "f16", {}), ((4104, 4104, 4097), "bf16", {"layout": "tn"}), ((1, 8, 8), "f16", {}),
    ((4097, 4104, 4104), "f16", {"layout": "nt", "batch": [3]}), ((16, 8192, 8192), "bf16", {"out": "float32"}),
    ((100, 264, 144), "float8_e4m3fn", {"layout": "nt", "out": "bfloat16", "epilogue": "all"}),
):  # fmt: skip
    row(f"ragged {shape} {dtype} {config}", Case("matmul", 1, shape, dtype, config=config), slow=True)
for shape in ((1001, 4096, 512), (1001, 4096, 8 * 1009), (1000, 3000, 4104)):
    row(f"uneven {shape}", Case(GATHER, 3, shape), slow=True)


@pytest.mark.parametrize(("case", "expected"), ROWS)
def test_other_kernels(case, expected):
    (*before, report), code = ptx_of(case)
    assert not expected.get("every") or [each.spills for each in before] == [0] * len(before)
    faults = [fault for fault, good in members.checks_of(report, TARGETS[case.target]).items() if not good]
    if "full" in expected:  # Some lessons of the ladder have a CTA for each tile.
        faults = [fault for fault in faults if not fault.startswith("a grid of")]
        assert not expected["full"] or math.prod(report.grid) == TARGETS[case.target].core_count
    assert faults == [] or 0 < report.spills <= expected.get("spills", 0)
    assert report.architecture == TARGETS[case.target].architecture
    assert report.name == expected.get("name", report.name)
    least, most = (smem, smem) if isinstance(smem := expected.get("smem", (0, 2**20)), int) else smem
    assert least <= report.shared_memory_bytes <= most
    assert [word for word in expected.get("words", ()) if word not in code] == []
    assert [word for word in expected.get("not_words", ()) if word in code] == []


# --- That the checks can fail -----------------------------------------------------------------------------------------


def wgmma_probe(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """Makes a kernel of one wgmma tile by one warpgroup."""
    m, n, k = case.shape
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
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    scratch = [plgpu.SMEM(shape, jnp.float16, transforms=transforms) for shape in ((m, k), (k, n), (m, n))]
    kernel = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((m, n), jnp.float16), kernel_name="wgmma_probe",
        scratch_types=[*scratch, plgpu.Barrier(num_arrivals=2)],
    )  # fmt: skip
    return kernel, tuple(assembly.struct(mesh, shape, case.dtype) for shape in ((m, k), (k, n)))


def dies(case: Case, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    del case, mesh
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


PROBE = Case("tests.assembly.test_assembled:wgmma_probe", 1, (128, 128, 64))


@pytest.mark.one_jax
def test_the_figures_of_a_known_kernel():
    (report,) = assemble_case(PROBE)
    assert (report.name, report.architecture, report.spills) == ("wgmma_probe", "sm_90a", 0)
    # At least 64 accumulator registers per thread; three tiles and one 8-byte barrier.
    assert 64 < report.registers <= 255
    assert report.shared_memory_bytes == 2 * (128 * 64 + 64 * 128 + 128 * 128) + 8
    assert (report.grid, report.threads) == ((1, 1, 1), (128, 1, 1))


@pytest.mark.one_jax
def test_spills_are_seen():
    # 192 x 256 f32 accumulators in one warpgroup need 384 registers per thread; the maximum is 255.
    (report,) = assemble_case(dataclasses.replace(PROBE, shape=(192, 256, 64)))
    faults = [fault for fault, good in members.checks_of(report, TARGETS["h200"]).items() if not good]
    assert any(re.fullmatch(r"[1-9]\d* bytes of spills", fault) for fault in faults)


@pytest.mark.slow
def test_xla_finds_a_kernel_that_was_assembled_ahead():
    with pytest.raises(RuntimeError, match="1 Mosaic kernels were lowered, and 0 assembled"):
        assemble_case(Case("tests.assembly.traced_cases:assembled_ahead", shape=(256, 512, 384)))


def test_a_child_that_dies_is_replaced(tmp_path):
    assemble = Assembler().assemble  # Not the other tests' child, whose CPU seconds would count here.
    first = assemble(PROBE)
    with pytest.raises(RuntimeError, match=r"ended(.|\n)*last words"):
        assemble(Case("tests.assembly.test_assembled:dies"))
    # Mosaic assembles equal kernels once in a process; the child makes each case a new one.
    assert [assemble(PROBE), assemble(PROBE)] == [first, first]
    assert assemble(PROBE, ptx=str(tmp_path / "ptx")) == first
    assert "wgmma_probe" in (tmp_path / "ptx").read_text()


@pytest.mark.one_jax
def test_a_config_that_does_not_fit_is_refused_before_it_is_assembled():
    with pytest.raises(RuntimeError, match="shared memory"):
        assemble_case(Case(GATHER, 4, SHAPE, config={"stages": 5}))


@pytest.mark.one_jax
def test_too_few_registers_are_noticed():
    kernel = next(kernel for kernel in CORE if kernel.tile_m * kernel.tile_n == 2**15 and not kernel.swapped)
    _, ptx = ptx_of(next(members.members(kernel)).case)
    stated, accumulator = registers.stated(ptx), 128
    assert registers.suffices(ptx, stated)
    assert not registers.suffices(ptx, Registers(accumulator, stated.transfer))


@pytest.mark.slow
def test_the_fewest_registers_are_found():
    kernel = next(kernel for kernel in EVERY if kernel.tile[:2] == (128, 256) and not kernel.epilogue)
    _, ptx = ptx_of(next(members.members(kernel)).case)
    needed, accumulator = registers.needed(ptx), 128
    assert needed is not None and accumulator < needed.compute < registers.stated(ptx).compute
    assert not registers.suffices(ptx, Registers(needed.compute - registers.STEP, needed.transfer))
    assert not registers.leaves(ptx, Registers(registers.stated(ptx).compute - accumulator, 0))
