"""Users' own kernels made of `overlap.primitives`: the examples, emulated, with defects, and assembled."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from overlap import primitives as prim
from overlap.emulation import DeadlockError, EmulationError, ProtocolError, RaceError, emulate
from tests import oracle
from tests.assembly import assembly
from tests.assembly.assembly import Case
from tests.ops.primitive_cases import KERNELS, program

# The gather's chunks are two rows of 8 KB. With three tiles, one has no edge.
SHARDS = {"all_gather": (4, 2048), "all_gather, handshake": (4, 2048), "halo_exchange": (24, 128)}
program = functools.cache(program)


def run(name, devices, **settings):
    with emulate(cores=2, **settings):
        assert program(name, devices, SHARDS[name])(settings.get("seed", 0)) <= 1e-6


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", KERNELS)
def test_the_examples_are_exact(name, devices):
    if devices == 1 and "handshake" in name:
        pytest.skip("there is nobody to look for")
    for seed, completion in enumerate(("late", "random", "eager", "late")):
        # Launches in a row on the same memory; in the last round one CTA runs at a time.
        run(name, devices, completion=completion, seed=seed, laps=2, resident=1 if seed == 3 else None)


def nothing(*_, **__):
    pass


def plain_wait(flag, value, *_, **__):
    """Makes the kernel wait at the right scope, but without the proxy fence."""
    prim.semaphores.plgpu.semaphore_wait(flag, value, decrement=False)


DEFECTS = {
    "no wait for the peers": ("semaphore_wait_peer", nothing, (ProtocolError, RaceError)),
    "told before it has landed": ("wait_stores_landed", nothing, (ProtocolError, RaceError)),
    "told when it has been read": ("wait_stores_landed", prim.wait_stores_read, (ProtocolError, RaceError)),
    "told at the scope of one GPU": (
        "semaphore_signal_peer",
        lambda flag, *_: prim.semaphore_signal(flag),
        EmulationError,
    ),
    "not told": ("semaphore_signal_peer", nothing, DeadlockError),
}


@pytest.mark.parametrize("defect", DEFECTS)
@pytest.mark.parametrize("name", ["all_gather", "halo_exchange"])
def test_defects_are_found(name, defect, monkeypatch):
    """The emulator must report each defect in one of at most four runs."""
    replaced, replacement, expected = DEFECTS[defect]
    monkeypatch.setattr(prim, replaced, replacement)
    spoilt = program.__wrapped__(name, 3, SHARDS[name])
    with pytest.raises(expected):
        for seed in range(4):
            with emulate(cores=2, completion=("late", "random")[seed % 2], seed=seed):
                spoilt(seed)


def test_a_wait_without_a_fence_is_found(monkeypatch):
    monkeypatch.setattr(prim, "semaphore_wait_peer", plain_wait)
    spoilt = program.__wrapped__("halo_exchange", 3, SHARDS["halo_exchange"])
    with pytest.raises(RaceError, match="fence"), emulate(cores=2, seed=1):
        spoilt(1)


def test_the_handshake_leaves_when_all_may(monkeypatch):
    monkeypatch.setattr(prim.Handshake, "begin", lambda self: self.looks + 0 * self.group.me())
    with pytest.raises(EmulationError), emulate(cores=2, seed=1):
        program.__wrapped__("all_gather, handshake", 3, SHARDS["all_gather"])(1)


EVERYWHERE = [(target, devices) for target in ("h200", "b200") for devices in (2, 4)]
ASSEMBLED = [
    *(("all_gather", *where) for where in [("h200", 1), *EVERYWHERE]),
    *(("halo_exchange", *where) for where in [("h200", 1), *EVERYWHERE]),
    *(("all_gather_with_handshake", target, 4) for target in ("h200", "b200")),
]


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(("kernel", "target", "devices"), ASSEMBLED)
def test_the_examples_are_assembled(kernel, target, devices):
    (report,) = assembly.assemble_case(
        Case(f"tests.ops.primitive_cases:{kernel}", devices, (64, 1024, 0), "f32", target)
    )
    assert report.architecture == {"h200": "sm_90a", "b200": "sm_100a"}[target]
    assert report.name == kernel.removesuffix("_with_handshake")
    assert (report.spills, report.stack_frame_bytes, report.remarks) == (0, 0, ())


def test_the_examples_run_as_programs(repository):
    """Both examples run in one process, which saves starting another process."""
    program = "import sys, all_gather, halo_exchange; sys.exit(all_gather.main() + halo_exchange.main())"
    command = [sys.executable, "-c", program, "--devices", "2"]
    paths = os.pathsep.join([str(repository), str(repository / "examples")])
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    done = subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["all_gather", "halo_exchange"]
    assert (
        done.stdout.count("2 devices (emulated on the CPU)") == done.stdout.count("3 launches, 0 wrong elements") == 2
    )


def on_mesh(function, mesh, **keywords):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False, **keywords))


def test_a_group_of_peers():
    mesh, seen = oracle.make_mesh(x=2, y=2), []

    def look(x):
        seen.extend([prim.PeerGroup.of("y"), prim.PeerGroup.of(("y", "x")), prim.PeerGroup.of(["x"])])
        return x

    on_mesh(look, mesh)(np.zeros(1))
    assert [group.size for group in seen] == [2, 4, 2]
    assert seen[2] == prim.PeerGroup("x", (("x", 2), ("y", 2))) == prim.PeerGroup.of("x", mesh)


@pytest.mark.parametrize(
    ("axis_name", "keywords", "message"),
    [
        ("z", {}, r"must be an axis of the mesh.*'z'"),
        ((), {}, "at least one mesh axis"),
        (("x", "x"), {}, "each mesh axis once"),
        ("y", {"axis_names": {"x"}}, r"`PeerGroup.of` must be called inside `jax.shard_map` over axis 'y'"),
    ],
)
def test_no_group_of_peers(axis_name, keywords, message):
    with pytest.raises(ValueError, match=message):
        on_mesh(lambda x: [prim.PeerGroup.of(axis_name), x][1], oracle.make_mesh(x=2, y=2), **keywords)(np.zeros(1))


def test_no_group_of_peers_without_a_mesh():
    with pytest.raises(ValueError, match=r"`PeerGroup.of` must be called inside `jax.shard_map`, and there is no mesh"):
        prim.PeerGroup.of("x")
    with (
        jax.set_mesh(oracle.make_mesh(x=2)),
        pytest.raises(ValueError, match=r"and no axis .*: wrap the call that runs"),
    ):
        prim.PeerGroup.of("x")


def test_all_names_are_documented(repository):
    page = (repository / "docs" / "primitives.md").read_text()
    assert not [name for name in prim.__all__ if f"`{name}" not in page]
