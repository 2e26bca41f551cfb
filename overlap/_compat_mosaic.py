"""What Mosaic GPU could do and does not offer: taught to it by changing its modules, each change with its reason.

Nothing else in the library changes modules of jax. What comes from `jax._src` is imported in `overlap/_compat.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from overlap import _compat

__all__ = [
    "let_operands_differ_in_tiles",
    "let_warps_arrive_at_cluster_barriers",
    "let_warps_load_scalars",
    "let_warps_loop",
    "offer_square_mma_tiles",
]


def offer_square_mma_tiles() -> None:
    """Lets wgmma and tcgen05 take operands in tiles of S × S, S: the elements of 128 bytes, besides 8 × S. Idempotent.

    Mosaic GPU's descriptors know these tiles, but its layout inference does not offer them, and its tcgen05 does not
    ask for them. An operand that arrives as several exactly clipped boxes lies in them
    (`overlap/kernels/tma/staging.py`). They are appended to the choices, so that only a buffer which states them has
    them. Same code in jax 0.11.2 and 0.12.0.1; the assembled tests would tell of a change.
    """
    from jax.experimental.mosaic.gpu import (
        constraints,
        dialect,  # pyright: ignore[reportPrivateImportUsage]
        launch_context,
        layout_inference,
        mma_utils,
        utils,
    )
    from jaxlib.mlir import ir

    offered, describe = layout_inference.mma_tiling_constraint, mma_utils.create_descriptor
    if getattr(offered, "offers_square_tiles", False):
        return

    def mma_tiling_constraint(variable: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        constraint: Any = offered(variable, op, *args, **kwargs)
        if not isinstance(op, (dialect.WGMMAOp, dialect.TcGen05MMAOp)):
            return constraint
        side = 128 * 8 // utils.bitwidth(ir.MemRefType(variable.key.value.type).element_type)
        if any(size % side for size in variable.shape):
            return constraint
        square = constraints.SMEMTransforms(launch_context.TileTransform((side, side)), 128)
        return constraints.OneOf(variable, (*constraint.allowed, square))

    def create_descriptor(ref: Any, *args: Any, large_tile: Any = None, **kwargs: Any) -> Any:
        *_, rows, columns = ir.MemRefType(ref.type).shape
        return describe(ref, *args, large_tile=(rows, columns) if rows == columns else large_tile, **kwargs)

    mma_tiling_constraint.offers_square_tiles = True  # pyright: ignore[reportFunctionMemberAccess]
    layout_inference.mma_tiling_constraint = mma_tiling_constraint
    mma_utils.create_descriptor = create_descriptor


def let_operands_differ_in_tiles() -> None:
    """Lets the two operands of a wgmma lie in different tiles, 8 × S and S × S (see above). Idempotent.

    A descriptor says of each operand how it lies; only the layout inference of Mosaic GPU demands that they be equal,
    where their widths, which must be, are checked again when the instruction is made. An operand of which a tile has
    any multiple of 8 rows cannot lie in tiles of S × S. Same code in jax 0.11.2 and 0.12.0.1.
    """
    from jax.experimental.mosaic.gpu import (
        constraints,
        dialect,  # pyright: ignore[reportPrivateImportUsage]
        layout_inference,
    )

    rules = layout_inference._constraint_system_derivation_rules
    rule = rules[dialect.WGMMAOp.OPERATION_NAME]
    if getattr(rule, "operands_may_differ", False):
        return

    def derive(ctx: Any, op: Any) -> Any:
        system, *rest = rule(ctx, op)
        free = []
        for constraint in system.constraints:
            if isinstance(constraint, constraints.Equals):
                left: Any = constraint.lhs
                constraint = layout_inference.mma_tiling_constraint(left, op)
            free.append(constraint)
        return (dataclasses.replace(system, constraints=free), *rest)

    derive.operands_may_differ = True  # pyright: ignore[reportFunctionMemberAccess]
    rules[dialect.WGMMAOp.OPERATION_NAME] = derive


def let_warps_arrive_at_cluster_barriers() -> None:
    """Lets a warp of its own (`plgpu.warp_map`) arrive at a `ClusterBarrier`, as a warpgroup can. Idempotent.

    Mosaic GPU has the arrival of a warpgroup only, though all that it needs is a thread per CTA of the cluster: it
    refuses others in the lowering rule. Same code in jax 0.11.2 and 0.12.0.1; the assembled tests would tell of a
    change.
    """
    from jax.experimental.mosaic.gpu import utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    rules, barrier_arrive = _compat.lowering_rules_of_warps()
    rule = rules[barrier_arrive]
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
    rules[barrier_arrive] = arrive


def let_warps_load_scalars() -> None:
    """Lets a warp of its own (`plgpu.warp_map`) load a scalar from shared memory, as a warpgroup can. Idempotent.

    A warp may store one, and Pallas loads what was there before; only the load is not among the operations that Mosaic
    GPU lists for a warp. Its lowering is the same for any threads. Same in jax 0.11.2 and 0.12.0.1.
    """
    from jax.experimental.mosaic.gpu import dialect_lowering
    from jaxlib.mlir.dialects import memref

    dialect_lowering._supported_warp_lowerings.add(memref.LoadOp.OPERATION_NAME)


def let_warps_loop() -> None:
    """Lets a warp of its own (`plgpu.warp_map`) run a `lax.while_loop` over scalars, as a warpgroup can. Idempotent.

    Mosaic GPU lists the operations that a warp may run, and `scf.while` is not among them; its lowering of one without
    arrays has nothing to do with warpgroups, as those of `scf.for` and `scf.if`, which are. Same in jax 0.11.2 and
    0.12.0.1; the assembled tests would tell of a change.
    """
    from jax.experimental.mosaic.gpu import dialect_lowering
    from jaxlib.mlir.dialects import scf

    dialect_lowering._supported_warp_lowerings.add(scf.WhileOp.OPERATION_NAME)
