"""Equal calls are traced once per process and lowered once per module; no other call gets their kernel."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.collectives.rows.mlp import expert_mlp
from overlap.emulation import emulate
from overlap.frame import primitive
from overlap.kernels.product_kernel import ProductKernel
from overlap.kernels.target import Target
from overlap.primitives import marks
from tests import oracle
from tests.choice import tuning_cases
from tests.choice.tuning_cases import H200, no_tables  # noqa: F401
from tests.ops.product_cases import normal

SMALL = overlap.Config(tile_m=64, tile_n=128, stages=2)
LAYERS, SPECS = 2, (P("x", None), P(None, None, "x"), P(None, "x", None))


@pytest.fixture
def traced(monkeypatch):
    """The kernels that are traced, each by its name, configuration, layouts and types."""
    found, launch = [], ProductKernel.launch

    def recorded(self, inputs, out_types, body_of):
        types = [(x.shape, x.dtype.name) for x in jax.tree.leaves((inputs, out_types))]
        found.append((self.name, self.config, self.types.layouts, *types))
        return launch(self, inputs, out_types, body_of)

    monkeypatch.setattr(ProductKernel, "launch", recorded)
    return found


@pytest.fixture
def hopper(monkeypatch):
    """Kernels are for the device in this list."""
    devices = [H200]
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: devices[0])
    return devices


def layer(x, up, down):
    rows = overlap.all_gather_lhs_matmul(x, up, "x", config=SMALL, implementation="fused")
    return x + overlap.matmul_reduce_scatter(rows, down, "x", config=SMALL, implementation="fused")


def in_a_row(x, ups, downs):
    for index in range(LAYERS):
        x = layer(x, ups[index], downs[index])
    return x


def scan(x, ups, downs, layer=layer):
    return lax.scan(lambda x, weights: (layer(x, *weights), None), x, (ups, downs))[0]


def trace(function, out_specs=SPECS[0], mesh=None, check_vma=False):
    specs = dict(mesh=mesh or oracle.make_mesh(x=2), in_specs=SPECS, out_specs=out_specs)
    shapes = (256, 256), (LAYERS, 256, 768), (LAYERS, 768, 256)
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(jax.shard_map(function, **specs, check_vma=check_vma)).trace(*types)


def gradient(form):
    return trace(jax.grad(lambda *given: jnp.square(form(*given).astype(jnp.float32)).sum(), (0, 1, 2)), SPECS)


def text_of_gradient():
    return gradient(in_a_row).lower(lowering_platforms=("cuda",)).as_text()


def text_of_experts():
    """A layer of experts with its gradients, by kernels. jax's persistent cache finds a program by this text."""

    def loss(tokens, weights, gates, ids):
        routing = overlap.route(ids, 4, "x", gates=gates)
        silu = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731
        y = expert_mlp(tokens, weights, routing, "x", activation=silu, implementation="fused")
        return jnp.square(y.astype(jnp.float32)).sum()

    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    weights = {"gate": bf16((4, 256, 512)), "up": bf16((4, 256, 512)), "down": bf16((4, 512, 256))}
    gates, ids = (jax.ShapeDtypeStruct((512, 2), dtype) for dtype in (jnp.float32, jnp.int32))
    specs = dict(mesh=oracle.make_mesh(x=2), in_specs=P("x"), out_specs=P("x"))
    traced = jax.jit(jax.shard_map(jax.grad(loss, (0, 1, 2)), **specs, check_vma=False)).trace(
        bf16((512, 256)), weights, gates, ids
    )
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_layers_share_their_kernels(traced, hopper):
    trace(in_a_row)
    assert len(traced) == 2
    for form in (in_a_row, scan, functools.partial(scan, layer=jax.checkpoint(layer))):
        gradient(form)
    # Each product has one kernel, in the second pass of a checkpoint too.
    assert len(traced) == len(set(traced)) >= 4
    before = len(traced)
    trace(lambda x, *weights: jax.vmap(in_a_row, (0, None, None))(jnp.stack([x, x]), *weights)[0])
    assert len(traced) == len(set(traced)) == before + 2


@pytest.mark.one_jax
def test_a_module_has_each_kernel_once_in_any_process(hopper, repository):
    """This process has lowered other kernels before, the other one has not, and it lowers these in another order."""
    trace(in_a_row, mesh=oracle.make_mesh(x=4)).lower(lowering_platforms=("cuda",))
    program = """
from tests import conftest
from tests.ops import test_compiled_once as t
conftest.use_cpu_devices()
t.dispatch.target = lambda mesh=None: t.H200
for text in t.text_of_experts(), t.text_of_gradient():
    print(t.hashlib.sha256(text.encode()).hexdigest())"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=repository, stdout=subprocess.PIPE, text=True) as other:
        text = text_of_gradient()
        texts = text_of_experts(), text
        assert other.communicate(timeout=100)[0].split() == [hashlib.sha256(x.encode()).hexdigest() for x in texts]
    hashes = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)
    assert len(hashes) == len(set(hashes)) == text.count("func.func private @overlap_operation")
    assert text.count("call @overlap_operation") == LAYERS * len(hashes)


def product(x, config=None, **keywords):
    return overlap.matmul(x, x, config=config, implementation="fused", **keywords)


def test_what_matters_is_part_of_the_key(traced, hopper, no_tables):  # noqa: F811
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)

    def news(**keywords):
        """How many kernels are traced for two equal calls."""
        traced.clear()
        jax.eval_shape(lambda x: product(product(x, **keywords), **keywords), x)
        return len(traced)

    assert [news(), news()] == [1, 0]
    assert [news(config=SMALL), news(config=SMALL)] == [1, 0]
    with jax.enable_x64(True):
        assert news() == 1
    assert news() == 0
    assert [news(activation=lambda y: y * 0.0), news(activation=lambda y: y * -0.0)] == [1, 1]
    # A table that is written later, a recording, and the device.
    better = overlap.Config(tile_m=64, tile_n=128, stages=3)
    tuning_cases.write(tuning_cases.entry(tuning_cases.problem("256x256x256"), better).to_json())
    assert [news(), news()] == [1, 0]
    with marks.recording(16) as recording:
        assert news() == len(recording.kernels) == 2
    hopper[0] = Target("gpu", "NVIDIA B200", 148)
    assert [news(), news()] == [1, 0]


def test_meshes_and_types_of_operands_are_part_of_the_key(traced, hopper):
    for count, keywords in enumerate(({}, {"check_vma": True}, {"mesh": oracle.make_mesh(data=2, x=2)}), 1):
        trace(in_a_row, **keywords)
        assert len(traced) == 2 * count


def test_what_was_traced_in_one_place_runs_in_another():
    """First inside a scan in a gradient, on tracers; then on arrays, where it is compiled once."""
    x, call = 0.1 * normal(0, 64, 64), functools.partial(product, config=SMALL)

    def loss(x):
        return lax.scan(lambda y, _: (call(y), None), x, length=2)[0].astype(jnp.float32).sum()

    with emulate(cores=2):
        jax.make_jaxpr(jax.grad(loss))(x)
        compiled = primitive._compiled._cache_size()
        with jax.checking_leaks():
            results = call(x), call(x), jax.jit(call)(x)
        assert primitive._compiled._cache_size() == compiled + 1
    assert all((result == results[0]).all() for result in results)
    assert oracle.distance(results[0], (x @ x).astype(jnp.float32)) < 1e-2
