"""`linear_cross_entropy`: a linear layer and its cross-entropy in one, over a vocabulary that devices share."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from overlap import _settings, emulation
from overlap.choice import dispatch
from overlap.choice.dispatch import Implementation
from overlap.collectives.loss.statistics import Static, statistics
from overlap.frame import arguments, mesh_axes
from overlap.frame.arguments import shown
from overlap.frame.explain import record
from overlap.frame.operands import accumulator
from overlap.frame.peers import peer_group_of
from overlap.frame.primitive import require_same_devices
from overlap.frame.signatures import AnyArray, AxisName, Given, Leaf
from overlap.kernels.config import Config
from overlap.kernels.operations import LINEAR_CROSS_ENTROPY
from overlap.kernels.target import Target
from overlap.kernels.varying import axes_of, types_tell
from overlap.primitives import PeerGroup
from overlap.single_gpu import logits_product
from overlap.single_gpu.logits_product import Product, Vocabulary

NAME = LINEAR_CROSS_ENTROPY.function
# A chunk has as many columns as this many bytes of dz allow, in whole tiles.
_CHUNK_BYTES = 256 << 20
_UNIT = 256
# The most bytes that are kept for the backward pass, unless `chunk` is given.
_MOST_KEPT_BYTES = 4 << 30
# The most bytes of logits that XLA is left to store whole.
_MOST_LOGITS_BYTES = 1 << 30
_INT32 = jnp.iinfo(jnp.int32)


class _Keywords(TypedDict, total=False):
    """The keywords of all forms of a call."""

    gather: bool
    transpose_w: bool
    bias: AnyArray | None
    soft_cap: float | None
    z_loss: float
    ignored_label: int | None
    weights: AnyArray | None
    vocabulary_size: int | None
    chunk: int | None
    config: Config | None
    implementation: Implementation | None


@overload
def linear_cross_entropy(
    x: AnyArray,
    w: AnyArray,
    labels: AnyArray,
    axis_name: AxisName | None = None,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    x: AnyArray,
    w: AnyArray,
    labels: AnyArray,
    axis_name: AxisName | None = None,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...


def linear_cross_entropy(
    x: AnyArray,
    w: AnyArray,
    labels: AnyArray,
    axis_name: AxisName | None = None,
    *,
    gather: bool = True,
    transpose_w: bool = False,
    bias: AnyArray | None = None,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    ignored_label: int | None = None,
    weights: AnyArray | None = None,
    vocabulary_size: int | None = None,
    return_lse: bool = False,
    chunk: int | None = None,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of each token with logits = x @ w, which are never stored.

        z = cap(x @ w + bias),   cap(z) = soft_cap · tanh(z / soft_cap),   lse = log Σ exp z
        loss = weight · (lse − z[label] + z_loss · lse²)

    For the backward pass the kernels keep as much as logits take in 16 bits, 2 · T · V / D bytes, if that is 4 GiB or
    less; the cotangents of the logits take its place. Else, with a `chunk` or a `soft_cap`, and with jax 0.12, the
    backward pass computes the logits again, by chunks of the vocabulary, and stores their cotangents for one chunk at a
    time. Against storing all logits that takes 4/3 of the operations and about `T · (2 · chunk + 4 · H + V / D / 8)`
    bytes.

    With an axis, call it inside `jax.shard_map`; D is the number of the axis' devices. Each has columns of `w`.

    Args:
      x: this device's tokens, [T / D, H]; global [T, H], sharded by rows. With `gather=False`, or without an axis, all
        tokens: [T, H], the same on all devices. Floating-point, at least 16 bits.
      w: [H, V / D], or [V / D, H] with `transpose_w`; global [H, V], sharded along the vocabulary. Same dtype as `x`.
      labels: of the tokens of `x`, integers of any type: [T / D] or [T].
      axis_name: the mesh axis, or a tuple of axes that count as one; None on one device.
      gather: whether `x`, `labels` and `weights` are sharded by rows, and gathered.
      transpose_w: whether `w` is stored as [V, H], as a table of embeddings is.
      bias: [V / D], added to the logits of each token.
      soft_cap: a positive number c: logits z become c · tanh(z / c). Differentiable in the logits, not in c.
      z_loss: the weight of lse², at least 0.
      ignored_label: tokens with this label have a loss of 0 and no gradient, if they are finite. It may be any integer
        of 32 bits, such as −100 or a label of the vocabulary. None: no token is ignored.
      weights: [T / D] or [T], a factor of the loss of each token. A token of weight 0 needs a right label, too.
      vocabulary_size: V, if that is less than the columns of all devices together: the last columns count as nothing,
        and their gradient is zero. So a vocabulary that D does not divide can be padded.
      return_lse: whether `lse` is a result as well.
      chunk: keep nothing for the backward pass, and store cotangents of so many columns of `w` at a time, a multiple of
        64. None: keep as said above; where nothing is kept, as many as take 256 MiB.
      config: tile sizes of the kernels that compute logits; see `overlap.matmul`.
      implementation: "fused" (the kernels; emulated on a CPU), "xla", or None to choose. XLA stores the logits whole in
        float32 unless they take more than 1 GiB or `chunk` is given; then it goes by chunks, and keeps nothing.

    Returns:
      The loss of each token of `x`, float32 (float64 for float64 operands): [T / D] or [T]; or that and `lse`. A label
      that is not in the vocabulary, and not ignored, makes the loss NaN and all gradients of it. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes or numbers are wrong; a label is not in the vocabulary, and is not traced; the
        type of `w` says that it is the same on several devices, and so no part of the vocabulary.
      NotImplementedError: `implementation="fused"` and the kernels cannot serve this call; the message says why.

    It has derivatives of any order. The backward pass runs by the kernels if the forward pass does. Forward mode, and
    derivatives of the backward pass, run by XLA. Under `jax.vmap` a kernel runs for one element after the other.

    Examples:
      >>> x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 512), jnp.bfloat16)
      >>> overlap.linear_cross_entropy(x, w, jnp.arange(128)).shape  # log 512 each
      (128,)
    """
    _settings.require_valid()
    arguments.require_values(x=x, w=w, labels=labels, bias=bias, weights=weights)
    arguments.one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    group = None if axis_name is None else peer_group_of(NAME, arguments.axis_name(axis_name))
    transposed = arguments.flag("transpose_w", transpose_w)
    gathers = arguments.flag("gather", gather) and group is not None
    soft_cap = None if soft_cap is None else _number("soft_cap", soft_cap)
    z_loss = _number("z_loss", z_loss)
    chunk = _chunk(chunk)
    config = arguments.config(config)
    returns_lse = arguments.flag("return_lse", return_lse)
    given = _operands(x, w, labels, bias, weights, transposed)
    if group is not None:
        _require_parts(given["w"], group)
    columns = given["w"].shape[0 if transposed else 1]
    total = columns * (1 if group is None else group.size)
    size = _vocabulary_size(vocabulary_size, total)
    ignored = _ignored(ignored_label)
    if columns:
        check_labels(given["labels"], size, ignored)
    if not arguments.is_in_jit():
        require_same_devices(list(given.items()))
    if not columns:
        raise ValueError("`w` must have at least one column, got none: pass the matrix of the vocabulary")
    if given["x"].shape[0] == 0:  # XLA gathers no empty arrays.
        nothing = jnp.zeros(0, accumulator(given["x"].dtype))
        return (nothing, nothing) if returns_lse else nothing
    factors = given.pop("weights", None)
    number = given["labels"] = _numbers(given["labels"])
    if group is not None and gathers:
        for name in ("x", "labels"):
            given[name] = lax.all_gather(given[name], group.axis_name, tiled=True)
    first = 0 if group is None else lax.axis_index(group.axis_name) * columns
    own = jnp.clip(size - first, 0, columns)
    # A label may be any number: so compare it before the subtraction could wrap around.
    is_own = (given["labels"] >= first) & (given["labels"] < first + own)
    given["labels"] = jnp.where(is_own, given["labels"] - first, -1)
    given["place"] = jnp.stack([jnp.zeros_like(own), own]).astype(jnp.int32)
    # A chunk of whole rows may have more columns than are left.
    is_cut = size < total or columns != logits_product.in_whole_rows(columns, given["w"].dtype)
    static = _chosen(given, Vocabulary(transposed, soft_cap, is_cut), chunk, config, implementation)
    with jax.named_scope(NAME):
        lse, at_label = statistics(static, given)
        if group is not None:
            lse, at_label = _of_all(lse, at_label, group, gathers)
    loss = lse - at_label + z_loss * lse * lse
    if factors is not None:
        loss *= factors.astype(loss.dtype)
    is_ignored = jnp.zeros(number.shape, bool) if ignored is None else number == ignored
    is_wrong = ~is_ignored & ((number < 0) | (number >= size))
    # A factor of NaN makes the gradient NaN, too.
    loss = jnp.where(is_ignored, 0, loss * jnp.where(is_wrong, jnp.nan, 1).astype(loss.dtype))
    return (loss, lse) if returns_lse else loss


def _of_all(lse: jax.Array, at_label: jax.Array, group: PeerGroup, scatters: bool) -> tuple[jax.Array, jax.Array]:
    """Returns the statistics of all columns: of all tokens, or of this device's if `scatters`."""
    axis = group.axis_name
    largest = lax.pmax(lax.stop_gradient(lse), axis)
    shares = jnp.stack([jnp.exp(lse - largest), at_label])
    if scatters:
        total, at_label = lax.psum_scatter(shares, axis, scatter_dimension=1, tiled=True)
        largest = lax.dynamic_slice_in_dim(largest, lax.axis_index(axis) * total.shape[0], total.shape[0])
    else:
        total, at_label = lax.psum(shares, axis)
    return largest + jnp.log(total), at_label


def _chosen(
    given: dict[str, Leaf],
    vocabulary: Vocabulary,
    chunk: int | None,
    config: Config | None,
    implementation: Implementation | None,
) -> Static:
    """Decides between the kernels and XLA, and says so to `explain`."""
    x = given["x"]
    w = given["w"]
    target = dispatch.target()
    tokens = x.shape[0]
    columns = vocabulary.size(w)
    found = None
    cannot = arguments.why_not_fused([("x", x), ("w", w)])
    if jax.export.is_symbolic_dim(tokens):  # Such a number cannot be compared. No kernel takes it.
        tokens = 1
    most = max(_CHUNK_BYTES // max(tokens * x.dtype.itemsize, 1) // _UNIT, 1) * _UNIT
    wanted = chunk or -(-columns // max(-(-columns // most), 1))  # Chunks of about one size.
    size = max(min(-(-wanted // _UNIT) * _UNIT if chunk is None else wanted, columns), 1)
    if implementation != "xla" and not cannot:
        found, cannot = _configs(x, w, vocabulary, size, config, target)
    logits_bytes = 4 * tokens * columns
    why_not = "" if logits_bytes > _MOST_LOGITS_BYTES or config or chunk else (
        f"the logits take {logits_bytes:,} bytes: XLA, which stores them, is not slower"
    )  # fmt: skip
    why = "config" if config else "chunk"
    why = f"`{why}` is given" if config or chunk else f"the logits would take {logits_bytes:,} bytes"
    choice = dispatch.decide_unmodeled(NAME, implementation, target, cannot, why_not, why)
    fused = choice.implementation == "fused"
    kept_bytes = tokens * columns * x.dtype.itemsize
    could_keep = chunk is None and vocabulary.soft_cap is None and logits_product.HAS_SHARES
    keeps = fused and could_keep and kept_bytes <= _MOST_KEPT_BYTES
    shapes = f"{tokens}x{columns}x{x.shape[1]} {x.dtype.name}"
    source = "" if not fused else "default" if config is None else "given"
    plan = f"keeps {kept_bytes:,} bytes for the backward pass" if keeps else "the backward pass computes logits again"
    config = found[0] if fused and found else None
    record(dataclasses.replace(choice, config=config, source=source, shapes=shapes, plan=plan if fused else ""))
    if fused and target.platform == "cpu":
        emulation.enable()
    stores = not fused and chunk is None and logits_bytes <= _MOST_LOGITS_BYTES
    products = tuple(Product(vocabulary, one, target) for one in found) if fused and found else None
    if stores:
        size = 0
    elif keeps:
        size = columns
    return Static(vocabulary, size, products, implementation == "fused", keeps)


def _configs(
    x: Leaf, w: Leaf, vocabulary: Vocabulary, size: int, config: Config | None, target: Target
) -> tuple[tuple[Config, Config, Config] | None, str]:
    """Returns the first configurations that serve the call; or None, and why there are none.

    Raises:
      ValueError: `config` contradicts the call.
    """
    columns = vocabulary.size(w)
    of_chunks = tuple(filter(None, (size, columns % size)))

    def first(configs: Sequence[Config], sizes: tuple[int, ...], sums: bool = False) -> Config:
        refusals = []
        for one in configs:
            try:
                for size in sizes:
                    logits_product.check(x, w, vocabulary, size, one, target, sums)
            except ValueError as refusal:
                refusals.append(refusal)
            else:
                return one
        raise refusals[0]

    of_cotangent = logits_product.OF_COTANGENT if vocabulary.soft_cap is None else logits_product.OF_CAPPED_COTANGENT
    try:
        mesh_axes.require_no_partitioner_axes()
        return (
            first(logits_product.OF_STATISTICS if config is None else [config], (columns,)),
            first(of_cotangent if config is None else [config], of_chunks),
            first(logits_product.OF_SUM, of_chunks, sums=True),
        ), ""
    except NotImplementedError as cannot:
        return None, str(cannot).removesuffix(', or use implementation="xla"')


def _operands(x: Given, w: Given, labels: Given, bias: Given, weights: Given, transposed: bool) -> dict[str, Leaf]:
    """Checks the arrays, and returns those that are given by name."""
    x = arguments.array("x", x)
    w = arguments.array("w", w)
    for name, value in (("x", x), ("w", w)):
        if value.ndim != 2:
            raise ValueError(
                f"`{name}` must have 2 dimensions, got shape {tuple(value.shape)}: reshape it, e.g. with "
                f".reshape(-1, {value.shape[-1] if value.ndim else 1})"
            )
    if x.dtype != w.dtype or x.dtype.itemsize < 2:
        raise ValueError(
            f"`x` and `w` must have one floating-point dtype of at least 16 bits, got {x.dtype.name} and "
            f"{w.dtype.name}: cast one, e.g. w.astype(x.dtype)"
        )
    columns, features = w.shape if transposed else w.shape[::-1]
    if features != x.shape[1]:
        fits = columns == x.shape[1]
        raise ValueError(
            f"`w` must have as many features as `x`, got {features} of shape {tuple(w.shape)} and {x.shape[1]} of "
            f"shape {tuple(x.shape)}: " + (f"pass transpose_w={not transposed}" if fits else "pass the w of this model")
        )
    if isinstance(labels, (np.ndarray, list, tuple)):
        labels = np.asarray(labels)
    kind = getattr(labels, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.integer):
        raise ValueError(f"`labels` must be an array of integers, got {shown(labels)}: convert it")
    found = {"x": x, "w": w, "labels": labels}
    if bias is not None:
        found["bias"] = arguments.array("bias", bias)
    if weights is not None:
        weights = jnp.asarray(weights, jnp.float32) if _is_whole(weights) else weights
        found["weights"] = arguments.array("weights", weights)
    for name, size in (("labels", x.shape[0]), ("bias", columns), ("weights", x.shape[0])):
        if name in found and tuple(found[name].shape) != (size,):
            of = "column of `w`" if name == "bias" else "row of `x`"
            raise ValueError(
                f"`{name}` must have an entry for each {of}, ({size},), got shape {tuple(found[name].shape)}: reshape "
                "it"
            )
    return found


def _require_parts(w: jax.Array, group: PeerGroup) -> None:
    """Raises ValueError if the type of `w` says that it is the same on several devices, whose columns it would be."""
    same = {axis: size for axis, size in group.axes if axis not in axes_of(w)}
    devices = math.prod(same.values())
    if devices > 1 and types_tell(group.names[0]):
        names = ", ".join(map(repr, same))
        raise ValueError(
            f"`w` must be each device's own part of the vocabulary, got one that its type says is the same on all "
            f"{devices} devices along {names}: shard it (in_specs), or, if equal parts are meant, pass "
            f'jax.lax.pcast(w, ({names},), to="varying")'
        )


def _is_whole(value: Given) -> bool:
    """Whether an array has integers or booleans."""
    kind = getattr(value, "dtype", None)
    return kind is not None and (jnp.issubdtype(kind, jnp.integer) or kind == jnp.dtype(bool))


def _number(name: str, value: Given) -> float:
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not np.isfinite(value) or value < 0 or (name == "soft_cap" and value == 0):
        what = "None or a positive number" if name == "soft_cap" else "a number of at least 0"
        raise ValueError(f"`{name}` must be {what}, got {shown(value)}: leave it out, or pass one")
    return float(value)


def _chunk(value: Given) -> int | None:
    chunk = arguments.count("chunk", value)
    if chunk is not None and chunk % logits_product.EPILOGUE_COLUMNS:
        raise ValueError(
            f"`chunk` must be a multiple of {logits_product.EPILOGUE_COLUMNS}, got {chunk}: round it, or leave it out"
        )
    return chunk


def _vocabulary_size(value: Given, columns: int) -> int:
    size = arguments.count("vocabulary_size", value)
    if size is not None and size > columns:
        raise ValueError(
            f"`vocabulary_size` must be at most the {columns} columns of `w` on all devices, got {size}: pad w, or "
            "leave it out"
        )
    return columns if size is None else size


def _ignored(value: Given) -> int | None:
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is not None and not (is_integer and _INT32.min <= value <= _INT32.max):
        raise ValueError(f"`ignored_label` must be None or an integer of 32 bits, got {shown(value)}: name one")
    return None if value is None else int(value)


def check_labels(labels: Leaf, size: int, ignored: int | None) -> None:
    """Raises ValueError for a label that is not in the vocabulary, if labels have values yet."""
    if isinstance(labels, Tracer) or not getattr(labels, "is_fully_addressable", True):
        return
    values = np.asarray(labels)
    wrong = values[((values < 0) | (values >= size)) & (True if ignored is None else values != ignored)]
    if wrong.size:
        may_be_ignored = ignored is None and _INT32.min <= wrong[0] <= _INT32.max
        hint = f", or pass ignored_label={wrong[0]} to leave such tokens out" if may_be_ignored else ""
        raise ValueError(f"`labels` must be from 0 to {size - 1}, got {wrong[0]}: correct them{hint}")


def _numbers(labels: Leaf) -> jax.Array:
    """Returns labels as int32, numbers beyond it as the nearest ones."""
    labels = jnp.asarray(labels)
    if labels.dtype.itemsize > 4 or labels.dtype == jnp.uint32:
        is_signed = jnp.issubdtype(labels.dtype, jnp.signedinteger)
        labels = jnp.clip(labels, _INT32.min if is_signed else None, _INT32.max)
    return labels.astype(jnp.int32)
