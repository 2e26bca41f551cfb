"""Operands whose types are sharded, outside of `shard_map` and inside one over some axes, and nested `shard_map`."""

import functools
import logging
import math

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
from overlap.sharded import partitions
from tests.layers.sharded_cases import answer, assert_near, assert_same, make_mesh, put, whole

CONFIG = overlap.Config(tile_n=64, stages=2)
M, N, K = 256, 128, 64
AUTO, EXPLICIT = make_mesh(AxisType.Auto, x=2, y=2), make_mesh(x=2, y=2)


def fused(*operands, **keywords):
    return overlap.matmul(*operands, implementation="fused", config=CONFIG, **keywords)


def drawn(mesh, *placed):
    """Draws integers in float16: all products and sums below are exact, and so are half of the cotangents."""
    return [put(mesh, whole(i, *shape, dtype=np.float16), spec) for i, (shape, spec) in enumerate(placed)]


def product(lhs, rhs):
    return np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)


@pytest.fixture
def h200(monkeypatch):
    """The chooser selects the kernel as for an H200; on CPU devices the kernel is then lowered for the emulator."""
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target.Target("gpu", "NVIDIA H200", 132))


# ---- Explicit axes ---------------------------------------------------------------------------------------------------

CASES = [  # lhs, rhs, their specs, the result's spec
    ((M, K), (K, N), P("x"), P(), P("x", None)),
    ((M, K), (K, N), P("x"), P(None, "y"), P("x", "y")),
    ((128, K), (K, 256), P(), P(None, ("y", "x")), P(None, ("y", "x"))),
    ((128, K), (K, 64), P(), P(), P(None, None)),
    ((2, 128, K), (2, K, 64), P("x"), P("x"), P("x", None, None)),
    ((2, M, K), (2, K, 64), P(None, "y"), P("x"), P("x", "y", None)),
    ((2, 2, 128, K), (K, 64), P("x", "y"), P(), P("x", "y", None, None)),
]


def test_each_device_computes_its_part():
    """All cases in one program. The count of `wgmma` says that only what types call replicated is computed twice."""
    operands = [drawn(EXPLICIT, (lhs, of_lhs), (rhs, of_rhs)) for lhs, rhs, of_lhs, of_rhs, _ in CASES]
    with emulate(cores=2, detect_races=False) as run:
        outs = jax.jit(lambda operands: [fused(*given) for given in operands])(operands)
    count = 0
    for (lhs, rhs, *_, spec), given, out in zip(CASES, operands, outs, strict=True):
        assert jax.typeof(out).sharding.spec == spec
        assert_same(out, product(*given))
        parts = math.prod(EXPLICIT.shape[axis] for part in spec if part for axis in part)
        tiles = math.prod(max(lhs[:-2], rhs[:-2], key=len)) * (lhs[-2] // 128) * (rhs[-1] // 64)
        count += EXPLICIT.size * tiles // parts * 2 * (K // 64)  # Each tile is split between two warpgroups.
    assert run.counts["wgmmas"] == count


def everything(lhs, rhs, addend, bias, rows, columns, **keywords):
    return overlap.matmul(
        lhs, rhs, addend=addend, bias=bias, lhs_scale=rows, rhs_scale=columns, activation=jnp.tanh,
        preferred_element_type=jnp.float16, transpose_rhs=True, **keywords,
    )  # fmt: skip


def test_everything_that_a_product_may_have_with_gradients():
    """Whole operands are split like the others. NumPy arrays and arrays of one device count as whole."""
    lhs, rhs, addend = (whole(i, *s, dtype=np.float16) for i, s in enumerate(((2, M, K), (N, K), (M, N))))
    bias, rows, columns = np.linspace(-1, 1, N), np.linspace(0.5, 1, M)[:, None], np.linspace(0.5, 1, N)
    operands = [
        put(EXPLICIT, lhs * np.float16(0.1), P(None, "x")), put(EXPLICIT, rhs * np.float16(0.1), P("y")),
        put(EXPLICIT, addend, P(None, "y")), jnp.asarray(bias, jnp.float32),
        put(EXPLICIT, rows.astype(np.float32), P()), put(EXPLICIT, columns.astype(np.float32), P("y")),
    ]  # fmt: skip

    def results(**keywords):
        def loss(operands):
            out = everything(*operands, **keywords)
            return (out.astype(jnp.float32) ** 2).sum(), out

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)

    with emulate(cores=2, detect_races=False) as run:
        (_, out), gradients = results(implementation="fused", config=CONFIG)
        eager = everything(*operands, implementation="fused", config=CONFIG)
    assert run.counts["launches"] > 0 and jax.typeof(out).sharding.spec == P(None, "x", "y")
    (_, by_xla), of_xla = results(implementation="xla")
    assert_near((out, gradients), (by_xla, of_xla))
    exact = np.tanh(product(operands[0], np.asarray(operands[1]).T) * rows * columns + bias + addend)
    assert_near((out, eager), (exact, exact))  # XLA's result would be wrong too if the split were.


def test_several_right_operands_and_axes_of_one_device():
    """The operands of an activation of two arrays are cut alike. An axis of one device cuts nothing, not even k."""
    lhs, *rhs = drawn(EXPLICIT, ((M, K), P("x")), *[((K, 2 * N), P(None, "y"))] * 2)
    single = drawn(make_mesh(x=1), ((M, K), P(None, "x")), ((K, N), P("x")))
    with emulate(cores=2, detect_races=False):
        out = overlap.matmul(lhs, rhs, activation=lambda a, b: a - 2 * b, implementation="fused")
        assert_same(fused(*single), product(*single))
    assert jax.typeof(out).sharding.spec == P("x", "y")
    assert_same(out, product(lhs, rhs[0]) - 2 * product(lhs, rhs[1]))


REFUSED = [  # specs of lhs and rhs, the exception, its message
    (P(None, "x"), P("x"), ValueError, "`lhs`.*`rhs`.*both.*k.*reshard.*shard_map"),
    (P("x"), P(None, "x"), ValueError, "'x'.*m of `lhs`.*n of `rhs`.*reshard.*shard_map"),
    (P(None, "x"), P(), NotImplementedError, r"all of k.*`lhs`.*\('x',\).*reshard.*xla"),
    (P("x"), P("x"), NotImplementedError, r"all of k.*`rhs`.*\('x',\).*reshard.*xla"),  # Weights are split (FSDP).
]


def test_what_would_need_communication_is_refused_with_the_way_out():
    for of_lhs, of_rhs, error, message in REFUSED:
        lhs, rhs = drawn(EXPLICIT, ((M, K), of_lhs), ((K, N), of_rhs))
        with pytest.raises(error, match=message):
            jax.eval_shape(fused, lhs, rhs)
        if error is ValueError:
            with pytest.raises(error, match=message):
                jax.eval_shape(overlap.matmul, lhs, rhs)
        else:  # XLA can do this: it gathers that operand.
            assert_same(jax.jit(overlap.matmul)(lhs, rhs), product(lhs, rhs))

    # Operands that are cut differently.
    for shapes, message, keyword in (
        ([((2, M, K), P("x")), ((2, K, N), P("y"))], r"`lhs` and `rhs`.*leading dimension 0.*'x'.*'y'", None),
        # Sizes of the whole arrays, not of their parts.
        ([((2, M, K), P("x")), ((2, M, N), P("x"))], rf"k={K}.*k={M}", None),
        ([((M, K), P("x")), ((K, N), P()), ((M, 1), P("y"))], r"`lhs` and `lhs_scale`.*along m.*'x'.*'y'", "lhs_scale"),
    ):
        lhs, rhs, *rest = drawn(EXPLICIT, *shapes)
        more = {keyword: rest[0].astype(jnp.float32)} if keyword else {}
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(overlap.matmul, implementation="fused"), lhs, rhs, **more)


def test_vmap_and_scan():
    """jax does not reveal the axes of a dimension that is sharded and mapped by `jax.vmap`."""
    lhs, rhs = drawn(EXPLICIT, ((2, M, K), P(None, "x")), ((K, N), P(None, "y")))

    def both(lhs, rhs):
        return jax.vmap(fused, (0, None))(lhs, rhs), lax.scan(lambda carry, x: (carry, fused(x, rhs)), 0, lhs)[1]

    with emulate(cores=2, detect_races=False):
        outs = jax.jit(both)(lhs, rhs)
    for out in outs:
        assert jax.typeof(out).sharding.spec == P(None, "x", "y")
        assert_same(out, product(lhs, rhs))

    for mesh in (EXPLICIT, make_mesh(x=2)):
        lhs, rhs = drawn(mesh, ((2, M, K), P("x")), ((K, N), P()))
        with pytest.raises(NotImplementedError, match=r"`jax.vmap`.*\('x',\).*leading.*\"xla\""):
            jax.eval_shape(jax.vmap(fused, (0, None)), lhs, rhs)
    out = jax.jit(jax.vmap(overlap.matmul, (0, None)))(lhs, rhs)
    assert jax.typeof(out).sharding.spec == P("x", None, None)
    assert_same(out, product(lhs, rhs))


def lowered_for_cuda(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_explain_and_lowering_are_about_the_part_of_a_device(h200):
    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float16, sharding=jax.NamedSharding(EXPLICIT, spec))

    rhs = struct((4096, 4096), P())
    part, all_of_it = (
        answer(overlap.matmul, struct((m, 4096), spec), rhs, bias=struct((4096,), P()))
        for m, spec in ((8192, P("x")), (4096, P()))
    )
    assert part.implementation == "fused" and part == all_of_it
    gathered = answer(overlap.matmul, struct((2048, 4096), P(None, "x")), rhs)
    assert gathered.implementation == "xla" and "`lhs`" in gathered.reason
    text = lowered_for_cuda(fused, struct((2048, 4096), P("x")), struct((4096, 4096), P(None, "y")))
    assert "mosaic_gpu" in text and "tensor<1024x2048xf16>" in text
    # One device needs no `shard_map`.
    assert "mosaic_gpu" in lowered_for_cuda(overlap.matmul, *(jax.ShapeDtypeStruct((1024, 1024), jnp.float16),) * 2)


# ---- Auto axes -------------------------------------------------------------------------------------------------------


def test_a_kernel_is_not_replicated_in_silence_and_xla_takes_its_place_if_nobody_insists(h200, caplog):
    lhs, rhs = drawn(AUTO, ((M, K), P("x")), ((K, N), P(None, "y")))

    def layer(lhs, rhs):
        bias = jnp.arange(float(N))
        return overlap.matmul(lhs, rhs, bias=bias, lhs_scale=0.5, activation=jax.nn.relu, config=CONFIG)

    def results(lhs, rhs):
        out, back = jax.vjp(layer, lhs, rhs)
        return out, back(jnp.ones_like(out))

    for around in (jax.jit, lambda f: f):
        message = r"program for 4 devices.*inside jax.shard_map.*\"xla\""
        with emulate(cores=2), pytest.raises(NotImplementedError, match=message):
            around(fused)(lhs, rhs)
    text = lowered_for_cuda(layer, lhs, rhs)
    assert "mosaic_gpu" not in text and "dot_general" in text
    launch._said.clear()
    with caplog.at_level(logging.WARNING, logger="overlap"):
        out, gradients = jax.jit(results)(lhs, rhs)
    assert any("program for 4 devices" in record.message for record in caplog.records)
    assert out.sharding.is_equivalent_to(jax.NamedSharding(AUTO, P("x", "y")), 2)
    z = product(lhs, rhs) * 0.5 + np.arange(N)
    slope = (z > 0) * 0.5
    assert_near((out, gradients), (np.maximum(z, 0), (product(slope, rhs.T), product(lhs.T, slope))), 1e-3)


# ---- Some axes manual, others not ------------------------------------------------------------------------------------

OPS = {
    "matmul": (overlap.matmul, P("x")),
    "pull": (functools.partial(overlap.all_gather_lhs_matmul, axis_name="x"), P(None, "x")),
    "weights": (functools.partial(overlap.all_gather_rhs_matmul, axis_name="x", dimension=1), P("x")),
}


def op(name, lhs, rhs, **keywords):
    return OPS[name][0](lhs, rhs, **{"implementation": "fused", "config": CONFIG} | keywords)


PARTLY = [  # An operation, the rest of the mesh, check_vma, the partition of `rhs`
    ("matmul", AxisType.Auto, 1, True, P()),
    ("pull", AxisType.Explicit, 2, False, P()),
    ("weights", AxisType.Explicit, 2, True, P()),
    ("matmul", AxisType.Explicit, 2, False, P(None, "y")),  # Cut along the rest.
    *((name, AxisType.Auto, 1, False, P()) for name in OPS),
    *((name, AxisType.Explicit, 2, name != "weights", P()) for name in OPS),
]


@pytest.mark.parametrize(
    "case", [case if i < 4 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(PARTLY)], ids=str
)
def test_partly_manual(case):
    """Values and gradients where nothing is left to the partitioner. Operands are whole along "y", or n is cut."""
    name, kind, size, check_vma, rhs_spec = case
    mesh = make_mesh((kind, kind), x=2, y=size)
    lhs, rhs = drawn(mesh, ((M, K), P("x")), ((K, N), rhs_spec))
    bias = np.arange(N, dtype=np.float16) % 5 if rhs_spec != P() else np.zeros(N, np.float16)

    def layer(lhs, rhs):
        return op(name, lhs, rhs, **{"bias": bias.astype(np.float32), "activation": jax.nn.relu} if bias.any() else {})

    mapped = jax.shard_map(
        layer, mesh=mesh, in_specs=(P("x"), P()), out_specs=OPS[name][1], axis_names={"x"}, check_vma=check_vma
    )

    def loss(lhs, rhs):
        out = mapped(lhs, rhs)
        return (out.astype(jnp.float32) ** 2).sum() / 64, out

    with jax.set_mesh(mesh), emulate(cores=2, detect_races=False) as run:
        (_, out), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(lhs, rhs)
    assert run.counts["launches"] > 0
    exact = product(lhs, rhs) + bias
    exact, copies = (np.maximum(exact, 0), 1) if bias.any() else (exact, 1 if name == "matmul" else 2)
    assert_same(out, np.tile(exact, (1, copies)))
    assert rhs_spec == P() or jax.typeof(out).sharding.spec == P("x", "y")
    cotangent = copies * exact / 32
    assert_near(gradients, (product(cotangent, np.asarray(rhs).T), product(np.asarray(lhs).T, cotangent)), 2e-3)


def test_partly_manual_where_operands_are_sharded_over_the_rest():
    for name, mesh, rhs_spec, message in (
        *((name, AUTO, P(), r"\('y',\).*partitioner.*axis_names.*second jax.shard_map.*\"xla\"") for name in OPS),
        *((name, EXPLICIT, P(None, "y"), r"`rhs` is sharded over \['y'\].*second jax.shard_map")
          for name in ("pull", "weights")),
    ):  # fmt: skip
        layer = functools.partial(op, name)
        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(P("x"), P()), out_specs=OPS[name][1], axis_names={"x"})
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(mapped, *drawn(mesh, ((M, K), P("x")), ((K, N), rhs_spec)))


# ---- One shard_map within another ------------------------------------------------------------------------------------

NESTED = [("matmul", AxisType.Auto, "yx"), ("pull", AxisType.Explicit, "xy"), ("weights", AxisType.Auto, "xy")]
NESTED += [(name, kind, axes) for name in OPS for kind in (AxisType.Auto, AxisType.Explicit) for axes in ("yx", "xy")]


@pytest.mark.parametrize(
    "case", [case if i < 3 else pytest.param(case, marks=pytest.mark.slow) for i, case in enumerate(NESTED)], ids=str
)
def test_nested(case):
    """The outer `shard_map` covers the first axis. Each device along "y" has its own weights; gathers run along "x"."""
    name, kind, axes = case
    mesh = make_mesh(kind, x=2, y=2)
    lhs, rhs = drawn(mesh, ((M, K), P("x")), ((K, 2 * N), P(None, "y")))
    specs = P("x"), P(None, "y"), P("x", "y") if name != "pull" else P(None, ("y", "x"))

    def along(axis, function):
        only = [P(*(axis if part and axis in part else None for part in spec)) for spec in specs]
        return jax.shard_map(function, in_specs=tuple(only[:2]), out_specs=only[2], axis_names={axis})

    def outer(lhs, rhs):
        return along(axes[1], functools.partial(op, name))(lhs, rhs)

    with jax.set_mesh(mesh), emulate(cores=2, detect_races=False) as run:
        out = jax.jit(along(axes[0], outer))(lhs, rhs)
    assert run.counts["launches"] == 1
    left, right = np.split(product(lhs, rhs), 2, 1)
    order = {"matmul": (left, right), "weights": (left, left, right, right)}.get(
        name, (left, left, right, right) if axes == "yx" else (left, right, left, right)
    )
    assert_same(out, np.concatenate(order, axis=1))


def test_gradients_within_another_shard_map():
    lhs, rhs = drawn(AUTO, ((M, K), P("x")), ((K, N), P()))

    def shifted(lhs, rhs):
        inner = jax.shard_map(
            functools.partial(op, "pull"), in_specs=(P("x"), P()), out_specs=P(None, "x"), axis_names={"x"}
        )
        return inner(lhs * (1 + lax.axis_index("y")).astype(lhs.dtype), rhs)

    layer = jax.shard_map(shifted, mesh=AUTO, in_specs=P(), out_specs=P("y"), axis_names={"y"})
    with emulate(cores=2, detect_races=False), jax.set_mesh(AUTO):
        loss = lambda lhs, rhs: (layer(lhs, rhs).astype(jnp.float32) ** 2).sum() / 64  # noqa: E731
        found = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    # Each of two devices along "x" has the product, with factors 1 and 2 along "y".
    cotangent = 2 * (1 + 2**2) * product(lhs, rhs) / 32
    assert_near(found, (product(cotangent, np.asarray(rhs).T), product(np.asarray(lhs).T, cotangent)), 2e-3)


def test_an_integer_beside_the_result_within_another_shard_map():
    """Without `check_vma`, devices share the cotangents of results that they all have; an integer has none."""

    def outer(x):
        of_parts = lambda parts: (lax.psum((parts["x"] ** 2).sum(), "x"), jnp.int32(1))  # noqa: E731
        return partitions.on_parts(of_parts, jax.sharding.get_abstract_mesh(), {"x": P("x")}, P())({"x": x})[0]

    mapped = jax.shard_map(outer, mesh=EXPLICIT, in_specs=P(), out_specs=P(), axis_names={"y"}, check_vma=False)
    with jax.set_mesh(EXPLICIT):
        found = jax.jit(jax.grad(mapped))(jax.device_put(jnp.arange(4.0), P("x")))
    np.testing.assert_array_equal(found, 2 * np.arange(4))
