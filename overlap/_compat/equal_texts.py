"""Mend: equal kernels get equal texts in equal programs (jax 0.11).

Reason: jax 0.11 numbers the kernels that a process lowers, and writes the number into each kernel's text
(`mosaic_gpu.dump_basename`, a file name for debugging). So no two texts are equal. Mosaic GPU, which keeps a compiled
kernel by its text, compiles an equal kernel of another program again. jax's persistent cache does not find a program if
the process has lowered other kernels before it. And processes with unequal histories hold unequal programs.

Change: the number is removed when the text is written. Mosaic GPU's own passes then give the kernel a number when it is
compiled, as they do for a text without one. jax 0.12 leaves the number out itself, so there no mend is needed
(compared: the texts of jax 0.11.2 and 0.12.0.1).

Replaced by: jax 0.12.
For upstream: docs/upstream.md#texts-of-kernels.
"""

from __future__ import annotations

from typing import Any

from overlap._compat.mend import Mend, replace

_NUMBERED = "mosaic_gpu.dump_basename"


def _change() -> None:
    def without_number(run: Any) -> Any:
        def run_serde_pass(module: Any, *, serialize: bool, **rest: Any) -> Any:
            written = run(module, serialize=serialize, **rest)
            if serialize and _NUMBERED in written.operation.attributes:
                del written.operation.attributes[_NUMBERED]
            return written

        return run_serde_pass

    replace("jax.experimental.mosaic.gpu.core", "_run_serde_pass", "writes_equal_texts", without_number)


_EQUAL_TEXTS = Mend("equal kernels have equal texts", _change)


def equal_texts() -> tuple[Mend, ...]:
    """The mend, if this version of jax needs it."""
    import jax

    return (_EQUAL_TEXTS,) if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12) else ()
