"""`all_gather_rhs_matmul`: emulated on CPU devices (numerics, meshes, loops, gradients); assembled; errors; choices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import crossover, dispatch
from overlap.choice.problem import Problem
from overlap.collectives.gather.rhs_schedule import K_STEPS_PER_FLAG
from overlap.emulation import emulate
from overlap.kernels.hopper.limits import smem_bytes
from overlap.kernels.target import Target
from tests import oracle
from tests.assembly import assembly
from tests.assembly.assembly import Case
from tests.ops.explained import answer
from tests.ops.product_cases import normal, oracle_of
from tests.ops.rhs_cases import ALONG, ROWS, SMALL, assert_exact, call, fused, gathered, mapped, product, weights
from tests.oracle import make_mesh, on_mesh

H200 = Target("gpu", "NVIDIA H200", 132)

CONFIGS = {
    "one CTA": (1, SMALL),
    "odd": (3, SMALL),
    "more CTAs than chunks": (7, overlap.Config(tile_n=256, stages=3, order_minor="n")),
    "parts of rows": (2, overlap.Config(tile_n=192, stages=2, chunk_bytes=256, chunk_buffers=3)),
    "one slot": (2, overlap.Config(tile_n=64, chunk_buffers=1, chunk_bytes=4096)),
    "stream k": (5, dataclasses.replace(SMALL, stream_k=4)),
}
SIZES = {  # m, and the shape of a shard of the weights.
    "even": (128, (128, 128)),
    "ragged": (200, (136, 264)),
    "several flags": (128, (72 + 64 * K_STEPS_PER_FLAG, 128)),
    "tiny": (1, (8, 8)),
    "uneven": (128, (40, 8 * 37)),  # Chunks of unequal sizes, by rows or by columns.
}


# Every configuration with every size, each with one of the two ways to gather; `make test-all` runs the other half too.
HALVES = [
    pytest.param(name, size, along, marks=[] if (i + j + k) % 2 == 0 else pytest.mark.slow)
    for i, name in enumerate(CONFIGS)
    for j, size in enumerate(SIZES)
    for k, along in enumerate(ALONG)
]


@pytest.mark.parametrize(("name", "size", "along"), HALVES)
def test_exact_on_integers(name, size, along):
    cores, config = CONFIGS[name]
    devices = 2 + (len(name) + len(size)) % 3
    with emulate(cores=cores, seed=devices, scheduler="pct"):
        assert_exact(mapped(make_mesh(x=devices), along, fused(along, config)), *product(devices, along, *SIZES[size]))


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_error_within_twice_the_unfused_product(devices, dtype, along):
    mesh = make_mesh(x=devices)

    def unfused(lhs, rhs):
        return oracle.rounded(call(along, implementation="xla")(lhs, rhs))

    def measure(lhs, rhs):
        exact = lax.dot(*(x.astype(jnp.float32) for x in (lhs, gathered(rhs, along))), precision="highest")
        errors = (oracle.distance(f(lhs, rhs), exact) for f in (fused(along), unfused))
        return tuple(oracle.worst(error, mesh) for error in errors)

    k, n = (devices * 128, 128) if along == "k" else (128, devices * 128)
    lhs, rhs = normal(0, devices * 128, k, dtype=dtype), normal(1, k, n, dtype=dtype)
    with emulate(cores=2):
        oracle.assert_close(mapped(mesh, along, measure, out_specs=(P(), P()))(lhs, rhs))


@pytest.mark.parametrize("along", ALONG)
def test_what_lies_beyond_a_shard_does_not_enter_its_sums(along):
    """Infinite activations must be multiplied only by weights of their own shard: times zero padding they give NaN."""
    devices, k_shard = 2, 72  # The last k step of a shard ends inside a tile.
    k, n = (devices * k_shard, 128) if along == "k" else (k_shard, devices * 128)
    lhs, rhs = np.ones((devices * 128, k), jnp.bfloat16), np.ones((k, n), jnp.bfloat16)
    lhs[:, -1] = np.inf
    with emulate(cores=2):
        result = np.asarray(mapped(make_mesh(x=devices), along, fused(along))(lhs, rhs), np.float32)
    assert np.isposinf(result).all()


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("axes", [{"data": 2, "x": 2}, {"x": 2, "data": 2}], ids=["minor", "major"])
def test_one_axis_of_a_larger_mesh(axes, along):
    mesh = make_mesh(**axes)
    lhs, rhs = product(2, along, 128, (64, 128))

    def body(a, b):
        return fused(along)(a * (1 + lax.axis_index("data")).astype(a.dtype), b)[None]

    with emulate(cores=2):
        result = np.asarray(mapped(mesh, along, body, P("data", "x"))(lhs, rhs), np.float32)
    for index in range(2):
        np.testing.assert_array_equal(result[index], oracle_of((1 + index) * lhs, rhs).astype(jnp.bfloat16))


@pytest.mark.parametrize("along", ALONG)
def test_a_tuple_of_axes(along):
    mesh, both = make_mesh(a=2, b=2), ("b", "a")
    lhs, rhs = product(4, along, 64, (64, 128))
    specs = (P(both, None), weights(along, both))
    f = on_mesh(mesh, fused(along, axis=both), in_specs=specs, out_specs=P(both, None))
    with emulate(cores=2):
        assert_exact(f, lhs, rhs)


@pytest.mark.parametrize("along", ALONG)
def test_in_a_loop_with_operands_that_change(along):
    lhs, rhs = product(3, along, 128, (128, 64))

    def body(lhs, rhs):
        def step(carry, _):
            lhs, rhs = carry
            wrong = jnp.any(fused(along)(lhs, rhs) != call(along, implementation="xla")(lhs, rhs))
            return (jnp.roll(-lhs, 1, 1), jnp.roll(rhs, 1, 0)), lax.pmax(wrong, "x")  # Right after the kernel.

        return lax.scan(step, (lhs, rhs), length=4)[1]

    with emulate(cores=3):
        assert not np.asarray(mapped(make_mesh(x=3), along, body, P(None))(lhs, rhs)).any()


@pytest.mark.parametrize("along", ALONG)
def test_launches_agree_bit_for_bit(along):
    k, n = (384, 128) if along == "k" else (128, 384)
    lhs, rhs = normal(0, 384, k, dtype=jnp.float16), normal(1, k, n, dtype=jnp.float16)
    f = mapped(make_mesh(x=3), along, fused(along, dataclasses.replace(SMALL, stream_k=4)))
    results = []
    for seed, completion in enumerate(("late", "eager", "random")):
        with emulate(cores=5, seed=seed, completion=completion, scheduler="pct"):
            results.append(np.asarray(f(lhs, rhs)))
    assert all((result == results[0]).all() for result in results)


@pytest.mark.parametrize("along", ALONG)
def test_gradients(along):
    lhs, rhs = product(2, along, 64, (64, 128))

    def gradients(f):
        def loss(lhs, rhs):
            return jnp.sum(jnp.sin(f(lhs, rhs).astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))

    def unfused(lhs, rhs):
        return lhs @ gathered(rhs, along)

    mesh, specs = make_mesh(x=2), (ROWS, weights(along))
    with emulate(cores=2):
        ours = mapped(mesh, along, gradients(fused(along)), specs)(lhs * 0.1, rhs * 0.1)
    theirs = mapped(mesh, along, gradients(unfused), specs)(lhs * 0.1, rhs * 0.1)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and float(oracle.distance(a, b.astype(jnp.float32))) < 1e-2


@pytest.mark.parametrize("implementation", ["fused", "xla"])
def test_leading_dimensions_are_more_rows(implementation):
    mesh, lead = make_mesh(x=2), (3, 2)
    for along in ALONG:
        lhs, rhs = product(2, along, 6 * 24, (64, 64))

        def both(lhs, rhs, along=along):
            op = call(along, implementation=implementation)
            of_rows = op(lhs.reshape(-1, lhs.shape[-1]), rhs)
            out = op(lhs, rhs)
            return out, of_rows, jax.grad(lambda lhs: op(lhs, rhs).astype(jnp.float32).sum())(lhs)

        cut = P(None, None, "x")
        specs = dict(in_specs=(cut, weights(along)), out_specs=(cut, ROWS, cut), mesh=mesh, check_vma=False)
        with emulate(cores=2):
            # `lhs` has leading dimensions and is sharded along its rows; no leading dimension is sharded.
            out, of_rows, gradient = jax.jit(jax.shard_map(both, **specs))(lhs.reshape(*lead, 48, -1), rhs)
        assert out.shape == (*lead, 48, of_rows.shape[-1]) and gradient.shape == (*lead, 48, lhs.shape[-1])
        parts = [part.reshape(-1, out.shape[-1]) for part in np.split(np.asarray(out, np.float32), 2, axis=2)]
        np.testing.assert_array_equal(np.concatenate(parts), np.asarray(of_rows, np.float32))


def test_the_default_on_a_cpu_is_xla_and_other_dtypes_of_the_result():
    for along in ALONG:
        lhs, rhs = product(2, along, 50, (15, 30))  # Sizes that the kernel does not support.
        lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
        np.testing.assert_allclose(mapped(make_mesh(x=2), along, call(along))(lhs, rhs), oracle_of(lhs, rhs))
        lhs, rhs = product(2, along, 64, (64, 64))
        with emulate(cores=2):
            out = mapped(make_mesh(x=2), along, fused(along, preferred_element_type=jnp.float16))(lhs, rhs)
        assert out.dtype == jnp.float16
        np.testing.assert_array_equal(np.asarray(out, np.float32), oracle_of(lhs, rhs))


# --- Errors and choices -----------------------------------------------------------------------------------------------


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(lhs, rhs, axis_name="x", *, size=2, **kwargs):
    """Traces a call inside `shard_map` on per-shard operands, and runs nothing."""

    def inner():
        arrays = (a if not hasattr(a, "shape") else jnp.zeros(a.shape, a.dtype) for a in (lhs, rhs))
        return overlap.all_gather_rhs_matmul(*arrays, axis_name, **kwargs)

    return jax.eval_shape(jax.shard_map(inner, mesh=make_mesh(x=size), in_specs=(), out_specs=P(), check_vma=False))


ALONG_N, ALONG_K, FUSED = {"dimension": 1}, {"dimension": 0}, {"implementation": "fused"}
GOOD_N, GOOD_K = (struct(128, 64), struct(64, 256)), (struct(128, 128), struct(64, 256))
WRONG_CALLS = [  # Each entry: (arguments, keywords, the exception's type, what its message must contain).
    (GOOD_N, {"dimension": 2}, ValueError, ["`dimension`", "0", "1", "got 2"]),
    (GOOD_N, {"dimension": True}, ValueError, ["`dimension`", "True"]),
    (GOOD_N, {"dimension": None}, ValueError, ["`dimension`", "None"]),
    (GOOD_N, ALONG_K, ValueError, ["`lhs`", "k=64", "k=128", "2 shards", "`dimension`"]),
    (GOOD_K, ALONG_N, ValueError, ["`lhs`", "k=128", "k=64"]),
    ((struct(128), struct(64, 256)), ALONG_K, ValueError, ["`lhs`", "2 dimensions", "got 1"]),
    ((struct(128, 64), struct(1, 64, 256)), ALONG_N | FUSED, NotImplementedError, ["`rhs`", "leading", "(1,)"]),
    (([1], struct(64, 256)), ALONG_K, ValueError, ["`lhs`", "array", "list"]),
    ((struct(128, 64), [1]), ALONG_K, ValueError, ["`rhs`", "array", "list"]),
    ((struct(8, 64, dtype=jnp.float16), struct(64, 8)), ALONG_N, ValueError, ["float16", "bfloat16", "cast"]),
    ((struct(8, 64, dtype=jnp.int8), struct(64, 8, dtype=jnp.int8)), ALONG_N, ValueError, ["floating-point"]),
    (GOOD_N, ALONG_N | {"axis_name": "y"}, ValueError, ["`axis_name`", "'y'", "('x',)"]),
    (GOOD_N, ALONG_N | {"implementation": "nccl"}, ValueError, ["`implementation`", "'nccl'"]),
    (GOOD_N, ALONG_N | FUSED | {"config": overlap.Config(stages=9)}, ValueError, ["shared memory", "`stages`"]),
    ((struct(128, 64), struct(64, 201)), ALONG_N | FUSED, NotImplementedError, ["n=201", "16 bytes", "xla"]),
    ((struct(128, 97), struct(97, 256)), ALONG_N | FUSED, NotImplementedError, ["k=97", "16 bytes", "xla"]),
    ((struct(128, 24), struct(12, 256)), ALONG_K | FUSED, NotImplementedError, ["k_shard=12", "multiple of 8", "xla"]),
    ((struct(0, 64), struct(64, 256)), ALONG_N | FUSED, NotImplementedError, ["m=0", "at least 1"]),
    (GOOD_K, ALONG_K | FUSED | {"preferred_element_type": jnp.float32}, NotImplementedError, ["float32", "xla"]),
]


@pytest.mark.parametrize(("args", "kwargs", "error", "fragments"), WRONG_CALLS)
def test_wrong_calls(args, kwargs, error, fragments):
    with pytest.raises(error) as caught:
        trace(*args, **kwargs)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_outside_shard_map():
    with pytest.raises(ValueError, match=r"inside `jax.shard_map`"):
        overlap.all_gather_rhs_matmul(jnp.zeros((8, 8)), jnp.zeros((8, 8)), "x", dimension=0)


def test_shapes_and_an_axis_of_one_device():
    assert trace(*GOOD_N, **ALONG_N, **FUSED).shape == (128, 512)
    assert trace(*GOOD_K, **ALONG_K, **FUSED).shape == (128, 256)
    for keywords in (ALONG_N, ALONG_K):
        assert trace(*GOOD_N, size=1, **keywords, **FUSED).shape == (128, 256)


def test_explain(monkeypatch):
    explain = lambda *args, **kwargs: answer(  # noqa: E731
        overlap.all_gather_rhs_matmul, *args, "x", mesh=make_mesh(x=2), **kwargs
    )
    assert explain(*GOOD_N, **ALONG_N).implementation == "xla"
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    monkeypatch.setattr(crossover, "measurements", lambda: ())
    unknown = explain(*GOOD_N, **ALONG_N)
    assert unknown.implementation == "xla" and "not measured" in str(unknown)
    problem = Problem("all_gather_rhs_matmul_n", 128, 128, 64, "bfloat16", "bfloat16", devices=2)
    monkeypatch.setattr(crossover, "measurements", lambda: (crossover.Measured(problem, 90.0, 100.0),))
    assert explain(*GOOD_N, **ALONG_N).implementation == "fused"
    large = struct(8192, 8192), struct(4096, 8192)
    chosen = explain(*large, **ALONG_K, implementation="fused")
    # With weights gathered along k, tiles go through all rows before the next columns. The chooser does not change a
    # configuration that the caller gives.
    assert chosen.implementation == "fused" and chosen.config.order_minor == "n" and chosen.source == "heuristic"
    assert explain(*large, **ALONG_K, config=SMALL).config == SMALL
    ragged = explain(struct(8, 24), struct(12, 256), **ALONG_K)
    assert ragged.implementation == "xla" and "k_shard=12" in ragged.reason
    with pytest.raises(ValueError, match="`dimension`"):
        explain(*GOOD_N, dimension=3)


# --- Lowered, assembled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 8}, {"data": 2, "x": 2}], ids=str)
def test_lowers_for_cuda_with_either_jax(axes, along, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    mesh, size = make_mesh(**axes), axes["x"]
    shapes = (size * 256, size * 512), (size * 512, size * 512)
    f = mapped(mesh, along, call(along, implementation="fused"))
    lowered = f.trace(*(struct(*shape) for shape in shapes)).lower(lowering_platforms=("cuda",))
    peers = ",".join(str(device) for device in range(mesh.size))
    assert "mosaic_gpu" in lowered.as_text() and f'xla_replica_ids = "{peers}"' in lowered.as_text()


def assembled_case(along):
    def build(case, mesh):
        m, n, k = case.shape  # Sizes of one device's product.
        config = overlap.Config(**case.config) if case.config else None
        f = jax.shard_map(
            fused(along, config), mesh=mesh, in_specs=(ROWS, weights(along)), out_specs=ROWS, check_vma=False
        )
        lhs = assembly.struct(mesh, (mesh.shape["x"] * m, k), case.dtype, ROWS)
        return f, (lhs, assembly.struct(mesh, (k, n), case.dtype, weights(along)))

    return build


assembled_along_n, assembled_along_k = assembled_case("n"), assembled_case("k")
ASSEMBLED = [  # devices, (m, n, k), config
    (8, (4096, 4096, 4096), {}),
    (4, (1000, 4 * 1032, 4 * 1032), {"tile_n": 192, "stages": 4, "order_minor": "n"}),
]


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize("along", ALONG)
@pytest.mark.parametrize(("devices", "shape", "config"), ASSEMBLED, ids=str)
def test_assembled_without_spills(devices, shape, config, along):
    op_name = f"tests.ops.test_all_gather_rhs_matmul:assembled_along_{along}"
    (report,) = assembly.assemble_case(Case(op_name, devices, shape, "bf16", config=config))
    assert report.name == f"overlap_all_gather_rhs_matmul_{along}"
    assert report.spills == 0 and not report.remarks
    expected = smem_bytes(overlap.Config(**config), jnp.bfloat16, "pull")
    assert not config or report.shared_memory_bytes <= expected + 1024
