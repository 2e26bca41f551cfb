"""Tests that the kernels lower for CUDA with every supported jax. Lowering does not need jax's CUDA plugin."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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


BF16_FLOPS_PER_US = 989e6  # An H200's peak, from its data sheet.
BATCH, ROWS, WIDTH, HIDDEN = 4, 2048, 2048, 8192


def test_a_fused_block_with_fsdp(monkeypatch):
    """XLA's scheduler learns how long kernels take. Weights are gathered again when their shards alone are there."""
    # This machine has no GPU. Leave out the barriers that keep XLA for CPUs from seeing constants.
    monkeypatch.setattr("overlap.frame.by_xla.guarded", lambda rhs, mesh=None: rhs)
    mesh = make_mesh(data=2, tensor=2)
    between, inside, up, down = P("data", "tensor"), P("data", None, "tensor"), P("data", "tensor"), P("tensor", "data")
    shapes = ((BATCH, ROWS, WIDTH), between), ((WIDTH, HIDDEN), up), ((HIDDEN, WIDTH), down)

    def loss(x, up_weights, down_weights):
        product = functools.partial(overlap.sharded_matmul, mesh=mesh, implementation="fused")
        h = product(x, up_weights, lhs_sharding=between, rhs_sharding=up, out_sharding=inside, activation=jnp.tanh)
        out = product(h, down_weights, lhs_sharding=inside, rhs_sharding=down, out_sharding=between, addend=x)
        return (out.astype(jnp.float32) ** 2).sum()

    operands = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in shapes]
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*operands)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    # Each product and each cotangent of a left operand. The latter brings what the cotangent of the weights needs.
    assert len(kernels) == 4
    at_peak_us = 2 * BATCH * ROWS * WIDTH * HIDDEN / mesh.size / BF16_FLOPS_PER_US
    for kernel in kernels:
        (ns,) = re.findall(r'latency_metadata = "(\d+)"', kernel)
        assert at_peak_us <= int(ns) / 1e3 <= 3 * at_peak_us
    # Each barrier has one operand, a device's shard of some weights. A cotangent would delay the second gather.
    shards = [f"{WIDTH // 2}x{HIDDEN // 2}xbf16", f"{HIDDEN // 2}x{WIDTH // 2}xbf16"]
    barriers = re.findall(r"stablehlo.optimization_barrier (.*)", text)
    alone = [re.fullmatch(r"%arg\d+ : tensor<(.*)>", barrier) for barrier in barriers]
    assert sorted(match[1] for match in alone if match) == sorted(shards) and all(alone), barriers
    gathered = re.findall(r'"stablehlo.all_gather"\((%\w+)\).*?: \(tensor<(.*?)>\)', text)
    assert sorted(shard for _, shard in gathered) == sorted(2 * shards)
    # Two of the gathers take what a barrier returns.
    assert [name.startswith("%arg") for name, _ in gathered] == [True, True, False, False]
