"""Numbers of every operation in every form: each bit against NumPy, and real numbers within twice the rounding.

Operands are small integers, whose sums are exact, and NumPy rounds what the kernel rounds. So one k step too many, a
row from another device or a missing rounding shows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives import communicator
from overlap.emulation import EmulationError
from overlap.kernels.target import emulating
from tests import oracle
from tests.ops import numbers_cases
from tests.ops.contract import (
    BF16,
    F16,
    F32,
    FORMS,
    SMALL,
    Call,
    assert_exact,
    check,
    mesh_of,
    put,
    running,
)
from tests.ops.numbers_cases import FEW, GATHERS, SUMS, TRANSPOSED, WEIGHTS, by_either, summed

slow = pytest.mark.slow
OFTEN = ("matmul", "pull", "joined", "ring", "weights k", "scatter n", "one shot")


@pytest.mark.parametrize(("devices", "cores", "call"), by_either(GATHERS) + TRANSPOSED)
def test_gathered_rows(devices, cores, call):
    check(call, devices, cores=cores, seed=cores, completions=(("late", "random")[cores % 2],))


@pytest.mark.parametrize(("devices", "cores", "call"), FEW, ids=str)
def test_few_gathered_rows(devices, cores, call):
    check(call, devices, cores=cores, seed=cores, completions=(("late", "random")[cores % 2],))


@pytest.mark.parametrize(("devices", "cores", "call"), WEIGHTS)
def test_gathered_weights(devices, cores, call):
    check(call, devices, cores=cores, scheduler="pct", seed=devices)


@pytest.mark.parametrize(("devices", "call", "settings"), SUMS, ids=str)
def test_sums(devices, call, settings):
    if call.op == "matmul_all_reduce" and not call.config.one_shot and "t" not in call.layout:
        cut_rows = call.m % devices == 0
        assert call.scattered(call.m, call.n, devices) == ("m" if cut_rows else "n")
    check(call, devices, **settings)
    if call.pairs and devices == 2:
        check(call, devices, implementation="xla")


@pytest.mark.parametrize(("gpu", "devices", "call"), numbers_cases.BY_GROUP, ids=str)
def test_groups(gpu, devices, call):
    with emulating(gpu):
        check(call, devices, launches=2, cores=3)


@pytest.mark.parametrize(
    ("name", "devices"),
    [pytest.param(name, devices, marks=[] if devices == (3, 4, 2)[i % 3] else slow)
     for i, name in enumerate(FORMS) for devices in (1, 2, 3, 4, 5, 8)
     if devices != 5 or not FORMS[name].op.startswith("matmul_")],
)  # fmt: skip
def test_every_form_on_any_number_of_devices(name, devices):
    """Exact with integers in launches in a row, and then, in the same program, with real numbers.

    Those have the same bits in every schedule, also when one CTA runs at a time where no other is needed. Their error
    is at most twice the rounding of the exact result, and of each device's part of a sum.
    """
    call, mesh = FORMS[name].but(dtype=F16 if len(name) % 2 else BF16), oracle.make_mesh(x=devices)
    drawn = [call.arrays(devices, seed) for seed in (0, 1)]
    program, results = call.program(mesh, drawn[0]), []
    with running(seed=devices, completion="random"):
        launches = [program(put(arrays, call.specs(arrays), mesh)) for arrays in drawn]
    for arrays, result in zip(drawn, launches, strict=True):
        assert_exact(result, call.expected(arrays, devices))
    arrays = call.normal(devices)
    resident = None if "ring" in name else 1
    for seed, completion, ctas in ((0, "late", None), (1, "eager", resident), (2, "random", None)):
        with running(cores=3, seed=seed, completion=completion, resident=ctas):
            results.append(np.asarray(program(arrays)).astype(np.float32))
    assert all((result == results[0]).all() for result in results[1:])
    (exact,), (rounded,) = call.but(out=F32).expected(arrays, devices), call.expected(arrays, devices)
    distance = lambda x: np.linalg.norm(x.astype(np.float32) - exact)  # noqa: E731
    assert 0 < distance(results[0]) <= oracle.ALLOWED * distance(rounded)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else slow) for n in FORMS])
def test_in_a_loop_on_one_axis_of_permuted_devices_beside_another_collective(name):
    """Operands change right after each launch, and devices along the other axis have others."""
    call, axes = FORMS[name].but(axis="warpgroup"), {"cluster": 2, "warpgroup": 2}
    mesh = mesh_of(dict(reversed(axes.items())) if len(name) % 2 else axes, (2, 0, 3, 1))
    arrays = call.arrays(2)

    def body(arrays):
        def step(arrays, _):
            wrong = jnp.any(call(arrays) != call.plain(arrays))
            moved = arrays | {"lhs": jnp.roll(-arrays["lhs"], 1, 1), "rhs": jnp.roll(arrays["rhs"], 1, 1)}
            return moved, lax.pmax(lax.pmax(wrong, "warpgroup"), "cluster")

        factor = (1 + lax.axis_index("cluster")).astype(arrays["lhs"].dtype)
        return lax.scan(step, arrays | {"lhs": arrays["lhs"] * factor}, length=3)[1]

    call = call.but(out=F32) if call.spec.sums or call.spec.is_routed else call
    with running(cores=3, seed=1) as run:
        assert not np.asarray(call.program(mesh, arrays, body, P())(arrays)).any()
    assert run.counts["launches"] > 0


def test_negative_controls(monkeypatch):
    """The comparison fails if one operand is another one, or if nobody waits for what is copied."""
    call = FORMS["pull"]
    (exact,), arrays = call.expected(call.arrays(2), 2), call.arrays(2)
    arrays["lhs"][-1, -1] += 1
    with running():
        result = call.program(oracle.make_mesh(x=2), arrays)(arrays)
    with pytest.raises(AssertionError):
        assert_exact(result, [exact])
    monkeypatch.setattr(communicator, "semaphore_wait", lambda *_, **__: None)
    with pytest.raises((EmulationError, AssertionError)):
        check(call, completions=("late", "random"))


# --- Rounding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "form"), [(BF16, "m"), (BF16, "all m"), (F16, "once"), (BF16, "ring")])
def test_parts_are_rounded_once_before_they_travel(dtype, form):
    """In one shot all devices sum, and round their own parts too, for the same bits; in blocks only peers' parts."""
    keywords = (("transport", "ring"),) if form == "ring" else ()
    call = summed("m" if form == "ring" else form, 3, 16, 24, 72, dtype=dtype, keywords=keywords)
    factor = 37 if dtype == BF16 else 301
    with pytest.MonkeyPatch.context() as patch:
        arrays = Call.arrays
        patch.setattr(Call, "arrays", lambda self, *a: arrays(self, *a) | {
            "lhs": (arrays(self, *a)["lhs"] * np.asarray(factor, dtype))})  # fmt: skip
        check(call, 3)
        given = call.arrays(3)
    # The operands are such that rounding later, or more often, gives other bits.
    expected = call.expected(given, 3)[0]
    assert np.any(expected != call.but(out=F32).expected(given, 3, F32)[0].astype(dtype))
    if form == "all m":
        assert np.any(expected != call.but(config=SMALL.replace(one_shot=True)).expected(given, 3)[0])


@pytest.mark.parametrize("along", ["n", "k"])
def test_what_lies_beyond_a_shard_does_not_enter_its_sums(along):
    """Infinite activations must be multiplied only by weights of their own shard: times zero padding they give NaN."""
    call = Call(f"all_gather_rhs_matmul_{along}", 128, 128, 72, config=overlap.Config(tile_n=128, stages=2))
    arrays = jax.tree.map(np.ones_like, call.arrays(2))
    arrays["lhs"][:, -1] = np.inf
    with running():
        assert np.isposinf(np.asarray(call.program(oracle.make_mesh(x=2), arrays)(arrays), np.float32)).all()


def test_scalar_scales_that_differ_from_device_to_device():
    call = summed("n", 2, 48, 24, 24, out=F32)
    arrays = call.arrays(2)

    def scaled(arrays):
        place = lax.axis_index("x").astype(F32)
        return call(arrays, lhs_scale=2 + place, rhs_scale=jnp.exp2(-place))

    with running():
        result = call.program(oracle.make_mesh(x=2), arrays, scaled, call.out_specs)(arrays)
    scales = {"lhs_scale": np.array([2.0, 3.0]), "rhs_scale": np.array([1.0, 0.5])}
    assert_exact(result, call.expected(arrays | scales, 2))


def test_scales_of_rows_that_all_leading_dimensions_share():
    call = summed("m", 2, 24, 40, 24, lead=(1, 2), extras=("lhs_scale",), out=F32)
    arrays = call.arrays(2)
    arrays["lhs_scale"] = arrays["lhs_scale"][:, 0, 0]  # [D, m, 1]
    spread = np.broadcast_to(arrays["lhs_scale"][:, None, None], (2, 1, 2, 48, 1))
    with running():
        result = call.program(oracle.make_mesh(x=2), arrays)(arrays)
    assert_exact(result, call.expected(arrays | {"lhs_scale": spread}, 2))


def test_the_ring_gives_few_rows_a_tile_for_each_shard():
    """It passes on operand tiles, and each must be of a single shard. Both kernels give the same bits."""
    texts = []
    for keywords in ((), (("transport", "ring"),)):
        call = FORMS["joined"].but(keywords=keywords)
        check(call, 3)
        with running():
            texts.append(str(jax.make_jaxpr(call.program(oracle.make_mesh(x=3), call.arrays(3)))(call.arrays(3))))
    assert ["overlap_all_gather_lhs_matmul_joined" in text for text in texts] == [True, False]


# --- By XLA -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", numbers_cases.BY_XLA + numbers_cases.GROUPS_BY_XLA, ids=str)
def test_by_xla_with_every_keyword(call):
    """`implementation="xla"`, and the default where no kernel can run, which also must launch none."""
    extras = tuple(name for name in call.extras if not (call.rhs_lead and name == "lhs_scale" and not call.lead))
    check(call.but(extras=extras, config=None), implementation=None if call.lead or call.widths else "xla")


def test_several_right_operands_of_which_some_have_leading_dimensions_or_a_bias():
    call = Call("all_gather_lhs_matmul", 8, 0, 32, widths=(16, 24), dtype=F32, extras=("bias", "addend"),
                config=None, activation=jax.nn.relu)  # fmt: skip
    assert_exact(check(call, implementation=None), call.expected(call.arrays(2), 2))
    given, mesh = call.arrays(2), oracle.make_mesh(x=2)
    rhs, bias = given["rhs"][0], given["bias"][0]
    sides, biases = [rhs, np.broadcast_to(rhs, (2, 3, *rhs.shape)), rhs], [bias, None, None]

    def body(lhs):
        return overlap.all_gather_lhs_matmul(lhs, sides, "x", bias=biases, return_gathered=True)

    outs, whole = oracle.on_mesh(mesh, body, P("x"), P())(given["lhs"])
    product = given["lhs"] @ rhs
    for out, exact in zip((*outs, whole), (product + bias, np.broadcast_to(product, (2, 3, *product.shape)), product,
                                           given["lhs"]), strict=True):  # fmt: skip
        np.testing.assert_array_equal(np.asarray(out), exact)


@pytest.mark.parametrize("op", [overlap.matmul_all_reduce, overlap.matmul_reduce_scatter])
def test_xla_adds_float16_over_devices_in_float32(op):
    """As the kernels do. In float16 the first row would be infinite, and the second one 2048."""
    lhs = np.array([[60000, 60000, -60000, -60000], [2048, 1, 1, 2]] * 2, np.float16)
    rhs = np.eye(4, dtype=np.float16).sum(1, keepdims=True) * np.ones((1, 8), np.float16)
    mesh = oracle.make_mesh(x=4)
    out_spec = P() if op is overlap.matmul_all_reduce else P("x", None)
    call = oracle.on_mesh(
        mesh, lambda a, b: op(a, b, "x", implementation="xla"), (P(None, "x"), P("x", None)), out_spec
    )
    np.testing.assert_array_equal(np.asarray(call(lhs, rhs)), np.array([[0], [2052]] * 2) * np.ones((1, 8)))


@pytest.mark.parametrize("spec", [P(), P(None, "x")])
def test_xla_adds_cotangents_of_float16_in_float32(spec):
    """Those of weights that all devices have, and of weights that are gathered. In float16 they would be infinite."""
    lhs = np.float16([[60000], [60000], [-60000], [-60000]]) * np.ones((1, 64), np.float16)

    def product(lhs, rhs):
        if spec == P():
            return overlap.matmul(lhs, rhs, implementation="fused")
        return overlap.all_gather_rhs_matmul(lhs, rhs, "x", dimension=1, implementation="fused")

    def loss(rhs):
        out = jax.shard_map(product, mesh=oracle.make_mesh(x=4), in_specs=(P("x"), spec), out_specs=P("x"))(lhs, rhs)
        return out.astype(F32).sum()

    with running():
        found = jax.jit(jax.grad(loss))(np.zeros((64, 32), np.float16))
    np.testing.assert_array_equal(found, np.zeros((64, 32)))


def test_a_reduction_of_a_product_with_a_constant():
    """XLA for CPUs computes it wrongly if it sees the constant, forward and in gradients of a sum."""
    lhs = np.random.default_rng(3).standard_normal((128, 128)).astype(np.float32)
    mesh = oracle.make_mesh(x=1)
    ones = jnp.ones((128, 128), jnp.float32)
    gather = oracle.on_mesh(
        mesh, lambda a: overlap.all_gather_lhs_matmul(a, ones, "x", implementation="xla"), P("x", None), P(None, "x")
    )
    spec = dict(lhs_sharding=P("x", None), rhs_sharding=P(None, "x"), out_sharding=P(None, "x"), mesh=mesh)
    functions = (
        lambda a: overlap.matmul(a, ones),
        gather,
        lambda a: overlap.sharded_matmul(a, ones, **spec),
        jax.grad(lambda w, a: overlap.matmul(a, w).sum(), 0),
        jax.grad(lambda w, a: overlap.sharded_matmul(a, w, **spec).sum(), 0),
    )
    # Sums of the rows, and of the columns in the gradients.
    expected = lhs.astype(np.float64).sum() * 128
    for f in functions[:3]:
        np.testing.assert_allclose(jax.jit(lambda a, f=f: f(a).sum())(lhs), expected, rtol=1e-3)
    for f in functions[3:]:
        np.testing.assert_allclose(jax.jit(lambda w, a, f=f: f(w, a).sum())(lhs, lhs), expected, rtol=1e-3)
