"""Layers of experts on small meshes: their operands and routings, and an oracle that computes every expert in f32."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice.dispatch import Implementation
from tests.oracle import make_mesh

IN, HIDDEN = 6, 5
gated = lambda gate, up: jax.nn.silu(gate) * up  # noqa: E731


@dataclasses.dataclass(frozen=True)
class Case:
    devices: int
    tokens: int  # Of each device.
    k: int
    experts: int
    capacity: int | None = None
    axes: tuple[str, ...] = ("x",)
    features: int = IN
    hidden: int = HIDDEN
    implementation: Implementation | None = None
    check_vma: bool = True

    @property
    def axis(self) -> Any:
        return None if not self.axes else self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def mesh(self) -> jax.sharding.Mesh:
        sizes = {"x": self.devices} if len(self.axes) < 2 else {"y": 2, "x": self.devices // 2}
        return make_mesh(**sizes)

    @property
    def rows(self) -> int:
        owned, tokens = self.experts // self.devices, self.devices * self.tokens
        return min(tokens * min(self.k, owned), owned * (tokens if self.capacity is None else self.capacity))


def operands(case: Case, seed: int) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    tokens, experts, features, hidden = case.devices * case.tokens, case.experts, case.features, case.hidden
    shapes = {
        "x": (tokens, features), "gates": (tokens, case.k), "w_gate": (experts, features, hidden),
        "w_up": (experts, features, hidden), "w_down": (experts, hidden, features), "b_gate": (experts, hidden),
        "b_up": (experts, hidden), "b_down": (experts, features),
    }  # fmt: skip
    drawn = {name: chance.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return drawn | {"shift": np.zeros((case.devices * case.rows, hidden), np.float32)}


def routings(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Ids of each kind, [tokens of all devices, k]; those of a token differ."""
    chance, tokens, experts = np.random.default_rng(seed), case.devices * case.tokens, case.experts
    draw = lambda few: np.array([chance.permutation(few)[: case.k] for _ in range(tokens)], np.int32)  # noqa: E731
    strange = draw(experts)
    where = chance.random(strange.shape) < 0.4
    strange[where] = chance.choice([-1, -7, experts, experts + 1, -(2**31), 2**31 - 1], where.sum())
    return {
        "drawn": draw(experts),
        "to one": np.tile(np.arange(experts - case.k, experts, dtype=np.int32), (tokens, 1)),
        "an expert without tokens": draw(max(experts - 1, case.k)),
        "ids out of range": strange,
        "no expert at all": np.full_like(strange, -1),
    }


def kept(case: Case, ids: np.ndarray) -> np.ndarray:
    """Which routes are computed: those to experts that exist, the first ones of each up to the capacity."""
    found, taken = np.zeros(ids.shape, bool), collections.Counter[int]()
    for at, expert in np.ndenumerate(ids):
        if 0 <= expert < case.experts and (case.capacity is None or taken[expert] < case.capacity):
            found[at] = True
            taken[expert] += 1
    return found


def oracle(given: dict[str, jax.Array], ids: np.ndarray, counts: np.ndarray) -> jax.Array:
    """Every expert of every token, in float32, and then the gates of those that count."""
    each = {name: jnp.einsum("th,ehi->tei", given["x"], given[f"w_{name}"]) for name in ("gate", "up")}
    hidden = gated(each["gate"] + given["b_gate"], each["up"] + given["b_up"])
    outs = jnp.einsum("tei,eih->teh", hidden, given["w_down"]) + given["b_down"]
    chosen = (ids[..., None] == np.arange(len(given["w_up"]))) & counts[..., None]
    return jnp.einsum("tke,tk,teh->th", chosen.astype(jnp.float32), given["gates"], outs)


def layer(case: Case, given: dict[str, jax.Array], ids: jax.Array) -> tuple[jax.Array, jax.Array, overlap.Routing]:
    """The layer on one device. What lies behind the rows in use is NaN between the two operations."""
    routing = overlap.route(ids, case.experts, case.axis, capacity=case.capacity)
    hidden = overlap.all_gather_lhs_grouped_matmul(
        given["x"], [given["w_gate"], given["w_up"]], routing, case.axis, activation=gated,
        bias=[given["b_gate"], given["b_up"]], implementation=case.implementation,
    )  # fmt: skip
    used = jnp.arange(len(hidden)) < routing.group_sizes.sum()
    poisoned = jnp.where(used[:, None], hidden, jnp.nan)
    if "shift" in given:  # Its gradient is the cotangent of the rows.
        poisoned += given["shift"]
    out = overlap.grouped_matmul_reduce_scatter(
        poisoned, given["w_down"], given["gates"], routing, case.axis, bias=given["b_down"],
        implementation=case.implementation,
    )  # fmt: skip
    return out, hidden, jax.tree.map(lambda x: x[None], routing)


def on_devices(case: Case, function: Callable[..., Any]) -> Callable[..., Any]:
    if case.axis is None:
        return function
    return jax.shard_map(function, mesh=case.mesh, in_specs=P(case.axis), out_specs=P(case.axis),
                         check_vma=case.check_vma)  # fmt: skip


@functools.cache
def program(case: Case) -> Any:
    run = on_devices(case, functools.partial(layer, case))

    def weighted(given: Any, ids: Any, weights: Any) -> Any:
        out, *rest = run(given, ids)
        return (out * weights).sum(), (out, *rest)

    return jax.jit(jax.value_and_grad(weighted, has_aux=True))


@functools.cache
def exact(case: Case) -> Any:
    weighted = lambda given, ids, counts, weights: (oracle(given, ids, counts) * weights).sum()  # noqa: E731
    return jax.jit(jax.grad(weighted)), jax.jit(oracle)
