"""The examples in the docstrings of public functions run, with small operands under the names used there."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mosaic_emulator
import overlap
from overlap import _settings, emulation
from tests.choice.tuning_cases import one_configuration_is_enough

PUBLIC = [
    *(getattr(overlap, name) for name in overlap.__all__ if name != "emulation"),
    *(getattr(emulation, name) for name in emulation.__all__),
    _settings.wait_timeout_s,
]
FUNCTIONS = [function for function in PUBLIC if inspect.isroutine(function)]
INSIDE = "# inside such a layer"


def examples(function: Callable[..., Any]) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(function) or "")


def mesh(devices: int = 4) -> jax.sharding.Mesh:
    types = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((devices,), ("x",), axis_types=types, devices=jax.devices()[:devices])


def matrix(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)


def fused(x: jax.Array, w: Any = None) -> jax.Array:
    return overlap.matmul(x, x if w is None else w, implementation="fused")


# Names that an example may assume. The example's own names take precedence, such as a `mesh` that it makes.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "all_gather_lhs_matmul": lambda: {"x": matrix(64, 64), "w": matrix(64, 256)},
    "all_gather_rhs_matmul": lambda: {"x": matrix(64, 64), "w": matrix(64, 64)},
    "all_gather_lhs_grouped_matmul": dict,
    "grouped_matmul": dict,
    "grouped_matmul_reduce_scatter": dict,
    "linear_cross_entropy": dict,
    "matmul": dict,
    "matmul_all_reduce": lambda: {"x": matrix(64, 256), "w": matrix(256, 64)},
    "matmul_reduce_scatter": lambda: {"x": matrix(64, 256), "w": matrix(256, 64)},
    "route": dict,
    "sharded_matmul": lambda: {"x": jnp.ones((2, 64, 64), jnp.bfloat16), "w": matrix(64, 64)},
    "explain": lambda: {"mesh": mesh()},
    "autotune": lambda: {"layer": fused, "x": matrix(64, 64), "w": matrix(64, 64)},
    "core_count_of_devices": dict,
    "emulate": lambda: {"f": fused, "x": matrix(64, 64)},
    "run_sequence": lambda: {"mosaic_emulator": mosaic_emulator, "along_x": fused, "along_y": fused,
                             "a": matrix(64, 64), "b": matrix(64, 64)},
    "stoppable": lambda: {"mosaic_emulator": mosaic_emulator, "f": fused, "x": matrix(64, 64)},
    "wait_timeout_s": dict,
}  # fmt: skip
# Per-shard operands, for lines that stand inside a layer.
SHARDS = {"a": (64, 64), "b": (64, 32), "u": (64, 64), "v": (32, 64), "x_shard": (16, 64), "w_gate": (64, 64),
          "w_up": (64, 64)}  # fmt: skip


def run(example: doctest.Example, names: dict[str, Any]) -> None:
    try:
        code = compile(example.source, "docstring", "eval")
    except SyntaxError:
        exec(compile(example.source, "docstring", "exec"), names)
        assert not example.want
        return
    value = eval(code, names)
    if example.want:
        assert repr(value) == example.want.strip()


@pytest.mark.parametrize("function", [f for f in FUNCTIONS if examples(f)], ids=lambda f: f.__name__)
def test_examples(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    one_configuration_is_enough(monkeypatch)
    assert function.__name__ in GIVEN, "say above what its example takes as given"
    names = {"overlap": overlap, "jax": jax, "jnp": jnp, "P": P, **GIVEN[function.__name__]()}
    for example in examples(function):
        example.source = example.source.replace("range(100)", "range(2)")
        if INSIDE not in example.source:
            run(example, names)
            continue
        shards = {name: matrix(*shape) for name, shape in SHARDS.items()}
        inside = lambda example=example, shards=shards: run(example, names | shards)  # noqa: E731
        jax.eval_shape(jax.shard_map(inside, mesh=names["mesh"], in_specs=(), out_specs=None, check_vma=False))


def test_overlap_hands_on_all_public_names_of_the_emulator() -> None:
    assert emulation.__all__ == mosaic_emulator.__all__
    for name in emulation.__all__:
        assert getattr(emulation, name) is getattr(mosaic_emulator, name)
    with pytest.raises(AttributeError, match=r"'overlap\.emulation' has no attribute 'nothing'"):
        _ = emulation.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_public_functions_have_examples() -> None:
    without = {function.__name__ for function in FUNCTIONS if "Examples:" not in (inspect.getdoc(function) or "")}
    # These two are one word each.
    assert without <= {"core_count", "enable"}
    assert {function.__name__ for function in FUNCTIONS if examples(function)} == GIVEN.keys()
