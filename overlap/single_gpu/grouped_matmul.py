"""`grouped_matmul`: each group of rows times a matrix of its own, as a layer of experts multiplies its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.frame import call
from overlap.frame.signatures import AnyArray, Arguments, Scale
from overlap.kernels.config import Config
from overlap.kernels.operations import GROUPED


def grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    group_sizes: AnyArray,
    *,
    bias: AnyArray | Sequence[AnyArray] | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes activation(lhs_scale · (lhs[rows of e] @ rhs[e]) · rhs_scale[e] + bias[e]) for each group e of rows.

    The rows of a group follow each other: first the `group_sizes[0]` rows of group 0, then those of group 1, and so on.
    The sizes are data, may be zero, and may differ from call to call without anything being compiled again.

    Args:
      lhs: [m, k]. float16, bfloat16, or float8 (e4m3fn, e5m2); by XLA any floating-point dtype.
      rhs: [groups, k, n], or [groups, n, k] with `transpose_rhs` (float8 needs it). Same dtype as `lhs` (float8 kinds
        may be mixed). Or a list or tuple of such arrays, if `activation` takes an array for each; `bias` and
        `rhs_scale` are then lists, too.
      group_sizes: integers [groups]: how many rows each group has. Rows behind all groups may hold anything; their
        results are zero. If the sizes add up to more than m, the last groups have fewer rows. A negative size counts
        as 0.
      bias: [groups, n], added to each row of the group.
      activation: as in `matmul`, but a function that no kernel can compute is applied by XLA to the products (with
        `implementation="fused"` it is refused).
      lhs_scale: a factor of the product, in float32: a scalar, or [m, 1], one value per row.
      rhs_scale: a factor of the product, in float32: a scalar, or [groups, n], one value per column of each group.
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32.
      transpose_rhs: whether `rhs` is stored transposed. The kernel reads it as it lies, without a copy.
      config: tile sizes of the kernel; by default the model chooses, as for equal groups.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla" (`jax.lax.ragged_dot`, which lets a NaN
        among the weights of one group into the results of all), or None to choose: the kernel wherever it can serve the
        call on a Hopper GPU.

    Returns:
      [m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes, the activation or the config are wrong.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why. Or,
        outside of `jax.shard_map`, rows, groups or k are sharded along Explicit mesh axes.

    Works under `jax.jit` and `lax.scan`, inside `jax.shard_map` (each device multiplies its own rows), and under
    `jax.vmap`, which computes one product after the other. Outside of `jax.shard_map`, `rhs`, `bias` and `rhs_scale`
    may be sharded along n over Explicit mesh axes, as is the result then. It has derivatives of any order. The backward
    pass runs two kernels: the same product for `lhs`, and for `rhs` one that contracts the rows of each group. If `rhs`
    is a list, one kernel adds the products for `lhs` in float32, and each entry has a contraction. Cotangents are
    rounded to the operands' dtype (bfloat16 for float8) before they are multiplied. With an
    activation the values before it are kept in float32 for the backward pass; in the dtype of the result if the
    activation takes several.

    Examples:
      >>> tokens, experts = jnp.ones((6, 64), jnp.bfloat16), jnp.ones((3, 64, 128), jnp.bfloat16)
      >>> overlap.grouped_matmul(tokens, experts, jnp.array([4, 0, 2])).shape
      (6, 128)

    Source: the grouped products of CUTLASS and of "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts"
    (Gale et al., MLSys 2023). That tiles of all groups are numbered together is also how DeepGEMM deals them out.
    """
    given = Arguments(
        lhs,
        rhs,
        group_sizes=group_sizes,
        bias=bias,
        activation=activation,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        config=config,
        implementation=implementation,
    )
    return call.run_on_each_device(GROUPED, given)
