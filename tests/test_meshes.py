"""Tests meshes with one axis or a tuple of axes, any number and order of devices: emulated, lowered and assembled."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration
from jax.experimental import mesh_utils
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import overlap
from overlap import _compat
from overlap.choice import dispatch
from overlap.collectives.collective import peer_group_of
from overlap.emulation import EmulationError, emulate
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup, clique
from tests import assembly, mesh_cases, oracle
from tests.explained import answer
from tests.mesh_cases import layout
from tests.product_cases import normal

CONFIG = overlap.Config(tile_n=128)
SHAPE = (128, 128, 64)
PERMUTED = (2, 0, 3, 1)
TRANSPOSED = (0, 3, 1, 4, 2, 5)

LAYOUTS = [
    *(layout("x", x=devices) for devices in (3, 5, 6, 7)),
    *(layout(over, a=2, b=3) for over in ("a", "b", ("a", "b"), ("b", "a"))),
    *(layout(over, a=2, b=2, c=2) for over in itertools.permutations("abc", 2)),
    layout(("c", "a", "b"), a=2, b=2, c=2),
    layout(("b", "a"), a=1, b=3),
    layout("x", PERMUTED, x=4),
    layout("x", (4, 2, 0, 1, 3), x=5),
    *(layout(over, PERMUTED, a=2, b=2) for over in ("a", "b", ("a", "b"), ("b", "a"))),
    *(layout(over, TRANSPOSED, a=3, b=2) for over in ("a", ("b", "a"))),
    layout(("c", "a"), (5, 2, 7, 0, 3, 6, 1, 4), a=2, b=2, c=2),
]


TRANSPORTS = pytest.mark.parametrize("transport", ["pull", "ring"])
# On the ring, a device sends to the one before it. Fewer layouts show everything that can go wrong there.
CASES = [*((case, "pull") for case in LAYOUTS), *((case, "ring") for case in (*LAYOUTS[::3], layout("x", x=6)))]


def fused(case, transport=None):
    return mesh_cases.fused(case, config=CONFIG, transport=transport)


def check(case, shape=SHAPE, seed=1, transport=None):
    with emulate(cores=2, seed=seed):
        measure = mesh_cases.errors(case, fused(case, transport))
        oracle.assert_close(measure(*mesh_cases.operands(case, shape, jnp.bfloat16, seed)))


# ---- The operation, emulated -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "transport"), CASES, ids=str)
def test_error_within_twice_the_unfused_product(case, transport):
    check(case, transport=transport)


@TRANSPORTS
@pytest.mark.parametrize("case", [layout("x", x=7), layout(("b", "a"), TRANSPOSED, a=3, b=2)], ids=str)
def test_ragged_shards(case, transport):
    check(case, shape=(72, 136, 40), transport=transport)


@pytest.mark.parametrize("case", [layout(("b", "a"), PERMUTED, a=2, b=2), layout(("b", "a"), a=2, b=3)], ids=str)
@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_shards_lie_as_the_partition_spec_says(case, implementation):
    """Compares with the global product in NumPy: rows and columns must be where `PartitionSpec` puts them."""
    lhs, rhs = mesh_cases.operands(case, SHAPE, jnp.bfloat16, seed=2)
    lhs_spec, rhs_spec, out_spec = case.specs()
    config = CONFIG if implementation == "fused" else None

    def op(lhs, rhs):
        return overlap.all_gather_lhs_matmul(lhs, rhs, case.over, implementation=implementation, config=config)

    with emulate(cores=2):
        out = oracle.on_mesh(case.mesh(), op, in_specs=(lhs_spec, rhs_spec), out_specs=out_spec)(lhs, rhs)
    expected = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, rtol=1e-2, atol=1e-1)


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)], ids=str)
def test_a_mesh_from_mesh_utils(shape):
    devices = mesh_utils.create_device_mesh(shape, devices=jax.devices()[:6])
    order = tuple(device.id for device in devices.flat)
    check(layout(("b", "a"), order, a=shape[0], b=shape[1]))


@pytest.mark.parametrize("case", [layout(("b", "a"), PERMUTED, a=2, b=2), layout(("a", "b"), a=2, b=3)], ids=str)
def test_gradients(case):
    lhs, rhs = mesh_cases.operands(case, SHAPE, jnp.bfloat16, seed=3)
    with emulate(cores=2):
        errors = mesh_cases.gradient_errors(case, fused(case))(lhs * 0.1, rhs * 0.1)
    assert max(map(float, errors)) < 2e-2


@TRANSPORTS
def test_launches_in_a_loop_with_operands_that_change(transport):
    case = layout(("b", "a"), PERMUTED, a=2, b=2)
    with emulate(cores=2):
        loop = mesh_cases.errors_in_a_loop(case, fused(case, transport), 3)
        worst = loop(*mesh_cases.operands(case, SHAPE, jnp.bfloat16, 4))
    assert float(worst) < 5e-3


@TRANSPORTS
def test_two_rings_of_one_mesh_in_one_program(transport):
    first, second = (layout(over, TRANSPOSED, a=3, b=2) for over in ("a", ("b", "a")))
    lhs = normal(5, 128, 64)
    rhs = normal(6, 64, 128)
    with emulate(cores=2):
        errors = mesh_cases.errors_of_two_rings(first, second, lambda case: fused(case, transport))(lhs, rhs)
    assert max(map(float, errors)) < 5e-3


# ---- The ring --------------------------------------------------------------------------------------------------------

MESH_SHAPE = (("a", 2), ("b", 3), ("c", 1))
TUPLES = [axes for count in (1, 2, 3) for axes in itertools.permutations("abc", count)]


@pytest.mark.parametrize("axes", TUPLES, ids="-".join)
def test_positions_and_coordinates(axes):
    group, sizes = PeerGroup(axes, MESH_SHAPE), dict(MESH_SHAPE)
    assert group.size == np.prod([sizes[name] for name in axes])
    for position in range(group.size):
        coordinates = np.unravel_index(position, [sizes[name] for name in axes])
        assert group.device_id(position) == dict(zip(axes, map(int, coordinates), strict=True))


@pytest.mark.parametrize("axes", TUPLES, ids="-".join)
def test_me_counts_as_all_gather_does(axes):
    group = PeerGroup(axes, MESH_SHAPE)
    mesh = Mesh(np.array(jax.devices()[:6])[list(TRANSPOSED)].reshape(2, 3, 1), ("a", "b", "c"))

    def body():
        gathered = lax.all_gather(group.me(), axes)
        return jnp.concatenate([gathered, jnp.stack([group.me() - lax.axis_index(axes)])])[None]

    # Without jit, jax would compile each operation of the function separately.
    out = oracle.on_mesh(mesh, body, (), P(("a", "b", "c")))()
    np.testing.assert_array_equal(np.asarray(out), [[*range(group.size), 0]] * 6)


def test_a_tuple_of_one_axis_is_that_axis():
    mesh = layout("x", x=2).mesh()
    assert peer_group_of("op", ("x",), mesh) == peer_group_of("op", ["x"], mesh) == peer_group_of("op", "x", mesh)


# ---- Injected defects: the tests above would detect them -------------------------------------------------------------


def take_ids_of_devices(patch, order):
    device_id = PeerGroup.device_id

    def physical(self, position):
        return device_id(self, sum(jnp.where(position == i, jnp.int32(d), 0) for i, d in enumerate(order)))

    patch.setattr(PeerGroup, "device_id", physical)


def take_the_position_for_a_logical_id(patch):
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


def fails(case):
    try:
        check(case)
    except (AssertionError, EmulationError):
        return True
    return False


def test_ids_of_devices_are_no_logical_ids(monkeypatch):
    """The logical id of a device is its position in the mesh, so a kernel must not use the device's own id there."""
    take_ids_of_devices(monkeypatch, PERMUTED)
    assert fails(layout("x", PERMUTED, x=4))


def test_ids_of_devices_serve_where_they_are_positions(monkeypatch):
    take_ids_of_devices(monkeypatch, (0, 1, 2, 3))
    check(layout("x", x=4))


@pytest.mark.filterwarnings("ignore:device_id_type is deprecated")
def test_a_position_is_a_logical_id_on_one_axis_only(monkeypatch):
    take_the_position_for_a_logical_id(monkeypatch)
    check(layout("x", PERMUTED, x=4))  # On the whole mesh the result is right, however its devices are permuted.
    check(layout(("a", "b"), PERMUTED, a=2, b=2))
    assert fails(layout("b", a=2, b=2))
    assert fails(layout(("b", "a"), a=2, b=2))


@pytest.mark.parametrize(
    ("defect", "over"), [(count_in_the_order_of_the_mesh, ("b", "a")), (reach_into_the_first_ring, "b")]
)
def test_injected_defects(defect, over, monkeypatch):
    defect(monkeypatch)
    assert fails(layout(over, a=2, b=3))


# ---- The way to a GPU ------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))


def lowered(case, mesh, *, sharded=False, transport=None):
    """Lowers the operation on `mesh` for CUDA, and returns the text of the program."""
    specs = case.specs()
    shapes = (case.size * 256, 512), (512, case.size * 512)
    arguments = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=jax.NamedSharding(case.mesh(), spec) if sharded else None)
        for s, spec in zip(shapes, specs)
    ]
    op = mesh_cases.fused(case, transport=transport)
    call = oracle.on_mesh(mesh, op, in_specs=specs[:2], out_specs=specs[2])
    return call.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def ids_for_xla(text):
    (ids,) = re.findall(r'xla_replica_ids = "([^"]*)"', text)
    return [int(i) for i in ids.split(",")]


@pytest.mark.parametrize(("case", "transport"), CASES, ids=str)
def test_xla_is_given_positions(case, transport, hopper):
    """Mosaic can compute on the host to which device each device sends, along any axes."""
    mesh = case.mesh()
    text = lowered(case, mesh, transport=transport)
    assert ids_for_xla(text) == list(range(mesh.size)) and "skip_device_barrier = true" in text


def test_xla_is_given_positions_of_an_abstract_mesh(hopper):
    case = layout("x", PERMUTED, x=4)
    text = lowered(case, case.mesh().abstract_mesh, sharded=True)
    assert ids_for_xla(text) == [0, 1, 2, 3]
    # The ready flag's key cannot name the devices, so jax's own barrier runs before the kernel.
    assert "skip_device_barrier = false" in text


def test_jax_alone_would_refuse_a_permuted_mesh(hopper, monkeypatch):
    """If this fails, jax supports permuted meshes: `primitives/clique.py` is then needed for several hosts only."""
    _compat.apply(clique.IN_CLIQUES)
    rule = registration.mpmd_map_mgpu_lowering_rule
    # Otherwise the kernel's own check that jax is prepared would raise first.
    monkeypatch.setattr(rule.__wrapped__, "lowers_by_cliques", True, raising=False)
    monkeypatch.setattr(registration, "mpmd_map_mgpu_lowering_rule", rule.__wrapped__)
    case = layout("x", PERMUTED, x=4)
    with pytest.raises(NotImplementedError, match="row-major"):
        lowered(case, case.mesh())


def test_the_lowering_is_set_up_once():
    _compat.apply(clique.IN_CLIQUES)
    rule = registration.mpmd_map_mgpu_lowering_rule
    _compat.apply(clique.IN_CLIQUES)
    assert registration.mpmd_map_mgpu_lowering_rule is rule


def test_a_mesh_of_other_devices_is_refused_with_the_way_out(hopper):
    case = layout("x", x=4)
    mesh = Mesh(np.array(jax.devices()[4:8]), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(
        NotImplementedError, match=r"devices \[0, 1, 2, 3\].* \[4, 5, 6, 7\].*CUDA_VISIBLE_DEVICES.*\"xla\""
    ):
        lowered(case, mesh)


def test_a_kernel_without_peers_takes_any_devices(hopper):
    _compat.apply(clique.IN_CLIQUES)
    mesh = Mesh(np.array(jax.devices()[4:6]), ("x",), axis_types=(AxisType.Auto,))
    call = oracle.on_mesh(mesh, lambda a, b: overlap.matmul(a, b, implementation="fused"))
    shapes = (512, 512), (512, 1024)
    text = call.trace(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in text.as_text()


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@TRANSPORTS
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"a": 2, "b": 3}], ids=str)
def test_assembled_over_both_axes_in_reverse_of_permuted_devices(sizes, transport):
    """The kernel needs no more registers or shared memory than along one axis, and does not spill."""
    given, devices = {"transport": transport}, math.prod(sizes.values())
    along_one = assembly.Case("tests.several_sides_cases:assembled", devices=devices, config=given)
    along_both = assembly.Case("tests.mesh_cases:reversed_axes_of_permuted_devices", mesh=sizes, config=given)
    (one,), (both,) = assembly.assemble_case(along_one), assembly.assemble_case(along_both)
    assert both.spill_store_bytes == both.spill_load_bytes == 0 and both.architecture == "sm_90a"
    assert both.shared_memory_bytes == one.shared_memory_bytes and both.registers == one.registers


# ---- Choice and errors -----------------------------------------------------------------------------------------------

OPERANDS = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)


@pytest.mark.parametrize("order", [None, PERMUTED], ids=["ordered", "permuted"])
def test_explain_takes_a_tuple_for_an_axis_of_as_many_devices(order, hopper):
    two, one = layout(("b", "a"), order, a=2, b=2).mesh(), layout("x", order, x=4).mesh()
    by_tuple = answer(overlap.all_gather_lhs_matmul, *OPERANDS, ("b", "a"), mesh=two)
    by_name = answer(overlap.all_gather_lhs_matmul, *OPERANDS, "x", mesh=one)
    assert by_tuple.implementation == "fused" and by_tuple == by_name
    half = answer(overlap.all_gather_lhs_matmul, *OPERANDS, ("b",), mesh=two)
    assert half == answer(overlap.all_gather_lhs_matmul, *OPERANDS, "x", mesh=layout("x", x=2).mesh())


@pytest.mark.parametrize(
    ("axis_name", "manual", "fragments"),
    [
        (("a", "z"), None, ["`axis_name`", "'z'", "('a', 'z')", "('a', 'b')"]),
        ("z", None, ["`axis_name`", "'z'", "('a', 'b')"]),
        (("a", "b", "a"), None, ["`axis_name`", "once", "'a' 2 times", "('a', 'b', 'a')"]),
        ((), None, ["`axis_name`", "at least one", "()"]),
        (("a", "b"), {"a"}, ["`all_gather_lhs_matmul`", "'b'", "('a',)", "axis_names"]),
    ],
)
def test_wrong_axes(axis_name, manual, fragments):
    mesh = layout("a", a=2, b=2).mesh()
    extra = {} if manual is None else {"axis_names": manual}

    def call():
        lhs, rhs = jnp.zeros((128, 64), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16)
        return overlap.all_gather_lhs_matmul(lhs, rhs, axis_name)

    with pytest.raises(ValueError) as caught:
        jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False, **extra))
    for fragment in fragments:
        assert fragment in str(caught.value)
    if manual is None:
        with pytest.raises(ValueError, match="`axis_name`"):
            answer(overlap.all_gather_lhs_matmul, *OPERANDS, axis_name, mesh=mesh)


def test_a_tuple_outside_shard_map():
    with pytest.raises(ValueError, match=r"inside `jax.shard_map`.*\('a', 'b'\)"):
        answer(overlap.all_gather_lhs_matmul, *OPERANDS, ("a", "b"))
