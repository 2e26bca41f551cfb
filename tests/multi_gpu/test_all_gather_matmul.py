"""`all_gather_lhs_matmul` on 2, 4 and 8 GPUs: exact to rounding and repeatable, whichever device is late."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives import communicator
from overlap.collectives.gather import ring
from overlap.primitives.handshake import Handshake
from tests import oracle
from tests.ops import skew_cases
from tests.ops.skew_cases import stall
from tests.oracle import make_mesh, on_mesh, operands
from tests.protocol.handshake_cases import do_not_look, speak_before_the_transfers, without_waiting_for

SHAPES = [
    (1024, 4096, 4096),
    (128, 256, 64),
    (384, 768, 192),
    (1024, 3584, 8192),
    (256, 512, 12288),
    (2048, 2048, 8192),
    (200, 264, 136),  # Ragged: the last tile of each shard of the result is clipped.
    (1000, 3000, 4104),
    (1, 8, 8),
]
CASES = [(shape, dtype, "pull") for shape in SHAPES for dtype in (jnp.float16, jnp.bfloat16)]
CASES += [(shape, jnp.bfloat16, "ring") for shape in SHAPES]
TRANSPORTS = pytest.mark.parametrize("transport", ["pull", "ring"])


def late_transfers(monkeypatch, victim):
    """Makes device `victim` stall before it announces that a chunk, or a piece passed on by the ring, has arrived."""
    copy_chunks, announce = communicator.copy_chunks, ring._announce

    def pull_late(*args, landed, **kwargs):
        def landed_late(*chunk):
            stall(victim)
            landed(*chunk)

        return copy_chunks(*args, landed=landed_late, **kwargs)

    def announce_late(*args):
        stall(victim)
        announce(*args)

    monkeypatch.setattr(communicator, "copy_chunks", pull_late)
    monkeypatch.setattr(ring, "_announce", announce_late)


def late_sends(monkeypatch, victim):
    """Makes device `victim` stall before it passes on the first k step of each piece."""
    pass_on = ring._pass_on

    def pass_on_late(site, tile, k, lhs_smem):
        stall(victim, k == 0)
        pass_on(site, tile, k, lhs_smem)

    monkeypatch.setattr(ring, "_pass_on", pass_on_late)


def repeated(mesh, iterations, transport="pull", *, flip=True):
    body = skew_cases.repeated(
        lambda lhs, rhs: oracle.fused(lhs, rhs, transport=transport), oracle.unfused, mesh, iterations, flip=flip
    )
    return on_mesh(mesh, body, out_specs=P())


@pytest.mark.parametrize(("shape", "dtype", "transport"), CASES, ids=str)
def test_error_within_twice_the_unfused_product(devices, shape, dtype, transport):
    mesh = make_mesh(x=devices)
    measure = oracle.errors(mesh, lambda lhs, rhs: oracle.fused(lhs, rhs, transport=transport))
    for seed in range(3):  # Three launches in a row, each with its own operands.
        oracle.assert_close(measure(*operands(mesh, shape, dtype, seed)))


def test_repeated_launches_agree_bit_for_bit_by_either_transport(devices):
    mesh = make_mesh(x=devices)
    lhs, rhs = operands(mesh, (1024, 4096, 4096), jnp.float16, seed=7)
    launches = [
        on_mesh(mesh, lambda lhs, rhs, transport=transport: oracle.fused(lhs, rhs, transport=transport))
        for transport in ("pull", "ring")
    ]
    first = launches[0](lhs, rhs)
    same = jax.jit(lambda a, b: (a == b).all())
    for launch in launches:
        for _ in range(5):
            assert bool(same(first, launch(lhs, rhs)))


@TRANSPORTS
def test_skewed_devices_and_inputs_overwritten_right_after(devices, transport):
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 50, transport)(*operands(mesh, (512, 1024, 1024), jnp.bfloat16, seed=3))) < 1e-2


@TRANSPORTS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_device_that_is_late(devices, victim, transport, monkeypatch):
    late_transfers(monkeypatch, victim)
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 5, transport)(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) < 1e-2


@TRANSPORTS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_device_that_begins_late(devices, victim, transport, monkeypatch):
    raise_ready_flag = Handshake._raise
    monkeypatch.setattr(Handshake, "_raise", lambda self: (stall(victim), raise_ready_flag(self))[1])
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 5, transport)(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) < 1e-2


@TRANSPORTS
def test_a_communicator_that_begins_late(devices, transport, monkeypatch):
    """CTA 0's communicator begins after the others are done with all peers. It must not raise the ready flag again."""
    begin = Handshake._begin
    monkeypatch.setattr(Handshake, "_begin", lambda self, look: (stall(1, self.cta == 0), begin(self, look))[1])
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 20, transport)(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) < 1e-2


def test_negative_control_without_looking_for_the_peers_it_is_wrong(devices, monkeypatch):
    do_not_look(monkeypatch)
    # If a device does not look for a peer, it may miss a signal of that peer, and wait for the signal forever.
    without_waiting_for("seen", "done")(monkeypatch)
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 20)(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) > 1e-1


def test_negative_control_without_the_flags_it_is_wrong(devices, monkeypatch):
    late_transfers(monkeypatch, 1)
    monkeypatch.setattr(communicator, "semaphore_wait", lambda *_, **__: None)
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 5)(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) > 1e-1


def test_negative_control_without_the_flags_of_the_ring_it_is_wrong(devices, monkeypatch):
    late_sends(monkeypatch, 1)
    monkeypatch.setattr(Handshake, "wait_for", lambda *_: None)
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 5, "ring")(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) > 1e-1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_device_that_passes_on_late_while_its_inputs_are_overwritten(devices, victim, monkeypatch):
    """The delay is that of the negative control. Other devices overwrite their inputs while rows still travel."""
    late_sends(monkeypatch, victim)
    mesh = make_mesh(x=devices)
    assert float(repeated(mesh, 5, "ring")(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=4))) < 1e-2


def test_negative_control_without_the_handshake_it_is_wrong(devices, monkeypatch):
    late_transfers(monkeypatch, 1)
    speak_before_the_transfers(monkeypatch)
    mesh = make_mesh(x=devices)
    # The shape is so large that a late device still has to pull most of its chunks when the others leave.
    assert float(repeated(mesh, 5)(*operands(mesh, (2048, 256, 4096), jnp.bfloat16, seed=4))) > 1e-2


@pytest.mark.gpus(4)
@TRANSPORTS
@pytest.mark.parametrize("axes", [{"data": 2, "x": 2}, {"x": 2, "data": 2}], ids=["minor", "major"])
def test_one_axis_of_a_larger_mesh(axes, transport):
    if jax.process_count() > 1 and jax.device_count() != 4:
        pytest.skip("one process per GPU: this test is for a job of 4")
    mesh = make_mesh(**axes)

    def measure(lhs, rhs):
        lhs = lhs * (1 + lax.axis_index("data")).astype(lhs.dtype)  # Different data along the other axis.
        expected = oracle.exact(lhs, rhs)
        actual = oracle.fused(lhs, rhs, transport=transport)
        total = lax.psum(actual.astype(jnp.float32).sum(), ("data", "x"))  # A collective beside the kernel.
        return oracle.worst(oracle.distance(actual, expected), mesh), total

    error, total = on_mesh(mesh, measure, out_specs=(P(), P()))(*operands(mesh, (256, 512, 512), jnp.bfloat16, seed=5))
    assert float(error) < 5e-3 and np.isfinite(float(total))


def test_gradients(devices):
    mesh = make_mesh(x=devices)

    def loss(op):
        return lambda lhs, rhs: jnp.sum(jnp.sin(op(lhs, rhs).astype(jnp.float32)))

    def body(lhs, rhs):
        ours = jax.grad(loss(oracle.fused), argnums=(0, 1))(lhs, rhs)
        theirs = jax.grad(loss(oracle.unfused), argnums=(0, 1))(lhs, rhs)
        return [
            oracle.worst(oracle.distance(a, b.astype(jnp.float32)), mesh) for a, b in zip(ours, theirs, strict=True)
        ]

    lhs, rhs = operands(mesh, (128, 256, 64), jnp.bfloat16, seed=6)
    for error in on_mesh(mesh, body, out_specs=[P(), P()])(lhs * 0.1, rhs * 0.1):
        assert float(error) < 2e-2


OTHER_CONFIGS = [
    overlap.Config(chunk_bytes=4096, chunk_buffers=4),
    overlap.Config(tile_n=128, stages=6),
    overlap.Config(order_minor="n", order_width=3),
    overlap.Config(stages=3),
    overlap.Config(schedule="pingpong", tile_n=128, stages=5),
    overlap.Config(schedule="pingpong", tile_m=64, tile_n=256, stages=4, stream_k=2),
    # (384 rows of a shard are no multiple of these.)
    overlap.Config(swap_operands=True, tile_m=104, stages=4),
    overlap.Config(swap_operands=True, tile_m=160, stages=3),
    overlap.Config(swap_operands=True, tile_m=80, stages=4),
    overlap.Config(swap_operands=True, schedule="pingpong", tile_m=136, tile_n=128, stages=4),
]


RING_CONFIGS = [
    overlap.Config(stream_k=4),
    overlap.Config(tile_n=128, stages=6, order_minor="n", order_width=3),
    overlap.Config(schedule="pingpong", tile_n=128, stages=5),
]


@pytest.mark.parametrize(
    ("config", "transport"),
    [*((config, "pull") for config in OTHER_CONFIGS), *((config, "ring") for config in RING_CONFIGS)],
    ids=str,
)
def test_other_configs(devices, config, transport):
    mesh = make_mesh(x=devices)
    measure = oracle.errors(mesh, lambda lhs, rhs: oracle.fused(lhs, rhs, config=config, transport=transport))
    oracle.assert_close(measure(*operands(mesh, (384, 768, 1024), jnp.float16, seed=8)))
