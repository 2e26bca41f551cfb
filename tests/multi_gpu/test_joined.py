"""Tests gathers with few rows per shard on 2, 4 and 8 GPUs: exact and repeatable, whichever device is late."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives import communicator
from overlap.collectives.communicator import Communicator
from tests import oracle
from tests.ops import several_sides_cases, skew_cases
from tests.ops.several_sides_cases import Form
from tests.ops.skew_cases import stall
from tests.protocol.handshake_cases import speak_before_the_transfers

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
ONE = overlap.Config(tile_m=64, tile_n=128, joined=True)
CUT = overlap.Config(tile_m=64, tile_n=256, stream_k=8, joined=True)
ALL = ("rows", "columns")
# With integers up to 3 in magnitude and k ≤ 200, every sum is exact in f16 and f32. A configuration of None leaves the
# choice to the library.
EXACT = [
    (Form(16, (1024,), 192, container=None), None),
    (Form(1, (24,), 8, container=None), CUT),
    (Form(16, (520, 136, 8), 200, gathered=True, container=tuple), dataclasses.replace(CUT, stages=3)),
    (Form(40, (264,), 136, container=None), ONE.replace(tile_m=128, chunk_bytes=256, chunk_buffers=3)),
    (Form(100, (264, 520), 200, gathered=True), ONE),
    (Form(24, (264, 520), 136, scales=("scalar", *ALL)), CUT),
    (Form(40, (264,), 136, scales=ALL), ONE.replace(tile_m=72, swap_operands=True)),
    (Form(16, (264, 136), 208, dtype=E4M3, out_dtype=BF16, transpose_rhs=True, scales=ALL),
     ONE.replace(tile_m=40, swap_operands=True)),
    (Form(3, (264, 136), 200, (2, 3), gathered=True, scales=ALL), CUT),
    (Form(1, (1032,), 200, (5,), transpose_rhs=True, container=None), None),
    (Form(16, (264, 136), 208, dtype=E4M3, transpose_rhs=True, gathered=True, scales=ALL),
     CUT),
]  # fmt: skip


@pytest.mark.parametrize(("form", "config"), EXACT, ids=str)
def test_every_bit(devices, form, config):
    mesh, launches = oracle.make_mesh(x=devices), []
    fused = several_sides_cases.on_mesh(
        form, mesh, several_sides_cases.call(form, implementation="fused", config=oracle.fitting(config))
    )
    for seed in range(3):  # Three launches in a row, each with its own operands.
        arrays = several_sides_cases.operands(form, devices, seed)
        launches.append((arrays, fused(*several_sides_cases.put(form, mesh, arrays))))
    for arrays, results in launches:
        several_sides_cases.assert_exact(form, arrays, results)


SHAPES = [(16, 4096, 4096), (16, 8192, 8192), (1, 1024, 4096), (32, 1024, 16384), (64, 3584, 8192), (7, 1000, 4104)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_within_twice_the_unfused_product(devices, shape):
    mesh = oracle.make_mesh(x=devices)
    config = CUT if shape[1] < 2048 else None
    measure = oracle.errors(mesh, lambda lhs, rhs: oracle.fused(lhs, rhs, config=config))
    for seed in range(3):
        oracle.assert_close(measure(*oracle.operands(mesh, shape, BF16, seed)))


def test_repeated_launches_agree_bit_for_bit(devices):
    mesh = oracle.make_mesh(x=devices)
    lhs, rhs = oracle.operands(mesh, (16, 4096, 4096), jnp.float16, seed=7)
    launch = oracle.on_mesh(mesh, lambda lhs, rhs: oracle.fused(lhs, rhs, config=CUT))
    first, same = launch(lhs, rhs), jax.jit(lambda a, b: (a == b).all())
    for _ in range(20):
        assert bool(same(first, launch(lhs, rhs)))


def late_copies(monkeypatch, victim, stalls=1):
    """Makes device `victim` stall before it copies its first chunk of a peer."""
    copy = Communicator._copy

    def copy_late(self, chunks, *args):
        if chunks is self.peers:
            stall(victim, times=stalls)
        return copy(self, chunks, *args)

    monkeypatch.setattr(Communicator, "_copy", copy_late)


def repeated(mesh, iterations, config):
    fused = lambda lhs, rhs: oracle.fused(lhs, rhs, config=config)  # noqa: E731
    return oracle.on_mesh(mesh, skew_cases.repeated(fused, oracle.unfused, mesh, iterations), out_specs=P())


@pytest.mark.parametrize("config", [ONE, CUT], ids=["one", "cut"])
def test_skewed_devices_and_inputs_overwritten_right_after(devices, config):
    mesh = oracle.make_mesh(x=devices)
    assert float(repeated(mesh, 50, config)(*oracle.operands(mesh, (16, 1024, 2048), BF16, seed=3))) < 1e-2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_device_that_is_late(devices, victim, monkeypatch):
    late_copies(monkeypatch, victim)
    mesh = oracle.make_mesh(x=devices)
    assert float(repeated(mesh, 5, CUT)(*oracle.operands(mesh, (16, 512, 2048), BF16, seed=4))) < 1e-2


def test_negative_control_without_the_flags_it_is_wrong(devices, monkeypatch):
    late_copies(monkeypatch, 1)
    monkeypatch.setattr(communicator, "semaphore_wait", lambda *_, **__: None)
    mesh = oracle.make_mesh(x=devices)
    assert float(repeated(mesh, 5, CUT)(*oracle.operands(mesh, (16, 512, 2048), BF16, seed=4))) > 1e-1


def test_negative_control_without_the_handshake_it_is_wrong(devices, monkeypatch):
    # The device stalls until long after the others have overwritten the operands that it still has to copy.
    late_copies(monkeypatch, 1, stalls=10)
    speak_before_the_transfers(monkeypatch)
    mesh = oracle.make_mesh(x=devices)
    assert float(repeated(mesh, 5, ONE)(*oracle.operands(mesh, (256, 256, 4096), BF16, seed=4))) > 1e-2
