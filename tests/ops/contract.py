"""The contract of all operations: `FORMS` has each of them in each form of its kernel, with ways to run and compare it.

The properties in tests/ops are written once over `FORMS`, emulated on CPU devices. tests/multi_gpu runs the same cases
on GPUs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlap.emulation import emulate
from overlap.kernels.target import Target
from tests import oracle
from tests.ops.calls import BF16 as BF16
from tests.ops.calls import E4M3 as E4M3
from tests.ops.calls import E5M2 as E5M2
from tests.ops.calls import EVERY as EVERY
from tests.ops.calls import F16 as F16
from tests.ops.calls import F32 as F32
from tests.ops.calls import SCALES as SCALES
from tests.ops.calls import SMALL as SMALL
from tests.ops.calls import Arrays as Arrays
from tests.ops.calls import Call as Call
from tests.ops.grouped_calls import GroupedCall as GroupedCall

H200 = Target("gpu", "NVIDIA H200", 132)
ONE_SHOT = SMALL.replace(one_shot=True)
JOINED = SMALL.replace(joined=True)
RING = (("transport", "ring"),)
# Each operation in each form of its kernel. The sizes are ragged, and such that 2, 3, 4 and 8 devices can cut a sum.
FORMS = {
    "matmul": Call("matmul"),
    "pull": Call("all_gather_lhs_matmul"),
    "ring": Call("all_gather_lhs_matmul", keywords=RING),
    "joined": Call("all_gather_lhs_matmul", m=24, config=JOINED),
    "weights n": Call("all_gather_rhs_matmul_n"),
    "weights k": Call("all_gather_rhs_matmul_k"),
    "scatter m": Call("matmul_reduce_scatter"),
    "scatter n": Call("matmul_reduce_scatter_n", n=72),
    "scatter by ring": Call("matmul_reduce_scatter", keywords=RING),
    "all, rows": Call("matmul_all_reduce", m=96),
    "all, columns": Call("matmul_all_reduce", m=25, n=192),
    "one shot": Call("matmul_all_reduce", config=ONE_SHOT),
    "groups": GroupedCall("grouped_matmul"),
    "tokens to rows": GroupedCall("all_gather_lhs_grouped_matmul", m=6, n=40, k=128),
    "rows to tokens": GroupedCall("grouped_matmul_reduce_scatter", m=6, n=128, k=200),
}


@contextlib.contextmanager
def running(**settings: Any) -> Iterator[Any]:
    """Runs kernels: emulated, with these settings, where there is no GPU."""
    if jax.default_backend() == "gpu":
        yield None
        return
    with emulate(**{"cores": 2} | settings) as run:
        yield run
        run.check()


def put(arrays: Arrays, specs: dict[str, P], mesh: Mesh) -> Arrays:
    """Puts NumPy arrays on the mesh, of which each process has them all."""
    place = lambda x, spec: jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda i: x[i])  # noqa: E731
    return {name: jax.tree.map(lambda x, name=name: place(x, specs[name]), x) for name, x in arrays.items()}


def mesh_of(axes: dict[str, int], order: tuple[int, ...] | None = None, kind: AxisType = AxisType.Auto) -> Mesh:
    """Returns a mesh over the first devices, or over these in another order."""
    devices = np.array(jax.devices())[list(order or range(math.prod(axes.values())))]
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(kind,) * len(axes))


def assert_exact(results: Any, expected: list[np.ndarray]) -> None:
    """Compares every bit that this process has."""
    for out, exact in zip(jax.tree.leaves(results), expected, strict=True):
        assert out.shape == exact.shape and out.dtype == exact.dtype, (out.shape, out.dtype, exact.shape, exact.dtype)
        for shard in out.addressable_shards:
            actual = np.asarray(shard.data).astype(np.float32)
            np.testing.assert_array_equal(actual, exact[shard.index].astype(np.float32))


def assert_close(actual: Any, expected: Any, limit: float = 1e-2) -> None:
    """Compares in the Frobenius norm; of arrays on several processes, the shards of this process."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape, (a.shape, b.shape)
        if isinstance(a, jax.Array) and not a.is_fully_addressable:
            a, b = (np.stack([np.asarray(shard.data) for shard in x.addressable_shards]) for x in (a, b))
        a, b = (np.asarray(x).astype(np.float64) for x in (a, b))
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b), np.linalg.norm(a - b) / np.linalg.norm(b)


def check(call: Call, devices: int = 2, *, mesh: Mesh | None = None, implementation: str | None = "fused",
          completions: Any = ("late",), launches: int = 1, seed: int = 0, **settings: Any) -> Any:  # fmt: skip
    """Compares every bit of launches in a row, each with operands of its own, under several schedules.

    Returns the results of the last launch.
    """
    mesh = mesh or oracle.make_mesh(x=devices)
    drawn = [call.arrays(devices, seed + launch) for launch in range(launches)]
    given = [put(arrays, call.specs(arrays), mesh) for arrays in drawn]
    function = call.stacked(lambda arrays: call(arrays, implementation))
    program = call.program(mesh, drawn[0], function, call.out_specs)
    for schedule, completion in enumerate(completions):
        with running(completion=completion, seed=seed + schedule, **settings) as run:
            results = [program(arrays) for arrays in given]
        assert run is None or (run.counts["launches"] > 0) == (implementation == "fused")
        for arrays, result in zip(drawn, results, strict=True):
            assert_exact(result, call.expected(arrays, devices))
    return results[-1]


def struct(*shape: int, dtype: Any = BF16, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
