"""The types of arguments that several public functions have, as type checkers and `help()` show them.

They say what `overlap.frame.arguments` accepts. What a type cannot say (shapes, dtypes, the axes of the mesh) is
checked at the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.kernels.config import Config
from overlap.primitives.types import AnyMesh as AnyMesh

# Narrower than `jax.typing.ArrayLike`, which includes Python numbers: an operand has at least one dimension.
AnyArray = jax.Array | np.ndarray
Scale = AnyArray | np.floating | np.integer | float
AxisName = str | tuple[str, ...]
# An argument as the caller gave it, not checked yet.
type Given = Any
# One of these: an array; its type (`jax.ShapeDtypeStruct`), where a call is only checked; or what a map over the tree
# has put in the array's place, such as a bool, a dtype or a tangent.
type Leaf = Any
# An argument with an entry for each right operand, if these are a list.
PerRhs = AnyArray | Sequence[AnyArray | None]
# One right operand or several, and the results for them. Arrays of NumPy are taken too, but are no type of a result.
Sides = TypeVar("Sides", jax.Array, list[jax.Array], tuple[jax.Array, ...])


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a public function as the caller gave them, before any check.

    The functions share most keywords. A keyword that a function lacks keeps its default here. `scalars` are those that
    `activation` captures, if it has been traced already (`activation.Activation`). `clears` is that of `Operation`.
    """

    lhs: AnyArray | Sequence[AnyArray]
    rhs: AnyArray | Sequence[AnyArray]
    axis_name: AxisName | None = None
    group_sizes: AnyArray | None = None
    addend: PerRhs | None = None
    bias: PerRhs | None = None
    activation: Callable[..., jax.Array] | None = None
    lhs_scale: Scale | None = None
    rhs_scale: Scale | Sequence[Scale] | None = None
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    preferred_element_type: DTypeLike | None = None
    config: Config | None = None
    implementation: Implementation | None = None
    transport: str | None = None
    return_gathered: bool = False
    scalars: tuple[jax.Array, ...] | None = None
    clears: tuple[bool, bool] = (True, True)

    @property
    def epilogue(self) -> dict[str, object]:
        """The keywords of the epilogue by name; None for those that were not given."""
        names = ("addend", "bias", "activation", "lhs_scale", "rhs_scale")
        return {name: getattr(self, name) for name in names}

    @property
    def arrays(self) -> dict[str, object]:
        """The arguments that are arrays, or lists of arrays, by name."""
        epilogue = self.epilogue
        del epilogue["activation"]
        return {"lhs": self.lhs, "rhs": self.rhs, "group_sizes": self.group_sizes, **epilogue}
