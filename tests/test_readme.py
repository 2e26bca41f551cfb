"""The README's code runs, one block after the other, on eight CPU devices at small sizes."""

from __future__ import annotations

import pathlib
import re


def test_python_blocks(repository: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (repository / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        for size, small in (("1024", "16"), ("4096", "64"), ("8192", "128")):
            block = block.replace(size, small)
        exec(compile(block, "README.md", "exec"), names)
    shapes = {name: getattr(names[name], "shape", None) for name in ("y", "c")}
    assert shapes == {"y": (8 * 16, 8 * 64), "c": (64, 128)}
