"""Tests added because injected defects had gone unnoticed, in sums by ring and in fused gradients of weights."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.gather.ring import RingTransport
from overlap.collectives.reduce import blocks_kernel
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.emulation import emulate
from overlap.kernels.hooks import Tile
from overlap.kernels.hopper import mainloop
from tests.explained import answer
from tests.oracle import make_mesh
from tests.product_cases import normal
from tests.scatter_cases import BF16, F16, F32, SMALL, assert_close

DEVICES = 4


@pytest.mark.parametrize("by_ring", [False, True])
def test_who_waits_for_a_term_names_its_sender(by_ring, monkeypatch):
    config = overlap.Config(tile_m=64, tile_n=128)
    schedule = ReduceScatterSchedule.of(DEVICES, "m", (1, 64, 128), (2, 64, 64), 2, config)
    schedule = dataclasses.replace(schedule, uses_ring=by_ring)
    loop = lambda first, end: lambda act: [act(index) for index in range(first, end)]  # noqa: E731
    monkeypatch.setattr(blocks_kernel, "pl", types.SimpleNamespace(loop=loop))
    for me in range(DEVICES):
        for step in (step for step in range(DEVICES) if schedule.has_terms(step)):
            waits = []
            handshake = types.SimpleNamespace(wait_for=lambda role, flag, times, sender: waits.append((flag, sender)))  # noqa: B023
            flag = lambda which, step, tile: step  # noqa: E731
            body = types.SimpleNamespace(schedule=schedule, me=me, _handshake=handshake, _flag=flag)
            blocks_kernel._Body._await_terms(body, Tile(step, 0, 0))
            # The flag's step tells which device computed each term and sent it here.
            assert all(schedule.receiver(sender, step) == me for step, sender in waits)
            assert len(waits) == schedule.terms


@pytest.mark.parametrize("transport", [None, "push", "ring"])
def test_of_one_device_nothing_travels(transport):
    operand = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    explanation = answer(
        overlap.matmul_reduce_scatter, operand, operand, "x", mesh=make_mesh(x=1), transport=transport,
        implementation="fused", config=overlap.Config(tile_m=64, tile_n=128, stages=2),
    )  # fmt: skip
    assert explanation.transport == ""


def test_who_sends_own_tiles_too_has_most_registers_for_it():
    """A kernel never takes more registers than at launch: 168 for each of 384 threads."""

    def registers(**exchange):
        hooks = types.SimpleNamespace(exchange=types.SimpleNamespace(**exchange) if exchange else None)
        return mainloop._registers(hooks)

    forms = [registers(), registers(own_stored=None), registers(own_stored=lambda tile: None)]
    transfer = [of_transfer for _, of_transfer in forms]
    assert transfer == sorted(set(transfer))
    assert {mainloop.COMPUTE_WARPGROUPS * compute + moved for compute, moved in forms} == {3 * 168}


ROWS, COLUMNS = P("x", None), P(None, "x")


def gradients(operation, in_specs, out_specs, operands, **options):
    mapped = jax.shard_map(
        lambda *given: operation(*given, "x", **options), mesh=make_mesh(x=2), in_specs=in_specs, out_specs=out_specs,
        check_vma=False,
    )  # fmt: skip

    def loss(*given):
        return sum((out.astype(F32) ** 2).sum() for out in jax.tree.leaves(mapped(*given)))

    with emulate(cores=2):
        return jax.block_until_ready(jax.jit(jax.grad(loss, argnums=tuple(range(len(operands)))))(*operands))


def test_gradients_go_by_ring_only_where_the_call_does(monkeypatch):
    by_ring, schedule_of = [], blocks_kernel._schedule
    monkeypatch.setattr(RingTransport, "hook_in", lambda self, *args: by_ring.append("gather"))

    def found(*args):
        schedule, *rest = schedule_of(*args)
        by_ring.extend(["sum"] * schedule.uses_ring)
        return schedule, *rest

    monkeypatch.setattr(blocks_kernel, "_schedule", found)
    operands = normal(0, 64, 64), normal(1, 64, 64)
    gradients(overlap.matmul_reduce_scatter, (COLUMNS, ROWS), ROWS, operands, implementation="fused", config=SMALL)
    gradients(overlap.all_gather_lhs_matmul, (ROWS, COLUMNS), COLUMNS, operands, implementation="fused", config=SMALL)
    assert not by_ring


@pytest.mark.parametrize(("operand", "result"), [(BF16, F16), (F16, BF16), (BF16, F32)])
def test_gradients_of_a_result_of_another_dtype(operand, result):
    """No kernel multiplies a cotangent and rows of different dtypes."""
    operands = tuple(x.astype(operand) / 8 for x in (normal(0, 64, 64), normal(1, 64, 128)))
    found, expected = (
        gradients(
            overlap.all_gather_lhs_matmul, (ROWS, COLUMNS), COLUMNS, operands, preferred_element_type=result, **how
        )
        for how in ({"implementation": "fused", "config": SMALL} if result != F32 else {}, {"implementation": "xla"})
    )
    assert_close(found, expected)


def test_what_several_right_operands_add_up_travels_in_the_operands_dtype(monkeypatch):
    """As in plain JAX. In f32 twice the bytes would travel, and tiles would be smaller."""
    dtypes, launch = [], blocks_kernel.launch
    monkeypatch.setattr(blocks_kernel, "launch", lambda *args: dtypes.append(args[1].out_dtype) or launch(*args))
    operands = normal(0, 64, 64), normal(1, 64, 128), normal(2, 64, 128)

    def several(x, a, b, axis, **options):
        return overlap.all_gather_lhs_matmul(x, [a, b], axis, **options)

    specs = (ROWS, COLUMNS, COLUMNS), [COLUMNS, COLUMNS]
    found = gradients(several, *specs, operands, implementation="fused", config=SMALL)
    assert dtypes == [BF16]  # One kernel, which runs twice.
    assert_close(found, gradients(several, *specs, operands, implementation="xla"), 2e-2)
