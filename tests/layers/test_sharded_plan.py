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
TABLE = {
    "data parallel": ("x..", "..", "x..", "matmul", (), 0, ()),
    "columns of the weights": ("...", ".x", "..x", "matmul", (), 0, ()),
    "column parallel, sequence": (".x.", ".x", "..x", "all_gather_lhs_matmul", ("x",), M, ()),
    "column parallel, batch": ("x..", ".x", "..x", "all_gather_lhs_matmul", ("x",), B, ()),
    "row parallel, sequence": ("..x", "x.", ".x.", "matmul_reduce_scatter", ("x",), M, ()),
    "row parallel, columns": ("..x", "x.", "..x", "matmul_reduce_scatter", ("x",), 2, ()),
    "row parallel, whole": ("..x", "x.", "...", "matmul_all_reduce", ("x",), 0, ()),
    "FSDP along n": ("x..", ".x", "x..", "all_gather_rhs_matmul", ("x",), 1, ()),
    "FSDP along k": ("x..", "x.", "x..", "all_gather_rhs_matmul", ("x",), 0, ()),
    "FSDP beside columns": ("xy.", "xy", "x.y", "all_gather_lhs_matmul", ("y",), M, ((0, ("x",)),)),
    "FSDP beside rows": ("x.y", "yx", "xy.", "matmul_reduce_scatter", ("y",), M, ((1, ("x",)),)),
    "FSDP, the same rows everywhere": ("...", ".x", "...", "matmul", (), 0, ((1, ("x",)),)),
}


def partition(text):
    return tuple(() if letter == "." else (letter,) for letter in text)


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    *case, operation, axes, dimension, gathers = TABLE[name]
    plan = plan_of(*map(partition, case), SIZES)
    assert (plan.operation, plan.axes, plan.gathers) == (operation, axes, gathers)
    if axes and operation != "matmul_all_reduce":
        assert plan.dimension == dimension


def test_what_says_what_happens():
    plan = plan_of(partition("xy."), partition("xy"), partition("x.y"), SIZES)
    assert str(plan) == "`rhs` is gathered along 'x', then all_gather_lhs_matmul along 'y'"
    assert str(plan_of(partition("x.."), partition(".."), partition("x.."), SIZES)) == "matmul of each device's part"


def test_axes_of_one_device_are_as_if_they_were_not_there():
    for case in (("x..", "x.", ".x."), ("..x", "..", "..."), ("xy.", "xy", "x.y")):
        with_one = plan_of(*map(partition, case), {"x": 1, "y": 4})
        without = plan_of(*(partition(text.replace("x", ".")) for text in case), {"y": 4})
        assert with_one == without


REFUSED = {
    "k of lhs alone": ("..x", "..", "...", r"'x' cuts k of `lhs` alone: shard k of `rhs`"),
    "rows that are whole in the result": (".x.", "..", "...", r"the rows \(m\) of `lhs` alone: name it in `out_shard"),
    "rows to columns": (".x.", "..", "..x", r"`lhs` and n of the result: shard n of `rhs` over it as well"),
    "FSDP to columns": ("...", "x.", "..x", r"k of `rhs` and n of the result: shard n of `rhs` over it instead"),
    "rows to batch": (".x.", "..", "x..", r"\(m\) of `lhs` and leading dimension 0 of the result: ask for the result"),
    "k against n": ("..x", ".x", "...", r"k of `lhs` and n of `rhs`: shard k of `rhs`.*or jax.reshard `lhs`"),
    "two communications": (".xy", "yx", "..x", r"one activation.*'x' gathers `lhs` while 'y' sums"),
    "two dimensions gathered": ("xy.", (("x", "y"), "n"), ("x", "y"), r"leading dimension 0 of `lhs`.*\(m\)"),
    "a gather that is not last": ((("x", "y"), "m"), ".x", ".yx", r"over \('y', 'x'\) in this order.*got \('x', 'y'\)"),
    "a scatter that is not last": ("y.x", "x.", (("x", "y"), "b"), r"come last, got \('x', 'y'\).*for \('y', 'x'\)"),
    "weights in another order": ("...", (("x", "y"), "n"), "..y", r"n of `rhs` must be sharded over \('y', 'x'\)"),
    "k in another order": ((("x", "y"), "k"), (("y", "x"), "k"), "...", r"\('x', 'y'\), k of.*got \('y', 'x'\)"),
    "half of a sum scattered": ((("x", "y"), "k"), (("x", "y"), "k"), "x..", r"as a whole.*over \('x', 'y'\) in `out"),
}  # fmt: skip


def along(given, dimensions):
    """A partition from a text, from (axes, dimension), or of n alone in the result."""
    if isinstance(given, str):
        return partition(given)
    axes, dimension = given
    if dimension not in dimensions:
        return ((), (), (axes, dimension))
    return tuple(axes if name == dimension else () for name in dimensions)


MIXED = {
    "a scatter": ("y.x", "x.", (("x", "y"), "b"), r"leave 'x' out of `out_sharding` and jax.reshard the result"),
    "a gather": ((("x", "y"), "m"), ".x", ".yx", r"jax.reshard it so that it is whole along 'x', since"),
    "weights": ("...", (("x", "y"), "n"), "..y", r"jax.reshard it so that it is whole along 'x', since"),
    "k": ("..y", (("x", "y"), "k"), "...", r"jax.reshard `rhs` so that it is whole along 'x', since"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_advice_on_mixed_meshes(name):
    """'x' is Explicit and 'y' is Auto: no sharding can name ('y', 'x')."""
    lhs, rhs, out, message = MIXED[name]
    with pytest.raises(ValueError, match=message) as error:
        plan_of(along(lhs, "bmk"), along(rhs, "kn"), along(out, "bmn"), SIZES, ("x",))
    assert not re.search(
        r"\('y', 'x'\) in `out_sharding`|or name the axes in this order|: shard it so", str(error.value)
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    lhs, rhs, out, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as error:
        plan_of(along(lhs, "bmk"), along(rhs, "kn"), along(out, "bmn"), SIZES)
    assert re.search(ENDS, str(error.value))
