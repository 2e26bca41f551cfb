"""The problem that a configuration is chosen for: an operation and its sizes; and which sizes share a configuration."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from overlap.kernels import limits
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

Layout = Literal["nn", "nt", "tn", "tt"]
LAYOUTS: tuple[Layout, ...] = ("nn", "nt", "tn", "tt")
_SIGNIFICANT_BITS = 4
# For each operation that gathers or scatters, the dimension of the product along which it does.
_GATHERED = {"all_gather_lhs_matmul": "m", "all_gather_rhs_matmul_n": "n", "all_gather_rhs_matmul_k": "k"}
_SCATTERED = {"matmul_reduce_scatter": "m", "matmul_reduce_scatter_n": "n"}
_ALL_REDUCE = "matmul_all_reduce"
# All values of `Problem.op`.
OPS = ("matmul", *_GATHERED, *_SCATTERED, _ALL_REDUCE)
# Tiles are made of squares of this size. A block whose size is no multiple of it wastes a part of its last squares.
_SQUARE = 128
# The names of these operations in messages.
_PUBLIC = {
    "all_gather_rhs_matmul_n": "all_gather_rhs_matmul (along n)",
    "all_gather_rhs_matmul_k": "all_gather_rhs_matmul (along k)",
    "matmul_reduce_scatter_n": "matmul_reduce_scatter (along n)",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of an operation, reduced to what decides its speed.

    Attributes:
      op: the operation's name, one of `OPS`.
      m: rows of the left operand; in a collective, of a device's shard.
      n: columns of the right operand; in a collective, of a device's shard.
      k: size of the contraction. If the right operand is gathered along k, or products are summed over the devices,
        this is the size on one device.
      dtype: name of the operands' dtype.
      out_dtype: name of the result's dtype.
      devices: how many devices take part.
      layout: which operands are stored transposed (t) or not (n), left and right; "nt": the right one is.
      batch: how many products of these sizes one call computes.
      block_scaled: whether the operands have scales of blocks.
    """

    op: str
    m: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    devices: int = 1
    layout: Layout = "nn"
    batch: int = 1
    block_scaled: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"`layout` must be one of {LAYOUTS}, got {self.layout!r}: name one of these")

    def __str__(self) -> str:
        dtypes = self.dtype if self.dtype == self.out_dtype else f"{self.dtype}->{self.out_dtype}"
        devices = f" on {self.devices} devices" if self.devices > 1 else ""
        layout = f" {self.layout}" if self.layout != "nn" else ""
        batch = f"{self.batch} × " if self.batch > 1 else ""
        op = _PUBLIC.get(self.op, self.op)
        scales = " with scales of blocks" if self.block_scaled else ""
        return f"{op} {batch}{self.shape} {dtypes}{layout}{scales}{devices}"

    @property
    def shape(self) -> str:
        """The sizes as the command line takes them: m, n, k."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def communicates(self) -> bool:
        """Whether data travels between devices beside the products."""
        return self.devices > 1

    @property
    def gathered(self) -> str:
        """The dimension along which the devices' shards are gathered: "m", "n" or "k"; "" if none is."""
        return _GATHERED.get(self.op, "")

    @property
    def scattered(self) -> str:
        """The dimension along which the sum over the devices is cut into a block for each device: "m", "n" or "".

        `matmul_all_reduce` may cut along either one. It takes the one whose blocks waste less of their tiles.
        """
        if self.op != _ALL_REDUCE:
            return _SCATTERED.get(self.op, "")
        by_rows, by_columns = self.m % self.units["m"] == 0, self.n % self.units["n"] == 0
        if not (by_rows and by_columns):
            return "m" if by_rows else "n"

        def squares(m: int, n: int) -> int:
            return ceil_div(m, _SQUARE) * ceil_div(n, _SQUARE)

        return "m" if squares(self.m // self.devices, self.n) <= squares(self.m, self.n // self.devices) else "n"

    @property
    def replicates(self) -> bool:
        """Whether all devices get the whole sum."""
        return self.op == _ALL_REDUCE

    @property
    def units(self) -> dict[str, int]:
        """m and n must be multiples of these to be cut into equal blocks, whose rows begin at multiples of 16 bytes."""
        of_row = limits.TMA_ROW_BYTES // self.itemsize
        of_result = limits.TMA_ROW_BYTES // jnp.dtype(self.out_dtype).itemsize
        m, n = of_row if self.transpose_lhs else 1, of_result if self.transpose_rhs else max(of_result, of_row)
        return {"m": self.devices * m, "n": self.devices * n}

    def transport(self, config: Config) -> Literal["", "pull", "push", "broadcast", "one_shot"]:
        """How data travels between devices, by the names of `limits.Sizes.transport`."""
        if not self.communicates:
            return ""
        if self.replicates:
            return "one_shot" if config.one_shot else "broadcast"
        return "push" if self.scattered else "pull"

    def grid(self, config: Config) -> tuple[int, int, int]:
        """(rows, columns, products): the size of each product that a device cuts into tiles, and how many there are."""
        if self.replicates and config.one_shot:
            return self.m, self.n, self.batch
        m, n = self.block
        return (self.blocks * m, n, 1) if config.joined else (m, n, self.blocks)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of one device's block: of the product of its shard, or of a sum that is scattered."""
        parts = {self.scattered: self.devices}
        return self.m // parts.get("m", 1), self.n // parts.get("n", 1)

    @property
    def blocks(self) -> int:
        """How many blocks one device computes, for all devices and batch elements.

        Shards gathered along k make no blocks.
        """
        return self.batch * (1 if self.gathered == "k" else self.devices)

    @property
    def whole(self) -> tuple[int, int, int]:
        """m, n and k of the product that one device computes."""
        factors = {self.gathered: self.devices}
        return self.m * factors.get("m", 1), self.n * factors.get("n", 1), self.k * factors.get("k", 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the operands."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def flops_per_device(self) -> float:
        """Floating-point operations that one device does."""
        m, n, k = self.whole
        return 2.0 * self.batch * m * n * k

    @property
    def bytes_per_device(self) -> float:
        """Bytes of the operands and the result of one device, each counted once."""
        m, n, k = self.whole
        return float(self.batch * ((m + n) * k * self.itemsize + m * n * jnp.dtype(self.out_dtype).itemsize))

    @property
    def received_bytes_per_device(self) -> float:
        """Bytes that one device receives from the others."""
        if self.scattered:
            block = math.prod(self.block) * jnp.dtype(self.out_dtype).itemsize * (2 if self.replicates else 1)
        else:
            block = (self.m if self.gathered == "m" else self.n) * self.k * self.itemsize
        return float((self.devices - 1) * self.batch * block)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of a row in memory, of the left and of the right operand."""
        lhs, rhs = self.m if self.transpose_lhs else self.k, self.k if self.transpose_rhs else self.n
        return lhs * self.itemsize, rhs * self.itemsize

    @property
    def transpose_lhs(self) -> bool:
        """Whether the left operand is [k, m] in memory."""
        return self.layout[0] == "t"

    @property
    def transpose_rhs(self) -> bool:
        """Whether the right operand is [n, k] in memory."""
        return self.layout[1] == "t"

    @property
    def bucket(self) -> Problem:
        """The problem with all sizes rounded up (`bucket`). It stands for all problems of about this size."""
        sizes = {name: bucket(getattr(self, name)) for name in ("m", "n", "k")}
        return dataclasses.replace(self, **sizes, batch=bucket(self.batch, least=1))

    def check(self, config: Config, target: Target) -> None:
        """`limits.check` for this problem."""
        self.check_blocks(config)
        # The parts of a split contraction are stored in f32.
        out_dtype = self.out_dtype if config.split_k == 1 else "float32"
        layouts, transport = OperandLayouts(self.transpose_lhs, self.transpose_rhs), self.transport(config)
        m, n = (self.m, self.n) if transport == "one_shot" else self.block
        sizes = limits.Sizes(m, n, self.k, self.dtype, out_dtype, layouts, transport, block_scaled=self.block_scaled)
        limits.check(sizes, config, target)

    def check_blocks(self, config: Config) -> None:
        """Raises NotImplementedError if a sum that all devices get cannot be cut into equal blocks, one per device."""
        cut = {"m": self.m, "n": self.n}.get(self.scattered, 0)
        if self.transport(config) == "broadcast" and cut % self.units[self.scattered]:
            raise NotImplementedError(
                f"the fused kernel of `{self.op}` sums up a block of rows or columns on each of the {self.devices} "
                f"devices, got m={self.m} and n={self.n}: pad m to a multiple of {self.units['m']} or n to one of "
                f'{self.units["n"]}, name a config with one_shot=True, or use implementation="xla"'
            )

    def accepts(self, config: Config, target: Target) -> bool:
        """Whether the fused kernel can run this problem with `config`, without spilling registers."""
        try:
            self.check(config, target)
        except (ValueError, NotImplementedError):
            return False
        return target.is_blackwell or not self._crowds_registers(config)

    def _crowds_registers(self, config: Config) -> bool:
        """Whether a thread on Hopper may need a few more registers than it has.

        These cases were found by assembling all kernels (`tests.assembly_sweep`). In compute threads:

        - 256 rows, or the largest tiles if both operands are transposed, with 32-bit results, cut tiles (stream-k) and
          a cluster, if the epilogue has everything
        - where parts of peers are added: 128 rows per warpgroup, or the largest tiles with the schedule "pingpong"
        - where own tiles are sent as well: the largest tiles of 8-bit operands or with 32-bit results

        In the producer, beside a gather:

        - the schedule "pingpong" in a cluster, or with the smallest tiles
        - tiles of 256 × 64 that are cut, in a cluster
        """
        transport = self.transport(config)
        fills_warpgroup = config.in_turn and (config.tile_m == 128 or config.tile_m * config.tile_n >= 64 * 256)
        if transport in ("push", "broadcast") and (config.tile_m == 256 or fills_warpgroup):
            return True
        if config.in_turn and transport == "pull" and (config.cluster > 1 or config.tile_m * config.tile_n <= 64 * 64):
            return True
        if (
            transport == "pull"
            and (config.tile_m, config.tile_n) == (256, 64)
            and min(config.cluster, config.stream_k) > 1
        ):
            return True
        has_wide_results = jnp.dtype(self.out_dtype).itemsize == 4
        is_large = config.tile_m * config.tile_n >= 128 * 256
        if transport == "broadcast" and is_large and (self.itemsize == 1 or has_wide_results):
            return True
        wide = has_wide_results and (config.tile_m == 256 or (is_large and self.layout == "tt"))
        return wide and config.cluster > 1 and config.stream_k > 1


def default_out_dtype(dtype: str) -> str:
    """The dtype of the result if the caller names none: that of the operands, or bfloat16 for 8-bit operands."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def bucket(size: int, least: int = 16) -> int:
    """`size` rounded up to four significant bits, and to at least `least`. There are eight buckets for every doubling.

    Example:
      >>> [bucket(size) for size in (1, 4096, 4097, 14336, 11008)]
      [16, 4096, 4608, 14336, 11264]
    """
    shift = max((size - 1).bit_length() - _SIGNIFICANT_BITS, 0)
    return max(-(-size >> shift) << shift, least)
