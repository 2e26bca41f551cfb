"""Which ends of a process end its job, and what a process does that hears of the end of another one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import pytest

from overlap.distributed import aborting, failures

pytestmark = pytest.mark.one_jax
_ENDS = """
import _thread, atexit, importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("aborting", sys.argv[1])
aborting = importlib.util.module_from_spec(spec)
spec.loader.exec_module(aborting)
atexit.register(lambda: print("jax's exit handler"))
aborting.abort_job_on_failure(lambda status: os._exit(40 + status))
aborting.abort_at_exit(1, lambda status: os._exit(40 + status))
def leave():
    sys.exit(3)
"""
_WAIT = "\nos._exit(os.waitstatus_to_exitcode(os.wait()[1]))"


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("leave()", 43),
        ("sys.exit('a reason')", 41),
        ("1 / 0", 41),
        # An exception that is caught, or that ends another thread, does not end this process.
        ("try:\n    leave()\nexcept SystemExit:\n    pass", 0),
        ("_thread.start_new_thread(leave, ())\ntime.sleep(0.2)", 0),
        # Nor does the end of a child, which runs no exit handlers of jax.
        ("os.fork() or leave()" + _WAIT, 3),
        ("os.fork() or 1 / 0" + _WAIT, 1),
        ("os.fork() or sys.exit()" + _WAIT, 0),
        # A child ends by SIGTERM, which jax ignores in the process itself.
        (
            "import ctypes; ctypes.CDLL(None).signal(15, 1)\nos.fork() or os.kill(os.getpid(), 15)\n"
            "os._exit(-os.waitstatus_to_exitcode(os.wait()[1]))",
            15,
        ),
    ],
)
def test_which_ends_of_a_process_end_the_job(ending, status):
    """The job's exit status is 40 more than the status that the other ranks are told."""
    command = [sys.executable, "-I", "-S", "-c", _ENDS + ending, aborting.__file__]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert process.returncode == status, process.stderr
    assert ("jax's exit handler" in process.stdout) == (status == 0 and "fork" not in ending)


def test_a_process_that_fails_waits_until_its_output_is_read():
    """MPICH's mpirun reads no more once it is told to end the job. A reader that has stopped ends the wait."""
    command = [sys.executable, "-I", "-S", "-c", _ENDS + "1 / 0", aborting.__file__]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE) as read,
        subprocess.Popen(command, stderr=subprocess.PIPE) as unread,
    ):
        assert read.stderr is not None
        with pytest.raises(subprocess.TimeoutExpired):
            read.wait(1.0)
        assert read.stderr.read().endswith(b"ZeroDivisionError: division by zero\n")
        assert read.wait(30) == unread.wait(30) == 41


def test_a_process_that_ends_because_another_one_failed_loses_none_of_its_output(monkeypatch, capfd):
    class Store:
        def key_value_dir_get(self, folder):
            return [(folder + "1", "3")] if folder == failures._FOLDER else []

    def ends(status):
        raise SystemExit(status)

    monkeypatch.setattr(failures, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(os, "_exit", ends)
    with open(1, "w", closefd=False) as buffered, pytest.raises(SystemExit, match="3"):
        monkeypatch.setattr(sys, "stdout", buffered)
        buffered.write("half a line")
        failures._look(Store(), 0, threading.Event())
        pytest.fail("it goes on")
    assert capfd.readouterr() == ("half a line", "overlap: process 0 ends, since process 1 failed\n")


def test_an_end_after_the_store_is_gone_is_quiet(monkeypatch):
    """After `jax.distributed.shutdown`, by a call or by an exit handler, nobody can be told of an end or a failure."""

    class Gone:
        def key_value_set(self, key, value):
            told.append((key, value))
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")

    told, handlers = [], []
    monkeypatch.setattr(failures._compat, "job_store", Gone)
    monkeypatch.setattr(failures.atexit, "register", lambda *call: handlers.append(call))
    for fails in (False, True):
        note_failure = failures.watch(1)
        ((end,),) = [handlers.pop()]
        if fails:
            note_failure(3)
        end()
        note_failure(4)
    assert told == [("overlap/failed/1", "3")]
