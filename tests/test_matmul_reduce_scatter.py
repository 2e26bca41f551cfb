"""`matmul_reduce_scatter`: emulated on CPU devices (numerics, meshes, loops), and with XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests import mesh_cases, oracle
from tests.oracle import make_mesh
from tests.product_cases import normal
from tests.scatter_cases import (
    ALONG,
    BF16,
    EVERY,
    F16,
    F32,
    SMALL,
    Layer,
    alternating,
    assert_exact,
    check,
    struct,
    trace,
)

H200 = Target("gpu", "NVIDIA H200", 132)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


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


SETTINGS = {  # A configuration, and the settings of the emulation.
    "one core": (SMALL, {"cores": 1}),
    "many cores": (SMALL, {"cores": 7, "completion": "random"}),
    "one CTA at a time": (SMALL, {"cores": 4, "resident": 1, "seed": 3}),
    "again with the same flags": (SMALL, {"laps": 2, "completion": "eager"}),
    "wide tiles": (overlap.Config(tile_m=128, tile_n=256, stages=3), {"cores": 3}),
    "high tiles": (overlap.Config(tile_m=256, tile_n=128, stages=2, order_minor="n"), {}),
    "low, wide tiles": (overlap.Config(tile_m=64, tile_n=256, stages=3), {"cores": 2}),
    "small chunks": (
        overlap.Config(tile_m=64, tile_n=128, stages=3, chunk_bytes=1024, chunk_buffers=3),
        {"cores": 3},
    ),
    "large chunks": (overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_bytes=65536, chunk_buffers=1), {}),
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
    config = overlap.Config(tile_m=64, tile_n=128, stages=2)
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
    arrays["lhs_scale"] = arrays["lhs_scale"][:, 0, 0]  # The same scales for all elements: [D, m, 1].
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
    """Devices along the other axis have other operands, so that a part from another peer group shows in the sum."""
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
    # Blocks have the same place as with `lax.psum_scatter`.
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


# --- With XLA ---------------------------------------------------------------------------------------------------------

BY_XLA = [  # The given operands, and the leading dimensions of lhs and rhs.
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
    # Sizes and a dtype that the fused kernel does not support.
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
        # jax 0.11 cannot compile a program whose sharded arguments are all empty.
        no_products = trace(struct(8, 0), struct(0, 8), dimension=ALONG.index(along))
        assert no_products.shape == ((4, 8) if along == "m" else (8, 4))


# --- Wider numbers ----------------------------------------------------------------------------------------------------


def test_the_same_bits_with_x64():
    layer = Layer("m", dtype=BF16, activation=lambda y: jnp.tanh(y * 0.5))
    arrays = {"lhs": normal(0, 48, 2 * 72), "rhs": normal(1, 2 * 72, 48)}
    in_float64 = {"lhs_scale": np.linspace(0.5, 1, 48)[None, :, None], "bias": np.linspace(-1, 1, 48)}
    results = []
    for is_on in (False, True):
        with jax.enable_x64(is_on), emulate(cores=2):
            results.append(layer.mapped(make_mesh(x=2), arrays, lambda arrays: layer(arrays | in_float64))(arrays))
    assert_exact(*results)
