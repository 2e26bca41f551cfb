"""A tiny run of examples/train.py. Importing this puts examples/ on the path, or skips the tests that need it."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
for package in ("flax", "optax", "orbax.checkpoint"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `examples`)")

import train  # noqa: E402

TINY = (
    "--layers 1 --features 32 --heads 4 --hidden 64 --sequence 32 --batch 8 --learning-rate 1e-2 --steps 12 --warmup 2 "
    "--dtype float32 --checkpoint-every 4"
)


def told(out: pathlib.Path, arguments: str = "", *, devices: int = 8) -> argparse.Namespace:
    """Parses the options of the tiny model, followed by further arguments. The model needs 8 devices."""
    given = train.parser().parse_args([*TINY.split(), "--out", str(out), *arguments.split()])
    train.complete(given, devices=devices, gpus=False)
    return given


def environment(repository: pathlib.Path) -> dict[str, str]:
    """Returns the environment for a child process, with the same compilation settings as this process."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "COLUMNS": "200",
    }  # fmt: skip
