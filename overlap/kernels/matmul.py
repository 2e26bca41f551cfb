"""`matmul`: the mainloop alone, on one GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from overlap.kernels import dispatch, hopper
from overlap.kernels.config import Config
from overlap.kernels.dispatch import Explanation
from overlap.kernels.tile_order import TileOrder


def check_operands(lhs: Any, rhs: Any, preferred_element_type: Any) -> jnp.dtype:
    """The checks that every product shares; returns the output's dtype.

    Raises:
      ValueError: wrong ranks, dtypes or sizes.
    """
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(f"`{name}` must be an array, got {type(array).__name__}")
        if len(array.shape) != 2:
            raise ValueError(f"`{name}` must have 2 dimensions, got {len(array.shape)} (shape {tuple(array.shape)})")
    if lhs.dtype != rhs.dtype:
        raise ValueError(f"`lhs` and `rhs` must have the same dtype, got {lhs.dtype} and {rhs.dtype}: cast one of them")
    if not jnp.issubdtype(lhs.dtype, jnp.floating):
        raise ValueError(f"`lhs` and `rhs` must be floating-point, got {lhs.dtype}")
    if lhs.shape[1] != rhs.shape[0]:
        raise ValueError(
            f"`lhs` and `rhs` must agree in the contraction dimension, got k={lhs.shape[1]} in lhs "
            f"{tuple(lhs.shape)} and k={rhs.shape[0]} in rhs {tuple(rhs.shape)}"
        )
    return jnp.dtype(lhs.dtype if preferred_element_type is None else preferred_element_type)


def require_unchecked_vma(*operands: Any) -> None:
    """Raises NotImplementedError if an operand's type says along which mesh axes it varies (`check_vma=True`).

    Mosaic GPU's split of a warpgroup into warps rejects such references.
    """
    for operand in operands:
        manual = getattr(jax.typeof(operand), "manual_axis_type", None) if isinstance(operand, jax.Array) else None
        if manual is not None and manual.varying:
            raise NotImplementedError(
                "the fused kernel needs `check_vma=False` in the enclosing jax.shard_map (default: True): set it, "
                'or use implementation="xla"'
            )


def decide(
    lhs: Any,
    rhs: Any,
    *,
    preferred_element_type: Any = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> Explanation:
    """Checks a call of `matmul` and says what would run. Same arguments and errors."""
    out_dtype = check_operands(lhs, rhs, preferred_element_type)
    (m, k), n = lhs.shape, rhs.shape[1]

    def check(config: Config, target: Any) -> None:
        config.check(m=m, n=n, k=k, dtype=lhs.dtype, out_dtype=out_dtype, target=target, pulls=False)
        require_unchecked_vma(lhs, rhs)

    problem = (m, n, k, str(lhs.dtype), str(out_dtype))
    return dispatch.decide("matmul", implementation, dispatch.target(), config or Config(), check, problem)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def fused(lhs: jax.Array, rhs: jax.Array, out_dtype: Any, config: Config, num_ctas: int) -> jax.Array:
    """The kernel itself: [m, k] times [k, n] on `num_ctas` cores; everything has been checked."""
    (m, k), n = lhs.shape, rhs.shape[1]
    order = TileOrder(m // config.tile_m, n // config.tile_n, config.order_minor, config.order_width)

    def tile_at(index: Any) -> hopper.Tile:
        tile_row, tile_column = order(index)
        return hopper.Tile(step=0, m=tile_row, n=tile_column, out_row=tile_row * config.tile_m)

    def body(lhs_gmem: Any, rhs_gmem: Any, out_gmem: Any) -> None:
        hooks = hopper.Hooks(load_lhs=lambda tile, load: load(lhs_gmem))

        def run(buffers: hopper.Buffers) -> None:
            hopper.mainloop(
                rhs_gmem, out_gmem, tiles=order.tiles, tile_at=tile_at, k=k, num_ctas=num_ctas, config=config,
                buffers=buffers, hooks=hooks,
            )  # fmt: skip

        pl.run_scoped(run, hopper.buffer_types(config, lhs.dtype, out_dtype), collective_axes=hopper.THREAD_AXIS)

    return hopper.launch(
        body, out_type=jax.ShapeDtypeStruct((m, n), out_dtype), num_ctas=num_ctas, name="overlap_matmul"
    )(lhs, rhs)


def _forward(lhs: jax.Array, rhs: jax.Array, out_dtype: Any, config: Config, num_ctas: int) -> Any:
    return fused(lhs, rhs, out_dtype, config, num_ctas), (lhs, rhs)


def _backward(out_dtype: Any, config: Config, num_ctas: int, saved: Any, cotangent: jax.Array) -> Any:
    del out_dtype, config, num_ctas  # The transposed products run by XLA.
    lhs, rhs = saved
    d_lhs = lax.dot_general(cotangent, rhs, (((1,), (1,)), ((), ())), preferred_element_type=lhs.dtype)
    d_rhs = lax.dot_general(lhs, cotangent, (((0,), (0,)), ((), ())), preferred_element_type=rhs.dtype)
    return d_lhs, d_rhs


fused.defvjp(_forward, _backward)


def reference(lhs: jax.Array, rhs: jax.Array, out_dtype: Any) -> jax.Array:
    """The same product by XLA."""
    return lax.dot(lhs, rhs, preferred_element_type=out_dtype)


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    preferred_element_type: Any = None,
    config: Config | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The product of two matrices on one GPU, by the mainloop that all fused operations share.

    Args:
      lhs: [m, k], float16 or bfloat16.
      rhs: [k, n], of the same dtype.
      preferred_element_type: dtype of the result; that of the operands by default. Accumulation is in float32.
      config: tile sizes; a default that suits large problems.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla", or None to choose.

    Returns:
      [m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes or the config are wrong.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why.

    Example:
      >>> overlap.matmul(jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)).shape
      (128, 256)

    Source: "Software pipelining with Mosaic GPU" in the JAX documentation.
    """
    choice = decide(
        lhs, rhs, preferred_element_type=preferred_element_type, config=config, implementation=implementation
    )
    out_dtype = check_operands(lhs, rhs, preferred_element_type)
    if choice.config is None:
        return reference(lhs, rhs, out_dtype)
    return fused(lhs, rhs, out_dtype, choice.config, choice.target.num_cores)
