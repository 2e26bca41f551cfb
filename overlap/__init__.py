"""Tensor-parallel communication that hides behind the matrix product, for JAX on NVIDIA GPUs.

Importing this touches no device.
"""

from overlap import emulation
from overlap.choice.dispatch import Explanation
from overlap.collectives.all_gather_matmul import all_gather_lhs_matmul
from overlap.collectives.all_gather_rhs_matmul import all_gather_rhs_matmul
from overlap.collectives.explain import explain
from overlap.distributed import initialize
from overlap.kernels.config import Config
from overlap.single_gpu.matmul import matmul
from overlap.tuning.autotune import autotune

__version__ = "0.1.0.dev0"

__all__ = [
    "Config",
    "Explanation",
    "all_gather_lhs_matmul",
    "all_gather_rhs_matmul",
    "autotune",
    "emulation",
    "explain",
    "initialize",
    "matmul",
]
