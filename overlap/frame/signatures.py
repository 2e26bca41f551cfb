"""The types of arguments that several public functions have, as type checkers and `help()` show them.

They say what `overlap.frame.arguments` accepts. What a type cannot say (shapes, dtypes, the axes of the mesh) is
checked at the call.
"""

from __future__ import annotations

import jax
import numpy as np

# Narrower than `jax.typing.ArrayLike`, which includes Python numbers: an operand has at least one dimension.
AnyArray = jax.Array | np.ndarray
Scale = AnyArray | np.floating | np.integer | float
AxisName = str | tuple[str, ...]
AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh
