"""Tuning without measuring: the search space, the heuristic, the tables, and the choice for a call."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import pathlib

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.choice import choose, model, space, tables
from overlap.choice.problem import Problem, bucket
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from overlap.tuning import search
from overlap.tuning.bench import Bench
from tests.choice.tuning_cases import H200, SHAPES, entry, no_tables, problem

__all__ = ["no_tables"]
pytestmark = pytest.mark.usefixtures("no_tables")


# --- The space and the heuristic --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("devices", [1, 8])
def test_candidates_are_valid_few_and_different(shape, devices):
    of = problem(shape, devices=devices, op="matmul" if devices == 1 else "all_gather_lhs_matmul")
    configs = space.candidates(of, H200)
    assert 20 < len(configs) < 1000
    assert len(set(configs)) == len(configs)
    for config in configs:
        of.check(config, H200)
    assert len({(config.tile_m, config.tile_n) for config in configs}) > 2
    assert devices == 1 or len({config.chunk_bytes for config in configs}) > 1
    assert configs[0] == space.heuristic(of, H200)


def test_every_field_of_the_space_is_a_field_of_the_config():
    names = vars(Config()).keys()
    assert {*space.SHAPE, *space.FINE, *space.CHUNKS} <= names
    # Put a new field into the space, or here.
    assert names - {*space.SHAPE, *space.FINE, *space.CHUNKS} == {"stages", "cluster_along"}


def test_the_heuristic_knows_the_usual_cases():
    def tile(shape, **fields):
        config = space.heuristic(problem(shape, **fields), H200)
        assert config is not None
        return config.tile_m, config.tile_n, config.split_k

    def fields(shape, **fields):
        config = space.heuristic(problem(shape, **fields), H200)
        assert config is not None
        return config

    # Large problem: a large tile, and warpgroups that take turns, or the tile with the most work per byte.
    rows, columns, cut = tile("8192x8192x8192")
    assert rows * columns >= 128 * 128 and cut == 1
    # 3.4 waves of the largest tiles: the last wave is cut, or avoided by tiles of half the size or with other rows.
    config = fields("4096x3584x8192")
    assert config.stream_k > 1 or config.swap_operands or config.in_turn
    assert fields("4096x4096x4096").stream_k == 1
    # Small k: one warpgroup stores while the other multiplies.
    assert fields("4096x32768x512").schedule == "pingpong"
    # Three tiles and much depth: the CTAs of a cluster compute a tile together.
    assert fields("64x384x9152").ctas_per_tile == 4
    # 32 tiles on 132 cores: the contraction is split, but not in a collective.
    config = fields("1024x1024x14336")
    assert config.split_k > 1 or config.ctas_per_tile > 1
    assert tile("1024x1024x14336", devices=2)[2] == 1
    # Few rows: the rest of a tile is not loaded. So take the narrowest tile that fills the cores, without cutting.
    assert tile("64x8192x8192") == (128, 64, 1)


def test_the_model_counts_waves_and_partial_tiles():
    def waves(m, n, **fields):
        config = Config(tile_m=128, tile_n=128, **fields)
        return model.waves(config, problem(f"{m}x{n}x4096"), H200)

    assert waves(128 * 132, 128) == 1
    assert waves(128 * 132 + 1, 128) == 2
    assert waves(1, 1, split_k=133) == 2
    assert waves(128 * 198, 128) == 2
    assert waves(128 * 198, 128, stream_k=2) == 1.5
    one, two = (model.predicted_us(Config(), problem(f"{m}x4096x4096"), H200) for m in (1024, 1152))
    # In the second wave few cores draw little power, and run at higher clocks.
    assert one * 1.5 < two < one * 2


def test_the_model_counts_empty_rows_and_weights_that_are_read_again():
    def us(shape, config, **fields):
        return model.predicted_us(config, problem(shape, **fields), H200)

    # Two tiles along m, the second nearly without rows: slower than two full tiles.
    narrow = Config(tile_n=64, stages=8)
    assert us("136x8192x8192", narrow) > 1.2 * us("256x8192x8192", narrow)
    # Half a tile is not padded: only half of it is loaded.
    assert us("64x8192x8192", narrow) < us("128x8192x8192", narrow)
    # A tile for each shard loads the weights from memory for each shard, unless they stay in the L2.
    apart = Config(tile_m=64, tile_n=128, stages=8)
    together = Config(tile_m=64, tile_n=128, stages=8, joined=True, stream_k=2)
    gathered = {"op": "all_gather_lhs_matmul", "devices": 2}
    assert us("16x8192x8192", apart, **gathered) > 1.5 * us("16x8192x8192", together, **gathered)
    assert us("16x4096x4096", apart, **gathered) < 1.2 * us("16x4096x4096", together, **gathered)


_sizes = st.builds(
    lambda blocks, odd: max(blocks * 64 + odd, 1), st.integers(0, 130), st.sampled_from([0, 0, 0, 1, 8, -3])
)
_problems = st.builds(
    Problem, st.just("matmul"), _sizes, _sizes, _sizes,
    st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float32"]), st.sampled_from(["bfloat16", "float32"]),
    st.sampled_from([1, 1, 2, 8]), st.sampled_from(["nn", "nt", "tn", "tt"]), st.sampled_from([1, 1, 3]),
)  # fmt: skip
_targets = st.builds(Target, st.just("gpu"), st.just("NVIDIA H200"), st.integers(1, 148), st.integers(40_000, 232_448))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(_problems, _targets)
def test_the_heuristic_serves_what_any_configuration_serves(of, target):
    chosen = space.heuristic(of, target)
    if chosen is not None:
        of.check(chosen, target)
        assert model.predicted_us(chosen, of, target) > 0
        return
    names = ("tile_m", "tile_n", "stages")
    every = {**space.SHAPE, **space.FINE, "stages": space.STAGES}
    for values in itertools.product(*(every[name] for name in names)):
        config = Config(**dict(zip(names, values, strict=True)))
        assert not of.accepts(config, target), config


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_buckets_are_monotone_and_an_eighth_wide(a, b):
    assert a <= bucket(a) == bucket(bucket(a))
    assert bucket(a) <= max(16, a * 9 / 8)
    assert (bucket(a) <= bucket(b)) or a > b


# --- Tables -----------------------------------------------------------------------------------------------------------


def test_a_table_reads_back_what_was_added(tmp_path):
    path = tmp_path / "new" / "table.json"
    entries = [entry(problem(shape), tried=7, date="2026-11-21") for shape in SHAPES]
    tables.add(path, entries[:2])
    tables.add(path, entries[2:])
    assert sorted(tables.read(path), key=str) == sorted(entries, key=str)
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    assert len(path.read_text().splitlines()) == len(entries) + 2  # One line per entry, for diffs.


def test_a_partial_result_does_not_replace_a_complete_one(tmp_path):
    path = tmp_path / "table.json"
    of = problem()
    for us, complete, expected in ((5.0, False, 5.0), (9.0, True, 9.0), (4.0, False, 9.0), (8.0, True, 8.0)):
        tables.add(path, [entry(of, us=us, complete=complete)])
        assert [e.us for e in tables.read(path)] == [expected]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    tables.add(path, [entry(problem())])
    before = path.read_text()

    def interrupt(*_):
        raise KeyboardInterrupt

    for step in ("chmod", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(tables.os, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                tables.add(path, [entry(problem("128x128x128"))])
        assert path.read_text() == before
        assert [p.name for p in tmp_path.iterdir()] == ["table.json"]


def test_the_shipped_tables_hold_what_the_kernels_accept(monkeypatch):
    monkeypatch.setattr(tables, "SHIPPED", pathlib.Path(tables.__file__).parent / "tables")
    files = list(tables.SHIPPED.glob("*.json"))
    assert files
    for path in files:
        lines = json.loads(path.read_text())["entries"]
        entries = tables.read(path)
        assert len(entries) == len(lines)
        for e in entries:
            e.problem.check(e.config, Target("gpu", e.kind, 132))


# --- The choice -------------------------------------------------------------------------------------------------------


def choice(of=None, target=H200):
    return choose.choose_config(of or problem(), target)


def test_the_users_table_comes_before_the_shipped_one_and_that_before_the_heuristic():
    of = problem()
    assert choice() == (space.heuristic(of, H200), "heuristic")
    tables.add(tables.SHIPPED / "h200.json", [entry(of, Config(stages=2))])
    assert choice() == (Config(stages=2), f"shipped table {tables.SHIPPED}/h200.json: 4096x8192x4096")
    tables.add(tables.user_file(H200.kind), [entry(of, Config(stages=3))])
    assert choice() == (Config(stages=3), f"table {tables.user_file(H200.kind)}: 4096x8192x4096")


def test_a_table_serves_its_bucket_and_the_nearest_entry_wins():
    near, far = problem("4096x8192x4096"), problem("3840x8192x4096")
    file = tables.user_file(H200.kind)
    tables.add(file, [entry(near, Config(stages=3)), entry(far, Config(stages=2))])
    assert choice(problem("3968x8192x4096"))[0] == Config(stages=3)
    assert choice(problem("4096x8192x3968"))[0] == Config(stages=3)
    assert choice(problem("3840x8192x4096"))[0] == Config(stages=2)
    for other in (
        problem("4224x8192x4096"), problem(out_dtype="float32"), problem(layout="nt"),
        problem(devices=2), problem(batch=2), problem(op="all_gather_lhs_matmul"),
    ):  # fmt: skip
        assert choice(other)[1] == "heuristic"
    # The two 16-bit dtypes serve each other; the problem's own dtype comes first.
    assert choice(problem(dtype="float16"))[0] == Config(stages=3)
    tables.add(file, [entry(problem("3968x8192x4096", dtype="float16"), Config(stages=4))])
    assert choice(problem(dtype="float16"))[0] == Config(stages=4)
    assert choice(near)[0] == Config(stages=3)
    assert choice(target=Target("gpu", "NVIDIA H100 80GB HBM3", 132))[1] == "heuristic"


def test_an_entry_that_the_kernel_cannot_run_for_this_problem_is_passed_over():
    tables.add(tables.user_file(H200.kind), [entry(problem(), Config(stages=4))])
    assert choice()[0] == Config(stages=4)
    small = dataclasses.replace(H200, smem_limit_bytes=128 * 1024)
    config, source = choice(target=small)
    assert source == "heuristic"
    problem().check(config, small)


def test_the_running_version_of_jax_comes_first_and_another_is_better_than_none():
    file, of = tables.user_file(H200.kind), problem()
    tables.add(file, [dataclasses.replace(entry(of, Config(stages=2)), jax="0.0.1")])
    of_another = f"measured with jax 0.0.1, and {jax.__version__} runs"
    assert choice() == (Config(stages=2), f"table {file}: 4096x8192x4096, {of_another}")
    tables.add(file, [entry(problem("3968x8192x4096"), Config(stages=3))])
    assert choice() == (Config(stages=3), f"table {file}: 3968x8192x4096")


def test_of_two_other_versions_the_one_whose_search_came_to_its_end_comes_first():
    for partial, complete in (("0.0.1", "0.0.2"), ("0.0.2", "0.0.1")):
        file = tables.user_file(H200.kind)
        entries = [entry(problem(), Config(stages=2), complete=False), entry(problem(), Config(stages=3))]
        versions = partial, complete
        file.unlink(missing_ok=True)
        tables.add(file, [dataclasses.replace(e, jax=jax_) for e, jax_ in zip(entries, versions, strict=True)])
        assert choice()[0] == Config(stages=3)


def test_a_new_table_is_seen_at_once():
    choice()
    for stages in (2, 3, 4):
        tables.add(tables.user_file(H200.kind), [entry(problem(), Config(stages=stages))])
        assert choice()[0] == Config(stages=stages)


def test_a_miss_is_logged_once_with_the_command_that_mends_it(caplog):
    with caplog.at_level(logging.INFO, "overlap"):
        for _ in range(3):
            choice()
            choice(problem("1024x4096x4096", op="all_gather_lhs_matmul", devices=8))
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "python -m overlap tune --op matmul --shapes 4096x8192x4096 --dtype bfloat16" in caplog.text
    assert "--op all_gather_lhs_matmul --shapes 1024x4096x4096 --dtype bfloat16 --devices 8" in caplog.text


def test_what_no_configuration_can_run_gets_the_default_in_silence(caplog):
    with caplog.at_level(logging.INFO, "overlap"):
        odd = [problem("1024x50257x4096", op=op, devices=4) for op in ("matmul_all_reduce", "matmul_reduce_scatter")]
        wide = [dataclasses.replace(of, out_dtype="float32") for of in odd]  # Large tiles have no room for these.
        b200 = Target("gpu", "NVIDIA B200", 148)
        cases = [(of, target) for of in (*odd, *wide) for target in (H200, b200)]
        for of, target in (*cases, (problem(dtype="float32"), H200), (problem(), Target("gpu", "NVIDIA A100", 108))):
            config, source = choice(of, target)
            assert source == "default"
            with pytest.raises(NotImplementedError):
                of.check(config, target)
    assert not caplog.records


def test_a_choice_never_measures_or_compiles(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("a choice must not measure")

    monkeypatch.setattr(Bench, "__init__", fail)
    monkeypatch.setattr(search, "search", fail)
    for shape in ("4096x8192x4096", "512x512x512"):
        assert choice(problem(shape))[1] == "heuristic"


def test_several_processes_use_the_users_table_only_if_its_folder_was_named(monkeypatch, tmp_path):
    tables.add(tables.user_file(H200.kind), [entry(problem())])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choice()[1].startswith("table")
    monkeypatch.delenv(tables.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tables.add(tables.user_file(H200.kind), [entry(problem())])
    assert choice()[1] == "heuristic"


def test_the_users_folder(monkeypatch, tmp_path):
    assert tables.user_file("NVIDIA H100 80GB HBM3") == tmp_path / "user" / "nvidia_h100_80gb_hbm3.json"
    monkeypatch.delenv(tables.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tables.user_directory() == tmp_path / "cache" / "overlap" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.user_directory() == tmp_path / ".cache" / "overlap" / "tuning"
