"""How a kernel finds its peers' memory where each GPU has a process of its own.

For each custom call that asks for its peers' addresses, XLA looks the addresses up, and then requires that *all*
operands and results of the call lie in symmetric memory. Operands that come from outside the program, weights included,
are copied there each time, and a result that leaves the program is copied out. For a product of 1024 rows, these copies
move as many bytes as the product itself. But a kernel that reads its peers' memory needs the addresses of two buffers
only: the operand that is gathered, and its flags. So where each GPU has a process of its own, there are two kernels:

    tell       takes the gathered operand and returns the flags: a table of the addresses of these two buffers on all
               peers, then zeros. To XLA, this is the kernel that talks to its peers. It replaces XLA's zeroing of the
               flags.
    the other  reads this table in place of XLA's. To XLA it is an ordinary kernel: nothing is copied for it.

The table is right for the second kernel because both kernels are given the same values, and a value has one buffer. It
is checked all the same: before it leaves, the second kernel compares the table with its own arguments, and traps if
they differ.

Results cannot be in that table, since the first kernel knows operands only. So peers write to an operand that an
earlier kernel has made and that no other operation uses (`landing_place`). If this memory is to be a result as well,
operand and result are aliased (`Params.aliased_results`).

A kernel opts in with `shared_semaphores(..., told=True)`, which puts the table before its flags, and with `Params`. It
must begin with `Handshake.begin`, because the framework runs no barrier before a call that is ordinary to XLA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.typing import DTypeLike

from overlap import _compat
from overlap.primitives.axes import kernel_axis
from overlap.primitives.types import GmemRef, LoweringContext
from overlap.primitives.windows import note_mesh

__all__ = ["FLAG_BYTES", "TABLE_FLAGS", "OwnMemory", "Params", "landing_place", "note_mesh", "require_told", "tell"]

FLAG_BYTES = 4
# The table, in flags: entries of 8 bytes, laid out as Mosaic GPU's own.
TABLE_FLAGS = 128
_THREADS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Params(plgpu.CompilerParams):
    """Compiler parameters of a kernel whose flags begin with the table of addresses.

    Attributes:
      peers_read: the indices of the operands that peers read or write, at most two.
      aliased_results: pairs of an operand's index and a result's index: the result has the operand's memory.
    """

    peers_read: tuple[int, ...]
    aliased_results: tuple[tuple[int, int], ...] = ()
    skip_device_barrier: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnMemory(plgpu.CompilerParams):
    """Compiler parameters of a kernel that only provides memory: XLA does not merge two such calls."""

    skip_device_barrier: bool = True


def tell(num_flags: int) -> Callable[..., jax.Array]:
    """Returns the first kernel: it maps the operands that peers read to the `num_flags` flags, the table included."""

    def write(context: LoweringContext, *operands_and_flags: ir.Value) -> None:
        """Emits the kernel: the table, and behind it zeros, of which thread t stores each `_THREADS`-th from t on."""
        start = mgpu_utils.memref_ptr(operands_and_flags[-1])
        # The lookup takes longest, so it begins first.
        table = _compat.peer_table(context, *operands_and_flags)
        zeros = (f"st.global.b32 [mine+{FLAG_BYTES * i}], 0;" for i in range(TABLE_FLAGS, num_flags, _THREADS))
        lines = [
            "{", ".reg .b32 thread;", ".reg .b64 mine;", "mov.u32 thread, %tid.x;",
            f"mad.wide.u32 mine, thread, {FLAG_BYTES}, $0;", *zeros, "}",
        ]  # fmt: skip
        mgpu_utils.inline_ptx("\n".join(lines), start, has_side_effects=True)
        for place, entry in table:
            mgpu_utils.inline_ptx(f"st.global.b64 [$0+{8 * place}], $1;", start, entry, has_side_effects=True)

    def overlap_tell_addresses(*refs: GmemRef) -> None:
        plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(write)(*refs)

    return plgpu.kernel(
        overlap_tell_addresses,
        out_type=jax.ShapeDtypeStruct((num_flags,), jnp.int32),
        grid=(1,),
        grid_names=(kernel_axis("cta"),),
        num_threads=1,
        thread_name=kernel_axis("warpgroup"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, skip_device_barrier=True
        ),
    )


def landing_place(shape: tuple[int, ...], dtype: DTypeLike, *, becomes_result: bool = False) -> jax.Array:
    """Returns memory to which peers write: an operand for the kernel that receives, with undefined contents.

    The memory is the result of a kernel that does nothing. To XLA it is a value, and two receiving kernels may get the
    same value. That does not matter, since no kernel reads data that were sent to another kernel.

    Args:
      shape: of the memory.
      dtype: of the memory.
      becomes_result: whether the memory is to be a result of the receiving kernel (`Params.aliased_results`). Then two
        such kernels must not get the same value: XLA would copy it for the second kernel, and the peers know nothing
        of the copy.
    """
    params = OwnMemory if becomes_result else plgpu.CompilerParams

    def overlap_landing_place(_: object) -> None:
        pass

    kernel = plgpu.kernel(
        overlap_landing_place,
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(1,),
        grid_names=(kernel_axis("cta"),),
        num_threads=1,
        thread_name=kernel_axis("warpgroup"),
        compiler_params=params(lowering_semantics=plgpu.LoweringSemantics.Warpgroup, skip_device_barrier=True),
    )
    return kernel()


def require_told(context: LoweringContext) -> None:
    """Emits code that traps if this kernel's buffers are not at the addresses that the peers were told.

    Call it in the inline code of one warp.
    """
    for told, own in _compat.told_addresses(context):
        mgpu_utils.inline_ptx(
            "{ .reg .pred differ; setp.ne.b64 differ, $0, $1; @differ trap; }", told, own, has_side_effects=True
        )
