"""`ExpertMLP` along other axes than one of rows, and with a bound for the rows of a device."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import overlap
from overlap import layers
from tests.layers.layer_cases import AUTO, assert_near, draw, numbers, put, same
from tests.layers.router_cases import (
    CASES,
    CHOSEN,
    EXPERTS,
    Case,
    built,
    chosen_by,
    gpt_oss_activation,
    mesh_of,
    right_of,
    run,
)

pytestmark = pytest.mark.one_jax


@pytest.mark.parametrize("name", CASES)
def test_experts_along_other_axes(name: str) -> None:
    """Results, placement, gradients; no gradient for the bias of the choice."""
    case = CASES[name]
    x = draw(1, (4, 8, 8))
    mesh = mesh_of(case)
    with jax.set_mesh(mesh):
        made = built(case)
        (_, (out, report)), (of_layer, of_x) = run(made, put(x, mesh, case.between))
    p = numbers(made)
    right, grads = right_of(case, p, x)
    assert_near(out, right, 1e-5)
    assert same(out, case.between) and report.dropped == 0 and 0.9 < report.load_balance_loss < EXPERTS
    assert_near((nnx.to_pure_dict(of_layer), of_x), grads, 2e-5)
    assert same(made.gate.kernel[...], P(case.options["axis"], case.options.get("fsdp_axis"), None))
    # A negative control.
    assert np.linalg.norm(out - right_of(case, p, x[::-1])[0]) > 1


def kept(ids: np.ndarray, experts: int, devices: int, capacity: int, rows: int) -> np.ndarray:
    """Which routes are computed. `ids`: [tokens, k], in the order of the devices."""
    of_expert, of_device = np.zeros(experts, int), np.zeros(devices, int)
    found = np.zeros(ids.shape, bool)
    for at, expert in np.ndenumerate(ids):
        device = expert // (experts // devices)
        if of_expert[expert] < capacity and of_device[device] < rows:
            found[at] = True
            of_expert[expert] += 1
            of_device[device] += 1
    return found


@pytest.mark.parametrize(("capacity_factor", "rows_factor"), [(None, 0.75), (1.25, 0.9)])
def test_a_bound_for_the_rows_of_a_device(capacity_factor: float | None, rows_factor: float) -> None:
    """Of four devices along the data axis, each of which takes its first rows."""
    case = Case(("data",), {"axis": "data", "batch_axis": "data"}, P("data", None, None))
    x = draw(3, (4, 8, 8))
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AUTO,))
    with jax.set_mesh(mesh):
        made = built(case, capacity_factor=capacity_factor, rows_factor=rows_factor)
        (_, (out, report)), (of_layer, of_x) = run(made, put(x, mesh, case.between))
    p = numbers(made)
    routes = 32 * CHOSEN
    capacity = routes if capacity_factor is None else math.ceil(capacity_factor * routes / EXPERTS)
    ids = chosen_by(case, p, x).reshape(-1, CHOSEN)
    counts = kept(ids, EXPERTS, 4, capacity, math.ceil(rows_factor * routes / 4))
    right, grads = right_of(case, p, x, counts.reshape(4, 8, CHOSEN))
    assert_near(out, right, 1e-5)
    assert_near((nnx.to_pure_dict(of_layer), of_x), grads, 2e-5)
    np.testing.assert_allclose(report.dropped, 1 - counts.mean(), rtol=1e-5)
    assert report.dropped > 0


def test_temporary_memory_falls_with_the_rows() -> None:
    """Of a layer with gradients on four devices: exact, C is min(k, E / D) · D · T rows; pooled, 1.25 · k · T."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",), axis_types=(AUTO,))
    found = {}
    with jax.set_mesh(mesh):
        for factor in (None, 1.25):
            build = functools.partial(layers.ExpertMLP, 128, 64, 32, 4, implementation="xla", rows_factor=factor)
            graph, state = nnx.split(nnx.eval_shape(lambda build=build: build(rngs=nnx.Rngs(0))))

            def loss(state: Any, x: Any, graph: Any = graph) -> Any:
                out, _ = nnx.merge(graph, state)(x)
                return (out**2).sum()

            x = jax.ShapeDtypeStruct((1, 4096, 128), jnp.float32)
            compiled = jax.jit(jax.grad(loss, (0, 1))).lower(state, x).compile()
            memory: Any = compiled.memory_analysis()
            found[factor] = memory.temp_size_in_bytes
    assert found[1.25] <= 0.55 * found[None], found


def test_one_case_by_the_kernels() -> None:
    """Two devices along the data axis, a bound for rows, gpt-oss's activation, in bfloat16."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(AUTO,))
    options: Any = {"axis": "data", "batch_axis": "data", "rows_factor": 0.9, "dtype": jnp.bfloat16,
                    "activation": gpt_oss_activation, "router": layers.TopKSoftmax()}  # fmt: skip
    x = put(draw(5, (2, 8, 128)).astype(jnp.bfloat16), mesh, P("data", None, None))
    found = []
    with jax.set_mesh(mesh), overlap.emulation.emulate(cores=2):
        for implementation in ("fused", "xla"):
            made = nnx.jit(lambda how=implementation: layers.ExpertMLP(
                128, 128, 4, 2, rngs=nnx.Rngs(0), implementation=how, **options))()  # fmt: skip
            found.append(nnx.jit(lambda layer, x: layer(x))(made, x))
    assert_near(found[0], found[1], 2e-2)
    assert found[0][1].dropped > 0
