"""`python tests/docs/run_pages.py PAGE...` runs the code blocks of pages as they stand there: test_pages.py calls it.

The blocks of a page run one after the other, each with the names of those before it. A page names the number of devices
in its text; this process must have as many. It prints the seconds of each page, and the most memory of all.
"""

from __future__ import annotations

import gc
import pathlib
import re
import resource
import sys
import time
from typing import Any

import jax
import numpy as np

gc.set_threshold(200_000, 20, 100)  # As in conftest.py: collecting what jax keeps takes a fifth of the time.
ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Of each page, what some of its names are in the end.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "README.md": {},
    "docs/choosing.md": {},
    "docs/decoding.md": {"last": (2, 1, 256), "alone": (1, 1, 256)},
    "docs/experts.md": {"x": (2, 128, 256), "y": (128, 256), "loads": (3, 16)},
    "docs/launching.md": {},
    "docs/layers.md": {"y": (2, 128, 256), "z": (2, 128, 256), "a": (2, 128, 256), "h": (2, 128, 512)},
    "docs/loss.md": {"loss": (), "dx": (256, 128), "dw": (128, 1024)},
    "docs/primitives.md": {"gathered": (4, 32, 1024), "y": (32, 1024)},
    "docs/quickstart.md": {"y": (1024, 512)},
    "docs/shard_map.md": {"y": (512, 256), "tokens": (16, 256), "h": (512, 1024), "quantized": (512, 1024)},
    "docs/sharded.md": {"y": (4, 128, 256), "h": (4, 128, 1024)},
    "docs/trainers.md": {"y": (4, 128, 256), "z": (4, 128, 256), "mixed": (64, 128)},
    "docs/training.md": {},
    "mosaic_emulator/README.md": {},
}


def run(page: str) -> None:
    """Runs a page's blocks, and checks what they have computed."""
    names: dict[str, Any] = {"__name__": "__main__"}
    text = (ROOT / page).read_text()
    before = jax.sharding.get_mesh()
    try:
        for match in PYTHON.finditer(text):
            above = text[: match.start()].count("\n") + 1  # So that errors name the page's own lines.
            exec(compile("\n" * above + match[1], str(ROOT / page), "exec"), names)
        check(page, names)
    finally:
        jax.set_mesh(before)


def check(page: str, names: dict[str, Any]) -> None:
    """Compares what a page has computed with what it should be."""
    assert {name: getattr(names.get(name), "shape", None) for name in SHAPES[page]} == SHAPES[page]
    if page == "docs/shard_map.md":
        for rows in names["quantize"](np.zeros((2, 4), np.float32)):  # Rows of zeros have a scale.
            assert np.isfinite(np.asarray(rows, np.float32)).all()
    if page == "docs/choosing.md":
        assert names["answer"].implementation in ("fused", "xla")
    if page == "docs/layers.md":
        x = names["x"].astype(np.float32)
        np.testing.assert_allclose(names["after"](x), names["before"](x), rtol=1e-3, atol=1e-3)
        logits = np.asarray(names["embedding"])[names["tokens"]] @ np.asarray(names["head"].kernel[...])
        chosen = np.take_along_axis(logits, np.asarray(names["tokens"])[..., None], -1)[..., 0]
        losses = np.log(np.exp(logits).sum(-1)) - chosen
        np.testing.assert_allclose(names["token_loss"], losses.mean(), rtol=1e-3)
        assert np.isfinite(names["loss"]) and set(names["grads"]["blocks"]) == {"norm1", "qkv", "out", "norm2", "mlp"}
    if page == "docs/trainers.md":  # All weights are 1 / 64, and the gates of a token add up to 1.
        sums = np.asarray(names["tokens"]).sum(-1, keepdims=True) / 64
        expected = np.broadcast_to(256 / 64 * sums**2 / (1 + np.exp(-sums)), (64, 128))
        np.testing.assert_allclose(names["mixed"], expected, rtol=1e-3, atol=1e-5)
    if page == "README.md":
        rng = np.random.default_rng(0)
        x, gate, up, down = (rng.standard_normal((64, 64)).astype(np.float32) / 4 for _ in range(4))
        z = x @ gate
        expected = (z / (1 + np.exp(-z)) * (x @ up)) @ down
        np.testing.assert_allclose(np.asarray(names["block"](x, gate, up, down)), expected, atol=1e-4)


def main() -> None:
    """Runs the pages of the command line."""
    for page in sys.argv[1:]:
        start = time.perf_counter()
        print(page, end=" ", flush=True)
        run(page)
        print(f"{time.perf_counter() - start:.1f} s", flush=True)
    print("GiB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)


if __name__ == "__main__":
    main()
