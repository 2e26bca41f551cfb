"""Runs fused calls along both axes of a mesh, one after the other, on devices that are late by up to 20 ms."""

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from tests.multi_gpu.axes_program import count_wrong
from tests.oracle import make_mesh

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.gpus(4)]


@pytest.mark.parametrize("apart", [False, True], ids=["loops", "programs"])
def test_no_launch_is_taken_for_another(apart):
    if jax.device_count() % 2 or jax.device_count() < 4:
        pytest.skip(f"needs an even number of GPUs, at least 4, got {jax.device_count()}")
    mesh = make_mesh(x=2, y=jax.device_count() // 2)
    assert count_wrong(mesh, 1, 40, apart=apart) == 0


@pytest.mark.one_process
def test_negative_control_with_one_key_for_all_they_are():
    """With one key for all axes, some launches never end, or compute with operands that have not arrived.

    It takes chance: the devices must be late in the right order. So the program repeats until a result is wrong.
    """
    command = [sys.executable, "-m", "tests.multi_gpu.axes_program", "--one-key", "--repeats", "1000"]
    environment = os.environ | {"OVERLAP_WAIT_TIMEOUT_S": "4", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.05"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert "gave up waiting" in done.stderr or ("wrong" in done.stdout and "0 wrong" not in done.stdout)
