"""Patch: a kernel runs on a mesh whose ranks are in reverse order of the positions in its mesh.

Rank 0 is the device at the last position.

Reason: on several hosts, XLA must be given the devices of this host in reverse order (`overlap/primitives/host_mesh.py`
says why). Mosaic GPU assumes in two places that a rank is a position: where a kernel asks for the number of its own
device, and where a kernel looks up the address of a peer's buffer.

Change: while a kernel is lowered inside `mirrored(True)`, the function that returns the device's number turns the rank
into a position, and the function that looks up a peer's buffer turns the position into a rank. Outside of
`mirrored(True)` both functions do what jax's own do. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: a translation from positions to ranks in Mosaic GPU, or a way to give XLA the devices in order without XLA
taking the list for one of its own.
For upstream: docs/upstream.md#ranks.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from overlap._compat.patch import Internal, Patch, private, replace

_MARK = "mirrors_ranks"
_is_mirrored: contextvars.ContextVar[bool] = contextvars.ContextVar("overlap_mirrored_ranks", default=False)


@contextlib.contextmanager
def mirrored(is_mirrored: bool) -> Iterator[None]:
    """A context in which kernels are lowered with ranks in reverse order of positions, if `is_mirrored`."""
    token = _is_mirrored.set(is_mirrored)
    try:
        yield
    finally:
        _is_mirrored.reset(token)


def _change() -> None:
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import arith

    constant = private("jax.experimental.mosaic.gpu.utils", "c")
    id_attribute = private("jax.experimental.mosaic.gpu.launch_context", "DEVICE_ID_ATTR")
    private("jax.experimental.mosaic.gpu.launch_context", "LaunchContext._get_parameter_address_on_peer")

    def opposite(context: Internal, number: Internal) -> Internal:
        """A position from a rank, and a rank from a position: number → peers - 1 - number, which is its own inverse."""
        return arith.subi(constant(context.num_peers - 1, ir.IntegerType.get_signless(32)), number)

    def own_position(device_id: Internal) -> Internal:
        """Wraps jax's `device_id`, which returns the rank of the device, into a function that returns its position."""

        def position(self: Internal, on_host: bool = False) -> Internal:
            """The device's number: its position inside `mirrored(True)`, else its rank, as in jax's own."""
            rank = device_id(self, on_host)
            if not _is_mirrored.get():
                return rank
            own = opposite(self, rank)
            # TMA descriptors are made on the host. By this attribute Mosaic GPU knows the value as the device's number,
            # and on the host it calls this function again to compute the value there.
            own.owner.attributes[id_attribute] = ir.UnitAttr.get()
            return own

        return position

    def of_position(address_on_peer: Internal) -> Internal:
        """Wraps jax's look-up of a peer's buffer, which takes the peer's rank, into one that takes its position."""

        def address_at(self: Internal, parameter_id: int, peer_id: Internal, on_host: bool) -> Internal:
            """The address of a peer's buffer; `peer_id`: a position inside `mirrored(True)`, else a rank."""
            rank = opposite(self, peer_id) if _is_mirrored.get() else peer_id
            return address_on_peer(self, parameter_id, rank, on_host)

        return address_at

    replace("jax.experimental.mosaic.gpu.launch_context", "LaunchContext.device_id", _MARK, own_position)
    replace(
        "jax.experimental.mosaic.gpu.launch_context", "LaunchContext._get_parameter_address_on_peer", _MARK, of_position
    )


MIRRORED_RANKS = Patch("ranks that count against positions", _change)
