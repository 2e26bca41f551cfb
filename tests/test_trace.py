"""`python -m overlap trace`: marks in kernels, the clocks of several GPUs, and the files that are written."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import itertools
import json
import re
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlap
from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.cli import main
from overlap.cli import trace as trace_command
from overlap.emulation import emulate, registers
from overlap.kernels.target import Target
from overlap.primitives import marks
from overlap.primitives.marks import ROWS, WORDS, Work
from overlap.tuning import clocks, trace
from overlap.tuning.clocks import Offset
from overlap.tuning.programs import draw_operands, mesh_of
from overlap.tuning.timeline import Span, Timeline, timeline
from tests import assembly
from tests.assembly import Case, assemble_case

CORES = 3
PRODUCT = Problem("matmul", 512, 384, 256, "bfloat16", "bfloat16")
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


@functools.cache
def recorded(case, capacity=256):
    """A trace of one emulated call, and the emulator's own events of the launch with marks."""
    problem, config = CASES[case]
    mesh = mesh_of(jax.devices()[: problem.devices])
    with emulate(cores=CORES, completion="random", scheduler="round_robin", record=True) as run:
        made = trace.record(
            problem, draw_operands(problem, mesh, 0), mesh, overlap.Config.of(tile_n=128, **config), capacity,
            emulated=True,
        )  # fmt: skip
    run.check()
    # The one before is the call without marks.
    launch = max(event.launch for event in run.events)
    return made, [event for event in run.events if event.launch == launch]


def numbers(timeline, device, role, work):
    return [s.number for s in timeline.spans if (s.device, s.role, s.work) == (device, role, work)]


@pytest.fixture(autouse=True)
def eight_devices():
    """The command asks for as many as it needs, unless they are in use already."""
    assert len(jax.devices()) == 8


def by_lane(spans):
    lanes = defaultdict(list)
    for span in spans:
        lanes[span.device, span.cta, span.role].append(span)
    return lanes


# --- Marks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
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
    # Every product lies in a span of that warpgroup's that says so.
    products = [event for event in events if event.kind == "wgmma"]
    assert products
    multiplied = {lane: [s for s in spans if s.work == Work.MULTIPLY] for lane, spans in lanes.items()}
    for event in products:
        of_warpgroup = multiplied[event.device, event.cta, f"compute {event.thread.removeprefix('wg')}"]
        step = event.start - timeline.origin
        assert any(span.start <= step <= span.end for span in of_warpgroup), event
    # Each device multiplies each tile once (each warpgroup its half, or its own ones), and loads it before that.
    for device in range(problem.devices):
        tiles = [s.number for lane, spans in multiplied.items() for s in spans if lane[0] == device]
        each = 1 if case == "pingpong" else 2
        assert sorted(tiles) == sorted([*range(max(tiles) + 1)] * each), (device, tiles)
    for (device, cta, role), spans in multiplied.items():
        # (A tile to which something is added is loaded for twice: the last span of it comes first here.)
        backwards = reversed(lanes[device, cta, "producer"])
        loaded = {s.number: s.start for s in backwards if s.work == Work.LOAD}
        for span in spans if role.startswith("compute") else ():
            assert loaded[span.number] <= span.start


_COMPUTE = {Work.AWAIT_OPERANDS, Work.MULTIPLY, Work.STORE}
# All that each role does: what it waits for as well.
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
    after_waits_the_producer_loads(recorded(case)[0].timelines[0])


def after_waits_the_producer_loads(timeline):
    """What it has waited for rows for, it then loads: the next mark says so."""
    for (_, _, role), spans in by_lane(timeline.spans).items():
        for before, after in itertools.zip_longest(spans, spans[1:]):
            if role == "producer" and before.work == Work.AWAIT_ROWS:
                assert after is not None and (after.work, after.number) == (Work.LOAD, before.number)


def test_where_the_other_operand_is_loaded_before_the_wait():
    (timeline,) = recorded("joined")[0].timelines
    assert [s for s in timeline.spans if s.work == Work.AWAIT_ROWS and s.end > s.start]
    after_waits_the_producer_loads(timeline)


def test_the_comparison_can_fail(monkeypatch):
    """Marks that come too late, after the products, are noticed."""
    now = marks.now
    monkeypatch.setattr(
        marks, "now", lambda work, *rest, **more: None if work == Work.MULTIPLY else now(work, *rest, **more)
    )
    recorded.cache_clear()
    with pytest.raises(AssertionError):
        test_marks_say_when_the_emulator_saw_it("product")
    recorded.cache_clear()


def test_all_chunks_are_copied_once():
    made, _ = recorded("gather")
    for device in range(2):
        carried = [
            s.number
            for s in made.timelines[0].spans
            if (s.device, s.role, s.work) == (device, "communicator", Work.COPY)
        ]
        # Chunk 0 stands for the first ones on their way as well.
        assert set(carried) == set(range(max(carried) + 1))
        assert sorted(n for n in carried if n) == list(range(1, max(carried) + 1))
        assert max(carried) > CORES


def test_gathered_weights_are_waited_for():
    made, _ = recorded("gathered weights")
    (timeline,) = made.timelines
    # One tile list, each tile over all k: it waits for the peer's blocks in the midst of its loads.
    for spans in (spans for (_, _, role), spans in by_lane(timeline.spans).items() if role == "producer"):
        works = [span.work for span in spans]
        assert Work.AWAIT_ROWS in works
        for before, wait, after in zip(spans[:-2], spans[1:-1], spans[2:], strict=True):
            if wait.work == Work.AWAIT_ROWS:
                assert (before.work, after.work) == (Work.LOAD, Work.LOAD)
                assert wait.number == after.number


def test_rows_are_waited_for_before_they_are_multiplied():
    made, _ = recorded("gather")
    peers = [s for s in made.timelines[0].spans if s.work == Work.AWAIT_ROWS and s.shard == 1]
    assert len(peers) == 2 * 4  # Of both devices, the four tiles of the peer's shard.
    assert sum(s.end - s.start for s in peers) > 0


def test_a_role_with_more_marks_than_room_says_so():
    made, _ = recorded("product", capacity=4)
    (timeline,) = made.timelines
    assert made.same_bits
    assert timeline.missing > 0
    # What had room is as it is in a trace that has room for all.
    whole = by_lane(recorded("product")[0].timelines[0].spans)
    assert by_lane(timeline.spans) == {lane: spans[:3] for lane, spans in whole.items()}


def test_on_blackwell():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OVERLAP_EMULATED_GPU", "blackwell")
        overlap._settings.emulated_gpu.cache_clear()
        try:
            made, _ = recorded.__wrapped__("gather")
        finally:
            patch.undo()
            overlap._settings.emulated_gpu.cache_clear()
    (timeline,) = made.timelines
    assert made.same_bits
    assert {s.role for s in timeline.spans} == {"epilogue", "producer", "communicator", "multiplier"}
    for device in range(2):
        tiles = [
            s.number for s in timeline.spans if (s.device, s.role, s.work) == (device, "multiplier", Work.MULTIPLY)
        ]
        assert sorted(tiles) == list(range(max(tiles) + 1))


def test_a_kernel_that_is_not_recorded_is_as_if_there_were_no_marks(monkeypatch):
    mesh = mesh_of(jax.devices()[:2])
    shapes = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128, 512), jnp.bfloat16)

    def call(lhs, rhs):
        return overlap.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused")

    def traced(program):
        # What it is made of, without addresses of Python objects.
        return re.sub(r"\d{9,}", "", str(program.trace(*shapes).jaxpr))

    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    as_it_is = traced(trace.call_program(GATHER, call, mesh))
    with_marks = traced(trace.program(GATHER, call, mesh, 16)[0])
    monkeypatch.setattr(marks, "now", lambda *args, **keywords: None)
    monkeypatch.setattr(marks, "role", lambda *args, **keywords: contextlib.nullcontext())
    assert "wgmma" in as_it_is
    assert traced(trace.call_program(GATHER, call, mesh)) == as_it_is
    # (The control: with marks it is another kernel, with a further result.)
    assert f"132,{ROWS},18,{WORDS}" in with_marks
    assert f"132,{ROWS},18,{WORDS}" not in as_it_is


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(
    ("target", "op", "config"),
    [
        ("h200", "all_gather_lhs_matmul", {}),
        ("h200", "matmul", {"schedule": "pingpong", "tile_m": 128, "tile_n": 128}),
        pytest.param("b200", "matmul_reduce_scatter", {}, marks=pytest.mark.slow),
        ("h200", None, {}),
    ],
)
def test_assembled(target, op, config):
    what, config = ("clocks", {}) if op is None else ("traced", {"of": op, **config})
    devices = 1 if op == "matmul" else 4
    for report in assemble_case(
        Case(f"tests.traced_cases:{what}", devices, (4096, 4096, 4096), "bf16", target, config)
    ):
        assert report.spill_store_bytes == report.spill_load_bytes == 0
        assert not [warning for warning in report.warnings if "wgmma" in warning]


# --- Clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("completion", ["late", "random"])
def test_the_exchange_of_clocks_is_emulated(completion):
    with emulate(cores=2, completion=completion) as run:
        offsets = clocks.offsets(mesh_of(jax.devices()[:3]))
    run.check()
    assert offsets == [Offset(0.0, 0.0)] * 3  # Emulated time stands still.


def test_clocks_that_are_apart_are_found(monkeypatch):
    """The whole exchange, with a clock of its own for each device."""
    ahead = (0, 7_000_000_000, -3_000_000)
    clock = lambda thread: 10**12 + 100 * thread.machine.world.now + ahead[thread.device]  # noqa: E731
    monkeypatch.setattr(registers, "CLOCK", clock)
    with emulate(cores=2, completion="random", scheduler="round_robin"):
        found = clocks.offsets(mesh_of(jax.devices()[:3]))
    assert found[0] == Offset(0.0, 0.0)
    for offset, true in zip(found[1:], ahead[1:], strict=True):
        assert 0 < offset.error_ns < 20_000
        assert abs(offset.ns - true) <= offset.error_ns


@given(
    ahead=st.integers(-(10**12), 10**12),
    trips=st.lists(st.tuples(st.integers(300, 90_000), st.integers(300, 90_000)), min_size=1, max_size=80),
    tick=st.sampled_from([1, 32, 1024]),
)
@settings(max_examples=50, deadline=None)
def test_offsets_are_within_their_error(ahead, trips, tick):
    sent, answered, returned, now = [], [], [], 5_000_000
    for there, back in trips:
        sent.append(now)
        answered.append(now + there + ahead)
        now += there + back
        returned.append(now)
        now += 700

    def ticked(times):
        return [time // tick * tick for time in times]

    found = clocks.offset(ticked(sent), ticked(answered), ticked(returned))
    assert abs(found.ns - ahead) <= found.error_ns + tick
    assert found.error_ns <= min(there for there, _ in trips) + min(back for _, back in trips) + tick


def test_one_time_for_all_devices():
    """Two GPUs, whose clocks are apart and tick coarsely, and whose cores count from anywhere: the truth is found."""
    rng = np.random.default_rng(0)
    ahead_ns, rate, tick_ns, ctas, count = (0, 123_456_789), (1.62, 1.81), 1024, 5, 40
    truth = np.sort(rng.uniform(0, 200_000, (2, ctas, count)))  # Nanoseconds since an event.
    entries = np.zeros((2 * ctas, ROWS, count + 2, WORDS), np.uint32)
    for device in range(2):
        for cta in range(ctas):
            lane = entries[device * ctas + cta, 2]
            cycles = (truth[device, cta] * rate[device] + rng.integers(0, 2**32)).astype(np.uint64)
            time = (truth[device, cta] + 1.7e18).astype(np.uint64) * 0 + np.uint64(1_763_900_000_000_000_000)
            time = (time + (truth[device, cta] + ahead_ns[device]).astype(np.uint64)) // tick_ns * tick_ns
            lane[0, 0] = count
            lane[1 : count + 1, 0] = [int(Work.LOAD) + (n << 8) for n in range(count)]
            lane[1 : count + 1, 1] = cycles & 0xFFFFFFFF
            lane[1 : count + 1, 2], lane[1 : count + 1, 3] = time & 0xFFFFFFFF, time >> np.uint64(32)
    found = timeline("kernel", {2: "producer"}, entries.view(np.int32), [Offset(0, 0), Offset(ahead_ns[1], 80)])
    assert (found.unit, found.clock_error) == ("µs", 0.08)
    starts = np.array([span.start for span in found.spans]).reshape(2, ctas, count - 1)
    error_us = starts - (truth[..., :-1] - truth.min()) / 1e3
    # Less than the tick: each CTA's own line is some 0.1 µs off.
    assert np.abs(error_us - error_us.mean()).max() < 0.3
    assert [span.number for span in found.spans[: count - 1]] == list(range(count - 1))


def written(devices, made, counts=None):
    """Entries of one CTA for each device: {row: [(work, cycle, nanosecond), ...]}, the same on all."""
    room = max(map(len, made.values()))
    entries = np.zeros((devices, ROWS, room + 2, WORDS), np.uint32)
    for row, marked in made.items():
        entries[:, row, 0, 0] = len(marked) if counts is None else counts
        for place, (work, cycle, ns) in enumerate(marked, 1):
            entries[:, row, place] = int(work), cycle % 2**32, ns % 2**32, ns >> 32
    return entries.view(np.int32)


def test_a_role_that_begins_before_the_others_and_a_counter_that_wraps():
    """Cycles before those of the row that is read first are no 4 billion cycles later."""
    epoch, wraps = 1_763_900_000_000_000_000, 2**32 - 3000
    roles = {0: "compute", 2: "producer"}
    made = {
        row: [(work, wraps + 2 * ns, epoch + ns) for work, ns in marked]
        for row, marked in {0: [(Work.MULTIPLY, 1000), (Work.STORE, 2000), (Work.IDLE, 3000)],
                            2: [(Work.LOAD, 0), (Work.IDLE, 1500)]}.items()
    }  # fmt: skip
    found = timeline("kernel", roles, written(1, made), [Offset(0, 0)])
    spans = [(span.work, span.start, span.end) for span in found.spans]
    expected = [(Work.MULTIPLY, 1.0, 2.0), (Work.STORE, 2.0, 3.0), (Work.LOAD, 0.0, 1.5)]
    assert [work for work, *_ in spans] == [work for work, *_ in expected]
    np.testing.assert_allclose([times for _, *times in spans], [times for _, *times in expected], atol=1e-3)
    assert found.origin == pytest.approx(epoch, abs=1)


def test_what_had_no_room_is_counted_on_all_devices():
    lane = [(Work.LOAD, step, 0) for step in range(4)]
    found = timeline("kernel", {2: "producer"}, written(3, {2: lane}, counts=9), [Offset(0, 0)] * 3)
    assert (found.missing, len(found.spans), found.unit) == (3 * 5, 3 * 3, "steps")


def test_shares_are_of_the_time_of_all_ctas_and_warpgroups():
    spans = [Span(0, cta, f"compute {w}", Work.MULTIPLY, 0, 0, 0.0, 2.0 + cta) for cta in range(2) for w in range(2)]
    found = Timeline("kernel", 2, "µs", [*spans, Span(1, 0, "compute 0", Work.STORE, 0, 0, 6.0, 10.0)], 0, 0.0)
    assert found.share(0, "compute", Work.MULTIPLY) == pytest.approx((2 + 2 + 3 + 3) / 40)
    assert found.share(1, "compute", Work.STORE) == pytest.approx(0.4)
    assert found.share(0, "producer", Work.LOAD) == 0


def test_a_kernel_without_marks_is_an_error():
    with pytest.raises(RuntimeError, match="device 0 has roles without marks in kernel: was the kernel recorded"):
        timeline("kernel", {2: "producer"}, np.zeros((2, ROWS, 4, WORDS), np.int32), [Offset(0, 0)])


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_trace_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "my.json.gz"
    status = main(
        ["trace", "--op", "matmul_reduce_scatter", "--shape", "1024x256x128", "--devices", "2", "--out", str(out)]
    )
    said = capsys.readouterr()
    assert status == 0, said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my.json.gz", "my.png"]
    assert (tmp_path / "my.png").read_bytes().startswith(b"\x89PNG")
    assert said.out.replace("\n", "").endswith(f"{out}; its picture: {tmp_path / 'my.png'}")
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == [f"device {d}: overlap_matmul_reduce_scatter_m" for d in range(2)]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    work = [e for e in events if e["ph"] == "X"]
    assert {threads[e["pid"], e["tid"]] for e in work} >= {f"CTA 3 {r}" for r in ("compute 1", "forwarder", "producer")}
    assert {e["name"] for e in work} >= {"load", "multiply", "store", "copy between GPUs", "wait for rows", "forward"}
    ends = defaultdict(float)
    for e in work:
        lane = e["pid"], e["tid"]
        assert ends[lane] - 1e-3 <= e["ts"] and e["dur"] >= 0
        ends[lane] = e["ts"] + e["dur"]


SMALL = ["trace", "--op", "matmul", "--shape", "64x256x128"]


def test_the_picture_may_have_a_place_of_its_own_and_what_is_missing_is_said(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(trace_command, "_CAPACITY", 2)
    out, picture = tmp_path / "a.json", tmp_path / "b.png"
    assert main([*SMALL, "--out", str(out), "--picture", str(picture)]) == 0
    assert sorted(tmp_path.iterdir()) == [out, picture]
    said = " ".join(capsys.readouterr().out.split())
    missing = json.loads(out.read_text())["otherData"]["overlap_matmul"]["missing_marks"]
    assert missing > 0 and f"{missing} marks had no room" in said
    assert f"{out}; its picture: {picture}" in said


def test_a_recorded_result_with_other_bits_is_a_failure_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    call_program = trace.call_program
    monkeypatch.setattr(trace, "call_program", lambda *args: lambda *x: call_program(*args)(*x).at[-1, -1].add(1))
    assert main([*SMALL, "--out", str(tmp_path / "a.json")]) == 1
    said = capsys.readouterr()
    assert "result differs from an ordinary one's" in " ".join(said.err.split()) and not said.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--op", "zz"], "--op must be one of matmul, all_gather_lhs_matmul"),
        (["--shape", "0x1x2"], "argument --shape: must be one MxNxK, each size from 1 to"),
        (["--shape", "1x1x2,3x4x5"], "got '1x1x2,3x4x5': e.g. 1024x4096x4096"),
        (["--shape", "256x256x100"], "multiples of 16 bytes"),
        (["--dtype", "zz"], "argument --dtype: a dtype must be one of f16, bf16"),
        (["--layout", "zz"], "argument --layout: invalid choice: 'zz'"),
        (["--devices", "0"], "argument --devices: must be an integer of at least 1, got '0'"),
        (["--devices", "99"], "--devices must be at most 8 where they are emulated, got 99"),
        (["--config", "tile_n"], "argument --config: must be NAME=VALUE"),
        (["--config", "zz=3"], "--config: overlap.Config has no field 'zz'; it has tile_m"),
        (["--config", "tile_n=many"], "--config: tile_n must be of the kind of 256, got 'many'"),
        (["--config", "stages=99"], "bytes of shared memory"),
        (["--op", "matmul_reduce_scatter", "--devices", "3"], "the 3 devices must divide m, got m=256"),
        (["--out", "/nowhere/x.json"], "argument --out: there is no folder /nowhere"),
        (["--out", "/dev/full"], "argument --out: must name a file, got '/dev/full', which is a device or a pipe"),
        (["--out", "x.png"], "--out names the trace, a JSON file, got x.png"),
        (["--out", "x.json", "--picture", "./x.json"], "--picture must be another file than --out, got x.json"),
        (["--layout", "tn"], "--layout must be one of nn, nt for all_gather_lhs_matmul, got tn"),
        (["--op", "matmul", "--devices", "2"], "--devices is for a collective, and matmul runs on one device, got 2"),
        (["--config", "joined=1"], "--config: joined must be of the kind of False, got 1"),
        (["--picture", "/nowhere/x.png"], "argument --picture: there is no folder /nowhere"),
    ],
)
def test_wrong_arguments_are_named(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["trace", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert not list(tmp_path.iterdir())
