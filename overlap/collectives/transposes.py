"""A gather of the left operand and a sum scattered by rows are transposes: each computes the other's cotangent."""

from __future__ import annotations

from overlap.collectives.gather.operation import AllGatherLhs
from overlap.collectives.reduce.operation import MatmulReduceScatter

_REASON = "as in the forward pass"


def transposed(operation: AllGatherLhs | MatmulReduceScatter) -> AllGatherLhs | MatmulReduceScatter:
    """Returns the operation that computes the cotangent of `lhs`, with the same kind of transport."""
    ring = operation.transport == "ring"
    if isinstance(operation, AllGatherLhs):
        transport = "ring" if ring else "push"
        return MatmulReduceScatter(operation.group, transport=transport, transport_reason=_REASON, transpose=transposed)
    transport = "ring" if ring else "pull"
    return AllGatherLhs(operation.group, _REASON, returns_gathered=True, transport=transport, transpose=transposed)
