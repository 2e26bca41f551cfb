"""`all_gather_lhs_matmul` on meshes of 4 GPUs: permuted devices, tuples of axes in both orders, one axis of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracle
from tests.ops import mesh_cases
from tests.ops.mesh_cases import fused, layout

pytestmark = pytest.mark.gpus(4)

PERMUTED = (2, 0, 3, 1)
LAYOUTS = [
    layout("x", PERMUTED, x=4),
    layout("x", (3, 2, 1, 0), x=4),
    *(layout(over, order, a=2, b=2) for over in ("a", "b", ("a", "b"), ("b", "a")) for order in (None, PERMUTED)),
    layout("x", x=3),
    layout("x", (1, 2, 0), x=3),
]
SHAPES = [(1024, 2048, 4096), (256, 512, 512), (200, 264, 136)]


@pytest.fixture(params=LAYOUTS, ids=str)
def case(request):
    count = int(np.prod([size for _, size in request.param.sizes]))
    if jax.process_count() > 1 and jax.device_count() != count:
        pytest.skip(f"one process per GPU: this layout is for a job of {count}")
    return request.param


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_within_twice_the_unfused_product(case, shape):
    measure = mesh_cases.errors(case, fused(case))
    for seed in range(3):  # Three launches in a row, each with its own operands.
        oracle.assert_close(measure(*mesh_cases.operands(case, shape, jnp.bfloat16, seed)))


def test_repeated_launches_agree_bit_for_bit(case):
    lhs, rhs = mesh_cases.operands(case, (512, 1024, 1024), jnp.float16, seed=7)
    lhs_spec, rhs_spec, out_spec = case.specs()
    launch = oracle.on_mesh(case.mesh(), fused(case), in_specs=(lhs_spec, rhs_spec), out_specs=out_spec)
    first = launch(lhs, rhs)
    same = jax.jit(lambda a, b: (a == b).all())
    for _ in range(5):
        assert bool(same(first, launch(lhs, rhs)))


@pytest.mark.parametrize("transport", ["pull", "ring"])
def test_launches_in_a_loop_with_operands_that_change(case, transport):
    worst = mesh_cases.errors_in_a_loop(case, fused(case, transport=transport), 50)
    assert float(worst(*mesh_cases.operands(case, (512, 1024, 1024), jnp.bfloat16, seed=3))) < 1e-2


def test_gradients(case):
    lhs, rhs = mesh_cases.operands(case, (128, 256, 64), jnp.bfloat16, seed=6)
    for error in mesh_cases.gradient_errors(case, fused(case))(lhs * 0.1, rhs * 0.1):
        assert float(error) < 2e-2


@pytest.mark.parametrize("order", [None, PERMUTED], ids=["ordered", "permuted"])
def test_two_rings_of_one_mesh_in_one_program(order):
    if jax.process_count() > 1 and jax.device_count() != 4:
        pytest.skip("one process per GPU: this test is for a job of 4")
    first, second = (layout(over, order, a=2, b=2) for over in ("a", ("b", "a")))

    def operand(seed, shape):
        return jax.device_put(
            np.random.default_rng(seed).standard_normal(shape).astype(jnp.bfloat16),
            jax.NamedSharding(first.mesh(), jax.P()),
        )

    errors = mesh_cases.errors_of_two_rings(first, second, fused)(operand(8, (256, 512)), operand(9, (512, 512)))
    for error in errors:
        assert float(error) < 1e-2


@pytest.mark.parametrize("transport", ["pull", "ring"])
def test_ranks_that_run_against_the_positions(transport, monkeypatch):
    """Ranks and positions differ, as on several hosts. One process can test this; see also test_several_hosts.py."""
    mesh_cases.let_ranks_run_against_the_positions(monkeypatch)
    case = layout("x", x=4)
    measure = mesh_cases.errors(case, fused(case, transport=transport))
    oracle.assert_close(measure(*mesh_cases.operands(case, (1024, 1024, 2048), jnp.bfloat16, 11)))
