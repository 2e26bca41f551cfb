"""Which problems the benchmarks measure, how long, and which command lines they refuse by name."""

from __future__ import annotations

import importlib

import pytest

from benchmarks import products
from benchmarks.problems import TableProblem, parse
from overlap.cli import devices as devices_of_cli
from overlap.cli import ending

pytestmark = pytest.mark.one_jax
GATHER = "all_gather_lhs_matmul"


def problems(table: str, *options: str, devices: int = 1) -> list[TableProblem]:
    return products.problems(products.parser(table).parse_args(options), table, devices)


def test_shapes_carry_a_dtype_and_a_layout() -> None:
    given = ["1x2x3", "4x5x6:bf16:nt", "7x8x9:tt", "7x8x9:f8_e5m2"]
    found = [str(problem) for problem in parse("matmul", 1, given, "f16", ["nn", "tn"])]
    assert found[:4] == ["1x2x3 f16 nn", "1x2x3 f16 tn", "4x5x6 bf16 nt", "7x8x9 f16 tt"]
    found = [str(problem) for problem in parse("matmul", 1, given, "f16", None)]
    assert found[-2:] == ["7x8x9 f16 tt", "7x8x9 f8_e5m2 nt"]
    for wrong in ("1x2", "1x2x3:f64", "1x2x3:nn:nt", "1x0x3"):
        with pytest.raises(SystemExit, match="MxNxK"):
            parse("matmul", 1, [wrong], "f16", None)
    first, second = problems("matmul", "--shapes", "1x2x3:bf16,4x5x6", devices=8)
    assert (first.m, first.n, first.k, first.dtype) == (1, 2, 3, "bf16")
    assert (second.shape, second.dtype, second.devices) == ("4x5x6", "f16", 8)


def test_the_standard_suite_is_thirteen_shapes_in_three_layouts_and_f8_in_one() -> None:
    found = problems("matmul", "--suite", "standard", "--dtype", "bf16")
    assert len(found) == len(set(found)) == 13 * 3
    assert {problem.layout for problem in found} == {"nn", "nt", "tn"}
    in_f8 = problems("matmul", "--suite", "standard", "--dtype", "f8_e4m3fn")
    assert len(in_f8) == 13 and {problem.layout for problem in in_f8} == {"nt"}
    gathered = problems(GATHER, "--shapes", "1x2x3:f8_e5m2,1x2x3:bf16", devices=2)
    assert [problem.layout for problem in gathered] == ["nt", "nn"]
    for table, options, said in (
        ("matmul", ("--layouts", "nn,xy"), "nn, nt, tn, tt"),
        ("ladder", ("--shapes", "1x2x3:nt"), "layout nn alone"),
        (GATHER, ("--shapes", "1x2x3:tn"), "layout nn, nt alone"),
    ):
        with pytest.raises(SystemExit, match=said):
            problems(table, *options, devices=2)


# --- Command lines ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with some files, which the command lines name by a relative path. Nothing may be written there."""
    (tmp_path / "file").write_text("a,b\n1,2\n")
    (tmp_path / "empty").touch()
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["empty", "file"]


def refused(line: str, capsys) -> str:
    """The last line that a command prints; the command must exit with status 2 (1 for a missing file)."""
    name, *options = line.split(" ")
    try:
        status = ending.run(lambda: importlib.import_module(f"benchmarks.{name or '__main__'}").main(options))
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert status == (1 if "No such file" in said.err else 2) and not said.out, (status, said)
    return said.err.splitlines()[-1]


TABLES = [
    (" nothing", "got 'nothing'"),
    *((f" --dry-run --{name} {text}", f"--{name}") for name in
      ("devices", "rounds", "timeout-s", "budget-s") for text in ("-1", "text")),
    (" --dry-run --devices 99", "`--devices` must be at most 8 with `--dry-run`, got 99"),
    (" --dry-run --dtype zz", "--dtype: invalid choice"),
    (" --dry-run --shapes 0x8x8", "`--shapes`"),
    (" --dry-run --suite zz", "--suite"),
    (" --dry-run --layouts zz", "`--layouts`"),
    (" --dry-run --variants xla:stages=3", "--variants: must begin with `fused`"),
    (" --dry-run --variants fused:stages", "--variants: must be NAME=VALUE"),
    *((f" block --dry-run --{name} {text}", f"--{name}") for name in
      ("devices", "rounds", "tokens") for text in ("0", "text")),
]  # fmt: skip
TOOLS = [
    ("configurations --tasks missing --out new", "missing: No such file"),
    ("configurations --tasks file --out new", "`--tasks` file is no task file"),
    ("configurations --tasks empty --out new", "`--tasks` empty is empty"),
    ("configurations --tasks file --out missing/new", "--out: there is no folder missing"),
    ("configurations --tasks file --out new --budget-s nan", "--budget-s"),
    *((f"configurations --tasks file --out new --{name} 0", f"--{name}") for name in ("workers", "gpus", "samples")),
    ("crossover missing --out new", "missing: No such file"),
    ("crossover file --out new", "file is no result of a benchmark"),
    ("fit_model --times missing", "missing: No such file"),
    ("fit_model --judge --times file", "file holds no times"),
    ("known_models tasks --out new --limit 0", "--limit"),
    ("known_models table file --jax 0.12", "file holds no times"),
    ("model_tasks --seed nan --problems 1 --out new", "--seed"),
    ("model_tasks --seed 1 --problems 0 --out new", "--problems"),
]


@pytest.mark.parametrize("lines", [TABLES, TOOLS], ids=["tables", "tools"])
def test_what_makes_no_sense_is_refused_by_name(here, capsys, lines):
    for line, named in lines:
        assert named in refused(line, capsys), line


def test_without_a_gpu_tables_ask_for_a_dry_run(here, capsys, monkeypatch):
    monkeypatch.setattr(devices_of_cli, "why_no_gpu", lambda: "no GPU is visible")
    asked = (
        "nothing was measured: no GPU is visible; run it on GPUs, or add --dry-run to try the harness on CPU devices"
    )
    for line in (" --rounds 3", " block", " ladder", " matmul --out results"):
        assert refused(line, capsys) == asked
