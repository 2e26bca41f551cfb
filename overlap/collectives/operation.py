"""What the operations along a mesh axis have in common, behind `overlap.frame.call.Operation`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from overlap.choice import dispatch
from overlap.collectives.axis import require_peers, untried
from overlap.frame import by_xla, sharded
from overlap.frame.normalize import Call
from overlap.frame.operands import Operands, Plan
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.target import Target
from overlap.kernels.varying import varying
from overlap.primitives import Ring


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation along an axis; those that are written out here may be replaced."""

    ring: Ring

    # A leading dimension of the left operand is one of all rows.
    batch_together = frozenset({"lhs"})

    def circumstances(self, mesh: Any) -> dispatch.Circumstances:
        return dispatch.Circumstances(untried=untried(self.ring, mesh))

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array | None:
        del gathered_lhs, lhs
        return None

    def times(self, lhs: Any, rhs: Any, layouts: OperandLayouts, dtype: Any, plan: Plan) -> jax.Array:
        del plan
        return by_xla.times(lhs, rhs, layouts, dtype)

    def require_served(self, call: Call, target: Target, mesh: Any) -> None:
        """Raises NotImplementedError unless each device holds its operands and can talk to its peers."""
        batch, *_ = call.sizes
        batched = [name for name, rhs in zip(call.names, call.operands.rhs_list, strict=True) if len(rhs.shape) > 2]
        if batched:
            raise NotImplementedError(
                f"the fused kernel takes leading dimensions of `lhs` only, and `{batched[0]}` has {call.batch}: use "
                'implementation="xla"'
            )
        if batch == 0:
            raise NotImplementedError(
                f"the fused kernel needs leading dimensions of at least 1, got {call.batch} in `lhs`: use "
                'implementation="xla"'
            )
        require_peers(self.ring, target, mesh)
        if mesh is None:
            sharded.require_rest_of_one()
            rhs_list = dict(zip(call.names, call.operands.rhs_list, strict=True))
            sharded.require_whole({"lhs": call.operands.lhs} | rhs_list)

    def varying(self, x: Any) -> Any:
        """The same array, typed as varying along the ring."""
        return varying(x, self.ring.names)


def refuse_transposed(name: str, layouts: OperandLayouts, *operands: str) -> None:
    """Raises NotImplementedError if one of these operands is transposed."""
    for operand in operands:
        if getattr(layouts, f"transpose_{operand}"):
            raise NotImplementedError(
                f"the fused kernel of `{name}` takes no `transpose_{operand}` yet: transpose it, or use "
                'implementation="xla"'
            )


def in_travelling_dtype(cotangent: jax.Array, wanted: Any) -> jax.Array:
    """A cotangent in the dtype in which it is summed over devices: 8 bits are too few."""
    return cotangent.astype(wanted if wanted.itemsize > 1 else "bfloat16")


def folded(operands: Operands, *, keep: bool) -> Operands:
    """Operands whose scale of rows has the batch of the left one; `keep` it, or fold it into the rows."""
    lhs, rows = operands.lhs, operands.row_scale
    if rows is not None and rows.ndim < lhs.ndim - 1:
        rows = jax.numpy.broadcast_to(rows, lhs.shape[:-1])
    if not keep:
        lhs, rows = lhs.reshape(-1, lhs.shape[-1]), None if rows is None else rows.reshape(-1)
    return dataclasses.replace(operands, lhs=lhs, row_scale=rows)
