"""Transformations that differentiate, and a comparison of a call's derivatives with those of the same in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests import oracle
from tests.ops.contract import F16, F32, FORMS, SCALES, Arrays, Call, put, running
from tests.ops.grouped_calls import DATA


def loss(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Weighs the results differently, so that none can pass for another."""
    return lambda *x: sum((2 + i) * jnp.sin(out.astype(F32)).sum() for i, out in enumerate(jax.tree.leaves(f(*x))))


def squares(tree: Any) -> jax.Array:
    return sum((x.astype(F32) ** 2).sum() for x in jax.tree.leaves(tree))


def direction(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jnp.cos(3 * x), arrays)


TRANSFORMED: dict[str, Callable[..., Any]] = {
    "vjp": lambda f, x: jax.grad(loss(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (direction(x),)),
    "jvp of grad": lambda f, x: jax.jvp(jax.grad(loss(f)), (x,), (direction(x),)),
    "grad of grad": lambda f, x: jax.grad(lambda x: squares(jax.grad(loss(f))(x)))(x),
    "grad of jvp": lambda f, x: jax.grad(lambda x: squares(jax.jvp(f, (x,), (direction(x),))[1]))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](direction(x)),
    "vmap of jvp": lambda f, x: jax.vmap(
        lambda t: jax.jvp(lambda lhs: f(x | {"lhs": lhs}), ((x["lhs"] * t).astype(F16),), (x["lhs"],))
    )(jnp.arange(1, 3, dtype=F16)),
}


def small(name: str, **changes: Any) -> Call:
    """A form with all keywords that its kernel takes, and small shapes."""
    call = FORMS[name]
    takes = call.spec.epilogue
    extras = tuple(n for n in (*SCALES, "bias", "addend") if n in takes)
    activation = jnp.tanh if "activation" in takes else None
    k = 64 if call.spec.gathers else 8
    fields = dict(m=16, n=16, k=k, dtype=F16, extras=extras, activation=activation)
    fields |= {"out": F32} if call.spec.sums else {}
    return call.but(**fields | changes)


def given(call: Call, devices: int = 2, factor: float = 0.25, seed: int = 0) -> Arrays:
    """Operands near zero, where sums do not saturate an activation."""
    arrays = call.normal(devices, seed)
    kept, scaled = (*SCALES, *DATA), lambda x: (x * factor).astype(x.dtype)
    return {n: x if n in kept else jax.tree.map(scaled, x) for n, x in arrays.items()}


def of_both(call: Call, arrays: Arrays, transformed: Callable[..., Any], *, check_vma: bool = False, devices: int = 2,
            mesh: Mesh | None = None, around: Callable[..., Any] = lambda f: f, implementation: Any = "fused",
            out_specs: Any = None, launches: bool = True) -> tuple[Any, Any]:  # fmt: skip
    """Applies `transformed` to the call and to the same in plain JAX, both under `shard_map`."""
    results, mesh = [], mesh or oracle.make_mesh(x=devices)
    specs = out_specs or (P() if call.spec.replicates else call.out_specs)
    arrays = put(arrays, call.specs(arrays), mesh)
    bodies = [lambda arrays: call(arrays, implementation), call.plain]
    for index, body in enumerate(bodies):
        body = around(body)
        if call.gathered:
            body = lambda arrays, body=body: (lambda outs, whole: (outs, whole[None]))(*body(arrays))  # noqa: E731
        mapped = jax.shard_map(body, mesh=mesh, in_specs=(call.specs(arrays),), out_specs=specs, check_vma=check_vma)
        with running(detect_races=False) as run:
            results.append(jax.block_until_ready(jax.jit(lambda x, f=mapped: transformed(f, x))(arrays)))
        assert run is None or (run.counts["launches"] > 0) == (launches and implementation == "fused" and index == 0)
    return results[0], results[1]


def in_f64(lhs: Any, rhs: Any, *, lhs_scale: Any = 1.0, rhs_scale: Any = 1.0, bias: Any = 0.0,
           activation: Any = lambda y: y, transpose_rhs: bool = False, times: Any = 1.0, **_: Any) -> Any:  # fmt: skip
    """Computes the gradient of the sum of `matmul`'s result in f64."""
    lhs, rhs, scale, bias = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, lhs_scale * rhs_scale, bias))
    with jax.enable_x64(True):

        def total(lhs: Any, rhs: Any) -> Any:
            return times * activation(lhs @ (rhs.T if transpose_rhs else rhs) * scale + bias).sum()

        return jax.grad(total, (0, 1))(jnp.asarray(lhs), jnp.asarray(rhs))
