"""Compares the fused operation `all_gather_lhs_matmul` with XLA, the roof and JAX's example kernel.

The roof is the product alone, of operands that are already gathered. The command can run on all GPUs of the host, on
some, with several configs of the fused operation, or with one process per GPU:

    python3 -m benchmarks.all_gather_matmul --out benchmarks/results
    python3 -m benchmarks.all_gather_matmul --devices 2
    python3 -m benchmarks.all_gather_matmul --variants fused fused:stages=3 fused:tile_n=128
    launch/mpirun.sh -np 4 -- python3 -m benchmarks.all_gather_matmul

With float8 operands, where the weights are stored as [n, k]:

    python3 -m benchmarks.all_gather_matmul --shapes 1024x4096x4096:f8_e4m3fn,1024x6144x12288:f8_e4m3fn

These commands show what a call spends its time on, and measure JAX's example with all configurations that it searches
itself:

    python3 -m benchmarks.all_gather_matmul --suite breakdown --methods fused,own_matmul,roof,xla
    python3 -m benchmarks.all_gather_matmul --methods fused,roof,jax_example --example-configs 60

--help describes the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

# A square layer, and two products of wider layers.
SHAPES = "1024x4096x4096:f16,1024x3584x8192:bf16,1024x6144x12288:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, SHAPES, "fused,xla,roof", devices=True, layouts=("nn", "nt"))
    arguments = parser.parse_args(argv)
    return command.run(arguments, "all_gather_lhs_matmul", command.late("all_gather_methods"), arguments.devices)


if __name__ == "__main__":
    sys.exit(ending.run(main))
