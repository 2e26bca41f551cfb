"""All-gather of the left operand and matmul as one kernel.

Device d of D holds lhs[m_shard, k] and rhs[k, n_shard] and computes gathered(lhs) @ rhs. The kernel is in
`lhs_kernel.py`; for few rows per shard it is in `joined_kernel.py`.

Constraints: f16, bf16 or f8. The rows of all matrices are multiples of 16 bytes. The devices can address each other
(`overlap/primitives/host_mesh.py`).

Source: the collective matmul of Wang et al., "Overlap Communication with Dependent Computation via Decomposition"
(ASPLOS 2023), here without a barrier between its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.frame import arguments, call
from overlap.frame.signatures import AnyArray, Arguments, AxisName, PerRhs, Scale, Sides
from overlap.kernels.config import Config
from overlap.kernels.operations import GATHER_LHS

GatherTransport = Literal["pull", "ring"]


class _Keywords(TypedDict, total=False):
    """The keywords of all overloads. If `rhs` is a list, those of each right operand are lists, too."""

    addend: PerRhs | None
    bias: PerRhs | None
    lhs_scale: Scale | None
    rhs_scale: Scale | Sequence[Scale] | None
    transpose_lhs: bool
    transpose_rhs: bool
    keep_gathered: bool
    preferred_element_type: DTypeLike | None
    config: Config | None
    implementation: Implementation | None
    transport: GatherTransport | None


class _OfEach(_Keywords, total=False):
    """The keywords where each right operand has a result of its own."""

    activation: Callable[[jax.Array], jax.Array] | None


type _OfSeveral = Callable[[jax.Array, jax.Array], jax.Array] | Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: Sides,
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    **keywords: Unpack[_OfEach],
) -> Sides: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray, rhs: Sides, axis_name: AxisName, *, return_gathered: Literal[True], **keywords: Unpack[_OfEach]
) -> tuple[Sides, jax.Array]: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: Sequence[jax.Array],
    axis_name: AxisName,
    *,
    activation: _OfSeveral,
    return_gathered: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> jax.Array: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: Sequence[jax.Array],
    axis_name: AxisName,
    *,
    activation: _OfSeveral,
    return_gathered: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    axis_name: AxisName,
    *,
    addend: PerRhs | None = None,
    bias: PerRhs | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    keep_gathered: bool = False,
    return_gathered: bool = False,
    preferred_element_type: DTypeLike | None = None,
    config: Config | None = None,
    implementation: Implementation | None = None,
    transport: GatherTransport | None = None,
) -> jax.Array | list[jax.Array] | tuple[Any, ...]:
    """Gathers `lhs` along a mesh axis and multiplies it by `rhs`, communication hidden behind computation.

    Call it inside `jax.shard_map`. The result equals `lax.all_gather(lhs, axis_name, axis=-2, tiled=True) @ rhs`.
    Several right operands (Q, K and V; gate and up) share one gather and one kernel.

    Args:
      lhs: [..., m_shard, k] per shard; globally [..., D · m_shard, k], rows sharded over the D devices of `axis_name`.
        The fused kernel takes float16, bfloat16, or float8 (on Hopper with `transpose_rhs`); float8 crosses the links
        as float8. Where each leading index has few rows, the rows of all shards are computed as one product
        (`joined_kernel.py`).
      rhs: [k, n_shard] per shard; globally [k, D · n_shard], columns sharded over `axis_name`. Same dtype as `lhs`
        (float8 kinds may be mixed). Or a list or tuple of such matrices, each with its own n_shard; they are not
        concatenated. With XLA's implementation `rhs` may have leading dimensions: those of `lhs`, or any if `lhs` has
        none.
      axis_name: the mesh axis, or a tuple of axes, which count as one; see `overlap.matmul`.
      addend: [..., D · m_shard, n_shard] or [D · m_shard, n_shard]. Only XLA's implementation takes it. `addend`,
        `bias` and `rhs_scale` are lists if `rhs` is one, with None for a right operand that has none.
      activation: of one array, then applied to each result; or of as many arrays as there are right operands.
      lhs_scale: [m_shard, 1] or [..., m_shard, 1], gathered with the rows, as block scales are (by the transport
        "pull"); or a scalar, the same on all devices of the axis.
      transpose_lhs: [..., k, m_shard] per shard. Only XLA's implementation takes it.
      keep_gathered: whether the gathered `lhs` is kept for the backward pass. This takes D times the memory of `lhs`;
        otherwise the backward pass of the kernel gathers `lhs` again. (XLA's implementation always keeps it, unless
        `jax.checkpoint` says otherwise.)
      return_gathered: whether to return the gathered `lhs` as well, which is then kept, too.
      transport: how the shards travel in the fused kernel. The results have the same bits. "pull" (the default): every
        device reads each peer's shard itself. Use it where all peers are one hop away, as the GPUs of one host are
        behind its switch. "ring": every device passes the rows that it has multiplied on to the device before it. Use
        it where only neighbours in the order of `axis_name` have a link, which traffic between other devices would
        share.

    Keywords not listed here: see `overlap.matmul`.

    Returns:
      [..., D · m_shard, n_shard] per shard; globally [..., D · m_shard, D · n_shard], columns sharded. If `rhs` is a
      list or tuple, a list or tuple of such arrays, or a single one if the activation takes all of them. With
      `return_gathered`, a pair of the above and the gathered `lhs`: [..., D · m_shard, k], or transposed if `lhs` is.
      The gathered `lhs` is typed as the same on all devices of the axis, so `out_specs` may leave the axis out.
      Deterministic: repeated calls give the same bits.

    Raises:
      ValueError: not inside `shard_map`; an unknown or repeated axis; or wrong ranks, dtypes, sizes or config.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call. The message says why and what
        to do.

    Differentiable to any order, in forward and reverse mode. If this call runs its kernel, the result has the operands'
    dtype, there are no scales, and nothing depends on a returned gathered `lhs`, the backward pass has a kernel. It is
    chosen for itself, as for a call without `config`:

    - The cotangent of `lhs` is one `matmul_reduce_scatter` of all right operands, with the same kind of transport.
    - If the gathered `lhs` was not returned, it travels once more beside that kernel (by "pull"). The cotangent of each
      `rhs` is then a plain product, by XLA.

    XLA computes all other products, and gathers `lhs` for them if no kernel has.

    `vmap` over `lhs` and an `lhs_scale` of rows becomes a leading dimension, with the configuration of a single
    element. (For leading dimensions in the call itself, the configuration is chosen for all of them together.) For
    `vmap` over anything else XLA runs, or NotImplementedError is raised if implementation="fused".

    Examples:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> layer = jax.shard_map(
      ...     lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x"),
      ...     mesh=mesh, in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"),
      ... )
      >>> y = jax.jit(layer)(x, w)
      >>> gate, up = overlap.all_gather_lhs_matmul(x_shard, (w_gate, w_up), "x")  # inside such a layer
      >>> swiglu = lambda gate, up: jax.nn.silu(gate) * up
      >>> h = overlap.all_gather_lhs_matmul(x_shard, (w_gate, w_up), "x", activation=swiglu)  # inside such a layer

    Source: Wang et al., "Overlap Communication with Dependent Computation via Decomposition" (ASPLOS 2023).
    """
    keep_gathered = arguments.flag("keep_gathered", keep_gathered)
    outs = call.run(
        GATHER_LHS,
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
            return_gathered=arguments.flag("return_gathered", return_gathered) or keep_gathered,
            transport=transport,
        ),
    )
    return outs[0] if keep_gathered and not return_gathered else outs
