"""Checks a call of any operation and brings it into the one form of `overlap.frame.operands`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.frame import activation as activations
from overlap.frame import arguments, block_scales, scales
from overlap.frame.form import Form
from overlap.frame.kernel import kernel_of
from overlap.frame.operands import Leaf, Operands, accumulator, rhs_names
from overlap.frame.operation import Call, Operation
from overlap.frame.signatures import Arguments
from overlap.kernels.config import FLOAT8
from overlap.kernels.operations import EPILOGUE, OperandLayouts


def normalize(operation: Operation, given: Arguments) -> Call:
    """Checks the arguments of a call and brings them into the form that kernels take.

    Arrays may be `jax.ShapeDtypeStruct`s. A `config` is checked before the activation is called.

    Raises:
      ValueError: wrong ranks, dtypes or sizes, or a configuration that contradicts the call.
    """
    layouts = OperandLayouts(
        arguments.flag("transpose_lhs", given.transpose_lhs), arguments.flag("transpose_rhs", given.transpose_rhs)
    )
    (lhs, rhs), *more = _pairs(operation, given.lhs, given.rhs, layouts)
    container, rhs_list = _several(operation, rhs)
    several = container is not None
    sizes = None
    if operation.spec.groups:
        sizes = _group_sizes(given.group_sizes)
        rights = dict(zip(rhs_names(container, len(rhs_list)), rhs_list, strict=True))
        _check_groups(lhs, rights, sizes.shape[0], layouts)
    out_dtype = _checked(operation, lhs, rhs_list, container, given.preferred_element_type, layouts)
    more_lefts = [left for left, _ in more]
    more_rights = [right for _, right in more]
    batch = _batch_of([lhs, *more_lefts, *rhs_list, *more_rights]) if sizes is None else ()
    m, _ = layouts.m_k(lhs.shape)
    widths = [layouts.k_n(x.shape)[1] for x in rhs_list]
    if operation.combines and len(set(widths)) > 1:
        raise ValueError(
            f"`activation` takes {len(widths)} arrays, so the matrices of `rhs` must have the same number of columns, "
            f"got {' and '.join(map(str, widths))}: pad them, or give a function of one array"
        )
    results = [operation.result_shape(m, n) for n in widths]
    wide = accumulator(lhs.dtype)
    groups = None if sizes is None else sizes.shape[0]
    scaled = scales.Scaled(batch, m, widths, several, groups, operation.spec.gathers == "m")
    blocks = None
    has_scales = given.lhs_scale is not None or given.rhs_scale is not None
    if has_scales and sizes is None:
        blocks = block_scales.normalize(given.lhs_scale, given.rhs_scale, lhs, rhs_list, several, layouts)
    left_blocks, right_blocks = blocks or (None, None)
    row_scale, column_scales = None, None
    if blocks is None:
        row_scale, column_scales = scales.normalize(given.lhs_scale, given.rhs_scale, scaled, wide)
    operands = Operands(
        lhs=_flat(lhs, 2),
        rhs_list=_all_flat(rhs_list, 2 if sizes is None else 3),
        row_scale=None if row_scale is None else _flat(row_scale, 1),
        column_scales=column_scales,
        biases=_biases(operation, given.bias, [scaled.of_columns(n) for _, n in results], container, wide),
        addends=_addends(operation, given.addend, results, batch, container, out_dtype),
        lhs_block_scale=None if left_blocks is None else _flat(left_blocks, 2),
        rhs_block_scales=None if right_blocks is None else _all_flat(right_blocks, 2),
        more_lefts=_all_flat(more_lefts, 2),
        more_rights=_all_flat(more_rights, 2),
        group_sizes=sizes,
    )
    names = tuple(name for name in EPILOGUE if getattr(given, name) is not None)
    form = Form.of(operands, layouts, out_dtype)
    call = Call(operands, form, None, None, batch, container, names, operation.combines)
    return call if given.activation is None else _with_activation(operation, call, given, given.activation)


def _batch_of(matrices: list[Leaf]) -> tuple[int, ...]:
    """Returns the leading dimensions, which all matrices that have any must share."""
    batches = list(dict.fromkeys(tuple(x.shape[:-2]) for x in matrices if len(x.shape) > 2))
    if len(batches) > 1:
        raise ValueError(
            "`lhs` and `rhs` must have the same leading dimensions, or one of them none, got "
            f"{batches[0]} and {batches[1]}: broadcast one of them"
        )
    return batches[0] if batches else ()


def _with_activation(operation: Operation, call: Call, given: Arguments, activation: Callable[..., jax.Array]) -> Call:
    """Returns `call` with its activation, which is traced here unless the caller has traced it (`scalars`)."""
    if given.config is not None:
        kernel_of(operation).require_config(call, given.config)
    if given.scalars is not None:
        by_xla = functools.partial(activation, scalars=given.scalars)
        return _activated(call, activation, given.scalars, by_xla)
    wide = accumulator(call.form.dtype)
    arrays = len(call.operands.rhs_list) if operation.combines else 1
    try:
        applied, scalars = activations.traced(activation, wide, arrays)
    except activations.NotElementwise as why:
        by_xla = activations.by_itself(activation, call.batch)
        for shape in {operation.result_shape(call.form.m, n) for n in call.form.widths}:
            values = [jax.ShapeDtypeStruct((*call.batch, *shape), wide)] * arrays
            jax.eval_shape(by_xla, *values)  # Raises here what the call would raise, for `explain`.
        return _activated(dataclasses.replace(call, not_elementwise=str(why)), None, (), by_xla)
    return _activated(call, applied, scalars, activation)


def _activated(call: Call, activation: Leaf, scalars: tuple[jax.Array, ...], by_xla: Callable[..., jax.Array]) -> Call:
    """Returns `call` with an activation: as kernels take it, with its scalars, and as XLA applies it."""
    operands = dataclasses.replace(call.operands, scalars=scalars)
    of_all = activations.on_all(by_xla, call.combines)
    return dataclasses.replace(call, operands=operands, activation=activation, by_xla=of_all)


def _pairs(operation: Operation, lhs: Leaf, rhs: Leaf, layouts: OperandLayouts) -> list[tuple[Leaf, Leaf]]:
    """Returns the pairs of operands whose products are added: one pair, if the caller gave no lists of pairs."""
    counts = [len(x) if type(x) in (list, tuple) else None for x in (lhs, rhs)]
    if counts[0] is not None and not operation.after.takes_pairs:
        raise ValueError(
            f"`lhs` of `{operation.name}` must be one array, got a {type(lhs).__name__} of {counts[0]}: only "
            "`matmul_reduce_scatter` and `matmul_all_reduce` take lists, of pairs whose products are added"
        )
    if not operation.after.takes_pairs or counts == [None, None]:
        return [(arguments.array("lhs", lhs), rhs)]
    if counts[0] != counts[1] or not counts[0]:
        left, right = ("one array" if count is None else f"a list of {count}" for count in counts)
        raise ValueError(
            f"`lhs` and `rhs` must both be arrays, or lists of equal length whose products are added, got {left} and "
            f"{right}: give each matrix of `lhs` its matrix of `rhs`"
        )
    pairs = [
        tuple(arguments.array(f"{name}[{index}]", x) for name, x in (("lhs", left), ("rhs", right)))
        for index, (left, right) in enumerate(zip(lhs, rhs, strict=True))
    ]
    for index, (left, right) in enumerate(pairs):
        try:
            _check_pair(operation, left, right, layouts)
        except ValueError as wrong:
            raise ValueError(f"pair {index} of {len(pairs)}: {wrong}") from None
    lefts, rights = zip(*pairs, strict=True)
    _check_alike("lhs", "rows", lefts, lambda shape: layouts.m_k(shape)[0])
    _check_alike("rhs", "columns", rights, lambda shape: layouts.k_n(shape)[1])
    return pairs


def _check_alike(name: str, what: str, matrices: tuple[Leaf, ...], size: Callable[[tuple[int, ...]], int]) -> None:
    """Raises ValueError if matrices of pairs differ in more than k: in dtype, leading dimensions, rows or columns."""
    first = matrices[0]
    for index, x in enumerate(matrices):
        if (x.dtype, x.shape[:-2], size(x.shape)) != (first.dtype, first.shape[:-2], size(first.shape)):
            raise ValueError(
                f"the matrices of `{name}` must have the same dtype, leading dimensions and {what}, got "
                f"{x.dtype.name} {tuple(x.shape)} in {name}[{index}] and {first.dtype.name} {tuple(first.shape)} in "
                f"{name}[0]: only k may differ"
            )


def _several(operation: Operation, rhs: Leaf) -> tuple[type | None, list[Leaf]]:
    """Returns the type of the container of right operands, list or tuple (None: a single operand), and the operands."""
    container = type(rhs) if operation.takes_lists and type(rhs) in (list, tuple) else None
    if type(rhs) in (list, tuple) and not rhs:
        raise ValueError(f"`rhs` must hold at least one matrix, got an empty {type(rhs).__name__}: name the weights")
    if type(rhs) in (list, tuple) and container is None:
        raise ValueError(
            f"`rhs` of `{operation.name}` must be one array, got a {type(rhs).__name__} of {len(rhs)}: make a call "
            "for each. Lists are for several products of one gather (`all_gather_lhs_matmul`), for an `activation` of "
            "as many arrays (there, in `matmul` and in `grouped_matmul`), and for pairs that are added "
            "(`matmul_reduce_scatter`, `matmul_all_reduce`)"
        )
    given = [rhs] if container is None else rhs
    names = rhs_names(container, len(given))
    return container, [arguments.array(name, x) for name, x in zip(names, given, strict=True)]


def _checked(
    operation: Operation,
    lhs: Leaf,
    rhs_list: list[Leaf],
    container: type | None,
    preferred: DTypeLike | None,
    layouts: OperandLayouts,
) -> jnp.dtype:
    """Checks each pair of operands, and returns the dtype of the results."""
    out_dtype = jnp.dtype(jnp.float32)
    for index, rhs in enumerate(rhs_list):
        try:
            _check_pair(operation, lhs, rhs, layouts)
            out_dtype = arguments.result_dtype(preferred, lhs.dtype)
        except ValueError as wrong:
            if container is None:
                raise
            raise ValueError(f"`rhs[{index}]` of {len(rhs_list)} right operands: {wrong}") from None
    return out_dtype


def _check_pair(operation: Operation, lhs: Leaf, rhs: Leaf, layouts: OperandLayouts) -> None:
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if len(array.shape) < 2:
            raise ValueError(
                f"`{name}` must have 2 dimensions or more, got {len(array.shape)} (shape {tuple(array.shape)}): "
                "reshape it"
            )
    if lhs.dtype != rhs.dtype and not (lhs.dtype in FLOAT8 and rhs.dtype in FLOAT8):
        raise ValueError(f"`lhs` and `rhs` must have the same dtype, got {lhs.dtype} and {rhs.dtype}: cast one of them")
    shards = operation.before.factors["k"]
    (_, lhs_k), (rhs_k, _) = layouts.m_k(lhs.shape), layouts.k_n(rhs.shape)
    if lhs_k == shards * rhs_k:
        return
    if shards > 1:
        raise ValueError(
            "`lhs` and `rhs` must agree in the contraction dimension once `rhs` is gathered, got "
            f"k={lhs_k} in lhs {tuple(lhs.shape)} and k={shards * rhs_k} from {shards} shards "
            f"{tuple(rhs.shape)} of rhs: is it sharded along its other dimension (`dimension`), or is one of "
            "them transposed?"
        )
    devices = operation.after.summed_over
    if devices > 1 and max(lhs_k, rhs_k) == devices * min(lhs_k, rhs_k):
        raise ValueError(
            f"`lhs` and `rhs` must agree in the contraction dimension, got k={lhs_k} in lhs {tuple(lhs.shape)} and "
            f"k={rhs_k} in rhs {tuple(rhs.shape)}: one of them is not sharded along it over the "
            f"{devices} devices (`in_specs` of `jax.shard_map`)"
        )
    raise ValueError(
        f"`lhs` and `rhs` must agree in the contraction dimension, got k={lhs_k} in lhs {tuple(lhs.shape)} and "
        f"k={rhs_k} in rhs {tuple(rhs.shape)}: is one of them transposed (`transpose_rhs`)"
        f"{', or `rhs` sharded along its other dimension' if operation.before.factors['n'] > 1 else ''}?"
    )


def _per_rhs(name: str, given: Leaf, count: int, container: type | None) -> list[tuple[str, Leaf]]:
    """Returns an argument's entry for each of `count` right operands: pairs of its name (for messages) and value."""
    if container is None:
        if type(given) in (list, tuple):
            raise ValueError(f"`{name}` must be one array, got {len(given)} in a {type(given).__name__}: give one")
        return [(name, given)]
    if not isinstance(given, (list, tuple)) or len(given) != count:
        was = (
            f"a {type(given).__name__} of {len(given)}" if isinstance(given, (list, tuple)) else arguments.shown(given)
        )
        raise ValueError(
            f"`{name}` must be a list with one entry per matrix of `rhs`, got {was}: give {count} entries, None where "
            "there is nothing to add"
        )
    return [(f"{name}[{index}]", x) for index, x in enumerate(given)]


def _group_sizes(value: Leaf) -> Leaf:
    kind = getattr(value, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.integer) or value.ndim != 1:
        raise ValueError(
            f"`group_sizes` must be integers of shape (groups,), got {arguments.shown(value)}: pass how many rows each "
            "group has, e.g. as a jnp.array"
        )
    if not value.shape[0]:
        raise ValueError("`group_sizes` must have at least one entry, got 0: name the groups")
    return arguments.each(jnp.asarray, value)


def _check_groups(lhs: Leaf, rights: dict[str, Leaf], groups: int, layouts: OperandLayouts) -> None:
    """Checks that the operands are those of groups of rows. `rights`: the right operands by name."""
    if len(lhs.shape) != 2:
        raise ValueError(
            f"`lhs` must have 2 dimensions, got {len(lhs.shape)} (shape {tuple(lhs.shape)}): reshape it to [rows, k]"
        )
    first = next(iter(rights.values()))
    for name, x in rights.items():
        if len(x.shape) != 3:
            layout = "n, k" if layouts.transpose_rhs else "k, n"
            raise ValueError(
                f"`{name}` must have 3 dimensions, (groups, {layout}), got {len(x.shape)} (shape {tuple(x.shape)}): "
                "stack the matrices of the groups"
            )
        if x.shape[0] != groups:
            raise ValueError(
                f"`{name}` must have a matrix for each of the {groups} groups, got {x.shape[0]} (shape "
                f"{tuple(x.shape)}): give each group one; of experts, each device has the matrices of its own experts"
            )
        if x.shape != first.shape:
            raise ValueError(
                f"the arrays of `rhs` must have one shape, got {tuple(first.shape)} and {tuple(x.shape)}: pad them"
            )


def _biases(
    operation: Operation, bias: Leaf, shapes: list[tuple[int, ...]], container: type | None, dtype: DTypeLike
) -> tuple[Leaf, ...] | None:
    if bias is None:
        return None

    def checked(name: str, x: Leaf, shape: tuple[int, ...]) -> Leaf:
        x = arguments.array(name, x)
        if tuple(x.shape) != shape:
            of = "one value per group and column" if len(shape) > 1 else "one value per column"
            raise ValueError(
                f"`{name}` must have shape {shape}, {of} of "
                f"{"this device's" if operation.takes_parts else 'the'} result, got {tuple(x.shape)}: reshape "
                f"{_or_part(operation)}"
            )
        return arguments.each(lambda x: x.astype(dtype), x)

    entries = zip(_per_rhs("bias", bias, len(shapes), container), shapes, strict=True)
    # One of several right operands may have none.
    return tuple(None if x is None else checked(name, x, shape) for (name, x), shape in entries)


def _addends(
    operation: Operation,
    addend: Leaf,
    result: list[tuple[int, int]],
    batch: tuple[int, ...],
    container: type | None,
    dtype: DTypeLike,
) -> tuple[Leaf, ...] | None:
    if addend is None:
        return None

    def checked(name: str, x: Leaf, shape: tuple[int, int]) -> Leaf:
        x = arguments.array(name, x)
        if tuple(x.shape) not in {shape, (*batch, *shape)}:
            for_all = f", or {shape}" if batch else ""
            raise ValueError(
                f"`{name}` must have the shape of the result, {(*batch, *shape)}{for_all}, got {tuple(x.shape)}: "
                f"reshape or broadcast {_or_part(operation)}"
            )
        return _flat(arguments.each(lambda x: x.astype(dtype), x), 2)

    entries = zip(_per_rhs("addend", addend, len(result), container), result, strict=True)
    return tuple(None if x is None else checked(name, x, shape) for (name, x), shape in entries)


def _or_part(operation: Operation) -> str:
    return "it, or pass this device's part" if operation.takes_parts else "it"


def _flat(x: Leaf, rank: int) -> Leaf:
    """Returns `x` with at most one leading dimension before its last `rank` dimensions."""
    leading, rest = x.shape[: len(x.shape) - rank], x.shape[len(x.shape) - rank :]
    if len(leading) < 2:
        return x
    return arguments.each(lambda x: x.reshape(math.prod(leading), *rest), x)  # (Not -1: a size may be 0.)


def _all_flat(arrays: Iterable[Leaf], rank: int) -> tuple[Leaf, ...]:
    return tuple(_flat(x, rank) for x in arrays)
