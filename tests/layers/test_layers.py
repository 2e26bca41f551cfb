"""The layers of overlap/layers/ against flax's own: values, placement of parameters and activations, refusals."""

from __future__ import annotations

import ast
import copy
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope
from flax import nnx
from jax.sharding import PartitionSpec as P

import overlap
from overlap import layers
from tests.layers.layer_cases import (
    AXES,
    BETWEEN,
    EXPLICIT,
    EXPLICIT_FIRST,
    INSIDE,
    KINDS,
    WHOLE,
    Block,
    draw,
    make_mesh,
    numbers,
    put,
    same,
    spread,
)


def spec_of(x: jax.Array) -> P:
    return x.sharding.spec  # pyright: ignore[reportAttributeAccessIssue]


@KINDS
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["rows sharded", "rows whole"])
def test_linear_layers(kind: Any, sequence_parallel: bool) -> None:
    """Both layers equal nnx.Linear with the same key, and arrays have the documented shardings."""
    options: Any = AXES | {"sequence_parallel": sequence_parallel}
    mesh, between = make_mesh(kind=kind), BETWEEN if sequence_parallel else WHOLE
    with jax.set_mesh(mesh):
        column = layers.ColumnParallelLinear(32, 64, rngs=nnx.Rngs(3), **options)
        row = layers.RowParallelLinear(64, 32, rngs=nnx.Rngs(4), **options)
        spread(column), spread(row)
        x = draw(0)
        inside = nnx.jit(lambda layer, x: layer(x))(column, put(x, mesh, between))
        out = nnx.jit(lambda layer, h, x: layer(h, x))(row, inside, put(x, mesh, between))
    assert spec_of(column.kernel[...]) == P("data", "tensor") and spec_of(row.kernel[...]) == P("tensor", "data")
    assert same(column.bias[...], P("tensor")) and same(row.bias[...], P(None))
    assert same(inside, INSIDE) and same(out, between)
    expected = x @ np.asarray(column.kernel[...]) + np.asarray(column.bias[...])
    np.testing.assert_allclose(inside, expected, atol=1e-4)
    np.testing.assert_allclose(out, expected @ np.asarray(row.kernel[...]) + np.asarray(row.bias[...]) + x, atol=1e-4)
    # Drawn as nnx.Linear draws them.
    np.testing.assert_array_equal(column.kernel[...], nnx.Linear(32, 64, rngs=nnx.Rngs(3)).kernel[...])


@pytest.mark.one_jax
@EXPLICIT_FIRST
def test_one_gather_for_several_products(kind: Any) -> None:
    """A gated MLP has one all-gather and one reduce-scatter in its program; QKV has one all-gather."""
    mesh = make_mesh(1, 4, kind)
    options: Any = {"axis": "tensor", "implementation": "xla", "rngs": nnx.Rngs(0)}
    with jax.set_mesh(mesh):
        mlp, qkv = layers.GatedMLP(32, 64, **options), layers.QKVProjection(32, 8, 4, **options)
        x = put(draw(0), mesh, P(None, "tensor", None))
        programs = [nnx.jit(lambda layer, x: layer(x)).lower(layer, x).as_text() for layer in (mlp, qkv)]
    counts = [
        tuple(text.count(f'"stablehlo.{name}"') for name in ("all_gather", "reduce_scatter", "all_reduce"))
        for text in programs
    ]
    assert counts == [(1, 1, 0), (1, 0, 0)]


@pytest.mark.one_jax
@EXPLICIT_FIRST
def test_heads(kind: Any) -> None:
    mesh = make_mesh(kind=kind)
    with jax.set_mesh(mesh):
        qkv = layers.QKVProjection(32, 8, 4, 16, rngs=nnx.Rngs(0), **AXES)
        x = draw(0)
        parts = nnx.jit(lambda layer, x: layer(x))(qkv, put(x, mesh, BETWEEN))
    for part, linear, heads in zip(parts, (qkv.query, qkv.key, qkv.value), (8, 4, 4), strict=True):
        assert same(part, P("data", None, "tensor", None))
        expected = (x @ np.asarray(linear.kernel[...])).reshape(4, 16, heads, 16)
        np.testing.assert_allclose(part, expected, atol=1e-4)


@pytest.mark.parametrize("norm", ["RMSNorm", pytest.param("LayerNorm", marks=pytest.mark.slow)])
@EXPLICIT_FIRST
def test_norms(norm: str, kind: Any) -> None:
    """Compares the values, and the gradient of the scale, which must be summed over the rows of all devices."""
    mesh, x, weight = make_mesh(kind=kind), draw(0), draw(1)

    def weighted(layer: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(layer(x) * weight)

    with jax.set_mesh(mesh):
        ours = getattr(layers, norm)(32, rngs=nnx.Rngs(0), **AXES)
        spread(ours)
        found = nnx.jit(nnx.grad(weighted, argnums=(0, 1)))(ours, put(x, mesh, BETWEEN), put(weight, mesh, BETWEEN))
        assert same(nnx.jit(lambda layer, x: layer(x))(ours, put(x, mesh, BETWEEN)), BETWEEN)
    theirs = getattr(nnx, norm)(32, rngs=nnx.Rngs(0))
    spread(theirs)
    expected = nnx.grad(weighted, argnums=(0, 1))(theirs, x, weight)
    assert same(found[0]["scale"][...], P(None))
    assert float(jnp.abs(expected[0]["scale"][...]).min()) > 1e-3
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.one_jax
@pytest.mark.slow
@EXPLICIT_FIRST
def test_one_device(kind: Any) -> None:
    """Along an axis of one device, nothing is communicated."""
    mesh = make_mesh(1, 1, kind)
    with jax.set_mesh(mesh):
        mlp, norm = layers.GatedMLP(32, 64, rngs=nnx.Rngs(0), **AXES), layers.RMSNorm(32, rngs=nnx.Rngs(0), **AXES)
        x = jnp.asarray(draw(0))
        run = nnx.jit(lambda mlp, norm, x: mlp(norm(x)))
        text = run.lower(mlp, norm, x).compile().as_text()
        out = run(mlp, norm, x)
    assert not [name for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all") if f" {name}(" in text]
    gate, up, down = (np.asarray(linear.kernel[...]) for linear in (mlp.gate, mlp.up, mlp.down))
    normed = np.asarray(nnx.RMSNorm(32, rngs=nnx.Rngs(0))(x))
    np.testing.assert_allclose(out, jax.nn.silu(normed @ gate) * (normed @ up) @ down, atol=1e-4)


@pytest.mark.one_jax
@EXPLICIT_FIRST
def test_decoding_with_the_trained_model(kind: Any) -> None:
    """One row of each sequence, with the same parameters."""
    mesh, x = make_mesh(kind=kind), draw(0, (4, 1, 32))
    with jax.set_mesh(mesh):
        mlp = layers.GatedMLP(32, 64, rngs=nnx.Rngs(0), **AXES)
        with pytest.raises(ValueError, match=r"rows .*=1 must be a multiple of the 4 devices.*sequence_parallel=False"):
            mlp(put(x, mesh, WHOLE))
        decoder = nnx.with_attributes(mlp, sequence_parallel=False)
        out = nnx.jit(lambda layer, x: layer(x))(decoder, put(x, mesh, WHOLE))
    assert mlp.gate.sequence_parallel and same(out, WHOLE)
    gate, up, down = (np.asarray(linear.kernel[...]) for linear in (mlp.gate, mlp.up, mlp.down))
    np.testing.assert_allclose(out, jax.nn.silu(x @ gate) * (x @ up) @ down, atol=1e-4)


@pytest.mark.one_jax
def test_a_mesh_of_its_own() -> None:
    """Without jax.set_mesh, the layer's mesh= applies to its parameters and products."""
    mesh, x = make_mesh(), draw(0)
    mlp, norm = (layer(rngs=nnx.Rngs(0), mesh=mesh, **AXES) for layer in (
        lambda **options: layers.GatedMLP(32, 64, **options), lambda **options: layers.RMSNorm(32, **options)
    ))  # fmt: skip
    out = nnx.jit(lambda mlp, norm, x: mlp(norm(x)))(mlp, norm, put(x, mesh, BETWEEN))
    assert same(out, BETWEEN) and spec_of(mlp.gate.kernel[...]) == P("data", "tensor")


@pytest.mark.one_jax
def test_a_residual_keeps_its_dtype() -> None:
    """A float32 residual beside a bf16 product is not rounded; a bf16 residual is added inside the product."""
    mesh, x = make_mesh(kind=EXPLICIT), draw(0)
    with jax.set_mesh(mesh):
        mlp = layers.GatedMLP(32, 64, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), **AXES)
        mlp.down.kernel.set_value(jnp.zeros_like(mlp.down.kernel[...]))
        out = nnx.jit(lambda mlp, x: mlp(x, residual=x))(mlp, put(x, mesh, BETWEEN))
        low = jax.eval_shape(lambda x: mlp(x, residual=x), jax.typeof(put(x.astype(jnp.bfloat16), mesh, BETWEEN)))
    np.testing.assert_array_equal(out, x)
    assert low.dtype == jnp.bfloat16


# --- Tools ------------------------------------------------------------------------------------------------------------

# Each gets a block and its input, and returns a block like it.
TOOLS: dict[str, Any] = {
    "tabulate": lambda block, x: nnx.tabulate(block, x, compute_flops=True) and block,
    "display": lambda block, x: treescope.render_to_html(block) and repr(block) and block,
    "split and merge": lambda block, x: nnx.merge(*nnx.split(block)),
    "eval_shape": lambda block, x: nnx.merge(
        nnx.split(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))[0], nnx.state(block)
    ),
    "paths": lambda block, x: jax.tree_util.tree_map_with_path(lambda path, x: x, block),
    "pickle": lambda block, x: pickle.loads(pickle.dumps(block)),
    "pickle of parts": lambda block, x: nnx.merge(*pickle.loads(pickle.dumps(nnx.split(block)))),
    "copy": lambda block, x: copy.deepcopy(block),
    "clone": lambda block, x: nnx.clone(block),
}


@pytest.fixture(scope="module")
def block() -> Block:
    with jax.set_mesh(make_mesh(kind=EXPLICIT)):
        return Block(nnx.Rngs(0))


@pytest.mark.one_jax
@pytest.mark.filterwarnings("ignore:The chararray class")  # Of numpy, when treescope lists its names.
@pytest.mark.parametrize("tool", TOOLS)
def test_tools_for_modules(tool: str, block: Block) -> None:
    """What flax, jax and treescope do to any module works on a model of the layers, and leaves their classes whole."""
    mesh = make_mesh(kind=EXPLICIT)
    with jax.set_mesh(mesh):
        x = put(draw(0), mesh, BETWEEN)
        found = TOOLS[tool](block, x)
        assert nnx.split(found)[0] == nnx.split(block)[0]
        jax.tree.map(np.testing.assert_array_equal, numbers(found), numbers(block))
        assert nnx.eval_shape(lambda block, x: block(x), block, x).shape == x.shape


# --- Refusals ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Any, str]] = {
    "no such axis": (
        lambda **o: layers.GatedMLP(32, 64, **o | {"axis": "model"}),
        "axis='model' is no axis of the mesh",
    ),
    "two uses of an axis": (
        lambda **o: layers.RMSNorm(32, rngs=o["rngs"], axis="data", batch_axis="data"),
        "RMSNorm: axis must be one mesh axis, other than fsdp_axis and batch_axis",
    ),
    "out_features": (
        lambda **o: layers.ColumnParallelLinear(32, 62, **o),
        "ColumnParallelLinear: out_features=62 must be a multiple of the 4 devices along mesh axis 'tensor': pad the",
    ),
    "in_features": (lambda **o: layers.RowParallelLinear(62, 32, **o), "in_features=62 must be a multiple of the 4"),
    "fsdp": (
        lambda **o: layers.ColumnParallelLinear(31, 64, **o),
        "in_features=31 .* 2 devices along mesh axis 'data'",
    ),
    "heads": (lambda **o: layers.QKVProjection(32, 6, 6, 8, **o), "num_heads=6 must be a multiple of the 4 devices"),
    "kv heads": (
        lambda **o: layers.QKVProjection(32, 8, 2, 8, **o),
        "num_kv_heads=2 .*repeat the heads of key and value",
    ),
    "groups": (lambda **o: layers.QKVProjection(32, 8, 3, 8, **o), "num_heads=8 must be a multiple of num_kv_heads=3"),
    "head_dim": (lambda **o: layers.QKVProjection(30, 8, **o), "give head_dim="),
    "output heads": (lambda **o: layers.OutputProjection(6, 8, 32, **o), "num_heads=6 must be a multiple of the 4"),
    "implementation": (
        lambda **o: layers.GatedMLP(32, 64, **o | {"implementation": "XLA"}),
        'must be "fused", "xla" or',
    ),
}


@pytest.mark.one_jax
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    build, message = REFUSED[case]
    with jax.set_mesh(make_mesh()), pytest.raises(ValueError, match=message):
        build(rngs=nnx.Rngs(0), **AXES)


def test_refused_activations() -> None:
    with pytest.raises(ValueError, match=r"must know the mesh \(`with mesh:` is not read\): build and call it"):
        layers.RMSNorm(32, rngs=nnx.Rngs(0), **AXES)
    mesh = make_mesh(kind=EXPLICIT)
    with jax.set_mesh(mesh):
        norm, mlp = layers.RMSNorm(32, rngs=nnx.Rngs(0), **AXES), layers.GatedMLP(32, 64, rngs=nnx.Rngs(0), **AXES)
        with pytest.raises(ValueError, match=r"RMSNorm: activations must be sharded .*tensor.*got .*jax.reshard\(x, "):
            norm(put(draw(0), mesh, INSIDE))
        # A replicated operand is split among the devices.
        assert same(norm(put(draw(0), mesh, WHOLE)), BETWEEN) and same(mlp(put(draw(0), mesh, WHOLE)), BETWEEN)
        with pytest.raises(ValueError, match="`lhs_sharding` must be as the type of `lhs` says"):
            mlp(put(draw(0), mesh, INSIDE))
        with pytest.raises(ValueError, match=r"must be \[..., rows, features\], got shape \(32,\)"):
            mlp(jnp.zeros(32))


# --- The package ------------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_flax_is_loaded_by_the_layers_alone(tmp_path: pathlib.Path, repository: pathlib.Path) -> None:
    (tmp_path / "flax").mkdir()
    (tmp_path / "flax" / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'flax'\")")
    program = (
        "import sys, overlap; overlap.matmul, overlap.sharded_matmul; assert 'flax' not in sys.modules\n"
        "try:\n    from overlap import layers\n"
        "except ImportError as error:\n    print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": f"{tmp_path}:{repository}", "JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "overlap.layers needs flax" in result.stdout and "pip install 'overlap[flax]'" in result.stdout


@pytest.mark.one_jax
def test_a_layer_is_short() -> None:
    """Each class has at most 60 lines of code, without docstrings and empty lines."""
    classes = 0
    for path in sorted((pathlib.Path(overlap.__file__).parent / "layers").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for part in ast.walk(node):
                    if isinstance(part, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(part):
                        part.body = part.body[1:] or [ast.Pass()]
                assert len(ast.unparse(node).splitlines()) <= 60, (path.name, node.name)
                classes += 1
    assert classes >= 9
