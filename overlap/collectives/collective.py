"""What all operations that communicate have in common: a group of devices, and the checks that it needs."""

from __future__ import annotations

import dataclasses

from overlap.choice.problem import Problem
from overlap.frame import mesh_axes
from overlap.frame.operation import Call, Operation
from overlap.frame.peers import require_peers, untried
from overlap.frame.signatures import AxisName
from overlap.kernels.config import Config
from overlap.kernels.operations import Transport
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup
from overlap.primitives.peers import outside_shard_map

XLA = 'use implementation="xla"'


def peer_group_of(op: str, axis_name: AxisName, *, more: str = "") -> PeerGroup:
    """Returns the devices along `axis_name` of the enclosing `jax.shard_map`'s mesh.

    Args:
      op: the operation's name, for messages.
      axis_name: one axis, or a tuple of axes that count as one; a tuple of one axis is that axis.
      more: further arguments that a call needs, for messages.

    Raises:
      ValueError: there is no enclosing `shard_map`, or its mesh lacks one of the axes; or `axis_name` is an empty
        tuple, or names an axis twice.
    """
    if outside := outside_shard_map():
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map`, and {outside}: wrap the call, e.g. "
            f"jax.shard_map(lambda x, w: overlap.{op}(x, w, {axis_name!r}{more}), mesh=mesh, in_specs=…, out_specs=…); "
            "`overlap.explain` takes mesh=…"
        )
    return PeerGroup.of(axis_name, caller=op)


@dataclasses.dataclass(frozen=True)
class Collective(Operation):
    """An operation whose fused kernel communicates.

    Attributes:
      group: the devices.
    """

    group: PeerGroup

    def products(self, call: Call) -> list[tuple[str, Problem, Transport]]:
        """Returns each product of a call: its right operand's name, the problem, and the transport ("": the usual one).

        Raises:
          NotImplementedError: no configuration takes operands of these forms.
        """
        raise NotImplementedError

    def check(self, call: Call, config: Config, target: Target) -> None:
        products = self.products(call)
        operands = call.operands
        rights = [*zip(call.names, operands.rhs_list, strict=True), *(("rhs", x) for x in operands.more_rights)]
        if batched := [name for name, rhs in rights if len(rhs.shape) > 2]:
            raise NotImplementedError(
                f"the fused kernel takes leading dimensions of `lhs` only, and `{batched[0]}` has {call.batch}: {XLA}"
            )
        if call.form.batch == 0:
            raise NotImplementedError(
                f"the fused kernel needs leading dimensions of at least 1, got {call.batch} in `lhs`: {XLA}"
            )
        for name, problem, transport in products:
            try:
                problem.check(config, target, transport)
            except NotImplementedError as cannot:
                raise NotImplementedError(f"{f'`{name}`: ' if call.container else ''}{cannot}") from None
        require_peers(self.group, target)
        mesh_axes.require_no_partitioner_axes()
        for name, x in (*(("lhs", x) for x in call.operands.lefts), *rights):
            mesh_axes.require_whole({name: x})

    def untried(self) -> str | None:
        """Returns the reason not to choose the fused kernel unless the caller asks for it; None: no reason."""
        return untried(self.group)
