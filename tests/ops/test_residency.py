"""Launches in which only some CTAs run at a time, as when another kernel occupies the other cores.

`resident` does not affect tracing, so each kernel is traced once for all values.
"""

import pytest
from jax import lax

from overlap import Config
from overlap.collectives import communicator
from overlap.collectives.gather.pull import PullTransport
from overlap.collectives.gather.ring import RingTransport
from overlap.emulation import DeadlockError
from overlap.kernels.grid import GRID_AXIS
from overlap.primitives import atomics, copies
from tests.ops.contract import FORMS, JOINED, RING, SMALL, Call, assert_exact, running
from tests.oracle import make_mesh

slow = pytest.mark.slow
CORES, COMPLETIONS = 4, ("late", "eager", "random")


class Kernel:
    """A call that is traced once and runs with any number of resident CTAs."""

    def __init__(self, call: Call, devices: int = 2) -> None:
        self.arrays = call.arrays(devices)
        self.program = call.program(make_mesh(x=devices), self.arrays)
        self.expected = call.expected(self.arrays, devices)

    def run(self, resident: int, cores: int = CORES, laps: int = 2) -> None:
        settings = dict(completion=COMPLETIONS[resident % 3], seed=resident, laps=laps)
        with running(cores=cores, resident=resident, **settings):
            result = self.program(self.arrays)
        assert_exact(result, self.expected)

    def hangs(self, resident: int, cores: int = CORES) -> str:
        with pytest.raises(DeadlockError) as caught:
            self.run(resident, cores, laps=1)
        return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=slow if n in ("matmul", "weights n", "all, columns") else []) for n in FORMS if n != "ring"],
)
def test_any_number_of_ctas_suffices(name):
    kernel = Kernel(FORMS[name], 3 if name in ("pull", "scatter m") else 2)
    for resident in (1, 3):
        kernel.run(resident)


@pytest.mark.parametrize("name", ["pull", "joined", "weights k", "scatter m"])
def test_work_that_is_dealt_beforehand_is_reported(name, monkeypatch):
    """Assigns work to all CTAs of the grid in advance, whether they run or not, instead of by a counter."""

    def deal(_):
        def dealt(counter, end, previous=None):
            del counter, end
            return lax.axis_index(GRID_AXIS) if previous is None else previous + CORES

        return dealt

    for module in (atomics, copies, communicator):  # Each calls `draw` through its own name.
        monkeypatch.setattr(module, "draw", deal(module.draw))
    kernel = Kernel(FORMS[name])
    kernel.run(CORES)
    kernel.hangs(1)


def test_the_ring_needs_them_all():
    """The CTA that multiplies rows also forwards them: `RingTransport.needs_all_ctas`."""
    assert RingTransport.needs_all_ctas and not PullTransport.needs_all_ctas
    # Two rows of three tiles. The second row begins at the last of four CTAs, and all other CTAs come to need its rows.
    config = Config(tile_n=64, stages=2, order_minor="n", order_width=3)
    kernel = Kernel(FORMS["ring"].but(m=136, n=192, k=136, config=config, keywords=RING), 3)
    kernel.run(CORES)
    for resident in range(1, CORES):
        assert "were never launched" in kernel.hangs(resident)


PARTS = 3
WEIGHTS_CUT = Config(tile_n=128, stages=2, chunk_bytes=1024, stream_k=PARTS)
CUT = {
    "pull": FORMS["pull"].but(m=64, n=256, k=192, config=SMALL.replace(tile_n=256, stream_k=PARTS)),
    "joined": FORMS["joined"].but(m=16, n=264, k=192, config=JOINED.replace(tile_n=256, stream_k=PARTS)),
    "weights n": FORMS["weights n"].but(m=64, n=64, k=192, config=WEIGHTS_CUT),
    "weights k": FORMS["weights k"].but(m=64, n=136, k=96, config=WEIGHTS_CUT),
}  # (Two tiles each.)


@pytest.mark.parametrize("name", CUT)
def test_as_many_suffice_as_a_tile_has_parts(name):
    kernel = Kernel(CUT[name])
    for resident in (PARTS, PARTS + 2):
        kernel.run(resident, cores=2 * PARTS)
    # Fewer CTAs do not suffice, which shows that the tiles were cut.
    kernel.hangs(PARTS - 1, cores=2 * PARTS)
