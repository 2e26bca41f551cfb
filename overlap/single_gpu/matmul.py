"""`matmul`: a product without communication, computed by the mainloop that the collective operations use too."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
from jax.typing import DTypeLike

from overlap.choice import choose
from overlap.choice.dispatch import Implementation
from overlap.choice.problem import Problem
from overlap.frame import by_xla, call, mesh_axes, primitive
from overlap.frame.explain import record_backward
from overlap.frame.form import Form
from overlap.frame.kernel import Kernel, kernel_of
from overlap.frame.operands import Operands, Results, as_rows
from overlap.frame.operation import Call, LaunchPlan, Operation
from overlap.frame.signatures import AnyArray, Arguments, Scale
from overlap.kernels.config import Config
from overlap.kernels.operations import MATMUL, OperandLayouts
from overlap.kernels.target import Target
from overlap.single_gpu import product


class MatmulKernel(Kernel):
    """The kernel of `matmul`. It communicates nothing, and takes all keywords of the epilogue."""

    takes_block_scales = True

    def problem(self, form: Form) -> Problem:
        form = form.folded
        sides = len(form.widths)
        return self.problem_of_sizes(form, form.m, form.n, form.k, batch=form.batch or 1, sides=sides)

    def check(self, call: Call, config: Config, target: Target) -> None:
        if call.form.batch == 0:
            raise NotImplementedError('the fused kernel needs a batch of at least 1, got 0: use implementation="xla"')
        self.problem(call.form).check(config, target)
        mesh_axes.require_no_partitioner_axes()

    def times(self, pair: Operands, layouts: OperandLayouts, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        """Returns a product of the backward pass, of a cotangent and an operand; by XLA if the kernel cannot serve it.

        `plan` is that of the forward pass. The product is a `matmul` of its own, without an epilogue and with a
        configuration of its own. For `explain` it is a part of the forward pass's operation.
        """
        lhs, rhs = pair.lhs, pair.rhs_list[0]
        if 0 in (*lhs.shape, *rhs.shape):
            return by_xla.times(lhs, rhs, layouts, dtype)
        form = Form.of(pair, layouts, dtype)
        alone = Operation(MATMUL)
        problem = kernel_of(alone).problem(form)
        config, source = choose.choose_config(problem, plan.target)
        try:
            problem.check(config, plan.target)
        except NotImplementedError:
            return by_xla.times(lhs, rhs, layouts, dtype)
        reason = "the kernel of the forward pass serves this product"
        shapes = f"{problem.shape} {problem.dtype}"
        record_backward(self.operation.name, plan.target, reason, shapes, config, source)
        (out,), _ = primitive.fused(pair, LaunchPlan(alone, form, plan.target, config))
        return out

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        rows = as_rows(operands, plan.layouts)
        plan = dataclasses.replace(plan, form=plan.form.folded)
        out = self.sealed(functools.partial(product.launch, plan=plan), "matmul", rows, plan)
        if rows is not operands:
            out = out.reshape(*operands.lhs.shape[:-1], out.shape[-1])
        return (out,), None


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
        pure function, since a call runs it several times, to check it and to trace it. Scalars that it captures become
        operands of the call, so `jax.grad`, `jax.jit` and `jax.vmap` work through them. The kernel's `erf`, `log1p` and
        the like are within 2 ulp of the true values. With a function that is not made of what kernels can compute
        (e.g. `jax.nn.softmax`, a loop, or `y**1.5`) XLA runs the whole operation, and applies it to the result. If it
        has as many parameters without a default as there are right operands, it makes one result of theirs, for example
        `lambda gate, up: jax.nn.silu(gate) * up`. Gradients then use their values in the dtype of the result.
      lhs_scale: a factor of the product, in float32: a scalar, or one value per row: [m, 1], the same for all leading
        indices, or [..., m, 1].
      rhs_scale: a factor of the product, in float32: a scalar, or [n] or [1, n], one value per column.
        Or `lhs_scale` and `rhs_scale` are both *block scales* (mxfp8): float8_e8m0fnu, in the shapes of the operands
        with k / 32 in place of k. The operands must then be float8, and k a multiple of 32. Each 32 elements along k
        are multiplied by one block scale before the product, by the tensor cores of Blackwell, or by XLA in bfloat16.
        Block scales have no derivative.
      preferred_element_type: float16, bfloat16 or float32; the operands' dtype by default, bfloat16 for float8.
        Accumulation is in float32. The kernels that gather write float16 and bfloat16.
      transpose_lhs: whether `lhs` is stored transposed. The kernel reads it as it lies, without a copy.
      transpose_rhs: whether `rhs` is stored transposed. The kernel reads it as it lies, without a copy.
      config: tile sizes of the kernel; by default from a table of measurements, else by a model, which treats several
        right operands as one of their total width. It is for this
        product; see below for the backward pass and `jax.vmap`.
      implementation: "fused" (this library's kernel; emulated on a CPU), "xla", or None to choose: the kernel where it
        can serve the call on a GPU and XLA was not measured, or is not predicted, to be faster. The choice is logged
        once, by the logger "overlap".

    The collectives have the same keywords, in which m, n and k are the sizes of a device's parts, and:
      axis_name: the mesh axis to communicate along, or a tuple of axes. The devices of a tuple of axes are counted
        row-major in its order, as in `PartitionSpec((a, b))`. The mesh may have more axes, and its devices may be in
        any order.

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

    Examples:
      >>> x, w = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 256), jnp.bfloat16)
      >>> overlap.matmul(x, w, bias=jnp.ones(256), activation=jax.nn.relu).shape
      (128, 256)

    Source: "Software pipelining with Mosaic GPU" in the JAX documentation.
    """
    given = Arguments(
        lhs,
        rhs,
        addend=addend,
        bias=bias,
        activation=activation,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        transpose_lhs=transpose_lhs,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        config=config,
        implementation=implementation,
    )
    return call.run_on_each_device(MATMUL, given)
