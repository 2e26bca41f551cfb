"""The types of arguments that several public functions have, as type checkers and `help()` show them.

They say what `overlap.frame.arguments` accepts. What cannot be said in a type (shapes, dtypes, which axes there are) is
checked at the call.
"""

from __future__ import annotations

import jax
import numpy as np

# `jax.typing.ArrayLike` has numbers as well, and no operand is a number.
AnyArray = jax.Array | np.ndarray
Scale = AnyArray | np.floating | np.integer | float
AxisName = str | tuple[str, ...]
