"""Checks the README: its code runs on CPU devices at small sizes, its commands parse, and its files exist."""

from __future__ import annotations

import pathlib
import re
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap.layers
import overlap.primitives
from overlap import cli
from tests.choice.tuning_cases import one_configuration_is_enough

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_python_blocks() -> None:
    """Runs the blocks one after the other, each with the names of those before it, and the MLP that they define."""
    names: dict[str, Any] = {}
    for block in (code for language, code in _FENCED.findall(README.read_text()) if language == "python"):
        for size, small in (("1024", "16"), ("4096", "64")):
            block = block.replace(size, small)
        exec(compile(block, "README.md", "exec"), names)
    rng, devices = np.random.default_rng(0), jax.device_count()
    x, gate, up, down = (
        rng.standard_normal(shape).astype(np.float16) / 4
        for shape in ((8 * devices, 16), (16, 8 * devices), (16, 8 * devices), (8 * devices, 16))
    )
    z, y = x.astype(np.float32) @ gate, x.astype(np.float32) @ up
    expected = (z / (1 + np.exp(-z)) * y) @ down.astype(np.float32)
    np.testing.assert_allclose(np.asarray(names["block"](x, gate, up, down), np.float32), expected, atol=0.02)


def spans() -> list[str]:
    """Returns the code spans outside of fenced blocks, each as one line."""
    text = _FENCED.sub("", README.read_text())
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def calls() -> list[str]:
    """The spans that call something of this library."""
    return sorted({span for span in spans() if re.search(r"\boverlap(\.\w+)+\(", span)})


@pytest.mark.parametrize("code", calls())
def test_inline_calls(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_configuration_is_enough(monkeypatch)
    matrix = jnp.ones((64, 64), jnp.bfloat16)
    operands = {"fn": lambda x, w: overlap.matmul(x, w, implementation="fused"), "args": (matrix, matrix)}
    exec(code, {"overlap": overlap, **operands})


def test_names_exist() -> None:
    """Spans such as `overlap.layers` and `overlap.layers.GatedMLP`."""
    dotted = {span for span in spans() if re.fullmatch(r"overlap(\.\w+)+", span)}
    assert len(dotted) > 3 and len(calls()) > 1
    for name in dotted:
        eval(name, {"overlap": overlap, "layers": overlap.layers, "primitives": overlap.primitives})


def test_commands_parse() -> None:
    commands = re.findall(r"python -m overlap (\w[^`\n#]*)", README.read_text())
    assert len(commands) >= 2
    for command in commands:
        cli._parser().parse_args(shlex.split(command))


def test_files_exist() -> None:
    text = README.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text)
    files = {path for link in links for path in link if path}
    files |= {span for span in spans() if re.fullmatch(r"[\w./-]+(/|\.(md|py|txt|png|sh|csv))", span)}
    assert len(files) > 12
    assert not [path for path in files if not (README.parent / path).exists()]
