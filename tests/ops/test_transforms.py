"""`jax.vmap`, 64-bit mode and other settings of jax: every operation gives the same bits, or refuses with a way out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import crossover, dispatch
from overlap.frame.rules import with_rule
from tests import oracle
from tests.ops import contract
from tests.ops.contract import BF16, EVERY, F16, F32, FORMS, SCALES, SMALL, Call, assert_close, assert_exact, running
from tests.ops.grouped_calls import DATA
from tests.ops.product_cases import normal

slow = pytest.mark.slow


# --- vmap -------------------------------------------------------------------------------------------------------------


def mapped(call, names, depth=1):
    """`jax.vmap` over leading dimensions of the arrays in `names`: what `call` does with leading dimensions."""
    single = call.but(lead=())
    over = {n: [0] * len(call.widths) if n in call.extras[1:] and call.widths else 0 for n in names}

    def body(arrays):
        given = {n: x.swapaxes(0, 1) if n == "lhs" and depth == 2 else x for n, x in arrays.items()}
        function, axes = single, ({n: over.get(n) for n in arrays},)
        function = jax.vmap(function, in_axes=axes)
        if depth == 1:
            return function(given)
        return jax.tree.map(lambda x: x.swapaxes(0, 1), jax.vmap(function, in_axes=axes)(given))

    return body


KEPT = dict(lead=(3, 2), widths=(72, 136), keywords=(("return_gathered", True),))
LEADING = [  # depth, call
    (2, FORMS["joined"].but(container=tuple, **KEPT)), (2, FORMS["weights k"].but(lead=(3, 2))),
    (1, FORMS["ring"].but(lead=(3,))), (1, FORMS["weights n"].but(lead=(3,))), (1, FORMS["scatter n"].but(lead=(3,))),
    pytest.param(2, FORMS["pull"].but(**KEPT), marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("depth", "call"), LEADING, ids=str)
def test_vmap_over_the_left_operand_is_a_leading_dimension(depth, call):
    arrays = call.arrays(2)
    with running(cores=3) as run:
        program = call.program(
            oracle.make_mesh(x=2), arrays, call.stacked(mapped(call, ["lhs"], depth)), call.out_specs
        )
        result = program(arrays)
    assert run.counts["launches"] > 0
    assert_exact(result, call.expected(arrays, 2))


BOTH, SCALED = ["lhs", "lhs_scale"], ("lhs_scale", "rhs_scale", "bias")


@pytest.mark.parametrize(
    ("name", "over"),
    [("pull", BOTH), ("joined", ["lhs_scale"]), ("scatter m", BOTH), ("one shot", ["lhs_scale"]),
     ("scatter n", ["bias"]), *(pytest.param(n, ["bias"], marks=slow) for n in ("all, rows", "matmul"))],
)  # fmt: skip
def test_vmap_over_scales_of_rows_and_biases(name, over):
    """XLA adds a mapped bias after the kernel, which still scales each device's product before the sum."""
    call = FORMS[name].but(extras=SCALED)
    call = call.but(out=F32) if call.spec.sums else call
    arrays, results = call.arrays(2), []
    stacks = {n: np.stack([arrays[n], arrays[n] * arrays[n].dtype.type(2)]) for n in over}

    def all_of(function):
        def body(arrays):
            given = {n: jnp.stack([arrays[n], 2 * arrays[n]]) if n in stacks else arrays[n] for n in arrays}
            return jax.vmap(function, ({n: 0 if n in stacks else None for n in given},))(given)

        return body

    out = P(None) if call.spec.replicates else P(None, *call.out_specs)
    with running(detect_races=False) as run:
        result = call.program(oracle.make_mesh(x=2), arrays, all_of(call), out)(arrays)
    assert run.counts["launches"] > 0
    for index in range(2):
        given = arrays | {n: stack[index] for n, stack in stacks.items()}
        (exact,) = call.but(config=SMALL if call.config.one_shot else call.config).expected(given, 2)
        results.append(exact[0] if call.spec.replicates else exact)
    np.testing.assert_array_equal(np.asarray(result).astype(np.float32), np.stack(results).astype(np.float32))


@pytest.mark.parametrize("name", ["groups", "tokens to rows", pytest.param("rows to tokens", marks=slow)])
def test_vmap_over_groups_is_one_call_after_the_other(name):
    """Over rows, and over sizes or routes."""
    call = FORMS[name]
    first, second = (call.arrays(2, seed) for seed in (0, 1))
    moved = [n for n in first if n in ("lhs", *DATA)]
    arrays = first | {f"second {n}": second[n] for n in moved}

    def body(arrays):
        given = {n: jnp.stack([arrays[n], arrays[f"second {n}"]]) if n in moved else arrays[n] for n in first}
        return jax.vmap(call, ({n: 0 if n in moved else None for n in given},))(given)

    specs = call.specs(first) | {f"second {n}": P("x") for n in moved}
    with running(detect_races=False):
        run = jax.shard_map(
            body, mesh=oracle.make_mesh(x=2), in_specs=(specs,), out_specs=P(None, "x"), check_vma=False
        )
        found = jax.jit(run)(arrays)
    exact = [call.expected(given, 2)[0] for given in (first, first | {n: second[n] for n in moved})]
    assert_exact(found, [np.stack(exact)])


MAPPED = [  # The arrays that `vmap` maps, and shapes beside [24, 64] and [64, 128].
    ("addend", {"addend": (3, 24, 128)}),
    ("rhs_scale", {"rhs_scale": (3, 128)}),
    ("bias", {"bias": (3, 128)}),
    ("lhs", {"lhs": (3, 24, 64), "rhs": (2, 64, 128)}),
    ("lhs", {"lhs": (3, 2, 24, 64), "lhs_scale": (2, 24, 1)}),
    ("lhs_scale", {"lhs": (2, 24, 64), "lhs_scale": (3, 2, 24, 1), "addend": (2, 24, 128)}),
    ("rhs", {"rhs": (3, 64, 128), "lhs_scale": (3, 24, 1)}),
    ("addend", {"lhs": (2, 24, 64), "addend": (3, 24, 128)}),
]


@pytest.mark.parametrize(("over", "shapes"), MAPPED, ids=str)
def test_vmap_of_matmul_over_anything_is_what_xla_has(over, shapes):
    shapes = {"lhs": (24, 64), "rhs": (64, 128)} | shapes
    dtypes = {"lhs": BF16, "rhs": BF16, "addend": BF16}
    given = {name: normal(i, *shape, dtype=dtypes.get(name, F32)) for i, (name, shape) in enumerate(shapes.items())}

    axes = {name: 0 if name == over or (name == "lhs_scale" and over == "rhs") else None for name in given}

    def both(given):
        calls = [functools.partial(overlap.matmul, implementation="fused", config=SMALL),
                 functools.partial(overlap.matmul, implementation="xla")]  # fmt: skip
        return [jax.vmap(lambda given, call=call: call(**given), (axes,))(given) for call in calls]

    with running():
        fused, by_xla = (np.asarray(x, np.float32) for x in jax.jit(both)(given))
    np.testing.assert_allclose(fused, by_xla, rtol=2e-2, atol=2e-2)


def over_three(name, function):
    """`vmap` over three times the array `name`; over none of it, if the name ends so."""
    which, _, none = name.partition(", ")

    def body(arrays):
        many = jnp.stack([arrays[which]] * 3)[: 0 if none else 3]
        return jax.vmap(lambda x: function(arrays | {which: x}))(many)

    return body


@pytest.mark.parametrize(
    ("form", "name"),
    [("pull", "rhs"), ("pull", "rhs_scale"), ("weights n", "rhs"), ("weights k", "lhs, none"), ("scatter m", "rhs"),
     ("one shot", "rhs"), ("scatter m", "lhs")],
)  # fmt: skip
def test_vmap_over_anything_else_is_refused_if_asked_for_and_left_to_xla_if_not(form, name, monkeypatch):
    """On a GPU, where the chooser would take the kernel of one call."""
    call = FORMS[form].but(m=1024, n=2048, k=2048, config=None, extras=("rhs_scale",) if name == "rhs_scale" else ())
    types = call.types(2)
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: contract.H200)
    monkeypatch.setattr(crossover, "verdict", lambda *_: crossover.Verdict(False, "", crossover.Cause.MEASURED))

    def traced(implementation):
        body = over_three(name, lambda arrays: call(arrays, implementation))
        return call.program(oracle.make_mesh(x=2), types, body, P()).trace(types)

    chosen = traced(None)
    assert ("mosaic_gpu" in chosen.lower(lowering_platforms=("cuda",)).as_text()) == (name == "lhs")
    if name != "lhs":
        assert chosen.out_info.shape == traced("xla").out_info.shape
        with pytest.raises(NotImplementedError, match=r"vmap.*xla"):
            traced("fused")


def scaled(x, y):
    return {"product": x * y.sum(), "sines": jnp.sin(y)}


def rule_of_scaled(primals, tangents):
    """Twice the derivative, so that jax's own would show."""
    moved = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moved(*given):
        return scaled(*(dict(zip(moved, given)).get(i, x) for i, x in enumerate(primals)))

    outs, of_outs = jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])
    return outs, jax.tree.map(lambda x: 2 * x, of_outs)


@pytest.mark.parametrize("moved", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("axes", [(1, 0), (None, 1), (1, None)], ids=str)
def test_rules_of_derivatives_under_vmap(axes, moved):
    """The derivative of a vmap: of operands that all elements share, along any dimension, and without some tangents."""
    chance = np.random.default_rng()
    size = 4
    shapes = [(3,) if axis is None else np.insert(np.array([3]), axis, size) for axis in axes]
    given, directions = ([chance.standard_normal(shape) for shape in shapes] for _ in range(2))

    def of_moved(*values):
        operands = [dict(zip(moved, values)).get(i, x) for i, x in enumerate(given)]
        return jax.vmap(lambda x, y: with_rule(scaled, rule_of_scaled, x, y), in_axes=axes)(*operands)

    with jax.enable_x64():
        outs, of_outs = jax.jvp(of_moved, [given[i] for i in moved], [directions[i] for i in moved])
    element = lambda x, axis, i: x if axis is None else np.take(x, i, axis)  # noqa: E731
    for i in range(size):
        x, y = (element(value, axis, i) for value, axis in zip(given, axes))
        d_x, d_y = (element(value, axis, i) * (j in moved) for j, (value, axis) in enumerate(zip(directions, axes)))
        np.testing.assert_allclose(outs["product"][i], x * y.sum())
        np.testing.assert_allclose(outs["sines"][i], np.sin(y))
        np.testing.assert_allclose(of_outs["product"][i], 2 * (d_x * y.sum() + x * d_y.sum()))
        np.testing.assert_allclose(of_outs["sines"][i], 2 * np.cos(y) * d_y)


def test_vmap_of_a_backward_pass_that_no_kernel_can_serve():
    """Inside `jax.jit`, `vmap` maps over the backward pass, for which nobody asked for the kernel: XLA runs."""
    call, arrays = FORMS["pull"].but(m=16, k=64), FORMS["pull"].but(m=16, k=64).normal(2)

    def of(function):
        total = jax.jit(lambda x, w: jnp.sin(function({"lhs": x, "rhs": w}).astype(F32)).sum())
        return lambda a: jax.vmap(jax.grad(total, (0, 1)), (0, None))(jnp.stack([a["lhs"], -a["lhs"]]), a["rhs"])

    results, out = [], (P(None, "x", None), P(None, None, "x"))
    for function in (call, call.plain):
        with running():
            results.append(call.program(oracle.make_mesh(x=2), arrays, of(function), out)(arrays))
    assert_close(*results, 2e-2)


@pytest.mark.parametrize("implementation", ["fused", "xla", "vmap"])
def test_products_are_not_rounded_before_their_epilogue(implementation):
    """If the product were rounded to float16 before the epilogue, it would be infinite."""
    lhs, rhs, bias = jnp.full((64, 128), 100, F16), jnp.full((128, 128), 100, F16), jnp.full(128, 128.5)
    product = functools.partial(overlap.matmul, lhs, rhs, rhs_scale=1e-4)
    with running():
        if implementation == "vmap":
            out = jax.vmap(lambda bias: product(bias=bias, implementation="fused", config=SMALL))(bias[None])
        else:
            out = product(bias=bias, implementation=implementation, config=None if implementation == "xla" else SMALL)
    np.testing.assert_allclose(np.asarray(out, np.float32), 256.5, rtol=2e-3)


def test_products_in_f32_have_a_configuration_that_fits():
    """An activation's derivative and a batch of vectors need f32 results, which take more shared memory."""
    config = overlap.Config(tile_m=128, tile_n=256, stages=4)
    lhs, rhs, bias = normal(0, 48, 32), normal(1, 32, 512), normal(2, 2, 512, dtype=F32)
    product = functools.partial(overlap.matmul, lhs, rhs, config=config, implementation="fused")
    with running():
        out = jax.jit(jax.vmap(lambda bias: product(bias=bias)))(bias)
        d = jax.jit(jax.grad(lambda bias: product(bias=bias, activation=jnp.tanh).astype(F32).sum()))(bias[0])
    exact = np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)
    assert_close(out, exact + np.asarray(bias)[:, None])
    assert_close(d, (1 - np.tanh(exact + np.asarray(bias[0])) ** 2).sum(0))


# --- Settings of jax --------------------------------------------------------------------------------------------------

WIDER = {name: call.but(extras=tuple(n for n in EVERY if n in call.spec.epilogue)) for name, call in FORMS.items()} | {
    "split k": Call("matmul", config=SMALL.replace(split_k=2)),
    "stream k": Call("all_gather_rhs_matmul_k", config=SMALL.replace(stream_k=2)),
}


WITH_X64 = ("joined", "weights k", "scatter n", "one shot", "split k", "rows to tokens")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in WITH_X64 else slow) for n in WIDER])
def test_the_same_bits_with_x64(name, monkeypatch):
    """Scales and biases are then of 64 bits, as NumPy makes them."""
    arrays = Call.arrays
    wide = lambda n, x: x.astype(np.float64) if n in (*SCALES, "bias", "gates") else x  # noqa: E731
    monkeypatch.setattr(Call, "arrays", lambda *args: {n: wide(n, x) for n, x in arrays(*args).items()})
    takes = "activation" in WIDER[name].spec.epilogue
    call = WIDER[name].but(activation=(lambda y: jnp.maximum(y * 0.5, -1.0)) if takes else None)
    with jax.enable_x64(True):
        contract.check(call, cores=4)


def test_gradients_with_x64():
    def total(a, b):
        activation = lambda y: jnp.tanh(y * 0.7) * jnp.float32(2)  # noqa: E731
        y = overlap.matmul(a, b, activation=activation, bias=np.ones(136), lhs_scale=0.01, implementation="fused")
        return y.astype(jnp.float32).sum()

    results = []
    for is_on in (False, True):
        with jax.enable_x64(is_on), running(cores=4):
            results.append(jax.jit(jax.grad(total, (0, 1)))(normal(0, 136, 144), normal(1, 144, 136)))
    assert_close(*results, 1e-3)


@pytest.mark.parametrize("name", ["joined", "scatter m"])
def test_it_lowers_for_cuda_with_x64(name, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: contract.H200)
    call = WIDER[name].but(m=64, n=128, k=64, config=None)
    arrays = call.arrays(2)
    with jax.enable_x64(True):
        lowered = call.program(oracle.make_mesh(x=2), arrays).trace(arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("name", ["matmul", "weights k"])
def test_without_jit(name):
    """Rows of weights gathered along k are found by the k step, which would be a plain number in an unrolled loop."""
    call = FORMS[name].but(m=16, n=128, k=128)
    arrays = call.arrays(2)
    with running(), jax.disable_jit():
        results = call.program(oracle.make_mesh(x=2), arrays)(arrays)
    assert_exact(results, call.expected(arrays, 2))


@pytest.mark.parametrize("name", ["matmul", "pull", "scatter m"])
def test_strict_rank_promotion(name):
    call = FORMS[name].but(lead=(2,), extras=EVERY, config=None, out=F32, activation=jnp.abs)
    with jax.numpy_rank_promotion("raise"):
        contract.check(call, implementation="xla")
