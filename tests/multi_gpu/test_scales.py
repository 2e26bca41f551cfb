"""Tests row scales that travel with the rows, on 2, 4 and 8 GPUs: many rows and few, whichever device is late."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.gather import joined_kernel, pull
from tests import oracle
from tests.ops import skew_cases
from tests.ops.skew_cases import stall
from tests.protocol import test_joined_protocol, test_protocol

# Rows per shard, and the configuration: row blocks with chunks of several CTAs; the same with clusters; few rows
# (`joined`).
MANY = (512, 512, 512), overlap.Config(tile_n=128)
CUT = (264, 512, 1024), overlap.Config(tile_n=128, stream_k=2)
FEW = (16, 512, 2048), overlap.Config(tile_m=64, tile_n=256, stream_k=8, joined=True)
KINDS = pytest.mark.parametrize("kind", [MANY, CUT, FEW], ids=["many", "cut", "few"])


def row_scales(lhs):
    """Returns row scales as a quantization would compute them: different for each row."""
    return 1 + jnp.abs(lhs[:, :1].astype(jnp.float32)) * 8


def repeated(devices, kind, iterations):
    (shape, config), mesh = kind, oracle.make_mesh(x=devices)

    def fused(lhs, rhs):
        return oracle.fused(lhs, rhs, lhs_scale=row_scales(lhs), config=config)

    def unfused(lhs, rhs):
        return oracle.unfused(lhs, rhs).astype(jnp.float32) * lax.all_gather(row_scales(lhs), "x", axis=0, tiled=True)

    body = skew_cases.repeated(fused, unfused, mesh, iterations)
    return float(oracle.on_mesh(mesh, body, out_specs=P())(*oracle.operands(mesh, shape, jnp.bfloat16, seed=9)))


def late_scales(monkeypatch, victim):
    """Makes CTAs of device `victim` stall before they copy scales, while other CTAs copy the rows."""

    def late(copy):
        return lambda *args: (stall(victim), copy(*args))[1]

    monkeypatch.setattr(pull, "_pull_scales", late(pull._pull_scales))
    monkeypatch.setattr(joined_kernel, "_pull_scales", late(joined_kernel._pull_scales))


@KINDS
def test_skewed_devices_and_inputs_overwritten_right_after(devices, kind):
    assert repeated(devices, kind, 50) < 1e-2


@KINDS
@pytest.mark.parametrize("victim", [0, 1])
def test_scales_that_are_late(devices, victim, kind, monkeypatch):
    late_scales(monkeypatch, victim)
    assert repeated(devices, kind, 5) < 1e-2


@pytest.mark.parametrize("kind", [MANY, FEW], ids=["many", "few"])
def test_negative_control_without_counting_scales_it_is_wrong(devices, kind, monkeypatch):
    late_scales(monkeypatch, 1)
    test_protocol.do_not_count_scales(monkeypatch)
    test_joined_protocol.do_not_count_scales(monkeypatch)
    assert repeated(devices, kind, 5) > 1e-1
