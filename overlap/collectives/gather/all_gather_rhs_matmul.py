"""All-gather of the right operand and matmul as one kernel: the weights are sharded (FSDP), the activations are not.

Device d of D holds its own rows lhs[m, k] and a shard of the weights, and computes lhs @ gathered(rhs). The weights are
sharded along n (each shard gives columns of the result) or along k (each shard gives a part of every sum). The kernel
is in `rhs_kernel.py`.

Constraints: f16 or bf16. The rows of all matrices are multiples of 16 bytes; if the weights are sharded along k, so are
the rows of the part of lhs that one shard multiplies. The devices can address each other
(`overlap/primitives/host_mesh.py`).

Source: Zhao et al., "PyTorch FSDP" (VLDB 2023) for the layout; Wang et al. (ASPLOS 2023) for the overlap.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.frame import arguments, call
from overlap.frame.signatures import AnyArray, Arguments, AxisName, Given, Scale
from overlap.kernels.config import Config
from overlap.kernels.operations import GATHER_RHS_K, GATHER_RHS_N, OperationSpec


def _spec(dimension: Given, transpose_rhs: Given) -> OperationSpec:
    """Returns the operation: it gathers `rhs` along n or k of the product."""
    transposed = arguments.flag("transpose_rhs", transpose_rhs)
    first, second = ("[n / D, k]", "[n, k / D]") if transposed else ("[k / D, n]", "[k, n / D]")
    meaning = f"0 (`rhs` is {first} per shard) or 1 ({second})"
    is_first = arguments.index("dimension", dimension, (0, 1), meaning) == 0
    along_k = not is_first if transposed else is_first
    return GATHER_RHS_K if along_k else GATHER_RHS_N


def all_gather_rhs_matmul(
    lhs: AnyArray,
    rhs: AnyArray,
    axis_name: AxisName,
    *,
    dimension: int,
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
    """Gathers `rhs` along a mesh axis and multiplies `lhs` by it, communication hidden behind computation.

    For fully sharded data parallelism: the weights are sharded over the axis, and each device has rows of its own. Call
    it inside `jax.shard_map`. The result equals
    `lhs @ lax.all_gather(rhs, axis_name, axis=dimension, tiled=True)`.

    Args:
      lhs: [..., m, k] per shard; globally, for example, [..., D · m, k], with the rows sharded over the D devices of
        `axis_name`. Leading dimensions are more rows. float16 or bfloat16 in the fused kernel.
      rhs: one shard of the [k, n] weights (with `transpose_rhs` of the [n, k] weights), in the same dtype. With
        dimension=1 it is [k, n_shard] per shard, globally [k, D · n_shard]; with dimension=0 it is
        [k_shard, n] per shard, globally [D · k_shard, n].
        With XLA's implementation it may have leading dimensions: those of `lhs`, or any if `lhs` has none.
      axis_name: the mesh axis, or a tuple of axes, which count as one; see `overlap.matmul`.
      dimension: the sharded dimension of `rhs`, as it lies in memory: 0 or 1, which are k and n, and with
        `transpose_rhs` n and k. If `rhs` has more than two dimensions, it counts among the last two.
      addend: [..., m, n] or [m, n]. Only XLA's implementation takes `addend`, `bias`, `activation`, `lhs_scale`,
        `rhs_scale` and `transpose_rhs`.
      rhs_scale: a scalar; or [n_shard] where n is gathered (with the columns), else [n]. Block scales of `rhs` are
        gathered with it.
      transpose_lhs: [..., k, m]. The fused kernel then takes a single matrix: all leading dimensions must be 1.

    Keywords not listed here: see `overlap.matmul`.

    Returns:
      [..., m, n] per shard, where n = D · n_shard if n is gathered; the rows are sharded as those of `lhs`.
      Deterministic: repeated calls give the same bits. If k is gathered, each device begins its sums with its own
      shard, so equal rows on two devices may differ in the last bit.

    Raises:
      ValueError: not inside `shard_map`; an unknown or repeated axis; or wrong ranks, dtypes, sizes, dimension or
        config.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call. The message says why and what
        to do.

    The kernel keeps the peers' D − 1 shards of the weights in scratch memory.

    Differentiable to any order, in forward and reverse mode. All derivatives run by XLA; the gradient of `rhs` is
    reduce-scattered. `vmap` over `lhs` becomes more rows, with the configuration of a single element. For `vmap` over
    `rhs`, or over a transposed `lhs`, XLA runs, or NotImplementedError is raised if implementation="fused".

    Examples:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.all_gather_rhs_matmul(x, w, "x", dimension=0),
      ...     mesh=mesh, in_specs=(P("x", None), P("x", None)), out_specs=P("x", None),
      ... )
      >>> y = jax.jit(layer)(x, w)

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (VLDB 2023).
    """
    given = Arguments(
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
    )
    return call.run(_spec(dimension, transpose_rhs), given)
