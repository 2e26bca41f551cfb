"""Makes the kernels of `protocol_cases`, and a product of one device, on the Blackwell mainloop, with exact results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import overlap
from overlap.frame.operands import Operands
from overlap.frame.operation import LaunchPlan
from overlap.kernels.operations import PLAIN
from overlap.kernels.target import Target, emulating
from overlap.single_gpu import product as single_gpu
from overlap.single_gpu.matmul import MATMUL
from tests.ops.product_cases import integers
from tests.ops.several_sides_cases import Form
from tests.protocol import protocol_cases
from tests.protocol.protocol_cases import ONE_SHOT, SPREAD, Kernel

B200 = Target("gpu", "NVIDIA B200", 148)
ONE = overlap.Config(tile_m=128, tile_n=64, stages=2, chunk_bytes=4096)
PAIR = ONE.replace(tile_n=128, cluster=2)
# With this configuration, a tile has two boxes, and each box has several chunks.
SUMS = overlap.Config(tile_m=128, tile_n=128, stages=2, chunk_bytes=4096)
ROWS = Form(136, (64,), 136, container=None)


def on_blackwell(kernel: Kernel) -> Kernel:
    """Returns the same kernel, traced for a Blackwell GPU."""

    def call() -> Any:
        with emulating("blackwell"):
            return kernel.call()

    return dataclasses.replace(kernel, call=call)


def launched(config: overlap.Config, shape: tuple[int, int, int], cores: int) -> Kernel:
    """Traces the kernel of a plain product anew; `overlap.matmul` would reuse an earlier trace."""
    (m, n, k), target = shape, Target("cpu", "cpu as NVIDIA B200", cores)
    lhs, rhs = integers(0, m, k).astype(jnp.bfloat16), integers(1, k, n).astype(jnp.bfloat16)
    plan = LaunchPlan(MATMUL, PLAIN, jnp.bfloat16, target, config)
    function = jax.jit(lambda lhs, rhs: single_gpu.launch(Operands(lhs, (rhs,)), plan))
    expected = (np.asarray(lhs, np.float32) @ np.asarray(rhs, np.float32)).astype(jnp.bfloat16).astype(np.float32)
    check = lambda result: np.testing.assert_array_equal(np.asarray(result, np.float32), expected)  # noqa: E731
    return Kernel(lambda: function(lhs, rhs), check)


def _of_rows(form: Form, config: overlap.Config, *transport: str) -> Callable[[int], Kernel]:
    return lambda devices: protocol_cases.of_rows(form, config, devices, *transport)


def _of_sums(along: str, config: overlap.Config = SUMS, **sizes: Any) -> Callable[[int], Kernel]:
    return lambda devices: protocol_cases.of_sums(along, config, devices, **sizes)


_KERNELS: dict[str, Callable[[int], Kernel]] = {
    "pull": _of_rows(ROWS, ONE),
    # Enough columns for both halves of a CTA pair's right operand, and for the epilogue's own loads of received terms.
    "pull, pairs": _of_rows(dataclasses.replace(ROWS, m=264, widths=(136,), scales=("rows",)), PAIR),
    "pull, scales, several": _of_rows(
        dataclasses.replace(ROWS, widths=(64, 136), container=list, scales=("rows", "columns")), ONE
    ),
    "joined": _of_rows(dataclasses.replace(ROWS, m=16), ONE.replace(joined=True, chunk_bytes=1024)),
    "ring": _of_rows(ROWS, ONE, "ring"),
    "rhs n": lambda devices: protocol_cases.of_weights("n", ONE.replace(chunk_bytes=1024), devices),
    "rhs k, pairs": lambda devices: protocol_cases.of_weights("k", PAIR, devices, m=264),
    "scatter m": _of_sums("m"),
    "scatter n": _of_sums("n"),
    "ring m": _of_sums("ring m"),
    SPREAD: _of_sums(SPREAD, block=(16, 72)),
    ONE_SHOT: _of_sums(ONE_SHOT),
}
FUSED = tuple(_KERNELS)


def fused(name: str, devices: int = 3) -> Kernel:
    """Traces a fused kernel anew."""
    return on_blackwell(_KERNELS[name](devices))


@functools.cache
def clean(name: str, devices: int = 3) -> Kernel:
    """A fused kernel, traced once and shared by all tests that patch nothing."""
    return fused(name, devices)
