"""`python -m benchmarks [TABLE] [OPTIONS]`: measures one table, `all_gather_lhs_matmul` unless another is named."""

from __future__ import annotations

import importlib
import sys

from benchmarks import products
from overlap.cli import ending
from overlap.cli.arguments import WrongArguments

OTHERS = ("block", "layer", "backward", "step")


def main(argv: list[str]) -> int:
    """Measures the table that the first argument names, with the other arguments as its options."""
    table, options = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("all_gather_lhs_matmul", argv)
    if table in OTHERS:
        return importlib.import_module(f"benchmarks.{table}").main(options)
    if table not in products.TABLES:
        known = ", ".join((*products.TABLES, *OTHERS))
        raise WrongArguments(f"`python -m benchmarks` takes one of {known} first, got {table!r}")
    return products.main(table, options)


if __name__ == "__main__":
    sys.exit(ending.run(lambda: main(sys.argv[1:])))
