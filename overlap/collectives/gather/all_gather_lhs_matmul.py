"""All-gather of the left operand and matmul as one kernel.

Device d of D holds lhs[m_shard, k] and rhs[k, n_shard] and computes gathered(lhs) @ rhs. The kernel is in
`lhs_kernel.py`; for few rows per shard it is in `joined_kernel.py`.

Constraints: f16, bf16 or f8. The rows of all matrices are multiples of 16 bytes. The devices can address each other
(`overlap/primitives/clique.py`).

Source: the collective matmul of Wang et al., "Overlap Communication with Dependent Computation via Decomposition"
(ASPLOS 2023), here without a barrier between its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
from jax.typing import DTypeLike

from overlap.choice.dispatch import Implementation
from overlap.collectives.collective import peer_group_of
from overlap.collectives.gather.operation import TRANSPORTS, AllGatherLhs
from overlap.collectives.transposes import transposed
from overlap.frame import activation as activations
from overlap.frame import arguments, call
from overlap.frame.normalize import normalize
from overlap.frame.operation import Call
from overlap.frame.signatures import AnyArray, Arguments, AxisName, Scale
from overlap.kernels.config import Config
from overlap.kernels.operations import GATHER_LHS

NAME = GATHER_LHS.function
GatherTransport = Literal["pull", "ring"]


def prepare(given: Arguments) -> tuple[AllGatherLhs, Call]:
    """Checks the arguments of `all_gather_lhs_matmul` and brings them into one form; see `overlap.frame.call`."""
    returns = arguments.flag("return_gathered", given.return_gathered)
    group = peer_group_of(NAME, arguments.axis_name(given.axis_name), given.mesh)
    chosen: Any = arguments.one_of("transport", given.transport, tuple(TRANSPORTS))
    reason = "asked for" if chosen else TRANSPORTS["pull"].why
    combines = activations.takes_all(given.activation, given.rhs)
    operation = AllGatherLhs(group, reason, returns, combines, transport=chosen or "pull", transpose=transposed)
    return operation, normalize(operation, given)


# --- The public function: the type of its result depends on `rhs`, `return_gathered` and `activation` -----------------


class _Shared[Each, EachScale](TypedDict, total=False):
    """The keywords of all overloads.

    `Each` is the type of an array that each right operand has, and `EachScale` that of its scales.
    """

    addend: Each | None
    bias: Each | None
    lhs_scale: Scale | None
    rhs_scale: EachScale | None
    transpose_lhs: bool
    transpose_rhs: bool
    preferred_element_type: DTypeLike | None
    config: Config | None
    implementation: Implementation | None
    transport: GatherTransport | None


class _Keywords[Each, EachScale](_Shared[Each, EachScale], total=False):
    """The keywords where each right operand has a result of its own."""

    activation: Callable[[jax.Array], jax.Array] | None


type _OfTwo = Callable[[jax.Array, jax.Array], jax.Array]
type _OfThree = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_OfOne = _Keywords[AnyArray, Scale]
_OfSeveral = _Keywords[Sequence[AnyArray | None], Scale | Sequence[Scale]]
_OfAll = _Shared[Sequence[AnyArray | None], Scale | Sequence[Scale]]


# A single right operand. mypy does not try True and False for a `bool`, so there is an overload for `bool`, too.
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: AnyArray,
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    **keywords: Unpack[_OfOne],
) -> jax.Array: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: AnyArray,
    axis_name: AxisName,
    *,
    return_gathered: Literal[True],
    **keywords: Unpack[_OfOne],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: AnyArray,
    axis_name: AxisName,
    *,
    return_gathered: bool,
    **keywords: Unpack[_OfOne],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


# A list of right operands. `list` is invariant, so a list of one kind of array is no list[AnyArray]: hence the type
# variable.
@overload
def all_gather_lhs_matmul[Side: AnyArray](
    lhs: AnyArray,
    rhs: list[Side],
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    **keywords: Unpack[_OfSeveral],
) -> list[jax.Array]: ...
@overload
def all_gather_lhs_matmul[Side: AnyArray](
    lhs: AnyArray,
    rhs: list[Side],
    axis_name: AxisName,
    *,
    return_gathered: Literal[True],
    **keywords: Unpack[_OfSeveral],
) -> tuple[list[jax.Array], jax.Array]: ...
@overload
def all_gather_lhs_matmul[Side: AnyArray](
    lhs: AnyArray,
    rhs: list[Side],
    axis_name: AxisName,
    *,
    return_gathered: bool,
    **keywords: Unpack[_OfSeveral],
) -> list[jax.Array] | tuple[list[jax.Array], jax.Array]: ...


# A tuple of right operands.
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: tuple[AnyArray, ...],
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    **keywords: Unpack[_OfSeveral],
) -> tuple[jax.Array, ...]: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: tuple[AnyArray, ...],
    axis_name: AxisName,
    *,
    return_gathered: Literal[True],
    **keywords: Unpack[_OfSeveral],
) -> tuple[tuple[jax.Array, ...], jax.Array]: ...
@overload
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: tuple[AnyArray, ...],
    axis_name: AxisName,
    *,
    return_gathered: bool,
    **keywords: Unpack[_OfSeveral],
) -> tuple[jax.Array, ...] | tuple[tuple[jax.Array, ...], jax.Array]: ...


# Several right operands, and an activation that makes one result of them.
@overload
def all_gather_lhs_matmul[Side: AnyArray](
    lhs: AnyArray,
    rhs: list[Side] | tuple[AnyArray, ...],
    axis_name: AxisName,
    *,
    activation: _OfTwo | _OfThree,
    return_gathered: Literal[False] = False,
    **keywords: Unpack[_OfAll],
) -> jax.Array: ...
@overload
def all_gather_lhs_matmul[Side: AnyArray](
    lhs: AnyArray,
    rhs: list[Side] | tuple[AnyArray, ...],
    axis_name: AxisName,
    *,
    activation: _OfTwo | _OfThree,
    return_gathered: Literal[True],
    **keywords: Unpack[_OfAll],
) -> tuple[jax.Array, jax.Array]: ...
def all_gather_lhs_matmul(
    lhs: AnyArray,
    rhs: AnyArray | list[Any] | tuple[AnyArray, ...],
    axis_name: AxisName,
    *,
    addend: AnyArray | Sequence[AnyArray | None] | None = None,
    bias: AnyArray | Sequence[AnyArray | None] | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
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
      axis_name: the mesh axis to gather along, or a tuple of axes. The devices of a tuple of axes are counted row-major
        in the order of the tuple, as in `PartitionSpec((a, b))`. The mesh may have more axes, and its devices may be in
        any order.
      addend: [..., D · m_shard, n_shard] or [D · m_shard, n_shard], added before the activation. For several right
        operands, a list with an addend or None for each. Only XLA's implementation takes it.
      bias: [n_shard], added to each row. For several right operands, a list with a bias or None for each.
      activation: an elementwise function of float32 values, as for `overlap.matmul`: of one array, then applied to each
        result; or of as many arrays as there are right operands (`lambda gate, up: jax.nn.silu(gate) * up`), which
        makes one result of them.
      lhs_scale: a factor of the product, in float32. Either one value per row of this shard, gathered with the rows:
        [m_shard, 1], the same for all leading indices, or [..., m_shard, 1]. Or a scalar, which must be the same on all
        devices of the axis.
      rhs_scale: a factor of the product, in float32: [n_shard] or [1, n_shard], one value per column of this device; or
        a scalar. For several right operands, one scalar for all, or a list with one of these for each. Or both
        `lhs_scale` and `rhs_scale` are scales of blocks, as in `matmul`: they have the shards' shapes with k / 32 in
        place of k, and those of `lhs` are gathered with its rows (by the transport "pull").
      transpose_lhs: `lhs` lies transposed in memory, [..., k, m_shard] per shard. Only XLA's implementation takes it.
      transpose_rhs: `rhs` lies transposed in memory, [n_shard, k] per shard. No copy is made.
      return_gathered: whether to return the gathered `lhs` as well. The backward pass then keeps the gathered `lhs`,
        which takes D times the memory of `lhs`; otherwise the fused operation gathers `lhs` again. (XLA's
        implementation always keeps it, unless `jax.checkpoint` says otherwise.)
      preferred_element_type: dtype of the result; by default that of the operands, or bfloat16 for float8. The fused
        kernel writes float16 and bfloat16. Sums are accumulated in float32.
      config: tile sizes of the fused kernel; by default from a table of measurements, or else from a model, which
        treats several right operands as one of their total width.
      implementation: "fused" (one kernel; on CPU devices it runs emulated), "xla" (all-gather, then matmul), or None to
        choose: fused where it can serve the call on a GPU and XLA was not measured to be faster. The choice is logged
        once, by the logger "overlap".
      transport: how the shards travel in the fused kernel. The results have the same bits. "pull" (the default): every
        device reads each peer's shard itself. Use it where all peers are one hop away, as the GPUs of one host are
        behind its switch. "ring": every device passes the rows that it has multiplied on to the device before it. Use
        it where only neighbours in the order of `axis_name` have a link, which traffic between other devices would
        share.

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

    Example:
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
    return call.run(
        prepare,
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
            return_gathered=return_gathered,
            transport=transport,
        ),
    )
