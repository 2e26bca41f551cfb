"""The operations of this library, declared once: what each gathers or sums, and what its fused kernel takes.

An operation that gathers or scatters along either of two dimensions is declared once for each (`OperationSpec.name`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

Dimension = Literal["", "m", "n", "k"]
Layout = Literal["nn", "nt", "tn", "tt"]
# How data travel between devices: a name in TRANSPORTS.
Transport = str
LAYOUTS: tuple[Layout, ...] = ("nn", "nt", "tn", "tt")
EPILOGUE = ("lhs_scale", "rhs_scale", "bias", "addend", "activation")


@dataclasses.dataclass(frozen=True)
class Travel:
    """What a transport asks of a mainloop and of its shared memory.

    Attributes:
      of_operand: whether shards of an operand travel. Such kernels write results of 16 bits only.
      in_chunks: whether communicator warps copy chunks through shared memory.
      forwards: whether the forwarder warp passes operand tiles on (`Hooks.in_smem`).
      exchanges: whether parts of tiles are exchanged with peers (`Hooks.exchange`).
      direct_sends: whether the parts are sent to the peers from shared memory (`Exchange.direct_sends`).
      in_strips: whether finished tiles travel as well, in strips of rows.
    """

    of_operand: bool = False
    in_chunks: bool = False
    forwards: bool = False
    exchanges: bool = False
    direct_sends: bool = False
    in_strips: bool = False


TRANSPORTS = {
    "": Travel(),  # Nothing travels.
    "pull": Travel(of_operand=True, in_chunks=True),
    "ring": Travel(of_operand=True, forwards=True),
    "push": Travel(exchanges=True, in_chunks=True),
    "broadcast": Travel(exchanges=True, in_chunks=True, in_strips=True),
    "one_shot": Travel(exchanges=True, direct_sends=True),
}


@dataclasses.dataclass(frozen=True)
class OperandLayouts:
    """Which operands are stored transposed.

    Attributes:
      transpose_lhs: the left operand is [k, m] instead of [m, k].
      transpose_rhs: the right operand is [n, k] instead of [k, n].
    """

    transpose_lhs: bool = False
    transpose_rhs: bool = False

    @property
    def k_major(self) -> bool:
        """Whether the rows of both operands run along k."""
        return self.transpose_rhs and not self.transpose_lhs

    @property
    def name(self) -> Layout:
        """Two letters, for `lhs` and `rhs`: "t" for a transposed operand, else "n"."""
        return LAYOUTS[2 * self.transpose_lhs + self.transpose_rhs]

    def m_k(self, lhs_shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns m and k of a left operand of this shape."""
        *_, first, second = lhs_shape
        return (second, first) if self.transpose_lhs else (first, second)

    def k_n(self, rhs_shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns k and n of a right operand of this shape."""
        *_, first, second = rhs_shape
        return (second, first) if self.transpose_rhs else (first, second)


PLAIN = OperandLayouts()


@dataclasses.dataclass(frozen=True)
class OperationSpec:
    """What an operation does, independent of a call.

    Attributes:
      name: the operation's name in tables and on the command line.
      function: the name of the public function.
      module: the module of the public function, within `overlap`.
      kernel: the class of the kernel (`frame/kernel.py`): its module within `overlap`, a colon, and its name there.
      gathers: the dimension of the product along which the devices' shards of an operand are gathered.
      sums: whether products are summed over the devices.
      scatters: the dimension along which such a sum is cut into a block for each device; "" if all get the whole sum.
      transports: how data may travel in the fused kernel, the usual way first.
      keyword: the keyword that chooses the dimension, and its value where the operands are not transposed.
      layouts: how the operands may lie in memory for the fused kernel: a letter each, "t" for transposed, else "n".
      epilogue: the keywords of the epilogue that the fused kernel takes.
      groups: the dimension that groups of rows divide: "m" where each group has a right operand of its own, "k" where
        the rows of each group are contracted; "" if there are no groups.
      is_loss: whether the results of the product are reduced to a loss.
      is_routed: whether a `Routing` says which tokens the rows belong to.
      xla_wastes: why XLA is much slower in any case, so that its time is not compared; "" if it may be faster.
    """

    name: str
    function: str
    module: str
    kernel: str
    gathers: Dimension = ""
    sums: bool = False
    scatters: Dimension = ""
    transports: tuple[Transport, ...] = ()
    keyword: tuple[str, int] | None = None
    layouts: tuple[Layout, ...] = LAYOUTS
    epilogue: tuple[str, ...] = EPILOGUE
    groups: Dimension = ""
    is_loss: bool = False
    is_routed: bool = False
    xla_wastes: str = ""

    def __str__(self) -> str:
        along = self.gathers or self.scatters
        return self.name if self.name == self.function else f"{self.function} (along {along})"

    def load_function(self) -> Callable[..., Any]:
        """Returns the public function."""
        return getattr(importlib.import_module(f"overlap.{self.module}"), self.function)

    @property
    def takes_activation_of_all(self) -> bool:
        """Whether an activation may take the values of all right operands."""
        return not (self.sums or self.gathers_rhs)

    @property
    def replicates(self) -> bool:
        """Whether all devices get the whole sum."""
        return self.sums and not self.scatters

    @property
    def gathers_rhs(self) -> bool:
        """Whether the right operand is gathered."""
        return self.gathers in ("n", "k")

    @property
    def sharded(self) -> tuple[Dimension, Dimension, Dimension]:
        """For `lhs`, `rhs` and the result, the dimension along which it is sharded over the devices; "" if none."""
        if self.sums:
            return "k", "k", self.scatters
        return ("m", "n", "n") if self.gathers == "m" else ("m", self.gathers, "m") if self.gathers else ("", "", "")


MATMUL = OperationSpec("matmul", "matmul", "single_gpu.matmul", "single_gpu.matmul:MatmulKernel")
GATHER_LHS = OperationSpec(
    "all_gather_lhs_matmul",
    "all_gather_lhs_matmul",
    "collectives.gather.all_gather_lhs_matmul",
    "collectives.gather.kernels:GatherLhs",
    gathers="m",
    transports=("pull", "ring"),
    layouts=("nn", "nt"),
    epilogue=("lhs_scale", "rhs_scale", "bias", "activation"),
)
GATHER_RHS_N = OperationSpec(
    "all_gather_rhs_matmul_n",
    "all_gather_rhs_matmul",
    "collectives.gather.all_gather_rhs_matmul",
    "collectives.gather.kernels:GatherRhs",
    gathers="n",
    transports=("pull",),
    keyword=("dimension", 1),
    layouts=("nn", "tn"),
    epilogue=(),
)
GATHER_RHS_K = dataclasses.replace(GATHER_RHS_N, name="all_gather_rhs_matmul_k", gathers="k", keyword=("dimension", 0))
SCATTER_M = OperationSpec(
    "matmul_reduce_scatter",
    "matmul_reduce_scatter",
    "collectives.reduce.matmul_reduce_scatter",
    "collectives.reduce.kernels:ReduceScatter",
    sums=True,
    scatters="m",
    transports=("push", "ring"),
    keyword=("dimension", 0),
)
SCATTER_N = dataclasses.replace(SCATTER_M, name="matmul_reduce_scatter_n", scatters="n", keyword=("dimension", 1))
ALL_REDUCE = OperationSpec(
    "matmul_all_reduce",
    "matmul_all_reduce",
    "collectives.reduce.matmul_all_reduce",
    "collectives.reduce.kernels:AllReduce",
    sums=True,
    transports=("broadcast", "one_shot"),
)
GROUPED = OperationSpec(
    "grouped_matmul",
    "grouped_matmul",
    "single_gpu.grouped_matmul",
    "single_gpu.grouped_kernels:RowsOfGroups",
    layouts=("nn", "nt"),
    epilogue=("lhs_scale", "rhs_scale", "bias", "activation"),
    groups="m",
    xla_wastes="XLA multiplies all rows with all matrices",
)
# Products of groups whose rows are copies of tokens of all devices, or are added to these tokens: `overlap.route` says
# which. Their products are those of `grouped_matmul`.
GATHER_TOKENS = dataclasses.replace(
    GROUPED,
    name="all_gather_lhs_grouped_matmul",
    function="all_gather_lhs_grouped_matmul",
    module="collectives.rows.experts",
    epilogue=("bias", "activation"),
    is_routed=True,
)
SCATTER_TOKENS = dataclasses.replace(
    GATHER_TOKENS, name="grouped_matmul_reduce_scatter", function="grouped_matmul_reduce_scatter", epilogue=("bias",)
)
# A gathered product whose results are reduced to a loss for each row, and never stored (`logits_product.py`). It has no
# `Kernel`, but kernels and rules of its own.
LINEAR_CROSS_ENTROPY = OperationSpec(
    "linear_cross_entropy",
    "linear_cross_entropy",
    "collectives.loss.linear_cross_entropy",
    "",
    gathers="m",
    layouts=("nn", "nt"),
    epilogue=("bias",),
    is_loss=True,
)
# The product of the backward pass for the right operand of `grouped_matmul`. It has no public function.
CONTRACTION = dataclasses.replace(
    GROUPED,
    name="grouped_matmul_k",
    kernel="single_gpu.grouped_kernels:Contraction",
    layouts=("tn",),
    epilogue=(),
    groups="k",
)
OPERATIONS = (
    MATMUL,
    GATHER_LHS,
    GATHER_RHS_N,
    GATHER_RHS_K,
    SCATTER_M,
    SCATTER_N,
    ALL_REDUCE,
    GROUPED,
    GATHER_TOKENS,
    SCATTER_TOKENS,
    LINEAR_CROSS_ENTROPY,
)
# The operations that are products.
BY_NAME = {spec.name: spec for spec in (*OPERATIONS, CONTRACTION) if not spec.is_loss}
# The operations of which a problem is tuned: those whose kernel is a product by itself.
TUNED = {spec.name: spec for spec in OPERATIONS if not (spec.is_routed or spec.is_loss)}
