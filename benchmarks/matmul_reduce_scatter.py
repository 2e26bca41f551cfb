"""Compares the fused operation `matmul_reduce_scatter` with XLA and the roof.

The sizes are those of one device's product: all m rows, all n columns, its part of k. The roof is this product alone:

    python3 -m benchmarks.matmul_reduce_scatter --out benchmarks/results
    python3 -m benchmarks.matmul_reduce_scatter --devices 2 --methods fused,own_matmul,roof,xla
    launch/mpirun.sh -np 4 -- python3 -m benchmarks.matmul_reduce_scatter

--help describes the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

SHAPES = "8192x4096x4096:bf16,8192x8192x3584:bf16,8192x12288x6144:bf16,4096x8192x7168:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, SHAPES, "fused,xla,roof", devices=True, layouts=("nn", "nt"))
    parser.add_argument("--along", default="m", choices=("m", "n"), help="what is scattered: rows or columns")
    arguments = parser.parse_args(argv)
    name = "matmul_reduce_scatter" if arguments.along == "m" else "matmul_reduce_scatter_n"
    return command.run(arguments, name, command.late("summed_methods"), arguments.devices)


if __name__ == "__main__":
    sys.exit(ending.run(main))
