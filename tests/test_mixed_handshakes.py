"""Launches that need one neighbour's memory, then launches that need all peers': no launch mistakes one for the other.

A device that needs only one neighbour leaves without waiting for the others, whose ready flags may still be raised. So
the key of the ready flag also says which peers a launch looks for.
"""

import pytest

from tests import sequences
from tests.sequences import Call, Trial, layout

THREE, SEEDS = layout(x=3), 6
# The handshakes of these kernels have flags at the same addresses.
MIXED = {
    "sums": (("scatter by ring", (16, 64, 64)), ("scatter m", (16, 64, 64))),
    "gather, then sums": (("ring", (136, 64, 64)), ("one shot", (72, 40, 72))),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_a_ready_flag_for_one_neighbour_is_none_for_all(mixed):
    calls = tuple(Call(THREE, "x", kind, shape) for kind, shape in MIXED[mixed])
    for seed in range(SEEDS):
        settings = {
            "completion": ("late", "random", "eager")[seed % 3],
            "scheduler": ("pct", "random")[seed % 2],
            "detect_races": True,
            "seed": seed,
        }
        trial = Trial(seed, calls, settings)
        fault = sequences.fault_of(trial)
        assert fault is None, f"{trial}\n{fault}"
