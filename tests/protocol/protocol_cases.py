"""Small instances of the library's kernels with exact results, and repeated runs of them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.problem import Problem
from overlap.collectives.rows import row_kernels
from overlap.collectives.rows.arriving import Arriving
from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing
from overlap.emulation import EmulationError, emulate
from overlap.frame.activation import traced
from overlap.frame.operands import Operands
from overlap.kernels.target import current_target, emulating
from overlap.primitives import PeerGroup
from overlap.single_gpu.grouped_product import contraction, rows_through
from tests.ops import test_linear_cross_entropy as loss
from tests.ops.grouped_plans import plan_of
from tests.oracle import make_mesh, on_mesh

BF16 = jnp.bfloat16
# With these chunks, each CTA copies several chunks of each peer's shard.
PULL = overlap.Config(tile_n=64, stages=2, chunk_bytes=4096)
JOINED = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True, chunk_bytes=1024)
WEIGHTS = overlap.Config(tile_n=128, stages=2, chunk_bytes=1024)
# With this configuration, a tile has two boxes, and each box has several chunks.
SUMS = overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_bytes=1024)
# A token has two parts, and the ring of buffers wraps around within a unit.
ARRIVING = overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_buffers=3, chunk_bytes=320)
# Names of `matmul_all_reduce` kernels for `of_sums`. SPREAD sums blocks of columns; "spread m" sums blocks of rows.
SPREAD, ONE_SHOT = "spread n", "one shot"
# The name for `of_sums` of a reduce-scatter whose partial sums travel from device to device.
SUMS_BY_RING = "ring m"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that is traced only once: when `call` first runs. Defects that are active then stay in the kernel.

    Attributes:
      call: runs the kernel on its own operands.
      check: raises AssertionError if the result is not exact.
    """

    call: Callable[[], Any]
    check: Callable[[Any], None]

    def run(self, **settings: Any) -> Any:
        """Emulates one run and checks that the result is exact. `settings`: keywords of `emulate`."""
        with emulate(**settings) as run:
            result = self.call()
            run.check()
        self.check(result)
        return run

    def report(self, seeds: int = 18, step_limit: int = 500_000, **settings: Any) -> EmulationError | None:
        """Runs the kernel with several seeds (and values of `completion`, if not given). Returns the first error."""
        for seed in range(seeds):
            # A thread can fall behind the copies only if these are fast ("eager").
            varied = {"completion": ("eager", "late", "random")[seed % 3]} | settings
            try:
                with emulate(seed=seed, step_limit=step_limit, **varied):
                    jax.block_until_ready(self.call())
            except EmulationError as report:
                return report
        return None


def integers(seed: int, *shape: int, dtype: Any = BF16, most: int = 3) -> np.ndarray:
    """Draws small integers. Their products are exact in f32, in any order of summation."""
    return np.random.default_rng(seed).integers(-most, most + 1, shape).astype(dtype)


def _f32(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def _equals(expected: Any, dtype: Any) -> Callable[[Any], None]:
    """Returns a check that compares every bit with arrays that are rounded to `dtype`."""

    def check(results: Any) -> None:
        for result, exact in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(_f32(result), _f32(exact.astype(dtype)))

    return check


def on_blackwell(kernel: Kernel) -> Kernel:
    """Returns the same kernel, traced for a Blackwell GPU."""

    def call() -> Any:
        with emulating("blackwell"):
            return kernel.call()

    return dataclasses.replace(kernel, call=call)


def of_product(
    shape: tuple[int, int, int],
    config: overlap.Config,
    *,
    out: Any = jnp.float32,
    extras: tuple[str, ...] = (),
    transpose_rhs: bool = False,
) -> Kernel:
    """Returns the kernel of a call of `matmul`. `extras` names "bias", "activation", "addend" and scales."""
    m, n, k = shape
    lhs, rhs = integers(1, m, k), integers(2, k, n)
    given: dict[str, Any] = {
        "bias": integers(5, n), "activation": jax.nn.relu, "addend": integers(6, m, n),
        "lhs_scale": np.resize(np.float32([0.5, 1.0, 2.0]), (m, 1)), "rhs_scale": np.resize(np.float32([0.5, 2.0]), n),
    }  # fmt: skip
    given = {name: given[name] for name in extras}
    exact = _f32(lhs) @ _f32(rhs) * given.get("lhs_scale", 1) * given.get("rhs_scale", 1)
    exact = exact + _f32(given.get("bias", 0)) + _f32(given.get("addend", 0))
    exact = np.maximum(exact, 0) if "activation" in given else exact
    given |= {"transpose_rhs": transpose_rhs, "preferred_element_type": out, "config": config}
    function = jax.jit(lambda a, b: overlap.matmul(a, b, implementation="fused", **given))
    operands = lhs, rhs.T if transpose_rhs else rhs
    return Kernel(lambda: function(*operands), _equals(exact, out))


def of_groups(sizes: tuple[int, ...], config: overlap.Config, *, contracts: bool = False) -> Kernel:
    """Returns the kernel of groups of rows: the product of the rows, with a bias, or the contraction over them."""
    m, k, n, groups = sum(sizes) + 17, 136, 136, len(sizes)
    lhs, rhs, bias = (
        integers(1, m, k),
        integers(2, m if contracts else groups, *((n,) if contracts else (k, n))),
        integers(3, groups, n),
    )
    ends = np.cumsum(sizes)
    rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    lhs[ends[-1] :] = np.nan  # Rows of no group.
    if contracts:
        rhs[ends[-1] :] = np.nan
        exact = np.stack([_f32(lhs[of]).T @ _f32(rhs[of]) for of in rows])
    else:
        exact = np.zeros((m, n), np.float32)
        for group, of in enumerate(rows):
            exact[of] = _f32(lhs[of]) @ _f32(rhs[group]) + _f32(bias[group])

    @jax.jit
    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        if contracts:
            given = Operands(lhs, (rhs,), group_sizes=sizes)
            return contraction(given, plan_of(given, config, jnp.float32))
        how: dict[str, Any] = {"preferred_element_type": jnp.float32, "config": config, "implementation": "fused"}
        return overlap.grouped_matmul(lhs, rhs, sizes, bias=bias, **how)

    return Kernel(lambda: call(lhs, rhs, np.int32(sizes)), _equals(exact, jnp.float32))


def change_texts(patch: pytest.MonkeyPatch, found: str, replacement: str) -> list[int]:
    """Changes the PTX of kernels traced from now on. Returns a list that collects the numbers of replacements."""
    emit, changes = mgpu_utils.inline_ptx, []

    def changed(text: str, *operands: Any, **keywords: Any) -> Any:
        text, count = re.subn(found, replacement, text)
        changes.append(count)
        return emit(text, *operands, **keywords)

    patch.setattr(mgpu_utils, "inline_ptx", changed)
    return changes


@dataclasses.dataclass(frozen=True)
class Form:
    """The form of a call of `all_gather_lhs_matmul`; sizes are per shard.

    `scales` names the scales that are given: "rows", "columns". `container` is None for a single right operand.
    """

    m: int
    widths: tuple[int, ...]
    k: int
    batch: tuple[int, ...] = ()
    gathered: bool = False
    scales: tuple[str, ...] = ()
    container: Any = None


def of_rows(form: Any, config: overlap.Config, devices: int = 3, transport: str | None = None) -> Kernel:
    """Returns the kernel of a call of `all_gather_lhs_matmul`."""
    chance, dtype, several = np.random.default_rng(0), np.float16, form.container is not None
    lhs = chance.integers(-3, 4, (*form.batch, devices * form.m, form.k)).astype(dtype)
    sides = [chance.integers(-3, 4, (form.k, devices * n)).astype(dtype) for n in form.widths]
    power = lambda *shape: 2.0 ** chance.integers(-2, 2, shape).astype(np.float32)  # noqa: E731
    rows, columns = power(*form.batch, devices * form.m, 1), [power(devices * n) for n in form.widths]
    one = lambda values: list(values) if several else values[0]  # noqa: E731

    def body(lhs: Any, sides: Any, rows: Any, columns: Any) -> Any:
        result = overlap.all_gather_lhs_matmul(
            lhs, one(sides), "x", lhs_scale=rows if "rows" in form.scales else None,
            rhs_scale=one(columns) if "columns" in form.scales else None, return_gathered=form.gathered,
            config=config, transport=transport, implementation="fused",
        )  # fmt: skip
        outs, gathered = result if form.gathered else (result, None)
        return outs, [] if gathered is None else gathered[None]

    exact = [_f32(lhs) @ _f32(side) * (rows if "rows" in form.scales else 1) for side in sides]
    exact = [out * scale if "columns" in form.scales else out for out, scale in zip(exact, columns, strict=True)]
    lead = (None,) * len(form.batch)
    of_rows, of_result = P(*lead, "x", None), one([P(*lead, None, "x")] * len(sides))
    in_specs = of_rows, [P(None, "x")] * len(sides), of_rows, [P("x")] * len(sides)
    function = on_mesh(make_mesh(x=devices), body, in_specs, (of_result, P("x") if form.gathered else []))
    expected = one(exact), [np.stack([lhs] * devices)] if form.gathered else []
    return Kernel(lambda: function(lhs, sides, rows, columns), _equals(expected, dtype))


def of_weights(
    along: str, config: overlap.Config = WEIGHTS, devices: int = 3, *, m: int = 64, shard: tuple[int, int] = (64, 64)
) -> Kernel:
    """Returns the kernel of a call of `all_gather_rhs_matmul`: "n" or "k" is the gathered dimension."""
    k, n = (devices * shard[0], shard[1]) if along == "k" else (shard[0], devices * shard[1])
    lhs, rhs = integers(0, devices * m, k), integers(1, k, n)
    keywords: Any = {"dimension": 0 if along == "k" else 1, "config": config, "implementation": "fused"}
    body = lambda a, b: overlap.all_gather_rhs_matmul(a, b, "x", **keywords)  # noqa: E731
    rows, weights = P("x", None), P("x", None) if along == "k" else P(None, "x")
    function = on_mesh(make_mesh(x=devices), body, (rows, weights), rows)
    return Kernel(lambda: function(lhs, rhs), _equals(_f32(lhs) @ _f32(rhs), BF16))


def of_sums(
    along: str,
    config: overlap.Config = SUMS,
    devices: int = 3,
    *,
    block: tuple[int, int] = (16, 136),
    k: int = 72,
    batch: int | None = None,
    dtype: Any = BF16,
    mesh: Any = None,
    axis: str = "x",
    bias: bool = False,
    row_scale: bool = False,
    transpose_lhs: bool = False,
) -> Kernel:
    """Returns the kernel of a call of `matmul_reduce_scatter` or `matmul_all_reduce`, and how to check its result.

    `along` is "m", "n", "ring m" or "ring n" for `matmul_reduce_scatter`, and "spread m", "spread n" or "one shot" for
    `matmul_all_reduce`. `block` is the (rows, columns) of the block that each device sums; `k` is the number of columns
    of `lhs` on each device. The check compares the results of all devices with the exact product.
    """
    mesh, (rows, columns), dimension = mesh or make_mesh(x=devices), block, along[-1]
    by_ring, everywhere = along.startswith("ring"), along.startswith(("spread", "one"))
    m, n = devices * rows if dimension == "m" else rows, devices * columns if dimension == "n" else columns
    lhs, rhs = integers(0, *([batch] if batch else []), m, devices * k), integers(1, devices * k, n)
    scales = np.resize(np.float32([0.5, 1.0, 2.0]), (m, 1))
    given: Any = {"preferred_element_type": dtype, "implementation": "fused", "transpose_lhs": transpose_lhs}
    given |= {"lhs_scale": scales} if row_scale else {}
    added = integers(5, n) if bias else np.zeros(n)
    if everywhere:
        given |= {"config": config.replace(one_shot=along == ONE_SHOT)} | ({"bias": added} if bias else {})
        problem = Problem("matmul_all_reduce", m, n, k, "bfloat16", "bfloat16", devices)
        assert along == ONE_SHOT or problem.scattered == dimension
    else:
        given |= {"config": config, "dimension": "mn".index(dimension), "transport": "ring" if by_ring else None}

    def summed(a: jax.Array, b: jax.Array) -> jax.Array:
        if everywhere:
            return overlap.matmul_all_reduce(a, b, axis, **given)[None]
        return overlap.matmul_reduce_scatter(a, b, axis, **given)

    lead = (None,) * (batch is not None)
    out_specs = P(axis) if everywhere else P(*lead, *((axis, None) if dimension == "m" else (None, axis)))
    of_lhs = (axis, None) if transpose_lhs else (None, axis)
    function = on_mesh(mesh, summed, (P(*lead, *of_lhs), P(axis, None)), out_specs)
    # k is small, so parts are exact in bfloat16.
    exact = _f32(lhs) @ _f32(rhs) * (scales if row_scale else 1) + _f32(added)
    expected = np.stack([exact] * devices) if everywhere else exact
    operands = lhs.swapaxes(-1, -2) if transpose_lhs else lhs, rhs
    return Kernel(lambda: function(*operands), _equals(expected, dtype))


def of_gradient(m: int, k: int, widths: tuple[int, ...], batch: int, devices: int = 3) -> Kernel:
    """Returns the kernel of a gradient: sums of the products of pairs, with gathered rows as a passenger."""
    rows, dtype = devices * m, np.float16
    x = integers(1, batch, rows, k, dtype=dtype, most=2)
    weights = [integers(2 + i, k, devices * n, dtype=dtype, most=2) for i, n in enumerate(widths)]
    cotangents = [integers(9 + i, batch, rows, devices * n, dtype=dtype, most=2) for i, n in enumerate(widths)]

    def gradient(x: Any, weights: Any, cotangents: Any) -> Any:
        gather = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", implementation="fused")
        return jax.vjp(gather, x, weights)[1](cotangents)

    specs = P(None, "x", None), P(None, "x"), P(None, None, "x")
    function = on_mesh(make_mesh(x=devices), gradient, specs, specs[:2])
    of_x = sum(_f32(d) @ _f32(w).T for d, w in zip(cotangents, weights, strict=True))
    of_weights = [np.einsum("bmk,bmn->kn", _f32(x), _f32(d)) for d in cotangents]
    return Kernel(lambda: function(x, weights, cotangents), _equals((of_x, of_weights), dtype))


def of_moved_rows(
    name: str, devices: int, tokens: int, features: int, *, slots: int = 2, dtype: Any = BF16, gated: bool = True
) -> Kernel:
    """Returns a kernel that moves rows of experts: "copied", "added" or "multiplied". `tokens` are those of a device.

    Each route has a row on one device at most, and no device has a row of the first token. Nobody may read the rows
    that no route has, and nobody writes them.
    """
    everything, chance = devices * tokens, np.random.default_rng(7)
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
    of_token, exact = (_f32(given[x]).reshape(devices, -1, features) for x in ("tokens", "rows"))
    of_token, copies = of_token.reshape(everything, features), np.zeros((devices, rows + 1, features), np.float32)
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
    check = _equals(expected.reshape(-1, expected.shape[-1]), jnp.float32 if name == "multiplied" else dtype)
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
) -> Kernel:
    """Returns the kernel of a product of rows that arrive meanwhile. `tokens` are those of a device.

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
        copies[device][positions[device]] = _f32(lhs)[here]
        exact[device, :last] = copies[device, :last] @ _f32(rhs[device * groups])
        exact[device, last:count] = copies[device, last:count] @ _f32(rhs[device * groups + 2])
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
        found = rows_through(dataclasses.replace(given, lhs=lhs), product, None, arrival)
        return tuple(jnp.where(jnp.arange(rows)[:, None] < sizes.sum(), x, 0) for x in found)

    function = on_mesh(make_mesh(x=devices), call, P("x"), P("x"))
    given = lhs, rhs, positions.reshape(-1, slots), sizes.reshape(-1)
    expected = exact.reshape(-1, n), copies.reshape(-1, features)
    return Kernel(lambda: function(*given), _equals(expected, out_dtype))


def of_loss(config: overlap.Config, **sizes: Any) -> Kernel:
    """Returns the kernels of a loss without logits and of its gradients. `sizes`: those of `loss.Case`.

    The z-loss shows what a loss alone would not: a number that is added to all logits of a token.
    """
    case = loss.Case(columns=200, z_loss=1e-2, **sizes)
    given = loss.drawn(case, seed=5)
    expected = loss.formulas(case, given)
    function = loss.program(case, "fused", config=config)

    def check(results: dict[str, jax.Array]) -> None:
        for name, distance in loss.distances(results, expected).items():
            assert distance <= (1e-4 if name == "loss" else 1e-2), (name, distance)

    return Kernel(lambda: function(given), check)


ONE = Form(72, (64,), 136)
FEW = Form(16, (136,), 136)
KERNELS: dict[str, Callable[[int], Kernel]] = {
    "pull": lambda devices: of_rows(ONE, PULL, devices),
    "pull, scales": lambda devices: of_rows(dataclasses.replace(ONE, scales=("rows",)), PULL, devices),
    "pull, gathered": lambda devices: of_rows(dataclasses.replace(ONE, gathered=True), PULL, devices),
    "joined": lambda devices: of_rows(FEW, JOINED, devices),
    "joined, scales": lambda devices: of_rows(dataclasses.replace(FEW, scales=("rows",)), JOINED, devices),
    "rhs n": lambda devices: of_weights("n", devices=devices),
    "rhs k": lambda devices: of_weights("k", devices=devices),
    "scatter m": lambda devices: of_sums("m", devices=devices),
    "scatter n": lambda devices: of_sums("n", devices=devices),
    SPREAD: lambda devices: of_sums(SPREAD, devices=devices, block=(16, 72)),
    ONE_SHOT: lambda devices: of_sums(ONE_SHOT, devices=devices),
    "ring": lambda devices: of_rows(ONE, PULL, devices, "ring"),
    # Several chunks per CTA, rows of one part or of several, and rings of buffers that wrap around within a chunk.
    "arriving": lambda devices: of_arriving(devices, 45, 320, ARRIVING),
    "rows copied": lambda devices: of_moved_rows("copied", devices, 9, 128, slots=3),
    "rows added": lambda devices: of_moved_rows("added", devices, 8, 4224, slots=6),
    "rows multiplied": lambda devices: of_moved_rows("multiplied", devices, 4, 2176, slots=8, dtype=np.float32),
}


@functools.cache
def clean(name: str, devices: int = 3) -> Kernel:
    """Returns a kernel of `KERNELS`, traced once and shared by all tests that inject nothing."""
    return KERNELS[name](devices)
