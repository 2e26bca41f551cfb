"""An all-gather kernel made of `overlap.primitives`. docs/primitives.md builds it step by step.

[JAX_PLATFORMS=cpu] python examples/all_gather.py [--devices N] [--handshake]

Each device stores its rows into the result of every device. The program runs on GPUs where there are any, else
emulated.
"""

from __future__ import annotations

import functools
import sys

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from on_devices import AXIS, mesh_of, parser, report

from overlap import primitives as prim

CTAS, CHUNK_BYTES = 8, 16384


def send_chunk(chunk, group, x_gmem, out_gmem, chunk_smem, loaded, arrived):
    """Stores one chunk of this device's rows into the result of every device, and tells the peers."""
    rows, chunk_rows, me = x_gmem.shape[0], chunk_smem.shape[0], group.me()
    row = chunk * chunk_rows
    prim.tma_load(x_gmem.at[pl.ds(row, chunk_rows)], chunk_smem, loaded)
    plgpu.barrier_wait(loaded)

    @pl.loop(0, group.size)  # Distance 0 is this device itself.
    def _store(distance):
        there = group.remote_ref(out_gmem, group.peer(distance))
        prim.tma_store(chunk_smem, there.at[pl.ds(me * rows + row, chunk_rows)])

    prim.wait_stores_landed()  # Before peers are told, and before the next chunk overwrites `chunk_smem`.

    @pl.loop(1, group.size)
    def _tell(distance):
        prim.semaphore_signal_peer(arrived.at[me], group, group.peer(distance))


def await_chunks(chunks, group, arrived):
    """Waits until all chunks of all peers have arrived here."""

    @pl.loop(1, group.size)
    def _await(distance):
        peer = group.peer(distance)
        prim.semaphore_wait_peer(arrived.at[peer], chunks, group, peer, operation="all_gather")


def gather(group, chunks, x_gmem, out_gmem, chunk_smem, loaded):
    """The kernel: gathers [rows, columns] of each device into [devices * rows, columns] on all devices."""
    counter, arrived = prim.shared_semaphores((1,), (group.size,))

    def send(chunk):
        send_chunk(chunk, group, x_gmem, out_gmem, chunk_smem, loaded, arrived)

    @plgpu.warp_map
    def _warps(warp):
        @pl.when(warp == 0)
        def _communicate():
            first = prim.draw(counter.at[0], chunks)
            prim.each_drawn(counter.at[0], first, chunks, send)
            await_chunks(chunks, group, arrived)
            prim.converge_warp()


def gather_with_handshake(group, chunks, x_gmem, out_gmem, chunk_smem, loaded):
    """The kernel without Mosaic GPU's barrier before it: the kernel itself waits until its peers have begun."""
    flags, arrived = prim.shared_semaphores(prim.HANDSHAKE_FLAGS, (group.size,))
    handshake = prim.Handshake(flags, group, lax.axis_index("cta"), "all_gather", transfers=chunks)

    def send(item):
        send_chunk(item - handshake.looks, group, x_gmem, out_gmem, chunk_smem, loaded, arrived)

    @plgpu.warp_map
    def _warps(warp):
        @pl.when(warp == 0)
        def _communicate():
            item = handshake.begin()
            handshake.await_peers()
            _, sent = prim.each_drawn(handshake.counter, item, handshake.items, send)
            await_chunks(chunks, group, arrived)
            handshake.leave(sent)
            prim.converge_warp()


def all_gather(x: jax.Array, axis_name: str = "x", *, handshake: bool = False) -> jax.Array:
    """Gathers rows along a mesh axis, inside `jax.shard_map`: [rows, columns] -> [devices * rows, columns]."""
    prim.prepare()
    rows, columns = x.shape
    group = prim.PeerGroup.of(axis_name)
    row_bytes = columns * x.dtype.itemsize
    if row_bytes % 16 or row_bytes > CHUNK_BYTES:
        raise ValueError(f"a row must have a multiple of 16 bytes, at most {CHUNK_BYTES}, got {row_bytes}")
    chunk_rows = max(n for n in range(1, rows + 1) if rows % n == 0 and n * row_bytes <= CHUNK_BYTES)
    chunks = rows // chunk_rows
    return plgpu.kernel(
        functools.partial(gather_with_handshake if handshake else gather, group, chunks),
        out_type=jax.ShapeDtypeStruct((group.size * rows, columns), x.dtype),
        grid=(min(CTAS, chunks),),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((chunk_rows, columns), x.dtype), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(skip_device_barrier=handshake),
        kernel_name="all_gather",
    )(x)


def by_jax(x: jax.Array) -> jax.Array:
    """Gathers the rows by JAX, to compare with."""
    return lax.all_gather(x, AXIS, tiled=True)


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--handshake", action="store_true", help="without the framework's barrier")
    given = arguments.parse_args()
    kernel = functools.partial(all_gather, handshake=given.handshake)
    return report("all_gather", kernel, by_jax, mesh_of(given.devices), (64, 1024))


if __name__ == "__main__":
    sys.exit(main())
