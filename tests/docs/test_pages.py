"""docs/ and the READMEs: code runs at small sizes, commands parse, files exist, quoted messages are the library's."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

import mosaic_emulator
import overlap.layers
import overlap.primitives
from overlap import cli
from tests.choice.tuning_cases import one_configuration_is_enough
from tests.docs import run_pages
from tests.docs.sources import tree_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
OF_EMULATOR = "mosaic_emulator/README.md"
PAGES = {path.name: path for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES |= {name: ROOT / name for name in ("README.md", OF_EMULATOR)}
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Variables that only this project's own programs set for each other, or that only its tests read.
_INTERNAL = {"OVERLAP_RANDOM_CASES", "OVERLAP_JOINED"}


def blocks(page: str, language: str) -> list[str]:
    return [code for kind, code in _FENCED.findall(PAGES[page].read_text()) if kind == language]


# --- Code -------------------------------------------------------------------------------------------------------------


DEVICES = 4
MOST_GIB, MOST_S = 8, 120  # Pages promise the first. The second is for busy machines: alone it takes about 15 s.


def test_code_runs_as_it_stands(tmp_path: pathlib.Path) -> None:
    """One process with as many devices as the pages name runs all of them (docs/EMULATION.md: tests/emulation)."""
    pages = {path.relative_to(ROOT).as_posix() for name, path in PAGES.items() if blocks(name, "python")}
    assert run_pages.SHAPES.keys() == pages - {"docs/EMULATION.md"}
    own = {"OVERLAP_TUNING_DIR": str(tmp_path), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    # That of primitives comes first: it sets the number of devices, which is refused once they are used.
    ordered = sorted(run_pages.SHAPES, key=lambda page: page != "docs/primitives.md")
    done = subprocess.run(
        [sys.executable, run_pages.__file__, *ordered],
        cwd=ROOT, env=os.environ | own | cpu, capture_output=True, text=True, timeout=MOST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) < MOST_GIB


@pytest.mark.parametrize("page", [page for page in run_pages.SHAPES if page.startswith("docs/")])
def test_a_page_with_code_names_its_devices(page: str) -> None:
    """A page whose code makes a mesh of fixed sizes says how many devices that takes."""
    text = (ROOT / page).read_text()
    sizes = {math.prod(map(int, re.findall(r"\d+", mesh))) for mesh in re.findall(r"make_mesh\(\(([\d, ]+)\)", text)}
    assert sizes <= {DEVICES}
    assert not sizes or f"{DEVICES} devices" in text or "four devices" in text


def test_functions_on_the_page_on_primitives_equal_the_examples() -> None:
    """Other tests run examples/."""
    examples = [(ROOT / "examples" / name).read_text() for name in ("all_gather.py", "halo_exchange.py")]
    for block in blocks("primitives.md", "python"):
        for node in ast.parse(block).body:
            if isinstance(node, ast.FunctionDef) and node.name != "on_mesh":
                text = "\n".join(block.splitlines()[node.lineno - 1 : node.end_lineno])
                assert any(text in example for example in examples), node.name


def spans() -> list[str]:
    """The README's code spans outside of fenced blocks, each as one line."""
    return [
        " ".join(span.split()) for span in re.findall(r"`([^`]+)`", _FENCED.sub("", PAGES["README.md"].read_text()))
    ]


def test_spans_of_the_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run; names such as `overlap.layers.GatedMLP` and files exist."""
    one_configuration_is_enough(monkeypatch)
    names = {"overlap": overlap, "layers": overlap.layers, "primitives": overlap.primitives}
    matrix = jnp.ones((64, 64), jnp.bfloat16)
    operands = {"fn": lambda x, w: overlap.matmul(x, w, implementation="fused"), "args": (matrix, matrix)}
    calls = {span for span in spans() if re.search(r"\boverlap(\.\w+)+\(", span)}
    dotted = {span for span in spans() if re.fullmatch(r"overlap(\.\w+)+", span)}
    assert len(dotted) > 3 and len(calls) > 1
    for code in calls:
        exec(code, names | operands)
    for name in dotted:
        eval(name, names)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", PAGES["README.md"].read_text())
    files = {path for link in links for path in link if path}
    files |= {span for span in spans() if re.fullmatch(r"[\w./-]+(/|\.(md|py|txt|png|sh|csv))", span)}
    assert len(files) > 12
    assert not [path for path in files if not (ROOT / path).exists()]


def test_links_of_the_emulators_readme() -> None:
    links = re.findall(r"\]\(([^)#]+)", PAGES[OF_EMULATOR].read_text())
    assert links and not [link for link in links if not (PAGES[OF_EMULATOR].parent / link).exists()]


# --- Commands ---------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, str]]:
    """(page, command) for each line of each `sh` block; lines that end with a backslash are joined."""
    for page in PAGES:
        for block in blocks(page, "sh"):
            lines = block.replace("\\\n", " ").splitlines()
            yield from ((page, line) for line in lines if line.strip() and not line.lstrip().startswith("#"))
    yield from (("README.md", f"python -m overlap {span}") for span in re.findall(
        r"python -m overlap (\w[^`\n#]*)", PAGES["README.md"].read_text()))  # fmt: skip


def test_commands() -> None:
    """Everything that a command names exists, and this library's own commands accept their arguments."""
    pages = {page for page, _ in commands()}
    assert pages >= {"quickstart.md", "launching.md", "tracing.md", "troubleshooting.md", "README.md"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page, command in commands():
        for part in re.split(r"&&|\|", command):
            words, said = shlex.split(part, comments=True), (page, command)
            part = " ".join(words)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words[:3] == ["python", "-m", "overlap"]:
                cli._parser().parse_args(words[3:])
            elif words[:2] == ["pip", "install"]:
                assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*?)\]", part)))) <= set(extras), said
            elif words[0] == "make":
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), said
            elif "/" in words[0]:
                assert (ROOT / words[0]).exists(), said
            for word in words:
                if re.match(r"(launch|docs|benchmarks|examples)/", word):
                    assert (ROOT / word).exists(), said


# --- Messages and variables -------------------------------------------------------------------------------------------


@functools.cache
def said() -> str:
    """All message texts of the library and its scripts; varying parts of f-strings are left out."""
    texts = [path.read_text() for path in sorted((ROOT / "launch").iterdir())]
    for path in (path for folder in ("overlap", "mosaic_emulator") for path in sorted((ROOT / folder).rglob("*.py"))):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.JoinedStr):
                texts.append("…".join(n.value for n in node.values if isinstance(n, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return " ".join(" ".join(texts).split())


def test_messages_are_those_of_the_library() -> None:
    for message in [block for page in ("troubleshooting.md", "launching.md") for block in blocks(page, "text")]:
        parts = [" ".join(part.split()) for part in message.strip().split("…")]
        assert max(map(len, parts)) >= 12, f"too little to be found by: {message}"
        for part in parts:
            # The code may fill in a number or a variable's name.
            with_gaps = re.sub(r"\b(\d+|OVERLAP_\w+)\b", "…", part).strip(" :;,.()")
            assert part.strip(" :;,.()") in said() or with_gaps in said(), part


def test_all_variables_are_explained() -> None:
    texts = [said(), *(path.read_text() for folder in ("setup", "launch") for path in (ROOT / folder).iterdir())]
    used = set(re.findall(r"OVERLAP_[A-Z0-9_]*[A-Z0-9]", " ".join(texts)))
    text = PAGES["environment.md"].read_text()
    assert set(re.findall(r"^\| `(OVERLAP_\w+)`", text, re.MULTILINE)) == used - _INTERNAL


def test_all_pages_are_built() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == PAGES.keys() - {"README.md", OF_EMULATOR}
    # With --strict each warning stops the build: for a broken link, to a page or to a heading in it.
    assert "anchors: warn" in (ROOT / "mkdocs.yml").read_text()


def test_the_reference_has_all_public_names() -> None:
    """A page without a list has all of a package's `__all__`, which mkdocstrings reads."""
    for page, package in (
        ("reference.md", overlap),
        ("reference_layers.md", overlap.layers),
        ("reference_primitives.md", overlap.primitives),
        ("reference_emulator.md", mosaic_emulator),
    ):
        text = PAGES[page].read_text()
        assert f"\n::: {package.__name__}\n" in text
        if members := re.search(r"members: \[(.*)\]", text):
            assert set(members[1].split(", ")) == set(package.__all__) - {"emulation"}


def test_tables_have_headers() -> None:
    for page, path in PAGES.items():
        lines = path.read_text().splitlines()
        for above, line in itertools.pairwise(lines):
            if re.fullmatch(r"\|[-| :]+\|", line):
                assert all(cell.strip() for cell in above.strip("|").split("|")), (page, above)
