"""Loads and saves the weights of layers by the names and layouts of Hugging Face's checkpoints.

A checkpoint is a mapping from names to tensors of which parts can be read: NumPy arrays, or the files of
`open_checkpoint`. Each device reads its own part of one weight after the other.

    layer                        names below the layer's prefix
    a linear layer               weight [out, in], bias
    GatedMLP                     gate_proj, up_proj and down_proj, each as a linear layer
    QKVProjection                q_proj, k_proj and v_proj, likewise
    RMSNorm, LayerNorm           weight, bias
    nnx.Embed                    weight [entries, features]
    ExpertMLP                    those of a format (`FORMATS`); shared_experts, as a GatedMLP, if it has shared features

Read in the sources of transformers 5.23: on disk Mixtral and Qwen3-MoE have a tensor for each expert, in memory one for
all, in which gate and up lie side by side; gpt-oss interleaves their columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from overlap.layers.attention import QKVProjection
from overlap.layers.experts import ExpertKernel, ExpertMLP
from overlap.layers.heads import CrossEntropyHead
from overlap.layers.mlp import GatedMLP

# Stands in a name for the number of an expert: each has a tensor.
_EXPERT = "{expert}"
# A tensor of a checkpoint: `shape` or `get_shape()`, and parts by slices.
type Tensor = Any
type Format = Literal["mixtral", "qwen3_moe", "fused", "gpt_oss"]
_MOST_NAMES = 4


@dataclasses.dataclass(frozen=True)
class _Experts:
    """The names of an expert layer's weights. Of biases, `_bias` follows the name in place of `.weight`.

    Attributes:
      router: of the router's linear layer.
      names: of gate, up and down.
      transposed: whether the last two dimensions are [out, in].
      interleaved: whether gate and up, if they have one name, lie in every second column, and not side by side.
    """

    router: str
    names: tuple[str, str, str]
    transposed: bool = True
    interleaved: bool = False


_FUSED = ("experts.gate_up_proj", "experts.gate_up_proj", "experts.down_proj")
_EACH = f"experts.{_EXPERT}."
FORMATS: Mapping[str, _Experts] = {
    "mixtral": _Experts("gate", (f"{_EACH}w1.weight", f"{_EACH}w3.weight", f"{_EACH}w2.weight")),
    "qwen3_moe": _Experts("gate", (f"{_EACH}gate_proj.weight", f"{_EACH}up_proj.weight", f"{_EACH}down_proj.weight")),
    "fused": _Experts("gate", _FUSED),
    "gpt_oss": _Experts("router", _FUSED, transposed=False, interleaved=True),
}


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A parameter, and where it lies in a checkpoint.

    Attributes:
      variable: the parameter.
      name: of its tensor; with `_EXPERT` there is one for each index of the first dimension.
      transposed: whether the last two dimensions of the tensor are the other way round.
      half: 0 or 1 if the tensor has this parameter and another one along the last dimension; else None.
      interleaved: whether these two lie in every second column.
      columns: how many entries of its last dimension a checkpoint has, if the others are padding, which is zero.
    """

    variable: nnx.Variable[Any]
    name: str
    transposed: bool = False
    half: int | None = None
    interleaved: bool = False
    columns: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter, without padding."""
        *others, last = self.variable.get_value().shape
        return (*others, last if self.columns is None else self.columns)

    @property
    def names(self) -> list[str]:
        if _EXPERT not in self.name:
            return [self.name]
        return [self.name.replace(_EXPERT, str(expert)) for expert in range(self.shape[0])]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        shape = self.shape[1:] if _EXPERT in self.name else self.shape
        shape = shape if self.half is None else (*shape[:-1], 2 * shape[-1])
        return self.turned(shape)

    def turned(self, dimensions: Sequence[Any]) -> tuple[Any, ...]:
        """Sizes or slices of a parameter's dimensions in the order of a tensor's, or the other way round."""
        return (*dimensions[:-2], dimensions[-1], dimensions[-2]) if self.transposed else tuple(dimensions)

    def read(self, tensors: Mapping[str, Tensor], index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the parameter."""
        whole = self.variable.get_value().shape
        at = [slice(*part.indices(size)[:2]) for part, size in zip(index, whole, strict=True)]
        if _EXPERT in self.name:
            return np.stack([self._read(tensors[self.names[e]], at[1:]) for e in range(at[0].start, at[0].stop)])
        *others, last = at
        size = self.shape[-1]
        if last.stop <= size:
            return self._read(tensors[self.name], at)
        padded = np.zeros([part.stop - part.start for part in at], np.float32)
        if last.start < size:  # Files refuse to read nothing at their end.
            found = self._read(tensors[self.name], [*others, slice(last.start, size)])
            padded = padded.astype(found.dtype)
            padded[..., : size - last.start] = found
        return padded

    def _read(self, tensor: Tensor, at: list[slice]) -> np.ndarray:
        """Returns a part of the parameter, of one expert if each has a tensor."""
        *others, last = at
        if self.half is None:
            columns = last
        elif self.interleaved:  # Of both parameters, since files are read without strides.
            columns = slice(2 * last.start, 2 * last.stop)
        else:
            first = self.half * self.shape[-1]
            columns = slice(first + last.start, first + last.stop)
        value = np.asarray(tensor[self.turned([*others, columns])])
        value = value.swapaxes(-1, -2) if self.transposed else value
        return value[..., self.half :: 2] if self.half is not None and self.interleaved else value

    def write(self, value: np.ndarray, into: np.ndarray) -> None:
        """Stores the parameter, of one expert if each has a tensor, into a tensor."""
        into = into.swapaxes(-1, -2) if self.transposed else into
        value = value[..., : self.columns]
        if self.half is not None:
            size = self.shape[-1]
            columns = slice(self.half, None, 2) if self.interleaved else slice(self.half * size, (self.half + 1) * size)
            into = into[..., columns]
        into[...] = value


def load_weights(
    layers: Mapping[str, nnx.Module],
    tensors: Mapping[str, Tensor],
    *,
    experts: Format = "qwen3_moe",
    tied: Mapping[str, str] | None = None,
    rounds: bool = False,
) -> None:
    """Replaces the weights of layers by those of a checkpoint. Each keeps its sharding and dtype.

    Args:
      layers: from the prefix of the names to the layer: {"model.layers.0.mlp": block.mlp, "lm_head": head, …}. Layers
        of this library, or nnx.Linear, nnx.Embed and nnx's norms. Their weights may be types with shardings, as
        nnx.get_abstract_model makes them: then nothing is drawn before.
      tensors: the checkpoint, by name: `open_checkpoint(folder)`, or arrays.
      experts: the format of layers of experts: "mixtral" and "qwen3_moe" (DeepSeek-V3 has the same names) as in files
        of these models, "fused" as in their memory, or "gpt_oss".
      tied: from prefixes to those whose tensors they share: {"lm_head": "model.embed_tokens"}. Each layer gets weights
        of its own: training makes them differ.
      rounds: whether weights may be rounded to a narrower dtype; if not, that is refused.

    Raises:
      ValueError: a tensor is missing, or has another shape, or a dtype that does not fit; nothing has been changed.

    Examples:
      >>> from flax import nnx
      >>> import numpy as np
      >>> from overlap import layers
      >>> linear = nnx.Linear(2, 3, use_bias=False, rngs=nnx.Rngs(0))
      >>> layers.load_weights({"lm_head": linear}, {"lm_head.weight": np.arange(6, dtype=np.float32).reshape(3, 2)})
      >>> linear.kernel[...].tolist()
      [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]
    """
    weights = _all_weights(layers, experts, tied or {})
    if not isinstance(rounds, bool):
        raise ValueError(f"`rounds` must be True or False, got {rounds!r}: pass one of them")
    for weight in weights:
        if isinstance(weight.variable.get_value(), Tracer):
            raise ValueError(f"`layers` must not be traced, and the weight for {weight.name!r} is: load outside of jit")
        if getattr(weight.variable.get_value(), "sharding", None) is None:
            raise ValueError(
                f"`layers` must have weights, or types with shardings, and that for {weight.name!r} has none: make the "
                "model by nnx.get_abstract_model, or draw its weights"
            )
    if not isinstance(tensors, Mapping):
        raise ValueError(
            f"`tensors` must be a mapping from names to tensors, got {type(tensors).__name__}: pass arrays by name, or "
            "`with open_checkpoint(folder) as tensors:`"
        )
    lacking = [name for weight in weights for name in weight.names if name not in tensors]
    if lacking:
        more = f" and {len(lacking) - _MOST_NAMES} more" if len(lacking) > _MOST_NAMES else ""
        raise ValueError(
            f"`tensors` lack {', '.join(map(repr, lacking[:_MOST_NAMES]))}{more}, and have "
            f"{', '.join(map(repr, sorted(tensors)[:_MOST_NAMES]))}, …: check the prefixes of `layers`, "
            f"experts={experts!r}, and `tied` for tensors that two layers share"
        )
    for weight in weights:
        for name in weight.names:
            _check_tensor(name, tensors[name], weight, rounds)
    if unread := _unread(weights, tensors):
        raise ValueError(
            f"`tensors` have {', '.join(map(repr, unread[:_MOST_NAMES]))}, which no layer takes: make the layer with "
            "what it belongs to (use_bias=True, router_bias=True, a router with a bias of the choice, as many "
            "experts), or leave the tensor out"
        )
    for weight in weights:
        old = weight.variable.get_value()
        of_device = functools.partial(_part, weight, tensors)
        weight.variable.set_value(jax.make_array_from_callback(old.shape, old.sharding, of_device))


def saved_weights(
    layers: Mapping[str, nnx.Module], *, experts: Format = "qwen3_moe", tied: Mapping[str, str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights of layers one after the other, as `load_weights` reads them: names and contiguous arrays.

    Pass dict(…) of it to `safetensors.numpy.save_file`, or the tensors of one file at a time. For the arguments see
    `load_weights`; layers in `tied` are left out.

    Raises:
      ValueError: other processes hold parts of a weight.
    """
    _all_weights(layers, experts, tied or {})  # For its checks.
    weights = _all_weights({prefix: x for prefix, x in layers.items() if prefix not in (tied or {})}, experts, {})
    by_name: dict[str, list[_Weight]] = {}
    for weight in weights:
        by_name.setdefault(weight.name, []).append(weight)
        value = weight.variable.get_value()
        if isinstance(value, Tracer) or not isinstance(value, jax.Array):
            raise ValueError(
                f"`layers` must have weights, and that for {weight.name!r} is a type or is traced: load them first, "
                "and save outside of jit"
            )
        if not value.is_fully_addressable:
            raise ValueError(
                f"`layers` must lie on devices of this process, and other processes have parts of {weight.name!r}: "
                "gather it first (jax.experimental.multihost_utils.process_allgather)"
            )
    for sharers in by_name.values():
        for number, name in enumerate(sharers[0].names):
            tensor = np.empty(sharers[0].tensor_shape, sharers[0].variable.get_value().dtype)
            for weight in sharers:
                value = np.asarray(weight.variable.get_value())
                weight.write(value[number] if _EXPERT in weight.name else value, tensor)
            yield name, tensor


def _unread(weights: Sequence[_Weight], tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns tensors that belong to the same linear layer as one that is read, or to the same experts, and are not."""
    read = {name for weight in weights for name in weight.names}
    parents = {name.rpartition(".")[0] for name in read}
    of_experts = ".experts."
    within = tuple({name[: name.index(of_experts)] + of_experts for name in read if of_experts in name})
    return sorted(
        name for name in tensors if name not in read and (name.rpartition(".")[0] in parents or name.startswith(within))
    )


def _part(weight: _Weight, tensors: Mapping[str, Tensor], index: tuple[slice, ...] | None) -> np.ndarray:
    """Returns the part of a parameter that a device holds."""
    assert index is not None
    return np.ascontiguousarray(weight.read(tensors, index), weight.variable.get_value().dtype)


def _all_weights(layers: Mapping[str, nnx.Module], experts: str, tied: Mapping[str, str]) -> list[_Weight]:
    if experts not in FORMATS:
        raise ValueError(f"`experts` must be one of {', '.join(map(repr, FORMATS))}, got {experts!r}: pass one of them")
    if not isinstance(layers, Mapping) or not layers:
        raise ValueError(
            f"`layers` must be a mapping from prefixes to layers, at least one, got {type(layers).__name__}: pass "
            '{"model.layers.0.mlp": layer}'
        )
    if not isinstance(tied, Mapping):
        raise ValueError(f'`tied` must be a mapping, got {tied!r}: pass {{"lm_head": "model.embed_tokens"}}')
    if unknown := [prefix for prefix in tied if prefix not in layers]:
        raise ValueError(
            f"`tied` must have prefixes of `layers`, got {unknown[0]!r}, and there are {', '.join(map(repr, layers))}: "
            "correct it"
        )
    return [
        weight
        for prefix, layer in layers.items()
        for weight in _weights(layer, tied.get(prefix, prefix), FORMATS[experts])
    ]


def _weights(layer: nnx.Module, prefix: str, experts: _Experts) -> list[_Weight]:
    """Returns the weights of a layer whose names begin with `prefix`."""
    of = lambda parts: [x for part, name in parts for x in _weights(part, f"{prefix}.{name}", experts)]  # noqa: E731
    if isinstance(layer, GatedMLP):
        return of([(layer.gate, "gate_proj"), (layer.up, "up_proj"), (layer.down, "down_proj")])
    if isinstance(layer, QKVProjection):
        return of([(layer.query, "q_proj"), (layer.key, "k_proj"), (layer.value, "v_proj")])
    if isinstance(layer, ExpertMLP):
        found = of([(layer.router, experts.router)])
        correction = getattr(layer.choose, "e_score_correction_bias", None)
        if correction is not None:
            found.append(_Weight(correction, f"{prefix}.{experts.router}.e_score_correction_bias"))
        for number, (kernel, name) in enumerate(zip((layer.gate, layer.up, layer.down), experts.names, strict=True)):
            half = number if experts.names.count(name) > 1 else None
            found += _of_experts(kernel, f"{prefix}.{name}", half, experts)
        return found if layer.shared is None else found + of([(layer.shared, "shared_experts")])
    own = {name: getattr(layer, name, None) for name in ("kernel", "embedding", "scale", "bias")}
    variables = {name: x for name, x in own.items() if isinstance(x, nnx.Variable)}
    if not variables or any(x.get_value().ndim > 2 for x in variables.values()):
        shapes = ", ".join(str(x.get_value().shape) for x in variables.values()) or "none"
        raise ValueError(
            f"`layers` must be layers of this library, nnx.Linear, nnx.Embed or norms, got {type(layer).__name__} for "
            f"{prefix!r}, with weights of shape {shapes}: pass the layers of a model one by one, with kernels [in, out]"
        )
    columns = layer.vocabulary if isinstance(layer, CrossEntropyHead) else None
    return [
        _Weight(x, f"{prefix}.{'bias' if name == 'bias' else 'weight'}", name == "kernel", columns=columns)
        for name, x in variables.items()
    ]


def _of_experts(kernel: ExpertKernel, name: str, half: int | None, experts: _Experts) -> list[_Weight]:
    found = [_Weight(kernel.kernel, name, experts.transposed, half, experts.interleaved)]
    if kernel.bias is not None:
        found.append(_Weight(kernel.bias, f"{name.removesuffix('.weight')}_bias", False, half, experts.interleaved))
    return found


def _check_tensor(name: str, tensor: Tensor, weight: _Weight, rounds: bool) -> None:
    of_file = str(tensor.get_dtype()) if hasattr(tensor, "get_dtype") else ""
    if of_file.startswith(("F8", "F4", "F6", "E8")):  # NumPy has no such numbers.
        raise ValueError(f"{name!r} of `tensors` has numbers of type {of_file}: dequantize the checkpoint to 16 bits")
    if not hasattr(tensor, "get_shape") and not hasattr(tensor, "shape"):
        raise ValueError(
            f"{name!r} of `tensors` must be an array, got {type(tensor).__name__}: convert it by np.asarray"
        )
    shape = tuple(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)
    if shape != weight.tensor_shape:
        raise ValueError(
            f"{name!r} of `tensors` must have shape {weight.tensor_shape} for a weight of shape {weight.shape}, got "
            f"{shape}: load the checkpoint of a model of these sizes"
        )
    given = np.asarray(tensor[tuple(slice(0, 0) for _ in shape)]).dtype
    wanted = weight.variable.get_value().dtype
    if not jnp.issubdtype(given, jnp.floating) or given.itemsize < 2:
        raise ValueError(
            f"{name!r} of `tensors` must be floating-point numbers of at least 16 bits, got {given}: dequantize it"
        )
    if not rounds and jnp.promote_types(given, wanted) != wanted:
        raise ValueError(
            f"{name!r} of `tensors` is {given}, which {wanted} does not hold exactly: pass rounds=True, or make the "
            f"layer with param_dtype={given}"
        )


@contextlib.contextmanager
def open_checkpoint(folder: str | pathlib.Path) -> Iterator[Mapping[str, Tensor]]:
    """Opens the safetensors files of a folder as one mapping, for `load_weights`. It needs the package safetensors.

    Of several files, model.safetensors.index.json says which has which tensor. Only what is asked for is read.

    Raises:
      ValueError: there are no such files in the folder, or one that the index names is missing.
    """
    from safetensors import safe_open  # pyright: ignore[reportMissingImports]

    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise ValueError(f"`folder` must be a folder, got {str(folder)!r}: pass the one that has the *.safetensors")
    index = folder / "model.safetensors.index.json"
    try:
        of_index: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{index} must be JSON with a `weight_map`, got {error!r}: download it again") from None
    files = sorted({*of_index.values()}) or sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in files if not (folder / name).exists()]
    if missing or not files:
        what = f"lacks {', '.join(missing)}, which {index.name} names" if files else "has no *.safetensors"
        raise ValueError(f"`folder` {str(folder)!r} {what}: download the whole checkpoint")
    with contextlib.ExitStack() as stack:
        slices: dict[str, Callable[[], Tensor]] = {}
        for file in files:
            try:
                opened = stack.enter_context(safe_open(folder / file, framework="numpy"))
            except Exception as error:  # Its own class, which no base has in common with others.
                raise ValueError(
                    f"{folder / file} is no whole file of safetensors ({error}): download it again"
                ) from None
            slices |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  It is no mapping.
        yield slices
