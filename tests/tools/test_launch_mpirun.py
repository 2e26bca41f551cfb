"""`overlap.initialize` and launch/mpirun.sh under a real mpirun, on CPU devices.

One job computes and then fails. Other ways to fail, MPICH, and hosts that only MPI knows are slow cases;
test_launch_ends.py shows without a launcher which ends of a process end the job.
"""

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
RANK_PY = pathlib.Path(__file__).with_name("launch_rank.py")


def _environment(repository: pathlib.Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    return kept | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}


def _run(command, **options):
    start = time.monotonic()
    process = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, timeout=200, capture_output=True,
                             text=True, errors="replace", check=False, **options)  # fmt: skip
    return process, time.monotonic() - start


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


_ONLY_MPI = ("env", "-u", "OMPI_COMM_WORLD_LOCAL_SIZE")  # This variable says that there is one host.
_WAITED = r"rank 0 of 2 on \S+ has waited in MPI for 2 s \(`timeout_s`\): at least one rank"


@pytest.mark.parametrize(
    ("mode", "before", "status", "said", "products", "most_s"),
    [
        slow("", (), 0, "", 2, 60),
        # Process 0 waits in a collective for process 1. Without the abort it would wait for its heartbeat's 100 s.
        ("exit", (), 3, "process 1 exits with status 3: ending the job", 1, 60),
        slow("raise", (), 1, "process 1 gives up", 1, 60),
        slow("kill", (), 137, "signal 9", 1, 60),
        # Process 0 sleeps, and jax's preemption service catches the SIGTERM that mpirun sends to it.
        slow("sleeps", (), 1, "process 1 gives up", 1, 25),
        slow("late", (), 1, r"overlap.initialize\(\) came after the first use of devices", 0, 60),
        # The missing rank has exited with status 0, which mpirun takes for success.
        slow("absent", (), 1, r"1 of 2 processes did not come to overlap.initialize\(\) within 2 s: rank 1\.", 0, 30),
        slow("", _ONLY_MPI, 0, "", 2, 60),
        # MPI_Init of the other ranks would wait forever, and can neither be interrupted nor left.
        slow("stuck", _ONLY_MPI, None, _WAITED, 0, 30),
    ],
)  # fmt: skip
def test_mpirun(repository, mode, before, status, said, products, most_s):
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside Python (extra `mpi`)")
    if before:
        pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra `mpi`)")
    command = [repository / "launch" / "mpirun.sh", "-np", 2, "--", *before, sys.executable, RANK_PY, mode]
    process, seconds = _run(command, env=_environment(repository) | {"MPIRUN": str(mpirun)})
    assert process.returncode == status or (status is None and process.returncode != 0), process.stderr
    assert re.search(said, process.stderr), process.stderr
    assert "During handling" not in process.stderr and "has slept" not in process.stdout
    errors = re.findall(r"process (\d) of 2, 2 devices, product (\d), error ([\d.]+)", process.stdout)
    assert sorted(found[:2] for found in errors) == [(r, p) for r in "01" for p in "01"[:products]], process.stdout
    assert all(float(error) < 0.02 for *_, error in errors)
    assert seconds < most_s


# --- MPICH ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mpich():
    return (
        shutil.which("mpirun.mpich") or shutil.which("mpiexec.hydra") or pytest.skip("no MPICH: apt-get install mpich")
    )


@pytest.mark.one_jax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "said"),
    [("stuck", "1 of 2 processes did not come to overlap.initialize() within 2 s"), ("sleeps", "process 1 gives up")],
)
def test_a_failing_rank_ends_a_job_of_mpich(mpich, repository, mode, said):
    """Hydra ignores a status other than 0 unless the process has called MPI."""
    process, seconds = _run([mpich, "-np", 2, sys.executable, RANK_PY, mode], env=_environment(repository))
    assert process.returncode == 1 and said in process.stderr
    assert "has slept" not in process.stdout and seconds < 25


@pytest.mark.one_jax
@pytest.mark.slow
def test_sigterm_to_the_mpirun_of_mpich_ends_the_job(mpich, repository):
    """Hydra passes SIGTERM on and waits, while jax's preemption service would catch the signal in each process."""
    command = [mpich, "-np", "2", sys.executable, str(RANK_PY), "wait"]
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
    assert "is done" not in output and time.monotonic() - start < 20


# --- The script -------------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_mpirun_sh_says_what_is_wrong(repository):
    script = repository / "launch" / "mpirun.sh"
    for arguments, status in (["--help"], 0), ([], 2), (["-np"], 2), (["-np", "2", "--"], 2):
        process, _ = _run([script, *arguments])
        assert process.returncode == status and "usage: launch/mpirun.sh" in process.stdout + process.stderr
    for number in ("abc", "0", "-1", "2x", "1.5", ""):
        process, _ = _run([script, "-np", number, "--", "true"])
        expected = f"-np takes the number of processes, a whole number of at least 1, and got: {number or 'empty'}\n"
        assert process.returncode == 2 and process.stderr.endswith(expected)
    process, _ = _run([script, "--", "true"], env=os.environ | {"MPIRUN": "/nonexistent/mpirun"})
    expected = "launch/mpirun.sh: $MPIRUN names /nonexistent/mpirun, which cannot be run\n"
    assert (process.returncode, process.stderr) == (127, expected)
