"""The choice between the transports, what each transport needs, and an exhaustive walk of the ring's schedule."""

import collections
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.kernels.hopper.limits import smem_bytes
from overlap.kernels.limits import BARRIER_BYTES
from overlap.kernels.stream_k import StreamK
from overlap.kernels.target import SMEM_BYTES, Target
from tests import oracle
from tests.assembly import assembly
from tests.assembly.assembly import Case
from tests.ops.explained import answer
from tests.ops.product_cases import pieces_of

OPERANDS = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
H200 = Target("gpu", "NVIDIA H200", 132)


def explain(devices=4, **keywords):
    mesh = oracle.make_mesh(x=devices)
    return answer(overlap.all_gather_lhs_matmul, *OPERANDS, "x", mesh=mesh, **keywords)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)


# --- The choice -------------------------------------------------------------------------------------------------------


def test_explain_says_which_and_why(hopper):
    default, pull, group = explain(), explain(transport="pull"), explain(transport="ring")
    assert (default.transport, pull.transport, group.transport) == ("pull", "pull", "ring")
    assert "one hop" in default.transport_reason and group.transport_reason == pull.transport_reason == "asked for"
    assert default.config == group.config and default.reason == group.reason
    for choice in (default, group):
        assert f"transport {choice.transport}: {choice.transport_reason}" in str(choice)


def test_explain_says_how_many_ctas_must_run_at_once(hopper):
    whole, cut = (explain(config=overlap.Config(stream_k=parts)) for parts in (1, 3))
    group = explain(transport="ring")
    assert (whole.ctas_at_once, cut.ctas_at_once, group.ctas_at_once) == (1, 3, group.target.num_cores)
    assert "at the same time" not in str(whole) and f"needs {group.ctas_at_once} CTAs at the same time" in str(group)
    assert explain(implementation="xla").ctas_at_once == 0
    assert explain(devices=1, transport="ring", config=overlap.Config()).ctas_at_once == 1


def test_without_the_kernel_or_without_peers_there_is_no_transport(hopper):
    for choice in (explain(implementation="xla", transport="ring"), explain(devices=1, transport="ring")):
        assert choice.transport == choice.transport_reason == "" and "transport" not in str(choice)


@pytest.mark.parametrize("transport", ["push", "", "Ring", 1])
@pytest.mark.parametrize("implementation", [None, "xla", "fused"])
def test_a_transport_that_there_is_not(transport, implementation):
    keywords = {"implementation": implementation, "transport": transport}
    with pytest.raises(ValueError) as caught:
        explain(**keywords)
    for fragment in ("`transport`", "None", "pull", "ring", repr(transport), "leave it out"):
        assert fragment in str(caught.value)
    lhs, rhs = jnp.zeros((128, 64), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16)
    with pytest.raises(ValueError, match="`transport`"):
        oracle.on_mesh(
            oracle.make_mesh(x=2), lambda: overlap.all_gather_lhs_matmul(lhs, rhs, "x", **keywords), (), P()
        )()


def test_the_ring_needs_no_chunk_buffers(hopper):
    config, bf16 = overlap.Config(), jnp.bfloat16
    pulled, plain = (smem_bytes(config, bf16, transport) for transport in ("pull", ""))
    assert smem_bytes(config, bf16, "ring") == plain
    assert pulled - plain == config.chunk_buffers * (config.chunk_bytes + BARRIER_BYTES)
    # So a configuration may fit the ring but not pulling; all other limits are the same.
    large = overlap.Config(chunk_bytes=16384)
    assert smem_bytes(large, bf16, "pull") > SMEM_BYTES
    assert explain(config=large, transport="ring").implementation == "fused"
    with pytest.raises(ValueError, match="shared memory"):
        explain(config=large, transport="pull")
    for transport in ("pull", "ring"):
        with pytest.raises(ValueError, match="split_k"):
            explain(config=overlap.Config(split_k=2), transport=transport)


# --- The ring's schedule ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 6])
@pytest.mark.parametrize("stream_k", [1, 3])
@pytest.mark.parametrize(("batch", "widths"), [(1, (264,)), (2, (136, 8)), (3, (64,))])
def test_rows_are_passed_on_once_and_satisfy_every_wait(devices, stream_k, batch, widths):
    """For every step and row block, each k step exactly once; the flag's final count equals what producers wait for."""
    for m_shard, order, num_ctas in itertools.product((1, 200, 384), ("m", "n"), (2, 13)):
        config = overlap.Config(tile_n=64, order_minor=order, stream_k=stream_k)
        schedule = AllGatherSchedule.of(devices, (batch, m_shard, 200), widths, 2, config)
        work = StreamK(schedule.tiles, math.ceil(200 / 64), num_ctas, config.stream_k)
        passed, raised = collections.Counter(), collections.Counter()
        for group in range(num_ctas):
            steps = []
            for piece in pieces_of(work, group):
                step, row, column = schedule.tile(piece.tile)
                steps.append(step)
                (element, m), (side, n) = schedule.batch_of(row), schedule.side_of(column)
                if schedule.passes_on(step, m, side, n):
                    flag = schedule.flag(step + 1, element * m_shard + m * config.tile_m)
                    assert all(0 <= i < size for i, size in zip(flag, schedule.flags_shape, strict=True))
                    raised[flag] += work.pieces_per_tile if piece.pieces_per_tile == 1 else 1
                    for k in range(piece.k_first, piece.k_first + piece.k_steps):
                        passed[step, element, m, k] += 1
            # A tile waits for tiles of the previous step, on another device. So the waits cannot form a cycle.
            assert steps == sorted(steps)
        every = itertools.product(range(devices - 1), range(batch), range(schedule.row_blocks), range(work.k_steps))
        assert passed == dict.fromkeys(every, 1)
        assert raised == dict.fromkeys(itertools.product(*map(range, schedule.flags_shape)), work.pieces_per_tile)


@pytest.mark.parametrize("devices", [2, 3, 6])
@pytest.mark.parametrize("keeps_own", [False, True])
def test_what_a_device_passes_on_is_what_the_one_before_it_needs_next(devices, keeps_own):
    schedule = dataclasses.replace(
        AllGatherSchedule.of(devices, (200, 64), (64,), 2, overlap.Config()), keeps_own=keeps_own
    )
    for me in range(devices):
        previous = (me + devices - 1) % devices
        places = [schedule.scratch_index(previous, step + 1) for step in range(devices - 1)]
        for step in range(devices - 1):
            assert schedule.shard(me, step) == schedule.shard(previous, step + 1)
        kept = [schedule.scratch_index(previous, 0)] if keeps_own else []
        assert sorted(places + kept) == list(range(schedule.scratch_shards))


# --- Assembled --------------------------------------------------------------------------------------------------------

ASSEMBLED = [  # devices, m of a shard, config; with 384 rows, the tiles of all steps are cut
    (2, 1024, {"stages": 4}),
    (8, 1024, {"stages": 4}),
    (3, 384, {"stream_k": 4}),
    (4, 1000, {"tile_n": 128, "stages": 6}),
]


@pytest.mark.skipif(bool(assembly.unavailable_reason()), reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(("devices", "m", "config"), ASSEMBLED, ids=str)
def test_the_ring_assembles_without_spills_and_with_the_shared_memory_it_announces(devices, m, config):
    shape, given = (m, 4096 if m > 384 else 1024, 4096), config | {"transport": "ring"}
    case = Case("tests.ops.several_sides_cases:assembled", devices, shape, config=given)
    (report,) = assembly.assemble_case(case)
    assert report.spills == report.stack_frame_bytes == 0 and report.remarks == ()
    assert report.architecture == "sm_90a"
    announced = smem_bytes(overlap.Config(**config), jnp.float16, "ring")
    assert report.shared_memory_bytes == announced
