"""The Hopper mainloop: one persistent, warp-specialized matmul with hooks.

Plain `matmul` is this loop without hooks; a fused collective is this loop with a tile order and hooks of its own.

A CTA has three warpgroups. Two *compute* warpgroups hold the two 64-row halves of the accumulator. The third gives up
its registers and is split into warps with roles, each with a long loop of its own:

    producer      for each output tile, for each k: wait until the slot is free, load the operand tiles by TMA
    communicator  a hook's own loop, e.g. pulling the peers' shards
    forwarder     a hook that sees each operand tile while it is in shared memory, e.g. to send it on

They meet at two mbarriers per slot: `full` (the tiles have landed) and `consumed` (nobody reads the slot any more). A
compute warpgroup leaves one wgmma in flight, so it gives back slot k − 1 only after it has issued slot k.

Every role walks the same sequence of tiles, `cta, cta + num_ctas, …`, and counts slots on its own across tiles, so that
the next tile's operands are on their way while this one's accumulator is stored.

Constraints: see `Config.check`. Source: the Mosaic GPU pipelining guide and CUTLASS's cooperative persistent kernel.

Shape legend: m, n, k: global-memory sizes; tile_*: `Config`; `stages` slots.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.config import COMPUTE_WARPGROUPS, SWIZZLE_BYTES, Config
from overlap.primitives import wait_stores_read
from overlap.primitives.integers import remainder

COMPUTE_REGISTERS = 232
TRANSFER_REGISTERS = 40
PRODUCER_WARP, COMMUNICATOR_WARP, FORWARDER_WARP = range(3)
TRANSFER_WARPGROUP = COMPUTE_WARPGROUPS
NUM_THREADS = COMPUTE_WARPGROUPS + 1
GRID_AXIS, THREAD_AXIS = "cta", "warpgroup"


@dataclasses.dataclass(frozen=True)
class Tile:
    """One output tile on its way through the mainloop; all indices are int32 scalars.

    Attributes:
      step: which operand the rows come from, as the tile order numbers them (always 0 in a plain matmul).
      m: tile row within that operand.
      n: tile column.
      out_row: first row of the tile in the output.
    """

    step: Any
    m: Any
    n: Any
    out_row: Any


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Where a fused operation enters the mainloop (the pipeline callbacks).

    Attributes:
      before_load: called by the producer before it loads the operand tiles of a `Tile`: wait for data here.
      load_lhs: called by the producer as `load_lhs(tile, load)`; it calls `load(ref)` with the [m, k] reference that
        holds the tile's rows (under `pl.when` if there are several such).
      communicate: the communicator warp's whole work; called once.
      in_smem: called by the forwarder warp as `in_smem(tile, k, lhs_smem, rhs_smem)` while both operand tiles are in
        shared memory. It must not return before its copies have read them (`wait_stores_read`).
      epilogue: maps the f32 accumulator to the values that are stored; elementwise.
    """

    load_lhs: Callable[[Tile, Callable[[Any], None]], None]
    before_load: Callable[[Tile], None] | None = None
    communicate: Callable[[], None] | None = None
    in_smem: Callable[[Tile, Any, Any, Any], None] | None = None
    epilogue: Callable[[jax.Array], jax.Array] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Buffers:
    """The mainloop's shared memory and barriers."""

    lhs_smem: Any
    rhs_smem: Any
    out_smem: Any
    full: Any
    consumed: Any


def swizzled(dtype: Any) -> tuple[Any, ...]:
    """The layout that wgmma and TMA share: 128-byte rows in blocks of eight, swizzled."""
    return (
        plgpu.TilingTransform((8, SWIZZLE_BYTES // jnp.dtype(dtype).itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(SWIZZLE_BYTES),  # pyright: ignore[reportAbstractUsage]
    )


def buffer_types(config: Config, dtype: Any, out_dtype: Any, *, forwards: bool = False) -> Buffers:
    """Scratch types of `Buffers` for `pl.run_scoped`."""
    wg_tile_m = config.tile_m // COMPUTE_WARPGROUPS
    return Buffers(
        lhs_smem=plgpu.SMEM((config.stages, config.tile_m, config.tile_k), dtype, transforms=swizzled(dtype)),
        rhs_smem=plgpu.SMEM((config.stages, config.tile_k, config.tile_n), dtype, transforms=swizzled(dtype)),
        out_smem=plgpu.SMEM(
            (COMPUTE_WARPGROUPS, config.epilogue_slots, wg_tile_m, config.epilogue_tile_n),
            out_dtype,
            transforms=swizzled(out_dtype),
        ),
        full=plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        consumed=plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS + forwards, num_barriers=config.stages),
    )


def _for_each_tile(cta: Any, num_ctas: int, tiles: int, visit: Callable[[Any, Any], None]) -> None:
    """Calls `visit(tile_index, ordinal)` for this CTA's tiles; `ordinal` counts them from 0."""
    mine = lax.div(jnp.int32(tiles + num_ctas - 1) - cta, jnp.int32(num_ctas))

    @pl.loop(0, mine)
    def _tile(ordinal: Any) -> None:
        visit(cta + ordinal * num_ctas, ordinal)


def _produce(
    tile: Tile, ordinal: Any, *, rhs_gmem: Any, k_steps: int, buffers: Buffers, hooks: Hooks, config: Config
) -> None:
    """The producer's part of one tile."""
    if hooks.before_load is not None:
        hooks.before_load(tile)
    first = ordinal * k_steps
    n_slice = pl.ds(tile.n * config.tile_n, config.tile_n)

    def load(lhs_gmem: Any) -> None:
        m_slice = pl.ds(tile.m * config.tile_m, config.tile_m)

        @pl.loop(0, k_steps)
        def _step(k: Any) -> None:
            slot = remainder(first + k, config.stages)
            k_slice = pl.ds(k * config.tile_k, config.tile_k)

            @pl.when(first + k >= config.stages)
            def _wait_until_free() -> None:
                plgpu.barrier_wait(buffers.consumed.at[slot])

            plgpu.copy_gmem_to_smem(lhs_gmem.at[m_slice, k_slice], buffers.lhs_smem.at[slot], buffers.full.at[slot])
            plgpu.copy_gmem_to_smem(rhs_gmem.at[k_slice, n_slice], buffers.rhs_smem.at[slot], buffers.full.at[slot])

    hooks.load_lhs(tile, load)


def _forward(tile: Tile, ordinal: Any, *, k_steps: int, buffers: Buffers, hooks: Hooks, config: Config) -> None:
    """The forwarder's part of one tile."""
    assert hooks.in_smem is not None

    @pl.loop(0, k_steps)
    def _step(k: Any) -> None:
        slot = remainder(ordinal * k_steps + k, config.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        hooks.in_smem(tile, k, buffers.lhs_smem.at[slot], buffers.rhs_smem.at[slot])  # pyright: ignore[reportOptionalCall]
        plgpu.barrier_arrive(buffers.consumed.at[slot])


def _compute(
    tile: Tile,
    ordinal: Any,
    *,
    warpgroup: Any,
    out_gmem: Any,
    k_steps: int,
    buffers: Buffers,
    hooks: Hooks,
    config: Config,
) -> None:
    """A compute warpgroup's part of one tile: the products, then the stores."""
    wg_tile_m = config.tile_m // COMPUTE_WARPGROUPS
    wg_rows = pl.ds(warpgroup * wg_tile_m, wg_tile_m)
    first = ordinal * k_steps

    def multiply(k: Any, acc: Any) -> None:
        slot = remainder(first + k, config.stages)
        plgpu.barrier_wait(buffers.full.at[slot])
        plgpu.wgmma(acc, buffers.lhs_smem.at[slot, wg_rows], buffers.rhs_smem.at[slot])

    def accumulate(acc: Any) -> jax.Array:
        multiply(0, acc)

        @pl.loop(1, k_steps)
        def _step(k: Any) -> None:
            multiply(k, acc)
            # Invariant: one wgmma, the one just issued, may be in flight; all before it have read their slots.
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(buffers.consumed.at[remainder(first + k - 1, config.stages)])

        return acc[...]  # Waits for the last wgmma.

    values = pl.run_scoped(accumulate, plgpu.WGMMAAccumulatorRef((wg_tile_m, config.tile_n), jnp.float32))
    plgpu.barrier_arrive(buffers.consumed.at[remainder(first + k_steps - 1, config.stages)])
    if hooks.epilogue is not None:
        values = hooks.epilogue(values)
    _store(values.astype(out_gmem.dtype), tile, warpgroup=warpgroup, out_gmem=out_gmem, buffers=buffers, config=config)


def _store(values: jax.Array, tile: Tile, *, warpgroup: Any, out_gmem: Any, buffers: Buffers, config: Config) -> None:
    """Registers → shared memory → output, `epilogue_tile_n` columns at a time."""
    wg_tile_m = config.tile_m // COMPUTE_WARPGROUPS
    rows = pl.ds(tile.out_row + warpgroup * wg_tile_m, wg_tile_m)
    for i in range(config.tile_n // config.epilogue_tile_n):
        out_smem = buffers.out_smem.at[warpgroup, i % config.epilogue_slots]
        # The slot's last store was `epilogue_slots` stores ago, maybe in the tile before.
        wait_stores_read(config.epilogue_slots - 1)
        out_smem[...] = values[:, i * config.epilogue_tile_n : (i + 1) * config.epilogue_tile_n]
        plgpu.commit_smem()
        columns = pl.ds(tile.n * config.tile_n + i * config.epilogue_tile_n, config.epilogue_tile_n)
        plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[rows, columns])


def mainloop(
    rhs_gmem: Any,
    out_gmem: Any,
    *,
    tiles: int,
    tile_at: Callable[[Any], Tile],
    k: int,
    num_ctas: int,
    config: Config,
    buffers: Buffers,
    hooks: Hooks,
) -> None:
    """Runs all roles of this CTA over its share of the output tiles.

    Args:
      rhs_gmem: [k, n].
      out_gmem: [rows, n], written tile by tile.
      tiles: how many output tiles the device computes.
      tile_at: the tile order: from a tile's index to the tile, the same in every role.
      k: the contraction dimension.
      num_ctas: CTAs of the grid.
      config: sizes.
      buffers: allocated from `buffer_types`.
      hooks: where the left operand's rows come from, and what else is to happen.
    """
    warpgroup, cta = lax.axis_index(THREAD_AXIS), lax.axis_index(GRID_AXIS)
    common = dict(k_steps=k // config.tile_k, buffers=buffers, hooks=hooks, config=config)

    def for_each_tile(role: Callable[..., None], **kwargs: Any) -> None:
        _for_each_tile(cta, num_ctas, tiles, lambda i, ordinal: role(tile_at(i), ordinal, **common, **kwargs))

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute_role() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for_each_tile(_compute, warpgroup=warpgroup, out_gmem=out_gmem)
        # Shared memory must outlive the stores that read it.
        wait_stores_read()

    @pl.when(warpgroup == TRANSFER_WARPGROUP)
    def _transfer_role() -> None:
        plgpu.set_max_registers(TRANSFER_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _roles(warp: Any) -> None:
            pl.when(warp == PRODUCER_WARP)(functools.partial(for_each_tile, _produce, rhs_gmem=rhs_gmem))
            if hooks.communicate is not None:
                pl.when(warp == COMMUNICATOR_WARP)(hooks.communicate)
            if hooks.in_smem is not None:
                pl.when(warp == FORWARDER_WARP)(functools.partial(for_each_tile, _forward))


def launch(body: Callable[..., None], *, out_type: Any, num_ctas: int, name: str) -> Callable[..., Any]:
    """A `plgpu.kernel` with the mainloop's grid and threads; `body` receives operand and output references.

    It cannot be batched: `vmap` would add a grid axis, and a persistent kernel with counted flags then hangs.
    """
    body.__name__ = name
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_ctas,),
        grid_names=(GRID_AXIS,),
        num_threads=NUM_THREADS,
        thread_name=THREAD_AXIS,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )

    @jax.custom_batching.custom_vmap
    def run(*operands: jax.Array) -> Any:
        return kernel(*operands)

    @run.def_vmap
    def _refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{name} does not support `jax.vmap` yet: fold the batch into the rows of `lhs`, or use "
            'implementation="xla"'
        )

    return run
