"""Turns each instruction of inline PTX into a function that an emulated thread runs.

An emulated thread stands for the warp or warpgroup that runs the PTX. A polling loop, which only reads words, blocks
its thread until one of the words changes, as a wait does. So does a polling loop that gives up after a number of tries:
tries take time, and by default time stands still (`registers.CLOCK`), so the loop never gives up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from ..execution import registers
from ..execution.machine import Thread
from ..execution.registers import Frame, Unreadable, typed, width_of
from ..foundations import ptx
from ..foundations.errors import ProtocolError
from . import ptx_memory

# ---- arithmetic ------------------------------------------------------------------------------------------------------

_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "min": min, "max": max, "shl": lambda a, b: a << b if b < 64 else 0,
    "shr": lambda a, b: a >> min(b, 64),
}  # fmt: skip
_COMPARE = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _arithmetic(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    name, kind = i.name, i.modifiers[-1] if i.modifiers else ""
    bits = width_of(kind)
    form = i.modifiers[:-1]
    if form not in ((), ("lo",), ("wide",)) or (form and name not in ("mul", "mad")):
        raise Unreadable(f"{i.text!r} is not emulated")
    if name in ("mul", "mad") and not form:
        raise Unreadable(f"{i.text!r}: .lo or .wide is missing")
    put = frame.set(i.operands[0])
    sources = [typed(frame, operand, kind) for operand in i.operands[1:]]
    mask = (1 << bits * (2 if form == ("wide",) else 1)) - 1
    if name == "mad":
        a, b, _ = sources
        c = frame.get(i.operands[3])
        return lambda thread: put(thread, (a(thread) * b(thread) + c(thread)) & mask)
    if name in ("shl", "shr"):
        a, count = sources[0], frame.get(i.operands[2])
        shift = _BINARY[name]
        return lambda thread: put(thread, shift(a(thread), count(thread)) & mask)
    if name == "not":
        (a,) = sources
        return lambda thread: put(thread, not a(thread) if bits == 1 else ~a(thread) & mask)
    if name == "mov":
        (a,) = sources
        return lambda thread: put(thread, a(thread))
    if name == "selp":
        a, b = sources[:2]
        which = frame.get(i.operands[3])
        return lambda thread: put(thread, (a(thread) if which(thread) else b(thread)) & mask)
    a, b = sources
    function = _BINARY[name]
    if bits == 1:
        return lambda thread: put(thread, bool(function(a(thread), b(thread))))
    return lambda thread: put(thread, function(a(thread), b(thread)) & mask)


def _convert(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    to, of = i.modifiers
    put, get, mask = frame.set(i.operands[0]), typed(frame, i.operands[1], of), (1 << width_of(to)) - 1
    return lambda thread: put(thread, get(thread) & mask)


def _compare(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    name, *combined, kind = i.modifiers
    if name not in _COMPARE or any(c not in _COMBINE for c in combined):
        raise Unreadable(f"{i.text!r} is not emulated")
    compare, combine = _COMPARE[name], _COMBINE[combined[0]] if combined else None
    targets = i.operands[: len(i.operands) - 2 - len(combined)]
    if name in ("lo", "ls", "hi", "hs"):
        kind = "u" + kind[1:]
    a, b = (typed(frame, operand, kind) for operand in i.operands[len(targets) : len(targets) + 2])
    third = frame.get(i.operands[-1]) if combine else None
    put = frame.set(targets[0])
    put_not = frame.set(targets[1]) if len(targets) > 1 else None
    text = i.text

    def run(thread: Thread) -> None:
        holds = compare(a(thread), b(thread))
        also = True if third is None else third(thread)
        put(thread, holds if combine is None else combine(holds, also))
        if put_not is not None:
            put_not(thread, not holds if combine is None else combine(not holds, also))
        if not holds:
            thread.orders.poll.tests.append(text)

    return run


# ---- control ---------------------------------------------------------------------------------------------------------


def branch(i: ptx.Instruction, place: list[int], here: int) -> Callable[[Thread], bool | None]:
    """Returns a function that jumps from the program's instruction `here` to `place[0]`.

    A jump backwards begins the next iteration of a loop. If that is a polling loop that finds nothing new, the thread
    blocks; or, if there is a clock, other threads run first.
    """

    def run(thread: Thread) -> bool | None:
        target = place[0]
        poll = thread.orders.poll
        if target <= here:
            if poll.head != target:
                poll.begin(target)
            elif not poll.is_blocked and poll.may_wait():
                if registers.CLOCK is None:
                    return _block(thread)
                thread.polled = True
            poll.has_news = poll.is_blocked = False
            poll.tests = []
        thread.pc = target
        return None

    return run


def _block(thread: Thread) -> bool:
    """Suspends a thread whose polling loop finds nothing new, until one of the words that it reads changes."""
    poll = thread.orders.poll
    poll.is_blocked = True
    words, tests = dict(poll.found), tuple(poll.tests)

    def why() -> str:
        looks = ", ".join(f"{word.name} of device {word.device}, got {write.value}" for word, write in words.items())
        return f"polls {looks}" + (f" ({'; '.join(tests)})" if tests else "")

    first, *others = words
    for word in others:
        word.waiters.append(thread)
    return thread.block(first, why)


def _shuffle(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    """Returns a function that gives all lanes the value of lane 0, which is the value that an emulated thread has."""
    if i.modifiers != ("sync", "idx", "b32") or i.operands[2] != 0:
        raise Unreadable(f"{i.text!r} is not emulated")
    put, get = frame.set(i.operands[0]), frame.get(i.operands[1])
    return lambda thread: put(thread, get(thread))


def _trap(thread: Thread) -> None:
    raise ProtocolError(f"the kernel trapped: {thread.instruction.name}")


def _sleep(thread: Thread) -> None:
    thread.polled = True


# ---- all of them -----------------------------------------------------------------------------------------------------

_ARITHMETIC = {*_BINARY, "mad", "not", "mov", "selp"}
VISIBLE = {"ld", "st", "atom", "red", "nanosleep"}


def meaning(frame: Frame, i: ptx.Instruction, under: frozenset[str]) -> Callable[[Thread], bool | None]:
    """Returns the function that runs an instruction other than a branch, without its guard.

    Args:
        frame: the registers.
        i: the instruction.
        under: whether only some of the CUDA threads run the instruction, chosen by their ``"lane"`` or ``"warp"``.

    Raises:
        Unreadable: the instruction is not emulated.
    """
    try:
        if i.name in _ARITHMETIC:
            return _arithmetic(frame, i)
        if i.name in ("atom", "red"):
            return ptx_memory.atomic(frame, i, under)
        simple = {"ld": ptx_memory.load, "st": ptx_memory.store, "setp": _compare, "cvt": _convert}
        if i.name in simple:
            return simple[i.name](frame, i)
        if i.name == "shfl":
            return _shuffle(frame, i)
        if i.name in ("fence", "membar"):
            return ptx_memory.fence(i)
        if i.name in ("trap", "nanosleep") or (i.name, i.modifiers) == ("bar", ("warp", "sync")):
            return {"trap": _trap, "nanosleep": _sleep, "bar": lambda thread: None}[i.name]
    except (ValueError, IndexError) as error:
        raise Unreadable(f"{i.text!r} has other operands than expected ({error})") from error
    raise Unreadable(f"{i.text!r} is not emulated")


def guarded(frame: Frame, i: ptx.Instruction, run: Callable[[Thread], bool | None]) -> Callable[[Thread], bool | None]:
    """Returns a function that calls `run` only if the instruction's guard lets the instruction run."""
    if i.guard is None:
        return run
    get, negated = frame.get(i.guard), i.negated
    return lambda thread: run(thread) if bool(get(thread)) != negated else None
