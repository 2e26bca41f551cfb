"""`matmul`: a product without communication, computed by the mainloop that the collective operations use too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.choice import choose, dispatch
from overlap.choice.dispatch import Explanation, Implementation
from overlap.choice.problem import Problem
from overlap.frame import activation as activations
from overlap.frame import arguments, by_xla, call, sharded
from overlap.frame.normalize import ARRAYS, Call, normalize
from overlap.frame.operands import LaunchPlan, Operands, Results, accumulator, as_rows, sizes
from overlap.frame.operation import Operation
from overlap.frame.signatures import AnyArray, Scale
from overlap.kernels import launch, operations
from overlap.kernels.block_scales import SCALE_DTYPE
from overlap.kernels.config import Config
from overlap.kernels.layouts import OperandLayouts
from overlap.kernels.target import Target
from overlap.primitives import marks
from overlap.single_gpu import product

_SCALES = ("lhs_scale", "rhs_scale")


@dataclasses.dataclass(frozen=True)
class Matmul(Operation):
    """The operation `matmul`. It communicates nothing, and its kernel takes all keywords of the epilogue."""

    combines: bool = False

    spec = operations.MATMUL
    takes_block_scales = True

    @property
    def apart(self) -> Operation:
        return dataclasses.replace(self, combines=False)

    @property
    def takes_lists(self) -> bool:
        # Several right operands of one product share nothing but an activation.
        return self.combines

    def problem(self, operands: Operands, layouts: OperandLayouts, out_dtype: Any) -> Problem:
        batch, m, widths, k = sizes(as_rows(operands, layouts), layouts)
        dtypes, layout = (operands.lhs.dtype.name, jnp.dtype(out_dtype).name), layouts.name
        more: Any = dict(layout=layout, batch=batch or 1, block_scaled=operands.is_block_scaled, sides=len(widths))
        return Problem(self.name, m, sum(widths), k, *dtypes, **more)

    def check(self, call: Call, config: Config, target: Target, mesh: Any) -> None:
        del mesh
        if call.sizes[0] == 0:
            raise NotImplementedError('the fused kernel needs a batch of at least 1, got 0: use implementation="xla"')
        self.problem(call.operands, call.layouts, call.out_dtype).check(config, target)
        sharded.require_no_partitioner_axes()

    def times(self, lhs: jax.Array, rhs: jax.Array, layouts: OperandLayouts, dtype: Any, plan: LaunchPlan) -> jax.Array:
        """Computes lhs @ rhs: by the kernel if it can serve these operands, else by XLA."""
        operands = Operands(lhs, (rhs,))
        if 0 in (*lhs.shape, *rhs.shape):
            return by_xla.times(lhs, rhs, layouts, dtype)
        problem = MATMUL.problem(operands, layouts, dtype)
        config, _ = choose.choose_config(problem, plan.target)
        try:
            problem.check(config, plan.target)
        except NotImplementedError:
            return by_xla.times(lhs, rhs, layouts, dtype)
        (out,), _ = call.fused(operands, LaunchPlan(MATMUL, layouts, dtype, plan.target, config))
        return out

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        rows = as_rows(operands, plan.layouts)
        # While a recording runs, tracing the kernel also adds the kernel's entries to the recording. This side effect
        # would be lost in a function that is sealed.
        out = (_sealed if marks.current() is None else product.launch)(rows, plan)
        return (out if rows is operands else out.reshape(*operands.lhs.shape[:-1], out.shape[-1]),), None


MATMUL = Matmul()


def _sealed(operands: Operands, plan: LaunchPlan) -> jax.Array:
    """Runs the kernel as one opaque operation.

    If XLA's partitioner might have to split that operation, XLA's own product is computed instead, unless the caller
    asked for the kernel.
    """
    leaves, structure = jax.tree.flatten(operands)

    def of_leaves(run: Callable[[Operands], jax.Array]) -> Callable[..., jax.Array]:
        return lambda *leaves: run(jax.tree.unflatten(structure, leaves))

    otherwise = of_leaves(
        lambda given: by_xla.products(given, plan.layouts, plan.out_dtype, plan.kernel_activation(given))[0]
    )
    kernel = of_leaves(lambda given: product.launch(given, plan))
    return launch.sealed(kernel, "matmul", None if plan.must_fuse else otherwise)(*leaves)


def prepare(mesh: Any = None, **given: Any) -> tuple[Matmul, Call]:
    """Checks the arguments of `matmul`. Returns the operation and the checked call; see `overlap.frame.call`."""
    del mesh
    operation = Matmul(combines=activations.takes_all(given.get("activation"), given["rhs"]))
    return operation, normalize(operation, **given)


# --- On several devices -----------------------------------------------------------------------------------------------


def _cut(
    mesh: Any, arrays: dict[str, Any], keywords: dict[str, Any], check: Callable[[Matmul, Call], None] | None
) -> Callable[..., jax.Array]:
    """Cuts a call on sharded global arrays into one product for each device; see `sharded`.

    Args:
      mesh: the mesh of the operands' types.
      arrays: the array arguments of `matmul` by name.
      keywords: the other arguments.
      check: a further check of the call, made before the activation is called; None for none.

    Returns:
      A function that takes a function `run` with the arguments of `matmul`. It calls `run` on the shards of each
      device, and returns the global result.

    Raises:
      ValueError, NotImplementedError: as raised by `normalize` for the whole call, by `check`, and by
        `sharded.product_sharding`.
    """
    if type(arrays["rhs"]) in (list, tuple):
        raise NotImplementedError(
            "the fused kernel takes one `rhs` on arrays that are sharded along Explicit axes, got a "
            f'{type(arrays["rhs"]).__name__}: call it inside `jax.shard_map`, or use implementation="xla"'
        )
    given = {name: x for name, x in arrays.items() if x is not None}
    operands = {name: arguments.array(name, x) for name, x in given.items() if name not in _SCALES}
    wide = accumulator(operands["lhs"].dtype)
    blocks = {name for name in _SCALES if getattr(given.get(name), "dtype", None) == SCALE_DTYPE}
    for name in _SCALES:
        if name in given:
            scale = given[name]
            operands[name] = arguments.array(name, scale) if name in blocks else arguments.factor(name, scale, wide)

    def bare_types() -> dict[str, Any]:
        """Types without a mesh. They suffice to check the whole call."""
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in operands.items()}

    if check is not None:
        bare: dict[str, Any] = bare_types() | keywords | {"activation": None}
        check(MATMUL, normalize(MATMUL, **bare))
    if keywords.get("activation") is not None:
        # Scalars that the activation captures are passed through the `shard_map` as operands, like the others.
        applied, scalars = activations.traced(keywords["activation"], wide)
        keywords = keywords | {"activation": applied}
        operands |= {f"scalars[{i}]": scalar for i, scalar in enumerate(scalars)}

    def of_call(shards: dict[str, Any]) -> dict[str, Any]:
        named = {name: x for name, x in shards.items() if "[" not in name}
        return named | {"scalars": tuple(x for name, x in shards.items() if "[" in name)} | keywords

    jax.eval_shape(lambda shards: normalize(MATMUL, **of_call(shards)).operands, bare_types())
    batch = tuple(range(max(operands["lhs"].ndim, operands["rhs"].ndim) - 2))
    matrices = {
        "lhs": ("k", "m") if keywords.get("transpose_lhs") else ("m", "k"),
        "rhs": ("n", "k") if keywords.get("transpose_rhs") else ("k", "n"),
        "addend": ("m", "n"),
    }
    # Block scales have the dimensions of their operand.
    matrices |= {name: matrices[name.removesuffix("_scale")] for name in blocks}

    def dimensions(name: str, x: jax.Array) -> tuple[Any, ...]:
        if name in matrices:
            return (*batch[: x.ndim - 2], *matrices[name])
        # Scales and the bias lie along the rows or the columns. A scalar factor has size 1 in all dimensions.
        *leading, last = ("m", None) if name == "lhs_scale" else (None, "n")
        own = (*batch[: max(x.ndim - 2, 0)], *leading, last)
        own = own[len(own) - x.ndim :]
        return tuple(None if size == 1 else along for size, along in zip(x.shape, own, strict=True))

    layout = sharded.product_sharding(mesh, operands, {name: dimensions(name, x) for name, x in operands.items()})
    return lambda run: layout.call(lambda **shards: run(**of_call(shards)), operands, (*batch, "m", "n"))


def _check_of(config: Config | None, mesh: Any = None) -> Callable[[Matmul, Call], None] | None:
    """Returns the check of a configuration that the caller gave, for `_cut`; None without one."""
    return None if config is None else functools.partial(call.require_config, config=config, mesh=mesh)


def decide(
    lhs: Any,
    rhs: Any,
    *,
    config: Config | None = None,
    implementation: str | None = None,
    mesh: Any = None,
    **keywords: Any,
) -> Explanation:
    """Checks a call of `matmul` and says what would run. Takes the arguments of `matmul` and raises the same errors."""
    call.check_choice(config, implementation)
    arrays = dict(lhs=lhs, rhs=rhs) | {name: keywords.pop(name, None) for name in ARRAYS[2:]}
    of_types = sharded.mesh_of(*jax.tree.leaves(arrays))
    explained = functools.partial(call.explain, prepare, config=config, implementation=implementation, mesh=mesh)
    if of_types is None:
        return explained(**arrays, **keywords)
    explanations: list[Explanation] = []
    check = _check_of(config, mesh)

    def of_shard(**of_shard: Any) -> jax.Array:
        explanations.append(explained(**of_shard))
        checked = normalize(MATMUL, **of_shard)
        _, m, (n,), _ = checked.sizes
        return jnp.zeros((*checked.batch, m, n))

    try:
        jax.eval_shape(lambda arrays: _cut(of_types, arrays, keywords, check)(of_shard), arrays)
    except NotImplementedError as cannot:
        if implementation == "fused":
            raise
        return Explanation("matmul", "xla", None, str(cannot), dispatch.target(mesh))
    return explanations[0]


def matmul(
    lhs: AnyArray,
    rhs: AnyArray | Sequence[AnyArray],
    *,
    addend: AnyArray | Sequence[AnyArray | None] | None = None,
    bias: AnyArray | Sequence[AnyArray | None] | None = None,
    activation: Callable[..., jax.Array] | None = None,
    lhs_scale: Scale | None = None,
    rhs_scale: Scale | Sequence[Scale] | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    config: Config | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes activation(lhs_scale · (lhs @ rhs) · rhs_scale + bias + addend) on each GPU, without communication.

    Args:
      lhs: [..., m, k], or [..., k, m] with `transpose_lhs`. float16, bfloat16, or float8 (e4m3fn, e5m2); by XLA any
        floating-point dtype.
      rhs: [..., k, n], or [..., n, k] with `transpose_rhs`. Same dtype as `lhs` (float8 kinds may be mixed). Same
        leading dimensions as `lhs`, or one of the two has none. Or a list or tuple of such matrices, if `activation`
        takes an array for each; `addend`, `bias` and `rhs_scale` are then lists, too.
      addend: [..., m, n] or [m, n], added before the activation; converted to the dtype of the result first.
      bias: [n], added to each row.
      activation: an elementwise function of float32 values, e.g. `jax.nn.gelu`, fused into the epilogue. It must be a
        pure function, since a call runs it several times, to check it and to trace it. A function that is not provably
        elementwise is refused. Scalars that it captures become operands of the call, so `jax.grad`, `jax.jit` and
        `jax.vmap` work through them. Loops of a known length are unrolled. The kernel's `erf`, `log1p` and the
        like are within 2 ulp of the true values; its `tan` is NaN above 12867. With a function that the kernel cannot
        compute (e.g. a Bessel function, or `y**1.5`) XLA runs the whole operation. If it has as many parameters
        without a default as there are right operands, it makes one result of theirs, for example
        `lambda gate, up: jax.nn.silu(gate) * up`. Gradients then use their values in the dtype of the result.
      lhs_scale: a factor of the product, in float32: a scalar, or one value per row: [m, 1], the same for all leading
        indices, or [..., m, 1].
      rhs_scale: a factor of the product, in float32: a scalar, or [n] or [1, n], one value per column.
        Or `lhs_scale` and `rhs_scale` are both *block scales* (mxfp8): float8_e8m0fnu, in the shapes of the operands
        with k / 32 in place of k. The operands must then be float8, and k a multiple of 32. Each 32 elements along k
        are multiplied by one block scale before the product, by the tensor cores of Blackwell, or by XLA in bfloat16.
        Block scales have no derivative.
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32.
      transpose_lhs: whether `lhs` is stored transposed. The kernel reads it as it lies, without a copy.
      transpose_rhs: whether `rhs` is stored transposed. The kernel reads it as it lies, without a copy.
      config: tile sizes of the kernel; by default from a table of measurements, else by a model. It is for this
        product; see below for the backward pass and `jax.vmap`.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla", or None to choose.

    Returns:
      [..., m, n]. Deterministic.

    Raises:
      ValueError: ranks, dtypes, sizes, the activation or the config are wrong, or the types do not say how the result
        is sharded.
      NotImplementedError: `implementation="fused"` and the kernel cannot serve this call; the message says why.

    Works under `jax.jit`, `jax.vmap` and `lax.scan`, and has derivatives of any order. The backward pass uses the same
    kernel where its operands have a dtype that the kernel takes. If there is a scale or an activation of one array, or
    if the result has another dtype than the operands, cotangents are in float32, and XLA multiplies them. Forward mode
    (`jax.jvp`) runs by XLA.

    The products of the backward pass have configurations of their own, chosen as without `config`. `jax.vmap` keeps the
    configuration of a single element, `config` included. Two cases need the product in float32: the derivative of a
    call with an activation, and `jax.vmap` over a bias, scales of columns or scalars that an activation captures. If
    the configuration does not fit float32 results, another one is chosen there.

    On several devices: inside `jax.shard_map` each device computes the product of its shards. Outside, operands may be
    sharded along Explicit mesh axes (the default of `jax.make_mesh`) in leading dimensions, m or n. Each device then
    multiplies its shards, and the result is sharded as the operands are. If k is sharded, XLA runs, and may add the
    devices' parts in the dtype of the result; if k is sharded in both operands, ValueError is raised. XLA also runs for
    `jax.vmap` over a sharded dimension. Along Auto axes XLA's partitioner decides, and the partitioner cannot split a
    kernel: so XLA runs, or `implementation="fused"` raises NotImplementedError.

    Example:
      >>> x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)
      >>> overlap.matmul(x, w, bias=jnp.ones(256), activation=jax.nn.relu).shape
      (128, 256)

    Source: "Software pipelining with Mosaic GPU" in the JAX documentation.
    """
    given = locals()
    arrays, keywords = (
        {name: given[name] for name in ARRAYS},
        {name: given[name] for name in ("activation", "preferred_element_type", "transpose_lhs", "transpose_rhs")},
    )
    arguments.require_values(**arrays)
    call.check_choice(config, implementation)
    if (mesh := sharded.mesh_of(*jax.tree.leaves(arrays))) is not None:
        try:
            run = functools.partial(call.run, prepare, config=config, implementation=implementation)
            return _cut(mesh, arrays, keywords, _check_of(config))(run)
        except NotImplementedError as cannot:
            if implementation is None:
                if dispatch.target().platform != "cpu":
                    launch.leave_to_xla("matmul", str(cannot), must_fuse=False)
                implementation = "xla"
            if implementation != "xla":
                raise
    return call.run(prepare, config=config, implementation=implementation, **arrays, **keywords)
