"""`overlap.autotune`: it finds the calls of a function, measures them, and its results are used."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import choose, tables
from overlap.choice.problem import Problem
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning import progress
from tests import oracle
from tests.choice.tuning_cases import no_tables

__all__ = ["no_tables"]
pytestmark = [pytest.mark.usefixtures("no_tables"), pytest.mark.one_jax]
autotune = importlib.import_module("overlap.tuning.autotune")
SMALL = Problem("matmul", 128, 128, 128, "bfloat16", "bfloat16")


def answer(*args, **kwargs):
    (choice,) = overlap.explain(overlap.matmul, *args, **kwargs)
    return choice


def layer(x, w):
    """Chooses its configuration as `overlap.matmul` does once dispatch asks `choose_config`."""
    (m, k), n = x.shape, w.shape[1]
    of = Problem("matmul", m, n, k, str(x.dtype), str(x.dtype))
    config, source = choose.choose_config(of, Target("cpu", "cpu", 4))
    layer.seen.append((config, source))
    return overlap.matmul(x, w, config=config, implementation="fused")


layer.seen = []


def operands(devices=1):
    return jnp.ones((128 * devices, 128), jnp.bfloat16), jnp.ones((128, 128 * devices), jnp.bfloat16)


def test_calls_are_found_wherever_they_are():
    x, w = operands()
    mapped = oracle.on_mesh(oracle.make_mesh(x=2), layer, (P("x", None), P()), P("x", None))

    def scanned(x, w):
        return jax.lax.scan(lambda c, _: (layer(c, w), None), x, None, length=2)[0]

    inner = jax.jit(layer)
    jax.eval_shape(inner, x, w)  # Traced before; `autotune` must see it again.
    for fn, args in (
        (layer, (x, w)), (inner, (x, w)), (jax.jit(lambda x, w: inner(x, w) + 1), (x, w)), (scanned, (x, w)),
        (mapped, (operands(2)[0], w)),
        (jax.grad(lambda x, w: layer(x, w).astype(jnp.float32).sum()), (x, w)),
    ):  # fmt: skip
        assert SMALL in autotune.problems_of(fn, *args)
    assert autotune.problems_of(lambda x, w: layer(x, w) + layer(2 * x, w), x, w) == [SMALL]
    gather = lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused")  # noqa: E731
    assert autotune.problems_of(oracle.on_mesh(oracle.make_mesh(x=2), gather), *operands(2)) == [
        dataclasses.replace(SMALL, op="all_gather_lhs_matmul", devices=2)
    ]


def test_the_products_of_a_gradient_are_found_where_xla_would_run_by_default():
    """After tuning the fused kernel may run, and then its backward products do, too."""
    x, w = jnp.ones((128, 192), jnp.bfloat16), jnp.ones((192, 256), jnp.bfloat16)
    assert answer(x, w).implementation == "xla"
    loss = lambda x, w: overlap.matmul(x, w).astype(jnp.float32).sum()  # noqa: E731
    found = autotune.problems_of(jax.grad(loss, (0, 1)), x, w)
    assert {(p.m, p.n, p.k, p.layout) for p in found} == {
        (128, 256, 192, "nn"), (128, 192, 256, "nt"), (192, 256, 128, "tn")
    }  # fmt: skip
    assert answer(x, w).implementation == "xla"


def test_collecting_neither_changes_explanations_nor_warns_nor_fails_where_calls_run(caplog):
    caplog.set_level(logging.INFO, "overlap")
    x, w = operands()
    seen = []

    def asks(x, w):
        seen.append(answer(x, w).implementation)
        return overlap.matmul(x, w)

    def compiles(x, w):
        jax.jit(overlap.matmul).lower(X, X).compile()
        return overlap.matmul(x, w)

    X = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    assert autotune.problems_of(asks, x, w) == [SMALL] and seen == ["xla"]
    assert SMALL in autotune.problems_of(compiles, x, w)
    pairs = jax.vmap(lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x"))
    pairs = oracle.on_mesh(oracle.make_mesh(x=2), pairs, P(), P())
    autotune.problems_of(pairs, *(jnp.stack([a, a]) for a in (x, w)))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_autotune_writes_its_results_and_its_context_uses_them(tmp_path, caplog):
    caplog.set_level(logging.INFO, "overlap")
    x, w = operands()
    path = tmp_path / "table.json"
    jitted = jax.jit(layer)
    before = jitted(x, w)
    seen = []
    result = autotune.autotune(layer, x, w, max_configs=2, path=path, progress=lambda text, part: seen.append(part))
    assert [e.problem for e in tables.read(path)] == [SMALL]
    assert list(result.configs) == [SMALL]
    assert str(result).startswith("matmul 128x128x128 bfloat16:\n")
    assert "XLA" in str(result)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    fused = {"implementation": "fused"}
    assert answer(x, w, **fused).source == "heuristic"
    assert answer(x, w, config=Config(stages=3, tile_n=128), **fused).source == "given"
    layer.seen.clear()
    with result:
        np.testing.assert_array_equal(np.asarray(jitted(x, w)), np.asarray(before))
        explained = answer(x, w, **fused)
        assert (explained.config, explained.source) == (result.configs[SMALL], "tuned")
    assert layer.seen == [(result.configs[SMALL], "tuned")]
    jax.eval_shape(lambda x, w: layer(x, w), x, w)
    assert layer.seen[-1][1] == "heuristic"  # Outside of `autotune`; tables of emulated times are not consulted.
    assert autotune.autotune(layer, x, w, path=path).outcomes[0].note == "already measured"
    said = [record for record in caplog.records if record.message.startswith("autotune: ")]
    assert said[0].levelname == "WARNING"
    assert "run emulated" in said[0].message and "up to 2 configurations of 1 problem" in said[0].message


def test_autotune_says_what_is_wrong(monkeypatch):
    x, w = operands()
    with pytest.raises(ValueError, match="makes no call of an operation of this library that leaves `config` open"):
        autotune.autotune(jnp.dot, x, w)
    with pytest.raises(ValueError, match="`max_configs` must be None or an integer of at least 1, got 0"):
        autotune.autotune(layer, x, w, max_configs=0)
    for budget_s in (-1, 0, float("nan"), "soon", True):
        with pytest.raises(ValueError, match="`budget_s` must be seconds, more than 0, got "):
            autotune.autotune(layer, x, w, budget_s=budget_s)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match=r"tune in a single process .* OVERLAP_TUNING_DIR"):
        autotune.autotune(layer, x, w)


def test_progress_without_a_terminal_is_a_line_for_each_problem_and_now_and_then(monkeypatch):
    said, clock = [], itertools.count()  # Each look at the clock returns one second more.
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    with progress.shown(said.append, every_s=1000) as report:
        for text, fraction in (("1x1x1: XLA", 0), ("1x1x1: compiling", 0.1), ("2x2x2: XLA", 0.5)):
            report(text, fraction)
    assert said == ["  0% 1x1x1: XLA", " 50% 2x2x2: XLA"]
    said.clear()
    with progress.shown(said.append, every_s=0) as report:
        for fraction in (0.2, 0.3):
            report("1x1x1: checking 128x128x64", fraction)
    assert said == [f" {part} 1x1x1: checking 128x128x64" for part in ("20%", "30%")]
