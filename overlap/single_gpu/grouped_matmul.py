"""`grouped_matmul`: each group of rows times a matrix of its own, as a layer of experts multiplies its tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap import _settings
from overlap.choice import dispatch
from overlap.choice.dispatch import Explanation, Implementation
from overlap.frame import activation as activations
from overlap.frame import arguments, sharded
from overlap.frame.activation import BoundActivation
from overlap.frame.by_xla import in_device_memory
from overlap.frame.call import why_not_fused
from overlap.frame.explain import record
from overlap.frame.operands import Leaf, accumulator, rhs_names
from overlap.frame.signatures import AnyArray, Given, Scale
from overlap.kernels import groups
from overlap.kernels.config import FLOAT8, Config
from overlap.kernels.launch import checks_numbers
from overlap.single_gpu import grouped_by_xla, grouped_choice, grouped_operation
from overlap.single_gpu.grouped_operation import NAME, Grouped, Product

# The names of the left and the right operand in messages.
type Names = tuple[str, str]
_NAMES: Names = ("lhs", "rhs")


def grouped_matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    group_sizes: AnyArray,
    *,
    bias: AnyArray | Sequence[AnyArray] | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes activation(lhs_scale · (lhs[rows of e] @ rhs[e]) · rhs_scale[e] + bias[e]) for each group e of rows.

    The rows of a group follow each other: first the `group_sizes[0]` rows of group 0, then those of group 1, and so on.
    The sizes are data, may be zero, and may differ from call to call without anything being compiled again.

    Args:
      lhs: [m, k]. float16, bfloat16, or float8 (e4m3fn, e5m2); by XLA any floating-point dtype.
      rhs: [groups, k, n], or [groups, n, k] with `transpose_rhs` (float8 needs it). Same dtype as `lhs` (float8 kinds
        may be mixed). Or a list or tuple of such arrays, if `activation` takes an array for each; `bias` and
        `rhs_scale` are then lists, too.
      group_sizes: integers [groups]: how many rows each group has. Rows behind all groups may hold anything; their
        results are zero. If the sizes add up to more than m, the last groups have fewer rows. A negative size counts
        as 0.
      bias: [groups, n], added to each row of the group.
      activation: as in `matmul`, but a function that no kernel can compute is applied by XLA to the products.
      lhs_scale: a factor of the product, in float32: a scalar, or [m, 1], one value per row.
      rhs_scale: a factor of the product, in float32: a scalar, or [groups, n], one value per column of each group.
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32.
      transpose_rhs: whether `rhs` is stored transposed. The kernel reads it as it lies, without a copy.
      config: tile sizes of the kernel; by default the model chooses, as for equal groups.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla" (`jax.lax.ragged_dot`, which lets a NaN
        among the weights of one group into the results of all), or None to choose: the kernel wherever it can serve the
        call on a Hopper GPU.

    Returns:
      [m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes, the activation or the config are wrong.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why. Or the
        operands are on a mesh with Explicit axes, outside of `jax.shard_map`.

    Works under `jax.jit` and `lax.scan`, inside `jax.shard_map` (each device multiplies its own rows), and under
    `jax.vmap`, which computes one product after the other. It has derivatives of any order. The backward pass runs two
    kernels: the same product for `lhs`, and for `rhs` one that contracts the rows of each group. If `rhs` is a list,
    one kernel adds the products for `lhs` in float32, and each entry has a contraction. Cotangents are rounded to the
    operands' dtype (bfloat16 for float8) before they are multiplied. With an activation, a bias or scales the
    products are kept in float32 for the backward pass; in the dtype of the result if the activation takes several.

    Example:
      >>> tokens, experts = jnp.ones((6, 64), jnp.bfloat16), jnp.ones((3, 64, 128), jnp.bfloat16)
      >>> overlap.grouped_matmul(tokens, experts, jnp.array([4, 0, 2])).shape
      (6, 128)

    Source: the grouped products of CUTLASS and of "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts"
    (Gale et al., MLSys 2023). That tiles of all groups are numbered together is also how DeepGEMM deals them out.
    """
    return multiplied(
        lhs, rhs, group_sizes, bias=bias, activation=activation, lhs_scale=lhs_scale, rhs_scale=rhs_scale,
        preferred_element_type=preferred_element_type, transpose_rhs=transpose_rhs, config=config,
        implementation=implementation,
    )  # fmt: skip


def multiplied(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    group_sizes: AnyArray,
    *,
    clears: tuple[bool, bool] = (True, True),
    bias: AnyArray | Sequence[AnyArray] | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Does what `grouped_matmul` does; the rows behind all groups are zeros only where `Product.clears` says so."""
    arguments.require_values(lhs=lhs, rhs=rhs, group_sizes=group_sizes, bias=bias, scales=(lhs_scale, rhs_scale))
    arguments.one_of("implementation", implementation, dispatch.IMPLEMENTATIONS)
    arguments.config(config)
    _settings.require_valid()
    clears = (True, True) if checks_numbers() else clears
    transpose_rhs = arguments.flag("transpose_rhs", transpose_rhs)
    container, operands = _checked(lhs, rhs, group_sizes, transpose_rhs, _NAMES)
    out_dtype = arguments.result_dtype(preferred_element_type, operands.lhs.dtype)
    operands = _with_vectors(operands, container, transpose_rhs, bias, lhs_scale, rhs_scale)
    combines = _combines(activation, rhs, container, _NAMES)
    # The sizes are computed with first, wherever they are.
    why_not = why_not_fused([(name, x) for name, x in operands.named if name != "group_sizes"])
    target = dispatch.target()
    must_fuse = implementation == "fused"
    product = Product("rows", transpose_rhs, out_dtype, "fused", target, config, must_fuse, clears=clears)
    if config is not None and not why_not:
        with contextlib.suppress(NotImplementedError):  # XLA may serve the call.
            grouped_choice.check(operands, product, config)
    applied, after = None, None
    if activation is not None:
        arrays = len(operands.rhs_list) if combines else 1
        try:
            applied, scalars = activations.traced(activation, accumulator(operands.lhs.dtype), arrays)
            operands = dataclasses.replace(operands, scalars=scalars)
        except activations.NotElementwise as why:
            if implementation == "fused":
                raise NotImplementedError(str(why)) from None
            after = activations.on_all(activations.by_itself(activation), combines)
    product = dataclasses.replace(product, activation=applied)
    if after is not None:
        product = dataclasses.replace(product, out_dtype=accumulator(operands.lhs.dtype))
    choice = _decide(operands, product, implementation, why_not)
    require_one_device(NAME, [x for _, x in operands.named], choice.implementation)
    record(choice)
    product = dataclasses.replace(product, implementation=choice.implementation)
    return in_device_memory(lambda operands: _computed(operands, product, after, out_dtype), operands)


def _computed(operands: Grouped, product: Product, after: BoundActivation, out_dtype: jnp.dtype) -> jax.Array:
    """Runs a product. XLA applies `after`, a function that no kernel can compute, to bare products and their scales."""
    operands = dataclasses.replace(operands, sizes=groups.clipped(operands.sizes, operands.lhs.shape[0]))
    if after is None:
        return _run(operands, product)
    products = [_run(Grouped(operands.lhs, (x,), operands.sizes), product) for x in operands.rhs_list]
    (out,) = after(grouped_by_xla.filled(grouped_by_xla.scaled(products, operands), operands.sizes))
    return grouped_by_xla.cleared(out, operands.sizes).astype(out_dtype)


def _run(operands: Grouped, product: Product) -> jax.Array:
    return sharded.in_enterable_axes(functools.partial(grouped_operation.run, product=product), operands)


def require_operands(
    lhs: Given, rhs: Given, group_sizes: Given, *, names: Names, bias: Given, activation: Given, transpose_rhs: bool
) -> None:
    """Checks what another public function passes on. `names` are its names of `lhs` and `rhs`, for messages.

    Raises:
      ValueError: the operands, `bias` and `activation` do not fit each other.
    """
    container, operands = _checked(lhs, rhs, group_sizes, transpose_rhs, names)
    _with_vectors(operands, container, transpose_rhs, bias, None, None, names)
    _combines(activation, rhs, container, names)


def _combines(activation: Given, rhs: Given, container: type | None, names: Names) -> bool:
    """Whether the activation takes an array for each right operand. If not, there must be one right operand."""
    if activation is not None and not callable(activation):
        raise ValueError(f"`activation` must be a function of arrays, got {arguments.shown(activation)}: pass one")
    combines = activations.takes_all(activation, rhs)
    if container is not None and not combines:
        raise ValueError(
            f"`{names[1]}` must be one array unless `activation` takes one array for each, got a {container.__name__} "
            f"of {len(rhs)}: make a call for each, or pass such an activation"
        )
    return combines


def _checked(
    lhs: Given, rhs: Given, group_sizes: Given, transpose_rhs: bool, called: Names
) -> tuple[type | None, Grouped]:
    """Returns the container of the right operands (None: one array) and the operands. `called`: names for messages."""
    of_lhs, of_rhs = called
    lhs = arguments.array(of_lhs, lhs)
    container = type(rhs) if type(rhs) in (list, tuple) else None
    given = [rhs] if container is None else list(rhs)
    if not given:
        raise ValueError(
            f"`{of_rhs}` must hold at least one array, got an empty {type(rhs).__name__}: name the weights"
        )
    names = rhs_names(container, len(given), of_rhs)
    rhs_list = [arguments.array(name, x) for name, x in zip(names, given, strict=True)]
    kind = getattr(group_sizes, "dtype", None)
    if kind is None or not jnp.issubdtype(kind, jnp.integer) or group_sizes.ndim != 1:
        raise ValueError(
            "`group_sizes` must be integers of shape (groups,), got "
            f"{arguments.shown(group_sizes)}: pass how many rows each group has, e.g. as a jnp.array"
        )
    sizes = jnp.asarray(group_sizes)
    if lhs.ndim != 2:
        raise ValueError(f"`{of_lhs}` must have 2 dimensions, got {lhs.ndim} (shape {lhs.shape}): reshape it")
    layout = "n, k" if transpose_rhs else "k, n"
    for name, x in zip(names, rhs_list, strict=True):
        if x.ndim != 3:
            raise ValueError(
                f"`{name}` must have 3 dimensions, (groups, {layout}), got {x.ndim} (shape {x.shape}): stack the "
                "matrices of the groups"
            )
        if x.dtype != lhs.dtype and not (lhs.dtype in FLOAT8 and x.dtype in FLOAT8):
            raise ValueError(
                f"`{of_lhs}` and `{name}` must have the same dtype, got {lhs.dtype} and {x.dtype}: cast one"
            )
        if x.shape[0] != sizes.shape[0]:
            raise ValueError(
                f"`{name}` must have a matrix for each of the {sizes.shape[0]} groups of `group_sizes`, got "
                f"{x.shape[0]} (shape {x.shape}): give each group one of each"
            )
        k = x.shape[2 if transpose_rhs else 1]
        if k != lhs.shape[1]:
            raise ValueError(
                f"`{of_lhs}` and `{name}` must agree in the contraction dimension, got k={lhs.shape[1]} in {of_lhs} "
                f"{lhs.shape} and k={k} in {name} {x.shape}: is it stored transposed (`transpose_rhs`)?"
            )
        if x.shape != rhs_list[0].shape:
            raise ValueError(
                f"the arrays of `{of_rhs}` must have one shape, got {rhs_list[0].shape} and {x.shape}: pad them"
            )
    if not sizes.shape[0]:
        raise ValueError("`group_sizes` must have at least one entry, got 0: name the groups")
    return container, Grouped(lhs, tuple(rhs_list), sizes)


def _with_vectors(
    operands: Grouped,
    container: type | None,
    transpose_rhs: bool,
    bias: Given,
    lhs_scale: Given,
    rhs_scale: Given,
    names: Names = _NAMES,
) -> Grouped:
    wide = accumulator(operands.lhs.dtype)
    count, *last = operands.rhs_list[0].shape
    shape, m = (count, last[0 if transpose_rhs else 1]), operands.lhs.shape[0]
    biases = _per_rhs("bias", bias, operands, container, [shape], wide, names[1])
    columns = _per_rhs("rhs_scale", rhs_scale, operands, container, [shape, ()], wide, names[1])
    row_scale: Leaf = None
    if lhs_scale is not None:
        given = arguments.factor("lhs_scale", lhs_scale, wide)
        if given.shape not in {(), (m, 1)}:
            raise ValueError(
                f"`lhs_scale` must be a scalar or of shape ({m}, 1), one value per row of `lhs`, got shape "
                f"{given.shape}: reshape it"
            )
        row_scale = jnp.broadcast_to(given, (m, 1))[:, 0]
    if columns is not None:
        columns = tuple(jnp.broadcast_to(x, shape) for x in columns)
    return dataclasses.replace(operands, row_scale=row_scale, column_scales=columns, biases=biases)


def _per_rhs(
    name: str,
    given: Given,
    operands: Grouped,
    container: type | None,
    shapes: list[tuple[int, ...]],
    dtype: DTypeLike,
    rhs: str,
) -> tuple[Leaf, ...] | None:
    """Returns an argument's entry for each right operand, or None if there is none. `rhs`: their name for messages."""
    if given is None:
        return None
    count = len(operands.rhs_list)
    is_list = isinstance(given, (list, tuple))
    if () in shapes and not is_list and jnp.ndim(given) == 0:
        given, is_list = [given] * count, True
    elif is_list != (container is not None) or (is_list and len(given) != count):
        wanted = "one array" if container is None else f"a list of {count}, as `{rhs}` is"
        raise ValueError(f"`{name}` must be {wanted}, got {arguments.shown(given)}: give one for each array of `{rhs}`")
    entries = []
    for index, x in enumerate(given if is_list else [given]):
        label = name if container is None else f"{name}[{index}]"
        x = arguments.factor(label, x, dtype)
        if x.shape not in shapes:
            raise ValueError(
                f"`{label}` must have shape {shapes[0]}, one value per group and column, got {x.shape}: reshape it"
            )
        entries.append(x)
    return tuple(entries)


def require_one_device(name: str, operands: Sequence[Leaf], implementation: Implementation | None) -> None:
    """Raises NotImplementedError for operands on a mesh with Explicit axes: XLA does not shard such a product.

    A kernel can run if the mesh has one device. `name` is that of the operation, for the message.
    """
    mesh = sharded.mesh_of(*operands) or jax.sharding.get_abstract_mesh()
    if not sharded.explicit_axes(mesh) or mesh.manual_axes or (implementation == "fused" and mesh.size == 1):
        return
    raise NotImplementedError(
        f"`{name}` on a mesh with Explicit axes must be called inside jax.shard_map, where each device multiplies its "
        f"own rows, got operands on {dict(mesh.shape)} outside of it: wrap the call, or use overlap.layers.ExpertMLP"
    )


def _decide(operands: Grouped, product: Product, implementation: Implementation | None, why_not: str) -> Explanation:
    """Chooses between the kernel and XLA. `why_not` says why no kernel can be built, if that is so."""
    lhs, given = operands.lhs, product.config
    (m, k), n = lhs.shape, operands.rhs_list[0].shape[1 if product.transpose_rhs else 2]

    def serve() -> tuple[Config, str]:
        sharded.require_no_partitioner_axes()
        if lhs.dtype in FLOAT8 and not product.transpose_rhs:
            raise NotImplementedError(
                "the fused kernel reads matrices of 8 bits as [groups, n, k] only, got transpose_rhs=False: store them "
                'so and pass transpose_rhs=True, or use implementation="xla"'
            )
        if given is None:
            return grouped_choice.config_of(operands, product), "heuristic"
        grouped_choice.check(operands, product, given)
        return given, "given"

    return dispatch.decide_unmodeled(
        NAME, implementation, product.target, serve, reason="XLA multiplies all rows with all matrices",
        why_not=why_not,
        shapes=f"{operands.sizes.shape[0]} groups, {m}x{n}x{k} {lhs.dtype.name}",
    )  # fmt: skip
