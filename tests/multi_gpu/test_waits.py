"""Every wait for another device ends and names that device: in one process, and in jobs of one process per GPU.

Each program is a process (or a job) of its own, since a kernel that gives up destroys its GPU's context. So these tests
run only when the test suite itself is one process.
"""

import os
import pathlib
import re
import subprocess
import sys
import time

import jax
import pytest

from overlap import _cuda

LIMIT_S = 6
# Upper bound on the time from the limit to the end, including the start of jax and MPI (about 15 s on these machines).
GRACE_S = 45
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.gpus(2), pytest.mark.one_process]


def run(mode, transport="pull", processes=None):
    command = [sys.executable, "-m", "tests.multi_gpu.waits_program", mode, transport]
    if processes:
        if (version := _cuda.nccl().version) < _cuda.NCCL_OF_PROCESSES:
            pytest.skip(f"one process per GPU needs NCCL 2.32.3, found {version}")
        command = [ROOT / "launch" / "mpirun.sh", "-np", str(processes), "--", *command]
    # The child runs beside this process, which holds most of the GPU memory.
    environment = os.environ | {"OVERLAP_WAIT_TIMEOUT_S": str(LIMIT_S), "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    start = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          errors="replace", timeout=150, check=False)  # fmt: skip
    return done, time.monotonic() - start


@pytest.mark.parametrize("transport", ["pull", "ring"])
def test_a_device_that_is_late_is_waited_for_and_named(transport, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "LIMIT_S", 30)
    done, _ = run("late", transport)
    assert done.returncode == 0 and "DONE, wrong by 0.0" in done.stdout, done.stdout + done.stderr[-2000:]
    last = jax.device_count() - 1
    assert re.search(rf"still waiting: all_gather_lhs_matmul 1024x256x512 bfloat16 along 'x' of {last + 1} devices: "
                     r"position \d \(GPU \d, process 0\) has waited \d s for position.* to (begin|pass rows on)",
                     done.stderr)  # fmt: skip
    assert "no longer waiting" in done.stderr and "gave up" not in done.stderr


@pytest.mark.parametrize("transport", ["pull", "ring"])
def test_a_device_that_never_comes_ends_the_program(transport):
    done, seconds = run("never", transport)
    assert done.returncode != 0 and "RAISED after" in done.stdout, done.stdout + done.stderr[-2000:]
    assert float(re.search(r"RAISED after ([\d.]+)", done.stdout)[1]) < LIMIT_S + 15
    assert "gave up waiting: all_gather_lhs_matmul 1024x256x512 bfloat16 along 'x'" in done.stderr
    assert seconds < LIMIT_S + GRACE_S


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("stall", "gave up waiting"),
        ("exit", "gave up waiting"),
        ("kill", "signal 9"),
        ("raise", "on purpose"),
        ("order", "All processes must call the same operations in the same order"),
    ],
)
def test_a_process_that_does_not_come_ends_the_job(mode, said):
    done, seconds = run(mode, processes=jax.device_count())
    assert done.returncode != 0 and said in done.stderr, done.stdout + done.stderr[-2000:]
    assert seconds < LIMIT_S + GRACE_S
    if mode == "order":
        # One line names both operations.
        lines = [line for line in done.stderr.splitlines() if "gave up waiting" in line]
        assert any("all_gather_lhs_matmul" in line and "matmul_reduce_scatter" in line for line in lines), done.stderr
    if said == "gave up waiting":
        last = jax.device_count() - 1
        assert re.search(rf"gave up waiting: all_gather_lhs_matmul .* for position {last} to begin", done.stderr)
