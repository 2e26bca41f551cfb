"""Checks what docs/sharded.md says about `custom_partitioning`. If a test fails, jax has changed: review the page."""

import subprocess
import sys
import textwrap

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

x, w = np.ones((8, 16, 32), np.float32), np.ones((32, 16), np.float32)
columns = P("data", "tensor"), P("data", "tensor")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_what_works() -> None:
    """The shardings reach the callback, and the operations run there with XLA."""
    done = run("""
        assert np.all(np.asarray(run(by_xla, *columns, P("data", None, "tensor"))) == 32)
        assert plans == ["`rhs` is gathered along 'data', then all_gather_lhs_matmul along 'tensor'"], plans
        assert np.all(np.asarray(run(by_xla, P("data", None, "tensor"), P("tensor"), P("data", "tensor"))) == 32)
        assert plans[1] == "matmul_reduce_scatter along 'tensor'", plans
    """)
    assert done.returncode == 0, done.stderr


def test_an_open_result_gathers_the_weights() -> None:
    done = run("""
        out = run(by_xla, P("data", "tensor"), P(None, "tensor"), None)
        assert out.sharding.spec == P("data", "tensor"), out.sharding
        assert plans == ["all_gather_rhs_matmul along 'tensor'"], plans
    """)
    assert done.returncode == 0, done.stderr


def test_callbacks_inside_crash() -> None:
    """A host callback inside `custom_partitioning` crashes. So no kernel can be emulated there."""
    done = run("run(by_callback, *columns, P('data', None, 'tensor')).block_until_ready()")
    assert done.returncode == -11


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("run(fails, *columns, P('data'))", "JaxRuntimeError: INTERNAL: custom_partitioner"),
        ("jax.grad(lambda x: product(by_xla)(x, w).sum())(x)", "Differentiation rule for 'custom_partitioning'"),
        ("jax.vmap(product(by_xla), (0, None))(x[None], w)", "Batching rule for 'custom_partitioning'"),
        (
            "jax.export.export(jax.jit(product(by_xla)))(jax.device_put(x, jax.NamedSharding(mesh, P('data'))), w)",
            "serialization of host_callbacks is not yet implemented",
        ),
    ],
)
def test_what_it_lacks(code: str, message: str) -> None:
    done = run(code)
    assert done.returncode == 1
    assert message in done.stderr
