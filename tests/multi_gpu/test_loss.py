"""The loss without logits on GPUs: right to rounding with its gradients, the same bits, no wrong label passes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.ops import loss_cases as loss
from tests.oracle import make_mesh

OPTIONS = {
    "plain": {}, "everything": {"transpose_w": True, "chunk": 320, **loss.EVERYTHING},
    "kept": {"chunk": None}, "kept, everything": {"transpose_w": True, "chunk": None, **loss.UNCAPPED},
}  # fmt: skip


def results(run, given, devices):
    """Whole on all devices, so that each process can read them."""
    whole = jax.jit(run, out_shardings=NamedSharding(make_mesh(x=devices), P()))
    return {name: np.asarray(x) for name, x in whole(given).items()}


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients(devices, name):
    """At most twice as far from the formulas in float64 as by XLA, and the same bits in five launches."""
    case = loss.Case(tokens=200 * devices, features=520, columns=1032 * devices, devices=devices, **OPTIONS[name])
    given = {key: np.array(value) for key, value in loss.drawn(case, seed=devices).items()}
    expected = loss.formulas(case, given)
    fused = loss.program(case, "fused")
    found, *again = (results(fused, given, devices) for _ in range(5))
    for others in again:
        for key, value in others.items():
            np.testing.assert_array_equal(value, found[key], key)
    by_xla = loss.distances(results(loss.program(case, "xla"), given, devices), expected)
    for key, distance in loss.distances(found, expected).items():
        assert distance <= 2 * max(by_xla[key], 1e-3), (key, distance, by_xla[key])


def test_a_wrong_label_spoils_its_token_alone(devices):
    case = loss.Case(tokens=200 * devices, columns=1032 * devices, devices=devices)
    given = {key: np.array(value) for key, value in loss.drawn(case, seed=devices).items()}
    given["labels"][5] = case.columns
    found = results(loss.program(case, "fused"), given, devices)
    assert np.flatnonzero(np.isnan(found["loss"])).tolist() == [5]
    assert np.flatnonzero(np.isnan(found["x"].astype(np.float32)).any(axis=1)).tolist() == [5]
    assert np.isnan(found["w"].astype(np.float32)).any()
