"""What fused kernels need from XLA, checked in the programs that XLA compiles for GPUs; and flags that break it."""

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
assembled = pytest.mark.skipif(assembly.unavailable_reason() is not None, reason=str(assembly.unavailable_reason()))


def on_mesh(call, mesh, count, out_specs):
    operands = [
        jax.ShapeDtypeStruct(shape, jnp.float16, sharding=jax.NamedSharding(mesh, spec))
        for shape, spec in zip(SHAPES, SPECS)
    ]
    mapped = jax.shard_map(call, mesh=mesh, in_specs=SPECS[:count], out_specs=out_specs, check_vma=False)
    return mapped, operands[:count]


def fused(a, b):
    return overlap.all_gather_lhs_matmul(a, b, "x", implementation="fused")


def independent(case, mesh):
    """Two fused calls, a product and a sum over all devices, all independent; and a loop of fused calls."""

    def call(a, b, c):
        again = lax.fori_loop(0, 3, lambda i, x: jnp.roll(x, 1, 0) + fused(a, b)[:256, :512] * 0.1, c)
        return fused(a, b), fused(c, b * 2), lax.psum(jnp.sum(a, 0), "x")[None], again.T @ c

    return on_mesh(call, mesh, 3, (P(None, "x"), P(None, "x"), P("x"), P("x")))


def on_a_second_stream(case, mesh):
    """Runs the fused call on a second stream, as a user can explicitly ask XLA to do."""
    space = jax.memory.Space.Device
    call = compute_on(fused, compute_type="gpu_stream:1", out_memory_spaces=space)
    return on_mesh(call, mesh, 2, P(None, "x"))


def program_of(name, tmp_path):
    assembly.assemble_case(assembly.Case(f"tests.choice.test_xla_needs:{name}", 4), hlo=str(tmp_path / "hlo"))
    return (tmp_path / "hlo").read_text()


def started_aside(program):
    """Returns how many fused calls a program has, and how many of them run beside the main stream."""
    bodies = dict(re.findall(r"^(?:ENTRY )?%([\w.-]+) \(.*?\{$(.*?)^\}", program, re.M | re.S))
    calls = {name: body.count('custom_call_target="mosaic_gpu_v2"') for name, body in bodies.items()}
    aside = re.findall(r" (?:async|call|fusion|custom-call)-start\(.*?(?:to_apply|calls)=%([\w.-]+)", program)
    return sum(calls.values()), sum(calls[name] for name in aside)


@assembled
def test_fused_calls_are_on_the_main_stream_in_one_order(tmp_path):
    program = program_of("independent", tmp_path)
    assert "is_scheduled=true" in program
    assert started_aside(program) == (3, 0)
    # XLA's collectives do run beside the main stream.
    assert "all-reduce-start(" in program


@assembled
def test_the_check_sees_a_call_that_is_not(tmp_path):
    assert started_aside(program_of("on_a_second_stream", tmp_path)) == (1, 1)


MODE = "--xla_gpu_command_buffer_scheduling_mode="


@pytest.mark.parametrize(
    "flags", ["", MODE + "LHS", MODE + "SERIALIZE", f"{MODE}CONCURRENT {MODE}LHS", "--xla_dump_to=a"]
)
def test_harmless_flags(flags):
    assert _xla_flags.breaking(flags) == []


@pytest.mark.parametrize("mode", ["CONCURRENT", "concurrent_regions"])
def test_flags_that_let_fused_kernels_run_at_the_same_time(mode, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=a {MODE}{mode}")
    (sentence,) = _xla_flags.breaking()
    assert f"{MODE}{mode.upper()}" in sentence and "leave the flag out" in sentence
