"""The programs of `python -m overlap soak`: many fused launches, whose results are compared with exact numbers.

All operands are whole numbers, and so small that each element of one device's product is exact in every dtype used.
Sums over devices are computed in f32, where they are exact, and rounded once. So a right result has the bits of the
expected result, in whatever order it was computed. XLA computes the expected result from operands that every device
holds completely. So the expected result depends on no communication.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

import overlap
from overlap.kernels.target import current_target

# About how long a turn of the loop in `_spin` takes.
_US_PER_TURN = 18.0
_F8 = jnp.float8_e4m3fn
# A mesh axis, or several mesh axes.
type Axis = str | tuple[str, ...]
# Pairs of a result and the expected result.
type Results = list[tuple[jax.Array, jax.Array]]
type Compute = Callable[[jax.Array, jax.Array, jax.Array, Axis], Results]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation and its sizes, to be run along an axis of a mesh of D devices.

    Attributes:
      name: the name in messages.
      rows: rows of the operand's shard.
      columns: columns of the weights.
      depth: columns of the operand's shard, and rows of the weights.
      dtype: the dtype of the operands.
      compute: a function of (shard, whole, weights, axis) that returns pairs of a result and the expected result. It
        runs inside `jax.shard_map`. shard is [rows, depth], a part of whole, [D * rows, depth]; weights is
        [depth, columns].
      beside: whether one of XLA's collectives may run at the same time.
    """

    name: str
    rows: int
    columns: int
    depth: int
    dtype: DTypeLike
    compute: Compute
    beside: bool = True


def _exact(lhs: jax.Array, rhs: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Computes the product by XLA."""
    return lax.dot(lhs, rhs, preferred_element_type=jnp.float32).astype(dtype)


def _gather_rows(**options: Any) -> Compute:
    def compute(shard: jax.Array, whole: jax.Array, weights: jax.Array, axis: Axis) -> Results:
        out = overlap.all_gather_lhs_matmul(shard, weights, axis, implementation="fused", **options)
        return [(out, _exact(whole, weights, out.dtype))]

    return compute


def _several_sides(shard: jax.Array, whole: jax.Array, weights: jax.Array, axis: Axis) -> Results:
    sides = [weights[:, :64], weights[:, 64:]]
    outs, gathered = overlap.all_gather_lhs_matmul(shard, sides, axis, implementation="fused", return_gathered=True)
    return [*((out, _exact(whole, side, out.dtype)) for out, side in zip(outs, sides)), (gathered, whole)]


def _scaled_float8(shard: jax.Array, whole: jax.Array, weights: jax.Array, axis: Axis) -> Results:
    rows = shard.shape[0]
    # Neighbouring rows have different scales, so that a result shows whether rows were mixed up. The scales are powers
    # of two, so that scaling does not round.
    scale_of = lambda row: jnp.exp2((row % 5).astype(jnp.float32) - 2)[:, None]  # noqa: E731
    first = lax.axis_index(axis) * rows
    out = overlap.all_gather_lhs_matmul(
        shard, weights.T, axis, transpose_rhs=True, lhs_scale=scale_of(first + jnp.arange(rows)), implementation="fused"
    )
    exact = _exact(whole.astype(jnp.bfloat16), weights.astype(jnp.bfloat16), jnp.float32)
    return [(out, (exact * scale_of(jnp.arange(whole.shape[0]))).astype(out.dtype))]


def _gather_weights(dimension: int) -> Compute:
    def compute(shard: jax.Array, whole: jax.Array, weights: jax.Array, axis: Axis) -> Results:
        # The rows of `whole` are k of the gathered weights (`dimension` 0), or n (`dimension` 1).
        side, everything = (shard, whole) if dimension == 0 else (shard.T, whole.T)
        lhs = jnp.resize(weights, (96, everything.shape[0]))
        out = overlap.all_gather_rhs_matmul(lhs, side, axis, dimension=dimension, implementation="fused")
        return [(out, _exact(lhs, everything, out.dtype))]

    return compute


def _reduce_scatter(dimension: int, block: int, **options: Any) -> Compute:
    """Makes a case's `compute`: each device keeps `block` rows of the sum (`dimension` 0) or `block` columns (1)."""

    def compute(shard: jax.Array, whole: jax.Array, weights: jax.Array, axis: Axis) -> Results:
        # The rows of `whole` are contracted: they are k of the right operand, or of the transposed left operand.
        size, me, k = lax.axis_size(axis), lax.axis_index(axis), shard.shape[0]
        shape = (size * block, size * k) if dimension == 0 else (size * k, size * block)
        other = jnp.resize(weights, shape)
        part = lax.dynamic_slice_in_dim(other, me * k, k, axis=1 - dimension)
        lhs, rhs = (part, shard) if dimension == 0 else (shard, part)
        out = overlap.matmul_reduce_scatter(
            lhs, rhs, axis, dimension=dimension, transpose_lhs=dimension == 1, implementation="fused", **options
        )
        exact = _exact(other, whole, out.dtype) if dimension == 0 else _exact(whole.T, other, out.dtype)
        return [(out, lax.dynamic_slice_in_dim(exact, me * block, block, axis=dimension))]

    return compute


def _all_reduce(rows: int, **options: Any) -> Compute:
    """Makes a case's `compute`: each device has the whole sum, [D * rows, columns]."""

    def compute(shard: jax.Array, whole: jax.Array, weights: jax.Array, axis: Axis) -> Results:
        # The rows of `whole` are contracted.
        size, me, k = lax.axis_size(axis), lax.axis_index(axis), shard.shape[0]
        other = jnp.resize(weights, (size * rows, size * k))
        part = lax.dynamic_slice_in_dim(other, me * k, k, axis=1)
        tile_m = 128 if current_target().is_blackwell else 64
        config = overlap.Config(tile_m=tile_m, tile_n=128, **options)
        out = overlap.matmul_all_reduce(part, shard, axis, config=config, implementation="fused")
        return [(out, _exact(other, whole, out.dtype))]

    return compute


CASES = (
    Case("rows", 128, 256, 256, jnp.float16, _gather_rows()),
    Case("ragged rows", 200, 264, 136, jnp.bfloat16, _gather_rows()),
    Case("few rows", 16, 256, 512, jnp.bfloat16, _gather_rows()),
    Case("rows by the ring", 128, 128, 192, jnp.bfloat16, _gather_rows(transport="ring"), beside=False),
    Case("several sides, gathered", 72, 136, 128, jnp.bfloat16, _several_sides),
    Case("scaled float8", 64, 128, 128, _F8, _scaled_float8),
    Case("few scaled float8", 8, 128, 256, _F8, _scaled_float8),
    Case("weights along k", 64, 256, 128, jnp.bfloat16, _gather_weights(0)),
    Case("weights along n", 64, 256, 128, jnp.bfloat16, _gather_weights(1)),
    Case("sums by rows", 128, 128, 264, jnp.bfloat16, _reduce_scatter(0, 136)),
    Case("sums by few rows", 64, 128, 256, jnp.bfloat16, _reduce_scatter(0, 8)),
    Case("sums by the ring", 64, 128, 136, jnp.bfloat16, _reduce_scatter(0, 72, transport="ring")),
    Case("sums by columns", 72, 128, 136, jnp.float16, _reduce_scatter(1, 72, preferred_element_type=jnp.float32)),
    # 136 columns are 17 units of 16 bytes, which no D divides; 384 are 48, which 2, 3, 4, 6 and 8 divide.
    Case("sums for all by rows", 64, 128, 136, jnp.bfloat16, _all_reduce(72, chunk_bytes=4096)),
    Case("sums for all by columns", 64, 128, 384, jnp.float16, _all_reduce(8)),
    Case("sums for all in one shot", 72, 128, 136, jnp.bfloat16, _all_reduce(8, one_shot=True)),
)


def meshes(devices: list[Any]) -> Iterator[Mesh]:
    """Yields meshes of all devices: with one axis, and with two axes in each possible shape; each also permuted."""
    count = len(devices)
    shapes: list[dict[str, int]] = [{"x": count}]
    shapes += [{"x": side, "y": count // side} for side in range(2, count) if count % side == 0]
    for shape in shapes:
        for order in (devices, [*devices[1::2], *devices[::2]]):
            array = np.array(order, dtype=object).reshape(tuple(shape.values()))
            yield Mesh(array, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def axes_of(mesh: Mesh) -> list[Axis]:
    """The axes along which an operation can run: each axis, and all axes together."""
    names = list(mesh.axis_names)
    return names if len(names) == 1 else [*names, tuple(names)]


def _spin(microseconds: jax.Array) -> jax.Array:
    """Keeps this device busy for about `microseconds`. Returns a zero that depends on this work."""
    turns = (microseconds / _US_PER_TURN).astype(jnp.int32)
    return lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.zeros((), jnp.float32))


@functools.cache
def program(case: Case, mesh: Mesh, axis: Axis, steps: int) -> Callable[..., jax.Array]:
    """A jitted function that runs `steps` launches of a case in a loop.

    Its arguments are (late_us, period, *arrays): a delay for each device, and the arrays that `operands` returns. In
    every `period`-th launch, each device is late by its `late_us`. A sum along all other axes of the mesh may run at
    the same time. The function returns how many results had a wrong bit, added up over the devices.
    """
    others = tuple(name for name in mesh.axis_names if name != axis and name not in axis)

    def run(late_us: jax.Array, period: jax.Array, whole: jax.Array, weights: jax.Array) -> jax.Array:
        me, size = lax.axis_index(axis), lax.axis_size(axis)
        whole = whole[: size * case.rows, : case.depth].astype(case.dtype)
        weights = weights[: case.depth, : case.columns].astype(case.dtype)

        def launch(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            wrong, beside = state
            late = _spin(jnp.where(i % period == period - 1, late_us[0], 0.0))
            now = jnp.roll(whole, i, axis=1)
            shard = lax.dynamic_slice(now, (me * case.rows, 0), (case.rows, case.depth))
            shard = (shard.astype(jnp.float32) + late).astype(case.dtype)
            if others and case.beside:
                beside = beside + lax.psum(jnp.roll(now.astype(jnp.float32), i), others)[:8, :8]
            for out, expected in case.compute(shard, now, weights, axis):
                wrong += jnp.any(out != expected).astype(jnp.int32)
            return wrong, beside

        wrong, beside = lax.fori_loop(0, steps, launch, (jnp.int32(0), jnp.zeros((8, 8), jnp.float32)))
        return lax.psum(wrong + jnp.isnan(beside.sum()).astype(jnp.int32), mesh.axis_names)

    every = tuple(mesh.axis_names)
    specs = (P(every), P(), P(), P())
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


def operands(mesh: Mesh, seed: int) -> tuple[jax.Array, jax.Array]:
    """The whole operand and the weights for all cases, the same on all devices. Their elements are −1, 0 and 1."""
    chance, rows = np.random.default_rng(seed), mesh.size * max(case.rows for case in CASES)
    shapes = (rows, max(c.depth for c in CASES)), (max(c.depth for c in CASES), max(c.columns for c in CASES))
    whole, weights = (chance.integers(-1, 2, shape).astype(jnp.bfloat16) for shape in shapes)
    return on_all(mesh, P(), whole), on_all(mesh, P(), weights)


def on_all(mesh: Mesh, spec: P, values: np.ndarray) -> jax.Array:
    """An array with sharding `spec`, from values that each process has completely."""
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])
