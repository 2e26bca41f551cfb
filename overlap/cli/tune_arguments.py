"""The arguments of `python -m overlap tune`. To parse them, neither rich nor jax is imported.

The functions read an argument's text: they return its value or raise `ArgumentTypeError`. argparse then prints the
argument's name and the message, and ends with status 2.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f8_e4m3fn": "float8_e4m3fn",
    "f8_e5m2": "float8_e5m2",
}
LAYOUTS = ("nn", "nt", "tn", "tt")
# Kernels use int32 for sizes.
LARGEST_SIZE = 2**31 - 1
_SHAPE = re.compile(r"([0-9]{1,10})x([0-9]{1,10})x([0-9]{1,10})(?::(.*))?", re.DOTALL)

Shape = tuple[int, int, int, str | None]  # m, n, k and a dtype


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of the command."""
    parser.add_argument(
        "--op",
        default="matmul",
        help="matmul (default), all_gather_lhs_matmul, all_gather_rhs_matmul_n or _k, matmul_reduce_scatter or "
        "matmul_reduce_scatter_n, matmul_all_reduce",
    )
    parser.add_argument(
        "--shapes",
        required=True,
        metavar="MxNxK,…",
        type=shapes,
        help="problems, for a collective per shard; each may name its own dtype: 1024x4096x4096:f16",
    )
    names = ", ".join(DTYPES)
    parser.add_argument("--dtype", default="bfloat16", type=dtype, help=f"of the operands: {names} (default: bf16)")
    parser.add_argument("--out-dtype", type=dtype, help="of the result (default: that of the operands; for f8: bf16)")
    parser.add_argument(
        "--layouts",
        default=["nn"],
        type=layouts,
        help="how the operands are stored, where t means transposed: nn (default), nt, tn, tt, or several as nn,nt",
    )
    parser.add_argument("--devices", type=count, help="number of devices (default: all visible GPUs, or 2 emulated)")
    parser.add_argument(
        "--max-configs", type=count, help="most configurations to try per problem (default: 12; emulated: 3)"
    )
    parser.add_argument("--budget-s", type=seconds, help="end after this time, in seconds, with the results so far")
    parser.add_argument(
        "--out", type=pathlib.Path, help="the table to write or extend (default: the user's table; emulated: none)"
    )
    parser.add_argument("--force", action="store_true", help="measure problems again that the table already has")
    parser.add_argument("--dry-run", action="store_true", help="list the configurations that would be tried, and exit")


def shapes(text: str) -> list[Shape]:
    """Reads m, n, k and, if one is given, the dtype of each problem."""
    found: list[Shape] = []
    for part in text.split(","):
        match = _SHAPE.fullmatch(part.strip())
        m, n, k = map(int, match.groups()[:3]) if match else (0, 0, 0)
        if match is None or not all(1 <= size <= LARGEST_SIZE for size in (m, n, k)):
            raise argparse.ArgumentTypeError(
                f"must be MxNxK or MxNxK:DTYPE, several with commas, each size from 1 to {LARGEST_SIZE}, got "
                f"{_said(part)}: e.g. 4096x8192x4096"
            )
        found.append((m, n, k, None if match[4] is None else dtype(match[4])))
    return found


def dtype(text: str) -> str:
    """Reads a dtype. Returns its full name."""
    if text not in DTYPES and text not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"a dtype must be one of {', '.join(DTYPES)}, got {_said(text)}")
    return DTYPES.get(text, text)


def layouts(text: str) -> list[str]:
    """Reads layouts. Returns each layout once."""
    named = [part.strip() for part in text.split(",")]
    if unknown := [part for part in named if part not in LAYOUTS]:
        raise argparse.ArgumentTypeError(f"must name some of {', '.join(LAYOUTS)}, got {_said(unknown[0])}")
    return list(dict.fromkeys(named))


def count(text: str) -> int:
    """Reads a number of at least 1."""
    if not re.fullmatch(r"\+?[0-9]{1,10}", text.strip()) or not 1 <= int(text) <= LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {_said(text)}: leave it out")
    return int(text)


def seconds(text: str) -> float:
    """Reads a time in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds, more than 0 and finite, got {_said(text)}: leave it out for no limit"
        )
    return value


def _said(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
