"""References with transforms: they are decoded once into steps, and resolved to views when an instruction runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, Protocol

from ..foundations.equations import AxisName, Environment, JaxObject, Scalar, Transform, value_of
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta, twin
from ..state.memory import Allocation, Buffer, Cells, Geometry, View
from ..state.mesh import Mesh
from . import transforms

_CACHE_LIMIT = 2048


class Resolver(Protocol):
    """A thread that resolves a reference."""

    env: Environment
    device: int
    cta: Cta
    mesh: Mesh


class RefPath:
    """A decoded chain of transforms, which can be applied to the buffer or `Cells` that a reference is bound to."""

    def __init__(self, steps: Iterable[Transform], clip: bool = False):
        self._steps: list[transforms.Step] = []
        self._dynamic: list[int] = []
        self._peer: tuple[JaxObject, JaxObject] | None = None
        self._place: dict[AxisName, Scalar] | None = (
            None  # the indices in the cluster of the CTA that the reference names
        )
        self.multicast: tuple[AxisName, ...] | None = None  # the mesh axes of a `multicast_ref`
        self.clip = clip  # whether a slice may reach beyond its array, and is clipped
        self._cache: dict[Hashable, Any] = {}
        self._places: dict[Hashable, int] = {}
        self._geometries: dict[Hashable, Geometry] = {}  # by (shape, dtype, indices); kept for later launches
        for transform in steps:
            name = type(transform).__name__
            if name == "PeerMemRef":
                self._peer = (transform.device_id, transform.device_id_type)
            elif name == "MulticastRef":
                self.multicast = tuple(transform.collective_axes)
            elif name == "ClusterRefTransform":
                self._place = dict(zip(transform.dims, transform.idxs))
            elif (step := transforms.decode(transform)) is not None:
                self._steps.append(step)
                self._dynamic += transforms.entries_of(transform)

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

    def resolve(self, thread: Resolver, base: Allocation) -> Any:
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

    def resolve_in(self, cta: Cta, thread: Resolver, base: Allocation) -> Any:
        """Like `resolve`, in the thread's own CTA or another one of its cluster."""
        return self.resolve(thread, base if cta is thread.cta else twin(base, cta))

    def locate(self, thread: Resolver, base: Allocation) -> tuple[Buffer | Cells, int]:
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

    def _base(self, thread: Resolver, base: Allocation) -> Buffer | Cells:
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

    def _apply(self, base: Allocation, env: Environment) -> transforms.Builder:
        b = transforms.Builder(base.data if isinstance(base, Buffer) else base.places, base.name)
        for step in self._steps:
            step(b, env, self.clip)
        return b

    def _build(self, base: Allocation, env: Environment) -> Any:
        b = self._apply(base, env)
        if isinstance(base, Cells):
            if b.array.size != 1:
                raise ProtocolError(f"{base.name}{b.text}: one element is needed, got shape {b.array.shape}")
            return base.at(int(b.array.reshape(-1)[0]))
        view = View(base, b.array, tuple(b.groups), b.text)
        view.requested, view.window = b.requested, b.window
        return view

    def _view(self, base: Allocation, env: Environment, indices: tuple[Hashable, ...]) -> Any:
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
