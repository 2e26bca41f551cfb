"""Tests that kernels find their peers' memory by position, for any device order and number of rows.

The tests hold with one process for all GPUs and with one process per GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from tests import oracle
from tests.ops import mesh_cases
from tests.ops.mesh_cases import fused, layout

ROWS = pytest.mark.parametrize("m_shard", [16, 512])


@ROWS
def test_permuted_devices(devices, m_shard):
    case = layout("x", tuple(reversed(range(devices))), x=devices)
    measure = mesh_cases.errors(case, fused(case))
    for seed in range(3):
        oracle.assert_close(measure(*mesh_cases.operands(case, (m_shard, 1024, 1024), jnp.bfloat16, seed)))


@ROWS
def test_ranks_that_run_against_the_positions(devices, m_shard, monkeypatch):
    """The test makes ranks differ from positions, as on several hosts (test_several_hosts.py)."""
    mesh_cases.let_ranks_run_against_the_positions(monkeypatch)
    case = layout("x", x=devices)
    measure = mesh_cases.errors(case, fused(case))
    oracle.assert_close(measure(*mesh_cases.operands(case, (m_shard, 1024, 2048), jnp.bfloat16, 11)))


@ROWS
def test_operands_from_outside_a_mesh_that_is_set_and_two_calls_with_the_same_operand(devices, m_shard):
    """The lowering sees no devices. XLA must not give the two kernels the same memory for their flags."""
    mesh = oracle.make_mesh(x=devices)
    rng = np.random.default_rng(7)
    shapes, specs = ((devices * m_shard, 512), *((512, devices * 256),) * 2), (P("x"), *(P(None, "x"),) * 2)
    arrays = [rng.integers(-3, 4, shape).astype(np.float32) for shape in shapes]
    operands = [
        jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index, x=x: x[index].astype(jnp.bfloat16))
        for shape, spec, x in zip(shapes, specs, arrays, strict=True)
    ]

    def layer(lhs, first, second):
        return [overlap.all_gather_lhs_matmul(lhs, side, "x", implementation="fused") for side in (first, second)]

    with jax.set_mesh(mesh):
        call = jax.jit(jax.shard_map(layer, in_specs=specs, out_specs=[P(None, "x")] * 2, check_vma=False))
        for _ in range(3):
            for out, side in zip(call(*operands), arrays[1:], strict=True):
                for shard in out.addressable_shards:
                    expected = (arrays[0] @ side)[shard.index].astype(jnp.bfloat16)
                    assert (np.asarray(shard.data) == expected).all()
