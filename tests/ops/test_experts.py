"""Layers of experts: both operations one after the other, what no form of one operation has, and refusals.

Numbers and derivatives of each operation are among those of all operations (contract.py, grouped_calls.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.rows import rows
from tests.ops.contract import BF16, F16, FORMS, GroupedCall, assert_close, running
from tests.ops.derivative_cases import given, loss
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax
gather, reduce = overlap.all_gather_lhs_grouped_matmul, overlap.grouped_matmul_reduce_scatter
IDS = np.zeros((4, 2), np.int32)
X, W, W2, GATES, H = (np.zeros(x, np.float32) for x in ((4, 6), (3, 6, 5), (3, 5, 6), (4, 2), (8, 5)))


LAYERS = [(2, "x", {"to": "last", "capacity": 4}), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
    (1, None, {}), (2, "x", {"slots": 3}), (4, "x", {"slots": 1, "groups": 2})))]  # fmt: skip


@pytest.mark.parametrize(("devices", "axis", "more"), LAYERS)
def test_a_layer(devices: int, axis: Any, more: Any) -> None:
    """Nobody reads the rows that are not in use, which kernels leave undefined between the two operations."""
    alike = {"config": None, "axis": axis, "dtype": F16, "extras": ("bias",), **more}
    gated = {"widths": (40, 40), "activation": lambda gate, up: jax.nn.silu(gate) * up}
    up = GroupedCall(gather.__name__, 6, 0, 192, **alike, **gated)
    down = GroupedCall(reduce.__name__, 6, 192, 40, **alike)
    arrays = [given(call, devices, 0.2) for call in (up, down)]
    del arrays[1]["lhs"], arrays[1]["ids"]

    def run(of: Callable[[GroupedCall], Any]) -> Any:
        def layer(of_up: Any, of_down: Any) -> jax.Array:
            return of(down)(of_down | {"lhs": of(up)(of_up), "ids": of_up["ids"]})

        specs = up.specs(arrays[0]), down.specs(arrays[1])
        how = {"mesh": make_mesh(x=devices), "in_specs": specs, "out_specs": P(axis), "check_vma": axis is not None}
        with running(detect_races=False):
            return jax.block_until_ready(jax.jit(jax.grad(loss(jax.shard_map(layer, **how)), (0, 1)))(*arrays))

    assert_close(run(lambda call: call), run(lambda call: call.plain), 1e-2)


def test_copies_and_sums_are_each_others_transposes() -> None:
    """In bfloat16, where the cotangent of a token is summed in float32. Rows not in use are zero, or unread."""
    ids, tokens = np.array([[1, 0, 2], [1, 2, 5]], np.int32), np.array([[3], [5]], BF16)
    by_xla = rows.Movement(None)

    def both(tokens: jax.Array, of_rows: jax.Array) -> Any:
        out, back = jax.vjp(lambda x: rows.copied(x, overlap.route(ids, 4, None), by_xla), tokens)
        return out, back(of_rows)[0]

    # The rows are of tokens 0; 0, 1; 0, 1. In bfloat16, 256 + 1 is 256.
    copies, sums = jax.jit(both)(tokens, np.array([[256], [1], [8], [1], [8], [np.nan]], BF16))
    assert copies[:, 0].tolist() == [3, 3, 5, 3, 5, 0] and sums[:, 0].tolist() == [258, 16]
    given = np.tile(np.array([256, 1], BF16), (6, 1))
    added = lambda gates: rows.added(given, gates, overlap.route(ids, 4, None), by_xla).sum()  # noqa: E731
    of_gates = jax.jit(jax.grad(added))
    assert of_gates(np.zeros((2, 3), np.float32)).tolist() == [[257, 257, 257], [257, 257, 0]]


def test_gates_of_routes_that_are_not_computed_do_not_count() -> None:
    gates, w = np.array([[2, np.nan], [np.inf, 3]], np.float32), np.ones((2, 1, 1), np.float32)

    def run(gates: jax.Array) -> tuple[jax.Array, Any]:
        routing = overlap.route(np.array([[0, -1], [0, 1]]), 2, None, capacity=1)
        out = reduce(np.ones((2, 1), np.float32), w, gates, routing, None)
        return out.sum(), (out, routing.dropped)

    (_, (out, dropped)), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(gates)
    assert out.tolist() == [[2], [3]] and dropped == 1 and grad.tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("name", ["tokens to rows", "rows to tokens"])
def test_no_sum_depends_on_an_order_that_may_change(name: str) -> None:
    call = FORMS[name].but(config=None)
    mapped = call.program(make_mesh(x=2), call.types(2), lambda arrays: call(arrays, "xla"), P("x"))
    text = str(jax.make_jaxpr(jax.grad(loss(mapped)))(call.types(2)))
    assert re.search(r"\bgather\b", text) and "scatter-add" not in text and "scatter_add" not in text


# --- Refusals: what does not fit the routing. test_arguments.py and test_refusals.py have the rest. -------------------

# A call, given a routing of `IDS`, and the message of its ValueError.
REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda r: on_two(lambda ids: gather(X[:2], W[:2], overlap.route(ids, 4, "x"), "y"), IDS),
     "`axis_name` must be that of `routing`, got 'y', and `route` got 'x': pass the same"),
    # The axis comes before the sizes, which it explains: without one, all experts are one device's.
    (lambda r: on_two(lambda ids: gather(X[:2], W[:2], overlap.route(ids, 4, None), "x"), IDS),
     "`axis_name` must be that of `routing`, got 'x', and `route` got None"),
    (lambda r: gather(X, W, r, "z"), "`all_gather_lhs_grouped_matmul` must be called inside"),
    (lambda r: gather(X[:3], W, r, None), r"`lhs` .* a row for each of this device's 4 tokens.*devices: 1.*\(3, 6\)"),
    (lambda r: gather(X, W[:2], r, None), r"`rhs` must have a matrix for each of the 3 groups, got 2 .*\(2, 6, 5\)"),
    (lambda r: gather(X, [W, W2], r, None, activation=jnp.add),
     r"the arrays of `rhs` must have one shape, got \(3, 6, 5\) and \(3, 5, 6\)"),
    (lambda r: gather(X, [W, W], r, None, activation=jnp.add, bias=W[0]), "`bias` must be a list .*: give 2"),
    (lambda r: gather(X.astype("float8_e4m3fn"), W.astype("float8_e4m3fn"), r, None),
     "`lhs` must have at least 16 bits, got float8_e4m3fn"),
    (lambda r: reduce(X[:, :5], W2, GATES, r, None), "`lhs` must have a row for each of the 8 rows .*, got 4"),
    (lambda r: reduce(H, W2, GATES[:, :1], r, None), "`gates` .* 2 experts.*, got 1: pass"),
    (lambda r: reduce(H, W2, GATES[1:], r, None), r"`gates` .* 4 tokens.*\(3, 2\)"),
    (lambda r: reduce(at(0, H), W2, at(1, GATES), r, None), "`gates` must be on the same devices as `lhs`"),
    (lambda r: gather(at(0, X), W, at(1, r), None), "`routing` must be on the same devices as `lhs`"),
]  # fmt: skip


def at(device: int, given: Any) -> Any:
    return jax.device_put(given, jax.devices()[device])


def on_two(run: Callable[[Any], Any], given: Any) -> Any:
    """Runs on two devices along x, and one along y."""
    mesh = make_mesh(x=2, y=1)
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))(given)


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(jax.jit(lambda: overlap.route(IDS, 3, None))())


def test_no_tokens_on_two_devices() -> None:
    """XLA gathers and scatters no empty arrays."""

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        routing = overlap.route(jnp.zeros((0, 2), jnp.int32), 4, ["x"])  # pyright: ignore[reportArgumentType]
        return gather(x, W[:2], routing, "x"), reduce(jnp.zeros((0, 5)), W2[:2], jnp.zeros((0, 2)), routing, "x")

    assert [out.shape for out in on_two(run, jnp.zeros((0, 6)))] == [(0, 5), (0, 6)]


def test_constants_of_a_program_may_lie_on_any_device() -> None:
    x, w, routing = at(0, X), at(1, W), at(2, jax.jit(lambda: overlap.route(IDS, 3, None))())
    assert jax.eval_shape(lambda: gather(x, w, routing, None)).shape == (8, 5)
