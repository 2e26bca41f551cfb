"""Plans of the kernels for groups of rows, which tests run by themselves."""

from __future__ import annotations

from typing import Any

from overlap import Config
from overlap.choice import dispatch
from overlap.frame.form import Form
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan, Operation
from overlap.kernels.operations import CONTRACTION, GROUPED, OperandLayouts


def plan_of(given: Operands, config: Config, dtype: Any, transpose_rhs: bool = False, gated: Any = None) -> LaunchPlan:
    """The plan of a product of rows; of a contraction, if the right operand is a matrix."""
    contracts = len(given.rhs_list[0].shape) == 2
    form = Form.of(given, OperandLayouts(contracts, transpose_rhs), dtype)
    operation = Operation(CONTRACTION if contracts else GROUPED, combines=gated is not None)
    return LaunchPlan(operation, form, dispatch.target(), config, gated)
