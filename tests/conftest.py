"""Runs the tests on eight CPU devices; tests/multi_gpu/, if named on the command line, runs on the GPUs."""

from __future__ import annotations

import collections
import gc
import os
import pathlib
import sys
from typing import Any

import jax
import pytest

from tests.budget import Budget

# jax keeps what it traces. At Python's default thresholds the garbage collector's passes over it take a fifth of the
# time.
gc.set_threshold(200_000, 20, 100)
# A test that patches the library wants kernels traced anew, by the patched functions, and so do the tests after it.
_OURS = "overlap", "mosaic_emulator", "lessons"
_setattr, _undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo


def _forget_traces() -> None:
    if (primitive := sys.modules.get("overlap.frame.primitive")) is not None:
        primitive.tracer_of.cache_clear()


def _setattr_and_forget(self: pytest.MonkeyPatch, target: Any, *args: Any, **options: Any) -> None:
    _setattr(self, target, *args, **options)
    if getattr(target, "__module__", getattr(target, "__name__", str(target))).startswith(_OURS):
        _forget_traces()
        self._patches_overlap = True


def _undo_and_forget(self: pytest.MonkeyPatch) -> None:
    _undo(self)
    if self.__dict__.pop("_patches_overlap", False):
        _forget_traces()


pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo = _setattr_and_forget, _undo_and_forget
_GPU_TESTS = pathlib.Path(__file__).parent / "multi_gpu"


def _only_gpu_tests(config: pytest.Config) -> bool:
    paths = [pathlib.Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    return bool(paths) and all(path.is_relative_to(_GPU_TESTS) for path in paths)


def use_cpu_devices() -> None:
    """Gives this process eight CPU devices."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    # Most programs compiled here run once, and optimizing them takes a tenth of the time.
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--budget"):
        config.pluginmanager.register(Budget(name))
    # This must happen before anything asks for devices. On a machine with GPUs the rest of the suite runs on the CPU
    # too: these tests check the same on every machine.
    if _only_gpu_tests(config) and os.environ.get("JAX_PLATFORMS", "") != "cpu":
        return
    use_cpu_devices()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        metavar="N",
        help="of each test with parameters, N cases, spread evenly (default: all); all of those marked all_cases",
    )
    parser.addoption("--budget", metavar="NAME", help="a table of tests/budget.toml: see tests/budget.py")


@pytest.hookimpl(trylast=True)  # Only the tests that -m and -k select.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (most := config.getoption("--cases")) is None:
        return
    cases = collections.defaultdict(list)
    for item in (item for item in items if item.get_closest_marker("all_cases") is None):
        cases[item.nodeid.split("[")[0]].append(item)
    left_out = {
        id(item)
        for of_one_test in cases.values()
        for number, item in enumerate(of_one_test)
        if number * most // len(of_one_test) == (number - 1) * most // len(of_one_test)
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def pytest_sessionfinish() -> None:
    # At the end pytest collects garbage once more. Over the heap of a whole run that takes longer than the five seconds
    # after which execnet (under pytest-xdist) sends SIGINT to a worker that has not ended: a KeyboardInterrupt would be
    # raised in the collector's callbacks and shown as unraisable. Frozen objects are left out.
    gc.freeze()


@pytest.fixture(scope="session")
def repository() -> pathlib.Path:
    """Returns the root of the working tree."""
    return pathlib.Path(__file__).resolve().parent.parent
