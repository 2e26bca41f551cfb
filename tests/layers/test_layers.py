"""The layers of overlap/layers/ against the same layers of flax on one device: values, gradients, placement, tools."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from overlap.emulation import emulate
from tests.layers.layer_cases import (
    AUTO,
    AXES,
    BETWEEN,
    EXPLICIT,
    INSIDE,
    WHOLE,
    Every,
    Plain,
    assert_near,
    draw,
    make_mesh,
    numbers,
    put,
    same,
    spread,
)

ROWS = 8
OPERANDS = draw(1, (4, ROWS, 32)), draw(2, (4, ROWS, 64))
# So that each element of each result has a cotangent of its own.
WEIGHTS = {name: np.cos(np.arange(4 * ROWS * 64) * i).astype(np.float32) for i, name in enumerate(
    ("column", "row", "query", "key", "value", "out", "mlp", "rms", "mean"), 2)}  # fmt: skip


@nnx.jit
def everything(model: Any, x: jax.Array, h: jax.Array) -> Any:
    """Returns the results of all layers, and the gradients of their weighted sum by parameters and inputs."""

    def weighted(model: Any, x: jax.Array, h: jax.Array) -> Any:
        outs = model(x, h)
        return sum((y * WEIGHTS[name][: y.size].reshape(y.shape)).sum() for name, y in outs.items()), outs

    (_, outs), grads = nnx.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True)(model, x, h)
    return outs, (nnx.to_pure_dict(grads[0]), *grads[1:])


@functools.cache
def expected() -> Any:
    plain = Plain(nnx.Rngs(3))
    spread(plain)
    with jax.default_matmul_precision("highest"):
        return numbers(plain), jax.device_get(everything(plain, *map(jnp.asarray, OPERANDS)))


# Data and tensor devices, the kind of mesh, and keywords.
CASES = {
    "explicit, rows sharded": (2, 2, EXPLICIT, {}),
    "auto, rows whole": (2, 2, AUTO, {"sequence_parallel": False, "keep_gathered": True}),
    "no FSDP": (1, 4, EXPLICIT, {"fsdp_axis": None}),
    "auto": (2, 4, AUTO, {}),
    "explicit, rows whole": (2, 4, EXPLICIT, {"sequence_parallel": False}),
    "one device": (1, 1, AUTO, {}),
}


@pytest.mark.parametrize(
    "case", [name if i < 2 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(CASES)]
)
def test_layers_are_those_of_flax(case: str) -> None:
    """The same parameters from the same keys, results and gradients; arrays have the documented shardings."""
    data, tensor, kind, options = CASES[case]
    mesh, between = make_mesh(data, tensor, kind), WHOLE if "sequence_parallel" in options else BETWEEN
    drawn, (values, grads) = expected()
    with jax.set_mesh(mesh):
        model = Every(nnx.Rngs(3), **AXES | options)
        jax.tree.map(np.testing.assert_array_equal, numbers(model.qkv), numbers(Plain(nnx.Rngs(3)).qkv))
        spread(model)
        jax.tree.map(np.testing.assert_array_equal, numbers(model), drawn)
        placed = put(OPERANDS[0], mesh, between), put(OPERANDS[1], mesh, INSIDE)
        compiled = everything.lower(model, *placed).compile()
        outs, found = compiled(model, *placed)
    assert_near(outs, values, 1e-5)
    assert_near(found, grads, 1e-5)
    for name, y in outs.items():
        heads, inside = P("data", None, "tensor", None), name == "column"
        assert same(y, heads if y.ndim == 4 else INSIDE if inside else between), name
    fsdp = options.get("fsdp_axis", "data")
    for of in (model, nnx.merge(nnx.split(model)[0], nnx.State(found[0]))):  # Gradients lie as the parameters do.
        assert same(of.column.kernel[...], P(fsdp, "tensor")) and same(of.mlp.down.kernel[...], P("tensor", fsdp))
        assert same(of.column.bias[...], P("tensor")) and same(of.row.bias[...], P(None)) and same(
            of.rms.scale[...], P(None))  # fmt: skip
    text = compiled.as_text()
    if mesh.size == 1:
        with jax.set_mesh(mesh):
            forward = nnx.jit(lambda model, x, h: model(x, h)).lower(model, *placed).compile().as_text()
        assert not re.search(r" (all-gather|reduce-scatter|all-reduce|all-to-all)\(", forward)
    # Profiles show this metadata, which names layer and product, forward and backward.
    names = " ".join(set(re.findall(r'op_name="([^"]*)"', text)))
    for name in ("RMSNorm", "QKVProjection", "OutputProjection", "LayerNorm", "GatedMLP"):
        assert f"/jvp({name})/" in names and f"/transpose(jvp({name}))/" in names, name
    if data == tensor == 2 and between == BETWEEN:
        for name in ("gate_up/sharded_matmul.all_gather_lhs_matmul", "down/sharded_matmul.matmul_reduce_scatter"):
            assert f"/jvp(GatedMLP)/{name}" in names, name


FUSED: dict[str, Any] = {
    "mlp": (functools.partial(layers.GatedMLP, 64, 128), lambda layer, x: layer(x, x)),
    "qkv": (functools.partial(layers.QKVProjection, 64, 2, 2, 64), lambda layer, x: jnp.stack(layer(x))),
    "out": (functools.partial(layers.OutputProjection, 2, 32, 64), lambda layer, x: layer(x.reshape(1, 128, 2, 32))),
}


@pytest.mark.one_jax
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qkv", "out"))])
def test_a_fused_layer(name: str) -> None:
    """Its kernels, forward and backward, in bf16: at most twice the error of the same layer by XLA."""
    (build, call), mesh, x = FUSED[name], make_mesh(1, 2), draw(1, (1, 128, 64)).astype(jnp.bfloat16)

    @nnx.jit
    def both(layer: Any, x: jax.Array) -> Any:
        def total(layer: Any, x: jax.Array) -> Any:
            out = call(layer, x).astype(jnp.float32)
            return (out**2).sum(), out

        (_, out), (of_layer, of_x) = nnx.value_and_grad(total, argnums=(0, 1), has_aux=True)(layer, x)
        return out, nnx.to_pure_dict(of_layer), of_x.astype(jnp.float32)

    with jax.set_mesh(mesh):
        layer = build(dtype=jnp.bfloat16, rngs=nnx.Rngs(0), implementation="fused")
        by_xla = nnx.with_attributes(layer, implementation="xla", raise_if_not_found=False)
        exact = nnx.with_attributes(by_xla, dtype=jnp.dtype(jnp.float32), raise_if_not_found=False)
        placed = put(x, mesh, P(None, "tensor", None) if name != "out" else P(None, None, "tensor"))
        with emulate(cores=2, detect_races=False) as run:
            found = both(layer, placed)
        known, right = both(by_xla, placed), both(exact, placed.astype(jnp.float32))
    assert run.counts["launches"] >= 2
    for ours, theirs, all_right in zip(*map(jax.tree.leaves, (found, known, right)), strict=True):
        error, allowed = (np.linalg.norm(np.asarray(y) - np.asarray(all_right)) for y in (ours, theirs))
        assert 0 < error <= 2 * allowed


@pytest.mark.one_jax
def test_one_gather_for_several_products() -> None:
    """A gated MLP has one all-gather and one reduce-scatter in its program; QKV has one all-gather."""
    mesh, counts = make_mesh(1, 2, EXPLICIT), []
    options: Any = {"implementation": "xla"}
    with jax.set_mesh(mesh):
        x = put(draw(0), mesh, P(None, "tensor", None))
        for layer in (functools.partial(layers.GatedMLP, 32, 64), functools.partial(layers.QKVProjection, 32, 8, 4)):
            graph, state = nnx.split(nnx.eval_shape(lambda layer=layer: layer(rngs=nnx.Rngs(0), **options)))
            text = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)).lower(state, x).as_text()
            names = ("all_gather", "reduce_scatter", "all_reduce")
            counts.append(tuple(text.count(f'"stablehlo.{name}"') for name in names))
    assert counts == [(1, 1, 0), (1, 0, 0)]


@pytest.mark.one_jax
@pytest.mark.parametrize("given", [False, True], ids=["jax.set_mesh", "mesh="])
def test_decoding_with_the_trained_model(given: bool) -> None:
    """One row of each sequence, with the same parameters; and the mesh as a keyword, without jax.set_mesh."""
    mesh, x = make_mesh(2, 2), draw(0, (4, 1, 32))
    with jax.set_mesh(jax.sharding.get_mesh() if given else mesh):
        mlp, norm = (
            layer(rngs=nnx.Rngs(0), **AXES, **{"mesh": mesh} if given else {})
            for layer in (functools.partial(layers.GatedMLP, 32, 64), functools.partial(layers.RMSNorm, 32))
        )
        with pytest.raises(ValueError, match=r"rows .*=1 must be a multiple of the 2 devices.*sequence_parallel=False"):
            mlp(put(x, mesh, WHOLE))
        decoder, unnormed = (nnx.with_attributes(layer, sequence_parallel=False) for layer in (mlp, norm))
        out = nnx.jit(lambda mlp, norm, x: mlp(norm(x)))(decoder, unnormed, put(x, mesh, WHOLE))
    assert mlp.gate.sequence_parallel and same(out, WHOLE) and same(mlp.gate.kernel[...], P("data", "tensor"))
    gate, up, down = (np.asarray(linear.kernel[...]) for linear in (mlp.gate, mlp.up, mlp.down))
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(out, jax.nn.silu(x @ gate) * (x @ up) @ down, atol=1e-4)


@pytest.mark.one_jax
def test_a_residual_keeps_its_dtype() -> None:
    """A float32 residual beside a bf16 product is not rounded; a bf16 residual is added inside the product."""
    mesh, x = make_mesh(2, 2, EXPLICIT), draw(0)
    with jax.set_mesh(mesh):
        row = layers.RowParallelLinear(64, 32, dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(0), **AXES)
        row.kernel.set_value(jnp.zeros_like(row.kernel[...]))
        h = put(draw(1, (4, 16, 64)), mesh, INSIDE)
        out = nnx.jit(lambda row, h, x: row(h, x))(row, h, put(x, mesh, BETWEEN))
        low = jax.eval_shape(row, *(jax.typeof(put(y.astype(jnp.bfloat16), mesh, s)) for y, s in (
            (draw(1, (4, 16, 64)), INSIDE), (x, BETWEEN))))  # fmt: skip
    np.testing.assert_array_equal(out, x)
    assert low.dtype == jnp.bfloat16


# --- Tools ------------------------------------------------------------------------------------------------------------

# Each gets a model and an input of its MLP, and returns a model like it.
TOOLS: dict[str, Any] = {
    "tabulate": lambda model, x: nnx.tabulate(model.mlp, x) and model,
    "display": lambda model, x: treescope.render_to_html(model) and repr(model) and model,
    "eval_shape": lambda model, x: nnx.merge(
        nnx.split(nnx.eval_shape(lambda: Every(nnx.Rngs(0), **AXES)))[0], nnx.state(model)
    ),
    "paths": lambda model, x: jax.tree_util.tree_map_with_path(lambda path, x: x, model),
    "pickle": lambda model, x: pickle.loads(pickle.dumps(model)),
    "pickle of parts": lambda model, x: nnx.merge(*pickle.loads(pickle.dumps(nnx.split(model)))),
    "copy": lambda model, x: copy.deepcopy(model),
    "clone": lambda model, x: nnx.clone(model),
}


@pytest.mark.one_jax
@pytest.mark.filterwarnings("ignore:The chararray class")  # Of numpy, when treescope lists its names.
def test_tools_for_modules() -> None:
    """What flax, jax and treescope do to any module works on a model of the layers, and leaves their classes whole."""
    mesh = make_mesh(2, 2, EXPLICIT)
    with jax.set_mesh(mesh):
        model, x = Every(nnx.Rngs(0), **AXES), put(OPERANDS[0], mesh, BETWEEN)
        for tool, use in TOOLS.items():
            found = use(model, x)
            assert nnx.split(found)[0] == nnx.split(model)[0], tool
            jax.tree.map(np.testing.assert_array_equal, numbers(found), numbers(model))
        assert nnx.eval_shape(lambda model, x: model.mlp(x), found, x).shape == x.shape
