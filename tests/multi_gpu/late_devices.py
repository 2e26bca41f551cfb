"""Makes devices late, inside kernels and before them, and overwrites operands right after a kernel."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import PartitionSpec as P

from overlap.collectives import communicator
from overlap.collectives.communicator import Communicator
from overlap.collectives.gather import joined_kernel, pull, ring
from overlap.primitives.handshake import Handshake
from tests import oracle
from tests.ops.contract import F32, put

STALL_NS = 200_000


def _stall(_):
    for _ in range(2):
        mgpu_utils.inline_ptx(f"nanosleep.u32 {STALL_NS // 2};", has_side_effects=True)


def stall(victim, also=True, times=1):
    """Inside a kernel: stalls device `victim` of axis x for `times` · `STALL_NS`, if `also` holds."""

    @pl.when(jnp.logical_and(lax.axis_index("x") == victim, also))
    def _do_nothing():
        for _ in range(times):
            plgpu.inline_mgpu()(_stall)()


def before(target, name, victim, also=lambda *args: True, times=1):
    """A defect of timing: device `victim` stalls before it calls `target.name`, if `also` holds for the arguments."""
    act = getattr(target, name)

    def late(*args, **kwargs):
        stall(victim, also(*args), times)
        return act(*args, **kwargs)

    return lambda patch: patch.setattr(target, name, late)


def chunks(which, victim):
    """Device `victim` stalls before it announces ("landed"), or before it begins with ("source"), each chunk."""
    copy_chunks = communicator.copy_chunks

    def late(*args, **kwargs):
        act = kwargs.pop(which)
        return copy_chunks(*args, **{which: lambda *place: (stall(victim), act(*place))[1]}, **kwargs)

    return lambda patch: patch.setattr(communicator, "copy_chunks", late)


def scales(victim):
    def late(patch):
        for module in (pull, joined_kernel):
            before(module, "_pull_scales", victim)(patch)

    return late


def peers_chunks(victim, times=1):
    copy = Communicator._copy

    def late(self, chunks, *args):
        if chunks is self.peers:
            stall(victim, times=times)
        return copy(self, chunks, *args)

    return lambda patch: patch.setattr(Communicator, "_copy", late)


LATE = {  # Each is a function of the late device, and makes a function of a `pytest.MonkeyPatch`.
    "arrivals": lambda victim: chunks("landed", victim),
    "departures": lambda victim: chunks("source", victim),
    "passing on": lambda victim: before(ring, "_pass_on", victim, lambda site, tile, k, lhs_smem: k == 0),
    "announcing": lambda victim: before(ring, "_announce", victim),
    "beginning": lambda victim: before(Handshake, "_raise", victim),
    "one communicator": lambda victim: before(Handshake, "_begin", victim, lambda self, look: self.cta == 0),
    "scales": scales,
    "copying": peers_chunks,
}


def worst_error(call, devices, iterations, seed=3, overwritten=None):
    """The largest distance from plain JAX, in a loop in which every device is late by its own random time.

    The operand that peers read is overwritten right after the kernel, so the result is wrong if a device leaves while
    a peer still reads. `overwritten`: its name.
    """
    mesh, arrays = oracle.make_mesh(x=devices), call.normal(devices, seed)
    name = overwritten or ("rhs" if call.spec.gathers_rhs else "lhs")

    def body(arrays):
        me = lax.axis_index("x")

        def step(i, carry):
            moved, worst = carry
            exact = call.plain(arrays | {name: moved}, F32)
            turns = jax.random.randint(jax.random.fold_in(jax.random.key(i), me), (), 0, 40)
            # Only this device does this work, and its operand depends on it: so this device starts the kernel late.
            zero = lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.zeros((), jnp.float32))
            late = moved + zero.astype(moved.dtype)
            worst = jnp.maximum(worst, oracle.distance(call(arrays | {name: late}), exact))
            return jnp.roll(-late, 1, axis=1), worst

        return oracle.worst(lax.fori_loop(0, iterations, step, (arrays[name], jnp.float32(0)))[1], mesh)

    return float(call.program(mesh, arrays, body, P())(put(arrays, call.specs(arrays), mesh)))
