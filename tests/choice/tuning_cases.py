"""Helpers of the tuning tests: problems, table entries, a device, isolated tables, and a bench with known times."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from overlap.choice import choose, tables
from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning import search
from overlap.tuning.settings import Settings

H200 = Target("gpu", "NVIDIA H200", 132)
SHAPES = ["4096x8192x4096", "8192x8192x8192", "1024x4096x4096", "1024x1024x14336", "16384x1536x4096", "128x8192x8192"]


def problem(shape="4096x8192x4096", **fields) -> Problem:
    m, n, k = map(int, shape.split("x"))
    return dataclasses.replace(Problem("matmul", m, n, k, "bfloat16", "bfloat16"), **fields)


def entry(of: Problem, config=None, us=100.0, **fields) -> tables.Entry:
    return tables.Entry(of, "NVIDIA H200", jax.__version__, config or Config(stages=3), us, {"xla": 90.0}, **fields)


TUNED = Config(stages=3)
MISSING = object()


def line(of=None, **changes):
    """The JSON of a table entry that chooses the fused kernel, with some fields changed."""
    tuned = {**entry(of or problem(), TUNED).to_json(), "others": {"xla": 200.0}, **changes}
    return {name: value for name, value in tuned.items() if value is not MISSING}


def users_table():
    path = tables.user_file(H200.kind)
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write(*lines, text=None):
    path = users_table()
    path.write_text(json.dumps({"format": 1, "entries": lines}) if text is None else text, encoding="latin-1")
    return path


def nested(depth):
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture
def no_tables(tmp_path, monkeypatch):
    """Every test has an empty user folder, no shipped tables, and no messages logged yet."""
    jax.devices()  # All 8: a command that is the first to ask would make only as many as it needs.
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, str(tmp_path / "user"))
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(choose, "_missed", set())


def one_configuration_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes searches on the CPU try a single configuration, for tests of something else."""
    of_three = Settings.for_platform("cpu")
    one = dataclasses.replace(of_three, max_configs=1)
    monkeypatch.setattr(Settings, "for_platform", staticmethod(lambda platform, max_configs=None: one))


class FakeBench:
    """A bench whose times are a function of the configuration; some results are wrong, some candidates fail."""

    us_of = staticmethod(lambda config: 100.0)
    wrong = staticmethod(lambda config: False)
    hook = staticmethod(lambda what, config: None)
    samples: dict = {}  # noqa: RUF012
    compiled: list = []  # noqa: RUF012

    def __init__(self, *_):
        FakeBench.samples, FakeBench.compiled = {}, []

    def compile(self, config):
        FakeBench.compiled.append(config)
        self.hook("compile", config)
        return [config]

    def error_of(self, program):
        self.hook("check", program[0])
        return float("nan") if program[0] and self.wrong(program[0]) else 1e-3

    def sample_us(self, program):
        self.hook("sample", program[0])
        FakeBench.samples[program[0]] = FakeBench.samples.get(program[0], 0) + 1
        return 95.0 if program[0] is None else self.us_of(program[0])

    def warm_up(self, program):
        self.hook("warm up", program[0])


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(search, "Bench", FakeBench)
    for name in ("us_of", "wrong", "hook"):
        monkeypatch.setattr(FakeBench, name, FakeBench.__dict__[name])  # monkeypatch restores this after the test.
    return FakeBench
