"""`python -m benchmarks.index`: writes benchmarks/results/README.md, which says of each result what code it is of.

A result names its commit in a line `- commit: HASH`, with words behind the hash where it is not simply that:

    HASH (unverified: not in a repository here)    measured on a copy; the line `- code:` verifies it
    NAME (not in this history: …)          a commit that was rewritten, or a tree that was never committed
    HASH (with changes: …)                 that commit and more
    HASH (before it was committed)         a tree that became that commit
"""

from __future__ import annotations

import csv
import dataclasses
import pathlib
import re
import sys
from collections.abc import Mapping

from benchmarks import provenance

RESULTS = provenance.REPOSITORY / "benchmarks" / "results"
INDEX = RESULTS / "README.md"
_LOST = "not in this history"
_WORDS = (_LOST, "with changes", "before it was committed")
_HEAD = """# Results

Made by `python -m benchmarks.index`; do not edit. A row is a file of tables (.md); beside it lie the same numbers
(.csv) and, of some, each round's (.rounds.csv). Results without a command are older than the harness that records it,
or made by hand.

*Commit*: the code that ran. "Not in this history": the numbers stand, the code is lost (a commit that was rewritten
later, or a tree that was never committed as it was). "After" is the last commit before the measurement. The harness now
refuses to measure such a tree.

| result | measured | commit | command |
| --- | --- | --- | --- |
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """A result and what its first lines say of it."""

    path: pathlib.Path
    facts: Mapping[str, str]


def results() -> list[Result]:
    """All results, by path."""
    return [Result(path, _facts(path)) for path in sorted(RESULTS.glob("*/*.md"))]


def _facts(path: pathlib.Path) -> dict[str, str]:
    lines = re.findall(r"^- ([^:\n]+): (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: value.strip() for name, value in reversed(lines)}


def state(facts: Mapping[str, str], root: pathlib.Path = provenance.REPOSITORY) -> str:
    """What the history in `root` says of the commit that a result names; begins with WRONG if they contradict."""
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
    """The CSV files of a result whose rows name a commit."""
    files = [path.with_name(path.stem + suffix) for suffix in (".csv", ".rounds.csv", ".summary.csv")]
    return [file for file in files if file.exists() and "env_commit" in file.open(encoding="utf-8").readline()]


def commits_in_rows(path: pathlib.Path) -> set[str]:
    """The commits that the rows of a CSV file name."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["env_commit"] for row in csv.DictReader(file)}


def text() -> str:
    """The index."""
    lines = []
    for result in results():
        name = result.path.relative_to(RESULTS)
        cells = [f"[{name.with_suffix('')}]({name})", result.facts.get("date", "–"), result.facts.get("commit", "–"),
                 f"`{result.facts['command']}`" if "command" in result.facts else "–"]  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return _HEAD + "".join(lines)


def main() -> int:
    """Writes the index; 1 if a result contradicts the history."""
    INDEX.write_text(text(), encoding="utf-8")
    wrong = [(result.path.name, said) for result in results() if (said := state(result.facts)).startswith("WRONG")]
    for name, said in wrong:
        print(f"{name}: {said}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
