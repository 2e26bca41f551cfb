"""Patch: equal kernels get equal texts, in every program and process (jax 0.11).

Reason: jax 0.11 numbers the kernels that a process lowers, and writes the number into each kernel's text
(`mosaic_gpu.dump_basename`, the name of files for debugging). So Mosaic GPU, which keeps compiled kernels by their
texts, compiles an equal kernel of another program again. jax's persistent cache does not find a program if the process
has lowered other kernels before it. And processes with unequal histories hold unequal programs. Second, the layout
inference of jax 0.11 puts values that have equal layouts into an order that depends on addresses in memory.

Change: the number is removed when the text is written; whoever compiles the text gives it a number of its own. Values
with equal layouts stay in the order of the program. This also saves a quarter of the time of lowering, since jax 0.11
prints whole loops in order to sort values. jax 0.12 does both itself, so there no patch is needed (compared: the code
and the texts of jax 0.11.2 and 0.12.0.1).

Replaced by: jax 0.12.
For upstream: docs/upstream.md#texts-of-kernels.
"""

from __future__ import annotations

from overlap._compat.patch import Internal, Patch, private, replace

_MARK = "makes_equal_texts"
_NUMBERED = "mosaic_gpu.dump_basename"


def _change() -> None:
    equals = private("jax.experimental.mosaic.gpu.constraints", "Equals")
    variable = private("jax.experimental.mosaic.gpu.constraints", "Variable")
    private("jax.experimental.mosaic.gpu.core", "_run_serde_pass")

    def without_number(run: Internal) -> Internal:
        def run_serde_pass(module: Internal, *, serialize: bool, **rest: Internal) -> Internal:
            written = run(module, serialize=serialize, **rest)
            if serialize and _NUMBERED in written.operation.attributes:
                del written.operation.attributes[_NUMBERED]
            return written

        return run_serde_pass

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
    replace("jax.experimental.mosaic.gpu.core", "_run_serde_pass", _MARK, without_number)


_EQUAL_TEXTS = Patch("equal kernels have equal texts", _change)


def equal_texts() -> tuple[Patch, ...]:
    """The patch, if this version of jax needs it."""
    import jax

    return (_EQUAL_TEXTS,) if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 12) else ()
