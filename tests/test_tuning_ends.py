"""How tuning ends: an unwritable table is refused before any measurement, and no end loses measured results."""

from __future__ import annotations

import importlib
import json
import logging
import signal

import jax
import jax.numpy as jnp
import pytest

import overlap
from overlap.choice import tables
from overlap.cli import main
from overlap.kernels.target import Target
from overlap.tuning import search
from overlap.tuning.settings import Settings
from overlap.tuning.stop import Stop, stopped_by_ctrl_c
from tests.tuning_cases import H200, bench, no_tables, problem

__all__ = ["bench", "no_tables"]
pytestmark = [pytest.mark.usefixtures("no_tables"), pytest.mark.one_jax]
# The module itself: the package has an attribute of the same name.
autotune = importlib.import_module("overlap.tuning.autotune")
SHAPES = ["128x128x64", "128x128x128", "128x128x192"]


@pytest.fixture
def nothing_is_measured(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("this must be refused before anything is measured")

    monkeypatch.setattr(search, "Bench", fail)
    monkeypatch.setattr(autotune, "search", fail)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def tune(*arguments):
    """Runs the command in this process and returns its status."""
    pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
    return main(["tune", "--shapes", ",".join(SHAPES), *map(str, arguments)])


def fn(x, w):
    return overlap.matmul(x, w, implementation="fused")


X, W = (jax.ShapeDtypeStruct((128, 128), jnp.bfloat16) for _ in range(2))


# --- Before measuring -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["no/table.json", "", "text"])
def test_what_cannot_be_written_is_refused_by_name_before_anything_is_measured(
    nothing_is_measured, tmp_path, capsys, place
):
    (tmp_path / "text").write_text("some text")
    path = tmp_path / place
    why = "is no tuning table" if place == "text" else "must be a file that can be written, got "
    assert tune("--out", path) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tune: ") and why in captured.err and str(path) in captured.err
    assert not captured.out
    with pytest.raises(ValueError, match=why):
        overlap.autotune(fn, X, W, path=path)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_the_users_table_is_looked_at_before_as_well(monkeypatch, tmp_path):
    file = autotune.result_file(H200, None)
    assert file == tables.user_file(H200.kind) and file.parent.is_dir()
    assert autotune.result_file(Target("cpu", "cpu", 4), None) is None
    (tmp_path / "file").touch()
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.raises(ValueError, match=r"nvidia_h200\.json cannot be written, and nothing has been .* OVERLAP_TUN"):
        autotune.result_file(H200, None)
    monkeypatch.setattr(tables, "user_directory", lambda: None)
    with pytest.raises(ValueError, match="there is no home directory"):
        autotune.result_file(H200, None)


# --- After measuring --------------------------------------------------------------------------------------------------


def test_a_table_that_cannot_be_written_ends_the_tuning_with_what_was_found(bench, monkeypatch, tmp_path, capsys):
    def full(path, entries):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tables, "add", full)
    assert tune("--out", tmp_path / "table.json") == 1
    said = capsys.readouterr()
    assert SHAPES[0] in said.out and said.err.endswith("table.json: No space left on device\n")


def test_autotune_that_is_not_to_save_writes_nothing(bench, tmp_path):
    tuning = overlap.autotune(fn, X, W, path=tmp_path / "table.json", save=False)
    assert tuning.configs and tuning.path is None
    assert not list(tmp_path.iterdir())


def test_an_unexpected_error_loses_nothing(bench, tmp_path, capsys, monkeypatch):
    searched = autotune.search

    def breaks(of, *rest, **options):
        if of.shape == SHAPES[1]:
            raise RuntimeError("the runtime is gone")
        return searched(of, *rest, **options)

    monkeypatch.setattr(autotune, "search", breaks)
    with pytest.raises(RuntimeError, match="the runtime is gone"):
        tune("--out", tmp_path / "table.json")
    assert SHAPES[0] in capsys.readouterr().out
    assert [e.problem.shape for e in tables.read(tmp_path / "table.json")] == SHAPES[:1]


def test_ctrl_c_ends_the_command_with_what_was_found(bench, tmp_path, capsys):
    out, started, sampled = tmp_path / "table.json", [], []

    def hook(what, config):
        started.extend([what] * (what == "warm up"))
        sampled.extend([config] * (len(started) == 2 and what == "sample" and config is not None))
        if len(sampled) == 2:
            started.append("the signal")
            signal.raise_signal(signal.SIGINT)

    bench.hook = staticmethod(hook)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert tune("--out", out) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr().out
    assert "Interrupted: 1 problems were not begun" in said and f"The results are in {out}" in said
    assert {e.problem.shape: e.complete for e in tables.read(out)} == {SHAPES[0]: True, SHAPES[1]: False}
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_a_handler_of_the_programs_own_stays():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append("own"))
    try:
        with stopped_by_ctrl_c() as stop:
            signal.raise_signal(signal.SIGINT)
            assert (came, stop.interrupted) == (["own"], False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_failed_last_check_of_xla_leaves_a_readable_entry(bench, tmp_path):
    """Its time would be infinite, which no table may hold."""
    checks = []

    def hook(what, config):
        if what == "check" and config is None:
            checks.append(what)
            if len(checks) == 2:
                raise RuntimeError("lost")

    bench.hook = staticmethod(hook)
    jax_devices = [None]
    outcome = search.search(problem(), H200, jax_devices, Settings(4, workers=4), stop=Stop())
    assert outcome.result is not None and "xla" not in outcome.result.others
    tables.add(tmp_path / "t.json", [outcome.result])
    assert tables.read(tmp_path / "t.json") == [outcome.result]


def test_faults_of_a_table_are_said_while_tuning_and_kept(bench, tmp_path, caplog):
    out = tmp_path / "table.json"
    out.write_text(json.dumps({"format": 1, "entries": ["no entry"]}))
    with caplog.at_level(logging.WARNING, "overlap"):
        assert tune("--out", out) == 0
    ignored = "1 entries of this tuning table are ignored, the first: entries[0]: an entry must be an object"
    assert f"{out}: {ignored}" in caplog.text
    assert len(json.loads(out.read_text())["entries"]) == 4
    assert bench.compiled
