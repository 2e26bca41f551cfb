"""The contract of tests/ops on GPUs: every operation in every form, exact, right to rounding, and repeatable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from overlap import Config
from overlap.collectives.rows import arriving
from tests import oracle
from tests.ops.contract import (
    BF16,
    E4M3,
    EVERY,
    F16,
    F32,
    FORMS,
    JOINED,
    RING,
    SCALES,
    Call,
    assert_close,
    assert_exact,
    check,
    put,
)
from tests.ops.derivative_cases import TRANSFORMED, given, of_both, small
from tests.ops.gradient_cases import Gradient, fused, plain
from tests.ops.mesh_cases import check_on, layout, let_ranks_run_against_the_positions
from tests.ops.numbers_cases import BANDS, CUT, GATHERED, gather, summed


def fitting(call):
    """With a configuration that this device's mainloop takes; few rows stay joined."""
    return call.but(config=oracle.fitting(call.config))


@pytest.mark.parametrize("name", FORMS)
def test_every_bit_of_launches_in_a_row(devices, name):
    """All launches are queued before a result is read: what one leaves in memory is wrong for the next one."""
    call = FORMS[name] if FORMS[name].spec.replicates or name == "joined" else FORMS[name].but(m=200, n=264, k=136)
    check(fitting(call), devices, launches=3)


@pytest.mark.parametrize("gated", [False, True])
def test_tokens_that_arrive_while_their_rows_are_multiplied(devices, gated, monkeypatch):
    """Rows that are not in use are zero, too."""
    monkeypatch.setattr(arriving, "_LEAST_DEVICES", 2)
    monkeypatch.setattr(arriving, "_LEAST_ROWS", 0)
    more = {"widths": (64, 64), "activation": jnp.maximum} if gated else {"extras": ("bias",)}
    check(FORMS["tokens to rows"].but(config=None, m=200, n=264, k=192, **more), devices, launches=5)


@pytest.mark.every_count
@pytest.mark.parametrize("name", ["pull", "scatter by ring"])
def test_every_number_of_devices(devices, name):
    check(fitting(FORMS[name]), devices, launches=2)


MORE = [  # With integers up to 3 in magnitude and k ≤ 200, every sum is exact in f16 and f32.
    gather(264, 0, 200, lead=(2, 3), widths=(136, 264), extras=SCALES, keywords=GATHERED, dtype=F16,
           config=Config(tile_n=128)),
    gather(200, 0, 136, widths=(264, 8, 72), container=tuple, keywords=GATHERED + RING, config=CUT),
    gather(520, 0, 208, layout="nt", widths=(264, 136), dtype=E4M3, extras=SCALES, keywords=GATHERED, config=None),
    gather(3, 264, 1032, lead=(5,), extras=("bias",), config=Config(chunk_bytes=1024)),
    gather(16, 0, 200, widths=(520, 136, 8), extras=SCALES, keywords=GATHERED, config=JOINED.replace(stream_k=8)),
    gather(40, 264, 136, config=JOINED.replace(tile_m=72, swap_operands=True)),
    Call("all_gather_rhs_matmul_n", 1000, 520, 1032, layout="tn", config=Config(stream_k=2)),
    Call("all_gather_rhs_matmul_k", 1000, 2056, 520, config=Config(tile_n=192, stages=3, chunk_bytes=1024)),
    Call("matmul_reduce_scatter", 200, 264, 144, pairs=(72, 64, 8), extras=EVERY, out=F32, keywords=RING),
    Call("matmul_reduce_scatter_n", 712, 584, 200, layout="tt", extras=EVERY, activation=jax.nn.relu, out=F32,
         config=Config(tile_m=64, tile_n=256, stages=4, chunk_bytes=1024, chunk_buffers=4)),
    summed("once", 4, 200, 264, 208, layout="nt", dtype=E4M3, out=F32, extras=SCALES, lead=(2,)),
    gather(1024, 0, 192, widths=(512, 128, 128), config=BANDS.replace(schedule="pingpong", stages=4)),
]  # fmt: skip


@pytest.mark.parametrize("call", MORE, ids=str)
def test_every_bit_of_more_forms(devices, call):
    check(fitting(call), devices, launches=2)


LARGE = {  # Sizes as real layers have them, and ragged ones.
    "pull": (1024, 4096, 4096), "ring": (1000, 3000, 4104), "joined": (16, 4096, 8192),
    "weights n": (2048, 1024, 4096), "weights k": (1000, 4104, 1032), "scatter m": (1024, 4096, 2048),
    "scatter n": (4096, 520, 1032), "scatter by ring": (1000, 2048, 1032), "all, rows": (4096, 4096, 1024),
    "one shot": (64, 8192, 2048),
}  # fmt: skip


def errors(call, devices, arrays):
    """Errors of the call and of the unfused product, relative to f32: the largest over the devices."""
    mesh = oracle.make_mesh(x=devices)

    def measure(arrays):
        exact = call.plain(arrays, F32)
        return tuple(oracle.worst(oracle.distance(f(arrays), exact), mesh) for f in (call, call.unfused))

    program = call.program(mesh, arrays, measure, (P(), P()), compiler_options=oracle.NO_SEARCH)
    return program(put(arrays, call.specs(arrays), mesh))


@pytest.mark.parametrize("name", LARGE)
def test_error_within_twice_the_unfused_product_and_the_same_bits_each_time(devices, name):
    """The configuration is the library's own."""
    config = None if name != "joined" else oracle.fitting(JOINED.replace(tile_n=256, stages=4, stream_k=8))
    m, n, k = LARGE[name]
    call = FORMS[name].but(m=m, n=n, k=k, config=config, dtype=F16 if name.endswith("n") else BF16)
    mesh, arrays = oracle.make_mesh(x=devices), call.normal(devices, 1)
    oracle.assert_close(errors(call, devices, arrays))
    program, on_mesh = call.program(mesh, arrays), put(arrays, call.specs(arrays), mesh)
    first, *others = [program(on_mesh) for _ in range(6)]
    of = lambda x: [np.asarray(shard.data) for shard in x.addressable_shards]  # noqa: E731
    assert all((a == b).all() for other in others for a, b in zip(of(first), of(other), strict=True))


@pytest.mark.parametrize("name", ["pull", "weights n", "weights k", "scatter m", "all, rows", "one shot"])
def test_gradients(devices, name):
    call = small(name, m=64, n=64, k=128, dtype=BF16, config=None)
    assert_close(*of_both(call, given(call, devices, 0.1), TRANSFORMED["vjp"], devices=devices, check_vma=True), 2e-2)


@pytest.mark.parametrize("form", [Gradient(200, 264, (136, 72)), Gradient(16, 128, (72, 264), (2,), True)], ids=str)
def test_gradients_of_several_products_in_one_kernel(devices, form):
    """Rows travel beside the sum that they are needed with, several times in a row."""
    mesh = oracle.make_mesh(x=devices)
    ours, exact = form.mapped(mesh, fused), form.mapped(mesh, plain)
    shardings = [jax.NamedSharding(mesh, spec) for spec in form.specs]
    launches = []
    for seed in range(3):
        arrays = [jax.tree.map(lambda x, s=s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]), of)
                  for of, s in zip(form.arrays(devices, seed), shardings, strict=True)]  # fmt: skip
        launches.append((arrays, ours(*arrays)))
    for arrays, results in launches:
        assert_close(results, exact(*arrays), 0.0)


PERMUTED = (2, 0, 3, 1)


@pytest.mark.gpus(4)
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (layout("x", PERMUTED, x=4), "pull"), (layout("b", PERMUTED, a=2, b=2), "ring"),
        (layout(("b", "a"), PERMUTED, a=2, b=2), "weights k"), (layout("a", a=2, b=2), "scatter m"),
        (layout(("a", "b"), a=2, b=2), "one shot"), (layout("x", (1, 2, 0), x=3), "pull"),
    ],
    ids=str,
)  # fmt: skip
def test_meshes(case, name):
    count = int(np.prod([size for _, size in case.sizes]))
    if jax.process_count() > 1 and jax.device_count() != count:
        pytest.skip(f"one process per GPU: this layout is for a job of {count}")
    check_on(case, fitting(FORMS[name].but(k=128)), launches=3)


@pytest.mark.parametrize("name", ["pull", "joined", "ring"])
def test_ranks_that_run_against_the_positions(devices, name, monkeypatch):
    """As on several hosts (test_several_hosts.py)."""
    let_ranks_run_against_the_positions(monkeypatch)
    check(fitting(FORMS[name]), devices, launches=2)


def test_two_calls_with_the_same_operand_from_outside_a_mesh_that_is_set(devices):
    """The lowering sees no devices. XLA must not give the two kernels the same memory for their flags."""
    call = FORMS["pull"].but(config=None, n=256)
    mesh, arrays = oracle.make_mesh(x=devices), call.arrays(devices)
    on_mesh = put(arrays, call.specs(arrays), mesh)

    def layer(arrays):
        return call(arrays), call(arrays | {"rhs": arrays["rhs"] * 2})

    specs = dict(in_specs=(call.specs(arrays),), out_specs=(call.out_specs,) * 2, check_vma=False)
    with jax.set_mesh(mesh):
        program = jax.jit(jax.shard_map(layer, **specs))
        for _ in range(3):
            (exact,) = call.expected(arrays, devices, F32)
            assert_exact(program(on_mesh), [exact.astype(BF16), (2 * exact).astype(BF16)])


@pytest.mark.parametrize("one_shot", [False, True])
def test_alike_sums_in_one_program(devices, one_shot):
    """XLA must not give two results the same memory, since peers would then write to it for both calls."""
    call = fitting(FORMS["one shot" if one_shot else "all, rows"].but(out=F32))
    mesh, arrays = oracle.make_mesh(x=devices), call.arrays(devices)
    doubled = lambda arrays: arrays | {"rhs": arrays["rhs"] * jnp.asarray(2, BF16)}  # noqa: E731

    def three(arrays):
        return [call(given)[None] for given in (arrays, arrays, doubled(arrays))]

    results = call.program(mesh, arrays, three, [call.out_specs] * 3)(put(arrays, call.specs(arrays), mesh))
    (exact,) = call.expected(arrays, devices)
    assert_exact(results, [exact, exact, 2 * exact])
