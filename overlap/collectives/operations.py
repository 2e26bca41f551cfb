"""The public functions, by name: `explain`, the tuner and `sharded` find an operation here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from overlap.choice.dispatch import Explanation
from overlap.collectives import all_gather_matmul, all_gather_rhs_matmul, matmul_all_reduce, matmul_reduce_scatter
from overlap.frame.call import Prepare
from overlap.single_gpu import matmul


@dataclasses.dataclass(frozen=True)
class Public:
    """A public function, and what the frame needs to know of it.

    Attributes:
      function: the public function.
      prepare: checks its arguments, see `overlap.frame.call`.
      decide: says what a call with these arguments would run.
    """

    function: Callable[..., Any]
    prepare: Prepare
    decide: Callable[..., Explanation]


PUBLIC = {
    "matmul": Public(matmul.matmul, matmul.prepare, matmul.decide),
    **{
        module.NAME: Public(getattr(module, module.NAME), module.prepare, module.decide)
        for module in (all_gather_matmul, all_gather_rhs_matmul, matmul_reduce_scatter, matmul_all_reduce)
    },
}
