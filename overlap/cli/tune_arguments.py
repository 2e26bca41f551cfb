"""The arguments of `python -m overlap tune`, apart from the command: to parse them needs neither rich nor jax."""

from __future__ import annotations

import argparse
import pathlib

DTYPES = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f8_e4m3fn": "float8_e4m3fn", "f8_e5m2": "float8_e5m2",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "--op",
        default="matmul",
        help="matmul (default), all_gather_lhs_matmul, all_gather_rhs_matmul_n or _k, matmul_reduce_scatter or "
        "matmul_reduce_scatter_n, matmul_all_reduce",
    )
    parser.add_argument(
        "--shapes", required=True, metavar="MxNxK,…",
        help="problems, per shard for a collective; each may have a dtype of its own: 1024x4096x4096:f16",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bf16", help=f"of the operands: {', '.join(DTYPES)} (default: bf16)")
    parser.add_argument("--out-dtype", help="of the result (default: that of the operands; bf16 for f8)")
    parser.add_argument(
        "--layouts", default="nn", help="how matmul's operands are stored: nn (default), nt, tn, tt; several: nn,nt"
    )
    parser.add_argument("--devices", type=int, help="for a collective (default: all GPUs, or 2 emulated)")
    parser.add_argument("--max-configs", type=int, help="tried per problem, at most (default: 48; emulated 3)")
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), help="end after so many seconds with what there is"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="the table to write or extend (default: the user's; emulated: none)"
    )
    parser.add_argument("--force", action="store_true", help="measure again what the table already has")
    parser.add_argument("--dry-run", action="store_true", help="list the configurations that would be tried, and end")
