"""Tests `overlap.initialize` and launch/mpirun.sh under a real mpirun, on CPU devices."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

_LEFT_OUT = ("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC")


def _environment(repository: pathlib.Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}


def _mpirun(repository: pathlib.Path, *arguments: str, before: tuple[str, ...] = ()):
    rank_py = repository / "tests" / "launch_rank.py"
    command = [repository / "launch" / "mpirun.sh", "-np", "2", "--", *before, sys.executable, rank_py, *arguments]
    beside = pathlib.Path(sys.executable).with_name("mpirun")
    environment = _environment(repository)
    if not beside.exists():
        pytest.skip("no mpirun beside Python (extra `mpi`)")
    start = time.monotonic()
    process = subprocess.run(command, env=environment | {"MPIRUN": str(beside)}, stdin=subprocess.DEVNULL, timeout=200,
                             capture_output=True, text=True, errors="replace", check=False)  # fmt: skip
    return process, time.monotonic() - start


def test_mpirun_runs_the_xla_implementation(repository):
    process, _ = _mpirun(repository)
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        match = re.search(rf"process {rank} of 2, 2 devices, error ([\d.]+)", process.stdout)
        assert match, process.stdout + process.stderr
        assert float(match[1]) < 0.02


@pytest.mark.parametrize(
    ("mode", "said", "status"),
    [("raise", "process 1 gives up", 1), ("exit", "status 3", 3), ("kill", "signal 9", 137)],
)
def test_a_failing_rank_ends_the_job(repository, mode, said, status):
    """Process 0 waits in a collective for process 1. Without the abort it would wait for its heartbeat's 100 s."""
    process, seconds = _mpirun(repository, mode)
    assert process.returncode == status, process.stderr
    assert said in process.stderr
    assert "error" not in process.stdout
    assert seconds < 60


def test_devices_used_too_early(repository):
    process, seconds = _mpirun(repository, "late")
    assert process.returncode != 0
    assert "overlap.initialize() came after the first use of devices" in process.stderr
    assert seconds < 60


@pytest.mark.one_jax
def test_a_rank_that_does_not_come_is_named(repository):
    """The missing rank has exited with status 0, which mpirun takes for success."""
    process, seconds = _mpirun(repository, "absent")
    assert process.returncode == 1, process.stderr
    assert "rank 1 of 2 has not come to overlap.initialize() within 2 s (rank 0 came)" in process.stderr
    # The output has only the reason, not as an exception within another one.
    assert "During handling" not in process.stderr
    assert seconds < 30


@pytest.mark.one_jax
def test_a_failing_rank_ends_others_that_do_not_communicate(repository):
    """Process 0 sleeps, and jax's preemption service catches the SIGTERM that mpirun sends to it."""
    process, seconds = _mpirun(repository, "sleeps")
    assert process.returncode == 1, process.stderr
    assert "process 1 gives up" in process.stderr
    assert "has slept" not in process.stdout
    assert seconds < 25


# --- Only MPI knows the hosts (the test removes the variable that says that there is one host) ------------------------

_ONLY_MPI = ("env", "-u", "OMPI_COMM_WORLD_LOCAL_SIZE")


@pytest.mark.one_jax
def test_by_mpi(repository):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra `mpi`)")
    process, _ = _mpirun(repository, "meet", before=_ONLY_MPI)
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        assert f"process {rank} of 2, 2 devices" in process.stdout


@pytest.mark.one_jax
def test_by_mpi_a_rank_that_does_not_come_ends_the_job(repository):
    """MPI_Init of the other ranks would wait forever, and can neither be interrupted nor left."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra `mpi`)")
    process, seconds = _mpirun(repository, "stuck", before=_ONLY_MPI)
    assert process.returncode != 0
    assert re.search(r"rank 0 of 2 on \S+ has waited in MPI for 2 s \(`timeout_s`\): at least one rank", process.stderr)
    assert seconds < 30


# --- MPICH ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpirun_of_mpich():
    return (
        shutil.which("mpirun.mpich") or shutil.which("mpiexec.hydra") or pytest.skip("no MPICH: apt-get install mpich")
    )


@pytest.mark.one_jax
@pytest.mark.parametrize("mode", ["stuck", "sleeps"])
def test_a_failing_rank_ends_a_job_of_mpich(mpirun_of_mpich, repository, mode):
    """Hydra ignores a status other than 0 unless the process has called MPI."""
    command = [mpirun_of_mpich, "-np", "2", sys.executable, repository / "tests" / "launch_rank.py", mode]
    start = time.monotonic()
    process = subprocess.run(command, env=_environment(repository), stdin=subprocess.DEVNULL, timeout=100,
                             capture_output=True, text=True, check=False)  # fmt: skip
    assert process.returncode == 1
    said = {"stuck": "rank 1 of 2 has not come to overlap.initialize() within 2 s", "sleeps": "process 1 gives up"}
    assert said[mode] in process.stderr
    assert "has slept" not in process.stdout
    assert time.monotonic() - start < 25


@pytest.mark.one_jax
def test_sigterm_to_the_mpirun_of_mpich_ends_the_job(mpirun_of_mpich, repository):
    """Hydra passes SIGTERM on and waits, while jax's preemption service would catch the signal in each process."""
    mpirun = mpirun_of_mpich
    command = [mpirun, "-np", "2", sys.executable, repository / "tests" / "launch_rank.py", "wait"]
    with subprocess.Popen(command, env=_environment(repository), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:  # fmt: skip
        try:
            lines = []
            # Counted in the whole text: unbuffered, both processes may write to the same line.
            while "".join(lines).count("of 2, 2 devices") < 2:
                lines.append(process.stdout.readline())
                assert lines[-1], lines
            start = time.monotonic()
            process.send_signal(signal.SIGTERM)
            # Its pipes close when the processes are gone. Hydra decides the status: version 4.0 returns 0 here.
            output, _ = process.communicate(timeout=40)
        finally:
            # Kill the whole session: ranks that ignore SIGTERM would stay behind.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert "is done" not in output
    assert time.monotonic() - start < 20


# --- The script -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["-np"], 2), (["-np", "2", "--"], 2)])
def test_mpirun_sh_usage(repository, arguments, status):
    script = repository / "launch" / "mpirun.sh"
    process = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == status
    assert "usage: launch/mpirun.sh" in process.stdout + process.stderr


def test_mpirun_sh_says_that_the_mpirun_is_not_there(repository):
    script = repository / "launch" / "mpirun.sh"
    environment = os.environ | {"MPIRUN": "/nonexistent/mpirun"}
    process = subprocess.run([script, "--", "true"], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 127
    assert process.stderr == "launch/mpirun.sh: $MPIRUN names /nonexistent/mpirun, which cannot be run\n"


@pytest.mark.parametrize("number", ["abc", "0", "-1", "2x", "1.5", ""])
def test_mpirun_sh_refuses_what_is_no_number_of_processes(repository, number):
    script = repository / "launch" / "mpirun.sh"
    process = subprocess.run([script, "-np", number, "--", "true"], capture_output=True, text=True, check=False)
    assert process.returncode == 2
    expected = f"-np takes the number of processes, a whole number of at least 1, and got: {number or 'empty'}\n"
    assert process.stderr.endswith(expected)
