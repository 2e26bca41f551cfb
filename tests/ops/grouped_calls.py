"""One call on groups of rows: `grouped_matmul`, or one of the two operations of a layer of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from tests.ops.calls import F32, PER_SIDE, SCALES, Arrays, Call

DATA = ("sizes", "ids")  # They say which rows belong together. In float32: a call is differentiable by all its arrays.
OF_GROUPS = ("rhs", "rhs_scale", "bias")


@dataclasses.dataclass(frozen=True)
class GroupedCall(Call):
    """A call inside `shard_map`; of `Call`, it has no leading dimensions, and `m` are a device's rows, or its tokens.

    Each device has sizes of its own, whose rows end before its last one. Of tokens, the ids of experts are drawn; some
    are no expert's. Where the operation reads rows that no group has, these hold NaN. The number of features that
    kernels move between devices is rounded up to one that they can move.

    Attributes:
      groups: the groups of one device.
      slots: how many experts each token chooses.
      capacity: that of `overlap.route`.
      to: where tokens go: "drawn" experts, the "last" ones, or "none".
      axis: None: the operation runs on each device by itself. That is for one device.
    """

    groups: int = 3
    slots: int = 2
    capacity: int | None = None
    to: str = "drawn"

    def __post_init__(self) -> None:
        moved = {"all_gather_lhs_grouped_matmul": "k", "grouped_matmul_reduce_scatter": "n"}.get(self.op)
        if moved and self.config is not None:
            object.__setattr__(self, moved, max(128, -(-getattr(self, moved) // 64) * 64))

    @property
    def scatters(self) -> bool:
        return self.op == "grouped_matmul_reduce_scatter"

    def rows(self, devices: int) -> int:
        """The rows of one device."""
        tokens = devices * self.m
        return min(tokens * min(self.slots, self.groups), self.groups * (self.capacity or tokens))

    # --- Arrays ---

    def shapes(self, devices: int) -> dict[str, Any]:
        tokens, groups = devices * self.m, self.groups * (devices if self.spec.is_routed else 1)
        sides, turned = self.widths or (self.n,), self.layout[1] == "t"
        shapes: dict[str, Any] = {
            "lhs": (devices * self.rows(devices) if self.scatters else tokens, self.k),
            "rhs": [(groups, n, self.k) if turned else (groups, self.k, n) for n in sides],
            "lhs_scale": (tokens, 1), "rhs_scale": [(groups, n) for n in sides], "bias": [(groups, n) for n in sides],
            "sizes": (devices * groups,), "ids": (tokens, self.slots), "gates": (tokens, self.slots),
        }  # fmt: skip
        data = ("ids",) if self.spec.is_routed else ("sizes",)
        return {n: shapes[n] for n in ("lhs", "rhs", *self.extras, *(("gates",) if self.scatters else ()), *data)}

    def drawn(self, chance: np.random.Generator, name: str, shape: tuple[int, ...], draw: Any) -> np.ndarray:
        if name == "sizes":
            ends = np.sort(chance.integers(0, self.m, (shape[0] // self.groups, self.groups)))
            return np.diff(ends, prepend=0).reshape(-1)
        if name == "ids":
            experts = shape[0] // self.m * self.groups
            if self.to != "drawn":
                return np.broadcast_to(-1 if self.to == "none" else experts - 1 - np.arange(self.slots), shape)
            ids = np.array([chance.permutation(experts)[: self.slots] for _ in range(shape[0])])
            return np.where(chance.random(shape) < 0.15, chance.choice([-1, experts, 2**30], shape), ids)
        if name == "gates":  # Not exact in bfloat16.
            return super().drawn(chance, SCALES[0], shape, draw) * (1 + chance.integers(0, 2, shape) * 2.0**-8)
        return super().drawn(chance, name, shape, draw)

    def specs(self, arrays: Arrays) -> dict[str, P]:
        whole = () if self.spec.is_routed else OF_GROUPS
        return {name: P() if name in whole else P(self.axis) for name in arrays}

    @property
    def out_specs(self) -> Any:
        return P(self.axis)

    # --- The call, and the same in plain JAX, on one device's part ---

    def __call__(self, arrays: Arrays, implementation: str | None = "fused", **more: Any) -> Any:
        given = dict(arrays)
        lhs, rhs = given.pop("lhs"), given.pop("rhs")
        data = next(given.pop(name).astype(int) for name in DATA if name in given)
        keywords: dict[str, Any] = {"transpose_rhs": True} if self.layout[1] == "t" else {}
        keywords |= {"preferred_element_type": self.out, "implementation": implementation}
        keywords |= {"config": None if implementation == "xla" else self.config} | dict(self.keywords) | more
        if self.activation is not None:
            keywords["activation"] = self.activation
        operation = getattr(overlap, self.op)
        if not self.spec.is_routed:
            return operation(_poisoned(lhs, data.sum()), rhs, data, **given, **keywords)
        devices = 1 if self.axis is None else lax.axis_size(self.axis)
        routing = overlap.route(data, self.groups * devices, self.axis, capacity=self.capacity)
        if not self.scatters:
            return operation(lhs, rhs, routing, self.axis, **given, **keywords)
        gates, lhs = given.pop("gates"), _poisoned(lhs, routing.group_sizes.sum())
        return operation(lhs, rhs, gates, routing, self.axis, **given, **keywords)

    def plain(self, arrays: Arrays, dtype: Any = None) -> Any:
        given, first = arrays, 0
        if self.spec.is_routed and self.axis is not None:
            first = self.groups * lax.axis_index(self.axis)
            of_all = ("ids", "gates") if self.scatters else ("ids", "lhs")
            given = arrays | {name: lax.all_gather(arrays[name], self.axis, axis=0, tiled=True) for name in of_all}
        with jax.default_matmul_precision("highest"):
            out = self._of_one(jnp, given, first, lambda rows: rows)
        if self.scatters and self.axis is not None:
            out = lax.psum_scatter(out, self.axis, scatter_dimension=0, tiled=True)
        return out.astype(dtype or self.out_dtype)

    # --- The exact result ---

    def expected(self, arrays: Arrays, devices: int, dtype: Any = None) -> list[np.ndarray]:
        dtype = dtype or self.out_dtype
        rounded = lambda x: np.asarray(x).astype(dtype).astype(F32)  # noqa: E731
        cut = {name for name, spec in self.specs(arrays).items() if spec != P()} - {"ids", "gates"}
        cut -= set() if self.scatters or not self.spec.is_routed else {"lhs"}
        outs = []
        for device in range(devices):
            part = lambda x: np.split(np.asarray(x), devices)[device]  # noqa: B023, E731
            given = {name: jax.tree.map(part, x) if name in cut else x for name, x in arrays.items()}
            outs.append(np.asarray(self._of_one(np, given, device * self.groups, rounded)))
        if self.scatters:  # The sums of others are rounded before they travel.
            blocks = [np.split(out, devices) for out in outs]
            outs = [
                sum((rounded(blocks[peer][own]) for peer in range(devices) if peer != own), blocks[own][own])
                for own in range(devices)
            ]
        return [np.concatenate(outs).astype(dtype)]

    def _of_one(self, of: Any, given: Arrays, first: Any, rounded: Any) -> Any:
        """The result of one device in float32, by NumPy or by jax, from the rows or tokens of all; sums, if scattered.

        `first` is the number of the device's first expert.
        """
        wide = lambda x: of.asarray(x).astype(F32)  # noqa: E731
        lhs = wide(given["lhs"])
        token = slot = None
        if self.spec.is_routed:
            order, group = self._order(of, given["ids"], first, self.rows(given["ids"].shape[0] // self.m))
            token, slot = order // self.slots, order % self.slots
            lhs = lhs if self.scatters else lhs[token]
        else:
            group = (of.cumsum(given["sizes"]) <= of.arange(self.m)[:, None]).sum(1)
        values = []
        for index in range(len(self.widths) or 1):
            side = {n: x[index] if n in PER_SIDE and self.widths else x for n, x in given.items()}
            rhs = wide(side["rhs"]).swapaxes(1, 2) if self.layout[1] == "t" else wide(side["rhs"])
            total: Any = 0.0
            for number in range(self.groups):
                is_own = (group == number)[:, None]
                value = of.where(is_own, lhs, 0) @ rhs[number] * wide(side.get("lhs_scale", 1.0))
                value = value * (wide(side["rhs_scale"])[number] if "rhs_scale" in side else 1.0)
                total = of.where(is_own, value + (wide(side["bias"])[number] if "bias" in side else 0.0), total)
            values.append(total)
        out = wide(values[0] if self.activation is None else self.activation(*values))
        out = of.where((group < self.groups)[:, None], out, 0)
        if not self.scatters:
            return out
        tokens = of.arange(given["gates"].shape[0])[:, None]
        return of.where(token == tokens, wide(given["gates"])[token, slot], 0) @ rounded(out)

    def _order(self, of: Any, ids: Any, first: Any, rows: int) -> tuple[Any, Any]:
        """The number of each row's route, and its group; `groups` for rows that are not in use."""
        group = (of.asarray(ids).astype(int) - first).reshape(-1)
        group = of.where((group >= 0) & (group < self.groups), group, self.groups)
        if self.capacity is not None:
            earlier = ((group[:, None] == group) & of.tri(len(group), k=-1, dtype=bool)).sum(1)
            group = of.where(earlier < self.capacity, group, self.groups)
        order = of.argsort(group, stable=True)[:rows]
        return order, group[order]


def _poisoned(rows: jax.Array, used: jax.Array) -> jax.Array:
    """Adds NaN to rows that are not in use. The cotangent passes unchanged."""
    unused = jnp.arange(rows.shape[0]) >= used
    return rows + jnp.where(unused, jnp.nan, 0)[:, None].astype(rows.dtype)
