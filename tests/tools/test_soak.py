"""`python -m overlap soak`: emulated, and its report of a wrong result."""

import argparse
import re
import shlex
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from overlap import cli
from overlap.cli import soak, soak_programs
from overlap.emulation import emulate


@pytest.fixture
def here(monkeypatch):
    """Runs in this process, which has the emulated devices already, with programs of one operation on two meshes."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:2])
    monkeypatch.setattr(soak, "CASES", [case for case in soak_programs.CASES if case.name == "few rows"])
    soak_programs.program.cache_clear()
    with emulate(cores=2):
        yield
    soak_programs.program.cache_clear()


def test_counts_what_it_ran(here, capsys):
    assert cli.main(["soak", "--programs", "4", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "4 launches, no bit differed" in said and re.search(r"few rows +4 programs", said)


def test_a_wrong_bit_is_reported_with_the_command_that_repeats_it(here, capsys, monkeypatch):
    exact = soak_programs._exact
    monkeypatch.setattr(soak_programs, "_exact", lambda *args: exact(*args).at[0, 0].add(1))
    assert cli.main(["soak", "--programs", "2", "--seed", "5"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"program 0: \d wrong results of few rows along 'x' of \{'x': 2\}", said)
    (again,) = re.findall(r"to repeat it: python -m overlap (soak .*)", said)
    given = vars(cli._parser().parse_args(shlex.split(again)))
    assert (given["seed"], given["first"], given["programs"]) == (5, 0, 2)
    # What repeats it runs up to the last wrong program.
    (mesh, *_), (case, *_) = soak_programs.meshes(jax.devices()), soak.CASES
    failed = [(number, ((case, mesh, "x"), [0.0], 7), 1) for number in (30, 33)]
    soak._print(Counter({case.name: 48}), failed, argparse.Namespace(seed=5, minutes=2.0), 9)
    (again,) = re.findall(r"to repeat it: python -m overlap (soak .*)", capsys.readouterr().out)
    given = vars(cli._parser().parse_args(shlex.split(again)))
    assert (given["seed"], given["steps"], given["minutes"]) == (5, 9, 2.0)
    assert given["first"] <= 30 and given["first"] + given["programs"] == 34


def test_every_case_is_exact_in_its_dtype_and_meshes_and_axes_of_four_devices():
    """The soak test relies on this: a right result has exactly the expected bits."""
    meshes = list(soak_programs.meshes(jax.devices()[:4]))
    assert [dict(mesh.shape) for mesh in meshes] == [{"x": 4}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 2}]
    assert len({tuple(d.id for d in mesh.devices.flat) for mesh in meshes}) == 2
    assert soak_programs.axes_of(meshes[2]) == ["x", "y", ("x", "y")]
    # All whole numbers up to this are exact in bfloat16, and in float16.
    most = 2 ** (jnp.finfo(jnp.bfloat16).nmant + 1)
    for case in soak_programs.CASES:
        problem = case.problem(8)
        first, second = np.random.default_rng(0).integers(-1, 2, (2, 64, problem.whole[2]))
        assert np.abs(first @ second.T).max() <= most, case.name
        # Where sums travel, each device's part of a sum is rounded.
        assert not case.name.startswith("sums") or problem.k <= most, case.name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(case.name, marks=[pytest.mark.slow] * (case.name != "sums for all by rows"))
        for case in soak_programs.CASES
    ],
)
def test_every_case_is_right_and_a_wrong_corner_is_noticed(name, monkeypatch):
    (case,) = (case for case in soak_programs.CASES if case.name == name)
    mesh = next(soak_programs.meshes(jax.devices()[:2]))
    late_us, period = np.zeros(2, np.float32), np.int32(7)
    given = soak_programs.operands(mesh, seed=0)
    with emulate(cores=2):
        assert int(soak_programs.program(case, mesh, "x", 1)(late_us, period, *given)) == 0
        exact = soak_programs._exact
        monkeypatch.setattr(soak_programs, "_exact", lambda *args: exact(*args).at[-1, -1].add(1))
        soak_programs.program.cache_clear()
        found = int(soak_programs.program(case, mesh, "x", 1)(late_us, period, *given))
    # The corner belongs to one device, which finds the wrong result; or every device has it.
    assert found == (2 if "for all" in name else 1)
    soak_programs.program.cache_clear()
