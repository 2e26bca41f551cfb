"""The layers in training: scan, remat with policies, gradient accumulation, donation, bf16, export, profiles."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from tests.layers.layer_cases import (
    AXES,
    BETWEEN,
    EXPLICIT_FIRST,
    Block,
    PlainBlock,
    draw,
    loss,
    make_mesh,
    numbers,
    put,
)

STACKED = {nnx.PARTITION_NAME: None}  # The dimension of the layers has no mesh axis.


class Stack(nnx.Module):
    """Blocks with stacked parameters, run by one scan; the backward pass computes each block again."""

    def __init__(self, count: int, rngs: nnx.Rngs, **options: Any):
        @nnx.split_rngs(splits=count)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata=STACKED)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs, **options)

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
    mesh, x, target = make_mesh(kind=kind), draw(1), draw(2)
    with jax.set_mesh(mesh):
        stack = Stack(2, nnx.Rngs(0))
        value, grads = nnx.jit(nnx.value_and_grad(loss))(stack, put(x, mesh, BETWEEN), put(target, mesh, BETWEEN))
    kernel = stack.blocks.mlp.gate.kernel
    assert kernel[...].sharding.spec == P(None, "data", "tensor") == P(*kernel.get_metadata("out_sharding"))
    assert jax.typeof(grads["blocks"]["mlp"]["gate"]["kernel"][...]).shape == (2, 32, 64)

    # The same parameters in blocks of flax's own layers, one after the other.
    graph, _ = nnx.split(PlainBlock(nnx.Rngs(0)))

    def plain(stacked: Any) -> jax.Array:
        out, _ = jax.lax.scan(lambda x, block: (nnx.merge(graph, nnx.State(block))(x), None), x, stacked)
        return jnp.mean((out - target) ** 2)

    expected, expected_grads = jax.jit(jax.value_and_grad(plain))(numbers(stack)["blocks"])
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    found = jax.device_get(nnx.to_pure_dict(grads))["blocks"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), found, expected_grads)


def count_of(primitive: str, program: Any) -> int:
    """Counts how often a primitive is executed, including sub-programs."""
    program = getattr(program, "jaxpr", program)
    if not hasattr(program, "eqns"):
        return sum(count_of(primitive, part) for part in program) if isinstance(program, (list, tuple)) else 0
    return sum(
        (equation.primitive.name == primitive) + sum(count_of(primitive, value) for value in equation.params.values())
        for equation in program.eqns
    )


@pytest.mark.slow
def test_policies_of_checkpoint() -> None:
    """A policy can keep each product's result by the layer's name: the backward pass then does not compute it again."""
    mesh = make_mesh(1, 4)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(layers.GatedMLP(32, 64, implementation="xla", rngs=nnx.Rngs(0)))
        x = put(draw(1), mesh, P(None, "tensor", None))

        def forward(state: Any, x: jax.Array) -> jax.Array:
            return jnp.sum(nnx.merge(graph, state)(x) ** 2)

        counts, grads = {}, {}
        policies = jax.checkpoint_policies
        for name, policy in {
            "nothing": policies.nothing_saveable,
            "by name": policies.save_only_these_names("before_activation"),
            "all": policies.everything_saveable,
        }.items():
            grad = jax.grad(jax.checkpoint(forward, policy=policy))
            program = jax.make_jaxpr(grad)(state, x)
            counts[name] = count_of("dot_general", program)
            if name != "nothing":
                grads[name] = jax.device_get(jax.jit(grad)(state, x))
    # Gate and up are kept. Down is computed again, since the loss squares its result.
    assert counts["nothing"] - counts["by name"] == 2 and counts["by name"] - counts["all"] == 1, counts
    jax.tree.map(np.testing.assert_array_equal, grads["by name"], grads["all"])


def steps(block: Any, x: jax.Array, target: jax.Array, *, parts: int, count: int = 3) -> tuple[list[float], str]:
    """Returns the losses of some Adam steps (gradients are accumulated over `parts` parts), and the compiled step."""
    optimizer = nnx.Optimizer(block, optax.adamw(3e-3), wrt=nnx.Param)

    def step(block: Any, optimizer: nnx.Optimizer, x: jax.Array, target: jax.Array) -> jax.Array:
        graph, state = nnx.split(block)

        def add(sums: Any, part: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            found = jax.value_and_grad(lambda state: loss(nnx.merge(graph, state), *part))(state)
            return jax.tree.map(jnp.add, sums, found), None

        zero = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, state)
        (value, grads), _ = jax.lax.scan(add, zero, (x, target))
        optimizer.update(block, jax.tree.map(lambda g: g / parts, grads))
        return value / parts

    jitted = nnx.jit(step, donate_argnums=(0, 1))
    text = jitted.lower(block, optimizer, x, target).compile().as_text()
    return [float(jitted(block, optimizer, x, target)) for _ in range(count)], text


@pytest.mark.slow
@EXPLICIT_FIRST
def test_training_steps(kind: Any) -> None:
    """Training in bf16 (f32 masters, accumulated gradients, donated state) agrees with training on one device."""
    mesh, x, target = make_mesh(kind=kind), draw(1, (2, 4, 16, 32)), draw(2, (2, 4, 16, 32))
    with jax.set_mesh(mesh):
        block = Block(nnx.Rngs(0), dtype=jnp.bfloat16)
        donated = block.mlp.gate.kernel.get_value()
        spec = P(None, *BETWEEN)
        losses, text = steps(block, put(x, mesh, spec), put(target, mesh, spec), parts=2)
    # Profiles show the HLO's metadata, which names layer and product, forward and backward.
    names = " ".join(set(re.findall(r'op_name="([^"]*)"', text)))
    for name in ("RMSNorm", "QKVProjection", "OutputProjection", "LayerNorm", "GatedMLP"):
        assert f"/jvp({name})/" in names and f"/transpose(jvp({name}))/" in names
    for name in ("gate_up/sharded_matmul.all_gather_lhs_matmul", "down/sharded_matmul.matmul_reduce_scatter"):
        assert f"/jvp(GatedMLP)/{name}" in names
    assert donated.is_deleted() and "input_output_alias" in text
    assert block.mlp.gate.kernel[...].dtype == jnp.float32
    assert block.mlp.gate.kernel[...].sharding.spec == P("data", "tensor")
    plain = PlainBlock(nnx.Rngs(0), dtype=jnp.bfloat16)  # Both models draw the same parameters.
    expected, _ = steps(plain, x, target, parts=2)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert losses[2] < losses[0] * 0.9


def test_export() -> None:
    """Gradients are lowered for CPU and GPU in one export, and run after loading."""
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        graph, state = nnx.split(layers.GatedMLP(32, 64, implementation="xla", rngs=nnx.Rngs(0), **AXES))
        leaves, tree = jax.tree.flatten(state)
        x = put(draw(1), mesh, BETWEEN)

        @jax.jit
        def grads(leaves: Any, x: jax.Array) -> Any:
            def forward(leaves: Any) -> jax.Array:
                return jnp.sum(nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x) ** 2)

            return jax.grad(forward)(leaves)

        exported = jax.export.export(grads, platforms=("cpu", "cuda"))(leaves, x)
        assert exported.nr_devices == 8 and exported.platforms == ("cpu", "cuda")
        for a, b in zip(jax.jit(exported.call)(leaves, x), grads(leaves, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
