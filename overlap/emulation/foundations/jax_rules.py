"""Lowers kernels that ask for JAX's own interpreter (`interpret=`), as jax does without the emulator."""

from __future__ import annotations

from typing import Any

import jax
from jax.interpreters import mlir


def lower_by_jax(primitive: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    """Lowers a kernel as jax does without the emulator.

    The emulator's rule for CPU devices hides jax's rule for all platforms, and there is no public way to get the hidden
    rule. The name `_lowerings` is the only private name of jax in the emulator (docs/private_names.md).

    Raises:
        NotImplementedError: this version of jax keeps its rules elsewhere.
    """
    rule = getattr(getattr(mlir, "_lowerings", {}).get(primitive), "rule", None)
    if rule is None:
        raise NotImplementedError(
            f"interpret={params['interpret']}: jax {jax.__version__} cannot run its own interpreter in a process that "
            "uses the emulator. Expected: interpret=False, or another process"
        )
    return rule(ctx, *args, **params)
