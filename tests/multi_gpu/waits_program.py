"""A program in which some devices or processes are late or missing: tests on GPUs run it as its own process or job.

    python -m tests.multi_gpu.waits_program late | never | stall | kill | raise | exit | order

`late`: the last device begins some seconds after the others. `never`: the last device is busy for much longer than the
limit. The other modes concern the last process of a job: it sleeps, is killed, raises, exits with status 0 while the
others continue, or calls another operation than they do.
"""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.primitives import stalls
from tests.oracle import make_mesh

SECONDS = {"late": 6.0, "never": 45.0}


def main(mode: str, transport: str) -> None:
    stalls.REPORT_AFTER_S = 2.0
    overlap.initialize()
    devices = jax.device_count()
    mesh = make_mesh(x=devices)

    def ones(shape, spec):
        return jax.jit(lambda: jnp.ones(shape, jnp.bfloat16), out_shardings=jax.NamedSharding(mesh, spec))()

    def layer(x, w, turns):
        # Only the last device does this work, and its operand depends on it.
        turns = jnp.where(lax.axis_index("x") == devices - 1, turns, 0)
        zero = lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.float32(0))
        out = overlap.all_gather_lhs_matmul(
            x + zero.astype(x.dtype), w, "x", implementation="fused", transport=transport
        )
        return jnp.abs(out - x.shape[1]).max()[None]

    def summed(x, w, _):
        return overlap.matmul_reduce_scatter(x, w, "x", implementation="fused").max()[None].astype(jnp.float32)

    f, scattered = (
        jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(P("x"), P(None, "x"), P()), out_specs=P("x")))
        for function in (layer, summed)
    )
    # More rows than the kernel for joined rows takes, whose waits name another kernel.
    x, w = ones((devices * 1024, 512), P("x")), ones((512, devices * 256), P(None, "x"))
    jax.block_until_ready(f(x, w, 1))
    if mode == "order":
        jax.block_until_ready(scattered(x, w, 1))
    start = time.monotonic()
    jax.block_until_ready(f(x, w, 20000))
    turns = int(SECONDS.get(mode, 0) * 20000 / (time.monotonic() - start))
    if mode not in SECONDS and jax.process_index() == jax.process_count() - 1:
        if mode == "raise":
            raise ValueError("on purpose")
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "exit":
            sys.exit(0)
        if mode == "order":
            f = scattered
        else:
            time.sleep(1000)
    start = time.monotonic()
    try:
        for _ in range(3 if mode == "late" else 1):
            wrong = jax.block_until_ready(f(x, w, turns))
            turns = 0
        time.sleep(2.5)  # Gives the host time to read what the kernels have reported.
        print(f"DONE, wrong by {max(float(s.data[0]) for s in wrong.addressable_shards)}", flush=True)
    except jax.errors.JaxRuntimeError as error:
        print(f"RAISED after {time.monotonic() - start:.1f} s: {str(error)[:200]}", flush=True)
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "pull")
