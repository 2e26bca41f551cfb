"""The objects that references stand for: buffers, arrays of synchronisation objects, and views of buffers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ..foundations.actors import Block
from ..foundations.errors import ProtocolError
from ..foundations.shadow import Region, Shadow, region_of

_serials = itertools.count()


def poison(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Makes an array that stands for undefined contents.

    The elements are NaN; or the most negative integer; or, in unsigned types, the largest integer; or True.
    """
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.ones(shape, dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return np.full(shape, info.min if info.min else info.max, dtype)
    try:
        return np.full(shape, np.nan, dtype)
    except (TypeError, ValueError):
        return np.full(shape, int(ml_dtypes.iinfo(dtype).min), dtype)


class _Reachable:
    """What a reference stands for: a `Buffer`, or `Cells`.

    Attributes:
        serial: a number that no other allocation has.
        peers: the same allocation on each device; None if other devices cannot reach it.
        twins: the same allocation in each CTA of the cluster; None if it is not shared.
    """

    def __init__(self, name: str, device: int):
        self.name, self.device = name, device
        self.peers: Mapping[int, Allocation] | None = None
        self.serial = next(_serials)
        self.twins: Sequence[Allocation] | None = None

    def on(self, device: int) -> Allocation:
        """Returns the same allocation on a device."""
        if self.peers is None:
            raise ProtocolError(
                f"{self.name} is this CTA's own memory, which other devices cannot reach. Expected: an operand or "
                "result of the kernel, or memory of pl.get_global"
            )
        return self.peers[device]


class Buffer(_Reachable):
    """One array in the memory of a device (``gmem``), a CTA (``smem``, ``tmem``) or a thread (``regs``)."""

    def __init__(
        self,
        name: str,
        space: str,
        data: np.ndarray,
        device: int,
        cta: Block | None = None,
        read_only: bool = False,
    ):
        super().__init__(name, device)
        self.space, self.data, self.cta = space, data, cta
        self.read_only = read_only
        self.written = False  # whether the buffer has defined contents from the start
        self.is_operand = False
        self._bytes: tuple[np.ndarray, np.ndarray] | None = None  # (the array, its bytes)
        self.shadow = Shadow(max(data.nbytes, 1))
        # component -> its last asynchronous access, to find memory that is freed while a copy uses it
        self.async_uses: dict[int, Any] = {}

    @property
    def bytes(self) -> np.ndarray:
        """The buffer's bytes, as a view. The buffer's array must be contiguous."""
        if self._bytes is None or self._bytes[0] is not self.data:
            self._bytes = self.data, self.data.reshape(-1).view(np.uint8)
        return self._bytes[1]


@functools.cache
def _places(shape: tuple[int, ...]) -> np.ndarray:
    places = np.arange(math.prod(shape)).reshape(shape)
    places.flags.writeable = False
    return places


class Cells(_Reachable):
    """An array of synchronisation objects (semaphores or mbarriers) that refs can index.

    Attributes:
        places: an array of the same shape that holds each object's place (its row-major index).
        at: returns the `Semaphore` or `MBarrier` at a place. It may make the object at that time, because a run uses
            only few flags.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        at: Callable[[int], Any],
        device: int,
        peers: Mapping[int, Cells] | None = None,
    ):
        super().__init__(name, device)
        self.peers = peers
        self.places, self.at = _places(shape), at


Allocation = Buffer | Cells


class View:
    """A rectangular part of a buffer, as a NumPy view.

    `shape` is the logical shape. `groups` has for each logical dimension its number of axes in `array`: a dimension
    that is tiled in memory has more than one axis there, outermost first.
    """

    __slots__ = ("_cells", "array", "buffer", "groups", "region", "requested", "shape", "text", "window")

    def __init__(
        self,
        buffer: Buffer,
        array: np.ndarray,
        groups: tuple[int, ...],
        text: str,
        shape: tuple[int, ...] | None = None,
    ):
        self.buffer, self.array, self.groups, self.text = buffer, array, groups, text
        self.requested: tuple[int, ...] | None = None  # the shape asked for, where a slice goes out of bounds
        self.window: tuple[slice, ...] | None = None  # the part of `requested` that is in bounds
        self.region: Region | None = None
        self._cells: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if shape is None:
            sizes = iter(array.shape)
            shape = tuple(math.prod(itertools.islice(sizes, n)) for n in groups)
        self.shape = shape

    def read(self, fill_undefined: bool = False) -> np.ndarray:
        """Returns a copy of the contents, in the logical shape. Elements out of bounds are zero, or undefined."""
        inside = np.array(self.array).reshape(self.shape)
        if self.requested is None:
            return inside
        fill = poison if fill_undefined else np.zeros
        whole = fill(self.requested, inside.dtype)
        whole[self.window] = inside
        return whole

    def write(self, value: np.ndarray) -> None:
        """Stores `value`, except for elements out of bounds."""
        if self.requested is not None:
            value = np.asarray(value).reshape(self.requested)[self.window]
        self.array[...] = np.asarray(value, self.array.dtype).reshape(self.array.shape)

    def bounds(self) -> Region:
        """Returns the bytes of the buffer that the view covers, for race detection."""
        if self.region is None:
            self.region = region_of(self.array, self.buffer.data)
        return self.region

    def cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shadow cells of this view (of writes, of reads), cached until the shadow splits its granules."""
        shadow = self.buffer.shadow
        cached = self._cells
        if cached is None or cached[0] is not shadow.writes:
            cached = self._cells = shadow.cells(self.bounds())
        return cached[1], cached[2]

    def __str__(self) -> str:
        where = f" of device {self.buffer.device}" if self.buffer.space == "gmem" else ""
        return f"{self.buffer.name}{self.text}{where} ({self.buffer.space})"


class Geometry:
    """The place of a view in its buffer, from which the same view of another buffer of that shape and type is made."""

    __slots__ = ("_dtype", "_offset", "_shape", "_strides", "_view")

    def __init__(self, view: View):
        array = view.array
        self._view = view.groups, view.text, view.shape, view.requested, view.window, view.bounds()
        self._offset = view.bounds()[0]
        self._shape, self._strides, self._dtype = array.shape, array.strides, array.dtype

    def of(self, buffer: Buffer) -> View:
        """Makes the view of `buffer`, whose array must be contiguous."""
        groups, text, shape, requested, window, region = self._view
        array = np.ndarray(self._shape, self._dtype, buffer.bytes, self._offset, self._strides)
        view = View(buffer, array, groups, text, shape)
        view.requested, view.window, view.region = requested, window, region
        return view
