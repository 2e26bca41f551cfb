"""Stream-K: its pieces, walked as pure integers, and the emulated mainloop that computes them."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import overlap
from overlap.choice import model
from overlap.choice.problem import Problem
from overlap.emulation import DeadlockError, emulate
from overlap.kernels.hopper.limits import warpgroup_tile
from overlap.kernels.partial_sums import share
from overlap.kernels.placement import gpcs
from overlap.kernels.stream_k import Piece, StreamK
from overlap.kernels.target import Target
from overlap.single_gpu import product
from tests import oracle
from tests.ops.product_cases import (
    check,
    check_exactly,
    check_gathered,
    handed_over,
    integers,
    normal,
    oracle_of,
    pieces_of,
    work_of,
)

# ---- the pieces ------------------------------------------------------------------------------------------------------

REALISTIC = [
    StreamK(561, 65, 132, 4),  # 33 tiles remain for 132 CTAs.
    StreamK(561, 65, 132, 3),
    StreamK(140, 128, 132, 16),
    StreamK(133, 224, 132, 132),  # One tile, shared by all.
    StreamK(198, 65, 132, 2),  # 66 tiles remain: two CTAs for each.
    StreamK(8, 128, 132, 16),
    StreamK(61, 1 << 16, 132, 8),  # k = 1 << 22.
    StreamK(5 * 132 + 40, 1 << 16, 132, 1 << 20),
    StreamK(77, 65, 66, 4),  # Clusters of two.
]


def check_walk(work):
    """Walks all pieces of all CTAs and checks what the mainloop relies on."""
    carriers = collections.defaultdict(list)  # tile -> [(k_first, k_steps, cta, part, parts)]
    whole, stretches = work.full_waves, []
    for cta in range(work.num_ctas):
        pieces, before = pieces_of(work, cta), 0
        for ordinal, piece in enumerate(pieces):
            assert piece.before == before
            assert piece.k_steps >= 1
            before += piece.k_steps
            carriers[piece.tile].append((piece.k_first, piece.k_steps, cta, piece.index_in_tile, piece.pieces_per_tile))
            if ordinal < whole or not work.cuts:
                steps = work.k_steps
                tile = cta + ordinal * work.num_ctas if ordinal < whole or not work.may_spread else piece.tile
                assert piece == Piece(tile, 0, steps, ordinal * steps, 1, 0, ordinal)
        assert work.total_k_steps(cta) == before
        if not work.cuts:
            continue
        # A CTA waits for others only in its last piece, and has one place in `sums`.
        shared = pieces[whole:]
        assert len(shared) == (cta < work.workers)
        stretches.extend(piece.k_steps for piece in shared)
    assert sorted(carriers) == list(range(work.tiles))
    for tile, parts in carriers.items():
        # Consecutive CTAs cover every k step once, and each CTA knows its part.
        parts.sort()
        ends = [k_first + k_steps for k_first, k_steps, *_ in parts]
        assert [k_first for k_first, *_ in parts] == [0, *ends[:-1]] and ends[-1] == work.k_steps
        first_cta = parts[0][2]
        for part, (_, _, cta, *which) in enumerate(parts):
            assert cta == first_cta + part and which == [part, len(parts)]
        if len(parts) > 1:
            assert tile >= whole * work.num_ctas and len(parts) == work.pieces_per_tile
    assert work.cuts == bool(stretches)
    if work.cuts:
        assert len(stretches) == work.workers <= min(work.num_ctas, work.left * work.max_pieces)
        assert sum(stretches) == work.left * work.k_steps
        assert max(stretches) - min(stretches) <= 1
        assert max(stretches) <= work.k_steps


@pytest.mark.parametrize("num_ctas", range(1, 10))
def test_every_k_step_of_every_tile_is_carried_once(num_ctas):
    for tiles, k_steps, max_pieces in itertools.product(range(1, 2 * num_ctas + 1), range(1, 8), (1, 2, 3, 4, 9)):
        check_walk(StreamK(tiles, k_steps, num_ctas, max_pieces))


@given(st.builds(StreamK, st.integers(1, 600), st.integers(1, 300), st.integers(1, 150), st.integers(1, 40)))
@settings(max_examples=40, deadline=None)
@example(REALISTIC[0])
@example(REALISTIC[3])
@example(StreamK(3, 6, 12, 4))  # Parts of unequal length.
def test_every_k_step_is_carried_once_at_sizes_of_real_devices(work):
    check_walk(work)


# Whole tiles of the last wave, which CTAs of all GPCs compute; full waves, and how many tiles are left.
SPREAD = [
    StreamK(full_waves * 132 + left, 1 << 12, 132, may_spread=True)
    for full_waves, left in ((0, 1), (0, 7), (0, 19), (0, 80), (1, 8), (3, 45), (40, 79))
]


@pytest.mark.parametrize("work", SPREAD, ids=str)
def test_few_tiles_of_the_last_wave_are_spread_over_the_gpcs(work):
    gpc_of = gpcs(1, 132)
    computed = [
        (work.piece(cta, work.full_waves).tile, gpc_of[cta]) for cta in range(132) if work.pieces(cta) > work.full_waves
    ]
    in_order = [gpc for _, gpc in sorted(computed)]
    counts = np.bincount(in_order, minlength=8)
    assert counts.sum() == work.left and counts.max() - counts.min() <= 1
    assert in_order == sorted(in_order)  # Adjacent tiles are in one GPC.


@pytest.mark.parametrize("shape", [(190, 376, 136), (64, 128 * 141, 64)])
def test_products_of_spread_tiles_are_exact_and_the_model_expects_them(shape, monkeypatch):
    config, launched, kernel = overlap.Config(tile_m=64, tile_n=128, stages=2), [], product.ProductKernel
    monkeypatch.setattr(product, "ProductKernel", lambda *args: (launched.append(args[-1]), kernel(*args))[1])
    check_exactly(shape, config, cores=132)
    [work], target = set(launched), Target("cpu", "cpu", 132)
    assert work._spreads and work == model.work_of(config, Problem("matmul", *shape, "bfloat16", "float32"), target)


@pytest.mark.parametrize(
    "work",
    [
        StreamK(81, 64, 132, may_spread=True),  # Most GPCs are full anyway.
        StreamK(132, 64, 132, may_spread=True),
        StreamK(19, 64, 114, may_spread=True),  # Nobody measured where the CTAs of this GPU run.
        StreamK(19, 64, 132, 4, may_spread=True),  # The tiles are cut.
        StreamK(19, 64, 66, ctas_per_tile=2, may_spread=True),
    ],
    ids=str,
)
def test_other_tiles_are_not_spread(work):
    alike = dataclasses.replace(work, may_spread=False)
    for cta in range(work.num_ctas):
        assert pieces_of(work, cta) == pieces_of(alike, cta) and work.total_k_steps(cta) == alike.total_k_steps(cta)


@pytest.mark.parametrize("work", [*REALISTIC, *SPREAD], ids=str)
def test_traced_indices_agree_with_python_ones(work):
    """No int32 overflows either: Python's integers are unbounded."""
    assert work.cuts != work.may_spread
    check_walk(work)
    most = max(work.pieces(cta) for cta in range(work.num_ctas))
    ctas, ordinals = np.divmod(np.arange(work.num_ctas * most, dtype=np.int32), most)

    def traced(cta, ordinal):
        return work.pieces(cta), work.total_k_steps(cta), *vars(work.piece(cta, ordinal)).values()

    pieces, steps, *fields = map(np.asarray, jax.jit(jax.vmap(traced))(ctas, ordinals))
    assert all(field.dtype == np.int32 for field in (pieces, steps, *fields))
    for i, (cta, ordinal) in enumerate(zip(map(int, ctas), map(int, ordinals), strict=True)):
        assert (pieces[i], steps[i]) == (work.pieces(cta), work.total_k_steps(cta))
        if ordinal < work.pieces(cta):
            assert Piece(*(int(field[i]) for field in fields)) == work.piece(cta, ordinal)


def check_walk_of_clusters(work):
    """Walks the pieces of all CTAs of clusters that share tiles, and checks what the mainloop relies on."""
    ranks, tiles = work.ctas_per_tile, []
    assert not work.cuts and work.pieces_per_tile == 1
    for cluster in range(work.num_ctas):
        before = [0] * ranks
        for ordinal in range(work.pieces(cluster)):
            pieces = [work.piece(cluster, ordinal, rank) for rank in range(ranks)]
            (tile,) = {piece.tile for piece in pieces}
            tiles.append(tile)
            # The CTAs take the k steps of the tile in their order, each at least one; the first ones take the most.
            k_steps = [piece.k_steps for piece in pieces]
            assert [piece.k_first for piece in pieces] == list(itertools.accumulate([0, *k_steps[:-1]]))
            assert sum(k_steps) == work.k_steps and min(k_steps) >= 1
            assert k_steps[0] == max(k_steps) <= min(k_steps) + 1
            assert [piece.before for piece in pieces] == before
            before = [a + b for a, b in zip(before, k_steps, strict=True)]
            for rank, piece in enumerate(pieces):
                assert (piece.index_in_tile, piece.pieces_per_tile, piece.ordinal) == (rank, ranks, ordinal)
        assert work.total_k_steps(cluster) == before[0]
    assert sorted(tiles) == list(range(work.tiles))


@pytest.mark.parametrize("ctas_per_tile", [2, 4])
def test_clusters_compute_every_k_step_of_every_tile_once(ctas_per_tile):
    for num_clusters, k_steps in itertools.product(range(1, 6), range(ctas_per_tile, 11)):
        for tiles in range(1, 2 * num_clusters + 2):
            check_walk_of_clusters(StreamK(tiles, k_steps, num_clusters, ctas_per_tile=ctas_per_tile))


@pytest.mark.parametrize(
    "work",
    [
        StreamK(48, 143, 66, ctas_per_tile=2),  # Renumbered clusters, some of them idle.
        StreamK(66, 64, 66, ctas_per_tile=2),
        StreamK(150, 1 << 16, 66, ctas_per_tile=2),  # Full waves, then a partial one.
        StreamK(6, 143, 30, ctas_per_tile=4),
        StreamK(77, 1 << 16, 30, ctas_per_tile=4),
        StreamK(20, 9, 57, ctas_per_tile=2),
        StreamK(60, 4, 26, max_pieces=8, ctas_per_tile=4),  # No tile is cut in another way.
    ],
    ids=str,
)
def test_traced_indices_of_clusters_agree_with_python_ones(work):
    check_walk_of_clusters(work)
    clusters, ordinals, ranks = np.indices((work.num_ctas, work.pieces(0), work.ctas_per_tile), np.int32)

    def traced(cluster, ordinal, rank):
        piece = work.piece(cluster, ordinal, rank)
        return work.pieces(cluster), work.total_k_steps(cluster), *(getattr(piece, name) for name in fields)

    fields = ("tile", "k_first", "k_steps", "before", "index_in_tile", "ordinal")
    found = jax.jit(jax.vmap(traced))(clusters.ravel(), ordinals.ravel(), ranks.ravel())
    pieces, steps, *values = map(np.asarray, found)
    assert all(value.dtype == np.int32 for value in (pieces, steps, *values))
    for i, where in enumerate(zip(*(map(int, axis.ravel()) for axis in (clusters, ordinals, ranks)), strict=True)):
        assert (pieces[i], steps[i]) == (work.pieces(where[0]), work.total_k_steps(where[0]))
        if where[1] < work.pieces(where[0]):
            piece = work.piece(*where)
            assert [value[i] for value in values] == [getattr(piece, name) for name in fields]


def test_nothing_is_cut_without_need():
    assert not StreamK(264, 65, 132, 8).cuts  # Only full waves.
    assert not StreamK(561, 65, 132).cuts  # Splitting is not asked for.
    assert not StreamK(561, 1, 132, 8).cuts  # Nothing to split.
    assert not StreamK(199, 65, 132, 8).cuts  # 67 tiles remain: fewer than two CTAs for each.
    assert StreamK(561, 65, 132, 8).workers == 132  # No more parts than CTAs,
    assert StreamK(137, 65, 132, 8).workers == 40  # or than asked for,
    assert StreamK(133, 3, 132, 8).workers == 3  # or than k steps.


# ---- the mainloop ----------------------------------------------------------------------------------------------------

SMALL = dict(tile_n=128)

SIZES = [  # cores, shape, config
    (4, (64, 128, 640), overlap.Config(stream_k=4, **SMALL)),  # One tile, shared by all.
    (5, (256, 128, 448), overlap.Config(stream_k=8, **SMALL)),  # Two tiles, a CTA idle.
    (8, (128, 256, 192), overlap.Config(stream_k=8, **SMALL)),  # Fewer k steps than it could be cut into.
    (9, (128, 128, 192), overlap.Config(stream_k=9, **SMALL)),  # Six CTAs have nothing to do.
    (3, (512, 128, 256), overlap.Config(stream_k=3, stages=2, **SMALL)),  # A full wave before.
    (2, (384, 384, 200), overlap.Config(stream_k=2, stages=3, **SMALL)),  # Four of them.
    (4, (384, 256, 328), overlap.Config(stream_k=2, order_minor="n", order_width=1, **SMALL)),
    (6, (64, 512, 320), overlap.Config(tile_m=64, stream_k=3, stages=3)),  # A warpgroup has half of the columns.
    (3, (256, 128, 320), overlap.Config(tile_m=256, stream_k=4, stages=3, **SMALL)),  # Half of the rows.
    (5, (128, 256, 320), overlap.Config(stream_k=5, stages=3)),
    (5, (130, 264, 328), overlap.Config(tile_n=128, stream_k=3)),  # Ragged in all dimensions.
]


@pytest.mark.parametrize(("cores", "shape", "config"), SIZES)
def test_results_are_exact(cores, shape, config):
    work = work_of(shape, config, cores)
    assert work.cuts
    run = check_exactly(shape, config, cores=cores)
    # The tile was cut: each warpgroup of a CTA with a part of a tile raises a flag, if its half of the tile has rows.
    half, _ = warpgroup_tile(config)
    busy = 1 if shape[0] <= half < config.tile_m else 2
    assert run.counts["signals"] == busy * handed_over(work)


def test_one_by_itself_does_not_cut():
    run = check_exactly((256, 128, 448), overlap.Config(**SMALL), cores=5)
    assert run.counts["signals"] == 0
    run = check_exactly((256, 128, 448), overlap.Config(stream_k=4, **SMALL), cores=2)
    assert run.counts["signals"] == 0


SCALES = jnp.array([0.25, 0.5, 1.0, 2.0])
EPILOGUE = dict(
    bias=integers(5, 264), activation=jax.nn.relu,
    lhs_scale=jnp.resize(SCALES, (136, 1)), rhs_scale=jnp.resize(SCALES, (264,)),
)  # fmt: skip


@pytest.mark.parametrize(("left", "right"), list(itertools.product([False, True], repeat=2)))
def test_all_layouts_and_the_whole_epilogue_on_a_batch(left, right):
    config = overlap.Config(stream_k=3, stages=3, **SMALL)
    check_exactly((136, 264, 328), config, cores=5, batch=(2,), transpose_lhs=left, transpose_rhs=right,
                  addend=integers(6, 2, 136, 264), **EPILOGUE)  # fmt: skip


@pytest.mark.parametrize("out", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_float8(out):
    config = overlap.Config(stream_k=4, **SMALL)
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        check_exactly((130, 136, 656), config, cores=5, dtype=dtype, transpose_rhs=True, preferred_element_type=out)


@pytest.mark.parametrize(
    ("dtype", "out"), [(jnp.bfloat16, jnp.bfloat16), (jnp.float16, jnp.float16), (jnp.bfloat16, jnp.float32)]
)
def test_error_within_twice_that_of_rounding(dtype, out):
    columns = jnp.exp(normal(9, 1, 264, dtype=jnp.float32))
    extra = dict(lhs_scale=0.1, rhs_scale=columns, bias=normal(10, 264), activation=jnp.tanh)
    config = overlap.Config(stream_k=3, **SMALL)
    lhs, rhs = normal(7, 200, 456, dtype=dtype), normal(8, 456, 264, dtype=dtype)
    check(lhs, rhs, config=config, cores=5, preferred_element_type=out)
    check(lhs, rhs, config=config, cores=5, preferred_element_type=out, limit=6e-3, **extra)


def test_gradients():
    lhs, rhs = 0.1 * normal(11, 136, 328), 0.1 * normal(12, 328, 136)
    config = overlap.Config(stream_k=4, **SMALL)

    def loss(a, b, **kwargs):
        return jnp.sum(jnp.sin(overlap.matmul(a, b, activation=jnp.tanh, **kwargs).astype(jnp.float32)))

    with emulate(cores=5):
        ours = jax.grad(lambda a, b: loss(a, b, config=config, implementation="fused"), argnums=(0, 1))(lhs, rhs)
        jax.block_until_ready(ours)
    for a, b in zip(ours, jax.grad(lambda a, b: loss(a, b, implementation="xla"), argnums=(0, 1))(lhs, rhs)):
        assert float(oracle.distance(a, b.astype(jnp.float32))) < 2e-2


SCHEDULES = [
    (completion, scheduler, seed)
    for seed, (completion, scheduler) in enumerate(
        itertools.product(("late", "eager", "random"), ("pct", "random", "round_robin"))
    )
]


@pytest.mark.parametrize(("cores", "stream_k"), [(5, 3), (13, 8)])
def test_the_same_bits_under_every_schedule(cores, stream_k):
    lhs, rhs = normal(13, 200, 520), normal(14, 520, 264)
    config = overlap.Config(stream_k=stream_k, stages=3, **SMALL)
    results = []
    for completion, scheduler, seed in SCHEDULES:
        with emulate(cores=cores, completion=completion, scheduler=scheduler, seed=seed):
            out = overlap.matmul(lhs, rhs, config=config, implementation="fused", preferred_element_type=jnp.float32)
            results.append(np.asarray(out))
    assert all((result == results[0]).all() for result in results)
    # In another order the sums differ in their last bits, so these operands can tell orders apart.
    with emulate(cores=cores):
        whole = overlap.matmul(lhs, rhs, config=overlap.Config(**SMALL), implementation="fused",
                               preferred_element_type=jnp.float32)  # fmt: skip
        assert not (np.asarray(whole) == results[0]).all()


def test_launches_in_a_row():
    """At each start, flags are zero and `sums` is empty: the second launch must not use data of the first."""
    xs, w = integers(15, 3, 130, 520), integers(16, 520, 264)
    config = overlap.Config(stream_k=4, **SMALL)

    def step(w, x):
        y = overlap.matmul(x, w, config=config, implementation="fused", preferred_element_type=jnp.float32)
        return -w, y

    with emulate(cores=5) as run:
        _, ys = jax.jit(lambda w, xs: jax.lax.scan(step, w, xs))(w, xs)
        run.check()
    assert run.counts["launches"] == 3
    signs = np.array([1, -1, 1])[:, None, None]
    np.testing.assert_array_equal(np.asarray(ys), signs * oracle_of(xs, w))


@pytest.mark.parametrize("scheduler", ["pct", "random", "round_robin"])
def test_as_many_ctas_at_a_time_as_a_tile_has_parts_are_enough(scheduler):
    """The CTAs that share a tile wait for each other, and have consecutive numbers."""
    config = overlap.Config(stream_k=4, **SMALL)
    shape = (256, 128, 1024)
    assert work_of(shape, config, 9).pieces_per_tile == 4
    check_exactly(shape, config, cores=9, settings=dict(resident=4, scheduler=scheduler))
    with pytest.raises(DeadlockError, match="CTAs were never launched"):
        check_exactly(shape, config, cores=9, settings=dict(resident=3, scheduler=scheduler))


@pytest.mark.parametrize(("boxes", "pieces"), list(itertools.product((1, 2, 4, 8), (2, 3, 4, 5, 8, 16))))
def test_shares_are_adjacent_and_even(boxes, pieces):
    shares = [share(piece, boxes, pieces) for piece in range(pieces)]
    assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])] and shares[-1][1] == boxes
    assert max(end - begin for begin, end in shares) == -(-boxes // pieces)
    assert min(end - begin for begin, end in shares) == boxes // pieces


@pytest.mark.parametrize("transport", ["pull", "ring"])
@pytest.mark.parametrize(
    ("devices", "cores", "shape", "stream_k"),
    [
        (2, 5, (128, 128, 320), 8),  # One partial wave on each device.
        (3, 2, (200, 136, 200), 2),  # Full waves before, and shards whose last block is short.
        (3, 7, (131, 264, 328), 3),
    ],
)
def test_all_gather(devices, cores, shape, stream_k, transport):
    config = overlap.Config(stream_k=stream_k, stages=3, **SMALL)
    check_gathered(devices, cores, shape, config, transport)
