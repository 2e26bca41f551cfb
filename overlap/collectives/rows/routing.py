"""`route`: from the experts that each token chose to lists of rows, the same on every run.

Each device of the axis owns num_experts / D consecutive experts. All devices gather all ids, and each sorts the routes
of its own experts. So no counts are exchanged, and all shapes are static. A *route* is one choice of one token: the
token's slot j, of k. The routes of all devices are counted by device, token and slot, in this order.

Cost per device: D · T · E / D comparisons with the own experts, a small matrix product that counts them, and a gather.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax

from overlap.frame import arguments, mesh_axes
from overlap.frame.arguments import shown
from overlap.frame.signatures import AnyArray, AxisName, Given

_MOST = jnp.iinfo(jnp.int32).max
# Tokens of a block within which routes are counted by a product.
_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The rows that one device computes for its experts: a pytree of int32 arrays, made by `overlap.route`.

    D: devices along the axis; T: tokens of one device; k: experts that each token chose; E: experts in all; C: rows,
    as many as this device may need at most. The first sum(group_sizes) rows are in use. They are sorted by expert, then
    by device, token and slot.

    Attributes:
      tokens: [C], the token that each row is a copy of, 0 … D · T - 1. Behind the last row in use: any of these.
      slots: [C], the slot of that token that chose the row's expert, 0 … k - 1. Behind the last row in use: any.
      positions: [D · T, k], the row of each route. C if this device computes nothing for that route: the expert is on
        another device, or there is no such expert, or the route was dropped.
      group_sizes: [E / D], the number of rows of each expert of this device.
      dropped: [], the number of routes to experts of this device that got no row.
      axis_name: the mesh axis of the devices, or several in their order; static. The operations check it.
    """

    tokens: jax.Array
    slots: jax.Array
    positions: jax.Array
    group_sizes: jax.Array
    dropped: jax.Array
    axis_name: AxisName | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def filled(self) -> jax.Array:
        """[C] bool: which rows are in use."""
        return jnp.arange(self.tokens.shape[0]) < self.group_sizes.sum()


def route(experts: AnyArray, num_experts: int, axis_name: AxisName | None, *, capacity: int | None = None) -> Routing:
    """Sorts the routes of all tokens of a mesh axis by expert, for the experts of this device.

    Call it inside `jax.shard_map`. It is plain JAX without effects and without derivatives: it works under
    `jax.checkpoint`, `lax.scan` and `jax.vmap`.

    Args:
      experts: integers, [T, k] per device, global [D · T, k] sharded by rows: the experts that each token chose. The
        experts of one token must differ, as those of `lax.top_k` do. An id that is negative, or num_experts or more, is
        no expert: that route computes nothing and adds nothing, and is not counted as dropped. Use -1 for padding.
      num_experts: the number of experts E of all devices, a multiple of D. Device i owns the experts from i · E / D on.
      axis_name: the mesh axis, or a tuple of axes, counted row-major in its order. None: one device owns all experts;
        no `shard_map` is needed.
      capacity: the most rows that one expert takes, the first ones in the order of device, token and slot. The other
        routes are dropped: they compute nothing and add nothing. None: nothing is dropped.

    Returns:
      The `Routing` of this device, with C = D · T · min(k, E / D) rows, or E / D · capacity if that is less or T is a
      symbol of `jax.export`.
      Deterministic. A token that chooses one expert several times may need more rows than there are; such routes are
      dropped and counted, the last ones first.

    Raises:
      ValueError: `experts` is not [T, k] of integers; D does not divide `num_experts`, or the tokens choose more
        experts than there are; there are 2^31 routes or more; `axis_name` is no axis of the enclosing `shard_map`.

    Example:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> chosen = jnp.array([[5, 0], [5, 7], [1, 2], [5, 6]])  # Of the experts 0 … 7, two on each device.
      >>> sizes = lambda ids: overlap.route(ids, 8, "x").group_sizes
      >>> jax.jit(jax.shard_map(sizes, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(chosen).tolist()
      [1, 1, 1, 0, 0, 3, 1, 1]
    """
    axis_name, devices = axis_of("route", axis_name)
    experts, owned, capacity = _checked(experts, num_experts, capacity, devices)
    first = 0 if axis_name is None else lax.axis_index(axis_name) * owned
    experts = gathered(experts, axis_name)
    tokens, k = experts.shape
    routes = tokens * k
    rows = tokens * min(k, owned)
    if capacity is not None:  # The number of tokens may be a symbol of `jax.export`, which cannot be compared.
        rows = owned * capacity if jax.export.is_symbolic_dim(rows) else min(rows, owned * capacity)
    own = experts - first
    # Routes that this device does not compute have a group of their own, the last one.
    group = jnp.where((own >= 0) & (own < owned), own, owned).astype(jnp.int32)
    before, chosen = _counted(group, owned)
    taken = chosen if capacity is None else jnp.minimum(chosen, capacity)
    ends = jnp.minimum(jnp.cumsum(taken, dtype=jnp.int32), rows)
    sizes = jnp.diff(ends, prepend=0)

    def of_routes(values: jax.Array) -> jax.Array:
        """The value of each route's group; 0 for the group of routes that this device does not compute."""
        return jnp.append(values, 0).at[group].get(mode="promise_in_bounds")

    row = jnp.where(before < of_routes(sizes), before + of_routes(ends - sizes), rows)
    # Not computed by XLA where nobody asks for it: the kernels go by positions.
    route = jnp.zeros(rows, jnp.int32).at[row.reshape(-1)].set(jnp.arange(routes, dtype=jnp.int32), mode="drop")
    dropped = chosen.sum(dtype=jnp.int32) - ends[-1]
    return Routing(route // k, route % k, row, sizes, dropped, axis_name)


def _counted(group: jax.Array, groups: int) -> tuple[jax.Array, jax.Array]:
    """Returns for each route, [tokens, k], how many routes before it have its group; and the routes of each group.

    A sort would be many kernels of XLA. Here a product with a triangular matrix counts within blocks of tokens, which
    is exact also where XLA rounds operands to bfloat16 or TF32: they are integers up to k, and sums are in float32.
    """
    tokens, k = group.shape
    is_of = (group[..., None] == jnp.arange(groups)).sum(1, dtype=jnp.int32)
    if jax.export.is_symbolic_dim(tokens):
        before = jnp.cumsum(is_of, axis=0, dtype=jnp.int32) - is_of
        total = is_of.sum(0, dtype=jnp.int32)
    else:
        before, total = _counted_in_blocks(is_of)
    of_route = jnp.take_along_axis(before, group, axis=1, mode="clip")
    # A token should not choose an expert twice; if it does, its earlier slots come first.
    twice = ((group[:, :, None] == group[:, None, :]) & jnp.tri(k, k=-1, dtype=bool)).sum(2, dtype=jnp.int32)
    return of_route + twice, total


def _counted_in_blocks(is_of: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of the rows before each row, [tokens, groups], and of all rows."""
    tokens, groups = is_of.shape
    size = max(1, min(_BLOCK, is_of.shape[0]))
    blocks = jnp.pad(is_of, ((0, -tokens % size), (0, 0))).reshape(-1, size, groups)
    earlier_rows = jnp.tri(size, k=-1, dtype=jnp.float32)
    in_block = jnp.einsum("ij,bjg->big", earlier_rows, blocks.astype(jnp.float32)).astype(jnp.int32)
    of_block = blocks.sum(1, dtype=jnp.int32)
    earlier_blocks = jnp.tri(len(of_block), k=-1, dtype=jnp.int32)
    in_earlier_blocks = (earlier_blocks[..., None] * of_block).sum(1, dtype=jnp.int32)
    before = in_block + in_earlier_blocks[:, None]
    return before.reshape(-1, groups)[:tokens], of_block.sum(0, dtype=jnp.int32)


def gathered(value: jax.Array, axis_name: AxisName | None) -> jax.Array:
    """Returns the values of all devices, one after the other."""
    if axis_name is None:
        return value
    if not value.size:  # XLA gathers no empty arrays.
        return jnp.zeros((value.shape[0] * lax.axis_size(axis_name), *value.shape[1:]), value.dtype)
    return lax.all_gather(value, axis_name, axis=0, tiled=True)


def axis_of(op: str, axis_name: Given) -> tuple[AxisName | None, int]:
    """Returns the axis, or the tuple of several, and the number of devices along it; 1 for None.

    Raises:
      ValueError: there is no such axis, or it is no name, or is named twice. `op` is the operation's name, for the
        message.
    """
    if axis_name is None:
        return None, 1
    names = arguments.axis_name(axis_name)
    names = tuple(names) if isinstance(names, (tuple, list)) else (names,)
    if not names or len(set(names)) < len(names):
        raise ValueError(
            f"`axis_name` must name at least one axis, and each once, got {axis_name!r}: name each axis once"
        )
    try:
        first, *more = names
        return names if more else first, lax.axis_size(names)
    except NameError:
        raise ValueError(
            f"`{op}` must be called inside `jax.shard_map` over axis {axis_name!r}, and there is no such axis here: "
            "wrap the call, or pass axis_name=None on one device"
        ) from None


def _checked(experts: Given, num_experts: Given, capacity: Given, devices: int) -> tuple[jax.Array, int, int | None]:
    """Checks the arguments of `route`.

    Returns the ids as an array, the number of experts of each device, and the capacity: None if it drops nothing.
    """
    arguments.require_values(experts=experts)
    experts = jnp.asarray(experts) if hasattr(experts, "dtype") else experts
    kind = getattr(experts, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.integer) or experts.ndim != 2 or not experts.shape[1]:
        found = shown(experts) if kind is not None else f"{type(experts).__name__} {shown(experts)}"
        raise ValueError(
            f"`experts` must be integers [tokens, k], the experts that each token chose, got {found}: pass the "
            "indices of lax.top_k, of rank 2, as an array (jnp.asarray)"
        )
    mesh = mesh_axes.mesh_of(experts)
    spec = jax.P() if mesh is None else mesh_axes.spec_of_type(experts)
    if mesh is not None and any(spec) and not mesh.manual_axes:
        raise ValueError(
            f"`experts` must be one device's, got an array that is sharded {spec} along Explicit axes: call `route` "
            "inside jax.shard_map"
        )
    is_number = isinstance(num_experts, (int, np.integer)) and not isinstance(num_experts, bool)
    if not is_number or num_experts < 1:
        raise ValueError(
            f"`num_experts` must be an integer of at least 1, got {shown(num_experts)}: pass the number of experts on "
            "all devices"
        )
    count = int(num_experts)
    if count % devices:
        more = -(-count // devices) * devices
        raise ValueError(
            f"`num_experts` must be a multiple of the {devices} devices along the axis, got {count}: use {more} "
            "experts, or fewer devices"
        )
    if experts.shape[1] > count:
        raise ValueError(
            f"`experts` must choose at most num_experts={count} experts for a token, got k={experts.shape[1]}: the "
            "experts of a token must differ"
        )
    routes = devices * experts.size
    is_symbol = jax.export.is_symbolic_dim(routes)  # Such a number cannot be compared.
    if not is_symbol and routes > _MOST:
        raise ValueError(
            f"`experts` must have fewer than 2^31 routes on all devices, got {routes}: split the tokens into several "
            "calls"
        )
    capacity = _capacity(capacity)
    # An expert never has more rows than there are routes.
    capacity = None if capacity is None or (not is_symbol and capacity >= routes) else capacity
    return experts.astype(jnp.int32), count // devices, capacity


def _capacity(value: Given) -> int | None:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 1):
        raise ValueError(
            f"`capacity` must be None or an integer of at least 1, got {shown(value)}: round it up to a number that is "
            "known while the program is traced, or pass None to drop nothing"
        )
    return None if value is None else int(value)
