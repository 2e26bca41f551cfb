"""Matmul and reduce-scatter as one kernel: the second half of a tensor-parallel layer.

Device d of D holds lhs[m, k_shard] and rhs[k_shard, n]. The products of all devices are summed, and each device keeps a
block of the sum: some rows, or some columns. The kernel is in `blocks_kernel.py`.

Constraints: f16, bf16 or f8. The rows of all matrices, and of a block, are multiples of 16 bytes. The devices can
address each other (`overlap/primitives/host_mesh.py`).

Source: the collective matmul of Wang et al., "Overlap Communication with Dependent Computation via Decomposition"
(ASPLOS 2023), here without a barrier between its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.frame import arguments, call
from overlap.frame.signatures import AnyArray, Arguments, AxisName, Scale
from overlap.kernels.config import Config
from overlap.kernels.operations import SCATTER_M, SCATTER_N

ScatterTransport = Literal["push", "ring"]


def matmul_reduce_scatter(
    lhs: AnyArray | Sequence[AnyArray],
    rhs: AnyArray | Sequence[AnyArray],
    axis_name: AxisName,
    *,
    dimension: int = 0,
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
    transport: ScatterTransport | None = None,
) -> jax.Array:
    """Multiplies `lhs` by `rhs`, sums over a mesh axis and keeps a block, communication hidden behind computation.

    For layers whose contraction is sharded (the output projection of attention, the second matrix of an MLP). Call it
    inside `jax.shard_map`. The result equals
    `lax.psum_scatter(lhs @ rhs, axis_name, scatter_dimension=dimension, tiled=True)`. Each device first
    computes its parts of the other devices' blocks. Each part travels while the device computes the next one.

    Args:
      lhs: [..., m, k_shard] per shard; globally [..., m, D · k_shard], columns sharded over the D devices of
        `axis_name`. The fused kernel takes float16, bfloat16, or float8 (on Hopper with `transpose_rhs`). Or a list of
        such matrices, each with its own k_shard: see `rhs`.
      rhs: [k_shard, n] per shard; globally [D · k_shard, n], rows sharded over `axis_name`. Same dtype as `lhs` (float8
        kinds may be mixed). With XLA's implementation `rhs` may have leading dimensions: those of `lhs`, or any if
        `lhs` has none. Or a list as long as that of `lhs`: the products of all pairs are added, in float32 and by one
        kernel, before the sum over devices. Nothing is concatenated.
      axis_name: the mesh axis, or a tuple of axes, which count as one; see `overlap.matmul`.
      dimension: the dimension of the result that is sharded: 0, its rows (m), or 1, its columns (n). If the
        result has more than two dimensions, it counts among the last two. D must divide the size of that dimension.
      addend: of the result's shape, or without its leading dimensions: this device's block of a residual, for example.
        Like `bias` and `activation` it is applied to the sum.
      bias: [n], or [n / D] with dimension=1.
      lhs_scale: of this device's product. A scalar may differ from device to device. Only XLA's implementation takes
        block scales here.
      preferred_element_type: also the dtype of the parts that travel. Parts are added in float32, but each is rounded
        to this dtype before it is sent: with bfloat16 an error of up to 2^-9 of each part. With float32 nothing is
        lost, and twice as many bytes travel.
      config: `cluster`, `stream_k` and `split_k` must be 1.
      transport: how the parts travel in the fused kernel. "push" (the default): every device sends its part of each
        block to the block's owner, which adds all parts up. Use it where all peers are one hop away, as the GPUs of one
        host are behind its switch. "ring": every device adds its own part to the sum that the next device in the
        order of `axis_name` has sent, and sends the new sum to the device before it. Use it where only
        neighbours have a link. The sum is then rounded on each of its D − 1 hops.

    Keywords not listed here: see `overlap.matmul`.

    Returns:
      [..., m / D, n] per shard, globally [..., m, n] with rows sharded; or, with dimension=1, [..., m, n / D].
      Deterministic: parts are added in a fixed order, so repeated calls give the same bits. (With "push", the owner
      first sums the parts of the others, from the device before it on backwards, and then adds that sum to its own
      part.) The two transports may differ in the last bits.

    Raises:
      ValueError: not inside `shard_map`; an unknown or repeated axis; wrong ranks, dtypes, sizes or config; or D does
        not divide the scattered dimension.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call. The message says why and what
        to do.

    Differentiable to any order, in forward and reverse mode. With rows scattered, no scales, and a result of the
    operands' dtype, the cotangent of `lhs` (of all matrices in it, if it is a list) is an `all_gather_lhs_matmul` with
    the same kind of transport, if this call runs its kernel. Whether that one runs as a kernel too is chosen for
    itself, as for a call without `config`. The gathered cotangent of the result is used for the cotangent of `rhs` as
    well. XLA computes everything else in the backward pass.

    `vmap` over `lhs` and an `lhs_scale` of rows becomes a leading dimension, with the configuration of a single
    element. For `vmap` over a bias or arrays that an activation captures, the kernel computes the sum and XLA the rest.
    For `vmap` over anything else XLA runs, or NotImplementedError is raised if implementation="fused".

    Examples:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.matmul_reduce_scatter(x, w, "x"),
      ...     mesh=mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P("x", None),
      ... )
      >>> y = jax.jit(layer)(x, w)
      >>> dx = overlap.matmul_reduce_scatter([a, b], [u, v], "x")  # inside such a layer: a @ u + b @ v

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    meaning = "0 (each device keeps [m / D, n]) or 1 ([m, n / D])"
    spec = SCATTER_N if arguments.index("dimension", dimension, (0, 1), meaning) else SCATTER_M
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
        transport=transport,
    )
    return call.run(spec, given)
