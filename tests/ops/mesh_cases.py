"""Helpers that make meshes with several axes and permuted devices, and measure the collective matmul's errors there."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from overlap.primitives import host_mesh
from tests import oracle
from tests.assembly import assembly

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
        shape = tuple(size for _, size in self.sizes)
        devices = np.array(jax.devices()[: math.prod(shape)])
        devices = devices if self.order is None else devices[list(self.order)]
        return Mesh(devices.reshape(shape), tuple(n for n, _ in self.sizes), axis_types=(AxisType.Auto,) * len(shape))

    def specs(self) -> tuple[P, P, P]:
        """Returns the partition specs of the left operand, the right operand and the result."""
        return P(self.over, None), P(None, self.over), P(None, self.over)


def layout(over: Axes, order: tuple[int, ...] | None = None, **sizes: int) -> Layout:
    return Layout(tuple(sizes.items()), over, order)


def let_ranks_run_against_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reverses the ranks relative to the positions, as can happen on several hosts."""
    of_one_host = host_mesh._of_one_host

    def mirrored(*args: Any) -> host_mesh.HostMesh:
        plain = of_one_host(*args)
        return dataclasses.replace(plain, positions=plain.positions[::-1], is_mirrored=True)

    monkeypatch.setattr(host_mesh, "_of_one_host", mirrored)


def operands(case: Layout, shape: tuple[int, int, int], dtype: Any, seed: int) -> tuple[jax.Array, jax.Array]:
    """Draws normally distributed operands for per-shard sizes (m_shard, n_shard, k)."""
    (m_shard, n_shard, k), mesh, (lhs, rhs, _) = shape, case.mesh(), case.specs()
    shardings = NamedSharding(mesh, lhs), NamedSharding(mesh, rhs)
    return oracle.draw(((case.size * m_shard, k), (k, case.size * n_shard)), dtype, shardings, seed)


def fused(case: Layout, **kwargs: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the fused operation along `case.over`, as a function of per-shard operands."""
    return lambda lhs, rhs: overlap.all_gather_lhs_matmul(lhs, rhs, case.over, implementation="fused", **kwargs)


def unfused(case: Layout) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns XLA's all-gather and product, as a user would write them without this library."""
    return lambda lhs, rhs: oracle.rounded(lax.all_gather(lhs, case.over, axis=0, tiled=True) @ rhs)


def errors(case: Layout, op: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """Returns a jitted function from operands to (error of `op`, unfused error); each is the largest over devices.

    Each peer group of the mesh has a left operand of its own, so that a shard of another group shows in the result.
    """
    mesh, (lhs_spec, rhs_spec, _) = case.mesh(), case.specs()
    others = tuple(name for name, _ in case.sizes if name not in case.group)

    def measure(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        lhs = lhs * (1 + lax.axis_index(others)).astype(lhs.dtype) if others else lhs
        gathered = lax.all_gather(lhs, case.over, axis=0, tiled=True).astype(jnp.float32)
        expected = lax.dot(gathered, rhs.astype(jnp.float32), precision=lax.Precision.HIGHEST)
        worst = lambda value: oracle.worst(oracle.distance(value, expected), mesh)  # noqa: E731
        return worst(op(lhs, rhs)), worst(unfused(case)(lhs, rhs))

    return oracle.on_mesh(mesh, measure, in_specs=(lhs_spec, rhs_spec), out_specs=(P(), P()))


def gradient_errors(case: Layout, op: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., Any]:
    """Returns a jitted function from operands to the distance of each gradient through `op` from XLA's gradient."""
    mesh, (lhs_spec, rhs_spec, _) = case.mesh(), case.specs()

    def loss(f: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
        return lambda lhs, rhs: jnp.sum(jnp.sin(f(lhs, rhs).astype(jnp.float32)))

    def measure(lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
        ours = jax.grad(loss(op), argnums=(0, 1))(lhs, rhs)
        theirs = jax.grad(loss(unfused(case)), argnums=(0, 1))(lhs, rhs)
        pairs = zip(ours, theirs, strict=True)
        return [oracle.worst(oracle.distance(a, b.astype(jnp.float32)), mesh) for a, b in pairs]

    return oracle.on_mesh(mesh, measure, in_specs=(lhs_spec, rhs_spec), out_specs=[P(), P()])


def errors_in_a_loop(case: Layout, op: Callable[[jax.Array, jax.Array], jax.Array], iterations: int) -> Any:
    """Returns a jitted function that launches `op` repeatedly and returns the largest distance from XLA's product.

    All launches are in one program. The left operand is overwritten right after each launch.
    """
    mesh, (lhs_spec, rhs_spec, _) = case.mesh(), case.specs()

    def measure(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        def step(_: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            lhs, worst = carry
            expected = unfused(case)(lhs, rhs).astype(jnp.float32)
            worst = jnp.maximum(worst, oracle.distance(op(lhs, rhs), expected))
            return jnp.roll(-lhs, 1, axis=1), worst

        _, worst = lax.fori_loop(0, iterations, step, (lhs, jnp.float32(0)))
        return oracle.worst(worst, mesh)

    return oracle.on_mesh(mesh, measure, in_specs=(lhs_spec, rhs_spec), out_specs=P())


def errors_of_two_rings(first: Layout, second: Layout, op: Callable[[Layout], Any]) -> Any:
    """Returns a jitted function from replicated operands of one shard to the errors of two products in one program.

    Both layouts use the same mesh. Each device scales the operands by its own factor.
    """
    mesh = first.mesh()
    everywhere = mesh.axis_names

    def measure(lhs: jax.Array, rhs: jax.Array) -> list[jax.Array]:
        lhs = lhs * (1 + lax.axis_index(everywhere)).astype(lhs.dtype)
        pairs = [(op(case)(lhs, rhs), unfused(case)(lhs, rhs).astype(jnp.float32)) for case in (first, second)]
        return [oracle.worst(oracle.distance(a, b), mesh) for a, b in pairs]

    return oracle.on_mesh(mesh, measure, in_specs=(P(), P()), out_specs=[P(), P()])


def reversed_axes_of_permuted_devices(case: Any, mesh: Mesh) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Makes a case for `assembly.py`: a peer group over all mesh axes in reverse order, on reversed devices.

    `case.config` holds further keywords of the operation.
    """
    over = mesh.axis_names[::-1]
    mesh = Mesh(mesh.devices.ravel()[::-1].reshape(mesh.devices.shape), mesh.axis_names)
    m_shard, n_shard, k = case.shape
    dtype = assembly.dtype_of(case.dtype)
    lhs_spec, rhs_spec, out_spec = P(over, None), P(None, over), P(None, over)
    op = functools.partial(overlap.all_gather_lhs_matmul, axis_name=over, implementation="fused", **case.config)
    mapped = jax.shard_map(op, mesh=mesh, in_specs=(lhs_spec, rhs_spec), out_specs=out_spec, check_vma=False)
    return mapped, (
        assembly.struct(mesh, (mesh.size * m_shard, k), dtype, lhs_spec),
        assembly.struct(mesh, (k, mesh.size * n_shard), dtype, rhs_spec),
    )
