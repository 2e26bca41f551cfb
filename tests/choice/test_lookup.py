"""Which configuration a call takes: that of an active tuning, a table's, the heuristic's, or the smallest one."""

from __future__ import annotations

import dataclasses
import logging

import jax
import pytest

from overlap.choice import choose, space, tables
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from tests.choice.tuning_cases import H200, entry, no_tables, problem

__all__ = ["no_tables"]
pytestmark = pytest.mark.usefixtures("no_tables")


def choice(of=None, target=H200):
    return choose.choose_config(of or problem(), target)


def add(*entries):
    tables.add(tables.user_file(H200.kind), entries)


def test_the_users_table_comes_before_the_shipped_one_and_that_before_the_heuristic():
    """A new table is seen at once."""
    of = problem()
    assert choice() == (space.heuristic(of, H200), "heuristic")
    tables.add(tables.SHIPPED / "h200.json", [entry(of, Config(stages=2))])
    assert choice() == (Config(stages=2), f"shipped table {tables.SHIPPED}/h200.json: 4096x8192x4096")
    for stages in (3, 4):
        add(entry(of, Config(stages=stages)))
        assert choice() == (Config(stages=stages), f"table {tables.user_file(H200.kind)}: 4096x8192x4096")


def test_a_table_serves_its_bucket_and_the_nearest_entry_wins():
    near, far = problem("4096x8192x4096"), problem("3840x8192x4096")
    add(entry(near, Config(stages=3)), entry(far, Config(stages=2)))
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
    add(entry(problem("3968x8192x4096", dtype="float16"), Config(stages=4)))
    assert choice(problem(dtype="float16"))[0] == Config(stages=4)
    assert choice(near)[0] == Config(stages=3)
    assert choice(target=Target("gpu", "NVIDIA H100 80GB HBM3", 132))[1] == "heuristic"


def test_an_entry_that_the_kernel_cannot_run_for_this_problem_is_passed_over():
    add(entry(problem(), Config(stages=4)))
    assert choice()[0] == Config(stages=4)
    small = dataclasses.replace(H200, smem_limit_bytes=128 * 1024)
    config, source = choice(target=small)
    assert source == "heuristic"
    problem().check(config, small)


def test_the_running_version_of_jax_comes_first_and_another_is_better_than_none():
    """Of two other versions, the one whose search came to its end comes first."""
    file, of = tables.user_file(H200.kind), problem()
    for versions in (("0.0.1", "0.0.2"), ("0.0.2", "0.0.1")):
        file.unlink(missing_ok=True)
        partial, complete = entry(of, Config(stages=4), complete=False), entry(of, Config(stages=2))
        add(*(dataclasses.replace(e, jax=version) for e, version in zip((partial, complete), versions, strict=True)))
        of_another = f"measured with jax {versions[1]}, and {jax.__version__} runs"
        assert choice() == (Config(stages=2), f"table {file}: 4096x8192x4096, {of_another}")
    add(entry(problem("3968x8192x4096"), Config(stages=3)))
    assert choice() == (Config(stages=3), f"table {file}: 3968x8192x4096")


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


def test_several_processes_use_the_users_table_only_if_its_folder_was_named(monkeypatch, tmp_path):
    add(entry(problem()))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choice()[1].startswith("table")
    monkeypatch.delenv(tables.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add(entry(problem()))
    assert choice()[1] == "heuristic"


def test_the_users_folder(monkeypatch, tmp_path):
    assert tables.user_file("NVIDIA H100 80GB HBM3") == tmp_path / "user" / "nvidia_h100_80gb_hbm3.json"
    monkeypatch.delenv(tables.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tables.user_directory() == tmp_path / "cache" / "overlap" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.user_directory() == tmp_path / ".cache" / "overlap" / "tuning"
