"""Environments without jax, with an unsupported or broken jax, without numpy, or with an old Python.

There `python -m overlap doctor` answers, the other commands end with one line, and `import overlap` reports the reason
at first use. Missing or broken packages are folders on PYTHONPATH, in child processes.
"""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import tomllib

import jax
import pytest

import overlap
from overlap import _requirements
from overlap.cli import doctor, main

pytestmark = pytest.mark.one_jax
# What a package on PYTHONPATH does when imported, and the expected message.
BROKEN = {
    "jax missing": ("jax", "raise ModuleNotFoundError(\"No module named 'jax'\")", "No module named 'jax'"),
    "jaxlib broken": ("jax", "raise AttributeError(\"module 'jaxlib' has no attribute 'x'\")", "no attribute 'x'"),
    "numpy missing": ("numpy", "raise ModuleNotFoundError(\"No module named 'numpy'\")", "No module named 'numpy'"),
    "jax 0.10": ("jax", '__version__ = "0.10.2"', "0.10.2"),
    "a folder": ("jax", "", "no jax"),
    "jax crashes": ("jax", "import os; os.abort()", "signal 6"),
}
COMMANDS = """
import sys
from overlap.cli import main
for command in (["demo"], ["soak"], ["tune", "--shapes", "1x2x3"], ["trace"]):
    assert main(command) == 1
import overlap
assert overlap.__version__ and "matmul" in dir(overlap)
try:
    overlap.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
try:
    from overlap import matmul
except ImportError as error:
    print(error, file=sys.stderr)
"""


def run(
    line: list[str], repository: pathlib.Path, *packages: pathlib.Path, **changes: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (*packages, repository)))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "", "COLUMNS": "400"} | changes
    return subprocess.run(
        line, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("kind", BROKEN)
def test_doctor_answers_and_the_other_commands_say_why_not(repository, tmp_path, monkeypatch, capsys, kind):
    package, code, said = BROKEN[kind]
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(code + "\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(repository))))
    # The checks of jax, which import it in a child process anyway.
    checks = {name: doctor.CHECKS[name] for name in ("Python", "jax", "GPUs", "settings", "emulator")}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    facts = {fact["subject"]: fact for fact in found["facts"]}
    assert "jax" in found["problems"] and said in facts["jax"]["found"] and facts["jax"]["advice"]
    assert facts["emulator"]["found"] == "not tried: see jax" and not found["can_run"]
    if kind not in ("jaxlib broken", "numpy missing", "jax 0.10"):
        return
    others = run([sys.executable, "-c", COMMANDS], repository, tmp_path)
    assert others.returncode == 0, others.stderr
    lines = others.stderr.splitlines()
    names = ["demo: ", "soak: ", "tune: ", "trace: ", "overlap.matmul cannot be loaded: "]
    assert [line.startswith(name) for line, name in zip(lines, names, strict=True)] == [True] * 5
    for line in lines:
        assert said in line and line.endswith("see `python -m overlap doctor`"), line


def _old_python() -> str | None:
    candidates = [shutil.which("python3.11"), *pathlib.Path.home().glob(".pyenv/versions/3.11.*/bin/python3")]
    return next((str(path) for path in candidates if path), None)


@pytest.mark.skipif(_old_python() is None, reason="there is no Python 3.11 here")
def test_on_python_3_11(repository):
    asked = run([str(_old_python()), "-m", "overlap", "doctor"], repository)
    assert asked.returncode == 1 and not asked.stderr, asked.stderr
    assert re.search(r"→ Python 3\.11\.\d+ is too old: overlap needs >= 3\.12, ", asked.stdout)
    assert "Wrong here: Python" in asked.stdout
    for line in (["-m", "benchmarks"], ["-c", "import overlap; overlap.matmul"]):
        other = run([str(_old_python()), *line], repository)
        assert other.returncode == 1
        assert "Python 3.11" in other.stderr.splitlines()[-1] and "python -m overlap doctor" in other.stderr
        assert line[0] == "-c" or len(other.stderr.splitlines()) == 1


def test_what_doctor_imports_has_no_newer_syntax_and_no_jax(repository):
    """Checks the syntax too, for machines without Python 3.11."""
    code = "import sys; from overlap.cli import doctor\nprint(*sys.modules)\n"
    code += "print(*(m.__file__ for n, m in sys.modules.items() if n.split('.')[0] == 'overlap'), sep=chr(10))"
    modules, *files = run([sys.executable, "-c", code], repository).stdout.splitlines()
    assert not {"jax", "jaxlib", "numpy", "rich"} & set(modules.split()) and len(files) > 6
    files.append(str(repository / "overlap/__main__.py"))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "E9"]
    ruff += ["--target-version", "py311"]
    assert run([*ruff, *files], repository).returncode == 0


def test_the_versions_are_those_of_pyproject(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    first, below = (".".join(map(str, bound)) for bound in (_requirements.JAX_FROM, _requirements.JAX_BELOW))
    assert f"jax>={first},<{below}" in project["dependencies"]
    assert f"numpy>={_requirements.NUMPY}" in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, _requirements.PYTHON))
    pinned = [(repository / name).read_text() for name in ("constraints.txt", "constraints/jax-0.12.txt")]
    for version, text in zip(_requirements.TESTED_JAX, pinned, strict=True):
        assert f"jax=={version}\n" in text


def test_public_names_are_what_their_modules_define():
    """The imports for type checkers and the table used at run time agree."""
    assert overlap.__file__
    tree = ast.parse(pathlib.Path(overlap.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.name: node.module.removeprefix("overlap").removeprefix(".")
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert shown == {**overlap._HOMES, "emulation": ""}
    assert sorted(shown) == sorted(overlap.__all__) == dir(overlap)
    for name in overlap.__all__:
        assert getattr(overlap, name) is vars(overlap)[name]
    assert pickle.loads(pickle.dumps(overlap.matmul)) is overlap.matmul
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = overlap.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_a_jax_newer_than_the_range_is_a_problem_for_doctor_alone(monkeypatch):
    why_not = _requirements.why_not.__wrapped__
    monkeypatch.setattr(jax, "__version__", "0.13.0")
    assert why_not() is None
    assert "too new" in (_requirements.why_not_jax("0.13.0") or "")
    monkeypatch.setattr(jax, "__version__", "0.11.1")
    assert "jax 0.11.1 is too old" in (why_not() or "")


def test_a_public_name_may_be_used_first_while_jax_traces(repository):
    """That traces the function around it once, and leaks nothing. The import alone touches no device, and no flax."""
    code = """
import sys, jax, jax.numpy as jnp, overlap
from overlap import _compat
overlap.initialize
assert not _compat.backends_are_initialized() and "matmul" not in vars(overlap)
sys.modules["flax"] = None
try:
    from overlap import layers
except ImportError as error:
    assert "overlap.layers needs flax" in str(error) and "pip install 'overlap[flax]'" in str(error)
else:
    raise AssertionError("the layers need no flax")
jax.config.update("jax_check_tracer_leaks", True)
traced, x = [], jnp.ones((64, 64), jnp.float16)
@jax.jit
def layer(x):
    traced.append(1)
    return overlap.matmul(x, x, implementation="xla")
assert [float(layer(x)[0, 0]) for _ in range(2)] == [64, 64] and traced == [1]
assert overlap.matmul(x, x, implementation="xla")[0, 0] == 64
"""
    done = run([sys.executable, "-c", code], repository, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
