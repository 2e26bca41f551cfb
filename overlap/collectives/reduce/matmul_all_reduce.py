"""Matmul and all-reduce as one kernel: the second half of a tensor-parallel layer whose result all devices need.

Device d of D holds lhs[m, k_shard] and rhs[k_shard, n]. The products of all devices are summed, and each device gets
the whole sum. For few rows every device computes the whole sum (`one_shot_kernel.py`). Otherwise the kernel of
`matmul_reduce_scatter` is used (`blocks_kernel.py`): each device sums one block, and sends it to all others.

Constraints: f16, bf16 or f8. The rows of all matrices are multiples of 16 bytes. Unless there are few rows, the sum can
be cut into a block of rows or columns for each device. The devices can address each other
(`overlap/primitives/host_mesh.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.frame import call
from overlap.frame.signatures import AnyArray, Arguments, AxisName, Scale
from overlap.kernels.config import Config
from overlap.kernels.operations import ALL_REDUCE


def matmul_all_reduce(
    lhs: AnyArray | Sequence[AnyArray],
    rhs: AnyArray | Sequence[AnyArray],
    axis_name: AxisName,
    *,
    addend: AnyArray | None = None,
    bias: AnyArray | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    preferred_element_type: DTypeLike | None = None,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies `lhs` by `rhs` and sums over a mesh axis, communication hidden behind computation.

    All devices get the sum. For layers whose contraction is sharded and whose result every device needs (Megatron's
    row-parallel layer without sequence parallelism, decoding). Call it inside `jax.shard_map`. The result equals
    `lax.psum(lhs @ rhs, axis_name)`. For few rows, each device sends its part of the result to all others and computes
    the whole sum (`Config.one_shot`). Otherwise each device sums a block, of rows or of columns, and sends that block
    to all others.

    Args:
      lhs: [..., m, k_shard] per shard; globally [..., m, D · k_shard], columns sharded over the D devices of
        `axis_name`. The fused kernel takes float16, bfloat16, or float8 (on Hopper with `transpose_rhs`). Or a list of
        such matrices, each with its own k_shard: see `rhs`.
      rhs: [k_shard, n] per shard; globally [D · k_shard, n], rows sharded over `axis_name`. Same dtype as `lhs` (float8
        kinds may be mixed). With XLA's implementation `rhs` may have leading dimensions: those of `lhs`, or any if
        `lhs` has none. Or a list as long as that of `lhs`: the products of all pairs are added, in float32 and by one
        kernel, before the sum over devices. Nothing is concatenated.
      axis_name: the mesh axis, or a tuple of axes, which count as one; see `overlap.matmul`.
      addend: of the result's shape, or without its leading dimensions: a residual, for example. Like `bias` and
        `activation` it is applied to the sum, once. Like `bias` and arrays that `activation` captures, it must be the
        same on all devices along `axis_name`: the kernel reads it on one of them, or on each of them.
      lhs_scale: of this device's product. A scalar may differ from device to device. Only XLA's implementation takes
        block scales here.
      preferred_element_type: also the dtype of the parts that travel; see `matmul_reduce_scatter`.
      config: tile sizes of the fused kernel (`cluster`, `stream_k` and `split_k` must be 1) and `one_shot`; by default
        from a table of measurements, or else from a model. Without `one_shot`, D must divide m, or n in units of 16
        bytes.

    Keywords not listed here: see `overlap.matmul`.

    Returns:
      [..., m, n], the same bits on all devices along `axis_name` (with `check_vma=True` its type says so).
      Deterministic: parts are added in a fixed order, so repeated calls give the same bits.

    Raises:
      ValueError: not inside `shard_map`; an unknown or repeated axis; or wrong ranks, dtypes, sizes or config.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call. The message says why and what
        to do.

    Differentiable to any order, in forward and reverse mode, as `lax.psum(lhs @ rhs, axis_name)` is. The backward pass
    runs by XLA; with `check_vma=True` it communicates nothing. The kernel folds leading dimensions into the rows.

    `vmap` over `lhs`, an `lhs_scale` of rows and an `addend` becomes a leading dimension, with the configuration of a
    single element. For `vmap` over a bias or arrays that an activation captures, the kernel computes the sum and XLA
    the rest. For `vmap` over anything else XLA runs, or NotImplementedError is raised if implementation="fused".

    Examples:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.matmul_all_reduce(x, w, "x"),
      ...     mesh=mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P(),
      ... )
      >>> y = jax.jit(layer)(x, w)

    Source: the row-parallel layer of Shoeybi et al., "Megatron-LM" (2019); reduce-scatter and all-gather as one
    all-reduce as in Thakur et al., "Optimization of Collective Communication Operations in MPICH" (2005).
    """
    return call.run(
        ALL_REDUCE,
        Arguments(
            lhs,
            rhs,
            axis_name,
            addend=addend,
            bias=bias,
            activation=activation,
            lhs_scale=lhs_scale,
            rhs_scale=rhs_scale,
            transpose_lhs=transpose_lhs,
            transpose_rhs=transpose_rhs,
            preferred_element_type=preferred_element_type,
            config=config,
            implementation=implementation,
        ),
    )
