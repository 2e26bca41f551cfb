"""Small instances of the library's kernels with exact results; `expert_cases.py` has those of experts."""

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
from overlap.frame.operands import Operands
from overlap.single_gpu.grouped_product import contraction
from tests.ops import loss_cases as loss
from tests.ops.grouped_plans import plan_of
from tests.oracle import make_mesh, on_mesh
from tests.protocol.exact import BF16, Kernel, equals, in_f32, integers
from tests.protocol.expert_cases import ARRIVING, of_arriving, of_moved_rows

# With these chunks, each CTA copies several chunks of each peer's shard.
PULL = overlap.Config(tile_n=64, stages=2, chunk_bytes=4096)
JOINED = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True, chunk_bytes=1024)
WEIGHTS = overlap.Config(tile_n=128, stages=2, chunk_bytes=1024)
# With this configuration, a tile has two boxes, and each box has several chunks.
SUMS = overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_bytes=1024)
# Names of `matmul_all_reduce` kernels for `of_sums`. SPREAD sums blocks of columns; "spread m" sums blocks of rows.
SPREAD, ONE_SHOT = "spread n", "one shot"
# The name for `of_sums` of a reduce-scatter whose partial sums travel from device to device.
SUMS_BY_RING = "ring m"


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
    exact = in_f32(lhs) @ in_f32(rhs) * given.get("lhs_scale", 1) * given.get("rhs_scale", 1)
    exact = exact + in_f32(given.get("bias", 0)) + in_f32(given.get("addend", 0))
    exact = np.maximum(exact, 0) if "activation" in given else exact
    given |= {"transpose_rhs": transpose_rhs, "preferred_element_type": out, "config": config}
    function = jax.jit(lambda a, b: overlap.matmul(a, b, implementation="fused", **given))
    operands = lhs, rhs.T if transpose_rhs else rhs
    return Kernel(lambda: function(*operands), equals(exact, out))


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
        exact = np.stack([in_f32(lhs[of]).T @ in_f32(rhs[of]) for of in rows])
    else:
        exact = np.zeros((m, n), np.float32)
        for group, of in enumerate(rows):
            exact[of] = in_f32(lhs[of]) @ in_f32(rhs[group]) + in_f32(bias[group])

    @jax.jit
    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        if contracts:
            given = Operands(lhs, (rhs,), group_sizes=sizes)
            return contraction(given, plan_of(given, config, jnp.float32))
        how: dict[str, Any] = {"preferred_element_type": jnp.float32, "config": config, "implementation": "fused"}
        return overlap.grouped_matmul(lhs, rhs, sizes, bias=bias, **how)

    return Kernel(lambda: call(lhs, rhs, np.int32(sizes)), equals(exact, jnp.float32))


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

    exact = [in_f32(lhs) @ in_f32(side) * (rows if "rows" in form.scales else 1) for side in sides]
    exact = [out * scale if "columns" in form.scales else out for out, scale in zip(exact, columns, strict=True)]
    lead = (None,) * len(form.batch)
    of_rows, of_result = P(*lead, "x", None), one([P(*lead, None, "x")] * len(sides))
    in_specs = of_rows, [P(None, "x")] * len(sides), of_rows, [P("x")] * len(sides)
    function = on_mesh(make_mesh(x=devices), body, in_specs, (of_result, P("x") if form.gathered else []))
    expected = one(exact), [np.stack([lhs] * devices)] if form.gathered else []
    return Kernel(lambda: function(lhs, sides, rows, columns), equals(expected, dtype))


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
    return Kernel(lambda: function(lhs, rhs), equals(in_f32(lhs) @ in_f32(rhs), BF16))


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
    exact = in_f32(lhs) @ in_f32(rhs) * (scales if row_scale else 1) + in_f32(added)
    expected = np.stack([exact] * devices) if everywhere else exact
    operands = lhs.swapaxes(-1, -2) if transpose_lhs else lhs, rhs
    return Kernel(lambda: function(*operands), equals(expected, dtype))


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
    of_x = sum(in_f32(d) @ in_f32(w).T for d, w in zip(cotangents, weights, strict=True))
    of_weights = [np.einsum("bmk,bmn->kn", in_f32(x), in_f32(d)) for d in cotangents]
    return Kernel(lambda: function(x, weights, cotangents), equals((of_x, of_weights), dtype))


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
