"""Cuts a copy to several CTAs of a cluster into equal parts. Each CTA issues one part."""

from __future__ import annotations

import math

from ..foundations.errors import ProtocolError
from .memory import View


def share(view: View, shape: tuple[int, ...], parts: int, index: int) -> tuple[slice, ...]:
    """Returns the part of a multicast copy that CTA `index` of `parts` issues, as slices of the logical shape.

    Like Mosaic GPU, this function cuts along the first dimension of the (tiled) shape in memory that is divisible by
    `parts`. The size of each dimension before that one must divide `parts`: the dimension is cut into single elements,
    and fewer parts remain for the next dimension.
    """
    slices = [slice(0, size) for size in shape]
    inner = [math.prod(view.array.shape[sum(view.groups[:d]) :][1:n]) for d, n in enumerate(view.groups)]
    # Outer dimensions first, then dimensions within a tile: (dimension, size in memory, elements of it per index).
    order = [(d, view.array.shape[sum(view.groups[:d])], inner[d]) for d in range(len(shape))]
    order += [(d, inner[d], 1) for d, n in enumerate(view.groups) if n > 1]
    for d, size, step in order:
        first = slices[d].start
        if size % parts == 0:
            length = size // parts * step
            slices[d] = slice(first + index * length, first + (index + 1) * length)
            return tuple(slices)
        if parts % size:
            break
        if size > 1:
            first += index % size * step
            slices[d] = slice(first, first + step)
            index, parts = index // size, parts // size
    raise ProtocolError(f"a multicast copy to {view} of shape {shape} cannot be cut into {parts} equal parts")


def slab(view: View, axis: int, parts: int, index: int) -> View:
    """Cuts a view of global memory along a dimension into `parts` equal parts, and returns number `index` of them.

    The view may reach out of bounds.
    """
    asked = view.requested or view.shape
    if asked[axis] % parts:
        raise ProtocolError(f"{view} of shape {asked} cannot be cut into {parts} equal parts along dimension {axis}")
    size = asked[axis] // parts
    first = index * size
    there = slice(0, asked[axis]) if view.window is None else view.window[axis]  # the part that is in bounds
    low = min(max(there.start, first), there.stop)
    high = max(min(there.stop, first + size), low)
    key = [slice(None)] * view.array.ndim
    key[axis] = slice(low - there.start, high - there.start)
    part = View(view.buffer, view.array[tuple(key)], view.groups, f"{view.text}[part {index} of {parts}]")
    if view.requested is not None and view.window is not None:
        part.requested = (*asked[:axis], size, *asked[axis + 1 :])
        inside = slice(low - first, high - first) if high > low else slice(0, 0)
        part.window = (*view.window[:axis], inside, *view.window[axis + 1 :])
    return part


def part_of(view: View, part: tuple[slice, ...]) -> View:
    """Returns the part of a view that the slices `part` of its logical shape select."""
    key: list[slice] = []
    at = 0
    for cut, n in zip(part, view.groups):
        sizes = view.array.shape[at : at + n]
        at += n
        inner = math.prod(sizes[1:])
        whole = cut.start % inner == 0 and cut.stop % inner == 0
        outer = slice(cut.start // inner, cut.stop // inner if whole else cut.start // inner + 1)
        key.append(outer)
        if n > 1:
            key.append(slice(None) if whole else slice(cut.start % inner, (cut.stop - 1) % inner + 1))
            key += [slice(None)] * (n - 2)
    text = view.text + "[" + ", ".join(f"{cut.start}:{cut.stop}" for cut in part) + "]"
    return View(view.buffer, view.array[tuple(key)], view.groups, text)
