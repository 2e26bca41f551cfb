"""Loads, stores, atomic operations and fences of inline PTX. Most work on the words of semaphores.

Plain loads and stores also work on bytes of shared memory, and plain stores on bytes of global memory. An address is a
number, and each array has its own range of numbers. `orders` defines how these accesses order threads.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from ..execution.machine import Thread
from ..execution.registers import LANES, WARPS, Frame, Getter, Unreadable, signed, typed, width_of
from ..foundations import ptx
from ..foundations.clocks import EMPTY, covers
from ..foundations.errors import ProtocolError, RaceError
from ..state.memory import Buffer, Cells, View
from ..state.orders import fence_sc
from ..state.sync import Release, Semaphore, Write, next_serial

_WORD_BYTES = 4
_MIDDLE = 1 << 31  # where an array's first byte lies in the array's range of numbers, so that offsets may be negative
_arrays: weakref.WeakValueDictionary[int, Cells | Buffer] = weakref.WeakValueDictionary()


def address_of(array: Cells | Buffer, offset: int) -> int:
    """Returns the number that stands for an address in an array: of object `offset` of `Cells`, or of that byte."""
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
    _require_place(array, offset, nbytes, array.places.size * _WORD_BYTES, f"{array.places.size} words")
    return [array.at(place) for place in range(first, first + count)]


def _require_place(array: Cells | Buffer, offset: int, nbytes: int, total: int, size: str) -> None:
    """Checks that `nbytes` at byte `offset` are aligned and inside an array of `total` bytes (`size`: as text)."""
    if offset % nbytes:
        raise ProtocolError(f"byte {offset} of {array.name} is no address for {nbytes} bytes: it must be a multiple")
    if not 0 <= offset <= total - nbytes:
        raise ProtocolError(
            f"bytes {offset} to {offset + nbytes} are out of bounds for {array.name} of device {array.device}, which "
            f"has {size}"
        )


_CACHING = ("ca", "cg", "cv", "wb", "wt", "cs", "lu", "L1::no_allocate")


def _is_plain_shared(i: ptx.Instruction) -> bool:
    """Whether the instruction is a plain `ld.shared` or `st.shared`. Other PTX on shared memory is not emulated."""
    return i.name in ("ld", "st") and i.modifiers[:-1] in (("shared",), ("shared::cta",))


def _access(i: ptx.Instruction) -> tuple[str, str, str, str]:
    """Returns (order, scope, operation, type) of a memory instruction, from its modifiers."""
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
    if width_of(kind) == 1:
        raise Unreadable(f"{i.text!r} is not emulated")
    return order, scope, operation, kind


def _require_scope(thread: Thread, word: Semaphore, write: Write, scope: str) -> None:
    others = [device for device in write.local if device != thread.device]
    if scope != "sys" and others:
        raise ProtocolError(
            f"an access of scope {scope!r} to {word.name} of device {word.device} meets a value that device "
            f"{others[0]} has written: expected scope 'sys' on both sides"
        )
    # Only values of this launch are checked. A thread may also read a value that another launch has left in the word,
    # but no thread relies on such a value.
    if write.within not in (None, thread.device) and write.launch in (None, thread.machine.number):
        raise ProtocolError(
            f"an access to {word.name} of device {word.device} meets a value that device {write.within} has written at "
            "a scope that does not leave it: expected scope 'sys' on both sides"
        )


def _require_order(thread: Thread, word: Semaphore, what: str, *, reads: bool) -> None:
    """Checks that a plain access comes after all writes to the word (and, if the access writes, after all reads)."""
    last = word.log[-1]
    if thread.machine.detector is None or last.by is None:
        return
    clock, own = thread.knowledge.seen, thread.component
    events = [last.by] if reads else [last.by, *last.readers.items()]
    for component, time in events:
        if component != own and not covers(clock, component, time):
            raise RaceError(
                f"race on {word.name} of device {word.device}: {what} is a plain access, and nothing orders it with "
                "another thread's. Expected: .relaxed and a scope, or a chain of signals and waits"
            )


def _address(frame: Frame, i: ptx.Instruction, operand: ptx.Operand) -> Getter:
    """Returns a function that computes the address that an operand stands for."""
    if not isinstance(operand, ptx.Address):
        raise Unreadable(f"{i.text!r}: the address is missing")
    base, offset = frame.get(operand.base), operand.offset
    return lambda thread: base(thread) + offset


def load(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    if _is_plain_shared(i):
        return _load_shared(frame, i)
    order, scope, _, kind = _access(i)
    target, address = i.operands
    put, where, nbytes = frame.set(target), _address(frame, i, address), width_of(kind) // 8

    def run(thread: Thread) -> None:
        words, orders = _words_at(where(thread), nbytes), thread.orders
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


def _note_write(thread: Thread, word: Semaphore, i: ptx.Instruction, scope: str) -> None:
    """Checks, before a write, that the word's owner has begun the launch and that the scope reaches the owner."""
    if word.device != thread.device:
        if scope in ("gpu", "cta"):
            raise ProtocolError(
                f"{i.text!r} writes {word.name} of device {word.device} at scope {scope!r}, which stays on its device: "
                "expected scope 'sys'"
            )
        thread.machine.check_present(thread, word.device, f"writes {word.name}", asynchronous=False)


def _store_words(
    thread: Thread, words: list[Semaphore], value: int, order: str, scope: str, *, continues: bool = False
) -> None:
    release = Release(EMPTY, EMPTY, scope or "sys")
    releases = order in ("release", "acq_rel")
    if order != "weak":
        release = thread.orders.released(thread.knowledge, scope, releases=releases)
    serial, event = next_serial(), (thread.component, thread.time)
    for n, word in enumerate(words):
        part = (value >> 32 * n) & 0xFFFFFFFF
        thread.orders.poll.has_news |= part != word.value
        word.write(part, thread.device, release, by=event, continues=continues, serial=serial)
        thread.orders.saw(thread, word, word.log[-1])
        if word.device != thread.device:
            word.expect_seen((thread, *event, thread.instruction))
    thread.tick()


def _bytes_at(thread: Thread, address: int, nbytes: int, space: str) -> View:
    """Makes a view of bytes of a buffer: in global memory of the thread's device, or in its CTA's shared memory."""
    buffer, offset = _arrays.get(address >> 32), (address & 0xFFFFFFFF) - _MIDDLE
    if not isinstance(buffer, Buffer) or buffer.space != space or buffer.device != thread.device:
        what = "nothing" if buffer is None else f"{buffer.name} of device {buffer.device}"
        raise Unreadable(f"a plain access of inline PTX to {what} as {space} is not emulated")
    if buffer.cta not in (None, thread.cta):
        raise ProtocolError(f"{buffer.name} is the shared memory of {buffer.cta}")
    _require_place(buffer, offset, nbytes, buffer.data.nbytes, str(buffer.data.nbytes))
    array = np.ndarray((nbytes,), np.uint8, buffer.bytes, offset)
    return View(buffer, array, (1,), f"[bytes {offset} to {offset + nbytes}]")


def _store_bytes(thread: Thread, address: int, value: bytes, space: str) -> None:
    view = _bytes_at(thread, address, len(value), space)
    thread.access(view, "store", write=True)
    view.array[:] = np.frombuffer(value, np.uint8)


def _load_shared(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    target, address = i.operands
    put, where, nbytes = frame.set(target), _address(frame, i, address), width_of(i.modifiers[-1]) // 8

    def run(thread: Thread) -> None:
        view = _bytes_at(thread, where(thread), nbytes, "smem")
        thread.access(view, "load", write=False)
        put(thread, int.from_bytes(view.array.tobytes(), "little"))

    return run


def store(frame: Frame, i: ptx.Instruction) -> Callable[[Thread], None]:
    is_shared = _is_plain_shared(i)
    order, scope, _, kind = ("weak", "", "", i.modifiers[-1]) if is_shared else _access(i)
    if order == "acquire":
        raise Unreadable(f"{i.text!r}: a store cannot acquire")
    address, value = i.operands
    place, get, nbytes = _address(frame, i, address), typed(frame, value, kind), width_of(kind) // 8

    def run(thread: Thread) -> None:
        where = place(thread)
        if is_shared or (order == "weak" and isinstance(_arrays.get(where >> 32), Buffer)):
            _store_bytes(thread, where, get(thread).to_bytes(nbytes, "little"), "smem" if is_shared else "gmem")
            return
        words = _words_at(where, nbytes)
        for word in words:
            if order == "weak":
                _require_order(thread, word, i.text, reads=False)
            _note_write(thread, word, i, scope)
        _store_words(thread, words, get(thread), order, scope)

    return run


def _new_value(operation: str, old: int, a: int, b: int, times: int, bits: int) -> int | None:
    """Returns what a word holds after `times` threads have run an atomic operation; None if it stores nothing."""
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


def atomic(frame: Frame, i: ptx.Instruction, under: frozenset[str]) -> Callable[[Thread], None]:
    order, scope, operation, kind = _access(i)
    target, address, *rest = i.operands if i.name == "atom" else (None, *i.operands)
    is_complete = bool(operation) and len(rest) == (2 if operation == "cas" else 1)
    if order == "weak" or not is_complete:
        raise Unreadable(f"{i.text!r} is not emulated")
    put, where, bits = frame.set(target), _address(frame, i, address), width_of(kind)
    a, b = (typed(frame, operand, kind) for operand in (rest * 2)[:2])
    has_result, is_signed = target is not None, kind[0] == "s"
    one_lane, one_warp = "lane" in under, "warp" in under

    def run(thread: Thread) -> None:
        times = (1 if one_lane else LANES) * (1 if one_warp or thread.warp is not None else WARPS)
        if times == WARPS and has_result:
            raise ProtocolError(
                f"each of the {WARPS} warps of a warpgroup runs this and gets a result of its own. Expected: call it "
                "in one warp (plgpu.warp_map, then pl.when(warp == 0)), or let a predicate elect one thread of the "
                "warpgroup"
            )
        if times > 1 and (has_result or operation == "cas"):
            raise Unreadable(
                f"{i.text!r} runs in {times} threads at once, and each has a result of its own: expected a predicate "
                "that elects one"
            )
        words, orders = _words_at(where(thread), bits // 8), thread.orders
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
        new = _new_value(operation, signed(old, bits) if is_signed else old, a(thread), b(thread), times, bits)
        if new is not None:
            _store_words(thread, words, new & ((1 << bits) - 1), order, scope, continues=True)
        put(thread, old)

    return run


def fence(i: ptx.Instruction) -> Callable[[Thread], None]:
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
        if kind[:1] == ("async::generic",) and any("restrict::shared" in word for word in kind):
            return lambda thread: thread.knowledge.fence_smem()
        raise Unreadable(f"{i.text!r} is not emulated")
    if len(words) == 1 and words[0] in ("cta", "gpu", "sys"):
        words = ("acq_rel", words[0])
    order, scope = words if len(words) == 2 else ("", "")
    if order not in ("acquire", "release", "acq_rel", "sc") or scope not in ("cta", "gpu", "sys"):
        raise Unreadable(f"{i.text!r} is not emulated")

    def run(thread: Thread) -> None:
        if order != "release":
            thread.orders.acquire(thread.knowledge, scope)
        if order == "sc":
            fence_sc(thread, scope)
        if order != "acquire":
            thread.orders.release(thread.knowledge, scope)
            thread.tick()

    return run
