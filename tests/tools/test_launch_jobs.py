"""`overlap.initialize` and the scripts of launch/ under real launchers, on CPU devices.

One job of mpirun computes and then fails, beside a proxy that reaches nobody, and one of Slurm learns its place. Other
launchers and other ways to fail are slow cases; test_launch_ends.py shows without a launcher which ends of a process
end the job. Slurm is one of our own (tests/tools/slurm.py), and each process runs tests/tools/launch_rank.py.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from tests.tools import slurm as own_slurm

RANK_PY = pathlib.Path(__file__).with_name("launch_rank.py")
REPOSITORY = RANK_PY.parents[2]
_LEFT_OUT = ("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)} | {
    "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY), "http_proxy": "http://127.0.0.1:9", "no_proxy": "",
    "MPIRUN": str(pathlib.Path(sys.executable).with_name("mpirun")),
}  # fmt: skip
_MPICH = shutil.which("mpirun.mpich") or shutil.which("mpiexec.hydra") or "no MPICH"
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "mpirun": (str(REPOSITORY / "launch" / "mpirun.sh"), "-np", "2", "--"),
    "mpich": (_MPICH, "-np", "2"),
    "torchrun": (  # Its variables. torch's own store would listen on the port.
        "env", "TORCHELASTIC_RUN_ID=none", "MASTER_ADDR=localhost", "MASTER_PORT=29500", "WORLD_SIZE=2",
        "LOCAL_WORLD_SIZE=2", "bash", "-c", 'for r in 0 1; do RANK=$r LOCAL_RANK=$r "$@" & done; wait', "-",
    ),
}  # fmt: skip
LAUNCHERS["mpich, SIGTERM"] = ("timeout", "12", *LAUNCHERS["mpich"])
# This variable says that there is one host.
LAUNCHERS["hosts of mpirun"] = (*LAUNCHERS["mpirun"], "env", "-u", "OMPI_COMM_WORLD_LOCAL_SIZE")


def _run(command, **options):
    start = time.monotonic()
    process = subprocess.run(list(map(str, command)), stdin=subprocess.DEVNULL, timeout=200, capture_output=True,
                             text=True, errors="replace", check=False, **options)  # fmt: skip
    return process, time.monotonic() - start


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def test_an_mpirun_that_is_a_script_finds_its_own_programs(tmp_path):
    """Intel's is one. It looks for them on PATH, and its environment need not be active."""
    scripts = {
        "mpirun": '[ "$1" != --version ] || { echo "Intel(R) MPI"; exit; }\nexec helper.of.mpirun "$@"\n',
        "helper.of.mpirun": 'echo "helped: $*"\n',
        "ls": "exit 1\n",  # Programs of the user come first.
    }
    for name, text in scripts.items():
        path = tmp_path / name
        path.write_text("#!/usr/bin/env bash\n" + text)
        path.chmod(0o755)
    line = [REPOSITORY / "launch" / "mpirun.sh", "-np", "3", "--", "ls"]
    variables = os.environ | {"MPIRUN": str(tmp_path / "mpirun"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["helped:", "-np", "3"]), done.stderr
    assert done.stdout.split()[-1] == shutil.which("ls")


_WAITED = r"rank 0 of 2 on \S+ has waited in MPI for 2 s \(`timeout_s`\): at least one rank"
_ABSENT = r"1 of 2 processes did not come to overlap.initialize\(\) within 2 s: rank 1\."


@pytest.mark.parametrize(
    ("launcher", "mode", "status", "said", "products", "most_s"),
    [  # The job's exit status (None: another than 0), what it says, the products of each process.
        # Process 0 waits in a collective for process 1. Without the abort it would wait for its heartbeat's 100 s.
        ("mpirun", "exit", 3, "process 1 exits with status 3: ending the job", 1, 60),
        slow("mpirun", "", 0, "", 2, 60),
        slow("mpirun", "raise", 1, "process 1 gives up", 1, 60),
        slow("mpirun", "kill", 137, "signal 9", 1, 60),
        # Process 0 sleeps, and jax's preemption service catches the SIGTERM that mpirun sends to it.
        slow("mpirun", "sleeps", 1, "process 1 gives up", 1, 25),
        slow("mpirun", "late", 1, r"overlap.initialize\(\) came after the first use of devices", 0, 60),
        # The missing rank has exited with status 0, which mpirun takes for success.
        slow("mpirun", "absent", 1, _ABSENT, 0, 30),
        slow("hosts of mpirun", "", 0, "", 2, 60),
        # MPI_Init of the other ranks would wait forever, and can neither be interrupted nor left.
        slow("hosts of mpirun", "stuck", None, _WAITED, 0, 30),
        # Hydra ignores a status other than 0 unless the process has called MPI.
        slow("mpich", "stuck", 1, _ABSENT, 0, 25),
        slow("mpich", "sleeps", 1, "process 1 gives up", 1, 25),
        # Hydra passes SIGTERM on and waits, while jax's preemption service would catch the signal in each process.
        slow("mpich, SIGTERM", "wait", 124, "", 0, 25),
        slow("torchrun", "", 0, "", 2, 60),
        slow("torchrun", "workers", 0, "", 0, 60),
    ],
)
def test_a_job(launcher, mode, status, said, products, most_s):
    needed = LAUNCHERS[launcher][0]
    if "mpirun" in launcher:
        needed = ENVIRONMENT["MPIRUN"]
    elif "mpich" in launcher:
        needed = _MPICH
    if shutil.which(needed) is None:
        pytest.skip(f"no {launcher} (extra `mpi`, or apt-get install mpich)")
    process, seconds = _run([*LAUNCHERS[launcher], sys.executable, RANK_PY, mode], env=ENVIRONMENT)
    assert process.returncode == status or (status is None and process.returncode != 0), process.stderr
    assert re.search(said, process.stderr), process.stderr
    assert "During handling" not in process.stderr and "has slept" not in process.stdout
    assert mode != "wait" or process.stdout.count("of 2, 2 devices") == 2 > process.stdout.count("is done") == 0
    errors = re.findall(r"process (\d) of 2, 2 devices, product (\d), error ([\d.]+)", process.stdout)
    assert sorted(found[:2] for found in errors) == [(r, p) for r in "01" for p in "01"[:products]], process.stdout
    assert all(float(error) < 0.02 for *_, error in errors)
    assert seconds < most_s
    if mode == "workers":  # Process 1 has started one.
        assert process.stdout.count("a worker is no process of the job") == 1 and process.stdout.count("is done") == 2


@pytest.mark.one_jax
def test_mpirun_sh_says_what_is_wrong():
    script = LAUNCHERS["mpirun"][0]
    for arguments, status in (["--help"], 0), ([], 2), (["-np"], 2), (["-np", "2", "--"], 2):
        process, _ = _run([script, *arguments])
        assert process.returncode == status and "usage: launch/mpirun.sh" in process.stdout + process.stderr
    for number in ("abc", "0", "2x", ""):
        process, _ = _run([script, "-np", number, "--", "true"])
        expected = f"-np takes the number of processes, a whole number of at least 1, and got: {number or 'empty'}\n"
        assert process.returncode == 2 and process.stderr.endswith(expected)
    process, _ = _run([script, "--", "true"], env=os.environ | {"MPIRUN": "/nonexistent/mpirun"})
    expected = "launch/mpirun.sh: $MPIRUN names /nonexistent/mpirun, which cannot be run\n"
    assert (process.returncode, process.stderr) == (127, expected)


# --- Slurm ------------------------------------------------------------------------------------------------------------

_PLACE = "import os; from overlap.distributed import launchers; print(launchers.find_place(os.environ), flush=True)"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := own_slurm.lacking():
        pytest.skip(reason)
    started = own_slurm.Slurm(tmp_path_factory.mktemp("slurm"), ENVIRONMENT)
    try:
        if reason := started.start(timeout_s=20):
            pytest.skip(f"Slurm did not come up within 20 s:\n{reason}")
        yield started
    finally:
        started.stop()


@pytest.mark.one_jax
@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ((sys.executable, "-c", _PLACE), 0, [rf"launcher='srun'.* size=2, rank={r}, local_rank={r}," for r in "01"]),
        (("no-such-command",), 127, ["no such command: no-such-command"]),
        slow((sys.executable, RANK_PY, "meet"), 0, [r"process 0 of 2, 2 devices", "process 1 is done"]),
        slow((sys.executable, RANK_PY, "absent"), None, [_ABSENT]),
        slow((sys.executable, RANK_PY, "exit"), None, ["process 1 exits with status 3: ending the job"]),
    ],
    ids=["place", "none", "meet", "absent", "exit"],
)
def test_srun_sbatch(slurm, tmp_path, command, status, said):
    script = REPOSITORY / "launch" / "srun.sbatch"
    options = ("--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=4", f"--output={tmp_path}/out")
    start, found = time.monotonic(), slurm.batch(*options, f"--chdir={tmp_path}", script, *command)
    output = (tmp_path / "out").read_text()
    assert found == status or (status is None and found != 0), output
    for words in said:
        assert re.search(words, output), output
    assert time.monotonic() - start < 40


@pytest.mark.one_jax
def test_srun_sbatch_outside_of_slurm():
    job, _ = _run(["bash", REPOSITORY / "launch" / "srun.sbatch", "true"], env=ENVIRONMENT)
    assert job.returncode == 2 and "this is not a job of Slurm. Submit it: sbatch launch/srun.sbatch" in job.stderr


@pytest.mark.parametrize(
    ("version", "given"),
    [("mpirun (Open MPI) 5.0.8", "--bind-to none --oversubscribe"), ("HYDRA build details", "-bind-to none"), ("", "")],
)
def test_what_launchers_get(tmp_path, version, given):
    """On CPUs Open MPI would refuse more processes than there are cores."""
    fake = tmp_path / "mpirun"
    fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo "$@"\n')
    fake.chmod(0o755)
    job, _ = _run([*LAUNCHERS["mpirun"], "true"], env=ENVIRONMENT | {"MPIRUN": str(fake)})
    assert job.returncode == 0 and given in job.stdout.replace("--allow-run-as-root ", ""), (job.stdout, job.stderr)
