"""Every import from `jax._src` and every test of a jax version, each with its reason.

Nothing else in the library imports private names. When a jax release moves one of them, this file alone changes.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

__all__ = [
    "backends_are_initialized",
    "let_warps_arrive_at_cluster_barriers",
    "lower_by_cliques",
    "offer_square_wgmma_tiles",
]


def backends_are_initialized() -> bool:
    """Whether any JAX backend has been started in this process.

    `jax.distributed.initialize` must come before that. There is no public way to ask without starting the backends:
    `jax.extend.backend.backends()` starts them.
    """
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def lower_by_cliques(clique_of: Callable[[Any, frozenset[str]], Any]) -> None:
    """Has Pallas lower each Mosaic GPU kernel for its clique instead of its whole mesh. The first call counts.

    `clique_of(mesh, axes)` is asked for each kernel in a `shard_map` over `mesh` that counts along the axes of the
    names given. It returns what has the fields of `overlap.primitives.clique.Clique`, or None: lower it as jax does.

    There is no other way: neither the devices nor the mesh are known before lowering (one of an abstract mesh is of no
    use), and a nested `shard_map` keeps the whole mesh. Same code in jax 0.11.2 and 0.12.0.1.
    """
    from jax._src.core import NamedAxisEffect
    from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration
    from jaxlib.mlir import ir

    lower = registration.mpmd_map_mgpu_lowering_rule
    if getattr(lower, "lowers_by_cliques", False):
        return
    _let_ranks_count_backwards()

    @functools.wraps(lower)
    def lower_by_clique(ctx: Any, *args: Any, jaxprs: Any, **params: Any) -> Any:
        axis_context = ctx.module_context.axis_context
        mesh = getattr(axis_context, "mesh", None)
        effects = [effect for jaxpr in jaxprs for effect in jaxpr.effects]
        axes = frozenset(str(effect.name) for effect in effects if isinstance(effect, NamedAxisEffect))
        clique = None if mesh is None else clique_of(mesh, axes)
        if clique is None:
            return lower(ctx, *args, jaxprs=jaxprs, **params)
        context = axis_context.__class__(clique.mesh, frozenset(clique.mesh.axis_names))
        token = _counts_backwards.set(clique.is_mirrored)
        try:
            within = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
            outs = lower(within, *args, jaxprs=jaxprs, **params)
        finally:
            _counts_backwards.reset(token)
        if not outs:
            return outs
        call = outs[0].owner
        config = call.attributes["mhlo.backend_config"]
        entries = {entry.name: entry.attr for entry in config}
        if "xla_replica_ids" in entries:
            clique.require_known_ids()
            entries["xla_replica_ids"] = ir.StringAttr.get(",".join(map(str, clique.positions)))
            call.attributes["mhlo.backend_config"] = ir.DictAttr.get(entries)
        elif clique.is_mirrored and clique.mesh.size > 1:
            # Then peers have other numbers, of which XLA knows nothing.
            raise NotImplementedError(
                "kernels on several hosts find their peers by XLA's own table, and NVSHMEM is in its place: uninstall "
                'nvidia-nvshmem, or use implementation="xla"'
            )
        return outs

    lower_by_clique.lowers_by_cliques = True  # pyright: ignore[reportAttributeAccessIssue]
    registration.mpmd_map_mgpu_lowering_rule = lower_by_clique


# Whether the kernel that is being lowered runs in a clique whose ranks run against the positions in its mesh.
_counts_backwards: contextvars.ContextVar[bool] = contextvars.ContextVar("counts_backwards", default=False)


def _let_ranks_count_backwards() -> None:
    """Has Mosaic GPU turn ranks into positions and back where `_counts_backwards`: rank 0 is the last position.

    It takes the two for the same in two places: where a kernel asks who it is, and where it looks up a peer's address.
    """
    from jax.experimental.mosaic.gpu import launch_context, utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    context: Any = launch_context.LaunchContext
    device_id, address_on_peer = context.device_id, context._get_parameter_address_on_peer

    def mirrored(self: Any, number: Any) -> Any:
        return arith.subi(utils.c(self.num_peers - 1, ir.IntegerType.get_signless(32)), number)

    @functools.wraps(device_id)
    def position(self: Any, on_host: bool = False) -> Any:
        rank = device_id(self, on_host)
        if not _counts_backwards.get():
            return rank
        own = mirrored(self, rank)
        # What depends on this is computed again on the host, for TMA descriptors, by calling this function there.
        own.owner.attributes[launch_context.DEVICE_ID_ATTR] = ir.UnitAttr.get()
        return own

    @functools.wraps(address_on_peer)
    def address_at(self: Any, parameter_id: int, peer_id: Any, on_host: bool) -> Any:
        rank = mirrored(self, peer_id) if _counts_backwards.get() else peer_id
        return address_on_peer(self, parameter_id, rank, on_host)

    context.device_id, context._get_parameter_address_on_peer = position, address_at


def offer_square_wgmma_tiles() -> None:
    """Lets wgmma take operands in tiles of S × S, S being the elements of 128 bytes, besides 8 × S. Idempotent.

    Mosaic GPU's wgmma and its descriptors know these tiles, but its layout inference does not offer them. An operand
    that arrives as several exactly clipped boxes lies in them (`overlap/kernels/staging.py`). They are appended to the
    choices, so that only a buffer which states them has them. Same code in jax 0.11.2 and 0.12.0.1; the assembled tests
    would tell of a change.
    """
    from jax._src.lib import mosaic_gpu_dialect as dialect  # pyright: ignore[reportPrivateImportUsage]
    from jax.experimental.mosaic.gpu import constraints, launch_context, layout_inference, utils
    from jaxlib.mlir import ir

    offered = layout_inference.mma_tiling_constraint
    if getattr(offered, "offers_square_tiles", False):
        return

    def mma_tiling_constraint(variable: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        constraint: Any = offered(variable, op, *args, **kwargs)
        if not isinstance(op, dialect.WGMMAOp):
            return constraint
        side = 128 * 8 // utils.bitwidth(ir.MemRefType(variable.key.value.type).element_type)
        if any(size % side for size in variable.shape):
            return constraint
        square = constraints.SMEMTransforms(launch_context.TileTransform((side, side)), 128)
        return constraints.OneOf(variable, (*constraint.allowed, square))

    mma_tiling_constraint.offers_square_tiles = True  # pyright: ignore[reportFunctionMemberAccess]
    layout_inference.mma_tiling_constraint = mma_tiling_constraint


def let_warps_arrive_at_cluster_barriers() -> None:
    """Lets a warp of its own (`plgpu.warp_map`) arrive at a `ClusterBarrier`, as a warpgroup can. Idempotent.

    Mosaic GPU has the arrival of a warpgroup only, though all that it needs is a thread per CTA of the cluster: it
    refuses others in the lowering rule. Same code in jax 0.11.2 and 0.12.0.1; the assembled tests would tell of a
    change.
    """
    from jax._src.pallas.mosaic_gpu import core, lowering, primitives
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    rules: Any = lowering.mosaic_lowering_rules[core.WGxWARP_SEMANTICS]
    rule = rules[primitives.barrier_arrive_p]
    if getattr(rule, "reaches_clusters", False):
        return

    class OfWarp:
        """A cluster barrier to the rule, which only indexes it and arrives."""

        def __init__(self, barrier: Any) -> None:
            self.barrier = barrier

        def __getitem__(self, index: Any) -> OfWarp:
            return OfWarp(self.barrier[index])

        def arrive(self, *, orders_tensor_core: bool = False, predicate: Any = None) -> None:
            assert not orders_tensor_core and predicate is None
            # What any lane has done comes before the arrival of each.
            utils.warp_barrier()
            # Lane i arrives at CTA i, where that is one of those in question.
            constant = lambda value: utils.c(value, ir.IntegerType.get_signless(32))  # noqa: E731
            lane = arith.remui(utils.thread_idx(), constant(utils.WARP_SIZE))
            bit = arith.andi(arith.shrui(self.barrier.cluster_mask, lane), constant(1))
            utils.inline_ptx(
                """
                {
                    .reg .b32 there;
                    @$0 mapa.shared::cluster.u32 there, $1, $2;
                    @$0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];
                }
                """,
                arith.cmpi(arith.CmpIPredicate.ne, bit, constant(0)),
                self.barrier.barrier.get_ptr(),
                lane,
                has_side_effects=True,
            )

    def arrive(ctx: Any, barrier: Any, *args: Any, **params: Any) -> Any:
        of_warp = OfWarp(barrier) if isinstance(barrier, utils.CollectiveBarrierRef) else barrier
        return rule(ctx, of_warp, *args, **params)

    arrive.reaches_clusters = True  # pyright: ignore[reportFunctionMemberAccess]
    rules[primitives.barrier_arrive_p] = arrive
