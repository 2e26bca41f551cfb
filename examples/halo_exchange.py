"""A halo exchange and a stencil in one kernel, made of `overlap.primitives`. docs/primitives.md builds it step by step.

[JAX_PLATFORMS=cpu] python examples/halo_exchange.py [--devices N]

The rows of a grid are sharded. Each row becomes a weighted sum of itself and its neighbours. So each device needs the
last rows of the device before it and the first rows of the device after it: its halo. The grid is a ring of rows: the
first row follows the last one. The program runs on GPUs where there are any, else emulated.
"""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from on_devices import AXIS, mesh_of, parser, report

from overlap import primitives as prim

WEIGHTS = (0.1, 0.2, 0.4, 0.2, 0.1)  # Of rows i - 2 to i + 2, for row i. So the halo has two rows on each side.
TILE_ROWS = 8
FROM_BEFORE, FROM_AFTER = 0, 1  # The two parts of the halo, and their flags.


def send_edge(part, group, x_gmem, halo_gmem, edge_smem, edge_loaded, arrived):
    """Sends part 0 or part 1 of the halo.

    Part 0 stores this device's last rows into the next device's halo. Part 1 stores its first rows into the previous
    device's halo.
    """
    halo = edge_smem.shape[0]
    neighbour = jnp.where(part == FROM_BEFORE, group.peer(1), group.peer(group.size - 1))
    first = jnp.where(part == FROM_BEFORE, x_gmem.shape[0] - halo, 0)
    prim.tma_load(x_gmem.at[pl.ds(first, halo)], edge_smem, edge_loaded)
    plgpu.barrier_wait(edge_loaded)
    prim.tma_store(edge_smem, group.remote_ref(halo_gmem, neighbour).at[part])
    prim.wait_stores_landed()
    prim.semaphore_signal_peer(arrived.at[part], group, neighbour)


def load_beside(part, is_inside, row, place_smem, neighbour, group, x_gmem, halo_gmem, loaded, arrived):
    """Loads the rows above or below a tile: from this device's own rows, or from the halo when it has arrived."""
    halo = place_smem.shape[0]

    @pl.when(is_inside)
    def _own_rows():
        prim.tma_load(x_gmem.at[pl.ds(row, halo)], place_smem, loaded)

    @pl.when(jnp.logical_not(is_inside))
    def _halo():
        prim.semaphore_wait_peer(arrived.at[part], 1, group, neighbour, operation="halo_exchange")
        prim.tma_load(halo_gmem.at[part], place_smem, loaded)


def exchange_and_sum(group, weights, x_gmem, out_gmem, halo_gmem, in_smem, out_smem, edge_smem, loaded, edge_loaded):
    """The kernel: one CTA for each tile of `TILE_ROWS` rows, one warpgroup."""
    counter, arrived = prim.shared_semaphores((1,), (2,))
    halo, tiles = len(weights) // 2, x_gmem.shape[0] // TILE_ROWS

    @plgpu.warp_map
    def _send(warp):
        @pl.when(warp == 0)
        def _by_one_warp():
            send = lambda part: send_edge(part, group, x_gmem, halo_gmem, edge_smem, edge_loaded, arrived)  # noqa: E731
            prim.each_drawn(counter.at[0], prim.draw(counter.at[0], 2), 2, send)
            prim.converge_warp()

    # The first and the last tile need the halo. They come last: the halo is sent while the other tiles are computed.
    tile = lax.rem(lax.axis_index("tile") + 1, tiles)
    row = tile * TILE_ROWS
    above, below = in_smem.at[pl.ds(0, halo)], in_smem.at[pl.ds(halo + TILE_ROWS, halo)]
    refs = group, x_gmem, halo_gmem, loaded, arrived
    prim.tma_load(x_gmem.at[pl.ds(row, TILE_ROWS)], in_smem.at[pl.ds(halo, TILE_ROWS)], loaded)
    load_beside(FROM_BEFORE, tile > 0, row - halo, above, group.peer(group.size - 1), *refs)
    load_beside(FROM_AFTER, tile < tiles - 1, row + TILE_ROWS, below, group.peer(1), *refs)
    plgpu.barrier_wait(loaded)
    out_smem[...] = sum(weight * in_smem[pl.ds(i, TILE_ROWS)] for i, weight in enumerate(weights))
    plgpu.commit_smem()
    prim.tma_store(out_smem, out_gmem.at[pl.ds(row, TILE_ROWS)])
    prim.wait_stores_landed()


def stencil(x: jax.Array, axis_name: str = "x", weights: tuple[float, ...] = WEIGHTS) -> jax.Array:
    """Weighted sums of neighbouring rows, inside `jax.shard_map`: float32 [rows, columns] -> [rows, columns]."""
    prim.prepare()
    rows, columns = x.shape
    halo = len(weights) // 2
    if rows % TILE_ROWS or columns % 128:
        raise ValueError(f"the shard must have multiples of {TILE_ROWS} rows and 128 columns, got {x.shape}")
    if len(weights) % 2 == 0 or halo > TILE_ROWS:
        raise ValueError(f"there must be an odd number of weights, at most {2 * TILE_ROWS + 1}, got {len(weights)}")
    halo_type = jax.ShapeDtypeStruct((2, halo, columns), x.dtype)  # A result, since peers can write to results.
    smem = [plgpu.SMEM((n, columns), x.dtype) for n in (TILE_ROWS + 2 * halo, TILE_ROWS, halo)]
    out, _ = plgpu.kernel(
        functools.partial(exchange_and_sum, prim.PeerGroup.of(axis_name), weights),
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype), halo_type),
        grid=(rows // TILE_ROWS,),
        grid_names=("tile",),
        scratch_types=[*smem, plgpu.Barrier(num_arrivals=3), plgpu.Barrier()],
        kernel_name="halo_exchange",
    )(x)
    return out


def by_jax(x: jax.Array) -> jax.Array:
    """Computes the weighted sums by JAX, to compare with."""
    halo, size = len(WEIGHTS) // 2, lax.axis_size(AXIS)
    before = lax.ppermute(x[-halo:], AXIS, [(i, (i + 1) % size) for i in range(size)])
    after = lax.ppermute(x[:halo], AXIS, [((i + 1) % size, i) for i in range(size)])
    rows = jnp.concatenate([before, x, after])
    return sum((w * rows[i : i + x.shape[0]] for i, w in enumerate(WEIGHTS)), jnp.zeros_like(x))


def main() -> int:
    return report("halo_exchange", stencil, by_jax, mesh_of(parser(__doc__).parse_args().devices), (64, 256))


if __name__ == "__main__":
    sys.exit(main())
