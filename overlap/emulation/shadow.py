"""The shadow of a buffer: for each granule of its bytes, who wrote it last and who has read it since.

A granule is as large as the accesses so far allow (a whole pipeline stage, a row of a tile). The shadow splits its
granules when a finer access comes, so the result is exact to the byte while an access touches few granules. The cells
hold numbers of sets of accesses; `races.RaceDetector` keeps the sets. NumPy does the work.
"""

from __future__ import annotations

import math

import numpy as np

# (byte offset, ((count, stride in bytes), ...) outer dimensions, bytes of the contiguous inner run)
Region = tuple[int, tuple[tuple[int, int], ...], int]


def region_of(array: np.ndarray, base: np.ndarray) -> Region:
    """The bytes of `base` that `array`, a view of it, covers."""
    offset = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    if not array.size:
        return offset, (), 0
    dims = sorted(((s, n) for n, s in zip(array.shape, array.strides) if n > 1), reverse=True)
    run = array.itemsize
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    merged: list[tuple[int, int]] = []
    for stride, count in dims:  # an outer dimension whose stride spans the inner one whole merges with it
        if merged and merged[-1][1] == count * stride:
            merged[-1] = (merged[-1][0] * count, stride)
        else:
            merged.append((count, stride))
    return offset, tuple(merged), run


class Shadow:
    """The last writes and the reads since, for each granule of one buffer."""

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
        """(identity of the shadow, its writes, its reads) for `region`, split finer first if need be."""
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
        """For each element of `array`, a view of the buffer `base`, whether nobody has written it."""
        places = np.full((), region_of(array, base)[0], np.int64)
        for count, stride in zip(array.shape, array.strides):
            places = places[..., None] + np.arange(count) * stride
        return self.writes[places // self.granule] == 0
