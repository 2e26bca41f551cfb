"""Helpers for the tests on GPUs: they make devices late, and overwrite operands right after the kernel."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests import oracle

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


def repeated(fused, unfused, mesh, iterations, *, flip=True):
    """Returns a function of (gathered operand, other operand) for `shard_map`: the largest distance of both products.

    In each iteration every device is late by its own random time, and the gathered operand is overwritten right after
    the kernel. So the result is wrong if a device leaves while a peer still reads its operand. With `flip` the new
    values differ from the old ones; without it they are the same.
    """

    def body(gathered, other):
        me = lax.axis_index("x")

        def step(i, carry):
            gathered, worst = carry
            expected = unfused(gathered, other).astype(jnp.float32)
            turns = jax.random.randint(jax.random.fold_in(jax.random.key(i), me), (), 0, 40)
            # Only this device does this work, and its operand depends on it: so this device starts the kernel late.
            zero = lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.zeros((), jnp.float32))
            late = gathered + zero.astype(gathered.dtype)
            worst = jnp.maximum(worst, oracle.distance(fused(late, other), expected))
            return jnp.roll(-late, 1, axis=1) if flip else late, worst

        return oracle.worst(lax.fori_loop(0, iterations, step, (gathered, jnp.float32(0)))[1], mesh)

    return body
