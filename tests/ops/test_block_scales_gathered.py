"""Block scales that travel with the gathered rows: exact on emulated Blackwell; unsupported calls are refused."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.gather import pull
from overlap.emulation import EmulationError, emulate
from overlap.kernels.target import emulating
from tests.ops.block_scale_cases import BLOCK, E4M3, E5M2, E8M0, config
from tests.oracle import make_mesh, on_mesh

NOTHING = lambda *_, **__: None  # noqa: E731
ONE = config(stages=2).replace(chunk_bytes=1024)
PAIR = ONE.replace(cluster=2, tile_n=128)


class Gathered:
    """Operands on `devices`, each with `m` rows, and the exact products with several right operands."""

    def __init__(self, devices, m=136, widths=(128,), k=288, batch=(), transpose_rhs=True):
        chance = np.random.default_rng(0)

        def operand(*shape, dtype):
            values = chance.integers(-3, 4, shape).astype(dtype)
            scales = (2.0 ** chance.integers(-2, 3, (*shape[:-1], k // BLOCK))).astype(E8M0)
            return values, scales, values.astype(np.float32) * np.repeat(scales.astype(np.float32), BLOCK, -1)

        lhs, lhs_scale, wide = operand(*batch, devices * m, k, dtype=E4M3)
        sides = [operand(devices * n, k, dtype=E5M2) for n in widths]
        turn = (lambda x: x) if transpose_rhs else (lambda x: x.T)
        self.given = lhs, [turn(x) for x, _, _ in sides], lhs_scale, [turn(scale) for _, scale, _ in sides]
        self.exact = [wide @ exact.T for *_, exact in sides]
        leading, side = (None,) * len(batch), P("x") if transpose_rhs else P(None, "x")
        rows = P(*leading, "x", None)
        self.specs = rows, [side] * len(widths), rows, [side] * len(widths)
        self.out = [P(*leading, None, "x")] * len(widths)
        self.mesh, self.transpose_rhs = make_mesh(x=devices), transpose_rhs

    def function(self, sizes, **more):
        keywords = dict(config=sizes, preferred_element_type=jnp.bfloat16, implementation="fused") | more

        def body(lhs, rhs, lhs_scale, rhs_scale):
            return overlap.all_gather_lhs_matmul(
                lhs, rhs, "x", lhs_scale=lhs_scale, rhs_scale=rhs_scale, transpose_rhs=self.transpose_rhs, **keywords
            )

        return on_mesh(self.mesh, body, self.specs, self.out)

    def run(self, function, cores=3, **settings):
        """Emulates one run and checks the result exactly."""
        with emulating("blackwell"), emulate(cores=cores, **settings) as run:
            results = function(*self.given)
            run.check()
        self.check(results)

    def check(self, results):
        for result, exact in zip(results, self.exact, strict=True):
            expected = exact.astype(jnp.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(np.asarray(result, np.float32), expected)


CASES = {
    "several sides, a batch": (dict(devices=2, m=40, widths=(128, 72), batch=(2,)), ONE),
    "pairs, the second tile empty": (dict(devices=2, m=264), PAIR),
    "rhs as [k, n], three devices": (dict(devices=3, m=40, transpose_rhs=False), ONE),
    "joined means nothing": (dict(devices=2, m=16), ONE.replace(joined=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_under_many_schedules(name):
    sizes, chosen = CASES[name]
    case = Gathered(**sizes)
    case.check(case.function(None, implementation="xla")(*case.given))
    function = case.function(chosen)
    for seed, completion in enumerate(("late", "eager")):
        case.run(function, completion=completion, seed=seed, laps=2)


def signal_before_the_scales_have_landed(patch):
    patch.setattr(pull, "wait_stores_landed", NOTHING)


def leave_the_last_steps_out(patch):
    divisor = pull.largest_divisor
    patch.setattr(pull, "largest_divisor", lambda steps, most: divisor(steps - 1, most))


@pytest.mark.parametrize("defect", [signal_before_the_scales_have_landed, leave_the_last_steps_out])
def test_each_defect_shows(defect, monkeypatch):
    defect(monkeypatch)
    case = Gathered(2, m=264)
    function = case.function(ONE)
    with pytest.raises((EmulationError, AssertionError)):
        for seed in range(12):
            case.run(function, cores=2, completion=("eager", "late", "random")[seed % 3], seed=seed)


def test_what_cannot_be_is_refused():
    case = Gathered(2)
    with emulating("blackwell"), pytest.raises(NotImplementedError, match="takes no `lhs_scale` and `rhs_scale` of"):
        case.function(ONE, transport="ring")(*case.given)
    with pytest.raises(NotImplementedError, match="the tensor cores of Hopper take no block scales"):
        case.function(ONE)(*case.given)
