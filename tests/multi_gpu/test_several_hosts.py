"""Tests a mesh over several hosts, with one process per GPU. JAX_PARTITION_INDEX lets one host count as several:

launch/mpirun.sh -np 4 -- sh -c 'JAX_PARTITION_INDEX=$((OMPI_COMM_WORLD_RANK / 2)) exec '"$(which python)"' \
    -m pytest tests/multi_gpu/test_several_hosts.py'
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.primitives import clique
from tests import mesh_cases, oracle
from tests.mesh_cases import layout

pytestmark = [
    pytest.mark.gpus(4),
    pytest.mark.skipif(not clique.several_hosts(), reason="one host, and no JAX_PARTITION_INDEX"),
]
SHAPE = (1024, 1024, 2048)
TRANSPORTS = pytest.mark.parametrize("transport", ["pull", "ring"])


def within_hosts():
    """Returns a mesh with one axis across the hosts and one axis within each host."""
    hosts = len({clique.host_of(device) for device in jax.devices()})
    return layout("x", data=hosts, x=jax.device_count() // hosts)


@TRANSPORTS
@pytest.mark.parametrize("shape", [SHAPE, (200, 136, 264)], ids=str)
def test_error_within_twice_the_unfused_product(shape, transport):
    """XLA's collectives over the same axis and over all devices run in the same program."""
    case = within_hosts()
    measure = mesh_cases.errors(case, mesh_cases.fused(case, transport=transport))
    for seed in range(3):
        oracle.assert_close(measure(*mesh_cases.operands(case, shape, jnp.bfloat16, seed)))


@TRANSPORTS
def test_launches_in_a_loop_with_operands_that_change(transport):
    case = within_hosts()
    loop = mesh_cases.errors_in_a_loop(case, mesh_cases.fused(case, transport=transport), 20)
    assert float(loop(*mesh_cases.operands(case, SHAPE, jnp.bfloat16, 7))) < 5e-3


@pytest.mark.parametrize("dimension", [0, 1])
def test_gathered_weights(dimension):
    case = within_hosts()
    mesh, size = case.mesh(), case.size
    spec = P("x", None) if dimension == 0 else P(None, "x")

    def measure(lhs, rhs):
        lhs = lhs * (1 + lax.axis_index("data")).astype(lhs.dtype)
        ours = overlap.all_gather_rhs_matmul(lhs, rhs, "x", dimension=dimension, implementation="fused")
        gathered = lax.all_gather(rhs, "x", axis=dimension, tiled=True)
        expected = lax.dot(lhs.astype(jnp.float32), gathered.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        worst = lambda value: oracle.worst(oracle.distance(value, expected), mesh)  # noqa: E731
        return worst(ours), worst(oracle.rounded(lhs @ gathered))

    def make():
        keys = jax.random.split(jax.random.key(3))
        shapes = (1024, 1024 * size), (1024 * size, 1024 * size)
        return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))

    shardings = tuple(jax.NamedSharding(mesh, s) for s in (P(), spec))
    lhs, rhs = jax.jit(make, out_shardings=shardings)()
    oracle.assert_close(oracle.on_mesh(mesh, measure, in_specs=(P(), spec), out_specs=(P(), P()))(lhs, rhs))


def test_an_axis_across_the_hosts_is_refused():
    case = layout("x", x=jax.device_count())
    shapes = (case.size * 256, 512), (512, case.size * 512)
    lhs, rhs, out = case.specs()
    call = oracle.on_mesh(case.mesh(), mesh_cases.fused(case), in_specs=(lhs, rhs), out_specs=out)
    with pytest.raises(NotImplementedError, match="several hosts"):
        call.lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
