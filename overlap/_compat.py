"""Every import from `jax._src` and every test of a jax version, each with its reason.

Nothing else in the library imports private names. When a jax release moves one of them, this file alone changes; what
Mosaic GPU is taught is in `_compat_mosaic.py`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from overlap import _cuda

__all__ = [
    "backends_are_initialized",
    "device_ids",
    "job_store",
    "lower_by_cliques",
    "lowering_rules_of_warps",
    "oldest_nccl_of_one_process",
    "peer_table",
    "told_addresses",
    "without_varying_axes",
]


def backends_are_initialized() -> bool:
    """Whether any JAX backend has been started in this process.

    `jax.distributed.initialize` must come before that. There is no public way to ask without starting the backends:
    `jax.extend.backend.backends()` starts them.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def job_store() -> Any:
    """The key-value store that connects the processes of `jax.distributed`; None in a single process.

    jax has no public way to it. Used: `key_value_set`, `key_value_dir_get`.
    """
    from jax._src import distributed

    return distributed.global_state.client


def lowering_rules_of_warps() -> tuple[dict[Any, Callable[..., Any]], Any]:
    """How Pallas lowers each primitive for a warp of its own, and the primitive of `plgpu.barrier_arrive`.

    jax has no public way to add or replace a rule.
    """
    from jax._src.pallas.mosaic_gpu import core, lowering, primitives

    rules: Any = lowering.mosaic_lowering_rules[core.WGxWARP_SEMANTICS]
    return rules, primitives.barrier_arrive_p


def oldest_nccl_of_one_process(jax_version: str) -> tuple[int, int] | None:
    """The oldest NCCL with which all programs of one process with all GPUs run; None if any will do.

    The version is given, since `python -m overlap doctor` asks and imports no jax.

    From jax 0.12 on, XLA asks NCCL for its peers' addresses for each small all-reduce, such as a scalar's `psum`. With
    NCCL 2.28.9, which jax's own extra allows, it fails ("ncclGetPeerDevicePointer … unhandled system error"), and with
    2.30.7 it does not. Kernels run with either.
    """
    number = tuple(int(part) for part in jax_version.split(".")[:2] if part.isdecimal())
    return _cuda.NCCL_WITH_PEER_POINTERS if number >= (0, 12) else None


def without_varying_axes() -> Any:
    """A context without `check_vma`, in which `overlap/kernels/launch.py` traces and lowers a kernel.

    There is no public way: `check_vma` is an argument of `jax.shard_map`, which belongs to the user.
    """
    from jax._src import config

    return config._check_vma(False)


class Addresses(Protocol):
    """What lowering needs of `overlap.primitives.addresses`."""

    @property
    def TABLE_FLAGS(self) -> int: ...

    @property
    def Params(self) -> type: ...

    @property
    def OwnMemory(self) -> type: ...

    def tell(self, num_flags: int) -> Callable[..., Any]: ...

    def note_program(self, program: Any, device_ids: tuple[int, ...]) -> None: ...


def lower_by_cliques(clique_of: Callable[[Any, frozenset[Hashable]], Any], addresses: Addresses) -> None:
    """Has Pallas lower each Mosaic GPU kernel for its clique instead of its whole mesh. The first call counts.

    `clique_of(mesh, axes)` is asked for each kernel in a `shard_map` over `mesh` that counts along the axes of the
    names given. It returns what has the fields of `overlap.primitives.clique.Clique`, or None: lower it as jax does.
    Kernels with `addresses.Params` are told their peers' addresses by another one, where each GPU has a process of its
    own (`overlap/primitives/addresses.py`).

    There is no other way: neither the devices nor the mesh are known before lowering (one of an abstract mesh is of no
    use), and a nested `shard_map` keeps the whole mesh. Same code in jax 0.11.2 and 0.12.0.1.
    """
    from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration
    from jax.experimental.mosaic.gpu import core
    from jaxlib.mlir import ir

    lower = registration.mpmd_map_mgpu_lowering_rule
    if getattr(lower, "lowers_by_cliques", False):
        return
    _let_ranks_count_backwards()
    _let_kernels_be_told(addresses)

    @functools.wraps(lower)
    def lower_by_clique(ctx: Any, *args: Any, jaxprs: Any, **params: Any) -> Any:
        axis_context = ctx.module_context.axis_context
        mesh = getattr(axis_context, "mesh", None)
        clique = None if mesh is None else clique_of(mesh, frozenset().union(*map(_axes_of, jaxprs)))
        if clique is None:
            outs = lower(ctx, *args, jaxprs=jaxprs, **params)
            if isinstance(params["compiler_params"], addresses.OwnMemory):
                outs[0].owner.attributes["has_side_effect"] = ir.BoolAttr.get(True)
            return outs
        context = axis_context.__class__(clique.mesh, frozenset(clique.mesh.axis_names))
        compiler_params: Any = params["compiler_params"]
        # An exported program runs on whatever devices it is loaded for.
        knows_devices = clique.knows_devices and not ctx.module_context.lowering_parameters.for_export
        a_process_each = core._is_known_multihost_mesh(clique.mesh) and not core.is_nvshmem_available()
        is_told = a_process_each and isinstance(compiler_params, addresses.Params)
        told = _Told(compiler_params.peers_read) if is_told else None
        if is_told:
            params["input_output_aliases"] = dict(compiler_params.aliased_results)
        if not knows_devices and compiler_params.skip_device_barrier:
            if is_told:
                raise NotImplementedError(
                    "where each GPU has a process of its own, a kernel must know the devices of its mesh, and this one "
                    "is abstract or to be exported: give jax.shard_map a mesh of devices (or jax.set_mesh), or use "
                    'implementation="xla"'
                )
            params["compiler_params"] = dataclasses.replace(compiler_params, skip_device_barrier=False)
        tokens = (
            _counts_backwards.set(clique.is_mirrored), _told.set(told),
            _device_ids.set(clique.device_ids if knows_devices else None),
        )  # fmt: skip
        try:
            within = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
            outs = lower(within, *args, jaxprs=jaxprs, **params)
        finally:
            _counts_backwards.reset(tokens[0])
            _told.reset(tokens[1])
            _device_ids.reset(tokens[2])
        if not outs:
            return outs
        call = outs[0].owner if told is None else told.call
        config = call.attributes["mhlo.backend_config"]
        entries = {entry.name: entry.attr for entry in config}
        if "xla_replica_ids" in entries:
            clique.require_known_ids()
            entries["xla_replica_ids"] = ir.StringAttr.get(",".join(map(str, clique.positions)))
            call.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
        elif clique.is_mirrored and clique.mesh.size > 1:
            # Then peers have other numbers, of which XLA knows nothing.
            raise NotImplementedError(
                "kernels on several hosts find their peers by XLA's own table, and NVSHMEM is in its place: uninstall "
                'nvidia-nvshmem, or use implementation="xla"'
            )
        return outs

    lower_by_clique.lowers_by_cliques = True  # pyright: ignore[reportAttributeAccessIssue]
    registration.mpmd_map_mgpu_lowering_rule = lower_by_clique


# Those of the mesh of the kernel that is being lowered, in order; None if they are not known.
_device_ids: contextvars.ContextVar[tuple[int, ...] | None] = contextvars.ContextVar("device_ids", default=None)


def device_ids() -> tuple[int, ...] | None:
    """In the lowering of a kernel: the ids of the devices of its mesh, in order, if they are known."""
    return _device_ids.get()


def _axes_of(jaxpr: Any) -> frozenset[Hashable]:
    """The names of all axes along which something in a kernel counts; what single warps do has no effects outside."""
    from jax._src import core

    effects = [effect for effect in jaxpr.effects if isinstance(effect, core.NamedAxisEffect)]
    within = (sub for equation in jaxpr.eqns for sub in core.jaxprs_in_params(equation.params))
    return frozenset(effect.name for effect in effects).union(*map(_axes_of, within))


@dataclasses.dataclass
class _Told:
    """A kernel that is being lowered and is told its peers' addresses by another one.

    Attributes:
      peers_read: which of its operands the peers read: the first rows of the table. The last one is its flags.
      call: XLA's custom call of the other one, once the kernel is lowered.
    """

    peers_read: tuple[int, ...]
    call: Any = None

    def parameters(self, context: Any) -> tuple[int, ...]:
        """The parameters of the rows."""
        return *self.peers_read, context.num_params - 1


_told: contextvars.ContextVar[_Told | None] = contextvars.ContextVar("told", default=None)


def _let_kernels_be_told(addresses: Addresses) -> None:
    """Has a kernel read the peers' addresses at the beginning of its flags where `_told`, and another one write them.

    A kernel's flags are its last operand, which XLA zeroes, and its last result, which shares the operand's memory.
    """
    from jax.experimental.mosaic.gpu import core, launch_context, utils
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    context: Any = launch_context.LaunchContext
    xlas_table, address_on_peer = context._collective_metadata, context._get_parameter_address_on_peer
    lower = core._mosaic_gpu_lowering_rule

    @functools.wraps(xlas_table)
    def table(self: Any, which: int) -> Any:
        if _told.get() is None:
            return xlas_table(self, which)
        if which:
            raise NotImplementedError("the host of a GPU with a process of its own does not know its peers' addresses")
        with ir.InsertionPoint.at_block_begin(self.buffers.owner):
            entries = ir.MemRefType.get((addresses.TABLE_FLAGS // 2,), ir.IntegerType.get_signless(64))
            return utils.ptr_as_memref(_pointer(self, self.num_params - 1), entries)

    @functools.wraps(address_on_peer)
    def address_by_row(self: Any, parameter_id: int, peer_id: Any, on_host: bool) -> Any:
        told = _told.get()
        row = parameter_id if told is None else told.parameters(self).index(parameter_id)
        return address_on_peer(self, row, peer_id, on_host)

    @functools.wraps(lower)
    def lower_told(ctx: Any, *args: Any, module: Any, **params: Any) -> Any:
        told = _told.get()
        if told is None:
            return lower(ctx, *args, module=module, **params)
        devices, read = ctx.module_context.axis_context.mesh.size, told.peers_read
        header = launch_context.COLLECTIVE_METADATA_SIZE
        assert len(read) + 1 < header  # Where the buffers are themselves has its place there.
        if (entries := header + (len(read) + 1) * devices) > addresses.TABLE_FLAGS // 2:
            raise NotImplementedError(
                f"where each GPU has a process of its own, a kernel has {addresses.TABLE_FLAGS // 2} entries for its "
                f'peers, and for {devices} devices needs {entries}: use implementation="xla"'
            )
        tell, avals = addresses.tell(ctx.avals_in[-1].size), [ctx.avals_in[i] for i in read]
        token = _told.set(None)
        try:
            (zeros,) = mlir.lower_fun(lambda *operands: [tell(*operands)], multiple_results=True)(
                ctx.replace(avals_in=avals, avals_out=[ctx.avals_in[-1]]), *[args[i] for i in read]
            )
        finally:
            _told.reset(token)
        told.call = zeros.owner
        addresses.note_program(ctx.module_context.module, _device_ids.get() or ())
        # Two of them with the same operands are not one: each makes flags of its own.
        told.call.attributes["has_side_effect"] = ir.BoolAttr.get(True)
        for attribute in (launch_context.COLLECTIVE_ATTR, launch_context.SYMMETRIC_MEMORY_ARGS_ATTR):
            del module.operation.attributes[attribute]
        return lower(ctx, *args[:-1], zeros, module=module, **params)

    context._collective_metadata, context._get_parameter_address_on_peer = table, address_by_row
    core._mosaic_gpu_lowering_rule = lower_told


def _pointer(context: Any, parameter: int) -> Any:
    """A parameter's address, as the host passes it."""
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir.dialects import llvm

    pointer = llvm.PointerType.get()
    return llvm.load(pointer, utils.getelementptr(context.buffers, [parameter], pointer))


def peer_table(context: Any, *parameters: Any) -> list[tuple[int, Any]]:
    """In a kernel's inline code: a table of its peers' addresses, places and entries, in Mosaic GPU's own form.

    That is the rank, room for others, and for each parameter a row of addresses, one per rank. XLA gives those of
    whatever the buffer lies in, for this device as well, and leaves it to the reader to add the offset there. So where
    the buffers are themselves stands behind the rank.

    Args:
      context: that of the code.
      *parameters: references to all parameters of the kernel.
    """
    from jax.experimental.mosaic.gpu import launch_context, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    context.device_id()  # Who asks for it, asks for XLA's table.
    header = launch_context.COLLECTIVE_METADATA_SIZE
    places = (0, *range(header, header + context.num_peers * len(parameters)))
    i64 = ir.IntegerType.get_signless(64)
    own = [(1 + row, llvm.ptrtoint(i64, utils.memref_ptr(ref))) for row, ref in enumerate(parameters)]
    return [(place, _entry(context, place)) for place in places] + own


def told_addresses(context: Any) -> list[tuple[Any, Any]]:
    """In a kernel's inline code: where the table says that its buffers are, and where they are; empty if not told."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    told = _told.get()
    if told is None:
        return []
    pairs = []
    for row, parameter in enumerate(told.parameters(context)):
        with ir.InsertionPoint.at_block_begin(context.buffers.owner):
            pointer = _pointer(context, parameter)
        pairs.append((_entry(context, 1 + row), llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)))
    return pairs


def _entry(context: Any, place: int) -> Any:
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import memref

    return memref.load(context.device_collective_metadata, [utils.c(place, ir.IndexType.get())])


# Whether the kernel that is being lowered runs in a clique whose ranks run against the positions in its mesh.
_counts_backwards: contextvars.ContextVar[bool] = contextvars.ContextVar("counts_backwards", default=False)


def _let_ranks_count_backwards() -> None:
    """Has Mosaic GPU turn ranks into positions and back where `_counts_backwards`: rank 0 is the last position.

    It takes the two for the same in two places: where a kernel asks who it is, and where it looks up a peer's address.
    """
    from jax.experimental.mosaic.gpu import launch_context, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    context: Any = launch_context.LaunchContext
    device_id, address_on_peer = context.device_id, context._get_parameter_address_on_peer

    def mirrored(self: Any, number: Any) -> Any:
        return arith.subi(utils.c(self.num_peers - 1, ir.IntegerType.get_signless(32)), number)

    @functools.wraps(device_id)
    def position(self: Any, on_host: bool = False) -> Any:
        rank = device_id(self, on_host)
        if not _counts_backwards.get():
            return rank
        own = mirrored(self, rank)
        # What depends on this is computed again on the host, for TMA descriptors, by calling this function there.
        own.owner.attributes[launch_context.DEVICE_ID_ATTR] = ir.UnitAttr.get()
        return own

    @functools.wraps(address_on_peer)
    def address_at(self: Any, parameter_id: int, peer_id: Any, on_host: bool) -> Any:
        rank = mirrored(self, peer_id) if _counts_backwards.get() else peer_id
        return address_on_peer(self, parameter_id, rank, on_host)

    context.device_id, context._get_parameter_address_on_peer = position, address_at
