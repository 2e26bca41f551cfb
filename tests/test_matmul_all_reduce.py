"""Both forms of `matmul_all_reduce`: emulated on CPU devices (numerics, bits, meshes, types), and with XLA.

`test_scatter_*.py` tests what it has in common with `matmul_reduce_scatter`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from overlap.emulation import emulate
from tests import oracle
from tests.oracle import make_mesh
from tests.product_cases import normal
from tests.scatter_cases import BF16, EVERY, EVERYWHERE, F16, F32, SMALL, Layer, assert_exact, check
from tests.test_matmul_reduce_scatter import BY_XLA, KEYWORDS, LAYOUTS, SETTINGS

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ONCE = SMALL.replace(one_shot=True)
# Each device sums a block of rows or of columns, or the whole result.
FORMS = ["rows", "columns", "one shot"]


def shape(form, devices, rows=24, columns=40, *, odd=True):
    """m and n of a result of which each device sums `rows` × `columns`; `columns`: 8 times a prime number.

    For blocks of columns, `odd` adds one row, so that the devices cannot split the rows.
    """
    if form == "columns":
        return rows + (odd and rows % devices == 0), columns * devices
    return rows * (devices if form == "rows" else 1), columns


def check_form(form, layer, mesh, arrays, *, config=SMALL, **settings):
    """Runs `check`, and asserts that the kernel uses this form."""
    result = check(layer, mesh, arrays, config=config.replace(one_shot=form == "one shot"), **settings)
    blocks = layer.blocks(*result.shape[-2:], mesh.size, arrays["lhs"].dtype)
    assert mesh.size == 1 or form == "one shot" or form == {"m": "rows", "n": "columns"}[blocks]
    return result


# --- The kernel, exact, on all devices --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "form"),
    [
        (1, "rows"),
        (2, "rows"),
        (3, "columns"),
        (4, "rows"),
        (8, "columns"),
        *((n, "one shot") for n in (1, 2, 3, 4, 8)),
    ],
)
def test_exact_on_any_number_of_devices(devices, form):
    layer = Layer(EVERYWHERE, dtype=BF16 if devices % 2 else F32)
    given = layer.integers(devices, *shape(form, devices, 8), 72)
    check_form(form, layer, make_mesh(x=devices), given, seed=devices)


@pytest.mark.parametrize(
    ("left", "right", "form"),
    [
        (False, True, "rows"),
        (True, False, "columns"),
        pytest.param(True, True, "columns", marks=pytest.mark.slow),
        (False, True, "one shot"),
        (True, False, "one shot"),
        (True, True, "one shot"),
    ],
)
def test_layouts(left, right, form):
    layer = Layer(EVERYWHERE, transpose_lhs=left, transpose_rhs=right)
    # For a transposed right operand, 4 columns of float32 are a block.
    given = layer.integers(2, *shape(form, 2, 72, 68 if form == "rows" else 40, odd=False), 72)
    check_form(form, layer, make_mesh(x=2), given)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("many cores", "columns", marks=pytest.mark.slow),
        ("one CTA at a time", "rows"),
        ("wide tiles", "one shot"),
        pytest.param("high tiles", "one shot", marks=pytest.mark.slow),
        ("small chunks", "rows"),
        pytest.param("large chunks", "columns", marks=pytest.mark.slow),
    ],
)
def test_ragged_tiles_whatever_the_configuration_and_the_schedule(name, form):
    config, settings = SETTINGS[name]
    layer, devices = Layer(EVERYWHERE), 2 + len(name) % 2
    given = layer.integers(devices, *shape(form, devices, 136, 136), 72)
    check_form(form, layer, make_mesh(x=devices), given, config=config, **settings)


@pytest.mark.parametrize("form", FORMS)
def test_one_row_or_a_few_columns_for_each_device(form):
    layer = Layer(EVERYWHERE, dtype=F16)
    check_form(form, layer, make_mesh(x=3), layer.integers(3, *shape(form, 3, 1, 8), 8, dtype=F16))


def test_rows_of_one_warpgroup_alone():
    """The other warpgroup has no rows of the tile to compute or to send."""
    layer = Layer(EVERYWHERE, dtype=BF16, activation=jax.nn.relu)
    for m in (1, 72):
        config = SMALL.replace(tile_m=128, tile_n=64)
        check_form("one shot", layer, make_mesh(x=2), layer.integers(2, m, 72, 24, extras=("bias",)), config=config)


@pytest.mark.parametrize(("kinds", "form"), [((E4M3, E4M3), "columns"), ((E5M2, E4M3), "one shot")])
def test_float8_with_scales_of_each_device(kinds, form):
    layer = Layer(EVERYWHERE, transpose_rhs=True, dtype=F32 if kinds[0] == E4M3 else BF16)
    arrays = layer.integers(2, *shape(form, 2), 144, extras=("lhs_scale", "rhs_scale"))
    arrays |= {name: arrays[name].astype(kind) for name, kind in zip(("lhs", "rhs"), kinds, strict=True)}
    check_form(form, layer, make_mesh(x=2), arrays, config=SMALL)


# `test_keywords.py` tests these with blocks of columns.
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param("bias", "rows", marks=pytest.mark.slow),
        ("addend", "one shot"),
        *(("all", form) for form in FORMS),
    ],
)
def test_keywords(name, form):
    extras, activation = KEYWORDS[name]
    layer, devices = Layer(EVERYWHERE, activation=activation), 3 if name == "all" else 2
    check_form(form, layer, make_mesh(x=devices), layer.integers(devices, *shape(form, devices), 24, extras=extras))


@pytest.mark.parametrize("form", ["rows", "one shot"])
def test_leading_dimensions(form):
    layer = Layer(EVERYWHERE, transpose_lhs=form == "rows", activation=jax.nn.relu)
    arrays = layer.integers(2, *shape(form, 2, 72), 24, lead=(1, 2), extras=(*EVERY, "addend"))
    assert check_form(form, layer, make_mesh(x=2), arrays).shape == (1, 2, *shape(form, 2, 72))


# --- Rounding, and bits -----------------------------------------------------------------------------------------------


def test_leading_dimensions_are_more_rows():
    """One token of each of 24 sequences takes as many products as 24 tokens of one sequence."""
    layer, mesh, work = Layer(EVERYWHERE), make_mesh(x=2), []
    for lead, m in (((), 24), ((24,), 1), ((4, 3), 2)):
        arrays = layer.integers(2, m, 40, 24, lead=lead, extras=("lhs_scale", "rhs_scale"))
        mapped = layer.mapped(mesh, arrays, lambda arrays: layer(arrays, config=ONCE))
        with emulate(cores=2) as run:
            assert_exact(mapped(arrays), layer.expected(arrays, 2, one_shot=True))
        work.append(run.counts["wgmmas"])
    assert work[0] == work[1] == work[2]


@pytest.mark.parametrize(("dtype", "form"), [(BF16, "rows"), (F16, "one shot")])
def test_parts_are_rounded_once_before_they_travel(dtype, form):
    """In one shot all devices sum, and round their own parts too, for the same bits; in blocks only peers' parts."""
    arrays = (layer := Layer(EVERYWHERE, dtype=dtype)).integers(3, *shape(form, 3), 72, dtype=dtype)
    arrays["lhs"] = arrays["lhs"] * (37 if dtype == BF16 else 301)
    check_form(form, layer, make_mesh(x=3), arrays)
    others = [layer.expected(arrays, 3, one_shot=one_shot) for one_shot in (False, True)]
    others.append(Layer(EVERYWHERE).expected(arrays, 3).astype(dtype))
    assert all(np.any(others[i] != others[j]) for i, j in ((0, 1), (1, 2), (0, 2)))


@pytest.mark.parametrize(("devices", "dtype", "form"), [(4, BF16, "one shot"), (2, F16, "columns")])
def test_error_within_twice_the_unfused_product(devices, dtype, form):
    mesh, layer = make_mesh(x=devices), Layer(EVERYWHERE, dtype=dtype)
    m, n = shape(form, devices, 64, 72)
    arrays = {"lhs": normal(0, m, 128 * devices, dtype=dtype), "rhs": normal(1, 128 * devices, n, dtype=dtype)}
    config = ONCE if form == "one shot" else SMALL

    def unfused(arrays):
        return oracle.rounded(lax.psum(arrays["lhs"] @ arrays["rhs"], "x"))

    def measure(arrays):
        exact = Layer(EVERYWHERE).plain(arrays)
        both = layer(arrays, config=config), unfused(arrays)
        return tuple(oracle.worst(oracle.distance(out, exact), mesh) for out in both)

    with emulate(cores=2):
        oracle.assert_close(layer.mapped(mesh, arrays, measure, (P(), P()))(arrays))


@pytest.mark.parametrize("form", ["rows", "one shot"])
def test_all_devices_and_all_launches_agree_bit_for_bit(form):
    layer, (m, n) = Layer(EVERYWHERE, dtype=F16, activation=jax.nn.gelu), shape(form, 3, 40, 136)
    arrays = {"lhs": normal(0, m, 3 * 72, dtype=F16), "rhs": normal(1, 3 * 72, n, dtype=F16)}
    config = ONCE if form == "one shot" else SMALL
    call = layer.mapped(make_mesh(x=3), arrays, lambda arrays: layer(arrays, config=config)[None], P("x"))
    results = []
    for seed, completion, cores in ((0, "late", 3), (1, "eager", 3), (2, "random", 7)):
        with emulate(cores=cores, seed=seed, completion=completion):
            results.extend(np.asarray(call(arrays)))
    assert len(results) == 9 and all((result == results[0]).all() for result in results)


# --- Meshes and types -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("over", "form"), [("cluster", "one shot"), ("warpgroup", "rows")])
def test_one_axis_of_a_larger_mesh_whatever_the_axes_are_called(over, form):
    """Devices along the other axis have other operands, so that a part from another peer group shows in the sum."""
    mesh, layer = make_mesh(cluster=2, warpgroup=2), Layer(EVERYWHERE, axis=over)
    (other,), config = {"cluster", "warpgroup"} - {over}, ONCE if form == "one shot" else SMALL
    arrays = layer.integers(2, *shape(form, 2), 24)

    def body(arrays):
        factor = (1 + lax.axis_index(other)).astype(arrays["lhs"].dtype)
        return layer(arrays | {"lhs": arrays["lhs"] * factor}, config=config)[None, None]

    with emulate(cores=2, seed=1):
        result = layer.mapped(mesh, arrays, body, P(other, over))(arrays)
    for index in range(2):
        exact = layer.expected(arrays | {"lhs": arrays["lhs"] * (1 + index)}, 2, one_shot=form == "one shot")
        assert_exact(result[index], np.broadcast_to(exact, (2, *exact.shape)))


@pytest.mark.parametrize(("case", "form"), [(LAYOUTS[1], "columns"), (LAYOUTS[3], "one shot")], ids=str)
def test_tuples_of_axes_and_permuted_devices(case, form):
    layer = Layer(EVERYWHERE, axis=case.over)
    check_form(form, layer, case.mesh(), layer.integers(case.size, *shape(form, case.size, 8), 24, extras=EVERY))


@pytest.mark.parametrize("form", ["rows", "one shot"])
def test_in_a_loop_with_operands_that_change(form):
    layer, config = Layer(EVERYWHERE), ONCE if form == "one shot" else SMALL
    arrays = layer.integers(3, *shape(form, 3), 72)

    def body(arrays):
        def step(arrays, _):
            wrong = jnp.any(layer(arrays, config=config) != layer.plain(arrays))
            moved = {"lhs": jnp.roll(-arrays["lhs"], 1, 1), "rhs": jnp.roll(arrays["rhs"], 1, 1)}
            return moved, lax.pmax(wrong, "x")  # Right after the kernel.

        return lax.scan(step, arrays, length=4)[1]

    with emulate(cores=3):
        assert not np.asarray(layer.mapped(make_mesh(x=3), arrays, body, P())(arrays)).any()


@pytest.mark.parametrize("config", [SMALL, ONCE], ids=["blocks", "one shot"])
def test_the_result_is_typed_as_the_same_on_all_devices(config):
    layer = Layer(EVERYWHERE)
    arrays = layer.integers(2, 16, 40, 24, extras=(*EVERY, "addend"))

    def typed(arrays):
        out = layer(arrays, config=config)
        assert not jax.typeof(out).manual_axis_type.varying
        return out

    with emulate(cores=2):
        result = layer.mapped(make_mesh(x=2), arrays, typed, P(), check_vma=True)(arrays)
    assert_exact(result, layer.expected(arrays, 2, one_shot=config.one_shot))


@pytest.mark.parametrize("name", ["bias", "addend", "activation"])
def test_what_differs_by_its_type_is_refused_by_the_kernel_and_served_by_xla(name):
    layer = Layer(EVERYWHERE)
    arrays = layer.integers(2, 16, 40, 24, extras=("bias", "addend"))

    def call(implementation):
        def body(arrays):
            place = lax.axis_index("x").astype(F32)
            given = {} if name == "activation" else {name: arrays[name] + place.astype(arrays[name].dtype)}
            activation = (lambda y: y * (1 + place)) if name == "activation" else None
            return Layer(EVERYWHERE, activation=activation)(arrays | given, implementation)[None]

        return layer.mapped(make_mesh(x=2), arrays, body, P("x"), check_vma=True)(arrays)

    with pytest.raises(NotImplementedError, match=rf"`{name}`.*varies along 'x'.*xla") as refused:
        call("fused")
    assert "to be the same on all devices" in str(refused.value)
    exact = layer.expected(arrays, 2)
    assert_exact(call(None), np.stack([exact, 2 * exact if name == "activation" else exact + 1]))


# --- With XLA ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("extras", "lead", "rhs_lead"), BY_XLA[2:4])
def test_by_xla_with_every_keyword(extras, lead, rhs_lead):
    transposed, activation = len(extras) > 2, jax.nn.relu if "bias" in extras else None
    layer = Layer(EVERYWHERE, transpose_lhs=transposed, transpose_rhs=transposed, activation=activation)
    # Sizes and a dtype that the fused kernel does not support.
    arrays = layer.integers(2, 10, 6, 5, extras=extras, lead=lead, rhs_lead=rhs_lead, dtype=F32)
    check(layer, make_mesh(x=2), arrays, implementation="xla" if lead else None)


def test_by_xla_in_other_dtypes_and_with_nothing_to_multiply():
    for dtype, out_dtype in ((F32, F32), (BF16, BF16), (E4M3, BF16), (F16, F32)):
        layer = Layer(EVERYWHERE, dtype=jnp.dtype(out_dtype))
        check(layer, make_mesh(x=2), layer.integers(2, 10, 6, 5, dtype=dtype), implementation="xla")
    for m, n in ((0, 8), (8, 0)):
        check(layer, make_mesh(x=2), layer.integers(2, m, n, 8), implementation=None)


# --- Wider numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, ONCE], ids=["blocks", "one shot"])
def test_the_same_bits_with_x64(config):
    layer = Layer(EVERYWHERE, dtype=BF16, activation=lambda y: jnp.tanh(y * 0.5))
    arrays = {"lhs": normal(0, 48, 2 * 72), "rhs": normal(1, 2 * 72, 48)}
    in_float64 = {"lhs_scale": np.linspace(0.5, 1, 48)[None, :, None], "bias": np.linspace(-1, 1, 48)}
    results = []
    for is_on in (False, True):
        with jax.enable_x64(is_on), emulate(cores=2):
            call = lambda arrays: layer(arrays | in_float64, config=config)  # noqa: E731
            results.append(layer.mapped(make_mesh(x=2), arrays, call)(arrays))
    assert_exact(*results)


def test_a_configuration_of_one_shot_means_nothing_elsewhere():
    layer = Layer("m")
    check(layer, make_mesh(x=2), layer.integers(2, 16, 40, 24), config=ONCE)
