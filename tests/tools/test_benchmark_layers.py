"""Benchmarks of blocks, of layers and of their products: all methods compute the same, and what is wrong is noticed."""

from __future__ import annotations

import collections
import dataclasses
import re

import jax
import pytest
from jax import lax
from jax.sharding import AxisType

from benchmarks import backward, block, current, layer, layer_runs
from overlap.emulation import emulate
from overlap.tuning.programs import mesh_of


def test_the_fused_block_computes_the_same_and_shares_what_it_can():
    """`block.measure` compares the tokens after a turn of the block with its backward pass."""
    with emulate(cores=3, keep=True) as run:
        block.measure(mesh_of(jax.devices()[:2]), (32, 64, 128), True, ("fused", "xla"), rounds=0, turns=1)
        run.check()
    # Forward: one gather and one scatter. Backward: a gather for the last product, and one scatter of the sum of the
    # products that share the first gather.
    assert collections.Counter(launch.name.split("_")[1] for launch in run.launches) == {"all": 2, "matmul": 2}


@pytest.mark.one_jax
def test_a_wrong_block_is_noticed(monkeypatch):
    right = block.mlp
    monkeypatch.setattr(block, "mlp", lambda how, *a: right(how, *a) * (1.0 if how == "plain" else 1.1) + a[0])
    with pytest.raises(AssertionError, match="chosen differs from XLA"):
        block.measure(mesh_of(jax.devices()[:2]), (32, 64, 128), False, ("chosen", "xla"), rounds=1, turns=1)


@pytest.mark.one_jax
def test_the_backward_pass_of_a_block_needs_every_product():
    mesh, sizes = mesh_of(jax.devices()[:2]), (32, 64, 128)
    program = layer_runs.loop(block.apply("xla", mesh), True, 1, None)
    text = program.lower(*block.operands(mesh, *sizes)).compile().as_text()
    # Three products forward, and two for the gradients of each. Without the result of the last one, it would be eight.
    assert len(re.findall(r" (?:dot|custom-call)\(", text)) == 9


@pytest.mark.one_jax
def test_a_dry_run_goes_into_the_current_table(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(layer_runs.jax, "device_count", lambda: 2)
    options = ["--dry-run", "--methods", "chosen", "xla", "--passes", "forward", "--out", str(tmp_path)]
    assert block.main(options) == 0
    (found,) = current.tables(tmp_path)
    assert found.name == "block-cpu-2-one_process" and found.device_kind == "cpu"
    assert {row["method"] for row in found.rows} == {"chosen", "xla", layer_runs.CONTROL}


@pytest.mark.one_jax
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("dx of q+k+v", "dh and gathered dy of o")]
)
def test_the_products_of_a_layer(name):
    mesh, sizes = mesh_of(jax.devices()[:2]), layer_runs.MODELS["tiny"]
    (product,) = (product for product in backward.products(sizes, 32) if product.name == name)
    times = backward.measure(product, mesh, ("lists", "xla", "roof"), rounds=1, turns=2)
    assert {"xla", "roof", layer_runs.CONTROL} <= times.keys() <= {"lists", "xla", "roof", layer_runs.CONTROL}


@pytest.mark.one_jax
def test_a_wrong_product_of_a_layer_is_noticed():
    mesh, sizes = mesh_of(jax.devices()[:2]), layer_runs.MODELS["tiny"]
    (right,) = (product for product in backward.products(sizes, 32) if product.name == "dW of o")
    scaled = lambda dy, h: [1.1 * (h.T @ lax.all_gather(dy, "x", tiled=True))]  # noqa: E731
    with pytest.raises(AssertionError, match="fused differs from XLA"):
        backward.measure(dataclasses.replace(right, ours={"fused": scaled}), mesh, ("fused", "xla"), rounds=1, turns=1)


def case(backward: bool) -> layer.Case:
    mesh = jax.make_mesh((2,), (layer.AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    return layer.Case(mesh, layer_runs.MODELS["tiny"], 32, backward)


@pytest.mark.one_jax
@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True])
def test_all_methods_compute_the_same_layer(backward):
    methods = ("chosen", "layers xla", "xla", "xla windowed")
    found = layer.measure(case(backward), methods, rounds=1, turns=2)
    assert found.keys() == {*methods, layer_runs.CONTROL} and all(us > 0 for [us] in found.values())


@pytest.mark.one_jax
def test_a_wrong_layer_is_noticed(monkeypatch):
    right = layer.plain
    monkeypatch.setattr(layer, "plain", lambda *given: 1.1 * right(*given) + 0.1)
    with pytest.raises(AssertionError, match="chosen differs from XLA by"):
        layer.measure(case(False), ("chosen", "xla"), rounds=1, turns=2)
