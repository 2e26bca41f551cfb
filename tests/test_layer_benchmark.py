"""The benchmark of transformer layers: all methods measure the same computation, and wrong results are detected."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from benchmarks import layer, layer_runs

pytestmark = pytest.mark.one_jax
METHODS = ("chosen", "layers xla", "xla", "xla windowed")


def case(backward: bool) -> layer.Case:
    mesh = jax.make_mesh((2,), (layer.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return layer.Case(mesh, layer_runs.MODELS["tiny"], 32, backward)


@pytest.mark.parametrize(
    ("backward", "methods"),
    [
        pytest.param(False, METHODS[1:3], marks=pytest.mark.slow),
        pytest.param(False, METHODS, marks=pytest.mark.slow),
        pytest.param(True, METHODS, marks=pytest.mark.slow),
    ],
)
def test_all_methods_compute_the_same_layer(backward, methods):
    found = layer.measure(case(backward), methods, rounds=1, turns=2)
    assert found.keys() == {*methods, layer_runs.CONTROL} and all(us > 0 for [us] in found.values())


def test_a_wrong_layer_is_noticed(monkeypatch):
    right = layer.plain
    monkeypatch.setattr(layer, "plain", lambda *given: 1.1 * right(*given) + 0.1)
    with pytest.raises(AssertionError, match="chosen differs from XLA by"):
        layer.measure(case(False), ("chosen", "xla"), rounds=1, turns=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--methods zz", "`--methods` must be of chosen, fused, layers xla, xla, xla hiding, xla windowed, got zz"),
        ("--methods fused", "`--methods` must contain xla"),
        ("--models zz", "`--models` must be of llama-70b, llama-8b, qwen-32b, tiny, got zz"),
        ("--tokens 7,8 --devices 2", "`--tokens` must be multiples of the 2 devices, got 7"),
        ("--devices 3", "3 devices do not divide the 8 heads of keys of llama-70b"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words, monkeypatch):
    monkeypatch.setattr(layer_runs.command, "need_gpus", lambda *_: None)
    monkeypatch.setattr(layer_runs.environment, "code_facts", lambda *_, **__: {})
    monkeypatch.setattr(layer_runs.overlap, "initialize", lambda: None)
    with pytest.raises(layer_runs.WrongArguments, match=words):
        layer.main(options.split())
