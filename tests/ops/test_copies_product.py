"""`all_gather_lhs_grouped_matmul` where tokens arrive while their rows are multiplied: numbers, derivatives, and when.

Forms of the operation itself are in contract.py. Here its least numbers of devices and rows are lower than they are.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.rows import arriving
from tests.ops.contract import BF16, F16, F32, FORMS, GroupedCall, assert_close, check, running
from tests.ops.derivative_cases import TRANSFORMED, given, loss, of_both
from tests.ops.test_grouped_matmul import equations_in
from tests.oracle import make_mesh

pytestmark = pytest.mark.one_jax
ARRIVE = "tokens arrive while their rows are multiplied"
CALL = FORMS["tokens to rows"].but(config=None, m=12, k=128)
GATED = CALL.but(widths=(40, 40), activation=lambda gate, up: jax.nn.silu(gate) * up, extras=("bias",))


@pytest.fixture(autouse=True)
def _from_two_devices_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arriving, "_LEAST_DEVICES", 2)
    monkeypatch.setattr(arriving, "_LEAST_ROWS", 0)


def mapped(call: GroupedCall, devices: int = 2, function: Any = None) -> Any:
    function = function or call
    specs = call.specs(call.types(devices))
    return jax.shard_map(function, mesh=make_mesh(x=devices), in_specs=(specs,), out_specs=P("x"), check_vma=False)


def plans(call: GroupedCall, devices: int = 2, function: Any = None) -> list[str]:
    """What `explain` says of the products."""
    explained = overlap.explain(mapped(call, devices, function), call.types(devices))
    return [x.plan for x in explained if x.op == "grouped_matmul"]


NUMBERS = [
    (2, CALL.but(dtype=BF16)), (3, CALL.but(dtype=F16, slots=3, extras=("bias",), layout="nt")),
    (2, CALL.but(to="last", capacity=4)), (2, CALL.but(to="none")), (1, CALL),
    (2, CALL.but(widths=(64, 64), activation=jnp.maximum, n=64)),
]  # fmt: skip


@pytest.mark.parametrize(("devices", "call"), NUMBERS, ids=str)
def test_numbers(devices: int, call: GroupedCall) -> None:
    """Every bit, in rows that are not in use as well, which are zero; in several launches."""
    assert plans(call, devices) == [ARRIVE if devices > 1 else "tokens are copied before, since 1 devices share"
                                    " the experts, fewer than 2"]  # fmt: skip
    check(call, devices, launches=2)


HOW = ["vjp", *(pytest.param(x, marks=pytest.mark.slow) for x in TRANSFORMED if x != "vjp")]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("call", [CALL.but(dtype=F16), GATED.but(dtype=F16)], ids=["product", "gated"])
def test_derivatives(call: GroupedCall, how: str) -> None:
    """As in plain JAX. With an activation of two arrays, tokens arrive with the first product that it takes."""
    found, expected = of_both(call, given(call), TRANSFORMED[how], check_vma=how != "vmap of jvp")
    assert_close(found, expected)


def test_the_backward_pass_takes_the_rows_that_arrived() -> None:
    """It copies no tokens again. A checkpoint that keeps what goes into the activation copies tokens alone."""

    def kernels(policy: Any) -> list[int]:
        """How many results each function has that has a rule of its own."""
        layer = jax.checkpoint(GATED, policy=policy) if policy else GATED

        def gradient(arrays: Any) -> Any:
            return jax.grad(lambda rhs: layer(arrays | {"rhs": rhs}).astype(F32).sum())(arrays["rhs"])[0]

        found = equations_in(jax.make_jaxpr(mapped(GATED, function=gradient))(GATED.types(2)).jaxpr)
        return sorted(len(x.outvars) for x in found if x.primitive.name == "overlap_function")

    policies = jax.checkpoint_policies
    assert kernels(None) == [2]
    assert kernels(policies.save_only_these_names("before_activation", "rows", "routing")) == [2]
    assert kernels(policies.save_only_these_names("before_activation", "routing")) == [1, 2]
    assert kernels(policies.nothing_saveable) == [2, 2]

    def of_both(arrays: Any) -> Any:
        given = arrays["lhs"], arrays["rhs"]
        return jax.grad(lambda lhs, rhs: GATED(arrays | {"lhs": lhs, "rhs": rhs}).astype(F32).sum(), (0, 1))(*given)[0]

    with running(detect_races=False):
        text = jax.jit(mapped(GATED, function=of_both)).lower(GATED.types(2)).compile().as_text()
    assert "overlap_added_rows" in text and "overlap_copied_rows" not in text


def test_the_gradient_of_scalars_that_the_activation_captures() -> None:
    call = GATED.but(dtype=F16)
    arrays = given(call)
    slopes = []
    for body in ("__call__", "plain"):

        def of_slope(slope: jax.Array, body: str = body) -> jax.Array:
            scaled = call.but(activation=lambda gate, up: jax.nn.silu(gate * slope) * up)
            function = mapped(call, function=getattr(scaled, body))
            return jnp.sin(function(arrays).astype(F32)).sum()

        with running(detect_races=False):
            slopes.append(jax.block_until_ready(jax.jit(jax.grad(of_slope))(jnp.float32(0.75))))
    assert_close(*slopes)


def test_one_matrix_twice() -> None:
    """With a bias of its own each time, so that its products differ."""
    call = GATED.but(dtype=F16)
    arrays = given(call)

    def twice(function: Any) -> Any:
        return lambda arrays: function(arrays | {"rhs": [arrays["rhs"][0]] * 2})

    found = []
    for body in (call, call.plain):
        with running(detect_races=False):
            gradient = jax.grad(loss(mapped(call, function=twice(body))))
            found.append(jax.block_until_ready(jax.jit(gradient)(arrays)))
    assert_close(*found)


def test_vmap() -> None:
    """Each element has the bits that it has by itself."""
    both = [CALL.arrays(2, seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *both)
    with running(detect_races=False):
        found = jax.jit(jax.vmap(mapped(CALL)))(stacked)
        alone = [jax.jit(mapped(CALL))(arrays) for arrays in both]
    for index, one in enumerate(alone):
        np.testing.assert_array_equal(np.asarray(found[index], F32), np.asarray(one, F32))


def test_when_tokens_are_copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what `explain` says then."""
    before = "tokens are copied before, since "
    assert plans(CALL.but(config=FORMS["tokens to rows"].config)) == [before + "`config` is given"]
    assert plans(CALL.but(out=F32)) == [before + arriving.NO_ROOM]
    cumulated = CALL.but(activation=lambda x: jnp.cumsum(x, 1))
    assert plans(cumulated, function=functools.partial(cumulated, implementation=None)) == [""]
    with jax.debug_nans(True):
        assert plans(CALL) == [before + "jax looks for NaN, which rows that are not in use may hold"]
    assert plans(CALL, function=functools.partial(CALL, implementation="xla")) == [""]
    monkeypatch.setattr(arriving, "_LEAST_ROWS", 5)
    assert plans(CALL) == [before + "an expert has 4 rows of each device, fewer than 5"]
