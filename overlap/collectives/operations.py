"""The public functions, by name: the tuner and `sharded` find an operation here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from overlap.collectives.gather import all_gather_lhs_matmul, all_gather_rhs_matmul
from overlap.collectives.reduce import matmul_all_reduce, matmul_reduce_scatter
from overlap.frame.call import Prepare
from overlap.single_gpu import grouped_matmul, matmul


@dataclasses.dataclass(frozen=True)
class Public:
    """A public function.

    Attributes:
      function: the function.
      prepare: checks its arguments, see `overlap.frame.call`.
    """

    function: Callable[..., Any]
    prepare: Prepare


_FUNCTIONS = (
    Public(matmul.matmul, matmul.prepare),
    Public(grouped_matmul.grouped_matmul, grouped_matmul.prepare),
    Public(all_gather_lhs_matmul.all_gather_lhs_matmul, all_gather_lhs_matmul.prepare),
    Public(all_gather_rhs_matmul.all_gather_rhs_matmul, all_gather_rhs_matmul.prepare),
    Public(matmul_reduce_scatter.matmul_reduce_scatter, matmul_reduce_scatter.prepare),
    Public(matmul_all_reduce.matmul_all_reduce, matmul_all_reduce.prepare),
)
PUBLIC = {public.function.__name__: public for public in _FUNCTIONS}
