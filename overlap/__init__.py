"""Tensor-parallel communication that hides behind the matrix product, for JAX on NVIDIA GPUs.

Importing this touches no device. What is public stands in `__all__`; other modules may change at any time.
"""

from overlap import _version, emulation
from overlap.choice.dispatch import Explanation
from overlap.collectives.all_gather_matmul import all_gather_lhs_matmul
from overlap.collectives.all_gather_rhs_matmul import all_gather_rhs_matmul
from overlap.collectives.explain import explain
from overlap.collectives.matmul_all_reduce import matmul_all_reduce
from overlap.collectives.matmul_reduce_scatter import matmul_reduce_scatter
from overlap.distributed import initialize
from overlap.kernels.config import Config, PullSizes
from overlap.single_gpu.matmul import matmul
from overlap.tuning.autotune import autotune

__version__ = _version.VERSION

__all__ = [
    "Config",
    "Explanation",
    "PullSizes",
    "all_gather_lhs_matmul",
    "all_gather_rhs_matmul",
    "autotune",
    "emulation",
    "explain",
    "initialize",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]


def __dir__() -> list[str]:
    return sorted(__all__)
