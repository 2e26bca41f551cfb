"""docs/ and the READMEs: code runs at small sizes, commands parse, files exist, quoted messages are the library's."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap.layers
import overlap.primitives
from overlap import cli
from tests.choice.tuning_cases import one_configuration_is_enough
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


# For each page (or pages that are read together) the sizes to replace, and the shapes of some names at the end.
RUN: dict[str, tuple[dict[str, str], dict[str, tuple[int, ...]]]] = {
    "index.md": ({"16384": "128", "4096": "64", "1024": "16"}, {"y": (64, 64)}),
    "sharded.md": ({"1024": "16", "512": "32", "2048": "64"}, {"y": (4, 16, 32), "h": (4, 16, 64)}),
    "shard_map.md choosing.md": (
        {"16384": "256", "8192": "128", "4096": "64", "1024": "16"},
        {"y": (128, 64), "tokens": (16, 64), "h": (128, 256), "quantized": (128, 256), "c": (64, 128)},
    ),
    "experts.md": (
        {"8192": "16", "2048": "16", "6144": "32", "768": "8", "128": "12", "12, 8,": "12, 2,", ", 8)": ", 2)"},
        {"x": (2, 16, 16), "y": (16, 16)},
    ),
    "loss.md": ({}, {"loss": (), "dx": (256, 128), "dw": (128, 1024)}),
    "primitives.md": ({}, {"gathered": (4, 32, 1024), "y": (32, 1024)}),
    "README.md": ({"1024": "16", "4096": "64"}, {}),
    OF_EMULATOR: ({}, {}),
}


@pytest.mark.parametrize("pages", RUN)
def test_code_runs(pages: str) -> None:
    """Runs the blocks one after the other, each with the names of those before it."""
    names, (sizes, shapes) = dict[str, Any](), RUN[pages]
    before = jax.sharding.get_mesh()
    try:
        for page in pages.split():
            assert blocks(page, "python")
            for block in blocks(page, "python"):
                for size, small in sizes.items():
                    block = block.replace(size, small)
                block = re.sub(r"^jax\.config\.update.*$", "", block, flags=re.MULTILINE)
                exec(compile(block, page, "exec"), names)
    finally:
        jax.set_mesh(before)
    assert {name: getattr(names.get(name), "shape", None) for name in shapes} == shapes
    if "choosing.md" in pages:
        for rows in names["quantize"](jnp.zeros((2, 4))):  # Rows of zeros have a scale.
            assert np.isfinite(np.asarray(rows, np.float32)).all()
        assert names["answer"].implementation in ("fused", "xla")
    if pages == "README.md":
        rng, devices = np.random.default_rng(0), jax.device_count()
        wide = 8 * devices
        x, gate, up, down = (
            rng.standard_normal(shape).astype(np.float16) / 4
            for shape in ((wide, 16), (16, wide), (16, wide), (wide, 16))
        )
        z, y = x.astype(np.float32) @ gate, x.astype(np.float32) @ up
        expected = (z / (1 + np.exp(-z)) * y) @ down.astype(np.float32)
        np.testing.assert_allclose(np.asarray(names["block"](x, gate, up, down), np.float32), expected, atol=0.02)


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
    assert pages >= {"index.md", "launching.md", "tracing.md", "troubleshooting.md", "README.md"}
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
