"""`overlap.initialize` and launch/srun.sbatch under a real Slurm (tests/tools/slurm.py), on CPU devices."""

from __future__ import annotations

import pathlib
import re
import sys
import time

import pytest

from tests.tools import slurm as own_slurm

pytestmark = pytest.mark.one_jax
RANK_PY = pathlib.Path(__file__).with_name("launch_rank.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, repository):
    if reason := own_slurm.lacking():
        pytest.skip(reason)
    started = own_slurm.Slurm(tmp_path_factory.mktemp("slurm"))
    started.environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}
    try:
        if reason := started.start(timeout_s=20):
            pytest.skip(f"Slurm did not come up within 20 s:\n{reason}")
        yield started
    finally:
        started.stop()


def _read(path: pathlib.Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("numbers", [(300,), pytest.param((301, 557), marks=pytest.mark.slow)])
def test_jobs_of_srun_sbatch(slurm, repository, tmp_path, numbers):
    """Side by side, 256 apart: ports computed from the numbers mod 4096 would be equal, and one end the other."""
    script = repository / "launch" / "srun.sbatch"
    for number in numbers:
        slurm.number_next_job(number)
        options = ["--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=4",
                   f"--output={tmp_path}/{number}"]  # fmt: skip
        assert slurm.batch(*options, script, sys.executable, RANK_PY, "meet") == number
    coordinators = []
    for number in numbers:
        assert slurm.wait(number) == 0, _read(tmp_path / str(number))
        output = _read(tmp_path / str(number))
        found = {tuple(match) for match in re.findall(r"process (\d) of 2, 2 devices, (\S+)", output)}
        assert {rank for rank, _ in found} == {"0", "1"} and "process 0 is done" in output, output
        coordinators += {address for _, address in found}
    assert len(set(coordinators)) == len(coordinators) == len(numbers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "said"),
    [("absent", r"1 of 2 processes did not come to overlap.initialize\(\) within 2 s: rank 1\."),
     ("exit", "process 1 exits with status 3: ending the job")],
)  # fmt: skip
def test_a_rank_that_leaves_ends_the_step(slurm, mode, said):
    start = time.monotonic()
    process = slurm.popen("srun", "--kill-on-bad-exit=1", "--ntasks=2", sys.executable, RANK_PY, mode)
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0 and re.search(said, output), output
    assert time.monotonic() - start < 40


def test_srun_sbatch_says_what_is_missing(slurm, repository, tmp_path):
    script = repository / "launch" / "srun.sbatch"
    job = slurm.popen("bash", script, "true")
    output, _ = job.communicate(timeout=60)
    assert job.returncode == 2 and "this is not a job of Slurm. Submit it: sbatch launch/srun.sbatch" in output
    options = ["--gpus-per-node=1", "--ntasks-per-node=1", f"--output={tmp_path}/out", f"--chdir={tmp_path}"]
    assert slurm.wait(slurm.batch(*options, script, "no-such-command")) == 127
    assert "no such command: no-such-command" in _read(tmp_path / "out")
