"""The table of the ladder: every rung, `overlap.matmul`, and cuBLAS (`jnp.dot`), which is their roof.

The column "roof/this" is the fraction of cuBLAS's speed, "% peak" that of the data sheet's dense TFLOP/s. The rungs are
those of `overlap/kernels/blackwell_ladder` on a Blackwell GPU, and of `overlap/kernels/ladder` on any other device.

    python3 -m benchmarks.ladder --out benchmarks/results
    python3 -m benchmarks.ladder --methods pipelined,persistent,xla --shapes 8192x8192x8192:bf16
    python3 -m benchmarks.ladder --architecture blackwell --dry-run

Arguments are described by --help.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import command
from overlap.cli import ending

SHAPES = "4096x8192x4096:f16"
METHODS = "ladder,fused,xla"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser((__doc__ or "").splitlines()[0], SHAPES, METHODS)
    parser.add_argument(
        "--architecture", choices=("hopper", "blackwell"), default=None, help="whose ladder; none: the device's"
    )
    parser.set_defaults(default_shapes=SHAPES, dry_shape="256x256x128")
    arguments = parser.parse_args(argv)

    def methods_of(*args):
        # Imported once the devices are set up.
        from benchmarks.methods import ladder_methods

        return ladder_methods(*args, architecture=arguments.architecture)

    return command.run(arguments, "ladder", methods_of, 1, roof="xla")


if __name__ == "__main__":
    sys.exit(ending.run(main))
