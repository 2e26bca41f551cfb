"""What operations choose and say: the kernel, XLA or an explicit configuration."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import overlap
from overlap.choice import crossover, dispatch, model, space
from overlap.choice.problem import Problem
from overlap.collectives.gather.joined_schedule import JoinedSchedule
from overlap.collectives.gather.lhs_schedule import AllGatherSchedule
from overlap.kernels.target import Target
from tests.ops.contract import BF16, E4M3, F32, H200, JOINED, SMALL, Call, mesh_of, running, struct
from tests.ops.explained import answer
from tests.ops.test_refusals import ALL, EVERYWHERE, GATHER, GROUPED, SCATTER, explain, good
from tests.oracle import make_mesh

FUSED = {"implementation": "fused"}

# --- The choice -------------------------------------------------------------------------------------------------------


def measured(monkeypatch, *problems):
    monkeypatch.setattr(crossover, "measurements", lambda: tuple(crossover.Measured(p, 90.0, 100.0) for p in problems))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)


@pytest.mark.parametrize("op", ALL)
def test_the_kernel_is_chosen_where_it_is_measured_to_be_faster(op, monkeypatch):
    assert explain(op, *good(op)).implementation == "xla"  # On a CPU.
    asked = explain(op, *good(op), **FUSED)
    assert asked.implementation == "fused" and asked.source == "heuristic" and asked.config is not None
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: H200)
    measured(monkeypatch)
    unknown = explain(op, *good(op))
    assert unknown.implementation == "xla" and "not measured" in str(unknown)
    m, n, k = 128, 128 if op == "all_gather_rhs_matmul_n" else 256, 128 if op == "all_gather_rhs_matmul_k" else 64
    measured(monkeypatch, Problem(op, m, n, k, "bfloat16", "bfloat16", devices=1 if op == "matmul" else 2))
    # Measurements of blocks of rows do not apply to blocks of columns, nor any to other operations.
    assert [other for other in ALL if explain(other, *good(other)).implementation == "fused"] == [op]
    # An explicit `config=` means that the caller wants the kernel, and it is not changed.
    given = explain(op, *good(op), config=SMALL)
    assert given.config == SMALL and given.source == "given" and given.implementation == "fused"
    rhs = struct(good(op)[1].shape[0], 202)
    refused = explain(op, good(op)[0], rhs, config=SMALL)
    assert (refused.implementation == "xla" and "=20" in refused.reason) or "=10" in refused.reason
    assert refused.reason in str(refused)


@pytest.mark.one_jax
def test_groups_by_kernel_on_hopper(monkeypatch):
    """Without a measurement. Elsewhere by XLA, and it says why; on Blackwell by the kernel if the caller asks."""
    types = struct(4096, 2048), struct(16, 2048, 1536), struct(16, dtype=jnp.int32)
    found = {}
    for kind in ("NVIDIA H200", "NVIDIA B200", "NVIDIA A100"):
        monkeypatch.setattr(dispatch, "target", lambda mesh=None, kind=kind: Target("gpu", kind, 132))
        found[kind] = answer(overlap.grouped_matmul, *types)
    assert found["NVIDIA H200"].implementation == "fused"
    assert found["NVIDIA H200"].config.tile_m * found["NVIDIA H200"].config.tile_n >= 128 * 128
    assert {found[kind].implementation for kind in ("NVIDIA B200", "NVIDIA A100")} == {"xla"}
    assert "not measured" in found["NVIDIA B200"].reason and "Hopper" in found["NVIDIA A100"].reason
    monkeypatch.setattr(dispatch, "target", lambda mesh=None: Target("gpu", "NVIDIA B200", 148))
    asked = answer(overlap.grouped_matmul, *types, **FUSED)
    assert asked.implementation == "fused" and asked.config.tile_m == 128 and asked.config.cluster == 1
    # A caller who gives a config wants the kernel.
    for op in GROUPED:
        given = explain(op, *good(op), config=asked.config)
        assert (given.implementation, given.source, given.config) == ("fused", "given", asked.config)


def test_a_fallback_on_the_right_gpu_is_a_warning_that_is_said_once(hopper, caplog):
    for _ in range(2):
        explain(GATHER, struct(100, 64), struct(64, 513))
    (record,) = [r for r in caplog.records if r.name == "overlap" and r.levelname == "WARNING"]
    assert "n=513" in record.message


def test_scratch_of_a_scattered_sum(hopper):
    """In the result's dtype: the half of this device's product that is sent, and the half that arrives, in tiles."""
    for op, keywords in ((SCATTER, {}), ("matmul_reduce_scatter_n", {}), (SCATTER, {"preferred_element_type": F32}),
                         (SCATTER, {"transpose_lhs": True})):  # fmt: skip
        chosen = explain(op, struct(8192, 8192), struct(8192, 8192), **keywords, **FUSED)
        assert chosen.implementation == "fused" and chosen.source == "heuristic"
        assert (chosen.config.cluster, chosen.config.stream_k, chosen.config.split_k) == (1, 1, 1)
        half = (4096, 8192) if op == SCATTER else (8192, 4096)
        tile = chosen.config.tile_m, chosen.config.tile_n
        rows, columns = (-(-size // of_tile) * of_tile for size, of_tile in zip(half, tile, strict=True))
        assert chosen.scratch_bytes == 2 * rows * columns * (4 if "preferred_element_type" in keywords else 2)
        assert f"scratch: {chosen.scratch_bytes:,} bytes" in str(chosen)


def test_sums_for_all_in_blocks_or_in_one_shot(hopper):
    """Few rows in one shot: the own part, and a part from each device. Many in blocks: parts sent, and that arrive."""
    for m, one_shot, parts in ((16, True, 5), (8192, False, 2 * 3 / 4)):
        for dtype in (BF16, F32):
            chosen = explain(
                EVERYWHERE, struct(m, 8192), struct(8192, 8192), devices=4, preferred_element_type=dtype, **FUSED
            )
            assert chosen.config.one_shot == one_shot
            columns = -(-8192 // chosen.config.tile_n) * chosen.config.tile_n  # Counted in whole tiles.
            assert chosen.scratch_bytes == m * columns * jnp.dtype(dtype).itemsize * parts
    for config in (SMALL, SMALL.replace(one_shot=True)):
        refused = explain(EVERYWHERE, struct(127, 64), struct(64, 200), devices=4, config=config)
        assert refused.implementation == ("fused" if config.one_shot else "xla"), str(refused)
        assert config.one_shot or "m=127" in refused.reason
    # Without `config=`, the library chooses one.
    assert explain(EVERYWHERE, struct(127, 64), struct(64, 200), devices=4, **FUSED).config.one_shot


def test_all_forms_of_a_gather_are_explained(hopper):
    lhs, rhs = struct(3, 128, 64, dtype=E4M3), [struct(256, 64, dtype=E4M3), struct(136, 64, dtype=E4M3)]
    scales = {"lhs_scale": 0.5, "rhs_scale": [1.0, np.ones(136)]}
    choice = explain(GATHER, lhs, rhs, transpose_rhs=True, return_gathered=True, **scales, **FUSED)
    assert choice.implementation == "fused"
    # For weights gathered along k, tiles go through all rows before the next columns.
    chosen = explain("all_gather_rhs_matmul_k", struct(8192, 8192), struct(4096, 8192), **FUSED)
    assert chosen.config.order_minor == "n"
    # Several right operands are chosen for as one of their total width, and leading dimensions as more rows.
    of_rhs = lambda m, *rhs: explain(GATHER, struct(m, 4096), [struct(4096, n) for n in rhs], **FUSED).config  # noqa: E731
    assert all(of_rhs(m, 128, 3968) == of_rhs(m, 4096) for m in (16, 256, 2048))
    of_lead = lambda *m: explain("all_gather_rhs_matmul_n", struct(*m, 4096), struct(4096, 2048), **FUSED).config  # noqa: E731
    assert of_lead(16, 128) == of_lead(2048) != of_lead(128)
    # Tiles of several right operands are walked as those of one of their total width.
    several, one = (AllGatherSchedule.of(4, (1024, 64), n, 2, overlap.Config()) for n in ((4096, 1024, 1024), (6144,)))
    assert [several.tile(i) for i in range(several.tiles)] == [one.tile(i) for i in range(one.tiles)]


def test_a_tuple_of_axes_is_chosen_for_as_an_axis_of_as_many_devices(hopper):
    operands, order = (struct(1024, 4096), struct(4096, 4096)), (2, 0, 3, 1)
    two, one = mesh_of({"a": 2, "b": 2}, order), mesh_of({"x": 4}, order)
    by_tuple = answer(overlap.all_gather_lhs_matmul, *operands, ("b", "a"), mesh=two)
    assert by_tuple == answer(overlap.all_gather_lhs_matmul, *operands, "x", mesh=one)
    assert by_tuple.implementation == "fused"
    half = answer(overlap.all_gather_lhs_matmul, *operands, ("b",), mesh=two)
    assert half == explain(GATHER, *operands)


def test_leading_dimensions_are_chosen_for_as_more_rows():
    """Products of the small GPT of `make train`, with 16 sequences of 2048 rows, on four H100s that are not there."""
    h100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((4,), ("x",), abstract_device=h100)
    gather, scatter = overlap.all_gather_lhs_matmul, overlap.matmul_reduce_scatter
    for op, rows, (k, n) in ((gather, (16, 512), (2048, 1536)), (scatter, (16, 2048), (1536, 2048))):
        divided, whole = (
            answer(op, struct(*of, k), struct(k, n), "x", mesh=mesh) for of in (rows, (rows[0] * rows[1],))
        )
        assert (divided.implementation, divided.cause) == ("fused", crossover.Cause.PREDICTED)
        assert (divided.reason, divided.ratio) == (whole.reason, whole.ratio) and divided.ratio > 1.2
    # 128 sequences of 16 rows of a device fill a quarter of their tiles.
    few, whole = (answer(gather, struct(*of, 2048), struct(2048, 1536), "x", mesh=mesh) for of in ((128, 16), (2048,)))
    assert few.implementation == "xla" and few.ratio == pytest.approx(whole.ratio / 4) and "only 16 rows" in few.reason


def test_meshes_of_devices_and_abstract_ones_and_types_for_scales(hopper):
    types = {"lhs_scale": struct(4096, 1, dtype=F32), "rhs_scale": struct(4096, dtype=F32)}
    operands = struct(4096, 4096), struct(4096, 4096)
    mesh = make_mesh(x=2)
    choices = [answer(overlap.all_gather_lhs_matmul, *operands, "x", mesh=m) for m in (mesh, mesh.abstract_mesh)]
    assert choices[0].implementation == choices[1].implementation
    choice = answer(overlap.matmul, *operands, mesh=mesh, **types)
    assert choice.target == H200 and choice.implementation == "fused"


def test_equal_calls_are_one_row_and_jitted_ones_are_traced_again():
    x = struct(512, 512)
    twice = jax.jit(lambda x: overlap.matmul(overlap.matmul(x, x), x))
    for _ in range(2):
        answers = overlap.explain(twice, x)
        row = str(answers).splitlines()[1].split()[:4]
        assert len(answers) == 2 and row == ["2", "matmul", "512x512x512", "bfloat16"]
    assert str(overlap.explain(jnp.tanh, x)) == "no call of an operation of this library"


# --- Few rows of each shard -------------------------------------------------------------------------------------------


def few(m, n=8192, k=8192, devices=4, **fields):
    return Problem(GATHER, m, n, k, "bfloat16", "bfloat16", devices=devices, **fields)


@pytest.mark.one_jax
def test_one_product_over_all_shards_is_chosen_for_few_rows_and_not_for_many():
    for n, k, devices, m in itertools.product((1024, 8192), (4096,), (2, 8), (1, 16, 512, 8192)):
        chosen = space.heuristic(few(m, n, k, devices), H200)
        assert chosen is not None and chosen.joined == (m <= 16)


@pytest.mark.one_jax
def test_the_space_has_both_where_both_make_sense():
    assert {config.joined for config in space.candidates(few(16), H200)} == {False, True}
    # Not: shards that fill tiles of their own, many rows, one device, other operations, plain products.
    others = [few(1024), few(257), few(16, devices=1), dataclasses.replace(few(16), op="all_gather_rhs_matmul_n")]
    for other in [*others, dataclasses.replace(few(16), op="matmul", devices=1)]:
        assert {config.joined for config in space.candidates(other, H200)} == {False}
    # A batch whose elements have few rows counts as few rows.
    chosen = space.heuristic(few(1, batch=16), H200)
    assert chosen is not None and chosen.joined


@pytest.mark.one_jax
def test_the_model_counts_the_tiles_of_the_kernel():
    for m, devices, tile_m, n in itertools.product((1, 16, 40, 100), (2, 3, 8), (64, 128), (128, 200)):
        config = JOINED.replace(tile_m=tile_m)
        schedule = JoinedSchedule.of(devices, (m, 64), (n,), 2, config)
        assert model.work_of(config, few(m, n, 64, devices), H200).tiles == schedule.product.tiles


def test_the_weights_do_not_wait_for_the_gather():
    """The producer requests right-operand tiles for all stages before it waits for the first row."""
    steps, call = 4, Call(GATHER, 16, 128, 64 * 4, config=JOINED.replace(stages=5))
    arrays = call.arrays(2)
    with running(record=True) as run:
        call.program(make_mesh(x=2), arrays)(arrays)
    # There is one tile, which CTA 0 computes.
    events = sorted((e for e in run.events if e.cta == 0 and e.thread == "wg2.warp0"), key=lambda e: e.start)
    for device in range(2):
        kinds = [e.target.split("{")[0] if e.kind == "copy" else e.source for e in events if e.device == device]
        first_wait = next(i for i, kind in enumerate(kinds) if kind.startswith("semaphore"))
        assert kinds[:first_wait] == ["buffers.rhs"] * (2 * steps)  # Two boxes per operand tile.
        assert kinds[first_wait + 1 : first_wait + 1 + steps] == ["buffers.lhs"] * steps


# --- Defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_the_usual_configuration():
    """The configuration that measurements found best when nothing is known; tables and tests rely on it."""
    assert dataclasses.asdict(overlap.Config()) == {
        "tile_m": 128, "tile_n": 256, "stages": 4, "schedule": "cooperative", "swap_operands": False,
        "order_minor": "m", "order_width": 8, "stream_k": 1, "split_k": 1, "cluster": 1, "cluster_along": "m",
        "joined": False, "one_shot": False, "chunk_bytes": 8192, "chunk_buffers": 2,
    }  # fmt: skip
    config = overlap.Config(chunk_buffers=4, tile_n=128)
    assert overlap.Config(tile_n=128).replace(chunk_buffers=4) == config
    with pytest.raises(TypeError, match="tile_x"):
        config.replace(tile_x=1)


def test_a_bias_keeps_its_bits():
    lhs, rhs = jnp.ones((64, 64), BF16), jnp.full((64, 128), -4, BF16)
    for implementation in ("fused", "xla"):
        with running():
            out = overlap.matmul(lhs, rhs, bias=jnp.full(128, 256.5), implementation=implementation)
        assert float(out[0, 0]) == 0.5


def test_64_bits_by_xla_are_computed_in_64_bits():
    with jax.enable_x64(True):
        lhs, rhs = (np.random.default_rng(i).standard_normal(s) for i, s in enumerate(((8, 16), (16, 24))))
        out = overlap.matmul(
            lhs, rhs, lhs_scale=1 / 3, bias=np.full(24, 1e-9), addend=np.ones((8, 24)),
            activation=lambda y: y * np.sqrt(2.0),
        )  # fmt: skip
        np.testing.assert_allclose(out, np.sqrt(2.0) * (lhs @ rhs / 3 + 1e-9 + 1), rtol=1e-12)
        assert out.dtype == np.float64
