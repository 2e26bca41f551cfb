"""Helpers of the tests of products summed over devices: calls under `shard_map`, operands, comparisons of results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.problem import Problem
from overlap.emulation import emulate
from tests.oracle import make_mesh
from tests.product_cases import in_f32

ALONG = ["m", "n"]
# The value of `Layer.along` with which all devices receive the whole sum (`matmul_all_reduce`).
EVERYWHERE = "everywhere"
WAYS = [*ALONG, EVERYWHERE]
F32 = jnp.dtype(jnp.float32)
BF16, F16 = jnp.bfloat16, jnp.float16
EVERY = ("lhs_scale", "rhs_scale", "bias")
SMALL = overlap.Config(tile_m=64, tile_n=128, stages=2)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A call of `overlap.matmul_reduce_scatter` or `matmul_all_reduce` inside `shard_map`, with its arrays by name.

    Globally lhs is [..., m, D · k], rhs [D · k, n], lhs_scale [D, m, 1] and rhs_scale [D, n]: each device has its own
    scales. Bias and addend belong to the whole sum.

    Attributes:
      along: the dimension in which the sum is scattered, or "everywhere".
      axis: the mesh axes to sum over.
      transpose_lhs: whether lhs is [..., D · k, m].
      transpose_rhs: whether rhs is [n, D · k].
      activation: applied to the sum.
      dtype: of the result.
      transport: the transport of the parts, if the sum is scattered.
      pairs: the sizes along k into which a device's operands are cut, to be passed as lists of pairs; (): one pair.
    """

    along: Literal["m", "n", "everywhere"] = "m"
    axis: Any = "x"
    transpose_lhs: bool = False
    transpose_rhs: bool = False
    activation: Any = None
    dtype: Any = F32
    transport: str | None = None
    pairs: tuple[int, ...] = ()

    def __call__(self, arrays: dict[str, Any], implementation: str | None = "fused", config: Any = SMALL) -> jax.Array:
        """Calls the operation on one device's part of the arrays."""
        given = self.of_one_device(arrays)
        lhs, rhs = given.pop("lhs"), given.pop("rhs")
        if self.pairs:
            ends = list(itertools.accumulate(self.pairs))[:-1]
            lhs = jnp.split(lhs, ends, -2 if self.transpose_lhs else -1)
            rhs = jnp.split(rhs, ends, -1 if self.transpose_rhs else -2)
        function: Any = overlap.matmul_all_reduce
        if self.along != EVERYWHERE:
            function = functools.partial(
                overlap.matmul_reduce_scatter, dimension=ALONG.index(self.along), transport=self.transport
            )
        return function(
            lhs, rhs, self.axis, transpose_lhs=self.transpose_lhs,
            transpose_rhs=self.transpose_rhs, activation=self.activation, preferred_element_type=self.dtype,
            implementation=implementation, config=None if implementation == "xla" else config, **given,
        )  # fmt: skip

    def plain(self, arrays: dict[str, Any]) -> jax.Array:
        """Computes the same result in plain JAX, in f32. Only the result is rounded."""
        given = self.of_one_device(arrays)
        lhs, rhs = (given[name].astype(F32) for name in ("lhs", "rhs"))
        lhs, rhs = lhs.mT if self.transpose_lhs else lhs, rhs.mT if self.transpose_rhs else rhs
        part = jnp.matmul(lhs, rhs, precision="highest") * given.get("lhs_scale", 1.0) * given.get("rhs_scale", 1.0)
        out = self.summed(part)
        out = out + given.get("bias", 0.0) + given.get("addend", jnp.zeros(())).astype(F32)
        return (out if self.activation is None else self.activation(out)).astype(self.dtype)

    def summed(self, part: jax.Array) -> jax.Array:
        """Sums all devices' parts with XLA's collective, scattered or not as `along` says."""
        if self.along == EVERYWHERE:
            return lax.psum(part, self.axis)
        dimension = part.ndim - 2 + ALONG.index(self.along)
        return lax.psum_scatter(part, self.axis, scatter_dimension=dimension, tiled=True)

    @staticmethod
    def of_one_device(arrays: dict[str, Any]) -> dict[str, Any]:
        """Removes the leading device dimension from the scales."""
        return {name: x[0] if name in ("lhs_scale", "rhs_scale") else x for name, x in arrays.items()}

    def blocks(self, m: int, n: int, devices: int, dtype: Any) -> str:
        """Returns "m" if each device sums a block of rows of an m × n result, "n" if a block of columns."""
        if self.along != EVERYWHERE:
            return self.along
        layout: Any = "".join("t" if transposed else "n" for transposed in (self.transpose_lhs, self.transpose_rhs))
        dtypes = jnp.dtype(dtype).name, jnp.dtype(self.dtype).name
        return Problem("matmul_all_reduce", m, n, 8, *dtypes, devices, layout).scattered

    # --- How arrays are sharded ---

    @property
    def out_spec(self) -> P:
        """Returns the partition spec of an addend, and of a result without leading dimensions."""
        return {"m": P(self.axis, None), "n": P(None, self.axis), EVERYWHERE: P(None, None)}[self.along]

    def specs(self, arrays: dict[str, Any]) -> dict[str, P]:
        """Returns the partition spec of each array."""
        rows, columns = (self.axis, None), (None, self.axis)
        of = {
            "lhs": rows if self.transpose_lhs else columns,
            "rhs": columns if self.transpose_rhs else rows,
            "addend": self.out_spec,
        }
        specs = {name: P(*(None,) * (arrays[name].ndim - 2), *of[name]) for name in of if name in arrays}
        of_vectors = {"lhs_scale": P(self.axis), "rhs_scale": P(self.axis)}
        of_vectors["bias"] = P(self.axis) if self.along == "n" else P()
        return specs | {name: of_vectors[name] for name in arrays if name in of_vectors}

    def mapped(self, mesh: Any, arrays: dict[str, Any], function: Any = None, out_specs: Any = None,
               check_vma: bool = False, **options: Any) -> Any:  # fmt: skip
        """Returns a jitted function of the global arrays that runs `function` (default: the layer) on each device."""
        if out_specs is None:
            lead = max(arrays["lhs"].ndim, arrays["rhs"].ndim) - 2
            out_specs = P(*(None,) * lead, *self.out_spec)
        return jax.jit(
            jax.shard_map(
                function or self, mesh=mesh, in_specs=(self.specs(arrays),), out_specs=out_specs, check_vma=check_vma
            ),
            **options,
        )

    # --- Operands and results ---

    def integers(self, devices: int, m: int, n: int, k: int, *, extras: tuple[str, ...] = (),
                 lead: tuple[int, ...] = (), rhs_lead: tuple[int, ...] = (), dtype: Any = jnp.bfloat16,
                 seed: int = 0) -> dict[str, Any]:  # fmt: skip
        """Draws small integers, and scales that are powers of two, so that all sums are exact in f32.

        k: contraction size per device. lead: leading dimensions of lhs and its scales. rhs_lead: those of rhs.
        """
        chance = np.random.default_rng(seed)
        draw = lambda *shape: chance.integers(-2, 3, shape).astype(np.float32)  # noqa: E731
        lhs, rhs = draw(*lead, m, devices * k), draw(*rhs_lead, devices * k, n)
        given = {
            "lhs": jnp.asarray((lhs.swapaxes(-1, -2) if self.transpose_lhs else lhs).astype(dtype)),
            "rhs": jnp.asarray((rhs.swapaxes(-1, -2) if self.transpose_rhs else rhs).astype(dtype)),
            "lhs_scale": jnp.asarray(2 ** draw(devices, *lead, m, 1)),
            "rhs_scale": jnp.asarray(2 ** draw(devices, n)),
            "bias": jnp.asarray(draw(n)),
            "addend": jnp.asarray(draw(m, n)),
        }
        return {name: given[name] for name in ("lhs", "rhs", *extras)}

    def expected(self, arrays: dict[str, Any], devices: int, *, one_shot: bool = False) -> np.ndarray:
        """Computes the kernel's result in NumPy. Each peer's part is rounded once, to the result's dtype.

        With `one_shot`, a device's own part is rounded too. On the ring, each partial sum is rounded when it is sent.
        """
        lhs, rhs = in_f32(arrays["lhs"], self.transpose_lhs), in_f32(arrays["rhs"], self.transpose_rhs)
        parts = [a @ b for a, b in zip(np.split(lhs, devices, -1), np.split(rhs, devices, -2), strict=True)]
        for name in ("lhs_scale", "rhs_scale"):
            if name in arrays:
                parts = [part * scale for part, scale in zip(parts, np.asarray(arrays[name]), strict=True)]
        if one_shot:
            out = sum(part.astype(self.dtype).astype(F32) for part in parts)
        else:
            m, n = parts[0].shape[-2:]
            dimension = -2 + ALONG.index(self.blocks(m, n, devices, arrays["lhs"].dtype))
            blocks = [np.split(part, devices, dimension) for part in parts]
            out = np.concatenate([self._summed_on(own, blocks) for own in range(devices)], dimension)
        out = out + in_f32(arrays.get("bias", 0.0)) + in_f32(arrays.get("addend", 0.0))
        return np.asarray(out if self.activation is None else self.activation(out)).astype(self.dtype)

    def _summed_on(self, own: int, blocks: Any) -> np.ndarray:
        """Sums one block for device `own`. `blocks[d][b]` is the part of block b that device d computes."""
        rounded = lambda part: part.astype(self.dtype).astype(F32)  # noqa: E731
        others = [(own - distance) % len(blocks) for distance in range(1, len(blocks))]
        if self.transport != "ring":
            return sum((rounded(blocks[device][own]) for device in others), blocks[own][own])
        total: Any = 0.0
        for device in others:
            total = rounded(blocks[device][own] + total)
        return blocks[own][own] + total


def check(layer: Layer, mesh: Any, arrays: dict[str, Any], *, config: Any = SMALL, implementation: Any = "fused",
          **settings: Any) -> jax.Array:  # fmt: skip
    """Runs the layer under the emulator and asserts that each bit of its result equals `Layer.expected`.

    With `implementation="fused"`, asserts that a kernel was launched; else, that none was. For `matmul_all_reduce`,
    compares the results of all devices, and returns the first.
    """
    devices = math.prod(mesh.shape[name] for name in np.atleast_1d(layer.axis))
    everywhere = layer.along == EVERYWHERE

    def call(arrays: dict[str, Any]) -> jax.Array:
        out = layer(arrays, implementation, config)
        return out[None] if everywhere else out

    mapped = layer.mapped(mesh, arrays, call, P(layer.axis) if everywhere else None)
    with emulate(**{"cores": 2} | settings) as run:
        actual = mapped(arrays)
        run.check()
    assert (run.counts["launches"] > 0) == (implementation == "fused")
    expected = layer.expected(arrays, devices, one_shot=implementation == "fused" and config.one_shot)
    assert_exact(actual, np.broadcast_to(expected, (devices, *expected.shape)) if everywhere else expected)
    return actual[0] if everywhere else actual


def assert_exact(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    np.testing.assert_array_equal(in_f32(actual), in_f32(expected))


def assert_close(actual: Any, expected: Any, limit: float = 1e-2) -> None:
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert a.shape == b.shape and np.linalg.norm(a - b) <= limit * np.linalg.norm(b)


def alternating(names):
    """Returns pairs (name, dimension), where the dimensions alternate between "m" and "n"."""
    return [(name, ALONG[index % 2]) for index, name in enumerate(names)]


def struct(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def trace(lhs, rhs, axis_name="x", *, size=2, operation=overlap.matmul_reduce_scatter, **keywords):
    """Traces a call of `operation` inside `shard_map` on per-shard operands. Returns the result's shape and dtype."""

    def inner():
        as_array = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x  # noqa: E731
        given = {name: as_array(x) for name, x in keywords.items()}
        return operation(as_array(lhs), as_array(rhs), axis_name, **given)

    return jax.eval_shape(jax.shard_map(inner, mesh=make_mesh(x=size), in_specs=(), out_specs=P(), check_vma=False))
