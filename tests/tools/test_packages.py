"""The contents of the two packages, built by the build backend in this process: no network is needed."""

import pathlib
import subprocess
import tarfile
import tomllib

import pytest

pytest.importorskip("hatchling", reason="hatchling, which builds the packages, is not installed: pip install '.[dev]'")
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import overlap

pytestmark = pytest.mark.one_jax
# The tests do not need this file: it calls `make test` on the CI machines.
NOT_IN_THE_SDIST = {".ci/run"}


def test_the_sdist_holds_what_its_tests_need(repository, tmp_path):
    """The sdist has every file in git: a test may import, open or run any of them."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=False)
    if not (repository / ".git").exists() or git.returncode:
        pytest.skip("needs a checkout: this is a copy without .git, or git does not read it")
    # A file may be deleted here but not yet in git.
    kept = {name for name in git.stdout.split("\0") if name and (repository / name).exists()}
    assert len(kept) > 500 and kept > NOT_IN_THE_SDIST
    (sdist,) = SdistBuilder(str(repository)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    assert not sorted(kept - held - NOT_IN_THE_SDIST), "add them to pyproject.toml, tool.hatch.build.targets.sdist"
    folders = {pathlib.PurePath(name).parts[0] for name in held}
    assert folders <= {pathlib.PurePath(name).parts[0] for name in kept}, "a folder that git does not keep"


def test_the_wheel_holds_the_library_and_its_emulator_in_its_version_and_its_tools_are_pinned(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["version"] == overlap.__version__
    pinned = {line.partition("==")[0] for line in (repository / "constraints" / "common.txt").read_text().splitlines()}
    tools = {extra.partition(">")[0] for extra in project["optional-dependencies"]["dev"]}
    assert {tool for tool in tools if not tool.startswith("overlap")} <= pinned
    here = {
        path.relative_to(repository).as_posix()
        for package in ("overlap", "mosaic_emulator")
        for path in (repository / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    tables = {"overlap/choice/crossover.csv", "overlap/choice/rates_h200.json", "overlap/choice/tables/h200.json"}
    typed = {"overlap/py.typed", "mosaic_emulator/py.typed"}
    assert {"overlap/__main__.py", "overlap/cli/__init__.py"} | typed | tables < here
    assert {file.distribution_path for file in WheelBuilder(str(repository)).recurse_included_files()} == here
