"""Meshes with several axes and permuted devices, and a comparison of every bit of what their peer groups compute."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from overlap.primitives import host_mesh
from tests.ops.contract import Call, assert_exact, mesh_of, put, running

Axes = str | tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and the axes along which the operands are sharded and gathered.

    `sizes` lists the mesh's axes, major to minor. `order` permutes the devices (None: jax's order).
    """

    sizes: tuple[tuple[str, int], ...]
    over: Axes
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = "x".join(f"{name}{size}" for name, size in self.sizes)
        over = self.over if isinstance(self.over, str) else "-".join(self.over)
        return f"{sizes} over {over}" + (f" of {self.order}" if self.order else "")

    @property
    def group(self) -> tuple[str, ...]:
        """Returns the names in `over` as a tuple."""
        return (self.over,) if isinstance(self.over, str) else self.over

    @property
    def size(self) -> int:
        """Returns the number of devices in a peer group."""
        return math.prod(dict(self.sizes)[name] for name in self.group)

    def mesh(self) -> Mesh:
        """Returns the mesh, over the first devices."""
        return mesh_of(dict(self.sizes), self.order)


def layout(over: Axes, order: tuple[int, ...] | None = None, **sizes: int) -> Layout:
    return Layout(tuple(sizes.items()), over, order)


def check_on(case: Layout, call: Call, *, launches: int = 1, seed: int = 1, **settings: Any) -> None:
    """Runs the call in every peer group, each with a left operand of its own, so that another group's rows show."""
    call, mesh = call.but(axis=case.over), case.mesh()
    others = tuple(name for name, _ in case.sizes if name not in case.group)
    drawn = [call.arrays(case.size, seed + launch) for launch in range(launches)]

    def body(arrays: Any) -> Any:
        factor = (1 + lax.axis_index(others)).astype(arrays["lhs"].dtype) if others else 1
        out = call.stacked(call)(arrays | {"lhs": arrays["lhs"] * factor})
        return out[None]

    program = call.program(mesh, drawn[0], body, P(others or None, *call.out_specs))
    with running(seed=seed, **settings):
        results = [program(put(arrays, call.specs(arrays), mesh)) for arrays in drawn]
    groups = math.prod(size for name, size in case.sizes if name in others)
    for arrays, result in zip(drawn, results, strict=True):
        of_group = [arrays | {"lhs": arrays["lhs"] * arrays["lhs"].dtype.type(1 + i)} for i in range(groups)]
        assert_exact(result, [np.stack([call.expected(given, case.size)[0] for given in of_group])])


def let_ranks_run_against_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reverses the ranks relative to the positions, as can happen on several hosts."""
    of_one_host = host_mesh._of_one_host

    def mirrored(*args: Any) -> host_mesh.HostMesh:
        plain = of_one_host(*args)
        return dataclasses.replace(plain, positions=plain.positions[::-1], is_mirrored=True)

    monkeypatch.setattr(host_mesh, "_of_one_host", mirrored)
