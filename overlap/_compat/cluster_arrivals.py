"""Patch: a single warp (`plgpu.warp_map`) arrives at a `ClusterBarrier`, as a warpgroup can.

Reason: in a cluster the forwarder warp gives a pipeline stage back to both CTAs, which load into each other's shared
memory. Pallas's rule for `plgpu.barrier_arrive` refuses a cluster's barrier in a warp, though an arrival needs only one
thread per CTA of the cluster.

Change: Pallas's rule that lowers `barrier_arrive` for single warps is wrapped. Instead of a cluster's barrier, the rule
gets an object whose `arrive` works in a warp: lane i arrives at CTA i. Same code in jax 0.11.2 and 0.12.0.1.

Replaced by: `CollectiveBarrierRef.arrive` for a warp in jax.
For upstream: docs/upstream.md#arrivals-of-warps-at-cluster-barriers.
"""

from __future__ import annotations

from typing import Any

from overlap._compat.patch import Patch, marked, private


class _OfWarp:
    """Stands in for a cluster's barrier in Pallas's lowering rule for arrivals, and lets one warp arrive.

    It has only what that rule uses: indexing and `arrive`.
    """

    def __init__(self, barrier: Any) -> None:
        self.barrier = barrier

    def __getitem__(self, index: Any) -> _OfWarp:
        return _OfWarp(self.barrier[index])

    def arrive(self, *, orders_tensor_core: bool = False, predicate: Any = None) -> None:
        from jax.experimental.mosaic.gpu import utils
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import arith

        assert not orders_tensor_core and predicate is None
        # After this barrier, each lane's arrival comes after everything that any lane has done before.
        utils.warp_barrier()
        # Lane i arrives at CTA i, if the barrier's mask has that CTA.
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


def _change() -> None:
    of_warps = private("jax._src.pallas.mosaic_gpu.core", "WGxWARP_SEMANTICS")
    rules = private("jax._src.pallas.mosaic_gpu.lowering", "mosaic_lowering_rules")[of_warps]
    primitive = private("jax._src.pallas.mosaic_gpu.primitives", "barrier_arrive_p")
    collective = private("jax.experimental.mosaic.gpu.utils", "CollectiveBarrierRef")

    def make(rule: Any) -> Any:
        def arrive(ctx: Any, barrier: Any, *args: Any, **params: Any) -> Any:
            return rule(ctx, _OfWarp(barrier) if isinstance(barrier, collective) else barrier, *args, **params)

        return arrive

    if not getattr(rules[primitive], "reaches_clusters", False):
        rules[primitive] = marked(rules[primitive], "reaches_clusters", make)


CLUSTER_ARRIVALS = Patch("a single warp arrives at barriers of a cluster", _change)
