"""Defines the tunable sizes of a matmul: of all mainloops and of the transports."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from overlap.primitives.integers import largest_divisor

FLOAT16 = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
# The width of the widest swizzle in bytes. The tensor cores of every architecture can read rows of this width, and a
# cache line has the same width.
SWIZZLE_BYTES = 128
# How many columns of each of several right operands follow each other in a tile (`hooks.SideBySide`).
SIDE_COLUMNS = 64
_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "order_minor": ("m", "n"),
    "cluster_along": ("m", "k"),
}
_SWITCHES = ("swap_operands", "joined", "one_shot")


def tile_k(dtype: DTypeLike) -> int:
    """Returns how many elements of a dtype one stage holds along k: rows as wide as the widest swizzle."""
    return SWIZZLE_BYTES // jnp.dtype(dtype).itemsize


def _valid(name: str, value: object) -> object:
    """Returns the value of a field, integers (of NumPy, say) as ints. Raises ValueError for one that is not allowed."""
    if name in _SWITCHES:
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be True or False, got {value!r}")
        return value
    if name in _CHOICES:
        if not (isinstance(value, str) and value in _CHOICES[name]):
            *most, last = map(repr, _CHOICES[name])
            raise ValueError(f"`{name}` must be {', '.join(most)} or {last}, got {value!r}")
        return value
    try:
        number = 0 if isinstance(value, (bool, np.bool_)) else operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")
    return number


@dataclasses.dataclass(frozen=True)
class Config:
    """The tunable sizes of a (fused) matmul.

    Three fields cut the contraction (k), for results whose tiles leave many SMs idle. Measured on an H200 and an
    H100, in 38 products of few tiles: `cluster_along="k"` is mostly the fastest where tiles fill at most half of the
    SMs and k is a few thousand; `stream_k` for a longer k, since it can cut a tile into more pieces, and for tiles
    that are left after full waves; `split_k` never. With a k below about 2000, smaller whole tiles are as fast.

    Attributes:
      tile_m: rows of the output tile of one CTA: 64, 128 or 256, or any multiple of 8 up to 256 with `swap_operands`;
        128 on Blackwell.
      tile_n: columns of the output tile of one CTA, at most 256. On Hopper a multiple of 64, or of 128 if `tile_m` is
        64 and `schedule` is "cooperative". On Blackwell a multiple of 64, or of 128 with `cluster=2`; twice these
        multiples if the right operand is float8 as [k, n].
      stages: stages of the shared-memory pipeline, at least 2. Each holds the operand tiles of one k step. Shared
        memory limits their number.
      schedule: "cooperative": the two compute warpgroups of a CTA share each tile. "pingpong": they take turns, each
        with tiles of its own, so that one stores its tile while the other multiplies; a tile is then 128 × 128 or
        64 × 256 at most (with `swap_operands` 20480 elements). Blackwell has no "pingpong": there a tile is always
        stored during the products of the next.
      swap_operands: the tensor cores compute the transposed tile, rhsᵀ · lhsᵀ. wgmma computes 64 rows at a time, but
        any multiple of 8 columns. So `tile_m` may then be any multiple of 8, chosen such that the tiles fill the last
        wave. `tile_n` is 128 or 256, with "pingpong" any multiple of 64; a tile has at most 40960 elements, with
        "pingpong" 20480. It needs a 16-bit result, `lhs` as [m, k], and no `split_k`; `stream_k` may be used. It cannot
        be used in `matmul_reduce_scatter` and `matmul_all_reduce`, with the transport "ring", or on Blackwell.
      order_minor: which dimension of the tile grid runs fastest, "m" or "n".
      order_width: the tile order runs through bands of this many tiles along `order_minor`: with "m" and 8 down 8 tile
        rows, then down the next column of these rows. A pair of CTAs has one tile here.
      stream_k: into how many pieces, at most, each tile of the last, partial wave is cut along k, so that SMs that
        would otherwise be idle compute a piece (`StreamK`); 1: no tile is cut.
      split_k: into how many pieces the contraction of every tile is cut. Each piece is computed as a tile of its own;
        XLA then sums the pieces in f32 in a fixed order. For results of few tiles (plain matmul only, and not together
        with `stream_k`).
      cluster: how many CTAs form a cluster: 1 (no clusters), 2, or with `cluster_along="k"` also 4.
      cluster_along: "m", on Blackwell only: the two CTAs of a cluster are a *pair* with adjacent tiles, one below the
        other, and one instruction of the tensor cores computes both, as one tile of twice the rows. "k", on Hopper
        only: all CTAs of a cluster compute the same tile. Each takes a part of the contraction, and they add their sums
        through each other's shared memory. That is for results of few tiles (plain `matmul` only, with the schedule
        "cooperative", without `stream_k` and `split_k`, and with at least one k step for each CTA), as in
        `Config(tile_m=64, tile_n=128, stages=8, cluster=2, cluster_along="k")`. The sums lie in the memory of the
        stages, so the operands of a CTA's next tile, if it has several, are loaded only after the exchange.
      joined: whether the gathered rows of all shards are tiled as the rows of one matrix, so that few rows per shard
        fill a tile together (`all_gather_lhs_matmul` by the transport "pull" only; ignored elsewhere).
      one_shot: whether each device sends its part of the whole result to all others, and adds up all parts itself: for
        few rows (`matmul_all_reduce` only; ignored elsewhere).
      chunk_bytes: the most bytes that a communicator warp copies at once (fused operations only; not the transport
        "ring").
      chunk_buffers: how many chunk buffers a CTA has in shared memory. Each can have one copy in flight.
    """

    tile_m: int = 128
    tile_n: int = 256
    stages: int = 4
    schedule: Literal["cooperative", "pingpong"] = "cooperative"
    swap_operands: bool = False
    order_minor: Literal["m", "n"] = "m"
    order_width: int = 8
    stream_k: int = 1
    split_k: int = 1
    cluster: int = 1
    cluster_along: Literal["m", "k"] = "m"
    joined: bool = False
    one_shot: bool = False
    chunk_bytes: int = 8192
    chunk_buffers: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            # Check the common case first, because the search makes thousands of configurations.
            if type(value) is not int or value < 1 or name in _SWITCHES or name in _CHOICES:
                object.__setattr__(self, name, _valid(name, value))

    @property
    def in_turn(self) -> bool:
        """Whether each compute warpgroup has tiles of its own."""
        return self.schedule == "pingpong"

    @property
    def cluster_tile_m(self) -> int:
        """Rows of the output tile of one cluster; it has `tile_n` columns."""
        return self.tiles_per_cluster * self.tile_m

    @property
    def tiles_per_cluster(self) -> int:
        """How many adjacent tiles the CTAs of a cluster compute: 2 in a pair, else 1."""
        return self.cluster if self.cluster_along == "m" else 1

    @property
    def ctas_per_tile(self) -> int:
        """How many CTAs, those of a cluster, divide the k steps of each tile among them."""
        return self.cluster if self.cluster_along == "k" else 1

    def strip_rows(self, itemsize: int) -> int:
        """Returns how many whole rows of an output tile one chunk holds: a divisor of `tile_m`."""
        return largest_divisor(self.tile_m, max(self.chunk_bytes // (self.tile_n * itemsize), 1))

    def replace(self, **fields: Any) -> Config:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **fields)
