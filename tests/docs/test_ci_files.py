"""The pre-commit and GitHub files run the Makefile's own targets: everything that `make test` needs on a CPU."""

import re

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML, which mkdocs brings, is not installed: pip install '.[docs]'")
pytestmark = pytest.mark.one_jax


def test_hooks_and_workflow_run_the_targets_of_the_makefile(repository):
    lines = re.findall(r"^([a-z][\w.-]*):([^=#\n]*)", (repository / "Makefile").read_text(), re.MULTILINE)
    targets = {target: needed.split() for target, needed in lines}
    (local,) = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local" and {hook["id"] for hook in local["hooks"]} == {"lint", "test"}
    for hook in local["hooks"]:
        command, target = hook["entry"].split()
        assert command == "make" and target in targets and not hook["pass_filenames"]
    (job,) = yaml.safe_load((repository / ".github" / "workflows" / "tests.yml").read_text())["jobs"].values()
    *actions, run = job["steps"]
    assert run == {"run": "make ${{ matrix.target }}"} and all("uses" in step for step in actions)
    assert actions[-1]["with"] == {"python-version": "3.12"}
    # CI has no GPUs.
    assert set(job["strategy"]["matrix"]["target"]) == set(targets["test"]) - {"test-gpu"} <= targets.keys()
