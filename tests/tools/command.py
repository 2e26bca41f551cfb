"""Runs `python -m overlap` in a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys


def run_overlap(repository: pathlib.Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "overlap", *map(str, arguments)]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository), "COLUMNS": "140"} | environment
    return subprocess.run(
        command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250, check=False
    )
