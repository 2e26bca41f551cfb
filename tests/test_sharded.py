"""Operands sharded over a mesh outside of `shard_map`; `shard_map` over some axes only; nested `shard_map`."""

import functools
import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.emulation import emulate
from overlap.kernels import launch, target
from tests.explained import answer
from tests.product_cases import integers, oracle_of
from tests.sharded_cases import assert_near, make_mesh, put

CONFIG = overlap.Config(tile_n=64, stages=2)
M, N, K = 256, 256, 64


def fused(*operands, **keywords):
    return overlap.matmul(*operands, implementation="fused", config=CONFIG, **keywords)


@pytest.fixture
def h200(monkeypatch):
    """The chooser selects the kernel as for an H200; on CPU devices the kernel is then lowered for the emulator."""
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target.Target("gpu", "NVIDIA H200", 132))


# ---- Explicit axes ---------------------------------------------------------------------------------------------------

EXPLICIT = make_mesh(x=2, y=2)
CASES = {  # lhs, rhs, their specs, the result's spec
    "m": ((M, K), (K, N), P("x"), P(), P("x", None)),
    "m and n": ((M, K), (K, N), P("x"), P(None, "y"), P("x", "y")),
    "n along two axes": ((M, K), (K, N), P(), P(None, ("y", "x")), P(None, ("y", "x"))),
    "nothing": ((M, K), (K, N), P(), P(), P(None, None)),
    "batch of both": ((2, M, K), (2, K, N), P("x"), P("x"), P("x", None, None)),
    "batch of one, m of the other": ((2, M, K), (2, K, N), P(None, "y"), P("x"), P("x", "y", None)),
    "two batch dimensions": ((2, 2, M, K), (K, N), P("x", "y"), P(), P("x", "y", None, None)),
}


@pytest.mark.parametrize("name", CASES)
def test_each_device_computes_its_part(name):
    lhs_shape, rhs_shape, lhs_spec, rhs_spec, out_spec = CASES[name]
    lhs, rhs = put(EXPLICIT, integers(1, *lhs_shape), lhs_spec), put(EXPLICIT, integers(2, *rhs_shape), rhs_spec)
    with emulate(cores=2, detect_races=False) as run:
        out = jax.jit(fused)(lhs, rhs)
    assert jax.typeof(out).sharding.spec == out_spec
    np.testing.assert_array_equal(np.asarray(out), np.asarray(oracle_of(lhs, rhs).astype(out.dtype)))
    parts = math.prod(EXPLICIT.shape[axis] for part in out_spec if part for axis in part)
    batch = math.prod(max(lhs_shape[:-2], rhs_shape[:-2], key=len))
    tiles = batch * (M // CONFIG.tile_m) * (N // CONFIG.tile_n)
    # Only what the types call replicated is computed several times. Each tile is split between two warpgroups.
    assert run.counts["wgmmas"] == EXPLICIT.size * tiles // parts * 2 * (K // 64)


def everything(lhs, rhs, addend, bias, rows, columns, **keywords):
    return overlap.matmul(
        lhs, rhs, addend=addend, bias=bias, lhs_scale=rows, rhs_scale=columns, activation=jnp.tanh,
        preferred_element_type=jnp.float16, transpose_rhs=True, **keywords,
    )  # fmt: skip


@pytest.mark.parametrize("around", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_everything_that_a_product_may_have_with_gradients(around):
    """Whole operands are split like the others. NumPy arrays and arrays of one device count as whole."""
    operands = [
        put(EXPLICIT, integers(1, 2, M, K).astype(jnp.float16) * 0.1, P(None, "x")),
        put(EXPLICIT, integers(2, N, K).astype(jnp.float16) * 0.1, P("y")),
        put(EXPLICIT, integers(3, M, N).astype(jnp.float16), P(None, "y")),
        jnp.linspace(-1.0, 1.0, N),
        put(EXPLICIT, jnp.linspace(0.5, 1.0, M)[:, None], P()),
        put(EXPLICIT, jnp.linspace(0.5, 1.0, N), P("y")),
    ]

    def results(**keywords):
        def loss(operands):
            out = everything(*operands, **keywords)
            return (out.astype(jnp.float32) ** 2).sum(), out

        with jax.set_mesh(EXPLICIT):  # Without it, jax has no mesh for the gradient's own scalars outside of `jit`.
            return around(jax.value_and_grad(loss, has_aux=True))(operands)

    with emulate(cores=2, detect_races=False) as run:
        (_, out), gradients = results(implementation="fused", config=CONFIG)
    assert run.counts["launches"] > 0 and jax.typeof(out).sharding.spec == P(None, "x", "y")
    (_, expected), by_xla = results(implementation="xla")
    assert_near((out, gradients), (expected, by_xla))
    names = ("addend", "bias", "lhs_scale", "rhs_scale")
    rest = dict(zip(names, operands[2:], strict=True), transpose_rhs=True, activation=np.tanh)
    assert_near(out, oracle_of(*operands[:2], **rest))  # XLA's result would be wrong too if the split were.


REFUSED = {  # specs of lhs and rhs: error type, words of the message
    (P(None, "x"), P("x")): (ValueError, ["`lhs`", "`rhs`", "both", "k", "reshard", "shard_map"]),
    (P("x"), P(None, "x")): (ValueError, ["'x'", "m of `lhs`", "n of `rhs`", "reshard", "shard_map"]),
    (P(None, "x"), P()): (NotImplementedError, ["`lhs`", "k", "('x',)", "reshard", "xla"]),
    (P("x"), P("x")): (NotImplementedError, ["`rhs`", "k", "('x',)", "reshard", "xla"]),  # Weights are split (FSDP).
}


@pytest.mark.parametrize("specs", REFUSED, ids=str)
def test_what_would_need_communication_is_refused_with_the_way_out(specs):
    lhs, rhs = put(EXPLICIT, integers(1, M, K), specs[0]), put(EXPLICIT, integers(2, K, N), specs[1])
    error, fragments = REFUSED[specs]
    with pytest.raises(error) as caught:
        jax.eval_shape(fused, lhs, rhs)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value
    if error is ValueError:
        with pytest.raises(error, match=re.escape(str(caught.value))):
            jax.jit(overlap.matmul)(lhs, rhs)
    else:  # XLA can do this: it gathers that operand.
        np.testing.assert_array_equal(np.asarray(jax.jit(overlap.matmul)(lhs, rhs), np.float32), oracle_of(lhs, rhs))


def test_operands_that_are_cut_differently():
    lhs, rhs = put(EXPLICIT, integers(1, 2, M, K), P("x")), put(EXPLICIT, integers(2, 2, K, N), P("y"))
    with pytest.raises(ValueError, match=r"`lhs` and `rhs`.*leading dimension 0.*'x'.*'y'"):
        jax.eval_shape(fused, lhs, rhs)
    with pytest.raises(ValueError, match=rf"k={K}.*k={M}"):  # Sizes of the whole arrays, not of their parts.
        jax.eval_shape(fused, lhs, put(EXPLICIT, integers(2, 2, M, N), P("x")))
    lhs, rhs, rows = (
        put(EXPLICIT, integers(1, M, K), P("x")),
        integers(2, K, N),
        put(EXPLICIT, jnp.ones((M, 1)), P("y")),
    )
    with pytest.raises(ValueError, match=r"`lhs` and `lhs_scale`.*along m.*'x'.*'y'"):
        jax.eval_shape(lambda lhs, rows: overlap.matmul(lhs, rhs, lhs_scale=rows), lhs, rows)


def test_vmap_and_scan():
    lhs, rhs = put(EXPLICIT, integers(1, 2, M, K), P(None, "x")), put(EXPLICIT, integers(2, K, N), P(None, "y"))
    with emulate(cores=2, detect_races=False):
        out = jax.jit(jax.vmap(fused, (0, None)))(lhs, rhs)
        loop = jax.jit(lambda lhs, rhs: lax.scan(lambda carry, x: (carry, fused(x, rhs)), 0, lhs)[1])(lhs, rhs)
    assert jax.typeof(out).sharding.spec == jax.typeof(loop).sharding.spec == P(None, "x", "y")
    for result in (out, loop):
        np.testing.assert_array_equal(np.asarray(result, np.float32), oracle_of(lhs, rhs))


@pytest.mark.parametrize("mesh", [EXPLICIT, make_mesh(x=2)], ids=str)
def test_vmap_over_a_dimension_that_is_sharded(mesh):
    """jax does not reveal the axes of such a dimension."""
    lhs, rhs = put(mesh, integers(1, 2, M, K), P("x")), put(mesh, integers(2, K, N), P())
    with pytest.raises(NotImplementedError, match=r"`jax.vmap`.*\('x',\).*leading.*\"xla\""):
        jax.eval_shape(jax.vmap(fused, (0, None)), lhs, rhs)
    out = jax.jit(jax.vmap(overlap.matmul, (0, None)))(lhs, rhs)
    assert jax.typeof(out).sharding.spec == P("x", None, None)
    np.testing.assert_array_equal(np.asarray(out, np.float32), oracle_of(lhs, rhs))


def test_explain_is_about_the_part_of_a_device(h200):
    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float16, sharding=jax.NamedSharding(EXPLICIT, spec))

    rhs = struct((4096, 4096), P())
    part, whole = (
        answer(overlap.matmul, struct((m, 4096), spec), rhs, bias=struct((4096,), P()))
        for m, spec in ((8192, P("x")), (4096, P()))
    )
    assert part.implementation == "fused" and part == whole
    gathered = answer(overlap.matmul, struct((2048, 4096), P(None, "x")), rhs)
    assert gathered.implementation == "xla" and "`lhs`" in gathered.reason


def lowered_for_cuda(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_lowered_for_a_gpu(h200):
    lhs, rhs = (
        jax.ShapeDtypeStruct(shape, jnp.float16, sharding=jax.NamedSharding(EXPLICIT, spec))
        for shape, spec in (((2048, 4096), P("x")), ((4096, 4096), P(None, "y")))
    )
    text = lowered_for_cuda(fused, lhs, rhs)
    assert "mosaic_gpu" in text and "tensor<1024x2048xf16>" in text


# ---- Auto axes -------------------------------------------------------------------------------------------------------

AUTO = make_mesh(AxisType.Auto, x=2, y=2)


@pytest.mark.parametrize("around", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_kernel_is_not_replicated_in_silence(around):
    lhs, rhs = put(AUTO, integers(1, M, K), P("x")), put(AUTO, integers(2, K, N), P())
    message = r"program for 4 devices.*inside jax.shard_map.*\"xla\""
    with emulate(cores=2), pytest.raises(NotImplementedError, match=message):
        around(fused)(lhs, rhs)


def test_xla_takes_its_place_if_nobody_insists(h200, caplog):
    lhs, rhs = put(AUTO, integers(1, M, K), P("x")), put(AUTO, integers(2, K, N), P(None, "y"))
    bias = jnp.arange(float(N))

    def results(**keywords):
        def loss(lhs, rhs, bias):
            out = overlap.matmul(lhs, rhs, bias=bias, lhs_scale=0.5, activation=jnp.tanh, config=CONFIG, **keywords)
            return (out.astype(jnp.float32) ** 2).sum(), out

        text = lowered_for_cuda(lambda *operands: loss(*operands)[1], lhs, rhs, bias)
        assert "mosaic_gpu" not in text and "dot_general" in text
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(lhs, rhs, bias)

    launch._said.clear()
    with caplog.at_level(logging.WARNING, logger="overlap"):
        actual = results()
    assert any("program for 4 devices" in record.message for record in caplog.records)
    (_, out), _ = actual
    assert out.sharding.is_equivalent_to(jax.NamedSharding(AUTO, P("x", "y")), 2)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(results(implementation="xla")), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2)


def test_one_device_needs_no_shard_map(h200):
    text = lowered_for_cuda(overlap.matmul, *(jax.ShapeDtypeStruct((1024, 1024), jnp.float16),) * 2)
    assert "mosaic_gpu" in text


# ---- Some axes manual, others not ------------------------------------------------------------------------------------

OPS = {
    "matmul": (fused, P("x")),
    "pull": (functools.partial(overlap.all_gather_lhs_matmul, axis_name="x"), P(None, "x")),
    "weights": (functools.partial(overlap.all_gather_rhs_matmul, axis_name="x", dimension=1), P("x")),
}


def op(name, lhs, rhs, **keywords):
    keywords = {"implementation": "fused", "config": CONFIG} | keywords
    return OPS[name][0](lhs, rhs, **keywords) if name != "matmul" else overlap.matmul(lhs, rhs, **keywords)


def expected(name, lhs, rhs):
    """Returns the global result of a layer with rows over "x" and weights that are the same everywhere."""
    product = oracle_of(lhs, rhs)
    return product if name == "matmul" else np.tile(product, (1, 2))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("rest", [(AxisType.Auto, 1), (AxisType.Explicit, 2)], ids=str)
def test_partly_manual_where_nothing_is_left_to_the_partitioner(rest, check_vma, name):
    kind, size = rest
    mesh = make_mesh((kind, kind), x=2, y=size)
    lhs, rhs = put(mesh, integers(1, M, K), P("x")), put(mesh, integers(2, K, N), P())
    with jax.set_mesh(mesh), emulate(cores=2, detect_races=False):
        layer = jax.shard_map(
            functools.partial(op, name), in_specs=(P("x"), P()), out_specs=OPS[name][1], axis_names={"x"},
            check_vma=check_vma,
        )  # fmt: skip
        out = jax.jit(layer)(lhs, rhs)
    np.testing.assert_array_equal(
        np.asarray(out, np.float32), np.asarray(expected(name, lhs, rhs).astype(out.dtype), np.float32)
    )


@pytest.mark.parametrize("name", OPS)
def test_partly_manual_where_the_partitioner_has_axes(name):
    mesh = make_mesh(AxisType.Auto, x=2, y=2)
    layer = jax.shard_map(
        functools.partial(op, name), mesh=mesh, in_specs=(P("x"), P()), out_specs=OPS[name][1], axis_names={"x"}
    )
    operands = jax.ShapeDtypeStruct((M, K), jnp.bfloat16), jax.ShapeDtypeStruct((K, N), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r"\('y',\).*partitioner.*axis_names.*second jax.shard_map.*\"xla\""):
        jax.eval_shape(layer, *operands)


@pytest.mark.parametrize("name", ["pull", "weights"])
def test_partly_manual_with_operands_that_are_sharded_over_the_rest(name):
    mesh = make_mesh(x=2, y=2)
    layer = jax.shard_map(
        functools.partial(op, name), mesh=mesh, in_specs=(P("x"), P()), out_specs=OPS[name][1], axis_names={"x"}
    )
    operands = put(mesh, integers(1, M, K), P("x")), put(mesh, integers(2, K, N), P(None, "y"))
    with pytest.raises(NotImplementedError, match=r"`rhs` is sharded over \['y'\].*second jax.shard_map"):
        jax.eval_shape(layer, *operands)


def test_partly_manual_matmul_is_cut_along_the_rest():
    mesh = make_mesh(x=2, y=2)
    lhs, rhs = put(mesh, integers(1, M, K), P("x")), put(mesh, integers(2, K, N), P(None, "y"))
    with emulate(cores=2, detect_races=False):
        layer = jax.shard_map(fused, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
        out = jax.jit(layer)(lhs, rhs)
    assert jax.typeof(out).sharding.spec == P("x", "y")
    np.testing.assert_array_equal(np.asarray(out, np.float32), oracle_of(lhs, rhs))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", [*OPS, "cut along the rest"])
def test_partly_manual_gradients(name, check_vma):
    """Along "y" the operands are whole; or, for `matmul` with all keywords, n is split along "y"."""
    mesh = make_mesh(x=2, y=2)
    lhs = put(mesh, integers(1, M, K).astype(jnp.float16) * 0.1, P("x"))
    rhs = put(mesh, integers(2, K, N).astype(jnp.float16) * 0.1, P() if name in OPS else P(None, "y"))
    bias = put(mesh, jnp.linspace(-1.0, 1.0, N), P())

    def layer(lhs, rhs, bias, **keywords):
        if name in OPS:
            return op(name, lhs, rhs, **keywords)
        return overlap.matmul(lhs, rhs, bias=bias, activation=jnp.tanh, **keywords)

    def gradients(check_vma, axis_names, rhs_spec, bias_spec, out_spec, **keywords):
        mapped = jax.shard_map(
            functools.partial(layer, **keywords), mesh=mesh, in_specs=(P("x"), rhs_spec, bias_spec),
            out_specs=out_spec, axis_names=axis_names, check_vma=check_vma,
        )  # fmt: skip
        loss = lambda *operands: (mapped(*operands).astype(jnp.float32) ** 2).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1, 2)))(lhs, rhs, jax.reshard(bias, bias_spec))

    out_spec = OPS[name][1] if name in OPS else P("x")
    with jax.set_mesh(mesh):
        with emulate(cores=2, detect_races=False) as run:
            actual = gradients(check_vma, {"x"}, P(), P(), out_spec, implementation="fused", config=CONFIG)
        specs = (P(), P(), out_spec) if name in OPS else (P(None, "y"), P("y"), P("x", "y"))
        expected = gradients(True, {"x", "y"}, *specs, implementation="xla", config=None)
    assert run.counts["launches"] > 0
    assert_near(actual, expected)


# ---- One shard_map within another ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("axes", [("y", "x"), ("x", "y")], ids=str)
def test_nested(axes, kind, name):
    """The outer `shard_map` covers the first axis. Each device along "y" has its own weights; gathers run along "x"."""
    mesh = make_mesh(kind, x=2, y=2)
    lhs, rhs = put(mesh, integers(1, M, K), P("x")), put(mesh, integers(2, K, 2 * N), P(None, "y"))
    lhs_spec, rhs_spec = P("x"), P(None, "y")
    out_spec = P("x", "y") if name != "pull" else P(None, ("y", "x"))

    def only(spec, axis):
        kept = lambda part: tuple(a for a in (part if isinstance(part, tuple) else (part,)) if a == axis)  # noqa: E731
        return P(*((kept(part) or (None,))[0] for part in spec))

    def outer(lhs, rhs):
        inner = jax.shard_map(
            functools.partial(op, name), in_specs=(only(lhs_spec, axes[1]), only(rhs_spec, axes[1])),
            out_specs=only(out_spec, axes[1]), axis_names={axes[1]},
        )  # fmt: skip
        return inner(lhs, rhs)

    with jax.set_mesh(mesh), emulate(cores=2, detect_races=False) as run:
        layer = jax.shard_map(
            outer, in_specs=(only(lhs_spec, axes[0]), only(rhs_spec, axes[0])), out_specs=only(out_spec, axes[0]),
            axis_names={axes[0]},
        )  # fmt: skip
        out = np.asarray(jax.jit(layer)(lhs, rhs), np.float32)
    assert run.counts["launches"] == 1
    product = np.asarray(oracle_of(lhs, rhs).astype(jnp.bfloat16), np.float32)
    halves = product[:, :N], product[:, N:]
    if name == "matmul":
        np.testing.assert_array_equal(out, product)
    elif name == "weights":
        np.testing.assert_array_equal(out, np.concatenate([np.tile(half, (1, 2)) for half in halves], axis=1))
    else:
        order = [halves[0]] * 2 + [halves[1]] * 2 if axes[0] == "y" else [*halves, *halves]
        np.testing.assert_array_equal(out, np.concatenate(order, axis=1))


def test_gradients_within_another_shard_map():
    """Compared with XLA within one `shard_map` over both axes: jax cannot lower the gradient of the nested form."""
    mesh = make_mesh(AxisType.Auto, x=2, y=2)
    lhs = put(mesh, integers(1, M, K).astype(jnp.float16) * 0.1, P("x"))
    rhs = put(mesh, integers(2, K, N).astype(jnp.float16) * 0.1, P())

    def gradients(layer):
        loss = lambda lhs, rhs: (layer(lhs, rhs).astype(jnp.float32) ** 2).sum()  # noqa: E731
        with jax.set_mesh(mesh):
            return jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)

    def shifted(call, lhs, rhs):
        return call(lhs * (1 + lax.axis_index("y")).astype(lhs.dtype), rhs)

    inner = jax.shard_map(
        functools.partial(op, "pull"), mesh=None, in_specs=(P("x"), P()), out_specs=P(None, "x"), axis_names={"x"}
    )
    nested = jax.shard_map(
        functools.partial(shifted, inner), mesh=mesh, in_specs=P(), out_specs=P("y"), axis_names={"y"}
    )
    by_xla = functools.partial(op, "pull", implementation="xla", config=None)
    flat = jax.shard_map(functools.partial(shifted, by_xla), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("y", "x"))
    with emulate(cores=2, detect_races=False):
        assert_near(gradients(nested), gradients(flat))
