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
from tests.ops.block_scale_cases import Product, config
from tests.oracle import make_mesh, on_mesh

NOTHING = lambda *_, **__: None  # noqa: E731
ONE = config(stages=2).replace(chunk_bytes=1024)
PAIR = ONE.replace(cluster=2, tile_n=128)


class Gathered:
    """Operands on `devices`, each with `m` rows, and the exact products with several right operands."""

    def __init__(self, devices, m=136, widths=(128,), k=288, batch=(), right="nk"):
        # The left operand is drawn first, so all of these have the same.
        products = [Product(0, devices * m, devices * n, k, batch=batch, right=right) for n in widths]
        rhs, scales = [x.rhs for x in products], [x.rhs_scale for x in products]
        self.given = products[0].lhs, rhs, products[0].lhs_scale, scales
        self.exact, self.transposes = [x.exact for x in products], products[0].transposes
        leading, side = (None,) * len(batch), P("x") if right == "nk" else P(None, "x")
        rows = P(*leading, "x", None)
        self.specs = rows, [side] * len(widths), rows, [side] * len(widths)
        self.out = [P(*leading, None, "x")] * len(widths)
        self.mesh = make_mesh(x=devices)

    def function(self, sizes, **more):
        keywords = dict(config=sizes, preferred_element_type=jnp.bfloat16, implementation="fused") | more
        keywords |= {"transpose_rhs": self.transposes["transpose_rhs"]}

        def body(lhs, rhs, lhs_scale, rhs_scale):
            return overlap.all_gather_lhs_matmul(lhs, rhs, "x", lhs_scale=lhs_scale, rhs_scale=rhs_scale, **keywords)

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
    "rhs as [k, n], three devices": (dict(devices=3, m=40, right="kn"), ONE),
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
