"""Checks docs/: code runs, commands parse, quoted messages are the library's, no environment variable is missing."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import jax
import pytest

from overlap import cli

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Variables that only this project's own programs set for each other, or that only its tests read.
_INTERNAL = {"OVERLAP_RANDOM_CASES", "OVERLAP_JOINED"}


def blocks(page: str, language: str) -> list[str]:
    return [code for kind, code in _FENCED.findall((DOCS / page).read_text()) if kind == language]


def test_the_quickstart_runs() -> None:
    names: dict[str, object] = {}
    python = blocks("index.md", "python")
    assert len(python) == 2
    for block in python:
        for size, small in (("16384", "128"), ("4096", "64"), ("1024", "16")):
            block = block.replace(size, small)
        exec(compile(block, "index.md", "exec"), names)
    assert getattr(names["y"], "shape", None) == (64, 64)


def test_the_page_on_global_arrays_runs() -> None:
    names: dict[str, object] = {}
    before = jax.sharding.get_mesh()
    try:
        for block in blocks("sharded.md", "python"):
            for size, small in (("1024", "16"), ("512", "32"), ("2048", "64")):
                block = block.replace(size, small)
            exec(compile(block, "sharded.md", "exec"), names)
    finally:
        jax.set_mesh(before)
    assert getattr(names["y"], "shape", None) == (4, 16, 32)
    assert getattr(names["h"], "shape", None) == (4, 16, 64)


def test_the_pages_on_operations_and_on_the_choice_run() -> None:
    names: dict[str, object] = {}
    for page in ("shard_map.md", "choosing.md"):
        for block in blocks(page, "python"):
            for size, small in (("16384", "256"), ("8192", "128"), ("4096", "64"), ("1024", "16")):
                block = block.replace(size, small)
            exec(compile(block, page, "exec"), names)
    shapes = {name: getattr(names[name], "shape", None) for name in ("y", "tokens", "h", "quantized", "c")}
    expected = {"y": (128, 64), "tokens": (16, 64), "h": (128, 256), "quantized": (128, 256), "c": (64, 128)}
    assert shapes == expected
    assert getattr(names["answer"], "implementation", None) in ("fused", "xla")


def test_the_page_on_primitives_runs() -> None:
    """The page's functions equal those in examples/, which other tests run."""
    examples = [(ROOT / "examples" / name).read_text() for name in ("all_gather.py", "halo_exchange.py")]
    names: dict[str, object] = {}
    for block in blocks("primitives.md", "python"):
        for node in ast.parse(block).body:
            if isinstance(node, ast.FunctionDef) and node.name != "on_mesh":
                text = "\n".join(block.splitlines()[node.lineno - 1 : node.end_lineno])
                assert any(text in example for example in examples), node.name
        block = re.sub(r"^jax\.config\.update.*$", "", block, flags=re.MULTILINE)
        exec(compile(block, "primitives.md", "exec"), names)
    assert getattr(names["gathered"], "shape", None) == (4, 32, 1024)
    assert getattr(names["y"], "shape", None) == (32, 1024)


def commands() -> list[tuple[str, str]]:
    """(page, command) for each line of each `sh` block; lines that end with a backslash are joined."""
    found = []
    for page in sorted(DOCS.glob("*.md")):
        for block in blocks(page.name, "sh"):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line) for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return found


def test_there_are_commands() -> None:
    assert {page for page, _ in commands()} >= {"index.md", "launching.md", "tracing.md", "troubleshooting.md"}


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands(page: str, command: str) -> None:
    """Everything that a command names exists, and this library's own commands accept their arguments."""
    for part in re.split(r"&&|\|", command):
        words = shlex.split(part, comments=True)
        part = " ".join(words)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:3] == ["python", "-m", "overlap"]:
            cli._parser().parse_args(words[3:])
        elif words[:2] == ["pip", "install"]:
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*?)\]", part)))) <= set(extras)
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif "/" in words[0]:
            assert (ROOT / words[0]).exists(), words[0]
        for word in words:
            if re.match(r"(launch|docs|benchmarks|examples)/", word):
                assert (ROOT / word).exists(), word


@functools.cache
def said() -> str:
    """All message texts of the library and its scripts; varying parts of f-strings are left out."""
    texts = [path.read_text() for path in sorted((ROOT / "launch").iterdir())]
    for path in sorted((ROOT / "overlap").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("…".join(n.value for n in node.values if isinstance(n, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return " ".join(" ".join(texts).split())


def messages() -> list[str]:
    return [block.strip() for page in ("troubleshooting.md", "launching.md") for block in blocks(page, "text")]


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_library(message: str) -> None:
    parts = [" ".join(part.split()) for part in message.split("…")]
    assert max(map(len, parts)) >= 12, "too little to be found by"
    for part in parts:
        # The code may fill in a number or a variable's name.
        as_written, with_gaps = part.strip(" :;,.()"), re.sub(r"\b(\d+|OVERLAP_\w+)\b", "…", part).strip(" :;,.()")
        assert as_written in said() or with_gaps in said(), part


def test_all_variables_are_explained() -> None:
    used = set(re.findall(r"OVERLAP_[A-Z0-9_]*[A-Z0-9]", said()))
    for folder in ("setup", "launch"):
        for path in (ROOT / folder).iterdir():
            used |= set(re.findall(r"OVERLAP_[A-Z0-9_]*[A-Z0-9]", path.read_text()))
    text = (DOCS / "environment.md").read_text()
    explained = set(re.findall(r"^\| `(OVERLAP_\w+)`", text, re.MULTILINE))
    assert explained == used - _INTERNAL


def test_all_pages_are_built() -> None:
    listed = set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.name for path in DOCS.glob("*.md")}


@pytest.mark.one_jax
def test_the_pages_are_built_strictly(tmp_path: pathlib.Path) -> None:
    """As in `make docs`, a broken link is an error."""
    pytest.importorskip("material", reason="mkdocs-material is not installed (extra `docs`)")
    docs = tmp_path / "docs"
    docs.mkdir()
    for path in DOCS.glob("*.md"):
        (docs / path.name).write_text(path.read_text())
    shutil.copytree(DOCS / "stylesheets", docs / "stylesheets")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())

    def build() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)

    with (docs / "index.md").open("a") as page:
        page.write("\nSee [nothing](nowhere.md) and [no heading](launching.md#nowhere).\n")
    broken = build()
    assert broken.returncode != 0
    assert "nowhere.md" in broken.stderr
    assert "launching.md#nowhere" in broken.stderr
