"""What the transforms of a reference do: each is decoded once, into a step from one array to a part of it.

Tensor memory has 128 lanes of 512 columns, with 32 bits in each. The emulator keeps an allocation as an array of its
logical shape. The columns matter only where allocations alias (`plgpu.RefUnion`). There the array consists of 32-bit
cells, and a reference is a view of some columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from ..foundations.equations import Entry, Environment, Transform, value_of
from ..foundations.errors import ProtocolError

LANES = 128  # of tensor memory
# Resolves one transform; the last argument says whether a slice may reach beyond its array, and is clipped.
Step = Callable[["Builder", Environment, bool], None]


def bits_of(dtype: npt.DTypeLike) -> int:
    """How many bits an element of a dtype has, also of types that are narrower than a byte."""
    return (jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits  # pyright: ignore


class Builder:
    """The state while a reference is resolved: the array so far, and the number of its axes per logical dimension."""

    __slots__ = ("array", "groups", "name", "requested", "text", "window")

    def __init__(self, array: np.ndarray, name: str):
        self.array, self.groups, self.name = array, [1] * array.ndim, name
        self.text = ""
        self.requested: tuple[int, ...] | None = None
        self.window: tuple[slice, ...] | None = None

    def sizes(self) -> list[int]:
        out, axis = [], 0
        for n in self.groups:
            out.append(math.prod(self.array.shape[axis : axis + n]))
            axis += n
        return out


def _index_tiled(sizes: tuple[int, ...], start: int, size: int, drop: bool, name: str) -> list[int | slice]:
    """Returns the indices of the axes (outermost first) of a tiled dimension for the slice [start, start + size).

    With `drop`, the slice is one element, and its dimension disappears.
    """
    inner = math.prod(sizes[1:])
    if len(sizes) == 1:
        return [start if drop else slice(start, start + size)]
    if not drop and start % inner == 0 and size % inner == 0:
        return [slice(start // inner, (start + size) // inner), *[slice(None)] * (len(sizes) - 1)]
    if start // inner == (start + size - 1) // inner:
        outer = start // inner
        head = outer if drop else slice(outer, outer + 1)
        return [head, *_index_tiled(sizes[1:], start % inner, size, drop, name)]
    raise NotImplementedError(
        f"{name}: the slice [{start}:{start + size}] of a dimension tiled by {inner} crosses tiles unevenly"
    )


def _index(transform: Transform) -> Step:
    """Makes the step that takes a part of the array: in each dimension an index, or a slice."""
    specs = []  # for each dimension: whether it is sliced, the start, the size, the stride
    for index in transform.indices:
        if hasattr(index, "size") and hasattr(index, "stride") and not isinstance(index, np.ndarray):
            specs.append((True, index.start, int(index.size), int(index.stride)))
        else:
            specs.append((False, index, 1, 1))

    def step(b: Builder, env: Environment, clip: bool) -> None:
        sizes = b.sizes()
        key: list[int | slice] = []  # an index or slice for each axis of the array; a tiled dimension has several axes
        axis = 0  # the first axis of the dimension
        # For each dimension that is left: how many axes it has, the size that was asked for, and which part of that
        # lies within the array.
        groups: list[int] = []
        requested: list[int] = []
        window: list[slice] = []
        texts: list[str] = []  # for messages
        clipped = False
        for (is_slice, start, size, stride), n, full in zip(specs, b.groups, sizes):
            start = value_of(start, env)
            if isinstance(start, np.ndarray) and start.ndim:
                raise NotImplementedError(f"{b.name}: indices that are arrays (gather and scatter) are not emulated")
            start = int(start)
            axes = b.array.shape[axis : axis + n]
            axis += n
            stop = start + (size - 1) * stride + 1
            if is_slice:
                texts.append(f"{start}:{stop}" + (f":{stride}" if stride != 1 else ""))
            else:
                texts.append(str(start))
            low, high = start, stop
            if start < 0 or stop > full:
                if not (clip and is_slice and stride == 1):
                    raise ProtocolError(
                        f"{b.name}{b.text}[{', '.join(texts)}...]: index {start}:{stop} is out of bounds for a "
                        f"dimension of size {full}"
                    )
                low, high = min(max(start, 0), full), min(max(stop, 0), full)
                clipped = True
            if stride != 1 and n != 1:
                raise NotImplementedError(f"{b.name}: strided slices of tiled memory are not emulated")
            if stride != 1:
                key.append(slice(low, high, stride))
            else:
                key.extend(_index_tiled(axes, low, high - low, not is_slice, b.name))
            if is_slice:
                groups.append(n)
                requested.append(size)
                window.append(slice(low - start, high - start))
        b.array = b.array[(*key, ...)]  # With the ellipsis, the result is a view even if all indices are scalars.
        b.groups = groups
        b.text += f"[{', '.join(texts)}]" if texts else ""
        if b.window is not None and any(cut.start for cut in b.window):
            raise NotImplementedError(f"{b.name}{b.text}: the slice of a slice that begins before its array")
        # Elements that an earlier slice lost at the end of its array are out of bounds for this slice too.
        b.requested, b.window = (tuple(requested), tuple(window)) if clipped else (None, None)

    return step


def _untile(k: int) -> Step:
    """Makes the step that joins the last `k` dimensions with the tiles into which they are cut."""

    def step(b: Builder, env: Environment, clip: bool) -> None:
        n = len(b.groups)
        if any(g != 1 for g in b.groups[n - 2 * k :]):
            raise NotImplementedError(f"{b.name}: tiled twice over the same dimensions")
        lead = sum(b.groups[: n - 2 * k])
        order = list(range(lead))
        for i in range(k):
            order += [lead + i, lead + k + i]
        b.array = b.array.transpose(order)
        b.groups = b.groups[: n - 2 * k] + [2] * k

    return step


def _tile(tiling: Sequence[int]) -> Step:
    """Makes the step that cuts the last dimensions into tiles."""
    k = len(tiling)

    def step(b: Builder, env: Environment, clip: bool) -> None:
        if any(g != 1 for g in b.groups[len(b.groups) - k :]):
            raise NotImplementedError(f"{b.name}: tiled twice over the same dimensions")
        lead = b.array.ndim - k
        shape = list(b.array.shape[:lead])
        for size, tile in zip(b.array.shape[lead:], tiling):
            shape += [size // tile, tile]
        order = [*range(lead), *range(lead, lead + 2 * k, 2), *range(lead + 1, lead + 2 * k, 2)]
        b.array = _reshaped(b.array, shape, b.name).transpose(order)
        b.groups = b.groups[: len(b.groups) - k] + [1] * (2 * k)

    return step


def _reshaped(array: np.ndarray, shape: Sequence[int], name: str) -> np.ndarray:
    view = array.reshape(shape)
    if view.size and not np.may_share_memory(view, array):  # The reshape has made a copy.
        raise NotImplementedError(f"{name}: this reshape of a strided part of memory is not emulated")
    return view


def _transpose(permutation: tuple[int, ...]) -> Step:
    def step(b: Builder, env: Environment, clip: bool) -> None:
        starts = np.cumsum([0, *b.groups])
        b.array = b.array.transpose([a for p in permutation for a in range(starts[p], starts[p] + b.groups[p])])
        b.groups = [b.groups[p] for p in permutation]
        b.text += ".T" if permutation == (1, 0) else f".transpose{permutation}"

    return step


def _reshape(shape: tuple[int, ...]) -> Step:
    def step(b: Builder, env: Environment, clip: bool) -> None:
        sizes = b.sizes()
        # Leading dimensions may change while tiled trailing ones stay as they are.
        keep = 0
        while keep < min(len(sizes), len(shape)) and sizes[-1 - keep] == shape[-1 - keep]:
            keep += 1
        while keep and math.prod(sizes[: len(sizes) - keep]) != math.prod(shape[: len(shape) - keep]):
            keep -= 1
        head = b.groups[: len(sizes) - keep]
        if any(g != 1 for g in head):
            raise NotImplementedError(f"{b.name}: reshape of tiled dimensions is not emulated")
        b.array = _reshaped(b.array, (*shape[: len(shape) - keep], *b.array.shape[len(head) :]), b.name)
        b.groups = [1] * (len(shape) - keep) + b.groups[len(head) :]
        b.text += f".reshape{tuple(shape)}"

    return step


def _bitcast(dtype: npt.DTypeLike) -> Step:
    def step(b: Builder, env: Environment, clip: bool) -> None:
        if any(g != 1 for g in b.groups):
            raise NotImplementedError(f"{b.name}: bitcast of tiled memory is not emulated")
        # Where the widths differ, Mosaic GPU changes the size of the last dimension but one.
        if np.dtype(dtype).itemsize != b.array.dtype.itemsize and b.array.ndim > 1:
            raise NotImplementedError(f"{b.name}: bitcast to another width is not emulated")
        b.array = b.array.view(dtype)

    return step


def _extract(transform: Transform) -> Step:
    """Makes the step that resolves one reference of a union: in shared memory, or (with a layout) in tensor memory."""
    if getattr(transform, "layout", None) is not None:
        return _extract_tensor(transform)
    dtype, shape, offset = np.dtype(transform.dtype), tuple(transform.shape), int(transform.offset)
    group = transform.alias_group_idx

    def step(b: Builder, env: Environment, clip: bool) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        b.array = b.array[offset : offset + nbytes].view(dtype).reshape(shape)
        b.groups = [1] * len(shape)
        b.text += f"{{union group {group}, {dtype}{list(shape)}}}"

    return step


def _extract_tensor(transform: Transform) -> Step:
    """Makes the step that resolves one reference of a union in tensor memory.

    The transform gives its shape, dtype and layout, and `offset`, the column at which it begins.
    """
    dtype, (rows, minor), first = np.dtype(transform.dtype), transform.shape, int(transform.offset)
    bits, layout = bits_of(transform.dtype), transform.layout
    count = layout.cols_in_shape((rows, minor), bits)
    # Without packing, each element has a column of its own, and the rest of that column's 32 bits is unused.
    unused = 1 if layout.vector_length > 1 else max(32 // (8 * dtype.itemsize), 1)

    def step(b: Builder, env: Environment, clip: bool) -> None:
        if bits < 8:
            raise NotImplementedError(f"{b.name}: {dtype} in a union of tensor memory is not emulated")
        cells = b.array[:, first : first + count].view(dtype)[:, ::unused]
        if rows == LANES:
            b.array, b.groups = cells[:, :minor], [1, 1]
        elif rows > LANES:  # Tiles of 128 rows lie side by side in the columns.
            tiles = rows // LANES
            b.array = cells[:, : tiles * minor].reshape(LANES, tiles, minor).transpose(1, 0, 2)
            b.groups = [2, 1]
        else:  # 64 rows: of every 32 lanes, the first 16 hold the left half of the columns, the others the right half.
            parts = cells[:, : minor // 2].reshape(4, 2, LANES // 8, minor // 2)
            b.array, b.groups = parts.transpose(0, 2, 1, 3), [2, 2]
        b.text += f"{{union group {transform.alias_group_idx}, {dtype}{[rows, minor]}}}"

    return step


def _expand(transform: Transform) -> Step:
    """Makes the step that adds leading dimensions to a view of tensor memory.

    The elements of these dimensions lie side by side along the columns.
    """
    batch = tuple(transform.batch_shape)

    def step(b: Builder, env: Environment, clip: bool) -> None:
        if b.groups != [1, 1]:
            raise NotImplementedError(f"{b.name}: leading dimensions of such a part of tensor memory are not emulated")
        rows, minor = b.array.shape
        b.array = b.array.reshape(rows, *batch, minor // math.prod(batch)).transpose(
            *range(1, len(batch) + 1), 0, len(batch) + 1
        )
        b.groups = [1] * (len(batch) + 2)

    return step


# By the name of the transform's class, the function that makes its step. None: it has no effect in the emulator, where
# the place of the bytes inside a row does not matter.
_STEPS: dict[str, Callable[[Transform], Step] | None] = {
    "NDIndexer": _index,
    "UntilingTransform": lambda transform: _untile(len(transform.tiling)),
    "TilingTransform": lambda transform: _tile(transform.tiling),
    "TransposeTransform": lambda transform: _transpose(tuple(transform.permutation)),
    "ReshapeTransform": lambda transform: _reshape(tuple(transform.shape)),
    "BitcastTransform": lambda transform: _bitcast(transform.dtype),
    "ExtractAliasedRef": _extract,
    "ExpandLeadingBatchDimensionsTransform": _expand,
    **dict.fromkeys(("UnswizzleRef", "SwizzleTransform", "IdentityTransform", "MemorySpaceCastTransform")),
}


def decode(transform: Transform) -> Step | None:
    """Decodes one transform; None if it has no effect in the emulator."""
    name = type(transform).__name__
    if name not in _STEPS:
        raise NotImplementedError(f"the reference transform {name} is not emulated")
    make = _STEPS[name]
    return None if make is None else make(transform)


def entries_of(transform: Transform) -> list[int]:
    """The entries of the environment that a transform's step reads: those of its indices."""
    indices = getattr(transform, "indices", ())
    starts = (getattr(index, "start", index) for index in indices)
    return [start.index for start in starts if type(start) is Entry]
