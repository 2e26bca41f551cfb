"""What can be tuned in a matmul: the sizes of all mainloops, and those of a transport as a part of their own."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from overlap.primitives.integers import largest_divisor

FLOAT16 = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
FLOAT8 = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))
# The widest swizzle: every architecture's tensor cores read rows of so many bytes, and lines of the cache are as wide.
SWIZZLE_BYTES = 128
_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "order_minor": ("m", "n"),
    "cluster_along": ("m", "n"),
}
_SWITCHES = ("swap_operands", "joined", "one_shot")


def _require_valid(sizes: Any) -> None:
    """Checks the fields of a (part of a) configuration one by one. Raises ValueError."""
    # (The search makes thousands.)
    for name, value in vars(sizes).items():
        if type(value) is int and value >= 1 and name not in _NO_NUMBERS:
            continue
        part = _PARTS.get(name)
        if part is not None:
            if not isinstance(value, part):
                raise ValueError(f"`{name}` must be an overlap.{part.__name__}, got {value!r}: pass one")
        elif name in _SWITCHES:
            if not isinstance(value, bool):
                raise ValueError(f"`{name}` must be True or False, got {value!r}")
        elif name in _CHOICES:
            first, second = _CHOICES[name]
            if not (isinstance(value, str) and value in (first, second)):
                raise ValueError(f"`{name}` must be {first!r} or {second!r}, got {value!r}")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}")


@dataclasses.dataclass(frozen=True)
class PullSizes:
    """What only the transport "pull" has.

    Attributes:
      chunk_bytes: the most that the communicator of one CTA pulls in one copy.
      chunk_buffers: how many such copies are in flight per CTA.
    """

    chunk_bytes: int = 8192
    chunk_buffers: int = 2

    def __post_init__(self) -> None:
        _require_valid(self)


_PARTS: dict[str, type] = {"pull": PullSizes}
_NO_NUMBERS = {*_SWITCHES, *_CHOICES, *_PARTS}


@dataclasses.dataclass(frozen=True)
class Config:
    """The tunable sizes of a (fused) matmul.

    Attributes:
      tile_m: rows of the output tile of one CTA: 64, 128 or 256, or any multiple of 8 up to 256 with `swap_operands`;
        128 on Blackwell.
      tile_n: columns of the output tile of one CTA: a multiple of 64 (of 128 where tile_m is 64 and the schedule
        cooperative), 256 at most. On Blackwell of 128 if `cluster` is 2, and of twice that if the right operand is
        float8 as [k, n].
      tile_k: depth of one stage, in elements; its bytes must be 128, the widest swizzle.
      stages: operand tiles in flight, at least 2; shared memory limits them.
      schedule: "cooperative": the two compute warpgroups of a CTA share each tile. "pingpong": each has tiles of its
        own, in turn, so that one stores its tile while the other one multiplies; a tile is then 128 × 128 or 64 × 256
        at most. On Blackwell a tile is always stored beside the products of the next, and there is no "pingpong".
      swap_operands: the tensor cores compute the transposed tile, rhsᵀ · lhsᵀ. These have 64 rows at a time, but
        columns in eights; so `tile_m` may then be chosen for tiles that fill the cores' last wave, and `tile_n` is 64
        (pingpong), 128 or 256. For 16-bit results and `lhs` as [m, k], without `stream_k` and `split_k`; not by the
        transport "ring", where results are exchanged, and on Blackwell.
      order_minor: which dimension of the tile grid runs fastest, "m" or "n".
      order_width: tiles (of a cluster) per band of the order (`TileOrder`).
      stream_k: into how many parts each tile of the last, partial wave may be cut along k, so that cores that would
        idle take a share (`StreamK`); 1: none is.
      split_k: into how many parts the contraction is cut, each a tile of its own, summed by XLA in f32 in a fixed order
        afterwards: for results of few tiles (plain matmul only, and not together with `stream_k`).
      cluster: how many CTAs (1 or 2) compute adjacent tiles and share the loads of the operand common to them. On
        Blackwell two compute one tile of twice the rows, with one product.
      cluster_along: in which dimension they are adjacent: "m" (they share the right operand) or "n" (the left one; not
        on Blackwell).
      joined: whether the gathered rows of all shards are tiled as those of one matrix, so that few rows per shard fill
        a tile together (`all_gather_lhs_matmul` by the transport "pull" only; elsewhere it means nothing).
      one_shot: whether each device sends its part of all of the result to all others, and adds up all of it itself: for
        few rows (`matmul_all_reduce` only; elsewhere it means nothing).
      epilogue_tile_n: columns that a warpgroup stores at a time.
      epilogue_buffers: shared-memory buffers per warpgroup for that, so that one is filled while another is stored. A
        divisor of the stores of a tile.
      pull: sizes of what communicates in chunks (fused operations only; not the transport "ring").
    """

    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    stages: int = 4
    schedule: Literal["cooperative", "pingpong"] = "cooperative"
    swap_operands: bool = False
    order_minor: Literal["m", "n"] = "m"
    order_width: int = 8
    stream_k: int = 1
    split_k: int = 1
    cluster: int = 1
    cluster_along: Literal["m", "n"] = "m"
    joined: bool = False
    one_shot: bool = False
    epilogue_tile_n: int = 64
    epilogue_buffers: int = 1
    pull: PullSizes = PullSizes()

    def __post_init__(self) -> None:
        _require_valid(self)

    @property
    def in_turn(self) -> bool:
        """Whether each compute warpgroup has tiles of its own."""
        return self.schedule == "pingpong"

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of the output tile of one cluster."""
        if self.cluster_along == "m":
            return self.cluster * self.tile_m, self.tile_n
        return self.tile_m, self.cluster * self.tile_n

    def strip_rows(self, itemsize: int) -> int:
        """How many whole rows of an output tile one chunk of a transport holds: at least one, and a divisor of all."""
        return largest_divisor(self.tile_m, max(self.pull.chunk_bytes // (self.tile_n * itemsize), 1))

    @property
    def fields(self) -> dict[str, Any]:
        """All sizes by name, those of the parts beside the others: as tables and command lines have them."""
        flat: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            flat |= dataclasses.asdict(value) if field.name in _PARTS else {field.name: value}
        return flat

    def replace(self, **fields: Any) -> Config:
        """The same configuration with some of `fields` changed, whichever part they are of.

        Raises:
          TypeError: there is no such field.
        """
        for name, part in _PARTS.items():
            names = {field.name for field in dataclasses.fields(part)} & fields.keys()
            if names:
                given = fields.get(name, getattr(self, name))
                fields[name] = dataclasses.replace(given, **{field: fields.pop(field) for field in names})
        return dataclasses.replace(self, **fields)

    @staticmethod
    def of(**fields: Any) -> Config:
        """The inverse of `fields`; what is missing has its default."""
        return Config().replace(**fields)


# `Config.fields` and `replace` know all sizes by one name each.
assert len(Config().fields) == sum(len(dataclasses.fields(x)) for x in (Config, *_PARTS.values())) - len(_PARTS)


def default_config(dtype: Any, *, block_scaled: bool = False) -> Config:
    """The configuration for large problems of a dtype; with scales of blocks a tile has fewer columns."""
    itemsize = jnp.dtype(dtype).itemsize
    tile_k = SWIZZLE_BYTES // itemsize if itemsize <= 2 else 64
    return Config(tile_n=128 if block_scaled else Config.tile_n, tile_k=tile_k)
