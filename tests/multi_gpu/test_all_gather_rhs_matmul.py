"""`all_gather_rhs_matmul` on 2, 4 and 8 GPUs: exact to rounding and repeatable, whichever device is late."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives import communicator
from tests import oracle
from tests.ops import skew_cases
from tests.ops.rhs_cases import ALONG, ROWS, call, gathered, mapped, weights
from tests.ops.skew_cases import stall
from tests.oracle import make_mesh
from tests.protocol.handshake_cases import speak_before_the_transfers

SHAPES = [  # Each entry: (m, {gathered dimension: shape of one shard of the weights}).
    (2048, {"n": (4096, 1024), "k": (1024, 4096)}),
    (1000, {"n": (1032, 520), "k": (520, 10248)}),  # Ragged; along k with several blocks of columns.
    (8, {"n": (64, 8), "k": (8, 64)}),
]
CONFIGS = [
    ("n", overlap.Config(stream_k=2)),
    ("n", overlap.Config(tile_n=192, chunk_bytes=1024, chunk_buffers=4)),
    ("n", overlap.Config(schedule="pingpong", tile_n=128, stages=5)),
    ("k", overlap.Config(schedule="pingpong", tile_m=64, tile_n=192, stages=4)),
    ("k", overlap.Config(stream_k=2, order_minor="n", chunk_bytes=4096)),
    ("n", overlap.Config(swap_operands=True, tile_m=152, tile_n=128, stages=4)),
    ("k", overlap.Config(swap_operands=True, schedule="pingpong", tile_m=104, tile_n=128, stages=5)),
]


def late_pulls(monkeypatch, victim):
    """Makes the communicators of device `victim` stall before they announce each chunk."""
    copy_chunks = communicator.copy_chunks

    def pull_late(*args, landed, **kwargs):
        def landed_late(*chunk):
            stall(victim)
            landed(*chunk)

        return copy_chunks(*args, landed=landed_late, **kwargs)

    monkeypatch.setattr(communicator, "copy_chunks", pull_late)


def operands(mesh, along, m, shard, dtype, seed):
    devices = mesh.shape["x"]
    k, n = (devices * shard[0], shard[1]) if along == "k" else (shard[0], devices * shard[1])

    shardings = NamedSharding(mesh, ROWS), NamedSharding(mesh, weights(along))
    return oracle.draw(((devices * m, k), (k, n)), dtype, shardings, seed)


def fused(along, config=None):
    return call(along, config=oracle.fitting(config), implementation="fused")


def unfused(along):
    return lambda lhs, rhs: oracle.rounded(lhs @ gathered(rhs, along))


def errors(mesh, along, config=None):
    """Returns a jitted function from operands to (fused error, unfused error); each is the largest over the devices."""

    def measure(lhs, rhs):
        wide = lhs.astype(jnp.float32), gathered(rhs, along).astype(jnp.float32)
        exact = lax.dot(*wide, precision=lax.Precision.HIGHEST)
        pair = (oracle.distance(f(lhs, rhs), exact) for f in (fused(along, config), unfused(along)))
        return tuple(oracle.worst(error, mesh) for error in pair)

    return mapped(mesh, along, measure, (P(), P()))


def repeated(mesh, along, iterations):
    body = skew_cases.repeated(
        lambda rhs, lhs: fused(along)(lhs, rhs), lambda rhs, lhs: unfused(along)(lhs, rhs), mesh, iterations
    )
    return mapped(mesh, along, lambda lhs, rhs: body(rhs, lhs), P())


MEDIUM = {"n": (1024, 512), "k": (512, 1024)}


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("m, shards", SHAPES, ids=str)
def test_error_within_twice_the_unfused_product(devices, m, shards, along):
    mesh = make_mesh(x=devices)
    measure = errors(mesh, along)
    for seed, dtype in enumerate((jnp.bfloat16, jnp.float16, jnp.bfloat16)):
        oracle.assert_close(measure(*operands(mesh, along, m, shards[along], dtype, seed)))


@pytest.mark.parametrize("along, config", CONFIGS, ids=str)
def test_other_configs(devices, along, config):
    mesh = make_mesh(x=devices)
    shard = {"n": (1096, 968), "k": (584, 2056)}[along]
    oracle.assert_close(errors(mesh, along, config)(*operands(mesh, along, 1500, shard, jnp.bfloat16, seed=1)))


@pytest.mark.parametrize("along", ALONG)
def test_transposed_rows(devices, along, monkeypatch):
    """The kernel reads a transposed left operand in place. The result has the same bits as without transposing."""
    late_pulls(monkeypatch, 1)
    mesh, (m, shards) = make_mesh(x=devices), SHAPES[1]
    lhs, rhs = operands(mesh, along, m, shards[along], jnp.bfloat16, seed=7)
    config = oracle.fitting(overlap.Config(tile_n=192, stages=3))

    def same(lhs, rhs):
        of_rows = fused(along, config)(lhs, rhs)
        transposed = call(along, config=config, implementation="fused", transpose_lhs=True)(lhs.T, rhs)
        return lax.pmin((of_rows == transposed).all().astype(jnp.int32), "x"), oracle.worst(
            oracle.distance(transposed, unfused(along)(lhs, rhs).astype(jnp.float32)), mesh
        )

    equal, error = mapped(mesh, along, same, (P(), P()))(lhs, rhs)
    assert int(equal) == 1 and float(error) < 1e-2


@pytest.mark.parametrize("along", ALONG)
def test_repeated_launches_agree_bit_for_bit(devices, along):
    mesh = make_mesh(x=devices)
    lhs, rhs = operands(mesh, along, *SHAPES[0][:1], SHAPES[0][1][along], jnp.float16, seed=2)
    launch = mapped(mesh, along, fused(along))
    first, same = launch(lhs, rhs), jax.jit(lambda a, b: (a == b).all())
    assert all(bool(same(first, launch(lhs, rhs))) for _ in range(5))


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("victim", [None, 1])
def test_skewed_devices_late_pulls_and_weights_overwritten_right_after(devices, victim, along, monkeypatch):
    if victim is not None:
        late_pulls(monkeypatch, victim)
    mesh = make_mesh(x=devices)
    run = repeated(mesh, along, 30 if victim is None else 5)
    assert float(run(*operands(mesh, along, 512, MEDIUM[along], jnp.bfloat16, seed=3))) < 1e-2


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("name", ["flags", "handshake"])
def test_negative_control_without_it_the_result_is_wrong(devices, name, along, monkeypatch):
    late_pulls(monkeypatch, 1)
    if name == "flags":
        monkeypatch.setattr(communicator, "semaphore_wait", lambda *_, **__: None)
    else:
        speak_before_the_transfers(monkeypatch)
    mesh = make_mesh(x=devices)
    # Few rows and large shards: a late device still has to pull most of its chunks when the others leave.
    shard = {"n": (4096, 1024), "k": (1024, 4096)}[along]
    assert float(repeated(mesh, along, 5)(*operands(mesh, along, 128, shard, jnp.bfloat16, seed=4))) > 1e-2


@pytest.mark.gpus(4)
@pytest.mark.parametrize(
    "axes, along", [({"data": 2, "x": 2}, "n"), ({"x": 2, "data": 2}, "k")], ids=["minor", "major"]
)
def test_one_axis_of_a_larger_mesh(axes, along):
    if jax.process_count() > 1 and jax.device_count() != 4:
        pytest.skip("one process per GPU: this test is for a job of 4")
    mesh = make_mesh(**axes)

    def measure(lhs, rhs):
        lhs = lhs * (1 + lax.axis_index("data")).astype(lhs.dtype)
        expected = unfused(along)(lhs, rhs).astype(jnp.float32)
        return oracle.worst(oracle.distance(fused(along)(lhs, rhs), expected), mesh)

    error = mapped(mesh, along, measure, P())(*operands(mesh, along, 256, MEDIUM[along], jnp.bfloat16, seed=5))
    assert float(error) < 5e-3


@pytest.mark.parametrize("along", ALONG)
def test_gradients(devices, along):
    mesh = make_mesh(x=devices)

    def gradients(f):
        return jax.grad(lambda lhs, rhs: jnp.sum(jnp.sin(f(lhs, rhs).astype(jnp.float32))), argnums=(0, 1))

    def body(lhs, rhs):
        pairs = zip(gradients(fused(along))(lhs, rhs), gradients(unfused(along))(lhs, rhs), strict=True)
        return [oracle.worst(oracle.distance(a, b.astype(jnp.float32)), mesh) for a, b in pairs]

    lhs, rhs = operands(mesh, along, 128, {"n": (64, 256), "k": (64, 256)}[along], jnp.bfloat16, seed=6)
    assert all(float(error) < 2e-2 for error in mapped(mesh, along, body, [P(), P()])(lhs * 0.1, rhs * 0.1))
