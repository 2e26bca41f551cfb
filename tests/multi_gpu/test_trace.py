"""Traces on real GPUs: marks do not change the result, and all devices share one time scale."""

import jax
import pytest

from overlap.choice.problem import Problem
from overlap.primitives.marks import Work
from overlap.tuning import trace
from overlap.tuning.programs import draw_operands, mesh_of


@pytest.mark.parametrize("op", ["all_gather_lhs_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_call_is_recorded(devices, op):
    if jax.process_count() > 1:
        pytest.skip("a trace is of one process")
    mesh = mesh_of(jax.devices()[:devices])
    problem = Problem(op, 1024 * devices, 4096, 4096, "bfloat16", "bfloat16", devices=devices)
    made = trace.record(problem, draw_operands(problem, mesh, 0), mesh, None, 2048)
    (timeline,) = made.timelines
    assert made.same_bits
    assert (timeline.unit, timeline.missing) == ("µs", 0)
    # The kernels take a few hundred microseconds; the clocks agree to a few microseconds.
    assert 20 < timeline.end < 20_000
    assert 0 <= timeline.clock_error < 10
    for device in range(devices):
        of_device = [span for span in timeline.spans if span.device == device]
        assert all(span.start <= span.end for span in of_device)
        tiles = {span.number for span in of_device if span.work == Work.MULTIPLY}
        assert tiles == set(range(max(tiles) + 1))
        # No device can end before all have begun, since each needs the others' data.
        assert max(span.end for span in of_device) > max(
            min(span.start for span in timeline.spans if span.device == other) for other in range(devices)
        )
    assert sum(timeline.share(0, "compute", work) for work in Work) == pytest.approx(1, abs=0.5)
