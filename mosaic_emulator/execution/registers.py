"""The registers of inline PTX: their entries in a thread's environment, and which of them vary between CUDA threads.

A register holds a non-negative integer or a truth value. An emulated thread stands for the CUDA threads of a warp or a
warpgroup. If a register has different values in these (by their lane or warp), the emulator keeps the value of the
first CUDA thread. The decoder notes which registers depend on the lane or the warp. An instruction under a predicate
that depends on the lane is taken to run in one lane.
"""

from __future__ import annotations

from collections.abc import Callable

from ..foundations import ptx
from ..foundations.errors import ProtocolError
from .machine import Thread

Getter = Callable[[Thread], int]  # reads a register or computes a value; a truth value is a `bool`
LANES, WARPS = 32, 4

# A function that returns a thread's time in nanoseconds. By default (None) time stands still: no wait times out, so a
# thread that waits for an event that never happens is in a deadlock. Without a clock, a loop that only reads words
# blocks its thread, and %clock counts the scheduler's steps.
CLOCK: Getter | None = None


class Unreadable(NotImplementedError):
    """Inline code has an operation or instruction that is not emulated."""


def _hardware_thread(thread: Thread) -> int:
    return (thread.warpgroup * WARPS + (thread.warp or 0)) * LANES


def _time(thread: Thread) -> int:
    return 0 if CLOCK is None else CLOCK(thread)


def _cycles(thread: Thread) -> int:
    return thread.simulation.now if CLOCK is None else CLOCK(thread)


SPECIAL: dict[str, Getter] = {
    "%laneid": lambda thread: 0,
    "%tid.x": _hardware_thread,
    "%tid.y": lambda thread: 0,
    "%tid.z": lambda thread: 0,
    "%warpid": lambda thread: _hardware_thread(thread) // LANES,
    "%globaltimer": _time,
    "%globaltimer_lo": lambda thread: _time(thread) & 0xFFFFFFFF,
    "%clock64": _cycles,
    "%clock": lambda thread: _cycles(thread) & 0xFFFFFFFF,
}
# The special registers that differ between the CUDA threads of an emulated thread: whether by lane, warp or both.
VARIES = {"%laneid": {"lane"}, "%tid.x": {"lane", "warp"}, "%warpid": {"warp"}}


class Frame:
    """The registers of one piece of inline PTX.

    Attributes:
        entries: for each register, its entry in the environment.
        varies: for each register, how its value differs between the CUDA threads of an emulated thread: by ``"lane"``,
            by ``"warp"``.
    """

    def __init__(self, entries: dict[str, int], varies: dict[str, frozenset[str]], code: ptx.Code):
        self.entries, self.varies = entries, varies
        self._settle(code)

    def _settle(self, code: ptx.Code) -> None:
        """Passes on `varies` from the operands of each instruction to its result, until nothing changes."""
        changed = True
        while changed:
            changed = False
            for i in code.instructions:
                target = i.operands[0] if i.operands else None
                # A shuffle gives the same value to all lanes.
                if i.name in ("st", "red", "shfl") or not isinstance(target, ptx.Register):
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
        """Returns a function that reads an operand in a thread."""
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
        entry, name = self.entries[operand.name], operand.name.split("'")[0]

        def read(thread: Thread) -> int:
            value = thread.env[entry]
            if value is None:
                raise ProtocolError(f"the register {name} is read before anything has been written to it")
            return value

        return read

    def set(self, operand: ptx.Operand) -> Callable[[Thread, int], None]:
        """Returns a function that writes a value to an operand in a thread."""
        if operand is None:
            return lambda thread, value: None
        if not isinstance(operand, ptx.Register):
            raise Unreadable("a result that is no register")
        entry = self.entries[operand.name]
        return lambda thread, value: thread.env.__setitem__(entry, value)


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def width_of(kind: str) -> int:
    """Returns the number of bits of a PTX type; 1 for a predicate."""
    if kind == "pred":
        return 1
    if kind not in ("b32", "u32", "s32", "b64", "u64", "s64"):
        raise Unreadable(f"the type .{kind} is not emulated")
    return int(kind[1:])


def typed(frame: Frame, operand: ptx.Operand, kind: str) -> Getter:
    """Returns a function that reads an operand as a number of the PTX type `kind`."""
    get, bits = frame.get(operand), width_of(kind)
    if bits == 1:
        return get
    mask = (1 << bits) - 1
    if kind[0] == "s":
        return lambda thread: signed(get(thread) & mask, bits)
    return lambda thread: get(thread) & mask
