"""docs/upstream.md: a section for each module of `overlap/_compat/`, and jax fails as the section says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import jax
import pytest

_TEXT = re.compile(r"^```text\n(.*?)\n^```$", re.MULTILINE | re.DOTALL)
_FIXED = re.compile(r"\*\*Fixed in jax ([\d.]+\d)\*\*")
_MACHINERY = {"__init__", "mend"}


@pytest.fixture(scope="module")
def sections(repository):
    """Maps the anchor of each section to its text."""
    _, *texts = re.split(r"^## ", (repository / "docs" / "upstream.md").read_text(), flags=re.MULTILINE)
    return {text.partition("\n")[0].lower().replace(" ", "-"): text for text in texts}


def test_each_module_has_a_section_and_each_section_a_module(repository, sections):
    named = set()
    for path in (repository / "overlap" / "_compat").glob("*.py"):
        if path.stem in _MACHINERY:
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        # The reason, the versions, the possible replacement, and the section.
        for word in ("Reason:", "0.11.2 and 0.12.0.1", "Replaced by:"):
            assert word in docstring, (path.name, word)
        (section,) = re.findall(r"For upstream: docs/upstream\.md#([\w-]+)\.", docstring)
        named.add(section)
        assert f"Module: `{path.name}`" in sections[section]
    assert named == sections.keys() and len(named) > 8


def test_jax_fails_as_the_sections_say(repository, sections):
    """If a case no longer fails, jax is fixed and the workaround may go.

    A section may say in which version of jax it is fixed. From that version on, the case must not fail.
    """
    program = repository / "tests" / "upstream_cases.py"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    failures = ast.literal_eval(done.stdout.splitlines()[-1])
    messages = {name: found[1] for name, text in sections.items() if (found := _TEXT.search(text))}
    assert failures.keys() == messages.keys()
    for name, message in messages.items():
        fixed = _FIXED.search(sections[name])
        if fixed and jax.__version_info__ >= tuple(map(int, fixed[1].split("."))):
            assert failures[name] is None, name
        else:
            assert message in (failures[name] or "nothing failed"), name
