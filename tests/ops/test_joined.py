"""Tests gathers with few rows per shard as one product over the rows of all shards: schedule, results, choice."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import overlap
from overlap.choice import dispatch, model, space
from overlap.choice.problem import Problem
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.emulation import emulate
from overlap.emulation.state.races import RaceDetector
from tests import oracle
from tests.assembly import assembly
from tests.choice.tuning_cases import H200
from tests.ops import several_sides_cases
from tests.ops.explained import answer
from tests.ops.several_sides_cases import Form
from tests.protocol.test_schedule import size_of

ONE = overlap.Config(tile_m=64, tile_n=128, stages=2, joined=True)
CUT = dataclasses.replace(ONE, stages=3, stream_k=3)
MANY = dataclasses.replace(ONE, tile_m=128, tile_n=64, order_minor="n", order_width=2)
FINE = ONE.replace(chunk_bytes=512, chunk_buffers=3)
F8 = CUT
E4M3, E5M2, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16
KERNEL = "overlap_all_gather_lhs_matmul_joined"


# --- The schedule -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("m_shard", "k", "chunk_bytes"),
    [(1, 8, 8192), (3, 1032, 1024), (16, 512, 8192), (40, 64, 512), (96, 64, 8192), (131, 64, 4096), (6, 1016, 1024)],
)
@pytest.mark.parametrize("tile_m", [64, 128])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_row_is_copied_once_and_every_flag_raised_as_announced(devices, m_shard, k, chunk_bytes, tile_m, scaled):
    config = overlap.Config(tile_m=tile_m, chunk_bytes=chunk_bytes)
    schedule = JoinedSchedule.of(devices, (m_shard, k), (256,), 2, config, scaled=scaled)
    for me in range(devices):
        copied, raised = np.zeros((devices * m_shard, k), int), np.zeros(schedule.flags_shape, int)
        for index in range(schedule.chunks):
            step, row, column = schedule.chunk(index)
            # The peers' chunks come first, since their transfer takes longest.
            assert (step > 0) == (index < schedule.pulled_chunks)
            rows, columns = size_of(schedule.chunking, row, column)
            assert row + rows <= m_shard and column + columns <= k
            first = schedule.row(me, step, row)
            assert first == (me + step) % devices * m_shard + row
            last = first + rows - 1
            copied[first : last + 1, column : column + columns] += 1
            assert schedule.flag(first) == schedule.flag(last) == first // tile_m
            raised[schedule.flag(first)] += 1
        assert (copied == 1).all()
        scales = np.zeros(devices * m_shard, int)
        for index in range(schedule.scale_transfers):
            step, row = schedule.scale_transfer(index)
            assert step < devices and row + schedule.scale_rows <= m_shard
            first = schedule.row(me, step, row)
            scales[first : first + schedule.scale_rows] += 1
            assert schedule.flag(first) == schedule.flag(first + schedule.scale_rows - 1)
            raised[schedule.flag(first)] += 1
        assert (scales == scaled).all()
        assert [schedule.flag_target(flag) for flag in range(len(raised))] == list(raised)
    assert schedule.product.tiles == -(-devices * m_shard // tile_m)


# --- Results ----------------------------------------------------------------------------------------------------------


def check(form, devices, cores, config, completions=("late", "random"), kernel=True, **settings):
    """Compares every bit under several schedules, with two launches in each."""
    mesh = oracle.make_mesh(x=devices)
    body = several_sides_cases.call(form, implementation="fused", config=config)
    fused = several_sides_cases.on_mesh(form, mesh, body)
    arrays = [several_sides_cases.operands(form, devices, launch) for launch in range(2)]
    given = [several_sides_cases.put(form, mesh, of_launch) for of_launch in arrays]
    for seed, completion in enumerate(completions):
        with emulate(cores=cores, completion=completion, seed=seed, **settings) as run:
            results = [fused(*of_launch) for of_launch in given]
            run.check()
        for of_launch, result in zip(arrays, results, strict=True):
            several_sides_cases.assert_exact(form, of_launch, result)
    with emulate(cores=cores):
        assert (KERNEL in str(jax.make_jaxpr(fused)(*given[0]))) == kernel


SIZES = [  # devices, cores, form, config
    (2, 2, Form(16, (128,), 128, container=None), ONE),
    (4, 3, Form(16, (200,), 264, container=None), CUT),
    (8, 3, Form(16, (136,), 520, container=None), CUT),  # Two rows of tiles.
    (3, 4, Form(50, (72,), 136, container=None), MANY),  # A tile contains rows of all three shards.
    (8, 2, Form(3, (72,), 1032, container=None), FINE),  # Chunks are parts of rows.
    (2, 7, Form(1, (8,), 8, container=None), ONE),  # More CTAs than chunks or tiles.
    (4, 3, Form(1, (24,), 200, container=None), CUT),
    (2, 1, Form(70, (136,), 136, container=None), ONE),  # One CTA does all the work.
    (1, 2, Form(16, (128,), 128, container=None), CUT),  # Nothing to gather: a plain product.
]


@pytest.mark.parametrize(("devices", "cores", "form", "config"), SIZES, ids=str)
def test_any_size(devices, cores, form, config):
    check(form, devices, cores, config, kernel=devices > 1)


FORMS = [
    (3, 5, Form(16, (136, 8, 72), 200), CUT),
    (4, 3, Form(5, (64,), 136, gathered=True, container=None, dtype=BF16), FINE),
    (3, 4, Form(24, (72, 64), 136, transpose_rhs=True, scales=("scalar", "rows", "columns")), ONE),
    (4, 3, Form(16, (136, 72), 272, dtype=E4M3, transpose_rhs=True, scales=("rows", "columns"), gathered=True), F8),
    (2, 3, Form(24, (128,), 144, dtype=E5M2, rhs_dtype=E4M3, transpose_rhs=True, container=None), F8),
    (2, 3, Form(1, (72,), 72, (4,), container=None), ONE),  # A batch of single rows.
    (3, 4, Form(5, (136, 8), 136, (2, 3), gathered=True, scales=("rows", "columns")), CUT),
    (2, 3, Form(8, (64,), 64, (1, 1), gathered=True), ONE),
]


@pytest.mark.parametrize(("devices", "cores", "form", "config"), FORMS, ids=str)
def test_all_forms(devices, cores, form, config):
    check(form, devices, cores, config, completions=("random",))


TALL = dataclasses.replace(ONE, tile_m=256)


@pytest.mark.parametrize(("m", "config"), [(96, MANY), (33, MANY), (20, TALL)], ids=str)
def test_no_scale_is_read_that_nobody_has_written(m, config, monkeypatch):
    """Tiles, or blocks of 64 rows, end below the last row: even wide loads must not read scales beyond it."""
    access = RaceDetector.access

    def whole(self, access_, knowledge):
        view = access_.view
        if not access_.write and not view.buffer.written and view.array.dtype == np.float32:
            writes, _ = view.cells()
            assert np.all(writes), f"a part of {view} is not written"
        access(self, access_, knowledge)

    monkeypatch.setattr(RaceDetector, "access", whole)
    check(Form(m, (72,), 72, scales=("rows", "columns")), 2, 3, config, completions=("random",))


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_real_numbers_are_as_exact_as_unfused_ones(devices):
    mesh = oracle.make_mesh(x=devices)
    with emulate(cores=3):
        measure = oracle.errors(mesh, lambda a, b: oracle.fused(a, b, config=CUT))
        oracle.assert_close(measure(*oracle.operands(mesh, (16, 128, 256), BF16, 1)))


def test_repeated_launches_agree_bit_for_bit():
    mesh = oracle.make_mesh(x=3)
    lhs, rhs = oracle.operands(mesh, (16, 128, 512), jnp.float16, seed=4)
    results = []
    for seed, completion in enumerate(("late", "eager", "random")):
        with emulate(cores=3, seed=seed, completion=completion):
            results.append(np.asarray(oracle.on_mesh(mesh, lambda a, b: oracle.fused(a, b, config=CUT))(lhs, rhs)))
    assert all((r == results[0]).all() for r in results)


def test_in_a_loop_beside_another_collective_with_operands_that_change():
    mesh = oracle.make_mesh(x=2)

    def body(lhs, rhs):
        def step(lhs, _):
            actual = oracle.fused(lhs, rhs, config=CUT)
            expected = oracle.unfused(lhs, rhs).astype(jnp.float32)
            return -lhs, oracle.worst(oracle.distance(actual, expected), mesh)

        return lax.scan(step, lhs, length=3)[1]

    with emulate(cores=3):
        errors = oracle.on_mesh(mesh, body, out_specs=P(None))(*oracle.operands(mesh, (16, 128, 256), BF16, seed=5))
    assert float(errors.max()) < 5e-3


def test_one_axis_of_a_larger_mesh():
    mesh = oracle.make_mesh(data=2, x=2)

    def measure(lhs, rhs):
        lhs = lhs * (1 + lax.axis_index("data")).astype(lhs.dtype)
        return oracle.worst(oracle.distance(oracle.fused(lhs, rhs, config=CUT), oracle.exact(lhs, rhs)), mesh)

    with emulate(cores=3):
        error = oracle.on_mesh(mesh, measure, out_specs=P())(*oracle.operands(mesh, (16, 128, 256), BF16, seed=3))
    assert float(error) < 5e-3


def test_gradients():
    mesh = oracle.make_mesh(x=2)

    def loss(op):
        return lambda lhs, rhs: jnp.sum(jnp.sin(op(lhs, rhs).astype(jnp.float32)))

    def body(lhs, rhs):
        ours = jax.grad(loss(lambda a, b: oracle.fused(a, b, config=ONE)), argnums=(0, 1))(lhs, rhs)
        theirs = jax.grad(loss(oracle.unfused), argnums=(0, 1))(lhs, rhs)
        return [
            oracle.worst(oracle.distance(a, b.astype(jnp.float32)), mesh) for a, b in zip(ours, theirs, strict=True)
        ]

    lhs, rhs = oracle.operands(mesh, (16, 128, 64), BF16, seed=6)
    with emulate(cores=2):
        errors = oracle.on_mesh(mesh, body, out_specs=[P(), P()])(lhs * 0.1, rhs * 0.1)
    assert max(map(float, errors)) < 2e-2


def test_the_ring_has_a_tile_for_each_shard():
    """The ring passes on operand tiles, and each must be of a single shard. The result of the call is the same."""
    form, mesh = Form(16, (72,), 136, container=None), oracle.make_mesh(x=3)
    arrays = several_sides_cases.operands(form, 3)
    body = several_sides_cases.call(form, implementation="fused", config=ONE, transport="ring")
    group = several_sides_cases.on_mesh(form, mesh, body)
    with emulate(cores=3):
        given = several_sides_cases.put(form, mesh, arrays)
        assert KERNEL not in str(jax.make_jaxpr(group)(*given))
        results = group(*given)
    several_sides_cases.assert_exact(form, arrays, results)


@pytest.mark.parametrize(("stages", "steps"), [(2, 2), (3, 3), (5, 4)])
def test_the_weights_do_not_wait_for_the_gather(stages, steps):
    """The producer requests right-operand tiles for all stages before it waits for the first row."""
    form, mesh = Form(16, (128,), 64 * 4, container=None), oracle.make_mesh(x=2)
    body = several_sides_cases.call(form, implementation="fused", config=dataclasses.replace(ONE, stages=stages))
    with emulate(cores=2, record=True) as run:
        given = several_sides_cases.put(form, mesh, several_sides_cases.operands(form, 2))
        several_sides_cases.on_mesh(form, mesh, body)(*given)
    # There is one tile, which CTA 0 computes.
    events = sorted((e for e in run.events if e.cta == 0 and e.thread == "wg2.warp0"), key=lambda e: e.start)
    for device in range(2):
        kinds = [e.target.split("{")[0] if e.kind == "copy" else e.source for e in events if e.device == device]
        first_wait = next(i for i, kind in enumerate(kinds) if kind.startswith("semaphore"))
        assert kinds[:first_wait] == ["buffers.rhs"] * (2 * steps)  # Two boxes per operand tile.
        assert kinds[first_wait + 1 : first_wait + 1 + steps] == ["buffers.lhs"] * steps


# --- Assembled --------------------------------------------------------------------------------------------------------

SIDES = {"widths": "1024+256+256", "scales": "rows+columns", "gathered": True}
ASSEMBLED = [  # devices, dtype, shape, given operands
    (2, "bf16", (16, 8192, 8192), {"tile_m": 64, "tile_n": 256, "stream_k": 4}),
    (8, "f16", (32, 1024, 4096), {"tile_m": 128, "tile_n": 128, "stages": 5, "stream_k": 8}),
    (4, "bf16", (64, 4096, 4104), {"tile_m": 256, "tile_n": 128, "stages": 3}),
    (4, "bf16", (3, 1024, 4096), SIDES | {"tile_m": 64, "tile_n": 128, "stream_k": 6, "batch": "2x2"}),
    (4, "f16", (16, 1024, 4096), SIDES | {"tile_m": 64, "tile_n": 256, "stream_k": 8, "transpose_rhs": True}),
    (8, "float8_e4m3fn", (16, 1024, 4096), SIDES | {"tile_m": 64, "stream_k": 8,
                                                    "transpose_rhs": True}),
]  # fmt: skip


@pytest.mark.skipif(bool(assembly.unavailable_reason()), reason=str(assembly.unavailable_reason()))
@pytest.mark.parametrize(("devices", "dtype", "shape", "given"), ASSEMBLED, ids=str)
def test_no_spills(devices, dtype, shape, given):
    case = assembly.Case(
        "tests.ops.several_sides_cases:assembled", devices, shape, dtype, config=given | {"joined": True}
    )  # fmt: skip
    (report,) = assembly.assemble_case(case)
    assert report.name == KERNEL and report.architecture == "sm_90a"
    assert report.spills == 0 and report.stack_frame_bytes == 0 and not report.remarks


# --- When it is chosen ------------------------------------------------------------------------------------------------


def gather(m, n=8192, k=8192, devices=4, **fields):
    return Problem("all_gather_lhs_matmul", m, n, k, "bfloat16", "bfloat16", devices=devices, **fields)


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(1024, 4096), (4096, 4096), (8192, 8192)])
def test_it_is_chosen_for_few_rows_and_not_for_many(devices, n, k):
    for m in (1, 8, 16):
        chosen = space.heuristic(gather(m, n, k, devices), H200)
        assert chosen is not None and chosen.joined
    for m in (512, 1024, 8192):
        chosen = space.heuristic(gather(m, n, k, devices), H200)
        assert chosen is not None and not chosen.joined


def test_the_space_has_both_where_both_make_sense():
    assert {config.joined for config in space.candidates(gather(16), H200)} == {False, True}
    # Not chosen: shards that fill tiles of their own, many rows, one device, other operations, plain products.
    others = [gather(1024), gather(257), gather(16, devices=1)]
    others += [dataclasses.replace(gather(16), op="all_gather_rhs_matmul_n")]
    others += [dataclasses.replace(gather(16), op="matmul", devices=1)]
    for other in others:
        assert {config.joined for config in space.candidates(other, H200)} == {False}
    # A batch whose elements have few rows counts as few rows.
    chosen = space.heuristic(gather(1, batch=16), H200)
    assert chosen is not None and chosen.joined


def test_the_model_counts_the_tiles_of_the_kernel():
    for m, devices, tile_m, n in itertools.product((1, 16, 40, 100), (2, 3, 8), (64, 128), (128, 200)):
        config = dataclasses.replace(ONE, tile_m=tile_m)
        schedule = JoinedSchedule.of(devices, (m, 64), (n,), 2, config)
        assert model.work_of(config, gather(m, n, 64, devices), H200).tiles == schedule.product.tiles


def test_explain_says_so(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    x, w = jax.ShapeDtypeStruct((16, 4096), BF16), jax.ShapeDtypeStruct((4096, 4096), BF16)
    mesh = oracle.make_mesh(x=4)
    choice = answer(overlap.all_gather_lhs_matmul, x, w, "x", mesh=mesh, implementation="fused")
    assert choice.config is not None and choice.config.joined and "joined=True" in str(choice)


def test_the_field_is_checked():
    with pytest.raises(ValueError, match="`joined` must be True or False, got 1"):
        overlap.Config(joined=1)  # pyright: ignore[reportArgumentType]
