"""`python -m benchmarks.index`: writes the index of all results, their tables, and the tables of README.md.

The index (benchmarks/results/README.md) has the current results first, then the experiments. It names the commit whose
code each run has measured. A run names its commit in a line `- commit: HASH`, or in the column `env_commit`. Words
after the hash say if the code was not exactly that commit:

    HASH (unverified: not in a repository here)    measured on a copy; the line `- code:` verifies it
    NAME (not in this history: …)          a commit that was rewritten, or a tree that was never committed
    HASH (with changes: …)                 that commit with changes
    HASH (before it was committed)         a tree that was committed later as that commit
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import command, current, provenance, readme
from overlap.choice.tables import replace
from overlap.cli import ending

RESULTS = provenance.REPOSITORY / "benchmarks" / "results"
EXPERIMENTS = provenance.REPOSITORY / "benchmarks" / "experiments"
INDEX = RESULTS / "README.md"
_LOST = "not in this history"
_WORDS = (_LOST, "with changes", "before it was committed")
_HEAD = """# Results

Made by `python -m benchmarks.index`; do not edit.

First the current results: a file for each operation, device, number of devices and layout, with the newest run of each
problem. `one_process`: one process has all GPUs; `process_each`: each GPU has a process of its own. After them the
experiments: the runs that answer a question, each as it was measured. Where such a run is the newest of a problem, its
rows stand in both places.

*Commit*: the code that ran. "Not in this history": the numbers stand, the code is lost (a commit that was rewritten
later, or a tree that was never committed as it was). "After" is the last commit before the measurement. The harness now
refuses to measure such a tree. "Unverified: not in a repository here": it was measured in a copy of the tree without
the history. The hash of overlap/ that was recorded there is compared with the commit's when this file is made.
*Command not recorded*: the run is older than the harness that records it, or made by
hand. The command under a table measures the same problems again.
"""
_EXPERIMENTS = """
# Experiments

A run lies in `benchmarks/experiments/DATE-QUESTION/`, and the README.md there has the answer. A run's tables are in its
.md; beside it lie the same numbers (.csv) and, of some, each round's (.rounds.csv) and the means (.summary.csv).
"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One execution of a benchmark.

    The rows of a run are either a whole file (an experiment), or some of the rows of a file of current results.

    Attributes:
      path: the file.
      facts: by name, what the file says about the run, such as its commit and date.
    """

    path: pathlib.Path
    facts: Mapping[str, str]


def experiments() -> list[pathlib.Path]:
    """Returns the folders of all experiments, ordered by date."""
    return sorted(path.parent for path in EXPERIMENTS.glob("*/README.md"))


def runs() -> list[Run]:
    """Finds all runs: first the runs in the current results, then the experiments, ordered by path."""
    of_tables = [
        Run(RESULTS / f"{table.name}.csv", {name.removeprefix("env_"): text for name, text in run.items() if text})
        for table in current.tables(RESULTS)
        for run in table.runs()
    ]
    paths = [path for path in sorted(EXPERIMENTS.glob("*/*.md")) if path.name != "README.md"]
    return of_tables + [Run(path, _facts(path)) for path in paths]


def _facts(path: pathlib.Path) -> dict[str, str]:
    lines = re.findall(r"^- ([^:\n]+): (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: value.strip() for name, value in reversed(lines)}


def state(facts: Mapping[str, str], root: pathlib.Path = provenance.REPOSITORY) -> str:
    """Says in words whether a run's commit is in the history of `root`. Begins with WRONG if `facts` are wrong."""
    named = facts.get("commit", "")
    words = next((words for words in _WORDS if f"({words}" in named), "")
    if words == _LOST:
        return _LOST
    name = re.match(r"[0-9a-f]{7,40}\b", named)
    commit = name and provenance.in_history(name[0], root)
    if not commit:
        return f"WRONG: {named or 'no commit'!r} is no commit of this history, and does not say so"
    if words:
        return words
    code = facts.get("code", "").removeprefix("overlap ")
    if code and not (provenance.git(root, "rev-parse", f"{commit}:overlap") or "").startswith(code):
        return f"WRONG: overlap/ of {commit[:12]} has another hash than {code}"
    if provenance.UNVERIFIED in named:
        return "verified by the hash of overlap/" if code else "WRONG: unverified, and no hash of overlap/ is recorded"
    return "in this history"


def tables_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the CSV files beside the markdown file `path` of an experiment, if their rows name a commit."""
    files = [path.with_name(path.stem + suffix) for suffix in (".csv", ".rounds.csv", ".summary.csv")]
    return [file for file in files if file.exists() and "env_commit" in file.open(encoding="utf-8").readline()]


def commits_in_rows(path: pathlib.Path) -> set[str]:
    """Returns the commits that the rows of a CSV file name."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["env_commit"] for row in csv.DictReader(file)}


# --- What is written --------------------------------------------------------------------------------------------------


def text() -> str:
    """Writes the text of the index."""
    tables = current.tables(RESULTS)
    lines = [_HEAD, *_overview(tables)]
    for table in tables:
        lines += ["", *_table(table)]
    lines.append(_EXPERIMENTS)
    for folder in experiments():
        lines += [*_experiment(folder), ""]
    return "\n".join(lines).rstrip() + "\n"


def _overview(tables: Sequence[current.Table]) -> list[str]:
    """Writes the lines of a markdown table with a row for each table of current results."""
    rows = []
    for table in tables:
        fused = [row["xla_over_this"] for row in table.rows if row["method"] == "fused"]
        ratios = [float(ratio) for ratio in fused if ratio]
        gain = f"{min(ratios):.2f} – {max(ratios):.2f}" if ratios else "–"
        rows.append(
            (
                f"[{table.name}]({table.name}.md)",
                table.operation,
                table.device_kind,
                str(table.devices),
                table.layout,
                str(len(table.problems())),
                gain,
                table.runs()[-1]["env_date"],
            )
        )
    headings = ("file", "operation", "device", "count", "layout", "problems", "XLA / fused", "newest run")
    return current.lines(headings, rows)


def _table(table: current.Table) -> Iterator[str]:
    yield f"## {current.title(table)}"
    yield ""
    rows = []
    for problem in table.problems():
        fused = current.method(problem, "fused")
        times = [current.number(current.method(problem, name), "loop_us", 1) for name in ("fused", "xla", "roof")]
        ratios = [current.number(fused, f"{name}_over_this", 2) for name in ("xla", "roof")]
        run = current.run_number(table, problem[0])
        rows.append((current.words_of_problem(problem[0]), *times, *ratios, problem[0]["env_date"], run))
    headings = (
        "(m, n, k) per shard",
        "fused, µs",
        "XLA, µs",
        "roof, µs",
        "XLA / fused",
        "roof / fused",
        "measured",
        "run",
    )
    yield from current.lines(headings, rows)
    yield ""
    yield from current.run_lines(table)
    yield ""
    yield "To measure all of it again, from the root of the repository, on a tree that is committed:"
    yield ""
    yield f"    {current.again(table)}"


def _experiment(folder: pathlib.Path) -> Iterator[str]:
    question, _, answer = (folder / "README.md").read_text(encoding="utf-8").partition("\n")
    link = (pathlib.Path("..") / folder.relative_to(RESULTS.parent)).as_posix()
    yield f"## {folder.name[:10]}: {question.removeprefix('# ')}"
    yield ""
    yield answer.strip()
    yield ""
    rows = []
    for path in sorted(folder.glob("*.md")):
        if path.name != "README.md":
            facts = _facts(path)
            rows.append(
                (
                    f"[{path.stem}]({link}/{path.name})",
                    facts.get("date", "–"),
                    facts.get("commit", "–"),
                    current.command_of(facts.get("command", "")),
                )
            )
    yield from current.lines(("run", "measured", "commit", "command"), rows)


def generated() -> dict[pathlib.Path, str]:
    """Returns the paths of all generated files, each with the text that the file must have."""
    tables = current.tables(RESULTS)
    files = {RESULTS / f"{table.name}.md": current.markdown(table) for table in tables}
    return files | {INDEX: text(), readme.FILE: readme.text(readme.FILE.read_text(encoding="utf-8"), tables)}


def main() -> int:
    """Writes all generated files. Returns 1 if a run contradicts the history, else 0."""
    command.tool_parser("index", __doc__).parse_args()
    for path, content in generated().items():
        replace(path, content)
    wrong = [(run.path.name, said) for run in runs() if (said := state(run.facts)).startswith("WRONG")]
    for name, said in wrong:
        print(f"{name}: {said}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(ending.run(main))
