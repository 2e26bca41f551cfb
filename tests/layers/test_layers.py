"""The layers of overlap/layers/ against flax's on one device: values, gradients, places, tools, scan, checkpoints."""

from __future__ import annotations

import copy
import functools
import pathlib
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
    EXPLICIT_FIRST,
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
from tests.layers.sharded_cases import collectives

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
            compiled = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)).lower(state, x).compile()
            counts.append(collectives(compiled))
    # XLA for CPUs leaves a reduce-scatter as an all-reduce.
    assert counts == [{("f32", "all-gather"): 1, ("f32", "all-reduce"): 1}, {("f32", "all-gather"): 1}]


@pytest.mark.one_jax
def test_decoding_with_the_trained_model() -> None:
    """One row of each sequence, with the same parameters; and the mesh as a keyword, without jax.set_mesh."""
    mesh, x, options = make_mesh(2, 2), draw(0, (4, 1, 32)), {"rngs": nnx.Rngs(0), **AXES}
    mlp, norm = layers.GatedMLP(32, 64, mesh=mesh, **options), layers.RMSNorm(32, mesh=mesh, **options)
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


# --- In training ------------------------------------------------------------------------------------------------------

STACKED = {nnx.PARTITION_NAME: None}  # The dimension of the layers has no mesh axis.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.mlp = layers.RMSNorm(32, rngs=rngs, **AXES), layers.GatedMLP(32, 64, rngs=rngs, **AXES)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mlp(self.norm(x), x)


class Stack(nnx.Module):
    """Blocks with stacked parameters, run by one scan; the backward pass computes each block again."""

    def __init__(self, count: int, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=count)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=STACKED)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.blocks = make(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata=STACKED)
        @nnx.remat
        def run(block: Block, x: jax.Array) -> jax.Array:
            return block(x)

        return run(self.blocks, x)


@pytest.mark.slow
@EXPLICIT_FIRST
def test_scan_over_layers(kind: Any) -> None:
    """Compares one scan over stacked, rematerialized blocks with the same blocks run in turn on one device."""
    mesh, x = make_mesh(2, 2, kind), draw(1)
    with jax.set_mesh(mesh):
        stack = nnx.jit(lambda: Stack(2, nnx.Rngs(0)))()
        loss = nnx.jit(nnx.value_and_grad(lambda stack, x: jnp.mean(stack(x) ** 2)))
        value, grads = loss(stack, put(x, mesh, BETWEEN))
    kernel = stack.blocks.mlp.gate.kernel
    assert kernel[...].sharding.spec == P(None, "data", "tensor") == P(*kernel.get_metadata("out_sharding"))

    def plain(stacked: Any) -> jax.Array:
        out = x
        for i in range(2):
            norm, mlp = (jax.tree.map(lambda leaf, i=i: leaf[i], stacked[name]) for name in ("norm", "mlp"))
            normed = out * jax.lax.rsqrt(jnp.mean(out**2, -1, keepdims=True) + 1e-6) * norm["scale"]
            gate, up, down = (mlp[name]["kernel"] for name in ("gate", "up", "down"))
            out = jax.nn.silu(normed @ gate) * (normed @ up) @ down + out
        return jnp.mean(out**2)

    expected = jax.jit(jax.value_and_grad(plain))(numbers(stack)["blocks"])
    assert_near((value, nnx.to_pure_dict(grads)["blocks"]), expected, 1e-4)


def count_of(primitive: str, program: Any) -> int:
    """Counts how often a primitive is executed, including sub-programs."""
    program = getattr(program, "jaxpr", program)
    if not hasattr(program, "eqns"):
        return sum(count_of(primitive, part) for part in program) if isinstance(program, (list, tuple)) else 0
    return sum(
        (equation.primitive.name == primitive) + sum(count_of(primitive, value) for value in equation.params.values())
        for equation in program.eqns
    )


@pytest.mark.one_jax
def test_policies_of_checkpoint() -> None:
    """A policy can keep each product's result by the layer's name: the backward pass then does not compute it again."""
    mesh = make_mesh(1, 2)
    with jax.set_mesh(mesh):
        mlp = nnx.eval_shape(lambda: layers.GatedMLP(32, 64, implementation="xla", rngs=nnx.Rngs(0)))
        graph, state = nnx.split(mlp)
        x, policies = put(draw(1), mesh, P(None, "tensor", None)), jax.checkpoint_policies

        def forward(state: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(nnx.merge(graph, state)(x) ** 2)

        def products(policy: Any) -> int:
            return count_of("dot_general", jax.make_jaxpr(jax.grad(jax.checkpoint(forward, policy=policy)))(state, x))

        nothing, every = products(policies.nothing_saveable), products(policies.everything_saveable)
        # Gate and up are kept. Down is computed again, since the loss squares its result.
        assert products(policies.save_only_these_names("before_activation")) == nothing - 2 == every + 1
        assert products(policies.save_only_these_names("down")) == nothing - 1


@pytest.mark.one_jax
@pytest.mark.parametrize("written_by", ["plain", pytest.param("layers", marks=pytest.mark.slow)])
def test_checkpoints_are_interchangeable_with_flax(written_by: str, tmp_path: pathlib.Path) -> None:
    """By orbax, of which each device reads only its own part."""
    ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed (extra `examples`)")
    theirs = Plain(nnx.Rngs(1))
    with jax.set_mesh(make_mesh(2, 2, EXPLICIT)):
        ours = Every(nnx.Rngs(0), **AXES)
    writer, reader = (ours, theirs) if written_by == "layers" else (theirs, ours)
    spread(writer)
    shardings = jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(nnx.state(reader, nnx.Param)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.state(writer, nnx.Param))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), nnx.state(reader, nnx.Param)
    )
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(reader, checkpointer.restore(tmp_path / "checkpoint", wanted))
    assert jax.tree.map(lambda x: x.sharding, nnx.to_pure_dict(nnx.state(reader, nnx.Param))) == shardings
    jax.tree.map(np.testing.assert_array_equal, numbers(ours), numbers(theirs))
    assert len(jax.tree.leaves(numbers(ours))) == 17
