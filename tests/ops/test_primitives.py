"""Users' own kernels made of `overlap.primitives`: the examples, emulated, and with defects; groups of peers."""

from __future__ import annotations

import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from overlap import primitives as prim
from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests import oracle
from tests.ops.primitive_cases import KERNELS, gathering, program, stencils

# The gather's chunks are two rows of 8 KB. With three tiles, one has no edge.
SHARDS = {"all_gather": (4, 2048), "all_gather, handshake": (4, 2048), "halo_exchange": (24, 128)}


@pytest.mark.parametrize("name", KERNELS)
def test_the_examples_are_exact(name):
    run = program(name, 3, SHARDS[name])
    for seed, completion in enumerate(("late", "random", "eager", "late")):
        # Launches in a row on the same memory; in the last round one CTA runs at a time.
        with emulate(cores=2, completion=completion, seed=seed, laps=2, resident=1 if seed == 3 else None):
            assert run(seed) <= 1e-6


def nothing(*_, **__):
    pass


def plain_wait(flag, value, *_, **__):
    """Waits at the right scope, but without the proxy fence."""
    prim.semaphores.plgpu.semaphore_wait(flag, value, decrement=False)


DEFECTS = {
    "no wait for the peers": ("semaphore_wait_peer", nothing, (ProtocolError, RaceError)),
    "told before it has landed": ("wait_stores_landed", nothing, (ProtocolError, RaceError)),
    "told when it has been read": ("wait_stores_landed", prim.wait_stores_read, (ProtocolError, RaceError)),
    "told at the scope of one GPU": (
        "semaphore_signal_peer", lambda flag, *_: prim.semaphore_signal(flag), EmulationError,
    ),
    "not told": ("semaphore_signal_peer", nothing, DeadlockError),
    "no fence": ("semaphore_wait_peer", plain_wait, RaceError),
}  # fmt: skip
GATHER_DEFECTS = ("told before it has landed", "told at the scope of one GPU")


@pytest.mark.parametrize("defect", DEFECTS)
def test_defects_are_found(defect, monkeypatch):
    """The emulator must report each defect in one of at most four runs."""
    replaced, replacement, expected = DEFECTS[defect]
    monkeypatch.setattr(prim, replaced, replacement)
    name = "all_gather" if defect in GATHER_DEFECTS else "halo_exchange"
    spoilt = program(name, 3, SHARDS[name])
    with pytest.raises(expected):
        for seed in range(4):
            with emulate(cores=2, completion=("late", "random")[seed % 2], seed=seed):
                spoilt(seed)


def test_the_handshake_leaves_when_all_may(monkeypatch):
    monkeypatch.setattr(prim.Handshake, "begin", lambda self: self.looks + 0 * self.group.me())
    with pytest.raises(EmulationError), emulate(cores=2, seed=1):
        program("all_gather, handshake", 3, SHARDS["all_gather"])(1)


@pytest.mark.one_jax
@pytest.mark.parametrize("example", [gathering, stencils], ids=lambda x: x.__name__)
def test_the_examples_run_as_programs(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{example.__name__}.py", "--devices", "2"])
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # These tests have more devices already.
    assert example.main() == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{example.__name__}: 2 devices (emulated on the CPU)")
    assert "3 launches, 0 wrong elements" in line


# --- Groups of peers --------------------------------------------------------------------------------------------------


def on_mesh(function, mesh, **keywords):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False, **keywords))


def test_a_group_of_peers():
    mesh, seen = oracle.make_mesh(x=2, y=2), []
    axes = "y", ("y", "x"), ["x"]
    on_mesh(lambda x: (seen.extend(map(prim.PeerGroup.of, axes)), x)[1], mesh)(np.zeros(1))
    assert [group.size for group in seen] == [2, 4, 2]
    assert seen[2] == prim.PeerGroup("x", (("x", 2), ("y", 2))) == prim.PeerGroup.of("x", mesh)


NO_GROUP = [
    ("z", {}, r"must be an axis of the mesh.*'z'"),
    ((), {}, "at least one mesh axis"),
    (("x", "x"), {}, "each mesh axis once"),
    ("y", {"axis_names": {"x"}}, r"`PeerGroup.of` must be called inside `jax.shard_map` over axis 'y'"),
]


def test_no_group_of_peers():
    for axis_name, keywords, message in NO_GROUP:
        with pytest.raises(ValueError, match=message):
            on_mesh(lambda x, a=axis_name: [prim.PeerGroup.of(a), x][1], oracle.make_mesh(x=2, y=2), **keywords)(
                np.zeros(1)
            )
    with pytest.raises(ValueError, match=r"`PeerGroup.of` must be called inside `jax.shard_map`, and there is no mesh"):
        prim.PeerGroup.of("x")
    wrap = pytest.raises(ValueError, match=r"and no axis .*: wrap the call that runs")
    with jax.set_mesh(oracle.make_mesh(x=2)), wrap:
        prim.PeerGroup.of("x")


@pytest.mark.one_jax
def test_all_names_are_documented(repository):
    page = (repository / "docs" / "primitives.md").read_text()
    assert not [name for name in prim.__all__ if f"`{name}" not in page]
