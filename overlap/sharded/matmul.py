"""`sharded_matmul`: a product of global arrays. Their shardings choose the operation that computes it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from overlap.choice.crossover import Cause
from overlap.choice.dispatch import Implementation, log
from overlap.frame import activation as activations
from overlap.frame import arguments, call, mesh_axes
from overlap.frame.explain import recorded, settled
from overlap.frame.operands import accumulator
from overlap.frame.operation import Call
from overlap.frame.signatures import AnyArray, AnyMesh, Arguments, PerRhs, Sides
from overlap.kernels.config import Config
from overlap.sharded import checks, partitions
from overlap.sharded.checks import NAME
from overlap.sharded.decide import decide
from overlap.sharded.dimensions import Dimensions, dimensions_of
from overlap.sharded.parts import Product
from overlap.sharded.plain import GlobalProduct
from overlap.sharded.plan import Partition, ShardingPlan, plan_of

Sharding = PartitionSpec | jax.NamedSharding


def _run(whole: GlobalProduct, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Computes the results. `operands`: arrays by name, as `Product` takes them."""
    # The caller's own scopes stay around this scope.
    product = whole.product
    with jax.named_scope(f"{NAME}.{product.plan.operation}"):
        if product.implementation != "fused":
            choice = decide(
                lambda decided: _of_parts(whole, dataclasses.replace(product, decided=decided)), operands, product.plan
            )
            if product.implementation is None:
                log(choice)
            if choice.implementation == "xla":
                with settled(choice):
                    return whole.compute(operands)
            if choice.cause is not Cause.ASKED_FOR:
                product = dataclasses.replace(product, decided=choice)
        return _of_parts(whole, product)(operands)


def _of_parts(whole: GlobalProduct, product: Product) -> Callable[[dict[str, jax.Array]], tuple[jax.Array, ...]]:
    """The product inside `shard_map`, where kernels can run."""

    def of_parts(parts: dict[str, Any]) -> tuple[jax.Array, ...]:
        inner = jax.sharding.get_abstract_mesh()
        if left := tuple(axis for axis in partitions.open_axes(inner) if inner.shape[axis] > 1):
            raise NotImplementedError(
                f"`{NAME}` does not take `jax.vmap` over a dimension that is sharded, here over {left}: give that "
                "dimension as a leading one of `lhs` instead"
            )
        merged = {name: x.reshape(whole.dimensions.merged(name, x.shape)) for name, x in parts.items()}
        outs = product.compute(merged)
        return tuple(x.reshape(*x.shape[:-1], *n) for x, n in zip(outs, whole.columns, strict=True))

    return partitions.on_parts(of_parts, whole.mesh, whole.specs, whole.out_spec)


# For calls outside `jax.jit`, those that `jax.grad` traces too: evaluated one by one, operations on arrays of Explicit
# axes get types that their derivatives do not fit. The decisions are part of the cache key: a call that is equal to an
# earlier one is compiled again only if other decisions were made.
_run_eagerly = jax.jit(lambda whole, decisions, operands: _run(whole, operands), static_argnums=(0, 1))


def _prepare(
    given: Arguments, shardings: dict[str, Any], mesh: AnyMesh | None, keep_gathered: bool | None
) -> tuple[GlobalProduct, dict[str, Any], Call]:
    """Checks all arguments. Returns the product, its operands by name, and the checked call with global arrays.

    `shardings`: those that the caller gave for "lhs", "rhs" and "out".
    """
    call.check_choice(given)
    if not isinstance(keep_gathered, (bool, type(None))):
        raise ValueError(
            f"`keep_gathered` must be True, False or None, got {arguments.shown(keep_gathered)}: leave it out"
        )
    rhs = given.rhs
    activation = given.activation
    arrays = checks.arrays(given.lhs, rhs, given.bias, given.addend)
    of_each_rhs = _of_each_rhs(shardings["rhs"], len(rhs) if type(rhs) in (list, tuple) else 1)
    of_rhs = {f"rhs[{i}]": x for i, x in enumerate(of_each_rhs)}
    shardings = {"lhs": shardings["lhs"], **of_rhs, "out": shardings["out"]}
    used = partitions.mesh_of(mesh, jax.tree.leaves(arrays), [x for x in shardings.values() if x is not None])
    # Check this before the sizes: inside a `shard_map` over an axis, arrays have the sizes of one device's parts.
    for name, sharding in shardings.items():
        partitions.require_not_manual(f"{name.split('[')[0]}_sharding", sharding, used)
    entries = len(partitions.given_spec("out_sharding", shardings["out"]))
    dimensions = dimensions_of(arrays["lhs"], arrays["rhs"], entries, given.transpose_rhs)
    whole = checks.whole_call(arrays, activation, given.preferred_element_type, dimensions)
    operands: dict[str, Any] = {"lhs": arrays["lhs"]}
    for name in ("rhs", "bias", "addend"):
        of_each = [arrays[name]] if whole.container is None else arrays[name] or ()
        operands |= {f"{name}[{i}]": x for i, x in enumerate(of_each) if x is not None}
    by_name = {_named(name, whole): x for name, x in operands.items()}
    partitions.require_summed(by_name)
    checks.require_on_mesh(by_name, used)
    arguments.one_memory(by_name.items())
    plan, out = _planned(operands, shardings, whole, dimensions, used)
    applied, scalars = None, ()
    out_dtype = whole.form.out_dtype
    implementation = given.implementation
    if activation is not None:
        wide = accumulator(operands["lhs"].dtype)
        try:
            applied, scalars = activations.traced(activation, wide, len(rhs) if whole.combines else 1)
        except activations.NotElementwise as why:
            if implementation == "fused":
                raise
            # XLA computes the products in f32, and the activation is applied to the global results.
            of_all = activations.on_all(activations.by_itself(activation), whole.combines)
            whole = dataclasses.replace(whole, not_elementwise=str(why), by_xla=of_all)
            out_dtype = wide
            implementation = "xla"
    operands |= {f"scalars[{i}]": scalar for i, scalar in enumerate(scalars)}
    specs = _specs_of(operands, plan, whole, dimensions, used)
    columns = _columns_of(operands, out, dimensions, used)
    product = Product(
        plan, dimensions.transpose_rhs, out_dtype, applied, given.config, implementation, keep_gathered,
        whole.not_elementwise,
    )  # fmt: skip
    columns = columns[:1] if product.combines else columns
    out_spec = mesh_axes.spec(out)
    return GlobalProduct(product, used, tuple(specs.items()), out_spec, dimensions, tuple(columns)), operands, whole


def _specs_of(
    operands: dict[str, Any], plan: ShardingPlan, whole: Call, dimensions: Dimensions, mesh: AnyMesh
) -> dict[str, jax.P]:
    """The partition of each operand, as the plan wants it.

    Raises:
      ValueError: a dimension cannot be cut into equal parts.
    """
    rhs = plan.rhs[::-1] if dimensions.transpose_rhs else plan.rhs
    partition = {"lhs": plan.lhs, "rhs": rhs, "bias": plan.out[-1:], "scalars": ()}
    specs = {}
    for name, x in operands.items():
        kind = name.split("[")[0]
        # In the plan leading dimensions are merged into rows. An addend may lack them.
        merged = plan.out[-len(dimensions.merged(name, x.shape)) :] if kind == "addend" else partition[kind]
        parts = dimensions.split(name, x.shape, merged, mesh.shape)
        partitions.require_divisible(f"`{_named(name, whole)}`", x.shape, parts, mesh)
        specs[name] = mesh_axes.spec(parts)
    return specs


def _columns_of(
    operands: dict[str, Any], out: Partition, dimensions: Dimensions, mesh: AnyMesh
) -> list[tuple[int, ...]]:
    """For each right operand, a device's sizes of the dimensions that the result has from it."""

    def part(size: int, axes: tuple[str, ...]) -> int:
        return size // math.prod(mesh.shape[axis] for axis in axes)

    shapes = _result_shapes(operands, dimensions)
    return [tuple(map(part, shape[-dimensions.n :], out[-dimensions.n :])) for shape in shapes]


def _of_each_rhs(given: Any, count: int) -> list[Any]:
    """The sharding of each of `count` right operands. `given` is one sharding for all of them, or a list."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"`rhs_sharding` must be one sharding for all of `rhs` or a list of {count}, got a list of {len(given)}: "
            "give one for each"
        )
    return given


def _result_shapes(operands: dict[str, Any], dimensions: Dimensions) -> list[tuple[int, ...]]:
    """The global shape of each result."""
    rows = tuple(operands["lhs"].shape[: -dimensions.k])
    return [(*rows, *dimensions.k_n(x.shape)[1]) for name, x in operands.items() if name.startswith("rhs")]


def _planned(
    operands: dict[str, Any], shardings: dict[str, Any], whole: Call, dimensions: Dimensions, mesh: AnyMesh
) -> tuple[ShardingPlan, Partition]:
    """The plan, and the partition of the result as the caller asked for it.

    `shardings`: those that the caller gave for "lhs", "rhs[0]", …, and "out".
    """
    shapes = _result_shapes(operands, dimensions)
    out = partitions.given("out_sharding", shardings["out"], len(shapes[0]), mesh)
    found = []
    for key, sharding in shardings.items():
        if key == "out":
            continue
        name = _named(key, whole)
        x = operands[key]
        parts = partitions.of_operand(name, x, sharding, mesh, f"{key.split('[')[0]}_sharding")
        merged = dimensions.merge(key, x.shape, parts, mesh, f"`{name}`")
        found.append(merged[::-1] if key != "lhs" and dimensions.transpose_rhs else merged)
    left, *rights = found
    merged_outs = [dimensions.merge("out", shape, out, mesh, "the result") for shape in shapes]
    for i, parts in enumerate(rights):
        if parts != rights[0]:
            raise ValueError(
                f"all of `rhs` must be sharded alike, got {mesh_axes.spec(rights[0])} for `rhs[0]` and "
                f"{mesh_axes.spec(parts)} for `rhs[{i}]`: jax.reshard one of them, or make a call for each"
            )
    return plan_of(left, rights[0], merged_outs[0], dict(mesh.shape), mesh_axes.explicit_axes(mesh)), out


def _named(name: str, whole: Call) -> str:
    """An operand's name for messages: without the index if the caller gave a single right operand."""
    return name.split("[")[0] if whole.container is None else name


def sharded_matmul(
    lhs: AnyArray,
    rhs: Sides,
    *,
    out_sharding: Sharding,
    lhs_sharding: Sharding | None = None,
    rhs_sharding: Sharding | list[Sharding] | None = None,
    mesh: AnyMesh | None = None,
    bias: PerRhs | None = None,
    addend: PerRhs | None = None,
    activation: Callable[..., jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    keep_gathered: bool | None = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Sides:
    """Computes activation(lhs @ rhs + bias + addend) of global arrays. Communication overlaps with the computation.

    This function is for code under plain `jax.jit`, and calls `jax.shard_map` itself. The places of each mesh axis
    in the shardings say which operation of this library runs (docs/sharded.md has the table and examples):

        rows of lhs, n of rhs, n of the result    all_gather_lhs_matmul
        k of lhs and rhs, rows of the result      matmul_reduce_scatter (n of the result: dimension=1)
        k of lhs and rhs, not in the result       matmul_all_reduce
        n or k of rhs alone (FSDP)                all_gather_rhs_matmul; beside one of the above, XLA gathers the
                                                  weights before it

    Nothing is communicated along an axis of the rows of both `lhs` and the result, or of n of both `rhs` and the
    result.

    Args:
      lhs: global [..., m, k]; its sharding says which part each device holds. All dimensions but the last are rows.
      rhs: global [k, n], or [n, k] with `transpose_rhs`, in the same dtype. Or a list or tuple of such matrices, each
        with its own n, which share the gather of `lhs`; all must be sharded alike. k and n may each be several
        dimensions, as in weights of attention; the first of them may be sharded (heads, but not head_dim).
      out_sharding: a PartitionSpec (or NamedSharding) of the result, one for all results. If `rhs` has more than two
        dimensions, it has an entry for each dimension of the result, which says how many dimensions are contracted:
        P(None, None, "tensor", None) for [b, s, features] @ [features, heads, head_dim], P(None, "tensor", None) for
        [b, s, heads, head_dim] @ [heads, head_dim, features].
      lhs_sharding: the sharding of `lhs`. Required if the mesh has Auto axes, since types do not say how arrays are
        sharded along Auto axes. If the array is sharded in another way, XLA moves it first. Along Explicit axes the
        sharding must be as the type says.
      rhs_sharding: the sharding of `rhs` as it lies in memory, under the same conditions; for several right operands
        one for all, or a list.
      mesh: the mesh; by default the mesh of a NamedSharding among the above, of `jax.set_mesh` or of the operands.
      bias, addend: see `overlap.matmul`; global [n] (each dimension of n) and [..., m, n] or [m, n].
      activation: see `overlap.matmul`. Where no kernel applies it to several results, it gets them in their own dtype.
      preferred_element_type: see `overlap.matmul`. Products that are summed over devices are sent in this dtype.
      keep_gathered: whether gathered operands are kept for the backward pass. On D devices this takes D times the
        memory of the shard, and saves one gather. False: weights that are gathered are not kept, and nor is `lhs` where
        the kernel gathers it; the backward pass gathers them again. True: all are kept. None, the default: as False
        where the kernel runs, which hides the second gather, and as in plain JAX where it does not: XLA decides, and
        mostly keeps what it gathers within one program.
      implementation: see `overlap.matmul`. Weights that are gathered beside another communication, XLA gathers in any
        case.

    Keywords not listed here: see `overlap.matmul`.

    Returns:
      Global [..., m, n], sharded as `out_sharding` says; a list or tuple of such arrays if `rhs` is one. Deterministic.

    Raises:
      ValueError: no operation serves these shardings; ranks, dtypes or sizes are wrong, or a size is 0; a dimension
        cannot be cut into equal parts; there is no mesh, or a sharding or an operand does not fit it; a type has
        unreduced or reduced axes.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call (the message says why and what
        to do), or `jax.vmap` over a dimension that is sharded.

    Works under `jax.jit` and outside of it, with `jax.grad` of any operand, `jax.checkpoint`, `lax.scan`, `jax.vmap`
    over dimensions that are not sharded, and inside `jax.shard_map` over other axes. Cotangents of weights that were
    gathered are reduce-scattered. Cotangents of weights that several devices have whole are summed, once.

    Examples:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
      >>> with jax.set_mesh(mesh):
      ...     y = overlap.sharded_matmul(
      ...         x, w, lhs_sharding=P("data", "tensor", None), rhs_sharding=P(None, "tensor"),
      ...         out_sharding=P("data", None, "tensor"),
      ...     )

    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (2022) for sequence parallelism.
    """
    given = Arguments(
        lhs,
        rhs,
        addend=addend,
        bias=bias,
        activation=activation,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        config=config,
        implementation=implementation,
    )
    arguments.require_values(**given.arrays)
    shardings = {"lhs": lhs_sharding, "rhs": rhs_sharding, "out": out_sharding}
    product, operands, whole = _prepare(given, shardings, mesh, keep_gathered)
    if arguments.is_in_jit():
        outs = _run(product, operands)
    else:
        with recorded() as decisions:
            jax.eval_shape(functools.partial(_run, product), operands)
        outs = _run_eagerly(product, tuple(decisions), operands)
    if whole.not_elementwise and whole.by_xla is not None:
        outs = tuple(x.astype(whole.form.out_dtype) for x in whole.by_xla(outs))
    result: Any = outs[0] if whole.container is None or whole.combines else whole.container(outs)
    return result
