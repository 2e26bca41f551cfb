"""Compares the fused operation `matmul_all_reduce` with XLA and the roof.

The sizes are those of one device's product: all m rows, all n columns, its part of k. The roof is this product alone:

    python3 -m benchmarks.matmul_all_reduce --out benchmarks/results
    python3 -m benchmarks.matmul_all_reduce --devices 2 --methods fused,own_matmul,roof,xla
    launch/mpirun.sh -np 4 -- python3 -m benchmarks.matmul_all_reduce

--help describes the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

# The two row-parallel products of a layer of Llama-70B on two GPUs, from decoding to prefill.
ROWS, PRODUCTS = (16, 64, 256, 1024, 2048, 8192), ("8192x4096", "8192x14336")
SHAPES = ",".join(f"{rows}x{product}:bf16" for product in PRODUCTS for rows in ROWS)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, SHAPES, "fused,xla,roof", devices=True)
    arguments = parser.parse_args(argv)
    return command.run(arguments, "matmul_all_reduce", command.late("summed_methods"), arguments.devices)


if __name__ == "__main__":
    sys.exit(ending.run(main))
