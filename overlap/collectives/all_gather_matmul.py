"""All-gather of the left operand and matmul as one kernel.

Device d of D holds lhs[m_shard, k] and rhs[k, n_shard] and computes gathered(lhs) @ rhs:

    producer     for each output tile, own shard's first, then the peers' in the order d+1, d+2, …:
                     a peer's tile: wait for the flag of its row block; then load from scratch
                     an own tile:   load from lhs
    transport    brings the peers' shards (by pull the scales of their rows as well) into scratch and raises the flags:
                 `pull.py`, `ring.py`
    compute      the mainloop of `overlap.kernels.hopper`

Several right operands share one gather: their tiles lie side by side in the list of tiles (`AllGatherSchedule`).

Constraints: f16, bf16 or f8; rows of all matrices multiples of 16 bytes; devices that can address each other, as
`overlap/primitives/clique.py` finds them. Source: the collective matmul of Wang et al., "Overlap Communication with
Dependent Computation via Decomposition" (ASPLOS 2023), here without its steps.

Shape legend: D: devices; m_shard, k, n_shard: per-shard sizes.
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

from overlap.choice import dispatch
from overlap.collectives import gathered_lhs, joined, reference
from overlap.collectives.axis import require_peers, ring_of, untried
from overlap.collectives.gathered_lhs import Operands, Plan
from overlap.collectives.pull import Pull
from overlap.collectives.ring import Forward
from overlap.collectives.schedule import AllGatherSchedule
from overlap.collectives.transport import Site, Transport, choose_transport
from overlap.frame import sharded
from overlap.frame.linear import tangents_of
from overlap.frame.operation import Operation
from overlap.kernels import arguments, hopper, launch
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.kernels.varying import varying
from overlap.primitives import Ring, shared_flags
from overlap.primitives.integers import ceil_div
from overlap.single_gpu import differentiable, product

NAME = "all_gather_lhs_matmul"
TRANSPORTS: dict[str, Transport] = {"pull": Pull(), "ring": Forward()}


def _kernel(inputs: Any, outputs: Any, *, ring: Ring, schedule: AllGatherSchedule, work: hopper.StreamK,
            plan: Plan) -> None:  # fmt: skip
    """The kernel's body: hooks and buffers for the mainloop.

    `inputs` are `Operands` of references; `outputs`: results, where the peers' shards lie, partial sums and where the
    scales of the peers' rows lie (each a list of one, or empty).
    """
    (lhs_gmem, sides_gmem), (outs_gmem, scratch_gmem, sums_gmem, scales_gmem) = (inputs.lhs, inputs.sides), outputs
    config: Any = plan.config
    num_ctas, me, carrier = work.num_ctas * config.cluster, ring.me(), TRANSPORTS[plan.transport]
    shapes = carrier.flag_shapes(schedule)
    shared = [hopper.partial_sums_flags(work, config)] if work.cuts else []
    all_flags = shared_flags(*shapes, *shared, told=carrier.told)
    flags, sums_flags = all_flags[: len(shapes)], all_flags[len(shapes) :]
    partial = hopper.PartialSums(*sums_gmem, *sums_flags) if work.cuts else None
    site = Site(NAME, ring, schedule, config, work.parts, hopper.cta(config), num_ctas, lhs_gmem, scratch_gmem,
                (inputs.row_scale, *scales_gmem) if scales_gmem else None)  # fmt: skip

    def tile_at(index: Any) -> hopper.Tile:
        step, row, column = schedule.tile(index)
        (batch, row), (side, column) = schedule.batch_of(row), schedule.side_of(column)
        m, n = hopper.own_tile(config, row, column)
        return hopper.Tile(step, m, n, out_row=m * config.tile_m, side=side, batch=batch)

    def load_rows(tile: hopper.Tile, load: Any) -> None:
        pl.when(tile.step == 0)(lambda: load(site.within(lhs_gmem, tile.batch)))
        slot = schedule.slot(me, tile.step)
        pl.when(tile.step > 0)(lambda: load(site.within(scratch_gmem, tile.batch, slot)))

    def out_at(tile: hopper.Tile) -> hopper.OneOf:
        # A dimension of its own for the shards, so that the last rows of one are clipped there.
        shard = schedule.shard(me, tile.step)
        return hopper.OneOf([site.within(out, tile.batch, shard) for out in outs_gmem], tile.side)

    def row_scales(tile: hopper.Tile, first_row: Any, rows: int, shape: tuple[int, ...]) -> jax.Array:
        def spread(vector_gmem: Any) -> jax.Array:
            return hopper.spread(vector_gmem, pl.ds(first_row, rows), shape, 0)

        if not scales_gmem:
            return spread(inputs.row_scale)
        # Those of a peer's rows are here if the rows are, for which the producer has waited. (The second tile of a
        # cluster may lie wholly below the last row, where nothing comes, and takes whatever there is.)
        (of_peers,) = scales_gmem
        return lax.cond(
            jnp.logical_or(tile.step == 0, tile.m >= schedule.row_blocks),
            lambda: spread(inputs.row_scale.at[0]),
            lambda: spread(of_peers.at[tile.step - 1, 0]),
        )

    def epilogue_at(tile: hopper.Tile) -> Any:
        # Both vectors are filled up as the tiles are: by batch element and by right operand.
        # Scales that came by themselves lie in the order of arrival.
        shard = 0 if scales_gmem else schedule.shard(me, tile.step)
        first_row = (shard * schedule.batch + tile.batch) * schedule.filled_rows(config)
        first_column = schedule.first_column(tile.side) * config.cluster_tile[1]

        def epilogue(values: jax.Array, rows: Any, columns: Any, addend: Any) -> jax.Array:
            del addend
            if inputs.row_scale is not None:
                values = values * row_scales(tile, first_row + rows.start, rows.size, values.shape)
            if inputs.column_scales is not None:
                where = pl.ds(first_column + columns.start, columns.size)
                values = values * hopper.spread(inputs.column_scales, where, values.shape, 1)
            return values

        return epilogue

    hooks = hopper.Hooks(
        load_lhs=load_rows,
        rhs_at=lambda tile: hopper.OneOf(sides_gmem, tile.side),
        out_at=out_at,
        epilogue_at=None if inputs.row_scale is None and inputs.column_scales is None else epilogue_at,
    )

    def run(buffers: hopper.Buffers, *smem: Any) -> None:
        hopper.mainloop(
            work=work,
            tile_at=tile_at,
            config=config,
            buffers=buffers,
            partial=partial,
            forms=plan.forms,
            hooks=carrier.hook_in(hooks, site, flags, smem),
        )

    pl.run_scoped(
        run,
        hopper.buffer_types(config, lhs_gmem.dtype, outs_gmem[0].dtype, m=lhs_gmem.shape[-2], forms=plan.forms,
                            rhs_dtype=sides_gmem[0].dtype, forwards=carrier.forwards),
        *carrier.smem_types(schedule, config, lhs_gmem.dtype),
        collective_axes=hopper.THREAD_AXIS,
    )  # fmt: skip


def _filled_rows(row_scale: Any, schedule: AllGatherSchedule, plan: Plan) -> Any:
    """The row scales, each batch element filled up to whole tiles.

    [1, n] of this device's where they travel with the rows; else gathered by XLA: a vector of all shards'.
    """
    if row_scale is None:
        return None
    assert plan.config is not None
    scales = row_scale if schedule.scaled else lax.all_gather(row_scale, plan.ring.axis_name)
    filler = schedule.filled_rows(plan.config) - scales.shape[-1]
    filled = jnp.pad(scales, ((0, 0),) * (scales.ndim - 1) + ((0, filler),))
    return filled.reshape(1, -1) if schedule.scaled else filled.reshape(-1)


def _launch(operands: Operands, plan: Plan) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """Runs the kernel on checked operands: [(batch,) D · m_shard, n] of each right operand, and the gathered one."""
    lhs, devices, config = operands.lhs, plan.ring.size, plan.config
    assert config is not None
    *batch, m_shard, k = lhs.shape
    widths = [side.shape[0 if plan.forms.transpose_rhs else 1] for side in operands.sides]
    schedule = AllGatherSchedule.of(
        devices, m_shard, widths, k, lhs.dtype.itemsize, config, batch=batch[0] if batch else 1,
        keeps_own=plan.returns_gathered,
        scaled=operands.row_scale is not None and TRANSPORTS[plan.transport].brings_scales,
    )  # fmt: skip
    if schedule.batch == 1:
        batch = []
    work = hopper.StreamK(
        schedule.tiles, ceil_div(k, config.tile_k), plan.target.num_cores // config.cluster, config.stream_k
    )
    row_scale = _filled_rows(operands.row_scale, schedule, plan)
    inputs = dataclasses.replace(
        operands, lhs=lhs.reshape(*batch, m_shard, k), row_scale=row_scale,
        column_scales=gathered_lhs.filled_columns(operands.column_scales, config),
    )  # fmt: skip
    out_types = (
        [jax.ShapeDtypeStruct((*batch, devices, m_shard, n), plan.out_dtype) for n in widths],
        jax.ShapeDtypeStruct((*batch, schedule.slots, m_shard, k), lhs.dtype),
        [hopper.partial_sums_type(work, config)] if work.cuts else [],
        [jax.ShapeDtypeStruct((devices - 1, *row_scale.shape), row_scale.dtype)] if schedule.scaled else [],
    )
    body = functools.partial(_kernel, ring=plan.ring, schedule=schedule, work=work, plan=plan)
    outs, scratch, *_ = gathered_lhs.launch(
        body,
        inputs,
        out_types,
        plan,
        f"overlap_{NAME}",
        told=TRANSPORTS[plan.transport].told,
        reads_scales=schedule.scaled,
    )
    rows = (*lhs.shape[:-2], devices * m_shard)
    gathered = scratch.reshape(*rows, k) if plan.returns_gathered else None
    return tuple(out.reshape(*rows, out.shape[-1]) for out in outs), gathered


def _on_one_device(operands: Operands, plan: Plan) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The same where there is nothing to gather: products, the batch folded into the rows."""
    assert plan.config is not None
    lhs, scales = operands.lhs, operands.column_scales or (None,) * len(operands.sides)
    rows = None if operands.row_scale is None else operands.row_scale.reshape(-1)
    of_one = product.Plan(plan.config, plan.target, plan.forms, plan.out_dtype)
    folded = lhs.reshape(-1, lhs.shape[-1])
    outs: list[Any] = [
        differentiable.fused(product.Operands(folded, side, row_scale=rows, column_scale=columns), of_one)
        for side, columns in zip(operands.sides, scales, strict=True)
    ]
    return tuple(out.reshape(*lhs.shape[:-1], -1) for out in outs), lhs if plan.returns_gathered else None


def _run(operands: Operands, plan: Plan) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The kernel for a plan."""
    by = joined.launch if joined.serves(plan) else _launch if plan.ring.size > 1 else _on_one_device
    outs, gathered = by(operands, plan)
    return outs, gathered_lhs.same_on_ring(gathered, operands.lhs, plan.ring)


def _batched(operands: Operands, is_batched: Operands, axis_size: int, plan: Plan) -> Any:
    """`vmap` as the kernel's own batch."""
    if cannot := gathered_lhs.why_not_folded(is_batched, axis_size):
        launch.leave_to_xla(NAME, cannot, insists=plan.insists)
        axes = jax.tree.map(lambda b: 0 if b else None, is_batched)
        by_xla = functools.partial(reference.all_gather_lhs_matmul, plan=plan)
        return jax.vmap(by_xla, in_axes=(axes,), axis_size=axis_size)(operands)
    of_all: Any = _fused(gathered_lhs.fold(operands, is_batched, axis_size), plan)
    batch = operands.lhs.shape[1 if is_batched.lhs else 0 : -2]
    return jax.tree.map(lambda x: x.reshape(axis_size, *batch, *x.shape[-2:]), of_all)


def _derivative(operands: Operands, tangents: Operands, plan: Plan, evaluate: Callable[[], Any]) -> Any:
    # In reverse mode: the transpose, matmul + reduce-scatter, by XLA.
    def backward(operands: Operands, saved: None, cotangents: Any, wanted: Operands) -> Operands:
        del saved  # What was gathered is gathered anew.
        return reference.all_gather_lhs_matmul_backward(operands, plan, cotangents, wanted)

    outs = evaluate()
    by_xla = functools.partial(reference.all_gather_lhs_matmul, plan=plan)
    return outs, tangents_of(outs, operands, tangents, by_xla=by_xla, backward=backward)


_fused = Operation(_run, _batched, _derivative)


def _decide(call: gathered_lhs.Call, ring: Ring, config: Config | None, implementation: str | None, by: str | None,
            mesh: Any = None) -> dispatch.Explanation:  # fmt: skip
    transport = choose_transport(arguments.one_of("transport", by, tuple(TRANSPORTS)))
    carrier = TRANSPORTS[transport[0]]

    def check(config: Config, target: Target) -> None:
        call.check(ring, config, target, forwards=carrier.forwards)
        require_peers(ring, target, mesh)
        if mesh is None:
            call.require_whole()

    problem = call.problem(NAME, ring.size)
    return dispatch.decide(
        NAME, implementation, dispatch.target(mesh), config, check, problem,
        transport=transport if ring.size > 1 else ("", ""), needs_all_ctas=carrier.needs_all_ctas and ring.size > 1,
        untried=untried(ring, mesh),
    )  # fmt: skip


def decide(
    lhs: Any, rhs: Any, axis_name: Any, *, config: Config | None = None, implementation: str | None = None,
    transport: str | None = None, mesh: Any = None, return_gathered: bool = False, **keywords: Any,
) -> dispatch.Explanation:  # fmt: skip
    """Checks a call of `all_gather_lhs_matmul` and says what would run. Same arguments and errors."""
    arguments.flag("return_gathered", return_gathered)  # It changes nothing about the choice.
    ring = ring_of(NAME, arguments.axis_name(axis_name), mesh)
    return _decide(gathered_lhs.normalize(lhs, rhs, **keywords), ring, config, implementation, transport, mesh)


def all_gather_lhs_matmul(
    lhs: jax.Array,
    rhs: Any,
    axis_name: str | tuple[str, ...],
    *,
    lhs_scale: Any = None,
    rhs_scale: Any = None,
    transpose_rhs: bool = False,
    return_gathered: bool = False,
    preferred_element_type: Any = None,
    config: Config | None = None,
    implementation: str | None = None,
    transport: str | None = None,
) -> Any:
    """Gathers `lhs` along a mesh axis and multiplies it by `rhs`, communication hidden behind computation.

    To be called inside `jax.shard_map`; equals `lax.all_gather(lhs, axis_name, axis=-2, tiled=True) @ rhs`. Several
    right operands (Q, K and V; gate and up) share one gather and one kernel.

    Args:
      lhs: [..., m_shard, k] per shard; globally [..., D · m_shard, k], rows sharded over the D devices of `axis_name`.
        In the fused kernel float16, bfloat16, or (with `transpose_rhs`) float8, which then crosses the links as such.
        Where each leading index has few rows, those of all shards are computed as one product (`joined.py`).
      rhs: [k, n_shard] per shard; globally [k, D · n_shard], columns sharded over `axis_name`. Same dtype (float8 kinds
        may be mixed). Or a list or tuple of such matrices, each with its own n_shard; nothing is concatenated.
      axis_name: the mesh axis to gather along, or a tuple of axes, whose devices then count row-major in the order of
        the tuple, as in `PartitionSpec((a, b))`; the mesh may have more axes, and its devices may be in any order.
      lhs_scale: a factor of the product, in float32: [..., m_shard, 1], one value per row of this shard, gathered with
        the rows; or a scalar, which must be the same on all devices of the axis.
      rhs_scale: a factor of the product, in float32: [n_shard] or [1, n_shard], one value per column of this device; or
        a scalar. Several right operands have one scalar, or a list with one such entry for each.
      transpose_rhs: `rhs` lies transposed in memory, [n_shard, k] per shard. It is read as it is.
      return_gathered: whether to return the gathered `lhs` as well.
      preferred_element_type: dtype of the result; that of the operands by default, bfloat16 for float8. Accumulation is
        in float32.
      config: tile sizes of the fused kernel; by default from a table of measurements, else by a model (which sees
        several right operands as one of their total width).
      implementation: "fused" (one kernel; on CPU devices it runs emulated), "xla" (all-gather, then matmul), or None to
        choose: fused where it can serve the call on a GPU and XLA was not measured to be faster. The choice is logged
        once, logger "overlap".
      transport: how the shards travel in the fused kernel; the results are the same bits. "pull", which None means:
        every device reads each peer's shard itself, right where all peers are one hop away, as the GPUs of one host are
        behind its switch. "ring": every device passes the rows that it has multiplied on to the device before it, right
        where only neighbours in the order of `axis_name` have a link, and traffic to the others would share it.

    Returns:
      [..., D · m_shard, n_shard] per shard; globally [..., D · m_shard, D · n_shard], columns sharded. A list or tuple
      of such if `rhs` is one. With `return_gathered` a pair of that and [..., D · m_shard, k], which is the same on all
      devices of the axis and typed so: `out_specs` may leave the axis out. Deterministic: repeated calls give the same
      bits.

    Raises:
      ValueError: not inside `shard_map`, an unknown or repeated axis, wrong ranks, dtypes, sizes or config.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call (the message says why and what
        to do).

    Differentiable to any order, in both modes: all but the result itself runs by XLA. `vmap` over `lhs` and an
    `lhs_scale` of rows becomes a leading dimension, with the configuration of a single element (one of your own is
    tuned as a whole); over anything else XLA runs, or NotImplementedError is raised if implementation="fused".

    Example:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x"),
      ...     mesh=mesh, in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"),
      ... )
      >>> y = jax.jit(layer)(x, w)
      >>> gate, up = overlap.all_gather_lhs_matmul(x_shard, (w_gate, w_up), "x")  # inside such a layer

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    arguments.require_values(lhs=lhs, rhs=rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    return_gathered = arguments.flag("return_gathered", return_gathered)
    ring = ring_of(NAME, arguments.axis_name(axis_name))
    call = gathered_lhs.normalize(
        lhs, rhs, lhs_scale=lhs_scale, rhs_scale=rhs_scale, transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
    )  # fmt: skip
    choice = _decide(call, ring, config, implementation, transport)
    plan = Plan(
        ring, call.forms, call.out_dtype, choice.config, choice.target, return_gathered, choice.transport,
        insists=implementation == "fused",
    )  # fmt: skip
    if choice.config is None:
        return call.restore(*reference.all_gather_lhs_matmul(call.operands, plan))
    operands = dataclasses.replace(call.operands, lhs=varying(call.operands.lhs, ring.names))
    results: Any = sharded.on_the_rest(lambda operands: _fused(operands, plan), operands)
    return call.restore(*results)
