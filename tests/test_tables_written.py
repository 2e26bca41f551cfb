"""Writing tuning tables loses no result: of another process, of a newer version, or behind a link."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading

import pytest

from overlap.choice import table_files, tables
from tests.tuning_cases import entry, line, nested, no_tables, problem, users_table, write

__all__ = ["no_tables"]
pytestmark = [pytest.mark.usefixtures("no_tables"), pytest.mark.one_jax]


def test_lines_that_cannot_be_read_outlast_those_that_are_added():
    newer, odd = line(of_the_future=1), line(us=math.nan, others={"deep": nested(50)})
    path = write(newer, line(), odd, "no entry")
    tables.add(path, [entry(problem("128x128x128"))])
    as_text = lambda value: json.dumps(value, sort_keys=True)  # noqa: E731  (NaN is not equal to itself.)
    lines = [as_text(value) for value in json.loads(path.read_text())["entries"]]
    assert len(lines) == 5 and {as_text(newer), as_text(odd), '"no entry"'} <= set(lines)


def test_what_would_not_be_read_again_is_not_written():
    with pytest.raises(ValueError, match="`us` must be a number"):
        tables.add(users_table(), [entry(problem(), us=math.inf)])
    assert not users_table().exists()


_WRITES = """
import pathlib, sys
from overlap.choice import tables
from tests.tuning_cases import entry, problem
path, first = pathlib.Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for m in range(first, first + 25):
    tables.add(path, [entry(problem(f"{m}x128x128"))])
"""


def test_two_processes_that_write_at_once_lose_nothing(repository, tmp_path):
    path = tmp_path / "table.json"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}
    other = subprocess.Popen(
        [sys.executable, "-c", _WRITES, path, "1000"], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        threading.Timer(0.02, lambda: other.stdin and (other.stdin.write("\n"), other.stdin.close())).start()
        for m in range(1, 26):
            tables.add(path, [entry(problem(f"{m}x128x128"))])
        other.stdin = None  # The timer's thread closes it.
        assert other.wait(timeout=60) == 0
    finally:
        other.kill()
        other.wait()
    assert sorted(e.problem.m for e in tables.read(path)) == [*range(1, 26), *range(1000, 1025)]
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_threads_lose_nothing_either(tmp_path):
    path = tmp_path / "table.json"
    adds = [
        threading.Thread(target=tables.add, args=(path, [entry(problem(f"{m}x128x128"))])) for m in range(1, 17)
    ]  # fmt: skip
    for thread in adds:
        thread.start()
    for thread in adds:
        thread.join()
    assert len(tables.read(path)) == 16


def test_a_lock_that_is_held_ends_in_an_error_and_one_left_behind_locks_nothing(tmp_path):
    path = tmp_path / "table.json"
    lock = tmp_path / ".table.json.lock"
    with table_files.locked(path):
        assert lock.exists()
        with (
            pytest.raises(TimeoutError, match=rf"has held the lock {lock} for 0\.05 s"),
            table_files.locked(path, 0.05),
        ):
            pass
    assert not lock.exists()
    lock.touch()  # As left by a process that was killed.
    tables.add(path, [entry(problem())])
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_a_lock_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    """Otherwise the next process would make a new file, and both would hold a lock."""
    lock, flock, calls = tmp_path / ".table.json.lock", table_files.fcntl.flock, []

    def late(handle, how):
        calls.append(handle)
        if len(calls) == 1:
            lock.unlink()  # Removed by the process that held the lock until now.
        flock(handle, how)

    monkeypatch.setattr(table_files.fcntl, "flock", late)
    with table_files.locked(tmp_path / "table.json"):
        assert lock.exists() and len(calls) == 2


def test_the_file_of_a_lock_is_removed_before_the_lock_is_released(tmp_path, monkeypatch):
    """In the other order, a process that gets the lock in between loses its file, and the next makes a new one."""
    lock, close, there = tmp_path / ".table.json.lock", os.close, []

    def released(handle):
        there.append(lock.exists())
        close(handle)

    with monkeypatch.context() as patch:
        patch.setattr(table_files.os, "close", released)
        with table_files.locked(tmp_path / "table.json"):
            assert lock.exists()
    assert there == [False]


def test_others_may_read_a_table(tmp_path):
    tables.add(tmp_path / "table.json", [entry(problem())])
    assert (tmp_path / "table.json").stat().st_mode & 0o777 == 0o644


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(table_files.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(table_files.fcntl, "flock", none)
    with caplog.at_level(logging.WARNING, "overlap"):
        tables.add(tmp_path / "table.json", [entry(problem())])
    assert f"{tmp_path} has no locks" in caplog.text
    assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_of_a_link_the_file_behind_it_is_replaced(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "table.json"
    link.symlink_to("real/table.json")
    tables.add(link, [entry(problem())])
    tables.add(link, [entry(problem("128x128x128"))])
    assert link.is_symlink() and len(tables.read(tmp_path / "real" / "table.json")) == 2


def test_a_device_is_never_replaced(tmp_path):
    for path in ("/dev/full", "/dev/null"):
        with pytest.raises(OSError, match="it is a device, no file"):
            tables.replace(table_files.pathlib.Path(path), "text")
        assert table_files.pathlib.Path(path).is_char_device()
