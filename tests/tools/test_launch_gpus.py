"""Which GPUs each process of a job gets, and the checks of `overlap.initialize` before it joins the job."""

from __future__ import annotations

import dataclasses
import os
import types

import jax
import pytest

from overlap import _cuda
from overlap.distributed import aborting, cards, failures, gpus, launchers, ports, rendezvous, start


def _job(**changes: object) -> cards.Job:
    fields: dict = dict(launcher="mpirun", mpi="Open MPI", size=4, rank=1, local_rank=1, local_size=4,
                        local_visible=(None,) * 4)  # fmt: skip
    return cards.Job(**(fields | changes))


def test_which_gpus_a_process_gets():
    for changes, visible, expected in (
        ({}, 4, [1]),
        ({"size": 8, "rank": 5}, 4, [1]),
        ({"local_visible": ("0,1,2,3",) * 4}, 4, [1]),
        # Dealt out by the launcher.
        ({"local_visible": ("0", "1", "2", "3")}, 1, [0]),
        ({"local_size": 2, "local_visible": ("0,1", "2,3")}, 2, [0, 1]),
        ({"launcher": "srun"}, 1, [0]),
    ):
        assert gpus.local_device_ids(_job(**changes), visible) == expected
    for changes, visible, said in (
        ({}, 2, r"4 processes were started on .*, which has 2 visible GPUs.*-np 2"),
        ({"local_visible": ("0",) * 4}, 1, r"4 processes .* 1 visible GPUs"),
        ({}, 0, "this process sees none"),
    ):
        with pytest.raises(RuntimeError, match=said):
            gpus.local_device_ids(_job(**changes), visible)


def test_gpus_or_not_and_a_single_core(monkeypatch):
    monkeypatch.setattr(_cuda, "visible_gpus", lambda: (_cuda.Gpu("NVIDIA H200", (9, 0)),))
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: "xla_cuda13")
    for platforms, uses_gpus in (("cpu", False), ("cuda,cpu", True), ("cpu,cuda", False), ("gpu", True), (None, True)):
        config = types.SimpleNamespace(jax_platforms=platforms)
        monkeypatch.setattr(gpus, "jax", types.SimpleNamespace(config=config))
        assert gpus.uses_gpus() is uses_gpus, platforms
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: None)
    assert not gpus.uses_gpus()
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    advice = {"mpirun": "--bind-to none", "srun": "srun --cpus-per-task", "torchrun": "more cores for torchrun"}
    for launcher, said in advice.items():
        with pytest.warns(RuntimeWarning, match=said):
            gpus.warn_about_binding(_job(local_rank=0, launcher=launcher))


def test_which_nccl_is_loaded_and_which_one_is_too_old(monkeypatch, tmp_path):
    """A library that is already loaded wins over the wheel, and the wheel wins over the search path, as in XLA."""
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: spec)
    (first, mode), *others = _cuda._nccl_candidates()
    assert [first, *(name for name, _ in others)] == ["libnccl.so.2", f"{tmp_path}/lib/libnccl.so.2", "libnccl.so.2"]
    assert mode & os.RTLD_NOLOAD
    for code, version in ((23007, (2, 30, 7)), (22809, (2, 28, 9)), (2708, (2, 7, 8))):
        assert _cuda._decode_version(code) == version
    for copies, said in (
        (("/a/libnccl.so.2",), r"NCCL 2\.28\.9 found at /a/libnccl\.so\.2; .* >= 2\.32\.3"),
        (("/a/libnccl.so.2", "/b/libnccl.so.2"), r"2 copies are loaded: /a/libnccl\.so\.2, /b/libnccl\.so\.2"),
    ):
        with pytest.raises(RuntimeError, match=said):
            gpus.require_nccl(_cuda.NcclLibrary((2, 28, 9), copies[0], copies))
    gpus.require_nccl(_cuda.NcclLibrary((2, 32, 3), "/somewhere/libnccl.so.2", ()))
    gpus.require_nccl(None)


@pytest.fixture
def job(monkeypatch):
    """Process 1 of four GPU processes on one host; `joined` records the calls of jax's own initialize."""
    mates = [cards.Card(rank, "a", "a", 100 + rank, "0", "0", None) for rank in range(4)]
    place = launchers.Place("mpirun", "Open MPI", 4, 1, 1, 4, None, "127.0.0.1", "key")
    job = types.SimpleNamespace(met=mates, place=place, coordinator="127.0.0.1:1", held=None)
    job.joined, job.keywords, job.hooks = [], [], []

    def meet(place, card, port, timeout_s):
        return cards.Agreement(job.coordinator, tuple(job.met), job.held)

    def initialize(*arguments, **keywords):
        job.joined.append(arguments)
        job.keywords.append(keywords | {"held": job.held and job.held.fileno() >= 0})

    monkeypatch.setattr(launchers, "find_place", lambda environ: job.place)
    monkeypatch.setattr(rendezvous, "meet", meet)
    monkeypatch.setattr(aborting, "_ending", None)
    monkeypatch.setattr(aborting, "abort_job_on_failure", lambda abort: job.hooks.append("failure"))
    monkeypatch.setattr(aborting, "abort_at_exit", lambda rank, abort: job.hooks.append("exit"))
    monkeypatch.setattr(failures, "watch", lambda rank: None)
    monkeypatch.setattr(gpus, "warn_about_binding", lambda job: None)
    monkeypatch.setattr(gpus, "uses_gpus", lambda: True)
    monkeypatch.setattr(start._compat, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(_cuda, "visible_gpus", lambda: (_cuda.Gpu("NVIDIA H200", (9, 0)),) * 4)
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary((2, 28, 9), "/old/libnccl.so.2", ()))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    return job


def test_initialize_with_old_nccl_stops_before_joining(monkeypatch, job):
    """With several GPU processes and an old NCCL, the job ends with our message, not inside XLA."""
    with pytest.raises(RuntimeError, match=r"NCCL 2\.28\.9"):
        start.initialize()
    assert not job.joined and job.hooks == ["failure", "exit"]
    start.initialize(check_nccl=False)
    # A second call installs no second hook. The handler behind jax's own handler is new.
    assert job.hooks == ["failure", "exit", "exit"]
    assert job.joined == [("127.0.0.1:1", 4, 1, [1])]
    # With a suitable NCCL, it also makes room for the windows of several programs, unless that was done before.
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary((2, 32, 3), "/new/libnccl.so.2", ()))
    monkeypatch.setenv("NCCL_WIN_STRIDE", "1")
    start.initialize()
    assert os.environ["NCCL_WIN_STRIDE"] == "1"
    monkeypatch.delenv("NCCL_WIN_STRIDE")
    start.initialize()
    assert int(os.environ["NCCL_WIN_STRIDE"]) >= 4 * 141 << 30
    monkeypatch.setenv("NCCL_WIN_STRIDE", "")  # monkeypatch restores it after the test.
    # Each of several hosts compiles its own program.
    assert "autotuning" not in os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", "")
    with monkeypatch.context() as patch:
        patch.setenv("JAX_PARTITION_INDEX", "0")  # This variable makes one host count as several.
        start.initialize()
        assert os.environ["XLA_FLAGS"] == "--xla_gpu_shard_autotuning=false"
    job.met += [cards.Card(rank, "b", "b", 100 + rank, "0", "0", None) for rank in range(4, 8)]
    job.place = dataclasses.replace(job.place, size=8)
    for before, after in [("--a", "--a --xla_gpu_shard_autotuning=false"), ("--xla_gpu_shard_autotuning=true",) * 2]:
        monkeypatch.setenv("XLA_FLAGS", before)
        start.initialize()
        assert os.environ["XLA_FLAGS"] == after


def test_what_jax_is_told(job):
    """jax receives the remaining time, the named GPUs, and (on a single host) an address only reachable there."""
    with ports.hold_free("127.0.0.1") as job.held:
        start.initialize(check_nccl=False, timeout_s=500, local_device_ids=[2, 3])
        assert job.held.fileno() == -1  # From here on, the port belongs to the coordinator.
    job.coordinator, job.held = "gpu1:7", None
    start.initialize(check_nccl=False, timeout_s=1)
    assert job.joined == [("127.0.0.1:1", 4, 1, [2, 3]), ("gpu1:7", 4, 1, [1])]
    alone, among_others = job.keywords
    assert 490 < alone["initialization_timeout"] <= 500 and among_others["initialization_timeout"] == 10
    assert (alone["held"], alone["coordinator_bind_address"]) == (True, "127.0.0.1:1")
    assert among_others["coordinator_bind_address"] is None
