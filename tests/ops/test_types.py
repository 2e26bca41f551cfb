"""`jax.shard_map` with its default `check_vma=True`: types, results and gradients are those of plain JAX.

Types say along which mesh axes a value varies. A wrong one makes a gradient that is summed too often, or not at all.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from tests import oracle
from tests.ops.contract import (
    EVERY,
    F32,
    FORMS,
    H200,
    JOINED,
    SMALL,
    Call,
    assert_close,
    assert_exact,
    mesh_of,
    running,
)
from tests.ops.derivative_cases import TRANSFORMED, given, small, squares
from tests.ops.product_cases import normal

slow = pytest.mark.slow
ROWS, ALL_ROWS, GATHERED = P("x", None), P(("data", "x"), None), P("data", "x")
M, N, K = 128, 128, 64  # Sizes of the global product; the mesh is 2 × 2.


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, called as `layer(lhs, rhs, implementation=…, config=…)`, and how its arrays lie."""

    layer: Callable[..., Any]
    lhs: P
    rhs: P
    out: Any
    config: overlap.Config = SMALL

    def fused(self, *operands):
        return self.layer(*operands, implementation="fused", config=self.config)

    def by_xla(self, *operands):
        return self.layer(*operands, implementation="xla")


def gather(lhs, rhs, **keywords):
    return overlap.all_gather_lhs_matmul(lhs, rhs, "x", **keywords)


def everything(lhs, rhs, **keywords):
    """All operands that a product may have; all except `addend` are the same on all devices."""
    m, n = lhs.shape[0], rhs.shape[1]
    return overlap.matmul(
        lhs, rhs, addend=lhs[:, :1] * jnp.ones((1, n), lhs.dtype), bias=rhs[0].astype(F32),
        activation=jnp.tanh, lhs_scale=jnp.arange(1.0, m + 1)[:, None] / m, rhs_scale=0.5, **keywords,
    )  # fmt: skip


def groups(lhs, rhs, **keywords):
    """The devices have groups of different sizes, and the same weights."""
    sizes = jnp.array([5, 0, 20]) + lax.axis_index("x")
    return overlap.grouped_matmul(lhs, jnp.stack([rhs, -rhs, 2 * rhs]), sizes, **keywords)


def several(lhs, rhs, **keywords):
    """Two right operands, such as Q and K: the first varies along "x", the second is the same everywhere."""
    both = rhs, lax.all_gather(rhs, "x", axis=1, tiled=True)[:, :64]
    scales = dict(lhs_scale=jnp.ones((*lhs.shape[:-1], 1)) * 0.5, rhs_scale=[2.0, jnp.arange(64.0)])
    return gather(lhs, both, return_gathered=True, **scales, **keywords)


def weights(dimension):
    return lambda *a, **b: overlap.all_gather_rhs_matmul(*a, "x", dimension=dimension, **b)


def summed(op, dimension=None):
    """Each device has a part of the features of both operands."""
    keywords = {} if dimension is None else {"dimension": dimension}
    return lambda lhs, rhs, **more: getattr(overlap, op)(lhs, rhs, "x", **keywords, **more)


# The weights are the same on all devices along "data": their gradients are summed over "data".
TENSOR = (ALL_ROWS, P(None, "x"), GATHERED)
CASES = {
    "matmul": Case(overlap.matmul, ALL_ROWS, P(), ALL_ROWS),
    "matmul with all that it takes": Case(everything, ALL_ROWS, P(), ALL_ROWS),
    "groups": Case(groups, ALL_ROWS, P(), ALL_ROWS),
    "pull": Case(gather, *TENSOR),
    "ring": Case(functools.partial(gather, transport="ring"), *TENSOR),
    "joined": Case(gather, *TENSOR, config=JOINED),
    "several": Case(several, *TENSOR[:2], ((GATHERED, GATHERED), P("data", None))),
    "several, joined": Case(several, *TENSOR[:2], ((GATHERED, GATHERED), P("data", None)), config=JOINED),
    "weights k": Case(weights(0), ALL_ROWS, ROWS, ALL_ROWS),
    "weights n": Case(weights(1), ALL_ROWS, P(None, "x"), ALL_ROWS),
    # The left operand is the same along "data"; the weights are not.
    "the same along both axes": Case(
        functools.partial(gather, return_gathered=True),
        ROWS, P(None, ("data", "x")), (P(None, ("data", "x")), P()),
    ),
    "scatter m": Case(summed("matmul_reduce_scatter", 0), P("data", "x"), ROWS, ALL_ROWS),
    "scatter n": Case(summed("matmul_reduce_scatter", 1), P("data", "x"), ROWS, P("data", "x")),
    "all": Case(summed("matmul_all_reduce"), P("data", "x"), ROWS, P("data", None)),
}  # fmt: skip


def on_mesh(kind, case, layer):
    """The layer inside `shard_map` with its defaults, and the layer's operands."""
    mesh = mesh_of({"data": 2, "x": 2}, kind=kind)
    operands = [
        jax.device_put(x, jax.NamedSharding(mesh, spec))
        for x, spec in zip((normal(1, M, K), normal(2, K, N) * 0.1), (case.lhs, case.rhs), strict=True)
    ]
    return jax.shard_map(layer, mesh=mesh, in_specs=(case.lhs, case.rhs), out_specs=case.out), operands


def values_and_gradients(kind, case, layer):
    mapped, operands = on_mesh(kind, case, layer)

    def loss(operands):
        outs = mapped(*operands)
        return sum((out.astype(F32) ** 2).sum() for out in jax.tree.leaves(outs)), outs

    (_, outs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
    return outs, gradients


def scanned(layer):
    """Runs the layer twice in a scan; the carry varies along the same axes as the result."""

    def run(lhs, rhs):
        def step(total, shift):
            return total + layer(lhs + shift, rhs), None

        return lax.scan(step, jnp.zeros_like(layer(lhs, rhs)), jnp.arange(2, dtype=lhs.dtype))[0]

    return run


def mapped(layer):
    """Runs the layer under `vmap`, over elements that differ; the other operands are shared."""
    return lambda lhs, rhs: jax.vmap(layer, in_axes=(0, None))(jnp.stack([lhs, 2 * lhs]), rhs).sum(0)


AROUND = {
    "": lambda f: f, "scanned": scanned, "mapped": mapped, "mapped checkpoint": lambda f: mapped(jax.checkpoint(f)),
}  # fmt: skip
FAST = [("matmul with all that it takes", ""), ("several, joined", ""), ("the same along both axes", ""), ("all", ""),
        ("pull", "scanned"), ("scatter n", "mapped checkpoint")]  # fmt: skip
SLOW = [*((name, "") for name in CASES), ("matmul", "scanned"), ("matmul", "mapped"), ("pull", "mapped")]


@pytest.mark.parametrize(
    ("name", "around"), [*FAST, *(pytest.param(*case, marks=slow) for case in SLOW if case not in FAST)]
)
def test_results_and_gradients(name, around):
    case, around = CASES[name], AROUND[around]
    with running(detect_races=False) as run:
        actual = values_and_gradients(AxisType.Explicit, case, around(case.fused))
    assert run.counts["launches"] > 0
    # A sum too many or too few is off by a factor.
    assert_close(actual, values_and_gradients(AxisType.Explicit, case, around(case.by_xla)), 2e-2)


@pytest.mark.parametrize("name", CASES)
def test_results_vary_along_the_same_axes(name):
    case, seen = CASES[name], []
    for kind, layer in ((AxisType.Explicit, case.fused), (AxisType.Explicit, case.by_xla), (AxisType.Auto, case.fused)):

        def typed(*operands, layer=layer):
            outs = layer(*operands)
            seen.append([jax.typeof(out).manual_axis_type.varying for out in jax.tree.leaves(outs)])
            return outs

        mapped, operands = on_mesh(kind, case, typed)
        jax.eval_shape(mapped, *operands)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("name", ["matmul", "several, joined"])
def test_lowered_for_a_gpu(name, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    mapped, operands = on_mesh(AxisType.Explicit, CASES[name], CASES[name].fused)
    text = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "callback" not in text
    assert ('xla_replica_ids = "0,1,2,3"' in text) == (name != "matmul")


def test_one_device_on_the_axis():
    """Nothing is gathered there; the operand itself is the same on all devices."""
    mesh = jax.make_mesh((2, 1), ("data", "x"))
    specs = (P("data"), P()), (P("data", "x"), P("data"))
    with running():
        lhs, rhs = (
            jax.reshard(x, jax.NamedSharding(mesh, s)) for x, s in zip((normal(1, M, K), normal(2, K, N)), specs[0])
        )
        layer = functools.partial(gather, implementation="fused", config=SMALL, return_gathered=True)
        out, gathered = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs[0], out_specs=specs[1]))(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(gathered), np.asarray(lhs))
    assert_close(out, np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32))


# --- What is the same on all devices ----------------------------------------------------------------------------------


BOTH = ("lhs", "rhs")
SAME = [(BOTH, "one shot"), (BOTH, "pull"), (BOTH, "scatter m"), (BOTH, "scatter n"), (BOTH, "weights n"),
        (BOTH, "weights k"), (("rhs",), "scatter n"), (("lhs",), "scatter m")]  # fmt: skip


@pytest.mark.parametrize(("same", "name"), [*SAME[:2], *(pytest.param(*case, marks=slow) for case in SAME[2:])])
def test_operands_that_are_the_same_on_all_devices(same, name):
    """The kernel reads peers' operands, so they are typed as varying; the gradients are those of plain JAX."""
    call, results = small(name, extras=(), m=16, n=16, k=64), []
    call = call.but(activation=jnp.tanh if call.spec.sums else None)
    whole, each = given(call, 1), given(call, 2)
    arrays = {n: whole[n] if n in same else each[n] for n in each}
    if call.op == "all_gather_rhs_matmul_k":
        arrays["lhs"] = each["lhs"][:16]
    specs = {n: P() if n in same else spec for n, spec in call.specs(arrays).items()}
    out_specs = P() if call.spec.replicates else call.out_specs
    for body in (call, call.plain):
        mapped = jax.shard_map(body, mesh=oracle.make_mesh(x=2), in_specs=(specs,), out_specs=out_specs)
        both = jax.jit(jax.value_and_grad(lambda arrays, f=mapped: squares(f(arrays))))
        with running(detect_races=False):
            results.append(jax.block_until_ready(both(arrays)))
    assert_close(*results)


def test_a_sum_for_all_is_typed_as_the_same_on_all_devices():
    for name in ("all, rows", "one shot"):
        call = FORMS[name].but(extras=EVERY)
        types = call.types(2)
        program = call.program(oracle.make_mesh(x=2), types, call, P(), check_vma=True)
        jax.eval_shape(program, types)  # Otherwise `shard_map` refuses the specs of the result.


@pytest.mark.parametrize("name", ["bias", "addend", "activation"])
def test_what_differs_by_its_type_is_refused_by_the_kernel_and_served_by_xla(name):
    call = Call("matmul_all_reduce", 16, 40, 24, extras=("bias", "addend"), out=F32)
    arrays = call.arrays(2)

    def run(implementation):
        def body(arrays):
            place = lax.axis_index("x").astype(F32)
            more = {} if name == "activation" else {name: arrays[name] + place.astype(arrays[name].dtype)}
            activation = (lambda y: y * (1 + place)) if name == "activation" else None
            return call.but(activation=activation)(arrays | more, implementation)[None]

        return call.program(oracle.make_mesh(x=2), arrays, body, P("x"), check_vma=True)(arrays)

    with pytest.raises(NotImplementedError, match=rf"`{name}`.*varies along 'x'.*xla") as refused:
        run("fused")
    assert "to be the same on all devices" in str(refused.value)
    exact = call.expected(arrays, 2)[0][0]
    assert_exact(run(None), [np.stack([exact, 2 * exact if name == "activation" else exact + 1])])


# --- Scalars that an activation captures ------------------------------------------------------------------------------


def product(lhs, rhs, slope, **keywords):
    """Each device has its own slope. The other scalar is exact in bfloat16, and XLA adds in that dtype."""
    narrow = slope.astype(jnp.bfloat16 if keywords["implementation"] == "fused" else F32)
    slope = slope + lax.axis_index("x")
    return overlap.matmul(
        lhs, rhs, activation=lambda y: jax.nn.silu(y * slope) + jnp.where(y > 0, narrow, 2), **keywords
    )


LHS, RHS = 0.25 * normal(0, 32, 64, dtype=jnp.float16), 0.25 * normal(1, 64, 32, dtype=jnp.float16)
SLOPE = jnp.asarray(0.75, F32)
BY_BOTH = {"implementation": "fused", "config": SMALL}, {"implementation": "xla"}


@pytest.mark.parametrize("how", ["jvp of grad", pytest.param("grad of grad", marks=slow)])
def test_scalars_in_both_modes_and_twice(how):
    mesh, results = mesh_of({"data": 2, "x": 2}, kind=AxisType.Explicit), []
    specs = ALL_ROWS, P(), P()
    operands = tuple(
        jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip((LHS, RHS, SLOPE), specs, strict=True)
    )
    for keywords in BY_BOTH:
        run = jax.shard_map(functools.partial(product, **keywords), mesh=mesh, in_specs=specs, out_specs=ALL_ROWS)
        f = lambda x, run=run: run(*x)  # noqa: E731
        with jax.set_mesh(mesh), running(detect_races=False) as emulation:
            results.append(jax.block_until_ready(jax.jit(lambda x, f=f: TRANSFORMED[how](f, x))(operands)))
        assert (emulation.counts["launches"] > 0) == (len(results) == 1)
    assert_close(*results)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=slow)])
def test_scalars_where_some_axes_are_manual(check_vma):
    """A nested `shard_map` covers the remaining axes; its gradient keeps only operands."""
    mesh, results = mesh_of({"data": 2, "x": 2}, kind=AxisType.Explicit), []
    for keywords in BY_BOTH:

        def layer(lhs, rhs, slope, keywords=keywords):
            count = slope.astype(jnp.int32)
            return overlap.matmul(lhs, rhs, activation=lambda y: jnp.tanh(y * slope) * count, **keywords)

        mapped = jax.shard_map(
            layer, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"},
            check_vma=check_vma,
        )  # fmt: skip
        with jax.set_mesh(mesh), running(detect_races=False) as run:
            lhs = jax.reshard(LHS, P("data"))
            gradient = jax.jit(jax.grad(lambda *x, f=mapped: squares(f(*x)), (0, 1, 2)))
            results.append(jax.block_until_ready(gradient(lhs, RHS, SLOPE + 1)))
        assert (run.counts["launches"] > 0) == (len(results) == 1)
    assert_close(*results)
