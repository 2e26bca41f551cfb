"""Reads problems as the command line and the tables write them, and names suites of problems."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

from overlap.choice import problem as library
from overlap.choice.problem import LAYOUTS, Layout
from overlap.cli.arguments import DTYPES, WrongArguments

_SHAPE = re.compile(
    r"(?P<m>\d+)x(?P<n>\d+)x(?P<k>\d+)" + f"(:(?P<dtype>{'|'.join(DTYPES)}))?(:(?P<layout>{'|'.join(LAYOUTS)}))?"
)


@dataclasses.dataclass(frozen=True)
class TableProblem:
    """A problem of the library, as the command line and the tables write the problem.

    If the weights are gathered, `m`, `n` and `k` are the sizes of one device's whole product: its own rows, and all of
    the weights.
    """

    op: str
    devices: int
    m: int
    n: int
    k: int
    dtype: str
    layout: Layout = "nn"

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} {self.layout}"

    @property
    def shape(self) -> str:
        """The sizes as text, `MxNxK`."""
        return f"{self.m}x{self.n}x{self.k}"

    @functools.cached_property
    def library(self) -> library.Problem:
        """The problem that is measured, as the library describes it: sizes per shard, and full names of dtypes."""
        dtype = DTYPES[self.dtype]
        result = library.Problem(
            "matmul" if self.op == "ladder" else self.op, self.m, self.n, self.k, dtype,
            library.default_out_dtype(dtype), self.devices, self.layout,
        )  # fmt: skip
        if (gathered := result.gathered) in ("m", ""):
            return result
        return dataclasses.replace(result, **{gathered: getattr(self, gathered) // self.devices})

    @property
    def flops_per_device(self) -> float:
        """The number of floating-point operations of one device."""
        return self.library.flops_per_device

    @property
    def received_bytes_per_device(self) -> float:
        """The number of bytes that one device receives from the other devices."""
        return self.library.received_bytes_per_device


# --- The command line -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Suite:
    """Shapes and layouts that are measured together."""

    shapes: tuple[str, ...]
    layouts: tuple[str, ...]


#     standard   the products over which the project's targets for `matmul` are stated
#     sweep      By these shapes the library chooses between its collective kernels and XLA (`benchmarks.crossover`).
#                m_shard is 16 to 8192, n_shard 256 to 16384, k 512 to 16384: the corners and the shapes of layers. The
#                quickest come first, for `--budget-s`.
#     scatter    By these shapes the library chooses for products that are summed and scattered. m is the number of rows
# of one
#                device's whole product: few and many rows with the output projections of layers, and the corners.
#     breakdown  what a fused call spends its time on: whole calls, gathers with hardly a product (n = 8), a tiny call
#     tiny       tests the harness
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
    "scatter": Suite(
        (
            "32x8192x4096", "64x8192x4096", "128x8192x4096", "256x8192x4096", "512x8192x4096", "1024x8192x4096",
            "64x4096x1024", "256x4096x2048", "1024x4096x2048", "512x1024x16384", "16384x2048x512", "2048x4096x4096",
            "2048x8192x14336", "4096x8192x3584", "8192x4096x4096", "4096x8192x7168", "8192x8192x3584",
            "16384x8192x4096", "8192x12288x6144", "32768x8192x3584",
        ),
        ("nn",),
    ),
    "breakdown": Suite(
        (
            "1024x4096x4096", "1024x8x4096", "1024x3584x8192", "1024x8x8192", "1024x6144x12288", "1024x8x12288",
            "8x8x64",
        ),
        ("nn",),
    ),
    "tiny": Suite(("128x256x128", "97x136x72"), ("nn", "nt", "tn")),
}  # fmt: skip


def parse(
    op: str, devices: int, shapes: Sequence[str], dtype: str, layouts: Sequence[str] | None
) -> list[TableProblem]:
    """Reads problems from texts `MxNxK[:DTYPE][:LAYOUT]`.

    A shape without a layout is measured in all `layouts`. If `layouts` is None, it is measured in "nn", or in "nt" for
    8-bit operands, which tensor cores read in no other layout.

    Args:
      op: the operation.
      devices: how many devices.
      shapes: the texts.
      dtype: the dtype of shapes that name none.
      layouts: the layouts of shapes that name none; None: as described above.
    """
    result = []
    for text in shapes:
        match = _SHAPE.fullmatch(text.strip())
        sizes = [0] if match is None else [int(size) for size in match.group("m", "n", "k") if len(size) < 10]
        if match is None or len(sizes) < 3 or 0 in sizes or (match["dtype"] or dtype) not in DTYPES:
            raise WrongArguments(
                "`--shapes` must list MxNxK[:DTYPE][:LAYOUT] with sizes from 1 to 999999999, a dtype of "
                f"{', '.join(DTYPES)} and a layout of {', '.join(LAYOUTS)}, got {text!r}"
            )
        m, n, k = sizes
        problem = TableProblem(op, devices, m, n, k, match["dtype"] or dtype)
        default = layouts or (("nt",) if problem.library.itemsize == 1 else ("nn",))
        for layout in [match["layout"]] if match["layout"] else default:
            result.append(dataclasses.replace(problem, layout=layout))
    return result
