"""Compares `overlap.matmul` on one GPU with cuBLAS (`lax.dot_general`), which is the roof, and JAX's example kernel.

The command measures the standard suite; other shapes, dtypes and layouts; or several configurations of the kernel. A
layout says how the operands are stored: with "t" as first letter lhs is [k, m], with "t" as second letter rhs is [n,
k].

    python3 -m benchmarks.matmul --suite standard --dtype bf16 --out benchmarks/results --budget-s 500
    python3 -m benchmarks.matmul --shapes 4096x8192x4096 --layouts nn,nt,tn,tt
    python3 -m benchmarks.matmul --shapes 8192x8192x8192:f8_e4m3fn,4096x4096x4096:bf16:nt
    python3 -m benchmarks.matmul --shapes 1024x4096x4096 --variants fused fused:stages=3

--help describes the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

SHAPES = "1024x4096x4096:f16,4096x8192x4096:f16,4096x8192x4096:bf16,8192x8192x8192:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, SHAPES, "fused,fused_bf16,xla", layouts=("nn", "nt", "tn", "tt"))
    parser.set_defaults(rounds=5, warmup_s=0.5)
    arguments = parser.parse_args(argv)
    return command.run(arguments, "matmul", command.late("matmul_methods"), 1, roof="xla")


if __name__ == "__main__":
    sys.exit(ending.run(main))
