"""All-gather of the right operand and matmul as one kernel: the weights are sharded (FSDP), the activations are not.

Device d of D holds its own rows lhs[m, k] and a shard of the weights, and computes lhs @ gathered(rhs). The weights are
cut along n (each shard gives columns of the result) or along k (each shard gives a part of every sum):

    producer       for each output tile, for each k step; at the first step of each block of rows of a peer's shard:
                       wait for the block's flag; then load from scratch
                   along n: tiles of the own shard's columns first, then the peers' in the order d+1, d+2, …
                   along k: every tile needs all shards: it begins with the own one, then d+1, d+2, …
    communicator   for each chunk that it draws, in the order in which tiles need them:
                       peer's rhs → shared memory → scratch; when it has landed, raise the flag of its block
                   before and after that: the handshakes
    compute        the mainloop of `overlap.kernels.hopper`

A wait stands inside the k loop, so that a tile begins as soon as the first rows of its columns are there.

Constraints: f16 or bf16; rows of all matrices, and along k also of one shard's part of lhs, multiples of 16 bytes;
devices that can address each other, as `overlap/primitives/clique.py` finds them. Source: Zhao et al., "PyTorch FSDP"
(VLDB 2023) for the layout; Wang et al. (ASPLOS 2023) for the overlap.

Shape legend: D: devices; m, k, n: sizes of the product of one device; k_shard = k / D or n_shard = n / D.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.choice import dispatch
from overlap.choice.problem import Problem
from overlap.collectives import reference
from overlap.collectives.axis import require_peers, ring_of, untried
from overlap.collectives.reference import Along
from overlap.collectives.rhs_schedule import GatherRhsSchedule
from overlap.frame import sharded
from overlap.frame.linear import tangents_of
from overlap.frame.operation import Operation
from overlap.kernels import arguments, hopper, launch
from overlap.kernels.config import TMA_ROW_BYTES, Config
from overlap.kernels.target import Target
from overlap.kernels.varying import varying
from overlap.primitives import (
    HANDSHAKE_FLAGS,
    Handshake,
    Ring,
    fence_async_proxy,
    pull_chunks,
    shared_flags,
    signal,
    wait_at_least,
)
from overlap.primitives.integers import choose, in_32_bits
from overlap.single_gpu import differentiable, matmul, product

NAME = "all_gather_rhs_matmul"


def check(lhs: Any, rhs: Any, out_dtype: Any, ring: Ring, along: Along, config: Config, target: Target) -> None:
    """Whether the fused kernel can serve a call. Raises as `Config.check` does."""
    (m, k), (k_shard, n) = lhs.shape, rhs.shape
    unit = TMA_ROW_BYTES // jnp.dtype(lhs.dtype).itemsize
    if along == "k" and k_shard % unit and ring.size > 1:
        raise NotImplementedError(
            f"the copy engine needs a shard's part of the rows of lhs to be a multiple of {TMA_ROW_BYTES} bytes, got "
            f"k_shard={k_shard} elements of {jnp.dtype(lhs.dtype).itemsize} bytes: pad k_shard to a multiple of "
            f'{unit}, or use implementation="xla"'
        )
    config.check(m=m, n=n, k=k, dtype=lhs.dtype, out_dtype=out_dtype, target=target, pulls=ring.size > 1)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about the product.

    Attributes:
      ring: along which the right operand is gathered.
      along: in which dimension of the product.
      out_dtype: of the result.
      config: the fused kernel's sizes.
      target: the device.
      insists: whether the caller asked for the fused kernel, so that XLA may not run in its place.
    """

    ring: Ring
    along: Along
    out_dtype: Any
    config: Config
    target: Target
    insists: bool


@dataclasses.dataclass(frozen=True)
class _Tile(hopper.Tile):
    """A tile, and the first k step of it that this CTA carries (not 0 if several CTAs share it)."""

    first: Any = 0


def _pull(number: Any, handshake: Handshake, rhs_gmem: Any, scratch_gmem: Any, flags: Any, slots_smem: Any, loaded: Any,
          ring: Ring, schedule: GatherRhsSchedule) -> Any:  # fmt: skip
    """The transfers of the chunks that this CTA draws, from `number` on; returns how many."""
    return pull_chunks(
        number, (handshake.looks, handshake.items), handshake.counter, schedule.plan,
        at=schedule.chunk,
        source=lambda step, *place: ring.remote(rhs_gmem, ring.peer(step)).at[place],
        destination=lambda step, *place: scratch_gmem.at[(step - 1, *place)],
        landed=lambda *where: signal(flags.at[schedule.flag(*where)]),
        slots_smem=slots_smem, loaded=loaded,
    )  # fmt: skip


def _kernel(lhs_gmem: Any, rhs_gmem: Any, out_gmem: Any, scratch_gmem: Any, *sums_gmem: Any,
            schedule: GatherRhsSchedule, work: hopper.StreamK, plan: Plan) -> None:  # fmt: skip
    """The kernel's body. Along n, `out_gmem` is [m, D, n_shard]; along k, `lhs_gmem` is [m, D, k_shard]."""
    ring, config, chunks, along_k = plan.ring, plan.config, schedule.plan, schedule.along == "k"
    me = ring.me()
    shared = [hopper.partial_sums_flags(work, config)] if work.cuts else []
    flags, handshake_flags, *sums_flags = shared_flags(schedule.flags, HANDSHAKE_FLAGS, *shared, told=True)
    partial = hopper.PartialSums(*sums_gmem, *sums_flags) if work.cuts else None
    group = lax.axis_index(hopper.GRID_AXIS)
    handshake = Handshake(handshake_flags, ring, hopper.cta(config), NAME, schedule.pulls)

    def tile_at(index: Any) -> _Tile:
        step, m, n = schedule.tile(index)
        m, n = hopper.own_tile(config, m, n)
        first = 0
        if work.cuts:
            is_cut = index >= work.full_waves * work.num_ctas
            first = choose(is_cut, work.piece(group, work.full_waves).k_first, 0)
        return _Tile(step, m, n, out_row=m * config.tile_m, first=first)

    def wait_for_block(tile: _Tile, k: Any) -> None:
        """Before the first k step of a block of a peer's shard, or of this CTA's part of the tile."""
        step, row = schedule.rows_of(tile.step, k)
        column, last_column = schedule.columns_of(tile.n)

        def wait(column: Any) -> None:
            wait_at_least(flags.at[schedule.flag(step, row, column)], schedule.flag_target(row, column))

        # The second tile of a cluster may lie wholly beyond the last column; it then waits for nothing.
        needed = jnp.logical_and(step > 0, column < chunks.shard_cols)

        @pl.when(jnp.logical_and(needed, jnp.logical_or(schedule.begins_block(k), k == tile.first)))
        def _wait() -> None:
            wait(column)
            if schedule.straddles:
                wait(last_column)
            fence_async_proxy()

    def load_rows(tile: _Tile, load: Any) -> None:
        def where(k: Any) -> tuple[Any, Any]:
            wait_for_block(tile, k)
            if not along_k:
                return lhs_gmem, k * config.tile_k
            step, row = schedule.rows_of(tile.step, k)
            # A dimension of its own for the shards, so that the last step of one is clipped there, as in `rhs_at`.
            return lhs_gmem.at[:, schedule.shard(me, step)], row

        load(hopper.ByStep(where))

    def rhs_at(tile: _Tile) -> Any:
        def of_step(step: Any) -> Any:
            return hopper.OneOf((rhs_gmem, scratch_gmem.at[jnp.maximum(step - 1, 0)]), (step > 0).astype(jnp.int32))

        def where(k: Any) -> tuple[Any, Any]:
            step, row = schedule.rows_of(tile.step, k)
            return of_step(step), row

        return hopper.ByStep(where) if along_k else of_step(tile.step)

    def run(buffers: hopper.Buffers, slots_smem: Any, loaded: Any) -> None:
        def communicate() -> None:
            number = handshake.begin()
            handshake.await_peers()
            carried = _pull(number, handshake, rhs_gmem, scratch_gmem, flags, slots_smem, loaded, ring, schedule)
            handshake.leave(carried)

        hopper.mainloop(
            work=work,
            tile_at=tile_at,
            config=config,
            buffers=buffers,
            partial=partial,
            hooks=hopper.Hooks(
                load_lhs=load_rows,  # pyright: ignore[reportArgumentType]
                rhs_at=rhs_at,  # pyright: ignore[reportArgumentType]
                # A dimension of its own for the shards, so that the last columns of one are clipped there.
                out_at=lambda tile: out_gmem if along_k else out_gmem.at[:, schedule.shard(me, tile.step)],
                communicate=communicate,
            ),
        )

    pl.run_scoped(
        run,
        hopper.buffer_types(config, lhs_gmem.dtype, out_gmem.dtype, m=out_gmem.shape[0]),
        plgpu.SMEM((config.chunk_slots, chunks.rows, chunks.cols), rhs_gmem.dtype),
        plgpu.Barrier(num_arrivals=1, num_barriers=config.chunk_slots),
        collective_axes=hopper.THREAD_AXIS,
    )


@in_32_bits
def _launch(lhs: jax.Array, rhs: jax.Array, plan: Plan) -> jax.Array:
    """Runs the kernel on checked operands."""
    ring, config, along = plan.ring, plan.config, plan.along
    if ring.size == 1:
        of_one = product.Plan(config, plan.target, hopper.PLAIN, plan.out_dtype)
        return differentiable.fused(product.Operands(lhs, rhs), of_one)
    (m, _), (rows, columns), size = lhs.shape, rhs.shape, ring.size
    schedule = GatherRhsSchedule.of(size, along, m, (rows, columns), rhs.dtype.itemsize, config)
    work = hopper.StreamK(schedule.tiles, schedule.k_steps, plan.target.num_cores // config.cluster, config.stream_k)
    body = functools.partial(_kernel, schedule=schedule, work=work, plan=plan)
    out, *_ = hopper.launch(
        lambda *refs: body(*refs),
        out_type=(
            jax.ShapeDtypeStruct((m, columns) if along == "k" else (m, size, columns), plan.out_dtype),
            jax.ShapeDtypeStruct((schedule.pulled, rows, columns), rhs.dtype),
            *([hopper.partial_sums_type(work, config)] if work.cuts else []),
        ),
        num_ctas=plan.target.num_cores,
        cluster=config.cluster,
        name=f"overlap_{NAME}_{along}",
        peers_read=(1,),
    )(lhs.reshape(m, size, rows) if along == "k" else lhs, rhs)
    return out.reshape(m, -1)


def _batched(operands: Any, is_batched: tuple[bool, bool], axis_size: int, plan: Plan) -> jax.Array:
    """`vmap` over the left operand as more rows of the same product."""
    lhs, rhs = operands
    if is_batched[1] or axis_size < 1:
        over = "`rhs`" if is_batched[1] else "no element at all"
        cannot = f'the fused kernel takes `jax.vmap` over `lhs` only, and not over {over}: use implementation="xla"'
        launch.leave_to_xla(NAME, cannot, insists=plan.insists)
        of_one = functools.partial(
            reference.all_gather_rhs_matmul, axis_name=plan.ring.axis_name, along=plan.along, out_dtype=plan.out_dtype
        )
        return jax.vmap(of_one, tuple(0 if b else None for b in is_batched), axis_size=axis_size)(lhs, rhs)
    out: Any = _fused((lhs.reshape(-1, lhs.shape[-1]), rhs), plan)
    return out.reshape(axis_size, -1, out.shape[-1])


def _derivative(operands: Any, tangents: Any, plan: Plan, evaluate: Callable[[], Any]) -> Any:
    axis_name, along = plan.ring.axis_name, plan.along

    def by_xla(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        return reference.all_gather_rhs_matmul(operands[0], operands[1], axis_name, along, plan.out_dtype)

    def backward(operands: tuple[jax.Array, jax.Array], saved: None, cotangent: jax.Array, wanted: Any) -> Any:
        del saved  # What was gathered is gathered anew.
        lhs, rhs = operands
        return reference.all_gather_rhs_matmul_backward(lhs, rhs, axis_name, along, cotangent, wanted)

    out = evaluate()
    return out, tangents_of(out, operands, tangents, by_xla=by_xla, backward=backward)


_fused = Operation(lambda operands, plan: _launch(operands[0], operands[1], plan), _batched, _derivative)


def _check_call(
    lhs: Any, rhs: Any, devices: int, gather_dimension: Any, preferred_element_type: Any
) -> tuple[Any, Any, Along, jnp.dtype]:
    """Checks the arguments; returns operands, the product's dimension that is gathered, and the output's dtype.

    The left operand comes back as [rows, k], whatever leading dimensions it has.
    """
    dimension = arguments.index(
        "gather_dimension", gather_dimension, (0, 1), "0 (`rhs` is [k / D, n] per shard) or 1 ([k, n / D])"
    )
    along: Along = "k" if dimension == 0 else "n"
    lhs, rhs = arguments.array("lhs", lhs), arguments.array("rhs", rhs)
    for name, array, fits, wanted in (
        ("lhs", lhs, len(lhs.shape) >= 2, "at least 2 dimensions"),
        ("rhs", rhs, len(rhs.shape) == 2, "2 dimensions"),
    ):
        if not fits:
            raise ValueError(
                f"`{name}` must have {wanted}, got {len(array.shape)} (shape {tuple(array.shape)}): reshape it"
            )
    if along == "k" and lhs.shape[-1] != devices * rhs.shape[0]:
        raise ValueError(
            "`lhs` and `rhs` must agree in the contraction dimension once `rhs` is gathered, got "
            f"k={lhs.shape[-1]} in lhs {tuple(lhs.shape)} and k={devices * rhs.shape[0]} from {devices} shards "
            f"{tuple(rhs.shape)} of rhs: is it sharded along n (gather_dimension=1)?"
        )
    gathered = rhs
    if along == "k":
        gathered = jax.ShapeDtypeStruct((devices * rhs.shape[0], rhs.shape[1]), rhs.dtype)
    if len(lhs.shape) > 2:
        rows = math.prod(lhs.shape[:-1]), lhs.shape[-1]
        lhs = arguments.each(lambda lhs: lhs.reshape(rows), lhs)
    return lhs, rhs, along, matmul.check_operands(lhs, gathered, preferred_element_type)


def decide(
    lhs: Any, rhs: Any, axis_name: Any, *, gather_dimension: int, preferred_element_type: Any = None,
    config: Config | None = None, implementation: str | None = None, mesh: Any = None,
) -> dispatch.Explanation:  # fmt: skip
    """Checks a call of `all_gather_rhs_matmul` and says what would run. Same arguments and errors."""
    ring = ring_of(NAME, arguments.axis_name(axis_name), mesh)
    lhs, rhs, along, out_dtype = _check_call(lhs, rhs, ring.size, gather_dimension, preferred_element_type)
    k, n = rhs.shape
    op = f"{NAME}_{along}"
    problem = Problem(op, lhs.shape[0], n, k, lhs.dtype.name, out_dtype.name, devices=ring.size)

    def check_call(config: Config, target: Target) -> None:
        check(lhs, rhs, out_dtype, ring, along, config, target)
        require_peers(ring, target, mesh)
        if mesh is None:
            sharded.require_rest_of_one()
            sharded.require_whole({"lhs": lhs, "rhs": rhs})

    return dispatch.decide(
        NAME, implementation, dispatch.target(mesh), config, check_call, problem, untried=untried(ring, mesh)
    )


def all_gather_rhs_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    axis_name: str | tuple[str, ...],
    *,
    gather_dimension: int,
    preferred_element_type: Any = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Gathers `rhs` along a mesh axis and multiplies `lhs` by it, communication hidden behind computation.

    For fully sharded data parallelism: the weights are sharded over the axis, and each device has rows of its own. To
    be called inside `jax.shard_map`; equals `lhs @ lax.all_gather(rhs, axis_name, axis=gather_dimension, tiled=True)`.

    Args:
      lhs: [..., m, k] per shard; globally [..., D · m, k], say, rows sharded over the D devices of `axis_name`. Leading
        dimensions are more rows. float16 or bfloat16 in the fused kernel.
      rhs: one shard of the [k, n] weights, in the same dtype. With gather_dimension=1 it is [k, n_shard] per shard,
        globally [k, D · n_shard]; with gather_dimension=0 it is [k_shard, n] per shard, globally [D · k_shard, n].
      axis_name: the mesh axis to gather along, or a tuple of axes, whose devices then count row-major in the order of
        the tuple, as in `PartitionSpec((a, b))`; the mesh may have more axes, and its devices may be in any order.
      gather_dimension: the dimension of `rhs` that is sharded: 0 (k) or 1 (n).
      preferred_element_type: dtype of the result; that of the operands by default. Accumulation is in float32.
      config: tile sizes of the fused kernel; by default from a table of measurements, else by a model.
      implementation: "fused" (one kernel; on CPU devices it runs emulated), "xla" (all-gather, then matmul), or None to
        choose: fused where it can serve the call on a GPU and was measured to be no slower than XLA for such sizes. The
        choice is logged once, logger "overlap".

    Returns:
      [..., m, n] per shard, n = D · n_shard with gather_dimension=1; rows sharded as those of `lhs`. Deterministic:
      repeated calls give the same bits. With gather_dimension=0 each device begins its sums with its own shard, so
      equal rows on two devices may differ in the last bit.

    Raises:
      ValueError: not inside `shard_map`, an unknown or repeated axis, wrong ranks, dtypes, sizes, dimension or config.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call (the message says why and what
        to do).

    The kernel keeps the peers' D − 1 shards of the weights in scratch memory of its own.

    Differentiable to any order, in both modes: all but the result itself runs by XLA (the gradient of `rhs` is
    reduce-scattered). `vmap` over `lhs` becomes more rows (with the configuration of a single element); over `rhs` XLA
    runs, or NotImplementedError is raised if implementation="fused".

    Example:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.all_gather_rhs_matmul(x, w, "x", gather_dimension=0),
      ...     mesh=mesh, in_specs=(P("x", None), P("x", None)), out_specs=P("x", None),
      ... )
      >>> y = jax.jit(layer)(x, w)

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023).
    """
    arguments.require_values(lhs=lhs, rhs=rhs)
    choice = decide(
        lhs, rhs, axis_name, gather_dimension=gather_dimension, preferred_element_type=preferred_element_type,
        config=config, implementation=implementation,
    )  # fmt: skip
    ring = ring_of(NAME, axis_name)
    leading = lhs.shape[:-1]
    lhs, rhs, along, out_dtype = _check_call(lhs, rhs, ring.size, gather_dimension, preferred_element_type)
    if choice.config is None:
        out = reference.all_gather_rhs_matmul(lhs, rhs, ring.axis_name, along, out_dtype)
    else:
        plan = Plan(ring, along, out_dtype, choice.config, choice.target, insists=implementation == "fused")
        operands = lhs, varying(rhs, ring.names)
        out = sharded.on_the_rest(lambda operands: _fused(operands, plan), operands)
    return out.reshape(*leading, out.shape[-1])
