"""`sharded_matmul` in training: remat, scan, vmap, donation, export, manual axes, names in profiles."""

import functools
import re
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
AUTO, EXPLICIT = make_mesh(AxisType.Auto, data=2, tensor=4), make_mesh(data=2, tensor=4)
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


def plain(x, up, down):
    return jnp.tanh(jnp.matmul(x, up, precision="highest")) @ down + x


def stack(block, x, ups, downs):
    return lax.scan(lambda x, weights: (block(x, *weights), None), x, (ups, downs))[0]


def operands(layers=None, mesh=AUTO):
    leading = () if layers is None else (layers,)
    lead = (None,) * len(leading)
    return (
        put(mesh, draw(1, BATCH, SEQ, WIDTH), BETWEEN),
        put(mesh, draw(2, *leading, WIDTH, HIDDEN), P(*lead, *UP)),
        put(mesh, draw(3, *leading, HIDDEN, WIDTH), P(*lead, *DOWN)),
    )


def gradients(layer, given):
    return jax.jit(jax.grad(lambda *given: (layer(*given) ** 2).sum(), (0, 1, 2)))(*given)


def bare(given):
    return [jnp.asarray(np.asarray(x)) for x in given]


POLICIES: dict[str, Any] = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["hidden"], names_which_can_be_offloaded=[],
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip


POLICIES["names"] = jax.checkpoint_policies.save_only_these_names("hidden")


@pytest.mark.parametrize(
    "policy", ["names", *(pytest.param(x, marks=pytest.mark.slow) for x in ("nothing", "dots", "offload", None))]
)
def test_scan_over_layers_with_remat(policy):
    given, layer = operands(layers=3), block
    if policy is not None:
        layer = jax.checkpoint(layer, policy=POLICIES[policy])
    expected = gradients(functools.partial(stack, plain), bare(given))
    assert_near(gradients(functools.partial(stack, layer), given), expected)


def collectives(layer, given):
    """Counts how often each collective occurs in a program."""
    text = jax.jit(layer).lower(*given).as_text()
    return {name: text.count(f"stablehlo.{name}") for name in ("all_gather", "reduce_scatter", "all_reduce")}


def test_gathers_of_the_weights_are_not_kept():
    """The kept values have no more bytes than the operands and the hidden activations, unless more is asked for."""
    x, up, down = operands()

    def kept(**more):
        # The backward function holds the kept values: a part of each of the 8 devices, stacked.
        back = jax.eval_shape(lambda *given: jax.vjp(functools.partial(block, **more), *given)[1], x, up, down)
        return {leaf.shape for leaf in jax.tree.leaves(back)}

    gathered = {(8 * WIDTH, HIDDEN // 4), (8 * HIDDEN // 4, WIDTH)}
    assert not gathered & kept()
    assert gathered <= kept(keep_gathered=True)


def test_cotangents_of_the_weights_are_reduce_scattered():
    """Along "data", over which they are sharded. Only replicated weights have their cotangents summed."""
    given = operands()
    forward, both = (collectives(f, given) for f in (block, lambda *given: gradients(block, given)))
    # Forward: gathers of two weights and of the rows of x, and the sum of the second product.
    assert forward == {"all_gather": 3, "reduce_scatter": 1, "all_reduce": 0}
    assert both["reduce_scatter"] >= forward["reduce_scatter"] + 2 and both["all_reduce"] == 0


@pytest.mark.one_jax
def test_masters_in_float32():
    """Weights are cast before they are gathered, and cotangents are returned in float32."""
    given = operands()

    def layer(x, up, down):
        return block(x.astype(jnp.bfloat16), up.astype(jnp.bfloat16), down.astype(jnp.bfloat16)).astype(jnp.float32)

    found = gradients(layer, given)
    assert {x.dtype for x in found} == {jnp.dtype(jnp.float32)}
    text = jax.jit(layer).lower(*given).as_text()
    gathers = [line for line in text.splitlines() if re.match(r"\s*}\) : \(tensor<.*x(bf16|f32)>\) -> ", line)]
    assert gathers and all("bf16" in line for line in gathers)

    exact = gradients(plain, bare(given))

    def rounded(x, up, down):
        x, up, down = (y.astype(jnp.bfloat16) for y in (x, up, down))
        return (jnp.tanh(x @ up) @ down + x).astype(jnp.float32)

    for a, b, c in zip(found, gradients(rounded, bare(given)), exact, strict=True):
        assert np.linalg.norm(np.asarray(a) - c) <= 2 * np.linalg.norm(np.asarray(b) - c)


@pytest.mark.parametrize(
    "kind", [pytest.param(AUTO, marks=pytest.mark.slow, id="auto"), pytest.param(EXPLICIT, id="explicit")]
)
def test_vmap(kind):
    x, up, down = operands(mesh=kind)
    several = put(kind, np.stack([np.asarray(x), -np.asarray(x)]), P(None, *BETWEEN))
    layer = jax.vmap(functools.partial(block, mesh=kind), (0, None, None))
    with jax.set_mesh(kind):
        assert_near(jax.jit(layer)(several, up, down), jax.vmap(plain, (0, None, None))(*bare((several, up, down))))
        assert_near(
            gradients(layer, (several, up, down)),
            gradients(jax.vmap(plain, (0, None, None)), bare((several, up, down))),
        )


def test_vmap_over_a_dimension_that_is_sharded():
    x, up, _ = operands(mesh=EXPLICIT)
    layer = functools.partial(overlap.sharded_matmul, out_sharding=P(None, "tensor"))
    with pytest.raises(NotImplementedError, match=r"`jax.vmap` over .*sharded, here over \('data',\): give that dim"):
        jax.eval_shape(jax.vmap(layer, (0, None)), x, put(EXPLICIT, np.asarray(up), P(None, "tensor")))


@pytest.mark.parametrize(
    ("kind", "check_vma"),
    [
        (AxisType.Auto, True),
        (AxisType.Explicit, False),
        pytest.param(AxisType.Auto, False, marks=pytest.mark.slow),
        pytest.param(AxisType.Explicit, True, marks=pytest.mark.slow),
    ],
)
def test_inside_a_shard_map_over_other_axes(kind, check_vma):
    """The caller handles data parallelism, with a gather, and sums over the remaining axes."""
    mesh = make_mesh(kind, data=2, tensor=4)
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
    without_residual = lambda x, up, down: plain(x, up, down) - x  # noqa: E731
    with jax.set_mesh(mesh):
        assert_near(jax.jit(layer)(*given), without_residual(*bare(given)))
        assert_near(gradients(layer, given), gradients(without_residual, bare(given)))


def test_axes_that_are_manual_already():
    layer = lambda x, w: overlap.sharded_matmul(  # noqa: E731
        x, w, lhs_sharding=P("data"), rhs_sharding=P(), out_sharding=P("data")
    )
    mapped = jax.shard_map(layer, mesh=AUTO, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    with pytest.raises(ValueError, match=r"`lhs_sharding` must not name an axis that is manual here, got 'data'"):
        jax.eval_shape(mapped, *operands()[:2])


@pytest.mark.one_jax
def test_donation():
    """The result takes the memory of a donated residual."""
    x, up, down = operands()
    out = jax.jit(block, donate_argnums=0)(x, up, down)
    assert x.is_deleted()
    assert_near(out, plain(*bare(operands())))


@pytest.mark.one_jax
def test_names_in_profiles():
    """The names of the operations, within the caller's own scopes, in both passes."""

    def step(*given):
        with jax.named_scope("decoder_7"):
            return jax.grad(lambda *given: (block(*given) ** 2).sum(), (0, 1, 2))(*given)

    text = jax.jit(step).lower(*operands()).compile().as_text()
    names = set(re.findall(r'op_name="([^"]*)"', text))
    for operation in ("all_gather_lhs_matmul", "matmul_reduce_scatter"):
        for direction in ("jvp", "transpose"):
            pattern = rf"decoder_7/{direction}\(.*sharded_matmul\.{operation}\b"
            assert any(re.search(pattern, name) for name in names), (pattern, names)


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
    assert exported.nr_devices == 8 and exported.mlir_module().count("@mosaic_gpu_v2") == 1
