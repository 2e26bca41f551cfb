"""Meshes with one axis or a tuple of axes, any number and order of devices: emulated, and lowered for CUDA."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap import _compat
from overlap.choice import dispatch
from overlap.emulation import EmulationError
from overlap.frame.peers import peer_group_of
from overlap.primitives import PeerGroup, host_mesh
from tests import oracle
from tests.ops.contract import EVERY, FORMS, H200, running, struct
from tests.ops.mesh_cases import check_on, layout

PERMUTED, TRANSPOSED = (2, 0, 3, 1), (0, 3, 1, 4, 2, 5)
slow = pytest.mark.slow
# With each of them, the forms of the kernels that `make test` runs; test_numbers.py has one axis of permuted devices.
LAYOUTS = [
    (layout("x", PERMUTED, x=4), []),
    (layout("a", a=2, b=3), ["weights n"]),
    (layout("b", a=2, b=3), []),
    (layout(("a", "b"), PERMUTED, a=2, b=2), ["ring", "tokens to rows"]),
    (layout(("b", "a"), PERMUTED, a=2, b=2), ["weights k", "scatter m", "rows to tokens"]),
    (layout(("b", "a"), a=1, b=3), ["joined"]),
    (layout(("b", "a"), TRANSPOSED, a=3, b=2), []),
    (layout(("c", "a"), (5, 2, 7, 0, 3, 6, 1, 4), a=2, b=2, c=2), []),
    (layout(("c", "a", "b"), a=2, b=2, c=2), []),
    *((layout("x", x=devices), []) for devices in (6, 7)),
]
CASES = [
    pytest.param(case, name, marks=[] if name in fast else slow, id=f"{case} {name}")
    for case, fast in LAYOUTS
    for name in (FORMS if case.order == PERMUTED else {"pull": 0, "ring": 0} | dict.fromkeys(fast))
]


@pytest.mark.parametrize(("case", "name"), CASES)
def test_every_peer_group_computes_its_own_product(case, name):
    """Rows and columns are where `PartitionSpec` puts them, since NumPy has the global product."""
    call = FORMS[name]
    check_on(case, call.but(extras=EVERY) if call.spec.sums else call.but(m=min(call.m, 40), n=72))


@pytest.mark.parametrize("name", [pytest.param("pull", marks=slow), "scatter m"])
def test_two_groups_of_one_mesh_in_one_program(name):
    """Along one axis, and along both in reverse: their flags and scratch must not be taken for each other's."""
    mesh = layout("a", TRANSPOSED, a=3, b=2).mesh()
    first, second = (FORMS[name].but(axis=over) for over in ("a", ("b", "a")))
    arrays = first.but(op="matmul_all_reduce", k=24).arrays(1)

    def body(arrays):
        factor = (1 + lax.axis_index(("a", "b"))).astype(arrays["lhs"].dtype)
        outs = [(call(given), call.plain(given)) for call in (first, second)
                for given in [{"lhs": arrays["lhs"] * factor, "rhs": arrays["rhs"]}]]  # fmt: skip
        return lax.pmax(jnp.stack([oracle.distance(a, b.astype(jnp.float32)) for a, b in outs]), ("a", "b"))

    with running():
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        assert np.asarray(jax.jit(mapped)(arrays)).max() < 5e-3


# --- The peer group ---------------------------------------------------------------------------------------------------

MESH_SHAPE = (("a", 2), ("b", 3), ("c", 1))
TUPLES = [axes for count in (1, 2, 3) for axes in itertools.permutations("abc", count)]


def test_positions_and_coordinates_are_counted_as_all_gather_does():
    sizes = dict(MESH_SHAPE)
    for axes in TUPLES:
        group = PeerGroup(axes, MESH_SHAPE)
        for position in range(group.size):
            coordinates = np.unravel_index(position, [sizes[name] for name in axes])
            assert group.device_id(position) == dict(zip(axes, map(int, coordinates), strict=True))

    def body():
        assert {peer_group_of("op", axis) for axis in (("a",), ["a"], "a")} == {PeerGroup("a", MESH_SHAPE)}
        groups = [(axes, PeerGroup(axes, MESH_SHAPE).me()) for axes in TUPLES]
        return [jnp.append(lax.all_gather(me, axes), me - lax.axis_index(axes))[None] for axes, me in groups]

    mesh = Mesh(np.array(jax.devices()[:6])[list(TRANSPOSED)].reshape(2, 3, 1), ("a", "b", "c"))
    for axes, out in zip(TUPLES, oracle.on_mesh(mesh, body, (), P(("a", "b", "c")))(), strict=True):
        size = int(np.prod([sizes[name] for name in axes]))
        assert PeerGroup(axes, MESH_SHAPE).size == size
        np.testing.assert_array_equal(np.asarray(out), [[*range(size), 0]] * 6)


# --- Injected defects: the tests above would detect them -------------------------------------------------------------


def take_ids_of_devices(patch):
    """The logical id of a device is its position in the mesh, so a kernel must not use the device's own id there."""
    device_id = PeerGroup.device_id

    def physical(self, position):
        return device_id(self, sum(jnp.where(position == i, jnp.int32(d), 0) for i, d in enumerate(PERMUTED)))

    patch.setattr(PeerGroup, "device_id", physical)


def take_the_position_for_a_logical_id(patch):
    """On the whole mesh the result would be right, however its devices are permuted."""
    logical = pl.DeviceIdType.LOGICAL
    patch.setattr(
        PeerGroup, "remote_ref", lambda self, ref, position: plgpu.remote_ref(ref, position, device_id_type=logical)
    )


def count_in_the_order_of_the_mesh(patch):
    axes = vars(PeerGroup)["axes"].fget
    patch.setattr(PeerGroup, "axes", property(lambda self: tuple(sorted(axes(self)))))


def reach_into_the_first_ring(patch):
    device_id = PeerGroup.device_id
    patch.setattr(
        PeerGroup, "device_id", lambda self, position: {n: 0 for n, _ in self.mesh_shape} | device_id(self, position)
    )


@pytest.mark.filterwarnings("ignore:device_id_type is deprecated")
@pytest.mark.parametrize(
    ("defect", "case"),
    [(take_ids_of_devices, layout("x", PERMUTED, x=4)), (take_the_position_for_a_logical_id, layout("b", a=2, b=2)),
     (count_in_the_order_of_the_mesh, layout(("b", "a"), a=2, b=3)),
     (reach_into_the_first_ring, layout("b", a=2, b=2))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)  # fmt: skip
def test_injected_defects(defect, case, monkeypatch):
    defect(monkeypatch)
    with pytest.raises((AssertionError, EmulationError)):
        check_on(case, FORMS["pull"].but(m=40, n=72))


# --- The way to a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)


def lowered(case, mesh, *, sharded=False, name="pull", **changes):
    """Lowers a form of an operation on `mesh` for CUDA, and returns the text of the program."""
    call = FORMS[name].but(**dict(axis=case.over, m=256, n=512, k=512, config=None) | changes)
    types = call.types(case.size)
    if sharded:
        specs = call.specs(types)
        types = {n: struct(*x.shape, sharding=jax.NamedSharding(case.mesh(), specs[n])) for n, x in types.items()}
    return call.program(mesh, types).trace(types).lower(lowering_platforms=("cuda",)).as_text()


def ids_for_xla(text):
    (ids,) = re.findall(r'xla_replica_ids = "([^"]*)"', text)
    return [int(i) for i in ids.split(",")]


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (layout("x", x=3), "all, rows"), (layout("x", data=2, x=2), "weights n"),
        (layout("x", x=2, data=2), "scatter m"), (layout("x", (4, 2, 0, 1, 3), x=5), "ring"),
        (layout(("b", "a"), PERMUTED, a=2, b=2), "pull"),
    ],
    ids=str,
)  # fmt: skip
def test_xla_is_given_positions(case, name, hopper):
    """Mosaic can compute on the host to which device each device sends, along any axes."""
    mesh = case.mesh()
    text = lowered(case, mesh, name=name)
    assert ids_for_xla(text) == list(range(mesh.size)) and "skip_device_barrier = true" in text


def test_xla_is_given_positions_of_an_abstract_mesh(hopper):
    case = layout("x", PERMUTED, x=4)
    text = lowered(case, case.mesh().abstract_mesh, sharded=True)
    assert ids_for_xla(text) == [0, 1, 2, 3]
    # The ready flag's key cannot name the devices, so jax's own barrier runs before the kernel.
    assert "skip_device_barrier = false" in text


def test_jax_alone_would_refuse_a_permuted_mesh(hopper, monkeypatch):
    """If this fails, jax supports permuted meshes: `primitives/host_mesh.py` is then needed for several hosts only."""
    _compat.apply(host_mesh.ON_HOST_MESHES)
    rule = registration.mpmd_map_mgpu_lowering_rule
    # Otherwise the kernel's own check that jax is prepared would raise first.
    monkeypatch.setattr(rule.__wrapped__, "lowers_by_host_mesh", True, raising=False)
    monkeypatch.setattr(registration, "mpmd_map_mgpu_lowering_rule", rule.__wrapped__)
    case = layout("x", PERMUTED, x=4)
    with pytest.raises(NotImplementedError, match="row-major"):
        lowered(case, case.mesh())


def test_the_lowering_is_set_up_once():
    _compat.apply(host_mesh.ON_HOST_MESHES)
    rule = registration.mpmd_map_mgpu_lowering_rule
    _compat.apply(host_mesh.ON_HOST_MESHES)
    assert registration.mpmd_map_mgpu_lowering_rule is rule


def test_a_mesh_of_other_devices_is_refused_with_the_way_out(hopper):
    case = layout("x", x=4)
    mesh = Mesh(np.array(jax.devices()[4:8]), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(
        NotImplementedError, match=r"devices \[0, 1, 2, 3\].* \[4, 5, 6, 7\].*CUDA_VISIBLE_DEVICES.*\"xla\""
    ):
        lowered(case, mesh)
