"""References with transforms: they are decoded once into steps, and resolved to views when an instruction runs."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from ..foundations import tensor_views
from ..foundations.environment import Entry, value_of
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta, twin
from ..state.memory import Buffer, Cells, Geometry, View
from ..state.mesh import Mesh

_CACHE_LIMIT = 2048


class Resolver(Protocol):
    """A thread that resolves a reference."""

    @property
    def env(self) -> list[Any]: ...

    @property
    def device(self) -> int: ...

    @property
    def cta(self) -> Cta: ...

    @property
    def mesh(self) -> Mesh: ...


class _Builder:
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


def _index_tiled(sizes: tuple[int, ...], start: int, size: int, drop: bool, name: str) -> list[Any]:
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
        head: Any = outer if drop else slice(outer, outer + 1)
        return [head, *_index_tiled(sizes[1:], start % inner, size, drop, name)]
    raise NotImplementedError(
        f"{name}: the slice [{start}:{start + size}] of a dimension tiled by {inner} crosses tiles unevenly"
    )


def _step_indexer(transform: Any):
    specs = []
    for index in transform.indices:
        if hasattr(index, "size") and hasattr(index, "stride") and not isinstance(index, np.ndarray):
            specs.append((True, index.start, int(index.size), int(index.stride)))
        else:
            specs.append((False, index, 1, 1))

    def step(b: _Builder, env: list, clip: bool) -> None:
        sizes = b.sizes()
        key: list[Any] = []
        groups: list[int] = []
        texts: list[str] = []
        axis = 0
        window: list[slice] = []
        requested: list[int] = []
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

    dynamic = [x.index for spec in specs for x in spec if type(x) is Entry]
    return step, dynamic


def _untile(tiling: tuple[int, ...]):
    k = len(tiling)

    def step(b: _Builder, env: list, clip: bool) -> None:
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


def _tile(tiling: tuple[int, ...]):
    k = len(tiling)

    def step(b: _Builder, env: list, clip: bool) -> None:
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


def _reshaped(array: np.ndarray, shape: Any, name: str) -> np.ndarray:
    view = array.reshape(tuple(shape))
    if view.size and not np.may_share_memory(view, array):  # The reshape has made a copy.
        raise NotImplementedError(f"{name}: this reshape of a strided part of memory is not emulated")
    return view


def _transpose(permutation: tuple[int, ...]):
    def step(b: _Builder, env: list, clip: bool) -> None:
        starts = np.cumsum([0, *b.groups])
        b.array = b.array.transpose([a for p in permutation for a in range(starts[p], starts[p] + b.groups[p])])
        b.groups = [b.groups[p] for p in permutation]
        b.text += ".T" if permutation == (1, 0) else f".transpose{permutation}"

    return step


def _reshape(shape: tuple[int, ...]):
    def step(b: _Builder, env: list, clip: bool) -> None:
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


def _bitcast(dtype: Any):
    def step(b: _Builder, env: list, clip: bool) -> None:
        if any(g != 1 for g in b.groups):
            raise NotImplementedError(f"{b.name}: bitcast of tiled memory is not emulated")
        if np.dtype(dtype).itemsize == b.array.dtype.itemsize:
            b.array = b.array.view(dtype)
        else:  # Mosaic GPU changes the size of the last dimension but one.
            swapped = np.ascontiguousarray(b.array) if b.array.ndim < 2 else b.array
            if b.array.ndim >= 2:
                raise NotImplementedError(f"{b.name}: bitcast to another width is not emulated")
            b.array = swapped.view(dtype)

    return step


def _extract(transform: Any):
    dtype, shape, offset = np.dtype(transform.dtype), tuple(transform.shape), int(transform.offset)
    group = transform.alias_group_idx

    def step(b: _Builder, env: list, clip: bool) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        b.array = b.array[offset : offset + nbytes].view(dtype).reshape(shape)
        b.groups = [1] * len(shape)
        b.text += f"{{union group {group}, {dtype}{list(shape)}}}"

    return step


def _decode(transform: Any):
    """Decodes one transform into (step, entries that the step reads); None if it has no effect in the emulator."""
    name = type(transform).__name__
    if name == "NDIndexer":
        return _step_indexer(transform)
    if name == "UntilingTransform":
        return _untile(tuple(transform.tiling)), []
    if name == "TilingTransform":
        return _tile(tuple(transform.tiling)), []
    if name == "TransposeTransform":
        return _transpose(tuple(transform.permutation)), []
    if name == "ReshapeTransform":
        return _reshape(tuple(transform.shape)), []
    if name == "BitcastTransform":
        return _bitcast(transform.dtype), []
    if name == "ExtractAliasedRef":
        return (_extract if getattr(transform, "layout", None) is None else tensor_views.extract)(transform), []
    if name == "ExpandLeadingBatchDimensionsTransform":
        return tensor_views.expand(transform), []
    if name in ("UnswizzleRef", "SwizzleTransform", "IdentityTransform", "MemorySpaceCastTransform"):
        return None  # The place of the bytes inside a row does not matter in the emulator.
    raise NotImplementedError(f"the reference transform {name} is not emulated")


class RefPath:
    """A decoded chain of transforms, which can be applied to the buffer or `Cells` that a reference is bound to."""

    def __init__(self, transforms: Any, clip: bool = False):
        self._steps = []
        self._dynamic: list[int] = []
        self._peer: tuple[Any, Any] | None = None
        self._place: dict[Any, Any] | None = None  # the indices in the cluster of the CTA that the reference names
        self.multicast: tuple[Any, ...] | None = None  # the mesh axes of a `multicast_ref`
        self._clip = clip
        self._cache: dict[Any, Any] = {}
        self._places: dict[Any, int] = {}
        self._geometries: dict[Any, Geometry] = {}  # by (shape, dtype, indices); kept for later launches
        for transform in transforms or ():
            if type(transform).__name__ == "PeerMemRef":
                self._peer = (transform.device_id, transform.device_id_type)
                continue
            if type(transform).__name__ == "MulticastRef":
                self.multicast = tuple(transform.collective_axes)
                continue
            if type(transform).__name__ == "ClusterRefTransform":
                self._place = dict(zip(transform.dims, transform.idxs))
                continue
            decoded = _decode(transform)
            if decoded is not None:
                self._steps.append(decoded[0])
                self._dynamic += decoded[1]

    @property
    def is_remote(self) -> bool:
        return self._peer is not None

    @property
    def names_a_cta(self) -> bool:
        """Whether the reference names a CTA of the cluster (`plgpu.cluster_ref`)."""
        return self._place is not None

    def forget(self) -> None:
        """Empties the caches whose contents belong to one launch."""
        self._cache.clear()
        self._places.clear()

    def resolve(self, thread: Resolver, base: Buffer | Cells) -> Any:
        """Returns the view of a buffer, or the synchronisation object, that the reference stands for in `thread`."""
        env, base = thread.env, self._base(thread, base)
        key = (base.serial, *[env[i] for i in self._dynamic])
        try:
            found = self._cache.get(key)
        except TypeError:  # An index is an array, so the key has no hash.
            key = found = None
        if found is None:
            found = self._build(base, env) if key is None else self._view(base, env, key[1:])
            if key is not None:
                if len(self._cache) > _CACHE_LIMIT:
                    self._cache.clear()
                self._cache[key] = found
        return found

    def locate(self, thread: Resolver, base: Buffer | Cells) -> tuple[Buffer | Cells, int]:
        """Returns the array in which the reference lies, and its offset in objects (`Cells`) or bytes (`Buffer`)."""
        env, base = thread.env, self._base(thread, base)
        key = (base.serial, *[env[i] for i in self._dynamic])
        try:
            found = self._places.get(key)
        except TypeError:  # An index is an array. `_apply` refuses it.
            found = None
        if found is None:
            part, whole = self._apply(base, env).array, base.data if isinstance(base, Buffer) else base.places
            distance = part.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
            found = distance if isinstance(base, Buffer) else distance // whole.itemsize
            if len(self._places) > _CACHE_LIMIT:
                self._places.clear()
            self._places[key] = found
        return base, found

    def _base(self, thread: Resolver, base: Buffer | Cells) -> Any:
        """Returns the buffer or `Cells` like `base` on the device, and in the CTA, that the reference names."""
        env = thread.env
        if self._peer is not None:
            base = base.on(thread.mesh.logical_device(thread.device, *self._peer, env))
        if self._place is not None:
            if thread.cta.cluster is None:
                raise ProtocolError(f"{base.name}: a cluster_ref in a kernel without clusters")
            place = {axis: int(value_of(index, env)) for axis, index in self._place.items()}
            base = twin(base, thread.cta.cluster.at(thread.cta, place))
        return base

    def _apply(self, base: Buffer | Cells, env: list) -> _Builder:
        b = _Builder(base.data if isinstance(base, Buffer) else base.places, base.name)
        for step in self._steps:
            step(b, env, self._clip)
        return b

    def _build(self, base: Buffer | Cells, env: list) -> Any:
        b = self._apply(base, env)
        if isinstance(base, Cells):
            if b.array.size != 1:
                raise ProtocolError(f"{base.name}{b.text}: one element is needed, got shape {b.array.shape}")
            return base.at(int(b.array.reshape(-1)[0]))
        view = View(base, b.array, tuple(b.groups), b.text)
        view.requested, view.window = b.requested, b.window
        return view

    def _view(self, base: Buffer | Cells, env: list, indices: tuple[Any, ...]) -> Any:
        """Returns what `_build` returns, but reuses the geometry of a view with the same indices of another buffer."""
        if isinstance(base, Cells) or not base.data.flags.c_contiguous or not base.data.size:
            return self._build(base, env)
        shape, dtype = base.data.shape, base.data.dtype
        known = self._geometries.get((shape, dtype, *indices))
        if known is not None:
            return known.of(base)
        view = self._build(base, env)
        if len(self._geometries) > _CACHE_LIMIT:
            self._geometries.clear()
        self._geometries[(shape, dtype, *indices)] = Geometry(view)
        return view
