"""`jax.shard_map` with its default `check_vma=True`: types, results and gradients equal XLA's."""

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
from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests.product_cases import normal

CONFIG = overlap.Config(tile_n=64, stages=2)
JOINED = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True)
ROWS, ALL_ROWS = P("x", None), P(("data", "x"), None)
GATHERED = P("data", "x")
M, N, K = 128, 128, 64  # Sizes of the global product; the mesh is 2 × 2.


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, called as `layer(lhs, rhs, implementation=…)` and, if it is fused, with `config`."""

    layer: Callable[..., Any]
    lhs: P
    rhs: P
    out: Any
    config: overlap.Config = CONFIG

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
        lhs, rhs, addend=lhs[:, :1] * jnp.ones((1, n), lhs.dtype), bias=rhs[0].astype(jnp.float32),
        activation=jnp.tanh, lhs_scale=jnp.arange(1.0, m + 1)[:, None] / m, rhs_scale=0.5, **keywords,
    )  # fmt: skip


def several(lhs, rhs, **keywords):
    """Two right operands, such as Q and K: the first varies along "x", the second is the same everywhere."""
    both = rhs, lax.all_gather(rhs, "x", axis=1, tiled=True)[:, :64]
    scales = dict(lhs_scale=jnp.ones((*lhs.shape[:-1], 1)) * 0.5, rhs_scale=[2.0, jnp.arange(64.0)])
    return gather(lhs, both, return_gathered=True, **scales, **keywords)


# These weights are the same on all devices along "data": their gradients are summed over "data".
TENSOR = (ALL_ROWS, P(None, "x"), GATHERED)
CASES = {
    "matmul": Case(overlap.matmul, ALL_ROWS, P(), ALL_ROWS),
    "matmul with all that it takes": Case(everything, ALL_ROWS, P(), ALL_ROWS),
    "pull": Case(gather, *TENSOR),
    "ring": Case(functools.partial(gather, transport="ring"), *TENSOR),
    "joined": Case(gather, *TENSOR, config=JOINED),
    "several right sides": Case(several, *TENSOR[:2], ((GATHERED, GATHERED), P("data", None))),
    "several, joined": Case(several, *TENSOR[:2], ((GATHERED, GATHERED), P("data", None)), config=JOINED),
    "weights sharded along k": Case(
        lambda *a, **b: overlap.all_gather_rhs_matmul(*a, "x", dimension=0, **b), ALL_ROWS, ROWS, ALL_ROWS
    ),
    "weights sharded along n": Case(
        lambda *a, **b: overlap.all_gather_rhs_matmul(*a, "x", dimension=1, **b),
        ALL_ROWS, P(None, "x"), ALL_ROWS,
    ),
    # The left operand is the same along "data"; the weights are not.
    "gathered operand the same along both axes": Case(
        lambda *a, **b: gather(*a, return_gathered=True, **b),
        ROWS, P(None, ("data", "x")), (P(None, ("data", "x")), P()),
    ),
}  # fmt: skip
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def on_mesh(kind, case, layer):
    """The layer inside `shard_map` with its defaults, and the layer's operands."""
    mesh = jax.make_mesh((2, 2), ("data", "x"), axis_types=(KINDS[kind],) * 2)
    specs = case.lhs, case.rhs
    operands = [
        jax.device_put(x, jax.NamedSharding(mesh, spec))
        for x, spec in zip((normal(1, M, K), normal(2, K, N) * 0.1), specs, strict=True)
    ]
    return jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=case.out), operands


def values_and_gradients(kind, case, layer):
    mapped, operands = on_mesh(kind, case, layer)

    def loss(operands):
        outs = mapped(*operands)
        return sum((out.astype(jnp.float32) ** 2).sum() for out in jax.tree.leaves(outs)), outs

    (_, outs), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(operands)
    return outs, gradients


def assert_close(actual, expected):
    """Compares with a tolerance for rounding, which other files test; a sum too many or too few is off by a factor."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert a.shape == b.shape and np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("explicit", name) for name in CASES), *(("auto", name) for name in ("matmul", "pull"))]
)
def test_results_and_gradients(kind, name):
    case = CASES[name]
    with emulate(cores=2, detect_races=False) as run:
        actual = values_and_gradients(kind, case, case.fused)
    assert run.counts["launches"] > 0
    assert_close(actual, values_and_gradients(kind, case, case.by_xla))


def types(kind, case, layer):
    """The axes along which each result varies."""
    seen = []

    def typed(*operands):
        outs = layer(*operands)
        seen.append([jax.typeof(out).manual_axis_type.varying for out in jax.tree.leaves(outs)])
        return outs

    mapped, operands = on_mesh(kind, case, typed)
    jax.eval_shape(mapped, *operands)
    return seen[0]


@pytest.mark.parametrize("name", CASES)
def test_results_vary_along_the_same_axes(name):
    case = CASES[name]
    for kind in KINDS:
        assert types(kind, case, case.fused) == types(kind, case, case.by_xla)


@pytest.mark.parametrize("name", ["matmul", "ring", "several, joined", "weights sharded along k"])
def test_lowered_for_a_gpu(name, monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))
    mapped, operands = on_mesh("explicit", CASES[name], CASES[name].fused)
    text = jax.jit(mapped).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "callback" not in text
    assert ('xla_replica_ids = "0,1,2,3"' in text) == ("matmul" not in name)


def test_one_device_on_the_axis():
    """Nothing is gathered there; the operand itself is the same on all devices."""
    mesh = jax.make_mesh((2, 1), ("data", "x"))
    specs = (P("data"), P()), (P("data", "x"), P("data"))
    with emulate(cores=2):
        lhs, rhs = (
            jax.reshard(x, jax.NamedSharding(mesh, s)) for x, s in zip((normal(1, M, K), normal(2, K, N)), specs[0])
        )
        layer = functools.partial(gather, implementation="fused", config=CONFIG, return_gathered=True)
        out, gathered = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=specs[0], out_specs=specs[1]))(lhs, rhs)
    np.testing.assert_array_equal(np.asarray(gathered), np.asarray(lhs))
    assert_close(out, np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32))


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


@pytest.mark.parametrize("around", [scanned, mapped, jax.checkpoint], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["matmul", "pull"])
def test_inside_other_transformations(around, name):
    case = CASES[name]
    with emulate(cores=2, detect_races=False):
        actual = values_and_gradients("explicit", case, around(case.fused))
    assert_close(actual, values_and_gradients("explicit", case, around(case.by_xla)))


def test_without_jit():
    case = CASES["pull"]
    call, operands = on_mesh("auto", case, case.fused)
    expected, _ = on_mesh("auto", case, case.by_xla)
    with emulate(cores=2):
        assert_close(call(*operands), expected(*operands))
