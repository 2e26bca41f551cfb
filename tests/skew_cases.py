"""Devices that are late, and operands overwritten right after the kernel: for the tests on GPUs."""

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
    """In a kernel: device `victim` on the axis x does nothing for a while, if `also` holds."""

    @pl.when(jnp.logical_and(lax.axis_index("x") == victim, also))
    def _do_nothing():
        for _ in range(times):
            plgpu.inline_mgpu()(_stall)()


def repeated(fused, unfused, mesh, iterations, *, flip=True):
    """A function of (what is gathered, the other operand), to be mapped: the worst distance between the products.

    In each iteration the devices are late by chance, each by itself, and what is gathered is overwritten right after
    the kernel: whoever leaves while a peer still reads it is caught. `flip`: with other values, else with the same.
    """

    def body(gathered, other):
        me = lax.axis_index("x")

        def step(i, carry):
            gathered, worst = carry
            expected = unfused(gathered, other).astype(jnp.float32)
            turns = jax.random.randint(jax.random.fold_in(jax.random.key(i), me), (), 0, 40)
            # Work that only this device has, which its operand depends on: it begins the kernel late.
            zero = lax.fori_loop(0, turns, lambda _, v: jnp.sin(v), jnp.zeros((), jnp.float32))
            late = gathered + zero.astype(gathered.dtype)
            worst = jnp.maximum(worst, oracle.distance(fused(late, other), expected))
            return jnp.roll(-late, 1, axis=1) if flip else late, worst

        return oracle.worst(lax.fori_loop(0, iterations, step, (gathered, jnp.float32(0)))[1], mesh)

    return body
