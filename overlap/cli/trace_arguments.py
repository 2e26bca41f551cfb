"""The arguments of `python -m overlap trace`. To parse them, neither rich nor jax is imported."""

from __future__ import annotations

import argparse

from overlap.cli.arguments import new_file
from overlap.cli.tune_arguments import DTYPES, LARGEST_SIZE, LAYOUTS, count, dtype, shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--op",
        default="all_gather_lhs_matmul",
        help="all_gather_lhs_matmul (default), all_gather_rhs_matmul_n or _k, matmul_reduce_scatter or "
        "matmul_reduce_scatter_n, matmul_all_reduce, matmul",
    )
    parser.add_argument(
        "--shape",
        metavar="MxNxK",
        type=shape,
        help="sizes, for a collective per shard (default: 1024x4096x4096; emulated: 256x256x256)",
    )
    names = ", ".join(DTYPES)
    parser.add_argument(
        "--dtype", default="bfloat16", type=dtype, help=f"dtype of the operands: {names} (default: bf16)"
    )
    parser.add_argument(
        "--layout", default="nn", choices=LAYOUTS, help="how the operands are stored; t means transposed (default: nn)"
    )
    parser.add_argument("--devices", type=count, help="number of devices (default: all visible GPUs, or 4 emulated)")
    parser.add_argument(
        "--config",
        metavar="NAME=VALUE,…",
        type=fields,
        help="fields of overlap.Config, such as tile_n=128,stages=4 (default: what the library chooses)",
    )
    parser.add_argument("--emulate", action="store_true", help="emulate on the CPU even if there are GPUs")
    parser.add_argument(
        "--out",
        type=new_file,
        default="overlap-trace.json.gz",
        help="file for the trace, for ui.perfetto.dev; compressed if it ends with .gz (default: overlap-trace.json.gz)",
    )
    parser.add_argument(
        "--picture", type=new_file, help="file for the picture, a PNG (default: beside the trace, overlap-trace.png)"
    )


def shape(text: str) -> tuple[int, int, int]:
    """Reads m, n and k of one problem."""
    try:
        (found,) = shapes(text)
    except (argparse.ArgumentTypeError, ValueError):
        found = None
    if found is None or found[3] is not None:
        raise argparse.ArgumentTypeError(
            f"must be one MxNxK, each size from 1 to {LARGEST_SIZE}, got {text[:60]!r}: e.g. 1024x4096x4096"
        )
    return found[:3]


def fields(text: str) -> dict[str, int | str | bool]:
    """Reads names and values of fields of `overlap.Config`."""
    found: dict[str, int | str | bool] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not (name and equals and value):
            raise argparse.ArgumentTypeError(f"must be NAME=VALUE, several with commas, got {part!r}: e.g. tile_n=128")
        is_number = value.removeprefix("-").isdecimal()
        found[name] = int(value) if is_number else {"true": True, "false": False}.get(value.lower(), value)
    return found
