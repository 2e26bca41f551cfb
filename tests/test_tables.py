"""Tuning tables as files: calls work whatever a table contains, and writers never lose others' entries."""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import tomllib

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import overlap
from overlap.choice import choose, crossover, table_entry, table_files, tables
from overlap.choice import problem as problems
from overlap.cli import arguments as types
from overlap.kernels.config import Config
from tests.explained import answer
from tests.tuning_cases import H200, MISSING, SHAPES, TUNED, entry, line, nested, no_tables, problem, users_table, write

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
    return answer(overlap.matmul, lhs, rhs, mesh=ON_H200)


# --- One bad entry ----------------------------------------------------------------------------------------------------

BAD = [
    ({"batch": "x"}, "`batch` must be an integer from 1 to 2147483647, got 'x'"),
    ({"others": None}, "`others` must be an object of numbers"),
    ({"others": {"xla": 0}}, "`others` must be an object of numbers of µs from 0.001 to 1e+12, got {'xla': 0}"),
    ({"others": {"xla": 1e-320}}, "`others` must be"),
    ({"others": {"xla": float("inf")}}, "got {'xla': inf}"),
    ({"others": {"xla": 1.0, "heuristic": float("nan")}}, "`others` must be"),
    ({"others": {"a\nb": 1.0}}, "`others` must be"),
    ({"us": float("nan")}, "`us` must be a number of µs from 0.001 to 1e+12, got nan"),
    ({"us": float("inf")}, "got inf"),
    ({"us": -1}, "got -1"),
    ({"us": True}, "got True"),
    ({"us": 10**400}, "`us` must be"),
    ({"us": "fast"}, "got 'fast'"),
    ({"m": 0}, "`m` must be an integer from 1"),
    ({"m": 4096.0}, "`m` must be an integer from 1 to 2147483647, got 4096.0"),
    ({"n": 2**31}, "got 2147483648"),
    ({"k": nested(50)}, "`k` must be an integer from 1 to 2147483647, got [[[[...]]]]"),
    ({"devices": None}, "`devices` must be"),
    ({"layout": "xy"}, "`layout` must be one of nn, nt, tn, tt, got 'xy'"),
    ({"layout": []}, "`layout` must be one of"),
    ({"dtype": "zz"}, "`dtype` must be one of float16, bfloat16, float32"),
    ({"op": "conv"}, "`op` must be one of matmul, all_gather_lhs_matmul"),
    ({"kind": ""}, "`kind` must be not empty"),
    ({"jax": "0.11\n"}, "`jax` must be a text of one line"),
    ({"date": "x" * 300}, "`date` must be a text of one line, at most 200 characters"),
    ({"tried": -1}, "`tried` must be an integer from 0"),
    ({"complete": "yes"}, "`complete` must be true or false, got 'yes'"),
    ({"block_scaled": 1}, "`block_scaled` must be true or false, got 1"),
    ({"surprise": 1}, "unknown field 'surprise': a newer version of overlap may have written it"),
    ({"us": MISSING}, "`us` is missing"),
    ({"config": None}, "`config` must be an object with the fields of an overlap.Config, got None"),
    ({"config": {"tile_of_the_future": 3}}, "`config` has an unknown field 'tile_of_the_future'"),
    ({"config": {"tile_m": nested(50)}}, "`config`: `tile_m` must be a short text, true, false or an int32"),
    ({"config": {"stages": 0}}, "`config`: `stages` must be an int of at least 1, got 0"),
    ({"config": {"order_width": 2**31}}, "`config`: `order_width` must be a short text"),
    ({"config": {"pull": {}}}, "`config` has an unknown field 'pull'"),
]


@pytest.mark.parametrize(("change", "said"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_bad_entry_is_left_out_and_named_and_the_others_serve(caplog, change, said):
    path = write(line(**change), line(problem("8192x8192x8192")))
    with caplog.at_level(logging.WARNING, "overlap"):
        for _ in range(2):
            assert explained().source == "heuristic"
            assert explained(problem("8192x8192x8192")).config == TUNED
    assert len(caplog.records) == 1
    assert f"the tuning table {path}: 1 of its entries is ignored: entries[0]" in caplog.text
    assert said in caplog.text


def test_many_bad_entries_are_one_warning(caplog):
    path = write(*[line(batch=number) for number in ("x", None, [], {}, -1, 0)], "no entry", line(m=[], us=0), line())
    with caplog.at_level(logging.WARNING, "overlap"):
        assert explained().config == TUNED
    (record,) = caplog.records
    assert f"{path}: 8 of its entries are ignored: entries[0] (matmul 4096x8192x4096): `batch`" in record.message
    assert "entries[3]" in record.message and record.message.endswith("and 4 more") and len(record.message) < 800


def test_of_two_entries_for_the_same_one_is_used_and_the_other_named(caplog):
    stages = lambda number, **changes: line(config=vars(Config(stages=number)), **changes)  # noqa: E731
    path = write(stages(2), stages(3), stages(4, complete=False))
    with caplog.at_level(logging.WARNING, "overlap"):
        assert explained().config == Config(stages=3)
    (record,) = caplog.records
    assert f"{path}: 2 of its entries are ignored: entries[0] (matmul 4096x8192x4096): entries[1] is for" in caplog.text
    assert "entries[2] (matmul 4096x8192x4096): entries[1] is for the same, and is used" in record.message


def test_an_entry_whose_configuration_cannot_run_is_named(caplog, monkeypatch):
    monkeypatch.setattr(crossover, "verdict", lambda *_: (False, "faster"))
    write(line(config=vars(Config(tile_m=256, tile_n=256))))
    with caplog.at_level(logging.WARNING, "overlap"):
        for _ in range(2):
            assert explained().source == "heuristic"
            # A problem that shares the entry but is not the entry's own: nobody said that it can run there.
            assert explained(problem("4096x8192x4160")).source == "heuristic"
    (record,) = caplog.records
    assert "the tuning table's entry for matmul" in record.message and "its `config` cannot run: " in record.message
    assert "shared memory" in record.message or "registers" in record.message, record.message


_TEXTS = st.sampled_from(["xla", "nt", "matmul", "float16", "", "\ud800"]) | st.text(max_size=9)
_NUMBERS = st.sampled_from([0, 1, -1, 2**31 - 1, 2**31, 10**400, -(10**4000)]) | st.integers(0, 300) | st.floats()
ODD = st.recursive(
    st.none() | st.booleans() | _TEXTS | _NUMBERS | st.just(nested(40)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)


def places(value, here=()):
    """Yields the path to every value in a JSON document."""
    yield here
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield from places(inner, (*here, name))


VALID = {"format": 1, "entries": [line(), line(problem("8192x8192x8192"))]}


@pytest.fixture
def one_heuristic_each(monkeypatch):
    """Caches the heuristic, so that it runs once for each problem that the tables lack."""
    monkeypatch.setattr(choose, "heuristic", functools.cache(choose.heuristic))


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(list(places(VALID))), ODD)
def test_any_value_in_place_of_any_part_leaves_calls_decided(one_heuristic_each, place, value):
    content = copy.deepcopy(VALID)
    if not place:
        content = value
    else:
        inner = content
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = value
    write(text=json.dumps(content))
    first = [explained(problem(shape)) for shape in SHAPES[:2]]
    tables._load.cache_clear()
    assert [explained(problem(shape)) for shape in SHAPES[:2]] == first
    if place[:2] == ("entries", 0):
        assert first[1].config == TUNED


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
    '{"format": 99, "entries": []}', '{"format": true, "entries": []}',
    f'{{"format": 1, "entries": [{"9" * 5000}]}}',
]  # fmt: skip


@pytest.mark.parametrize("content", BROKEN, ids=[str(number) for number in range(len(BROKEN))])
def test_a_file_that_is_no_table_is_reported_once_and_never_overwritten(caplog, content):
    path = write(text=content)
    with caplog.at_level(logging.WARNING, "overlap"):
        assert [explained().source for _ in range(3)] == ["heuristic"] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text
    for action in (lambda: tables.read(path), lambda: tables.add(path, [entry(problem())])):
        with pytest.raises(ValueError, match=r"nvidia_h200\.json is no tuning table .* move it away"):
            action()
    assert path.read_text(encoding="latin-1") == content
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_is_no_regular_file_or_cannot_be_read_is_reported_once(caplog, monkeypatch, tmp_path):
    path = users_table()

    def warned(*said):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "overlap"):
            for number in range(2):
                (tmp_path / f"{len(caplog.records)}{number}").touch()
                assert explained().source == "heuristic"
        assert len(caplog.records) == 1, caplog.text
        assert all(text in caplog.text for text in said), caplog.text

    path.mkdir()
    warned(f"{path} is no tuning table (it is a folder)")
    path.rmdir()
    os.mkfifo(path)
    warned("it is a pipe")  # Reading it does not wait for a writer.
    path.unlink()
    path.symlink_to("/dev/zero")
    warned("it is a device")
    path.unlink()
    path.symlink_to(path)
    warned("symbolic links")
    path.unlink()
    write(line())
    with monkeypatch.context() as patch:
        patch.setattr(tables, "LARGEST_BYTES", 100)
        warned("bytes, and a table at most 100")
    with monkeypatch.context() as patch:
        patch.setattr(table_files.pathlib.Path, "read_text", lambda *_, **__: os.open(tmp_path / "no" / "rights", 0))
        os.utime(path)
        warned("no/rights")
    (tmp_path / "file").touch()
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, str(tmp_path / "file"))
    warned("Not a directory", str(tmp_path / "file"))
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, "/" + "x" * 5000)
    warned("too long")
    monkeypatch.setenv(tables.DIRECTORY_VARIABLE, "~nobody_has_this_name/x")
    assert explained().source == "heuristic"


# --- What `explain` says ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({}, ""),
        ({"overlap": MISSING}, ""),  # As in older tables.
        ({"jax": "0.0.1"}, f", measured with jax 0.0.1, and {jax.__version__} runs"),
        ({"jax": MISSING, "overlap": MISSING}, ", measured with an unknown jax"),
        ({"overlap": "0.0.1"}, f", measured with overlap 0.0.1, and {overlap.__version__} runs"),
    ],
)
def test_explain_names_the_file_and_other_versions(versions, said):
    path = write(line(**versions))
    choice = explained()
    assert choice.source == f"table {path}: 4096x8192x4096{said}"
    assert f"({choice.source})" in str(choice)
    # The same file may be why XLA runs.
    write(line(others={"xla": 50.0}, **versions))
    choice = explained()
    assert (choice.implementation, choice.config) == ("xla", None)
    assert f"XLA was measured to be 2.00 x as fast for {problem()} (table {path}: 4096x8192x4096{said})" in str(choice)


def test_what_is_written_says_which_versions_measured_it():
    tables.add(users_table(), [entry(problem())])
    (saved,) = json.loads(users_table().read_text())["entries"]
    assert (saved["jax"], saved["overlap"]) == (jax.__version__, overlap.__version__)


def test_each_fact_that_stands_twice_is_the_same(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["version"] == overlap.__version__
    assert types.LAYOUTS == problems.LAYOUTS
    assert types.LARGEST_SIZE == table_entry.LARGEST_SIZE
    assert set(types.DTYPES.values()) == set(table_entry._DTYPES)
