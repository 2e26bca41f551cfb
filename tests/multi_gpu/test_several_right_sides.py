"""Tests `all_gather_lhs_matmul` on GPUs: several right operands, the returned gathered operand, batches, f8, scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import overlap
from tests import oracle
from tests.ops import several_sides_cases
from tests.ops import test_summed_pairs as summed_pairs
from tests.ops.several_sides_cases import Form
from tests.ops.test_summed_pairs import Gradient

E4M3, BF16, F16 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float16
ALL = ("rows", "columns")
# With integers up to 3 in magnitude and k ≤ 200, every sum is exact in f16 and f32.
EXACT = [
    (Form(1024, (512, 128, 128), 192), None),
    (Form(200, (264, 8, 72), 136, gathered=True, container=tuple), overlap.Config(stream_k=3)),
    (Form(264, (136, 264), 200, (2, 3), gathered=True, scales=ALL), overlap.Config(tile_n=128)),
    (Form(3, (264,), 1032, (5,), gathered=True, container=None, out_dtype=BF16), overlap.Config(chunk_bytes=1024)),
    (Form(264, (520, 136), 136, (2,), transpose_rhs=True, scales=("scalar", *ALL)),
     overlap.Config(stream_k=2)),
    (Form(520, (264, 136), 208, dtype=E4M3, transpose_rhs=True, gathered=True, scales=ALL, out_dtype=F16), None),
]  # fmt: skip


@pytest.mark.parametrize("transport", ["pull", "ring"])
@pytest.mark.parametrize(("form", "config"), EXACT, ids=str)
def test_every_bit(devices, form, config, transport):
    mesh, launches = oracle.make_mesh(x=devices), []
    body = several_sides_cases.call(form, implementation="fused", config=oracle.fitting(config), transport=transport)
    fused = several_sides_cases.on_mesh(form, mesh, body)
    for seed in range(3):  # Three launches in a row, each with its own operands.
        arrays = several_sides_cases.operands(form, devices, seed)
        launches.append((arrays, fused(*several_sides_cases.put(form, mesh, arrays))))
    for arrays, results in launches:
        several_sides_cases.assert_exact(form, arrays, results)


@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_a_layer_as_long_as_real_ones(devices, dtype):
    """Computes Q, K and V of 4096 features: the error is no larger than XLA's, and each run gives the same bits."""
    is_f8 = jnp.dtype(dtype).itemsize == 1
    form = Form(1024, (4096 // devices, 1024 // devices, 1024 // devices), 4096, dtype=dtype, transpose_rhs=is_f8,
                gathered=True, scales=ALL)  # fmt: skip
    mesh = oracle.make_mesh(x=devices)
    draw = lambda rng, *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    given = several_sides_cases.put(form, mesh, several_sides_cases.operands(form, devices, 1, draw))

    def measure(lhs, sides, rows, columns):
        results = {
            name: several_sides_cases.call(form, implementation=name)(lhs, sides, rows, columns)
            for name in ("fused", "xla")
        }
        again, _ = several_sides_cases.call(form, implementation="fused")(lhs, sides, rows, columns)
        gathered = lax.all_gather(lhs, "x", axis=0, tiled=True)
        all_rows = lax.all_gather(rows, "x", axis=0, tiled=True)
        errors = []
        for i, (side, column) in enumerate(zip(sides, columns, strict=True)):
            matrix = (side.T if is_f8 else side).astype(jnp.float32)
            exact = (
                jnp.matmul(gathered.astype(jnp.float32), matrix, precision=lax.Precision.HIGHEST) * all_rows * column
            )
            outs = [oracle.rounded(results[name][0][i]) for name in ("fused", "xla")]
            errors.append([oracle.worst(oracle.distance(out, exact), mesh) for out in outs])
        bits = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.uint8)
        kept = jnp.all(bits(results["fused"][1][0][0]) == bits(gathered))
        same = functools.reduce(jnp.logical_and, map(jnp.array_equal, results["fused"][0], again))
        return errors, oracle.worst(jnp.logical_not(kept & same).astype(jnp.int32), mesh)

    errors, differs = oracle.on_mesh(mesh, measure, several_sides_cases.specs(form), P())(*given)
    assert int(differs) == 0
    # The tensor cores add f8 products with about 14 bits; XLA may use other instructions.
    floor = 2e-3 if is_f8 else 1e-5
    for ours, theirs in errors:
        assert float(ours) <= oracle.ALLOWED * float(theirs) + floor


# Sizes are such that all sums of integers up to 2 in magnitude are exact in f16.
GRADIENTS = [
    Gradient(1024, 512, (512, 128, 128)),
    Gradient(200, 136, (264, 72), transpose_rhs=True),
    Gradient(264, 200, (136, 8), lead=(2,)),
]


@pytest.mark.parametrize("form", GRADIENTS, ids=str)
def test_every_bit_of_gradients(devices, form):
    """The sum of two products, and the gathered operand that travels beside it, several times in a row."""
    mesh, launches = oracle.make_mesh(x=devices), []
    ours, exact = form.mapped(mesh, summed_pairs.fused), form.mapped(mesh, summed_pairs.plain)
    same = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
    for seed in range(4):
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), form.specs)
        x, weights, d_outs = jax.tree.map(np.asarray, form.arrays(devices, seed))
        arrays = jax.device_put(
            (x, weights, d_outs), (shardings[0], [shardings[1]] * len(weights), [shardings[2]] * len(weights))
        )
        launches.append((arrays, ours(*arrays)))
    for arrays, results in launches:
        assert all(map(bool, jax.tree.leaves(same(results, exact(*arrays)))))
