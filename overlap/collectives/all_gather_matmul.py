"""All-gather of the left operand and matmul as one kernel.

Device d of D holds lhs[m_shard, k] and rhs[k, n_shard] and computes gathered(lhs) @ rhs:

    producer       for each output tile, own shard's first, then the peers' in the order d+1, d+2, …:
                       a peer's tile: wait for the flag of its row block; then load from scratch
                       an own tile:   load from lhs
    communicator   for each of this CTA's chunks, in the order in which tiles need them:
                       peer's lhs → shared memory → scratch; when it has landed, raise the flag of its row block
                   at the end: the exit handshake
    compute        the mainloop of `overlap.kernels.hopper`

The shards are pulled (read by who needs them), so a flag never crosses NVLink: the only remote signals are the
handshake's. Remote data lands once in local scratch, because reads of a peer are not cached in the local L2.

Constraints: f16 or bf16; rows of all matrices multiples of 16 bytes; a mesh of D devices with ids 0 … D − 1, in any
order, that can all address each other. Source: the collective matmul of Wang et al., "Overlap Communication with
Dependent Computation via Decomposition" (ASPLOS 2023), here without its steps.

Shape legend: D: devices; m_shard, k, n_shard: per-shard sizes; chunk: `PullPlan`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap import tuning
from overlap.collectives import reference
from overlap.collectives.axis import require_all_manual, ring_of
from overlap.collectives.schedule import AllGatherSchedule
from overlap.kernels import differentiable, dispatch, hopper, matmul
from overlap.kernels.config import Config
from overlap.kernels.product import Operands, Plan
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    PullPlan,
    Ring,
    exit_handshake,
    fence_async_proxy,
    pull_chunks,
    shared_flags,
    signal,
    wait_at_least,
)
from overlap.primitives.integers import ceil_div

NAME = "all_gather_lhs_matmul"


def check(lhs: Any, rhs: Any, out_dtype: Any, ring: Ring, config: Config, target: Target) -> None:
    """Whether the fused kernel can serve a call. Raises as `Config.check` does."""
    (m_shard, k), n_shard = lhs.shape, rhs.shape[1]
    config.check(
        m=m_shard, n=n_shard, k=k, dtype=lhs.dtype, out_dtype=out_dtype, target=target, pulls=ring.size > 1,
        m_name="m_shard",
    )  # fmt: skip


def make_schedule(devices: int, m_shard: int, n_shard: int, k: int, itemsize: int, config: Config) -> AllGatherSchedule:
    """The schedule of a problem of the given per-shard sizes."""
    plan = PullPlan.cut(m_shard, k, itemsize, config.tile_m, config.chunk_bytes)
    return AllGatherSchedule(devices, TileOrder.of(m_shard, n_shard, config), config.tile_m, plan)


def _pull(cta: Any, num_ctas: int, lhs_gmem: Any, scratch_gmem: Any, flags: Any, slots_smem: Any, loaded: Any,
          ring: Ring, schedule: AllGatherSchedule) -> None:  # fmt: skip
    """The communicator's transfers: this CTA's share of the chunks."""
    plan = schedule.plan

    def at(ordinal: Any) -> tuple[Any, Any, Any]:
        return schedule.chunk(cta + ordinal * num_ctas)

    def piece(row: Any, column: Any) -> tuple[Any, Any]:
        return pl.ds(row, plan.rows), pl.ds(column, plan.cols)

    def source(ordinal: Any) -> Any:
        step, row, column = at(ordinal)
        return ring.remote(lhs_gmem, ring.peer(step)).at[piece(row, column)]

    def destination(ordinal: Any) -> Any:
        step, row, column = at(ordinal)
        return scratch_gmem.at[(step - 1, *piece(row, column))]

    def landed(ordinal: Any) -> None:
        step, row, _ = at(ordinal)
        signal(flags.at[schedule.flag(step, row)])

    mine = lax.div(jnp.int32(schedule.pulls + num_ctas - 1) - cta, jnp.int32(num_ctas))
    pull_chunks(mine, source=source, destination=destination, landed=landed, slots_smem=slots_smem, loaded=loaded)


def _kernel(lhs_gmem: Any, rhs_gmem: Any, out_gmem: Any, scratch_gmem: Any, *sums_gmem: Any, ring: Ring,
            schedule: AllGatherSchedule, work: hopper.StreamK, config: Config) -> None:  # fmt: skip
    """The kernel's body: hooks and buffers for the mainloop."""
    plan, num_ctas = schedule.plan, work.num_ctas * config.cluster
    me = ring.me()
    shared = [hopper.partial_sums_flags(work, config)] if work.cuts else []
    flags, exit_flags, *sums_flags = shared_flags(schedule.flags, HANDSHAKE_FLAGS, *shared)
    partial = hopper.PartialSums(*sums_gmem, *sums_flags) if work.cuts else None
    cta = hopper.cta(config)

    def tile_at(index: Any) -> hopper.Tile:
        step, m, n = schedule.tile(index)
        m, n = hopper.own_tile(config, m, n)
        return hopper.Tile(step, m, n, out_row=m * config.tile_m)

    def wait_for_rows(tile: hopper.Tile) -> None:
        # The second tile of a cluster may lie wholly below the last row; it then waits for nothing.
        @pl.when(jnp.logical_and(tile.step > 0, tile.m < schedule.row_blocks))
        def _wait() -> None:
            wait_at_least(flags.at[schedule.flag(tile.step, tile.m * config.tile_m)], schedule.flag_target(tile.m))
            fence_async_proxy()

    def load_rows(tile: hopper.Tile, load: Any) -> None:
        pl.when(tile.step == 0)(lambda: load(lhs_gmem))
        pl.when(tile.step > 0)(lambda: load(scratch_gmem.at[tile.step - 1]))

    def run(buffers: hopper.Buffers, slots_smem: Any, loaded: Any) -> None:
        def communicate() -> None:
            _pull(cta, num_ctas, lhs_gmem, scratch_gmem, flags, slots_smem, loaded, ring, schedule)
            exit_handshake(exit_flags, ring, cta, num_ctas)

        hopper.mainloop(
            work=work,
            tile_at=tile_at,
            config=config,
            buffers=buffers,
            partial=partial,
            hooks=hopper.Hooks(
                load_lhs=load_rows,
                rhs_at=lambda tile: rhs_gmem,
                # A dimension of its own for the shards, so that the last rows of one are clipped there.
                out_at=lambda tile: out_gmem.at[schedule.shard(me, tile.step)],
                before_load=wait_for_rows,
                communicate=communicate,
            ),
        )

    pl.run_scoped(
        run,
        hopper.buffer_types(config, lhs_gmem.dtype, out_gmem.dtype),
        plgpu.SMEM((config.chunk_slots, plan.rows, plan.cols), lhs_gmem.dtype),
        plgpu.Barrier(num_arrivals=1, num_barriers=config.chunk_slots),
        collective_axes=hopper.THREAD_AXIS,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _fused(lhs: jax.Array, rhs: jax.Array, ring: Ring, out_dtype: Any, config: Config, target: Target) -> jax.Array:
    if ring.size == 1:
        return differentiable.fused(Operands(lhs, rhs), Plan(config, target, hopper.PLAIN, out_dtype))
    (m_shard, k), n_shard = lhs.shape, rhs.shape[1]
    schedule = make_schedule(ring.size, m_shard, n_shard, k, lhs.dtype.itemsize, config)
    work = hopper.StreamK(
        schedule.tiles, ceil_div(k, config.tile_k), target.num_cores // config.cluster, config.stream_k
    )
    body = functools.partial(_kernel, ring=ring, schedule=schedule, work=work, config=config)
    out, *_ = hopper.launch(
        lambda *refs: body(*refs),
        out_type=(
            jax.ShapeDtypeStruct((ring.size, m_shard, n_shard), out_dtype),
            jax.ShapeDtypeStruct((ring.size - 1, m_shard, k), lhs.dtype),
            *([hopper.partial_sums_type(work, config)] if work.cuts else []),
        ),
        num_ctas=target.num_cores,
        cluster=config.cluster,
        name=f"overlap_{NAME}",
    )(lhs, rhs)
    return out.reshape(ring.size * m_shard, n_shard)


def _fused_forward(lhs: jax.Array, rhs: jax.Array, ring: Ring, out_dtype: Any, config: Config, target: Target) -> Any:
    return _fused(lhs, rhs, ring, out_dtype, config, target), (lhs, rhs)


def _fused_backward(
    ring: Ring, out_dtype: Any, config: Config, target: Target, saved: Any, cotangent: jax.Array
) -> Any:
    del out_dtype, config, target  # The transpose, matmul + reduce-scatter, runs by XLA.
    lhs, rhs = saved
    return reference.all_gather_lhs_matmul_backward(lhs, rhs, ring.axis_name, cotangent)


_fused.defvjp(_fused_forward, _fused_backward)


def _check_matrices(lhs: Any, rhs: Any, preferred_element_type: Any) -> Any:
    out_dtype = matmul.check_operands(lhs, rhs, preferred_element_type)
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if len(array.shape) != 2:
            raise ValueError(f"`{name}` must have 2 dimensions, got {len(array.shape)} (shape {tuple(array.shape)})")
    return out_dtype


def decide(
    lhs: Any, rhs: Any, axis_name: Any, *, preferred_element_type: Any = None, config: Config | None = None,
    implementation: str | None = None, mesh: Any = None,
) -> dispatch.Explanation:  # fmt: skip
    """Checks a call of `all_gather_lhs_matmul` and says what would run. Same arguments and errors."""
    ring = ring_of(NAME, axis_name, mesh)
    out_dtype = _check_matrices(lhs, rhs, preferred_element_type)
    (m_shard, k), n_shard = lhs.shape, rhs.shape[1]
    problem = tuning.Problem(NAME, m_shard, n_shard, k, lhs.dtype.name, out_dtype.name, devices=ring.size)

    def check_call(config: Config, target: Target) -> None:
        check(lhs, rhs, out_dtype, ring, config, target)
        matmul.require_unchecked_vma(lhs, rhs)
        if mesh is None:
            require_all_manual()

    return dispatch.decide(NAME, implementation, dispatch.target(mesh), config, check_call, problem)


def all_gather_lhs_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    preferred_element_type: Any = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Gathers `lhs` along a mesh axis and multiplies it by `rhs`, communication hidden behind computation.

    To be called inside `jax.shard_map`; equals `lax.all_gather(lhs, axis_name, tiled=True) @ rhs`.

    Args:
      lhs: [m_shard, k] per shard; globally [D · m_shard, k], rows sharded over the D devices of `axis_name`. float16 or
        bfloat16 in the fused kernel.
      rhs: [k, n_shard] per shard; globally [k, D · n_shard], columns sharded over `axis_name`. Same dtype.
      axis_name: the mesh axis to gather along, or a tuple of axes, whose devices then count row-major in the order of
        the tuple, as in `PartitionSpec((a, b))`; the mesh may have more axes, and its devices may be in any order.
      preferred_element_type: dtype of the result; that of the operands by default. Accumulation is in float32.
      config: tile sizes of the fused kernel; by default from a table of measurements, else by a model.
      implementation: "fused" (one kernel; on CPU devices it runs emulated), "xla" (all-gather, then matmul), or None to
        choose: fused where it can serve the call on a GPU. The choice is logged once at INFO level, logger "overlap".

    Returns:
      [D · m_shard, n_shard] per shard; globally [D · m_shard, D · n_shard], columns sharded. Deterministic:
      repeated calls give the same bits.

    Raises:
      ValueError: not inside `shard_map`, an unknown or repeated axis, wrong ranks, dtypes, sizes or config.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call (the message says why and what
        to do).

    Differentiable: the backward pass runs by XLA. Under `vmap`, use implementation="xla".

    Example:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x"),
      ...     mesh=mesh, in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"), check_vma=False,
      ... )
      >>> y = jax.jit(layer)(x, w)

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    choice = decide(
        lhs, rhs, axis_name, preferred_element_type=preferred_element_type, config=config, implementation=implementation
    )
    out_dtype = _check_matrices(lhs, rhs, preferred_element_type)
    ring = ring_of(NAME, axis_name)
    if choice.config is None:
        return reference.all_gather_lhs_matmul(lhs, rhs, ring.axis_name, out_dtype)
    return _fused(lhs, rhs, ring, out_dtype, choice.config, choice.target)
