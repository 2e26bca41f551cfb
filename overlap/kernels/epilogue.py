"""The one epilogue of all products: what is done to the f32 sums before they are stored.

    out = activation(row_scale · sums · column_scale + bias + addend)

Scales of columns and the bias belong to the columns of the right operands; scales of rows to those of the left one.
Threads read vectors without looking where they end, so each is filled up to whole tiles (`filled`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.kernels.hooks import Epilogue
from overlap.kernels.mainloop import Mainloop

_VECTORS = {"floats": jnp.float32, "integers": jnp.int32}


class Program(Protocol):
    """An elementwise function of f32 values and of scalars, in primitives that a kernel has."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """Names of the scalars' dtypes."""
        ...

    def __call__(self, values: Any, scalars: Sequence[Any]) -> Any: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Vectors:
    """What an epilogue reads; arrays outside of a kernel, references inside. None where there is nothing.

    Attributes:
      row_scale: in f32, in any order: `row_scales` of `epilogue` loads a tile's.
      column_scale: [columns] in f32, those of several right operands one behind the other.
      bias: likewise.
      scalars: what the activation captures, as `packed` has it.
    """

    row_scale: Any = None
    column_scale: Any = None
    bias: Any = None
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)


def filled(vectors: Sequence[jax.Array] | None, unit: int) -> Any:
    """Vectors one behind the other, each filled up to a multiple of `unit` entries; None if there are none."""
    if vectors is None:
        return None
    padded = [jnp.pad(x, (0, -x.shape[0] % unit)) for x in vectors]
    return padded[0] if len(padded) == 1 else jnp.concatenate(padded)


def epilogue(
    vectors: Vectors,
    program: Program | None,
    mainloop: Mainloop,
    *,
    first_column: Any = 0,
    row_scales: Callable[[Any, tuple[int, ...]], jax.Array] | None = None,
    transposed: bool = False,
) -> Epilogue:
    """The epilogue of one tile (`Hooks.epilogue_at`).

    Args:
      vectors: references.
      program: of the activation; None for none.
      mainloop: whose values these are.
      first_column: where the columns of the tile's right operand begin in vectors of columns.
      row_scales: from a slice of rows of the output, and the shape of the values, to their scales; by default those of
        `vectors.row_scale` at these rows.
      transposed: whether values (and `row_scales`) are [columns, rows] (`Config.swap_operands`).
    """
    row_dimension, column_dimension = (1, 0) if transposed else (0, 1)

    def of_columns(vector_gmem: Any, columns: Any, shape: tuple[int, ...]) -> jax.Array:
        start = columns.start if _is_zero(first_column) else first_column + columns.start
        return mainloop.broadcast_vector(vector_gmem, pl.ds(start, columns.size), shape, column_dimension)

    def apply(values: jax.Array, rows: Any, columns: Any, addend: jax.Array | None) -> jax.Array:
        shape = values.shape
        if row_scales is not None:
            values = values * row_scales(rows, shape)
        elif vectors.row_scale is not None:
            values = values * mainloop.broadcast_vector(vectors.row_scale, rows, shape, row_dimension)
        if vectors.column_scale is not None:
            values = values * of_columns(vectors.column_scale, columns, shape)
        if vectors.bias is not None:
            values = values + of_columns(vectors.bias, columns, shape)
        if addend is not None:
            values = values + addend
        if program is None:
            return values
        return program(values, _unpacked(vectors.scalars, program.scalars)).astype(jnp.float32)

    return apply


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def packed(scalars: Sequence[Any], program: Program | None) -> dict[str, jax.Array]:
    """An activation's scalars as vectors, which a kernel can have: one of f32, one of int32."""
    vectors: dict[str, list[Any]] = {}
    for scalar, dtype in zip(scalars, () if program is None else program.scalars, strict=True):
        vectors.setdefault(_vector_of(dtype), []).append(scalar)
    return {name: jnp.stack([x.astype(_VECTORS[name]) for x in values]) for name, values in vectors.items()}


def _unpacked(vectors_gmem: dict[str, Any], dtypes: tuple[str, ...]) -> list[Any]:
    """The scalars, loaded from their vectors."""
    before = dict.fromkeys(_VECTORS, 0)
    scalars = []
    for dtype in dtypes:
        name = _vector_of(dtype)
        value = vectors_gmem[name][before[name]]
        scalars.append(value != 0 if dtype == "bool" else value.astype(dtype))
        before[name] += 1
    return scalars


def _vector_of(dtype: str) -> str:
    return "floats" if "float" in dtype else "integers"
