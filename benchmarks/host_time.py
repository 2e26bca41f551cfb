"""Shows what a call of `all_gather_lhs_matmul` costs the host, and on which steps of XLA's runtime the host spends it.

    python -m benchmarks.host_time --devices 2 --shapes 16x8192x8192

Products of few rows take the GPU less time than the host needs to start them. The first table has the time that the
host needs per call, for the fused operation, XLA's collective and product, the product of gathered operands by XLA
(roof), and the same by our kernel (own_matmul). The second table has the steps of each method, from a profile of jax.
Steps contain each other, and profiling itself takes time: the steps of one method are to be compared with the steps of
another.
"""

from __future__ import annotations

import collections
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

import jax

from benchmarks import command
from benchmarks.methods import Variant, all_gather_methods
from benchmarks.problems import parse
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, whole_number
from overlap.tuning.programs import call_program, complete_program, draw_operands, mesh_of

METHODS = ("fused", "xla", "roof", "own_matmul")
# Steps that take less than this are not listed.
_LEAST_US = 2.0


def dispatch_us(call: Callable[[], jax.Array], calls: int) -> float:
    """Returns how long the host needs for a call that it does not wait for, in microseconds."""
    began = time.perf_counter()
    results = [call() for _ in range(calls)]
    took = time.perf_counter() - began
    jax.block_until_ready(results)
    return 1e6 * took / calls


def steps_us(call: Callable[[], jax.Array], calls: int) -> dict[str, tuple[float, float]]:
    """Profiles some calls. Returns for each step of XLA's threads (microseconds, how often) per call and thread."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([call() for _ in range(calls)])
        total: collections.Counter[str] = collections.Counter()
        count: collections.Counter[str] = collections.Counter()
        threads: dict[str, set[int]] = collections.defaultdict(set)
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                lines = list(plane.lines) if plane.name.startswith("/host:") else []
                for number, line in enumerate(lines):
                    for event in line.events:
                        if event.name.startswith("$"):  # A function of Python.
                            continue
                        # "[0] GpuExecutable::ExecuteThunks": the step, and the device of the thread.
                        name = event.name.partition("] ")[2] if event.name.startswith("[") else event.name
                        total[name] += event.duration_ns * 1e-3
                        count[name] += 1
                        threads[name].add(number)
    return {
        name: (us / calls / len(threads[name]), count[name] / calls / len(threads[name])) for name, us in total.items()
    }


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("host_time", __doc__)
    parser.add_argument("--devices", type=whole_number(1), default=2, help="how many devices")
    parser.add_argument("--shapes", default="16x8192x8192", help="MxNxK per shard; one")
    parser.add_argument("--rounds", type=whole_number(1), default=7, help="how often each method is timed")
    parser.add_argument("--calls", type=whole_number(1), default=200, help="calls that are timed together")
    given = parser.parse_args(None if arguments is None else list(arguments))
    [table_problem] = parse("all_gather_lhs_matmul", given.devices, [given.shapes], "bf16", ["nn"])
    command.need_gpus("it needs GPUs")
    if given.devices > len(jax.devices()):
        raise WrongArguments(f"host_time: `--devices` must be at most {len(jax.devices())} here, got {given.devices}")
    problem, mesh = table_problem.library, mesh_of(jax.devices()[: given.devices])
    operands = draw_operands(problem, mesh, 0)
    whole = complete_program(problem, mesh)(*operands)
    calls: dict[str, Callable[[], jax.Array]] = {}
    for method in all_gather_methods(problem, METHODS, [Variant.parse("fused")], 1):
        program, given_to = call_program(problem, method.call, mesh), whole if method.gathered else operands
        calls[method.name] = lambda program=program, given_to=given_to: program(*given_to)
        dispatch_us(calls[method.name], given.calls)
    samples = {name: [] for name in calls}
    for _ in range(given.rounds):
        for name, call in calls.items():
            samples[name].append(dispatch_us(call, given.calls))
    print(f"{table_problem}, {given.devices} x {jax.devices()[0].device_kind}: microseconds of the host per call")
    for name, of_method in samples.items():
        print(f"{name:12} median {statistics.median(of_method):6.1f}, {min(of_method):.1f} to {max(of_method):.1f}")
    for name, call in calls.items():
        print(f"\n{name}: microseconds per call and thread, how often, step")
        for step, (us, often) in sorted(steps_us(call, given.calls).items(), key=lambda item: -item[1][0]):
            if us >= _LEAST_US:
                print(f"{us:8.1f} {often:5.1f}  {step}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
