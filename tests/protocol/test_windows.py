"""One process per GPU: how many meshes can learn peers' addresses, and whose memory peers cannot see."""

import jax
import pytest

from overlap.primitives import windows


@pytest.mark.parametrize(("gpus", "meshes"), [(2, 45), (4, 22), (8, 11)])
def test_address_space_is_enough_for_some_meshes_and_the_one_too_many_is_refused(monkeypatch, gpus, meshes):
    monkeypatch.setattr(windows, "_meshes", set())
    monkeypatch.setenv("NCCL_WIN_STRIDE", str(windows.STRIDE_BYTES))
    for mesh in [*range(meshes), *range(meshes)]:
        windows.note_mesh(tuple(range(mesh, mesh + gpus)))
    with pytest.raises(NotImplementedError, match=rf"{meshes + 1} meshes of different devices.* 9\d TB.*smaller"):
        windows.note_mesh((-1, *range(1, gpus)))


def test_an_allocator_whose_memory_peers_do_not_see_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with pytest.raises(NotImplementedError, match=r"XLA_PYTHON_CLIENT_ALLOCATOR=platform .* cuda_async"):
        windows.require_shared_memory()
