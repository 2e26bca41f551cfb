"""Tensor-parallel communication that hides behind the matrix product, for JAX on NVIDIA GPUs.

Importing this package touches no device. The public names are listed in `__all__`; everything else may change at any
time. A public name is loaded at its first use, and jax with it. So `python -m overlap doctor` can say what is wrong
where jax cannot be imported; there, the first use of a public name raises an ImportError with the reason.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

from overlap._version import __version__ as __version__
from overlap.kernels.operations import OPERATIONS

if TYPE_CHECKING:
    from overlap import emulation
    from overlap.choice.dispatch import Explanation
    from overlap.collectives.gather.all_gather_lhs_matmul import all_gather_lhs_matmul
    from overlap.collectives.gather.all_gather_rhs_matmul import all_gather_rhs_matmul
    from overlap.collectives.loss.linear_cross_entropy import linear_cross_entropy
    from overlap.collectives.reduce.matmul_all_reduce import matmul_all_reduce
    from overlap.collectives.reduce.matmul_reduce_scatter import matmul_reduce_scatter
    from overlap.collectives.rows.experts import all_gather_lhs_grouped_matmul, grouped_matmul_reduce_scatter
    from overlap.collectives.rows.routing import Routing, route
    from overlap.distributed import initialize
    from overlap.frame.explain import explain
    from overlap.kernels.config import Config
    from overlap.sharded.matmul import sharded_matmul
    from overlap.single_gpu.grouped_matmul import grouped_matmul
    from overlap.single_gpu.matmul import matmul
    from overlap.tuning.autotune import autotune

__all__ = [
    "Config",
    "Explanation",
    "Routing",
    "all_gather_lhs_grouped_matmul",
    "all_gather_lhs_matmul",
    "all_gather_rhs_matmul",
    "autotune",
    "emulation",
    "explain",
    "grouped_matmul",
    "grouped_matmul_reduce_scatter",
    "initialize",
    "linear_cross_entropy",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "route",
    "sharded_matmul",
]

# The module of each public name: the imports above, done at run time.
_HOMES = {spec.function: spec.module for spec in OPERATIONS} | {
    "Config": "kernels.config",
    "Explanation": "choice.dispatch",
    "Routing": "collectives.rows.routing",
    "autotune": "tuning.autotune",
    "explain": "frame.explain",
    "initialize": "distributed",
    "route": "collectives.rows.routing",
    "sharded_matmul": "sharded.matmul",
}


def _prepare_for_tracing() -> None:
    """Loads the modules whose context variables are part of the cache key of `jax.jit`.

    If they were loaded only with the first public name, during the first call of a jitted function, that function would
    be traced and compiled again at its second call.
    """
    from overlap import _requirements

    with contextlib.suppress(ImportError):
        if not _requirements.why_not():
            for light in ("choice.session", "emulation", "kernels.target"):
                importlib.import_module(f"overlap.{light}")


if "jax" in sys.modules:
    _prepare_for_tracing()

if not TYPE_CHECKING:  # For a type checker, names that are not imported above do not exist.

    def __getattr__(name: str) -> Any:
        """Loads a public name at its first use. Afterwards it is an ordinary attribute of this module."""
        if name not in __all__:
            raise AttributeError(f"module 'overlap' has no attribute {name!r}: public are {', '.join(__all__)}")
        from overlap import _requirements

        if reason := _requirements.why_not():
            raise ImportError(f"overlap.{name} cannot be loaded: {reason}; {_requirements.SEE_DOCTOR}")
        try:
            if name == "emulation":
                return importlib.import_module("overlap.emulation")  # This makes it an attribute as well.
            value = getattr(importlib.import_module(f"overlap.{_HOMES[name]}"), name)
        except ImportError as error:
            reason = _requirements.in_one_line(error)
            raise ImportError(f"overlap.{name} cannot be loaded: {reason}; {_requirements.SEE_DOCTOR}") from error
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
