"""Invalid input raises a clear error of the right type before anything is traced."""

import contextlib

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.collectives.collective import peer_group_of
from overlap.kernels.target import SMEM_BYTES, Target
from tests.explained import answer

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
H200 = Target("gpu", "NVIDIA H200", 132)


def mesh(**axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))]).reshape(tuple(axes.values()))
    return jax.sharding.Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def struct(shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(lhs, rhs, axis_name="x", *, on=None, axis_names=None, **kwargs):
    """Traces the call inside `shard_map` on per-shard operands, without running it."""
    on = on or mesh(x=2)
    extra = {} if axis_names is None else {"axis_names": axis_names}

    def call():
        return overlap.all_gather_lhs_matmul(
            *(a if not hasattr(a, "shape") else jnp.zeros(a.shape, a.dtype) for a in (lhs, rhs)), axis_name, **kwargs
        )

    return jax.eval_shape(jax.shard_map(call, mesh=on, in_specs=(), out_specs=P(), check_vma=False, **extra))


GOOD = struct((128, 64)), struct((64, 256))

SHAPES = (6, 64), (64, 256)
FUSED = {"implementation": "fused"}
X_OF_XY = {"on": mesh(x=2, y=2), "axis_names": {"x"}}
WRONG_CALLS = [  # arguments, keywords, type, what the message must contain
    ((struct((128, 64)), struct((128, 256))), {}, ValueError, ["`lhs`", "`rhs`", "k=64", "k=128"]),
    ((struct((128,)), struct((64, 256))), {}, ValueError, ["`lhs`", "2 dimensions", "got 1"]),
    ((struct((128, 64)), struct((1, 64, 256))), FUSED, NotImplementedError, ["`rhs`", "leading dimensions", "(1,)"]),
    ((struct((128, 64), F16), struct((64, 256), BF16)), {}, ValueError, ["float16", "bfloat16", "cast"]),
    ((struct((128, 64), jnp.int8), struct((64, 256), jnp.int8)), {}, ValueError, ["floating-point", "int8"]),
    (([1, 2], struct((64, 256))), {}, ValueError, ["`lhs`", "array", "list"]),
    (GOOD, {"axis_name": "y"}, ValueError, ["`axis_name`", "'y'", "('x',)"]),
    (GOOD, {"axis_name": ("x", "y")}, ValueError, ["`axis_name`", "'y'", "('x', 'y')"]),
    (GOOD, {"implementation": "nccl"}, ValueError, ["`implementation`", "'nccl'", "fused", "xla"]),
    (GOOD, FUSED | X_OF_XY, NotImplementedError, ["'y'", "manual"]),
    ((struct((128, 64)), struct((64, 201))), FUSED, NotImplementedError, ["n=201", "16 bytes", "multiple of 8", "xla"]),
    ((struct((128, 97)), struct((97, 256))), FUSED, NotImplementedError, ["k=97", "16 bytes", "xla"]),
    ((struct((0, 64)), struct((64, 256))), FUSED, NotImplementedError, ["m_shard=0", "at least 1", "xla"]),
    ((struct((128, 64), F32), struct((64, 256), F32)), FUSED, NotImplementedError, ["float32", "xla"]),
    (GOOD, FUSED | {"preferred_element_type": F32}, NotImplementedError, ["float32", "preferred_element_type"]),
]


@pytest.mark.parametrize(("args", "kwargs", "error", "fragments"), WRONG_CALLS)
def test_wrong_calls(args, kwargs, error, fragments):
    with pytest.raises(error) as caught:
        trace(*args, **kwargs)
    for fragment in fragments:
        assert fragment in str(caught.value)


WRONG_CONFIGS = [
    ({"tile_m": 32}, ["`tile_m`", "128", "32"]),
    ({"tile_n": 96}, ["`tile_n`", "64", "96"]),
    ({"tile_n": 512}, ["`tile_n`", "256", "512"]),
    ({"stages": 1}, ["`stages`", "at least 2", "1"]),
    ({"stages": 6}, ["shared memory", str(SMEM_BYTES), "`stages` (6)"]),
    ({"chunk_bytes": 1000}, ["`chunk_bytes`", "16", "1000"]),
]


@pytest.mark.parametrize(("fields", "fragments"), WRONG_CONFIGS)
def test_configs_that_do_not_fit(fields, fragments):
    with pytest.raises(ValueError) as caught:
        trace(*GOOD, implementation="fused", config=overlap.Config(**fields))
    for fragment in fragments:
        assert fragment in str(caught.value)


OPERATIONS = {
    overlap.matmul: ((), {}),
    overlap.all_gather_lhs_matmul: (("x",), {}),
    overlap.all_gather_rhs_matmul: (("x",), {"dimension": 1}),
    overlap.matmul_reduce_scatter: (("x",), {}),
    overlap.matmul_all_reduce: (("x",), {}),
    overlap.sharded_matmul: ((), {"lhs_sharding": P("x"), "rhs_sharding": P(None, "x"), "out_sharding": P(None, "x")}),
}


@pytest.mark.parametrize("implementation", [None, "fused", "xla"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_config_is_checked_even_if_xla_runs(op, implementation):
    args, kwargs = OPERATIONS[op]

    def explained(config):
        given = kwargs | {"implementation": implementation, "config": config}
        if op is overlap.sharded_matmul:
            with jax.set_mesh(mesh(x=2)):
                return answer(op, *GOOD, *args, **given)
        return answer(op, *GOOD, *args, mesh=mesh(x=2), **given)

    with pytest.raises(ValueError, match="`tile_n` must be a multiple of 64"):
        explained(overlap.Config(tile_n=96))
    if implementation == "xla":
        assert explained(overlap.Config(tile_n=128)) == explained(None)


def on_devices(op, **keywords):
    """Returns (call of two whole matrices, the sharding of a whole matrix on the devices that compute it)."""
    args, given = OPERATIONS[op]
    on = mesh(x=1 if op is overlap.matmul else 2)
    more = {"mesh": on} if op is overlap.sharded_matmul else {}

    def call(lhs, rhs):
        return op(lhs, rhs, *args, **given, **more, **keywords)

    mapped = jax.shard_map(call, mesh=on, in_specs=P(), out_specs=P(), check_vma=False) if args else call
    return mapped, jax.NamedSharding(on, P())


@pytest.mark.parametrize("op", OPERATIONS)
def test_sizes_that_are_symbols(op):
    (rows,) = jax.export.symbolic_shape("2*b")
    types = struct((rows, 64)), struct((64, 256))
    call, _ = on_devices(op)
    exported = jax.export.export(jax.jit(call))(*types)
    if op is overlap.matmul:  # (jax 0.11 and 0.12 do not run a program that gathers or scatters along a symbol.)
        lhs, rhs = (jnp.arange(np.prod(shape)).reshape(shape).astype(BF16) % 8 for shape in SHAPES)
        np.testing.assert_array_equal(exported.call(lhs, rhs), lhs @ rhs)
    with pytest.raises(NotImplementedError, match=r"sizes that are numbers, got `lhs` of shape \(.*b, 64\): export a"):
        jax.eval_shape(on_devices(op, implementation="fused")[0], *types)


@pytest.mark.parametrize("implementation", [None, "fused"])
def test_vmap_over_a_number_that_is_a_symbol(implementation, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    types = struct((*jax.export.symbolic_shape("b"), 128, 64)), struct((64, 256))
    call, _ = on_devices(overlap.matmul, implementation=implementation, config=overlap.Config())
    mapped = jax.vmap(call, (0, None))
    if implementation is None:
        assert "overlap_operation" not in str(jax.make_jaxpr(mapped)(*types))
        return
    with pytest.raises(NotImplementedError, match=r"sizes that are numbers, got `jax\.vmap` over b elements"):
        jax.eval_shape(mapped, *types)


@pytest.mark.parametrize("implementation", [None, "fused"])
@pytest.mark.parametrize("op", OPERATIONS)
def test_operands_in_host_memory(op, implementation):
    """XLA multiplies operands that are all in host memory, but no kernel does; nobody multiplies across memories."""
    call, whole = on_devices(op, implementation=implementation)
    of_device = [jax.device_put(jnp.zeros(shape, BF16), whole) for shape in SHAPES]
    of_host = [jax.device_put(x, whole.with_memory_kind("pinned_host")) for x in of_device]
    for run in (call, jax.jit(call)):
        with pytest.raises(
            ValueError, match=r"^`lhs` and `rhs` .* same memory, got device and host: .*device_put\(rhs,"
        ):
            run(of_device[0], of_host[1])
        with pytest.raises(ValueError, match=r"got host and device: move one of them first, .*device_put\(lhs,"):
            run(of_host[0], of_device[1])
    if implementation == "fused":
        with pytest.raises(
            NotImplementedError, match="the fused kernel reads device memory, got operands in host memo"
        ):
            call(*of_host)
    else:
        assert jax.eval_shape(call, *of_host).shape == jax.eval_shape(call, *of_device).shape


@pytest.mark.parametrize("fields", [{"tile_n": 0}, {"stages": "4"}, {"order_minor": "k"}, {"chunk_buffers": True}])
def test_configs_that_make_no_sense(fields):
    with pytest.raises(ValueError, match=f"`{next(iter(fields))}`"):
        overlap.Config(**fields)


def test_configs_take_integers_of_numpy():
    config = overlap.Config(tile_m=np.int64(64), stages=np.uint8(3), chunk_bytes=np.int32(4096))
    assert repr(config) == repr(overlap.Config(tile_m=64, stages=3, chunk_bytes=4096))
    for wrong in (np.True_, np.int64(0), np.float64(64), np.arange(2)):
        with pytest.raises(ValueError, match="`tile_m` must be an int of at least 1"):
            overlap.Config(tile_m=wrong)


@pytest.mark.filterwarnings("ignore:`with mesh.` context manager has been deprecated")
def test_outside_shard_map():
    lhs, rhs = jnp.zeros((128, 64), BF16), jnp.zeros((64, 256), BF16)
    here = [
        (contextlib.nullcontext, r"there is no mesh here \(`with mesh:` is not read\)"),
        (lambda: mesh(x=2), r"there is no mesh here \(`with mesh:` is not read\)"),
        (
            lambda: jax.set_mesh(mesh(x=2)),
            r"no axis of the mesh is manual here \(`jax.set_mesh` alone makes none manual\)",
        ),
    ]
    for context, why in here:
        with context(), pytest.raises(ValueError, match=f"inside `jax.shard_map`, and {why}: wrap the call"):
            overlap.all_gather_lhs_matmul(lhs, rhs, "x")


@pytest.mark.parametrize(
    ("target", "fragment"),
    [
        (Target("gpu", "NVIDIA A100-SXM4-80GB", 108), "Hopper"),
        (Target("gpu", "NVIDIA GeForce RTX 5090", 170), "a Hopper or a Blackwell GPU"),
        (Target("tpu", "TPU v5", 1), "tpu"),
    ],
)
def test_devices_without_a_kernel(monkeypatch, target, fragment):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target)
    with pytest.raises(NotImplementedError, match=fragment):
        trace(*GOOD, implementation="fused")
    choice = answer(overlap.all_gather_lhs_matmul, *GOOD, "x", mesh=mesh(x=2))
    assert choice.implementation == "xla" and fragment in choice.reason


def test_a_fallback_on_the_right_gpu_is_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    answer(overlap.all_gather_lhs_matmul, struct((100, 64)), struct((64, 513)), "x", mesh=mesh(x=2))
    (record,) = [r for r in caplog.records if r.name == "overlap" and r.levelname == "WARNING"]
    assert "n=513" in record.message


def test_explain_and_choice(monkeypatch):
    on = mesh(x=2)
    assert answer(overlap.all_gather_lhs_matmul, *GOOD, "x", mesh=on).implementation == "xla"
    asked = answer(overlap.all_gather_lhs_matmul, *GOOD, "x", mesh=on, implementation="fused")
    assert asked.implementation == "fused" and asked.source == "heuristic" and asked.config is not None
    given = overlap.Config(tile_n=128)
    asked = answer(overlap.all_gather_lhs_matmul, *GOOD, "x", mesh=on, implementation="fused", config=given)
    assert asked.config == given and asked.source == "given"
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    chosen = answer(overlap.all_gather_lhs_matmul, *GOOD, "x", mesh=on)
    assert chosen.implementation == "fused"
    ragged = answer(overlap.all_gather_lhs_matmul, struct((100, 65)), struct((65, 256)), "x", mesh=on)
    assert ragged.implementation == "xla" and "k=65" in ragged.reason and "k=65" in str(ragged)
    with pytest.raises(ValueError, match=r"inside `jax.shard_map`"):
        answer(overlap.all_gather_lhs_matmul, *GOOD, "x")


def test_a_choice_is_said_once(caplog):
    caplog.set_level("INFO", logger="overlap")
    lhs, rhs = jnp.ones((64, 64), BF16), jnp.ones((64, 192), BF16)
    overlap.matmul(lhs, rhs)
    overlap.matmul(lhs, rhs)
    assert len([r for r in caplog.records if r.name == "overlap"]) == 1


def test_an_axis_of_one_device_and_a_tuple_of_one_name():
    assert peer_group_of("op", ("x",), mesh(x=2)).axis_name == "x"
    assert trace(*GOOD, on=mesh(x=1)).shape == (128, 256)


@pytest.mark.parametrize("implementation", [None, "fused", "xla"])
@pytest.mark.parametrize("config", [overlap.Config(tile_n=96), {"tile_n": 128}])
@pytest.mark.parametrize("op", [overlap.matmul, overlap.matmul_reduce_scatter, overlap.matmul_all_reduce])
def test_a_config_is_checked_before_the_activation_is_called(op, config, implementation):
    def activation(values):
        raise AssertionError("called")

    def call(lhs, rhs):
        given = dict(activation=activation, config=config, implementation=implementation)
        return op(lhs, rhs, *OPERATIONS[op][0], **given)

    on = jax.make_mesh((2,), ("x",))
    sharded = jax.shard_map(call, mesh=on, in_specs=P(), out_specs=P("x"), check_vma=False)
    typed = jax.NamedSharding(on, P("x"))
    operands = [[jnp.zeros(x.shape, x.dtype) for x in GOOD]]
    if op is overlap.matmul:
        operands += [[jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=typed) for x in GOOD[:1]] + operands[0][1:]]
    for of_call, run in zip(operands, (sharded, call), strict=False):
        with pytest.raises(ValueError, match=r"`(tile_n|config)` must be"):
            jax.eval_shape(run, *of_call)
