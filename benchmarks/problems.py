"""What is measured: a problem's sizes, dtype and layout, how they are written on the command line, and named suites."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

AXIS = "x"
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f8_e4m3fn": jnp.float8_e4m3fn, "f8_e5m2": jnp.float8_e5m2}
# The operands as they lie in memory: "t" says that lhs is [k, m], or rhs [n, k].
LAYOUTS = ("nn", "nt", "tn", "tt")
OUT = P(None, AXIS)
_SHAPE = re.compile(
    r"(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)" + f"(:(?P<dtype>{'|'.join(DTYPES)}))?(:(?P<layout>{'|'.join(LAYOUTS)}))?"
)
# What an H200 reaches, per microsecond, and what a call costs at least: only to choose the length of loops.
_FLOPS_PER_US, _BYTES_PER_US, _CALL_US = 700e6, 4e6, 10.0


@dataclasses.dataclass(frozen=True)
class Problem:
    """A matmul by its sizes per shard: (m, k), gathered along the mesh axis where there are devices, times (k, n)."""

    op: str
    devices: int
    m: int
    n: int
    k: int
    dtype: str
    layout: str = "nn"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} {self.layout}"

    @property
    def shape(self) -> str:
        """The sizes per shard, as in the tables and on the command line."""
        return f"{self.m}x{self.n}x{self.k}"

    # --- Operands: all that depends on the layout and the dtype ---

    @property
    def transpose_lhs(self) -> bool:
        """Whether lhs is [k, m]."""
        return self.layout[0] == "t"

    @property
    def transpose_rhs(self) -> bool:
        """Whether rhs is [n, k]."""
        return self.layout[1] == "t"

    @property
    def lhs_m_axis(self) -> int:
        """Which dimension of lhs is m."""
        return 1 if self.transpose_lhs else 0

    @property
    def lhs_shape(self) -> tuple[int, int]:
        """One device's lhs, before it is gathered."""
        return (self.k, self.m) if self.transpose_lhs else (self.m, self.k)

    @property
    def rhs_shape(self) -> tuple[int, int]:
        """One device's rhs."""
        return (self.n, self.k) if self.transpose_rhs else (self.k, self.n)

    @property
    def lhs_spec(self) -> P:
        """lhs is sharded along m."""
        return P(None, AXIS) if self.transpose_lhs else P(AXIS, None)

    @property
    def rhs_spec(self) -> P:
        """rhs is sharded along n."""
        return P(AXIS, None) if self.transpose_rhs else P(None, AXIS)

    @property
    def element_type(self) -> jnp.dtype:
        """Of the operands."""
        return jnp.dtype(DTYPES[self.dtype])

    @property
    def is_float8(self) -> bool:
        """Whether the operands have 8 bits."""
        return self.element_type.itemsize == 1

    @property
    def out_type(self) -> jnp.dtype:
        """Of the result."""
        return jnp.dtype(jnp.bfloat16) if self.is_float8 else self.element_type

    def dot(self, lhs: jax.Array, rhs: jax.Array, **keywords: Any) -> jax.Array:
        """XLA's product of complete operands as they lie in memory: nothing is transposed by a copy."""
        contracting = ((1 - self.lhs_m_axis,), (1 if self.transpose_rhs else 0,))
        keywords = {"preferred_element_type": self.out_type} | keywords
        return lax.dot_general(lhs, rhs, (contracting, ((), ())), **keywords)

    # --- Numbers ---

    @property
    def flops_per_device(self) -> float:
        """Floating-point operations of one device."""
        return 2.0 * self.devices * self.m * self.n * self.k

    @property
    def bytes_per_device(self) -> float:
        """Bytes of operands and result of one device, each counted once."""
        rows = self.devices * self.m
        operands = (rows + self.n) * self.k * self.element_type.itemsize
        return float(operands + rows * self.n * self.out_type.itemsize)

    @property
    def received_bytes_per_device(self) -> float:
        """Bytes that one device receives from the others."""
        return float((self.devices - 1) * self.m * self.k * self.element_type.itemsize)

    @property
    def expected_us(self) -> float:
        """About how long a call takes on a fast GPU. Sets the length of loops, and nothing else."""
        return _CALL_US + max(self.flops_per_device / _FLOPS_PER_US, self.bytes_per_device / _BYTES_PER_US)

    @property
    def error_floor(self) -> float:
        """The relative error that is allowed in any case: of sums in f8, which Hopper's tensor cores keep in 14 bits.

        Each instruction (32 products and the sum so far) drops what lies below 2**-13 of its largest addend. In a
        simulation of that on normal operands the relative error of the sum is 0.3 * 2**-13 * sqrt(k) (k = 1024 to
        28672). XLA may take instructions that keep more, so twice its error is no bound for ours; twice the simulated
        error is: 6.6e-3 at k = 8192, where one lost tile of 128 x 128 in 8192 x 8192 would be 1.6e-2.
        """
        return 0.6 * 2.0**-13 * self.k**0.5 if self.is_float8 else 0.0


class GatheredWeights(Problem):
    """Rows of one's own times gathered weights, `m`, `n` and `k` being those of one device's whole product.

    To the harness, lhs is what is gathered: here the shard of the weights, and rhs are the activations (m, k).
    """

    @property
    def lhs_m_axis(self) -> int:
        """Along which dimension the weights are gathered."""
        return 0 if self.op.endswith("_k") else 1

    @property
    def lhs_shape(self) -> tuple[int, int]:
        """One device's shard of the weights."""
        return (self.k // self.devices, self.n) if self.lhs_m_axis == 0 else (self.k, self.n // self.devices)

    @property
    def rhs_shape(self) -> tuple[int, int]:
        """One device's activations."""
        return self.m, self.k

    @property
    def lhs_spec(self) -> P:
        """The weights' sharding."""
        return P(AXIS, None) if self.lhs_m_axis == 0 else P(None, AXIS)

    @property
    def rhs_spec(self) -> P:
        """Each device has rows of its own."""
        return P(AXIS, None)

    def dot(self, lhs: jax.Array, rhs: jax.Array, **keywords: Any) -> jax.Array:
        """XLA's product of the activations `rhs` and the complete weights `lhs`."""
        keywords = {"preferred_element_type": self.out_type} | keywords
        return lax.dot(rhs, lhs, **keywords)

    @property
    def flops_per_device(self) -> float:
        """Floating-point operations of one device."""
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes_per_device(self) -> float:
        """Bytes of operands and result of one device, each counted once."""
        return float((self.m + self.n) * self.k * self.element_type.itemsize + self.m * self.n * self.out_type.itemsize)

    @property
    def received_bytes_per_device(self) -> float:
        """Bytes that one device receives from the others."""
        return (self.devices - 1) / self.devices * self.n * self.k * self.element_type.itemsize


_KINDS = {"all_gather_rhs_matmul_n": GatheredWeights, "all_gather_rhs_matmul_k": GatheredWeights}


# --- The command line -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Suite:
    """Shapes and layouts that are always measured together."""

    shapes: tuple[str, ...]
    layouts: tuple[str, ...]


# The first is what the project's targets for `matmul` are stated over, the last tests the harness. By the second the
# library chooses between its collective kernels and XLA (`benchmarks.crossover`): m_shard from 16 to 8192, n_shard from
# 256 to 16384 and k from 512 to 16384, the corners and the shapes of layers; quickest first, for `--budget-s`.
SUITES = {
    "standard": Suite(
        (
            "4096x8192x4096", "4096x4096x4096", "8192x8192x8192", "1024x4096x4096", "2048x4096x4096",
            "1024x1024x14336", "8192x28672x8192", "8192x8192x3584", "16384x1536x4096", "512x8192x8192",
            "128x8192x8192", "16x8192x8192", "4097x4104x4104",
        ),
        ("nn", "nt", "tn"),
    ),
    "sweep": Suite(
        (
            "16x256x512", "512x256x512", "16x1024x4096", "16x256x16384", "64x1024x4096", "16x16384x512",
            "128x1024x4096", "16x4096x4096", "32x4096x4096", "64x4096x4096", "8192x256x512", "128x4096x4096",
            "512x1024x4096", "16x8192x8192", "64x8192x8192", "128x8192x8192", "512x4096x4096", "2048x256x16384",
            "16x16384x16384", "512x3584x8192", "2048x16384x512", "2048x4096x4096", "8192x1024x4096", "8192x4096x4096",
            "2048x16384x16384", "8192x8192x8192",
        ),
        ("nn",),
    ),
    # What a fused call is made of: a whole one, the gather with hardly a product (n = 8), and what any call costs.
    "breakdown": Suite(
        (
            "1024x4096x4096", "1024x8x4096", "1024x3584x8192", "1024x8x8192", "1024x6144x12288", "1024x8x12288",
            "8x8x64",
        ),
        ("nn",),
    ),
    "tiny": Suite(("128x256x128", "97x136x72"), ("nn", "nt", "tn")),
}  # fmt: skip


def parse(op: str, devices: int, shapes: Sequence[str], dtype: str, layouts: Sequence[str] | None) -> list[Problem]:
    """The problems that shapes name, `MxNxK[:DTYPE][:LAYOUT]`; those that name no layout come in all of `layouts`.

    Without `layouts` that is "nn", and "nt" for 8-bit operands, which tensor cores read in no other form.
    """
    result = []
    for text in shapes:
        match = _SHAPE.fullmatch(text.strip())
        if match is None or (match["dtype"] or dtype) not in DTYPES:
            raise SystemExit(
                f"`--shapes` must list MxNxK[:DTYPE][:LAYOUT] with a dtype of {', '.join(DTYPES)} and a layout of "
                f"{', '.join(LAYOUTS)}, got {text!r}"
            )
        m, n, k = map(int, match.group("m", "n", "k"))
        problem = _KINDS.get(op, Problem)(op, devices, m, n, k, match["dtype"] or dtype)
        default = layouts or (("nt",) if problem.is_float8 else ("nn",))
        for layout in [match["layout"]] if match["layout"] else default:
            result.append(dataclasses.replace(problem, layout=layout))
    return result
