"""Describes the problem that a configuration is chosen for, and says which sizes share tuned configurations."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from overlap.kernels import limits
from overlap.kernels.architectures import mainloop_of
from overlap.kernels.config import Config
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import BY_NAME, LAYOUTS, Dimension, Layout, OperandLayouts, OperationSpec, Transport
from overlap.kernels.target import Target
from overlap.primitives.integers import ceil_div

_SIGNIFICANT_BITS = 4
# The sizes of blocks are compared in squares of this many rows and columns, as a stand-in for tiles. If a block's size
# is not a multiple of this, a part of its last squares is wasted.
_SQUARE = 128


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call of an operation, described by the properties that determine its speed.

    Attributes:
      op: the operation's name, one of `operations.BY_NAME`.
      m: rows of the left operand; in a collective, rows of its shard on one device.
      n: columns of the right operand; in a collective, columns of its shard on one device.
      k: size of the contraction. If the right operand is gathered along k, or products are summed over the devices,
        this is the size on one device.
      dtype: name of the operands' dtype.
      out_dtype: name of the result's dtype.
      devices: how many devices take part.
      layout: two letters, for the left and the right operand: "t" if it is stored transposed, else "n". For example,
        "nt" means that only the right operand is stored transposed.
      batch: how many products of these sizes one call computes. Of products of groups of rows: how many groups. `m` (or
        k, of a contraction) is then the number of rows of a group on average.
      block_scaled: whether the operands have one scale for each block of elements.
      sides: how many right operands lie side by side in each tile, for an activation of all of them. `n` counts the
        columns of all.
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
    sides: int = 1

    def __post_init__(self) -> None:
        if self.op not in BY_NAME:
            raise ValueError(f"`op` must be one of {list(BY_NAME)}, got {self.op!r}: name one of these")
        if self.layout not in LAYOUTS:
            raise ValueError(f"`layout` must be one of {LAYOUTS}, got {self.layout!r}: name one of these")

    def __str__(self) -> str:
        words = [str(self.spec)]
        if self.batch > 1:
            words.append(f"{self.batch} ×")
        words.append(self.shape)
        words.append(self.dtype if self.dtype == self.out_dtype else f"{self.dtype}->{self.out_dtype}")
        if self.layout != "nn":
            words.append(self.layout)
        if self.block_scaled:
            words.append("with scales of blocks")
        if self.sides > 1:
            words.append(f"of {self.sides} right operands side by side")
        if self.devices > 1:
            words.append(f"on {self.devices} devices")
        return " ".join(words)

    @property
    def shape(self) -> str:
        """The sizes as the command line takes them: m, n, k."""
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def communicates(self) -> bool:
        """Whether the call sends data between devices."""
        return self.devices > 1 and bool(self.spec.transports)

    @property
    def spec(self) -> OperationSpec:
        """What the operation does."""
        return BY_NAME[self.op]

    @property
    def gathered(self) -> Dimension:
        """The dimension along which the devices' shards are gathered: "m", "n" or "k"; "" if none is."""
        return self.spec.gathers

    @property
    def scattered(self) -> Dimension:
        """The dimension along which the sum over the devices is cut into a block for each device: "m" or "n".

        "" if the sum is not cut. `matmul_all_reduce` may cut along either, and takes the one whose blocks need fewer
        tiles.
        """
        if not self.replicates:
            return self.spec.scatters
        by_rows, by_columns = self.m % self.units["m"] == 0, self.n % self.units["n"] == 0
        if not (by_rows and by_columns):
            return "m" if by_rows else "n"

        def squares(m: int, n: int) -> int:
            return ceil_div(m, _SQUARE) * ceil_div(n, _SQUARE)

        return "m" if squares(self.m // self.devices, self.n) <= squares(self.m, self.n // self.devices) else "n"

    @property
    def replicates(self) -> bool:
        """Whether all devices get the whole sum."""
        return self.spec.replicates

    @property
    def units(self) -> dict[str, int]:
        """The numbers of which m and n must be multiples, so that the sum can be cut into one equal block per device.

        Rows of these blocks must begin at multiples of 16 bytes in memory.
        """
        of_row = limits.TMA_ROW_BYTES // self.itemsize
        of_result = limits.TMA_ROW_BYTES // jnp.dtype(self.out_dtype).itemsize
        m = of_row if self.transpose_lhs else 1
        n = of_result if self.transpose_rhs else max(of_result, of_row)
        return {"m": self.devices * m, "n": self.devices * n}

    def transport(self, config: Config) -> Transport:
        """Returns how data travels between devices, unless the caller names another way; "" if no data does."""
        if not self.communicates:
            return ""
        return "one_shot" if self.replicates and config.one_shot else self.spec.transports[0]

    def grid(self, config: Config) -> tuple[int, int, int]:
        """Returns (rows, columns, products): the size and the number of the products that a device cuts into tiles."""
        if self.replicates and config.one_shot:
            return self.m, self.n, self.batch
        m, n = self.block
        return (self.blocks * m, n, 1) if config.joined else (m, n, self.blocks)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block: the product of one shard, or one device's share of a sum that is scattered."""
        parts = {self.scattered: self.devices}
        return self.m // parts.get("m", 1), self.n // parts.get("n", 1)

    @property
    def blocks(self) -> int:
        """The number of separately tiled blocks in one device's product: one for each device and batch element.

        Shards gathered along k add to the same block, so they do not raise the number.
        """
        return self.batch * (1 if self.gathered == "k" else self.devices)

    @property
    def undivided(self) -> Problem:
        """The collective with all rows of its batch in one product. Those of `matmul` may share no right operand."""
        return dataclasses.replace(self, m=self.batch * self.m, batch=1) if self.spec.transports else self

    @property
    def whole(self) -> tuple[int, int, int]:
        """m, n and k of the whole product that one device computes, with the shards that it gathers."""
        factors = {self.gathered: self.devices}
        return self.m * factors.get("m", 1), self.n * factors.get("n", 1), self.k * factors.get("k", 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the operands."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def flops_per_device(self) -> float:
        """The number of floating-point operations of one device: two for each multiply-add."""
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
        """Bytes of a row, as stored in memory, of the left operand and of the right operand."""
        lhs = self.m if self.transpose_lhs else self.k
        rhs = self.k if self.transpose_rhs else self.n
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
        """The problem with its sizes rounded up by the function `bucket`: equal for problems of about the same size."""
        sizes = {name: bucket(getattr(self, name)) for name in ("m", "n", "k")}
        return dataclasses.replace(self, **sizes, batch=bucket(self.batch, least=1))

    def types(self, config: Config, transport: Transport) -> OperandTypes:
        """Returns what a mainloop must know of the operands."""
        # With split-k, partial products are stored in f32.
        out_dtype = "float32" if config.split_k > 1 and not transport else self.out_dtype
        layouts = OperandLayouts(self.transpose_lhs, self.transpose_rhs)
        m = self.m if transport == "one_shot" else self.block[0]
        if self.spec.groups == "m":
            m *= self.batch  # All groups lie in one operand.
        return OperandTypes(
            m,
            self.dtype,
            self.dtype,
            out_dtype,
            layouts,
            transport,
            block_scaled=self.block_scaled,
            sides=self.sides,
            grouped=self.spec.groups,
        )

    def check(self, config: Config, target: Target, transport: Transport = "") -> None:
        """Checks that the fused kernel can run this problem with `config`. Raises as `limits.check` does.

        `transport` is the one that the caller named; "": the usual one.
        """
        self._check_blocks(config)
        if self.spec.groups:
            limits.check_groups(config)
        transport = transport or self.transport(config)
        part: Dimension = "" if transport == "one_shot" else self.scattered
        m, n = (self.m, self.n) if transport == "one_shot" else self.block
        names = {"m": "m_shard" if self.gathered == "m" else "m", "n": "n"}
        if part:
            names[part] += f" / {self.devices}"
        sizes = {"m": (names["m"], m), "n": (names["n"], n // self.sides), "k": ("k", self.whole[2])}
        beside_bytes = limits.ZEROS_BYTES if self.spec.groups == "m" else 0
        limits.check(mainloop_of(target), self.types(config, transport), sizes, config, target, part, beside_bytes)

    def _check_blocks(self, config: Config) -> None:
        """Raises NotImplementedError if operands cannot be cut into equal blocks, one per device.

        These are a sum that all devices get, and the left operand where the right one is gathered along k.
        """
        cut = {"m": self.m, "n": self.n}.get(self.scattered, 0)
        if self.transport(config) == "broadcast" and cut % self.units[self.scattered]:
            raise NotImplementedError(
                f"the fused kernel of `{self.op}` sums up a block of rows or columns on each of the {self.devices} "
                f"devices, got m={self.m} and n={self.n}: pad m to a multiple of {self.units['m']} or n to one of "
                f'{self.units["n"]}, name a config with one_shot=True, or use implementation="xla"'
            )
        unit = limits.TMA_ROW_BYTES // self.itemsize
        if self.gathered == "k" and self.k % unit and self.communicates and not self.transpose_lhs:
            raise NotImplementedError(
                f"the copy engine needs a shard's part of the rows of lhs to be a multiple of {limits.TMA_ROW_BYTES} "
                f"bytes, got k_shard={self.k} elements of {self.itemsize} bytes: pad k_shard to a multiple of "
                f'{unit}, or use implementation="xla"'
            )

    def accepts(self, config: Config, target: Target) -> bool:
        """Whether the fused kernel can run this problem with `config`, without spilling registers."""
        try:
            self.check(config, target)
        except (ValueError, NotImplementedError):
            return False
        types = self.types(config, self.transport(config))
        rows, columns, products = self.grid(config)
        tiles = products * ceil_div(rows, config.tile_m) * ceil_div(columns, config.tile_n)
        return not mainloop_of(target).crowds_registers(types, tiles, config, target)


def default_out_dtype(dtype: str) -> str:
    """Returns the dtype of a result for which the caller names none: bfloat16 for 8-bit operands, else their dtype."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def bucket(size: int, least: int = 16) -> int:
    """Returns `size` rounded up to four significant bits, but at least `least`: eight values for each doubling.

    Examples:
      >>> [bucket(size) for size in (1, 4096, 4097, 14336, 11008)]
      [16, 4096, 4608, 14336, 11264]
    """
    shift = max((size - 1).bit_length() - _SIGNIFICANT_BITS, 0)
    return max(-(-size >> shift) << shift, least)
