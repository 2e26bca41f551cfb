"""Computes the epilogue of all products: the elementwise operations on the f32 sums before they are stored.

    out = activation(row_scale · sums · column_scale + bias + addend)

A row scale belongs to a row of the left operand; a column scale and a bias belong to a column of a right operand.
Threads read these vectors without bounds checks. So each vector is padded to whole tiles (`filled`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from overlap.kernels.hooks import Epilogue, ResultsEpilogue, Values
from overlap.kernels.limits import EPILOGUE_COLUMNS
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

    def all_results(self, values: Sequence[jax.Array]) -> list[jax.Array]:
        """Applies a function without scalars that has any number of results."""
        ...


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
            where = _in_vector(vector_gmem, columns, index, sides, first_column)
            return mainloop.broadcast_vector(vector_gmem, where, shape, column_dimension)

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


@dataclasses.dataclass(frozen=True)
class ProgramResults:
    """An epilogue with several results, some of which may be summed over the columns instead of being stored.

    The program is called with the values of all right operands, then the addends, then, if there is one, the vector of
    rows. It has `stored` results that are stored, and one more if there are sums.

    Attributes:
      program: the function.
      stored: how many of its results are stored.
      sums: whether the rows of its last result are summed. Each block of columns has a sum of its own, in f32, and
        always adds in the same order.
    """

    program: Program
    stored: int
    sums: bool = False

    def epilogue(
        self,
        mainloop: Mainloop,
        dtype: jnp.dtype,
        vectors: Vectors,
        first_column: Index,
        sums_at: Callable[[pl.Slice, pl.Slice], GmemRef] | None = None,
    ) -> ResultsEpilogue:
        """Returns the epilogue of one tile (`hooks.SeveralResults`).

        Args:
          mainloop: the mainloop that computes the values.
          dtype: of the results that are stored.
          vectors: biases, which are added to the values; and row scales, which are the program's vector of rows.
          first_column: as in `epilogue`.
          sums_at: a function from slices of rows and columns to where the sums of these columns are stored, in f32.
        """

        def apply(
            values: Callable[[int, int], tuple[jax.Array, ...]],
            rows: pl.Slice,
            columns: pl.Slice,
            addends: Callable[[], Sequence[jax.Array]],
        ) -> Iterator[dict[int, jax.Array]]:
            count = len(addends())
            # First those that overwrite no addend, and the sums. All results at once would spill registers.
            first = range(count, self.stored) if count < self.stored else range(self.stored)
            for results in filter(len, (first, range(first.start))):
                found, total = some(values, rows, columns, addends(), results)
                if sums_at is not None and results is first:
                    store_in_registers_order(total.sum(axis=1), sums_at(rows, columns))
                yield dict(zip(results, found, strict=True))

        def some(
            values: Callable[[int, int], tuple[jax.Array, ...]],
            rows: pl.Slice,
            columns: pl.Slice,
            addends: Sequence[jax.Array],
            results: Sequence[int],
        ) -> tuple[list[jax.Array], jax.Array]:
            """Returns the results with these indices, and the last result of the program, added over its parts."""
            # Fewer columns at a time than for one result, since addends and results lie in registers as well.
            width = mainloop.long_activation_columns // 2
            parts: list[list[jax.Array]] = []
            last: list[jax.Array] = []
            for first in range(0, EPILOGUE_COLUMNS, width):
                given = list(values(first, width))
                shape = given[0].shape
                if (bias_gmem := vectors.bias) is not None:
                    here = pl.ds(columns.start + first, width)
                    places = [_in_vector(bias_gmem, here, i, len(given), first_column) for i in range(len(given))]
                    biases = [mainloop.broadcast_vector(bias_gmem, place, shape, 1) for place in places]
                    given = [x + bias for x, bias in zip(given, biases, strict=True)]
                given += [lax.slice(x, (0, first), (x.shape[0], first + width)).astype(jnp.float32) for x in addends]
                if vectors.row_scale is not None:
                    given.append(mainloop.broadcast_vector(vectors.row_scale, rows, shape, 0))
                found = self.program.all_results(given)
                parts.append([found[index].astype(dtype) for index in results])
                last.append(found[-1])
            return [lax.concatenate(list(x), 1) for x in zip(*parts, strict=True)], functools.reduce(jnp.add, last)

        return apply


def store_in_registers_order(values: jax.Array, block_gmem: GmemRef) -> None:
    """Stores values to global memory as they lie in registers, without rearranging them for whole cache lines."""
    # From 0.12 on, jax refuses an optimized store unless it fills whole cache lines. A block of transposed sums may
    # have any multiple of 8 rows, so it may end within a line. The instructions are the same. jax 0.11 optimizes no
    # store to global memory, and has no `plgpu.store`.
    if (store := getattr(plgpu, "store", None)) is not None:
        store(block_gmem, values, optimized=False)
    else:
        block_gmem[...] = values


def _in_vector(vector_gmem: GmemRef, columns: pl.Slice, side: int, sides: int, first_column: Index) -> pl.Slice:
    """Returns where the entries of some columns of one of the right operands lie in a vector.

    The vectors of the right operands in a tile follow each other, all padded to the same length.
    """
    first = vector_gmem.shape[0] // sides * side + first_column
    return pl.ds(columns.start if _is_zero(first) else first + columns.start, columns.size)


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
