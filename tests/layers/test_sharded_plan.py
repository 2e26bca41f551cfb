"""The planner of `sharded_matmul`: each plan computes the product; unsupported cases are refused with a way out."""

import functools
import math
import random
import re

import numpy as np
import pytest

from overlap.sharded.plan import ShardingPlan, plan_of
from tests.layers.sharded_plans import computed, drawn, every, part

pytestmark = pytest.mark.one_jax
SIZES = {"x": 2, "y": 3}
ENDS = r"(: [^:]*|; docs/sharded.md has the table of what can be served)$"


@functools.cache
def operands(size):
    chance = np.random.default_rng(0)
    lhs, rhs = chance.integers(-4, 5, (size, size, size)), chance.integers(-4, 5, (size, size))
    return lhs, rhs, lhs @ rhs


def plan_or_error(case, sizes):
    """Returns a plan, or None if the planner correctly refuses the case."""
    try:
        return plan_of(*case, sizes)
    except ValueError as error:
        assert re.search(ENDS, str(error)), error
        assert any(repr(axis) in str(error) for axis in sizes), error
        return None


def assert_computes_the_product(plan, out, sizes):
    lhs, rhs, product = operands(math.prod(sizes.values()))
    for at, result in computed(plan, lhs, rhs, sizes):
        assert np.array_equal(result, part(product, out, sizes, at))


def moves_nothing(given, cut):
    """Returns whether each device finds its part under this partition within its part of the given array."""
    return all(wanted[: len(axes)] == axes for axes, wanted in zip(given, cut, strict=True))


def test_weights_of_several_axes_are_gathered_by_a_kernel_only_where_each_axis_has_rows_of_its_own():
    """Else devices with the same rows would add the shards in different orders."""
    lhs, rhs = (("x",), ()), (("x", "y"), ())
    assert plan_of(lhs, rhs, (("x",), ()), SIZES).operation == "matmul"
    assert plan_of((("x", "y"), ()), rhs, (("x", "y"), ()), SIZES).operation == "all_gather_rhs_matmul"


def test_every_place_of_two_axes():
    """Each plan gives every device its part of the product, with the requested sharding."""
    served = 0
    for case in every(tuple(SIZES)):
        if (plan := plan_or_error(case, SIZES)) is None:
            continue
        served += 1
        lhs, rhs, out = case
        assert plan.out == out
        assert moves_nothing(lhs, plan.lhs) and moves_nothing(rhs, plan.rhs)
        assert_computes_the_product(plan, out, SIZES)
    assert served > 300


def test_places_of_three_axes():
    sizes = {"x": 2, "y": 2, "z": 2}
    chance, served = random.Random(0), 0
    for _ in range(6000):
        case = drawn(chance, tuple(sizes))
        if plan := plan_or_error(case, sizes):
            served += 1
            assert_computes_the_product(plan, case[2], sizes)
    assert served > 50


def test_the_simulation_would_see_a_wrong_plan():
    """This negative control runs a gather with its axes in the wrong order."""
    case = ((), (("x", "y")), ()), ((), ("x", "y")), ((), (), ("x", "y"))
    plan = plan_of(*case, SIZES)
    assert plan.operation == "all_gather_lhs_matmul" and plan.axes == ("x", "y")
    wrong = ShardingPlan(plan.lhs, plan.rhs, plan.out, plan.spec, ("y", "x"), plan.dimension)
    assert_computes_the_product(plan, case[2], SIZES)
    with pytest.raises(AssertionError):
        assert_computes_the_product(wrong, case[2], SIZES)


B, M = 0, 1
# The cases that the docs promise: lhs [b, m, k], rhs [k, n], result [b, m, n]; operation, axes, dimension, gathers
# before.
TABLE = [
    ("x..", "..", "x..", "matmul", (), 0, ()),  # Data parallel.
    ("...", ".x", "..x", "matmul", (), 0, ()),  # Columns of the weights.
    (".x.", ".x", "..x", "all_gather_lhs_matmul", ("x",), M, ()),  # Column parallel.
    ("x..", ".x", "..x", "all_gather_lhs_matmul", ("x",), B, ()),
    ("..x", "x.", ".x.", "matmul_reduce_scatter", ("x",), M, ()),  # Row parallel.
    ("..x", "x.", "..x", "matmul_reduce_scatter", ("x",), 2, ()),
    ("..x", "x.", "...", "matmul_all_reduce", ("x",), 0, ()),
    ("x..", ".x", "x..", "all_gather_rhs_matmul", ("x",), 1, ()),  # FSDP along n, along k.
    ("x..", "x.", "x..", "all_gather_rhs_matmul", ("x",), 0, ()),
    ("xy.", "xy", "x.y", "all_gather_lhs_matmul", ("y",), M, ((0, ("x",)),)),  # FSDP beside columns, beside rows.
    ("x.y", "yx", "xy.", "matmul_reduce_scatter", ("y",), M, ((1, ("x",)),)),
    ("...", ".x", "...", "matmul", (), 0, ((1, ("x",)),)),  # FSDP, the same rows everywhere.
]


def along(given, dimensions):
    """A partition from a text, from (axes, dimension), or of n alone in the result."""
    if isinstance(given, str):
        return tuple(() if letter == "." else (letter,) for letter in given)
    axes, dimension = given
    if dimension not in dimensions:
        return ((), (), (axes, dimension))
    return tuple(axes if name == dimension else () for name in dimensions)


def planned(lhs, rhs, out, sizes=SIZES, explicit=()):
    return plan_of(along(lhs, "bmk"), along(rhs, "kn"), along(out, "bmn"), sizes, explicit)


def test_the_table():
    for *case, operation, axes, dimension, gathers in TABLE:
        plan = planned(*case)
        assert (plan.operation, plan.axes, plan.gathers) == (operation, axes, gathers)
        if axes and operation != "matmul_all_reduce":
            assert plan.dimension == dimension
    assert str(planned("xy.", "xy", "x.y")) == ("`rhs` is gathered along 'x', then all_gather_lhs_matmul along 'y'")
    assert str(planned("x..", "..", "x..")) == "matmul of each device's part"


def test_axes_of_one_device_are_as_if_they_were_not_there():
    for case in (("x..", "x.", ".x."), ("..x", "..", "..."), ("xy.", "xy", "x.y")):
        without = planned(*(text.replace("x", ".") for text in case), {"y": 4})
        assert planned(*case, {"x": 1, "y": 4}) == without


XY, YX = ("x", "y"), ("y", "x")
REFUSED = [  # The last three with 'x' Explicit and 'y' Auto: no sharding can name ('y', 'x').
    ("..x", "..", "...", (), r"'x' cuts k of `lhs` alone: shard k of `rhs`"),
    (".x.", "..", "...", (), r"the rows \(m\) of `lhs` alone: name it in `out_shard"),
    (".x.", "..", "..x", (), r"`lhs` and n of the result: shard n of `rhs` over it as well"),
    ("...", "x.", "..x", (), r"k of `rhs` and n of the result: shard n of `rhs` over it instead"),
    (".x.", "..", "x..", (), r"\(m\) of `lhs` and leading dimension 0 of the result: ask for the result"),
    ("..x", ".x", "...", (), r"k of `lhs` and n of `rhs`: shard k of `rhs`.*or jax.reshard `lhs`"),
    (".xy", "yx", "..x", (), r"one activation.*'x' gathers `lhs` while 'y' sums"),
    ("xy.", (XY, "n"), XY, (), r"leading dimension 0 of `lhs`.*\(m\)"),
    ((XY, "m"), ".x", ".yx", (), r"over \('y', 'x'\) in this order.*got \('x', 'y'\)"),
    ("y.x", "x.", (XY, "b"), (), r"come last, got \('x', 'y'\).*for \('y', 'x'\)"),
    ("...", (XY, "n"), "..y", (), r"n of `rhs` must be sharded over \('y', 'x'\)"),
    ((XY, "k"), (YX, "k"), "...", (), r"\('x', 'y'\), k of.*got \('y', 'x'\)"),
    ((XY, "k"), (XY, "k"), "x..", (), r"as a whole.*over \('x', 'y'\) in `out"),
    ("y.x", "x.", (XY, "b"), ("x",), r"leave 'x' out of `out_sharding` and jax.reshard the result"),
    ((XY, "m"), ".x", ".yx", ("x",), r"jax.reshard it so that it is whole along 'x', since"),
    ("...", (XY, "n"), "..y", ("x",), r"jax.reshard it so that it is whole along 'x', since"),
    ("..y", (XY, "k"), "...", ("x",), r"jax.reshard `rhs` so that it is whole along 'x', since"),
]  # fmt: skip


def test_refused():
    wrong_on_mixed = r"\('y', 'x'\) in `out_sharding`|or name the axes in this order|: shard it so"
    for lhs, rhs, out, explicit, message in REFUSED:
        with pytest.raises(ValueError, match=message) as error:
            planned(lhs, rhs, out, SIZES, explicit)
        assert explicit or re.search(ENDS, str(error.value))
        assert not (explicit and re.search(wrong_on_mixed, str(error.value)))
