"""Patch: a kernel reads its peers' addresses at the beginning of its flags, where another kernel has written them.

Reason: with a process per GPU, XLA copies at every call all operands and results of a kernel with peers to or from
symmetric memory. `overlap/primitives/addresses.py` says how two kernels avoid these copies. The first kernel asks XLA
for the addresses and writes a table of them. The second kernel is told the addresses: it reads the table, and XLA takes
it for a kernel without peers.

Change: while a kernel is lowered inside `told(...)`, Mosaic GPU reads addresses from the table that the first kernel
has written, and finds a buffer's row in the table by `Told.rows`. Outside of `told(...)` Mosaic GPU works as in jax.
`Told.put_before` changes nothing in jax. It edits the program: the first kernel makes the flags of the second one, and
XLA sees no peers in the second one. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: a decision per parameter in Mosaic GPU, so that only parameters that peers read are in symmetric memory.
For upstream: docs/upstream.md#symmetric-memory.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

from overlap._compat.mirrored_ranks import MIRRORED_RANKS
from overlap._compat.patch import Internal, Patch, private, replace

_MARK = "reads_told_addresses"


class Addresses(Protocol):
    """The names of the module `overlap.primitives.addresses` that lowering uses."""

    @property
    def TABLE_FLAGS(self) -> int: ...

    @property
    def Params(self) -> type: ...

    @property
    def OwnMemory(self) -> type: ...

    def tell(self, num_flags: int) -> Internal: ...

    def note_mesh(self, device_ids: tuple[int, ...]) -> None: ...


@dataclasses.dataclass
class Told:
    """A kernel that is being lowered, and that reads its peers' addresses from a table which another kernel writes.

    Attributes:
      addresses: the module `overlap.primitives.addresses`, which this package may not import.
      peers_read: the indices of the kernel's operands that peers read or write. Their addresses are the first rows of
        the table; the addresses of the kernel's flags are the last row.
    """

    addresses: Addresses
    peers_read: tuple[int, ...]

    def rows(self, context: Internal) -> tuple[int, ...]:
        """For each row of the table, the index of the kernel's parameter whose addresses are in the row."""
        return *self.peers_read, context.num_params - 1

    def check_room(self, devices: int) -> None:
        """Raises NotImplementedError if the table has no room for the addresses on this number of devices."""
        header = private("jax.experimental.mosaic.gpu.launch_context", "COLLECTIVE_METADATA_SIZE")
        assert len(self.peers_read) + 1 < header  # The header has room for the addresses of this device's own buffers.
        entries = header + (len(self.peers_read) + 1) * devices
        room = self.addresses.TABLE_FLAGS // 2
        if entries > room:
            raise NotImplementedError(
                f"where each GPU has a process of its own, a kernel has {room} entries for its peers, and for "
                f'{devices} devices needs {entries}: use implementation="xla"'
            )

    def put_before(self, call: Internal, context: Internal, operands: Sequence[Internal]) -> Internal:
        """Inserts the kernel that writes the table before the call of this kernel, which reads the table.

        The flags of a kernel are the last operand of its call. jax passes zeros as the flags. This function replaces
        them by the result of the inserted kernel: the table, then zeros.

        Args:
          call: the custom call of this kernel.
          context: jax's lowering context, with the types of this kernel's operands.
          operands: the lowered operands of this kernel, without the flags.

        Returns:
          The custom call of the inserted kernel.
        """
        import jax
        from jax.extend.core import jaxpr_as_fun
        from jax.extend.mlir import ir
        from jax.interpreters import mlir

        flags = len(call.operands) - 1
        (num_flags,) = ir.RankedTensorType(call.operands[flags].type).shape
        read = [context.avals_in[i] for i in self.peers_read]
        kernel = jax.make_jaxpr(self.addresses.tell(num_flags))(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in read))
        within = context.replace(avals_in=kernel.in_avals, avals_out=kernel.out_avals)
        with told(None), ir.InsertionPoint(call):
            lower = mlir.lower_fun(jaxpr_as_fun(kernel), multiple_results=True)
            (table_and_zeros,) = lower(within, *(operands[i] for i in self.peers_read))
        call.operands[flags] = table_and_zeros
        _hide_peers(call)
        # XLA must not merge two of these kernels although their operands are equal: each makes the flags of one call.
        table_and_zeros.owner.attributes["has_side_effect"] = ir.BoolAttr.get(True)
        return table_and_zeros.owner


def _hide_peers(call: Internal) -> None:
    """Removes from a Mosaic GPU call the attributes that make XLA look up peers and use symmetric memory."""
    from jax.extend.mlir import ir

    entries = {entry.name: entry.attr for entry in call.attributes["mhlo.backend_config"]}
    entries["uses_xla_collective_metadata"] = ir.BoolAttr.get(False)
    for name in ("xla_replica_ids", "symmetric_memory_parameters"):
        entries.pop(name, None)
    call.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
    # From jax 0.12 on, these attributes ask XLA for symmetric memory.
    if "mhlo.frontend_attributes" in call.attributes:
        asked = {entry.name: entry.attr for entry in call.attributes["mhlo.frontend_attributes"]}
        kept = {name: value for name, value in asked.items() if not name.endswith("_memory_spaces")}
        call.attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(kept)


_told: contextvars.ContextVar[Told | None] = contextvars.ContextVar("overlap_told", default=None)


@contextlib.contextmanager
def told(kernel: Told | None) -> Iterator[None]:
    """A context in which `kernel` is being lowered; None: a kernel that uses jax's own table of addresses."""
    token = _told.set(kernel)
    try:
        yield
    finally:
        _told.reset(token)


def _change() -> None:
    """Replaces two methods of jax's launch context: where the table of the peers' addresses is, and its rows."""
    from jax.extend.mlir import ir

    # `private` raises if jax has no such name. It is asked for all of them before the first one is replaced.
    as_memref = private("jax.experimental.mosaic.gpu.utils", "ptr_as_memref")
    private("jax.experimental.mosaic.gpu.launch_context", "LaunchContext._collective_metadata")
    private("jax.experimental.mosaic.gpu.launch_context", "LaunchContext._get_parameter_address_on_peer")

    def at_the_flags(xlas_table: Internal) -> Internal:
        def table(self: Internal, which: int) -> Internal:
            kernel = _told.get()
            if kernel is None:
                return xlas_table(self, which)
            if which:
                reason = "the host of a GPU with a process of its own does not know its peers' addresses"
                raise NotImplementedError(reason)
            # The table lies before the kernel's flags, its last parameter. An address takes the place of two flags.
            with ir.InsertionPoint.at_block_begin(self.buffers.owner):
                entries = ir.MemRefType.get((kernel.addresses.TABLE_FLAGS // 2,), ir.IntegerType.get_signless(64))
                return as_memref(_pointer(self, self.num_params - 1), entries)

        return table

    def by_row(address_on_peer: Internal) -> Internal:
        def address_by_row(self: Internal, parameter_id: int, peer_id: Internal, on_host: bool) -> Internal:
            kernel = _told.get()
            row = parameter_id if kernel is None else kernel.rows(self).index(parameter_id)
            return address_on_peer(self, row, peer_id, on_host)

        return address_by_row

    replace("jax.experimental.mosaic.gpu.launch_context", "LaunchContext._collective_metadata", _MARK, at_the_flags)
    replace("jax.experimental.mosaic.gpu.launch_context", "LaunchContext._get_parameter_address_on_peer", _MARK, by_row)


ADDRESSES_TOLD = Patch("a kernel is told its peers' addresses by another kernel", _change, needs=(MIRRORED_RANKS,))


def _pointer(context: Internal, parameter: int) -> Internal:
    """Loads a parameter's address from the array of addresses that the host passes to the kernel."""
    from jaxlib.mlir.dialects import llvm

    element = private("jax.experimental.mosaic.gpu.utils", "getelementptr")
    pointer = llvm.PointerType.get()
    return llvm.load(pointer, element(context.buffers, [parameter], pointer))


def peer_table(context: Internal, *parameters: Internal) -> list[tuple[int, Internal]]:
    """For inline code of a kernel: the table of its peers' addresses, as pairs (index in the table, value).

    The table has Mosaic GPU's format: a header of `COLLECTIVE_METADATA_SIZE` entries, which begins with the rank, and
    then for each parameter a row of addresses, one per rank. XLA gives the addresses of the allocations in which the
    buffers lie, also for this device. A reader must add the offset of a buffer in its allocation. So the table also has
    the addresses of this device's own buffers: in the header, behind the rank.

    Args:
      context: Mosaic GPU's launch context, as inline code gets it.
      *parameters: references to all parameters of the kernel.
    """
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm

    header = private("jax.experimental.mosaic.gpu.launch_context", "COLLECTIVE_METADATA_SIZE")
    address = private("jax.experimental.mosaic.gpu.utils", "memref_ptr")
    context.device_id()  # Only a kernel that asks for its device's number gets XLA's table.
    places = (0, *range(header, header + context.num_peers * len(parameters)))
    i64 = ir.IntegerType.get_signless(64)
    own = [(1 + row, llvm.ptrtoint(i64, address(ref))) for row, ref in enumerate(parameters)]
    return [(place, _entry(context, place)) for place in places] + own


def told_addresses(context: Internal) -> list[tuple[Internal, Internal]]:
    """For inline code of a kernel: for each row of its table, a pair of addresses of this device's own buffer.

    The first address is the one in the table, the second one is the buffer's actual address. The list is empty if the
    kernel has no table.
    """
    from jax.extend.mlir import ir
    from jaxlib.mlir.dialects import llvm

    kernel = _told.get()
    if kernel is None:
        return []
    pairs = []
    for row, parameter in enumerate(kernel.rows(context)):
        with ir.InsertionPoint.at_block_begin(context.buffers.owner):
            pointer = _pointer(context, parameter)
        pairs.append((_entry(context, 1 + row), llvm.ptrtoint(ir.IntegerType.get_signless(64), pointer)))
    return pairs


def _entry(context: Internal, place: int) -> Internal:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import memref

    constant = private("jax.experimental.mosaic.gpu.utils", "c")
    return memref.load(context.device_collective_metadata, [constant(place, ir.IndexType.get())])
