"""`sharded_matmul` in training: remat, scan, vmap, donation, export, manual axes, what is kept and communicated."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.kernels import target
from tests.layers.sharded_cases import assert_near, make_mesh, put

BATCH, SEQ, WIDTH, HIDDEN = 4, 8, 16, 32
AUTO, EXPLICIT = make_mesh(AxisType.Auto, data=2, tensor=2), make_mesh(data=2, tensor=2)
BETWEEN, INSIDE = P("data", "tensor", None), P("data", None, "tensor")
# The weights are sharded twice: FSDP over "data".
UP, DOWN = P("data", "tensor"), P("tensor", "data")


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) / np.sqrt(shape[-2])


def block(x, up, down, *, mesh=AUTO, **more):
    """Runs half a transformer block: column-parallel, then row-parallel with the residual."""
    auto = AxisType.Auto in mesh.axis_types
    of_up, of_down = (
        {"lhs_sharding": lhs, "rhs_sharding": rhs} if auto else {} for lhs, rhs in ((BETWEEN, UP), (INSIDE, DOWN))
    )
    hidden = overlap.sharded_matmul(x, up, out_sharding=INSIDE, mesh=mesh, activation=jnp.tanh, **of_up, **more)
    hidden = checkpoint_name(hidden, "hidden")
    return overlap.sharded_matmul(hidden, down, out_sharding=BETWEEN, mesh=mesh, addend=x, **of_down, **more)


def expected(x, ups, downs, residual=True):
    """The result of a stack of blocks, and the gradients of the sum of its squares, in NumPy."""
    x, ups, downs = (np.asarray(given, np.float32) for given in (x, ups, downs))
    shape, x, states = x.shape, x.reshape(-1, WIDTH), []
    ups, downs = (w if w.ndim == 3 else w[None] for w in (ups, downs))
    for up, down in zip(ups, downs):
        states.append((x, hidden := np.tanh(x @ up)))
        x = hidden @ down + residual * x
    d, of_weights = 2 * x, []
    for up, down, (before, hidden) in zip(ups[::-1], downs[::-1], states[::-1]):
        inner = d @ down.T * (1 - hidden**2)
        of_weights.append((before.T @ inner, hidden.T @ d))
        d = inner @ up.T + residual * d
    of_ups, of_downs = (np.stack(w[::-1]).squeeze() for w in zip(*of_weights))
    return x.reshape(shape), (d.reshape(shape), of_ups, of_downs)


def operands(layers=None, mesh=AUTO):
    leading = () if layers is None else (layers,)
    lead = (None,) * len(leading)
    return (
        put(mesh, draw(1, BATCH, SEQ, WIDTH), BETWEEN),
        put(mesh, draw(2, *leading, WIDTH, HIDDEN), P(*lead, *UP)),
        put(mesh, draw(3, *leading, HIDDEN, WIDTH), P(*lead, *DOWN)),
    )


def with_gradients(layer):
    def both(*given):
        def loss(*given):
            out = layer(*given)
            return (out**2).sum(), out

        (_, out), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*given)
        return out, gradients

    return jax.jit(both)


POLICIES: dict[str, Any] = {
    "names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=[],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "policy", ["names", *(pytest.param(x, marks=pytest.mark.slow) for x in ("nothing", "offload"))]
)
def test_scan_over_layers_with_remat(policy):
    given = operands(layers=3)
    layer = jax.checkpoint(block, policy=POLICIES[policy])

    def stack(x, ups, downs):
        return lax.scan(lambda x, weights: (layer(x, *weights), None), x, (ups, downs))[0]

    assert_near(with_gradients(stack)(*given), expected(*given), 1e-5)


def test_cotangents_of_the_weights_are_reduce_scattered():
    """Along "data", over which they are sharded."""
    given = operands()
    # In the form with kernels, whose gathers and sums are the library's own. (Of the plain form see tests/assembly.)
    fused = functools.partial(block, implementation="fused")
    given = [x.astype(jnp.bfloat16) for x in given]
    texts = [jax.jit(f).lower(*given).as_text().splitlines() for f in (fused, with_gradients(fused))]
    forward, both = (
        {
            "all_gather": sum("stablehlo.all_gather" in line and "bf16" in line for line in text),
            "reduce_scatter": sum("stablehlo.reduce_scatter" in line for line in text),
        }
        for text in texts
    )
    # Forward: gathers of two weights; the kernels gather the rows of x and sum the second product.
    assert forward == {"all_gather": 2, "reduce_scatter": 0}
    # Backward: both weights are gathered again, and their cotangents scattered.
    assert both == {"all_gather": 4, "reduce_scatter": 2}


@pytest.mark.one_jax
def test_masters_in_float32():
    """Weights are cast before they are gathered, and cotangents are returned in float32."""
    given = operands()

    def layer(x, up, down):
        return block(x.astype(jnp.bfloat16), up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)).astype(jnp.float32)

    out, found = with_gradients(layer)(*given)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.float32)}
    assert_near((out, found), expected(*given), 1e-2)
    dots = [line for line in jax.jit(layer).lower(*given).as_text().splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 2 and all("f32" not in line for line in dots)


@pytest.mark.parametrize(
    "mesh", [pytest.param(AUTO, marks=pytest.mark.slow, id="auto"), pytest.param(EXPLICIT, id="explicit")]
)
def test_vmap(mesh):
    x, up, down = operands(mesh=mesh)
    several = put(mesh, np.stack([np.asarray(x), -np.asarray(x)]), P(None, *BETWEEN))
    layer = jax.vmap(functools.partial(block, mesh=mesh), (0, None, None))
    with jax.set_mesh(mesh):
        assert_near(with_gradients(layer)(several, up, down), expected(several, up, down), 1e-5)
    if mesh is EXPLICIT:
        layer = jax.vmap(functools.partial(overlap.sharded_matmul, out_sharding=P(None, "tensor")), (0, None))
        with pytest.raises(
            NotImplementedError, match=r"`jax.vmap` over .*sharded, here over \('data',\): give that dim"
        ):
            jax.eval_shape(layer, x, put(EXPLICIT, np.asarray(up), P(None, "tensor")))


@pytest.mark.parametrize(("kind", "check_vma"), [(AxisType.Auto, True), (AxisType.Explicit, False)])
def test_inside_a_shard_map_over_other_axes(kind, check_vma):
    """The caller handles data parallelism, with a gather, and sums over the remaining axes."""
    mesh = EXPLICIT if kind == AxisType.Explicit else AUTO
    named = [
        dict(lhs_sharding=lhs, rhs_sharding=rhs) if kind == AxisType.Auto else {}
        for lhs, rhs in ((P(None, "tensor"), P(None, "tensor")), (P(None, None, "tensor"), P("tensor")))
    ]

    def inner(x, up, down):
        hidden = overlap.sharded_matmul(x, up, out_sharding=P(None, None, "tensor"), activation=jnp.tanh, **named[0])
        return overlap.sharded_matmul(hidden, down, out_sharding=P(), **named[1])

    layer = jax.shard_map(
        inner, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"}, check_vma=check_vma
    )
    specs = BETWEEN, P(None, "tensor"), P("tensor")
    given = [put(mesh, np.asarray(x), spec) for x, spec in zip(operands(), specs, strict=True)]
    with jax.set_mesh(mesh):
        assert_near(with_gradients(layer)(*given), expected(*given, residual=False), 1e-5)


def test_export(monkeypatch):
    """A machine without GPUs exports a program for GPUs. The export contains the kernels."""
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: target.Target("gpu", "NVIDIA H200", 132))
    shapes = ((2, 8192, 4096), BETWEEN), ((4096, 14336), UP)
    types = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=jax.NamedSharding(AUTO, spec)) for shape, spec in shapes
    ]
    layer = functools.partial(
        overlap.sharded_matmul, lhs_sharding=BETWEEN, rhs_sharding=UP, out_sharding=INSIDE, mesh=AUTO
    )
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(jax.jit(layer), platforms=["cuda"], disabled_checks=unchecked)(*types)
    assert exported.nr_devices == 4 and exported.mlir_module().count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("keep", [None, False, True])
def test_kernels_keep_gathered_weights_only_if_asked(keep):
    given = [x.astype(jnp.bfloat16) for x in operands()]
    fused = functools.partial(block, implementation="fused", keep_gathered=keep)
    lines = jax.jit(with_gradients(fused)).lower(*given).as_text().splitlines()
    assert sum("stablehlo.all_gather" in line and "bf16" in line for line in lines) == (2 if keep else 4)
