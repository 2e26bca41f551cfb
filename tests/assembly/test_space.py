"""Each choice of the tuner and the heuristic belongs to a class of kernels, and the classes to assemble suffice."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.choice import space, tables
from overlap.choice.problem import LAYOUTS, Problem
from overlap.kernels.config import Config
from tests.assembly import blackwell, members, sweep
from tests.assembly import space as classes
from tests.assembly.space import MATMUL, OPERATIONS, TARGET, UNSEEN, classify

pytestmark = pytest.mark.one_jax
EVERY, COVER = frozenset(classes.every()), classes.cover()

# --- The classes, without a compiler ----------------------------------------------------------------------------------


def test_every_field_of_a_config_is_seen_or_is_not():
    # Put a new field into one of the two; `sweep` then measures whether that is right.
    fields = vars(Config()).keys()
    assert fields == classes.SEEN | UNSEEN.keys()
    assert not classes.SEEN & UNSEEN.keys()
    assert {*space.SHAPE, *space.FINE, *space.CHUNKS, "stages", "cluster_along"} == fields


def assert_in_a_class(problem: Problem, configs: list[Config]) -> None:
    for config in configs:
        for epilogue in (False, True)[: 1 + OPERATIONS[problem.op][2]]:
            kernel = classify(config, problem, epilogue=epilogue)
            assert kernel in EVERY, (problem, config)
        for name, values in classes.values_of(kernel).items():
            # The search may try fewer stages than fit in shared memory, but at least two.
            allowed = values if name != "stages" else range(min(values), max(values) + 1)
            assert vars(config)[name] in allowed, (problem, name, config)


INPUTS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# A problem does not determine the transport.
OF_PROBLEMS = [op for op in OPERATIONS if op != classes.ONE_SHOT]
KINDS = list(itertools.product(INPUTS, ("float16", "bfloat16", "float32")))
# Shapes that the library is built for (m, n, k), and decoding.
SHAPES = [(1, 8192, 8192), (16, 8192, 8192), (16384, 1536, 4096), (1024, 1024, 14336), (4096, 8192, 4096)]


def assert_candidates_are_enumerated(problem: Problem) -> None:
    configs = space.candidates(problem, TARGET)
    assert_in_a_class(problem, configs)
    assert space.heuristic(problem, TARGET) == next(iter(configs), None)


@pytest.mark.parametrize("layout", ["nn", *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[1:])])
def test_the_choices_for_common_products_are_enumerated(layout):
    for shape in SHAPES:
        problem = Problem(MATMUL, *shape, "bfloat16", "bfloat16", layout=layout)
        assert_candidates_are_enumerated(problem)
        # TMA cannot load a single transposed row.
        assert bool(space.candidates(problem, TARGET)) == (shape[0] > 1 or layout[0] == "n")


sizes = st.integers(1, 40000) | st.integers(1, 4000).map(lambda x: 8 * x)


@settings(max_examples=50, deadline=None)
@given(sizes, sizes, sizes, st.sampled_from(KINDS), st.sampled_from(OF_PROBLEMS), st.integers(1, 9), st.data())
def test_every_candidate_is_enumerated(m, n, k, kinds, op, count, data):
    layouts, operand_bytes, _ = OPERATIONS[op]
    many = {"batch": count} if op == MATMUL else {"devices": max(count, 2)}
    problem = Problem(op, m, n, k, *kinds, layout=data.draw(st.sampled_from(layouts)), **many)
    if jnp.dtype(problem.dtype).itemsize in operand_bytes:
        assert_candidates_are_enumerated(problem)


@pytest.mark.parametrize("op", ["matmul_all_reduce", "matmul_reduce_scatter", "matmul_reduce_scatter_n"])
def test_fewer_rows_or_columns_than_devices_have_a_choice_or_none(op):
    """A device's block of the result may be empty."""
    for (m, n), out_dtype in itertools.product(((3, 4), (1, 1), (8, 4), (3, 256), (64, 8)), ("bfloat16", "float32")):
        problem = Problem(op, m, n, 64, "bfloat16", out_dtype, devices=8)
        assert_candidates_are_enumerated(problem)


def test_what_the_shipped_table_says_is_enumerated():
    for entry in itertools.chain.from_iterable(map(tables.load, tables.shipped_files())):
        # Configurations that need too many registers with this version of jax are skipped.
        if not space.spills(entry.config):
            assert_in_a_class(entry.problem, [entry.config])


def test_swapped_tiles_of_any_rows_that_do_not_spill_are_in_a_class():
    """A class whose own rows spill has fewer rows that do not."""
    grid = itertools.product(range(8, 257, 8), (128, 256), ("cooperative", "pingpong"), (1, 2), (1, 2), "mk")
    taken = collections.Counter()
    for rows, columns, schedule, cluster, parts, along in grid:
        config = Config(tile_m=rows, tile_n=columns, stages=2, schedule=schedule, cluster=cluster, stream_k=parts,
                        swap_operands=True, cluster_along=along)  # fmt: skip
        problem = Problem(MATMUL, rows, 512, 6464, "bfloat16", "bfloat16")
        if along == "m":
            problem = dataclasses.replace(problem, m=4 * rows + 8, n=1792)
        if problem.accepts(config, TARGET) and not space.spills(config):
            kernel = classify(config, problem, epilogue=False)
            taken[kernel.along_k] += 1
            assert kernel in EVERY and kernel.tile_m >= rows, kernel
    assert min(taken[False], taken[True]) > 40


def test_the_cover_has_every_loop_and_every_ending_with_every_tile():
    for parts in (("loop", "tile"), ("pulls", "tile", "ending")):
        combinations = [
            {tuple(getattr(kernel, part) for part in parts) for kernel in kernels} for kernels in (EVERY, COVER)
        ]
        assert combinations[0] == combinations[1]
    assert len(COVER) == len(set(COVER))
    # Also every value of every field that is not part of the class, in many of the classes.
    drawn = [next(members.members(kernel)) for kernel in COVER]
    for name, values in UNSEEN.items():
        for value in values:
            assert sum(vars(member.config)[name] == value for member in drawn) >= 4, (name, value)


def test_the_sweep_compares_members_of_classes_that_there_are():
    sampled = sweep.samples(COVER)
    assert {kernel.tile for kernel in sampled} == set(sweep.SAMPLED)


def test_clusters_along_k_take_no_more_tiles_than_there_are_clusters():
    for cluster, most in ((2, TARGET.num_cores // 2), (4, 30)):
        config = Config(tile_n=128, stages=3, cluster=cluster, cluster_along="k")
        accepted = [
            Problem(MATMUL, 128, 128 * tiles, 4096, "bfloat16", "bfloat16").accepts(config, TARGET)
            for tiles in (1, most, most + 1, 2 * most)
        ]
        assert accepted == [True, True, False, False]


def test_every_pair_of_values_and_what_needs_most_registers_is_assembled_before_a_release():
    for space_of in (classes, blackwell):
        pairs = [set().union(*map(classes.value_pairs, kernels)) for kernels in (space_of.every(), space_of.pairwise())]
        assert pairs[0] == pairs[1]
    assert {(kernel.tile, (kernel.pulls, *kernel.ending)) for kernel in classes.pairwise()} >= {*classes.MOST_REGISTERS}


@pytest.mark.parametrize("space_of", [classes, blackwell])
def test_every_run_assembles_each_operation_value_and_feature(space_of):
    kernels = [space_of.every(), space_of.core()]
    every, core = (set().union(*map(classes.values_and_features, of)) for of in kernels)
    assert every == core and {kernel.op for kernel in kernels[0]} == set(space_of.OPERATIONS)
    assert any(cuts for op, cuts in every if cuts == "cuts") and len(kernels[1]) <= 20
