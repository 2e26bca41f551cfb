"""The interface of an operation, everything in which operations differ, and the calls and plans that it works on.

The defaults here are right for an operation that communicates nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, final

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.choose import choose_config
from overlap.choice.problem import Problem
from overlap.frame import block_scales, by_xla
from overlap.frame.activation import Activation, BoundActivation, on_all
from overlap.frame.form import Form
from overlap.frame.operands import F32, Operands, Results, accumulator, rhs_names, summed_as
from overlap.frame.products import of as products_of
from overlap.kernels import epilogue
from overlap.kernels.config import Config
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts, OperationSpec, Transport
from overlap.kernels.target import Target

NOTHING_GATHERED = MappingProxyType({"m": 1, "n": 1, "k": 1})
_WAYS_AROUND = {
    "bias": "add it to the result",
    "addend": "add it to the result",
    "activation": "apply it to the result",
    "lhs_scale": "multiply the result by it",
    "rhs_scale": "multiply the result by it",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked call, and how its results are brought back into the caller's form.

    Attributes:
      operands: with at most one leading dimension. Arrays may be `jax.ShapeDtypeStruct`s.
      form: sizes, layouts and dtypes; the results' dtype is `form.out_dtype`.
      activation: the traced activation; None for none, and for one that is not proven to be elementwise.
      by_xla: the caller's own activation function, which is applied where XLA runs, to the values of all right
        operands; None for none.
      batch: the leading dimensions of the results.
      container: list or tuple if the caller gave several right operands, else None.
      given: the keywords of the epilogue that the caller gave.
      combines: as in `Operation`.
      not_elementwise: why only XLA may apply the activation; empty if a kernel may.
    """

    operands: Operands
    form: Form
    activation: Activation | None
    by_xla: BoundActivation
    batch: tuple[int, ...]
    container: type | None
    given: tuple[str, ...] = ()
    combines: bool = False
    not_elementwise: str = ""

    @property
    def names(self) -> list[str]:
        """The right operands' names for messages."""
        return rhs_names(self.container, len(self.operands.rhs_list))

    def restore(self, results: Results) -> Any:
        """Returns the results in the caller's form: with leading dimensions, and in a `container` if there is one."""
        # If only one of several right operands has leading dimensions, only its result has them.
        outs, gathered = jax.tree.map(lambda x: x.reshape(*(self.batch if x.ndim > 2 else ()), *x.shape[-2:]), results)
        result = outs[0] if self.container is None or self.combines else self.container(outs)
        return result if gathered is None else (result, gathered)


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """Everything about a product that is known when it is traced.

    Attributes:
      operation: the operation, with what is special about this call.
      form: sizes, layouts and dtypes.
      target: the device.
      chosen: the fused kernel's configuration; None: XLA computes the product, with the derivatives of the kernel.
      activation: the activation, of f32 values; None for none.
      must_fuse: whether the caller asked for the fused kernel. XLA may then not run in its place.
    """

    operation: Operation
    form: Form
    target: Target
    chosen: Config | None
    activation: Activation | None = None
    must_fuse: bool = False

    @property
    def config(self) -> Config:
        """The configuration of a plan that is run by a kernel."""
        assert self.chosen is not None
        return self.chosen

    @property
    def layouts(self) -> OperandLayouts:
        """How the operands lie in memory."""
        return self.form.layouts

    @property
    def out_dtype(self) -> jnp.dtype:
        """The dtype of the results."""
        return self.form.out_dtype

    def of(self, operands: Operands) -> LaunchPlan:
        """Returns the plan for operands of other sizes, which may be types."""
        return dataclasses.replace(self, form=Form.of(operands, self.layouts, self.out_dtype))

    def bound_activation(self, operands: Operands) -> BoundActivation:
        """Returns the activation with its scalars bound, as XLA computes and JAX differentiates it; None for none."""
        if self.activation is None:
            return None
        return on_all(functools.partial(self.activation, scalars=operands.scalars), self.operation.combines)

    @property
    def without_function(self) -> LaunchPlan:
        """The plan for the kernel alone. A cache may keep it, since it holds nothing that belongs to the caller."""
        activation = self.activation
        return self if activation is None else dataclasses.replace(self, activation=activation.without_function)

    @property
    def program(self) -> epilogue.Program | None:
        """The activation as a kernel computes it; None for none."""
        return None if self.activation is None else self.activation.program

    def kernel_activation(self, operands: Operands) -> BoundActivation:
        """Returns `program` with its scalars bound, for use by XLA in place of a kernel; None for none.

        The returned function has no derivative rules.
        """
        program = self.program
        if program is None:
            return None
        scalars = [x.astype(dtype) for x, dtype in zip(operands.scalars, program.scalars, strict=True)]
        return on_all(lambda *values: program(values, scalars), self.operation.combines)

    @property
    def result_widths(self) -> tuple[int, ...]:
        """The columns of each result."""
        return self.form.widths[:1] if self.operation.combines else self.form.widths

    def __str__(self) -> str:
        """The operation with the sizes of its operands, as reports of long waits name it."""
        return f"{self.operation.name} {self.form}"

    def types(
        self, operands: Operands, m: int, transport: Transport = "", out_dtype: DTypeLike | None = None
    ) -> OperandTypes:
        """Returns what the mainloop must know of the operands, which may be types.

        `m`: rows of the matrix that is cut into tiles. `out_dtype`: what the kernel stores, if not the plan's dtype.
        """
        dtypes = operands.lhs.dtype, operands.rhs_list[0].dtype, jnp.dtype(out_dtype or self.out_dtype)
        has_addend, scaled = operands.addends is not None, operands.is_block_scaled
        sides = len(operands.rhs_list) if self.operation.combines else 1
        return OperandTypes(m, *dtypes, self.layouts, transport, has_addend, scaled, sides)

    def vectors(self, operands: Operands, row_scale: jax.Array | None = None) -> epilogue.Vectors:
        """Returns the vectors that the epilogue reads, padded to whole tiles. `row_scale` must be padded already."""
        unit = self.config.tile_n
        biases = operands.biases and [
            jnp.zeros(n, F32) if bias is None else bias
            for bias, n in zip(operands.biases, self.form.widths, strict=True)
        ]
        scales, of_columns = epilogue.filled(operands.column_scales, unit), epilogue.filled(biases, unit)
        return epilogue.Vectors(row_scale, scales, of_columns, epilogue.packed(operands.scalars, self.program))

    def by_xla(self, operands: Operands) -> Results:
        """Runs the whole operation by XLA."""
        return self.operation.by_xla(operands, self.form, self.bound_activation(operands))

    def activated(self, operands: Operands, products: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Returns the results, given the values before the activation; by XLA, with derivatives of any order."""
        applied = products_of(operands).guarded(self.bound_activation(operands))
        assert applied is not None
        wide = accumulator(self.form.dtype)
        return tuple(x.astype(self.out_dtype) for x in applied([z.astype(wide) for z in products]))

    @property
    def in_f32(self) -> LaunchPlan | None:
        """The plan for f32 results, without the activation; None if no kernel has such results.

        f32 results take more shared memory and registers. So where the plan's configuration does not fit any more,
        another one is chosen.
        """
        form = dataclasses.replace(self.form, out_dtype=F32)
        problem = self.operation.problem(form)
        config = self.config
        if not problem.accepts(config, self.target):
            config, _ = choose_config(problem, self.target)
        if self.operation.combines or not problem.accepts(config, self.target):
            return None
        return dataclasses.replace(self, activation=None, form=form, chosen=config)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, with the static data of one call, such as its devices. Hashable; equal operations run one kernel.

    Attributes:
      spec: what the operation does, whatever the call.
      takes_lists: whether `rhs` may be a list.
      combines: whether the activation takes the values of all right operands, side by side, and makes one result of
        them.
      takes_parts: True: the arrays are a device's parts, as inside `jax.shard_map`. False: they are global.
      transport: how data travels between devices in the fused kernel; empty: no data travels.
      takes_block_scales: whether the fused kernel takes scales of blocks.
      has_own_derivatives: whether the derivatives are the frame's also where XLA computes the product. Else they are
        jax's.
      batched_together: names of fields of `Operands`. In the kernel all of them have a batch dimension if one has.
    """

    spec: ClassVar[OperationSpec]
    takes_lists = False
    combines = False
    takes_parts = True
    transport = ""
    takes_block_scales = False
    has_own_derivatives = False
    batched_together = frozenset()

    @property
    def name(self) -> str:
        """The name of the public function."""
        return self.spec.function

    @property
    def reduces(self) -> bool:
        """Whether products are summed over devices, before the rest. `lhs` and `rhs` may then be lists of pairs."""
        return self.spec.sums

    @property
    def apart(self) -> Operation:
        """The operation whose results are one for each right operand, if it `combines` them; else the same."""
        return self

    @property
    def summed_over(self) -> int:
        """How many devices' products are summed, if `reduces`."""
        return 1

    @property
    def gather_factors(self) -> Mapping[str, int]:
        """How many times the size of a shard the product of one device has, in m, n and k.

        The shard is that of `lhs` for m, and that of `rhs` for n and k.
        """
        return NOTHING_GATHERED

    def result_shape(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of a device's result.

        Args:
          m: rows of a device's `lhs`.
          n: columns of a device's `rhs`.

        Raises:
          ValueError: the devices cannot have equal blocks of the result.
        """
        return m * self.gather_factors["m"], n * self.gather_factors["n"]

    # --- The choice ---

    def problem(self, form: Form) -> Problem:
        """Returns what a configuration is chosen from."""
        raise NotImplementedError

    def check(self, call: Call, config: Config, target: Target) -> None:
        """Raises, as `limits.check` does, if the fused kernel cannot serve the call."""
        raise NotImplementedError

    def check_keywords(self, call: Call) -> None:
        """Raises NotImplementedError if the fused kernel does not take the call's epilogue or its scales of blocks."""
        if call.operands.is_block_scaled and not self.takes_block_scales:
            raise NotImplementedError(
                f"the fused kernel of `{self.name}` takes no `lhs_scale` and `rhs_scale` of blocks yet: "
                'use implementation="xla", which runs by default'
            )
        for name in call.given:
            if name not in self.spec.epilogue:
                raise NotImplementedError(
                    f"the fused kernel of `{self.name}` takes no `{name}` yet: {_WAYS_AROUND[name]}, or use "
                    'implementation="xla"'
                )
        if self.combines and ("addend" in call.given or call.operands.is_block_scaled):
            what = "`addend`" if "addend" in call.given else "scales of blocks"
            raise NotImplementedError(
                f"the fused kernel takes no {what} with an `activation` of {len(call.operands.rhs_list)} arrays yet: "
                'use implementation="xla", which runs by default'
            )
        if call.not_elementwise:
            raise NotImplementedError(call.not_elementwise)

    def require_config(self, call: Call, config: Config) -> None:
        """Raises ValueError if a configuration contradicts itself, the call (but for its activation) or the device."""
        with contextlib.suppress(NotImplementedError):
            self.check_keywords(call)
            self.check(call, config, dispatch.target())

    def circumstances(self, call: Call) -> dispatch.Circumstances:
        """Returns what the choice depends on beside the problem, and what a fused kernel would need."""
        return dispatch.Circumstances()

    # --- The kernel ---

    def launch(self, operands: Operands, plan: LaunchPlan) -> Results:
        """Runs the kernel on checked operands."""
        raise NotImplementedError

    def typed(self, operands: Operands) -> Operands:
        """Returns the operands, typed as varying along the axes of the kernel's peers (`kernels/varying.py`)."""
        return operands

    def why_not_batched(self, is_batched: Operands, axis_size: int, plan: LaunchPlan) -> str | None:
        """Returns why the kernel cannot compute a `jax.vmap` (see `batch`) as its own batch; None if it can."""
        return None

    # --- Derivatives ---

    def before_activation(self, plan: LaunchPlan) -> LaunchPlan:
        """Returns the plan of what goes into the activation, which the derivative of the activation needs.

        Where no kernel has f32 results, as in gathers, or the activation takes several products, it has the results'
        dtype.
        """
        return plan.in_f32 or dataclasses.replace(plan, operation=self.apart, activation=None)

    def of_tangents(self, plan: LaunchPlan) -> Callable[[Operands], Results]:
        """Returns the operation as forward mode differentiates it: a function of operations with derivatives."""
        return plan.by_xla

    # --- The implementation by XLA, and the backward pass ---

    @final
    def by_xla(self, operands: Operands, form: Form, activation: BoundActivation) -> Results:
        """Runs the whole operation by XLA: gathers operands, multiplies, and sums over the devices.

        An operation says what differs in `gathered`, `reduced` and their kin, since the derivatives use these, too.
        Products that are summed over devices are rounded to the results' dtype before they are sent, but not to
        float16, in which sums could overflow.
        """
        layouts, out_dtype = form.layouts, form.out_dtype
        gathered = block_scales.gathered(operands, lambda given: self.gathered(given, layouts))
        if not self.reduces:
            outs = by_xla.products(gathered, layouts, out_dtype, activation)
            return outs, self.kept(gathered.lhs, operands.lhs)
        bare = dataclasses.replace(gathered, biases=None, addends=None)
        sent = by_xla.products(bare, layouts, summed_as(out_dtype), None)
        sums = tuple(self.reduced(x).astype(out_dtype) for x in sent)
        travelled = self.gathered_passenger(operands)
        if gathered.biases is None and gathered.addends is None and activation is None:
            return sums, travelled
        rest = dataclasses.replace(gathered, row_scale=None, column_scales=None)
        wide = accumulator(operands.lhs.dtype)
        return by_xla.finish(tuple(x.astype(wide) for x in sums), rest, out_dtype, activation), travelled

    def gathered(self, operands: Operands, layouts: OperandLayouts) -> Operands:
        """By XLA: gathers what the operation gathers. Returns the operands of the product that one device computes."""
        return operands

    def reduced(self, product: jax.Array) -> jax.Array:
        """By XLA: sums a device's product over the devices. Returns this device's part of the result."""
        return product

    def product_cotangent(self, cotangent: jax.Array) -> jax.Array:
        """The transpose of `reduced`: the cotangent of a product from that of this device's part of the result."""
        return cotangent

    def kept(self, gathered_lhs: jax.Array, lhs: jax.Array) -> jax.Array | None:
        """Returns the gathered left operand if it is a result of the operation; else None."""
        return None

    def scattered(
        self,
        cotangents: Operands,
        d_kept: jax.Array | None,
        operands: Operands,
        wanted: Operands,
        layouts: OperandLayouts,
    ) -> Operands:
        """Returns the operands' cotangents, given those of the gathered operands: the transpose of `gathered`.

        Args:
          cotangents: of the gathered operands.
          d_kept: the cotangent of `kept`; None if there is none.
          operands: the operands, before they are gathered.
          wanted: which cotangents are wanted, as for `linear.linear_map`.
          layouts: how the operands lie in memory.
        """
        return cotangents

    def gathered_passenger(self, operands: Operands) -> jax.Array | None:
        """By XLA: gathers `Operands.passenger`, if there is one."""
        return None

    def lhs_cotangent(
        self,
        gs: Sequence[jax.Array],
        whole: Operands,
        passenger: jax.Array | None,
        dtype: DTypeLike,
        plan: LaunchPlan,
    ) -> tuple[jax.Array, jax.Array | None] | None:
        """Returns the cotangent Σ g rhsᵀ of the left operand, multiplied, added and scattered by one kernel.

        Also returns the passenger, gathered meanwhile, or None if it does not travel with this kernel. Returns None if
        there is no such kernel: then `times` and `scattered` do the same. `whole` are the operands, gathered.
        """
        return None

    def lhs_and_product_cotangents(
        self, cotangent: jax.Array, rights: Sequence[jax.Array], dtype: DTypeLike, plan: LaunchPlan
    ) -> tuple[Sequence[jax.Array], jax.Array] | None:
        """Returns g rhsᵀ for the right operand of each pair, and g, which is `product_cotangent(cotangent)`.

        It is one kernel; None if there is none. Then `product_cotangent` and `times` do the same.
        """
        return None

    def rhs_cotangent(self, pair: Operands, g: jax.Array, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array | None:
        """Returns the cotangent lhsᵀ g of the right operand of a pair; None if `times` computes it."""
        return None

    def times(self, pair: Operands, layouts: OperandLayouts, dtype: DTypeLike, plan: LaunchPlan) -> jax.Array:
        """Returns a product of the backward pass."""
        return by_xla.times(pair.lhs, pair.rhs_list[0], layouts, dtype)
