"""One process per GPU: how many programs can learn peers' addresses, and the message when room runs out."""

import types

import jax
import pytest

from overlap.primitives import windows

GIB = 1 << 30


@pytest.fixture
def job(monkeypatch):
    """As in a job of four processes, each with a pool of 105 GiB; nothing is compiled yet."""
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": 105 * GIB})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(windows, "_lowered", [None, 0])
    monkeypatch.setattr(windows, "_meshes", set())
    monkeypatch.setenv("NCCL_WIN_STRIDE", str(windows.stride_bytes(4)))
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    return device


@pytest.mark.parametrize(("gpus", "programs", "meshes"), [(2, 70, 5), (4, 33, 5), (8, 33, 2)])
def test_room_for_programs_and_meshes_on_any_number_of_gpus(job, monkeypatch, gpus, programs, meshes):
    monkeypatch.setenv("NCCL_WIN_STRIDE", str(windows.stride_bytes(gpus)))
    assert windows.most_programs() >= programs
    for mesh in range(meshes):
        windows.note_program(object(), tuple(range(mesh, mesh + gpus)))
    with pytest.raises(NotImplementedError, match=r"\d meshes of different devices.* \d+ TB.*NCCL_WIN_STRIDE smaller"):
        for mesh in range(meshes, 3 * meshes):
            windows.note_program(object(), tuple(range(mesh, mesh + gpus)))


def test_programs_are_counted_and_the_one_too_many_is_refused(job):
    most = windows.most_programs()
    assert 30 <= most <= 4 * 1024 // 105
    for _ in range(most):
        windows.require_room()
        program = object()
        windows.note_program(program, (0, 1, 2, 3))
        windows.note_program(program, (0, 1, 2, 3))  # A second kernel in the program.
    with pytest.raises(NotImplementedError, match=rf"{most} programs .* has room for {most}: .*implementation=\"xla\""):
        windows.require_room()


def test_processes_with_nearly_the_same_memory_come_to_the_same_number(job):
    limits = set()
    for pool in (105 * GIB, 105 * GIB - 12345, 105 * GIB + 98765):
        job.memory_stats = lambda pool=pool: {"bytes_limit": pool}
        limits.add(windows.most_programs())
    assert len(limits) == 1


def test_nothing_is_refused_where_nothing_is_known(job, monkeypatch):
    windows._lowered[1] = 10**6
    monkeypatch.delenv("NCCL_WIN_STRIDE")
    windows.require_room()
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    windows.require_room()


def test_an_allocator_whose_memory_peers_do_not_see_is_refused_by_name(job, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with pytest.raises(NotImplementedError, match=r"XLA_PYTHON_CLIENT_ALLOCATOR=platform .* cuda_async"):
        windows.require_room()
