"""The layers in training: scan over stacked layers, policies of `jax.checkpoint`, export, checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from tests.layers.layer_cases import (
    AXES,
    BETWEEN,
    EXPLICIT,
    EXPLICIT_FIRST,
    Every,
    Plain,
    assert_near,
    draw,
    make_mesh,
    numbers,
    put,
    spread,
)

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

        def products(policy: Any) -> int:
            def forward(state: Any, x: jax.Array) -> jax.Array:
                return jnp.sum(nnx.merge(graph, state)(x) ** 2)

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
