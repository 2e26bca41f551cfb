"""Which products of global arrays kernels compute: forward and backward are decided together."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import crossover, dispatch
from overlap.choice.crossover import Cause, Measured
from overlap.choice.problem import Problem
from overlap.kernels.target import Target
from overlap.sharded.plan import plan_of
from tests.layers.sharded_cases import SIZES, answer, make_mesh
from tests.layers.sharded_plans import every

pytestmark = pytest.mark.one_jax
MESH = make_mesh(x=4)
ROWS, WIDTH = 16384, 4096
BF16 = "bfloat16"
# The operations of a product and its cotangent of `lhs`, as one device of four sees them.
GATHER = Problem("all_gather_lhs_matmul", ROWS // 4, WIDTH // 4, WIDTH, BF16, BF16, devices=4)
GATHER_BACK = Problem("matmul_reduce_scatter", ROWS, WIDTH, WIDTH // 4, BF16, BF16, devices=4, layout="nt")
SCATTER = Problem("matmul_reduce_scatter", ROWS, WIDTH, WIDTH // 4, BF16, BF16, devices=4)
SCATTER_BACK = Problem("all_gather_lhs_matmul", ROWS // 4, WIDTH // 4, WIDTH, BF16, BF16, devices=4, layout="nt")
COLUMNS = P("x"), P(None, "x"), P(None, "x")
ROW = P(None, "x"), P("x"), P("x")
FSDP = P("x"), P("x"), P("x")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H100 80GB HBM3", 132))


@pytest.fixture
def measure(monkeypatch):
    """Replaces the measurements by pairs of a problem and the speedup of the kernel."""

    def set_to(ratios):
        found = tuple(Measured(of, 100.0, 100.0 * ratio, "h100") for of, ratio in ratios.items())
        monkeypatch.setattr(crossover, "measurements", lambda: found)

    return set_to


def explained(specs, dtype=jnp.bfloat16, **options):
    """Explains the gradients of a product: first the product, then its backward pass."""
    lhs, rhs, out = specs

    def loss(x, w):
        y = overlap.sharded_matmul(x, w, out_sharding=out, **options)
        return (y.astype(jnp.float32) ** 2).sum()

    operands = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(MESH, spec))
        for shape, spec in (((ROWS, WIDTH), lhs), ((WIDTH, WIDTH), rhs))
    )
    return overlap.explain(jax.grad(loss, (0, 1)), *operands)


BOTH = [  # The kernel's speedup forward and backward, what runs, and all three products' speedup, one of them XLA's.
    (0.9, 1.4, "fused", 1.10), (1.05, 0.8, "xla", 0.95), (1.5, 1.2, "fused", 1.23), (0.8, 1.1, "xla", 0.97),
]  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "forward", "backward"), [(COLUMNS, GATHER, GATHER_BACK), (ROW, SCATTER, SCATTER_BACK)], ids=["up", "down"]
)
def test_forward_and_backward_are_decided_together(specs, forward, backward, measure):
    for ratio, of_backward, implementation, together in BOTH:
        measure({forward: ratio, backward: of_backward})
        first, *others = explained(specs)
        assert first.implementation == implementation
        assert f"forward and backward together {together:.2f} x" in first.reason
        # Behind a kernel another one computes the cotangent of `lhs`. Behind XLA no kernel runs.
        assert [choice.implementation for choice in others] == (["fused"] if implementation == "fused" else [])


def test_a_kernel_may_be_alone_in_front_of_a_backward_pass_by_xla(measure):
    measure({GATHER: 1.6, GATHER_BACK: 0.9})
    assert [choice.implementation for choice in explained(COLUMNS)] == ["fused", "xla"]


@pytest.mark.parametrize(
    ("specs", "options", "reason"),
    [
        (FSDP, {}, "a gather of weights is left to XLA$"),
        (COLUMNS, {"dtype": jnp.float32}, "float32"),
        (COLUMNS, {"implementation": "xla"}, "^asked for$"),
        (COLUMNS, {"activation": lambda x: x / jnp.linalg.norm(x)}, ""),
    ],
    ids=["weights", "float32", "asked for", "not elementwise"],
)
def test_a_plain_forward_has_a_plain_backward(specs, options, reason):
    """Also where a kernel could compute the backward pass."""
    (only,) = explained(specs, **options)
    assert only.implementation == "xla" and re.search(reason, only.reason)
    assert only.plan  # What runs along which axis.


def test_no_kernel_of_global_arrays_needs_all_of_its_ctas_at_once():
    """Such a kernel and a collective of XLA could each hold a part of the cores, and wait for the other for ever."""
    chosen = {}
    mesh = make_mesh(**SIZES)
    for case in every(tuple(SIZES)):
        try:
            plan = plan_of(*case, SIZES)
        except ValueError:
            continue
        # Plans differ by the operation, the dimension and the axes. The order of axes elsewhere does not matter here.
        chosen.setdefault((plan.operation, plan.dimension, plan.axes, bool(plan.gathers)), case)
    transports, decisions = set(), []
    for case in chosen.values():
        lhs, rhs, out = (P(*(axes or None for axes in parts)) for parts in case)
        x, w = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(mesh, spec))
            for shape, spec in (((8, 2048, 8192), lhs), ((8192, 8192), rhs))
        )
        for implementation in (None, "fused"):
            product = functools.partial(overlap.sharded_matmul, out_sharding=out, implementation=implementation)
            decisions.append(answer(product, x, w))
    fused = [choice for choice in decisions if choice.implementation == "fused"]
    assert {choice.op for choice in fused} == {operation for operation, *_ in chosen} and len(fused) > len(chosen)
    for choice in fused:
        assert 1 <= choice.ctas_at_once <= 16 < choice.target.num_cores
        transports.add(choice.transport)
    assert "pull" in transports and "ring" not in transports


PLAIN = Problem("matmul", ROWS // 4, WIDTH, WIDTH, BF16, BF16)


@pytest.mark.parametrize(
    ("specs", "measured", "implementation"),
    [(COLUMNS, (GATHER, GATHER_BACK), "fused"), ((P("x"), P(), P("x")), (PLAIN,), "xla")],
    ids=["collective", "plain"],
)
def test_a_small_gain_is_taken_by_collectives_only(specs, measured, implementation, measure):
    measure(dict.fromkeys(measured, 1.01))
    assert explained(specs)[0].implementation == implementation


def test_several_right_sides_count_each(measure):
    measure({SCATTER: 0.7, SCATTER_BACK: 1.2})
    x, w = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=jax.NamedSharding(MESH, spec))
        for s, spec in (((ROWS, WIDTH), ROW[0]), ((WIDTH, WIDTH), ROW[1]))
    )

    def loss(x, w, v):
        y, z = overlap.sharded_matmul(x, [w, v], out_sharding=ROW[2])
        return (y.astype(jnp.float32) * z).sum()

    first, *_ = overlap.explain(jax.grad(loss, (0, 1, 2)), x, w, w)
    assert "together 0.97 x" in first.reason and first.shapes == "16384x4096x1024 bfloat16"


def test_a_product_is_logged_once(measure, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_logged", set())
    measure({GATHER: 1.6, GATHER_BACK: 0.9})
    with caplog.at_level(logging.INFO, "overlap"):
        for lhs, rhs, out in (COLUMNS, FSDP):
            given = [
                jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=jax.NamedSharding(MESH, spec))
                for s, spec in (((ROWS, WIDTH), lhs), ((WIDTH, WIDTH), rhs))
            ]
            for _ in range(2):
                jax.eval_shape(functools.partial(overlap.sharded_matmul, out_sharding=out), *given)
    said = [r.getMessage() for r in caplog.records if "no tuning table" not in r.getMessage()]
    assert len(said) == 2 and "together" in said[0] and "not measured" in said[1]


def test_the_cause_and_the_ratio_of_the_decision_are_kept(measure):
    measure({GATHER: 0.9, GATHER_BACK: 1.4})
    first, _ = explained(COLUMNS)
    assert first.cause is Cause.MEASURED and first.ratio == pytest.approx(0.9)
    measure({GATHER: 1.1, GATHER_BACK: 0.6})
    first, *_ = explained(COLUMNS)
    assert first.implementation == "xla" and first.ratio == pytest.approx(1.1)


def test_why_only_xla_can_run_is_said():
    (only,) = explained(COLUMNS, activation=lambda x: x / jnp.linalg.norm(x))
    assert only.cause is Cause.NOT_SERVED and "activation" in only.reason
