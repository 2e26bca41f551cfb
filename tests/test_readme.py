"""Checks the README: its code runs on CPU devices at small sizes, its commands parse, and its files exist."""

from __future__ import annotations

import ast
import functools
import inspect
import pathlib
import re
import shlex
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap import cli
from tests.tuning_cases import one_configuration_is_enough

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_python_blocks() -> None:
    """Runs the blocks one after the other; each sees the names that earlier blocks define."""
    blocks = [code for language, code in _FENCED.findall(README.read_text()) if language == "python"]
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        for size, small in (("1024", "16"), ("4096", "64"), ("8192", "128")):
            block = block.replace(size, small)
        exec(compile(block, "README.md", "exec"), names)
    shapes = {name: getattr(names[name], "shape", None) for name in ("y", "c")}
    assert shapes == {"y": (8 * 16, 8 * 64), "c": (64, 128)}


def inline() -> list[str]:
    """Returns the code spans outside of fenced blocks, each as one line."""
    text = _FENCED.sub("", README.read_text())
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def calls() -> list[str]:
    """The spans that call something of this library, with `...` for an ellipsis in the text."""
    return sorted({span.replace("…", "...") for span in inline() if re.search(r"\boverlap(\.\w+)+\(", span)})


def called(code: str) -> dict[str, ast.Call]:
    """Returns the calls of this library in a piece of code, by function name."""
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    return {ast.unparse(node.func).removeprefix("overlap."): node
            for node in nodes if ast.unparse(node.func).startswith("overlap.")}  # fmt: skip


def results_of(code: str, names: dict[str, Any]) -> list[Any]:
    """Runs a span: returns the value of an expression, or what a statement assigns."""
    tree = ast.parse(code)
    if isinstance(tree.body[-1], ast.Expr):
        return [eval(code, names)]
    exec(code, names)
    targets = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return [names[target] for target in targets]


@functools.cache
def operands() -> dict[str, np.ndarray]:
    """Returns whole matrices under the README's names."""
    rng = np.random.default_rng(0)
    names = {"x": (32, 64), "w": (64, 128), "w_gate": (64, 128), "w_up": (64, 256), "h": (32, 128), "w_down": (128, 64)}
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in names.items()}


def weights_spec(name: str, call: ast.Call) -> tuple[P, P]:
    """How the weights and the result of a collective are sharded, if the rows of `x` are sharded over "x"."""
    if name == "all_gather_lhs_matmul":
        return P(None, "x"), P(None, "x")
    if name == "all_gather_rhs_matmul":
        dimension = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}.get("gather_dimension")
        return (P("x", None) if dimension == 0 else P(None, "x")), P("x", None)
    if name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        return P("x", None), P("x", None) if name == "matmul_reduce_scatter" else P()
    raise NotImplementedError(f"say here how the operands of `{name}` are sharded, so that the README's call can run")


@pytest.mark.parametrize("code", calls())
def test_inline_calls(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_configuration_is_enough(monkeypatch)
    (name, call), *_ = called(code).items()
    function = getattr(overlap, name)
    names: dict[str, Any] = {"overlap": overlap, "jnp": jnp}
    if "axis_name" not in inspect.signature(function).parameters:
        # Everything else is no collective: `fn` and `args` are a small layer.
        matrix = jnp.ones((64, 64), jnp.bfloat16)
        names |= {"fn": lambda x, w: overlap.matmul(x, w, implementation="fused"), "args": (matrix, matrix)}
        exec(code, names)
        return
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    used = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)} & operands().keys()
    arrays = {operand: operands()[operand] for operand in sorted(used)}
    spec, out_spec = weights_spec(name, call)
    left = {"x": P("x", None), "h": P(None, "x")}  # Rows, or (of a sum) columns.
    specs = {operand: left.get(operand, spec) for operand in arrays}
    run = jax.shard_map(
        lambda arrays: results_of(code, names | arrays), mesh=mesh, in_specs=(specs,), out_specs=out_spec,
        check_vma=False,
    )  # fmt: skip
    results = jax.jit(run)(arrays)
    weights = [array for operand, array in arrays.items() if operand not in left]
    (rows,) = (array for operand, array in arrays.items() if operand in left)
    assert len(results) == len(weights) > 0
    for result, matrix in zip(results, weights, strict=True):
        expected = rows.astype(np.float32) @ matrix.astype(np.float32)
        np.testing.assert_allclose(np.asarray(result, np.float32), expected, atol=0.05)


def test_there_are_inline_calls() -> None:
    names = {name for code in calls() for name in called(code)}
    assert {"all_gather_lhs_matmul", "all_gather_rhs_matmul", "initialize", "autotune"} <= names


def test_commands_parse() -> None:
    commands = re.findall(r"python -m overlap (\w[^`\n#]*)", README.read_text())
    assert len(commands) >= 3
    for command in commands:
        cli._parser().parse_args(shlex.split(command))


def test_files_exist() -> None:
    root = README.parent
    spans = {span for span in inline() if re.fullmatch(r"[\w./-]+(/|\.(md|py|txt|png|sh|csv))", span)}
    assert len(spans) > 10
    spans |= {path for path in re.findall(r"\b(?:docs|benchmarks|overlap|launch)/[\w./-]*\w", README.read_text())}
    assert not [span for span in spans if not (root / span).exists()]
