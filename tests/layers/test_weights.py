"""Weights by the names and layouts of Hugging Face's models: against the models' formulas, which read the tensors."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from overlap import layers
from tests.layers.router_cases import gpt_oss_activation, softmax, top
from tests.meshes import make_mesh

pytestmark = pytest.mark.one_jax
H, INNER, EXPERTS, K, DEVICES = 16, 24, 4, 2, 2
type Tensors = dict[str, np.ndarray]


def drawn(*shape: int) -> np.ndarray:
    return (np.random.default_rng().standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gpt_oss(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


# Of each format: its tensors, and the products of one expert by their rows [out, in] and biases, from the tensors.
def tensors_of(form: str) -> Tensors:
    if form == "gpt_oss":
        return {
            "router.weight": drawn(EXPERTS, H), "router.bias": drawn(EXPERTS),
            "experts.gate_up_proj": drawn(EXPERTS, H, 2 * INNER),
            "experts.gate_up_proj_bias": drawn(EXPERTS, 2 * INNER),
            "experts.down_proj": drawn(EXPERTS, INNER, H), "experts.down_proj_bias": drawn(EXPERTS, H),
        }  # fmt: skip
    router = {"gate.weight": drawn(EXPERTS, H)}
    if form == "fused":
        fused = {"experts.gate_up_proj": drawn(EXPERTS, 2 * INNER, H), "experts.down_proj": drawn(EXPERTS, H, INNER)}
        return router | fused
    names = ("w1", "w3", "w2") if form == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    shapes = (INNER, H), (INNER, H), (H, INNER)
    each = {f"experts.{e}.{name}.weight": drawn(*shape) for e in range(EXPERTS)
            for name, shape in zip(names, shapes, strict=True)}  # fmt: skip
    return router | each


def expert_of(form: str, of: Tensors, e: int, x: np.ndarray) -> np.ndarray:
    if form == "gpt_oss":
        both = x @ of["experts.gate_up_proj"][e] + of["experts.gate_up_proj_bias"][e]
        return gpt_oss(both[:, ::2], both[:, 1::2]) @ of["experts.down_proj"][e] + of["experts.down_proj_bias"][e]
    if form == "fused":
        both = x @ of["experts.gate_up_proj"][e].T
        return (silu(both[:, :INNER]) * both[:, INNER:]) @ of["experts.down_proj"][e].T
    names = ("w1", "w3", "w2") if form == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (of[f"experts.{e}.{name}.weight"].T for name in names)
    return (silu(x @ gate) * (x @ up)) @ down


def model(form: str, of: Tensors, x: np.ndarray) -> np.ndarray:
    of = {name: tensor.astype(np.float64) for name, tensor in of.items()}
    logits = x @ of["router.weight" if form == "gpt_oss" else "gate.weight"].T
    logits += of.get("router.bias", 0.0)
    ids = top(logits, K)
    gates = softmax(np.take_along_axis(logits, ids, -1))
    out = np.zeros_like(x)
    for e in range(EXPERTS):
        out += np.where(ids == e, gates, 0).sum(-1, keepdims=True) * expert_of(form, of, e, x)
    return out


def experts_layer(form: str, **options: Any) -> layers.ExpertMLP:
    more: dict[str, Any] = {}
    if form == "gpt_oss":
        more = {"use_bias": True, "router_bias": True, "activation": gpt_oss_activation}
    options = {"axis": "x", "rngs": nnx.Rngs(0)} | more | options
    return layers.ExpertMLP(H, INNER, EXPERTS, K, **options)


class Spy:
    """A tensor that counts how much is read of it at a time, and lies in a file, as far as its reader can see."""

    def __init__(self, tensor: np.ndarray):
        self._tensor = tensor
        self.most = 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, at: tuple[slice, ...]) -> np.ndarray:
        assert all(part.step in (None, 1) for part in at)
        self.most = max(self.most, self._tensor[at].size)
        return self._tensor[at]


@pytest.mark.parametrize("form", ["mixtral", "qwen3_moe", "fused", "gpt_oss"])
def test_experts(form: Any) -> None:
    """The layer computes what the model's formula says of the tensors, and gives the same tensors back."""
    of = tensors_of(form)
    mesh = make_mesh(x=DEVICES)
    spies = {f"h.0.{name}": Spy(tensor) for name, tensor in of.items()}
    x = drawn(1, 12, H)
    with jax.set_mesh(mesh):
        layer = nnx.jit(lambda: experts_layer(form))()
        placed = {path: leaf.sharding for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
        layers.load_weights({"h.0": layer}, spies, experts=form)
        out, *_ = nnx.jit(lambda layer, x: layer(x))(
            layer, jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, "x")))
        )
    assert {path: leaf.sharding for path, leaf in nnx.to_flat_state(nnx.state(layer, nnx.Param))} == placed
    right = model(form, of, x[0].astype(np.float64))
    assert np.linalg.norm(np.asarray(out)[0] - right) < 1e-5 * np.linalg.norm(right)
    # Experts are cut over devices, and a device reads its own.
    assert all(spy.most <= of[name[4:]].size // DEVICES for name, spy in spies.items()
               if "experts." in name and of[name[4:]].shape[0] == EXPERTS)  # fmt: skip
    saved = dict(layers.saved_weights({"h.0": layer}, experts=form))
    assert saved.keys() == spies.keys()
    for name, tensor in saved.items():
        assert tensor.flags["C_CONTIGUOUS"] and (tensor == of[name[4:]]).all(), name
    # A negative control: gate and up the other way round.
    swapped = dict(of)
    for name in of:
        other = name.replace("w1", "w3") if "w1" in name else name.replace("gate_proj", "up_proj")
        if other != name:
            swapped[name], swapped[other] = of[other], of[name]
        if "gate_up_proj" in name:
            swapped[name] = np.roll(of[name], 1 if form == "gpt_oss" else INNER, axis=1 if form == "fused" else -1)
    assert np.linalg.norm(np.asarray(out)[0] - model(form, swapped, x[0].astype(np.float64))) > 1e-2


def test_deepseek() -> None:
    """The bias of the choice, which is no parameter, and shared experts have names, too."""
    of = tensors_of("qwen3_moe") | {"gate.e_score_correction_bias": drawn(EXPERTS)}
    shapes = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
    of |= {f"shared_experts.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
    with jax.set_mesh(make_mesh(x=DEVICES)):
        layer = experts_layer("qwen3_moe", router=layers.SigmoidTopK(EXPERTS), shared_features=INNER)
        layers.load_weights({"mlp": layer}, {f"mlp.{name}": tensor for name, tensor in of.items()})
    saved = dict(layers.saved_weights({"mlp": layer}))
    assert len(saved) == len(of) and all((saved[f"mlp.{name}"] == tensor).all() for name, tensor in of.items())
    assert layer.shared is not None
    assert (np.asarray(layer.shared.up.kernel[...]) == of["shared_experts.up_proj.weight"].T).all()
    assert isinstance(layer.choose, layers.SigmoidTopK)
    assert (np.asarray(layer.choose.e_score_correction_bias[...]) == of["gate.e_score_correction_bias"]).all()


def dense() -> dict[str, nnx.Module]:
    rngs = nnx.Rngs(0)
    options = {"axis": "x", "rngs": nnx.Rngs(1)}
    return {
        "embed": nnx.Embed(32, H, rngs=rngs),
        "self_attn": layers.QKVProjection(H, 4, 2, head_dim=8, use_bias=True, **options),
        "self_attn.o_proj": layers.OutputProjection(4, 8, H, **options),
        "mlp": layers.GatedMLP(H, INNER, **options),
        "norm": layers.RMSNorm(H, **options),
        "ln": layers.LayerNorm(H, **options),
        "lm_head": nnx.Linear(H, 32, use_bias=False, rngs=rngs),
    }


SHAPES = {
    "embed.weight": (32, H), "norm.weight": (H,), "ln.weight": (H,), "ln.bias": (H,),
    "self_attn.q_proj.weight": (32, H), "self_attn.q_proj.bias": (32,), "self_attn.k_proj.weight": (16, H),
    "self_attn.k_proj.bias": (16,), "self_attn.v_proj.weight": (16, H), "self_attn.v_proj.bias": (16,),
    "self_attn.o_proj.weight": (H, 32), "mlp.gate_proj.weight": (INNER, H), "mlp.up_proj.weight": (INNER, H),
    "mlp.down_proj.weight": (H, INNER),
}  # fmt: skip


def test_dense_layers_with_tied_embeddings(tmp_path: pathlib.Path) -> None:
    """From two files and back, into layers whose weights were never drawn; the head has the embedding's tensor."""
    from safetensors.numpy import save_file

    of = {name: drawn(*shape) for name, shape in SHAPES.items()}
    names = sorted(of)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: of[name] for name in some}, tmp_path / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    mesh = make_mesh(x=DEVICES)
    tied = {"lm_head": "embed"}

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.parts = nnx.Dict({name.replace(".", "_"): layer for name, layer in dense().items()})

    with jax.set_mesh(mesh):
        made = nnx.merge(*nnx.get_abstract_model(Model, mesh))
        parts = {name: made.parts[name.replace(".", "_")] for name in dense()}
        with layers.open_checkpoint(tmp_path) as tensors:
            layers.load_weights(parts, tensors, tied=tied)
    saved = dict(layers.saved_weights(parts, tied=tied))
    assert saved.keys() == of.keys() and all((saved[name] == tensor).all() for name, tensor in of.items())
    assert (np.asarray(parts["lm_head"].kernel[...]) == of["embed.weight"].T).all()
    up = parts["mlp"].up.kernel[...]
    assert up.sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(None, "x")), 2)
    (tmp_path / "b.safetensors").unlink()
    message = "lacks b.safetensors, which model.safetensors.index.json names: download the whole"
    with pytest.raises(ValueError, match=message), layers.open_checkpoint(tmp_path):
        pass
    for folder, text, message in (
        (tmp_path / "nowhere", None, "must be a folder, got .*nowhere"),
        (tmp_path, "{}", r"must be JSON with a `weight_map`, got KeyError"),
        (tmp_path, "{", "got JSONDecodeError"),
    ):
        if text is not None:
            (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=message), layers.open_checkpoint(folder):
            pass
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "a.safetensors").write_bytes(b"no file of this kind")
    with pytest.raises(ValueError, match=r"a\.safetensors is no whole file"), layers.open_checkpoint(tmp_path):
        pass
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ValueError, match="has no"), layers.open_checkpoint(tmp_path):
        pass


WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "missing": ({"gate.weight": None}, {}, r"lack 'h.gate.weight', and have 'h.experts.0.down_proj.weight'"),
    "many missing": ({}, {"experts": "mixtral"}, r"lack 'h.experts.0.w1.weight'.* and 8 more.*experts='mixtral'"),
    "shape": (
        {"gate.weight": drawn(EXPERTS, H + 1)},
        {},
        r"'h.gate.weight'.* must have shape \(4, 16\).*got \(4, 17\)",
    ),
    "integers": ({"gate.weight": np.zeros((EXPERTS, H), np.int8)}, {}, "got int8: dequantize it"),
    "rounded": ({"gate.weight": np.zeros((EXPERTS, H))}, {}, "float64, which float32 does not hold exactly"),
    "format": ({}, {"experts": "llama"}, "`experts` must be one of 'mixtral', .*got 'llama'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_checkpoints(name: str) -> None:
    changes, options, message = WRONG[name]
    of = {f"h.{key}": value for key, value in (tensors_of("qwen3_moe") | changes).items() if value is not None}
    with jax.set_mesh(make_mesh(x=DEVICES)):
        layer = experts_layer("qwen3_moe")
        before = nnx.to_pure_dict(nnx.state(layer))
        with pytest.raises(ValueError, match=message):
            layers.load_weights({"h": layer}, of, **options)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), before, nnx.to_pure_dict(nnx.state(layer))))
        if name == "rounded":
            layers.load_weights({"h": layer}, of, rounds=True)
            assert not np.asarray(layer.router.kernel[...]).any()


def test_tensors_that_no_layer_takes() -> None:
    """They are named: without them the model is another one."""
    biased = tensors_of("gpt_oss")
    fifth = tensors_of("qwen3_moe") | {"experts.4.up_proj.weight": drawn(INNER, H)}
    chosen = tensors_of("qwen3_moe") | {"gate.e_score_correction_bias": drawn(EXPERTS)}
    with jax.set_mesh(make_mesh(x=DEVICES)):
        plain = {"router_bias": True, "activation": gpt_oss_activation, "use_bias": False}
        for form, of, options, left in (
            ("gpt_oss", biased, plain, "'h.experts.down_proj_bias', 'h.experts.gate_up_proj_bias'"),
            ("qwen3_moe", fifth, {}, "'h.experts.4.up_proj.weight'"),
            ("qwen3_moe", chosen, {}, "'h.gate.e_score_correction_bias'"),
        ):
            layer = experts_layer(form, **options)
            named = {f"h.{name}": tensor for name, tensor in of.items()} | {"other.weight": drawn(2)}
            with pytest.raises(ValueError, match=f"have {left}, which no layer takes: make"):
                layers.load_weights({"h": layer}, named, experts=form)
        attention = layers.QKVProjection(H, 4, 2, head_dim=8, axis="x", rngs=nnx.Rngs(0))
        of = {f"a.{name}_proj.weight": drawn(size, H) for name, size in (("q", 32), ("k", 16), ("v", 16))}
        layers.load_weights({"a": attention}, of | {"a.o_proj.weight": drawn(H, 32)})  # Of a layer that is not given.
        with pytest.raises(ValueError, match=r"have 'a\.q_proj\.bias'"):
            layers.load_weights({"a": attention}, of | {"a.q_proj.bias": drawn(32)})


def test_a_padded_head() -> None:
    """Its padding is zero and in no checkpoint, on any number of devices."""
    tensor = drawn(101, H)
    for devices in (1, 2, 4):
        with jax.set_mesh(make_mesh(x=devices)):
            head = layers.CrossEntropyHead(H, 101, axis="x", rngs=nnx.Rngs(0))
            layers.load_weights({"lm_head": head}, {"embed.weight": tensor}, tied={"lm_head": "embed"})
            kernel = np.asarray(head.kernel[...])
            assert kernel.shape == (H, 512) and (kernel[:, :101] == tensor.T).all() and not kernel[:, 101:].any()
            ((name, saved),) = layers.saved_weights({"lm_head": head})
            assert name == "lm_head.weight" and (saved == tensor).all()


def test_devices_with_padding_alone(tmp_path: pathlib.Path) -> None:
    """From a file, which refuses to read nothing at its end."""
    from safetensors.numpy import save_file

    tensor = drawn(100, H)
    save_file({"lm_head.weight": tensor}, tmp_path / "a.safetensors")
    with jax.set_mesh(make_mesh(x=4)), layers.open_checkpoint(tmp_path) as tensors:
        head = layers.CrossEntropyHead(H, 100, axis="x", rngs=nnx.Rngs(0))
        layers.load_weights({"lm_head": head}, tensors)
    kernel = np.asarray(head.kernel[...])
    assert (kernel[:, :100] == tensor.T).all() and not kernel[:, 100:].any()


def test_explicit_meshes() -> None:
    of = {f"h.{name}": tensor for name, tensor in tensors_of("mixtral").items()}
    explicit = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(explicit):
        layer = experts_layer("mixtral")
        layers.load_weights({"h": layer}, of, experts="mixtral")
        saved = dict(layers.saved_weights({"h": layer}, experts="mixtral"))
    assert saved.keys() == of.keys() and all((saved[name] == of[name]).all() for name in of)


def test_float8_in_files(tmp_path: pathlib.Path) -> None:
    from safetensors.numpy import save_file

    save_file({"h.weight": np.zeros((3, 2), jnp.float8_e4m3fn)}, tmp_path / "a.safetensors")
    linear = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    with layers.open_checkpoint(tmp_path) as tensors, pytest.raises(ValueError, match="type F8_E4M3: dequantize"):
        layers.load_weights({"h": linear}, tensors)


def test_wrong_arguments() -> None:
    linear = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
    abstract = nnx.eval_shape(lambda: nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0)))
    wrong: Any
    for wrong, message in (
        (lambda: layers.load_weights(linear, {}), "`layers` must be a mapping from prefixes to layers.*got Linear"),
        (lambda: layers.load_weights({}, {}), "at least one"),
        (lambda: layers.load_weights({"h": linear}, {}, tied="h"), "`tied` must be a mapping, got 'h'"),
        (lambda: layers.load_weights({"h": linear}, {}, rounds="yes"), "`rounds` must be True or False, got 'yes'"),
        (lambda: nnx.jit(lambda x: layers.load_weights({"h": x}, {}))(linear), "must not be traced"),
        (lambda: nnx.jit(lambda x: [*layers.saved_weights({"h": x})])(linear), "is a type or is traced"),
        (lambda: layers.load_weights({"h": abstract}, {}), r"types with shardings, and that for 'h\.weight' has none"),
        (lambda: [*layers.saved_weights({"h": abstract})], "is a type or is traced: load them first"),
        (lambda: layers.load_weights({"h": linear}, {"h.weight": [[1.0]]}), "'h.weight' .* must be an array, got list"),
        (lambda: layers.load_weights({"h": linear}, layers.open_checkpoint(".")), "`tensors` must be a mapping"),
        (lambda: layers.load_weights({"h": linear}, {}, tied={"g": "h"}), "`tied` must have prefixes.*got 'g'"),
        (lambda: [*layers.saved_weights({"h": linear}, tied={"g": "h"})], "`tied` must have prefixes.*got 'g'"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_wrong_layers() -> None:
    whole = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match="got Sequential for 'h', with weights of shape none: pass the layers of a model"
    ):
        layers.load_weights({"h": whole}, {})


def test_bfloat16() -> None:
    """A checkpoint in bfloat16 fits float32 weights, and weights in bfloat16 are saved as such."""
    tensor = drawn(3, 2).astype(jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        linear = nnx.Linear(2, 3, use_bias=False, param_dtype=dtype, rngs=nnx.Rngs(0))
        layers.load_weights({"h": linear}, {"h.weight": tensor})
        ((_, saved),) = layers.saved_weights({"h": linear})
        assert saved.dtype == dtype and (saved == tensor.astype(saved.dtype)).all()
