"""Scales of blocks (mxfp8): exact by XLA in all operations and in the emulated Blackwell kernel; wrong calls.

Operands are small integers in 8 bits and scales are powers of two, so that every sum is exact in float32: a scale of a
wrong block, row or column shows in the result, whatever the order of the sum.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import overlap
from overlap import emulation
from overlap.choice import space, tables
from overlap.choice.problem import Problem
from overlap.emulation import EmulationError, emulate
from overlap.kernels import target
from overlap.kernels.blackwell import limits, scales
from overlap.kernels.target import emulating
from overlap.tuning import operations
from tests import assembly, oracle

E4M3, E5M2, E8M0 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e8m0fnu
BLOCK = 32
B200, H200 = target.Target("gpu", "NVIDIA B200", 148), target.Target("gpu", "NVIDIA H200", 132)
F32 = dict(preferred_element_type=jnp.float32)


class Product:
    """Operands with scales, and their exact product; a batch of `lhs` in front, of `rhs` too if `both`."""

    def __init__(self, seed, m, n, k, *, left="mk", right="nk", batch=(), both=False, dtypes=(E4M3, E5M2)):
        chance = np.random.default_rng(seed)

        def operand(rows, batch, dtype):
            values = chance.integers(-3, 4, (*batch, rows, k)).astype(dtype)
            return values, (2.0 ** chance.integers(-2, 3, (*batch, rows, k // BLOCK))).astype(E8M0)

        (x, of_x), (y, of_y) = operand(m, batch, dtypes[0]), operand(n, batch if both else (), dtypes[1])
        wide = [v.astype(np.float32) * np.repeat(s.astype(np.float32), BLOCK, -1) for v, s in ((x, of_x), (y, of_y))]
        self.exact = wide[0] @ wide[1].swapaxes(-1, -2)
        turned = [v.swapaxes(-1, -2) if swap else v for v, swap in
                  ((x, left == "km"), (of_x, left == "km"), (y, right == "kn"), (of_y, right == "kn"))]  # fmt: skip
        self.lhs, self.lhs_scale, self.rhs, self.rhs_scale = map(jnp.asarray, turned)
        self.transposes = dict(transpose_lhs=left == "km", transpose_rhs=right == "nk")

    @property
    def scales(self):
        return dict(lhs_scale=self.lhs_scale, rhs_scale=self.rhs_scale)

    def __call__(self, implementation="xla", **more):
        keywords = F32 | self.transposes | self.scales | more
        return overlap.matmul(self.lhs, self.rhs, implementation=implementation, **keywords)

    def check(self, cores=2, settings=None, **more):
        """By the emulated kernel."""
        with emulating("blackwell"), emulate(cores=cores, **settings or {}) as run:
            actual = self("fused", **more)
            run.check()
        np.testing.assert_array_equal(np.asarray(actual), self.exact)
        return run


def config(**fields):
    return overlap.Config(**dict(tile_m=128, tile_n=128, tile_k=128, stages=3, epilogue_tile_n=64) | fields)


# --- The kernel, emulated ---------------------------------------------------------------------------------------------

SIZES = [  # cores, shape, config
    (1, (128, 128, 128), config(stages=2)),
    (2, (300, 272, 32), config()),
    (2, (200, 192, 416), config(tile_n=64)),
    (3, (1, 16, 1056), config(stages=2)),
    (4, (130, 400, 288), config(order_minor="n", epilogue_slots=2)),
    (2, (300, 272, 288), config(cluster=2)),
    (4, (513, 144, 608), config(cluster=2, stages=2)),
    (3, (260, 144, 544), config(stream_k=3)),
    (4, (384, 144, 544), config(stream_k=3, cluster=2)),
    (4, (64, 144, 544), config(split_k=5)),
]


@pytest.mark.parametrize(("cores", "shape", "config"), SIZES)
def test_results_are_exact(cores, shape, config):
    Product(0, *shape).check(cores, config=config)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(["mk", "km"], ["nk", "kn"])))
def test_all_layouts_on_a_batch(left, right):
    Product(1, 144, 272, 288, left=left, right=right, batch=(2,), both=left == "km").check(config=config())


@pytest.mark.parametrize("dtypes", list(itertools.product([E4M3, E5M2], repeat=2)))
def test_dtypes(dtypes):
    Product(2, 128, 128, 160, dtypes=dtypes).check(config=config())


def test_with_an_epilogue():
    product, bias = Product(3, 136, 144, 160), jnp.arange(144.0) - 70
    with emulating("blackwell"), emulate(cores=2):
        out = product("fused", bias=bias, addend=jnp.ones((136, 144)), activation=jax.nn.relu, config=config())
    np.testing.assert_array_equal(out, np.maximum(product.exact + np.asarray(bias) + 1, 0))


def drawn(seed):
    """A shape and a configuration."""
    chance = np.random.default_rng(seed)
    m, n, k = int(chance.integers(1, 420)), 16 * int(chance.integers(1, 20)), 32 * int(chance.integers(1, 24))
    cluster = int(chance.integers(1, 3))
    sizes = dict(tile_n=128 if cluster == 2 else int(chance.choice([64, 128])), stages=int(chance.integers(2, 5)))
    return (m, n, k), config(cluster=cluster, stream_k=int(chance.integers(1, 3)), **sizes)


@pytest.mark.parametrize("completion", ["eager", "late", "random"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_drawn_shapes_and_schedules(seed, completion):
    shape, drawn_config = drawn(seed)
    settings = dict(completion=completion, seed=seed)
    Product(seed, *shape).check(2 * (1 + seed % 2), settings, config=drawn_config)


# --- Defects, each seeded by a patch ----------------------------------------------------------------------------------


def of_another_step(patch):
    load = scales.load
    patch.setattr(scales, "load", lambda loop, buffers, tile, step, slot: load(loop, buffers, tile, step + 1, slot))


def of_another_row_of_tiles(patch):
    load = scales.load
    beside = lambda tile: dataclasses.replace(tile, m=tile.m + 1)  # noqa: E731
    patch.setattr(scales, "load", lambda loop, buffers, tile, *rest: load(loop, buffers, beside(tile), *rest))


def into_a_stage_that_is_still_read(patch):
    """The scales go to the next stage, whose product may be under way."""
    load = scales.load

    def early(loop, buffers, tile, step, slot):
        load(loop, buffers, tile, step, jax.lax.rem(slot + 1, loop.config.stages))

    patch.setattr(scales, "load", early)


def not_awaited(patch):
    """The barrier of a stage counts the copies of the operand tiles only."""
    patch.setattr(scales, "COPIES", 0)


def swapped(patch):
    to_tensor_memory = scales.to_tensor_memory

    def other(*args):
        given = to_tensor_memory(*args)
        return dict(a_scale=given["b_scale"], b_scale=given["a_scale"])

    patch.setattr(scales, "to_tensor_memory", other)


DEFECTS = {of_another_step: 1, of_another_row_of_tiles: 1, into_a_stage_that_is_still_read: 1, not_awaited: 1, swapped: 1}


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_reported(defect, cluster, monkeypatch):
    jax.clear_caches()
    defect(monkeypatch)
    try:
        with pytest.raises((EmulationError, AssertionError, ValueError)) as reported:
            Product(4, 384, 128, 640).check(2, config=config(cluster=cluster, stages=2, tile_n=128))
    finally:
        jax.clear_caches()
    if defect in (into_a_stage_that_is_still_read, not_awaited):
        assert isinstance(reported.value, EmulationError), reported.value
