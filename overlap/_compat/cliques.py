"""Patch: Pallas lowers a Mosaic GPU kernel for its clique, the devices that it can talk to, not for its whole mesh.

Reason: jax refuses a mesh whose devices are permuted, and makes one clique of devices on several hosts, which cannot
reach each other's memory. `overlap/primitives/clique.py` says which devices and numbers are right. The kernel's
devices cannot be named before lowering: while a kernel is traced, the mesh may be abstract and have no devices yet, and
inside a nested `jax.shard_map` it is still the whole mesh, not the clique's.

Change: Pallas's lowering rule for kernels is wrapped. The wrapper passes the clique's mesh to the rule instead of the
whole mesh. In the custom call that the rule returns, the wrapper replaces the devices that are named to XLA. Where each
GPU has a process of its own, a kernel with `addresses.Params` gets its peers' addresses from another kernel
(`told_addresses.py`). Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: in Mosaic GPU, logical device numbers that are positions in the mesh, and one clique per host.
For upstream: docs/upstream.md#cliques.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from overlap._compat.mirrored_ranks import MIRRORED_RANKS, mirrored
from overlap._compat.patch import Patch, private, replace
from overlap._compat.told_addresses import ADDRESSES_TOLD, Addresses, Told, told

_MARK = "lowers_by_cliques"
# The ids of the devices in the mesh of the kernel that is being lowered, in order; None if they are not known.
_device_ids: contextvars.ContextVar[tuple[int, ...] | None] = contextvars.ContextVar("overlap_device_ids", default=None)


def device_ids() -> tuple[int, ...] | None:
    """The ids of the devices of the mesh, in order, of the kernel that is being lowered; None if they are not known.

    Raises:
      RuntimeError: the patch `kernels_in_cliques` has not been applied in this process, so the ids are never known.
    """
    rule = private("jax._src.pallas.mosaic_gpu.pallas_call_registration", "mpmd_map_mgpu_lowering_rule")
    if not getattr(rule, _MARK, False):
        raise RuntimeError(
            "a kernel that communicates by the words of overlap.primitives is being lowered, and jax is not prepared "
            "for it: call overlap.primitives.prepare() before you compile kernels of your own"
        )
    return _device_ids.get()


@contextlib.contextmanager
def _known(ids: tuple[int, ...] | None) -> Iterator[None]:
    token = _device_ids.set(ids)
    try:
        yield
    finally:
        _device_ids.reset(token)


def kernels_in_cliques(clique_of: Callable[[Any, frozenset[Hashable]], Any], addresses: Addresses) -> Patch:
    """Makes the patch. The arguments pass in parts of `overlap.primitives`, which this package may not import.

    Args:
      clique_of: called as `clique_of(mesh, axes)` for each kernel in a `shard_map` over `mesh`; `axes` are the names of
        all axes along which the kernel uses an index or a device id. It returns an object with the fields of
        `overlap.primitives.clique.Clique`; or None, and jax's own rule lowers the kernel unchanged.
      addresses: `overlap.primitives.addresses`.
    """

    def change() -> None:
        private("jax.experimental.mosaic.gpu.core", "_is_known_multihost_mesh")
        private("jax.experimental.mosaic.gpu.core", "is_nvshmem_available")
        private("jax._src.core", "NamedAxisEffect")
        private("jax._src.core", "jaxprs_in_params")
        replace(
            "jax._src.pallas.mosaic_gpu.pallas_call_registration", "mpmd_map_mgpu_lowering_rule", _MARK,
            lambda lower: _by_cliques(lower, clique_of, addresses),
        )  # fmt: skip

    return Patch("kernels talk to their peers", change, needs=(MIRRORED_RANKS, ADDRESSES_TOLD))


def _by_cliques(lower: Callable[..., Any], clique_of: Callable[..., Any], addresses: Addresses) -> Callable[..., Any]:
    """Wraps Pallas's lowering rule `lower`, so that it lowers each kernel for its clique."""

    def lower_by_clique(ctx: Any, *args: Any, jaxprs: Any, **params: Any) -> Any:
        axis_context = ctx.module_context.axis_context
        mesh = getattr(axis_context, "mesh", None)
        clique = None if mesh is None else clique_of(mesh, frozenset().union(*map(_axes_of, jaxprs)))
        if clique is None:
            outs = lower(ctx, *args, jaxprs=jaxprs, **params)
            if isinstance(params["compiler_params"], addresses.OwnMemory):
                _keep_apart(outs[0].owner)
            return outs
        context = axis_context.__class__(clique.mesh, frozenset(clique.mesh.axis_names))
        within = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
        # The devices of an exported program are known only when it is loaded.
        knows_devices = clique.knows_devices and not ctx.module_context.lowering_parameters.for_export
        kernel = _told(clique, params["compiler_params"], addresses)
        params |= _without_own_barrier(params["compiler_params"], kernel) if not knows_devices else {}
        if kernel is not None:
            kernel.check_room(clique.mesh.size)
            params["input_output_aliases"] = dict(params["compiler_params"].aliased_results)
        with mirrored(clique.is_mirrored), told(kernel), _known(clique.device_ids if knows_devices else None):
            outs = lower(within, *args, jaxprs=jaxprs, **params)
            if not outs:
                return outs
            call = outs[0].owner
            if kernel is not None:
                call = kernel.put_before(call, within, args)
                addresses.note_mesh(_device_ids.get() or ())
        _name_devices(call, clique)
        return outs

    return lower_by_clique


def _told(clique: Any, compiler_params: Any, addresses: Addresses) -> Told | None:
    """A `Told` for a kernel that reads its peers' addresses from a table; None if it does not need the table.

    The table is needed by a kernel with `addresses.Params`, if each GPU has a process of its own and there is no
    NVSHMEM.
    """
    if not isinstance(compiler_params, addresses.Params):
        return None
    several_processes = private("jax.experimental.mosaic.gpu.core", "_is_known_multihost_mesh")(clique.mesh)
    if not several_processes or private("jax.experimental.mosaic.gpu.core", "is_nvshmem_available")():
        return None
    params: Any = compiler_params
    return Told(addresses, params.peers_read)


def _without_own_barrier(compiler_params: Any, kernel: Told | None) -> dict[str, Any]:
    """Returns the compiler parameters to change so that XLA's barrier runs before the kernel, if the kernel skips it.

    A kernel needs that barrier if the devices of its mesh are not known while it is lowered.

    Raises:
      NotImplementedError: the kernel reads its peers' addresses from a table. XLA does not know that such a kernel has
        peers, so XLA runs no barrier for it.
    """
    if not getattr(compiler_params, "skip_device_barrier", False):
        return {}
    if kernel is not None:
        raise NotImplementedError(
            "where each GPU has a process of its own, a kernel must know the devices of its mesh, and this one is "
            "abstract or to be exported: give jax.shard_map a mesh of devices (or jax.set_mesh), or use "
            'implementation="xla"'
        )
    return {"compiler_params": dataclasses.replace(compiler_params, skip_device_barrier=False)}


def _keep_apart(call: Any) -> None:
    """Marks a call as having side effects, so that XLA does not merge it with an identical call."""
    from jax.extend.mlir import ir

    call.attributes["has_side_effect"] = ir.BoolAttr.get(True)


def _name_devices(call: Any, clique: Any) -> None:
    """Tells XLA the clique's devices, in an attribute of the custom call `call`.

    The attribute lists the devices' positions in the enclosing mesh, in the order of ranks.

    Raises:
      NotImplementedError: the mesh spans several hosts, and NVSHMEM replaces XLA's table of peers.
    """
    from jax.extend.mlir import ir

    entries = {entry.name: entry.attr for entry in call.attributes["mhlo.backend_config"]}
    if "xla_replica_ids" in entries:
        clique.require_known_ids()
        entries["xla_replica_ids"] = ir.StringAttr.get(",".join(map(str, clique.positions)))
        call.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
    elif clique.is_mirrored and clique.mesh.size > 1:
        # NVSHMEM has its own numbers for peers, which XLA does not know.
        raise NotImplementedError(
            "kernels on several hosts find their peers by XLA's own table, and NVSHMEM is in its place: uninstall "
            'nvidia-nvshmem, or use implementation="xla"'
        )


def _axes_of(jaxpr: Any) -> frozenset[Hashable]:
    """The names of all axes that the effects of a kernel's jaxpr name, those of inner jaxprs included.

    The inner jaxprs must be searched: the effects in the body of a map over warps do not appear outside of it.
    """
    effect_of_axis = private("jax._src.core", "NamedAxisEffect")
    inner = private("jax._src.core", "jaxprs_in_params")
    effects = [effect for effect in jaxpr.effects if isinstance(effect, effect_of_axis)]
    within = (sub for equation in jaxpr.eqns for sub in inner(equation.params))
    return frozenset(effect.name for effect in effects).union(*map(_axes_of, within))
