"""Patch: equal kernels get equal texts, in every program and process.

Reason: Mosaic GPU keeps compiled kernels by their texts, and a text is part of the key of jax's persistent cache. But
texts of equal kernels differ in three ways, by what the process did before:

    locations   Each operation has the file and the line of a user's code that it comes from. jax traces a function such
                as `jnp.where` once for equal types, so its lines are those of whoever called it first. jax removes
                locations from a program before it makes the key, also within kernels for TPUs, not in those for GPUs.
    number      jax 0.11 numbers the kernels that a process lowers, and writes the number into each kernel's text
                (`mosaic_gpu.dump_basename`, the name of files for debugging).
    order       The layout inference of jax 0.11 puts values that have equal layouts into an order that depends on
                addresses in memory.

So Mosaic GPU compiles a kernel again for another program. jax's persistent cache does not find a program if the process
has lowered other kernels before it, or if a line was added above a user's activation. And processes with unequal
histories hold unequal programs.

Change: locations, of kernels of this library alone (`without_locations`), and the number are removed when the text is
written; whoever compiles the text gives it a number of its own. Values with equal layouts stay in the order of the
program. This also saves a quarter of the time of lowering, since jax 0.11 prints whole loops in order to sort values.
jax 0.12 does the last two itself (compared: the code and the texts of jax 0.11.2 and 0.12.0.1). With a version that was
not checked nothing is changed, since kernels work without.

Replaced by: jax 0.12, but for locations.
For upstream: docs/upstream.md#texts-of-kernels.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from overlap import _requirements
from overlap._compat.patch import Internal, Patch, private, replace

_MARK = "makes_equal_texts"
_NUMBERED = "mosaic_gpu.dump_basename"
_without_locations: contextvars.ContextVar[bool] = contextvars.ContextVar("overlap_without_locations", default=False)


@contextlib.contextmanager
def without_locations() -> Iterator[None]:
    """A context in which a kernel is lowered to a text without locations, if the patch has been applied."""
    token = _without_locations.set(True)
    try:
        yield
    finally:
        _without_locations.reset(token)


def _change_texts() -> None:
    from jax.extend.mlir import passmanager

    def plain(run: Internal) -> Internal:
        def run_serde_pass(module: Internal, *, serialize: bool, **rest: Internal) -> Internal:
            if serialize and _without_locations.get():
                passes = passmanager.PassManager.parse("builtin.module(strip-debuginfo)", module.context)
                passes.run(module.operation)
            written = run(module, serialize=serialize, **rest)
            if serialize and _NUMBERED in written.operation.attributes:
                del written.operation.attributes[_NUMBERED]
            return written

        return run_serde_pass

    replace("jax.experimental.mosaic.gpu.core", "_run_serde_pass", _MARK, plain)


def _change_order() -> None:
    equals = private("jax.experimental.mosaic.gpu.constraints", "Equals")
    variable = private("jax.experimental.mosaic.gpu.constraints", "Variable")

    def in_order(_: Internal) -> Internal:
        def equal_variables(system: Internal) -> dict[Internal, list[Internal]]:
            # From each variable to the list of those equal to it, and itself, which all of them share.
            groups: dict[Internal, list[Internal]] = {}
            for constraint in system.constraints:
                if isinstance(constraint, equals):
                    sides = constraint.lhs, constraint.rhs
                    if all(isinstance(side, variable) for side in sides):
                        one, other = (groups.setdefault(side, [side]) for side in sides)
                        if one is not other:
                            one += other
                            groups |= dict.fromkeys(other, one)
            return {one: [other for other in group if other != one] for one, group in groups.items()}

        return equal_variables

    replace("jax.experimental.mosaic.gpu.constraints", "compute_transitively_equal_vars", _MARK, in_order)


_EQUAL_TEXTS = Patch("equal kernels have equal texts", _change_texts)
_EQUAL_ORDERS = Patch("values of equal layouts have one order", _change_order)


def equal_texts() -> tuple[Patch, ...]:
    """The patches that this version of jax needs."""
    import jax

    if _requirements.why_not_jax(jax.__version__):
        return ()
    return (_EQUAL_TEXTS, _EQUAL_ORDERS) if jax.__version_info__ < (0, 12) else (_EQUAL_TEXTS,)
