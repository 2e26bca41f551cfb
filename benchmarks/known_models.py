"""Makes the tuning table that is shipped with the library, from the products of known models.

    python -m benchmarks.known_models tasks --out tasks.jsonl               writes tasks for `configurations`
    python -m benchmarks.known_models table benchmarks/model/h200/known*.csv.xz --jax 0.11.2
                                                                             writes the table, from its measurements

Both take `--gpu h100` for an H100.

A dense layer has four products. Tensor parallelism over `tp` devices divides the heads and the width of the MLP. The
table has the fastest configuration of each problem, and XLA's time if the samples were long. Entries of other
operations stay in the table.
"""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import sys
from collections.abc import Iterable, Iterator

from benchmarks import command, fit_model
from benchmarks.configurations import Task
from benchmarks.model_tasks import TARGETS, add_gpu, shape_of
from overlap.choice import space, tables
from overlap.choice.problem import Problem
from overlap.choice.tables import Entry
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments, whole_number
from overlap.kernels.config import Config
from overlap.kernels.target import Target

TP, TOKENS = (8, 4, 2, 1), (4096, 1024)
CONFIGS = 8
# IN_TURN: how many times longer a configuration with `in_turn` takes at the power limit if it is measured alone
# (harness, 2026-11-23). Samples of less than about 50 ms do not show this: the GPU's clock still depends on the
# configurations that ran before. POWER_LIMITED_US: products that take longer reach the power limit.
IN_TURN, POWER_LIMITED_US = 1.02, 100.0


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a transformer's layer.

    Attributes:
      hidden: width of the residual stream.
      mlp: width of the gated MLP.
      heads: query heads.
      kv_heads: heads of keys and values; 0: the model computes keys and values in another way.
      head_size: width of a head.
    """

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_size: int = 128

    def products(self, tp: int) -> Iterator[tuple[int, int]]:
        """Yields (n, k) of each product of one device. A product that `tp` devices cannot share evenly is left out."""
        if self.kv_heads and self.kv_heads % tp == 0:
            yield (self.heads + 2 * self.kv_heads) * self.head_size // tp, self.hidden
        yield self.hidden, self.heads * self.head_size // tp
        yield 2 * self.mlp // tp, self.hidden
        yield self.hidden, self.mlp // tp


# Source: the configurations that the authors publish with the weights.
MODELS = {
    "Llama 3 70B": Model(8192, 28672, 64, 8),
    "Llama 3 8B": Model(4096, 14336, 32, 8),
    "Qwen 3 32B": Model(5120, 25600, 64, 8),
    "Gemma 3 27B": Model(5376, 21504, 32, 16),
    "DeepSeek V3": Model(7168, 18432, 128, 0),
}


def problems() -> list[Problem]:
    """Returns the products of all models, each once, ordered by tokens and devices: the most first."""
    found = (
        Problem("matmul", tokens, n, k, "bfloat16", "bfloat16")
        for tokens in TOKENS
        for tp in TP
        for model in MODELS.values()
        for n, k in model.products(tp)
    )
    return list(dict.fromkeys(found))


def task_of(problem: Problem, target: Target) -> Task:
    """Makes the task of a problem: XLA, and the search's first `CONFIGS` configurations, one for each `shape_of`."""
    shapes = {shape_of(config): config for config in reversed(space.candidates(problem, target))}
    ranked = [config for config in space.candidates(problem, target) if shapes[shape_of(config)] == config]
    return Task(problem, tuple(ranked[:CONFIGS]), with_xla=True)


def _by_itself(config: Config, us: float, short: bool) -> float:
    """Estimates how long a configuration takes if it is measured alone (see `IN_TURN`), in microseconds.

    Args:
      config: the configuration.
      us: its time in `benchmarks.configurations`.
      short: whether it was measured in short samples (`fit_model.Times`).
    """
    return us * IN_TURN if short and config.in_turn and us > POWER_LIMITED_US else us


def entries(times: fit_model.Times, jax_version: str, date: str) -> list[Entry]:
    """Makes the entries of the table, with the fastest configuration of each problem that the search offers."""
    result = []
    for problem, of_problem in times.items():
        fused = [(config, us) for config, us in of_problem.items() if config is not None and not space.spills(config)]
        (best, us), *rest = ranked = sorted(fused, key=lambda pair: _by_itself(*pair, problem in times.short))
        others = {space.differences(config): other for config, other in rest[:2]}
        if None in of_problem and problem not in times.short:
            # In short samples XLA's product runs at the clocks that our kernels have left: it is no fair comparison.
            others["xla"] = of_problem[None]
        result.append(
            Entry(
                problem, times.target.kind, jax_version, best, us, others, tried=len(ranked), complete=True, date=date
            )
        )
    return result


def main(arguments: Iterable[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    parser = command.tool_parser("known_models", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    tasks = commands.add_parser("tasks", help="write the task file")
    tasks.add_argument("--out", type=pathlib.Path, required=True, help="the task file to write")
    add_gpu(tasks)
    tasks.add_argument("--limit", type=whole_number(1), help="write only the first LIMIT problems")
    table = commands.add_parser("table", help="write the table that is shipped")
    table.add_argument(
        "times",
        nargs="+",
        type=pathlib.Path,
        help="CSV files of benchmarks.configurations; of several with the same problem the last one counts",
    )
    add_gpu(table)
    table.add_argument("--jax", required=True, help="the version of jax of the measurements")
    table.add_argument("--date", default=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    given = parser.parse_args(None if arguments is None else list(arguments))
    if given.command == "tasks":
        lines = [task_of(problem, TARGETS[given.gpu]).to_json() for problem in problems()[: given.limit]]
        tables.replace(given.out, "\n".join(lines) + "\n")
        print(f"{len(lines)} tasks in {given.out}")
        return 0
    found: dict[Problem, Entry] = {}
    for path in given.times:
        try:
            made = entries(fit_model.load(path, given.gpu), given.jax, given.date)
        except (KeyError, TypeError, ValueError) as error:
            raise WrongArguments(f"known_models: {path} holds no times: {error!r}") from None
        found |= {entry.problem: entry for entry in made}
    file = tables.SHIPPED / f"{given.gpu}.json"
    kept = [entry for entry in tables.read(file) if entry.problem.op != "matmul"] if file.exists() else []
    new = file.with_suffix(".new")
    tables.add(new, [*kept, *found.values()])
    new.replace(file)
    print(f"{len(tables.load(file))} entries in {file}")
    return 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
