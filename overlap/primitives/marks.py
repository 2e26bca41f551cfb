"""Records what each role of a kernel does, and when it begins each kind of work, for `python -m overlap trace`.

A role's part of a kernel calls `marks.now(Work.MULTIPLY, tile.step, piece.tile)` where it begins something new. While
jax traces the kernel inside `marks.recording`, each of these calls becomes an entry in global memory. Otherwise it
emits nothing: the machine code is the same as without marks.

An entry is 16 bytes, which one thread writes without waiting:

    4 bytes   what, which shard and which tile or chunk (`unpack`)
    4 bytes   %clock of the SM: exact, but each SM has its own
    8 bytes   %globaltimer in nanoseconds: one for all SMs of a GPU; how often it ticks is not fixed

`overlap.tuning.timeline` combines both into one time. Entry 0 of a role is its header: the number of entries that
follow. A role that makes more entries than there is room for keeps counting them, so that the number of missing entries
is known.

Shape legend: rows: one for each role of a CTA; entries: the header, `capacity` entries, and a last one that is
overwritten by all further entries.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.primitives import atomics
from overlap.primitives.types import GmemRef, Index, ScratchType, SmemRef

ROWS = 6
# The row of each role. For several compute warpgroups: the row of the first one; the index of the warpgroup is added.
_ROW_OF = {"compute": 0, "epilogue": 0, "producer": 2, "communicator": 3, "forwarder": 4, "multiplier": 5}
_WARPGROUPS = ("compute", "epilogue")
WORDS = 4
_WORK_BITS = 4
_SHARD_BITS = 4


class Work(enum.IntEnum):
    """What a role does; `overlap.cli.trace_files` has the words for it."""

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
      name: the kernel's name.
      roles: from each role's row to its name.
      entries: int32 [CTAs, ROWS, entries, WORDS] of this device, a result of the kernel.
    """

    name: str
    roles: dict[int, str]
    entries: jax.Array


@dataclasses.dataclass
class Recording:
    """The record of all kernels that jax traces inside `recording`.

    Attributes:
      capacity: entries of each role.
      kernels: the kernels, in the order in which they were traced.
    """

    capacity: int
    kernels: list[RecordedKernel] = dataclasses.field(default_factory=list)

    def entries_type(self, ctas: int) -> jax.ShapeDtypeStruct:
        """The type of the result to which a kernel with `ctas` CTAs writes its entries."""
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
      row: the row of the role whose part is being traced.
      threads: how many threads run that role.
      last: work, shard and number of the role's last mark.
    """

    entries: GmemRef
    counts: SmemRef
    cta: Index
    capacity: int
    roles: dict[int, str] = dataclasses.field(default_factory=dict)
    row: Index | None = None
    threads: int = 0
    last: tuple[Work, Index, Index] | None = None


_recording: ContextVar[Recording | None] = ContextVar("overlap_recording", default=None)
_tape: ContextVar[Tape | None] = ContextVar("overlap_tape", default=None)


@contextlib.contextmanager
def recording(capacity: int) -> Iterator[Recording]:
    """Inside this context, the kernels of this library that jax traces record `capacity` entries for each role."""
    made = Recording(capacity)
    token = _recording.set(made)
    try:
        yield made
    finally:
        _recording.reset(token)


def current() -> Recording | None:
    """Returns the recording for kernels that are traced now; None if none is being made."""
    return _recording.get()


def counts_type() -> ScratchType:
    """Returns the type of the shared memory that a recorded kernel needs in addition."""
    return plgpu.SMEM((ROWS,), jnp.int32)


@contextlib.contextmanager
def on(tape: Tape) -> Iterator[None]:
    """Inside this context, marks go to this tape."""
    token = _tape.set(tape)
    try:
        yield
    finally:
        _tape.reset(token)


@contextlib.contextmanager
def role(name: str, index: Index = 0, count: int = 1) -> Iterator[None]:
    """Inside this context, marks belong to the role `name`.

    Args:
      name: compute, epilogue, producer, communicator, forwarder or multiplier.
      index: the index among the warpgroups with the same role; it may be traced.
      count: how many warpgroups have this role.
    """
    tape = _tape.get()
    if tape is None:
        yield
        return
    first = _ROW_OF[name]
    tape.roles |= {first + i: name if count == 1 else f"{name} {i}" for i in range(count)}
    tape.row = first + index
    tape.threads = 128 if name in _WARPGROUPS else 32
    tape.last = None
    atomics.inline(_begin(tape.threads), [tape.counts.at[tape.row]])
    yield
    now(Work.IDLE)
    header = tape.entries.at[tape.cta, tape.row, 0]
    atomics.inline(_end(tape.threads), [header, tape.counts.at[tape.row]])


def playing(name: str, part: Callable[[], None], index: Index = 0, count: int = 1) -> Callable[[], None]:
    """Returns a function that runs `part`, a role's part of a kernel, inside the context `role`."""

    def marked() -> None:
        with role(name, index, count):
            part()

    return marked


def now(work: Work, shard: Index = 0, number: Index = 0) -> None:
    """Marks that from here on the role does `work`, until its next mark.

    Args:
      work: the kind of work.
      shard: the step of the shard concerned (0: this device's own). Its last four bits are kept.
      number: the number of the tile, or of the chunk.
    """
    tape = _tape.get()
    if tape is None:
        return
    tape.last = work, shard, number
    what = int(work) + ((shard & (1 << _SHARD_BITS) - 1) << _WORK_BITS) + (number << _WORK_BITS + _SHARD_BITS)
    entries = tape.entries.at[tape.cta, tape.row, 0]
    atomics.inline(_mark(tape.threads, tape.capacity), [entries, tape.counts.at[tape.row]], what)


@contextlib.contextmanager
def during(work: Work) -> Iterator[None]:
    """Marks `work` for the time inside this context; afterwards marks the role's earlier work again.

    Shard and number stay the same. The earlier work must have been marked in the same scope of the traced kernel, or in
    an enclosing one.
    """
    tape = _tape.get()
    before = None if tape is None else tape.last
    now(work, *(before or (work, 0, 0))[1:])
    yield
    if before is not None:
        now(*before)


# One thread of a warp or a warpgroup writes the entry and counts it. The other threads must not count, because the
# warps of a warpgroup share the count: one entry would be counted several times.


def _by_one(threads: int, *lines: str) -> Callable[..., None]:
    registers = (".reg .pred one;", ".reg .b32 thread, count, place, clock;", ".reg .b64 to, time;")
    choose = ("mov.u32 thread, %tid.x;", f"and.b32 thread, thread, {threads - 1};", "setp.eq.u32 one, thread, 0;")
    text = [*registers, *choose, *(f"@one {line}" for line in lines)]
    return lambda _, *operands: atomics.ptx(text, *operands)


def _begin(threads: int) -> Callable[..., None]:
    return _by_one(threads, "st.shared.b32 [$0], 0;")


def _mark(threads: int, capacity: int) -> Callable[..., None]:
    return _by_one(
        threads,
        "mov.u32 clock, %clock;", "mov.u64 time, %globaltimer;",
        "ld.shared.b32 count, [$1];",
        # Behind the header. The last place takes all entries for which there is no room.
        f"min.u32 place, count, {capacity};", f"mad.wide.u32 to, place, {4 * WORDS}, $0;",
        f"st.global.b32 [to+{4 * WORDS}], $2;", f"st.global.b32 [to+{4 * WORDS + 4}], clock;",
        f"st.global.b64 [to+{4 * WORDS + 8}], time;",
        "add.u32 count, count, 1;", "st.shared.b32 [$1], count;",
    )  # fmt: skip


def _end(threads: int) -> Callable[..., None]:
    return _by_one(threads, "ld.shared.b32 count, [$1];", "st.global.b32 [$0], count;")


def unpack(what: int) -> tuple[Work, int, int]:
    """Returns (work, shard, number) of an entry's first word."""
    what &= 0xFFFFFFFF
    work, rest = what & (1 << _WORK_BITS) - 1, what >> _WORK_BITS
    return Work(work), rest & (1 << _SHARD_BITS) - 1, rest >> _SHARD_BITS
