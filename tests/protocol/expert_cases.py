"""Small instances of the kernels of experts with exact results."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.rows import row_kernels
from overlap.collectives.rows.arriving import Arriving
from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing
from overlap.frame.activation import traced
from overlap.frame.operands import Operands
from overlap.kernels.target import current_target
from overlap.primitives import PeerGroup
from overlap.single_gpu.grouped_product import rows_through
from tests.ops.grouped_plans import plan_of
from tests.oracle import make_mesh, on_mesh
from tests.protocol.exact import BF16, Kernel, equals, in_f32, integers

# A token has two parts, and the ring of buffers wraps around within a unit.
ARRIVING = overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_buffers=3, chunk_bytes=320)


def of_moved_rows(
    name: str, devices: int, tokens: int, features: int, *, slots: int = 2, dtype: Any = BF16, gated: bool = True
) -> Kernel:
    """Returns a kernel that moves rows of experts: "copied", "added" or "multiplied". `tokens` are those of a device.

    Each route has a row on one device at most, and no device has a row of the first token. Nobody may read the rows
    that no route has, and nobody writes them.
    """
    everything = devices * tokens
    chance = np.random.default_rng(7)
    owner = chance.integers(-1, devices, (everything, slots))
    owner[0] = -1
    counts = [(owner == device).sum() for device in range(devices)]
    rows = max(counts) + 1
    positions = np.full((devices, everything, slots), rows, np.int32)
    for device, count in enumerate(counts):
        positions[device][owner == device] = chance.permutation(rows)[:count]
    given = {"tokens": integers(1, everything, features, dtype=dtype), "positions": positions.reshape(-1, slots)}
    given |= {"rows": integers(2, devices * rows, features, dtype=dtype, most=2)}
    gates = integers(3, everything, slots, dtype=np.float32, most=2)
    is_row = np.zeros((devices, rows + 1), bool)
    np.put_along_axis(is_row, positions.reshape(devices, -1), True, 1)
    given["rows"][~is_row[:, :rows].ravel()] = np.nan
    factors = gates if gated else np.ones_like(gates)
    of_token = in_f32(given["tokens"])
    exact = in_f32(given["rows"]).reshape(devices, rows, features)
    copies = np.zeros((devices, rows + 1, features), np.float32)
    here, slot = np.meshgrid(np.arange(everything), np.arange(slots), indexing="ij")
    for device, at in enumerate(positions):
        copies[device][at] = of_token[here] * factors[here, slot][..., None]
    filled = np.pad(np.nan_to_num(exact), ((0, 0), (0, 1), (0, 0)))
    of_slots = np.stack([filled[device][at] for device, at in enumerate(positions)])
    kernel, unused, expected = {
        "copied": (row_kernels.copied, "rows", np.where(is_row[..., None], copies, 0)[:, :rows]),
        "added": (row_kernels.added, "tokens", (of_slots * factors[..., None]).sum((0, 2))),
        "multiplied": (row_kernels.products, "gates", (of_slots * of_token[:, None]).sum(-1)),
    }[name]
    given = {x: value for x, value in given.items() if x != unused}
    given |= {"gates": gates} if gated and unused != "gates" else {}

    def call(given: dict[str, jax.Array], is_row: jax.Array) -> jax.Array:
        group = PeerGroup.of("x") if devices > 1 else None
        plan = RowsPlan(tokens, slots, rows, features, jnp.dtype(dtype), current_target(), group)
        found = kernel(given, plan)[{"copied": "rows", "added": "sums"}.get(name, "products")]
        return jnp.where(is_row[0, :-1, None], found, 0) if name == "copied" else found

    specs = {x: P() if x == "gates" else P("x") for x in given}
    function = on_mesh(make_mesh(x=devices), call, (specs, P("x")), P("x"))
    check = equals(expected.reshape(-1, expected.shape[-1]), jnp.float32 if name == "multiplied" else dtype)
    return Kernel(lambda: function(given, is_row), check)


def of_arriving(
    devices: int,
    tokens: int,
    features: int,
    config: overlap.Config,
    *,
    slots: int = 4,
    dtype: Any = BF16,
    activation: Any = None,
    block: int = 64,
    clears: bool = True,
) -> Kernel:
    """Returns the kernel of a product of rows that arrive meanwhile. `tokens` are those of a device.

    Rows of the result that are not in use are zero if it `clears` them.

    Each route has a row on one device at most, and the rows in use are in any order. One device uses all of its rows.
    Units have 4 rows and blocks 64, or `block`. The first unit of device 0 has one token, with its first row at the
    unit's first, and no device has a row of the second token. The last row of a tile is the first one of a block.
    """
    everything = devices * tokens
    chance = np.random.default_rng(7)
    n = 136
    groups = 3
    owner = chance.integers(-1, devices, (everything, slots))
    owner[:2] = [[0], [-1]]
    counts = [int((owner == device).sum()) for device in range(devices)]
    rows = max(counts)
    positions = np.full((devices, everything, slots), rows, np.int32)
    sizes = np.zeros((devices, groups), np.int32)
    for device, count in enumerate(counts):
        places = np.arange(count)
        places[4:] = chance.permutation(places[4:])  # Those of token 0 come first.
        positions[device][owner == device] = places
        sizes[device] = 65, 0, count - 65
    out_dtype = dtype if config.swap_operands else jnp.float32
    lhs = integers(1, everything, features, dtype=dtype)
    rhs = integers(2, devices * groups, features, n, dtype=dtype)
    copies = np.zeros((devices, rows + 1, features), np.float32)
    exact = np.zeros((devices, rows, n), np.float32)
    here = np.repeat(np.arange(everything)[:, None], slots, 1)
    for device, (count, *_, last) in enumerate(zip(counts, sizes[:, 0], strict=True)):
        copies[device][positions[device]] = in_f32(lhs)[here]
        exact[device, :last] = copies[device, :last] @ in_f32(rhs[device * groups])
        exact[device, last:count] = copies[device, last:count] @ in_f32(rhs[device * groups + 2])
    exact = np.maximum(exact, 0) if activation else exact
    copies = copies[:, :rows] * (np.arange(rows)[:, None] < np.array(counts)[:, None, None])

    def call(lhs: jax.Array, rhs: jax.Array, positions: jax.Array, sizes: jax.Array) -> tuple[jax.Array, ...]:
        plan = RowsPlan(tokens, slots, rows, features, jnp.dtype(dtype), current_target(), PeerGroup.of("x"))
        nothing = jnp.zeros((), jnp.int32)
        arrival = Arriving.of(plan, Routing(nothing, nothing, positions, sizes, nothing), unit=4, block=block)
        given = Operands(jax.ShapeDtypeStruct((rows, features), dtype), (rhs,), group_sizes=sizes)
        product = plan_of(given, config, out_dtype)
        if activation is not None:
            product = dataclasses.replace(product, activation=traced(activation)[0])
        out, copies = rows_through(dataclasses.replace(given, lhs=lhs), product, None, arrival, clears=clears)
        is_used = jnp.arange(rows)[:, None] < sizes.sum()
        return out if clears else jnp.where(is_used, out, 0), jnp.where(is_used, copies, 0)

    function = on_mesh(make_mesh(x=devices), call, P("x"), P("x"))
    given = lhs, rhs, positions.reshape(-1, slots), sizes.reshape(-1)
    expected = exact.reshape(-1, n), copies.reshape(-1, features)
    return Kernel(lambda: function(*given), equals(expected, out_dtype))
