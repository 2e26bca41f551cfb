"""Two kernels that move the rows of an expert layer between the tokens of all devices and the rows of this one.

    copied   rows[positions[t, j]] = gates[t, j] · tokens[t]              for the tokens t of all devices, their slots j
    added    sums[t] = Σ over devices and j of gates[t, j] · rows[positions[t, j]]       for the tokens t of this device

Tokens are taken in chunks, which the running CTAs draw from a counter. A CTA has two warpgroups: one computes, and one
warp of the other talks to the peers. They hand over one chunk at a time; several CTAs run on each core, so that some
wait for memory while others compute.

    copied   transfer   for each chunk that it draws, this device's own first: loads the tokens, here or from a peer
             compute    multiplies each token by its gates, and stores it to the rows of this device that are copies
    added    transfer   for each chunk that it draws, the peers' first: of an own chunk, waits for the peers' sums;
                        of a peer's chunk, raises the peer's flag when the chunk's sums have landed there
             compute    adds the rows of each token in float32; sends the sums of a peer's chunk, rounded, to the peer;
                        adds the peers' sums to those of an own chunk, and stores the result

Each token crosses the wire once in each direction, however many rows it has. There is no array of all devices' tokens,
and rows that are not in use are neither read nor written.

Why this is correct (`overlap/primitives` has the rest of the argument):
- `copied` reads the peers' tokens once all peers have begun, and a peer leaves when all devices have read its tokens.
- `added` writes to a peer once it has begun. Sums have landed before the transfer warp is told; it raises the peer's
  flag with a release at system scope, and the peer's transfer warp acquires the flag before the sums are read. No
  device leaves before it has all its own results, so everything that peers write to its memory has come by then.
- No CTA waits for a CTA that may not have started: chunks of peers come first, and wait for nothing but the peers'
  beginning.

T: tokens of one device. D: devices. k: slots of a token. C: rows. h: features. Own chunks come first or last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import _compat
from overlap.collectives.reduce.blocks_operands import landing_place, lands_in_an_operand
from overlap.kernels.grid import GRID_AXIS, THREAD_AXIS
from overlap.kernels.launch import sealed
from overlap.kernels.target import Target
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    PeerGroup,
    addresses,
    atomics,
    converge_warp,
    draw,
    semaphore_signal_peer,
    shared_semaphores,
    stalls,
    tma_load,
    tma_store,
    wait_stores_landed,
)
from overlap.primitives.host_mesh import ON_HOST_MESHES
from overlap.primitives.integers import in_32_bits, largest_divisor, quotient, remainder
from overlap.primitives.shared_words import load_word
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, SmemRef, Tree

# Features are added in parts of at most so many, so that the sums take few registers; and by all threads of a warpgroup.
_PART, _THREADS = 2048, 128
# The most tokens of a chunk, and the most bytes. Few bytes let several CTAs run on a core.
_CHUNK_TOKENS, _CHUNK_BYTES = 8, 32 << 10
_CTAS_PER_CORE = 4
# The most rows that are loaded ahead, and their bytes.
_RING_ROWS, _RING_BYTES = 8, 32 << 10
_COMPUTE, _TRANSFER = range(2)


@dataclasses.dataclass(frozen=True)
class RowsPlan:
    """The static data of both kernels.

    Attributes:
      tokens: T.
      slots: k.
      rows: C.
      features: h.
      dtype: of tokens, rows and sums.
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
    def part(self) -> int:
        """Features that are added at a time."""
        return _THREADS * largest_divisor(self.features // _THREADS, _PART // _THREADS)

    @property
    def parts(self) -> list[pl.Slice]:
        """The parts of a row."""
        return [pl.ds(first, self.part) for first in range(0, self.features, self.part)]

    @property
    def buffers(self) -> int:
        """Rows that are loaded ahead when rows are added."""
        return max(2, min(_RING_ROWS, _RING_BYTES // (self.features * self.dtype.itemsize)))

    def token(self, chunk: _Chunk, index: Index) -> Index:
        """A token of a chunk, counted over all devices."""
        return chunk.device * self.tokens + chunk.first + index

    def why_not(self) -> str | None:
        """Says why the kernels cannot move such rows; None if they can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"the kernels move rows of bfloat16, float16 or float32, not of {self.dtype}"
        if self.features % _THREADS or not self.features:
            return f"the kernels move rows of a multiple of {_THREADS} features, and there are {self.features}"
        if self.features * self.dtype.itemsize > _CHUNK_BYTES:
            most = _CHUNK_BYTES // self.dtype.itemsize
            return f"the kernels move rows of at most {most} features, and there are {self.features}"
        return None


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A chunk of tokens: the device that owns them, how many positions ahead it is, and its first token there."""

    device: Index
    distance: Index
    first: Index


@dataclasses.dataclass(frozen=True)
class _Roles:
    """What the two roles of a CTA share: the chunks in the order in which they are drawn, and how they are handed over.

    Attributes:
      plan: sizes.
      name: of the kernel, for reports of long waits.
      own_last: whether this device's own chunks come last.
      flags: of the handshake, or one counter if there are no peers.
      number_smem: one word, the number of the chunk.
      posted: the barrier at which the transfer warp arrives when it has written a number.
      done: the barrier at which the compute warpgroup arrives when it has finished with a chunk.
    """

    plan: RowsPlan
    name: str
    own_last: bool
    flags: SemaphoreRef
    number_smem: SmemRef
    posted: SmemRef
    done: SmemRef

    @property
    def _count(self) -> int:
        return self.plan.devices * self.plan.chunks

    @property
    def handshake(self) -> Handshake:
        """The handshake with the peers, if there are any."""
        assert self.plan.group is not None
        return Handshake(self.flags, self.plan.group, lax.axis_index(GRID_AXIS), self.name, self._count)

    def at(self, number: Index) -> _Chunk:
        """Returns a chunk, given its number from 0 on."""
        of_device, group = self.plan.chunks, self.plan.group
        distance = quotient(number, of_device)
        first = (number - distance * of_device) * self.plan.chunk
        if group is None:
            return _Chunk(0, 0, first)
        distance = remainder(distance + 1, group.size) if self.own_last else distance
        return _Chunk(group.peer(distance), distance, first)

    def transfer(
        self, load: Callable[[_Chunk, Index], Index], finish: Callable[[_Chunk], None], before: Callable[[_Chunk], None]
    ) -> None:
        """Runs the transfer warp. For each chunk that it draws:

        calls `before`, hands the chunk over, calls `load`, and calls `finish` when the compute warpgroup has done its
        part. `load` gets the number that it has returned for the chunk before, 0 at first.
        """
        if self.plan.group is None:
            counter, first = self.flags.at[0], 0
            number = draw(counter, self._count)
        else:
            number, counter, first = self.handshake.begin(), self.handshake.counter, self.handshake.looks
        end = first + self._count

        def post(number: Index) -> None:
            self.number_smem[0] = number - first
            plgpu.barrier_arrive(self.posted)

        def turn(state: tuple[Index, Index, Index]) -> tuple[Index, Index, Index]:
            number, count, loads = state
            chunk = self.at(number - first)
            before(chunk)
            post(number)
            loads = load(chunk, loads)
            following = draw(counter, end, number)
            plgpu.barrier_wait(self.done)
            finish(chunk)
            return following, count + 1, loads

        start = (number, jnp.int32(0), jnp.int32(0))
        _, count, _ = atomics.loop_while(lambda state: state[0] < end, turn, start)
        post(end)
        if self.plan.group is not None:
            self.handshake.leave(count)

    def compute(self, do: Callable[[_Chunk, Index], Index]) -> None:
        """Runs the compute warpgroup: calls `do` for each chunk that is handed over, as `load` in `transfer`."""

        def read() -> jax.Array:
            plgpu.barrier_wait(self.posted)
            return load_word(self.number_smem.at[0])

        def turn(state: tuple[Index, Index]) -> tuple[Index, Index]:
            number, loads = state
            loads = do(self.at(number), loads)
            plgpu.barrier_arrive(self.done)
            return read(), loads

        atomics.loop_while(lambda state: state[0] < self._count, turn, (read(), jnp.int32(0)))


@in_32_bits
def _run(
    plan: RowsPlan, name: str, body: Callable[..., None], inputs: list[jax.Array], outs: list[jax.ShapeDtypeStruct],
    peers_read: tuple[int, ...], smem: Sequence[ScratchType],
    otherwise: Callable[..., jax.Array] | None,
) -> list[jax.Array]:  # fmt: skip
    """Launches `body(*refs, flags of shape [D, chunks], flags of the handshake, what `_Roles` needs, chunk, *smem)`."""
    told = peers_read if plan.group is not None else ()
    ctas = min(_CTAS_PER_CORE * plan.target.num_cores, plan.devices * plan.chunks)

    def kernel(*refs: GmemRef) -> None:
        given, scratch = refs[: len(inputs) + len(outs)], refs[len(inputs) + len(outs) :]
        shapes = ((1,),) if plan.group is None else ((plan.devices, plan.chunks), HANDSHAKE_FLAGS)
        flags = shared_semaphores(*shapes, told=bool(told))
        body(*given, flags[0], flags[-1], *scratch)

    kernel.__name__ = name
    params = {"lowering_semantics": plgpu.LoweringSemantics.Warpgroup, "skip_device_barrier": True}
    launched = plgpu.kernel(
        kernel,
        out_type=outs,
        grid=(ctas,),
        grid_names=(GRID_AXIS,),
        num_threads=2,
        thread_name=THREAD_AXIS,
        scratch_types=[
            plgpu.SMEM((1,), jnp.int32),
            *(plgpu.Barrier(num_arrivals=1) for _ in range(2)),
            plgpu.SMEM((plan.chunk, plan.features), plan.dtype),
            *smem,
        ],
        compiler_params=addresses.Params(**params, peers_read=told) if told else plgpu.CompilerParams(**params),
    )
    by_xla = None if otherwise is None else lambda *given: [otherwise(*given)]
    return sealed(launched, name, by_xla, (ON_HOST_MESHES, _compat.WARP_LOOPS))(*inputs)


def _roles(compute: Callable[[], None], transfer: Callable[[], None]) -> None:
    thread = lax.axis_index(THREAD_AXIS)
    pl.when(thread == _COMPUTE)(compute)

    @pl.when(thread == _TRANSFER)
    def _transfer() -> None:
        @plgpu.warp_map
        def _warps(warp: Index) -> None:
            @pl.when(warp == 0)
            def _first() -> None:
                transfer()
                converge_warp()


def _places(plan: RowsPlan, positions_gmem: GmemRef, chunk: _Chunk, index: Index) -> list[Index]:
    """The row of each slot of a chunk's token; those that this device does not have are C."""
    token = plan.token(chunk, index)
    return [positions_gmem[token, slot] for slot in range(plan.slots)]


def copied(plan: RowsPlan, otherwise: Callable[..., jax.Array] | None = None) -> Callable[..., jax.Array]:
    """Returns a function that copies the tokens of all devices, times their gates, to the rows of this device.

    It takes `tokens` [T, h], int32 `positions` [D · T, k] as in `Routing`, and, unless all are 1, `gates`: float32
    [D · T, k], those of all devices. It returns [C, h]. Rows that no position names are undefined.

    Args:
      plan: the static data.
      otherwise: the same by XLA, for a program that XLA's partitioner splits; None: such a program is refused.
    """

    def launch(tokens: jax.Array, positions: jax.Array, *gates: jax.Array) -> jax.Array:
        body = functools.partial(_copied_body, plan, bool(gates))
        rows = jax.ShapeDtypeStruct((plan.rows, plan.features), plan.dtype)
        inputs, barrier = [tokens, positions, *gates], plgpu.Barrier(num_arrivals=1)
        return _run(plan, "overlap_copied_rows", body, inputs, [rows], (0,), [barrier], otherwise)[0]

    return launch


def _copied_body(
    plan: RowsPlan, has_gates: bool, tokens_gmem: GmemRef, positions_gmem: GmemRef, *refs: GmemRef
) -> None:
    gates_gmem, refs = (refs[0], refs[1:]) if has_gates else (None, refs)
    rows_gmem, _, flags, number_smem, posted, done, chunk_smem, loaded = refs
    roles = _Roles(plan, f"rows of {plan.tokens}x{plan.features}", False, flags, number_smem, posted, done)

    def await_peers(chunk: _Chunk) -> None:
        if plan.group is not None:
            pl.when(chunk.distance > 0)(roles.handshake.await_peers)

    def load(chunk: _Chunk, loads: Index) -> Index:
        source = tokens_gmem if plan.group is None else plan.group.remote_ref(tokens_gmem, chunk.device)
        tma_load(source.at[pl.ds(chunk.first, plan.chunk)], chunk_smem, loaded)
        return loads

    def spread(chunk: _Chunk, loads: Index) -> Index:
        plgpu.barrier_wait(loaded)

        @pl.loop(0, plan.chunk)
        def _token(index: jax.Array) -> None:
            token, value = plan.token(chunk, index), chunk_smem[index]
            for slot, place in enumerate(_places(plan, positions_gmem, chunk, index)):
                pl.when(place < plan.rows)(functools.partial(store, token, slot, place, value))

        return loads

    def store(token: Index, slot: int, place: Index, value: jax.Array) -> None:
        gated = value if gates_gmem is None else value.astype(jnp.float32) * gates_gmem[token, slot]
        rows_gmem[place] = gated.astype(plan.dtype)

    _roles(lambda: roles.compute(spread), lambda: roles.transfer(load, lambda chunk: None, await_peers))


def added(plan: RowsPlan, otherwise: Callable[..., jax.Array] | None = None) -> Callable[..., jax.Array]:
    """Returns a function that adds the rows of each token, times their gates, on all devices.

    It takes `rows` [C, h], of which those that no position names may hold anything, and `positions` and `gates` as
    `copied`. It returns the sums of this device's tokens, [T, h]. The arguments are those of `copied`.
    """

    def launch(rows: jax.Array, positions: jax.Array, *gates: jax.Array) -> jax.Array:
        inputs, outs = [rows, positions, *gates], [jax.ShapeDtypeStruct((plan.tokens, plan.features), plan.dtype)]
        landing = jax.ShapeDtypeStruct((plan.devices, plan.tokens, plan.features), plan.dtype)
        is_operand, peers_read = plan.group is not None and lands_in_an_operand(), ()
        if is_operand:
            peers_read, inputs = (len(inputs),), [*inputs, landing_place(landing)]
        elif plan.group is not None:
            outs.append(landing)
        body = functools.partial(_added_body, plan, bool(gates), is_operand)
        ring = plgpu.SMEM((plan.buffers, plan.features), plan.dtype)
        barriers = [plgpu.Barrier(num_arrivals=1, num_barriers=plan.buffers) for _ in range(2)]
        smem = [ring, *barriers]
        return _run(plan, "overlap_added_rows", body, inputs, outs, peers_read, smem, otherwise)[0]

    return launch


def _added_body(
    plan: RowsPlan, has_gates: bool, is_operand: bool, rows_gmem: GmemRef, positions_gmem: GmemRef, *refs: GmemRef
) -> None:
    gates_gmem, refs = (refs[0], refs[1:]) if has_gates else (None, refs)
    landing_gmem, refs = (refs[0], refs[1:]) if is_operand else (None, refs)
    sums_gmem, refs = refs[0], refs[1:]
    group = plan.group
    if group is not None and not is_operand:
        landing_gmem, refs = refs[0], refs[1:]
    arrived, flags, number_smem, posted, done, chunk_smem, ring_smem, loaded, read = refs
    roles = _Roles(plan, f"sums of {plan.tokens}x{plan.features}", True, flags, number_smem, posted, done)

    def flag_of(device: Index, chunk: _Chunk) -> SemaphoreRef:
        return arrived.at[device, quotient(chunk.first, plan.chunk)]

    def await_peers(chunk: _Chunk) -> None:
        if group is None:
            return

        @pl.when(chunk.distance > 0)
        def _to_peer() -> None:
            roles.handshake.await_peers()

        @pl.when(chunk.distance == 0)
        def _own() -> None:
            @pl.loop(1, group.size)
            def _peer(distance: jax.Array) -> None:
                peer = group.peer(distance)
                roles.handshake.wait_for(stalls.TERMS, flag_of(peer, chunk), 1, peer)

    def tell(chunk: _Chunk) -> None:
        if group is not None:
            signal = lambda: semaphore_signal_peer(flag_of(group.me(), chunk), group, chunk.device)  # noqa: E731
            pl.when(chunk.distance > 0)(signal)

    def load(chunk: _Chunk, loads: Index) -> Index:
        """Loads the rows of a chunk's tokens, one after the other. `loads`: how many there were before."""

        def of_token(index: Index, loads: Index) -> Index:
            for place in _places(plan, positions_gmem, chunk, index):

                def of_row(place: Index = place, loads: Index = loads) -> None:
                    buffer = remainder(loads, plan.buffers)
                    pl.when(loads >= plan.buffers)(lambda: plgpu.barrier_wait(read.at[buffer]))
                    tma_load(rows_gmem.at[pl.ds(place, 1)], ring_smem.at[pl.ds(buffer, 1)], loaded.at[buffer])

                pl.when(place < plan.rows)(of_row)
                loads += jnp.where(place < plan.rows, 1, 0)
            return loads

        return lax.fori_loop(0, plan.chunk, of_token, loads)

    def each_sum(chunk: _Chunk, loads: Index, do: Callable[[Index, pl.Slice, jax.Array], None]) -> Index:
        """Adds the rows of each token in the order of its slots. Calls `do` with the token's index and parts of sums."""

        def of_token(index: Index, loads: Index) -> Index:
            totals = tuple(jnp.zeros(plan.part, jnp.float32) for _ in plan.parts)
            for slot, place in enumerate(_places(plan, positions_gmem, chunk, index)):
                gate = None if gates_gmem is None else gates_gmem[plan.token(chunk, index), slot]

                def add(totals: tuple[jax.Array, ...], gate: Index | None = gate, loads: Index = loads) -> Tree:
                    buffer = remainder(loads, plan.buffers)
                    plgpu.barrier_wait(loaded.at[buffer])
                    rows = [ring_smem[buffer, part].astype(jnp.float32) for part in plan.parts]
                    plgpu.barrier_arrive(read.at[buffer])
                    return tuple(a + (b if gate is None else gate * b) for a, b in zip(totals, rows, strict=True))

                totals = lax.cond(place < plan.rows, add, lambda totals: totals, totals)
                loads += jnp.where(place < plan.rows, 1, 0)
            for part, total in zip(plan.parts, totals, strict=True):
                do(index, part, total)
            return loads

        return lax.fori_loop(0, plan.chunk, of_token, loads)

    def send(chunk: _Chunk, loads: Index) -> Index:
        assert group is not None

        def keep(index: Index, part: pl.Slice, total: jax.Array) -> None:
            chunk_smem[index, part] = total.astype(plan.dtype)

        loads = each_sum(chunk, loads, keep)
        plgpu.commit_smem()
        there = group.remote_ref(landing_gmem, chunk.device).at[group.me(), pl.ds(chunk.first, plan.chunk)]
        tma_store(chunk_smem, there)
        wait_stores_landed()
        return loads

    def finish(chunk: _Chunk, loads: Index) -> Index:
        def store(index: Index, part: pl.Slice, total: jax.Array) -> None:
            token = chunk.first + index
            for distance in range(1, plan.devices):
                assert group is not None
                total += landing_gmem[group.peer(distance), token, part].astype(jnp.float32)
            sums_gmem[token, part] = total.astype(plan.dtype)

        return each_sum(chunk, loads, store)

    def compute(chunk: _Chunk, loads: Index) -> Index:
        if group is None:
            return finish(chunk, loads)
        return lax.cond(chunk.distance > 0, functools.partial(send, chunk), functools.partial(finish, chunk), loads)

    _roles(lambda: roles.compute(compute), lambda: roles.transfer(load, tell, await_peers))
