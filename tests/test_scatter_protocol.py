"""The protocol of `matmul_reduce_scatter`: clean under many schedules, and each seeded defect is reported."""

import dataclasses
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

import overlap
from overlap import primitives
from overlap.collectives import pull, scattered
from overlap.collectives.scatter_schedule import ReduceScatterSchedule
from overlap.emulation import DeadlockError, emulate
from overlap.kernels.grid import GRID_AXIS
from overlap.kernels.hopper import drawn, exchange
from overlap.primitives import Ring, atomics, board, waits
from overlap.primitives.handshake import Handshake
from overlap.primitives.integers import remainder
from tests import handshake_cases
from tests.oracle import make_mesh, on_mesh
from tests.protocol_cases import SUMS, clean, of_sums
from tests.test_protocol import signal_when_only_read, signal_without_waiting
from tests.test_rhs_protocol import pull_last

NOTHING = lambda *_, **__: None  # noqa: E731
STEPS = 200_000
CHUNKS_OF_A_TILE = 4  # Of `of_sums`, if nothing else is said.
COMPLETIONS = ("late", "eager", "random")
# Two boxes of each warpgroup; with 136 rows the last tile has few, of one warpgroup alone.
TALL = overlap.Config.of(tile_n=128, stages=3, chunk_bytes=4096)


def run_some(kernel, *, seeds=3, cores=2, **settings):
    for seed in range(seeds):
        completion = COMPLETIONS[seed % 3]
        scheduler = ("pct", "random")[seed % 2]
        kernel.run(cores=cores, completion=completion, scheduler=scheduler, seed=seed, **settings)


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("along", ["m", "n"])
def test_clean(along, devices):
    run_some(clean(f"scatter {along}", devices), seeds=4)


CASES = {
    "whole boxes": lambda: of_sums("m", TALL, 2, block=(136, 136), k=72),
    "many k steps": lambda: of_sums("m", devices=2, block=(16, 264), k=640, dtype=jnp.float32),
    "batch": lambda: of_sums("m", devices=2, batch=2),
    "batch, n": lambda: of_sums("n", devices=2, batch=2, block=(72, 72)),
    "parts of rows": lambda: of_sums("m", SUMS.replace(chunk_bytes=64), 2, block=(8, 72)),
    "six devices": lambda: of_sums("n", devices=6, block=(16, 72)),  # A loop over the terms.
}


@pytest.mark.parametrize("case", CASES)
def test_other_sizes_are_clean(case):
    run_some(CASES[case]())


@pytest.mark.parametrize("axis", ["x", "y"])
def test_one_axis_of_two_is_clean(axis):
    run_some(of_sums("m", devices=2, mesh=make_mesh(x=2, y=2), axis=axis))


@pytest.mark.parametrize("victim", [0, 2])
def test_clean_if_a_device_is_late(victim, monkeypatch):
    """Its communicators begin when all its peers have sent everything."""
    pull_last(monkeypatch, victim, devices=3)
    run_some(of_sums("m"), seeds=2)


# --- What a device computes for its peers -----------------------------------------------------------------------------


def within(patch, module, name, **words):
    """Replaces words of `plgpu`, as `module` calls them, while its function `name` is traced."""
    function = getattr(module, name)

    def changed(*args, **kwargs):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(module, "plgpu", types.SimpleNamespace(**{**vars(plgpu), **words}))
            return function(*args, **kwargs)

    patch.setattr(module, name, changed)


def change_chunks(patch, **changes):
    """`change(field)` in the place of each of these fields of `Chunks`."""

    def chunks(*args, **kwargs):
        made = pull.Chunks(*args, **kwargs)
        return dataclasses.replace(made, **{name: change(getattr(made, name)) for name, change in changes.items()})

    patch.setattr(scattered, "Chunks", chunks)


def change_flag(patch, which, change):
    """`change(step, tile)` says of which step and tile the flag is that is meant."""
    flag = scattered._Body._flag

    def changed(self, number, step, tile):
        return flag(self, number, *(change(step, tile) if number == which else (step, tile)))

    patch.setattr(scattered._Body, "_flag", changed)


def tell_stored_at_once(patch):
    patch.setattr(exchange, "wait_stores_landed", NOTHING)


def tell_stored_when_only_read(patch):
    patch.setattr(exchange, "wait_stores_landed", primitives.wait_stores_read)


def never_tell_stored(patch):
    within(patch, exchange, "tell_stored", barrier_arrive=NOTHING)


def announce_without_waiting(patch):
    within(patch, exchange, "announce", barrier_wait=NOTHING)


def announce_own_tiles_as_well(patch):
    announce, of_loop = exchange.announce, exchange._exchange

    def announce_all(*args):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                exchange,
                "_exchange",
                lambda loop: dataclasses.replace(of_loop(loop), is_own=lambda tile: tile.step < 0),
            )
            announce(*args)

    patch.setattr(exchange, "announce", announce_all)


def announce_another_tile(patch):
    change_flag(patch, 0, lambda step, tile: (step, dataclasses.replace(tile, n=1 - tile.n)))


def store_both_halves_in_one_place(patch):
    store = exchange.store_boxes
    patch.setattr(
        exchange, "store_boxes", lambda boxes, views, buffers, config, warpgroup, first: store(
            boxes, views, buffers, config, 0 * warpgroup, first)
    )  # fmt: skip


def drop_the_communicators_proxy_fence(patch):
    patch.setattr(pull, "fence_async_proxy", NOTHING)


def send_without_waiting_for_the_tile(patch):
    change_chunks(patch, ready=lambda ready: None)


def wait_for_the_first_tile_only(patch):
    change_chunks(patch, ready=lambda ready: lambda step, row, column: ready(step, 0 * row, column))


def wait_for_the_first_step_only(patch):
    change_chunks(patch, ready=lambda ready: lambda step, row, column: ready(0 * step, row, column))


# --- What is sent -----------------------------------------------------------------------------------------------------


def count_other_than(patch, more):
    """Who has sent a chunk of a tile takes the number of those sent before for another one."""
    patch.setattr(scattered, "add", lambda word, amount: atomics.add(word, amount) + more)


def raise_the_peers_flag_at_the_first_chunk(patch):
    count_other_than(patch, CHUNKS_OF_A_TILE - 1)


def raise_the_peers_flag_a_chunk_too_early(patch):
    count_other_than(patch, 1)


def raise_the_peers_flag_a_chunk_too_late(patch):
    count_other_than(patch, -1)


def raise_the_peers_flag_by_every_chunk(patch):
    patch.setattr(scattered, "add", lambda word, amount: 0 * atomics.add(word, amount) + CHUNKS_OF_A_TILE - 1)


def count_chunks_without_acquiring(patch):
    def relaxed(context, *operands):
        emit = atomics.ptx
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                atomics, "ptx", lambda lines, *rest, **kwargs: emit(
                    [line.replace("atom.acq_rel", "atom.relaxed") for line in lines], *rest, **kwargs)
            )  # fmt: skip
            return atomics._add(context, *operands)

    patch.setattr(scattered, "add", lambda word, amount: atomics.inline(relaxed, [word], amount, returns=True))


def signal_peers_at_the_scope_of_one_gpu(patch):
    def signal(flag, ring, position):
        plgpu.semaphore_signal(flag, 1, device_id=ring.device_id(position), memory_scope="gpu")

    patch.setattr(scattered, "signal_peer", signal)


def signal_another_peer(patch):
    patch.setattr(scattered, "signal_peer", lambda flag, ring, position: primitives.signal_peer(
        flag, ring, remainder(position + 1, ring.size)))  # fmt: skip


def signal_nobody(patch):
    patch.setattr(scattered, "signal_peer", NOTHING)


def send_to_another_peer(patch):
    """The flags go to the right ones."""
    remote = Ring.remote

    def to_another(self, ref, position):
        is_memory = len(ref.shape) > 1
        return remote(self, ref, remainder(position + 1, self.size) if is_memory else position)

    patch.setattr(Ring, "remote", to_another)


def send_to_another_slot(patch):
    change_chunks(patch, destination=lambda destination: lambda step, *where: destination(1 - step, *where))


def send_the_part_of_another_step(patch):
    """Of another peer's block: a race, or what nobody has written yet."""
    change_chunks(patch, source=lambda source: lambda step, *where: source(1 - step, *where))


def send_a_chunk_twice(patch):
    chunk = ReduceScatterSchedule.chunk
    patch.setattr(ReduceScatterSchedule, "chunk", lambda self, index: chunk(self, index - remainder(index, 2)))


def leave_the_last_chunk(patch):
    sends = vars(ReduceScatterSchedule)["sends"].fget
    patch.setattr(ReduceScatterSchedule, "sends", property(lambda self: sends(self) - 1))


def send_before_peers_have_begun(patch):
    patch.setattr(Handshake, "await_peers", NOTHING)


# --- What comes -------------------------------------------------------------------------------------------------------


def do_not_wait_for_terms(patch):
    patch.setattr(scattered._Body, "_await_terms", NOTHING)


def wait_for_the_first_term_only(patch):
    change_flag(patch, 2, lambda step, tile: (0 * step, tile))


def wait_for_another_tiles_terms(patch):
    change_flag(patch, 2, lambda step, tile: (step, dataclasses.replace(tile, n=1 - tile.n)))


def wait_for_terms_as_for_this_device(patch):
    patch.setattr(
        Handshake, "wait_for", lambda self, role, word, expected, position: pull.wait_for_block(word, expected)
    )


def wait_for_terms_with_fences(patch, *fences):
    look_until = waits.look_until

    def look(*args, role, **kwargs):
        look_until(*args, role=role, **kwargs | ({"fences": fences} if role == board.TERMS else {}))

    patch.setattr(waits, "look_until", look)


def drop_the_producers_proxy_fence(patch):
    wait_for_terms_with_fences(patch, "fence.acquire.sys;")


def acquire_terms_at_the_scope_of_one_gpu(patch):
    wait_for_terms_with_fences(patch, "fence.acquire.gpu;", "fence.proxy.async.global;")


def do_not_acquire_terms(patch):
    wait_for_terms_with_fences(patch, "fence.proxy.async.global;")


def load_terms_into_slots_in_use(patch):
    within(patch, exchange, "load_terms", barrier_wait=NOTHING)


def count_an_arrival_too_few(patch):
    copies = exchange.copies_per_step
    patch.setattr(exchange, "copies_per_step", lambda *args: copies(*args) - 1)


def count_an_arrival_too_many(patch):
    copies = exchange.copies_per_step
    patch.setattr(exchange, "copies_per_step", lambda *args: copies(*args) + 1)


def read_terms_without_waiting(patch):
    within(patch, exchange, "sum_of_terms", barrier_wait=NOTHING)


def give_slots_of_terms_back_twice(patch):
    def arrive(barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_arrive(barrier)

    within(patch, exchange, "sum_of_terms", barrier_arrive=arrive)


def never_give_slots_of_terms_back(patch):
    within(patch, exchange, "sum_of_terms", barrier_arrive=NOTHING)


def count_a_step_of_terms_too_few_in_the_producer(patch):
    deal, steps = drawn.deal, exchange.term_steps

    def deal_fewer(*args):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(exchange, "term_steps", lambda *args: jnp.maximum(steps(*args) - 1, 0))
            deal(*args)

    patch.setattr(drawn, "deal", deal_fewer)


def load_terms_of_another_tile(patch):
    boxes = scattered._Body._boxes

    def of_another(self, ref, step, tile):
        is_term = ref is self._terms_gmem
        return boxes(self, ref, step, dataclasses.replace(tile, n=1 - tile.n) if is_term else tile)

    patch.setattr(scattered._Body, "_boxes", of_another)


# --- Tiles that are drawn ---------------------------------------------------------------------------------------------


def change_numbers(patch, change):
    """`change(number)` in the place of each tile's number that is drawn."""
    draw = drawn.draw
    patch.setattr(drawn, "draw", lambda *args: change(draw(*args)))


def draw_a_tile_twice(patch):
    """The first one, instead of the second."""
    change_numbers(patch, lambda number: jnp.where(number == 1, 0, number))


def draw_each_tile_twice(patch):
    change_numbers(patch, lambda number: number // 2)


def leave_the_first_tile(patch):
    change_numbers(patch, lambda number: number + 1)


def compute_own_tiles_first(patch):
    tile = ReduceScatterSchedule.tile

    def backwards(self, index):
        step, *place = tile(self, index)
        return self.last_step - step, *place

    patch.setattr(ReduceScatterSchedule, "tile", backwards)


def read_mail_without_waiting(patch):
    within(patch, drawn, "for_each", barrier_wait=NOTHING)


def overwrite_mail(patch):
    within(patch, drawn, "deal", barrier_wait=NOTHING)


def post_mail_without_a_word(patch):
    within(patch, drawn, "deal", barrier_arrive=NOTHING)


def never_give_mail_back(patch):
    within(patch, drawn, "for_each", barrier_arrive=NOTHING)


def give_back_first(patch, *, announcer):
    """Before the tile is announced, or computed; the other roles as ever."""
    for_each = drawn.for_each

    def too_early(loop, buffers, role, *more):
        if (role is exchange.announce) != announcer:
            return for_each(loop, buffers, role, *more)
        postponed = []

        def arrive_and_act(barrier):
            plgpu.barrier_arrive(barrier)
            role(*postponed.pop())

        with pytest.MonkeyPatch.context() as inside:
            words = {**vars(plgpu), "barrier_arrive": arrive_and_act}
            inside.setattr(drawn, "plgpu", types.SimpleNamespace(**words))
            return for_each(loop, buffers, lambda *args: postponed.append(args), *more)

    patch.setattr(drawn, "for_each", too_early)


def give_mail_back_before_the_tile_is_announced(patch):
    give_back_first(patch, announcer=True)


def give_mail_back_before_the_tile_is_computed(patch):
    give_back_first(patch, announcer=False)


DEFECTS = [
    tell_stored_at_once,
    tell_stored_when_only_read,
    never_tell_stored,
    announce_without_waiting,
    announce_own_tiles_as_well,
    announce_another_tile,
    store_both_halves_in_one_place,
    drop_the_communicators_proxy_fence,
    send_without_waiting_for_the_tile,
    wait_for_the_first_tile_only,
    wait_for_the_first_step_only,
    signal_when_only_read,
    signal_without_waiting,
    raise_the_peers_flag_at_the_first_chunk,
    raise_the_peers_flag_a_chunk_too_early,
    raise_the_peers_flag_a_chunk_too_late,
    raise_the_peers_flag_by_every_chunk,
    count_chunks_without_acquiring,
    signal_peers_at_the_scope_of_one_gpu,
    signal_another_peer,
    signal_nobody,
    send_to_another_peer,
    send_to_another_slot,
    send_the_part_of_another_step,
    send_a_chunk_twice,
    leave_the_last_chunk,
    send_before_peers_have_begun,
    do_not_wait_for_terms,
    wait_for_the_first_term_only,
    wait_for_another_tiles_terms,
    wait_for_terms_as_for_this_device,
    drop_the_producers_proxy_fence,
    acquire_terms_at_the_scope_of_one_gpu,
    do_not_acquire_terms,
    load_terms_into_slots_in_use,
    count_an_arrival_too_few,
    count_an_arrival_too_many,
    read_terms_without_waiting,
    give_slots_of_terms_back_twice,
    never_give_slots_of_terms_back,
    count_a_step_of_terms_too_few_in_the_producer,
    load_terms_of_another_tile,
    draw_a_tile_twice,
    draw_each_tile_twice,
    leave_the_first_tile,
    compute_own_tiles_first,
    read_mail_without_waiting,
    overwrite_mail,
    post_mail_without_a_word,
    never_give_mail_back,
    give_mail_back_before_the_tile_is_announced,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_reported(defect, monkeypatch):
    defect(monkeypatch)
    # Three slots: in two, k steps that have changed places would have the same sum.
    kernel, settings = of_sums("m", SUMS.replace(stages=3)), {"cores": 2, "scheduler": "pct", "step_limit": STEPS}
    # Also with one CTA at a time, which then carries several own tiles.
    report = kernel.report(seeds=6, **settings) or kernel.report(seeds=6, resident=1, **settings)
    assert report, f"{defect.__name__} was not reported in 12 runs"
    assert "device" in str(report) and "CTA" in str(report) and ".py:" in str(report)


def test_one_place_for_all_batch_elements_is_reported(monkeypatch):
    place = ReduceScatterSchedule.place
    monkeypatch.setattr(ReduceScatterSchedule, "place", lambda self, element, m, n: place(self, 0, m, n))
    assert of_sums("m", devices=2, batch=2).report(seeds=6, cores=2, scheduler="pct", step_limit=STEPS)


def test_tiles_that_are_dealt_beforehand_are_reported(monkeypatch):
    """To all CTAs of the grid, whether they run or not, instead of by a counter."""

    def deal(counter, end, previous=None):
        del counter
        return lax.axis_index(GRID_AXIS) if previous is None else jnp.minimum(previous + 2, end)

    monkeypatch.setattr(drawn, "draw", deal)
    dealt = of_sums("m")
    dealt.run(cores=2)
    assert isinstance(dealt.report(seeds=1, cores=2, resident=1), DeadlockError)


# --- What is no race shows in the numbers -----------------------------------------------------------------------------


def send_to_the_peer_on_the_other_side(patch):
    """Parts and flags alike, so that only the sums are wrong."""
    communicate, block = scattered._Body._communicate, ReduceScatterSchedule.block

    def communicate_there(self):
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(
                ReduceScatterSchedule, "block", lambda self, me, step: block(self, me, self.last_step - 1 - step)
            )
            communicate(self)

    patch.setattr(scattered._Body, "_communicate", communicate_there)


def add_the_first_term_for_all(patch):
    boxes = scattered._Body._boxes

    def of_the_first(self, ref, step, tile):
        return boxes(self, ref, 0 * step if ref is self._terms_gmem else step, tile)

    patch.setattr(scattered._Body, "_boxes", of_the_first)


def multiply_the_own_block_for_all(patch):
    patch.setattr(scattered._Body, "_block", lambda self, tile, along: self.me if self.schedule.along == along else 0)


def leave_the_last_tile(patch):
    tiles = vars(ReduceScatterSchedule)["tiles"].fget
    patch.setattr(ReduceScatterSchedule, "tiles", property(lambda self: tiles(self) - 1))


OF_NUMBERS = [
    send_to_the_peer_on_the_other_side,
    add_the_first_term_for_all,
    multiply_the_own_block_for_all,
    leave_the_last_tile,
]


@pytest.mark.parametrize("defect", OF_NUMBERS, ids=lambda f: f.__name__)
def test_a_wrong_sum_shows(defect, monkeypatch):
    defect(monkeypatch)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        of_sums("m").run(cores=2)


def sums_in_f32():
    """Of 2²⁴, 1, −2²⁴ and 1 from four devices, whose order shows: what each device gets, and what it should get."""
    factors = np.array([4096, 1, -4096, 1])
    parts = (factors * abs(factors)).astype(np.float32)
    lhs, rhs = np.zeros((4 * 8, 4 * 64)), np.zeros((4 * 64, 64))
    lhs[:, ::64], rhs[::64] = factors, abs(factors)[:, None]

    def summed(a, b):
        return overlap.matmul_reduce_scatter(
            a, b, "x", config=SUMS, preferred_element_type=jnp.float32, implementation="fused"
        )

    function = on_mesh(make_mesh(x=4), summed, (P(None, "x"), P("x", None)), P("x", None))
    with emulate(cores=2):
        result = np.asarray(function(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)))
    # Those of the devices before this one, the nearest first; their sum is added to the own one.
    terms = [functools.reduce(np.add, [parts[(me - distance) % 4] for distance in (1, 2, 3)]) for me in range(4)]
    return result, np.repeat(np.array(terms) + parts, 8)[:, None] * np.ones(64)


def test_parts_are_added_in_one_order():
    np.testing.assert_array_equal(*sums_in_f32())


def test_another_order_shows(monkeypatch):
    boxes = scattered._Body._boxes

    def backwards(self, ref, step, tile):
        return boxes(self, ref, 2 - step if ref is self._terms_gmem else step, tile)

    monkeypatch.setattr(scattered._Body, "_boxes", backwards)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        np.testing.assert_array_equal(*sums_in_f32())


# --- What does no harm, though elsewhere it would ---------------------------------------------------------------------

HARMLESS = [
    # The wait for the part's tile has a proxy fence as well.
    handshake_cases.begin_without_a_proxy_fence,
    # All that peers write to a device is what its own tiles wait for. So it outlives that without their last word.
    handshake_cases.speak_when_the_first_has_completed_something,
    handshake_cases.speak_before_the_transfers,
    handshake_cases.count_transfers_when_they_begin,
    # The announcer keeps all others from being two tiles ahead.
    give_mail_back_before_the_tile_is_computed,
]


@pytest.mark.parametrize("change", HARMLESS, ids=lambda f: f.__name__)
def test_what_does_no_harm(change, monkeypatch):
    """If one of these is reported one day, it belongs among the defects."""
    change(monkeypatch)
    run_some(of_sums("m"))
