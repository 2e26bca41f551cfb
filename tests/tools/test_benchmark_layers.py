"""Benchmarks of blocks, of layers and of their products: all methods compute the same, and what is wrong is noticed."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from benchmarks import backward, block, current, layer, layer_runs
from overlap.emulation import emulate
from overlap.tuning.programs import mesh_of
from tests.ops.product_cases import normal

ROWS, COLUMNS = P("x", None), P(None, "x")
HEADS, WIDTH = 2, 16  # Sizes per device.
# Allowed factor on the error of plain JAX in bf16; both errors are measured against f32.
ALLOWED = 2.0


# --- Blocks as users write them ---------------------------------------------------------------------------------------


def attention(implementation, x, q, k, v, out):
    """Self-attention over all rows; each device has its own heads."""
    if implementation == "plain":
        rows = lax.all_gather(x, "x", tiled=True)
        heads = [rows @ w for w in (q, k, v)]
    else:
        heads = overlap.all_gather_lhs_matmul(x, (q, k, v), "x", implementation=implementation)
    mixed = jax.nn.dot_product_attention(*(h.reshape(h.shape[0], HEADS, WIDTH) for h in heads), is_causal=True)
    mixed = mixed.reshape(mixed.shape[0], -1)
    if implementation == "plain":
        return lax.psum_scatter(mixed @ out, "x", tiled=True)
    return overlap.matmul_reduce_scatter(mixed, out, "x", implementation=implementation)


def mlp_of_all_rows(implementation, x, gate, up, down):
    """A gated MLP; each device has some of the inner columns."""
    inner = jax.nn.silu(x @ gate) * (x @ up)
    if implementation == "plain":
        return lax.psum(inner @ down, "x")
    return overlap.matmul_all_reduce(inner, down, "x", implementation=implementation)


BLOCKS = {  # Width between blocks, width inside (per device), and how many weights share the first gather.
    "mlp": (block.mlp, 64, 72, 2),
    "attention": (attention, 64, HEADS * WIDTH, 3),
    "mlp of all rows": (mlp_of_all_rows, 64, 72, 2),
}


def operands(devices, hidden, inner, sides):
    """Rows of 16 tokens per device, and weights; one size of each is sharded over the devices."""
    shapes = [(devices * 16, hidden), *[(hidden, devices * inner)] * sides, (devices * inner, hidden)]
    arrays = [np.asarray(normal(seed, *shape), np.float32) for seed, shape in enumerate(shapes)]
    return [arrays[0], *(x * np.float32(x.shape[0]) ** -0.5 for x in arrays[1:])]


def results(name, implementation, devices, arrays, check_vma):
    """The block's result and the gradients of all operands, in f32."""
    call, *_, sides = BLOCKS[name]
    rows = P() if call is mlp_of_all_rows else ROWS
    mapped = jax.shard_map(
        functools.partial(call, implementation), mesh=mesh_of(jax.devices()[:devices]),
        in_specs=(rows, *[COLUMNS] * sides, ROWS), out_specs=rows, check_vma=check_vma,
    )  # fmt: skip
    weights = np.asarray(normal(9, *arrays[0].shape), np.float32)

    def loss(*operands):
        out = mapped(*operands)
        return (out.astype(jnp.float32) * weights).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, tuple(range(len(arrays))), has_aux=True))(*arrays)
    return [np.asarray(x, np.float32) for x in (out, *gradients)]


@pytest.mark.parametrize(
    ("name", "devices", "check_vma"),
    [
        ("mlp", 2, True),
        pytest.param("mlp", 4, False, marks=pytest.mark.slow),
        pytest.param("attention", 2, True, marks=pytest.mark.slow),
        ("mlp of all rows", 2, False),
        pytest.param("mlp of all rows", 2, True, marks=pytest.mark.slow),
    ],
)
def test_a_block_and_its_gradients(name, devices, check_vma):
    arrays = [x.astype(jnp.bfloat16) for x in operands(devices, *BLOCKS[name][1:])]
    exact = results(name, "plain", devices, [x.astype(np.float32) for x in arrays], check_vma)
    plain = results(name, "plain", devices, arrays, check_vma)
    with emulate(cores=3, keep=True) as run:
        fused = results(name, "fused", devices, arrays, check_vma)
        run.check()
    # Forward: one gather and one scatter. Backward: a gather for the last product, and one scatter of the sum of the
    # products that share the first gather. The backward pass of an all-reduce runs none of our kernels.
    counts = collections.Counter(launch.name.split("_")[1] for launch in run.launches)
    assert counts == ({"matmul": 1} if name == "mlp of all rows" else {"all": 2, "matmul": 2})
    for ours, theirs, expected in zip(fused, plain, exact, strict=True):
        error, allowed = (np.linalg.norm(x - expected) / np.linalg.norm(expected) for x in (ours, theirs))
        assert error <= ALLOWED * allowed


# --- Their benchmarks -------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_the_benchmark_of_a_block(monkeypatch):
    given = mesh_of(jax.devices()[:2]), (32, 64, 128)
    times = block.measure(*given, True, ("chosen", "xla"), rounds=2, turns=2)
    assert times.keys() == {"chosen", "xla", layer_runs.CONTROL} and all(len(us) == 2 for us in times.values())
    right = block.mlp
    monkeypatch.setattr(block, "mlp", lambda how, *a: right(how, *a) * (1.0 if how == "plain" else 1.1) + a[0])
    with pytest.raises(AssertionError, match="chosen differs from XLA"):
        block.measure(*given, False, ("chosen", "xla"), rounds=1, turns=1)


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
def test_products_of_layers_that_are_wrong_are_noticed():
    mesh, sizes = mesh_of(jax.devices()[:2]), layer_runs.MODELS["tiny"]
    found = {product.name: product for product in backward.products(sizes, 32)}
    for name in ("dx of q+k+v", "dh and gathered dy of o"):
        times = backward.measure(found[name], mesh, ("lists", "xla", "roof"), rounds=1, turns=2)
        assert {"xla", "roof", layer_runs.CONTROL} <= times.keys() <= {"lists", "xla", "roof", layer_runs.CONTROL}
    scaled = lambda dy, h: [1.1 * (h.T @ lax.all_gather(dy, "x", tiled=True))]  # noqa: E731
    wrong = dataclasses.replace(found["dW of o"], ours={"fused": scaled})
    with pytest.raises(AssertionError, match="fused differs from XLA"):
        backward.measure(wrong, mesh, ("fused", "xla"), rounds=1, turns=1)


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
