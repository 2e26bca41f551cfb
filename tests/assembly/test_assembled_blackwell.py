"""Every kind of kernel of the Blackwell mainloop, assembled for B200 (sm_100a): no spills, memory as `limits` says."""

from __future__ import annotations

import dataclasses

import pytest

from tests.assembly import assembly, blackwell_space
from tests.assembly.assembly import Case

pytestmark = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
EVERY, CORE = blackwell_space.every(), blackwell_space.core()


@pytest.mark.parametrize(
    "kernel",
    [pytest.param(kernel, marks=[] if kernel in CORE else pytest.mark.slow) for kernel in EVERY],
    ids=str,
)
def test_it_assembles_without_spills(kernel, tmp_path):
    member, code = next(blackwell_space.members(kernel)), tmp_path / "kernel.ptx"
    (report,) = assembly.assemble_case(member.case, ptx=str(code))
    assert blackwell_space.faults(member, report, code.read_text()) == []


@pytest.mark.parametrize(
    "topology",
    [{"hosts": 2, "mesh": {"data": 2, "x": 4}}, {"mesh": {"data": 2, "x": 4}}, {"processes": 8, "devices": 8}],
    ids=["2 hosts of 4", "2 x 4", "a process per GPU"],
)
def test_other_topologies(topology):
    case = Case("all_gather_lhs_matmul", target="b200", config={"tile_m": 128, "tile_n": 256, "stages": 3}, **topology)
    *_, report = assembly.assemble_case(case)
    assert (report.architecture, report.spills) == ("sm_100a", 0)


def test_what_is_chosen_by_itself_assembles():
    case = Case("matmul", shape=(4096, 8192, 4096), target="b200")
    (report,) = assembly.assemble_case(case)
    assert (report.architecture, report.spills) == ("sm_100a", 0)
    (report,) = assembly.assemble_case(dataclasses.replace(case, target="b300"))
    assert (report.architecture, report.spills) == ("sm_103a", 0)
