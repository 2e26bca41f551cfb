"""The pre-commit and GitHub files run the Makefile's own targets: everything that `make test` needs on a CPU."""

from __future__ import annotations

import re

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, which mkdocs brings, is not installed: pip install '.[docs]'")
pytestmark = pytest.mark.one_jax


@pytest.fixture(scope="module")
def targets(repository):
    """Maps each target of the Makefile to the targets that it depends on."""
    lines = re.findall(r"^([a-z][\w.-]*):([^=#\n]*)", (repository / "Makefile").read_text(), re.MULTILINE)
    return {target: needed.split() for target, needed in lines}


def test_the_hooks_of_pre_commit(repository, targets):
    (local,) = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in local["hooks"]}
    assert local["repo"] == "local" and hooks.keys() == {"lint", "test"}
    for hook in hooks.values():
        command, target = hook["entry"].split()
        assert command == "make" and target in targets and not hook["pass_filenames"]


def test_the_workflow_of_github(repository, targets):
    (job,) = yaml.safe_load((repository / ".github" / "workflows" / "tests.yml").read_text())["jobs"].values()
    *actions, run = job["steps"]
    assert run == {"run": "make ${{ matrix.target }}"} and all("uses" in step for step in actions)
    assert actions[-1]["with"] == {"python-version": "3.12"}
    run_there = job["strategy"]["matrix"]["target"]
    # CI has no GPUs.
    assert set(run_there) == set(targets["test"]) - {"test-gpu"} <= targets.keys()
