"""The gradient of `all_gather_lhs_matmul` as one kernel: a sum of several products, and the rows gathered beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.emulation import emulate
from tests.ops.contract import F16, F32
from tests.oracle import make_mesh


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of a product with several right operands; sizes are per shard."""

    m: int
    k: int
    widths: tuple[int, ...]
    lead: tuple[int, ...] = ()
    transpose_rhs: bool = False
    dtype = F16

    def arrays(self, devices: int, seed: int = 0) -> Any:
        """Draws small integers: the rows, the right operands, and a cotangent of each result."""
        chance, rows = np.random.default_rng(seed), devices * self.m
        sides = [(self.k, devices * n) for n in self.widths]
        shapes = [(*self.lead, rows, self.k), *(s[::-1] if self.transpose_rhs else s for s in sides)]
        shapes += [(*self.lead, rows, devices * n) for n in self.widths]
        x, *rest = (chance.integers(-2, 3, shape).astype(self.dtype) for shape in shapes)
        return x, rest[: len(self.widths)], rest[len(self.widths) :]

    @property
    def specs(self) -> tuple[P, P, P]:
        lead = (None,) * len(self.lead)
        return P(*lead, "x", None), P("x", None) if self.transpose_rhs else P(None, "x"), P(*lead, None, "x")

    def mapped(self, mesh: Any, function: Callable[..., Any], around: Callable[..., Any] = lambda f: f) -> Any:
        def gradient(x: Any, weights: Any, d_outs: Any) -> Any:
            f = around(functools.partial(function, transpose_rhs=self.transpose_rhs))
            return jax.vjp(f, x, weights)[1](d_outs)

        specs = self.specs
        return jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[:2], check_vma=False))


def plain(x: Any, weights: Any, transpose_rhs: bool) -> Any:
    rows = lax.all_gather(x, "x", axis=x.ndim - 2, tiled=True).astype(F32)
    return [
        jnp.matmul(rows, (w.T if transpose_rhs else w).astype(F32), precision="highest").astype(x.dtype)
        for w in weights
    ]


fused = functools.partial(overlap.all_gather_lhs_matmul, axis_name="x", implementation="fused")


def runner(form: Gradient, devices: int, around: Callable[..., Any] = lambda f: f) -> Callable[..., Any]:
    """Returns a function of settings of the emulation that compares every bit, and returns the `Run`."""
    mesh, arrays = make_mesh(x=devices), form.arrays(devices)
    ours, expected = form.mapped(mesh, fused, around), form.mapped(mesh, plain)(*arrays)

    def run(**settings: Any) -> Any:
        with emulate(**{"cores": 2} | settings) as emulation:
            results = jax.block_until_ready(ours(*arrays))
            emulation.check()
        for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(*(np.asarray(x).astype(np.float32) for x in (a, b)))
        return emulation

    return run
