"""`matmul_reduce_scatter` with the transport "ring": numbers, protocol, and injected defects."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives import communicator
from overlap.collectives.gather.ring import RingTransport
from overlap.collectives.reduce import blocks_kernel
from overlap.collectives.reduce.blocks_schedule import ReduceScatterSchedule
from overlap.emulation import DeadlockError, emulate
from overlap.kernels.hooks import Exchange
from overlap.primitives.handshake import Handshake
from overlap.primitives.integers import remainder
from tests import handshake_cases, mesh_cases
from tests import scatter_defects as defects
from tests.explained import answer
from tests.oracle import make_mesh
from tests.product_cases import normal
from tests.protocol_cases import SUMS, SUMS_BY_RING, of_sums
from tests.scatter_cases import BF16, EVERY, F16, F32, SMALL, Layer, assert_close, check
from tests.test_handshakes import begin_late, raise_late
from tests.test_protocol import signal_when_only_read

RING = Layer("m", transport="ring")
STEPS = 200_000


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "along"), [(1, "m"), (2, "n"), (3, "m"), (4, "n"), (6, "m"), (8, "n")])
def test_exact_on_any_number_of_devices(devices, along):
    m, n = (24 * devices, 72) if along == "m" else (40, 16 * devices)
    layer = dataclasses.replace(RING, along=along, dtype=BF16 if devices % 2 else F32)
    check(layer, make_mesh(x=devices), layer.integers(devices, m, n, 72), seed=devices)


def test_sums_are_rounded_once_on_each_way():
    layer = dataclasses.replace(RING, dtype=BF16)
    arrays = layer.integers(4, 64, 48, 72)
    arrays["lhs"] = arrays["lhs"] * 37
    actual = check(layer, make_mesh(x=4), arrays)
    pushed = dataclasses.replace(layer, transport="push").expected(arrays, 4)
    assert np.any(np.asarray(actual) != pushed)


@pytest.mark.parametrize("transposed", [False, True])
def test_all_that_a_sum_can_have(transposed):
    """Each device has its own scales. A part is scaled before the received sum is added and the result passed on."""
    layer = dataclasses.replace(RING, transpose_lhs=transposed, transpose_rhs=not transposed, activation=jax.nn.relu)
    arrays = layer.integers(3, 3 * 72, 136, 24, lead=(2,), extras=(*EVERY, "addend"))
    check(layer, make_mesh(x=3), arrays, config=overlap.Config(tile_n=128, stages=3))


def test_float8():
    layer = dataclasses.replace(RING, transpose_rhs=True, dtype=F16)
    arrays = layer.integers(3, 3 * 40, 72, 144, extras=("lhs_scale", "rhs_scale"))
    arrays |= {name: arrays[name].astype(jnp.float8_e4m3fn) for name in ("lhs", "rhs")}
    check(layer, make_mesh(x=3), arrays, config=overlap.Config(tile_m=64, tile_n=128, stages=2))


@pytest.mark.parametrize(
    "case",
    [mesh_cases.layout(("b", "a"), (2, 0, 3, 1), a=2, b=2), mesh_cases.layout("a", a=3, b=2)],
    ids=str,
)
def test_meshes(case):
    layer = dataclasses.replace(RING, axis=case.over)
    check(layer, case.mesh(), layer.integers(case.size, 16 * case.size, 64, 24, extras=EVERY))


def test_gradients_go_the_same_way(monkeypatch):
    """The ring also gathers the cotangent of lhs, and sums the cotangent of a gather by ring."""
    used, hook_in, schedule_of = [], RingTransport.hook_in, blocks_kernel._schedule

    def gathered_by_ring(self, *args):
        used.append("gather")
        return hook_in(self, *args)

    def summed_by(*args):
        schedule, *rest = schedule_of(*args)
        used.append("sum" if schedule.uses_ring else "pushed sum")
        return schedule, *rest

    monkeypatch.setattr(RingTransport, "hook_in", gathered_by_ring)
    monkeypatch.setattr(blocks_kernel, "_schedule", summed_by)
    mesh, operands = make_mesh(x=3), (normal(0, 3 * 16, 3 * 64), normal(1, 3 * 64, 3 * 64))
    rows, columns, summed = P("x", None), P(None, "x"), overlap.matmul_reduce_scatter
    ways = [  # The operation, the same with XLA, the specs, the kernels that run.
        (summed, {"in_specs": (columns, rows), "out_specs": rows}, {"sum", "gather"}),
        (overlap.all_gather_lhs_matmul, {"in_specs": (rows, columns), "out_specs": columns}, {"gather", "sum"}),
    ]
    for operation, specs, expected in ways:
        used.clear()

        def gradients(operation=operation, specs=specs, **options):
            layer = jax.shard_map(lambda a, b: operation(a, b, "x", **options), mesh=mesh, check_vma=False, **specs)
            return jax.jit(jax.grad(lambda *x: (layer(*x).astype(F32) ** 2).sum(), argnums=(0, 1)))(*operands)

        with emulate(cores=2):
            actual = gradients(transport="ring", implementation="fused", config=SMALL)
        assert set(used) == expected
        assert_close(actual, gradients(implementation="xla"))


# --- The protocol -----------------------------------------------------------------------------------------------------


def of_ring(devices=3, config=SUMS, **options):
    return of_sums(SUMS_BY_RING, config, devices, **options)


clean = functools.cache(of_ring)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_clean(devices):
    for seed, completion in enumerate(("late", "eager", "random")):
        clean(devices).run(cores=2, completion=completion, seed=seed, laps=2)
        clean(devices).run(cores=2, completion=completion, scheduler="random", seed=seed, resident=1)


@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_begins_late(victim, monkeypatch):
    raise_late(monkeypatch, victim)
    of_ring().run(cores=2, laps=2)


def test_clean_if_a_cta_begins_when_all_is_over(monkeypatch):
    begin_late(monkeypatch)
    of_ring().run(cores=2, laps=3)


def hold_a_chunk_while_waiting_for_a_tile(patch):
    smem_types = communicator.smem_types
    patch.setattr(
        communicator,
        "smem_types",
        lambda config, *args, **kwargs: smem_types(config.replace(chunk_buffers=2), *args, **kwargs),
    )


def pass_on_to_the_device_behind(patch):
    patch.setattr(ReduceScatterSchedule, "receiver", lambda self, me, step: remainder(me + 1, self.devices))


def pass_on_what_has_come_without_the_own_part(patch):
    """A chunk leaves when the flag of the step in which it arrived is raised, instead of the flag of the next step."""
    defects.change_chunks(
        patch, ready=lambda ready: lambda step, row, column: ready(jnp.maximum(step - 1, 0), row, column)
    )


def wait_for_the_sum_of_another_step(patch):
    defects.change_flag(patch, 2, lambda step, tile: (jnp.maximum(step - 1, 0), tile))


def wait_for_terms_of_own_tiles_only(patch):
    wait = blocks_kernel._Body._await_terms

    def of_own_tiles(self, tile):
        jax.lax.cond(tile.step == self.schedule.last_step, lambda: wait(self, tile), lambda: None)

    patch.setattr(blocks_kernel._Body, "_await_terms", of_own_tiles)


def count_terms_of_own_tiles_only(patch):
    """The order of pipeline stages counts terms of own tiles only, while the sums still add all terms."""
    patch.setattr(Exchange, "has_terms", lambda self, tile: self.is_own(tile))


def leave_without_a_word(patch):
    patch.setattr(Handshake, "_speak", defects.NOTHING)


DEFECTS = [
    pass_on_to_the_device_behind,
    pass_on_what_has_come_without_the_own_part,
    wait_for_the_sum_of_another_step,
    wait_for_terms_of_own_tiles_only,
    count_terms_of_own_tiles_only,
    handshake_cases.look_at_the_other_neighbour,
    leave_without_a_word,
    signal_when_only_read,
    defects.tell_stored_at_once,
    defects.never_tell_stored,
    defects.send_without_waiting_for_the_tile,
    defects.wait_for_the_first_step_only,
    defects.raise_the_peers_flag_a_chunk_too_early,
    defects.signal_peers_at_the_scope_of_one_gpu,
    defects.signal_another_peer,
    defects.send_to_another_peer,
    defects.send_to_another_slot,
    defects.send_before_peers_have_begun,
    defects.do_not_wait_for_terms,
    defects.wait_for_another_tiles_terms,
    defects.drop_the_producers_proxy_fence,
    defects.load_terms_of_another_tile,
    defects.compute_own_tiles_first,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    kernel, settings = of_ring(config=SUMS.replace(stages=3)), {"cores": 2, "scheduler": "pct", "step_limit": STEPS}
    report = kernel.report(seeds=6, laps=2, **settings) or kernel.report(seeds=6, resident=1, laps=2, **settings)
    assert report, f"{defect.__name__} was not reported in 12 runs"


def test_chunks_that_are_held_are_a_deadlock(monkeypatch):
    """With few chunks, one communicator may draw two in a row."""
    kernel = functools.partial(of_ring, config=SMALL, block=(16, 72))
    kernel().run(cores=2)
    hold_a_chunk_while_waiting_for_a_tile(monkeypatch)
    assert isinstance(kernel().report(seeds=3, cores=2), DeadlockError)


def test_what_has_come_is_added_to_what_is_passed_on(monkeypatch):
    """Without the addition, only the sums are wrong."""
    monkeypatch.setattr(ReduceScatterSchedule, "adds_before_sending", False)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        of_ring().run(cores=2)


# --- The interface ----------------------------------------------------------------------------------------------------


def test_explain_says_how_parts_travel():
    mesh, (lhs, rhs) = make_mesh(x=4), (jax.ShapeDtypeStruct(shape, BF16) for shape in ((64, 64), (64, 64)))
    explain = functools.partial(answer, overlap.matmul_reduce_scatter, lhs, rhs, "x", mesh=mesh, config=SMALL)
    asked, unasked = (explain(implementation="fused", transport=name) for name in ("ring", None))
    assert (asked.transport, asked.transport_reason) == ("ring", "asked for") and asked.ctas_at_once == 1
    assert unasked.transport == "push" and "one hop" in unasked.transport_reason
    assert explain(implementation="xla", transport="ring").transport == ""
    with pytest.raises(ValueError, match=r"`transport` must be None or one of \('push', 'ring'\), got 'pull'"):
        explain(transport="pull")
