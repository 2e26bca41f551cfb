"""Tests on real GPUs. Run `pytest tests/multi_gpu` in one process, or under `launch/mpirun.sh` in a process per GPU.

`test_contract.py` runs the cases of tests/ops on the GPUs. The other files have what only GPUs show.
"""

import jax
import pytest

import overlap


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(n): needs n Hopper or Blackwell GPUs in the job")
    config.addinivalue_line("markers", "every_count: runs on 2, 4 and 8 GPUs, and not only on as many as there are")
    config.addinivalue_line("markers", "one_process: starts processes of its own, so the suite must be one process")
    overlap.initialize()


def gpus_with_kernels() -> int:
    if jax.default_backend() != "gpu":
        return 0
    return sum(getattr(d, "compute_capability", "") in ("9.0", "10.0", "10.3") for d in jax.devices())


def pytest_collection_modifyitems(items):
    available = gpus_with_kernels()
    for item in items:
        if (mark := item.get_closest_marker("gpus")) and available < mark.args[0]:
            reason = f"needs {mark.args[0]} Hopper or Blackwell GPUs, found {available}"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("one_process") and jax.process_count() > 1:
            item.add_marker(pytest.mark.skip(reason="starts processes of its own"))


def pytest_generate_tests(metafunc):
    # With one process per GPU, every mesh must use all GPUs of the job: a rank without a shard has nothing to run.
    if "devices" in metafunc.fixturenames:
        every = any(mark.name == "every_count" for mark in metafunc.definition.iter_markers())
        most = max((n for n in (2, 4, 8) if n <= gpus_with_kernels()), default=2)
        counts = [jax.device_count()] if jax.process_count() > 1 else [2, 4, 8] if every else [most]
        metafunc.parametrize("devices", [pytest.param(n, marks=pytest.mark.gpus(n), id=f"{n}gpus") for n in counts])
