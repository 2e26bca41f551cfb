r"""Compares the times of another commit's kernels with the times of this tree's kernels, in turns in one process.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.before_after --before /tmp/before --before-commit COMMIT
    launch/mpirun.sh -- python -m benchmarks.before_after ...                       one process per GPU

Both packages are loaded at the same time. The package of the other commit is a copy whose imports are renamed. Each
case is a loop inside one program on all GPUs, timed as in all benchmarks. The ratio after / before is the time of this
tree / the time of the other commit in the same round, the median over the rounds. After the first loop of each package,
every process compares the results of both bit for bit, on its own devices.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import overlap
from benchmarks import command, layer_runs, report
from overlap.choice.problem import Problem, default_out_dtype
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, old_folder
from overlap.tuning.programs import call_program, draw_operands, loop_program, mesh_of
from overlap.tuning.timing import Loop

_NAME = "overlap_before"
# (operation; m, n, k per shard; dtype; keywords)
type Case = tuple[str, int, int, int, Any, dict[str, Any]]
CASES: tuple[Case, ...] = (
    ("lhs", 1024, 4096, 4096, jnp.float16, {}),
    ("lhs", 1024, 4096, 8192, jnp.bfloat16, {}),
    ("lhs", 1024, 3584, 8192, jnp.bfloat16, {}),
    ("lhs", 1024, 6144, 12288, jnp.bfloat16, {}),
    ("lhs", 512, 4096, 4096, jnp.bfloat16, {}),
    ("lhs", 128, 4096, 4096, jnp.bfloat16, {}),
    ("lhs", 64, 4096, 4096, jnp.bfloat16, {}),
    ("lhs", 32, 4096, 4096, jnp.bfloat16, {}),
    ("lhs", 16, 4096, 4096, jnp.bfloat16, {}),
    ("lhs", 32, 8192, 8192, jnp.bfloat16, {}),
    ("lhs", 16, 8192, 8192, jnp.bfloat16, {}),
    ("lhs", 1024, 4096, 4096, jnp.bfloat16, {"transport": "ring"}),
    ("lhs", 1024, 4096, 4096, jnp.bfloat16, {"return_gathered": True}),
    ("scaled", 1024, 4096, 4096, jnp.float8_e4m3fn, {}),
    ("scaled", 16, 8192, 8192, jnp.float8_e4m3fn, {}),
    ("rhs", 2048, 2048, 8192, jnp.bfloat16, {"gather_dimension": 1}),
    ("rhs", 2048, 4096, 2048, jnp.bfloat16, {"gather_dimension": 0}),
)


def load(tree: pathlib.Path) -> Any:
    """Imports the package `overlap` of another tree under the name `_NAME`, and returns it."""
    home = pathlib.Path(tempfile.mkdtemp())
    shutil.copytree(tree / "overlap", home / _NAME, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (home / _NAME).rglob("*.py"):
        file.write_text(re.sub(r"\b(from|import) overlap\b", rf"\1 {_NAME}", file.read_text()))
    sys.path.insert(0, str(home))
    # Only import statements are renamed. A module that is looked up by the text "overlap.something" is this tree's.
    package = importlib.import_module(_NAME)
    # Both packages must use the same board and the same table of device ids, which exist once in a process. With a
    # board for each package, kernels were seen to hang (2 H200s).
    for module, function in (("primitives.board", "address"), ("_compat", "device_ids")):
        setattr(importlib.import_module(f"{_NAME}.{module}"), function, getattr(_own(module), function))
    return package


def _own(module: str) -> Any:
    return importlib.import_module(f"overlap.{module}")


def call_of(package: Any, case: Case) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a function (lhs, rhs) -> out that runs a case by one of the two packages, inside `jax.shard_map`."""
    kind, m, n, _, _, keywords = case

    def call(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        if kind == "rhs":
            return package.all_gather_rhs_matmul(lhs, rhs, "x", implementation="fused", **keywords)
        scaled = scales_of(package, m, n) | {"transpose_rhs": True} if kind == "scaled" else {}
        out = package.all_gather_lhs_matmul(lhs, rhs, "x", implementation="fused", **keywords, **scaled)
        return out[0] if keywords.get("return_gathered") else out

    return call


def problem_of(case: Case, devices: int) -> Problem:
    """Converts a case to a problem of the library."""
    kind, m, n, k, dtype, keywords = case
    along = f"rhs_matmul_{'kn'[keywords['gather_dimension']]}" if kind == "rhs" else "lhs_matmul"
    name = jnp.dtype(dtype).name
    layout = "nt" if kind == "scaled" else "nn"
    return Problem(f"all_gather_{along}", m, n, k, name, default_out_dtype(name), devices, layout)


def scales_of(package: Any, m: int, n: int) -> dict[str, Any]:
    """Returns scales of rows and columns as keywords of `package`. Older packages take them as one tuple, `scale`."""
    rows, columns = jnp.ones((m, 1)), jnp.ones((n,))
    is_older = "scale" in inspect.signature(package.all_gather_lhs_matmul).parameters
    return {"scale": (rows, columns)} if is_older else {"lhs_scale": rows, "rhs_scale": columns}


def measure(before: Any, case: Case, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """Measures a case by both packages.

    Returns:
      "before" and "after": the median time of a call, in microseconds. "ratio", "low" and "high": median and quartiles
      of after / before. "same": whether the results have the same bits.
    """
    iterations, problem = 300 if case[1] <= 256 else 60, problem_of(case, mesh.size)
    operands = draw_operands(problem, mesh, 0)

    def loop_of(package: Any) -> Loop:
        call = call_of(package, case)
        program = loop_program(problem, call, mesh, iterations)
        loop = Loop(problem, program, iterations, operands, call_program(problem, call, mesh)(*operands))
        loop.launch()
        return loop

    # Use this tree's package first: both packages patch the same parts of jax, and the first patches stay.
    loops = {"after": loop_of(overlap), "before": loop_of(before)}
    results = {name: _local(loop.out) for name, loop in loops.items()}
    times: dict[str, list[float]] = {"before": [], "after": []}
    for turn in range(rounds):
        for name in ("before", "after")[:: 1 if turn % 2 else -1]:
            times[name].append(1e6 * loops[name].call_s(1))
    ratios = sorted(after / before for after, before in zip(times["after"], times["before"]))
    return {
        "before": statistics.median(times["before"]),
        "after": statistics.median(times["after"]),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[3 * len(ratios) // 4],
        "same": _in_all_processes((results["after"] == results["before"]).all()),
    }


def _local(array: jax.Array) -> np.ndarray:
    """Returns the rows that this process's devices hold, in float32."""
    return np.concatenate([np.asarray(shard.data, np.float32) for shard in array.addressable_shards])


def _in_all_processes(holds: np.bool_) -> bool:
    return bool(np.all(multihost_utils.process_allgather(np.array(holds)))) if jax.process_count() > 1 else bool(holds)


def name_of(case: Case) -> str:
    """Describes a case in words, as in the table."""
    kind, m, n, k, dtype, keywords = case
    given = ", ".join(f"{name}={value!r}" for name, value in keywords.items() if name != "gather_dimension")
    words = {"lhs": "all_gather_lhs_matmul", "scaled": "the same with scales", "rhs": "all_gather_rhs_matmul"}[kind]
    along = f" along {'nk'[1 - keywords['gather_dimension']]}" if kind == "rhs" else ""
    return f"{words}{along} {m}, {n}, {k} {jnp.dtype(dtype).name}" + (f" ({given})" if given else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.tool_parser("before_after", __doc__)
    parser.add_argument("--before", type=old_folder, required=True, help="the root of the other tree")
    parser.add_argument("--before-commit", required=True, help="the commit of the other tree")
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    layer_runs.add_options(parser, rounds=15)
    arguments = parser.parse_args(argv)
    if not (arguments.before / "overlap/__init__.py").is_file():
        raise WrongArguments(
            f"before_after: `--before` must be the root of a tree with overlap/, got {arguments.before}"
        )
    cases = [case for case in CASES if arguments.only in name_of(case)]
    if not cases:
        raise WrongArguments(f"before_after: no case has {arguments.only!r} (`--only`) in its name")
    run = layer_runs.begin("before_after", arguments, before=arguments.before_commit)
    mesh = mesh_of(run.devices)
    before = load(arguments.before)
    rows = []
    for case in cases:
        row = measure(before, case, mesh, arguments.rounds)
        times = [f"{row[name]:.1f}" for name in ("before", "after")]
        quartiles = f"{row['low']:.3f} – {row['high']:.3f}"
        rows.append([name_of(case), *times, f"{row['ratio']:.3f}", quartiles, "yes" if row["same"] else "NO"])
    if jax.process_index() == 0:
        headings = ("case", "before, µs", "after, µs", "after / before", "quartiles", "same bits")
        report.print_table("\n".join(f"{name}: {text}" for name, text in run.facts.items()), headings, rows)
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
