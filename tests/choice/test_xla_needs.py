"""What fused kernels need from XLA, checked in a program that XLA compiles for GPUs; and flags that break it."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec as P

import overlap
from overlap import _xla_flags
from tests.assembly import assembly

SHAPES = (1024, 512), (512, 2048), (1024, 512)
SPECS = P("x", None), P(None, "x"), P("x", None)


def fused(a, b):
    return overlap.all_gather_lhs_matmul(a, b, "x", implementation="fused")


def program(case, mesh):
    """Fused calls, a loop of them, a product and a sum over all devices, all independent; one is on a second stream."""
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(SHAPES, SPECS)
    ]
    aside = compute_on(fused, compute_type="gpu_stream:1", out_memory_spaces=jax.memory.Space.Device)

    def call(a, b, c):
        again = lax.fori_loop(0, 3, lambda i, x: jnp.roll(x, 1, 0) + fused(a, b)[:256, :512] * 0.1, c)
        return fused(a, b), fused(c, b * 2), lax.psum(jnp.sum(a, 0), "x")[None], again.T @ c, aside(a, b * 3)

    out_specs = P(None, "x"), P(None, "x"), P("x"), P("x"), P(None, "x")
    return jax.shard_map(call, mesh=mesh, in_specs=SPECS, out_specs=out_specs, check_vma=False), operands


@pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))
def test_fused_calls_are_on_the_main_stream_in_one_order(tmp_path):
    """All but the one that a user explicitly put on a second stream: so the check sees a call that is not."""
    assembly.assemble_case(assembly.Case("tests.choice.test_xla_needs:program", 4), hlo=str(tmp_path / "hlo"))
    text = (tmp_path / "hlo").read_text()
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) \(.*?\{$(.*?)^\}", text, re.M | re.S))
    calls = {name: body.count('custom_call_target="mosaic_gpu_v2"') for name, body in bodies.items()}
    aside = re.findall(r" (?:async|call|fusion|custom-call)-start\(.*?(?:to_apply|calls)=%([\w.-]+)", text)
    assert "is_scheduled=true" in text
    assert (sum(calls.values()), sum(calls[name] for name in aside)) == (4, 1)
    # XLA's collectives do run beside the main stream.
    assert "all-reduce-start(" in text


MODE = "--xla_gpu_command_buffer_scheduling_mode="


def test_flags_that_let_fused_kernels_run_at_the_same_time(monkeypatch):
    for harmless in ("", MODE + "LHS", MODE + "SERIALIZE", f"{MODE}CONCURRENT {MODE}LHS", "--xla_dump_to=a"):
        assert _xla_flags.breaking(harmless) == []
    for mode in ("CONCURRENT", "concurrent_regions"):
        monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=a {MODE}{mode}")
        (sentence,) = _xla_flags.breaking()
        assert f"{MODE}{mode.upper()}" in sentence and "leave the flag out" in sentence
