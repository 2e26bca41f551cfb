"""What the layers of overlap/layers/ refuse, at construction and at the call: the type, layer, argument and way out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap import layers
from tests.layers.layer_cases import AXES, BETWEEN, EXPLICIT, INSIDE, WHOLE, draw, make_mesh, put, same

pytestmark = pytest.mark.one_jax


Column, Row = layers.ColumnParallelLinear, layers.RowParallelLinear
MLP, QKV, Out, Norm = layers.GatedMLP, layers.QKVProjection, layers.OutputProjection, layers.RMSNorm
NO_KEYS = {"rngs": None}
# A class, its arguments, the exception and its message. The layers have 4 devices along "tensor" and 2 along "data".
BUILT: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (MLP, (32, 64), {"activation": "silu"}, TypeError, r"^GatedMLP: activation .*, got 'silu': give jax\.nn\.silu$"),
    (MLP, (32, 64), {"dtype": "bf16"}, TypeError, r"^GatedMLP\.gate: dtype .*, got 'bf16': give jnp\.bfloat16"),
    (Column, (32, 64), {"param_dtype": jnp.int32}, ValueError, "^ColumnP.*: param_dtype .*, got int32: give jnp"),
    (layers.LayerNorm, (32,), {"dtype": jnp.int32}, ValueError, "^LayerNorm: dtype must be .*, got int32"),
    (Column, (-48, 64), {}, ValueError, "in_features must be at least 1, got -48: give a positive size"),
    (Column, (48.0, 64), {}, TypeError, r"in_features must be a whole number, got 48\.0: give 48$"),
    (QKV, (32, 8, 0), {}, ValueError, "^QKVProjection: num_kv_heads must be at least 1, got 0"),
    (QKV, (32, 8, 5), {}, ValueError, "num_heads=8 .* multiple of num_kv_heads=5: give num_kv_heads=4, for example$"),
    (QKV, (32, 2, 2, 7), {}, ValueError, "num_heads=2 .* multiple of the 4 devices .* 'tensor': shard along fewer"),
    (QKV, (32, 8, 2, 8), {}, ValueError, "num_kv_heads=2 .* the 4 devices.*repeat the heads of key and value"),
    (QKV, (30, 8), {}, ValueError, "in_features=30 is no multiple of num_heads=8: give head_dim="),
    (QKV, (32, 8), {"num_key_value_heads": 4}, TypeError, "^QKVP.* `num_key_value_heads`: did you mean `num_kv_heads`"),
    (Out, (6, 8, 32), {}, ValueError, "^OutputProjection: num_heads=6 must be a multiple of the 4 devices"),
    (Norm, (32,), {"axis": "data"}, ValueError, "^RMSNorm: axis must be one mesh axis.*: name an axis that those"),
    (Norm, (32,), {"axis": "data", "fsdp_axis": None}, ValueError, "other than fsdp_axis and batch_axis, got"),
    (Norm, (32,), {"axis": "model"}, ValueError, "^RMSNorm: axis='model' is no axis of the mesh, which .*: name one"),
    (Norm, (32,), {"batch_axis": "rows"}, ValueError, "^RMSNorm: batch_axis='rows' is no axis of the mesh, which "),
    (MLP, (32, 64), {"bias_init": 0.0}, TypeError, r"^GatedMLP: bias_init must be a function, got 0\.0: give jax"),
    (Norm, (32,), {"implementation": "cuda"}, ValueError, "^RMSNorm: implementation must .*, got 'cuda': leave it out"),
    (Norm, (32,), {"eps": 1e-5}, TypeError, "^RMSNorm has no argument `eps`: did you mean `epsilon`"),
    (MLP, (32, 64), {"activaton": abs}, TypeError, "^GatedMLP has no argument `activaton`: did you mean `activation`"),
    (MLP, (32, 64), {"keep_gathered": "no"}, TypeError, "^GatedMLP.*: keep_gathered must be True or False, got 'no'"),
    (Norm, (32,), {"sequence_parallel": "no"}, TypeError, "^RMSNorm: sequence_parallel must be True or .*, got 'no'"),
    (MLP, (32, 64), {"use_bias": 1}, TypeError, r"^GatedMLP\.gate: use_bias must be True or False, got 1"),
    (Out, (8, 8, 32), NO_KEYS, TypeError, "^OutputProjection needs `rngs`"),
    (MLP, (32, 64), NO_KEYS, TypeError, "^GatedMLP needs `rngs`"),
    (Row, (64, 32, True), {}, TypeError, "^RowParallelLinear takes 2 arguments by position"),
    (MLP, (32, 62), {}, ValueError, r"^GatedMLP\.gate: out_features=62 must be a multiple of the 4 devices"),
    (Column, (32, 62), {}, ValueError, "out_features=62 must .* 4 devices along mesh axis 'tensor': pad the features"),
    (Column, (31, 64), {}, ValueError, "in_features=31 .* 2 devices along mesh axis 'data'"),
    (Row, (62, 32), {}, ValueError, "in_features=62 must be a multiple of the 4"),
    (Row, (64, 31), {}, ValueError, "out_features=31 .* 2 devices along mesh axis 'data'"),
]


def test_at_construction() -> None:
    for build, arguments, changed, kind, message in BUILT:
        options = {"rngs": nnx.Rngs(0), **AXES, **changed}
        given = {name: x for name, x in options.items() if x is not None or name != "rngs"}
        with jax.set_mesh(make_mesh()), pytest.raises(kind, match=message):
            build(*arguments, **given)
    with pytest.raises(ValueError, match=r"must know the mesh \(`with mesh:` is not read\): build and call it"):
        layers.RMSNorm(32, rngs=nnx.Rngs(0), **AXES)
    with pytest.raises(TypeError, match=r"ShardedDotGeneral: lhs_sharding must be a PartitionSpec .*, got 'd'"):
        layers.ShardedDotGeneral("d", "t", "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match='ShardedDotGeneral: implementation must be "fused", "xla" or None, got'):
        layers.ShardedDotGeneral(out_sharding=P(), implementation="XLA")  # pyright: ignore[reportArgumentType]


x = functools.partial(jnp.zeros, dtype=jnp.float32)
CALLED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("mlp", ([[1.0]],), TypeError, r"^GatedMLP: the input must be an array, got list: make it one by jnp\.as"),
    ("mlp", (x((2, 8, 48)),), ValueError,
     r"^GatedMLP: the input must be \[\.\.\., rows, in_features\] with in_features=32, got shape \(2, 8, 48\): build"),
    ("row", (x((2, 8, 32)),), ValueError, "^RowParallelLinear: the input .*in_features=64, got"),
    ("mlp", (x((2, 8, 32)), x((2, 8, 1))), ValueError,
     r"^GatedMLP: residual must have the shape of the result, \(2, 8, 32\), got \(2, 8, 1\): jnp\.broadcast_to"),
    ("mlp", (x(32),), ValueError, r"^GatedMLP: .*\[..., rows, features\], got shape \(32,\): .* as x\[None\]$"),
    ("mlp", (x((2, 8, 32)), [0.0]), TypeError, "^GatedMLP: residual must be an array, got list"),
    ("mlp", (x((3, 8, 32)),), ValueError, r"^GatedMLP\.gate: batch \(the first dimension\)=3 .* the 2 devices"),
    ("norm", (x((2, 6, 32)),), ValueError, "^RMSNorm: rows .*=6 must be a multiple of the 4 devices"),
    ("fused", (x((2, 8, 32)),), NotImplementedError,
     r"^GatedMLP: the fused kernel multiplies 16-bit and 8-bit operands, got float32: .* dtype=jnp\.bfloat16"),
    ("narrow", (x((2, 8, 64)),), NotImplementedError, "^RowParallelLinear: .*: pad n to a multiple of 8"),
    ("out", (x((2, 8, 64)),), ValueError,
     r"^OutputProjection: the input .*\(num_heads, head_dim\)=\(8, 8\), .*\(2, 8, 64\): reshape\(\*x\.shape\[:-1\], 8"),
]  # fmt: skip


def test_at_the_call() -> None:
    def call_all() -> None:
        options: Any = {"rngs": nnx.Rngs(0), **AXES}
        mlp = layers.GatedMLP(32, 64, **options)
        model = {
            "mlp": mlp,
            "fused": nnx.with_attributes(mlp, implementation="fused", raise_if_not_found=False),
            "row": layers.RowParallelLinear(64, 32, **options),
            "out": layers.OutputProjection(8, 8, 32, **options),
            "norm": layers.RMSNorm(32, **options),
            "narrow": layers.RowParallelLinear(64, 4, implementation="fused", dtype=jnp.bfloat16, **options),
        }
        for name, arguments, kind, message in CALLED:
            with pytest.raises(kind, match=message):
                model[name](*arguments)

    with jax.set_mesh(make_mesh()):
        nnx.eval_shape(call_all)  # Draws no parameters.


def test_on_another_mesh() -> None:
    """Each layer says which axis the mesh lacks, and that it takes global arrays."""
    one = Mesh(jax.devices()[:1], ("x",))
    for build in (
        functools.partial(Norm, 32),
        functools.partial(MLP, 32, 64),
        functools.partial(layers.ExpertMLP, 32, 64, 8, 2),
    ):
        with jax.set_mesh(make_mesh()):
            made = nnx.eval_shape(lambda build=build: build(rngs=nnx.Rngs(0), **AXES))
        call = lambda x, made=made: made(x)  # noqa: E731
        with jax.set_mesh(one), pytest.raises(ValueError, match=r": axis='tensor' is no axis of the mesh, .*'x': 1"):
            jax.eval_shape(call, x((2, 8, 32)))

        def built(build: Any = build) -> None:
            build(rngs=nnx.Rngs(0), **AXES)

        inside = jax.shard_map(built, mesh=make_mesh(), in_specs=(), out_specs=None)
        with pytest.raises(ValueError, match=r": axis='tensor' must not be manual, .*: a layer takes global arrays"):
            jax.eval_shape(inside)


def test_activations_that_are_sharded_otherwise() -> None:
    mesh = make_mesh(2, 2, EXPLICIT)
    with jax.set_mesh(mesh):
        norm, mlp = layers.RMSNorm(32, rngs=nnx.Rngs(0), **AXES), layers.GatedMLP(32, 64, rngs=nnx.Rngs(0), **AXES)
        with pytest.raises(ValueError, match=r"RMSNorm: activations must be sharded .*tensor.*got .*jax.reshard\(x, "):
            norm(put(draw(0), mesh, INSIDE))
        with pytest.raises(ValueError, match="`lhs_sharding` must be as the type of `lhs` says"):
            mlp(put(draw(0), mesh, INSIDE))
        mask = put(np.ones((2, 8), bool), mesh, P("tensor", "data"))
        with pytest.raises(ValueError, match=r"^ExpertMLP: the mask must be sharded .*got P\('tensor', 'data'\)"):
            jax.eval_shape(
                lambda x, mask: layers.ExpertMLP(32, 64, 8, 2, rngs=nnx.Rngs(0), **AXES)(x, mask=mask),
                draw(0, (2, 8, 32)), mask,
            )  # fmt: skip
        # A replicated operand is split among the devices.
        assert same(norm(put(draw(0), mesh, WHOLE)), BETWEEN) and same(mlp(put(draw(0), mesh, WHOLE)), BETWEEN)
