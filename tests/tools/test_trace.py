"""`python -m overlap trace`: the marks in kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

import overlap
from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.cli import trace_files
from overlap.emulation import emulate
from overlap.kernels.target import Target, emulating
from overlap.primitives import marks
from overlap.primitives.marks import ROWS, WORDS, Work
from overlap.tuning import trace
from overlap.tuning.programs import draw_operands, mesh_of
from tests.assembly import assembly
from tests.assembly.assembly import Case, assemble_case

CORES = 3
PRODUCT = Problem("matmul", 512, 256, 128, "bfloat16", "bfloat16")
GATHER = Problem("all_gather_lhs_matmul", 256, 256, 128, "bfloat16", "bfloat16", devices=2)
SCATTER = Problem("matmul_reduce_scatter", 512, 256, 128, "bfloat16", "bfloat16", devices=2)
ONE_SHOT = Problem("matmul_all_reduce", 64, 256, 128, "bfloat16", "bfloat16", devices=2)
CASES = {
    "product": (PRODUCT, {}),
    "pingpong": (PRODUCT, {"schedule": "pingpong", "tile_m": 128}),
    "gather": (GATHER, {}),
    "scatter": (SCATTER, {}),
    "one shot": (ONE_SHOT, {"one_shot": True, "tile_m": 64}),
    "gathered weights": (dataclasses.replace(GATHER, op="all_gather_rhs_matmul_k"), {}),
    "joined": (dataclasses.replace(GATHER, m=16), {"joined": True, "tile_m": 64, "stages": 2}),
}
EACH = [pytest.param(case, marks=[pytest.mark.slow] * (case in ("pingpong", "one shot"))) for case in CASES]


@functools.cache
def recorded(case, capacity=256):
    """Returns a trace of one emulated call, and the emulator's own events of the launch with marks."""
    problem, config = CASES[case]
    mesh = mesh_of(jax.devices()[: problem.devices])
    with emulate(cores=CORES, completion="random", scheduler="round_robin", record=True) as run:
        made = trace.record(
            problem, draw_operands(problem, mesh, 0), mesh, overlap.Config(tile_n=128, **config), capacity,
            emulated=True,
        )  # fmt: skip
    run.check()
    # The previous launch is the call without marks.
    launch = max(event.launch for event in run.events)
    return made, [event for event in run.events if event.launch == launch]


def test_each_device_of_each_kernel_has_a_process_of_its_own(tmp_path):
    made = recorded("gather")[0].timelines[0]
    trace_files.write_trace([made, made], tmp_path / "two.json")
    events = json.loads((tmp_path / "two.json").read_text())["traceEvents"]
    named = [e["pid"] for e in events if e["name"] == "process_name"]
    assert len(named) == len(set(named)) == 2 * made.devices


def by_lane(spans):
    lanes = defaultdict(list)
    for span in spans:
        lanes[span.device, span.cta, span.role].append(span)
    return lanes


# --- Marks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", EACH)
def test_marks_say_when_the_emulator_saw_it(case):
    problem, _ = CASES[case]
    made, events = recorded(case)
    (timeline,) = made.timelines
    assert made.same_bits
    assert (timeline.unit, timeline.devices, timeline.missing) == ("steps", problem.devices, 0)
    lanes = by_lane(timeline.spans)
    for spans in lanes.values():
        for before, after in itertools.pairwise(spans):
            assert before.start <= before.end == after.start
    # Every product lies in a span of its own warpgroup that records a product.
    products = [event for event in events if event.kind == "wgmma"]
    assert products
    multiplied = {lane: [s for s in spans if s.work == Work.MULTIPLY] for lane, spans in lanes.items()}
    for event in products:
        of_warpgroup = multiplied[event.device, event.cta, f"compute {event.thread.removeprefix('wg')}"]
        step = event.start - timeline.origin
        assert any(span.start <= step <= span.end for span in of_warpgroup), event
    # Each device loads each tile and then multiplies it once (each warpgroup its half, or its own tiles).
    for device in range(problem.devices):
        tiles = [s.number for lane, spans in multiplied.items() for s in spans if lane[0] == device]
        each = 1 if case == "pingpong" else 2
        assert sorted(tiles) == sorted([*range(max(tiles) + 1)] * each), (device, tiles)
    for (device, cta, role), spans in multiplied.items():
        # A tile with an addend has two loads: the last such span comes first here.
        backwards = reversed(lanes[device, cta, "producer"])
        loaded = {s.number: s.start for s in backwards if s.work == Work.LOAD}
        for span in spans if role.startswith("compute") else ():
            assert loaded[span.number] <= span.start


_COMPUTE = {Work.AWAIT_OPERANDS, Work.MULTIPLY, Work.STORE}
# Everything that each role does, including its waits.
WORK = {
    "product": {"compute": _COMPUTE, "producer": {Work.LOAD}},
    "gather": {
        "compute": _COMPUTE, "producer": {Work.AWAIT_ROWS, Work.LOAD},
        "communicator": {Work.AWAIT_PEERS, Work.COPY, Work.LEAVE},
    },
    "scatter": {
        "compute": _COMPUTE, "producer": {Work.AWAIT_ROWS, Work.LOAD}, "forwarder": {Work.AWAIT_TILE, Work.FORWARD},
        "communicator": {Work.AWAIT_PEERS, Work.AWAIT_TILE, Work.COPY, Work.LEAVE},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", WORK)
def test_each_role_says_all_that_it_does(case):
    found = defaultdict(set)
    for span in recorded(case)[0].timelines[0].spans:
        found[span.role.split()[0]].add(span.work)
    assert found == WORK[case]


@pytest.mark.parametrize("case", ["gather", "scatter", "joined", "gathered weights"])
def test_after_a_wait_for_rows_the_producer_loads_them(case):
    """Also where the other operand is loaded before the wait ("joined"), or blocks between others ("weights")."""
    waits = []
    for (_, _, role), spans in by_lane(recorded(case)[0].timelines[0].spans).items():
        works = list(itertools.zip_longest([None, *spans], spans, spans[1:]))
        for before, wait, after in works if role == "producer" else ():
            if wait is not None and wait.work == Work.AWAIT_ROWS:
                waits.append(wait)
                assert after is not None and (after.work, after.number) == (Work.LOAD, wait.number)
                if case == "gathered weights":  # One list of tiles, each over all of k.
                    assert before is not None and before.work == Work.LOAD
    assert sum(wait.end - wait.start for wait in waits) > 0
    if case == "gather":
        assert sum(wait.shard == 1 for wait in waits) == 2 * 4  # The peer's four tiles, on both devices.


def test_the_comparison_can_fail(monkeypatch):
    """Marks that come too late, after the products, are detected."""
    now = marks.now
    monkeypatch.setattr(
        marks, "now", lambda work, *rest, **more: None if work == Work.MULTIPLY else now(work, *rest, **more)
    )
    recorded.cache_clear()
    with pytest.raises(AssertionError):
        test_marks_say_when_the_emulator_saw_it("product")
    recorded.cache_clear()


def test_a_role_with_more_marks_than_room_says_so():
    made, _ = recorded("product", capacity=4)
    (timeline,) = made.timelines
    assert made.same_bits
    assert timeline.missing > 0
    # The marks that had room equal those of a trace with room for all.
    whole = by_lane(recorded("product")[0].timelines[0].spans)
    assert by_lane(timeline.spans) == {lane: spans[:3] for lane, spans in whole.items()}


def test_on_blackwell():
    with emulating("blackwell"):
        made, _ = recorded.__wrapped__("gather")
    (timeline,) = made.timelines
    assert made.same_bits
    assert {s.role for s in timeline.spans} == {"epilogue", "producer", "communicator", "multiplier"}
    for device in range(2):
        of_device = [s for s in timeline.spans if (s.device, s.role) == (device, "multiplier")]
        tiles = [s.number for s in of_device if s.work == Work.MULTIPLY]
        assert sorted(tiles) == list(range(max(tiles) + 1))


def test_a_kernel_that_is_not_recorded_is_as_if_there_were_no_marks(monkeypatch):
    mesh = mesh_of(jax.devices()[:2])
    shapes = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 512), jnp.bfloat16)

    def call(lhs, rhs):
        return overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused")

    def traced(program):
        # The program's text, without addresses of Python objects.
        return re.sub(r"\d{9,}", "", str(program.trace(*shapes).jaxpr))

    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    as_it_is = traced(trace.call_program(GATHER, call, mesh))
    with_marks = traced(trace.program(GATHER, call, mesh, 16)[0])
    monkeypatch.setattr(marks, "now", lambda *args, **keywords: None)
    monkeypatch.setattr(marks, "role", lambda *args, **keywords: contextlib.nullcontext())
    assert "wgmma" in as_it_is
    assert traced(trace.call_program(GATHER, call, mesh)) == as_it_is
    # The control: with marks it is another kernel, with one more result.
    assert f"132,{ROWS},18,{WORDS}" in with_marks
    assert f"132,{ROWS},18,{WORDS}" not in as_it_is


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(
    ("target", "op", "config"),
    [
        ("h200", "all_gather_lhs_matmul", {}),
        pytest.param("h200", "matmul", {"schedule": "pingpong", "tile_m": 128, "tile_n": 128}, marks=pytest.mark.slow),
        pytest.param("b200", "matmul_reduce_scatter", {}, marks=pytest.mark.slow),
        ("h200", None, {}),
    ],
)
def test_assembled(target, op, config):
    what, config = ("clocks", {}) if op is None else ("traced", {"of": op, **config})
    devices = 1 if op == "matmul" else 4
    for report in assemble_case(
        Case(f"tests.assembly.traced_cases:{what}", devices, (4096, 4096, 4096), "bf16", target, config)
    ):
        assert report.spill_store_bytes == report.spill_load_bytes == 0
        assert not [warning for warning in report.warnings if "wgmma" in warning]
