"""JAX's own way to run a kernel on the CPU: its interpreter, for kernels that ask for it."""

from __future__ import annotations

from typing import Any

import jax
from jax.interpreters import mlir


def lower_by_jax(primitive: Any, ctx: Any, *args: Any, **params: Any) -> Any:
    """Lowers a kernel as jax does without the emulator.

    The emulator's rule for CPU devices hides jax's rule for all platforms. There is no public way to ask for that one:
    this is the only hidden name of jax in the emulator (docs/private_names.md).

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
