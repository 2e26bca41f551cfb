"""`python -m overlap trace`: the clocks of several GPUs, the command, and the files that it writes."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_emulator.execution import registers
from overlap.cli import main, trace_files
from overlap.emulation import emulate
from overlap.primitives.marks import ROWS, WORDS, Work
from overlap.tuning import clocks, trace
from overlap.tuning.clocks import Offset
from overlap.tuning.programs import mesh_of
from overlap.tuning.timeline import Span, Timeline, timeline

# --- Clocks -----------------------------------------------------------------------------------------------------------


def test_clocks_that_are_apart_are_found(monkeypatch):
    """Runs the whole exchange, with a different clock on each device."""
    ahead = (0, 7_000_000_000, -3_000_000)
    clock = lambda thread: 10**12 + 100 * thread.simulation.now + ahead[thread.device]  # noqa: E731
    monkeypatch.setattr(registers, "CLOCK", clock)
    with emulate(cores=2, completion="random", scheduler="round_robin") as run:
        found = clocks.offsets(mesh_of(jax.devices()[:3]))
    run.check()
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
    """Recovers the true times of two GPUs with different, coarse clocks and with cycle counters that start anywhere."""
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
    # Below the clock's tick: each CTA's own fit is off by about 0.1 µs.
    assert np.abs(error_us - error_us.mean()).max() < 0.3
    assert [span.number for span in found.spans[: count - 1]] == list(range(count - 1))


def written(devices, made, counts=None):
    """Entries of one CTA for each device: {row: [(work, cycle, nanosecond), ...]}, the same on all devices."""
    room = max(map(len, made.values()))
    entries = np.zeros((devices, ROWS, room + 2, WORDS), np.uint32)
    for row, marked in made.items():
        entries[:, row, 0, 0] = len(marked) if counts is None else counts
        for place, (work, cycle, ns) in enumerate(marked, 1):
            entries[:, row, place] = int(work), cycle % 2**32, ns % 2**32, ns >> 32
    return entries.view(np.int32)


def test_a_role_that_begins_before_the_others_and_a_counter_that_wraps():
    """Cycles before the start of the row that is read first are not taken as 4 billion cycles later."""
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


def test_shares_are_of_the_time_of_all_ctas_and_warpgroups():
    spans = [Span(0, cta, f"compute {w}", Work.MULTIPLY, 0, 0, 0.0, 2.0 + cta) for cta in range(2) for w in range(2)]
    found = Timeline("kernel", 2, "µs", [*spans, Span(1, 0, "compute 0", Work.STORE, 0, 0, 6.0, 10.0)], 0, 0.0)
    assert found.share(0, "compute", Work.MULTIPLY) == pytest.approx((2 + 2 + 3 + 3) / 40)
    assert found.share(1, "compute", Work.STORE) == pytest.approx(0.4)
    assert found.share(0, "producer", Work.LOAD) == 0
    # What had no room is counted on all devices.
    marked = written(3, {2: [(Work.LOAD, step, 0) for step in range(4)]}, counts=9)
    found = timeline("kernel", {2: "producer"}, marked, [Offset(0, 0)] * 3)
    assert (found.missing, len(found.spans), found.unit) == (3 * 5, 3 * 3, "steps")
    with pytest.raises(RuntimeError, match="device 0 has roles without marks in kernel: was the kernel recorded"):
        timeline("kernel", {2: "producer"}, np.zeros((2, ROWS, 4, WORDS), np.int32), [Offset(0, 0)])


# --- The command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_trace_and_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "my.json.gz"
    status = main(
        ["trace", "--op", "matmul_reduce_scatter", "--shape", "256x256x128", "--devices", "2", "--out", str(out)]
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


def test_marks_without_room_are_said_and_a_result_with_other_bits_is_a_failure(tmp_path, capsys, monkeypatch):
    """The picture may have a place of its own. After a failure nothing is written."""
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "made" / "a.json", tmp_path / "made" / "b.png"
    out.parent.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(trace_files, "CAPACITY", 2)
        assert main([*SMALL, "--out", str(out), "--picture", str(picture)]) == 0
    assert sorted(out.parent.iterdir()) == [out, picture]
    said = " ".join(capsys.readouterr().out.split())
    missing = json.loads(out.read_text())["otherData"]["overlap_matmul"]["missing_marks"]
    assert missing > 0 and f"{missing} marks had no room" in said and f"{out}; its picture: {picture}" in said
    call_program = trace.call_program
    monkeypatch.setattr(trace, "call_program", lambda *args: lambda *x: call_program(*args)(*x).at[-1, -1].add(1))
    assert main([*SMALL, "--out", str(tmp_path / "a.json")]) == 1
    said = capsys.readouterr()
    assert "result differs from an ordinary one's" in " ".join(said.err.split()) and not said.out
    assert list(tmp_path.iterdir()) == [out.parent]


WRONG = [
    ("--shape 0x1x2", "argument --shape: must be MxNxK or MxNxK:DTYPE, several with commas"),
    ("--shape 1x1x2,3x4x5", "must be one MxNxK, got '1x1x2,3x4x5': e.g. 1024x4096x4096"),
    ("--dtype zz", "argument --dtype: a dtype must be one of f16, bf16"),
    ("--layout zz", "argument --layout: invalid choice: 'zz'"),
    ("--devices 99", "--devices must be at most 8 where they are emulated, got 99"),
    ("--config tile_n", "argument --config: must be NAME=VALUE"),
    ("--config zz=3", "--config: overlap.Config has the fields tile_m, "),
    ("--config tile_n=many", "`tile_n` must be an int of at least 1, got 'many'"),
    ("--config stages=99", "bytes of shared memory"),
    ("--out x.png", "--picture must be another file than --out, got x.png"),
    ("--out x.json --picture ./x.json", "--picture must be another file than --out, got x.json"),
    ("--layout tn", "takes no `transpose_lhs` yet"),
    ("--op matmul --devices 2", "--devices is for a collective, and matmul runs on one device, got 2"),
    ("--config joined=1", "`joined` must be True or False, got 1"),
]  # fmt: skip


def test_wrong_arguments_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, said in WRONG:
        try:
            status = main(["trace", *arguments.split()])
        except SystemExit as end:
            status = end.code
        assert status == 2, arguments
        assert said in capsys.readouterr().err.replace("\n", " "), arguments
    assert not list(tmp_path.iterdir())
