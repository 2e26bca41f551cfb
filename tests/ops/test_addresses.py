"""Tests how a kernel learns its peers' addresses when each GPU has its own process: what is lowered and assembled.

Only GPUs show that the results are right: run tests/multi_gpu/ under mpirun.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import core
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.collectives.reduce import blocks_kernel, one_shot_kernel
from overlap.primitives import addresses
from tests import oracle
from tests.assembly import assembly
from tests.ops.contract import H200
from tests.ops.mesh_cases import layout
from tests.ops.test_meshes import PERMUTED, lowered

COLUMNS, ROWS = P(None, "x"), P("x", None)
assembled = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)


@pytest.fixture
def a_process_each(monkeypatch):
    monkeypatch.setattr(core, "_is_known_multihost_mesh", lambda mesh: mesh is not None and mesh.size > 1)


def text_of(call, mesh, specs, shapes):
    """Lowers a call over the whole mesh for CUDA, and returns the text of the program."""
    mapped = oracle.on_mesh(mesh, call, in_specs=specs[:2], out_specs=specs[2])
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return mapped.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def lowered_on(devices=4, order=None, **changes):
    case = layout("x", order, x=devices)
    return lowered(case, case.mesh(), **changes)


def calls(text):
    """Returns (name of the result, names of the operands, the rest) of each Mosaic GPU kernel, in order."""
    found = re.findall(r"(%\d+)(?::\d+)? = stablehlo.custom_call @mosaic_gpu_v2\(([^)]*)\)(.*)", text)
    return [(result, operands.split(", "), rest) for result, operands, rest in found]


CASES = {
    "rows": ({}, 0),
    "few rows, permuted devices": (dict(m=16, order=PERMUTED), 0),
    "weights along k": (dict(name="weights k"), 1),
    "weights along n": (dict(name="weights n"), 1),
}


@pytest.mark.parametrize(("changes", "peers_read"), CASES.values(), ids=CASES.keys())
def test_only_what_the_peers_read_and_the_flags_talk_to_peers(changes, peers_read, a_process_each):
    (flags, tells, first), (_, operands, second) = calls(lowered_on(**changes))
    assert tells == [operands[peers_read]] and operands[-1] == flags
    assert 'symmetric_memory_parameters = "1,1"' in first and 'xla_replica_ids = "0,1,2,3"' in first
    # Without this, XLA would merge two calls that look the same, or move one out of a loop.
    assert "has_side_effect = true" in first
    for word in ("symmetric_memory_parameters", "memory_spaces", "xla_replica_ids"):
        assert word not in second
    assert "uses_xla_collective_metadata = false" in second and "skip_device_barrier = true" in first


def test_peers_read_the_scales_of_rows_too(a_process_each):
    """The row scales come after both right operands."""
    (_, tells, _), (_, operands, _) = calls(lowered_on(m=16, widths=(256, 256), extras=("lhs_scale",)))
    assert tells == [operands[0], operands[3]]


def test_the_ring_and_one_process_leave_it_to_xla(monkeypatch):
    ((_, operands, only),) = calls(lowered_on())
    assert len(operands) == 3 and 'xla_replica_ids = "0,1,2,3"' in only and "symmetric_memory" not in only
    monkeypatch.setattr(core, "_is_known_multihost_mesh", lambda mesh: True)
    ((_, operands, only),) = calls(lowered_on(name="ring"))
    assert 'symmetric_memory_parameters = "1,1,1,1,1,1"' in only and "skip_device_barrier = true" in only


def test_two_calls_with_the_same_operand_have_flags_of_their_own(a_process_each):
    def twice(a, b):
        one = overlap.all_gather_lhs_matmul(a, b, "x", implementation="fused")
        return one + overlap.all_gather_lhs_matmul(a, b * 2, "x", implementation="fused")

    text = text_of(twice, layout("x", x=4).mesh(), (ROWS, COLUMNS, COLUMNS), ((4096, 512), (512, 2048)))
    # Both call one function. Its first kernel has a side effect, so XLA runs that kernel once for each call.
    (flags, _, first), (_, operands, _) = calls(text)
    assert text.count("call @overlap_operation(") == 2
    assert operands[-1] == flags and "has_side_effect = true" in first


@pytest.mark.parametrize("one_shot", [False, True])
def test_where_peers_write_is_an_operand_and_a_result_has_memory_of_its_own(one_shot, a_process_each, monkeypatch):
    for module in (blocks_kernel, one_shot_kernel):
        monkeypatch.setattr(module, "lands_in_an_operand", lambda: True)
    config = overlap.Config(tile_n=128, one_shot=one_shot)

    def call(a, b):
        return overlap.matmul_all_reduce(a, b, "x", implementation="fused", config=config)

    text = text_of(call, layout("x", x=4).mesh(), (COLUMNS, ROWS, P(None, None)), ((1024, 512), (512, 256)))
    *places, (flags, tells, first), (_, operands, second) = calls(text)
    # After both matrices come the buffers in which parts land and, if results are sent too, the result. XLA may share
    # the landing buffers between two calls, but not results.
    assert [result for result, _, _ in places] == operands[2:-1] == tells[: len(places)]
    assert operands[-1] == flags and "has_side_effect = true" in first
    assert ["has_side_effect = true" in rest for _, _, rest in places] == ([False] if one_shot else [False, True])
    aliased = re.findall(r"output_tuple_indices = \[(\d+)\], operand_index = (\d+)", second)
    last = len(operands) - 1
    assert ("0", str(last - 1)) in aliased if not one_shot else all(operand == str(last) for _, operand in aliased)


def test_more_devices_than_the_table_has_room_for(a_process_each, monkeypatch):
    monkeypatch.setattr(addresses, "TABLE_FLAGS", 16)
    with pytest.raises(NotImplementedError, match=r'8 entries.* 4 devices needs 12.*"xla"'):
        lowered_on()


@assembled
def test_the_table_is_xlas_and_where_the_buffers_are(tmp_path):
    """The machine code of the first kernel has every entry of the table, and zeroes the flags behind the table."""
    case = assembly.Case("all_gather_lhs_matmul", 4, (1024, 1024, 512), processes=4)
    told, fused = assembly.assemble_case(case, ptx=str(tmp_path / "ptx"))
    assert told.name == "overlap_tell_addresses" and told.spills == fused.spills == 0 and told.grid == (1, 1, 1)
    code = (tmp_path / "ptx").read_text().split(".visible .entry")[1]
    loaded = {}
    for registers, offset in re.findall(
        r"ld\.global(?:\.v2)?\.b64 \s*\{?([^,\[\]}]*(?:, %\w+)?)\}?, \[%\w+\+?(\d*)\]", code
    ):
        for index, register in enumerate(registers.split(", ")):
            loaded[register.strip()] = int(offset or 0) + 8 * index
    stored = dict(re.findall(r"st\.global\.b64 \[%\w+\+(\d+)\], (%\w+);", code))
    parameters = {register for register, _ in re.findall(r"ld\.param\S* \s*(%\w+), \[(\S+)\]", code)}
    own = {int(place): register for place, register in stored.items() if 0 < int(place) < 32}
    assert sorted(own) == [8, 16] and set(own.values()) <= parameters
    rest = {int(place): loaded[register] for place, register in stored.items() if int(place) not in own}
    assert rest == {place: place for place in (0, *range(32, 32 + 2 * 4 * 8, 8))}
    zeroed = [int(offset) for offset in re.findall(r"st\.global\.b32 \[mine\+(\d+)\], 0;", code)]
    assert zeroed == list(range(4 * addresses.TABLE_FLAGS, 4096, 512))


@assembled
@pytest.mark.parametrize("m", [1024, pytest.param(16, marks=pytest.mark.slow)])
def test_xla_copies_what_is_gathered_and_nothing_else(m, tmp_path):
    """XLA copies neither weights nor result: operands come from outside the program, and the result leaves it."""
    case = assembly.Case("all_gather_lhs_matmul", 4, (m, 1024, 512), processes=4)
    assembly.assemble_case(case, hlo=str(tmp_path / "hlo"))
    program = (tmp_path / "hlo").read_text()
    program = program[program.index("ENTRY") :]
    copied = dict(re.findall(r"(%\S+) = (\S+?)\{\S* copy\(", program))
    assert list(copied.values()) == [f"f16[{m},512]"]
    ((operand,), (first, *_)) = (
        re.findall(r"%[\w.-]+", operands) for operands in re.findall(r" custom-call\(([^)]*)\)", program)
    )
    assert operand == first == next(iter(copied)), "both kernels must have the same buffer"
