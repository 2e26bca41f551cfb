"""`sharded_matmul`: a product of global arrays, by the operation that fits how they are sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from overlap.choice.dispatch import Explanation, Implementation
from overlap.collectives import explain
from overlap.frame import activation as activations
from overlap.frame import arguments, call, sharded
from overlap.frame.normalize import Call
from overlap.frame.operands import accumulator
from overlap.frame.signatures import AnyArray
from overlap.kernels.config import Config
from overlap.sharded import checks, partitions
from overlap.sharded.checks import NAME
from overlap.sharded.parts import Product
from overlap.sharded.plan import Partition, ShardingPlan, plan_of

Sharding = PartitionSpec | jax.NamedSharding
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call that has been checked: what is static about it. Its operands are arrays by name, as `Product` takes them.

    Attributes:
      product: what each device computes.
      mesh: the mesh, some axes of which may be manual already.
      specs: of the operands, inside.
      out_spec: of each result.
    """

    product: Product
    mesh: Any
    specs: tuple[tuple[str, jax.P], ...]
    out_spec: jax.P

    def run(self, operands: dict[str, Any], said: list[Explanation] | None = None) -> tuple[jax.Array, ...]:
        """The results; `said` takes what was decided."""
        specs = dict(self.specs)
        # The caller's own scopes stay around this one.
        with jax.named_scope(f"{NAME}.{self.product.plan.operation}"):
            cut = {name: self._cut(x, specs[name]) for name, x in operands.items()}
            axes = partitions.open_axes(self.mesh)

            def of_parts(parts: dict[str, Any]) -> tuple[jax.Array, ...]:
                self._require_all_manual()
                return self.product.compute(parts, said)

            return sharded.enter(of_parts, self.mesh, specs, self.out_spec, axes)(cut)

    def _cut(self, x: jax.Array, spec: jax.P) -> jax.Array:
        """An operand typed as it is entered. Along Auto axes there are no types, and `shard_map` itself sees to it."""
        explicit = sharded.explicit_axes(self.mesh)
        wanted = partitions.spec_of(partitions.only(_entries(spec), explicit))
        if not explicit or (sharded.has_mesh(x) and sharded.spec_of_type(x) == wanted):
            return x
        return jax.reshard(x, jax.NamedSharding(self.mesh, wanted))

    def _require_all_manual(self) -> None:
        mesh = jax.sharding.get_abstract_mesh()
        if left := [axis for axis in partitions.open_axes(mesh) if mesh.shape[axis] > 1]:
            raise NotImplementedError(
                f"`{NAME}` does not take `jax.vmap` over a dimension that is sharded, here over {tuple(left)}: give "
                "that dimension as a leading one of `lhs` instead"
            )


# Outside of `jax.jit`: a call like one before is not compiled again, if the same is decided.
_run_eagerly = jax.jit(lambda call, said, operands: call.run(operands), static_argnums=(0, 1))


def _entries(spec: jax.P) -> Partition:
    return tuple(entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in spec)


def _prepare(
    lhs: Any, rhs: Any, *, out_sharding: Any, lhs_sharding: Any = None, rhs_sharding: Any = None, mesh: Any = None,
    bias: Any = None, addend: Any = None, activation: Any = None, preferred_element_type: Any = None,
    transpose_rhs: bool = False, keep_gathered: bool = False, implementation: str | None = None,
    config: Config | None = None,
) -> tuple[_Call, dict[str, Any], Call]:  # fmt: skip
    """The checked call, its operands by name, and what leads back to the caller's form."""
    call.check_choice(config, implementation)
    keep_gathered = arguments.flag("keep_gathered", keep_gathered)
    given = checks.arrays(lhs, rhs, bias, addend)
    rhs_shardings = _of_each_rhs(rhs_sharding, len(rhs) if type(rhs) in (list, tuple) else 1)
    shardings = [("lhs_sharding", lhs_sharding)]
    shardings += [*(("rhs_sharding", x) for x in rhs_shardings), ("out_sharding", out_sharding)]
    used = partitions.mesh_of(mesh, jax.tree.leaves(given), [x for _, x in shardings if x is not None])
    # Before the sizes, which are those of parts where axes are manual.
    for name, sharding in shardings:
        partitions.require_not_manual(name, sharding, used)
    whole = checks.whole_call(given, activation, preferred_element_type, transpose_rhs)
    rank = len(given["lhs"].shape)
    operands: dict[str, Any] = {"lhs": given["lhs"]}
    for name in ("rhs", "bias", "addend"):
        of_each = [given[name]] if whole.container is None else given[name] or ()
        operands |= {f"{name}[{i}]": x for i, x in enumerate(of_each) if x is not None}
    by_name = {_named(name, whole): x for name, x in operands.items()}
    sharded.require_summed(by_name)
    checks.require_on_mesh(by_name, used)
    plan, out = _planned(operands, whole, out_sharding, lhs_sharding, rhs_shardings, used)
    applied, scalars = None, ()
    if activation is not None:
        applied, scalars = activations.traced(activation, accumulator(operands["lhs"].dtype))
    operands |= {f"scalars[{i}]": scalar for i, scalar in enumerate(scalars)}
    order = slice(None, None, -1) if whole.layouts.transpose_rhs else slice(None)
    partition = {"lhs": plan.lhs, "rhs": plan.rhs[order], "bias": plan.out[-1:], "scalars": ()}
    specs = {}
    for name, x in operands.items():
        kind = name.split("[")[0]
        # (An addend may lack the leading dimensions.)
        parts = plan.out[rank - len(x.shape) :] if kind == "addend" else partition[kind]
        partitions.require_divisible(f"`{_named(name, whole)}`", x.shape, parts, used)
        specs[name] = partitions.spec_of(parts)
    for out_type in whole.operands.rhs_list:
        n = whole.layouts.k_n(out_type.shape)[1]
        partitions.require_divisible("the result", (*operands["lhs"].shape[:-1], n), plan.out, used)
    product = Product(
        plan, whole.layouts.transpose_rhs, whole.out_dtype, applied, config, implementation, keep_gathered
    )
    return _Call(product, used, tuple(specs.items()), partitions.spec_of(out)), operands, whole


def _of_each_rhs(given: Any, count: int) -> list[Any]:
    """The shardings of the right operands: one for all, or a list."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise ValueError(
            f"`rhs_sharding` must be one sharding for all of `rhs` or a list of {count}, got a list of {len(given)}: "
            "give one for each"
        )
    return given


def _planned(
    operands: dict[str, Any], whole: Call, out_sharding: Any, lhs_sharding: Any, rhs_shardings: list[Any], mesh: Any
) -> tuple[ShardingPlan, Partition]:
    """The plan, and the partition of the result as the caller asks for it."""
    left = partitions.of_operand("lhs", operands["lhs"], lhs_sharding, mesh)
    out = partitions.given("out_sharding", out_sharding, len(operands["lhs"].shape), mesh)
    found = []
    for i, given in enumerate(rhs_shardings):
        name = _named(f"rhs[{i}]", whole)
        parts = partitions.of_operand(name, operands[f"rhs[{i}]"], given, mesh, "rhs_sharding")
        found.append(parts[::-1] if whole.layouts.transpose_rhs else parts)
    for i, parts in enumerate(found):
        if parts != found[0]:
            raise ValueError(
                f"all of `rhs` must be sharded alike, got {partitions.spec_of(found[0])} for `rhs[0]` and "
                f"{partitions.spec_of(parts)} for `rhs[{i}]`: jax.reshard one of them, or make a call for each"
            )
    return plan_of(left, found[0], out, dict(mesh.shape), sharded.explicit_axes(mesh)), out


def _named(name: str, whole: Call) -> str:
    """An operand's name as the caller knows it."""
    return name.split("[")[0] if whole.container is None else name


def decide(*args: Any, **keywords: Any) -> Explanation:
    """Checks a call of `sharded_matmul` and says what would run. Same arguments and errors; arrays may be types."""
    checked, operands, _ = _prepare(*args, **keywords)
    return _decided(checked, operands)[0]


def _decided(checked: _Call, operands: dict[str, Any]) -> tuple[Explanation, ...]:
    said: list[Explanation] = []
    jax.eval_shape(lambda operands: checked.run(operands, said), operands)
    return tuple(dataclasses.replace(choice, plan=str(checked.product.plan)) for choice in said)


# --- The public function: its result is what `rhs` is -----------------------------------------------------------------


@overload
def sharded_matmul(
    lhs: AnyArray, rhs: AnyArray, *,
    out_sharding: Sharding, lhs_sharding: Sharding | None = None,
    mesh: Mesh | None = None, activation: Callable[[jax.Array], jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None, transpose_rhs: bool = False, keep_gathered: bool = False,
    implementation: Implementation | None = None, config: Config | None = None,
    rhs_sharding: Sharding | None = None, bias: AnyArray | None = None, addend: AnyArray | None = None,
) -> jax.Array: ...  # fmt: skip
@overload
def sharded_matmul[Side: AnyArray](
    lhs: AnyArray, rhs: list[Side], *,
    out_sharding: Sharding, lhs_sharding: Sharding | None = None,
    mesh: Mesh | None = None, activation: Callable[[jax.Array], jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None, transpose_rhs: bool = False, keep_gathered: bool = False,
    implementation: Implementation | None = None, config: Config | None = None,
    rhs_sharding: Sharding | list[Sharding] | None = None, bias: Sequence[AnyArray | None] | None = None,
    addend: Sequence[AnyArray | None] | None = None,
) -> list[jax.Array]: ...  # fmt: skip
@overload
def sharded_matmul(
    lhs: AnyArray, rhs: tuple[AnyArray, ...], *,
    out_sharding: Sharding, lhs_sharding: Sharding | None = None,
    mesh: Mesh | None = None, activation: Callable[[jax.Array], jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None, transpose_rhs: bool = False, keep_gathered: bool = False,
    implementation: Implementation | None = None, config: Config | None = None,
    rhs_sharding: Sharding | list[Sharding] | None = None, bias: Sequence[AnyArray | None] | None = None,
    addend: Sequence[AnyArray | None] | None = None,
) -> tuple[jax.Array, ...]: ...  # fmt: skip
def sharded_matmul(
    lhs: AnyArray,
    rhs: AnyArray | list[Any] | tuple[AnyArray, ...],
    *,
    out_sharding: Sharding,
    lhs_sharding: Sharding | None = None,
    rhs_sharding: Sharding | list[Sharding] | None = None,
    mesh: Mesh | None = None,
    bias: AnyArray | Sequence[AnyArray | None] | None = None,
    addend: AnyArray | Sequence[AnyArray | None] | None = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_rhs: bool = False,
    keep_gathered: bool = False,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> jax.Array | list[jax.Array] | tuple[jax.Array, ...]:
    """activation(lhs @ rhs + bias + addend) of global arrays, communication hidden behind computation.

    For code under plain `jax.jit`: it enters `jax.shard_map` by itself. Which operation of this library runs follows
    from where each mesh axis occurs (docs/sharded.md has the table and examples):

        rows of lhs, n of rhs, n of the result    all_gather_lhs_matmul
        k of lhs and rhs, rows of the result      matmul_reduce_scatter (n of the result: scatter_dimension=1)
        k of lhs and rhs, not in the result       matmul_all_reduce
        n or k of rhs alone (FSDP)                all_gather_rhs_matmul; beside one of the above the weights are
                                                  gathered by XLA before it

    Axes of the rows of `lhs` and of the result, or of n of `rhs` and of the result, communicate nothing.

    Args:
      lhs: global [..., m, k]; a device's part of it is what its sharding says. All dimensions but the last are rows.
      rhs: global [k, n], or [n, k] with `transpose_rhs`, in the same dtype; or a list or tuple of such, all sharded
        alike, each with its own n, which share the gather of `lhs`.
      out_sharding: a PartitionSpec (or NamedSharding) of the result, of each if there are several.
      lhs_sharding: that of `lhs`. It must be given where the mesh has Auto axes, since types do not say how arrays are
        sharded along these; what arrives otherwise is moved by XLA. Along Explicit axes it must be as the type says.
      rhs_sharding: likewise of `rhs` as it lies in memory; for several right operands one for all, or a list.
      mesh: by default that of a NamedSharding among the above, of `jax.set_mesh` or of the operands.
      bias: global [n], added to each row; for several right operands a list of such, or None in the place of one.
      addend: global [..., m, n] or [m, n], added before the activation (a residual, say); likewise. Its dtype does not
        change the result's.
      activation: an elementwise function of float32 values, as for `overlap.matmul`; of each result.
      preferred_element_type: dtype of the result; that of the operands by default, bfloat16 for float8. Accumulation
        is in float32; what travels to be summed over devices has this dtype.
      transpose_rhs: `rhs` lies transposed in memory.
      keep_gathered: whether what XLA gathers, and `lhs` by the fused kernel, is kept for the backward pass: D times the
        memory of the shard on D devices, and one gather less. By default weights are gathered again there, as is `lhs`
        by the fused kernel (XLA's implementation keeps `lhs`, unless `jax.checkpoint` says otherwise).
      implementation: "fused" (one kernel; on CPU devices it runs emulated), "xla", or None to choose: fused where it
        can serve the call on a GPU and XLA was not measured to be faster. Gathers of the weights beside another
        communication are XLA's in any case.
      config: tile sizes of the fused kernel; by default from a table of measurements, else by a model.

    Returns:
      Global [..., m, n], sharded as `out_sharding` says; a list or tuple of such if `rhs` is one. Deterministic.

    Raises:
      ValueError: no operation serves these shardings; ranks, dtypes or sizes are wrong, or a size is 0; a dimension
        cannot be cut into equal parts; there is no mesh, or a sharding or an operand does not fit it; a type has
        unreduced or reduced axes.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call (the message says why and what
        to do), or `jax.vmap` over a dimension that is sharded.

    Works under `jax.jit` and outside of it, `jax.grad` of any operand (cotangents of weights that were gathered are
    reduce-scattered, those of weights that several devices have are summed, once), `jax.checkpoint`, `lax.scan`,
    `jax.vmap` over dimensions that are not sharded, and inside `jax.shard_map` over other axes. `overlap.explain`
    takes it.

    Example:
      >>> mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
      >>> with jax.set_mesh(mesh):
      ...     y = overlap.sharded_matmul(
      ...         x, w, lhs_sharding=P("data", "tensor", None), rhs_sharding=P(None, "tensor"),
      ...         out_sharding=P("data", None, "tensor"),
      ...     )

    Source: Shoeybi et al., "Megatron-LM" (2019); Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (2022) for sequence parallelism.
    """
    given = locals()
    arguments.require_values(**{name: given[name] for name in ("lhs", "rhs", "bias", "addend")})
    checked, operands, whole = _prepare(**given)
    if any(isinstance(x, Tracer) for x in operands.values()):
        outs = checked.run(operands)
    else:
        outs = _run_eagerly(checked, _decided(checked, operands), operands)
    return outs[0] if whole.container is None else whole.container(outs)


explain.EXPLAINED[sharded_matmul] = decide
