"""Stream-K: the pieces of all CTAs, walked as pure integers: every k step of every tile is carried once."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from overlap.kernels.placement import gpcs
from overlap.kernels.stream_k import Piece, StreamK
from tests.ops.product_cases import pieces_of

REALISTIC = [
    StreamK(561, 65, 132, 4),  # 33 tiles remain for 132 CTAs.
    StreamK(133, 224, 132, 132),  # One tile, shared by all.
    StreamK(198, 65, 132, 2),  # 66 tiles remain: two CTAs for each.
    StreamK(3, 6, 12, 4),  # Parts of unequal length.
    StreamK(5 * 132 + 40, 1 << 16, 132, 1 << 20),  # k = 1 << 22.
    StreamK(77, 65, 66, 4),  # Clusters of two.
]
# Whole tiles of the last wave, which CTAs of all GPCs compute; full waves, and how many tiles are left.
SPREAD = [
    StreamK(full_waves * 132 + left, 1 << 12, 132, may_spread=True)
    for full_waves, left in ((0, 1), (0, 19), (1, 8), (40, 79))
]
TOGETHER = [  # The CTAs of a cluster divide each tile.
    StreamK(48, 143, 66, ctas_per_tile=2),  # Renumbered clusters, some of them idle.
    StreamK(77, 1 << 16, 30, ctas_per_tile=4),  # Full waves, then a partial one.
    StreamK(60, 4, 26, max_pieces=8, ctas_per_tile=4),  # No tile is cut in another way.
]


def check_walk(work):
    """Walks all pieces of all CTAs and checks what the mainloop relies on."""
    carriers = collections.defaultdict(list)  # tile -> [(k_first, k_steps, cta, part, parts)]
    whole, stretches = work.full_waves, []
    for cta in range(work.num_ctas):
        pieces, before = pieces_of(work, cta), 0
        for ordinal, piece in enumerate(pieces):
            assert piece.before == before and piece.k_steps >= 1
            before += piece.k_steps
            carriers[piece.tile].append((piece.k_first, piece.k_steps, cta, piece.index_in_tile, piece.pieces_per_tile))
            if ordinal < whole or not work.cuts:
                steps = work.k_steps
                tile = cta + ordinal * work.num_ctas if ordinal < whole or not work.may_spread else piece.tile
                assert piece == Piece(tile, 0, steps, ordinal * steps, 1, 0, ordinal)
        assert work.total_k_steps(cta) == before
        if work.cuts:
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
        assert max(stretches) - min(stretches) <= 1 and max(stretches) <= work.k_steps


def check_walk_of_clusters(work):
    """The same where the CTAs of each cluster divide its tiles."""
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


@pytest.mark.one_jax
@pytest.mark.parametrize("num_ctas", [1, 3, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_every_k_step_of_every_tile_is_carried_once(num_ctas):
    for tiles, k_steps, max_pieces in itertools.product(range(1, 2 * num_ctas + 1), range(1, 8), (1, 2, 3, 9)):
        check_walk(StreamK(tiles, k_steps, num_ctas, max_pieces))
    for tiles, ranks in itertools.product(range(1, 2 * min(num_ctas, 5) + 2), (2, 4)):
        for k_steps in range(ranks, 11):
            check_walk_of_clusters(StreamK(tiles, k_steps, min(num_ctas, 5), ctas_per_tile=ranks))


@pytest.mark.parametrize("work", [*REALISTIC, *SPREAD, *TOGETHER], ids=str)
def test_traced_indices_agree_with_python_ones(work):
    """No int32 overflows either: Python's integers are unbounded."""
    (check_walk_of_clusters if work.ctas_per_tile > 1 else check_walk)(work)
    most = max(work.pieces(cta) for cta in range(work.num_ctas))
    ctas, ordinals, ranks = (
        x.ravel()
        for x in np.indices((work.num_ctas, most, work.ctas_per_tile if work.ctas_per_tile > 1 else 1), np.int32)
    )
    names = [field.name for field in dataclasses.fields(Piece)]

    def traced(cta, ordinal, rank):
        piece = work.piece(cta, ordinal, rank) if work.ctas_per_tile > 1 else work.piece(cta, ordinal)
        return work.pieces(cta), work.total_k_steps(cta), *(np.int32(0) + getattr(piece, name) for name in names)

    pieces, steps, *fields = map(np.asarray, jax.jit(jax.vmap(traced))(ctas, ordinals, ranks))
    assert all(field.dtype == np.int32 for field in (pieces, steps, *fields))
    for i, (cta, ordinal, rank) in enumerate(zip(ctas.tolist(), ordinals.tolist(), ranks.tolist(), strict=True)):
        assert (pieces[i], steps[i]) == (work.pieces(cta), work.total_k_steps(cta))
        if ordinal < work.pieces(cta):
            piece = work.piece(cta, ordinal, rank) if work.ctas_per_tile > 1 else work.piece(cta, ordinal)
            assert [int(field[i]) for field in fields] == [getattr(piece, name) for name in names]


@pytest.mark.one_jax
def test_few_tiles_of_the_last_wave_are_spread_over_the_gpcs():
    gpc_of = gpcs(1, 132)
    for work in SPREAD:
        last = {cta: work.piece(cta, work.full_waves) for cta in range(132) if work.pieces(cta) > work.full_waves}
        in_order = [gpc for _, gpc in sorted((piece.tile, gpc_of[cta]) for cta, piece in last.items())]
        counts = np.bincount(in_order, minlength=8)
        assert counts.sum() == work.left and counts.max() - counts.min() <= 1
        assert in_order == sorted(in_order)  # Adjacent tiles are in one GPC.
    for work in (
        StreamK(81, 64, 132, may_spread=True),  # Most GPCs are full anyway.
        StreamK(19, 64, 114, may_spread=True),  # Nobody measured where the CTAs of this GPU run.
        StreamK(19, 64, 132, 4, may_spread=True),  # The tiles are cut.
        StreamK(19, 64, 66, ctas_per_tile=2, may_spread=True),
    ):
        alike = dataclasses.replace(work, may_spread=False)
        assert [pieces_of(work, cta) for cta in range(work.num_ctas)] == [
            pieces_of(alike, cta) for cta in range(work.num_ctas)
        ]


@pytest.mark.one_jax
def test_nothing_is_cut_without_need():
    assert not StreamK(264, 65, 132, 8).cuts  # Only full waves.
    assert not StreamK(561, 65, 132).cuts  # Splitting is not asked for.
    assert not StreamK(561, 1, 132, 8).cuts  # Nothing to split.
    assert not StreamK(199, 65, 132, 8).cuts  # 67 tiles remain: fewer than two CTAs for each.
    assert StreamK(561, 65, 132, 8).workers == 132  # No more parts than CTAs,
    assert StreamK(137, 65, 132, 8).workers == 40  # or than asked for,
    assert StreamK(133, 3, 132, 8).workers == 3  # or than k steps.
