"""A user's program, for type checkers only: `make lint` runs pyright and mypy on it, both strict. Nothing runs it.

`assert_type` is an error if the result has another type. A comment that ignores an error is itself an error if there is
none to ignore.
"""
# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from typing import Any, Literal, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import overlap

type Several = list[jax.Array]
type Pair = tuple[jax.Array, ...]


def right_calls(x: jax.Array, w: jax.Array, sides: Several, loaded: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    assert_type(overlap.all_gather_lhs_matmul(x, w, "x", transport="ring"), jax.Array)
    assert_type(overlap.all_gather_lhs_matmul(x, [w, w], ("x", "y"), bias=[None, loaded], rhs_scale=2), Several)
    assert_type(overlap.all_gather_lhs_matmul(x, sides, "x", rhs_scale=[0.5, w], config=overlap.Config()), Several)
    assert_type(overlap.all_gather_lhs_matmul(x, (w, w), "x", preferred_element_type=jnp.float32), Pair)
    assert_type(overlap.all_gather_lhs_matmul(loaded, w, "x", return_gathered=True), tuple[jax.Array, jax.Array])
    assert_type(overlap.all_gather_lhs_matmul(x, sides, "x", return_gathered=True), tuple[Several, jax.Array])
    assert_type(overlap.all_gather_lhs_matmul(x, (w, w), "x", return_gathered=True), tuple[Pair, jax.Array])
    assert_type(overlap.all_gather_lhs_matmul(x, [w, w], "x", activation=lambda gate, up: gate * up), jax.Array)
    assert_type(overlap.matmul_reduce_scatter([x, x], [w, loaded], "x"), jax.Array)
    assert_type(overlap.all_gather_rhs_matmul(x, w, "x", dimension=1, implementation="xla"), jax.Array)
    assert_type(overlap.matmul_reduce_scatter(x, w, "x", transport="push", activation=jax.nn.gelu), jax.Array)
    assert_type(overlap.matmul_all_reduce(x, w, "x", addend=x, lhs_scale=np.float32(2)), jax.Array)
    assert_type(overlap.matmul(x, loaded, activation=jnp.tanh, implementation="fused"), jax.Array)


def asks_beforehand(x: jax.ShapeDtypeStruct, w: jax.ShapeDtypeStruct) -> None:
    assert_type(overlap.explain(overlap.matmul, x, w)[0].implementation, Literal["fused", "xla"])
    with overlap.autotune(overlap.matmul, x, w, budget_s=1) as tuning:
        assert_type(tuning.outcomes[0].complete, bool)


def wrong_calls(x: jax.Array, w: jax.Array) -> list[jax.Array]:
    overlap.all_gather_lhs_matmul(x, w, "x", transport="push")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    overlap.all_gather_lhs_matmul(x, w, "x", implementation="cuda")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    overlap.all_gather_lhs_matmul(x, [w, 1.0], "x")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    overlap.all_gather_lhs_matmul(x, w, "x", trasport="pull")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    overlap.matmul(overlap.all_gather_lhs_matmul(x, [w, w], "x"), w)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    gate: list[jax.Array] = overlap.all_gather_lhs_matmul(x, w, "x")  # type: ignore[arg-type]  # pyright: ignore[reportAssignmentType]
    overlap.all_gather_rhs_matmul(x, [w, w], "x", dimension=0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    overlap.all_gather_rhs_matmul(x, w, "x")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    overlap.matmul_reduce_scatter(x, w, "x", transport="pull")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    overlap.matmul_all_reduce(x, w, "x", implementation="ring")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    overlap.matmul(x, 2.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    overlap.matmul(x, w, implementation=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    overlap.matmull(x, w)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    overlap.explain("matmul", x, w)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    overlap.Config(schedule="turns")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    return gate
