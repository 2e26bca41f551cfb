"""`layers.ShardedDotGeneral` as the `dot_general=` of flax's own layers, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from tests.layers.layer_cases import BETWEEN, EXPLICIT, EXPLICIT_FIRST, INSIDE, draw, make_mesh, put, same
from tests.layers.sharded_cases import collectives


@EXPLICIT_FIRST
def test_dot_general_of_nnx_linear(kind: Any) -> None:
    mesh, x = make_mesh(kind=kind), draw(0)
    dot = layers.ShardedDotGeneral(BETWEEN, P("data", "tensor"), INSIDE, implementation="xla")
    with jax.set_mesh(mesh):
        linear = nnx.Linear(
            32, 64, dot_general=dot, use_bias=False, rngs=nnx.Rngs(0),
            kernel_metadata={"out_sharding": P("data", "tensor")},
        )  # fmt: skip
        compiled = nnx.jit(lambda layer, x: layer(x)).lower(linear, put(x, mesh, BETWEEN)).compile()
        out = nnx.jit(lambda layer, x: layer(x))(linear, put(x, mesh, BETWEEN))
        # The arguments of the call take precedence.
        whole = nnx.jit(lambda layer, x: layer(x, out_sharding=INSIDE))(linear, put(x, mesh, BETWEEN))
        lying = put(np.asarray(linear.kernel[...]).T, mesh, P("tensor", "data"))
        transposed = dataclasses.replace(dot, rhs_sharding=P("tensor", "data"))(
            put(x, mesh, BETWEEN), lying, (((2,), (1,)), ((), ()))
        )
    assert collectives(compiled) == {("f32", "all-gather"): 2}  # The rows of x, and the kernel along "data".
    assert same(out, INSIDE) and same(whole, INSIDE) and same(transposed, INSIDE)
    np.testing.assert_allclose(transposed, out, atol=1e-4)
    np.testing.assert_allclose(out, x @ np.asarray(linear.kernel[...]), atol=1e-4)


@pytest.mark.one_jax
def test_dot_general_of_nnx_einsum() -> None:
    """Also with heads on both sides, and as linen's and nnx's layers over several dimensions give the numbers."""
    mesh, x = make_mesh(kind=EXPLICIT), draw(0)
    dot = layers.ShardedDotGeneral(BETWEEN, P("data", "tensor"), INSIDE, implementation="xla")
    back = layers.ShardedDotGeneral(INSIDE, P("tensor"), BETWEEN, implementation="xla")
    heads, mixed = draw(1, (32, 8, 4)), draw(2, (8, 4, 6, 2))
    with jax.set_mesh(mesh):
        inside = jnp.einsum("bsf,fhd->bshd", put(x, mesh, BETWEEN), heads, _dot_general=dot)
        out = jnp.einsum("bshd,hdef->bsef", inside, mixed, _dot_general=back)
    assert same(inside, INSIDE) and same(out, BETWEEN)
    np.testing.assert_allclose(out, np.tensordot(np.tensordot(x, heads, 1), mixed, 2), rtol=1e-3, atol=1e-3)


@pytest.mark.one_jax
def test_what_dot_general_refuses() -> None:
    dot, x, w = layers.ShardedDotGeneral(out_sharding=P()), jnp.zeros((2, 8, 16)), jnp.zeros((16, 4))
    no_batch, heads = ((), ()), jnp.zeros((8, 16, 4))
    for rhs, *contracted in (
        (w, ((1,), (0,)), no_batch),
        (w, ((2,), (0,)), ((0,), (0,))),
        (heads, ((1, 2), (1, 0)), no_batch),  # In another order.
        (heads, ((2,), (1,)), no_batch),  # Between others.
        (w, ((), ()), no_batch),
        (jnp.zeros((2, 8, 16)), ((0, 1, 2), (0, 1, 2)), no_batch),
    ):
        with pytest.raises(
            NotImplementedError, match="contracts the last dimensions of lhs with the first or the last"
        ):
            dot(x, rhs, contracted)
    with pytest.raises(NotImplementedError, match=r"default precision, got Precision.HIGHEST"):
        dot(x, w, (((2,), (0,)), ((), ())), precision=jax.lax.Precision.HIGHEST)
    with pytest.raises(ValueError, match="must know how its result is sharded"):
        layers.ShardedDotGeneral()(x, w, (((2,), (0,)), ((), ())))
    assert hash(dot) == hash(layers.ShardedDotGeneral(out_sharding=P()))  # nnx.jit compares static attributes.
