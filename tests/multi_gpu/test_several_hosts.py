"""Tests a mesh over several hosts, with one process per GPU. JAX_PARTITION_INDEX lets one host count as several:

launch/mpirun.sh -np 4 -- sh -c 'JAX_PARTITION_INDEX=$((OMPI_COMM_WORLD_RANK / 2)) exec '"$(which python)"' \
    -m pytest tests/multi_gpu/test_several_hosts.py'
"""

import jax
import pytest

from overlap.primitives import host_mesh
from tests.ops.contract import FORMS
from tests.ops.mesh_cases import check_on, layout

pytestmark = [
    pytest.mark.gpus(4),
    pytest.mark.skipif(not host_mesh.several_hosts(), reason="one host, and no JAX_PARTITION_INDEX"),
]


def within_hosts():
    """Returns a mesh with one axis across the hosts and one axis within each host."""
    hosts = len({host_mesh.host_of(device) for device in jax.devices()})
    return layout("x", data=hosts, x=jax.device_count() // hosts)


@pytest.mark.parametrize("name", ["pull", "ring", "joined", "weights n", "weights k", "scatter m", "one shot"])
def test_every_bit_of_launches_in_a_row(name):
    check_on(within_hosts(), FORMS[name].but(config=None, k=128), launches=3)


def test_an_axis_across_the_hosts_is_refused():
    case = layout("x", x=jax.device_count())
    call = FORMS["pull"].but(config=None)
    types = call.types(case.size)
    with pytest.raises(NotImplementedError, match="several hosts"):
        call.program(case.mesh(), types).lower(types)
