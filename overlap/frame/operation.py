"""An operation, and the calls and plans that it works on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from overlap.frame import block_scales, by_xla
from overlap.frame.activation import Activation, BoundActivation, on_all
from overlap.frame.form import Form
from overlap.frame.moves import NOTHING, Gather, Move, Sum
from overlap.frame.operands import F32, Operands, Results, accumulator, rhs_names
from overlap.frame.products import of as products_of
from overlap.kernels import epilogue
from overlap.kernels.config import Config
from overlap.kernels.mainloop import OperandTypes
from overlap.kernels.operations import OperandLayouts, OperationSpec, Transport
from overlap.kernels.target import Target
from overlap.primitives import PeerGroup


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
        return OperandTypes(
            m,
            operands.lhs.dtype,
            operands.rhs_list[0].dtype,
            jnp.dtype(out_dtype or self.out_dtype),
            self.layouts,
            transport,
            addend=operands.addends is not None,
            block_scaled=self.form.is_block_scaled,
            sides=len(operands.rhs_list) if self.operation.combines else 1,
        )

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


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, *move · product · move*, with the static data of one call. Equal operations run one kernel.

    Attributes:
      spec: what the operation does, whatever the call.
      group: the devices; None if the operation communicates nothing.
      combines: whether the activation takes the values of all right operands, side by side, and makes one result of
        them.
      returns_gathered: whether the gathered left operand is a result as well.
      transport: how data travels between devices in the fused kernel; empty: no data travels.
      transport_reason: why the transport is used; empty if there is no choice.
      clears: of products of groups, whether the rows behind all groups must be zeros in the result, and in the
        cotangent of `lhs`. The kernel leaves them undefined if nobody reads them.
      takes_parts: True: the arrays are a device's parts, as inside `jax.shard_map`. False: they are global.
    """

    spec: OperationSpec
    group: PeerGroup | None = None
    combines: bool = False
    returns_gathered: bool = False
    transport: Transport = ""
    transport_reason: str = ""
    clears: tuple[bool, bool] = (True, True)
    takes_parts: bool = True

    @property
    def name(self) -> str:
        """The name of the public function."""
        return self.spec.function

    @property
    def before(self) -> Move:
        """What moves before the product."""
        return Gather(self.spec.gathers, self.peers) if self.spec.gathers else NOTHING

    @property
    def after(self) -> Move:
        """What moves after the product."""
        return Sum(self.spec.scatters, self.peers) if self.spec.sums else NOTHING

    @property
    def move(self) -> Move:
        """The one that moves something; there is no operation that moves before and after its product."""
        return self.before if self.spec.gathers else self.after

    @property
    def peers(self) -> PeerGroup:
        """The devices of an operation that communicates."""
        assert self.group is not None
        return self.group

    @property
    def takes_lists(self) -> bool:
        """Whether `rhs` may be a list: of several products of one gather, or for an activation of all of them."""
        return self.combines or self.spec.gathers == "m" or not self.takes_parts

    @property
    def apart(self) -> Operation:
        """The operation whose results are one for each right operand."""
        return dataclasses.replace(self, combines=False)

    def result_shape(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of a device's result, for m rows of its `lhs` and n columns of its `rhs`.

        Raises:
          ValueError: the devices cannot have equal blocks of the result.
        """
        return self.after.result_shape(self.name, *self.before.result_shape(self.name, m, n))

    def by_xla(self, operands: Operands, form: Form, activation: BoundActivation) -> Results:
        """Runs the whole operation by XLA: gathers operands, multiplies, and sums over the devices.

        Products that travel are rounded before they are sent (`Move.sent_as`).
        """
        layouts = form.layouts
        out_dtype = form.out_dtype
        gathered = block_scales.gathered(operands, lambda given: self.before.gathered(given, layouts))
        if not self.after.moves:
            outs = by_xla.products(gathered, layouts, out_dtype, activation)
            kept = self.before.kept(gathered.lhs, operands.lhs) if self.returns_gathered else None
            return outs, kept
        bare = dataclasses.replace(gathered, biases=None, addends=None)
        sent = by_xla.products(bare, layouts, self.after.sent_as(out_dtype), None)
        arrived = tuple(self.after.reduced(x).astype(out_dtype) for x in sent)
        travelled = self.after.gathered_passenger(operands)
        if gathered.biases is None and gathered.addends is None and activation is None:
            return arrived, travelled
        rest = dataclasses.replace(gathered, row_scale=None, column_scales=None)
        wide = accumulator(operands.lhs.dtype)
        return by_xla.finish(tuple(x.astype(wide) for x in arrived), rest, out_dtype, activation), travelled
