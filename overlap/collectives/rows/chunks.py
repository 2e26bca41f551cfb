"""How the kernels that move rows are launched: chunks of tokens, which the running CTAs draw, and two roles of a CTA.

A CTA has two warpgroups: one computes, and one warp of the other loads data and talks to the peers. They hand over one
chunk of tokens at a time. Several CTAs run on each core, so that some wait for memory while others compute.

No CTA waits for a CTA that may not have started (`overlap/primitives/handshake.py` says why): chunks are drawn from a
counter, so one running CTA on each device suffices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.kernels.grid import GRID_AXIS, THREAD_AXIS
from overlap.kernels.launch import sealed
from overlap.kernels.target import Target
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    PeerGroup,
    addresses,
    converge_warp,
    draw,
    shared_semaphores,
    tma_load,
)
from overlap.primitives.atomics import loop_while
from overlap.primitives.host_mesh import ON_HOST_MESHES
from overlap.primitives.integers import ceil_div, in_32_bits, largest_divisor, quotient, remainder
from overlap.primitives.shared_words import load_word
from overlap.primitives.types import BarrierRef, GmemRef, Index, ScratchType, SemaphoreRef, SmemRef

# A row is computed with in parts of so many features, by all threads of a warpgroup.
_PARTS = (2048, 1024, 512, 256, 128)
# A row begins at a multiple of so many bytes of shared memory, for the copy engine.
_ROW_BYTES = 128
# The most tokens of a chunk, and the most bytes. Few bytes let several CTAs run on a core. (On two H200s 8192 tokens of
# 2048 bf16 were copied in 116 µs by chunks of 4 tokens and in 126 by chunks of 8; they were added in 129 and 144.)
_CHUNK_TOKENS = 4
_CHUNK_BYTES = 32 << 10
_CTAS_PER_CORE = 4
# The copy engine moves 16 bytes, at least.
_LEAST_WORDS = 4
# The most rows that are loaded ahead, and their bytes.
_BUFFERS, _BUFFER_BYTES = 8, 32 << 10
_COMPUTE, _TRANSFER = range(2)


@dataclasses.dataclass(frozen=True)
class RowsPlan:
    """The static data of a kernel.

    Attributes:
      tokens: T.
      slots: k.
      rows: C.
      features: h.
      dtype: of tokens and rows.
      target: the device.
      group: the devices; None: this one alone.
    """

    tokens: int
    slots: int
    rows: int
    features: int
    dtype: jnp.dtype
    target: Target
    group: PeerGroup | None

    @property
    def devices(self) -> int:
        """D."""
        return 1 if self.group is None else self.group.size

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        most = max(1, min(_CHUNK_TOKENS, _CHUNK_BYTES // (self.features * self.dtype.itemsize)))
        return largest_divisor(self.tokens, most)

    @property
    def chunks(self) -> int:
        """Chunks of one device's tokens."""
        return self.tokens // self.chunk

    @property
    def ctas(self) -> int:
        """CTAs of the grid."""
        return min(_CTAS_PER_CORE * self.target.num_cores, self.devices * self.chunks)

    @property
    def parts(self) -> list[pl.Slice]:
        """The parts of a row. The last one may begin with features that the one before has, too."""
        parts = []
        first = 0
        while (left := self.features - first) >= _PARTS[-1]:
            size = next(size for size in _PARTS if size <= left)
            parts.append(pl.ds(first, size))
            first += size
        return [*parts, pl.ds(self.features - _PARTS[-1], _PARTS[-1])] if left else parts

    @property
    def twice(self) -> int:
        """How many features of the last part the one before has, too."""
        return -self.features % _PARTS[-1]

    @property
    def buffers(self) -> int:
        """Rows that are loaded ahead."""
        return max(2, min(_BUFFERS, _BUFFER_BYTES // (self.features * self.dtype.itemsize)))

    @property
    def words(self) -> int:
        """The words of a chunk's positions, and of its gates: those of its slots, and padding for the copy engine."""
        return self.chunk * self.slots + -self.chunk * self.slots % _LEAST_WORDS

    def token(self, chunk: Chunk, index: Index) -> Index:
        """A token of a chunk, counted over all devices."""
        return chunk.device * self.tokens + chunk.first + index

    def by_chunks(self, of_slots: jax.Array) -> jax.Array:
        """Returns an array [D · T, k] as [D · chunks, words]."""
        rows = of_slots.reshape(-1, self.chunk * self.slots)
        return jnp.pad(rows, ((0, 0), (0, self.words - rows.shape[1])))

    def why_not(self) -> str | None:
        """Says why the kernels cannot move such rows; None if they can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the kernels move rows of bfloat16, float16 or float32, not of {self.dtype}: cast them"
        unit = _ROW_BYTES // self.dtype.itemsize
        least = _PARTS[-1]
        if self.features % unit or self.features < least:
            there_are = f"from {least} on, and there are {self.features}: pad them"
            return f"the kernels move rows of a multiple of {unit} features of {self.dtype}, {there_are}"
        if self.features * self.dtype.itemsize > _CHUNK_BYTES:
            most = _CHUNK_BYTES // self.dtype.itemsize
            there_are = f"and there are {self.features}: split them"
            return f"the kernels move rows of at most {most} features of {self.dtype}, {there_are}"
        return None


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of tokens.

    Attributes:
      device: that owns them.
      distance: how many positions ahead it is.
      first: the first token there.
      buffer: where the positions and gates of its slots are, 0 or 1.
    """

    device: Index
    distance: Index
    first: Index
    buffer: Index


@dataclasses.dataclass(frozen=True)
class Refs:
    """The references of a kernel, and the loops of its two roles.

    Attributes:
      plan: sizes.
      name: of the kernel, for reports of long waits.
      own_later: whether this device's own chunks are drawn after the peers' chunks of the same index (`_own_later`),
        instead of before them.
      inputs: the operands; "positions" and "gates" by chunks (`RowsPlan.by_chunks`).
      outputs: the results.
      arrived: a flag for each device and chunk; only if there are peers.
      flags: of the handshake, or one counter if there are no peers.
      number_smem: one word, the number of the chunk.
      posted: the barrier at which the transfer warp arrives when it has written a number.
      done: the barrier at which the compute warpgroup arrives when it has finished with a chunk.
      slots_smem: the positions and gates of two chunks, by name, [2, 1, words] each.
      known: the barriers of both.
      chunk_smem: [tokens of a chunk, h].
      smem: further shared memory and barriers.
    """

    plan: RowsPlan
    name: str
    own_later: bool
    inputs: Mapping[str, GmemRef]
    outputs: Mapping[str, GmemRef]
    arrived: SemaphoreRef
    flags: SemaphoreRef
    number_smem: SmemRef
    posted: BarrierRef
    done: BarrierRef
    slots_smem: Mapping[str, SmemRef]
    known: BarrierRef
    chunk_smem: SmemRef
    smem: Sequence[SmemRef]

    @property
    def _count(self) -> int:
        return self.plan.devices * self.plan.chunks

    @property
    def handshake(self) -> Handshake:
        """The handshake with the peers, if there are any."""
        assert self.plan.group is not None
        return Handshake(self.flags, self.plan.group, lax.axis_index(GRID_AXIS), self.name, self._count)

    def at(self, number: Index, buffer: Index) -> Chunk:
        """Returns a chunk, given its number from 0 on."""
        group = self.plan.group
        if group is None:
            return Chunk(0, 0, number * self.plan.chunk, buffer)
        if self.own_later:
            index, distance = _own_later(number, self.plan.chunks, group.size, self.plan.ctas)
        else:  # In turn, so that the links are busy all the time.
            index = quotient(number, group.size)
            distance = number - index * group.size
        return Chunk(group.peer(distance), distance, index * self.plan.chunk, buffer)

    def places(self, chunk: Chunk, index: Index) -> list[Index]:
        """The row of each slot of a chunk's token; C where this device has none."""
        words_smem = self.slots_smem["positions"].at[chunk.buffer, 0]
        return [load_word(words_smem.at[index * self.plan.slots + slot]) for slot in range(self.plan.slots)]

    def gate(self, chunk: Chunk, index: Index, slot: int) -> jax.Array | None:
        """The gate of a slot of a chunk's token, in the compute warpgroup; None if all are 1."""
        gates_smem = self.slots_smem.get("gates")
        return None if gates_smem is None else gates_smem[chunk.buffer, 0, index * self.plan.slots + slot]

    def run(
        self,
        compute: Callable[[Chunk, Index], Index],
        load: Callable[[Chunk, Index], Index],
        before: Callable[[Chunk], None],
        finish: Callable[[Chunk], None] = lambda chunk: None,
    ) -> None:
        """Runs both roles.

        For each chunk that it draws, the transfer warp calls `before`, hands the chunk over, calls `load`, and calls
        `finish` when `compute` has returned, which the compute warpgroup calls. `load` and `compute` each get the
        number that they have returned for the chunk before, at first 0.
        """
        thread = lax.axis_index(THREAD_AXIS)
        pl.when(thread == _COMPUTE)(lambda: self._compute(compute))

        @pl.when(thread == _TRANSFER)
        def _transfer() -> None:
            @plgpu.warp_map
            def _warps(warp: Index) -> None:
                @pl.when(warp == 0)
                def _first() -> None:
                    self._transfer(load, before, finish)
                    converge_warp()

    def _transfer(
        self, load: Callable[[Chunk, Index], Index], before: Callable[[Chunk], None], finish: Callable[[Chunk], None]
    ) -> None:
        if self.plan.group is None:
            counter = self.flags.at[0]
            first = 0
            number = draw(counter, self._count)
        else:
            number = self.handshake.begin()
            counter = self.handshake.counter
            first = self.handshake.looks
        end = first + self._count

        def post(number: Index) -> None:
            self.number_smem[0] = number - first
            plgpu.barrier_arrive(self.posted)

        def tell(number: Index, count: Index) -> None:
            """Loads the positions and gates of a chunk, if it is one."""

            @pl.when(number < end)
            def _load() -> None:
                chunk = self.at(number - first, remainder(count, 2))
                row = chunk.device * self.plan.chunks + quotient(chunk.first, self.plan.chunk)
                for name, slots_smem in self.slots_smem.items():
                    tma_load(
                        self.inputs[name].at[pl.ds(row, 1)], slots_smem.at[chunk.buffer], self.known.at[chunk.buffer]
                    )

        def turn(state: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
            number, count, loads = state
            chunk = self.at(number - first, remainder(count, 2))
            before(chunk)
            post(number)
            plgpu.barrier_wait(self.known.at[chunk.buffer])
            loads = load(chunk, loads)
            following = draw(counter, end, number)
            tell(following, count + 1)
            plgpu.barrier_wait(self.done)
            finish(chunk)
            return following, count + 1, loads

        tell(number, 0)
        start = (number, jnp.int32(0), jnp.int32(0))
        _, count, _ = loop_while(lambda state: state[0] < end, turn, start)
        post(end)
        if self.plan.group is not None:
            self.handshake.leave(count)

    def _compute(self, do: Callable[[Chunk, Index], Index]) -> None:
        def read() -> jax.Array:
            plgpu.barrier_wait(self.posted)
            return load_word(self.number_smem.at[0])

        def turn(state: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
            number, count, loads = state
            chunk = self.at(number, remainder(count, 2))
            plgpu.barrier_wait(self.known.at[chunk.buffer])
            loads = do(chunk, loads)
            plgpu.barrier_arrive(self.done)
            return read(), count + 1, loads

        loop_while(lambda state: state[0] < self._count, turn, (read(), jnp.int32(0), jnp.int32(0)))


def _own_later(number: Index, chunks: int, devices: int, ctas: int) -> tuple[Index, Index]:
    """Returns which chunk of the device at which distance comes at a place of the order in which own chunks come later.

    First come chunks of all peers, one for each CTA; then one own chunk and one of each peer in turn, so that the links
    are busy all the time; at the end own chunks. An own chunk comes after the peers' chunks of the same index.
    """
    peers = devices - 1
    lag = min(ceil_div(ctas, peers), chunks)
    after = number - lag * peers
    turn = quotient(jnp.maximum(after, 0), devices)
    in_turn = after - turn * devices
    # Own chunks until the end, from here on.
    rest = after - (chunks - lag) * devices
    of_turn = jnp.where(in_turn > 0, lag + turn, turn), in_turn
    of_start = quotient(number, peers), remainder(number, peers) + 1
    index, distance = (
        jnp.where(after < 0, first, jnp.where(rest < 0, middle, last))
        for first, middle, last in zip(of_start, of_turn, (chunks - lag + rest, 0), strict=True)
    )
    return index, distance


@in_32_bits
def launch(
    plan: RowsPlan,
    name: str,
    body: Callable[[Refs], None],
    inputs: Mapping[str, jax.Array],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    own_later: bool,
    smem: Sequence[ScratchType],
    peers_read: str | None = None,
    otherwise: Callable[[Mapping[str, jax.Array]], Mapping[str, jax.Array]] | None = None,
) -> Mapping[str, jax.Array]:
    """Launches a kernel.

    Args:
      plan: sizes.
      name: of the kernel.
      body: is called with the kernel's references. It calls `Refs.run`.
      inputs: the operands.
      outputs: the types of the results.
      own_later: as in `Refs`.
      smem: types of further shared memory and barriers.
      peers_read: the name of the operand that peers read or write.
      otherwise: computes the results by XLA, for a program that XLA's partitioner splits; None: that is refused.
    """
    slots = [name for name in ("positions", "gates") if name in inputs]
    leaves, structure = jax.tree.flatten(dict(inputs))
    types, out_structure = jax.tree.flatten(dict(outputs))
    told = (sorted(inputs).index(peers_read),) if plan.group is not None and peers_read is not None else ()

    def kernel(*refs: GmemRef) -> None:
        rest = iter(refs)
        given = jax.tree.unflatten(structure, itertools.islice(rest, len(leaves)))
        outs = jax.tree.unflatten(out_structure, itertools.islice(rest, len(types)))
        number, posted, done, known, *more = rest
        slots_smem = dict(zip(slots, more, strict=False))
        chunk_smem, *more = more[len(slots) :]
        flag_shapes = ((1,),) if plan.group is None else ((plan.devices, plan.chunks), HANDSHAKE_FLAGS)
        flags = shared_semaphores(*flag_shapes, told=bool(told))
        title = f"{name.removeprefix('overlap_')} {plan.tokens}x{plan.features}"
        body(Refs(plan, title, own_later, given, outs, flags[0], flags[-1], number, posted, done, slots_smem, known,
                  chunk_smem, more))  # fmt: skip

    kernel.__name__ = name
    params = {"lowering_semantics": plgpu.LoweringSemantics.Warpgroup, "skip_device_barrier": True}
    launched = plgpu.kernel(
        kernel,
        out_type=types,
        grid=(plan.ctas,),
        grid_names=(GRID_AXIS,),
        num_threads=2,
        thread_name=THREAD_AXIS,
        scratch_types=[
            plgpu.SMEM((1,), jnp.int32),
            *(plgpu.Barrier(num_arrivals=1) for _ in range(2)),
            plgpu.Barrier(num_arrivals=len(slots), num_barriers=2),
            *(plgpu.SMEM((2, 1, plan.words), inputs[name].dtype) for name in slots),
            plgpu.SMEM((plan.chunk, plan.features), plan.dtype),
            *smem,
        ],
        compiler_params=addresses.Params(**params, peers_read=told) if told else plgpu.CompilerParams(**params),
    )
    patches = ON_HOST_MESHES, _compat.WARP_LOOPS

    def of_tree(inputs: dict[str, jax.Array]) -> Mapping[str, jax.Array]:
        inputs = inputs | {name: plan.by_chunks(inputs[name]) for name in slots}
        return jax.tree.unflatten(out_structure, launched(*jax.tree.leaves(inputs)))

    return sealed(of_tree, name, otherwise, patches)(dict(inputs))
