"""The kernel behind `matmul`: the mainloop over batches, tiles and parts of k, with an epilogue.

    out[b] = activation(row_scale · (lhs[b] @ rhs[b]) · column_scale + bias + addend[b])

Any operand may lack the batch dimension; it then serves all batch elements. With `Config.split_k` > 1 each part of k is
a tile of its own whose f32 result goes to a buffer of its own; XLA adds the parts, always in the same order, and
applies the epilogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from overlap.choice import choose
from overlap.choice.problem import Problem
from overlap.frame.activation import Activation
from overlap.kernels import hopper
from overlap.kernels.config import Config
from overlap.kernels.staging import Forms
from overlap.kernels.target import Target
from overlap.kernels.tile_order import TileOrder
from overlap.primitives import shared_flags
from overlap.primitives.integers import ceil_div, in_32_bits, quotient, remainder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What goes into a product; None where there is nothing.

    Attributes:
      lhs: [(batch,) m, k], or [(batch,) k, m] if transposed.
      rhs: [(batch,) k, n], or [(batch,) n, k] if transposed.
      addend: [(batch,) m, n], added to the product.
      bias: [n] in f32, added to each row.
      row_scale: [m] in f32.
      column_scale: [n] in f32.
      scalars: what the activation captures, each of a dtype of its own.
    """

    lhs: Any
    rhs: Any
    addend: Any = None
    bias: Any = None
    row_scale: Any = None
    column_scale: Any = None
    scalars: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a product.

    Attributes:
      config: sizes.
      target: the device; one CTA runs on each of its cores.
      forms: how the operands lie in memory.
      out_dtype: of the result.
      activation: of f32 values; None for none.
      insists: whether the caller asked for the fused kernel, so that XLA may not run in its place.
    """

    config: Config
    target: Target
    forms: Forms
    out_dtype: Any
    activation: Activation | None = None
    insists: bool = False

    def applied(self, operands: Operands) -> Callable[[jax.Array], jax.Array] | None:
        """The activation with the scalars that it captures, as JAX sees it; None for none."""
        activation = self.activation
        return None if activation is None else lambda values: activation(values, operands.scalars)

    def computed(self, operands: Operands) -> Callable[[jax.Array], jax.Array] | None:
        """The same by the program that the kernel computes, which has no rules of derivatives; None for none."""
        if self.activation is None:
            return None
        program = self.activation.program
        scalars = [x.astype(dtype) for x, dtype in zip(operands.scalars, program.scalars, strict=True)]
        return lambda values: program(values, scalars)


def accumulator(dtype: Any) -> jnp.dtype:
    """The dtype in which products of operands are summed, and everything behind them is computed."""
    return jnp.dtype(dtype if jnp.dtype(dtype).itemsize > 4 else jnp.float32)


def sizes(operands: Operands, forms: Forms) -> tuple[int | None, int, int, int]:
    """Batch (None if no operand has that dimension), m, n and k."""
    m, k = operands.lhs.shape[-2:][:: -1 if forms.transpose_lhs else 1]
    n = operands.rhs.shape[-2 if forms.transpose_rhs else -1]
    batches = {x.shape[0] for x in (operands.lhs, operands.rhs, operands.addend) if x is not None and x.ndim == 3}
    return next(iter(batches), None), m, n, k


def problem(operands: Operands, forms: Forms, out_dtype: Any) -> Problem:
    """The product's sizes, as the choice of a configuration sees them."""
    batch, m, n, k = sizes(operands, forms)
    layout = ("t" if forms.transpose_lhs else "n") + ("t" if forms.transpose_rhs else "n")
    dtypes = operands.lhs.dtype.name, jnp.dtype(out_dtype).name
    return Problem("matmul", m, n, k, *dtypes, layout=layout, batch=batch or 1)  # pyright: ignore[reportArgumentType]


def check(operands: Operands, forms: Forms, out_dtype: Any, config: Config, target: Target,
          activation: Activation | None = None) -> None:  # fmt: skip
    """Whether the kernel can serve a product. Raises as `Config.check` does."""
    if activation is not None and (cannot := activation.program.why_not_in_kernel):
        raise NotImplementedError(
            f"the fused kernel cannot take this `activation`: {cannot}; apply it to the result, or use "
            'implementation="xla"'
        )
    batch, *_ = sizes(operands, forms)
    if batch == 0:
        raise NotImplementedError('the fused kernel needs a batch of at least 1, got 0: use implementation="xla"')
    problem(operands, forms, out_dtype).check(config, target)


def choose_config(operands: Operands, forms: Forms, out_dtype: Any, target: Target) -> Config:
    """The configuration for a product that nobody has configured. Raises NotImplementedError if there is none."""
    config, _ = choose.choose_config(problem(operands, forms, out_dtype), target)
    check(operands, forms, out_dtype, config, target)
    return config


def finish(product: jax.Array, operands: Operands, out_dtype: Any, activation: Any) -> jax.Array:
    """The epilogue on a whole product, by XLA; `activation` is a function of its values."""
    if operands.row_scale is not None:
        product = product * operands.row_scale[:, None]
    if operands.column_scale is not None:
        product = product * operands.column_scale
    if operands.bias is not None:
        product = product + operands.bias
    if operands.addend is not None:
        product = product + operands.addend.astype(product.dtype)
    if activation is not None:
        product = activation(product)
    return product.astype(out_dtype)


@in_32_bits
def launch(operands: Operands, plan: Plan) -> jax.Array:
    """Runs the kernel; everything has been checked. Returns [(batch,) m, n]."""
    config, forms, split = plan.config, plan.forms, plan.config.split_k
    batch, m, n, k = sizes(operands, forms)
    batches = batch or 1
    order = TileOrder.of(m, n, config)
    k_steps = ceil_div(ceil_div(k, config.tile_k), split)
    clusters = plan.target.num_cores // config.cluster
    work = hopper.StreamK(batches * split * order.tiles, k_steps, clusters, config.stream_k)
    out_dtype = jnp.dtype(jnp.float32 if split > 1 else plan.out_dtype)
    names = ["lhs", "rhs", *(["addend", "bias", "row_scale", "column_scale"] if split == 1 else [])]
    inputs = {name: _padded(name, x, config) for name in names if (x := getattr(operands, name)) is not None}
    program = None if plan.activation is None else plan.activation.program
    if split == 1 and program is not None:
        inputs |= _packed(operands.scalars, program.scalars)
    if "addend" in inputs:
        inputs["addend"] = inputs["addend"].astype(out_dtype)  # It passes through the buffer of the result.

    def tile_at(index: Any) -> hopper.Tile:
        step = quotient(index, order.tiles)
        row, column = hopper.own_tile(config, *order(index - step * order.tiles))
        part = remainder(step, split)
        return hopper.Tile(step, row, column, out_row=row * config.tile_m, k_first=part * k_steps)

    def of_batch(ref: Any, tile: hopper.Tile) -> Any:
        return ref.at[quotient(tile.step, split)] if len(ref.shape) == 3 else ref

    def body(*refs: Any) -> None:
        given = dict(zip(inputs, refs[: len(inputs)], strict=True))
        out_gmem, *sums = refs[len(inputs) :]
        partial = None
        if work.cuts:
            (flags,) = shared_flags(hopper.partial_sums_flags(work, config))
            partial = hopper.PartialSums(sums[0], flags)

        def epilogue(values: jax.Array, rows: Any, columns: Any, addend: jax.Array | None) -> jax.Array:
            if "row_scale" in given:
                values = values * hopper.spread(given["row_scale"], rows, values.shape, 0)
            if "column_scale" in given:
                values = values * hopper.spread(given["column_scale"], columns, values.shape, 1)
            if "bias" in given:
                values = values + hopper.spread(given["bias"], columns, values.shape, 1)
            if addend is not None:
                values = values + addend
            if program is None:
                return values
            return program(values, _unpacked(given, program.scalars)).astype(jnp.float32)

        hooks = hopper.Hooks(
            load_lhs=lambda tile, load: load(of_batch(given["lhs"], tile)),
            rhs_at=lambda tile: of_batch(given["rhs"], tile),
            out_at=lambda tile: out_gmem.at[tile.step] if len(out_gmem.shape) == 3 else out_gmem,
            addend_at=(lambda tile: of_batch(given["addend"], tile)) if "addend" in given else None,
            epilogue=epilogue if split == 1 else None,
        )

        def run(buffers: hopper.Buffers) -> None:
            hopper.mainloop(
                work=work,
                tile_at=tile_at,
                config=config,
                buffers=buffers,
                hooks=hooks,
                forms=forms,
                partial=partial,
            )

        types = hopper.buffer_types(config, operands.lhs.dtype, out_dtype, m=m, forms=forms,
                                    rhs_dtype=operands.rhs.dtype, addend="addend" in inputs)  # fmt: skip
        pl.run_scoped(run, types, collective_axes=hopper.THREAD_AXIS)

    leading = (batches * split,) if batch is not None or split > 1 else ()
    out_types = [jax.ShapeDtypeStruct((*leading, m, n), out_dtype)]
    if work.cuts:
        out_types.append(hopper.partial_sums_type(work, config))
    out, *_ = hopper.launch(
        body,
        out_type=tuple(out_types),
        num_ctas=plan.target.num_cores,
        cluster=config.cluster,
        name="overlap_matmul",
    )(*inputs.values())
    if split == 1:
        return out
    product = out.reshape(batches, split, m, n).sum(axis=1)
    return finish(product if batch is not None else product[0], operands, plan.out_dtype, plan.computed(operands))


def _padded(name: str, x: jax.Array, config: Config) -> jax.Array:
    """Vectors get the length of whole tiles, since threads read them without looking where they end."""
    rows, columns = config.cluster_tile
    tile = {"bias": columns, "column_scale": columns, "row_scale": rows}.get(name)
    return x if tile is None else jnp.pad(x, (0, -x.shape[0] % tile))


def _packed(scalars: tuple[Any, ...], dtypes: tuple[str, ...]) -> dict[str, jax.Array]:
    """An activation's scalars as vectors, which a kernel can have: one of f32, one of int32."""
    vectors: dict[str, list[Any]] = {}
    for scalar, dtype in zip(scalars, dtypes, strict=True):
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


_VECTORS = {"floats": jnp.float32, "integers": jnp.int32}


def _vector_of(dtype: str) -> str:
    return "floats" if "float" in dtype else "integers"
