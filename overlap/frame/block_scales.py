"""Scales of blocks: `lhs_scale` and `rhs_scale` with one power of two for each 32 elements along k.

Their dtype, float8_e8m0fnu, tells them from scales of rows and columns. An operand and its scales have the same shape,
but for k / 32 in place of k. So whatever is done to an operand (a gather, a batch dimension folded into the rows) is
done to its scales in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from overlap.frame import arguments
from overlap.frame.operands import Leaf, Operands, to_rank
from overlap.kernels.block_scales import BLOCK, SCALE_DTYPE
from overlap.kernels.config import FLOAT8
from overlap.kernels.operations import OperandLayouts

# In this dtype an 8-bit float times a power of two is exact, unless the product overflows or underflows.
_DEQUANTIZED = jnp.bfloat16
# The number of elements along k that share a scale (of dtype float8_e4m3fn) in nvfp4, a format that is refused.
_NVFP4_BLOCK = 16


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand, and the checks of its scale of blocks.

    Attributes:
      name: the operand's, for messages.
      scale_name: the scale's, for messages.
      array: the operand.
      k_axis: the operand's dimension of size k, -1 or -2.
    """

    name: str
    scale_name: str
    array: Leaf
    k_axis: int

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape that a scale of blocks must have."""
        return self._scale_shape(BLOCK)

    def _scale_shape(self, block: int) -> tuple[int, ...]:
        shape = list(self.array.shape)
        shape[self.k_axis] //= block
        return tuple(shape)

    @property
    def k(self) -> int:
        return self.array.shape[self.k_axis]

    def is_scaled_by_blocks(self, scale: Leaf) -> bool:
        """Whether `scale` is a scale of blocks.

        Raises:
          ValueError: it has the shape of a scale of blocks, but another dtype.
        """
        dtype = getattr(scale, "dtype", None)
        if dtype == SCALE_DTYPE:
            return True
        shape = tuple(getattr(scale, "shape", ()))
        if dtype == jnp.float8_e4m3fn and shape == self._scale_shape(_NVFP4_BLOCK) and self.k >= 2 * _NVFP4_BLOCK:
            raise ValueError(
                f"`{self.scale_name}` of dtype {dtype} and shape {shape} scales blocks of {_NVFP4_BLOCK} elements "
                f"along k={self.k} (nvfp4), and only blocks of {BLOCK} with scales of dtype {SCALE_DTYPE.name} are "
                f"taken yet: multiply `{self.name}` by it in bfloat16 before the call"
            )
        if shape != self.scale_shape or self.k < 2 * BLOCK:  # (k may be a symbol, which cannot be compared.)
            return False
        raise ValueError(
            f"`{self.scale_name}` of shape {shape} scales blocks of {BLOCK} elements along k={self.k} and must have "
            f"dtype {SCALE_DTYPE.name}, got {dtype}: cast it, e.g. with .astype(jnp.{SCALE_DTYPE.name}), which rounds "
            "to powers of two"
        )

    def checked(self, scale: Leaf) -> Leaf:
        """Returns the scale, as an array.

        Raises:
          ValueError: it does not fit the operand.
        """
        if self.array.dtype not in FLOAT8:
            raise ValueError(
                f"`{self.scale_name}` of dtype {SCALE_DTYPE.name} scales blocks of float8_e4m3fn or float8_e5m2, got "
                f"`{self.name}` of dtype {self.array.dtype}: cast one of them"
            )
        if self.k % BLOCK:
            whole = self.k + -self.k % BLOCK
            raise ValueError(
                f"`{self.scale_name}` scales blocks of {BLOCK} elements, and k must be a multiple of {BLOCK}, got "
                f"k={self.k} in `{self.name}` {tuple(self.array.shape)}: pad both operands with zeros to k={whole}"
            )
        if tuple(scale.shape) != self.scale_shape:
            raise ValueError(
                f"`{self.scale_name}` of dtype {SCALE_DTYPE.name} must have shape {self.scale_shape}, one value per "
                f"{BLOCK} elements of `{self.name}` {tuple(self.array.shape)} along k, got {tuple(scale.shape)}: "
                "reshape it, or cast it to float32 if it scales rows, columns or everything"
            )
        return arguments.array(self.scale_name, scale)


def normalize(
    lhs_scale: Leaf, rhs_scale: Leaf, lhs: Leaf, rhs_list: list[Leaf], several: bool, layouts: OperandLayouts
) -> tuple[Leaf, tuple[Leaf, ...]] | None:
    """Checks scales of blocks.

    Args:
      lhs_scale: `lhs_scale` as the caller gave it.
      rhs_scale: `rhs_scale` as the caller gave it; for several right operands a list or tuple with one entry for each.
      lhs: the left operand.
      rhs_list: the right operands.
      several: whether the caller gave a list of right operands.
      layouts: how the operands lie in memory.

    Returns:
      The left operand's scale and a tuple of the right operands' scales; None if no scale is a scale of blocks.

    Raises:
      ValueError: a scale of blocks has a wrong dtype or shape, or only one operand has such scales.
    """
    left = _Operand("lhs", "lhs_scale", lhs, -2 if layouts.transpose_lhs else -1)
    k_axis = -1 if layouts.transpose_rhs else -2
    indices = [f"[{index}]" for index in range(len(rhs_list))] if several else [""]
    right = [
        _Operand(f"rhs{index}", f"rhs_scale{index}", rhs, k_axis) for index, rhs in zip(indices, rhs_list, strict=True)
    ]
    given = list(rhs_scale) if several and isinstance(rhs_scale, (list, tuple)) else [rhs_scale]
    # (A list of the wrong length, and one array for several right operands, are refused below or in `scales.py`.)
    of_right = [operand.is_scaled_by_blocks(scale) for operand, scale in zip(right, given, strict=False)]
    if not left.is_scaled_by_blocks(lhs_scale) and not any(of_right):
        return None
    missing = [None] * (len(right) - len(given))
    for operand, scale in ((left, lhs_scale), *zip(right, [*given, *missing], strict=False)):
        if not operand.is_scaled_by_blocks(scale):
            was = "nothing" if scale is None else arguments.shown(scale)
            raise ValueError(
                f"`lhs_scale` and `rhs_scale` must both be of blocks or neither, got {was} as `{operand.scale_name}`: "
                f"give {SCALE_DTYPE.name} of shape {operand.scale_shape}, ones where there is nothing to scale"
            )
    if len(given) != len(right):
        raise ValueError(
            f"`rhs_scale` must have {len(right)} entries, one per matrix of `rhs`, got {len(given)}: give one scale of "
            "blocks per matrix"
        )
    return left.checked(lhs_scale), tuple(x.checked(scale) for x, scale in zip(right, given, strict=True))


# --- The implementation by XLA ----------------------------------------------------------------------------------------


def gathered(operands: Operands, gather: Callable[[Operands], Operands]) -> Operands:
    """Returns `gather(operands)`, with the scales of blocks gathered in the same way.

    Raises:
      TypeError: when the scales are differentiated: they have no derivative.
    """
    whole = gather(operands)
    if not operands.is_block_scaled:
        return whole
    # Gather the scales as integers, since every collective takes integers.
    left, right = operands.lhs_block_scale, operands.rhs_block_scales

    def as_bits(scale: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(_without_derivative(scale), jnp.uint8)

    bits = gather(jax.tree.map(as_bits, Operands(left, right or ())))
    left, *right = (lax.bitcast_convert_type(x, SCALE_DTYPE) for x in (bits.lhs, *bits.rhs_list))
    return dataclasses.replace(whole, lhs_block_scale=left, rhs_block_scales=tuple(right))


def dequantized(operands: Operands, layouts: OperandLayouts) -> Operands:
    """Returns the operands multiplied by their scales of blocks, in bfloat16, in which these products are exact."""
    if not operands.is_block_scaled:
        return operands
    lhs = _scaled(operands.lhs, operands.lhs_block_scale, -2 if layouts.transpose_lhs else -1)
    k_axis = -1 if layouts.transpose_rhs else -2
    pairs = zip(operands.rhs_list, operands.rhs_block_scales or (), strict=True)
    rhs_list = tuple(_scaled(rhs, scale, k_axis) for rhs, scale in pairs)
    return dataclasses.replace(operands, lhs=lhs, rhs_list=rhs_list, lhs_block_scale=None, rhs_block_scales=None)


def _scaled(x: jax.Array, scale: jax.Array, k_axis: int) -> jax.Array:
    factor = jnp.repeat(scale.astype(_DEQUANTIZED), BLOCK, axis=scale.ndim + k_axis)
    rank = max(x.ndim, factor.ndim)  # One of both may lack the batch dimension.
    return to_rank(x.astype(_DEQUANTIZED), rank) * to_rank(factor, rank)


@jax.custom_jvp
def _without_derivative(scale: jax.Array) -> jax.Array:
    """Returns `scale`, and raises TypeError if it is differentiated.

    Without this function, the conversion to integers would give the scale a derivative of zero, and no error.
    """
    return scale


def _refuse(primals: tuple[jax.Array], tangents: tuple[Leaf]) -> tuple[jax.Array, Leaf]:
    (scale,), (tangent,) = primals, tangents
    if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
        raise TypeError(
            f"`lhs_scale` and `rhs_scale` of dtype {SCALE_DTYPE.name} are powers of two, and have no derivative: apply "
            "jax.lax.stop_gradient to them, or differentiate with respect to the other operands (`argnums`)"
        )
    return scale, tangent


_without_derivative.defjvp(_refuse, symbolic_zeros=True)
