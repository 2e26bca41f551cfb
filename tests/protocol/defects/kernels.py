"""Small instances of the library's kernels, which between them run every statement that a defect can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import overlap
from tests.ops import blackwell_cases, test_summed_pairs
from tests.ops.product_cases import in_f32, integers, oracle_of
from tests.ops.several_sides_cases import Form
from tests.protocol import protocol_cases
from tests.protocol.protocol_cases import ONE, ONE_SHOT, PULL, SUMS, SUMS_BY_RING, Kernel, of_rows, of_sums

_F32, _BF16 = jnp.float32, jnp.bfloat16
_TILE = overlap.Config(tile_m=64, tile_n=128, stages=2)
_ROWS = (200, 264, 328)


def _product(shape: tuple[int, int, int], config: overlap.Config, **keywords: Any) -> Kernel:
    """Returns the kernel of a call of `overlap.matmul`."""
    m, n, k = shape
    lhs, rhs = integers(1, m, k), integers(2, k, n)
    keywords = {"preferred_element_type": _F32} | keywords
    expected = oracle_of(lhs, rhs, **keywords).astype(keywords["preferred_element_type"])
    function = jax.jit(lambda a, b: overlap.matmul(a, b, config=config, implementation="fused", **keywords))
    check = lambda result: np.testing.assert_array_equal(in_f32(result), in_f32(expected))  # noqa: E731
    return Kernel(lambda: function(lhs, rhs), check)


def _on_blackwell(name: str) -> Callable[[], Kernel]:
    return lambda: blackwell_cases.fused(name, 3)


def _alone(shape: tuple[int, int, int], config: overlap.Config, **keywords: Any) -> Callable[[], Kernel]:
    return lambda: _product(shape, config, **keywords)


_EPILOGUE = {
    "bias": integers(5, 264), "activation": jax.nn.relu, "addend": integers(6, 200, 264),
    "lhs_scale": jnp.resize(jnp.array([0.5, 1.0, 2.0]), (200, 1)),
    "rhs_scale": jnp.resize(jnp.array([0.5, 2.0]), (264,)),
}  # fmt: skip
_ALONG_K = _TILE.replace(cluster=2, cluster_along="k")
# The name of each kernel: how it is made anew, and the number of cores of a device.
KERNELS: dict[str, tuple[Callable[[], Kernel], int]] = {
    "matmul": (_alone(_ROWS, _TILE, **_EPILOGUE), 2),
    "pingpong": (_alone(_ROWS, _TILE.replace(schedule="pingpong"), **_EPILOGUE), 2),
    "stream k": (_alone((320, 128, 584), _TILE.replace(stream_k=3)), 4),
    "split k": (_alone((72, 136, 360), _TILE.replace(split_k=3)), 2),
    "cluster m": (_alone((264, 136, 200), _TILE.replace(cluster=2)), 4),
    "cluster n": (_alone((136, 264, 200), _TILE.replace(cluster=2, cluster_along="n")), 4),
    "cluster k": (_alone((64, 3 * 128, 6 * 64), _ALONG_K), 2),
    "cluster k, blocks": (_alone((256, 64, 4 * 64), _ALONG_K.replace(tile_m=256, tile_n=64)), 2),
    "swapped": (
        _alone((150, 136, 200), _TILE.replace(tile_m=72, swap_operands=True), bias=integers(5, 136),
               preferred_element_type=_BF16), 2,
    ),
    **{
        name: (lambda make=make: make(3), 2)
        for name, make in protocol_cases.KERNELS.items()
    },
    "ring, sums": (lambda: of_sums(SUMS_BY_RING), 2),
    "pull, pingpong": (lambda: of_rows(ONE, PULL.replace(tile_m=64, schedule="pingpong")), 2),
    "pull, several": (lambda: of_rows(dataclasses.replace(ONE, widths=(64, 136), container=list), PULL), 2),
    "pull, batch": (lambda: of_rows(Form(72, (64,), 136, (2,), container=None), PULL), 2),
    "scatter, batch, f32": (lambda: of_sums("m", SUMS, 2, batch=2, dtype=_F32), 2),
    "passenger": (
        lambda: test_summed_pairs.kernel_of(test_summed_pairs.Gradient(16, 128, (136, 72), lead=(2,)), 3), 2
    ),
    "blackwell": (lambda: blackwell_cases.launched(blackwell_cases.ONE, (640, 128, 192), 1), 1),
    "blackwell, pair": (lambda: blackwell_cases.launched(blackwell_cases.PAIR, (1280, 128, 192), 2), 2),
    **{
        f"blackwell, {name}": (_on_blackwell(name), 2)
        for name in ("pull, pairs", "rhs k, pairs", "joined", "scatter m", ONE_SHOT)
    },
}  # fmt: skip
# The CTAs of these kernels do not wait for each other, so a device may run one at a time.
ONE_AT_A_TIME = frozenset(protocol_cases.KERNELS) - {"ring"}


def chosen(names: list[str]) -> list[str]:
    """Returns a few of the kernels that run a function: some of each kind, since most are alike for it."""
    kinds = {"blackwell": 2, "matmul": 3, "gather": 3, "sum": 2}
    return [name for name in names if (kind := _kind(name)) in kinds and (kinds := kinds | {kind: kinds[kind] - 1})[kind] >= 0]


def _kind(name: str) -> str:
    if name.startswith("blackwell"):
        return "blackwell"
    if name in protocol_cases.KERNELS or "," in name or name == "passenger":
        return "sum" if any(part in name for part in ("scatter", "spread", "shot", "sums", "passenger")) else "gather"
    return "matmul"
