"""The all-gather + matmul table: the fused operation against XLA, the roof and JAX's example kernel.

On all GPUs of the host, on some, with several configs of the fused operation, or with one process per GPU:

    python3 -m benchmarks.all_gather_matmul --out benchmarks/results
    python3 -m benchmarks.all_gather_matmul --devices 2
    python3 -m benchmarks.all_gather_matmul --variants fused fused:stages=3 fused:tile_n=128
    launch/mpirun.sh -np 4 -- python3 -m benchmarks.all_gather_matmul

With float8 operands, whose weights lie as [n, k]:

    python3 -m benchmarks.all_gather_matmul --shapes 1024x4096x4096:f8_e4m3fn,1024x6144x12288:f8_e4m3fn

What a call's time is made of, and JAX's example over all that it searches itself:

    python3 -m benchmarks.all_gather_matmul --suite breakdown --methods fused,own_matmul,roof,xla
    python3 -m benchmarks.all_gather_matmul --methods fused,roof,jax_example --example-configs 60

Arguments are described by --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

# The shapes of the project's targets: a square layer, and the two halves of wider ones.
SHAPES = "1024x4096x4096:f16,1024x3584x8192:bf16,1024x6144x12288:bf16"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser(
        (__doc__ or "").splitlines()[0], SHAPES, "fused,xla,roof", devices=True, layouts=("nn", "nt")
    )
    arguments = parser.parse_args(argv, None)
    arguments.default_shapes = SHAPES

    def methods_of(*args):
        # Imported once the devices are set up.
        from benchmarks.methods import all_gather_methods

        return all_gather_methods(*args)

    return command.run(arguments, "all_gather_lhs_matmul", methods_of, arguments.devices)


if __name__ == "__main__":
    sys.exit(ending.run(main))
