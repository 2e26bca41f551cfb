"""The kernel for few rows is clean under many schedules, and each seeded defect in its protocol is reported."""

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

import overlap
from overlap import primitives
from overlap.collectives import joined
from overlap.collectives.joined_schedule import JoinedSchedule
from overlap.emulation import EmulationError, emulate
from overlap.kernels import hopper
from overlap.primitives import handshake
from overlap.primitives.integers import remainder
from tests import several_sides_cases
from tests.oracle import make_mesh
from tests.product_cases import integers
from tests.several_sides_cases import Form
from tests.test_protocol import signal_when_only_read, signal_without_waiting

WHOLE = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True, chunk_bytes=256)
CUT = overlap.Config(tile_m=64, tile_n=128, stages=3, stream_k=3, joined=True, chunk_bytes=1024)
ALONG_N = overlap.Config(tile_m=64, tile_n=128, stages=2, cluster=2, cluster_along="n", joined=True)
# Two rows of tiles, the second with rows of two shards; more tiles than CTAs.
FORM = Form(24, (136, 128), 200, gathered=True, container=list)
NOTHING = lambda *_, **__: None  # noqa: E731


def launch(config=WHOLE, *, devices=3, cores=3, form=FORM, **settings):
    mesh = make_mesh(x=devices)
    arrays = several_sides_cases.operands(form, devices)
    # Traced anew each time: what a test has replaced must be in the kernel.
    fused = several_sides_cases.on_mesh(
        form, mesh, several_sides_cases.call(form, implementation="fused", config=config)
    )
    with emulate(cores=cores, **settings):
        results = fused(*several_sides_cases.put(form, mesh, arrays))
    several_sides_cases.assert_exact(form, arrays, results)


@pytest.mark.parametrize("scheduler", ["pct", "random"])
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
@pytest.mark.parametrize("seed", range(6))
def test_clean(completion, seed, scheduler):
    config, cores = [(WHOLE, 3), (CUT, 7), (ALONG_N, 5)][seed % 3]
    launch(config, devices=2 + seed % 2, cores=cores, completion=completion, scheduler=scheduler, seed=seed)


def drop_wait_for_rows(patch):
    patch.setattr(joined, "wait_at_least", NOTHING)


def drop_proxy_fence(patch):
    patch.setattr(joined, "fence_async_proxy", NOTHING)


def fence_before_the_wait(patch):
    wait, fence = joined.wait_at_least, joined.fence_async_proxy
    patch.setattr(joined, "wait_at_least", lambda *args: (fence(), wait(*args)))
    patch.setattr(joined, "fence_async_proxy", NOTHING)


def count_too_few(patch):
    target = JoinedSchedule.flag_target
    patch.setattr(JoinedSchedule, "flag_target", lambda self, flag: target(self, flag) - 1)


def count_too_many(patch):
    target = JoinedSchedule.flag_target
    patch.setattr(JoinedSchedule, "flag_target", lambda self, flag: target(self, flag) + 1)


def wait_for_one_shard_only(patch):
    """What would be right with a tile for each shard."""
    patch.setattr(JoinedSchedule, "flag_target", lambda self, flag: self.plan.chunks)


def wait_for_the_first_rows_only(patch):
    patch.setattr(joined, "wait_at_least", lambda flag, value: primitives.wait_at_least(flag, 1))


def raise_flags_twice(patch):
    patch.setattr(joined, "signal", lambda flag: primitives.signal(flag, 2))


def raise_the_flag_of_the_row_within_the_shard(patch):
    flag = JoinedSchedule.flag
    patch.setattr(JoinedSchedule, "flag", lambda self, row: flag(self, remainder(row, self.plan.shard_rows)))


def copy_a_chunk_twice(patch):
    chunk = JoinedSchedule.chunk
    patch.setattr(JoinedSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    chunks = vars(JoinedSchedule)["chunks"].fget
    patch.setattr(JoinedSchedule, "chunks", property(lambda self: chunks(self) - 1))


def leave_the_own_shard(patch):
    patch.setattr(JoinedSchedule, "chunks", JoinedSchedule.pulls)


def lay_the_shards_in_the_order_of_steps(patch):
    """No race: the right rows in the wrong place, which the result must show."""
    patch.setattr(JoinedSchedule, "row", lambda self, me, step, row: step * self.plan.shard_rows + row)


def drop_handshake(patch):
    patch.setattr(joined, "exit_handshake", NOTHING)


def shake_hands_before_the_copies(patch):
    copy, shake = joined._copy, joined.exit_handshake

    def first_shake(cta, num_ctas, *args):
        *_, ring, _ = args
        shake(patch.exit_flags, ring, cta, num_ctas)
        copy(cta, num_ctas, *args)

    flags = joined.shared_flags

    def keep(*shapes, **kwargs):
        given = flags(*shapes, **kwargs)
        patch.exit_flags = given[1]
        return given

    patch.setattr(joined, "shared_flags", keep)
    patch.setattr(joined, "exit_handshake", NOTHING)
    patch.setattr(joined, "_copy", first_shake)


def leave_when_one_peer_has_not_finished(patch):
    wait = handshake.wait_at_least
    patch.setattr(
        handshake, "wait_at_least", lambda flag, n, from_peer=False: wait(flag, n - from_peer, from_peer=from_peer)
    )


def _in_the_mainloop(patch, name, function):
    """Replaces a function of `jax.numpy` there alone."""
    patch.setattr(hopper, "jnp", types.SimpleNamespace(**{**vars(jnp), name: function}))


def fill_a_slot_too_many(patch):
    """As many tiles of the right operand as slots, and one more, which lands where the first one lies."""
    _in_the_mainloop(patch, "minimum", lambda steps, stages: jnp.minimum(steps, stages + 1))


def fill_the_slots_for_every_tile(patch):
    """Not of the first tile alone, when they are free, but of the next one as well."""
    _in_the_mainloop(patch, "where", lambda is_first, steps, none: steps)


DEFECTS = [
    drop_wait_for_rows,
    drop_proxy_fence,
    fence_before_the_wait,
    signal_when_only_read,
    signal_without_waiting,
    count_too_few,
    count_too_many,
    wait_for_one_shard_only,
    wait_for_the_first_rows_only,
    raise_flags_twice,
    raise_the_flag_of_the_row_within_the_shard,
    copy_a_chunk_twice,
    leave_the_last_chunk,
    leave_the_own_shard,
    drop_handshake,
    shake_hands_before_the_copies,
    leave_when_one_peer_has_not_finished,
    fill_a_slot_too_many,
    fill_the_slots_for_every_tile,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    reports = []
    for seed in range(10):
        try:
            launch(completion="late", scheduler="pct", seed=seed)
        except EmulationError as report:
            reports.append(report)
            break
        except AssertionError:
            continue
    assert reports, f"{defect.__name__} was not reported in 10 runs"
    # The report says where: device, CTA and the line of the kernel.
    assert "device" in str(reports[0]) and "CTA" in str(reports[0]) and ".py:" in str(reports[0])


SCALED = Form(24, (136, 128), 200, scales=("rows", "columns"))


@pytest.mark.parametrize("m_shard", [24, 3])
@pytest.mark.parametrize("completion", ["late", "eager", "random"])
def test_scales_of_rows_are_clean(completion, m_shard):
    form = dataclasses.replace(SCALED, m=m_shard)
    for seed in range(3):
        launch(form=form, cores=[2, 9, 20][seed], completion=completion, scheduler="pct", seed=seed)


def do_not_count_scales(patch):
    target = JoinedSchedule.flag_target
    without = lambda self, flag: target(dataclasses.replace(self, scale_rows=0), flag)  # noqa: E731
    patch.setattr(JoinedSchedule, "flag_target", without)


def leave_the_last_scales(patch):
    pieces = vars(JoinedSchedule)["scale_pieces"].fget
    patch.setattr(JoinedSchedule, "scale_pieces", property(lambda self: pieces(self) - 1))


def lay_all_scales_where_the_own_ones_belong(patch):
    row_of, copy_scales = JoinedSchedule.row, joined._copy_scales

    def copy(*args):
        patch.setattr(JoinedSchedule, "row", lambda self, me, step, row: row_of(self, me, 0 * step, row))
        copy_scales(*args)
        patch.setattr(JoinedSchedule, "row", row_of)

    patch.setattr(joined, "_copy_scales", copy)


def read_scales_after_leaving(patch):
    copy_scales, shake, later = joined._copy_scales, joined.exit_handshake, []
    patch.setattr(joined, "_copy_scales", lambda *args: later.append(args))
    patch.setattr(joined, "exit_handshake", lambda *args: (shake(*args), copy_scales(*later.pop())))


@pytest.mark.parametrize(
    "defect",
    [do_not_count_scales, leave_the_last_scales, lay_all_scales_where_the_own_ones_belong, read_scales_after_leaving],
    ids=lambda f: f.__name__,
)
def test_each_defect_of_scales_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(EmulationError):
        for seed in range(10):
            launch(form=SCALED, cores=9, completion="late", scheduler="pct", seed=seed)


def test_a_wrong_order_of_the_shards_shows_in_the_numbers(monkeypatch):
    lay_the_shards_in_the_order_of_steps(monkeypatch)
    with pytest.raises(AssertionError):
        launch()


@pytest.mark.parametrize("config", [WHOLE, CUT], ids=["whole", "cut"])
def test_many_launches_in_a_row_with_operands_that_change(config):
    """Each launch overwrites what the one before has read and written."""
    mesh = make_mesh(x=4)
    form = Form(16, (128,), 200, container=None)
    fused = several_sides_cases.on_mesh(
        form, mesh, several_sides_cases.call(form, implementation="fused", config=config)
    )
    launches = []
    with emulate(cores=5, completion="random", scheduler="pct", seed=3) as run:
        for seed in range(5):
            arrays = several_sides_cases.operands(form, 4, seed)
            launches.append((arrays, fused(*several_sides_cases.put(form, mesh, arrays))))
        run.check()
    for arrays, results in launches:
        several_sides_cases.assert_exact(form, arrays, results)


def test_integers_differ_between_launches():
    """What the test above rests on."""
    assert not np.array_equal(integers(0, 64), integers(1, 64))
