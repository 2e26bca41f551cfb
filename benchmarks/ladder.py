"""Measures the ladder of matmul kernels, and prints a table of them, `overlap.matmul` and cuBLAS (`jnp.dot`).

The ladder is a series of matmul kernels (rungs) that each add one optimization. cuBLAS is the roof. The column
"roof/this" is cuBLAS's time / the method's time: the method's speed as a fraction of cuBLAS's. The column "% peak" is
the method's TFLOP/s in percent of the data sheet's dense TFLOP/s. The rungs are in `overlap/kernels/blackwell_ladder`
for Blackwell GPUs, and in `overlap/kernels/ladder` for any other device.

    python3 -m benchmarks.ladder --out benchmarks/results
    python3 -m benchmarks.ladder --methods pipelined,persistent,xla --shapes 8192x8192x8192:bf16
    python3 -m benchmarks.ladder --architecture blackwell --dry-run

--help describes the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

SHAPES = "4096x8192x4096:f16"
METHODS = "ladder,fused,xla"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(__doc__, SHAPES, METHODS)
    parser.add_argument(
        "--architecture", choices=("hopper", "blackwell"), default=None, help="whose ladder; None: the device's"
    )
    parser.set_defaults(dry_shape="256x256x128")
    arguments = parser.parse_args(argv)

    methods_of = command.late("ladder_methods", architecture=arguments.architecture)
    return command.run(arguments, "ladder", methods_of, 1, roof="xla")


if __name__ == "__main__":
    sys.exit(ending.run(main))
