"""Tests that the kernels lower for CUDA with every supported jax. Lowering does not need jax's CUDA plugin."""

import re

import jax
import jax.numpy as jnp
import pytest

import overlap
from overlap.choice import dispatch
from overlap.kernels.target import Target
from tests import oracle
from tests.oracle import make_mesh

MESHES = [
    {"x": 8}, {"data": 2, "x": 2}, {"x": 2, "data": 2},
    *(pytest.param({"x": size}, marks=pytest.mark.slow) for size in (1, 2, 3)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA H200", 132))


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_all_gather_lhs_matmul(axes):
    mesh = make_mesh(**axes)
    devices = axes["x"]
    shapes = (devices * 256, 512), (512, devices * 512)
    # With several devices, the chooser takes the kernel.
    how = "fused" if devices == 1 else None
    call = oracle.on_mesh(mesh, lambda a, b: overlap.all_gather_lhs_matmul(a, b, "x", implementation=how))
    lowered = call.trace(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text
    if devices > 1:
        peers = ",".join(str(d) for d in range(mesh.size))
        assert f'xla_replica_ids = "{peers}"' in text
        # The size of each buffer that XLA adds is a multiple of NCCL's window alignment (primitives/semaphores.py).
        (flags,) = set(re.findall(r"tensor<(\d+)xi32>", text))
        assert int(flags) * 4 % 4096 == 0


def test_matmul():
    # A size at which the kernel was measured to be faster: the chooser selects it.
    lhs, rhs = (jax.ShapeDtypeStruct((4096, 4096), jnp.float16),) * 2
    lowered = jax.jit(overlap.matmul).trace(lhs, rhs).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
