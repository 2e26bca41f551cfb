"""The table of products with gathered weights (FSDP): the fused operation against XLA and the roof.

The sizes are those of one device's whole product: its own m rows, all n columns, all of k. The weights are gathered
along n or along k. Along k with the left operand transposed (tn), it is the gradient of weights whose layer gathers
its input (m: columns of the layer's result on one device, n: of its input, k: all rows):

    python3 -m benchmarks.all_gather_rhs_matmul --along n --out benchmarks/results
    python3 -m benchmarks.all_gather_rhs_matmul --along k --shapes 8192x8192x8192:bf16:tn
    python3 -m benchmarks.all_gather_rhs_matmul --along k --devices 4 --variants fused fused:order_minor=m

Arguments are described by --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

# Tokens of one device by two layers of a model; few and many rows for the same weights.
SHAPES = "8192x4096x4096:bf16,8192x14336x4096:bf16,2048x4096x4096:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(
        (__doc__ or "").splitlines()[0], SHAPES, "fused,xla,roof", devices=True, layouts=("nn", "tn")
    )
    parser.add_argument("--along", default="n", choices=("n", "k"), help="how the weights are sharded")
    arguments = parser.parse_args(argv, None)
    arguments.default_shapes = SHAPES

    def methods_of(*args):
        # Imported once the devices are set up.
        from benchmarks.methods import all_gather_rhs_methods

        return all_gather_rhs_methods(*args)

    return command.run(arguments, f"all_gather_rhs_matmul_{arguments.along}", methods_of, arguments.devices)


if __name__ == "__main__":
    sys.exit(ending.run(main))
