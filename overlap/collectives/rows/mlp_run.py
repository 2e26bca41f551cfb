"""How the experts' MLP runs by kernels, forward and backward (`mlp.py` has the call and its rules).

Tokens are copied to their rows before the first product and before that of the backward pass, or arrive meanwhile
(`arriving.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad
from jax.typing import DTypeLike

from overlap.choice import dispatch
from overlap.choice.dispatch import Implementation
from overlap.collectives.rows.arriving import ARRIVE, COPIED_BEFORE, NO_ROOM, Arriving, why_not_faster
from overlap.collectives.rows.experts import gathering, movement_of
from overlap.collectives.rows.routing import Routing
from overlap.collectives.rows.rows import Movement, added, copied
from overlap.frame import call, products
from overlap.frame.activation import BEFORE_ACTIVATION, Activation, on_all
from overlap.frame.elementwise import NotElementwise
from overlap.frame.explain import record, record_backward, recorded
from overlap.frame.kernel import kernel_of
from overlap.frame.operands import F32, Operands
from overlap.frame.operation import LaunchPlan, Operation
from overlap.frame.rules import with_rule
from overlap.frame.signatures import Arguments, AxisName, Leaf
from overlap.kernels import epilogue
from overlap.kernels.operations import GROUPED, SCATTER_TOKENS, OperandLayouts
from overlap.single_gpu.grouped_kernels import RowsOfGroups
from overlap.single_gpu.grouped_product import EpilogueOperands

# The arrays of a call, by name: "tokens", "gates", and weights and biases by the names of `expert_mlp`.
type Arrays = Mapping[str, Leaf]


@dataclasses.dataclass(frozen=True)
class MlpCall:
    """What is static in a call: its keywords, and the activation once it is proven to be elementwise."""

    axis_name: AxisName | None
    activation: Callable[[jax.Array, jax.Array], jax.Array]
    preferred_element_type: DTypeLike | None
    implementation: Implementation | None
    proven: Activation | None = None

    def bound(self, groups: products.Groups) -> Callable[[Sequence[jax.Array]], tuple[jax.Array, ...]]:
        """The activation by XLA, with derivatives of any order: from gate and up to h, zero behind all groups."""
        assert self.proven is not None
        applied = groups.guarded(on_all(functools.partial(self.proven, scalars=()), combines=True))
        assert applied is not None
        return applied

    def of_first(self, arrays: Arrays) -> dict[str, Any]:
        """The keywords of the first operation."""
        return {
            "bias": [arrays["gate.bias"], arrays["up.bias"]] if "gate.bias" in arrays else None,
            "activation": self.activation,
            "scalars": arrays.get("scalars"),
            "preferred_element_type": self.preferred_element_type,
            "implementation": self.implementation,
            "clears": (False, False),  # The rows of h that are not in use are read by nobody.
        }


@dataclasses.dataclass(frozen=True)
class MlpRun:
    """The MLP by kernels, with its backward pass. It holds no arrays.

    Attributes:
      static: the call.
      movement: how tokens and rows move.
      plan: of the first product.
      why_not: why tokens are copied to their rows before the first product; empty if they arrive while it runs.
    """

    static: MlpCall
    movement: Movement
    plan: LaunchPlan
    why_not: str

    @staticmethod
    def of(static: MlpCall, arrays: Arrays, routing: Routing) -> MlpRun | None:
        """Returns None if XLA moves the rows or multiplies them, or there are no rows."""
        given = Arguments(arrays["tokens"], [arrays["gate"], arrays["up"]], **static.of_first(arrays))
        given, tokens, movement = gathering(given, routing, static.axis_name)
        if movement.target is None or not routing.tokens.size or not tokens.size:
            return None
        rows = jax.ShapeDtypeStruct((routing.tokens.shape[0], tokens.shape[1]), tokens.dtype)
        chosen: list[tuple[Operation, call.Call, dispatch.Explanation]] = []

        def choose(rows: jax.Array) -> None:
            chosen.append(_chosen(dataclasses.replace(given, lhs=rows)))

        # Only types are needed to choose: nothing is computed.
        jax.eval_shape(choose, rows)
        ((operation, checked, choice),) = chosen
        if choice.config is None:
            return None
        must_fuse = static.implementation == "fused"
        plan = LaunchPlan(operation, checked.form, choice.target, choice.config, static.proven, must_fuse)
        why_not = why_not_faster(tokens.shape[0], arrays["up"].shape[0], routing)
        run = MlpRun(static, movement, plan, why_not)
        if run.arrives and not run._has_kernels(arrays, routing):
            run = dataclasses.replace(run, why_not=NO_ROOM)
        if not run.arrives and not run._has_kernels(arrays, routing):
            return None
        if run.arrives:
            kernel, _ = run._first(arrays, routing, run._of_values)
            record(dataclasses.replace(choice, config=kernel.plan.config, plan=ARRIVE))
        else:
            record(dataclasses.replace(choice, plan=COPIED_BEFORE.format(run.why_not)))
        return run

    @property
    def arrives(self) -> bool:
        return not self.why_not

    def forward(self, arrays: Arrays, routing: Routing) -> tuple[jax.Array, Arrays]:
        """Returns the result, and what the backward pass needs."""
        given = {name: x for name, x in arrays.items() if name in ("gate", "up", "gate.bias", "up.bias")}
        values = functools.partial(_values_by_products, self.static)
        with jax.named_scope("gate_up"):
            gate, up, hidden, rows = self._with_rows(self._values, values, arrays["tokens"], given, routing)
        rows = checkpoint_name(rows, "rows")
        gate, up = (checkpoint_name(z, BEFORE_ACTIVATION) for z in (gate, up))
        return self._sums(hidden, arrays, routing), {"rows": rows, "gate": gate, "up": up}

    def _sums(self, hidden: jax.Array, arrays: Arrays, routing: Routing) -> jax.Array:
        """The second product, and the sums of each token's rows."""
        given = Arguments(
            checkpoint_name(hidden, "hidden"),
            arrays["down"],
            group_sizes=routing.group_sizes,
            bias=arrays.get("down.bias"),
            implementation=self.static.implementation,
            clears=(False, True),
        )
        with jax.named_scope("down"):
            of_rows = call.run(GROUPED, given)
            sums = movement_of(SCATTER_TOKENS.name, of_rows, routing, routing.axis_name, self.static.implementation, "")
            return added(of_rows, None, dataclasses.replace(routing, gates=arrays["gates"]), sums)

    def backward(
        self, names: tuple[str, ...], arrays: Arrays, routing: Routing, saved: Arrays, cotangent: jax.Array
    ) -> dict[str, jax.Array]:
        """Returns the cotangents of the arrays with these names, in float32 or the dtype of the array."""
        kernel = self._kernel
        plan = self.plan
        sizes = routing.group_sizes
        positions = routing.positions
        weights = jnp.zeros(saved["rows"].shape[0], F32).at[positions].set(arrays["gates"].astype(F32), mode="drop")
        given = {"weights": weights, "down": arrays["down"], "gate": saved["gate"], "up": saved["up"]}
        by_products = functools.partial(_cotangents_by_product, self.static)
        d_tokens = cotangent.astype(plan.out_dtype)
        d_gate, d_up, weighted, d_weights, d_out = self._with_rows(
            self._cotangents, by_products, d_tokens, given, routing
        )
        why = "the kernels of the forward pass serve these rows" + (f"; {ARRIVE}" if self.arrives else "")
        shapes = f"{d_out.shape[0]} rows of {d_out.shape[1]} {d_out.dtype}"
        of_product = f"to {d_gate.shape[0]}x{d_gate.shape[1]} through the activation {d_out.dtype}"
        steps = [("rows added to tokens", shapes), (GROUPED.function, of_product)]
        if not self.arrives:
            steps.append(("tokens copied to rows", shapes))
        for name, what in steps:
            record_backward(name, plan.target, why, what)
        found: dict[str, jax.Array] = {}
        rows = saved["rows"]
        for name, lhs, d in (("gate", rows, d_gate), ("up", rows, d_up), ("down", weighted, d_out)):
            pair = Operands(lhs, (arrays[name],), group_sizes=sizes)
            found[name] = kernel.rhs_cotangent(pair, d, arrays[name].dtype, plan)
        whole = Operands(rows, (arrays["gate"], arrays["up"]), group_sizes=sizes)
        d_rows, _ = kernel.lhs_cotangent([d_gate, d_up], whole, None, plan.form.dtype, plan)
        found["tokens"] = added(d_rows, None, routing, self.movement)
        if "gate.bias" in arrays:
            groups = products.Groups(sizes)
            wide = groups.cleared(d_out).astype(F32)
            d_weights += (wide * groups.of_columns(arrays["down.bias"].astype(F32), wide)).sum(axis=1)
            found["gate.bias"] = groups.sum_of_rows(d_gate, F32)
            found["up.bias"] = groups.sum_of_rows(d_up, F32)
            found["down.bias"] = groups.sum_of_rows(wide * weights[:, None], F32)
        found["gates"] = d_weights.at[positions].get(mode="fill", fill_value=0)
        # XLA removes what is not wanted.
        return {name: found[name].astype(arrays[name].dtype) for name in names}

    @property
    def _kernel(self) -> RowsOfGroups:
        kernel = kernel_of(self.plan.operation)
        assert isinstance(kernel, RowsOfGroups)
        return kernel

    def _has_kernels(self, arrays: Arrays, routing: Routing) -> bool:
        """Whether there is a kernel for both products with several results."""
        (count,) = routing.tokens.shape
        width = arrays["up"].shape[2]
        hidden = jax.ShapeDtypeStruct((count, width), self.plan.out_dtype)
        weights = jax.ShapeDtypeStruct((count,), F32)
        cotangent = {"weights": weights, "down": arrays["down"], "gate": hidden, "up": hidden}
        arrays = {name: x for name, x in arrays.items() if name != "tokens"}
        try:
            kernels = [self._first(arrays, routing, self._of_values)[0], self._second(cotangent, routing)[0]]
        except NotElementwise:
            return False
        return None not in kernels

    def _with_rows(
        self,
        kernel: Callable[[Arrays, Routing], tuple[jax.Array, ...]],
        reference: Callable[[Arrays, Routing], tuple[jax.Array, ...]],
        tokens: jax.Array,
        given: Arrays,
        routing: Routing,
    ) -> tuple[jax.Array, ...]:
        """Runs a product of rows that are copies of `tokens`. Returns its results, and the rows.

        `kernel` and `reference` take the rows, as "rows"; or, where tokens arrive, `kernel` takes them as "tokens", and
        returns the rows, too.
        """
        if not self.arrives:
            rows = copied(tokens, routing, self.movement)
            return *_differentiated(kernel, reference, {"rows": rows, **given}, routing), rows

        def after_copies(given: Arrays, routing: Routing) -> tuple[jax.Array, ...]:
            rows = copied(given["tokens"], routing, self.movement)
            return *reference({"rows": rows, **given}, routing), rows

        def rows_alone(given: Arrays, routing: Routing) -> jax.Array:
            return copied(given["tokens"], routing, self.movement)

        return _differentiated(kernel, after_copies, {"tokens": tokens, **given}, routing, rows_alone)

    def _values(self, given: Arrays, routing: Routing) -> tuple[jax.Array, ...]:
        """The first product by its kernel: to gate, up and h."""
        run, operands = self._first(given, routing, self._of_values)
        return run(operands, self._of_values, self._arrival(given, routing))

    def _cotangents(self, given: Arrays, routing: Routing) -> tuple[jax.Array, ...]:
        """The product d_out @ w_downᵀ by its kernel, which makes of d: d_gate, d_up, w · h, and the sums of d · h."""
        run, operands, how = self._second(given, routing)
        return run(operands, how, self._arrival(given, routing))

    def _arrival(self, given: Arrays, routing: Routing) -> Arriving | None:
        if not self.arrives:
            return None
        tokens = given["tokens"]
        return Arriving.of(self.movement.plan(tokens.shape[1], tokens.dtype, routing), routing)

    @property
    def _of_values(self) -> EpilogueOperands:
        """The epilogue that stores gate, up and h."""
        assert self.static.proven is not None
        return EpilogueOperands(epilogue.ProgramResults(self.static.proven.with_values(self.plan.out_dtype), 3))

    def _first(self, given: Arrays, routing: Routing, how: EpilogueOperands) -> tuple[Leaf, Operands]:
        """The kernel of the first product, None if there is none, and what it multiplies."""
        biases = tuple(given[name].astype(F32) for name in ("gate.bias", "up.bias") if name in given) or None
        operands = Operands(self._left(given, routing, given["up"].shape[1]), (given["gate"], given["up"]),
                            biases=biases, group_sizes=routing.group_sizes)  # fmt: skip
        return self._kernel.through(operands, OperandLayouts(), self.plan, how, self._count(routing)), operands

    def _second(self, given: Arrays, routing: Routing) -> tuple[Leaf, Operands, EpilogueOperands]:
        """As `_first`."""
        assert self.static.proven is not None
        operands = Operands(self._left(given, routing, given["down"].shape[2]), (given["down"],),
                            row_scale=given["weights"], group_sizes=routing.group_sizes)  # fmt: skip
        program = self.static.proven.of_cotangent()
        how = EpilogueOperands(epilogue.ProgramResults(program, 3, sums=True), (given["gate"], given["up"]))
        kernel = RowsOfGroups(Operation(GROUPED, clears=(False, False)))
        layouts = OperandLayouts(transpose_rhs=True)
        return kernel.through(operands, layouts, self.plan, how, self._count(routing)), operands, how

    def _left(self, given: Arrays, routing: Routing, features: int) -> Leaf:
        """The left operand of a product: rows, or the tokens that arrive; their type if there are none."""
        rows = jax.ShapeDtypeStruct((routing.tokens.shape[0], features), self.plan.out_dtype)
        return given.get("tokens" if self.arrives else "rows", rows)

    def _count(self, routing: Routing) -> int | None:
        """How many rows arrive; None: they are there."""
        return routing.tokens.shape[0] if self.arrives else None


def _differentiated(
    kernel: Callable[[Arrays, Routing], tuple[jax.Array, ...]],
    reference: Callable[[Arrays, Routing], tuple[jax.Array, ...]],
    given: Arrays,
    routing: Routing,
    last: Callable[[Arrays, Routing], jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """Runs a kernel, which jax differentiates as `reference`. `last`: as for `with_rule`."""

    def rule(primals: tuple[Arrays, Routing], tangents: tuple[Arrays, Routing]) -> tuple[Leaf, Leaf]:
        given, routing = primals
        moved = {name: x for name, x in tangents[0].items() if not isinstance(x, ad.Zero)}

        def of_moved(moved: Arrays) -> tuple[jax.Array, ...]:
            return reference({**given, **moved}, routing)

        with recorded():
            return jax.jvp(of_moved, ({name: given[name] for name in moved},), (moved,))

    return with_rule(kernel, rule, given, routing, last=last)


def _values_by_products(static: MlpCall, given: Arrays, routing: Routing) -> tuple[jax.Array, ...]:
    """The same as `MlpRun._values`, by operations with derivatives of any order."""
    groups = products.Groups(routing.group_sizes)

    def product(name: str) -> jax.Array:
        more = {"bias": given.get(f"{name}.bias"), "implementation": static.implementation}
        return call.run(GROUPED, Arguments(given["rows"], given[name], group_sizes=groups.sizes, **more))

    gate = product("gate")
    up = product("up")
    (hidden,) = static.bound(groups)([gate.astype(F32), up.astype(F32)])
    return gate, up, hidden.astype(gate.dtype)


def _cotangents_by_product(static: MlpCall, given: Arrays, routing: Routing) -> tuple[jax.Array, ...]:
    """The same as `MlpRun._cotangents`, by operations with derivatives of any order."""
    groups = products.Groups(routing.group_sizes)
    more = {"transpose_rhs": True, "preferred_element_type": F32, "implementation": static.implementation}
    d = call.run(GROUPED, Arguments(given["rows"], given["down"], group_sizes=groups.sizes, **more))
    gate, up = (groups.cleared(given[name]).astype(F32) for name in ("gate", "up"))
    weights = groups.cleared(given["weights"][:, None])
    (hidden,), pull = jax.vjp(lambda gate, up: static.bound(groups)([gate, up]), gate, up)
    stored = *pull((weights * d,)), weights * hidden
    return *(x.astype(given["gate"].dtype) for x in stored), (d * hidden).sum(axis=1)


def _chosen(given: Arguments) -> tuple[Operation, call.Call, dispatch.Explanation]:
    operation, checked = call.prepare(GROUPED, given)
    return operation, checked, call.decide(operation, checked, dispatch.Asked(None, given.implementation))
