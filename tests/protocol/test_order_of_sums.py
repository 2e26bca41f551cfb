"""Parts of a sum are added in one order and rounded once: bits that integers do not tell apart."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests.oracle import make_mesh, on_mesh
from tests.protocol.defects import source
from tests.protocol.protocol_cases import ONE_SHOT, SUMS

SHOT, SUM = "collectives.reduce.one_shot_kernel._Body.", "collectives.reduce.blocks_kernel._Body."


def sums_of(kernel, parts, dtype):
    """Sums one number (given as two factors) of each of four devices. Returns each device's sums, one per block.

    `kernel` is "spread m", "one shot", or "scatter m", of which each device has one block.
    """
    lhs, rhs = np.zeros((4 * 8, 4 * 64)), np.zeros((4 * 64, 72))
    for device, factors in enumerate(parts):
        for k, (left, right) in enumerate(factors):
            lhs[:, 64 * device + k], rhs[64 * device + k] = left, right
    given = {"preferred_element_type": dtype, "implementation": "fused"}

    def summed(a, b):
        if kernel == "scatter m":
            return overlap.matmul_reduce_scatter(a, b, "x", config=SUMS, **given)
        return overlap.matmul_all_reduce(a, b, "x", config=SUMS.replace(one_shot=kernel == ONE_SHOT), **given)[None]

    function = on_mesh(make_mesh(x=4), summed, (P(None, "x"), P("x", None)), P("x"))
    with emulate(cores=2):
        result = np.asarray(function(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)), np.float32)
    result = result[None] if kernel == "scatter m" else result
    # On a device, all values of a block are equal.
    np.testing.assert_array_equal(result, np.repeat(result[:, ::8, :1], 8, 1) * np.ones(72))
    return result[:, ::8, 0]


LARGE, SMALL = [(4096, 4096)], [(1, 1)]
ORDER = [LARGE, SMALL, [(-4096, 4096)], SMALL]  # The products are 2²⁴, 1, −2²⁴, 1.
ROUNDING = [[(256, 1), (1, 1)], [(-256, 1)], [(0, 0)], [(0, 0)]]  # The products are 257, which bfloat16 rounds to 256.
# For each block, add the parts of the devices before its owner, nearest first; then add this sum to the own part.
NUMBERS = np.array([2.0**24, 1, -(2.0**24), 1], np.float32)
IN_BLOCKS = [functools.reduce(np.add, [NUMBERS[(me - d) % 4] for d in (1, 2, 3)]) + NUMBERS[me] for me in range(4)]
EXPECTED = {
    ("scatter m", "order"): IN_BLOCKS,
    ("spread m", "order"): IN_BLOCKS,
    (ONE_SHOT, "order"): [functools.reduce(np.add, NUMBERS)] * 4,
    # The own part is not rounded, only the result is. In one shot the own part is rounded too.
    ("spread m", "rounding"): [1, 0, 0, 0],
    (ONE_SHOT, "rounding"): [0, 0, 0, 0],
}
PARTS = {"order": (ORDER, jnp.float32), "rounding": (ROUNDING, jnp.bfloat16)}


@pytest.mark.parametrize(("kernel", "what"), EXPECTED)
def test_all_devices_have_the_bits_of_one_order_and_one_rounding(kernel, what):
    result = sums_of(kernel, *PARTS[what])
    np.testing.assert_array_equal(result, [EXPECTED[kernel, what]] * len(result))


CHANGES = {
    "the own part first": (ONE_SHOT, "order", [
        (SHOT + "_term_at", 'part = OneOf', "position = (self.me + position) % self.group.size; part = OneOf"),
    ]),
    "the own part unrounded": (ONE_SHOT, "rounding", [
        ("kernels.tma.finish._finish_exchanged", "dataclasses.replace(own, terms_replace_sums=True)", "own"),
        (SHOT + "hooks", "terms=self.group.size,", "terms=self.group.size - 1,"),
        (SHOT + "_term_at", "part = OneOf", "position = position + jnp.where(position < self.me, 0, 1); part = OneOf"),
    ]),
    "backwards": ("scatter m", "order", [
        (SUM + "hooks", "schedule.step_of_term(tile.step, term)", "2 - schedule.step_of_term(tile.step, term)"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_another_order_or_rounding_shows(change):
    kernel, what, changes = CHANGES[change]
    with source.rewritten(*changes):
        result = sums_of(kernel, *PARTS[what])
    assert np.any(result != EXPECTED[kernel, what])
    # Then devices have sums that differ from each other, too.
    assert kernel != ONE_SHOT or len({row.tobytes() for row in result}) > 1
