"""Ctrl-C during emulated kernels, in a child process: the launch ends, and the next one works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.budget import slowness

PROGRAM = """
import contextlib, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores SIGINT, and so would we.
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
import overlap
from jax.sharding import PartitionSpec as P
from overlap import emulation
from mosaic_emulator.entry.sequence import World

began = threading.Event()
execute = World.execute

def noting(self, *arguments):
    began.set()
    return execute(self, *arguments)

World.execute = noting
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

def one(x, w):
    return overlap.matmul(x, w, implementation="fused")

def two(x, w):
    call = lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused")
    specs = dict(in_specs=(P("x", None), P(None, "x")), out_specs=P(None, "x"), check_vma=False)
    return jax.shard_map(call, mesh=mesh, **specs)(x, w)

def loop(x, w):
    return jax.lax.fori_loop(0, 1000, lambda _, y: one(y, w) / 2, x)

def interrupted(name, function, size, context):
    operand = jnp.ones((size, size), jnp.bfloat16)
    began.clear()
    sent = []

    def press():
        began.wait()
        time.sleep(0.2)  # In the middle of a launch.
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    try:
        with context:
            jax.block_until_ready(jax.jit(function)(operand, operand))
            time.sleep(1)  # A KeyboardInterrupt comes within this, if not before.
        print(name, "was not interrupted")
    except BaseException as error:
        # The run must be over, not only the wait for it: the next one begins where this one ends.
        y = np.asarray(jitted[function if function is not loop else one](small, small), np.float32)
        print(name, type(error).__name__, (y == 128).all(), time.monotonic() - sent[0])

small, jitted = jnp.ones((128, 128), jnp.bfloat16), {one: jax.jit(one), two: jax.jit(two)}
for function in (one, two):
    jax.block_until_ready(jitted[function](small, small))  # Compiled.
for function, size, emulated in CASES:
    name = f"{function.__name__} {emulated}"
    interrupted(name, function, size, emulation.emulate(seed=3) if emulated else contextlib.nullcontext())
# The last interrupt ends the program, while one launch runs and others wait.
call, large = jitted[two], jnp.ones((1024, 1024), jnp.bfloat16)
began.clear()
for _ in range(4):  # jax itself waits for the first call of a function only.
    call(large, large)
began.wait()
print(time.time(), flush=True)
os.kill(os.getpid(), signal.SIGINT)
"""
FEW = "(two, 2048, True), (loop, 128, False)"
OTHERS = "(one, 2048, False), (one, 2048, True), (two, 2048, False), (loop, 128, True)"


@pytest.mark.parametrize("cases", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_an_interrupt_ends_the_run_and_the_next_one_works(repository, cases):
    environment = os.environ | {"PYTHONPATH": str(repository), "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", PROGRAM.replace("CASES", cases)]
    process = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200, check=False)
    end = time.time()
    *said, last = [line.rsplit(maxsplit=3) for line in process.stdout.splitlines()]
    assert len(said) == cases.count("128") + cases.count("2048"), process.stdout + process.stderr
    for name, error, right, seconds in said:
        assert (error, right) == ("KeyboardInterrupt", "True"), name
        # Without interrupt: 10 to 60 s, and more beside other work, which slows the end as well.
        assert float(seconds) < 9 * slowness(), f"{name}: the next result came after {seconds} s"
    assert process.returncode == -signal.SIGINT, process.stderr
    assert end - float(last[0]) < 9
