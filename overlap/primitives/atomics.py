"""Atomic operations on words in global memory, by one warp as one thread: drawing numbers, adding, setting bits.

Pallas has signals (an addition of a constant whose result nobody sees) and no other atomic operations. So these are
inline PTX. All lanes of the warp run it; lane 0 acts, and all lanes get its result. Call them in one warp: in a
warpgroup, each of the four warps would act.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from overlap.primitives.arguments import require_constant, require_index, require_one
from overlap.primitives.peers import PeerGroup
from overlap.primitives.types import GmemRef, Index, LoweringContext, Predicate, SemaphoreRef, SmemRef, Tree

# Emits inline code for the lowering's context and operands. Returns its result, an `ir.Value`, or None.
type Emit = Callable[..., Tree]
_SCALAR = plgpu.Layout.WG_SPLAT
BY_LANE_0 = (".reg .pred first;", ".reg .b32 lane;", "mov.u32 lane, %laneid;", "setp.eq.u32 first, lane, 0;")


def inline(emit: Emit, refs: Sequence[GmemRef | SmemRef], *scalars: Index, returns: bool = False) -> Tree:
    """Runs inline PTX on words of memory and int32 scalars.

    Args:
      emit: called at lowering as `emit(context, *pointers, *values)`; it emits the PTX. If `returns`, it returns the
        result, an MLIR value of type i32.
      refs: words of global memory (of this device or of a peer) or of shared memory.
      *scalars: int32 scalars.
      returns: whether the code has a result, an int32 scalar.

    Returns:
      The result, or None.
    """

    def code(context: LoweringContext, *operands: Tree) -> mgpu.FragmentedArray | None:
        pointers = map(mgpu_utils.memref_ptr, operands[: len(refs)])
        result = emit(context, *pointers, *(value.registers.item() for value in operands[len(refs) :]))
        return mgpu.FragmentedArray.splat(result, (), is_signed=True) if returns else None

    return plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType() for _ in refs), *(_SCALAR for _ in scalars)),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR) if returns else None,
    )(code)(*refs, *(jnp.asarray(x, jnp.int32) for x in scalars))


def ptx(lines: Sequence[str], *operands: ir.Value, returns: bool = False) -> Tree:
    """Emits a block of PTX that all lanes of the warp run together.

    If it `returns`, $0 is the result and operands count from $1, else from $0.
    """
    text = "\n".join(["{", *lines, "}"])
    result = ir.IntegerType.get_signless(32) if returns else None
    return mgpu_utils.inline_ptx(text, *operands, result_types=result, has_side_effects=True, convergent=True)


def _draw(end: int) -> Emit:
    def emit(_: object, pointer: ir.Value, previous: ir.Value) -> ir.Value:
        lines = [
            *BY_LANE_0, ".reg .b32 number;", f"mov.b32 number, {end};", f"setp.lt.and.s32 first, $2, {end}, first;",
            "@first atom.relaxed.gpu.global.add.u32 number, [$1], 1;",
            "shfl.sync.idx.b32 $0, number, 0, 31, 0xffffffff;",
        ]  # fmt: skip
        return ptx(lines, pointer, previous, returns=True)

    return emit


def _add(_: object, pointer: ir.Value, amount: ir.Value) -> ir.Value:
    lines = [
        *BY_LANE_0, ".reg .b32 before;", "mov.b32 before, 0;",
        "@first atom.acq_rel.gpu.global.add.u32 before, [$1], $2;",
        "shfl.sync.idx.b32 $0, before, 0, 31, 0xffffffff;",
    ]  # fmt: skip
    return ptx(lines, pointer, amount, returns=True)


def _set_bit(_: object, pointer: ir.Value, place: ir.Value) -> None:
    lines = [
        *BY_LANE_0, ".reg .b32 bit;", "mov.b32 bit, 1;", "shl.b32 bit, bit, $1;",
        "@first red.release.sys.global.or.b32 [$0], bit;",
    ]  # fmt: skip
    ptx(lines, pointer, place)


def draw(counter: SemaphoreRef, end: int, previous: Index = 0) -> jax.Array:
    """Draws the next number of a counter of this device, from 0 on. No other warp draws the same number.

    Call it in one warp (in a `plgpu.warp_map`, under `pl.when(warp == 0)`); all lanes get the number. In a warpgroup
    each of the four warps would draw a number of its own. The emulator reports that.

    Ordering: none.

    Args:
      counter: one semaphore of this device, zero at launch, as `shared_semaphores((1,))[0].at[0]`.
      end: numbers from here on are not needed; a Python int.
      previous: the number that this warp has drawn before. If that number is not below `end`, no later number will be.
        Then the counter is not accessed, and the result is `end`.

    Returns:
      An int32 scalar.

    Raises:
      TypeError: `counter` is not one semaphore, `end` is not a Python int, or `previous` is not an integer scalar.
      ValueError: `end` or `previous` is a negative Python int.
    """
    require_one("draw", "counter", counter)
    require_constant("draw", "end", end, 0, "give the number of items, which the kernel knows while it is traced")
    require_index("draw", "previous", previous, "the number drawn before")
    return inline(_draw(end), [counter], previous, returns=True)


def add(counter: SemaphoreRef, amount: Index) -> jax.Array:
    """Adds `amount` to a counter of this device and returns the previous value.

    Ordering: a release and an acquire at GPU scope.
    """
    return inline(_add, [counter], amount, returns=True)


def set_bit_at_peer(word: SemaphoreRef, group: PeerGroup, position: Index, bit: Index) -> None:
    """Sets a bit in a word of the peer at `position`.

    Ordering: a release at system scope.
    """
    inline(_set_bit, [group.remote_ref(word, position)], bit)


def each_drawn(
    counter: SemaphoreRef, number: Index, end: int, do: Callable[[jax.Array], None]
) -> tuple[jax.Array, jax.Array]:
    """Calls `do(number)` and draws the next number, until the number is not below `end`.

    All warps that call this function on one counter share the numbers among them, however many warps there are and
    whenever they begin. Call it in one warp of a CTA.

    Args:
      counter: the counter, as in `draw`.
      number: the first number that this warp has drawn.
      end: the first number for which `do` is not called; a Python int. The numbers from `end` on may stand for other
        work, which the caller does after this call.
      do: is traced once, with an int32 scalar.

    Returns:
      Two int32 scalars: the first number that this warp has drawn and for which it has not called `do`, and the number
      of its calls of `do`.

    Raises:
      TypeError: `end` is not a Python int, or `number` is not an integer scalar.
      ValueError: `end` is negative.

    Examples:
      `each_drawn(counter, draw(counter, chunks), chunks, send_chunk)`
    """
    require_index("each_drawn", "number", number, "the number drawn first")
    require_constant("each_drawn", "end", end, 0, "give the first number for which `do` is not called")

    def body(state: Tree) -> Tree:
        number, count = state
        do(number)
        return draw(counter, end, number), count + 1

    return loop_while(lambda state: state[0] < end, body, (number, jnp.int32(0)))


def loop_while(test: Callable[[Tree], Predicate], body: Callable[[Tree], Tree], state: Tree) -> Tree:
    """Runs `lax.while_loop` over int32 scalars.

    In a single warp of a `plgpu.warp_map` it needs the patch `_compat.WARP_LOOPS` (`overlap.primitives.prepare`).
    """
    return lax.while_loop(test, body, state)
