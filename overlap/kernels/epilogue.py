"""Computes the epilogue of all products: the elementwise operations on the f32 sums before they are stored.

    out = activation(row_scale · sums · column_scale + bias + addend)

A row scale belongs to a row of the left operand; a column scale and a bias belong to a column of a right operand.
Threads read these vectors without bounds checks. So each vector is padded to whole tiles (`filled`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from overlap.kernels.hooks import Epilogue, Values
from overlap.kernels.mainloop import Mainloop
from overlap.primitives.types import GmemRef, Index

# An activation is computed for so many columns at a time.
_WIDTH = 32
# One of at least so many operations is computed for as many columns as the mainloop says: its intermediate values need
# registers.
_MANY_OPS = 16
_VECTORS = {"floats": jnp.float32, "integers": jnp.int32}


class Program(Protocol):
    """An elementwise function of f32 arrays and of scalars, made of primitives that a kernel can run."""

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the dtypes of the scalars that the function takes, in their order."""
        ...

    @property
    def ops(self) -> Sequence[object]:
        """The operations."""
        ...

    def __call__(self, values: Sequence[jax.Array], scalars: Sequence[jax.Array]) -> jax.Array: ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Vectors:
    """The vectors that an epilogue reads: arrays outside of a kernel, references inside. None: no such vector is used.

    Attributes:
      row_scale: row scales in f32, [rows]. If the function `row_scales` is passed to `epilogue`, only that function
        reads them, and their order and shape may be others.
      column_scale: column scales in f32, [columns]. The vectors of several right operands are concatenated (`filled`).
      bias: biases in f32, laid out as `column_scale`.
      scalars: the scalars that the activation captures, as `packed` returns them.
    """

    row_scale: GmemRef = None
    column_scale: GmemRef = None
    bias: GmemRef = None
    scalars: dict[str, GmemRef] = dataclasses.field(default_factory=dict)


def filled(vectors: Sequence[jax.Array] | None, unit: int) -> jax.Array | None:
    """Concatenates vectors, each padded with zeros to a multiple of `unit` entries; None if `vectors` is None."""
    if vectors is None:
        return None
    padded = [jnp.pad(x, (0, -x.shape[0] % unit)) for x in vectors]
    return padded[0] if len(padded) == 1 else jnp.concatenate(padded)


def epilogue(
    vectors: Vectors,
    program: Program | None,
    mainloop: Mainloop,
    *,
    first_column: Index = 0,
    row_scales: Callable[[pl.Slice, tuple[int, ...]], jax.Array] | None = None,
    transposed: bool = False,
) -> Epilogue:
    """Returns the epilogue of one tile (`Hooks.epilogue_at`).

    Args:
      vectors: references to the vectors in global memory.
      program: the activation; None if there is none.
      mainloop: the mainloop that computes the values. It loads vectors in the register layout of its values.
      first_column: where the columns of the tile's right operand begin in `column_scale` and `bias`.
      row_scales: a function from a slice of rows of the output, and the shape of the values, to the scales of these
        rows, broadcast to that shape. None: the scales are read from `vectors.row_scale` at these rows.
      transposed: whether the values, and the results of `row_scales`, are [columns, rows] (`Config.swap_operands`).
    """
    row_dimension, column_dimension = (1, 0) if transposed else (0, 1)

    def before_program(
        values: jax.Array, rows: pl.Slice, columns: pl.Slice, addend: jax.Array | None, place: tuple[int, int]
    ) -> jax.Array:
        shape = values.shape
        index, sides = place

        def of_columns(vector_gmem: GmemRef) -> jax.Array:
            # The vectors of the right operands in a tile follow each other, all padded to the same length.
            first = vector_gmem.shape[0] // sides * index + first_column
            start = columns.start if _is_zero(first) else first + columns.start
            return mainloop.broadcast_vector(vector_gmem, pl.ds(start, columns.size), shape, column_dimension)

        if row_scales is not None:
            values = values * row_scales(rows, shape)
        elif vectors.row_scale is not None:
            values = values * mainloop.broadcast_vector(vectors.row_scale, rows, shape, row_dimension)
        if vectors.column_scale is not None:
            values = values * of_columns(vectors.column_scale)
        if vectors.bias is not None:
            values = values + of_columns(vectors.bias)
        return values if addend is None else values + addend

    def apply(values: Values, rows: pl.Slice, columns: pl.Slice, addend: jax.Array | None) -> jax.Array:
        given = values if isinstance(values, tuple) else (values,)
        sums = [before_program(x, rows, columns, addend, (i, len(given))) for i, x in enumerate(given)]
        if program is None:
            return sums[0]
        scalars = _unpacked(vectors.scalars, program.scalars)
        height, width = sums[0].shape
        parts = []
        at_once = _WIDTH if len(program.ops) < _MANY_OPS else mainloop.long_activation_columns
        for first in range(0, width, at_once):
            part = [lax.slice(x, (0, first), (height, min(first + at_once, width))) for x in sums]
            parts.append(program(part, scalars).astype(jnp.float32))
        return parts[0] if len(parts) == 1 else lax.concatenate(parts, 1)

    return apply


def _is_zero(value: Index) -> bool:
    return isinstance(value, int) and value == 0


def packed(scalars: Sequence[jax.Array], program: Program | None) -> dict[str, jax.Array]:
    """Packs an activation's scalars into vectors, which a kernel can take as operands: one of f32, one of int32."""
    vectors: dict[str, list[jax.Array]] = {}
    for scalar, dtype in zip(scalars, () if program is None else program.scalars, strict=True):
        vectors.setdefault(_vector_of(dtype), []).append(scalar)
    return {name: jnp.stack([x.astype(_VECTORS[name]) for x in values]) for name, values in vectors.items()}


def _unpacked(vectors_gmem: dict[str, GmemRef], dtypes: tuple[str, ...]) -> list[jax.Array]:
    """Loads the scalars from the vectors that `packed` made. `dtypes`: the scalars' dtypes, in their order."""
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
