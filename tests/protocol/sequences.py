"""Random sequences of fused launches on shared memory: how they are drawn and run, and a command that runs many.

    python -m tests.protocol.sequences --count 10000 --seed 0 [--detect]

Sequence number n depends on n alone, so `--count 1 --seed n` repeats it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import math
import random
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.rows import row_kernels
from overlap.collectives.rows.arriving import Arriving
from overlap.collectives.rows.chunks import RowsPlan
from overlap.collectives.rows.routing import Routing
from overlap.emulation import EmulationError, Launch, emulate, run_sequence
from overlap.frame.operands import Operands
from overlap.kernels.target import current_target
from overlap.primitives import PeerGroup
from overlap.single_gpu.grouped_product import rows_through
from tests.ops.grouped_plans import plan_of

Axes = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh over some of the eight devices. `order` lists the devices' numbers in the order of the mesh."""

    sizes: tuple[tuple[str, int], ...]
    order: tuple[int, ...]

    def mesh(self) -> Mesh:
        names, shape = zip(*self.sizes, strict=True)
        devices = np.array([jax.devices()[number] for number in self.order]).reshape(shape)
        return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(shape))

    @property
    def rings(self) -> list[Axes]:
        """Returns the axes and pairs of axes that have more than one device. A call can run along each of them."""
        names = tuple(name for name, size in self.sizes if size > 1)
        return [*names, *(itertools.permutations(names, 2) if len(names) > 1 else ())]


def layout(*order: int, **sizes: int) -> Layout:
    return Layout(tuple(sizes.items()), order or tuple(range(math.prod(sizes.values()))))


LAYOUTS = [
    layout(x=2, y=2),
    layout(0, 2, 1, 3, x=2, y=2),  # transposed
    layout(3, 1, 0, 2, x=2, y=2),  # permuted
    layout(x=4, y=1),
    layout(2, 0, 3, 1, x=4),
    layout(x=2),
    layout(2, 1, x=2),
    layout(x=2, y=3),
    layout(5, 1, 3, 0, 4, 2, x=2, y=3),
    layout(x=3, y=2),
    layout(x=2, y=4),
    layout(7, 2, 5, 0, 3, 6, 1, 4, x=2, y=4),
    layout(2, 3, 4, 5, x=2, y=2),
]

TILES = overlap.Config(tile_m=64, tile_n=128, stages=2, chunk_bytes=1024)
JOINED = dataclasses.replace(TILES, joined=True)
ONE_SHOT = dataclasses.replace(TILES, one_shot=True)
# For each kind of operation, two shapes per device, as (rows, columns, contraction). If an operand is gathered, the
# gathered dimension has the size of one shard. If the result is scattered or all-reduced, the divided dimension has the
# size of one device's block.
SHAPES: dict[str, list[tuple[int, int, int]]] = {
    "pull": [(16, 64, 64), (72, 64, 72)],
    "ring": [(16, 64, 64), (72, 64, 72)],
    "several": [(16, 64, 64), (72, 40, 72)],
    "joined": [(8, 64, 64), (24, 72, 72)],
    "rhs n": [(16, 64, 64), (72, 24, 72)],
    "rhs k": [(16, 64, 64), (72, 64, 40)],
    "scatter m": [(16, 64, 64), (24, 136, 72)],
    "scatter n": [(16, 64, 64), (72, 40, 72)],
    "scatter by ring": [(16, 64, 64), (24, 136, 72)],
    "spread": [(16, 64, 64), (24, 136, 72)],  # The first is summed in blocks of columns, the second in blocks of rows.
    "one shot": [(16, 64, 64), (72, 40, 72)],
    "passenger": [(16, 64, 64), (24, 136, 72)],
    "matmul": [(16, 64, 64), (72, 64, 72)],
}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a fused operation on a mesh."""

    layout: Layout
    axes: Axes
    kind: str
    shape: tuple[int, int, int]

    def __str__(self) -> str:
        axes = self.axes if isinstance(self.axes, str) else "".join(self.axes)
        sizes = "x".join(str(size) for _, size in self.layout.sizes)
        return f"{self.kind} {'x'.join(map(str, self.shape))} along {axes} of {sizes} {list(self.layout.order)}"

    def function(self) -> Any:
        """Returns the call as a function from one device's left and right operand to its results."""
        fused: Any = {"implementation": "fused", "config": JOINED if self.kind == "joined" else TILES}
        match self.kind:
            case "matmul":
                return lambda a, b: overlap.matmul(a, b, **fused)
            case "rhs n" | "rhs k":
                fused["dimension"] = 1 if self.kind == "rhs n" else 0
                return lambda a, b: overlap.all_gather_rhs_matmul(a, b, self.axes, **fused)
            case "scatter m" | "scatter n" | "scatter by ring":
                fused["dimension"] = 1 if self.kind == "scatter n" else 0
                fused["transport"] = "ring" if self.kind == "scatter by ring" else "push"
                return lambda a, b: overlap.matmul_reduce_scatter(a, b, self.axes, **fused)
            case "spread" | "one shot":
                fused["config"] = ONE_SHOT if self.kind == "one shot" else TILES
                return lambda a, b: overlap.matmul_all_reduce(a, b, self.axes, **fused)
            case "several":
                return lambda a, b: overlap.all_gather_lhs_matmul(a, [b, b], self.axes, return_gathered=True, **fused)
            case "rows copied" | "rows added":
                return self._move_rows
            case "arriving":
                return self._multiply_arriving
            case "passenger":
                gather = functools.partial(overlap.all_gather_lhs_matmul, axis_name=self.axes, implementation="fused")
                # The gradient is a sum of two products, beside which the left operand travels.
                return lambda a, b: jax.vjp(gather, jnp.resize(a, self.shape[:2]), [b.T, b.T])[1]([a, a])
            case _:
                transport = "ring" if self.kind == "ring" else "pull"
                return lambda a, b: overlap.all_gather_lhs_matmul(a, b, self.axes, transport=transport, **fused)

    def _rows(self, dtype: Any) -> tuple[jax.Array, RowsPlan]:
        """The positions of rows, and their sizes: each device has every D-th token of all devices."""
        group, (tokens, _, features) = PeerGroup.of(self.axes), self.shape
        token = jnp.arange(group.size * tokens)
        positions = jnp.where(token % group.size == group.me(), token // group.size, tokens)[:, None]
        return positions, RowsPlan(tokens, 1, tokens, features, dtype, current_target(), group)

    def _multiply_arriving(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, ...]:
        positions, plan = self._rows(a.dtype)
        sizes = jnp.array([plan.rows], jnp.int32)
        nothing = jnp.zeros((), jnp.int32)
        arrival = Arriving.of(plan, Routing(nothing, nothing, positions, sizes, nothing), unit=4, block=64)
        given = Operands(jax.ShapeDtypeStruct((plan.rows, plan.features), a.dtype), (b[None],), group_sizes=sizes)
        return rows_through(dataclasses.replace(given, lhs=a), plan_of(given, TILES, a.dtype), None, arrival)

    def _move_rows(self, a: jax.Array, _: jax.Array) -> jax.Array:
        positions, plan = self._rows(a.dtype)
        given = {"positions": positions}
        if self.kind == "rows copied":
            return row_kernels.copied({"tokens": a, **given}, plan)["rows"]
        return row_kernels.added({"rows": a, **given}, plan)["sums"]

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """Draws the operands of all devices: small integers, different on each device."""
        rows, columns, k = self.shape
        devices, sizes = len(self.layout.order), dict(self.layout.sizes)
        group = math.prod(sizes[name] for name in ((self.axes,) if isinstance(self.axes, str) else self.axes))
        whole_k = k * group if self.kind == "rhs k" else k
        by_rows = self.kind in ("scatter m", "scatter by ring", "passenger") or (
            self.kind == "spread" and self.shape[0] > 16
        )
        by_columns = self.kind == "scatter n" or (self.kind == "spread" and not by_rows)
        whole_rows, whole_columns = rows * group if by_rows else rows, columns * group if by_columns else columns
        draw = np.random.default_rng(random.Random(str(self)).getrandbits(32)).integers
        return (
            draw(-4, 5, (devices * whole_rows, whole_k)).astype(jnp.bfloat16),
            draw(-4, 5, (devices * k, whole_columns)).astype(jnp.bfloat16),
        )


CALLS = [
    Call(layout, axes, kind, shape)
    for layout in LAYOUTS
    for axes in layout.rings
    for kind, shapes in SHAPES.items()
    for shape in shapes
]


@functools.cache
def launch_of(call: Call) -> Launch:
    """Traces the call and runs it alone. Returns its launch, with the results that a sequence must reproduce."""
    everywhere = P(tuple(name for name, _ in call.layout.sizes))
    mapped = jax.shard_map(
        call.function(), mesh=call.layout.mesh(), in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    with emulate(cores=2, detect_races=False, keep=True) as run:
        jax.jit(mapped)(*call.operands())
    (launch,) = run.launches
    # The traced programs stay alive. Without freezing them, garbage collection would take a fifth of the time.
    gc.collect()
    gc.freeze()
    return launch


@dataclasses.dataclass(frozen=True)
class Trial:
    """One sequence, and the settings of its run."""

    number: int
    calls: tuple[Call, ...]
    settings: dict[str, Any]

    def __str__(self) -> str:
        calls = [f"  {place}. {call}" for place, call in enumerate(self.calls)]
        repeat = "repeat it: python -m tests.protocol.sequences --count 1 --seed " + str(self.number)
        repeat += " --detect" if self.settings["detect_races"] else ""
        return "\n".join([f"sequence {self.number}, {self.settings}", *calls, repeat])


_TOGETHER = 25  # This many consecutive sequences draw from the same few calls, because tracing a call is slow.


def _pool(number: int) -> list[Call]:
    """Draws some calls, mostly on the same devices. They have few kinds and shapes, so flags often share addresses."""
    chance = random.Random(f"calls {number}")
    devices = set(chance.choice(LAYOUTS).order)
    alike = [each for each in LAYOUTS if set(each.order) == devices]
    layouts = alike if chance.random() < 0.7 and len(alike) > 1 else LAYOUTS
    rings = [(each, axes) for each in layouts for axes in each.rings]
    forms = chance.sample([(kind, shape) for kind, shapes in SHAPES.items() for shape in shapes], 2)
    return [Call(*group, *form) for group in chance.sample(rings, min(5, len(rings))) for form in forms]


def trial(number: int, *, detect: bool = False) -> Trial:
    """Returns sequence `number`."""
    pool, chance = _pool(number // _TOGETHER), random.Random(number)
    calls = [chance.choice(pool)]
    for _ in range(chance.randint(2, 5)):
        calls.append(calls[-1] if chance.random() < 0.3 else chance.choice(pool))
    # On the ring, the CTA that multiplies rows also forwards them: all CTAs must run at the same time.
    may_be_alone = all(call.kind != "ring" for call in calls)
    settings = {
        "completion": chance.choice(("late", "random", "eager")),
        "scheduler": chance.choice(("pct", "pct", "random")),
        "resident": 1 if chance.random() < 0.2 and may_be_alone else None,
        "detect_races": chance.random() < 0.25 or detect,
        "seed": number,
    }
    return Trial(number, tuple(calls), settings)


def fault_of(trial: Trial) -> str | None:
    """Runs a sequence. Returns a description of the first fault, or None.

    The sequence must end without an error, and every call's result must equal the result of a run of that call alone.
    """
    launches = [launch_of(call) for call in trial.calls]
    try:
        results = run_sequence(launches, **trial.settings)
    except EmulationError as error:
        return f"{type(error).__name__}: {error}"
    for place, (launch, outputs) in enumerate(zip(launches, results, strict=True)):
        for position, (got, expected) in enumerate(zip(outputs, launch.outputs, strict=True)):
            if [each.tobytes() for each in got] != [each.tobytes() for each in expected]:
                return f"wrong numbers at position {position} of launch {place}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs sequences. The exit status is 0 if all are right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.protocol.sequences", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="number of the first one")
    parser.add_argument("--detect", action="store_true", help="races detected in all of them, not in a quarter")
    given = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    failed = 0
    for number in range(given.seed, given.seed + given.count):
        each = trial(number, detect=given.detect)
        if (fault := fault_of(each)) is not None:
            failed += 1
            print(f"{each}\n{fault}\n", flush=True)
    print(f"{failed} of {given.count} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
