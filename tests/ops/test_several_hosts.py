"""Meshes over several hosts, as far as one host can test them: what is lowered, assembled and refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu.launch_context import LaunchContext
from jax.sharding import AxisType, Mesh

import overlap
from overlap import _compat
from overlap.choice import dispatch
from overlap.primitives import host_mesh
from overlap.primitives.host_mesh import HostMesh
from tests import oracle
from tests.assembly import assembly
from tests.ops.contract import H200
from tests.ops.explained import answer
from tests.ops.mesh_cases import layout
from tests.ops.test_meshes import ids_for_xla, lowered

# Eight devices as two hosts of four, numbered as in jax: host by host.
TWO_HOSTS = [
    (layout("x", data=2, x=4), [3, 2, 1, 0], [7, 6, 5, 4]),
    (layout(("b", "a"), data=2, a=2, b=2), [3, 2, 1, 0], [7, 6, 5, 4]),
    (layout("x", data=4, x=2), [3, 2, 1, 0], [7, 6, 5, 4]),
    (layout("x", (2, 0, 3, 1, 5, 6, 4, 7), data=2, x=4), [3, 2, 1, 0], [7, 6, 5, 4]),
    # The data axis, which crosses the hosts, is the minor axis.
    (layout("x", (0, 4, 1, 5, 2, 6, 3, 7), x=4, data=2), None, None),
]

OPERANDS = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)


@pytest.fixture
def two_hosts(monkeypatch):
    """Two hosts of four devices; returns a function that moves this process to one of them."""
    monkeypatch.setattr(host_mesh, "host_of", lambda device: device.id // 4)
    return lambda host: monkeypatch.setattr(host_mesh, "_own_host", lambda mesh: host)


@pytest.mark.parametrize(("number", "name", "host"), [(1, "pull", 0), (2, "ring", 1), (3, "scatter m", 1)])
def test_xla_is_given_the_devices_of_this_host_in_reverse(number, name, host, two_hosts):
    case, *ids = TWO_HOSTS[number]
    two_hosts(host)
    assert ids_for_xla(lowered(case, case.mesh(), name=name)) == ids[host]


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_has_a_mesh_of_its_own(host, two_hosts):
    two_hosts(host)
    case, *_ = TWO_HOSTS[-1]
    own = HostMesh.of(case.mesh(), frozenset("x"))
    rings = HostMesh.of(layout("x", data=4, x=2).mesh(), frozenset("x"))
    assert dict(rings.mesh.shape) == {"data": 2, "x": 2} and rings.positions == ((7, 6, 5, 4) if host else (3, 2, 1, 0))
    assert dict(own.mesh.shape) == {"x": 4} and own.is_mirrored
    # Ranks follow positions, whatever the devices' ids; the last position has rank 0.
    assert [device.id for device in own.mesh.devices.flat] == [0, 1, 2, 3]
    assert own.positions == ((7, 5, 3, 1) if host else (6, 4, 2, 0))
    assert own.device_ids == tuple(range(4 * host, 4 * host + 4))
    # An axis of one device that a kernel names stays.
    mesh = layout("x", data=2, a=1, x=4).mesh()
    assert dict(HostMesh.of(mesh, frozenset(("a", "x"))).mesh.shape) == {"a": 1, "x": 4}
    assert dict(HostMesh.of(mesh, frozenset("x")).mesh.shape) == {"x": 4}


def test_one_host_is_as_it_was():
    mesh = layout("x", (2, 0, 3, 1), x=4).mesh()
    own = HostMesh.of(mesh, frozenset("x"))
    assert own.positions == (0, 1, 2, 3) and own.device_ids == (2, 0, 3, 1) and not own.is_mirrored
    assert HostMesh.of(mesh, frozenset()) is None
    # jax keeps what it has made for a mesh: these two have the same ids, of other devices.
    assert own.mesh != HostMesh.of(layout("x", x=4).mesh(), frozenset("x")).mesh


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (layout("x", x=8), r"'x' are on several hosts \(8 devices, 4 of them here\).*within a host.*\"xla\""),
        (layout("x", x=4, data=2), r"'x' are on several hosts \(4 devices, 2 of them here\)"),
        (layout("x", (0, 1, 2, 4, 3, 5, 6, 7), data=2, x=4), r"4 devices of this host do not form a block.*\"xla\""),
        (layout("x", (4, 5, 6, 7, 0, 1, 2, 3), data=2, x=4),
         r"devices \[4, 5, 6, 7\] at these places.*got \[0, 1, 2, 3\]: arrange the mesh host by host"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_work_is_refused_with_the_way_out(case, message, two_hosts):
    two_hosts(0)
    with pytest.raises(NotImplementedError, match=message):
        lowered(case, case.mesh())
    with pytest.raises(NotImplementedError, match=r"abstract mesh of 8 devices.*\"xla\""):
        lowered(case, case.mesh().abstract_mesh, sharded=True)
    # `explain` receives the devices, so it knows in advance.
    with pytest.raises(NotImplementedError, match=message):
        answer(overlap.all_gather_lhs_matmul, *OPERANDS, case.over, mesh=case.mesh(), implementation="fused")


@pytest.mark.one_jax
@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
def test_a_topology_of_several_hosts_is_refused():
    """A program compiled ahead of time is one program, but each host needs its own."""
    program = """
import jax, numpy as np, overlap
from tests.assembly.targets import topology
from tests.ops.explained import answer
operands = jax.ShapeDtypeStruct((1024, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
for hosts, devices in ((1, 8), (2, 4)):
    mesh = jax.sharding.Mesh(np.array(topology("h200", devices, hosts)).reshape(2, 4), ("data", "x"))
    print(answer(overlap.all_gather_lhs_matmul, *operands, "x", mesh=mesh))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=assembly.child_environment(), capture_output=True, text=True, check=True,
        timeout=200,
    )  # fmt: skip
    one, two = done.stdout.splitlines()
    assert "matmul: fused" in one
    assert "matmul: xla" in two and "several hosts" in two and "ahead of time" in two


def test_a_kernel_without_peers_takes_any_devices(two_hosts):
    mesh = Mesh(np.array(jax.devices())[[0, 5, 6]], ("x",), axis_types=(AxisType.Auto,))
    call = oracle.on_mesh(mesh, lambda a, b: overlap.matmul(a, b, implementation="fused"))
    shapes = (3 * 256, 512), (512, 3 * 1024)
    text = call.trace(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in text.as_text()


def test_nobody_is_given_the_kernel_there_unasked(two_hosts, caplog):
    call = overlap.all_gather_rhs_matmul, *OPERANDS, "x"
    given = dict(mesh=layout("x", data=2, x=4).mesh(), dimension=1)
    with caplog.at_level(logging.WARNING, "overlap"):
        chosen = answer(*call, **given)
    assert chosen.implementation == "xla" and "several hosts" in chosen.reason and "several hosts" in caplog.text
    # An explicit `config=` means that the caller wants the fused kernel, too.
    for asked in ({"implementation": "fused"}, {"config": overlap.Config()}):
        assert answer(*call, **given, **asked).implementation == "fused"

    def experts(x, w, ids):
        return overlap.all_gather_lhs_grouped_matmul(x, w, overlap.route(ids, 4, "x"), "x")

    of = jax.ShapeDtypeStruct
    arrays = of((16, 256), jnp.bfloat16), of((1, 256, 64), jnp.bfloat16), of((16, 2), jnp.int32)
    moved = overlap.explain(experts, *arrays, mesh=given["mesh"])[0]
    assert moved.implementation == "xla" and "several hosts" in moved.reason


def test_ranks_are_turned_into_positions_and_back(two_hosts, monkeypatch):
    """Done on two hosts each time Mosaic asks for the rank or for a peer's memory; never done on one host."""
    _compat.apply(host_mesh.ON_HOST_MESHES)
    device_id, address_on_peer = LaunchContext.device_id, LaunchContext._get_parameter_address_on_peer
    turned = {"who": [], "where": []}

    def who(self, on_host=False):
        own = device_id(self, on_host)
        turned["who"].append(own.owner.name == "arith.subi")
        return own

    def where(self, parameter_id, peer_id, on_host):
        address = address_on_peer(self, parameter_id, peer_id, on_host)
        _, index = address.owner.operands  # The table, and offset + (the rank as an index).
        rank = index.owner.operands[1].owner.operands[0]
        turned["where"].append(rank != peer_id)
        assert rank == peer_id or (rank.owner.name == "arith.subi" and rank.owner.operands[1] == peer_id)
        return address

    monkeypatch.setattr(LaunchContext, "device_id", who)
    monkeypatch.setattr(LaunchContext, "_get_parameter_address_on_peer", where)
    (case, *_), plain = TWO_HOSTS[0], layout("x", x=4)
    for mesh, host, expected in ((case, 1, True), (plain, 0, False)):
        two_hosts(host)
        lowered(mesh, mesh.mesh())
        for answers in turned.values():
            assert set(answers) == {expected}
            answers.clear()


@pytest.mark.one_jax
def test_every_process_lowers_for_its_own_host(repository):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra `mpi`)")
    script = repository / "tests" / "tools" / "launch_rank.py"
    command = [repository / "launch" / "mpirun.sh", "-np", "2", "--", sys.executable, script, "hosts"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(repository)}
    process = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                             timeout=200, check=True)  # fmt: skip
    assert "process 0: ids 1,0" in process.stdout and "process 1: ids 3,2" in process.stdout, process.stderr
