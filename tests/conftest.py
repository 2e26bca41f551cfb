"""The tests run on eight CPU devices; tests/multi_gpu/, when it is named on the command line, on the GPUs."""

from __future__ import annotations

import os
import pathlib

import jax
import pytest

_GPU_TESTS = pathlib.Path(__file__).parent / "multi_gpu"


def _only_gpu_tests(config: pytest.Config) -> bool:
    paths = [pathlib.Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return bool(paths) and all(path.is_relative_to(_GPU_TESTS) for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    # Before anything asks for devices. A machine with GPUs runs the rest of the suite on its CPU too: what the tests
    # check there is the same everywhere.
    if _only_gpu_tests(config) and os.environ.get("JAX_PLATFORMS", "") != "cpu":
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """The root of the working tree."""
    return pathlib.Path(__file__).resolve().parent.parent
