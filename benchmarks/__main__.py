"""`python -m benchmarks [TABLE] [OPTIONS]`: measures one table, `all_gather_matmul` unless another is named."""

from __future__ import annotations

import importlib
import sys

from overlap.cli import ending
from overlap.cli.arguments import WrongArguments

TABLES = (
    "all_gather_matmul",
    "all_gather_rhs_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul",
    "ladder",
    "block",
    "layer",
    "backward",
)


def main(argv: list[str]) -> int:
    """Runs the module of the table that the first argument names, with the other arguments as its options."""
    table, options = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (TABLES[0], argv)
    if table not in TABLES:
        raise WrongArguments(f"`python -m benchmarks` takes one of {', '.join(TABLES)} first, got {table!r}")
    return importlib.import_module(f"benchmarks.{table}").main(options)


if __name__ == "__main__":
    sys.exit(ending.run(lambda: main(sys.argv[1:])))
