"""The shadow of a buffer records, for each granule of its bytes, the last write and the reads since then.

All granules of a buffer have the same size: as many bytes as the accesses so far allow (a whole pipeline stage, a row
of a tile). The shadow splits its granules when a finer access comes. So the result is exact to the byte, and yet an
access covers few granules. A *cell* is the shadow's entry for a granule. It holds the number of a set of accesses;
`races.RaceDetector` keeps the sets.
"""

from __future__ import annotations

import math

import numpy as np

# (byte offset, the outer dimensions as ((count, stride in bytes), ...), number of bytes of the contiguous inner run)
Region = tuple[int, tuple[tuple[int, int], ...], int]


def region_of(array: np.ndarray, base: np.ndarray) -> Region:
    """Returns which bytes of `base` are covered by `array`, which is a view of `base`."""
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    if not array.size:
        return offset, (), 0
    dims = sorted(((s, n) for n, s in zip(array.shape, array.strides) if n > 1), reverse=True)
    run = array.itemsize
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    merged: list[tuple[int, int]] = []
    for stride, count in dims:  # Two dimensions merge if the outer stride is the whole extent of the inner dimension.
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    return offset, tuple(merged), run


class Shadow:
    """The cells of one buffer: for each granule, of the last write (`writes`) and of the reads since (`reads`)."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.granule = nbytes
        self.writes = np.zeros(1, np.int32)
        self.reads = np.zeros(1, np.int32)

    def _refine(self, granule: int) -> None:
        times = self.granule // granule
        self.writes = np.repeat(self.writes, times)
        self.reads = np.repeat(self.reads, times)
        self.granule = granule

    def cells(self, region: Region) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (all cells of writes, the cells of writes in `region`, the cells of reads in `region`), as views.

        If the region does not consist of whole granules, the granules are split first. Then the
        first array is a new one: a caller that kept views compares it with theirs. If they differ, the views are old.
        """
        offset, dims, run = region
        granule = math.gcd(self.granule, offset, run, *(stride for _, stride in dims))
        if granule != self.granule:
            self._refine(granule)
        shape = (*(count for count, _ in dims), run // granule)
        strides = (*(stride // granule * 4 for _, stride in dims), 4)
        start = offset // granule * 4
        return (
            self.writes,
            np.ndarray(shape, np.int32, buffer=self.writes, offset=start, strides=strides),
            np.ndarray(shape, np.int32, buffer=self.reads, offset=start, strides=strides),
        )

    def unwritten(self, array: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Returns for each element of `array`, a view of the buffer `base`, whether nobody has written the element."""
        places = np.full((), region_of(array, base)[0], np.int64)
        for count, stride in zip(array.shape, array.strides):
            places = places[..., None] + np.arange(count) * stride
        return self.writes[places // self.granule] == 0
