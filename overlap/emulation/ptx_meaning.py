"""What the instructions of inline PTX do to an emulated thread, which stands for the warp or warpgroup that runs them.

Registers are slots of the thread's environment and hold what the hardware's hold: integers from 0, and truth values. An
address is a number too: each array of words begins at a number of its own (`address_of`). A loop that only looks at
words blocks the thread until one of them changes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from . import ptx
from .errors import ProtocolError, RaceError
from .memory import Buffer, Cells
from .orders import Orders, fence_sc
from .sync import Semaphore, Write, next_serial

Getter = Callable[[Any], Any]
LANES, WARPS = 32, 4

# Of a thread, in nanoseconds, if time is to pass. It stands still by default: then no wait runs out, and who waits for
# what nobody does is in a deadlock. A loop that reads the time is not blocked while there is a clock.
CLOCK: Callable[[Any], int] | None = None

_WORD_BYTES = 4
_MIDDLE = 1 << 31  # of the numbers for one array, so that offsets may be negative
_arrays: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Unreadable(NotImplementedError):
    """An instruction that is not emulated."""


def address_of(array: Cells | Buffer, offset: int) -> int:
    """The number that stands for the address of element or byte `offset` of an array."""
    _arrays[array.serial] = array
    return (array.serial << 32) + _MIDDLE + offset * (_WORD_BYTES if isinstance(array, Cells) else 1)


def _words_at(address: int, nbytes: int) -> list[Semaphore]:
    array = _arrays.get(address >> 32)
    if array is None:
        raise ProtocolError(f"inline code reaches for address {address:#x}, which is in no array that it was given")
    offset = (address & 0xFFFFFFFF) - _MIDDLE
    if isinstance(array, Buffer):
        raise Unreadable(f"inline PTX on {array.name}, which is no array of semaphores, is not emulated")
    first, count = offset // _WORD_BYTES, nbytes // _WORD_BYTES
    if offset % nbytes:
        raise ProtocolError(f"byte {offset} of {array.name} is no address for {nbytes} bytes: it must be a multiple")
    if not 0 <= first <= array.cells.size - count:
        raise ProtocolError(
            f"bytes {offset} to {offset + nbytes} are out of bounds for {array.name} of device {array.device}, which "
            f"has {array.cells.size} words"
        )
    return list(array.cells.reshape(-1)[first : first + count])


# ---- operands --------------------------------------------------------------------------------------------------------


def _hardware_thread(thread: Any) -> int:
    return (thread.warpgroup * WARPS + (thread.warp or 0)) * LANES


def _time(thread: Any) -> int:
    return 0 if CLOCK is None else CLOCK(thread)


SPECIAL: dict[str, Getter] = {
    "%laneid": lambda thread: 0,
    "%tid.x": _hardware_thread,
    "%tid.y": lambda thread: 0,
    "%tid.z": lambda thread: 0,
    "%warpid": lambda thread: _hardware_thread(thread) // LANES,
    "%globaltimer": _time,
    "%globaltimer_lo": lambda thread: _time(thread) & 0xFFFFFFFF,
    "%clock64": _time,
    "%clock": lambda thread: _time(thread) & 0xFFFFFFFF,
}
# What tells a thread of the hardware from the others of its emulated one: its lane, its warp.
VARIES = {"%laneid": {"lane"}, "%tid.x": {"lane", "warp"}, "%warpid": {"warp"}}


class Frame:
    """The registers of one text: slots, and what each of them differs by within an emulated thread."""

    def __init__(self, slots: dict[str, int], varies: dict[str, frozenset[str]], code: ptx.Code):
        self.slots, self.varies = slots, varies
        self._settle(code)

    def _settle(self, code: ptx.Code) -> None:
        changed = True
        while changed:
            changed = False
            for i in code.instructions:
                target = i.operands[0] if i.operands else None
                if i.name in ("st", "red") or not isinstance(target, ptx.Register):
                    continue
                sources = self.of_guard(i).union(*(self.of(operand) for operand in i.operands[1:]))
                if not sources <= self.varies.get(target.name, frozenset()):
                    self.varies[target.name] = self.varies.get(target.name, frozenset()) | sources
                    changed = True

    def of(self, operand: ptx.Operand) -> frozenset[str]:
        if isinstance(operand, ptx.Special):
            return frozenset(VARIES.get(operand.name, ()))
        if isinstance(operand, ptx.Not):
            operand = operand.register
        if isinstance(operand, ptx.Address):
            operand = operand.base
        return self.varies.get(operand.name, frozenset()) if isinstance(operand, ptx.Register) else frozenset()

    def of_guard(self, instruction: ptx.Instruction) -> frozenset[str]:
        return self.of(instruction.guard)

    def get(self, operand: ptx.Operand) -> Getter:
        """Reads an operand."""
        if isinstance(operand, int):
            return lambda thread: operand
        if isinstance(operand, ptx.Not):
            inner = self.get(operand.register)
            return lambda thread: not inner(thread)
        if isinstance(operand, ptx.Special):
            if operand.name not in SPECIAL:
                raise Unreadable(f"{operand.name} is not emulated")
            return SPECIAL[operand.name]
        if not isinstance(operand, ptx.Register):
            raise Unreadable("an address where a value is expected")
        slot, name = self.slots[operand.name], operand.name.split("'")[0]

        def read(thread: Any) -> Any:
            value = thread.env[slot]
            if value is None:
                raise ProtocolError(f"the register {name} is read before anything has been written to it")
            return value

        return read

    def set(self, operand: ptx.Operand) -> Callable[[Any, Any], None]:
        """Writes an operand."""
        if operand is None:
            return lambda thread, value: None
        if not isinstance(operand, ptx.Register):
            raise Unreadable("a result that is no register")
        slot = self.slots[operand.name]
        return lambda thread, value: thread.env.__setitem__(slot, value)


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _width(kind: str) -> int:
    """Bits of a type; 1 of a predicate."""
    if kind == "pred":
        return 1
    if kind not in ("b32", "u32", "s32", "b64", "u64", "s64"):
        raise Unreadable(f"the type .{kind} is not emulated")
    return int(kind[1:])


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


def _typed(frame: Frame, operand: ptx.Operand, kind: str) -> Getter:
    """An operand as a number of this type."""
    get, bits = frame.get(operand), _width(kind)
    if bits == 1:
        return get
    mask = (1 << bits) - 1
    if kind[0] == "s":
        return lambda thread: _signed(get(thread) & mask, bits)
    return lambda thread: get(thread) & mask


def _arithmetic(frame: Frame, i: ptx.Instruction) -> Callable[[Any], None]:
    name, kind = i.name, i.modifiers[-1] if i.modifiers else ""
    bits = _width(kind)
    form = i.modifiers[:-1]
    if form not in ((), ("lo",), ("wide",)) or (form and name not in ("mul", "mad")):
        raise Unreadable(f"{i.text!r} is not emulated")
    if name in ("mul", "mad") and not form:
        raise Unreadable(f"{i.text!r}: .lo or .wide is missing")
    put = frame.set(i.operands[0])
    sources = [_typed(frame, operand, kind) for operand in i.operands[1:]]
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


def _convert(frame: Frame, i: ptx.Instruction) -> Callable[[Any], None]:
    to, of = i.modifiers
    put, get, mask = frame.set(i.operands[0]), _typed(frame, i.operands[1], of), (1 << _width(to)) - 1
    return lambda thread: put(thread, get(thread) & mask)


def _compare(frame: Frame, i: ptx.Instruction) -> Callable[[Any], None]:
    name, *combined, kind = i.modifiers
    if name not in _COMPARE or any(c not in _COMBINE for c in combined):
        raise Unreadable(f"{i.text!r} is not emulated")
    compare, combine = _COMPARE[name], _COMBINE[combined[0]] if combined else None
    targets = i.operands[: len(i.operands) - 2 - len(combined)]
    if name in ("lo", "ls", "hi", "hs"):
        kind = "u" + kind[1:]
    a, b = (_typed(frame, operand, kind) for operand in i.operands[len(targets) : len(targets) + 2])
    third = frame.get(i.operands[-1]) if combine else None
    put = frame.set(targets[0])
    put_not = frame.set(targets[1]) if len(targets) > 1 else None
    text = i.text

    def run(thread: Any) -> None:
        holds = compare(a(thread), b(thread))
        also = True if third is None else third(thread)
        put(thread, holds if combine is None else combine(holds, also))
        if put_not is not None:
            put_not(thread, not holds if combine is None else combine(not holds, also))
        if not holds:
            thread.orders.poll.tests.append(text)

    return run


# ---- memory ----------------------------------------------------------------------------------------------------------

_CACHING = ("ca", "cg", "cv", "wb", "wt", "cs", "lu", "L1::no_allocate")


def _access(i: ptx.Instruction) -> tuple[str, str, str, str]:
    """(order, scope, operation, type) of a memory instruction."""
    *words, kind = i.modifiers
    order, scope, operation = "", "", ""
    for word in words:
        if word in ("weak", "relaxed", "acquire", "release", "acq_rel", "volatile"):
            order = word
        elif word in ("cta", "gpu", "sys"):
            scope = word
        elif word in ("add", "exch", "cas", "max", "min", "inc", "dec", "and", "or", "xor"):
            operation = word
        elif word != "global" and word not in _CACHING:
            raise Unreadable(f".{word} in {i.text!r} is not emulated")
    if i.name in ("atom", "red"):
        order, scope = order or "relaxed", scope or "gpu"
    if order == "volatile":
        order, scope = "relaxed", "sys"
    if order in ("", "weak"):
        order = "weak"
    elif not scope:
        raise Unreadable(f"{i.text!r} names no scope")
    if _width(kind) == 1:
        raise Unreadable(f"{i.text!r} is not emulated")
    return order, scope, operation, kind


def _require_scope(thread: Any, word: Semaphore, write: Write, scope: str) -> None:
    others = [device for device in write.local if device != thread.device]
    if scope != "sys" and others:
        raise ProtocolError(
            f"an access of scope {scope!r} to {word.name} of device {word.device} meets a value that device "
            f"{others[0]} has written: expected scope 'sys' on both sides"
        )


def _require_order(thread: Any, word: Semaphore, what: str, *, reads: bool) -> None:
    """A plain access must come after all writes to the word (and, if it writes, after all reads)."""
    last = word.log[-1]
    if thread.machine.detector is None or last.by is None:
        return
    clock, own = thread.knowledge.seen, thread.component
    events = [last.by] if reads else [last.by, *last.readers.items()]
    for component, time in events:
        if component != own and not (component < clock.size and clock[component] >= time):
            raise RaceError(
                f"race on {word.name} of device {word.device}: {what} is a plain access, and nothing orders it with "
                "another thread's. Expected: .relaxed and a scope, or a chain of signals and waits"
            )


def _load(frame: Frame, i: ptx.Instruction) -> Callable[[Any], None]:
    order, scope, _, kind = _access(i)
    target, address = i.operands
    if not isinstance(address, ptx.Address):
        raise Unreadable(f"{i.text!r}: the address is missing")
    put, base, offset, nbytes = frame.set(target), frame.get(address.base), address.offset, _width(kind) // 8

    def run(thread: Any) -> None:
        words = _words_at(base(thread) + offset, nbytes)
        orders: Orders = thread.orders
        if order == "weak":
            for word in words:
                _require_order(thread, word, i.text, reads=True)
        writes = orders.read(thread, words, newest=order == "weak")
        for word, write in zip(words, writes):
            if order != "weak":
                _require_scope(thread, word, write, scope)
                orders.gather(write, thread.device, scope)
            orders.poll.looked_at(word, write)
        if order == "acquire":
            orders.acquire(thread.knowledge, scope)
        put(thread, sum(write.value << 32 * n for n, write in enumerate(writes)))

    return run


def _note_write(thread: Any, word: Semaphore, i: ptx.Instruction, scope: str) -> None:
    """What holds before a write: the word's owner has begun, and the scope reaches it."""
    if word.device != thread.device:
        if scope in ("gpu", "cta"):
            raise ProtocolError(
                f"{i.text!r} writes {word.name} of device {word.device} at scope {scope!r}, which stays on its device: "
                "expected scope 'sys'"
            )
        thread.machine.laps.check_begun(thread, word.device, f"writes {word.name}", asynchronous=False)


def _store_words(
    thread: Any, words: list[Semaphore], value: int, order: str, scope: str, *, continues: bool = False
) -> None:
    clocks = {"local": np.zeros(0, np.int32), "system": np.zeros(0, np.int32)}
    releases = order in ("release", "acq_rel")
    if order != "weak":
        clocks = thread.orders.released(thread.knowledge, scope, releases=releases)
    serial, event = next_serial(), (thread.component, thread.time)
    for n, word in enumerate(words):
        part = (value >> 32 * n) & 0xFFFFFFFF
        thread.orders.poll.has_news |= part != word.value
        word.write(part, thread.device, by=event, continues=continues, serial=serial, **clocks)
        thread.orders.saw(thread, word, word.log[-1])
        if word.device != thread.device:
            word.expect_seen((thread, *event, thread.instruction, thread.lap))
    thread.tick()


def _store(frame: Frame, i: ptx.Instruction) -> Callable[[Any], None]:
    order, scope, _, kind = _access(i)
    if order == "acquire":
        raise Unreadable(f"{i.text!r}: a store cannot acquire")
    address, value = i.operands
    if not isinstance(address, ptx.Address):
        raise Unreadable(f"{i.text!r}: the address is missing")
    base, offset, get, nbytes = frame.get(address.base), address.offset, _typed(frame, value, kind), _width(kind) // 8

    def run(thread: Any) -> None:
        words = _words_at(base(thread) + offset, nbytes)
        for word in words:
            if order == "weak":
                _require_order(thread, word, i.text, reads=False)
            _note_write(thread, word, i, scope)
        _store_words(thread, words, get(thread), order, scope)

    return run


def _new_value(operation: str, old: int, a: int, b: int, times: int, bits: int) -> int | None:
    """What an atomic operation stores, if `times` threads do it one after the other; None: nothing."""
    if operation == "add":
        return old + times * a
    if operation == "cas":
        return b if old == a else None
    if operation in ("inc", "dec"):
        for _ in range(times):
            down = a if old == 0 or old > a else old - 1
            old = (0 if old >= a else old + 1) if operation == "inc" else down
        return old
    if operation == "xor":
        return old ^ a if times % 2 else old
    return {"exch": a, "max": max(old, a), "min": min(old, a), "and": old & a, "or": old | a}[operation]


def _atomic(frame: Frame, i: ptx.Instruction, under: frozenset[str]) -> Callable[[Any], None]:
    order, scope, operation, kind = _access(i)
    target, address, *rest = i.operands if i.name == "atom" else (None, *i.operands)
    if not operation or order == "weak" or not isinstance(address, ptx.Address) or len(rest) != 1 + (operation == "cas"):
        raise Unreadable(f"{i.text!r} is not emulated")
    put, base, offset, bits = frame.set(target), frame.get(address.base), address.offset, _width(kind)
    a, b = (_typed(frame, operand, kind) for operand in (rest * 2)[:2])
    has_result, signed = target is not None, kind[0] == "s"
    one_lane, one_warp = "lane" in under, "warp" in under

    def run(thread: Any) -> None:
        times = (1 if one_lane else LANES) * (1 if one_warp or thread.warp is not None else WARPS)
        if times > 1 and (has_result or operation == "cas"):
            raise Unreadable(
                f"{i.text!r} runs in {times} threads at once, and each has a result of its own: expected a predicate "
                "that elects one"
            )
        words = _words_at(base(thread) + offset, bits // 8)
        orders: Orders = thread.orders
        for word in words:
            _note_write(thread, word, i, scope)
        writes = orders.read(thread, words, newest=True)
        old = sum(write.value << 32 * n for n, write in enumerate(writes))
        for word, write in zip(words, writes):
            _require_scope(thread, word, write, scope)
            orders.gather(write, thread.device, scope)
            orders.poll.looked_at(word, write)
        if order in ("acquire", "acq_rel"):
            orders.acquire(thread.knowledge, scope)
        new = _new_value(operation, _signed(old, bits) if signed else old, a(thread), b(thread), times, bits)
        if new is not None:
            _store_words(thread, words, new & ((1 << bits) - 1), order, scope, continues=True)
        put(thread, old)

    return run


# ---- fences ----------------------------------------------------------------------------------------------------------


def _fence(i: ptx.Instruction) -> Callable[[Any], None]:
    words = i.modifiers
    if i.name == "membar" and len(words) == 1 and words[0] in ("cta", "gl", "sys"):
        words = ("sc", "gpu" if words[0] == "gl" else words[0])
    if words[:1] == ("proxy",):
        kind = words[1:]
        if kind == ("alias",):
            return lambda thread: None
        if kind == ("async",):
            return lambda thread: thread.knowledge.fence_all()
        if kind == ("async", "global"):
            return lambda thread: thread.knowledge.fence_gmem()
        if kind in (("async", "shared::cta"), ("async", "shared::cluster")):
            return lambda thread: thread.knowledge.fence_smem()
        raise Unreadable(f"{i.text!r} is not emulated")
    if len(words) == 1 and words[0] in ("cta", "gpu", "sys"):
        words = ("acq_rel", words[0])
    if len(words) != 2 or words[0] not in ("acquire", "release", "acq_rel", "sc") or words[1] not in ("cta", "gpu", "sys"):
        raise Unreadable(f"{i.text!r} is not emulated")
    order, scope = words

    def run(thread: Any) -> None:
        if order != "release":
            thread.orders.acquire(thread.knowledge, scope)
        if order == "sc":
            fence_sc(thread, scope)
        if order != "acquire":
            thread.orders.release(thread.knowledge, scope)
            thread.tick()

    return run


# ---- control ---------------------------------------------------------------------------------------------------------


def branch(i: ptx.Instruction, place: list[int], here: int) -> Callable[[Any], bool | None]:
    """A jump to the program's instruction `place[0]`, from `here`; backwards it may be a wait."""

    def run(thread: Any) -> bool | None:
        target = place[0]
        poll = thread.orders.poll
        if target <= here:
            if poll.head != target:
                poll.begin(target)
            elif poll.values and not poll.is_blocked:
                if not poll.has_news and CLOCK is None:
                    return _block(thread)
                thread.polled = not poll.has_news
            poll.has_news = poll.is_blocked = False
            poll.tests = []
        thread.pc = target
        return None

    return run


def _block(thread: Any) -> bool:
    """Suspends a thread whose loop finds nothing new until one of the words that it looks at changes."""
    poll = thread.orders.poll
    poll.is_blocked = True
    words, tests = dict(poll.values), tuple(poll.tests)

    def why() -> str:
        looks = ", ".join(f"{word.name} of device {word.device}, got {value}" for word, value in words.items())
        return f"polls {looks}" + (f" ({'; '.join(tests)})" if tests else "")

    first, *others = words
    for word in others:
        word.waiters.append(thread)
    return thread.block(first, why)


def _trap(thread: Any) -> None:
    raise ProtocolError(f"the kernel trapped: {thread.instruction.name}")


def _sleep(thread: Any) -> None:
    thread.polled = True


# ---- all of them -----------------------------------------------------------------------------------------------------

_ARITHMETIC = {*_BINARY, "mad", "not", "mov", "selp"}
VISIBLE = {"ld", "st", "atom", "red", "nanosleep"}


def meaning(frame: Frame, i: ptx.Instruction, under: frozenset[str]) -> Callable[[Any], Any]:
    """The function that runs an instruction that is no branch, its guard left aside.

    `under`: what the threads that run it have been chosen by, a lane or a warp.
    """
    try:
        if i.name in _ARITHMETIC:
            return _arithmetic(frame, i)
        if i.name in ("atom", "red"):
            return _atomic(frame, i, under)
        simple = {"ld": _load, "st": _store, "setp": _compare, "cvt": _convert}
        if i.name in simple:
            return simple[i.name](frame, i)
        if i.name in ("fence", "membar"):
            return _fence(i)
        if i.name in ("trap", "nanosleep") or (i.name, i.modifiers) == ("bar", ("warp", "sync")):
            return {"trap": _trap, "nanosleep": _sleep, "bar": lambda thread: None}[i.name]
    except (ValueError, IndexError) as error:
        raise Unreadable(f"{i.text!r} has other operands than expected ({error})") from error
    raise Unreadable(f"{i.text!r} is not emulated")


def guarded(frame: Frame, i: ptx.Instruction, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`run`, if the instruction's guard lets it."""
    if i.guard is None:
        return run
    get, negated = frame.get(i.guard), i.negated
    return lambda thread: run(thread) if bool(get(thread)) != negated else None
