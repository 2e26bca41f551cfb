"""Marks: what each role of a kernel does from when on, for `python -m overlap trace`.

A role's part of a kernel says `marks.now(Work.MULTIPLY, tile.step, piece.tile)` where it begins something new. While
jax traces the kernel inside `marks.recording`, each of these becomes an entry in global memory; otherwise it emits
nothing at all, so a kernel that is not traced is the same machine code as one without marks.

An entry is 16 bytes, which one thread writes and does not wait for:

    4 bytes   what, which shard and which tile or chunk (`unpack`)
    4 bytes   %clock of the core: exact, but each core has its own
    8 bytes   %globaltimer in nanoseconds: one for all cores of a GPU, but it may tick only every 32 ns or 1 µs

`overlap.tuning.timeline` makes one time of both. Entry 0 of a role is its header: how many entries follow. A role that
makes more than there is room for goes on counting, so that what is missing can be told.

Shape legend: rows: one for each role of a CTA; entries: header, `capacity` entries, and one that takes all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat_mosaic
from overlap.primitives import atomics

ROWS = 6
# The row of each role; a compute warpgroup's is the first one plus its index.
_ROW_OF = {"compute": 0, "epilogue": 0, "producer": 2, "communicator": 3, "forwarder": 4, "multiplier": 5}
_WARPGROUPS = ("compute", "epilogue")
WORDS = 4
_WORK_BITS, _SHARD_BITS = 4, 4


class Work(enum.IntEnum):
    """What a role does. The names are those in the trace."""

    IDLE = 0
    AWAIT_PEERS = 1  # until all peers have begun the launch
    AWAIT_ROWS = 2  # until gathered rows, or parts of sums, have come from a peer
    AWAIT_OPERANDS = 3  # until operand tiles are in shared memory, or an accumulator is ready
    AWAIT_TILE = 4  # until a tile is stored that is to be sent
    LOAD = 5
    MULTIPLY = 6
    STORE = 7
    COPY = 8  # a chunk between GPUs: a pull, or a push
    FORWARD = 9
    LEAVE = 10  # until all peers have what they need from here


@dataclasses.dataclass(frozen=True)
class RecordedKernel:
    """One kernel of a recording.

    Attributes:
      name: the kernel's.
      roles: from the row of each role to its name.
      entries: int32 [CTAs, ROWS, entries, WORDS] of this device, a result of the kernel.
    """

    name: str
    roles: dict[int, str]
    entries: jax.Array


@dataclasses.dataclass
class Recording:
    """What the kernels record that jax traces inside `recording`.

    Attributes:
      capacity: entries of each role.
      kernels: in the order in which they were traced.
    """

    capacity: int
    kernels: list[RecordedKernel] = dataclasses.field(default_factory=list)

    def entries_type(self, ctas: int) -> jax.ShapeDtypeStruct:
        """The type of the result that a kernel with so many CTAs writes its entries to."""
        return jax.ShapeDtypeStruct((ctas, ROWS, self.capacity + 2, WORDS), jnp.int32)


@dataclasses.dataclass
class Tape:
    """Where one kernel's marks go while its body is traced.

    Attributes:
      entries: reference to `Recording.entries_type`.
      counts: shared memory, one int32 for each row: how many entries a role has made.
      cta: this CTA's index on the device.
      capacity: entries of each role.
      roles: as in `RecordedKernel`, filled in meanwhile.
      row: of the role whose part is being traced.
      threads: that run it.
    """

    entries: Any
    counts: Any
    cta: Any
    capacity: int
    roles: dict[int, str] = dataclasses.field(default_factory=dict)
    row: Any = None
    threads: int = 0


_recording: ContextVar[Recording | None] = ContextVar("overlap_recording", default=None)
_tape: ContextVar[Tape | None] = ContextVar("overlap_tape", default=None)


@contextlib.contextmanager
def recording(capacity: int) -> Iterator[Recording]:
    """Kernels of this library that jax traces inside of it record `capacity` entries for each role."""
    made = Recording(capacity)
    token = _recording.set(made)
    try:
        yield made
    finally:
        _recording.reset(token)


def current() -> Recording | None:
    """The recording that kernels which are traced now belong to, if any."""
    return _recording.get()


def counts_type() -> Any:
    """The shared memory that a recorded kernel needs beside its own."""
    return plgpu.SMEM((ROWS,), jnp.int32)


@contextlib.contextmanager
def on(tape: Tape) -> Iterator[None]:
    """Marks inside of it go to this tape."""
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


@contextlib.contextmanager
def role(name: str, index: Any = 0, count: int = 1) -> Iterator[None]:
    """Around all that a role does: what is marked inside of it is this role's.

    Args:
      name: compute, epilogue, producer, communicator, forwarder or multiplier.
      index: which of `count` warpgroups with the same role; it may be traced.
      count: how many there are.
    """
    tape = _tape.get()
    if tape is None:
        yield
        return
    _compat_mosaic.let_warps_load_scalars()
    first = _ROW_OF[name]
    tape.roles |= {first + i: name if count == 1 else f"{name} {i}" for i in range(count)}
    tape.row, tape.threads = first + index, 128 if name in _WARPGROUPS else 32
    tape.counts[tape.row] = jnp.int32(0)
    yield
    now(Work.IDLE)
    header = tape.entries.at[tape.cta, tape.row, 0]
    atomics.inline(_write_header, [header], tape.counts[tape.row], tape.threads)


def playing(name: str, part: Callable[[], None], index: Any = 0, count: int = 1) -> Callable[[], None]:
    """A role's part of a kernel, with its marks: `part` inside `role`."""

    def marked() -> None:
        with role(name, index, count):
            part()

    return marked


def now(work: Work, shard: Any = 0, number: Any = 0) -> None:
    """From here on the role does this, until its next mark.

    Args:
      work: what.
      shard: the step of the shard it is about (0: this device's own), below 16.
      number: of the tile, or of the chunk.
    """
    tape = _tape.get()
    if tape is None:
        return
    count = tape.counts[tape.row]
    tape.counts[tape.row] = count + 1
    place = jnp.minimum(count, tape.capacity) + 1
    what = int(work) + (shard << _WORK_BITS) + (number << _WORK_BITS + _SHARD_BITS)
    atomics.inline(_write_entry, [tape.entries.at[tape.cta, tape.row, place]], what, tape.threads)


# One thread of a warp or a warpgroup; $2 is how many threads it has.
_ONE_THREAD = (
    ".reg .pred one;", ".reg .b32 thread, last;",
    "mov.u32 thread, %tid.x;", "sub.u32 last, $2, 1;", "and.b32 thread, thread, last;", "setp.eq.u32 one, thread, 0;",
)  # fmt: skip


def _write_entry(_: Any, pointer: Any, what: Any, threads: Any) -> None:
    lines = [
        *_ONE_THREAD, ".reg .b32 clock;", ".reg .b64 time;",
        "mov.u32 clock, %clock;", "mov.u64 time, %globaltimer;",
        "@one st.global.b32 [$0], $1;", "@one st.global.b32 [$0+4], clock;", "@one st.global.b64 [$0+8], time;",
    ]  # fmt: skip
    atomics.ptx(lines, pointer, what, threads)


def _write_header(_: Any, pointer: Any, count: Any, threads: Any) -> None:
    atomics.ptx([*_ONE_THREAD, "@one st.global.b32 [$0], $1;"], pointer, count, threads)


def unpack(what: int) -> tuple[Work, int, int]:
    """(work, shard, number) of an entry's first word."""
    what &= 0xFFFFFFFF
    work, rest = what & (1 << _WORK_BITS) - 1, what >> _WORK_BITS
    return Work(work), rest & (1 << _SHARD_BITS) - 1, rest >> _SHARD_BITS
