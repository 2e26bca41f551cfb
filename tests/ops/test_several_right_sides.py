"""`all_gather_lhs_matmul`: several right operands, the gathered operand, leading dimensions, scales; emulated."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.emulation import EmulationError, emulate
from overlap.kernels.config import tile_k
from overlap.kernels.stream_k import StreamK
from tests import oracle
from tests.assembly import assembly
from tests.ops import several_sides_cases
from tests.ops.explained import answer
from tests.ops.several_sides_cases import Form
from tests.protocol.handshake_cases import change_own_chunks
from tests.protocol.test_schedule import size_of

SMALL = overlap.Config(tile_n=64, stages=2)
CUT = overlap.Config(tile_n=64, stages=2, stream_k=3)
FINE = overlap.Config(tile_n=128, chunk_bytes=512, chunk_buffers=3)
F8 = overlap.Config(tile_n=64, stages=2)
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def cuts(form, devices, cores, config):
    """Returns whether the kernel of this call has tiles that several CTAs share."""
    shard, itemsize = (*form.batch, form.m, form.k), jnp.dtype(form.dtype).itemsize
    schedule = AllGatherSchedule.of(devices, shard, form.widths, itemsize, config)
    return StreamK(schedule.tiles, -(-form.k // tile_k(form.dtype)), cores // config.cluster, config.stream_k).cuts


TRANSPORTS = pytest.mark.parametrize("transport", ["pull", "ring"])


def with_transports(cases):
    """Yields each case with both transports. Every second ring case is marked slow: the ring has its own tests."""
    by_ring = [pytest.param(*case, "ring", marks=[pytest.mark.slow] * (i % 2)) for i, case in enumerate(cases)]
    names = ("devices", "cores", "form", "config", "transport")
    return pytest.mark.parametrize(names, [*((*case, "pull") for case in cases), *by_ring], ids=str)


def check(form, devices, cores, config, transport=None, completions=("late", "random")):
    """Compares every bit of the fused kernel's results under several schedules, and of XLA's results."""
    assert devices == 1 or cuts(form, devices, cores, config) == (config.stream_k > 1)
    mesh, arrays = oracle.make_mesh(x=devices), several_sides_cases.operands(form, devices)
    given = several_sides_cases.put(form, mesh, arrays)
    body = several_sides_cases.call(form, implementation="fused", config=config, transport=transport)
    fused = several_sides_cases.on_mesh(form, mesh, body)
    for seed, completion in enumerate(completions):
        with emulate(cores=cores, completion=completion, seed=seed) as run:
            results = fused(*given)
            run.check()
        several_sides_cases.assert_exact(form, arrays, results)
    if transport == "ring":
        return  # XLA's results are the same for both.
    by_xla = several_sides_cases.on_mesh(form, mesh, several_sides_cases.call(form, implementation="xla"))
    several_sides_cases.assert_exact(form, arrays, by_xla(*given))


SIDES = [  # devices, cores, form, config
    (2, 3, Form(128, (128, 64, 64), 64), SMALL),
    (3, 5, Form(200, (136, 8, 72), 72), CUT),  # Ragged in all dimensions; one right operand is narrower than a tile.
    (2, 3, Form(40, (24, 24, 24, 24), 136), FINE),
    (3, 2, Form(1, (8,), 8), SMALL),  # A list of one right operand gives a list.
    (1, 3, Form(130, (72, 136), 72, container=tuple), CUT),
]


@with_transports(SIDES)
def test_several_right_sides(devices, cores, form, config, transport):
    check(form, devices, cores, config, transport)


GATHERED = [
    (2, 3, Form(128, (64,), 64, gathered=True, container=None), SMALL),
    (3, 8, Form(200, (72, 8), 136, gathered=True), CUT),
    (3, 5, Form(131, (64,), 1032, gathered=True, container=None), FINE),  # Chunks are parts of rows.
    (2, 9, Form(1, (8,), 8, gathered=True, container=None), SMALL),  # More CTAs than chunks.
    (1, 2, Form(72, (64, 8), 64, gathered=True), SMALL),
]


@with_transports(GATHERED)
def test_the_gathered_operand_as_well(devices, cores, form, config, transport):
    check(form, devices, cores, config, transport)


BATCHES = [
    (2, 3, Form(128, (64,), 64, (2,), container=None), SMALL),
    (3, 9, Form(72, (136, 8), 72, (2, 2)), CUT),
    (2, 3, Form(3, (8,), 1032, (5,), container=None), FINE),
    (2, 3, Form(64, (64,), 64, (1, 1), container=None, gathered=True), SMALL),
    (1, 3, Form(40, (72,), 64, (3,), scales=("rows",), gathered=True), SMALL),
]


@with_transports(BATCHES)
def test_leading_dimensions(devices, cores, form, config, transport):
    check(form, devices, cores, config, transport)


SCALED = [
    (2, 3, Form(72, (72,), 72, scales=("rows", "columns"), container=None), SMALL),
    (3, 5, Form(136, (72, 200), 72, scales=("scalar", "rows", "columns"), gathered=True), CUT),
    (2, 3, Form(72, (64,), 72, scales=("scalar",), container=None), FINE),
    (1, 3, Form(72, (64, 8), 72, scales=("rows", "columns")), SMALL),
    (2, 3, Form(1, (72,), 64, scales=("rows", "columns"), container=None), SMALL),  # Shape (1, 1)
    # [n, k] in 16 bits, and f8, each gathered in its own dtype.
    (2, 3, Form(136, (72, 8), 72, transpose_rhs=True), SMALL),
    (2, 3, Form(136, (72, 8), 272, transpose_rhs=True, dtype=E4M3, gathered=True), F8),
    (3, 7, Form(72, (136, 72), 144, (2,), transpose_rhs=True, dtype=E4M3, rhs_dtype=E5M2, out_dtype=jnp.float16,
                scales=("rows", "columns")), overlap.Config(tile_n=64, stages=2, stream_k=2)),
    (2, 4, Form(136, (136,), 272, transpose_rhs=True, dtype=E5M2, scales=("scalar", "rows"), container=None),
     overlap.Config(tile_n=64, stages=2)),
]  # fmt: skip


@with_transports(SCALED)
def test_scales_and_forms(devices, cores, form, config, transport):
    check(form, devices, cores, config, transport)


# --- Errors, before anything is traced --------------------------------------------------------------------------------


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, V = struct(128, 64), struct(64, 256), struct(64, 136)
FUSED = {"implementation": "fused"}
SCALE = np.ones
WRONG_CALLS = [  # lhs, rhs, keywords, type, what the message must contain
    (X, [], {}, ValueError, ["`rhs`", "at least one", "empty list"]),
    (X, [W, struct(72, 136)], {}, ValueError, ["`rhs[1]` of 2", "k=64", "k=72"]),
    (X, (W, struct(64, 136, dtype=jnp.float16)), {}, ValueError, ["`rhs[1]`", "bfloat16", "float16", "cast"]),
    (X, [W, struct(2, 64, 136)], FUSED, NotImplementedError, ["`rhs[1]`", "leading dimensions", "(2,)", "xla"]),
    (X, [W, 3], {}, ValueError, ["`rhs[1]`", "array", "int"]),
    (X, W, {"transpose_rhs": True}, ValueError, ["k=64", "k=256"]),
    (X, [W, struct(64, 201)], FUSED, NotImplementedError, ["`rhs[1]`", "n=201", "16 bytes", "xla"]),
    (struct(0, 128, 64), W, FUSED, NotImplementedError, ["leading dimensions", "(0,)", "xla"]),
    (X, W, {"lhs_scale": SCALE((3,))}, ValueError, ["`lhs_scale`", "(128, 1)", "got shape (3,)"]),
    (X, W, {"rhs_scale": SCALE((3,))}, ValueError, ["`rhs_scale`", "(256,)", "got shape (3,)"]),
    (X, [W, V], {"rhs_scale": SCALE(256)}, ValueError, ["`rhs_scale`", "list", "one entry per matrix", "shape (256,)"]),
    (X, [W, V], {"rhs_scale": [1.0]}, ValueError, ["`rhs_scale`", "2 entries", "list of 1"]),
    (X, (W, V), {"rhs_scale": (1.0,) * 3}, ValueError, ["`rhs_scale`", "2 entries", "tuple of 3"]),
    (X, [W, V], {"rhs_scale": [1.0, SCALE(256)]}, ValueError, ["`rhs_scale[1]`", "(136,)", "got shape (256,)"]),
    (X, [W, V], {"rhs_scale": [None, 1.0]}, ValueError, ["`rhs_scale[0]`", "a real number", "None"]),
    (X, W, {"rhs_scale": [1.0]}, ValueError, ["`rhs_scale`", "list only if `rhs` is", "list of 1"]),
    (struct(2, 128, 64), W, {"lhs_scale": SCALE((3, 128, 1))}, ValueError,
     ["`lhs_scale`", "(2, 128, 1)", "got shape (3, 128, 1)"]),
    (struct(128, 64, dtype=E4M3), struct(64, 256, dtype=E4M3), FUSED, NotImplementedError, ["8-bit", "transpose_rhs"]),
    (struct(128, 64, dtype=E4M3), [struct(256, 64, dtype=E4M3), struct(256, 64, dtype=E5M2)],
     FUSED | {"transpose_rhs": True}, NotImplementedError, ["`rhs`", "same dtype", "e4m3fn", "e5m2"]),
    (struct(128, 72, dtype=E4M3), struct(256, 72, dtype=E4M3), FUSED | {"transpose_rhs": True}, NotImplementedError,
     ["k=72", "16 bytes"]),
]  # fmt: skip


@pytest.mark.parametrize(("lhs", "rhs", "keywords", "error", "fragments"), WRONG_CALLS)
def test_wrong_calls(lhs, rhs, keywords, error, fragments):
    with pytest.raises(error) as caught:
        answer(overlap.all_gather_lhs_matmul, lhs, rhs, "x", mesh=oracle.make_mesh(x=2), **keywords)
    for fragment in fragments:
        assert fragment in str(caught.value)
    with pytest.raises(error):
        zeros = lambda tree: jax.tree.map(lambda x: x if x == 3 else jnp.zeros(x.shape, x.dtype), tree)  # noqa: E731
        body = lambda: overlap.all_gather_lhs_matmul(zeros(lhs), zeros(rhs), "x", **keywords)  # noqa: E731
        oracle.on_mesh(oracle.make_mesh(x=2), body, (), P())()


def test_explain_takes_all_forms():
    mesh, lhs = oracle.make_mesh(x=2), struct(3, 128, 64, dtype=E4M3)
    rhs = [struct(256, 64, dtype=E4M3), struct(136, 64, dtype=E4M3)]
    choice = answer(overlap.all_gather_lhs_matmul, lhs, rhs, "x", mesh=mesh, transpose_rhs=True,
                             lhs_scale=0.5, rhs_scale=[1.0, np.ones(136)], return_gathered=True, **FUSED)  # fmt: skip
    assert choice.implementation == "fused"
    by_xla = answer(overlap.all_gather_lhs_matmul, X, [W, struct(64, 201)], "x", mesh=mesh)
    assert by_xla.implementation == "xla"


# --- Gradients --------------------------------------------------------------------------------------------------------


def written_out(form, lhs, sides, rows, columns):
    """Computes the results in f32 as a user would without this library."""
    gathered = lax.all_gather(lhs, "x", axis=lhs.ndim - 2, tiled=True)
    outs = []
    for side, column in zip(sides, columns, strict=True):
        matrix = side.astype(jnp.float32)
        out = gathered.astype(jnp.float32) @ (matrix.T if form.transpose_rhs else matrix)
        out = out * lax.all_gather(rows, "x", axis=rows.ndim - 2, tiled=True) if "rows" in form.scales else out
        out = out * column if "columns" in form.scales else out
        outs.append(out * 0.5 if "scalar" in form.scales else out)
    return outs, [gathered[None]] if form.gathered else []


DIFFERENTIABLE = [
    Form(64, (64, 8), 64),
    Form(40, (72, 64, 8), 72, (2,), gathered=True, container=tuple),
    Form(40, (72,), 72, gathered=True, transpose_rhs=True, scales=("rows", "columns"), container=None),
    Form(40, (8, 72), 72, (2,), scales=("scalar", "rows", "columns")),
    Form(40, (16, 72), 80, dtype=E4M3, transpose_rhs=True, scales=("rows", "columns"), gathered=True),
]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("implementation", ["fused", "xla"])
@pytest.mark.parametrize("form", DIFFERENTIABLE, ids=str)
def test_gradients(form, implementation, devices):
    mesh, is_f8 = oracle.make_mesh(x=devices), jnp.dtype(form.dtype).itemsize == 1
    draw = lambda rng, *shape: (0.3 if is_f8 else 0.1) * rng.standard_normal(shape)  # noqa: E731
    given = several_sides_cases.put(form, mesh, several_sides_cases.operands(form, devices, 1, draw))
    config = F8 if is_f8 else SMALL
    call = several_sides_cases.call(form, implementation=implementation, config=config)

    def loss(op):
        def total(*operands):
            outs, gathered = op(*operands)
            # A different weight for each result and device, so that no result can pass for another.
            weighted = [(i + 2 + lax.axis_index("x")) * jnp.sin(out.astype(jnp.float32)) for i, out in enumerate(outs)]
            kept = [jnp.cos(3 * x.astype(jnp.float32)) * (1 + lax.axis_index("x")) for x in gathered]
            return sum(jnp.sum(x) for x in weighted + kept)

        return total

    def body(*operands):
        gradients = [
            jax.grad(loss(op), argnums=(0, 1, 2, 3), allow_int=True)(*operands)
            for op in (call, lambda *operands: written_out(form, *operands))
        ]
        worst = lambda a, b: oracle.worst(  # noqa: E731
            jnp.where((a == 0).all() & (b == 0).all(), 0.0, oracle.distance(a, b.astype(jnp.float32))), mesh
        )
        return [worst(a, b) for a, b in zip(*map(jax.tree.leaves, gradients), strict=True)]

    count = 2 + 2 * len(form.widths)
    with emulate(cores=2):
        errors = oracle.on_mesh(mesh, body, several_sides_cases.specs(form), [P()] * count)(*given)
    limit = 8e-2 if is_f8 else 1e-2
    assert max(map(float, errors)) < limit, [float(error) for error in errors]


# --- The order of tiles, and injected defects -------------------------------------------------------------------------


SCHEDULES = list(itertools.product([1, 3], [1, 2, 3], [1, 2], [(200, 8), (64,), (264, 136, 72)]))


@pytest.mark.parametrize(("devices", "batch", "cluster", "widths"), SCHEDULES)
def test_every_tile_of_every_side_and_batch_element_once(devices, batch, cluster, widths):
    for m_shard, order in itertools.product((200, 1, 256), ("m", "n")):
        config = overlap.Config(tile_n=64, cluster=cluster, order_minor=order, order_width=2)
        schedule = dataclasses.replace(
            AllGatherSchedule.of(devices, (batch, m_shard, 64), widths, 2, config), keeps_own=True
        )
        rows, columns = config.cluster_tile_m, config.tile_n
        found, raised = [], {}
        for index in range(schedule.pulled_chunks):
            step, row, _ = schedule.chunk(index)
            flag = schedule.flag(step, row)
            assert all(0 <= i < size for i, size in zip(flag, schedule.flags_shape, strict=True))
            raised[flag] = raised.get(flag, 0) + 1
        for index in range(schedule.tiles):
            step, row, column = schedule.tile(index)
            (element, m), (side, n) = schedule.batch_of(row), schedule.side_of(column)
            assert schedule.first_column(side) + n == column
            found.append((step, element, m, side, n))
            for block in range(m * rows // 128, min((m + 1) * rows // 128, schedule.row_blocks)):
                flag = schedule.flag(step, element * m_shard + block * 128) if step else None
                assert not step or raised[flag] == schedule.flag_target(block)
        grid = [(side, n) for side, width in enumerate(widths) for n in range(-(-width // columns))]
        assert sorted(found) == [
            (step, element, m, *place)
            for step, element, m, place in itertools.product(
                range(devices), range(batch), range(-(-m_shard // rows)), grid
            )
        ]
        # All chunks of a shard, also of the own shard, cover each of its elements once.
        origins = [schedule.origin(chunk) for chunk in range(schedule.chunks)]
        assert len(set(origins)) == len(origins)
        sizes = [size_of(schedule.chunking, row % m_shard, column) for row, column in origins]
        assert sum(rows * columns for rows, columns in sizes) == batch * m_shard * 64
        for me in range(devices):
            assert sorted(schedule.scratch_index(me, step) for step in range(devices)) == list(range(devices))


def test_right_sides_are_as_local_and_as_balanced_as_one_of_their_total_width():
    config = overlap.Config()
    several = AllGatherSchedule.of(4, (1024, 64), (4096, 1024, 1024), 2, config)
    one = AllGatherSchedule.of(4, (1024, 64), (6144,), 2, config)
    assert [several.tile(i) for i in range(several.tiles)] == [one.tile(i) for i in range(one.tiles)]


MIXED = Form(136, (72, 64), 72, (2,), gathered=True, scales=("rows", "columns"))


@TRANSPORTS
@pytest.mark.parametrize("seed", range(6))
def test_clean_under_many_schedules(seed, transport):
    form, mesh = MIXED, oracle.make_mesh(x=3)
    config = [CUT, SMALL][seed % 2]
    assert cuts(form, 3, 5, CUT)
    given = several_sides_cases.put(form, mesh, several_sides_cases.operands(form, 3))
    body = several_sides_cases.call(form, implementation="fused", config=config, transport=transport)
    fused = several_sides_cases.on_mesh(form, mesh, body)
    with emulate(cores=5 + seed % 3, completion=["late", "eager", "random"][seed // 2], scheduler="pct", seed=seed):
        fused(*given)


def one_flag_for_all_batch_elements(patch):
    flag = AllGatherSchedule.flag
    patch.setattr(AllGatherSchedule, "flag", lambda self, step, row: flag(self, step, self.batch_of_row(row)[1]))


def keep_the_own_shard_in_a_peers_place(patch):
    slot = AllGatherSchedule.scratch_index
    patch.setattr(
        AllGatherSchedule, "scratch_index", lambda self, me, step: slot(self, me, 1 if isinstance(step, int) else step)
    )


def leave_a_chunk_of_the_own_shard(patch):
    change_own_chunks(
        patch,
        lambda copy_chunks, number, numbers, *args, **kwargs: copy_chunks(number, (0, numbers[1] - 1), *args, **kwargs),
    )


def swap_the_sides(patch):
    side_of = AllGatherSchedule.side_of
    patch.setattr(AllGatherSchedule, "side_of", lambda self, n: (1 - side_of(self, n)[0], side_of(self, n)[1]))


def scale_by_the_wrong_shard(patch):
    first = AllGatherSchedule.first_column
    patch.setattr(AllGatherSchedule, "first_column", lambda self, side: first(self, 1 - side))


DEFECTS = [
    one_flag_for_all_batch_elements,
    keep_the_own_shard_in_a_peers_place,
    leave_a_chunk_of_the_own_shard,
    swap_the_sides,
    scale_by_the_wrong_shard,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda f: f.__name__)
def test_each_defect_is_noticed(defect, monkeypatch):
    """Either the emulator reports the defect, or the result differs from the oracle."""
    defect(monkeypatch)
    with pytest.raises((EmulationError, AssertionError)):
        check(MIXED, 2, 3, SMALL, completions=["late", "random", "late", "random"])


# --- Assembled -------------------------------------------------------------------------------------------------------


EVERYTHING = {"widths": "4096+1024+1024", "scales": "rows+columns", "batch": "2x2", "gathered": True}
RING = {"transport": "ring", "gathered": True}
ASSEMBLED = [  # dtype, shape, what is given
    ("f16", (1024, 4096, 4096), {"widths": "4096+1024+1024"}),
    ("bf16", (1024, 4096, 4096), EVERYTHING | {"stream_k": 2}),
    ("float8_e4m3fn", (1024, 4096, 4096), EVERYTHING | {"stream_k": 2, "transpose_rhs": True}),
    ("f16", (1024, 4096, 4096), RING),
    ("bf16", (1024, 4096, 4096), EVERYTHING | RING | {"stream_k": 2}),
    ("float8_e4m3fn", (1024, 4096, 4096), EVERYTHING | RING | {"stream_k": 2, "transpose_rhs": True}),
]


@pytest.mark.skipif(bool(assembly.unavailable_reason()), reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(("dtype", "shape", "given"), ASSEMBLED, ids=str)
def test_no_spills(dtype, shape, given):
    case = assembly.Case("tests.ops.several_sides_cases:assembled", devices=4, dtype=dtype, shape=shape, config=given)
    (report,) = assembly.assemble_case(case)
    assert report.spills == 0 and report.stack_frame_bytes == 0 and not report.remarks
    assert report.architecture == "sm_90a"
