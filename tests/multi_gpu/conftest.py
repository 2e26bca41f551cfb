"""Tests on real GPUs. Run `pytest tests/multi_gpu` in one process, or under `launch/mpirun.sh` in a process per GPU."""

import jax
import pytest

import overlap

MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpus(n): needs n Hopper or Blackwell GPUs in the job")
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


def pytest_generate_tests(metafunc):
    # With one process per GPU, every mesh must use all GPUs of the job: a rank without a shard has nothing to run.
    if "devices" in metafunc.fixturenames:
        counts = [2, 4, 8] if jax.process_count() == 1 else [jax.device_count()]
        metafunc.parametrize("devices", [pytest.param(n, marks=pytest.mark.gpus(n), id=f"{n}gpus") for n in counts])
