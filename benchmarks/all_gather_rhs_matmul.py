"""Compares the fused product with gathered weights (FSDP) with XLA and the roof.

The sizes are those of one device's whole product: its own m rows, all n columns, all of k. The roof is this product
alone, of weights that are already gathered. The weights are gathered along n or along k. Gathered along k, with the
left operand transposed (tn), the product is the gradient of the weights in a layer that gathers its input. In this
product, m is the number of columns of the layer's result on one device, n the number of columns of the layer's input,
and k the number of all rows:

    python3 -m benchmarks.all_gather_rhs_matmul --along n --out benchmarks/results
    python3 -m benchmarks.all_gather_rhs_matmul --along k --shapes 8192x8192x8192:bf16:tn
    python3 -m benchmarks.all_gather_rhs_matmul --along k --devices 4 --variants fused fused:order_minor=m

--help describes the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

# Two layers of a model with 8192 tokens per device, then the first of them with 2048.
SHAPES = "8192x4096x4096:bf16,8192x14336x4096:bf16,2048x4096x4096:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, SHAPES, "fused,xla,roof", devices=True, layouts=("nn", "tn"))
    parser.add_argument("--along", default="n", choices=("n", "k"), help="how the weights are sharded")
    arguments = parser.parse_args(argv)
    return command.run(
        arguments, f"all_gather_rhs_matmul_{arguments.along}", command.late("all_gather_rhs_methods"), arguments.devices
    )


if __name__ == "__main__":
    sys.exit(ending.run(main))
