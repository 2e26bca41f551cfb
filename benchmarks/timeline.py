"""Draws the timeline of the README: XLA's kernels, and below them the fused kernel, from recorded traces.

    python -m benchmarks.timeline record --raw DIR --out docs/figures/timeline.json     # on two GPUs
    python -m benchmarks.timeline condense --raw DIR --out docs/figures/timeline.json
    python -m benchmarks.timeline draw docs/figures/timeline.json

`record` writes the traces to DIR, and `condense`, which `record` ends with, makes a small file of them. `draw` writes
two pictures beside the small file, for a light and a dark page.

Every call that is traced follows three other calls at once. XLA's kernels come from a profile of jax. What the fused
kernel does comes from marks in it (`overlap.tuning.trace`), which cost a little time. A profile also says how long the
fused kernel takes without marks; the picture has the longer of the two times.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import pathlib
import shutil
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import command, environment, timeline_picture
from benchmarks.profile_kinds import Kernel, kernels, kind_of
from overlap import Config, emulation
from overlap.choice.dispatch import Implementation
from overlap.choice.problem import Problem
from overlap.cli import ending, trace_files
from overlap.cli.arguments import WrongArguments, shape
from overlap.primitives.marks import Work
from overlap.tuning import trace
from overlap.tuning.operations import call_operation
from overlap.tuning.programs import call_program, draw_operands, mesh_of

_OP, _DEVICES, _MARKS_OF_A_ROLE = "all_gather_lhs_matmul", 2, 2048
# Each burst is some calls in a row. The last one counts, since all GPUs begin it together.
_BURSTS, _CALLS = 5, 4
# The number of times at which the small file says what the fused kernel does.
_POINTS = 200
# The kinds of the kernel that a call begins with.
_FIRST_KERNEL = {"xla": ("gather", "communication"), "fused": ("fused",)}


def record(problem: Problem, raw: pathlib.Path, facts: dict[str, str], *, dry_run: bool) -> None:
    """Writes traces to the folder `raw`. Where one fails, prints the error and goes on: GPUs are rare."""
    raw.mkdir(parents=True, exist_ok=True)
    content = {"measured": not dry_run, "op": problem.op, "sizes": [problem.m, problem.n, problem.k], "facts": facts}
    (raw / "facts.json").write_text(json.dumps(content, indent=1))
    mesh = mesh_of(jax.devices()[: problem.devices])
    operands, config = draw_operands(problem, mesh, 0), Config(tile_n=128) if dry_run else None

    def marks() -> None:
        made = trace.record(problem, operands, mesh, config, _MARKS_OF_A_ROLE, emulated=dry_run)
        trace_files.write_trace(made.timelines, raw / "marks.json.gz")
        print(f"marks: the result has the same bits as without marks: {made.same_bits}")

    def profile(method: Implementation) -> None:
        def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return call_operation(problem, lhs, rhs, config if method == "fused" else None, method)

        program = call_program(problem, call, mesh)
        jax.block_until_ready(program(*operands))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for _ in range(_BURSTS):
                    jax.block_until_ready([program(*operands) for _ in range(_CALLS)])
            written = next(pathlib.Path(folder).rglob("*.xplane.pb"))
            shutil.copyfile(written, raw / f"{method}.xplane.pb")

    with emulation.emulate(cores=4, scheduler="round_robin") if dry_run else contextlib.nullcontext():
        for step in (marks, functools.partial(profile, "xla"), functools.partial(profile, "fused")):
            try:
                step()
            except Exception:
                traceback.print_exc()


def condense(raw: pathlib.Path) -> dict[str, Any]:
    """Returns what the picture needs of the traces in `raw`. A trace that is missing leaves an empty list."""
    content = json.loads((raw / "facts.json").read_text())
    calls = {method: _calls(raw / f"{method}.xplane.pb", kinds) for method, kinds in _FIRST_KERNEL.items()}
    content["xla"] = [
        [[name, round(start_us - call[0].start_us, 2), round(us, 2)] for name, start_us, us in call]
        for call in calls["xla"]
    ]
    content["fused_us"] = [round(call[0].us, 2) for call in calls["fused"]]
    path = raw / "marks.json.gz"
    content["fused"] = _marks(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]) if path.exists() else []
    print("marks.json.gz: µs of the kernel on each GPU:", *(gpu["us"] for gpu in content["fused"]))
    return content


def _calls(profile: pathlib.Path, kinds: Sequence[str]) -> list[list[Kernel]]:
    """Returns for each GPU the kernels of one call: the median, by time, of the bursts' last calls."""
    chosen, gpus = [], kernels(profile) if profile.exists() else []
    print(f"{profile.name}: {len(gpus)} GPUs" if profile.exists() else f"{profile.name} is missing")
    for gpu in gpus:
        begins = [index for index, kernel in enumerate(gpu) if kind_of(kernel.name) in kinds]
        calls = [gpu[begin:end] for begin, end in zip(begins, [*begins[1:], None], strict=True)]
        print(f"  {len(gpu)} kernels, {len(calls)} calls: {sorted({kernel.name for kernel in gpu})}")
        lasts = sorted(calls[_CALLS - 1 :: _CALLS] or calls, key=_us)
        print("  µs of the last calls of the bursts:", *(f"{_us(call):.1f}" for call in lasts))
        chosen += lasts[len(lasts) // 2 :][:1]
    return chosen


def _us(call: Sequence[Kernel]) -> float:
    return max(kernel.start_us + kernel.us for kernel in call) - call[0].start_us


def _marks(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each GPU the percentage of its CTAs that multiply, and that copy rows of peers, at some times."""
    cta_of = {
        (event["pid"], event["tid"]): int(event["args"]["name"].split()[1])
        for event in events
        if event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    found = []
    for gpu in sorted({span["pid"] for span in spans}):
        own = [span for span in spans if span["pid"] == gpu]
        begin = min(span["ts"] for span in own)
        us = max(span["ts"] + span["dur"] for span in own) - begin
        times = begin + us * (np.arange(_POINTS) + 0.5) / _POINTS
        of_gpu: dict[str, Any] = {"us": round(us, 2)}
        for name, work in (("multiply", Work.MULTIPLY), ("copy", Work.COPY)):
            busy = np.zeros((1 + max(cta_of.values()), _POINTS), bool)
            for span in own:
                if span["name"] == trace_files.LABELS[work][0]:
                    busy[cta_of[gpu, span["tid"]]] |= (span["ts"] <= times) & (times < span["ts"] + span["dur"])
            of_gpu[name] = np.rint(100 * busy.mean(0)).astype(int).tolist()
        found.append(of_gpu)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("timeline", __doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    recorder = verbs.add_parser("record", help="record on two GPUs, then condense")
    recorder.add_argument("--shape", type=shape, default="4096x2048x4096", help="MxNxK per shard")
    recorder.add_argument("--commit", default=None, metavar="HASH", help="the commit; needed where there is no .git")
    recorder.add_argument("--dry-run", action="store_true", help="use emulated devices and a tiny size")
    condenser = verbs.add_parser("condense", help="make the small file of recorded traces")
    for each in (recorder, condenser):
        each.add_argument("--raw", type=pathlib.Path, required=True, metavar="DIR", help="the folder of the traces")
        each.add_argument("--out", type=pathlib.Path, required=True, help="the small file to write, .json")
    drawer = verbs.add_parser("draw", help="draw the small file")
    drawer.add_argument(
        "file", type=pathlib.Path, help="the small file; the pictures get its name, -light.svg, -dark.svg"
    )
    given = parser.parse_args(argv)
    if given.verb == "draw":
        content: dict[str, Any] = {}
        with contextlib.suppress(ValueError):
            content = json.loads(given.file.read_text())
        if not (content.get("xla") and content.get("fused")):
            raise WrongArguments(f"{given.file} lacks the traces of XLA and of the fused kernel: record it on two GPUs")
        for theme in timeline_picture.THEMES:
            path = given.file.with_name(f"{given.file.stem}-{theme}.svg")
            path.write_text(timeline_picture.svg(content, theme))
            print(f"wrote {path}")
        return 0
    if given.verb == "record":
        if given.dry_run:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", _DEVICES)
        else:
            command.need_gpus()
        if len(jax.devices()) < _DEVICES:
            raise WrongArguments(f"record needs {_DEVICES} GPUs, and this machine has {len(jax.devices())}")
        facts = environment.describe("one process", _DEVICES, command.code_facts(given.commit, dry_run=given.dry_run))
        m, n, k = (256, 256, 256) if given.dry_run else given.shape
        record(Problem(_OP, m, n, k, "bfloat16", "bfloat16", devices=_DEVICES), given.raw, facts, dry_run=given.dry_run)
    if not (given.raw / "facts.json").exists():
        raise WrongArguments(f"`--raw` must be a folder that `record` wrote, got {given.raw}")
    content = condense(given.raw)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(content, separators=(",", ":")) + "\n")
    complete = all(content[part] for part in ("xla", "fused", "fused_us"))
    print(f"wrote {given.out}" + ("" if complete else ", which lacks what a picture needs"))
    return 0 if complete or not content["measured"] else 1


if __name__ == "__main__":
    sys.exit(ending.run(main))
