"""What the layers of overlap/layers/ refuse, at construction and at the call; messages name layer and argument."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from overlap import layers
from tests.layers.layer_cases import AXES, make_mesh

pytestmark = pytest.mark.one_jax


class OwnNorm(layers.RMSNorm):
    def __init__(self, **options: Any):
        super().__init__(32, **options)


BUILT: dict[str, tuple[Any, type[Exception], str]] = {
    "activation": (
        lambda **o: layers.GatedMLP(32, 64, activation="silu", **o),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"GatedMLP: activation must be an elementwise function, got 'silu': give jax\.nn\.silu$",
    ),
    "no dtype": (
        lambda **o: layers.GatedMLP(32, 64, dtype="bf16", **o),
        TypeError,
        r"GatedMLP\.gate: dtype must be a dtype, got 'bf16': give jnp\.bfloat16",
    ),
    "whole numbers": (
        lambda **o: layers.ColumnParallelLinear(32, 64, param_dtype=jnp.int32, **o),
        ValueError,
        r"ColumnParallelLinear: param_dtype must be a floating-point dtype, got int32: give jnp\.bfloat16",
    ),
    "dtype of a norm": (
        lambda **o: layers.LayerNorm(32, dtype=jnp.int32, **o),
        ValueError,
        "LayerNorm: dtype must be a floating-point dtype, got int32",
    ),
    "negative": (
        lambda **o: layers.ColumnParallelLinear(-48, 64, **o),
        ValueError,
        "ColumnParallelLinear: in_features must be at least 1, got -48: give a positive size",
    ),
    "no whole number": (
        lambda **o: layers.ColumnParallelLinear(48.0, 64, **o),  # pyright: ignore[reportArgumentType]
        TypeError,
        r"ColumnParallelLinear: in_features must be a whole number, got 48\.0: give 48$",
    ),
    "no heads": (
        lambda **o: layers.QKVProjection(32, 8, 0, **o),
        ValueError,
        "QKVProjection: num_kv_heads must be at least 1, got 0",
    ),
    "heads that do not share": (
        lambda **o: layers.QKVProjection(32, 8, 5, **o),
        ValueError,
        "QKVProjection: num_heads=8 must be a multiple of num_kv_heads=5: give num_kv_heads=4, for example$",
    ),
    "an axis of its own": (
        lambda **o: layers.RMSNorm(32, **o | {"axis": "data"}),
        ValueError,
        "RMSNorm: axis must be one mesh axis.*: name an axis that those two do not name$",
    ),
    "an axis that the mesh has not": (
        lambda **o: layers.RMSNorm(32, **o | {"axis": "model"}),
        ValueError,
        "RMSNorm: axis='model' is no axis of the mesh, which has .*: name one of those$",
    ),
    "an implementation that is none": (
        lambda **o: layers.RMSNorm(32, **o, implementation="cuda"),  # pyright: ignore[reportArgumentType]
        ValueError,
        "RMSNorm: implementation must be .*, got 'cuda': leave it out, or name one$",
    ),
    "few heads": (
        lambda **o: layers.QKVProjection(32, 2, 2, 7, **o),
        ValueError,
        "QKVProjection: num_heads=2 must be a multiple of the 4 devices along mesh axis 'tensor': shard along fewer",
    ),
    "another name for epsilon": (
        lambda **o: layers.RMSNorm(32, eps=1e-5, **o),
        TypeError,
        "^RMSNorm has no argument `eps`: did you mean `epsilon`",
    ),
    "a keyword of nnx.Linear": (
        lambda **o: layers.ColumnParallelLinear(32, 64, kernel_metadata={}, **o),
        TypeError,
        "^ColumnParallelLinear has no argument `kernel_metadata`: did you mean",
    ),
    "a keyword of no part": (
        lambda **o: layers.GatedMLP(32, 64, activaton=jax.nn.relu, **o),
        TypeError,
        "^GatedMLP has no argument `activaton`: did you mean `activation`",
    ),
    "a keyword of other attention": (
        lambda **o: layers.QKVProjection(32, 8, num_key_value_heads=4, **o),
        TypeError,
        "^QKVProjection has no argument `num_key_value_heads`: did you mean `num_kv_heads`",
    ),
    "no keys": (lambda **o: layers.OutputProjection(8, 8, 32), TypeError, "^OutputProjection needs `rngs`"),
    "no keys for a part": (lambda **o: layers.GatedMLP(32, 64), TypeError, "^GatedMLP needs `rngs`"),
    "too many by position": (
        lambda **o: layers.RowParallelLinear(64, 32, True, **o),  # pyright: ignore[reportCallIssue]
        TypeError,
        "^RowParallelLinear takes 2 arguments by position",
    ),
    "a user's norm": (
        lambda **o: OwnNorm(eps=1e-5, **o),
        TypeError,
        "^RMSNorm has no argument `eps`: did you mean `epsilon`",
    ),
    "a part": (
        lambda **o: layers.GatedMLP(32, 62, **o),
        ValueError,
        r"GatedMLP\.gate: out_features=62 must be a multiple of the 4 devices",
    ),
}


@pytest.mark.parametrize("case", BUILT)
def test_at_construction(case: str) -> None:
    build, kind, message = BUILT[case]
    with jax.set_mesh(make_mesh()), pytest.raises(kind, match=message):
        build(rngs=nnx.Rngs(0), **AXES)


def test_dot_general_at_construction() -> None:
    with pytest.raises(TypeError, match=r"ShardedDotGeneral: lhs_sharding must be a PartitionSpec .*, got 'd'"):
        layers.ShardedDotGeneral("d", "t", "x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match='ShardedDotGeneral: implementation must be "fused", "xla" or None, got'):
        layers.ShardedDotGeneral(out_sharding=P(), implementation="XLA")  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def model() -> dict[str, Any]:
    """Returns one instance of each layer."""
    with jax.set_mesh(make_mesh()):
        options: Any = {"rngs": nnx.Rngs(0), **AXES}
        mlp = layers.GatedMLP(32, 64, **options)
        return {
            "mlp": mlp,
            "fused": nnx.with_attributes(mlp, implementation="fused", raise_if_not_found=False),
            "row": layers.RowParallelLinear(64, 32, **options),
            "qkv": layers.QKVProjection(32, 8, 4, 8, **options),
            "out": layers.OutputProjection(8, 8, 32, **options),
            "norm": layers.RMSNorm(32, **options),
            "narrow": layers.RowParallelLinear(64, 4, implementation="fused", dtype=jnp.bfloat16, **options),
        }


X = jnp.zeros((2, 8, 32))
CALLED: dict[str, tuple[str, tuple[Any, ...], type[Exception], str]] = {
    "a list": ("mlp", ([[1.0]],), TypeError, r"GatedMLP: the input must be an array, got list: make it one by jnp\.as"),
    "a list of heads": ("out", ([[1.0]],), TypeError, "OutputProjection: the input must be an array, got list"),
    "features of an MLP": (
        "mlp",
        (jnp.zeros((2, 8, 48)),),
        ValueError,
        r"GatedMLP: the input must be \[\.\.\., rows, in_features\] with in_features=32, got shape \(2, 8, 48\): build",
    ),
    "features of heads": ("qkv", (jnp.zeros((2, 8, 48)),), ValueError, "QKVProjection: the input .*in_features=32"),
    "features of a row": ("row", (X,), ValueError, "RowParallelLinear: the input .*in_features=64, got"),
    "features of a norm": ("norm", (jnp.zeros((2, 8, 1)),), ValueError, "RMSNorm: the input .*num_features=32, got"),
    "residual": (
        "mlp",
        (X, jnp.zeros((2, 8, 1))),
        ValueError,
        r"GatedMLP: residual must have the shape of the result, \(2, 8, 32\), got \(2, 8, 1\): jnp\.broadcast_to",
    ),
    "residual of a row": ("row", (jnp.zeros((2, 8, 64)), jnp.zeros(32)), ValueError, "RowParallelLinear: residual"),
    "a single row": (
        "mlp",
        (jnp.zeros(32),),
        ValueError,
        r"GatedMLP: activations must be .*: give a single row as x\[None\]$",
    ),
    "a residual that is a list": ("mlp", (X, [0.0]), TypeError, "GatedMLP: residual must be an array, got list"),
    "batch": (
        "mlp",
        (jnp.zeros((3, 8, 32)),),
        ValueError,
        r"GatedMLP\.gate: batch \(the first dimension\)=3 must be a multiple of the 2 devices",
    ),
    "batch of a row": ("row", (jnp.zeros((3, 8, 64)),), ValueError, "RowParallelLinear: batch .*=3"),
    "float32 fused": (
        "fused",
        (X,),
        NotImplementedError,
        r"^GatedMLP: the fused kernel multiplies 16-bit and 8-bit operands, got float32: .* dtype=jnp\.bfloat16",
    ),
    "a width that the kernel cannot serve": (
        "narrow",
        (jnp.zeros((2, 8, 64)),),
        NotImplementedError,
        "^RowParallelLinear: .*: pad n to a multiple of 8",
    ),
    "heads together": (
        "out",
        (jnp.zeros((2, 8, 64)),),
        ValueError,
        r"OutputProjection: the input must be \[.*\] with \(num_heads, head_dim\)=\(8, 8\), .*shape \(2, 8, 64\): "
        r"reshape\(\*x\.shape\[:-1\], 8, 8\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLED)
def test_at_the_call(case: str, model: dict[str, Any]) -> None:
    name, arguments, kind, message = CALLED[case]
    with jax.set_mesh(make_mesh()), pytest.raises(kind, match=message):
        model[name](*arguments)
