"""Waits for another device. A wait that takes long is reported, and after a time limit it ends the kernel.

A legal wait may be long: the peer compiles, loads data, or sits in a debugger. So the waiting warp keeps looking, and

    after `stalls.REPORT_AFTER_S`             writes to the stall report which device waits for which, and for what
    after `_settings.wait_timeout_s()`        writes that it gives up, lingers until the host has read that, and traps

The clock is read only after a look that did not end the wait. Waits for CTAs of the same device have no limit: those
CTAs wait for a peer in turn, with a limit, and a trap ends the whole kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from overlap import _settings
from overlap.primitives import stalls
from overlap.primitives.arguments import require_index, require_one
from overlap.primitives.atomics import inline, ptx
from overlap.primitives.peers import PeerGroup, require_group
from overlap.primitives.types import Index, SemaphoreRef

_NEVER = 2**32 - 1
_FENCES = ("fence.acquire.sys;", "fence.proxy.async.global;")


def _ticks(seconds: float) -> int:
    return min(int(seconds / stalls.TICK_S) + 1, _NEVER - 1)


def _write_record(state: int, operation: int, role: int) -> list[str]:
    """PTX that writes a record from registers: `own`, `me`, `peer`, `expected`, `got`, `waited`."""
    fields = (
        (stalls.OPERATION, str(operation)), (stalls.POSITION, "me"), (stalls.PEER, "peer"), (stalls.ROLE, str(role)),
        (stalls.EXPECTED, "expected"), (stalls.GOT, "got"), (stalls.WAITED, "waited"),
    )  # fmt: skip
    return [
        *(f"@lane_0 st.relaxed.sys.global.b32 [record+{4 * word}], {value};" for word, value in fields),
        f"@lane_0 st.relaxed.sys.global.b64 [record+{4 * stalls.POINTER}], own;",
        "fence.acq_rel.sys;",
        f"@lane_0 st.relaxed.sys.global.b32 [record+{4 * stalls.STATE}], {state};",
    ]


def look_until(
    look: Sequence[str],
    operands: Sequence[ir.Value],
    *,
    operation: int,
    role: int,
    expected_constant: int | None = None,
) -> None:
    """Emits a wait by all lanes of a warp: no lane proceeds before all lanes have seen what they wait for.

    Args:
      look: PTX that looks once. It sets the predicate `there` if the wait is over, and `got` to the value that it saw.
      operands: $0, $1, … in `look`: pointers to the words looked at. Then follow, for the record, a pointer to any flag
        of this device, and as i32 values this device's position, the peer's position and the expected value.
      operation: the number of the kernel, from `stalls.describe`.
      role: what the wait is for: `stalls.BEGUN` and so on.
      expected_constant: the expected value for the record, where it is known only at lowering; in place of the operand.
    """
    where = stalls.address()
    limit_s = _settings.wait_timeout_s()
    limit = _ticks(limit_s) if limit_s else _NEVER
    first = min(_ticks(stalls.REPORT_AFTER_S), limit)
    own, me, peer, expected = (f"${len(operands) - 4 + i}" for i in range(4))
    expected = expected if expected_constant is None else str(expected_constant)
    most = stalls.MOST_DEVICES - 1

    def write(state: int) -> list[str]:
        if where is None:
            return []
        return [
            # Each pair of devices has a record of its own. The GPUs of a process have address ranges that are far
            # apart, so high bits of the flag's address say which GPU it is.
            f"mov.b64 own, {own};", "shr.u64 record, own, 34;", "cvt.u32.u64 place, record;",
            "shr.u32 me, place, 5;", "xor.b32 place, place, me;", f"and.b32 place, place, {most};",
            f"mov.b32 me, {me};", f"and.b32 peer, {peer}, {most};", f"mov.b32 expected, {expected};",
            f"mad.lo.u32 place, place, {stalls.MOST_DEVICES}, peer;",
            f"mov.b64 record, {where};", f"mad.wide.u32 record, place, {stalls.RECORD_BYTES}, record;",
            "mov.u32 place, %laneid;", "setp.eq.u32 lane_0, place, 0;",
            *_write_record(state, operation, role),
        ]  # fmt: skip

    clock = ["mov.u64 now, %globaltimer;", "shr.u64 now, now, 20;", "cvt.u32.u64 clock, now;"]
    lines = [
        ".reg .pred there, early, lane_0;", ".reg .b32 got, clock, since, waited, until, me, peer, expected, place;",
        ".reg .b64 now, own, record;",
        "mov.b32 since, 0;", f"mov.b32 until, {first};",
        "LOOK:", *look, "@there bra THERE;", "nanosleep.u32 40;",
        *clock, "setp.eq.u32 early, since, 0;", "@early mov.b32 since, clock;",
        "sub.u32 waited, clock, since;", "setp.lt.u32 early, waited, until;", "@early bra LOOK;",
        f"setp.ge.u32 early, waited, {limit};", "@early bra GIVE_UP;",
        *write(stalls.STILL_WAITING), f"mov.b32 until, {limit};", "bra LOOK;",
        "GIVE_UP:", *write(stalls.GIVEN_UP), "mov.b32 since, clock;",
        "LINGER:", "nanosleep.u32 1000000;",
        *clock, "sub.u32 waited, clock, since;",
        f"setp.lt.u32 early, waited, {_ticks(stalls.LINGER_S)};", "@early bra LINGER;",
        "trap;",
        "THERE:", *_FENCES,
        # The lanes of the warp may read the word at different times. If the first lane that sees the expected value
        # went on alone, what it does next may change the value: a peer lowers its ready flag once it knows that the
        # ready flag has been seen. The other lanes, which have not read the word yet, would then wait for ever. The
        # compiler need not make the lanes converge here, so this barrier does.
        "bar.warp.sync 0xffffffff;",
        f"setp.eq.u32 early, until, {first};", "@early bra OVER;", *write(stalls.OVER), "OVER:",
    ]  # fmt: skip
    ptx(lines, *operands)


def wait_for_word(
    word: SemaphoreRef,
    expected: Index,
    group: PeerGroup,
    peer: Index,
    *,
    operation: int,
    role: int,
    at_least: bool = False,
) -> None:
    """Waits until a word of this device equals `expected`.

    Ordering: an acquire at system scope, then a proxy fence.

    Args:
      word: the word, which other devices change.
      expected: an int32 scalar.
      group: the peers.
      peer: the position of the device that this one waits for; this device's own position if it waits for several.
      operation: the number of the kernel, from `stalls.describe`.
      role: what the wait is for: `stalls.BEGUN` and so on.
      at_least: whether a greater value ends the wait as well.
    """
    test = "ge" if at_least else "eq"
    look = ("ld.relaxed.sys.global.b32 got, [$0];", f"setp.{test}.u32 there, got, $4;")

    def emit(_: object, *operands: ir.Value) -> None:
        look_until(look, operands, operation=operation, role=role)

    inline(emit, [word, word], group.me(), peer, expected)


def semaphore_wait_peer(
    flag: SemaphoreRef, value: Index, group: PeerGroup, position: Index, *, operation: str = "a kernel"
) -> None:
    """Waits until a flag of this device, which a peer raises, has reached `value`. The flag keeps its value.

    A wait that takes long is reported: after 30 s the host logs which device waits for which (logger `overlap`).
    After OVERLAP_WAIT_TIMEOUT_S (600 s unless that variable is set; 0: no limit) the kernel traps, and the program ends
    with a CUDA error.

    Call it in one warp (`plgpu.warp_map`) or in one warpgroup; all of its threads wait.

    Ordering: an acquire at system scope, and a proxy fence. Whatever the peer had done before its
    `semaphore_signal_peer` is visible to these threads, and to the copies (TMA) that they start afterwards.

    Args:
      flag: one semaphore in global memory of this device, as `shared_semaphores(...)[0].at[i]`.
      value: what the flag must reach: a Python int or an int32 scalar, at least 0.
      group: the peers.
      position: the position of the peer that raises the flag: a Python int or an int32 scalar. Only the report names
        it.
      operation: the name of the kernel in the report.

    Raises:
      TypeError: `flag` is not one semaphore, `group` is no `PeerGroup`, or `value` or `position` is not an integer
        scalar.
      ValueError: `value` is a negative Python int, or `position` is a Python int outside of the group.

    Examples:
      `semaphore_wait_peer(arrived.at[peer], 1, group, peer, operation="all_gather")`
    """
    require_group("semaphore_wait_peer", group)
    require_one("semaphore_wait_peer", "flag", flag)
    require_index("semaphore_wait_peer", "value", value, "the number that the flag must reach")
    require_index("semaphore_wait_peer", "position", position, "a position in the group", group.size)
    number = stalls.describe(operation, group)
    wait_for_word(flag, value, group, position, operation=number, role=stalls.FLAG, at_least=True)


def wait_within_device(word: SemaphoreRef, count: int) -> None:
    """Waits until a counter of this device has reached `count`.

    Ordering: an acquire at GPU scope, then a proxy fence.

    All threads of the warp read the counter. If one thread read it and the others waited for that thread, ptxas would
    need more registers for the code that follows than this warp has.
    """

    def wait(_: object, flag: ir.Value) -> None:
        lines = [
            ".reg .pred enough;", ".reg .b32 number;",
            "LOOK:", "ld.relaxed.gpu.global.b32 number, [$0];", f"setp.ge.u32 enough, number, {count};",
            "@!enough bra LOOK;", "fence.acquire.gpu;", "fence.proxy.async.global;",
        ]  # fmt: skip
        ptx(lines, mgpu_utils.memref_ptr(flag))

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(wait)(word)
