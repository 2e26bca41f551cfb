"""The fields of `Config` that change the mainloop, in the fused operations: exact and clean, emulated.

tests/ops/single_gpu/test_configurations.py has the same fields in `overlap.matmul`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

import overlap
from overlap.kernels.tma import finish
from tests.protocol.protocol_cases import FEW, JOINED, ONE, PULL, SUMS, WEIGHTS, Form, of_rows, of_sums, of_weights

ROWS = dataclasses.replace(ONE, m=200)
LONG = dataclasses.replace(ROWS, k=264)
SEVERAL = dataclasses.replace(ROWS, scales=("rows", "columns"), gathered=True, widths=(64, 136), container=list)
GATHERED = dataclasses.replace(ROWS, gathered=True)
FEWER = Form(20, (136,), 136, gathered=True)  # Fewer rows than a tile.
WIDE = overlap.Config(tile_n=128, stages=3)
TALL = overlap.Config(tile_m=128, tile_n=64, stages=2)
TURNS = PULL.replace(tile_m=64, schedule="pingpong")
J_TURNS, W_TURNS, S_TURNS = (config.replace(schedule="pingpong") for config in (JOINED, WEIGHTS, SUMS))
S_TALL = S_TURNS.replace(tile_m=128, stages=3, chunk_bytes=4096)
SWAPPED = PULL.replace(tile_m=104, tile_n=128, swap_operands=True)
J_SWAPPED, W_SWAPPED = JOINED.replace(tile_m=16, swap_operands=True), WEIGHTS.replace(tile_m=104, swap_operands=True)


def gather(m, n, k, config, devices=2, transport="pull"):
    return of_rows(Form(m, (n,), k, container=None), config, devices, transport)


CASES = {
    # Warpgroups that take turns.
    "turns, pull, cut": lambda: of_rows(LONG, TURNS.replace(stream_k=3), 2),
    "turns, joined": lambda: of_rows(FEW, J_TURNS, 2),
    "turns, ring": lambda: of_rows(ROWS, TURNS, 3, "ring"),
    "turns, ring, cut": lambda: of_rows(LONG, TURNS.replace(stream_k=3), 2, "ring"),
    "turns, weights n": lambda: of_weights("n", W_TURNS, 2, m=200),
    "turns, weights k": lambda: of_weights("k", W_TURNS, 2, m=200),
    "turns, scatter m": lambda: of_sums("m", S_TALL, 2, block=(136, 136)),
    "turns, scatter m, batch": lambda: of_sums("m", S_TURNS, 2, batch=2),
    "turns, scatter n": lambda: of_sums("n", S_TURNS, 3, block=(72, 72)),
    "turns, scatter n, f32": lambda: of_sums("n", S_TURNS, 2, block=(72, 72), k=136, dtype=jnp.float32),
    "turns, ring m": lambda: of_sums("ring m", S_TURNS, 3),
    "turns, ring n": lambda: of_sums("ring n", S_TURNS, 2, block=(72, 72)),
    "turns, spread m": lambda: of_sums("spread m", S_TURNS, 2, block=(72, 136)),
    "turns, spread n": lambda: of_sums("spread n", S_TURNS, 2, block=(16, 72)),
    "turns, one shot": lambda: of_sums("one shot", S_TURNS, 2, block=(72, 136)),
    # 16 of a part's 128 rows arrive. Without turns, one warpgroup does all of a tile of 256 rows.
    "turns, one shot, few rows": lambda: of_sums("one shot", S_TALL, 2, block=(16, 136)),
    "one shot, few rows": lambda: of_sums("one shot", S_TALL.replace(
        tile_m=256, stages=2, schedule="cooperative"), 2, block=(16, 136)),
    # Transposed tiles.
    "swapped, pull": lambda: of_rows(SEVERAL, SWAPPED.replace(tile_m=40), 2),
    "swapped, pull, turns": lambda: of_rows(ROWS, SWAPPED.replace(schedule="pingpong"), 2),
    "swapped, joined": lambda: of_rows(
        dataclasses.replace(FEW, scales=("rows", "columns"), widths=(64, 136), container=list), J_SWAPPED, 2),
    "swapped, joined, cut": lambda: of_rows(
        dataclasses.replace(FEW, m=40, k=264, scales=("rows",)), J_SWAPPED.replace(tile_m=72, stream_k=3), 2),
    "swapped, weights n": lambda: of_weights("n", W_SWAPPED, 2, m=200),
    "swapped, weights k, cut": lambda: of_weights("k", W_SWAPPED.replace(stream_k=3), 2, m=200, shard=(192, 64)),
    # Cut tiles, after full waves and alone.
    "pull, cut": lambda: gather(200, 136, 200, WIDE.replace(stream_k=2)),
    "ring, cut": lambda: gather(131, 136, 328, WIDE.replace(stream_k=3), transport="ring"),
    "ring, cut, alone": lambda: gather(128, 128, 320, WIDE.replace(stream_k=8), transport="ring"),
    # Fewer rows than a tile.
    "pull, few rows": lambda: of_rows(FEWER, TALL),
    "ring, few rows": lambda: of_rows(FEWER, TALL, 2, "ring"),
}  # fmt: skip
# Each of these has a case beside it with the same field or the same operation.
SLOW = {
    "turns, ring", "turns, weights n", "turns, scatter m, batch", "turns, scatter n", "turns, ring n",
    "turns, spread m", "turns, one shot", "one shot, few rows", "swapped, pull, turns", "swapped, joined",
    "ring, cut, alone", "pull, few rows",
}  # fmt: skip
# How many cores leave tiles that are cut, if not 10.
CORES = {name: 7 for name in ("turns, pull, cut", "turns, ring, cut", "pull, cut", "ring, cut")}
assert CASES.keys() >= SLOW


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow if x in SLOW else []) for x in CASES])
def test_exact_and_clean(name, monkeypatch):
    shared, together = [], finish.finish_together
    monkeypatch.setattr(finish, "finish_together", lambda *args: (shared.append(name), together(*args))[-1])
    kernel, cut, exchanges = CASES[name](), "cut" in name, any(x in name for x in ("scatter", "spread", "shot", "g m"))
    # First fast copies; then other schedules, in which CTAs that draw their tiles may be late.
    cores = CORES.get(name, 10 if cut else 2)
    kernel.run(cores=cores, completion="eager", scheduler="pct", seed=1)
    resident = 1 if exchanges else None
    kernel.run(cores=cores, completion="random", scheduler="random", seed=2, resident=resident)
    assert bool(shared) == cut  # CTAs share a tile exactly where one is cut.
