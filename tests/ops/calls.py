"""One call of an operation: its operands, its exact result, and the same in plain JAX. grouped_calls.py has groups."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.problem import Problem
from overlap.kernels.operations import BY_NAME, OperationSpec
from tests import oracle

BF16, F16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16), jnp.dtype(jnp.float32)
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
SMALL = overlap.Config(tile_m=64, tile_n=128, stages=2)
SCALES, EVERY = ("lhs_scale", "rhs_scale"), ("lhs_scale", "rhs_scale", "bias", "addend")
PER_SIDE = ("rhs", "rhs_scale", "bias", "addend")  # A list of right operands has a list of these.
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call inside `shard_map`. Arrays are global NumPy arrays by the name of their argument.

    Attributes:
      op: the name in `OPERATIONS`.
      m, n, k: sizes; those of a dimension along which an array is sharded are of one shard.
      layout: "t" for each transposed operand.
      lead, rhs_lead: leading dimensions.
      extras: which of `EVERY` are given as arrays. If products are summed, each device has scales of its own.
      widths: the n of each of several right operands; (): one that is no list. An activation may combine them.
      pairs: the sizes of k of the pairs of operands whose products are added; (): one pair.
      out: `preferred_element_type`.
      keywords: further keywords of the operation.
    """

    op: str
    m: int = 72
    n: int = 136
    k: int = 72
    config: overlap.Config | None = SMALL
    layout: str = "nn"
    lead: tuple[int, ...] = ()
    rhs_lead: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    container: Any = list
    pairs: tuple[int, ...] = ()
    dtype: Any = BF16
    rhs_dtype: Any = None
    out: Any = None
    activation: Any = None
    keywords: tuple[tuple[str, Any], ...] = ()
    axis: Any = "x"

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if f.name != "op" and getattr(self, f.name) != f.default]
        # A function is named, since its text has an address, and the workers of pytest-xdist compare the texts.
        values = ((f.name, getattr(self, f.name)) for f in changed)
        return " ".join([self.op, *(f"{name}={getattr(x, '__name__', x)}" for name, x in values)])

    def but(self, **changes: Any) -> Call:
        return dataclasses.replace(self, **changes)

    @property
    def spec(self) -> OperationSpec:
        return BY_NAME[self.op]

    @property
    def sharded(self) -> tuple[str, str, str]:
        """For lhs, rhs and the result, the sharded dimension. Each device of `matmul` has rows of its own."""
        return ("m", "", "m") if self.op == "matmul" else self.spec.sharded

    @property
    def out_dtype(self) -> Any:
        return jnp.dtype(self.out or (BF16 if jnp.dtype(self.dtype).itemsize == 1 else self.dtype))

    @property
    def combines(self) -> bool:
        """Whether the activation makes one result of the products of all right operands."""
        return bool(self.widths and self.activation) and len(inspect.signature(self.activation).parameters) > 1

    @property
    def gathered(self) -> bool:
        """Whether the gathered operand is returned as well."""
        return "return_gathered" in dict(self.keywords)

    # --- Arrays ---

    def shapes(self, devices: int) -> dict[str, Any]:
        """The shape of each array; those of each right operand for the arrays in `PER_SIDE`."""
        times = {name: devices for name in self.sharded}
        m, k = (size * times.get(name, 1) for name, size in (("m", self.m), ("k", self.k)))
        widths = [n * times.get("n", 1) for n in self.widths or (self.n,)]
        lead, each = self.lead or self.rhs_lead, (devices,) if self.spec.sums else ()
        shapes: dict[str, Any] = {
            "lhs": (*self.lead, *((k, m) if self.layout[0] == "t" else (m, k))),
            "rhs": [(*self.rhs_lead, *((n, k) if self.layout[1] == "t" else (k, n))) for n in widths],
            "lhs_scale": (*each, *lead, m, 1), "rhs_scale": [(*each, n) for n in widths],
            "bias": [(n,) for n in widths], "addend": [(*lead, m, n) for n in widths],
        }  # fmt: skip
        return {name: shapes[name] for name in ("lhs", "rhs", *self.extras)}

    def _of_each(self, devices: int, make: Callable[[str, tuple[int, ...]], Any]) -> Arrays:
        """Makes each array of the call from its name and shape."""
        made = {}
        for name, shape in self.shapes(devices).items():
            of_all = [make(name, one) for one in (shape if name in PER_SIDE else [shape])]
            made[name] = self.container(of_all) if name in PER_SIDE and self.widths else of_all[0]
        return made

    def arrays(self, devices: int, seed: int = 0, draw: Any = None) -> Arrays:
        """Draws operands: small integers and scales that are powers of two, so that sums are exact; or by `draw`."""
        chance = np.random.default_rng(seed)
        draw = draw or (lambda chance, *shape: chance.integers(-3, 4, shape))
        return self._of_each(
            devices, lambda name, shape: self.drawn(chance, name, shape, draw).astype(self.dtype_of(name))
        )

    def drawn(self, chance: np.random.Generator, name: str, shape: tuple[int, ...], draw: Any) -> np.ndarray:
        return 2.0 ** chance.integers(-1, 2, shape) if name in SCALES else draw(chance, *shape)

    def types(self, devices: int) -> Arrays:
        """The types of the arrays."""
        return self._of_each(devices, lambda name, shape: jax.ShapeDtypeStruct(shape, self.dtype_of(name)))

    def dtype_of(self, name: str) -> Any:
        of = {"lhs": self.dtype, "rhs": self.rhs_dtype or self.dtype, "addend": self.out_dtype}
        return of.get(name, F32)

    def normal(self, devices: int, seed: int = 0) -> Arrays:
        return self.arrays(devices, seed, lambda chance, *shape: chance.standard_normal(shape, np.float32))

    def specs(self, arrays: Arrays) -> dict[str, P]:
        """The partition spec of each array; it holds for all entries of a list."""
        cut = dict(zip(("lhs", "rhs", "addend"), self.sharded, strict=True)) | {
            "lhs_scale": self.sharded[0], "rhs_scale": self.sharded[1], "bias": self.sharded[2],
        }  # fmt: skip
        letters = {"lhs": "km" if self.layout[0] == "t" else "mk", "rhs": "nk" if self.layout[1] == "t" else "kn",
                   "addend": "mn", "lhs_scale": "m1", "rhs_scale": "n", "bias": "n"}  # fmt: skip

        def spec(name: str, x: Any) -> P:
            if self.spec.sums and name.endswith("_scale"):
                return P(self.axis)
            ends = [self.axis if cut[name] == letter else None for letter in letters[name]]
            x = x[0] if isinstance(x, (list, tuple)) else x
            return P(*(None,) * (len(x.shape) - len(ends)), *ends)

        return {name: spec(name, x) for name, x in arrays.items()}

    @property
    def out_specs(self) -> Any:
        lead = (None,) * len(self.lead or self.rhs_lead)
        out = P(*lead, *(self.axis if self.sharded[2] == letter else None for letter in "mn"))
        return P(self.axis) if self.spec.replicates else (out, P(self.axis)) if self.gathered else out

    # --- The call, and the same in plain JAX, on one device's part ---

    def __call__(self, arrays: Arrays, implementation: str | None = "fused", **more: Any) -> Any:
        given = self._of_one_device(arrays)
        lhs, rhs, (left, right) = given.pop("lhs"), given.pop("rhs"), (letter == "t" for letter in self.layout)
        if self.pairs:
            ends = list(itertools.accumulate(self.pairs))[:-1]
            lhs, rhs = jnp.split(lhs, ends, -2 if left else -1), jnp.split(rhs, ends, -1 if right else -2)
        keywords = dict(self.keywords) | ({"transpose_lhs": True} if left else {})
        keywords |= {"transpose_rhs": True} if right else {}
        if self.spec.keyword:
            name, value = self.spec.keyword
            keywords[name] = 1 - value if self.spec.gathers and right else value
        if implementation == "xla":
            keywords.pop("transport", None)
        axis = () if self.op == "matmul" else (self.axis,)
        config = None if implementation == "xla" else self.config
        given |= {"activation": self.activation, "preferred_element_type": self.out, "config": config}
        return getattr(overlap, self.spec.function)(
            lhs, rhs, *axis, implementation=implementation, **given | keywords | more
        )

    def plain(self, arrays: Arrays, dtype: Any = None) -> Any:
        """The same in f32, with XLA's collectives. Only the result is rounded, to `dtype`."""
        given, (left, right) = self._of_one_device(arrays), (letter == "t" for letter in self.layout)
        lhs, sides = given["lhs"], given["rhs"] if self.widths else [given["rhs"]]
        lhs, sides = lhs.mT if left else lhs, [side.mT if right else side for side in sides]
        gather = lambda x, axis: lax.all_gather(x, self.axis, axis=x.ndim + axis, tiled=True)  # noqa: E731
        whole, outs = lhs, []
        rows, columns = (given.get(name, 1.0) for name in SCALES)
        if self.spec.gathers == "m":
            whole = gather(lhs, -2)
            rows = gather(rows, -2) if np.ndim(rows) else rows
        for index, side in enumerate(sides):
            of = lambda x: x[index] if isinstance(x, (list, tuple)) else x  # noqa: B023, E731
            scale = of(columns)
            if self.spec.gathers_rhs:
                side = gather(side, -2 if self.spec.gathers == "k" else -1)
                scale = gather(scale, -1) if np.ndim(scale) and self.spec.gathers == "n" else scale
            out = jnp.matmul(whole.astype(F32), side.astype(F32), precision="highest") * rows * scale
            out = self._summed(out) + of(given.get("bias", 0.0)) + of(given.get("addend", jnp.zeros(()))).astype(F32)
            outs.append(out if self.activation is None or self.combines else self.activation(out))
        outs = [out.astype(dtype or self.out_dtype) for out in ([self.activation(*outs)] if self.combines else outs)]
        result = self.container(outs) if self.widths and not self.combines else outs[0]
        return (result, whole) if self.gathered else result

    def unfused(self, arrays: Arrays) -> Any:
        """The call as a user would write it without this library: each device's part of a sum is rounded."""
        parts = self.but(extras=(), activation=None)
        given = self._of_one_device(arrays)
        given = {name: x.astype(BF16 if x.dtype.itemsize == 1 else x.dtype) for name, x in given.items()}
        lhs = given["lhs"].mT if self.layout[0] == "t" else given["lhs"]
        rhs = given["rhs"].mT if self.layout[1] == "t" else given["rhs"]
        if self.spec.gathers == "m":
            lhs = lax.all_gather(lhs, self.axis, axis=lhs.ndim - 2, tiled=True)
        if self.spec.gathers_rhs:
            rhs = lax.all_gather(rhs, self.axis, axis=0 if self.spec.gathers == "k" else 1, tiled=True)
        return oracle.rounded(parts._summed(lax.dot(lhs, rhs, preferred_element_type=F32).astype(self.out_dtype)))

    def _summed(self, part: jax.Array) -> jax.Array:
        if not self.spec.sums:
            return part
        if self.spec.replicates:
            return lax.psum(part, self.axis)
        dimension = part.ndim - 2 + "mn".index(self.spec.scatters)
        return lax.psum_scatter(part, self.axis, scatter_dimension=dimension, tiled=True)

    def _of_one_device(self, arrays: Arrays) -> Arrays:
        return {n: x[0] if self.spec.sums and n.endswith("_scale") else x for n, x in arrays.items()}

    # --- The exact result ---

    def expected(self, arrays: Arrays, devices: int, dtype: Any = None) -> list[np.ndarray]:
        """The kernel's results, with NumPy. What travels in a sum is rounded to the result's dtype, or to `dtype`."""
        dtype, outs = dtype or self.out_dtype, []
        wide = lambda x: np.asarray(x).astype(F32)  # noqa: E731
        lhs = wide(arrays["lhs"]).swapaxes(-1, -2) if self.layout[0] == "t" else wide(arrays["lhs"])
        for index in range(len(self.widths) or 1):
            of = {n: x[index] if isinstance(x, (list, tuple)) else x for n, x in arrays.items()}
            rhs = wide(of["rhs"]).swapaxes(-1, -2) if self.layout[1] == "t" else wide(of["rhs"])
            rows, columns = (wide(of[name]) if name in of else None for name in SCALES)
            scalars = math.prod(float(dict(self.keywords).get(name, 1.0)) for name in SCALES)
            if self.spec.sums:
                pairs = zip(np.split(lhs, devices, -1), np.split(rhs, devices, -2), strict=True)
                parts = [a @ b * scalars for a, b in pairs]
                parts = [part if rows is None else part * rows[i] for i, part in enumerate(parts)]
                parts = [part if columns is None else part * columns[i] for i, part in enumerate(parts)]
                out = self._total(parts, dtype)
            else:
                out = lhs @ rhs * (1.0 if rows is None else rows) * (1.0 if columns is None else columns) * scalars
            out = out + wide(of.get("bias", 0.0)) + wide(of.get("addend", 0.0))
            out = np.asarray(out if self.activation is None else self.activation(out), np.float32).astype(dtype)
            outs.append(np.broadcast_to(out, (devices, *out.shape)) if self.spec.replicates else out)
        whole = np.asarray(arrays["lhs"])
        return [*outs, np.broadcast_to(whole, (devices, *whole.shape))] if self.gathered else outs

    def scattered(self, m: int, n: int, devices: int) -> str:
        """The dimension along which each device sums a block of an m × n result."""
        names = jnp.dtype(self.dtype).name, self.out_dtype.name
        layout: Any = self.layout
        return self.spec.scatters or Problem(self.op, m, n, 8, *names, devices, layout).scattered

    def _total(self, parts: list[np.ndarray], dtype: Any) -> np.ndarray:
        rounded = lambda part: part.astype(dtype).astype(F32)  # noqa: E731
        if self.spec.replicates and self.config is not None and self.config.one_shot:
            return sum(map(rounded, parts), np.float32(0))
        devices, along = len(parts), self.scattered(*parts[0].shape[-2:], len(parts))
        dimension = -2 + "mn".index(along or "m")
        if parts[0].shape[dimension] % devices:  # No kernel cuts this.
            return sum(parts, np.float32(0))
        blocks = [np.split(part, devices, dimension) for part in parts]
        sums = []
        for own in range(devices):
            others, total = [blocks[(own - d) % devices][own] for d in range(1, devices)], np.float32(0)
            for other in others:
                ring = dict(self.keywords).get("transport") == "ring"
                total = rounded(other + total) if ring else rounded(other) + total
            sums.append(blocks[own][own] + total)
        return np.concatenate(sums, dimension)

    # --- Running ---

    def program(self, mesh: Mesh, arrays: Arrays, function: Any = None, out_specs: Any = None, *,
                check_vma: bool = False, **options: Any) -> Callable[..., Any]:  # fmt: skip
        """Returns a jitted function of the global arrays; `function` (default: the call) runs on each device."""
        if function is None:
            function, out_specs = self.stacked(self), self.out_specs
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=(self.specs(arrays),), out_specs=out_specs, check_vma=check_vma
        )
        return jax.jit(mapped, **options)

    def stacked(self, function: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        """What is the same on all devices gets a leading dimension, so that every device's copy is compared."""

        def each(arrays: Arrays) -> Any:
            out = function(arrays)
            if self.gathered:
                return out[0], out[1][None]
            return out[None] if self.spec.replicates else out

        return each
