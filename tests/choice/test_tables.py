"""Tuning tables: which configuration a call takes, whatever a file contains; writers lose no entries of others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import math
import os
import pathlib
import threading

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import overlap
from overlap.choice import choose, space, tables
from overlap.choice import problem as problems
from overlap.cli import arguments as types
from overlap.kernels.config import Config
from overlap.kernels.target import Target
from tests.choice.tuning_cases import (
    H200,
    MISSING,
    SHAPES,
    TUNED,
    entry,
    line,
    nested,
    no_tables,
    problem,
    users_table,
    write,
)

__all__ = ["no_tables"]
pytestmark = [pytest.mark.usefixtures("no_tables"), pytest.mark.one_jax]
ON_H200 = AbstractMesh(
    (1,), ("x",), axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind=H200.kind, num_cores=H200.num_cores, platform="gpu"),
)  # fmt: skip


def explained(of=None):
    """Returns what `overlap.matmul` would choose on an H200. This machine needs no such GPU."""
    of = of or problem()
    lhs, rhs = (jax.ShapeDtypeStruct(shape, of.dtype) for shape in ((of.m, of.k), (of.k, of.n)))
    return overlap.explain(overlap.matmul, lhs, rhs, mesh=ON_H200)[0]


# --- One bad entry ----------------------------------------------------------------------------------------------------

BAD = [
    {"batch": "x"}, {"others": None}, {"others": {"xla": 0}}, {"others": {"xla": 1e-320}},
    {"others": {"xla": 1.0, "heuristic": float("nan")}}, {"us": float("nan")}, {"us": float("inf")}, {"us": -1},
    {"us": True}, {"us": 10**400}, {"us": "fast"}, {"m": 0}, {"m": 4096.0}, {"n": 2**31}, {"k": nested(50)},
    {"devices": None}, {"layout": "xy"}, {"layout": []}, {"dtype": "zz"}, {"dtype": []}, {"op": "conv"}, {"op": []},
    {"kind": None}, {"jax": 0.11}, {"date": {}}, {"surprise": 1}, {"us": MISSING}, {"m": MISSING}, {"config": MISSING},
    {"config": None}, {"config": {"tile_of_the_future": 3}}, {"config": {"tile_m": nested(50)}},
    {"config": {"stages": 0}}, {"config": {"order_width": 2**31}},
]  # fmt: skip


def test_bad_entries_are_left_out_and_the_others_serve(caplog):
    """One warning says how many there are."""
    path = write(*(line(**change) for change in BAD), "no entry", line(problem("8192x8192x8192")))
    with caplog.at_level(logging.WARNING, "overlap"):
        for _ in range(2):
            assert explained().source == "heuristic"
            assert explained(problem("8192x8192x8192")).config == TUNED
    ignored = f"{path}: {len(BAD) + 1} entries of this tuning table are ignored, the first: entries[0]: "
    assert len(caplog.records) == 1 and ignored in caplog.text


ODD = [None, True, -1, 0, 2**31, 10**400, 0.5, math.nan, "", "xla", [], {}, nested(50)]


def odd_lines(whole, value):
    """Yields copies of a JSON object, in each of which one value, at any depth, is another one."""
    for name, inner in whole.items():
        yield whole | {name: value}
        if isinstance(inner, dict):
            yield from (whole | {name: changed} for changed in odd_lines(inner, value))


def test_any_value_in_any_place_leaves_calls_decided(monkeypatch):
    monkeypatch.setattr(choose, "heuristic", functools.cache(choose.heuristic))
    for changed in itertools.chain.from_iterable(odd_lines(line(), value) for value in ODD):
        write(changed, line(problem("8192x8192x8192")))
        tables._load.cache_clear()
        choose.choose_config(problem(), H200)
        assert choose.choose_config(problem("8192x8192x8192"), H200)[0] == TUNED, changed


def test_the_largest_sizes_that_an_entry_may_have_can_be_traced():
    """Such sizes follow the rules of a table; whether the kernel supports them, the kernel itself says."""
    largest = 2**31 - 1
    write(line(config=vars(Config(order_width=largest, chunk_bytes=2**31 - 16, chunk_buffers=largest))))
    assert explained().config.order_width == largest
    operands = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((4096, 4096), (4096, 8192)))
    with jax.sharding.use_abstract_mesh(ON_H200):
        assert jax.eval_shape(overlap.matmul, *operands).shape == (4096, 8192)


# --- Files that are not tables ----------------------------------------------------------------------------------------

BROKEN = [
    "", "{", "[]", "null", '{"format": 1}', "\x00\xff", '{"format": 1, "entries": {"a": 1}}', "[" * 200_000,
    '{"format": 99, "entries": []}', f'{{"format": 1, "entries": [{"9" * 5000}]}}',
]  # fmt: skip


def test_a_file_that_is_no_table_is_reported_once_and_never_overwritten(caplog):
    for content in BROKEN:
        path = write(text=content)
        tables._load.cache_clear()
        with caplog.at_level(logging.WARNING, "overlap"):
            assert [explained().source for _ in range(3)] == ["heuristic"] * 3
        (said,) = caplog.records
        assert said.levelname == "WARNING" and str(path) in said.getMessage()
        caplog.clear()
        for action, arguments in ((tables.read, ()), (tables.add, ([entry(problem())],))):
            with pytest.raises(ValueError, match=r"nvidia_h200\.json is no tuning table .* move it away"):
                action(path, *arguments)
        assert path.read_text(encoding="latin-1") == content
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_is_no_regular_file_counts_as_empty(monkeypatch, tmp_path):
    path = users_table()
    kinds = (path.mkdir, lambda: os.mkfifo(path), *(lambda to=to: path.symlink_to(to) for to in ("/dev/zero", path)))
    for make in kinds:
        make()
        assert explained().source == "heuristic"
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "file").touch()
    for folder in (str(tmp_path / "file"), "/" + "x" * 5000, "~nobody_has_this_name/x"):
        monkeypatch.setenv(tables.DIRECTORY_VARIABLE, folder)
        assert explained().source == "heuristic"


# --- What `explain` says ----------------------------------------------------------------------------------------------


def test_explain_names_the_file_and_other_versions():
    for versions, said in (
        ({}, ""),
        ({"overlap": MISSING}, ""),  # As in older tables.
        ({"jax": "0.0.1"}, f", measured with jax 0.0.1, and {jax.__version__} runs"),
        ({"overlap": "0.0.1"}, f", measured with overlap 0.0.1, and {overlap.__version__} runs"),
    ):
        path = write(line(**versions))
        choice = explained()
        assert choice.source == f"table {path}: 4096x8192x4096{said}"
        assert f"({choice.source})" in str(choice)
        # The same file may be why XLA runs.
        write(line(others={"xla": 50.0}, **versions))
        choice = explained()
        assert (choice.implementation, choice.config) == ("xla", None)
        assert f"2.00 x as fast for {problem()} (table {path}: 4096x8192x4096{said})" in str(choice)


def test_the_shipped_tables_hold_what_the_kernels_accept_and_facts_that_stand_twice_are_the_same():
    assert (types.LAYOUTS, types.LARGEST_SIZE) == (problems.LAYOUTS, tables.LARGEST_SIZE)
    assert set(types.DTYPES.values()) == set(tables.DTYPES)
    files = list((pathlib.Path(tables.__file__).parent / "tables").glob("*.json"))
    assert files
    for path in files:
        entries = tables.read(path)
        assert len(entries) == len(json.loads(path.read_text())["entries"])
        for e in entries:
            e.problem.check(e.config, Target("gpu", e.kind, 132))


# --- Which configuration a call takes ---------------------------------------------------------------------------------


def choice(of=None, target=H200):
    return choose.choose_config(of or problem(), target)


def add(*entries):
    tables.add(users_table(), entries)


def test_the_users_table_comes_before_the_shipped_one_and_that_before_the_heuristic():
    """A new table is seen at once."""
    assert choice() == (space.heuristic(problem(), H200), "heuristic")
    tables.add(tables.SHIPPED / "h200.json", [entry(problem(), Config(stages=2))])
    assert choice() == (Config(stages=2), f"shipped table {tables.SHIPPED}/h200.json: 4096x8192x4096")
    for stages in (3, 4):
        add(entry(problem(), Config(stages=stages)))
        assert choice() == (Config(stages=stages), f"table {users_table()}: 4096x8192x4096")
    # An entry that the kernel cannot run for this problem is passed over.
    small = dataclasses.replace(H200, smem_limit_bytes=128 * 1024)
    assert choice(target=small)[0] == Config(stages=2)


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


def test_the_running_version_of_jax_comes_first_and_another_is_better_than_none():
    """Of two other versions, the one whose search came to its end comes first."""
    file, of = users_table(), problem()
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


def test_the_users_folder_which_several_processes_use_only_if_it_was_named(monkeypatch, tmp_path):
    assert tables.user_file("NVIDIA H100 80GB HBM3") == tmp_path / "user" / "nvidia_h100_80gb_hbm3.json"
    add(entry(problem()))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert choice()[1].startswith("table")
    monkeypatch.delenv(tables.DIRECTORY_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    add(entry(problem()))
    assert choice()[1] == "heuristic"
    assert tables.user_directory() == tmp_path / "cache" / "overlap" / "tuning"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.user_directory() == tmp_path / ".cache" / "overlap" / "tuning"


# --- Writing ----------------------------------------------------------------------------------------------------------


def test_a_table_reads_back_what_was_added(tmp_path):
    path = tmp_path / "new" / "table.json"
    entries = [entry(problem(shape), tried=7, date="2026-11-21") for shape in SHAPES]
    tables.add(path, entries[:2])
    tables.add(path, entries[2:])
    assert sorted(tables.read(path), key=str) == sorted(entries, key=str)
    assert [p.name for p in path.parent.iterdir()] == ["table.json"]
    assert len(path.read_text().splitlines()) == len(entries) + 2  # One line per entry, for diffs.
    saved = json.loads(path.read_text())["entries"]
    assert {(e["jax"], e["overlap"]) for e in saved} == {(jax.__version__, overlap.__version__)}
    # A partial result does not replace a complete one.
    for us, complete, expected in ((5.0, False, 5.0), (9.0, True, 9.0), (4.0, False, 9.0), (8.0, True, 8.0)):
        tables.add(tmp_path / "one.json", [entry(problem(), us=us, complete=complete)])
        assert [e.us for e in tables.read(tmp_path / "one.json")] == [expected]


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


def test_lines_that_cannot_be_used_outlast_those_that_are_added():
    newer, odd = line(of_the_future=1), line(us=math.nan, others={"deep": nested(50)})
    path = write(newer, line(), odd, "no entry")
    tables.add(path, [entry(problem("128x128x128"))])
    as_text = lambda value: json.dumps(value, sort_keys=True)  # noqa: E731  (NaN is not equal to itself.)
    lines = [as_text(value) for value in json.loads(path.read_text())["entries"]]
    assert len(lines) == 5 and {as_text(newer), as_text(odd), '"no entry"'} <= set(lines)
    with pytest.raises(ValueError, match="times must be numbers"):  # It could not be read again.
        tables.add(users_table(), [entry(problem(), us=math.inf)])


def test_threads_that_write_at_once_lose_nothing(tmp_path):
    """A lock on the folder keeps processes apart as well. The table is a link: the file behind it is replaced."""
    (tmp_path / "real").mkdir()
    path, real = tmp_path / "table.json", tmp_path / "real" / "table.json"
    path.symlink_to("real/table.json")
    adds = [threading.Thread(target=tables.add, args=(path, [entry(problem(f"{m}x128x128"))])) for m in range(1, 41)]
    for thread in adds:
        thread.start()
    for thread in adds:
        thread.join()
    assert sorted(e.problem.m for e in tables.read(path)) == [*range(1, 41)]
    assert path.is_symlink() and [p.name for p in real.parent.iterdir()] == ["table.json"]
    assert real.stat().st_mode & 0o777 == 0o644
