"""How tuning ends: an unwritable table is refused before any measurement, and no end loses measured results."""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal

import jax
import jax.numpy as jnp
import pytest

import overlap
from overlap.choice import table_files, tables
from overlap.cli import main
from overlap.kernels.target import Target
from overlap.tuning import search
from overlap.tuning.interrupt import noticed
from tests.tuning_cases import H200, bench, entry, no_tables, problem

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


def tune(*arguments):
    """Runs the command in this process and returns its status."""
    pytest.importorskip("rich", reason="rich is not installed (extra `cli`)")
    return main(["tune", "--shapes", ",".join(SHAPES), *map(str, arguments)])


def fn(x, w):
    return overlap.matmul(x, w, implementation="fused")


X, W = (jax.ShapeDtypeStruct((128, 128), jnp.bfloat16) for _ in range(2))


def printed_table(text, tmp_path):
    """Returns the entries of the table at the end of a text."""
    (tmp_path / "printed.json").write_text(text[text.index('{"format"') :])
    return tables.read(tmp_path / "printed.json")


# --- Before measuring -------------------------------------------------------------------------------------------------


def no_folder(folder):
    return folder / "no" / "table.json", "is a folder that does not exist"


def under_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "table.json", "file is no folder"


def a_folder(folder):
    return folder, "it is a folder"


def a_pipe(folder):
    os.mkfifo(folder / "pipe")
    return folder / "pipe", "it is a pipe"


def a_full_device(folder):
    return "/dev/full", "it is a device"


def a_link_to_a_device(folder):
    (folder / "link").symlink_to("/dev/null")
    return folder / "link", "it is a device"


def where_no_file_can_be_made(folder):
    return "/proc/table.json", "(/proc)"


def too_long(folder):
    return folder / ("x" * 300), "File name too long"


def no_table(folder):
    (folder / "text").write_text("some text")
    return folder / "text", "is no tuning table"


@pytest.mark.parametrize(
    "place",
    [
        no_folder, under_a_file, a_folder, a_pipe, a_full_device, a_link_to_a_device, where_no_file_can_be_made,
        too_long, no_table,
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name_before_anything_is_measured(
    nothing_is_measured, tmp_path, capsys, place
):
    path, why = place(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert tune("--out", path) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("tune: ") and why in captured.err and str(path) in captured.err
    assert place is no_table or captured.err.startswith("tune: --out must be a file that can be written, got ")
    assert not captured.out
    with pytest.raises(ValueError) as error:
        overlap.autotune(fn, X, W, path=path)
    assert why in str(error.value)
    assert place is no_table or str(error.value).startswith("`path` must be a file that can be written, got ")
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_and_a_held_lock_are_seen_before(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(table_files.errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(table_files.os, "fsync", full)
        assert table_files.obstacle(tmp_path / "t.json") == f"No space left on device ({tmp_path})"
    with table_files.locked(tmp_path / "t.json"), monkeypatch.context() as patch:
        patch.setattr(table_files.time, "monotonic", iter(range(0, 10**6, 100)).__next__)
        assert "another process has held the lock" in table_files.obstacle(tmp_path / "t.json")
    (tmp_path / "t.json").touch()
    with monkeypatch.context() as patch:
        patch.setattr(table_files.os, "access", lambda *_: False)  # The tests may run as root, who may do everything.
        assert table_files.obstacle(tmp_path / "t.json") == "it is write-protected"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_the_users_table_is_looked_at_before_as_well(monkeypatch, tmp_path):
    file = autotune.result_file(H200, None)
    assert file == tables.user_file(H200.kind) and file.parent.is_dir()
    assert autotune.result_file(Target("cpu", "cpu", 4), None) is None
    (tmp_path / "file").touch()
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.raises(RuntimeError, match=r"nvidia_h200\.json cannot be written, and nothing has been .* OVERLAP_TUN"):
        autotune.result_file(H200, None)
    monkeypatch.setattr(tables, "user_directory", lambda: None)
    with pytest.raises(RuntimeError, match="there is no home directory"):
        autotune.result_file(H200, None)


# --- After measuring --------------------------------------------------------------------------------------------------


@pytest.fixture
def writing_fails(monkeypatch):
    """Writing fails from the second write on; the first succeeds."""
    replace, wrote = tables.replace, []

    def fail(path, text):
        wrote.append(path)
        if len(wrote) in fail.at:
            raise OSError(table_files.errno.ENOSPC, "No space left on device")
        replace(path, text)

    fail.at = range(2, 100)
    monkeypatch.setattr(tables, "replace", fail)
    return fail


def test_what_cannot_be_written_in_the_end_is_printed_as_a_table(bench, writing_fails, tmp_path, capsys):
    out = tmp_path / "table.json"
    assert tune("--out", out) == 1
    said = capsys.readouterr().out
    assert f"tune: {out} could not be written ([Errno 28] No space left on device). What it lacks, as a table:" in said
    assert "The results are in" not in said
    assert [e.problem.shape for e in tables.read(out)] == SHAPES[:1]
    assert {e.problem.shape for e in printed_table(said, tmp_path)} == set(SHAPES[1:])


def test_what_could_not_be_written_is_tried_again_with_the_next(bench, writing_fails, tmp_path, capsys):
    out = tmp_path / "table.json"
    writing_fails.at = (1, 2)
    assert tune("--out", out) == 0
    assert f"The results are in {out}" in capsys.readouterr().out
    assert {e.problem.shape for e in tables.read(out)} == set(SHAPES)


def test_autotune_logs_what_it_cannot_write_and_raises_nothing(bench, writing_fails, tmp_path, caplog):
    writing_fails.at = range(1, 100)
    with overlap.autotune(fn, X, W, path=tmp_path / "table.json") as tuning:
        explained = overlap.explain(overlap.matmul, X, W, implementation="fused")
    assert (tuning.path, explained.source) == (None, "tuned")
    (record,) = [record for record in caplog.records if "could not be written" in record.message]
    assert record.levelname == "WARNING"
    assert [e.problem.shape for e in printed_table(record.message, tmp_path)] == ["128x128x128"]
    assert [path.name for path in tmp_path.iterdir()] == ["printed.json"]


def test_autotune_that_is_not_to_save_writes_nothing(bench, tmp_path):
    tuning = overlap.autotune(fn, X, W, path=tmp_path / "table.json", save=False)
    assert tuning.configs and tuning.path is None
    assert not list(tmp_path.iterdir())


def test_a_table_that_was_broken_meanwhile_is_left_alone(bench, tmp_path, capsys):
    out = tmp_path / "table.json"
    bench.hook = staticmethod(lambda what, config: out.write_text("mine"))
    assert tune("--out", out) == 1
    said = capsys.readouterr().out
    assert out.read_text() == "mine"
    assert {e.problem.shape for e in printed_table(said, tmp_path)} == set(SHAPES)


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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_with_what_was_found(bench, tmp_path, capsys, number, status):
    out, started = tmp_path / "table.json", []

    def hook(what, config):
        started.extend([what] * (what == "warm up"))
        if len(started) == 2 and what == "sample" and config is not None:
            started.append("the signal")
            signal.raise_signal(number)

    bench.hook = staticmethod(hook)
    before = signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        assert tune("--out", out) == status
    finally:
        signal.signal(number, before)
    said = capsys.readouterr().out
    assert "Interrupted: 1 problems were not begun" in said and f"The results are in {out}" in said
    assert {e.problem.shape: e.complete for e in tables.read(out)} == {SHAPES[0]: True, SHAPES[1]: False}
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_autotune_ends_the_process_as_sigterm_does_once_all_is_written(bench, tmp_path, monkeypatch):
    raised, raise_signal = [], signal.raise_signal

    def hook(what, config):
        if what == "sample" and config is not None and not raised:
            raised.append("by the hook")
            raise_signal(signal.SIGTERM)

    bench.hook = staticmethod(hook)
    monkeypatch.setattr(autotune.signal, "raise_signal", lambda number: raised.append((number, handler())))
    handler = lambda: signal.getsignal(signal.SIGTERM)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):  # A real signal would have ended the process here.
        overlap.autotune(fn, X, W, path=tmp_path / "table.json")
    assert raised == ["by the hook", (signal.SIGTERM, signal.SIG_DFL)]
    assert len(tables.read(tmp_path / "table.json")) == 1


def test_no_signal_in_the_middle_of_a_write_leaves_half_a_file(tmp_path, monkeypatch):
    path, fsync = tmp_path / "table.json", os.fsync

    def signals(count):
        def struck(handle):
            for _ in range(count):
                signal.raise_signal(signal.SIGTERM)
            fsync(handle)

        monkeypatch.setattr(table_files.os, "fsync", struck)

    signals(1)
    with noticed() as came:
        tables.add(path, [entry(problem())])
        assert came() == signal.SIGTERM
    signals(2)
    with pytest.raises(SystemExit) as end, noticed():
        tables.add(path, [entry(problem("128x128x128"))])
    assert end.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert [entry["m"] for entry in json.loads(path.read_text())["entries"]] == [4096]
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_handler_of_the_programs_own_stays(tmp_path):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("own"))
    try:
        with noticed() as first:
            signal.raise_signal(signal.SIGTERM)
            assert (came, first()) == (["own"], 0)
    finally:
        signal.signal(signal.SIGTERM, before)


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
    outcome = search.search(problem(), H200, jax_devices, search.Settings(4, workers=4))
    assert outcome.result is not None and "xla" not in outcome.result.others
    tables.add(tmp_path / "t.json", [outcome.result])
    assert tables.read(tmp_path / "t.json") == [outcome.result]


def test_faults_of_a_table_are_said_while_tuning_and_kept(bench, tmp_path, caplog):
    out = tmp_path / "table.json"
    out.write_text(json.dumps({"format": 1, "entries": ["no entry"]}))
    with caplog.at_level(logging.WARNING, "overlap"):
        assert tune("--out", out) == 0
    assert f"{out}: 1 of its entries is ignored: entries[0]: an entry must be an object" in caplog.text
    assert len(json.loads(out.read_text())["entries"]) == 4
    assert bench.compiled
