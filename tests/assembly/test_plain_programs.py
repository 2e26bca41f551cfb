"""Products that XLA computes make the program of plain JAX, compiled for four H200s: equal dots, collectives, memory.

Compiling needs no GPU. The children of `step_cases` take about 3 s of CPU for each program.
"""

import functools

import pytest

from tests.assembly.assembly import unavailable_reason
from tests.assembly.step_cases import LARGE, StepCase, count, counted

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
# The first one sees most: where weights are gathered, XLA shares gathers, or keeps their results.
CASES = [
    (mesh, explicit) if mesh == (4, 1) and not explicit else pytest.param(mesh, explicit, marks=pytest.mark.slow)
    for explicit in (False, True) for mesh in ((4, 1), (1, 4), (2, 2))
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "explicit"), CASES)
def test_the_program_is_that_of_plain_jax(mesh, explicit):
    """Two blocks, forward and backward. The plain layers have Auto axes."""
    plain, ours = counted(StepCase("plain", mesh, blocks=2), StepCase("overlap", mesh, explicit, blocks=2))
    # Fourteen products, each with two cotangents. XLA joins some that share an operand.
    dots = sum(number for name, number in plain.operations.items() if name.startswith("dot "))
    assert 14 <= dots <= 42 and any("all-reduce" in name for name in plain.operations)
    assert ours.operations == plain.operations
    assert ours.shard_maps == plain.shard_maps == 4  # Those of attention.
    # A copy in float32 of one of a block's results takes 0.8% or more.
    assert ours.temp_bytes <= 1.005 * plain.temp_bytes


@functools.cache
def gathered_weights():
    """The shapes of a block's weights, whole, and their bytes in bfloat16."""
    (hidden, mlp, heads, kv_heads, size), _ = LARGE
    shapes = [(hidden, heads * size), *[(hidden, kv_heads * size)] * 2, (heads * size, hidden)]
    shapes += [(hidden, mlp), (hidden, mlp), (mlp, hidden)]
    return shapes, 2 * sum(rows * columns for rows, columns in shapes)


def gathers_of(operations, shape):
    """How often an array of this shape, or its transpose, is gathered."""
    return sum(operations.get(f"all-gather bf16[{a},{b}]", 0) for a, b in {shape, shape[::-1]})


@pytest.mark.slow
def test_what_is_kept_of_gathered_weights():
    """False gathers each of them twice, and needs less memory. None is as plain JAX, which keeps them, and as True."""
    given = [StepCase("overlap", (4, 1), keep_gathered=keep, blocks=3, large=True) for keep in (False, None, True)]
    again, default, kept = counted(*given)
    shapes, block_bytes = gathered_weights()
    for shape in {tuple(sorted(shape)) for shape in shapes}:
        weights = 3 * sum(tuple(sorted(other)) == shape for other in shapes)
        found = [gathers_of(program.operations, shape) for program in (again, default, kept)]
        assert found == [2 * weights, weights, weights], shape
    # Of three blocks the weights of at most two are whole at a time: of the one that runs, and of the next.
    assert again.temp_bytes <= default.temp_bytes - block_bytes
    assert default.temp_bytes == kept.temp_bytes


def test_the_counts_see_dots_and_collectives_in_each_form():
    text = """
      %a = bf16[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}
      %b = ((f32[2,4]{1,0}, bf16[3]{0}), (f32[8,4]{1,0}, bf16[12]{0})) all-gather-start(%x, %z), channel_id=1
      %c = (f32[8,4]{1,0}, bf16[12]{0}) all-gather-done(%b)
      %d = f32[2]{0} reduce-scatter(%e), channel_id=2
      %f = f32[8]{0} fusion(%e), kind=kLoop
      %g = (f32[2]{0}, f32[4]{0}) all-reduce(%h, %i)
    """
    assert count(text) == {
        "dot bf16[8,4]": 1, "all-gather f32[8,4]": 1, "all-gather bf16[12]": 1, "reduce-scatter f32[2]": 1,
        "all-reduce f32[2]": 1, "all-reduce f32[4]": 1,
    }  # fmt: skip
