"""docs/upstream/: one text for each module of `overlap/_compat/`, and reproducers that fail as documented."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import jax
import pytest

_PYTHON, _TEXT = (re.compile(rf"^```{kind}\n(.*?)^```$", re.MULTILINE | re.DOTALL) for kind in ("python", "text"))
_FIXED = re.compile(r"^\*\*Versions:\*\*.*; fixed in jax ([\d.]+\d)", re.MULTILINE)
_MACHINERY = {"__init__", "mend"}


@pytest.fixture(scope="module")
def pages(repository):
    return {page.name: page.read_text() for page in (repository / "docs" / "upstream").glob("*.md")}


def test_each_thing_has_a_text_and_each_text_a_thing(repository, pages):
    named = set()
    for path in (repository / "overlap" / "_compat").glob("*.py"):
        if path.stem in _MACHINERY:
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        # The reason, the versions, the possible replacement, and the text.
        for word in ("Reason:", "0.11.2 and 0.12.0.1", "Replaced by:"):
            assert word in docstring, (path.name, word)
        (page,) = re.findall(r"For upstream: docs/upstream/([\w-]+\.md)\.", docstring)
        named.add(page)
        assert f"`{path.name}`" in pages["README.md"]
    assert named == pages.keys() - {"README.md"} and len(named) > 8
    assert all(f"({page})" in pages["README.md"] for page in named)


def test_reproducers_fail_as_they_say(pages):
    """All run in one process, without this library. If one no longer fails, jax is fixed and the workaround may go.

    A text may say in which version of jax its reproducer is fixed. From that version on, it must not fail.
    """
    blocks = {name: (_PYTHON.search(text), _TEXT.search(text)) for name, text in pages.items()}
    cases = {name: (code[1], said[1].strip()) for name, (code, said) in blocks.items() if code and said}
    assert len(cases) == 7
    attempt = "try:\n    exec({!r}, {{}})\nexcept Exception as error:\n    failures[{!r}] = str(error)"
    attempts = (attempt.format(code, name) for name, (code, _) in cases.items())
    program = "\n".join(["failures = {}", *attempts, "print(failures)"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    failures = ast.literal_eval(done.stdout.splitlines()[-1])
    for name, (_, message) in cases.items():
        fixed = _FIXED.search(pages[name])
        if fixed and jax.__version_info__ >= tuple(map(int, fixed[1].split("."))):
            assert name not in failures
        else:
            assert message in failures.get(name, "nothing failed"), name
