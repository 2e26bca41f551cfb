"""The kernels that move the rows of an expert layer between the tokens of all devices and the rows of this one.

    copied    rows[positions[t, j]] = gates[t, j] · tokens[t]             for the tokens t of all devices, their slots j
    added     sums[t] = Σ over devices and j of gates[t, j] · rows[positions[t, j]]      for the tokens t of this device
    products  [t, j] = <tokens[t], rows[positions[t, j]]>                 for the tokens t of all devices, their slots j

`chunks.py` has the roles. What they do with a chunk:

    copied    transfer   loads the tokens, here or from a peer
              compute    multiplies each token by its gates, and stores it to the rows of this device that are copies
    added     transfer   of an own chunk, waits for the peers' sums; loads the rows of each token, one after the other;
                         of a peer's chunk, raises the peer's flag when the chunk's sums have landed there
              compute    adds the rows of each token in float32; sends the sums of a peer's chunk, rounded, to the peer;
                         adds the peers' sums to those of an own chunk, and stores the result
    products  transfer   loads the tokens, here or from a peer, and the rows of each token
              compute    multiplies each row by its token, and stores the sum of the products

Each token crosses the wire once in each direction, however many rows it has. There is no array of all devices' tokens,
and rows that are not in use are neither read nor written.

Why this is correct (`overlap/primitives` has the rest of the argument):
- Peers' tokens are read once all peers have begun, and a peer leaves when all devices have read its tokens.
- `added` writes to a peer once it has begun. Sums have landed before the transfer warp is told; it raises the peer's
  flag with a release at system scope, and the peer's transfer warp acquires the flag before the sums are read. No
  device leaves before it has all its own results, so everything that peers write to its memory has come by then.
- In `added`, chunks of peers wait for nothing but the peers' beginning. An own chunk waits for the peers' sums of its
  tokens, which each peer draws at an earlier place of the order than the own chunk has. So of all chunks that are not
  finished, one at the first place does not wait.

T: tokens of one device. D: devices. k: slots of a token. C: rows. h: features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.collectives.rows.chunks import Chunk, Refs, RowsPlan, launch
from overlap.kernels.landing import landing_place, lands_in_an_operand
from overlap.primitives import PeerGroup, semaphore_signal_peer, stalls, tma_load, tma_store, wait_stores_landed
from overlap.primitives.integers import quotient, remainder
from overlap.primitives.types import GmemRef, Index, ScratchType, SemaphoreRef, Tree

type Arrays = Mapping[str, jax.Array]


def copied(inputs: Arrays, plan: RowsPlan, otherwise: Callable[[Arrays], Arrays] | None = None) -> Arrays:
    """Copies the tokens of all devices, times their gates, to the rows of this device.

    Args:
      inputs: "tokens": [T, h]. "positions": int32 [D · T, k], as in `Routing`. Unless all are 1, "gates": float32
        [D · T, k], those of all devices.
      plan: the static data.
      otherwise: the same by XLA, as in `launch`.

    Returns:
      "rows": [C, h]. Rows that no position names are undefined.
    """
    rows = {"rows": jax.ShapeDtypeStruct((plan.rows, plan.features), plan.dtype)}
    return launch(plan, "overlap_copied_rows", _copied_body, inputs, rows, own_later=False,
                  smem=[plgpu.Barrier(num_arrivals=1)], peers_read="tokens", otherwise=otherwise)  # fmt: skip


def _copied_body(refs: Refs) -> None:
    plan = refs.plan
    (loaded,) = refs.smem

    def load(chunk: Chunk, loads: Index) -> Index:
        tma_load(_tokens_of(refs, chunk), refs.chunk_smem, loaded)
        return loads

    def spread(chunk: Chunk, loads: Index) -> Index:
        plgpu.barrier_wait(loaded)

        @pl.loop(0, plan.chunk)
        def _token(index: jax.Array) -> None:
            values = [refs.chunk_smem[index, part] for part in plan.parts]
            for slot, place in enumerate(refs.places(chunk, index)):
                pl.when(place < plan.rows)(functools.partial(store, chunk, index, slot, place, values))

        return loads

    def store(chunk: Chunk, index: Index, slot: int, place: Index, values: list[jax.Array]) -> None:
        gate = refs.gate(chunk, index, slot)
        for part, value in zip(plan.parts, values, strict=True):
            gated = value if gate is None else value.astype(jnp.float32) * gate
            refs.outputs["rows"][place, part] = gated.astype(plan.dtype)

    refs.run(spread, load, functools.partial(_await_peers, refs))


def added(inputs: Arrays, plan: RowsPlan, otherwise: Callable[[Arrays], Arrays] | None = None) -> Arrays:
    """Adds the rows of each token, times their gates, on all devices.

    Args:
      inputs: "rows": [C, h]; those that no position names may hold anything. "positions" and "gates" as in `copied`.
      plan: the static data.
      otherwise: the same by XLA, as in `launch`.

    Returns:
      "sums": [T, h], of this device's tokens.
    """
    outputs = {"sums": jax.ShapeDtypeStruct((plan.tokens, plan.features), plan.dtype)}
    landing = jax.ShapeDtypeStruct((plan.devices, plan.tokens, plan.features), plan.dtype)
    if plan.group is not None and lands_in_an_operand():
        inputs = {**inputs, "landing": landing_place(landing)}
    elif plan.group is not None:
        outputs["landing"] = landing
    peers_read = "landing" if "landing" in inputs else None
    return launch(plan, "overlap_added_rows", _added_body, inputs, outputs, own_later=True, smem=_ring_types(plan),
                  peers_read=peers_read, otherwise=otherwise)  # fmt: skip


def _added_body(refs: Refs) -> None:
    plan = refs.plan
    group = refs.plan.group
    ring = _Ring(refs)
    landing_gmem: GmemRef = {**refs.inputs, **refs.outputs}.get("landing")

    def flag_of(device: Index, chunk: Chunk) -> SemaphoreRef:
        return refs.arrived.at[device, quotient(chunk.first, plan.chunk)]

    def await_sums(chunk: Chunk, group: PeerGroup) -> None:
        @pl.loop(1, group.size)
        def _peer(distance: jax.Array) -> None:
            peer = group.peer(distance)
            refs.handshake.wait_for(stalls.TERMS, flag_of(peer, chunk), 1, peer)

    def await_peers(chunk: Chunk) -> None:
        _await_peers(refs, chunk)
        if group is not None:
            pl.when(chunk.distance == 0)(functools.partial(await_sums, chunk, group))

    def tell(chunk: Chunk) -> None:
        if group is not None:
            flag = flag_of(group.me(), chunk)
            pl.when(chunk.distance > 0)(functools.partial(semaphore_signal_peer, flag, group, chunk.device))

    def each_sum(chunk: Chunk, loads: Index, do: Callable[[Index, pl.Slice, jax.Array], None]) -> Index:
        """Adds the rows of each token in the order of its slots. Calls `do` with the token's index and each part."""

        def add(index: Index, slot: int, totals: Tree, rows: list[jax.Array]) -> Tree:
            gate = refs.gate(chunk, index, slot)
            return tuple(a + (b if gate is None else gate * b) for a, b in zip(totals, rows, strict=True))

        def of_token(index: Index, loads: Index) -> Index:
            totals = tuple(jnp.zeros(part.size, jnp.float32) for part in plan.parts)
            loads, totals = ring.each_row(chunk, index, loads, totals, add)
            for part, total in zip(plan.parts, totals, strict=True):
                do(index, part, total)
            return loads

        return lax.fori_loop(0, plan.chunk, of_token, loads)

    def send(chunk: Chunk, loads: Index) -> Index:
        assert group is not None

        def keep(index: Index, part: pl.Slice, total: jax.Array) -> None:
            refs.chunk_smem[index, part] = total.astype(plan.dtype)

        loads = each_sum(chunk, loads, keep)
        plgpu.commit_smem()
        there = group.remote_ref(landing_gmem, chunk.device).at[group.me(), pl.ds(chunk.first, plan.chunk)]
        tma_store(refs.chunk_smem, there)
        wait_stores_landed()
        return loads

    def finish(chunk: Chunk, loads: Index) -> Index:
        def store(index: Index, part: pl.Slice, total: jax.Array) -> None:
            token = chunk.first + index
            for distance in range(1, plan.devices):
                assert group is not None
                total += landing_gmem[group.peer(distance), token, part].astype(jnp.float32)
            refs.outputs["sums"][token, part] = total.astype(plan.dtype)

        return each_sum(chunk, loads, store)

    def compute(chunk: Chunk, loads: Index) -> Index:
        if group is None:
            return finish(chunk, loads)
        return lax.cond(chunk.distance > 0, functools.partial(send, chunk), functools.partial(finish, chunk), loads)

    refs.run(compute, ring.load, await_peers, tell)


def products(inputs: Arrays, plan: RowsPlan, otherwise: Callable[[Arrays], Arrays] | None = None) -> Arrays:
    """Multiplies each row of this device by the token that it belongs to, and adds the products of its features.

    Args:
      inputs: "tokens", "rows" and "positions", as in `copied` and `added`.
      plan: the static data.
      otherwise: the same by XLA, as in `launch`.

    Returns:
      "products": float32 [D · T, k]; 0 where this device has no row.
    """
    types = {"products": jax.ShapeDtypeStruct((plan.devices * plan.tokens, plan.slots), jnp.float32)}
    smem = [*_ring_types(plan), plgpu.Barrier(num_arrivals=1)]
    return launch(plan, "overlap_products_of_rows", _products_body, inputs, types, own_later=False, smem=smem,
                  peers_read="tokens", otherwise=otherwise)  # fmt: skip


def _products_body(refs: Refs) -> None:
    """Runs both roles. A token's products, one for each slot, are the state of `_Ring.each_row`; 0 without a row."""
    plan = refs.plan
    ring = _Ring(refs)
    *_, loaded = refs.smem

    def load(chunk: Chunk, loads: Index) -> Index:
        tma_load(_tokens_of(refs, chunk), refs.chunk_smem, loaded)
        return ring.load(chunk, loads)

    def multiply(chunk: Chunk, loads: Index) -> Index:
        plgpu.barrier_wait(loaded)

        def product(index: Index, slot: int, sums: Tree, rows: list[jax.Array]) -> Tree:
            token = [refs.chunk_smem[index, part].astype(jnp.float32) for part in plan.parts]
            *others, last = (a * b for a, b in zip(token, rows, strict=True))
            if plan.twice:
                # The last part begins with features that the part before has already: they must count once.
                last = jnp.where(lax.broadcasted_iota(jnp.int32, last.shape, 0) < plan.twice, 0, last)
            # A sum over threads takes long, so parts of one size are added before.
            of_sizes: dict[int, jax.Array] = {}
            for part in (*others, last):
                of_sizes[part.size] = of_sizes[part.size] + part if part.size in of_sizes else part
            total = functools.reduce(jnp.add, (part.sum() for part in of_sizes.values()))
            return (*sums[:slot], total, *sums[slot + 1 :])

        def of_token(index: Index, loads: Index) -> Index:
            loads, sums = ring.each_row(chunk, index, loads, (jnp.float32(0),) * plan.slots, product)
            for slot, value in enumerate(sums):
                refs.outputs["products"][plan.token(chunk, index), slot] = value
            return loads

        return lax.fori_loop(0, plan.chunk, of_token, loads)

    refs.run(multiply, load, functools.partial(_await_peers, refs))


def _await_peers(refs: Refs, chunk: Chunk) -> None:
    """Waits until the peers' memory may be accessed, if a chunk is a peer's."""
    if refs.plan.group is not None:
        pl.when(chunk.distance > 0)(refs.handshake.await_peers)


def _tokens_of(refs: Refs, chunk: Chunk) -> GmemRef:
    tokens = refs.inputs["tokens"]
    group = refs.plan.group
    tokens = tokens if group is None else group.remote_ref(tokens, chunk.device)
    return tokens.at[pl.ds(chunk.first, refs.plan.chunk)]


def _ring_types(plan: RowsPlan) -> list[ScratchType]:
    barriers = (plgpu.Barrier(num_arrivals=1, num_barriers=plan.buffers) for _ in range(2))
    return [plgpu.SMEM((plan.buffers, plan.features), plan.dtype), *barriers]


class _Ring:
    """A ring of buffers for the rows of a chunk's tokens, which both roles visit in one order: by token and slot.

    Each role counts the rows that it has visited (`loads`), which says what buffer is next. A slot that has no row on
    this device has the place `plan.rows`, one behind the last row: both roles pass over it.
    """

    def __init__(self, refs: Refs):
        self.refs = refs
        self.rows_smem, self.loaded, self.read, *_ = refs.smem

    def load(self, chunk: Chunk, loads: Index) -> Index:
        """Loads the rows of a chunk's tokens, in the transfer warp. `loads`: how many there were before."""
        plan = self.refs.plan
        rows_gmem = self.refs.inputs["rows"]

        def of_token(index: Index, loads: Index) -> Index:
            for place in self.refs.places(chunk, index):

                def of_row(place: Index = place, loads: Index = loads) -> None:
                    buffer = remainder(loads, plan.buffers)
                    pl.when(loads >= plan.buffers)(lambda: plgpu.barrier_wait(self.read.at[buffer]))
                    to = self.rows_smem.at[pl.ds(buffer, 1)]
                    tma_load(rows_gmem.at[pl.ds(place, 1)], to, self.loaded.at[buffer])

                pl.when(place < plan.rows)(of_row)
                loads += jnp.where(place < plan.rows, 1, 0)
            return loads

        return lax.fori_loop(0, plan.chunk, of_token, loads)

    def each_row(
        self,
        chunk: Chunk,
        index: Index,
        loads: Index,
        state: Tree,
        use: Callable[[Index, int, Tree, list[jax.Array]], Tree],
    ) -> tuple[Index, Tree]:
        """Calls `use` for each row of a token, in the compute warpgroup, in the order of the token's slots.

        `use(index, slot, state, parts of the row in float32)` returns the state that the next call gets; the first one
        gets `state`. Returns `loads`, with the rows of this token, and the last state.
        """
        plan = self.refs.plan
        for slot, place in enumerate(self.refs.places(chunk, index)):

            def with_row(state: Tree, slot: int = slot, loads: Index = loads) -> Tree:
                buffer = remainder(loads, plan.buffers)
                plgpu.barrier_wait(self.loaded.at[buffer])
                rows = [self.rows_smem[buffer, part].astype(jnp.float32) for part in plan.parts]
                plgpu.barrier_arrive(self.read.at[buffer])
                return use(index, slot, state, rows)

            state = lax.cond(place < plan.rows, with_row, lambda state: state, state)
            loads += jnp.where(place < plan.rows, 1, 0)
        return loads, state
