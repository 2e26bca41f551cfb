"""The table of products that are summed over the devices and scattered: the fused operation against XLA and the roof.

The sizes are those of one device's product: all m rows, all n columns, its part of k. The roof is that product alone:

    python3 -m benchmarks.matmul_reduce_scatter --out benchmarks/results
    python3 -m benchmarks.matmul_reduce_scatter --devices 2 --methods fused,own_matmul,roof,xla
    launch/mpirun.sh -np 4 -- python3 -m benchmarks.matmul_reduce_scatter

Arguments are described by --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

SHAPES = "8192x4096x4096:bf16,8192x8192x3584:bf16,8192x12288x6144:bf16,4096x8192x7168:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser((__doc__ or "").splitlines()[0], SHAPES, "fused,xla,roof", devices=True)
    parser.add_argument("--along", default="m", choices=("m", "n"), help="what is scattered: rows or columns")
    arguments = parser.parse_args(argv, None)
    arguments.default_shapes = SHAPES

    def methods_of(*args):
        # Imported once the devices are set up.
        from benchmarks.methods import summed_methods

        return summed_methods(*args)

    name = "matmul_reduce_scatter" if arguments.along == "m" else "matmul_reduce_scatter_n"
    return command.run(arguments, name, methods_of, arguments.devices)


if __name__ == "__main__":
    sys.exit(ending.run(main))
