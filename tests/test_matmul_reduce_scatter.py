"""`matmul_reduce_scatter`: emulated on CPU devices (numerics, meshes, loops), by XLA, derivatives, errors, choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import crossover, dispatch
from overlap.choice.problem import Problem
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests import mesh_cases, oracle
from tests.oracle import make_mesh
from tests.product_cases import normal
from tests.scatter_cases import ALONG, F32, SMALL, Layer, assert_close, assert_exact

H200 = Target("gpu", "NVIDIA H200", 132)
BF16, F16 = jnp.bfloat16, jnp.float16
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
EVERY = ("lhs_scale", "rhs_scale", "bias")
FUSED = {"implementation": "fused"}


def check(layer, mesh, arrays, *, config=SMALL, implementation="fused", **settings):
    """Compares every bit with the oracle."""
    devices = int(np.prod([mesh.shape[name] for name in np.atleast_1d(layer.axis)]))
    call = layer.mapped(mesh, arrays, lambda arrays: layer(arrays, implementation, config))
    with emulate(**{"cores": 2} | settings) as run:
        actual = call(arrays)
        run.check()
    assert (run.counts["launches"] > 0) == (implementation == "fused")
    assert_exact(actual, layer.expected(arrays, devices))
    return actual


def alternating(names):
    """Each name with one of the two dimensions, in turn."""
    return [(name, ALONG[index % 2]) for index, name in enumerate(names)]


# --- The kernel, exact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "along"), [(1, "m"), (2, "n"), (3, "m"), (4, "n"), (6, "m"), (8, "n")])
def test_exact_on_any_number_of_devices(devices, along):
    m, n = (24 * devices, 72) if along == "m" else (40, 16 * devices)
    layer = Layer(along, dtype=BF16 if devices % 2 else F32)
    check(layer, make_mesh(x=devices), layer.integers(devices, m, n, 72), seed=devices)


@pytest.mark.parametrize(
    ("left", "right", "along"),
    [
        (False, False, "m"),
        (False, True, "m"),
        (True, False, "m"),
        (True, True, "m"),
        (False, True, "n"),
        (True, False, "n"),
    ],
)
def test_layouts(left, right, along):
    layer = Layer(along, transpose_lhs=left, transpose_rhs=right)
    check(layer, make_mesh(x=2), layer.integers(2, 2 * 72, 2 * 72, 72))


SETTINGS = {  # a configuration, and how it is run
    "one core": (SMALL, {"cores": 1}),
    "many cores": (SMALL, {"cores": 7, "completion": "random"}),
    "one CTA at a time": (SMALL, {"cores": 4, "resident": 1, "seed": 3}),
    "again with the same flags": (SMALL, {"laps": 2, "completion": "eager"}),
    "wide tiles": (overlap.Config.of(tile_m=128, tile_n=256, stages=3, epilogue_tile_n=32), {"cores": 3}),
    "high tiles": (overlap.Config.of(tile_m=256, tile_n=128, stages=2, epilogue_tile_n=32, order_minor="n"), {}),
    "low, wide tiles": (overlap.Config.of(tile_m=64, tile_n=256, stages=3), {"cores": 2}),
    "two buffers": (overlap.Config.of(tile_n=128, stages=2, epilogue_tile_n=32, epilogue_slots=2), {}),
    "small chunks": (overlap.Config.of(tile_m=64, tile_n=128, stages=3, chunk_bytes=1024, chunk_slots=3), {"cores": 3}),
    "large chunks": (overlap.Config.of(tile_m=64, tile_n=128, stages=2, chunk_bytes=65536, chunk_slots=1), {}),
}


@pytest.mark.parametrize(("name", "along"), alternating(SETTINGS))
def test_ragged_tiles_whatever_the_configuration_and_the_schedule(name, along):
    config, settings = SETTINGS[name]
    layer, devices = Layer(along), 2 + len(name) % 2
    m, n = (devices * 136, 264) if along == "m" else (136, devices * 264)
    check(layer, make_mesh(x=devices), layer.integers(devices, m, n, 72), config=config, **settings)


@pytest.mark.parametrize("along", ALONG)
def test_a_row_or_a_few_columns_per_device(along):
    layer = Layer(along, dtype=F16)
    m, n = (3, 8) if along == "m" else (1, 3 * 8)
    check(layer, make_mesh(x=3), layer.integers(3, m, n, 8, dtype=F16))


@pytest.mark.parametrize(("dtype", "along"), [(BF16, "m"), (F16, "n")])
def test_parts_are_rounded_once_before_they_travel_and_the_own_one_is_not(dtype, along):
    layer, wide = Layer(along, dtype=dtype), Layer(along)
    arrays = layer.integers(3, 48, 48, 72, dtype=dtype)
    arrays["lhs"] = arrays["lhs"] * (37 if dtype == BF16 else 301)
    actual = check(layer, make_mesh(x=3), arrays)
    in_f32 = check(wide, make_mesh(x=3), arrays)
    assert np.any(np.asarray(actual) != np.asarray(in_f32.astype(dtype)))


@pytest.mark.parametrize(("kinds", "along"), [((E4M3, E4M3), "m"), ((E5M2, E4M3), "n")])
def test_float8_with_scales_of_each_device(kinds, along):
    layer = Layer(along, transpose_rhs=True, dtype=F32 if kinds[0] == E4M3 else BF16)
    arrays = layer.integers(2, 2 * 40, 2 * 72, 144, extras=("lhs_scale", "rhs_scale"))
    arrays |= {name: arrays[name].astype(kind) for name, kind in zip(("lhs", "rhs"), kinds, strict=True)}
    config = overlap.Config(tile_m=64, tile_n=128, tile_k=128, stages=2)
    check(layer, make_mesh(x=2), arrays, config=config)


KEYWORDS = {
    "bias": (("bias",), None),
    "addend": (("addend",), jax.nn.relu),
    "activation": ((), jax.nn.relu),
    "scales of rows": (("lhs_scale",), None),
    "scales of columns": (("rhs_scale",), None),
    "all": ((*EVERY, "addend"), lambda y: jnp.maximum(2 * y, -1)),
}


@pytest.mark.parametrize(("name", "along"), [*alternating(KEYWORDS), ("all", "n")])
def test_keywords(name, along):
    extras, activation = KEYWORDS[name]
    layer, devices = Layer(along, activation=activation), 3 if name == "all" else 2
    check(layer, make_mesh(x=devices), layer.integers(devices, devices * 72, devices * 40, 24, extras=extras))


def test_scalar_scales_that_differ_from_device_to_device():
    layer = Layer("n")
    arrays = layer.integers(2, 48, 48, 24)

    def scaled(arrays):
        place = lax.axis_index("x").astype(F32)
        return layer(arrays | {"lhs_scale": (2 + place)[None], "rhs_scale": jnp.exp2(-place)[None]})

    with emulate(cores=2):
        actual = layer.mapped(make_mesh(x=2), arrays, scaled)(arrays)
    scales = {"lhs_scale": np.array([2.0, 3.0]), "rhs_scale": np.array([1.0, 0.5])}
    assert_exact(actual, layer.expected(arrays | scales, 2))


@pytest.mark.parametrize(("along", "transposed"), [("m", False), ("n", True)])
def test_leading_dimensions(along, transposed):
    layer = Layer(along, transpose_lhs=transposed, activation=jax.nn.relu)
    arrays = layer.integers(2, 2 * 72, 2 * 40, 24, lead=(1, 2), extras=(*EVERY, "addend"))
    actual = check(layer, make_mesh(x=2), arrays)
    assert actual.shape == (1, 2, 2 * 72, 2 * 40)
    arrays["lhs_scale"] = arrays["lhs_scale"][:, 0, 0]  # The same for all of them: [D, m, 1].
    spread = jnp.broadcast_to(arrays["lhs_scale"][:, None, None], (2, 1, 2, 2 * 72, 1))
    with emulate(cores=2):
        actual = layer.mapped(make_mesh(x=2), arrays)(arrays)
    assert_exact(actual, layer.expected(arrays | {"lhs_scale": spread}, 2))


# --- Rounding and repeatability ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "dtype", "along"), [(2, F16, "m"), (2, BF16, "n"), (4, BF16, "m")])
def test_error_within_twice_the_unfused_product(devices, dtype, along):
    mesh, layer, wide = make_mesh(x=devices), Layer(along, dtype=dtype), Layer(along)
    arrays = {"lhs": normal(0, 64 * devices, 128 * devices, dtype=dtype)}
    arrays["rhs"] = normal(1, 128 * devices, 64 * devices, dtype=dtype)

    def unfused(arrays):
        part = arrays["lhs"] @ arrays["rhs"]
        out = lax.psum_scatter(part, "x", scatter_dimension=ALONG.index(along), tiled=True)
        return oracle.rounded(out)

    def measure(arrays):
        exact = wide.plain(arrays)
        return tuple(oracle.worst(oracle.distance(f(arrays), exact), mesh) for f in (layer, unfused))

    with emulate(cores=2):
        oracle.assert_close(layer.mapped(mesh, arrays, measure, (P(), P()))(arrays))


@pytest.mark.parametrize("along", ALONG)
def test_launches_agree_bit_for_bit_whoever_is_first(along):
    layer = Layer(along, dtype=F16, activation=jax.nn.gelu)
    arrays = {"lhs": normal(0, 3 * 72, 3 * 72, dtype=F16), "rhs": normal(1, 3 * 72, 3 * 48, dtype=F16)}
    call, results = layer.mapped(make_mesh(x=3), arrays), []
    for seed, completion, cores in ((0, "late", 3), (1, "eager", 3), (2, "random", 3), (3, "random", 7)):
        with emulate(cores=cores, seed=seed, completion=completion):
            results.append(np.asarray(call(arrays)))
    assert all((result == results[0]).all() for result in results)


# --- Meshes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("over", "along"), alternating(["cluster", "warpgroup"]))
def test_one_axis_of_a_larger_mesh_whatever_the_axes_are_called(over, along):
    """The devices along the other axis have other operands, so that a part from another group shows."""
    mesh, layer = make_mesh(cluster=2, warpgroup=2), Layer(along, axis=over)
    (other,) = {"cluster", "warpgroup"} - {over}
    arrays = layer.integers(2, 48, 48, 24)

    def body(arrays):
        factor = (1 + lax.axis_index(other)).astype(arrays["lhs"].dtype)
        return layer(arrays | {"lhs": arrays["lhs"] * factor})[None]

    with emulate(cores=2, seed=1):
        result = layer.mapped(mesh, arrays, body, P(other, *layer.out_spec))(arrays)
    for index in range(2):
        assert_exact(result[index], layer.expected(arrays | {"lhs": arrays["lhs"] * (1 + index)}, 2))


LAYOUTS = [
    mesh_cases.layout(("a", "b"), a=2, b=2),
    mesh_cases.layout(("b", "a"), a=3, b=1),
    mesh_cases.layout("x", (2, 0, 3, 1), x=4),
    mesh_cases.layout(("b", "a"), (2, 0, 3, 1), a=2, b=2),
]


@pytest.mark.parametrize(("case", "along"), alternating(LAYOUTS), ids=str)
def test_tuples_of_axes_and_permuted_devices(case, along):
    layer = Layer(along, axis=case.over)
    size = 16 * case.size
    arrays = layer.integers(case.size, size, size, 24, extras=EVERY)
    check(layer, case.mesh(), arrays)
    # Blocks lie where `lax.psum_scatter` puts them.
    assert_exact(layer.mapped(case.mesh(), arrays, layer.plain)(arrays), layer.expected(arrays, case.size))


@pytest.mark.parametrize("along", ALONG)
def test_in_a_loop_with_operands_that_change(along):
    layer = Layer(along)
    arrays = layer.integers(3, 48, 48, 72)

    def body(arrays):
        def step(arrays, _):
            wrong = jnp.any(layer(arrays) != layer.plain(arrays))
            moved = {"lhs": jnp.roll(-arrays["lhs"], 1, 1), "rhs": jnp.roll(arrays["rhs"], 1, 1)}
            return moved, lax.pmax(wrong, "x")  # Right after the kernel.

        return lax.scan(step, arrays, length=4)[1]

    with emulate(cores=3):
        assert not np.asarray(layer.mapped(make_mesh(x=3), arrays, body, P())(arrays)).any()


# --- By XLA -----------------------------------------------------------------------------------------------------------

BY_XLA = [  # what is given, leading dimensions of lhs and of rhs
    (("addend",), (), ()),
    (("addend", *EVERY), (), ()),
    (("addend", *EVERY), (2,), ()),
    (("lhs_scale", "rhs_scale"), (2, 3), (2, 3)),
    (("rhs_scale", "bias", "addend"), (), (2,)),
]


@pytest.mark.parametrize(("along", "implementation"), [("m", "xla"), ("n", None)])
@pytest.mark.parametrize(("extras", "lead", "rhs_lead"), BY_XLA)
def test_by_xla_with_every_keyword(extras, lead, rhs_lead, along, implementation):
    transposed = along == "n"
    activation = jax.nn.relu if "bias" in extras else None
    layer = Layer(along, transpose_lhs=transposed, transpose_rhs=transposed, activation=activation)
    # Sizes and a dtype that the fused kernel does not take.
    arrays = layer.integers(2, 10, 6, 5, extras=extras, lead=lead, rhs_lead=rhs_lead, dtype=F32)
    check(layer, make_mesh(x=2), arrays, implementation=implementation)


@pytest.mark.parametrize("along", ALONG)
def test_by_xla_in_other_dtypes(along):
    for dtype, out_dtype in ((F32, F32), (BF16, BF16), (E4M3, BF16), (F16, F32)):
        layer = Layer(along, dtype=jnp.dtype(out_dtype))
        check(layer, make_mesh(x=2), layer.integers(2, 10, 6, 5, dtype=dtype), implementation="xla")


def test_nothing_to_multiply():
    for along in ALONG:
        for m, n in ((0, 8), (8, 0)):
            layer = Layer(along, dtype=BF16)
            check(layer, make_mesh(x=2), layer.integers(2, m, n, 8), implementation=None)
        # (jax 0.11 cannot compile a program whose sharded arguments are all empty.)
        no_products = trace(struct(8, 0), struct(0, 8), scatter_dimension=ALONG.index(along))
        assert no_products.shape == ((4, 8) if along == "m" else (8, 4))


# --- Derivatives ------------------------------------------------------------------------------------------------------


def loss(f):
    return lambda *x: jnp.sin(f(*x).astype(F32)).sum()


def squares(tree):
    return sum((x.astype(F32) ** 2).sum() for x in jax.tree.leaves(tree))


def direction(arrays):
    return jax.tree.map(lambda x: jnp.cos(3 * x), arrays)


TRANSFORMED = {
    "vjp": lambda f, x: jax.grad(loss(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (direction(x),)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (direction(x),)),
    "grad of grad": lambda f, x: jax.grad(lambda x: squares(jax.grad(loss(f))(x)))(x),
}
GELU = (jax.nn.gelu, EVERY)
DERIVATIVES = [  # how, along, activation and keywords, check_vma
    *((how, along, GELU, index < 2) for index, (how, along) in enumerate(alternating(TRANSFORMED))),
    ("jvp of grad", "n", GELU, True),
    ("vjp", "m", (None, ()), True),
    ("vjp", "n", (None, EVERY), True),
]


def of_both(layer, arrays, transformed, check_vma, implementation="fused", around=lambda f: f):
    """What `transformed` makes of the layer and of the same in plain JAX, both under `shard_map`."""
    results = []
    lead = (None,) * (arrays["lhs"].ndim - 2)
    for call in (lambda arrays: layer(arrays, implementation), layer.plain):
        mapped = layer.mapped(make_mesh(x=2), arrays, around(call), P(*lead, *layer.out_spec), check_vma)
        with emulate(cores=2, detect_races=False) as run:
            results.append(jax.block_until_ready(jax.jit(lambda x, f=mapped: transformed(f, x))(arrays)))
        assert (run.counts["launches"] > 0) == (implementation == "fused" and call != layer.plain)
    return results


def operands(layer, extras=(), dtype=F16, lead=()):
    arrays = layer.integers(2, 16, 16, 8, extras=extras, dtype=dtype, lead=lead)
    return {name: (x * 0.25).astype(x.dtype) for name, x in arrays.items()}


@pytest.mark.parametrize(("how", "along", "given", "check_vma"), DERIVATIVES)
def test_derivatives(how, along, given, check_vma):
    activation, extras = given
    layer = Layer(along, activation=activation)
    assert_close(*of_both(layer, operands(layer, extras), TRANSFORMED[how], check_vma))


@pytest.mark.parametrize("how", ["vjp", "jvp of grad"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_derivatives_by_xla_with_an_addend(check_vma, how):
    layer = Layer("n" if check_vma else "m", activation=jnp.tanh)
    arrays = operands(layer, (*EVERY, "addend"))
    assert_close(*of_both(layer, arrays, TRANSFORMED[how], check_vma, implementation="xla"))


def test_derivatives_with_leading_dimensions_of_transposed_operands():
    layer = Layer("m", transpose_lhs=True, transpose_rhs=True, activation=jnp.tanh)
    assert_close(*of_both(layer, operands(layer, EVERY, lead=(2,)), TRANSFORMED["vjp"], True))


def test_gradients_of_a_result_of_16_bits():
    layer = Layer("n", dtype=BF16)
    ours, theirs = of_both(layer, operands(layer, dtype=BF16), TRANSFORMED["vjp"], True)
    assert all(gradient.dtype == BF16 for gradient in ours.values())
    assert_close(ours, theirs, 2e-2)


def test_gradients_taken_inside_shard_map():
    layer = Layer("m", activation=jax.nn.gelu)
    arrays = operands(layer, EVERY)
    # The bias is the same on all devices, and each has its own part of the gradient.
    specs = layer.specs(arrays)
    results = []
    for call in (layer, layer.plain):
        gradients = jax.grad(loss(call))
        each = lambda arrays, g=gradients: {n: x[None] if n == "bias" else x for n, x in g(arrays).items()}  # noqa: E731
        with emulate(cores=2, detect_races=False):
            results.append(layer.mapped(make_mesh(x=2), arrays, each, specs | {"bias": P("x")})(arrays))
    assert_close(*results)


def test_the_gradient_of_a_scalar_that_the_activation_captures():
    layer = Layer("n")
    arrays = operands(layer, EVERY)

    def body(call):
        def of_slope(slope, arrays):
            slope = slope + lax.axis_index("x")  # Each device has another one.
            activated = Layer("n", activation=lambda y: jax.nn.silu(y * slope))
            return getattr(activated, call)(arrays)

        specs = P(), layer.specs(arrays)
        mapped = jax.shard_map(of_slope, mesh=make_mesh(x=2), in_specs=specs, out_specs=layer.out_spec)
        with emulate(cores=2, detect_races=False):
            return jax.block_until_ready(jax.jit(jax.grad(loss(mapped)))(jnp.float32(0.75), arrays))

    assert_close(body("__call__"), body("plain"))


def scanned(call):
    """Over two left operands."""

    def run(arrays):
        def step(_, shift):
            return None, call(arrays | {"lhs": arrays["lhs"] + shift.astype(arrays["lhs"].dtype)})

        return lax.scan(step, None, jnp.arange(2, dtype=F32))[1].sum(0)

    return run


@pytest.mark.parametrize(("around", "check_vma"), [(scanned, True), (jax.checkpoint, False)])
def test_gradients_inside_other_transformations(around, check_vma):
    layer = Layer("n", activation=jnp.tanh)
    arrays = operands(layer, EVERY)
    assert_close(*of_both(layer, arrays, TRANSFORMED["vjp"], check_vma, around=around))


@pytest.mark.parametrize(
    ("same", "along"), [(("lhs", "rhs"), "m"), (("lhs", "rhs"), "n"), (("lhs",), "m"), (("rhs",), "n")]
)
def test_operands_that_are_the_same_on_all_devices(same, along):
    """Their types say so, the result varies, and gradients are summed."""
    layer = Layer(along, activation=jnp.tanh)
    arrays = {"lhs": normal(0, 16, 8, dtype=F16), "rhs": normal(1, 8, 16, dtype=F16)}
    times = {"lhs": (1, 2), "rhs": (2, 1)}
    arrays = {name: x if name in same else jnp.tile(x, times[name]) for name, x in arrays.items()}
    specs = layer.specs(arrays) | dict.fromkeys(same, P())
    results = []
    for call in (layer, layer.plain):
        mapped = jax.shard_map(call, mesh=make_mesh(x=2), in_specs=(specs,), out_specs=layer.out_spec)
        both = jax.jit(jax.value_and_grad(lambda arrays, f=mapped: squares(f(arrays))))
        with emulate(cores=2, detect_races=False):
            results.append(jax.block_until_ready(both(arrays)))
    assert_close(*results)


# --- vmap -------------------------------------------------------------------------------------------------------------


def over(name, layer, arrays, implementation="fused"):
    """A batch of three by `vmap` over one of the arrays, of both ways to compute it."""
    out, results = P(None, *layer.out_spec), []
    for call in (lambda arrays: layer(arrays, implementation), layer.plain):

        def batch(arrays, call=call):
            x = arrays[name]
            return jax.vmap(lambda x: call(arrays | {name: x}))(jnp.stack([x, 2 * x, -x]))

        with emulate(cores=2, detect_races=False):
            results.append(layer.mapped(make_mesh(x=2), arrays, batch, out)(arrays))
    return results


@pytest.mark.parametrize(("name", "along"), alternating(["lhs", "lhs_scale"]))
def test_vmap_becomes_a_leading_dimension(name, along):
    layer = Layer(along, activation=jax.nn.relu)
    assert_exact(*over(name, layer, layer.integers(2, 48, 48, 24, extras=EVERY)))


@pytest.mark.parametrize(
    ("along", "extras"), [("m", ()), ("m", ("lhs_scale", "rhs_scale")), ("n", ("lhs_scale", "rhs_scale"))]
)
def test_vmap_over_a_bias(along, extras):
    """By XLA behind the kernel, which still scales each device's product before it is summed."""
    layer = Layer(along)
    assert_exact(*over("bias", layer, layer.integers(2, 48, 48, 32, extras=("bias", *extras))))


@pytest.mark.parametrize("name", ["rhs", "rhs_scale"])
def test_vmap_over_anything_else_is_refused_or_left_to_xla(name):
    layer = Layer("m")
    arrays = layer.integers(2, 48, 48, 24, extras=("rhs_scale",))
    with pytest.raises(NotImplementedError, match=r"vmap.*xla"):
        over(name, layer, arrays)
    assert_exact(*over(name, layer, arrays, None))


def test_vmap_over_anything_else_where_the_chooser_takes_the_kernel(monkeypatch):
    layer = Layer("m", dtype=BF16)
    arrays = {"lhs": struct(8192, 8192), "rhs": struct(8192, 8192)}
    problem = Problem("matmul_reduce_scatter", 8192, 8192, 4096, "bfloat16", "bfloat16", devices=2)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    monkeypatch.setattr(crossover, "_measurements", lambda: (crossover.Measured(problem, 90.0, 100.0),))
    for name, has_kernel in (("lhs", True), ("rhs", False)):

        def batch(arrays, name=name):
            x = arrays[name]
            return jax.vmap(lambda x: layer(arrays | {name: x}, None, None))(jnp.stack([x, -x]))

        traced = layer.mapped(make_mesh(x=2), arrays, batch, P(None, "x", None)).trace(arrays)
        assert ("mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()) == has_kernel


def test_vmap_of_gradients():
    layer = Layer("n", activation=jnp.tanh)
    arrays = operands(layer, EVERY)

    def gradients(f, arrays):
        many = jnp.stack([arrays["lhs"], -arrays["lhs"]])
        return jax.vmap(lambda lhs: jax.grad(loss(f))(arrays | {"lhs": lhs}))(many)

    assert_close(*of_both(layer, arrays, gradients, True))


# --- Wider numbers ----------------------------------------------------------------------------------------------------


def test_the_same_bits_with_x64():
    layer = Layer("m", dtype=BF16, activation=lambda y: jnp.tanh(y * np.float64(0.5)))
    arrays = {"lhs": normal(0, 48, 2 * 72), "rhs": normal(1, 2 * 72, 48)}
    in_float64 = {"lhs_scale": np.linspace(0.5, 1, 48)[None, :, None], "bias": np.linspace(-1, 1, 48)}
    results = []
    for is_on in (False, True):
        with jax.enable_x64(is_on), emulate(cores=2):
            results.append(layer.mapped(make_mesh(x=2), arrays, lambda arrays: layer(arrays | in_float64))(arrays))
    assert_exact(*results)


# --- Errors and choices -----------------------------------------------------------------------------------------------


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(lhs, rhs, axis_name="x", *, size=2, **keywords):
    """Traces the call inside `shard_map` on per-shard operands; runs nothing."""

    def inner():
        as_array = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x  # noqa: E731
        given = {name: as_array(x) for name, x in keywords.items()}
        return overlap.matmul_reduce_scatter(as_array(lhs), as_array(rhs), axis_name, **given)

    return jax.eval_shape(jax.shard_map(inner, mesh=make_mesh(x=size), in_specs=(), out_specs=P(), check_vma=False))


GOOD, COLUMNS = (struct(128, 64), struct(64, 256)), {"scatter_dimension": 1}
OF_8_BITS = struct(128, 64, dtype=E4M3), struct(64, 256, dtype=E4M3)
WRONG_CALLS = [  # arguments, keywords, type, what the message must contain
    (GOOD, {"scatter_dimension": 2}, ValueError, ["`scatter_dimension`", "0", "1", "got 2"]),
    (GOOD, {"scatter_dimension": -1}, ValueError, ["`scatter_dimension`", "got -1"]),
    (GOOD, {"scatter_dimension": True}, ValueError, ["`scatter_dimension`", "True"]),
    (GOOD, {"scatter_dimension": None}, ValueError, ["`scatter_dimension`", "None"]),
    ((struct(127, 64), struct(64, 256)), {}, ValueError, ["rows of `lhs`", "m=127", "2 devices", "multiple of 2"]),
    ((struct(128, 64), struct(64, 201)), COLUMNS, ValueError, ["columns of `rhs`", "n=201", "2 devices"]),
    ((struct(127, 64), struct(64, 256)), FUSED, ValueError, ["m=127", "2 devices", "pad"]),
    ((struct(128, 64), struct(32, 256)), {}, ValueError, ["`lhs`", "`rhs`", "k=64", "k=32"]),
    ((struct(128), struct(64, 256)), {}, ValueError, ["`lhs`", "2 dimensions", "got 1"]),
    (([1], struct(64, 256)), {}, ValueError, ["`lhs`", "array", "list"]),
    ((struct(128, 64, dtype=F16), struct(64, 256)), {}, ValueError, ["float16", "bfloat16", "cast"]),
    ((struct(8, 8, dtype=jnp.int8), struct(8, 8, dtype=jnp.int8)), {}, ValueError, ["floating-point", "int8"]),
    ((struct(3, 8, 8), struct(2, 8, 8)), {}, ValueError, ["leading dimensions", "(3,)", "(2,)"]),
    ((GOOD[0], [np.zeros((64, 256))] * 2), {}, ValueError, ["`rhs`", "one array", "list of 2", "a call for each"]),
    ((struct(128, 128), GOOD[1]), {}, ValueError, ["k=128", "k=64", "not sharded", "2 devices", "in_specs"]),
    (GOOD, {"axis_name": "y"}, ValueError, ["`axis_name`", "'y'", "('x',)"]),
    (GOOD, {"axis_name": ("x", "x")}, ValueError, ["`axis_name`", "once", "('x', 'x')"]),
    (GOOD, {"implementation": "nccl"}, ValueError, ["`implementation`", "'nccl'"]),
    (GOOD, {"bias": struct(128)}, ValueError, ["`bias`", "(256,)", "(128,)"]),
    (GOOD, COLUMNS | {"bias": struct(256)}, ValueError, ["`bias`", "(128,)", "(256,)"]),
    (GOOD, {"addend": struct(128, 256)}, ValueError, ["`addend`", "(64, 256)", "(128, 256)"]),
    (GOOD, {"lhs_scale": struct(64, 1)}, ValueError, ["`lhs_scale`", "(128, 1)", "(64, 1)"]),
    (GOOD, COLUMNS | {"rhs_scale": struct(128)}, ValueError, ["`rhs_scale`", "(256,)", "(128,)"]),
    (GOOD, FUSED | {"config": overlap.Config(stages=9)}, ValueError, ["shared memory", "`stages`"]),
    (GOOD, FUSED | {"config": overlap.Config(cluster=2)}, ValueError, ["`cluster`", "`stream_k`", "2 and 1"]),
    (GOOD, FUSED | {"config": overlap.Config(stream_k=2)}, ValueError, ["`cluster`", "`stream_k`", "1 and 2"]),
    (GOOD, FUSED | {"config": overlap.Config(split_k=2)}, ValueError, ["`split_k`", "got 2"]),
    ((struct(128, 64), struct(1, 64, 8)), FUSED, NotImplementedError, ["`rhs`", "leading", "(1,)", "xla"]),
    ((struct(128, 64), struct(64, 201)), FUSED, NotImplementedError, ["n=201", "16 bytes", "xla"]),
    ((struct(128, 60), struct(60, 256)), FUSED, NotImplementedError, ["k=60", "16 bytes", "xla"]),
    ((struct(128, 64), struct(64, 24)), FUSED | COLUMNS, NotImplementedError, ["=12", "16 bytes", "xla"]),
    ((struct(64, 24), struct(64, 8)), FUSED | {"transpose_lhs": True}, NotImplementedError, ["m / 2=12", "16 bytes"]),
    ((struct(0, 64), struct(64, 256)), FUSED, NotImplementedError, ["=0", "at least 1", "xla"]),
    ((struct(0, 8, 8), struct(8, 8)), FUSED, NotImplementedError, ["`lhs`", "at least 1", "(0,)"]),
    (OF_8_BITS, FUSED, NotImplementedError, ["8-bit", "transpose_rhs=True", "xla"]),
    ((struct(8, 8, dtype=F32), struct(8, 8, dtype=F32)), FUSED, NotImplementedError, ["float32", "cast", "xla"]),
]


@pytest.mark.parametrize(("args", "keywords", "error", "fragments"), WRONG_CALLS)
def test_wrong_calls(args, keywords, error, fragments):
    with pytest.raises(error) as caught:
        trace(*args, **keywords)
    for fragment in fragments:
        assert fragment in str(caught.value)
    if error is NotImplementedError:
        # Right calls, which XLA serves.
        rank = max(len(x.shape) for x in args)
        assert trace(*args, **keywords | {"implementation": None}).ndim == rank


def test_outside_shard_map():
    with pytest.raises(ValueError, match=r"`matmul_reduce_scatter` must be called inside `jax.shard_map`"):
        overlap.matmul_reduce_scatter(jnp.zeros((8, 8)), jnp.zeros((8, 8)), "x")


def test_shapes_and_dtypes():
    for implementation in ("fused", "xla"):
        given = {"implementation": implementation}
        assert trace(*GOOD, **given).shape == (64, 256) and trace(*GOOD, **given).dtype == BF16
        assert trace(*GOOD, **given, **COLUMNS).shape == (128, 128)
        assert trace(*GOOD, **given, preferred_element_type=F32).dtype == F32
        assert trace(struct(2, 3, 128, 64), GOOD[1], **given).shape == (2, 3, 64, 256)
        lhs, rhs = struct(128, 64, dtype=E4M3), struct(256, 64, dtype=E5M2)
        assert trace(lhs, rhs, transpose_rhs=True, **given).dtype == BF16


def explain(*args, **keywords):
    return overlap.explain(overlap.matmul_reduce_scatter, *args, "x", mesh=make_mesh(x=2), **keywords)


def test_explain(monkeypatch):
    assert explain(*GOOD).implementation == "xla"
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    monkeypatch.setattr(crossover, "_measurements", lambda: ())
    unknown = explain(*GOOD)
    assert unknown.implementation == "xla" and "not measured" in str(unknown)
    rows = Problem("matmul_reduce_scatter", 128, 256, 64, "bfloat16", "bfloat16", devices=2)
    monkeypatch.setattr(crossover, "_measurements", lambda: (crossover.Measured(rows, 90.0, 100.0),))
    assert explain(*GOOD).implementation == "fused"
    # What was measured of rows says nothing of columns.
    assert explain(*GOOD, **COLUMNS).implementation == "xla"
    for keywords in ({}, COLUMNS, {"preferred_element_type": F32}, {"transpose_lhs": True}):
        chosen = explain(struct(8192, 8192), struct(8192, 8192), **keywords, **FUSED)
        assert chosen.implementation == "fused" and chosen.source == "heuristic"
        assert (chosen.config.cluster, chosen.config.stream_k, chosen.config.split_k) == (1, 1, 1)
        # Of the two devices' products, in the result's dtype: the half that is sent, and the half that comes.
        assert chosen.scratch_bytes == 8192 * 8192 * (4 if "preferred_element_type" in keywords else 2)
        assert f"scratch: {chosen.scratch_bytes:,} bytes" in str(chosen)
    assert explain(*GOOD, config=SMALL).config == SMALL
    refused = explain(GOOD[0], struct(64, 201))
    assert refused.implementation == "xla" and "n=201" in refused.reason
    with pytest.raises(ValueError, match="`scatter_dimension`"):
        explain(*GOOD, scatter_dimension=3)
    with pytest.raises(ValueError, match="m=127"):
        explain(struct(127, 64), GOOD[1])


@pytest.mark.parametrize(("axes", "along"), [({"x": 3}, "n"), ({"data": 2, "x": 2}, "m")], ids=str)
def test_lowers_for_cuda(axes, along, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    mesh, size, layer = make_mesh(**axes), axes["x"], Layer(along, dtype=BF16)
    arrays = {"lhs": struct(size * 256, size * 512), "rhs": struct(size * 512, size * 512)}
    lowered = layer.mapped(mesh, arrays, lambda arrays: layer(arrays, config=None)).trace(arrays)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    peers = ",".join(str(device) for device in range(mesh.size))
    assert "mosaic_gpu" in text and f'xla_replica_ids = "{peers}"' in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_linear_transpose(check_vma):
    layer = Layer("m")
    arrays = layer.integers(2, 48, 48, 24)

    def transposed(call):
        mapped = layer.mapped(make_mesh(x=2), arrays, call, check_vma=check_vma)
        by_lhs = lambda lhs: mapped(arrays | {"lhs": lhs})  # noqa: E731
        return jax.linear_transpose(by_lhs, arrays["lhs"])(jnp.ones((48, 48), F32))[0]

    with emulate():
        ours = np.asarray(transposed(layer), np.float32)
    np.testing.assert_array_equal(ours, np.asarray(transposed(layer.plain), np.float32))
