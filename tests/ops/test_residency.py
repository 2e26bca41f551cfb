"""Launches in which only some CTAs run at a time, as when another kernel occupies the other cores.

`resident` does not affect tracing, so each kernel is traced once for all values.
"""

import dataclasses

import pytest
from jax import lax

from overlap.collectives.gather.pull import PullTransport
from overlap.collectives.gather.ring import RingTransport
from overlap.emulation import DeadlockError
from overlap.kernels.grid import GRID_AXIS
from tests.ops.several_sides_cases import Form
from tests.protocol.handshake_cases import change_draws
from tests.protocol.protocol_cases import JOINED, KERNELS, ONE, PULL, WEIGHTS, clean, of_rows, of_weights

CORES = 4
COMPLETIONS = ("late", "eager", "random")
ANY = [kernel for kernel in KERNELS if kernel != "ring"]


@pytest.mark.parametrize("kernel", ANY)
def test_any_number_of_ctas_suffices(kernel):
    for resident in range(1, CORES + 1):
        completion = COMPLETIONS[resident % len(COMPLETIONS)]
        clean(kernel).run(cores=CORES, resident=resident, completion=completion, seed=resident, laps=2)


@pytest.mark.parametrize("kernel", ["pull", "joined", "rhs k", "scatter m"])
def test_work_that_is_dealt_beforehand_is_reported(kernel, monkeypatch):
    """Assigns work to all CTAs of the grid in advance, whether they run or not, instead of by a counter."""

    def deal(_):
        def dealt(counter, end, previous=None):
            del counter, end
            return lax.axis_index(GRID_AXIS) if previous is None else previous + CORES

        return dealt

    change_draws(monkeypatch, deal)
    dealt = KERNELS[kernel](3)
    dealt.run(cores=CORES, laps=2)
    assert isinstance(dealt.report(seeds=1, cores=CORES, resident=1), DeadlockError)


def test_the_ring_needs_them_all():
    """The CTA that multiplies rows also forwards them: `RingTransport.needs_all_ctas`."""
    assert RingTransport.needs_all_ctas and not PullTransport.needs_all_ctas
    # Two rows of three tiles. The second row begins at the last of four CTAs, and all other CTAs come to need its rows.
    form = Form(136, (192,), 136, container=None)
    kernel = of_rows(form, dataclasses.replace(PULL, order_minor="n", order_width=3), transport="ring")
    kernel.run(cores=CORES, laps=2)
    for resident in range(1, CORES):
        report = kernel.report(seeds=1, cores=CORES, resident=resident)
        assert isinstance(report, DeadlockError) and "were never launched" in str(report)


PARTS = 3
CUT_ROWS = dataclasses.replace(PULL, tile_n=256, stream_k=PARTS)
CUT = {
    "pull": lambda: of_rows(dataclasses.replace(ONE, widths=(256,), k=192), CUT_ROWS, 2),
    "pull, gathered": lambda: of_rows(dataclasses.replace(ONE, widths=(256,), k=192, gathered=True), CUT_ROWS, 2),
    "joined": lambda: of_rows(
        Form(16, (264,), 192, container=None), dataclasses.replace(JOINED, tile_n=256, stream_k=PARTS), 2
    ),
    "rhs n": lambda: of_weights("n", dataclasses.replace(WEIGHTS, stream_k=PARTS), 2, shard=(192, 64)),
    "rhs k": lambda: of_weights("k", dataclasses.replace(WEIGHTS, stream_k=PARTS), 2, shard=(96, 136)),
}


@pytest.mark.parametrize("name", CUT)
def test_as_many_suffice_as_a_tile_has_parts(name):
    kernel, cores = CUT[name](), 2 * PARTS
    for resident in range(PARTS, cores + 1):
        kernel.run(cores=cores, resident=resident, completion=COMPLETIONS[resident % 3], seed=resident, laps=2)
    # Fewer CTAs do not suffice, which shows that the tiles were cut.
    assert isinstance(kernel.report(seeds=1, cores=cores, resident=PARTS - 1), DeadlockError)
