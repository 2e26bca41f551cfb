"""Checks what docs/sharded.md says about `custom_partitioning`. If a test fails, jax has changed: review the page."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, PartitionSpec as P
from overlap.sharded.parts import Product
from overlap.frame import sharded
from overlap.sharded import partitions
from overlap.sharded.plan import plan_of

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
plans = []

def product(inside):
    f = custom_partitioning(lambda x, w: jnp.einsum("bmk,kn->bmn", x, w))
    def partition(mesh, args, result):
        parts = [partitions.given("x", a.sharding, len(a.shape), mesh) for a in (*args, result)]
        plan = plan_of(*parts, dict(mesh.shape))
        plans.append(str(plan))
        spec = lambda parts: jax.NamedSharding(mesh, sharded.spec(parts))
        def of_parts(x, w):
            manual = mesh.abstract_mesh.update(axis_types=(AxisType.Manual,) * 2)
            with jax.sharding.use_abstract_mesh(manual):
                return inside(Product(plan, False, x.dtype, None, None, "xla", True), x, w)
        return mesh, of_parts, spec(plan.out), (spec(plan.lhs), spec(plan.rhs))
    f.def_partition(partition=partition, sharding_rule="b m k, k n -> b m n", reduction_factors=("k",))
    return f

def run(inside, lhs, rhs, out):
    lhs, rhs, out = (None if s is None else jax.NamedSharding(mesh, s) for s in (lhs, rhs, out))
    return jax.jit(product(inside), in_shardings=(lhs, rhs), out_shardings=out)(x, w)

def by_xla(product, x, w):
    return product.compute({"lhs": x, "rhs[0]": w})[0]

def by_callback(product, x, w):
    y = by_xla(product, x, w)
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(y.shape, y.dtype), y)

def fails(product, x, w):
    raise ValueError("nothing serves this")

def refused(call, words):
    try:
        call()
    except Exception as error:
        assert words in str(error), (words, error)
    else:
        raise AssertionError(words)

x, w = np.ones((8, 16, 32), np.float32), np.ones((32, 16), np.float32)
columns = P("data", "tensor"), P("data", "tensor")
"""
# The shardings reach the callback, and the operations run there with XLA. An open result gathers the weights.
WORKS = """
assert np.all(np.asarray(run(by_xla, *columns, P("data", None, "tensor"))) == 32)
assert np.all(np.asarray(run(by_xla, P("data", None, "tensor"), P("tensor"), P("data", "tensor"))) == 32)
out = run(by_xla, P("data", "tensor"), P(None, "tensor"), None)
assert out.sharding.spec == P("data", "tensor"), out.sharding
assert plans == ["`rhs` is gathered along 'data', then all_gather_lhs_matmul along 'tensor'",
                 "matmul_reduce_scatter along 'tensor'", "all_gather_rhs_matmul along 'tensor'"], plans
"""
LACKS = """
refused(lambda: run(fails, *columns, P('data')), "custom_partitioner")
refused(lambda: jax.grad(lambda x, w: product(by_xla)(x, w).sum())(x, w), "Differentiation rule for")
refused(lambda: jax.vmap(product(by_xla), (0, None))(x[None], w), "Batching rule for 'custom_partitioning'")
on_mesh = jax.device_put(x, jax.NamedSharding(mesh, P('data')))
refused(lambda: jax.export.export(jax.jit(product(by_xla)))(on_mesh, w), "serialization of host_callbacks is not yet")
"""
# A host callback inside `custom_partitioning` crashes. So no kernel can be emulated there.
CRASHES = "run(by_callback, *columns, P('data', None, 'tensor')).block_until_ready()"


@pytest.mark.parametrize(
    ("code", "status"), [(WORKS, 0), (LACKS, 0), (CRASHES, -11)], ids=["works", "lacks", "crashes"]
)
def test_custom_partitioning(code: str, status: int) -> None:
    command = [sys.executable, "-c", PROGRAM + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stderr
