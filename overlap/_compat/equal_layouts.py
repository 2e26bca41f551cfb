"""Patch: the tilings that values of equal layouts allow are joined once for all of them, in linear time.

Reason: Mosaic GPU infers layouts from constraints on values. A constraint `Divides` says which tilings a value allows,
and it holds for all values of an equal layout. Mosaic GPU makes a constraint for each pair of such values and then
joins those of each value. The time is quadratic in the number of values, a tenth of the time of lowering our kernels.

Change: the constraints of all values of an equal layout are joined first, and then each value gets the result. It is
the same list in the same order. Same code in jax 0.11.2 and 0.12.0.1. With a version that was not checked nothing is
changed.

Replaced by: the same change in jax.
For upstream: docs/upstream.md#layouts-of-equal-values.
"""

from __future__ import annotations

import dataclasses

from overlap import _requirements
from overlap._compat.patch import Internal, Patch, private, replace

_MARK = "joins_tilings_once"


def _change() -> None:
    divides = private("jax.experimental.mosaic.gpu.constraints", "Divides")
    variable = private("jax.experimental.mosaic.gpu.constraints", "Variable")
    join = private("jax.experimental.mosaic.gpu.constraints", "merge_divides_constraints")

    def linear(_: Internal) -> Internal:
        def saturated(system: Internal) -> Internal:
            # Look it up now: another patch may have changed it.
            equal = private("jax.experimental.mosaic.gpu.constraints", "compute_transitively_equal_vars")(system)
            others = []
            first_of: dict[Internal, Internal] = {}  # The first of the values of equal layout.
            joined: dict[Internal, Internal] = {}
            for constraint in system.constraints:
                if not (isinstance(constraint, divides) and isinstance(constraint.expr, variable)):
                    others.append(constraint)
                elif first := first_of.get(constraint.expr):
                    joined[first] = join(joined[first], dataclasses.replace(constraint, expr=first))
                else:
                    joined[constraint.expr] = constraint
                    first_of |= dict.fromkeys([constraint.expr, *equal.get(constraint.expr, [])], constraint.expr)
            tilings = [dataclasses.replace(joined[first], expr=value) for value, first in first_of.items()]
            return dataclasses.replace(system, constraints=[*others, *tilings])

        return saturated

    replace("jax.experimental.mosaic.gpu.constraints", "saturate_divides_constraints_for_equal_vars", _MARK, linear)


_EQUAL_LAYOUTS = Patch("layouts of equal values are inferred in linear time", _change)


def equal_layouts() -> tuple[Patch, ...]:
    """The patch, if this version of jax was checked."""
    import jax

    return () if _requirements.why_not_jax(jax.__version__) else (_EQUAL_LAYOUTS,)
