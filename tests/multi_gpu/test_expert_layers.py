"""`layers.ExpertMLP` by kernels on GPUs, on meshes of two axes: against a loop over its experts, and against XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from overlap import layers
from tests.layers.layer_cases import draw, whole
from tests.layers.test_expert_mlp import CHOSEN, EXPERTS, expected, loss_of

FEATURES, HIDDEN, ROWS = 256, 384, 40
# Where the weights and the batch lie, and further keywords; "masked" leaves out some tokens.
CASES: dict[str, dict[str, Any]] = {
    f"{fsdp}-{batch}": {"fsdp_axis": fsdp, "batch_axis": batch} for fsdp in (None, "data") for batch in (None, "data")
}
CASES["masked"] = {"fsdp_axis": "data", "batch_axis": "data", "masked": True}
CASES["dropped"] = {"fsdp_axis": "data", "batch_axis": None, "capacity_factor": 0.6}
CASES["rows whole"] = {"fsdp_axis": None, "batch_axis": "data", "sequence_parallel": False, "use_bias": True}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("along", ["tensor", "data", "both"])
@pytest.mark.parametrize("name", CASES)
def test_the_layer_on_every_mesh(devices: int, name: str, along: str, kind: AxisType) -> None:
    """In bfloat16: at most twice XLA's distance from float32, and the same bits twice."""
    if along == "both" and devices < 4:
        pytest.skip("needs 4 GPUs")
    options = dict(CASES[name])
    tensor = {"tensor": devices, "data": 1, "both": devices // 2}[along]
    mesh = Mesh(np.array(jax.devices()).reshape(-1, tensor), ("data", "tensor"), axis_types=(kind,) * 2)
    x = draw(1, (2 * devices, ROWS, FEATURES)).astype(jnp.bfloat16)
    mask = np.random.default_rng(2).random(x.shape[:2]) < 0.6 if options.pop("masked", False) else None
    options |= {"axis": "tensor", "dtype": jnp.bfloat16, "param_dtype": jnp.float32}

    def results(implementation: str) -> Any:
        made = layers.ExpertMLP(
            FEATURES, HIDDEN, EXPERTS, CHOSEN, rngs=nnx.Rngs(0), implementation=implementation, **options
        )
        run = nnx.jit(nnx.value_and_grad(
            lambda layer, x, mask: loss_of(layer(x, x, mask)), argnums=(0, 1), has_aux=True))  # fmt: skip
        found = []
        for _ in range(2):
            (_, outs), (of_layer, of_x) = run(made, x, mask)
            leaves = jax.tree.leaves((outs, nnx.to_pure_dict(of_layer), of_x))
            found.append([whole(a).astype(np.float32) for a in leaves])
        return made, found

    # In float32 the router chooses as the reference does. The products of experts are in bfloat16 all the same.
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        made, (first, again) = results("fused")
        _, (rival, _) = results("xla")
    groups = mesh.shape["data"] if options["batch_axis"] else 1
    capacity = None
    if factor := options.get("capacity_factor"):
        capacity = int(np.ceil(factor * x.shape[0] // groups * ROWS * CHOSEN / EXPERTS))
    cut = tensor if options.get("sequence_parallel", True) else 1
    right = expected(made, x.astype(np.float32), capacity, groups, True, cut, True if mask is None else mask)
    for ours, twice, theirs, exact in zip(first, again, rival, jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(ours, twice)
        size = np.linalg.norm(exact) + 1e-6
        off, allowed = (np.linalg.norm(a.reshape(exact.shape) - exact) / size for a in (ours, theirs))
        assert off <= 2 * allowed + 1e-3, (off, allowed)
