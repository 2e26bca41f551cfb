"""`all_gather_rhs_matmul` with a transposed left operand, which includes the gradient of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests.ops.product_cases import normal, oracle_of
from tests.ops.rhs_cases import SMALL, call, fused, product, weights
from tests.ops.scatter_cases import assert_close
from tests.oracle import make_mesh, on_mesh

SIZES = [  # along, devices, m per device, shape of a shard of the weights, config
    ("k", 3, 200, (136, 264), overlap.Config(tile_n=192, stages=2, chunk_bytes=256, chunk_buffers=3)),
    ("k", 2, 8, (12, 8), SMALL),  # A shard has less than 16 bytes of each row.
    ("k", 2, 136, (72, 136), overlap.Config(tile_n=128, stages=2, stream_k=3)),
    ("n", 3, 200, (136, 72), SMALL),
    ("n", 2, 72, (40, 136), overlap.Config(tile_m=64, tile_n=128, stages=3)),
]


@pytest.mark.parametrize(("along", "devices", "m", "shard", "config"), SIZES)
def test_exact_on_integers(along, devices, m, shard, config):
    lhs, rhs = product(devices, along, m, shard)
    specs = P(None, "x"), weights(along)
    function = on_mesh(make_mesh(x=devices), fused(along, config, transpose_lhs=True), specs, P("x", None))
    with emulate(cores=3, seed=m, scheduler="pct"):
        result = function(np.asarray(lhs).T, rhs)
    np.testing.assert_array_equal(np.asarray(result, np.float32), oracle_of(lhs, rhs).astype(jnp.bfloat16))


def test_one_matrix_only():
    lhs, rhs = product(2, "k", 64, (64, 64))

    def layer(implementation, leading, around=lambda f: f):
        function = around(call("k", config=None if implementation is None else SMALL,
                               implementation=implementation, transpose_lhs=True))  # fmt: skip
        specs = P(*(None,) * leading, None, "x"), weights("k")
        return on_mesh(make_mesh(x=2), function, specs, P(*(None,) * leading, "x", None))

    several, transposed = np.stack([lhs, 2 * lhs]).swapaxes(1, 2), np.asarray(lhs).T
    expected = np.stack([oracle_of(lhs, rhs), 2 * oracle_of(lhs, rhs)]).astype(jnp.bfloat16)
    with emulate(cores=2) as run:
        one = layer("fused", 1)(transposed[None], rhs)
    assert run.counts["launches"] == 1
    np.testing.assert_array_equal(np.asarray(one, np.float32), expected[:1])
    with pytest.raises(NotImplementedError, match=r"one matrix as a transposed `lhs`, got leading dimensions \(2,\)"):
        layer("fused", 1)(several, rhs)
    mapped = lambda f: jax.vmap(f, in_axes=(0, None))  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"a transposed `lhs`, and `jax.vmap` maps over several"):
        layer("fused", 1, mapped)(several, rhs)
    for around in (lambda f: f, mapped):
        np.testing.assert_array_equal(np.asarray(layer(None, 1, around)(several, rhs), np.float32), expected)


# For `all_gather_lhs_matmul`: whether the weights are transposed, leading dimensions, further arguments, number of
# launches. The launches are the product, and the cotangent of the rows, beside which the rows travel once more.
GRADIENTS = [
    (False, (), {}, 2),
    (True, (3, 1), {"m_shard": 64, "check_vma": True}, 2),
    (False, (), {"sides": 2, "check_vma": True}, 2),
    (False, (), {"return_gathered": True}, 2),
    (False, (), {"lhs_scale": 0.5}, 1),
    (False, (), {"transport": "ring"}, 2),
]

# An argument that is not a keyword of the operation.
DEFAULTS = {"check_vma": False, "m_shard": 40, "sides": 1}


@pytest.mark.parametrize(("transposed", "lead", "how", "launches"), GRADIENTS)
def test_the_gradient_gathers_by_xla_only_where_no_kernel_does(transposed, lead, how, launches):
    mesh, options = make_mesh(x=3), dict(how)
    check_vma, rows_of_shard, sides = (options.pop(*default) for default in DEFAULTS.items())
    columns, rows = (P("x", None) if transposed else P(None, "x")), P(*(None,) * len(lead), "x", None)
    out_specs = P(*(None,) * len(lead), None, "x")
    x = normal(0, *lead, 3 * rows_of_shard, 64)
    w = [normal(1 + side, *((3 * 72, 64) if transposed else (64, 3 * 72))) for side in range(sides)]

    def gradients(**keywords):
        def layer(x, w):
            out = overlap.all_gather_lhs_matmul(x, w, "x", transpose_rhs=transposed, **options, **keywords)
            return sum(out[0] if options.get("return_gathered") else out)

        mapped = jax.shard_map(layer, mesh=mesh, in_specs=(rows, columns), out_specs=out_specs, check_vma=check_vma)

        def loss(*given):
            out = mapped(*given).astype(jnp.float32)
            return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32).reshape(out.shape))).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))

    function = gradients(implementation="fused", config=SMALL)
    with emulate(cores=2) as run:
        actual = jax.block_until_ready(function(x, w))
        by_xla = function.lower(x, w).as_text().count("stablehlo.all_gather")
    options.pop("transport", None)
    exact = gradients(implementation="xla")(*jax.tree.map(lambda a: a.astype(jnp.float32), (x, w)))
    assert_close(actual[1], exact[1])
    assert run.counts["launches"] == launches
    assert (by_xla > 0) == ("lhs_scale" in how or "transport" in how)
