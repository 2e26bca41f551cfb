"""One process of a job that a test starts.

The first argument says what the job does instead of two products, or what goes wrong after the first one:

    raise, exit, kill     process 1 does this, while process 0 waits in the second product
    sleeps                process 1 raises while the other process sleeps
    late                  process 1 uses devices before it has joined the job
    absent, stuck         process 1 does not come to the rendezvous of the processes
    hosts                 each process counts as a host of its own
    meet, wait, workers   the processes meet (wait: then wait until they are killed;
                          workers: process 1 then starts a process that imports this module)
"""

import functools
import multiprocessing
import os
import re
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap import _compat
from overlap.distributed import launchers


def lower_for_own_host() -> None:
    """Prints the device ids that XLA receives if each process is a host of its own."""
    from overlap.choice import dispatch
    from overlap.kernels.target import Target
    from overlap.primitives import host_mesh

    host_mesh.host_of = lambda device: device.process_index
    host_mesh.HostMesh.require_known_ids = lambda self: None  # jax numbers the CPU devices of process p from 2048 p.
    dispatch.target = lambda mesh=None: Target("gpu", "NVIDIA H200", 132)
    mesh = jax.make_mesh((2, 2), ("data", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    layer = jax.shard_map(
        lambda x, w: overlap.all_gather_lhs_matmul(x, w, "x", implementation="fused"),
        mesh=mesh, in_specs=(P(("data", "x")), P(None, "x")), out_specs=P("data", "x"), check_vma=False,
    )  # fmt: skip
    operands = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (512, 1024)))
    text = jax.jit(layer).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    (ids,) = re.findall(r'xla_replica_ids = "([^"]*)"', text)
    print(f"process {jax.process_index()}: ids {ids}", flush=True)


def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else ""
    if mode == "late":
        jax.devices()
    if mode in ("absent", "stuck"):
        if launchers.find_place(os.environ).rank == 1:
            if mode == "stuck":
                time.sleep(60)
            raise SystemExit(0)
        overlap.initialize(timeout_s=2)
    overlap.initialize()
    if __name__ != "__main__":
        assert not jax.distributed.is_initialized()
        return print("a worker is no process of the job", flush=True)
    if mode in ("meet", "wait", "workers"):
        print(f"process {jax.process_index()} of {jax.process_count()}, {jax.device_count()} devices", flush=True)
        while mode == "wait":
            time.sleep(0.05)
        if mode == "workers" and jax.process_index() == 1:
            worker = multiprocessing.get_context("spawn").Process(target=print)
            worker.start()
            worker.join()
        # Communicate once more at the end, to show that the job still works.
        _compat.job_store().wait_at_barrier("tests", 30_000)
        return print(f"process {jax.process_index()} is done", flush=True)
    overlap.initialize()  # A second call has no effect.
    if mode == "hosts":
        return lower_for_own_host()
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    values = [np.random.default_rng(seed).standard_normal(shape).astype(np.float16)
              for seed, shape in enumerate(((devices * 8, 16), (16, devices * 8)))]  # fmt: skip
    specs = P("x", None), P(None, "x")
    lhs, rhs = (
        jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index, array=array: array[index])
        for array, spec in zip(values, specs, strict=True)
    )
    call = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", implementation="xla")
    layer = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=False))
    expected = values[0].astype(np.float32) @ values[1]
    for number in range(2):
        (shard,) = layer(lhs, rhs).addressable_shards
        error = float(np.abs(np.asarray(shard.data, np.float32) - expected[shard.index]).max())
        who = f"process {jax.process_index()} of {jax.process_count()}, {devices} devices"
        print(f"{who}, product {number}, error {error:.4f}", flush=True)
        if jax.process_index() == 1:
            if mode in ("raise", "sleeps"):
                raise ValueError("process 1 gives up")
            if mode == "exit":
                raise SystemExit(3)
            if mode == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        if mode == "sleeps":
            time.sleep(100)
            print("process 0 has slept", flush=True)


main()
