"""Says where a Hopper GPU places clusters: how many run at a time, and which of them share loads.

The SMs of a GPU belong to GPCs (eight on an H100 and an H200, of 16 or 18 SMs). All CTAs of a cluster run in one
GPC, and SMs of one GPC share loads of the same lines. Measured on two H200s and an H100 of 132 SMs, by asking each
CTA for its SM (docs/answers.md):

- CTAs without clusters fill one GPC after the other: CTAs 0 to 15 run in one GPC, 16 to 31 in the next, and so on.
- Clusters are dealt to the GPCs in turn: of clusters of two CTAs, clusters 4, 12, 20 and 28 run in one GPC; after
  cluster 35 one GPC is full, and the others go on in turn.
- At most 30 clusters of four CTAs run at a time. That is fewer than the 32 for which the GPCs have SMs: the last
  SMs of one GPC run no cluster of four.

Other GPUs may place clusters differently. Then results are the same, and loads are shared less.
"""

from __future__ import annotations

import functools

import numpy as np

from overlap.primitives.integers import choose, quotient, remainder, smaller
from overlap.primitives.types import Index

# Without clusters on 132 SMs: (GPC, how many of the CTAs that follow each other run there).
_FILLED = ((0, 16), (1, 16), (2, 16), (3, 16), (4, 16), (5, 16), (6, 16), (0, 2), (7, 18))
# GPCs of a GPU, and SMs per GPC, where the placement was not measured.
_GPCS = 8
_CORES = 16
# (CTAs per cluster, clusters) → ranges of cluster indices that are dealt to GPCs in turn: (first index, count, GPCs).
_DEALT = {(2, 66): ((4, 32, 8), (36, 28, 7)), (4, 30): ((0, 16, 8), (16, 14, 7))}
# The GPCs of the other clusters of these grids: (index, GPC). Where the last two run was not seen; these have room.
_NOT_DEALT = {(2, 66): ((0, 0), (1, 0), (2, 0), (3, 0), (64, 0), (65, 7))}
# The CTA before which GPC 0 gets two more CTAs, and how many CTAs they all are.
_LATER = 112
_ALL = 132
# Up to this many CTAs at work are spread over the GPCs. More of them fill most of the GPCs anyway, and share loads.
_FEW = 80
# Clusters of more than two CTAs can use about this part of the SMs.
_USED = 10, 11


def clusters_at_once(num_cores: int, cluster: int) -> int:
    """Returns how many clusters of `cluster` CTAs, one CTA per SM, run at the same time."""
    most = num_cores // cluster
    return most if cluster <= 2 else max(most * _USED[0] // _USED[1], 1)


@functools.cache
def gpcs(cluster: int, clusters: int) -> np.ndarray:
    """Returns the number of the GPC where each cluster runs. Where the placement was not measured, it is a guess.

    Args:
      cluster: how many CTAs a cluster has; 1: there are no clusters.
      clusters: how many clusters there are.
    """
    index = np.arange(clusters)
    if cluster == 1:
        if clusters == sum(count for _, count in _FILLED):
            return np.repeat(*np.transpose(_FILLED))
        return index // _CORES
    found = index % _GPCS
    for first, count, of in _DEALT.get((cluster, clusters), ()):
        # If a GPC is full, it is the first one.
        found = np.where((index >= first) & (index < first + count), _GPCS - of + (index - first) % of, found)
    for place, gpc in _NOT_DEALT.get((cluster, clusters), ()):
        found[place] = gpc
    return found


def beside_neighbours[I: Index](index: I, cluster: int, clusters: int) -> I:
    """Renumbers a cluster, so that runs of two or four consecutive numbers lie in one GPC.

    The new numbers are a permutation of 0 to `clusters` - 1. Where the placement was not measured, the number is
    `index`.

    Args:
      index: the index of the cluster in the grid.
      cluster: how many CTAs a cluster has.
      clusters: how many clusters there are.
    """
    number = index
    for first, count, gpcs in _DEALT.get((cluster, clusters), ()):
        place = index - first
        moved = first + remainder(place, gpcs) * (count // gpcs) + quotient(place, gpcs)
        number = choose(index >= first, choose(index < first + count, moved, index), number)
    return number


def spreads(count: int, ctas: int) -> bool:
    """Whether `spread` is for `count` of `ctas` CTAs."""
    return 0 < count <= _FEW and ctas == _ALL


def spread[I: Index](cta: I, count: int) -> I:
    """Numbers CTAs so that the numbers below `count` are spread over the GPCs, and consecutive ones share a GPC.

    A CTA that gets none of these numbers gets `count` or a larger one. For `spreads` only.

    Args:
      cta: the index of a CTA in a grid without clusters.
      count: how many CTAs have work.
    """
    # Without the two late CTAs of GPC 0, the CTAs of each GPC are at least `_CORES` that follow each other.
    place = cta - choose(cta < _LATER, 0, 2)
    gpc, in_gpc = quotient(place, _CORES), remainder(place, _CORES)
    each, more = divmod(count, _GPCS)
    # The first GPCs get one CTA more each.
    has_work = in_gpc < each + choose(gpc < more, 1, 0)
    return choose(has_work, gpc * each + smaller(gpc, more) + in_gpc, count)
