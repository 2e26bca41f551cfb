"""`matmul_reduce_scatter` and `matmul_all_reduce` on GPUs: exact to rounding, repeatable, whichever device is late."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives import communicator
from overlap.collectives.reduce import blocks_kernel
from tests import oracle
from tests.ops import skew_cases
from tests.ops.scatter_cases import ALONG, EVERYWHERE, F32, WAYS, Layer
from tests.ops.skew_cases import stall
from tests.oracle import make_mesh

BF16, F16, E4M3 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float8_e4m3fn)
SHAPES = {  # m, n and k of the product of one of D devices.
    "large": lambda D: (8192, 4096, 4096),
    "ragged": lambda D: (D * 1000, D * 520, 1032),
    "16 rows": lambda D: (D * 16, 8192, 2048),
    "64 rows": lambda D: (D * 64, 4096, 1024),
    "tiny": lambda D: (D * 8, D * 8, 64),
}
OF_8_BITS = {"large": lambda D: (4096, 4096, 4096), "ragged": lambda D: (D * 1000, D * 528, 1040)}
CONFIGS = [
    ("m", overlap.Config(tile_n=128, chunk_bytes=16384)),
    ("m", overlap.Config(tile_m=64, tile_n=256, stages=4, chunk_bytes=1024, chunk_buffers=4)),
    ("n", overlap.Config(tile_m=256, tile_n=128, order_minor="n", order_width=3)),
    ("n", overlap.Config(tile_n=192, stages=3, chunk_bytes=4096)),
    ("m", overlap.Config(schedule="pingpong", tile_n=128, stages=5, order_width=16)),
    ("n", overlap.Config(schedule="pingpong", tile_m=64, tile_n=256, stages=4)),
    (EVERYWHERE, overlap.Config(schedule="pingpong", tile_n=128, stages=4)),
    (EVERYWHERE, overlap.Config(tile_n=192, stages=3, chunk_bytes=4096, order_minor="n")),
    (EVERYWHERE, overlap.Config(tile_m=64, tile_n=128, stages=4, chunk_bytes=1024, chunk_buffers=4)),
    (EVERYWHERE, overlap.Config(tile_n=192, stages=3, order_minor="n", one_shot=True)),
    (EVERYWHERE, overlap.Config(tile_m=64, tile_n=128, stages=4, one_shot=True)),
]
EVERY = ("lhs_scale", "rhs_scale", "bias")


# --- Operands and references ------------------------------------------------------------------------------------------


def operands(mesh, layer, sizes, seed, *, dtype=BF16, extras=()):
    """Draws normally distributed operands, and scales that differ on each device.

    `of_type` then rounds 16-bit operands to 8 bits, and moves the scales away from zero.
    """
    (m, n, k), devices = sizes, mesh.shape["x"]
    shapes = {
        "lhs": (devices * k, m) if layer.transpose_lhs else (m, devices * k),
        "rhs": (n, devices * k) if layer.transpose_rhs else (devices * k, n),
        "lhs_scale": (devices, m, 1), "rhs_scale": (devices, n), "bias": (n,),
    }  # fmt: skip
    names = ("lhs", "rhs", *extras)
    types = {name: jax.ShapeDtypeStruct(shapes[name], F32) for name in names}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in layer.specs(types).items()}

    def drawn(names, dtype, seed):
        return oracle.draw(tuple(shapes[n] for n in names), dtype, tuple(shardings[n] for n in names), seed)

    matrices = drawn(("lhs", "rhs"), BF16 if dtype == E4M3 else dtype, 2 * seed)
    vectors = drawn(extras, F32, 2 * seed + 1) if extras else ()
    return dict(zip(names, (*matrices, *vectors), strict=True))


def of_type(arrays, dtype):
    """Returns `arrays` with operands converted to `dtype`, and scales mapped to 1 + |scale|, away from zero.

    Call this function inside `shard_map`.
    """
    scales = {name: 1 + jnp.abs(x) for name, x in arrays.items() if name.endswith("_scale")}
    return arrays | scales | {name: arrays[name].astype(dtype) for name in ("lhs", "rhs")}


def unfused(layer):
    """Returns the computation of `layer` as a user would write it without this library.

    Each intermediate result is rounded to the result's dtype, because XLA might keep excess precision.
    """

    def call(arrays):
        given = layer.of_one_device(arrays)
        lhs, rhs = (given[name].astype(BF16) if given[name].dtype == E4M3 else given[name] for name in ("lhs", "rhs"))
        lhs, rhs = lhs.mT if layer.transpose_lhs else lhs, rhs.mT if layer.transpose_rhs else rhs
        part = lax.dot(lhs, rhs, preferred_element_type=F32) * given.get("lhs_scale", 1.0) * given.get("rhs_scale", 1.0)
        out = oracle.rounded(layer.summed(part.astype(layer.dtype)))
        if "bias" not in given and layer.activation is None:
            return out
        out = out.astype(F32) + given.get("bias", 0.0)
        return oracle.rounded((out if layer.activation is None else layer.activation(out)).astype(layer.dtype))

    return call


def fused(layer, config=None):
    return lambda arrays: layer(arrays, "fused", oracle.fitting(config))


def exact(layer):
    return lambda arrays: Layer(**vars(layer) | {"dtype": F32}).plain(arrays)


def check(mesh, layer, arrays, *, config=None, dtype=None):
    """Asserts that the fused error is at most twice the unfused error; both are the largest over the devices."""

    def measure(arrays):
        arrays = arrays if dtype is None else of_type(arrays, dtype)
        expected = exact(layer)(arrays)
        pair = (oracle.distance(f(arrays), expected) for f in (fused(layer, config), unfused(layer)))
        return tuple(oracle.worst(error, mesh) for error in pair)

    ours, theirs = map(
        float, layer.mapped(mesh, arrays, measure, (P(), P()), compiler_options=oracle.NO_SEARCH)(arrays)
    )
    # The tensor cores truncate f32 sums, and add f8 products with about 14 bits. XLA may use other instructions.
    floor = 2e-3 if dtype == E4M3 else 1e-5 if layer.dtype == F32 else 0.0
    assert ours <= oracle.ALLOWED * theirs + floor, f"error {ours:.2e} against {theirs:.2e} of the unfused product"


def repeated(mesh, layer, sizes, iterations, seed):
    """Returns the largest distance between the fused and the unfused result over `iterations` launches.

    Devices are late by random times, and each launch's lhs is overwritten right after the kernel.
    """
    arrays = operands(mesh, layer, sizes, seed)

    def measure(arrays):
        # `skew_cases.repeated` overwrites its first operand. Make lhs the first, since peers depend on its products.
        of = lambda call: lambda lhs, rhs: call({"lhs": lhs, "rhs": rhs})  # noqa: E731
        body = skew_cases.repeated(of(fused(layer)), of(unfused(layer)), mesh, iterations)
        return body(arrays["lhs"], arrays["rhs"])

    return float(layer.mapped(mesh, arrays, measure, P())(arrays))


# --- Right to rounding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("name", SHAPES)
def test_error_within_twice_the_unfused_product(devices, name, along):
    mesh, sizes = make_mesh(x=devices), SHAPES[name](devices)
    for seed, dtype in enumerate((BF16, F16)):
        layer = Layer(along, dtype=dtype)
        check(mesh, layer, operands(mesh, layer, sizes, seed, dtype=dtype))


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_layouts(devices, left, right, along):
    mesh, layer = make_mesh(x=devices), Layer(along, transpose_lhs=left, transpose_rhs=right, dtype=BF16)
    for seed, name in enumerate(("ragged", "64 rows")):
        check(mesh, layer, operands(mesh, layer, SHAPES[name](devices), seed))


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_results_in_f32(devices, dtype, along):
    mesh, layer = make_mesh(x=devices), Layer(along)
    for seed, name in enumerate(("large", "ragged", "16 rows")):
        check(mesh, layer, operands(mesh, layer, SHAPES[name](devices), seed, dtype=dtype))


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("out_dtype", [BF16, F32], ids=str)
def test_float8_with_scales_of_each_device(devices, out_dtype, along):
    mesh, layer = make_mesh(x=devices), Layer(along, transpose_rhs=True, dtype=out_dtype)
    for seed, sizes in enumerate(OF_8_BITS.values()):
        arrays = operands(mesh, layer, sizes(devices), seed, dtype=E4M3, extras=("lhs_scale", "rhs_scale"))
        check(mesh, layer, arrays, dtype=E4M3)


@pytest.mark.parametrize("along", WAYS)
def test_keywords(devices, along):
    mesh, layer = make_mesh(x=devices), Layer(along, activation=jax.nn.gelu, dtype=BF16)
    for seed, name in enumerate(("large", "ragged", "16 rows")):
        arrays = operands(mesh, layer, SHAPES[name](devices), seed, extras=EVERY)
        # Large enough that the values before the activation matter.
        check(mesh, layer, arrays | {"bias": 100 * arrays["bias"]}, dtype=BF16)


@pytest.mark.parametrize("along", ALONG)
def test_by_ring(devices, along):
    mesh = make_mesh(x=devices)
    for seed, (name, dtype) in enumerate((("large", BF16), ("ragged", F16), ("ragged", F32), ("tiny", BF16))):
        layer = Layer(along, dtype=dtype, transport="ring")
        check(mesh, layer, operands(mesh, layer, SHAPES[name](devices), seed, extras=EVERY), dtype=BF16)


@pytest.mark.parametrize("late", ["arrivals", "departures"])
def test_by_ring_whoever_is_late(devices, late, monkeypatch):
    LATE[late](monkeypatch, 1)
    mesh, layer = make_mesh(x=devices), Layer("m", dtype=BF16, transport="ring")
    assert repeated(mesh, layer, MEDIUM, 8, seed=3) < 1e-2


@pytest.mark.parametrize(("along", "config"), CONFIGS, ids=str)
def test_other_configs(devices, along, config):
    mesh, layer = make_mesh(x=devices), Layer(along, dtype=BF16)
    check(mesh, layer, operands(mesh, layer, (devices * 712, devices * 584, 1096), 1), config=config)


@pytest.mark.gpus(4)
@pytest.mark.parametrize(
    ("axes", "along"), [({"data": 2, "x": 2}, "n"), ({"x": 2, "data": 2}, "m")], ids=["minor", "major"]
)
def test_one_axis_of_a_larger_mesh(axes, along):
    if jax.process_count() > 1 and jax.device_count() != 4:
        pytest.skip("one process per GPU: this test is for a job of 4")
    mesh, layer = make_mesh(**axes), Layer(along, dtype=BF16)
    arrays = operands(mesh, layer, (1024, 1024, 512), 5)

    def measure(arrays):
        arrays = arrays | {"lhs": arrays["lhs"] * (1 + lax.axis_index("data")).astype(BF16)}
        expected = unfused(layer)(arrays).astype(F32)
        return oracle.worst(oracle.distance(fused(layer)(arrays), expected), mesh)

    assert float(layer.mapped(mesh, arrays, measure, P())(arrays)) < 1e-2


@pytest.mark.parametrize("along", WAYS)
def test_gradients(devices, along):
    mesh, layer = make_mesh(x=devices), Layer(along, dtype=BF16, activation=jnp.tanh)
    arrays = operands(mesh, layer, (devices * 64, devices * 64, 128), 6, extras=EVERY)

    def gradients(f):
        return jax.grad(lambda arrays: jnp.sum(jnp.sin(f(of_type(arrays, BF16)).astype(F32))))

    def body(arrays):
        arrays = arrays | {name: arrays[name] * 0.1 for name in ("lhs", "rhs")}
        ours, theirs = gradients(fused(layer))(arrays), gradients(layer.plain)(arrays)
        return {n: oracle.worst(oracle.distance(ours[n], theirs[n].astype(F32)), mesh) for n in ours}

    errors = layer.mapped(mesh, arrays, body, dict.fromkeys(arrays, P()))(arrays)
    assert all(float(error) < 2e-2 for error in errors.values())


# --- Late devices -----------------------------------------------------------------------------------------------------


def late_arrivals(monkeypatch, victim):
    """The communicators of device `victim` stall before they announce that a chunk has arrived."""
    copy_chunks = communicator.copy_chunks

    def push_late(*args, landed, **kwargs):
        def landed_late(*chunk):
            stall(victim)
            landed(*chunk)

        return copy_chunks(*args, landed=landed_late, **kwargs)

    monkeypatch.setattr(communicator, "copy_chunks", push_late)


def late_departures(monkeypatch, victim):
    """The communicators of device `victim` stall before they begin with a chunk."""
    copy_chunks = communicator.copy_chunks

    def push_late(*args, source, **kwargs):
        def source_late(*place):
            stall(victim)
            return source(*place)

        return copy_chunks(*args, source=source_late, **kwargs)

    monkeypatch.setattr(communicator, "copy_chunks", push_late)


LATE = {"arrivals": late_arrivals, "departures": late_departures}
MEDIUM = 1024, 1024, 512


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_launches_in_a_row_agree_bit_for_bit(devices, dtype, along):
    mesh, layer = make_mesh(x=devices), Layer(along, dtype=dtype)
    arrays = operands(mesh, layer, SHAPES["large"](devices), 2, dtype=F16)
    launch, same = layer.mapped(mesh, arrays, fused(layer)), jax.jit(lambda a, b: (a == b).all())
    results = [launch(arrays) for _ in range(6)]
    assert all(bool(same(results[0], result)) for result in results[1:])


@pytest.mark.parametrize("along", WAYS)
def test_launches_in_a_row_with_other_operands(devices, along):
    """Queues all launches before reading a result. Values that a launch leaves in memory are wrong for the next one."""
    mesh, layer = make_mesh(x=devices), Layer(along, dtype=BF16)
    sizes = devices * 264, devices * 264, 520
    given = [operands(mesh, layer, sizes, seed) for seed in range(8)]
    launch, expected = (layer.mapped(mesh, given[0], f(layer)) for f in (fused, unfused))
    results = [launch(arrays) for arrays in given]
    distance = jax.jit(oracle.distance)
    for arrays, result in zip(given, results, strict=True):
        assert float(distance(result, expected(arrays).astype(F32))) < 1e-2


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("victim", [None, 0, 1])
@pytest.mark.parametrize("late", LATE)
def test_skewed_devices_late_chunks_and_inputs_overwritten_right_after(devices, late, victim, along, monkeypatch):
    if victim is None and late != "arrivals":
        pytest.skip("nothing is late: tested already")
    if victim is not None:
        LATE[late](monkeypatch, victim)
    mesh, layer = make_mesh(x=devices), Layer(along, dtype=BF16)
    assert repeated(mesh, layer, MEDIUM, 30 if victim is None else 5, seed=3) < 1e-2


@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("without", ["terms", "parts"])
def test_negative_control_without_waiting_the_result_is_wrong(devices, without, along, monkeypatch):
    """Each iteration has another lhs, so that results left by the previous iteration are wrong as well."""
    late_arrivals(monkeypatch, 1)
    late_departures(monkeypatch, 1)
    if without == "terms":
        monkeypatch.setattr(blocks_kernel._Body, "_await_terms", lambda *_: None)
    else:
        # Sends a part whether or not it has been computed.
        monkeypatch.setattr(communicator, "wait_for_block", lambda *_: None)
    mesh, layer = make_mesh(x=devices), Layer(along, dtype=BF16)
    assert repeated(mesh, layer, (2048, 4096, 1024), 5, seed=4) > 1e-2


@pytest.mark.parametrize("one_shot", [False, True])
def test_alike_calls_in_one_program_and_in_a_loop(devices, one_shot):
    """XLA must not give two results the same memory, since peers would then write to it for both calls."""
    config = overlap.Config(tile_n=128, one_shot=one_shot)
    mesh, layer = make_mesh(x=devices), Layer(EVERYWHERE, dtype=BF16)
    arrays = operands(mesh, layer, (devices * 64, devices * 64, 256), 8)

    def measure(arrays):
        def step(i, carry):
            lhs, worst = carry
            given = arrays | {"lhs": lhs}
            expected = unfused(layer)(given).astype(F32)
            first, second, third = (fused(layer, config)(given | more) for more in ({}, {}, {"rhs": arrays["rhs"] * 2}))
            for result, factor in ((first, 1), (second, 1), (third, 2)):
                worst = jnp.maximum(worst, oracle.distance(result, factor * expected))
            same = (first == second).all() & (2 * first == third).all()
            return jnp.roll(lhs, 1 + i, axis=0), jnp.where(same, worst, jnp.inf)

        _, worst = lax.fori_loop(0, 5, step, (arrays["lhs"], jnp.float32(0)))
        outside = [fused(layer, config)(arrays) for _ in range(2)]
        worst = jnp.where((outside[0] == outside[1]).all(), worst, jnp.inf)
        return oracle.worst(worst, mesh), *outside

    worst, *results = layer.mapped(mesh, arrays, measure, (P(), P(), P()))(arrays)
    assert float(worst) < 1e-2
    assert bool(jax.jit(lambda a, b: (a == b).all())(*results))


MIXED = [{"x": 2}, {"x": 4}, {"data": 2, "x": 2}, {"x": 2, "data": 2}]


@pytest.mark.parametrize("axes", [pytest.param(a, marks=pytest.mark.gpus(4 if len(a) > 1 else a["x"])) for a in MIXED])
@pytest.mark.parametrize("victim", [None, 1])
def test_layers_in_a_loop_with_a_gather_before_and_a_sum_beside(axes, victim, monkeypatch):
    """Both halves of an MLP, repeatedly in one program, with XLA's sums along the other axis at the same time."""
    count = 4 if len(axes) > 1 else axes["x"]
    if jax.process_count() > 1 and jax.device_count() != count:
        pytest.skip(f"one process per GPU: this test is for a job of {count}")
    if victim is not None:
        late_arrivals(monkeypatch, victim)
    mesh, layer = make_mesh(**axes), Layer("m", dtype=BF16)
    rows, width, hidden = 512, 1024, 1536  # Sizes per device.
    shapes = (axes["x"] * rows, width), (width, axes["x"] * hidden), (axes["x"] * hidden, width)
    specs = P("x", None), P(None, "x"), P("x", None)
    arrays = oracle.draw(shapes, BF16, tuple(NamedSharding(mesh, spec) for spec in specs), 7)

    def mlp(x, up, down, gather, scatter):
        return scatter({"lhs": jax.nn.silu(gather(x, up)).astype(BF16), "rhs": down})

    def body(x, up, down):
        def step(i, carry):
            x, beside, worst = carry
            expected = mlp(x, up, down, oracle.unfused, unfused(layer)).astype(F32)
            y = mlp(x, up, down, oracle.fused, fused(layer))
            if "data" in axes:
                beside = beside + lax.psum(jnp.roll(x.astype(F32), i), "data")[:8, :8]
            worst = jnp.maximum(worst, oracle.distance(y, expected))
            # Rescaled to about the same size, and different on the devices along the other axis.
            y = y.astype(F32) * lax.rsqrt((y.astype(F32) ** 2).mean())
            shift = lax.axis_index("data") if "data" in axes else 0
            return jnp.roll(y, 1 + shift, axis=1).astype(BF16), beside, worst

        start = x, jnp.zeros((8, 8), F32), jnp.float32(0)
        _, beside, worst = lax.fori_loop(0, 20, step, start)
        return oracle.worst(jnp.where(jnp.isfinite(beside).all(), worst, jnp.inf), mesh)

    run = oracle.on_mesh(mesh, body, in_specs=specs, out_specs=P())
    assert float(run(*arrays)) < 2e-2
