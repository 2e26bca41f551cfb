"""Small kernels, which between them run every statement that a defect can change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

import overlap
from tests.protocol import protocol_cases
from tests.protocol.exact import BF16, Kernel, on_blackwell
from tests.protocol.expert_cases import of_moved_rows
from tests.protocol.protocol_cases import (
    ONE,
    ONE_SHOT,
    PULL,
    SUMS,
    SUMS_BY_RING,
    Form,
    of_gradient,
    of_groups,
    of_loss,
    of_product,
    of_rows,
    of_sums,
    of_weights,
)

_TILE = overlap.Config(tile_m=64, tile_n=128, stages=2)
_ROWS, _ALL = (200, 264, 328), ("bias", "activation", "addend", "lhs_scale", "rhs_scale")
_ALONG_K = _TILE.replace(cluster=2, cluster_along="k")
_B200 = overlap.Config(tile_m=128, tile_n=64, stages=2, chunk_bytes=4096)
_PAIR, _B200_SUMS = _B200.replace(tile_n=128, cluster=2), _B200.replace(tile_n=128)
_B200_ROWS = Form(136, (64,), 136)


def _alone(shape: tuple[int, int, int], config: overlap.Config, **keywords: object) -> Callable[[], Kernel]:
    return lambda: of_product(shape, config, **keywords)  # pyright: ignore[reportArgumentType]


_BLACKWELL: dict[str, tuple[Callable[[], Kernel], int]] = {
    "blackwell": (_alone((640, 128, 192), _B200, out=BF16), 1),
    "blackwell, loss": (lambda: of_loss(_B200.replace(tile_n=128), tokens=150, with_bias=True, soft_cap=3.0), 1),
    "blackwell, pair": (_alone((1280, 128, 192), _PAIR, out=BF16), 2),
    "blackwell, groups": (lambda: of_groups((70, 0, 3, 64), _B200), 2),
    "blackwell, groups contracted": (lambda: of_groups((70, 0, 64), _B200, contracts=True), 2),
    # Enough columns for both halves of a CTA pair's right operand, and for the epilogue's own loads of received terms.
    "blackwell, pull, pairs": (
        lambda: of_rows(dataclasses.replace(_B200_ROWS, m=264, widths=(136,), scales=("rows",)), _PAIR), 2),
    "blackwell, rhs k, pairs": (lambda: of_weights("k", _PAIR, m=264), 2),
    "blackwell, joined": (
        lambda: of_rows(dataclasses.replace(_B200_ROWS, m=16), _B200.replace(joined=True, chunk_bytes=1024)), 2),
    "blackwell, scatter m": (lambda: of_sums("m", _B200_SUMS), 2),
    f"blackwell, {ONE_SHOT}": (lambda: of_sums(ONE_SHOT, _B200_SUMS), 2),
}  # fmt: skip
# The name of each kernel: how it is made anew, and the number of cores of a device.
KERNELS: dict[str, tuple[Callable[[], Kernel], int]] = {
    "matmul": (_alone(_ROWS, _TILE, extras=_ALL), 2),
    "pingpong": (_alone(_ROWS, _TILE.replace(schedule="pingpong"), extras=_ALL), 2),
    "stream k": (_alone((320, 128, 584), _TILE.replace(stream_k=3)), 4),
    "split k": (_alone((72, 136, 360), _TILE.replace(split_k=3)), 2),
    "cluster k": (_alone((64, 3 * 128, 6 * 64), _ALONG_K), 2),
    "cluster k, blocks": (_alone((256, 64, 4 * 64), _ALONG_K.replace(tile_m=256, tile_n=64)), 2),
    "swapped": (_alone((150, 136, 200), _TILE.replace(tile_m=72, swap_operands=True), extras=("bias",), out=BF16), 2),
    "groups": (lambda: of_groups((70, 0, 3, 64), _TILE), 2),
    "groups in turn": (lambda: of_groups((200, 0, 3, 64), _TILE.replace(schedule="pingpong", order_width=2)), 2),
    "groups contracted": (lambda: of_groups((70, 0, 130), _TILE, contracts=True), 2),
    "groups contracted in turn": (
        lambda: of_groups((70, 0, 130), _TILE.replace(schedule="pingpong"), contracts=True), 2),
    "loss": (lambda: of_loss(_TILE, tokens=150, with_bias=True), 2),
    "loss, kept": (lambda: of_loss(_TILE, tokens=72, with_bias=True, chunk=None), 2),
    "loss, capped": (
        lambda: of_loss(_TILE.replace(tile_m=128), tokens=70, transpose_w=True, soft_cap=3.0, chunk=64), 2),
    # A core has four CTAs that move rows.
    **{name: (lambda make=make: make(3), 1 if name.startswith("rows") else 2)
       for name, make in protocol_cases.KERNELS.items()},
    "rows copied, one device": (lambda: of_moved_rows("copied", 1, 9, 320, gated=False), 1),
    "rows added, one device": (lambda: of_moved_rows("added", 1, 9, 4096, gated=False), 1),
    "rows multiplied, one device": (lambda: of_moved_rows("multiplied", 1, 9, 4160), 1),
    "ring, sums": (lambda: of_sums(SUMS_BY_RING), 2),
    "pull, pingpong": (lambda: of_rows(ONE, PULL.replace(tile_m=64, schedule="pingpong")), 2),
    "pull, several": (lambda: of_rows(dataclasses.replace(ONE, widths=(64, 136), container=list), PULL), 2),
    "pull, batch": (lambda: of_rows(Form(72, (64,), 136, (2,)), PULL), 2),
    "scatter, batch, f32": (lambda: of_sums("m", SUMS, 2, batch=2, dtype=jnp.float32), 2),
    "passenger": (lambda: of_gradient(16, 128, (136, 72), 2), 2),
    **{name: (lambda make=make: on_blackwell(make()), cores) for name, (make, cores) in _BLACKWELL.items()},
}  # fmt: skip
# The CTAs of these kernels do not wait for each other, so a device may run one at a time.
ONE_AT_A_TIME = frozenset(protocol_cases.KERNELS) - {"ring"} | {"ring, sums", "scatter, 3 stages", "spread, tiles"}


def chosen(names: list[str]) -> list[str]:
    """Returns a few of the kernels that run a function: the first and the last of each kind."""
    of_kinds: dict[str, list[str]] = {}
    for name in names:
        of_kinds.setdefault(kind(name), []).append(name)
    return [name for kind in of_kinds.values() for name in dict.fromkeys((kind[0], kind[-1]))]


def kind(name: str) -> str:
    """Returns "matmul" (a product of one device), "gather", "sum", "loss", "blackwell", or a name that moves rows."""
    if name.startswith("blackwell"):
        return "blackwell"
    if name.startswith("loss"):
        return "loss"
    if name.startswith("rows"):
        return name
    if name in protocol_cases.KERNELS or "," in name or name == "passenger":
        return "sum" if any(part in name for part in ("scatter", "spread", "shot", "sums", "passenger")) else "gather"
    return "matmul"
