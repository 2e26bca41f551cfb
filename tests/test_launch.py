"""`overlap.initialize`, in fake environments and under a real mpirun on CPU devices."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import time
import types

import jax
import pytest

from overlap import _cuda, _distributed


def _job(**changes: object) -> _distributed._Job:
    fields: dict = dict(launcher="mpirun", size=4, rank=1, local_rank=1, local_size=4, coordinator="127.0.0.1:1",
                        local_visible=(None,) * 4, abort=lambda status: None)  # fmt: skip
    return _distributed._Job(**(fields | changes))


# --- Who started this process -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte_hnp_uri": "x"}, ("mpirun", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "0"}, ("mpirun", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}, ("mpirun", 2)),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, ("srun", 8)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # In an interactive allocation, without srun.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
        # mpirun inside a Slurm allocation; then Hydra's proxies are what srun counts.
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("mpirun", 4)),
        ({"PMI_SIZE": "8", "MPI_LOCALNRANKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("mpirun", 8)),
        # srun with a PMI plug-in.
        ({"PMI_SIZE": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}, ("srun", 8)),
    ],
)
def test_launcher(environ, expected):
    assert _distributed._launcher(environ) == expected


def test_single_process_is_a_no_op_without_mpi4py(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # An import of it would fail.
    hook = sys.excepthook
    _distributed.initialize()
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


def test_several_processes_without_mpi4py(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"started 2 processes, but mpi4py cannot be used .* pip install mpi4py"):
        _distributed.initialize()


def test_mpirun_and_mpi4py_of_different_installations(monkeypatch):
    world = types.SimpleNamespace(size=1, rank=0)
    mpi = types.SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "MPICH Version: 5.0\nmore")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"started 2 processes, but mpi4py's MPI \(MPICH Version: 5.0\) sees 1"):
        _distributed.initialize()


# --- Slurm ------------------------------------------------------------------------------------------------------------


def _slurm(**changes: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
            "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[007-009,012],login1"} | changes  # fmt: skip


def test_slurm_job():
    job = _distributed._slurm_job(_slurm(), 8, None)
    assert (job.size, job.rank, job.local_rank, job.local_size) == (8, 5, 1, None)
    host, port = job.coordinator.split(":")
    assert host == "gpu007"
    assert 61440 <= int(port) < 65536
    # All processes of a step agree, two steps of a job do not.
    assert _distributed._slurm_job(_slurm(SLURM_PROCID="0"), 8, None).coordinator == job.coordinator
    assert _distributed._slurm_job(_slurm(SLURM_STEP_ID="3"), 8, None).coordinator != job.coordinator
    assert _distributed._slurm_job(_slurm(), 8, 1234).coordinator == "gpu007:1234"


@pytest.mark.parametrize(
    ("nodes", "first"), [("a1", "a1"), ("a1,b2", "a1"), ("gpu[3-5]", "gpu3"), ("n[01,03-05],m1", "n01")]
)
def test_first_slurm_host(nodes, first):
    assert _distributed._first_slurm_host(nodes) == first


# --- Which GPUs, which NCCL -------------------------------------------------------------------------------------------


def test_one_gpu_per_process():
    assert _distributed._local_device_ids(_job(), 4) == [1]
    assert _distributed._local_device_ids(_job(local_visible=("0,1,2,3",) * 4), 4) == [1]


def test_gpus_dealt_out_by_the_launcher():
    assert _distributed._local_device_ids(_job(local_visible=("0", "1", "2", "3")), 1) == [0]
    assert _distributed._local_device_ids(_job(local_size=2, local_visible=("0,1", "2,3")), 2) == [0, 1]
    assert _distributed._local_device_ids(_job(launcher="srun", local_size=None, local_visible=None), 1) == [0]


def test_more_processes_than_gpus():
    with pytest.raises(RuntimeError, match=r"4 processes were started on .*, which has 2 visible GPUs.*-np 2"):
        _distributed._local_device_ids(_job(), 2)
    with pytest.raises(RuntimeError, match=r"4 processes .* 1 visible GPUs"):
        _distributed._local_device_ids(_job(local_visible=("0",) * 4), 1)
    with pytest.raises(RuntimeError, match=r"at least 4 processes .* 2 visible GPUs"):
        _distributed._local_device_ids(_job(launcher="srun", local_rank=3, local_size=None, local_visible=None), 2)


def test_no_gpu_where_one_was_asked_for():
    with pytest.raises(RuntimeError, match="this process sees none"):
        _distributed._local_device_ids(_job(), 0)


def test_platform_choice(monkeypatch):
    monkeypatch.setattr(_cuda, "visible_gpus", lambda: (_cuda.Gpu("NVIDIA H200", (9, 0)),))
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: "xla_cuda13")
    for platforms, uses_gpus in (("cpu", False), ("cuda,cpu", True), ("cpu,cuda", False), ("gpu", True), (None, True)):
        config = types.SimpleNamespace(jax_platforms=platforms)
        monkeypatch.setattr(_distributed, "jax", types.SimpleNamespace(config=config))
        assert _distributed._uses_gpus() is uses_gpus, platforms
    monkeypatch.setattr(_cuda, "jax_plugin", lambda: None)
    assert not _distributed._uses_gpus()


def test_nccl_too_old():
    library = _cuda.NcclLibrary((2, 28, 9), "/somewhere/libnccl.so.2", ("/somewhere/libnccl.so.2",))
    with pytest.raises(RuntimeError, match=r"NCCL 2\.28\.9 found at /somewhere/libnccl\.so\.2; .* >= 2\.30"):
        _distributed._require_nccl(library)
    several = _cuda.NcclLibrary((2, 28, 9), "/a/libnccl.so.2", ("/a/libnccl.so.2", "/b/libnccl.so.2"))
    with pytest.raises(RuntimeError, match=r"2 copies are loaded: /a/libnccl\.so\.2, /b/libnccl\.so\.2"):
        _distributed._require_nccl(several)
    _distributed._require_nccl(_cuda.NcclLibrary((2, 30, 0), "/somewhere/libnccl.so.2", ()))
    _distributed._require_nccl(None)


def test_initialize_with_old_nccl_stops_before_joining(monkeypatch):
    """The whole way: several GPU processes and an old NCCL end in our message, not inside XLA."""
    joined = []
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setattr(_distributed, "_mpi_job", lambda environ, size, port: _job())
    monkeypatch.setattr(_distributed, "_abort_job_on_failure", lambda job: None)
    monkeypatch.setattr(_distributed, "_warn_about_binding", lambda job: None)
    monkeypatch.setattr(_distributed, "_uses_gpus", lambda: True)
    monkeypatch.setattr(_distributed.atexit, "register", lambda *arguments: None)
    monkeypatch.setattr(_distributed._compat, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(_cuda, "visible_gpus", lambda: (_cuda.Gpu("NVIDIA H200", (9, 0)),) * 4)
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary((2, 28, 9), "/old/libnccl.so.2", ()))
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **keywords: joined.append(arguments))
    with pytest.raises(RuntimeError, match=r"NCCL 2\.28\.9"):
        _distributed.initialize()
    assert not joined
    _distributed.initialize(check_nccl=False)
    assert joined == [("127.0.0.1:1", 4, 1, [1])]
    # With an NCCL that will do, it also makes room for the windows of several programs, unless that was done already.
    monkeypatch.setattr(_cuda, "nccl", lambda: _cuda.NcclLibrary((2, 30, 7), "/new/libnccl.so.2", ()))
    monkeypatch.setenv("NCCL_WIN_STRIDE", "1")
    _distributed.initialize()
    assert os.environ["NCCL_WIN_STRIDE"] == "1"
    monkeypatch.delenv("NCCL_WIN_STRIDE")
    _distributed.initialize()
    assert int(os.environ["NCCL_WIN_STRIDE"]) >= 10 * 141 << 30
    monkeypatch.setenv("NCCL_WIN_STRIDE", "")  # So that its end is the test's.
    # Several hosts compile each for itself.
    assert "autotuning" not in os.environ.get("XLA_FLAGS", "")
    monkeypatch.setattr(_distributed, "_mpi_job", lambda environ, size, port: _job(size=8))
    for before, after in [("--a", "--a --xla_gpu_shard_autotuning=false"), ("--xla_gpu_shard_autotuning=true",) * 2]:
        monkeypatch.setenv("XLA_FLAGS", before)
        _distributed.initialize()
        assert os.environ["XLA_FLAGS"] == after


def test_import_touches_no_device():
    program = "import overlap; from overlap import _compat; assert not _compat.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(("code", "version"), [(23007, (2, 30, 7)), (22809, (2, 28, 9)), (2708, (2, 7, 8))])
def test_nccl_version_code(code, version):
    assert _cuda._decode_version(code) == version


def test_nccl_is_asked_in_the_order_of_xla(monkeypatch, tmp_path):
    """A library that is loaded already wins over the wheel, the wheel over the search path."""
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(_cuda.importlib.util, "find_spec", lambda name: spec)
    names = [name for name, mode in _cuda._nccl_candidates()]
    assert names == ["libnccl.so.2", str(tmp_path / "lib" / "libnccl.so.2"), "libnccl.so.2"]
    assert _cuda._nccl_candidates()[0][1] & os.RTLD_NOLOAD


def test_warns_about_a_single_core(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.warns(RuntimeWarning, match="--bind-to none"):
        _distributed._warn_about_binding(_job(local_rank=0))


# --- Under mpirun -----------------------------------------------------------------------------------------------------


def _mpirun(repository: pathlib.Path, mode: str) -> tuple[subprocess.CompletedProcess[str], float]:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra `mpi`)")
    rank_py = repository / "tests" / "launch_rank.py"
    command = [repository / "launch" / "mpirun.sh", "-np", "2", "--", sys.executable, rank_py, mode]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}
    start = time.monotonic()
    process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                             errors="replace", timeout=200, check=False)  # fmt: skip
    return process, time.monotonic() - start


def test_mpirun_runs_the_xla_implementation(repository):
    process, _ = _mpirun(repository, "")
    assert process.returncode == 0, process.stderr
    for rank in range(2):
        match = re.search(rf"process {rank} of 2, 2 devices, error ([\d.]+)", process.stdout)
        assert match, process.stdout + process.stderr
        assert float(match[1]) < 0.02


def test_a_rank_that_ends_well_while_another_goes_on_is_named(repository):
    process, _ = _mpirun(repository, "leave")
    assert process.returncode == 0, process.stderr
    assert "heard: process 1 of the job ended 1 s ago or more, with status 0, and process 0 goes on" in process.stdout
    assert "process 0 was told: True" in process.stdout


@pytest.mark.parametrize(
    ("mode", "said", "status"),
    [("raise", "process 1 gives up", 1), ("exit", "status 3", 3), ("kill", "signal 9", 137)],
)
def test_a_failing_rank_ends_the_job(repository, mode, said, status):
    """Process 0 waits in a collective for process 1; without the abort it would do so for its heartbeat's 100 s."""
    process, seconds = _mpirun(repository, mode)
    assert process.returncode == status, process.stderr
    assert said in process.stderr
    assert "error" not in process.stdout
    assert seconds < 60


def test_devices_used_too_early(repository):
    process, seconds = _mpirun(repository, "late")
    assert process.returncode != 0
    assert "overlap.initialize() came after the first use of devices" in process.stderr
    assert seconds < 60


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2), (["-np"], 2), (["-np", "2", "--"], 2)])
def test_mpirun_sh_usage(repository, arguments, status):
    script = repository / "launch" / "mpirun.sh"
    process = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == status
    assert "usage: launch/mpirun.sh" in process.stdout + process.stderr
