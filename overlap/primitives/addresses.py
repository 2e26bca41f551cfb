"""Where a kernel finds its peers' memory, if each GPU has a process of its own.

XLA looks up the peers' addresses for every custom call that asks for them, and then wants *all* that this call reads
and writes in symmetric memory. What comes from outside the program is copied there each time, weights included, and a
result that leaves the program is copied out: for a product of 1024 rows as many bytes again as the product itself
moves. But a kernel that reads its peers needs the addresses of two buffers only, those of the operand that is gathered
and of its own flags. So there are two kernels in that layout:

    tell       gathered operand → flags: zeros, and at their beginning a table of the addresses of these two buffers on
               all peers. To XLA it is the one that talks to its peers. It takes the place of XLA's zeroing of flags.
    the other  reads the table where it would read XLA's, and is to XLA one like any other: nothing is copied for it.

The table holds for the second kernel because both are given the same values, and a value has one buffer. It is checked
all the same: before it leaves, the second kernel compares the table with its own arguments, and traps if they differ.

Results cannot be in that table, since the first kernel knows operands only. What peers are to write to is therefore an
operand whose memory some kernel before has given, and which nobody else uses (`landing_place`). If that is to be a
result as well, the two are one to XLA (`Params.aliased_results`).

A kernel opts in by beginning its flags with the table (`shared_semaphores(..., told=True)`) and by `Params`. It
must begin with `Handshake.begin`, since no barrier of the framework's goes with a call that is like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.primitives.axes import kernel_axis
from overlap.primitives.windows import note_program

__all__ = ["FLAG_BYTES", "TABLE_FLAGS", "OwnMemory", "Params", "landing_place", "note_program", "require_told", "tell"]

FLAG_BYTES = 4
# The table, in flags: entries of 8 bytes, laid out as Mosaic GPU's own.
TABLE_FLAGS = 128
_THREADS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(plgpu.CompilerParams):
    """Of a kernel whose flags begin with the table of addresses.

    Attributes:
      peers_read: which of its operands the peers read or write, at most two.
      aliased_results: which of these is the memory of which result: pairs of an operand and a result.
    """

    peers_read: tuple[int, ...]
    aliased_results: tuple[tuple[int, int], ...] = ()
    skip_device_barrier: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMemory(plgpu.CompilerParams):
    """Of a kernel whose results are memory that is written afterwards: XLA takes no two of them for one."""

    skip_device_barrier: bool = True


def tell(num_flags: int) -> Callable[..., jax.Array]:
    """The first kernel: from the operands that the peers read to the flags, `num_flags` with the table."""

    def write(context: Any, *operands_and_flags: Any) -> None:
        start = mgpu_utils.memref_ptr(operands_and_flags[-1])
        # The looking up takes longest, so it begins first.
        table = _compat.peer_table(context, *operands_and_flags)
        zeros = (f"st.global.b32 [mine+{FLAG_BYTES * i}], 0;" for i in range(TABLE_FLAGS, num_flags, _THREADS))
        lines = [
            "{", ".reg .b32 thread;", ".reg .b64 mine;", "mov.u32 thread, %tid.x;",
            f"mad.wide.u32 mine, thread, {FLAG_BYTES}, $0;", *zeros, "}",
        ]  # fmt: skip
        mgpu_utils.inline_ptx("\n".join(lines), start, has_side_effects=True)
        for place, entry in table:
            mgpu_utils.inline_ptx(f"st.global.b64 [$0+{8 * place}], $1;", start, entry, has_side_effects=True)

    def overlap_tell_addresses(*refs: Any) -> None:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(write)(*refs)

    return plgpu.kernel(
        overlap_tell_addresses, out_type=jax.ShapeDtypeStruct((num_flags,), jnp.int32), grid=(1,),
        grid_names=(kernel_axis("cta"),), num_threads=1, thread_name=kernel_axis("warpgroup"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, skip_device_barrier=True
        ),
    )  # fmt: skip


def landing_place(shape: tuple[int, ...], dtype: Any, *, becomes_result: bool = False) -> jax.Array:
    """Memory for peers to write to, as an operand of the kernel to which they send: nothing is in it yet.

    A kernel that does nothing gives it. To XLA that is a value; two calls may get the same one, which does not matter,
    since no kernel reads what another one has been sent. But of memory that is to be a result
    (`Params.aliased_results`) XLA would make a copy for the second call, of which the peers have not been told.
    """
    params = OwnMemory if becomes_result else plgpu.CompilerParams

    def overlap_landing_place(_: Any) -> None:
        pass

    kernel = plgpu.kernel(
        overlap_landing_place, out_type=jax.ShapeDtypeStruct(shape, dtype), grid=(1,), grid_names=(kernel_axis("cta"),),
        num_threads=1, thread_name=kernel_axis("warpgroup"),
        compiler_params=params(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, skip_device_barrier=True),
    )  # fmt: skip
    return kernel()


def require_told(context: Any) -> None:
    """In inline code, by one warp: traps if this kernel's buffers are not those of which the peers have been told."""
    for told, own in _compat.told_addresses(context):
        mgpu_utils.inline_ptx(
            "{ .reg .pred differ; setp.ne.b64 differ, $0, $1; @differ trap; }", told, own, has_side_effects=True
        )
