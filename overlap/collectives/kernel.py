"""What the kernels of all collectives have in common: the checks that peers need, and the products of a call."""

from __future__ import annotations

from overlap.choice.problem import Problem
from overlap.frame import mesh_axes
from overlap.frame.kernel import Kernel
from overlap.frame.operation import Call
from overlap.frame.peers import require_peers
from overlap.kernels.config import Config
from overlap.kernels.operations import Transport
from overlap.kernels.target import Target

XLA = 'use implementation="xla"'


class CollectiveKernel(Kernel):
    """A kernel that communicates."""

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
        for name, x in (*(("lhs", x) for x in operands.lefts), *rights):
            mesh_axes.require_whole({name: x})
