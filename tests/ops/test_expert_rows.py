"""Layers of experts whose rows are moved by kernels: results and gradients, transforms, refusals, and where XLA runs."""

from __future__ import annotations

import dataclasses
import functools
import re
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch
from overlap.experts import row_kernels, rows
from overlap.experts.routing import Routing
from tests.ops.expert_cases import Case, exact, kept, layer, on_devices, operands, program, routings
from tests.oracle import ALLOWED, make_mesh

pytestmark = pytest.mark.one_jax
FUSED: Any = {"features": 128, "hidden": 40, "implementation": "fused"}
TWO = Case(2, 6, 3, 8, **FUSED)
CASES = {
    "two devices, capacity": dataclasses.replace(TWO, capacity=4),
    "no axis": Case(1, 5, 2, 3, axes=(), **FUSED | {"features": 384}),
    "four devices in two axes, one expert": Case(4, 3, 1, 8, axes=("x", "y"), check_vma=False, **FUSED),
    "two devices": TWO,
}
# Of each case, the routings of every run.
FAST = {"two devices, capacity": ("to one",), "no axis": ("ids out of range",)} | {
    "four devices in two axes, one expert": ("drawn",)}  # fmt: skip
SOME = [
    pytest.param(name, kind, marks=[] if kind in FAST.get(name, ()) else pytest.mark.slow)
    for name, case in CASES.items()
    for kind in routings(case, 0)
]


def half(given: dict[str, Any]) -> dict[str, jax.Array]:
    """In bfloat16, but for the gates."""
    return {name: jnp.asarray(x, None if name == "gates" else jnp.bfloat16) for name, x in given.items()}


def assert_as_near(found: Any, by_xla: Any, right: Any, context: Any) -> None:
    for ours, theirs, expected in zip(*map(jax.tree.leaves, (found, by_xla, right)), strict=True):
        ours, theirs, expected = (np.asarray(x, np.float32) for x in (ours, theirs, expected))
        off, allowed = np.linalg.norm(ours - expected), np.linalg.norm(theirs - expected)
        assert off <= ALLOWED * allowed, (off, allowed, ours.shape, context)


@pytest.mark.parametrize(("name", "kind"), SOME)
def test_results_and_gradients(name: str, kind: str) -> None:
    case, seed = CASES[name], secrets.randbits(32)
    given, ids, context = half(operands(case, seed)), routings(case, seed)[kind], (name, kind, seed)
    weights = np.random.default_rng(seed + 1).standard_normal(given["x"].shape, np.float32)
    (_, (out, hidden, routing)), grads = program(case)(given, ids, weights)
    (_, (out_xla, *_)), grads_xla = program(dataclasses.replace(case, implementation="xla"))(given, ids, weights)
    wide = {name: x.astype(jnp.float32) for name, x in given.items() if name != "shift"}
    expected_grads, expected = (f(wide, ids, kept(case, ids), *more) for f, more in zip(exact(case), ((weights,), ())))
    # Rows that are not in use are zero, and so are their cotangents.
    for device, places in enumerate(np.split(np.arange(len(hidden)), case.devices)):
        unused = places[np.asarray(routing.group_sizes)[device].sum() :]
        assert not np.asarray(hidden)[unused].any() and not np.asarray(grads["shift"])[unused].any(), context
    for all_grads in (grads, grads_xla):
        del all_grads["shift"]
    assert_as_near((out, grads), (out_xla, grads_xla), (expected, expected_grads), context)
    again = program(case)(given, ids, weights)
    np.testing.assert_array_equal(again[0][1][0], out)


def test_transforms() -> None:
    """`jax.checkpoint` in `lax.scan`, and `jax.vmap` over tokens and routings, forward and backward."""
    case = dataclasses.replace(TWO, tokens=3, experts=4, k=2)
    given, ids = half(operands(case, 3)), np.stack([routings(case, seed)["drawn"] for seed in (4, 5)])
    del given["shift"]

    def scanned(run: Any, given: Any) -> Any:
        step = lambda x, ids: (x + jax.checkpoint(run)(given | {"x": x}, ids), None)  # noqa: E731
        return lax.scan(step, given["x"], ids)[0]

    def mapped(run: Any, given: Any) -> Any:
        axes = {name: 0 if name == "x" else None for name in given}
        return jax.vmap(run, in_axes=(axes, 0))(given | {"x": jnp.stack([given["x"], given["x"][::-1]])}, ids)

    def results(f: Any, implementation: Any, given: Any) -> Any:
        of = dataclasses.replace(case, implementation=implementation)
        run = on_devices(of, lambda given, ids: layer(of, given, ids)[0])
        return jax.jit(jax.value_and_grad(lambda given: (f(run, given) * 0.25).astype(jnp.float32).sum()))(given)

    for f in (scanned, mapped):
        wide = {name: x.astype(jnp.float32) for name, x in given.items()}
        assert_as_near(results(f, "fused", given), results(f, "xla", given), results(f, "xla", wide), f.__name__)


