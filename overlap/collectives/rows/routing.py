"""`route`: from the experts that each token chose to lists of rows, the same on every run.

Each device of the axis owns num_experts / D consecutive experts. All devices gather all ids, and each sorts the routes
of its own experts. So no counts are exchanged, and all shapes are static. A *route* is one choice of one token: the
token's slot j, of k. The routes of all devices are counted by device, token and slot, in this order.

XLA makes many kernels of a sort or of a running sum. Instead the routes lie in words of 32, and the words in blocks.
For each own expert the bits of a word say which routes chose it. The row of a route is a sum of three numbers: of the
rows before its block, of its expert's routes before its word, and of its expert's bits before its own. The first is a
reduction with a mask, and the second a product with a triangular matrix: as a reduction it took ten times as long on an
H100. tests/assembly/test_routing_kernels.py counts the kernels.

W = D · T · k / 32 words in blocks of M. Operations per device: 32 W · E / D, W · M · E / D and (W / M · E / D)².
"""

from __future__ import annotations

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from overlap.frame import arguments, mesh_axes
from overlap.frame.arguments import shown
from overlap.frame.signatures import AnyArray, AxisName, Given

_MOST = jnp.iinfo(jnp.int32).max
# Routes of a word, one bit for each.
_WORD = 32
# Words of a block; up to four times as many where there would be more than _MOST_COUNTS counts of experts in blocks.
_BLOCK = 128
_MOST_COUNTS = 4096


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The rows that one device computes for its experts: a pytree of int32 arrays, and gates, by `overlap.route`.

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
      gates: float32 [D · T, k], the gates of all devices, if `route` got gates; float64 if they are. Else None.
    """

    tokens: jax.Array
    slots: jax.Array
    positions: jax.Array
    group_sizes: jax.Array
    dropped: jax.Array
    axis_name: AxisName | None = dataclasses.field(default=None, metadata={"static": True})
    gates: jax.Array | None = None

    @property
    def filled(self) -> jax.Array:
        """[C] bool: which rows are in use."""
        return jnp.arange(self.tokens.shape[0]) < self.group_sizes.sum()


def route(
    experts: AnyArray,
    num_experts: int,
    axis_name: AxisName | None,
    *,
    gates: AnyArray | None = None,
    capacity: int | None = None,
    rows: int | None = None,
) -> Routing:
    """Sorts the routes of all tokens of a mesh axis by expert, for the experts of this device.

    Call it inside `jax.shard_map`. It is plain JAX without effects, and works under `jax.checkpoint`, `lax.scan` and
    `jax.vmap`. It is differentiable in `gates`: their cotangents are scattered back to their devices.

    The forward and the backward pass of a layer share one routing. Under `jax.checkpoint` the backward pass routes
    again, unless the policy keeps the name "routing", which all arrays of the result have:
    `jax.checkpoint_policies.save_only_these_names("routing")`.

    Args:
      experts: integers, [T, k] per device, global [D · T, k] sharded by rows: the experts that each token chose. The
        experts of one token must differ, as those of `lax.top_k` do. An id that is negative, or num_experts or more, is
        no expert: that route computes nothing and adds nothing, and is not counted as dropped. Use -1 for padding.
      num_experts: the number of experts E of all devices, a multiple of D. Device i owns the experts from i · E / D on.
      axis_name: the mesh axis, or a tuple of axes, counted row-major in its order. None: one device owns all experts;
        no `shard_map` is needed.
      gates: floating-point, [T, k] per device, as `experts`: the weight of each route in its token's sum. They travel
        with the ids in one collective, and `grouped_matmul_reduce_scatter` then takes `gates=None`. None: that
        operation gets them.
      capacity: the most rows that one expert takes, the first ones in the order of device, token and slot. The other
        routes are dropped: they compute nothing and add nothing. None: nothing is dropped.
      rows: the most rows of this device, for all its experts, after `capacity`: it takes the first ones in the order of
        device, token and slot, whatever their experts, and the others are dropped. None: no such limit. Where experts
        have uneven shares this drops far fewer routes than a capacity that needs as much memory.

    Returns:
      The `Routing` of this device, with C = D · T · min(k, E / D) rows, or E / D · capacity, or `rows`: the least. If T
      is a symbol of `jax.export`, the least of the last two.
      Deterministic. A token that chooses one expert several times may need more rows than there are; such routes are
      dropped and counted, the last ones first.

    Raises:
      ValueError: `experts` is not [T, k] of integers, or `gates` not of floating-point numbers; T is a symbol of
        `jax.export`, and there are several devices; D does not divide `num_experts`, or the tokens choose more experts
        than there are; there are 2^31 routes or more; `capacity` or `rows` is less than 1; `axis_name` is no axis of
        the enclosing `shard_map`.

    Examples:
      >>> mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> chosen = jnp.array([[5, 0], [5, 7], [1, 2], [5, 6]])  # Of the experts 0 … 7, two on each device.
      >>> sizes = lambda ids: overlap.route(ids, 8, "x").group_sizes
      >>> jax.jit(jax.shard_map(sizes, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(chosen).tolist()
      [1, 1, 1, 0, 0, 3, 1, 1]
    """
    axis_name, devices = axis_of("route", axis_name)
    experts, owned = _checked(experts, num_experts, devices)
    gates = _checked_gates(gates, experts.shape)
    capacity, rows = _limit("capacity", capacity), _limit("rows", rows)
    first = 0 if axis_name is None else lax.axis_index(axis_name) * owned
    experts = gathered(experts, axis_name)  # XLA makes one call of both gathers.
    gates = None if gates is None else gathered(gates, axis_name)
    tokens, k = experts.shape
    routes = tokens * k
    is_symbol = jax.export.is_symbolic_dim(routes)  # Such a number cannot be compared.
    # No expert and no device ever has more rows than there are routes.
    capacity, rows = (None if x is None or (not is_symbol and x >= routes) else x for x in (capacity, rows))
    limits = [x for x in (None if capacity is None else owned * capacity, rows) if x is not None]
    most = min(limits) if is_symbol and limits else min([tokens * min(k, owned), *limits])
    counts = _Counts.of(experts.reshape(-1), first, owned)
    before = counts.before
    everything = before[0]
    bounds = everything
    if limits:
        owner = jnp.arange(owned)
        taken = counts.taken(before, rows, capacity)
        bounds = jnp.where(owner < jnp.arange(owned + 1)[:, None], taken, 0).sum(1, dtype=jnp.int32)
        before += bounds - everything
    bounds = jnp.minimum(bounds, most)
    row = counts.of_routes(before, bounds, most)[:routes].reshape(tokens, k)
    # Not computed by XLA where nobody asks for it: the kernels go by positions.
    route = jnp.zeros(most, jnp.int32).at[row.reshape(-1)].set(jnp.arange(routes, dtype=jnp.int32), mode="drop")
    found = Routing(route // k, route % k, row, jnp.diff(bounds), everything[-1] - bounds[-1], axis_name, gates)
    return jax.tree.map(lambda x: checkpoint_name(x, "routing"), found)


@dataclasses.dataclass(frozen=True)
class _Counts:
    """How many routes of each group come before others.

    Routes beyond 0 … groups - 1 have no group. S: blocks. M: words of a block. G: groups.

    Attributes:
      group: [S, M, 32], of each route, and -1 behind the last one.
      words: uint32 [M, S, G]: a bit for each route.
      within: [M, S, G], the routes of a block up to this word and with it.
    """

    group: jax.Array
    words: jax.Array
    within: jax.Array

    @staticmethod
    def of(experts: jax.Array, first: jax.Array | int, groups: int) -> _Counts:
        """Counts the routes, [routes], to each of the experts from `first` on."""
        group = _in_words(experts, groups) - first
        bit = jnp.uint32(1) << lax.iota(jnp.uint32, _WORD)
        # Groups come last, so that each thread of XLA's kernel makes words of its own.
        chose = group.swapaxes(0, 1)[..., None] == jnp.arange(groups)
        words = jnp.where(chose, bit[:, None], 0).sum(2, dtype=jnp.uint32)
        # Exact: operands are integers up to 32, and sums are in float32.
        until = np.tri(len(words), dtype=jnp.bfloat16)
        of_words = _ones(words).astype(jnp.bfloat16)
        within = jnp.einsum("msg,nm->nsg", of_words, until, preferred_element_type=jnp.float32).astype(jnp.int32)
        return _Counts(group, words, within)

    @property
    def before(self) -> jax.Array:
        """[S, G + 1]: the routes of groups before this one, and of this group in blocks before this one."""
        of_blocks = self.within[-1]
        block, group = (jnp.arange(size) for size in of_blocks.shape)
        this_block = block[:, None, None, None]
        this_group = jnp.arange(len(group) + 1)[:, None, None]
        is_before = (group < this_group) | ((group == this_group) & (block[:, None] < this_block))
        return jnp.where(is_before, of_blocks, 0).sum((2, 3), dtype=jnp.int32)

    def taken(self, before: jax.Array, rows: int | None, capacity: int | None) -> jax.Array:
        """Returns [G], how many rows each group takes: at most `capacity`, and all together the first `rows`.

        The routes up to some route take Σ min(capacity, routes of the group up to it) rows, which grows by at most 1
        from route to route. So the routes where this is at most `rows` are those before the cut.
        """
        least = lambda values: values if capacity is None else jnp.minimum(values, capacity)  # noqa: E731
        if rows is None:
            return least(jnp.diff(before[0]))
        until = (before - before[:1])[:, :-1] + self.within
        later = _ones(self.words[:, :, None] >> lax.iota(jnp.uint32, _WORD)[:, None] >> 1)
        until = least(until[:, :, None] - later).swapaxes(0, 1)  # [S, M, 32, G]
        last = (until.sum(3, dtype=jnp.int32) <= rows).sum(dtype=jnp.int32) - 1
        return until.reshape(-1, until.shape[3])[last]

    def of_routes(self, before: jax.Array, bounds: jax.Array, nowhere: int) -> jax.Array:
        """Returns the row of each route, [S · M · 32]; `nowhere` if it has no group or its group's rows are taken.

        before: [S, G + 1], the rows before a block's first route of a group. bounds: [G + 1], the rows before a group.
        """
        _, blocks, groups = self.words.shape
        own = jnp.clip(self.group, 0, groups - 1)
        block = lax.broadcasted_iota(jnp.int32, own.shape, 0)
        word = (lax.broadcasted_iota(jnp.int32, own.shape, 1) * blocks + block) * groups + own
        at = lambda values, where: values.reshape(-1).at[where].get(mode="promise_in_bounds")  # noqa: E731
        later = _ones(at(self.words, word) >> lax.iota(jnp.uint32, _WORD))  # This route and those after it in the word.
        row = at(before, block * (groups + 1) + own) + at(self.within, word) - later
        has_row = (self.group >= 0) & (self.group < groups) & (row < at(bounds, own + 1))
        return jnp.where(has_row, row, nowhere).reshape(-1)


def _in_words(experts: jax.Array, groups: int) -> jax.Array:
    """Returns the routes as [S, M, 32], with -1 behind the last one."""
    (routes,) = experts.shape
    if jax.export.is_symbolic_dim(routes):  # `jnp.pad` would have to know that the number of added routes is positive.
        whole = -(-routes // (_BLOCK * _WORD)) * (_BLOCK * _WORD)
        return experts.at[jnp.arange(whole)].get(mode="fill", fill_value=-1).reshape(-1, _BLOCK, _WORD)
    words = max(1, -(-experts.size // _WORD))
    size = _BLOCK
    while size < 4 * _BLOCK and words * groups > _MOST_COUNTS * size:
        size *= 2
    size = min(size, 1 << (words - 1).bit_length())
    missing = -(-words // size) * size * _WORD - experts.size
    return jnp.pad(experts, (0, missing), constant_values=-1).reshape(-1, size, _WORD)


def _ones(words: jax.Array) -> jax.Array:
    """Returns how many bits of each word are set."""
    return lax.population_count(words).astype(jnp.int32)


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


def _checked(experts: Given, num_experts: Given, devices: int) -> tuple[jax.Array, int]:
    """Checks the ids and the number of experts. Returns the ids as an array, and the experts of each device."""
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
    is_symbol = jax.export.is_symbolic_dim(routes)
    if is_symbol and devices > 1:  # jaxlib 0.11 and 0.12 end the process where they refine shapes inside a shard_map.
        raise ValueError(
            f"`experts` must have a known number of tokens where {devices} devices share the experts, got shape "
            f"{experts.shape}: export a program for each number of tokens"
        )
    if not is_symbol and routes > _MOST:
        raise ValueError(
            f"`experts` must have fewer than 2^31 routes on all devices, got {routes}: split the tokens into several "
            "calls"
        )
    return experts.astype(jnp.int32), count // devices


def _checked_gates(gates: Given, shape: tuple[int, ...]) -> jax.Array | None:
    """Returns the gates in at least 32 bits."""
    if gates is None:
        return None
    arguments.require_values(gates=gates)
    gates = arguments.array("gates", gates)
    if gates.shape != shape:
        raise ValueError(
            f"`gates` must have the shape of `experts`, {shape}, got {gates.shape}: pass a gate for each id"
        )
    return gates.astype(jnp.promote_types(gates.dtype, jnp.float32))


def _limit(name: str, value: Given) -> int | None:
    is_number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and not (is_number and value >= 1):
        raise ValueError(
            f"`{name}` must be None or an integer of at least 1, got {shown(value)}: round it up to a number that is "
            "known while the program is traced, or pass None to drop nothing"
        )
    return None if value is None else min(int(value), _MOST)
