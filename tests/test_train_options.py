"""examples/train.py: the option --compare, and the options that are refused."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from train_cases import environment, told  # First: it puts examples/ on the path.

from gpt import compare, corpus, curves, devices, losses, options, run  # isort: skip
from gpt.devices import Axes, Refused  # isort: skip
from gpt.losses import Step  # isort: skip


@pytest.fixture(scope="module")
def text():
    return corpus.stories(1 << 16, 0)


# --- Fused and XLA compared -------------------------------------------------------------------------------------------


def drifting(scale: float, seed: int) -> list[Step]:
    noise = np.random.default_rng(seed).normal(scale=scale, size=50)
    return [Step(number + 1, 5.0 - 0.05 * number + float(noise[number]), 1.0, None) for number in range(50)]


@pytest.mark.parametrize(("fused_scale", "agree"), [(1e-3, True), (2e-2, False)])
def test_the_comparison_tells_rounding_from_error(tmp_path, text, monkeypatch, fused_scale, agree):
    """Within rounding the fused run passes; beyond it, as with a wrong gradient, it fails."""
    made = {"xla": drifting(0, 0), "xla-other-order": drifting(1e-3, 1), "fused": drifting(fused_scale, 2)}
    chosen = {}

    def train(options, text, *, title):
        chosen[title] = options
        return run.Result(None, None, made[title])

    monkeypatch.setattr(run, "train", train)
    result = compare.compare(told(tmp_path, "--data 2 --tensor 4 --compare", compared=True), text)
    assert result.agree is agree
    assert result.fused_largest == max(abs(a.loss - b.loss) for a, b in zip(made["fused"], made["xla"], strict=True))
    assert ("NOT within" in result.lines()[-1]) is not agree
    assert {title: (of.implementation, of.axes, of.out.name) for title, of in chosen.items()} == {
        "xla": ("xla", Axes(2, 1, 4), "xla"),
        "xla-other-order": ("xla", Axes(4, 1, 2), "xla-other-order"),
        "fused": ("fused", Axes(2, 1, 4), "fused"),
    }
    curves.draw(result.runs, tmp_path / "losses.png", title="test")
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_with_emulated_kernels(repository, tmp_path):
    command = [sys.executable, "examples/train.py", "--compare", "--steps", "6", "--data", "1", "--out", str(tmp_path)]
    process = subprocess.run(command, env=environment(repository), cwd=repository, stdin=subprocess.DEVNULL,
                             timeout=280, capture_output=True, text=True, check=False)  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert "The fused curve is within 3 times the distance that another order of summation makes." in process.stdout
    assert len(losses.read(tmp_path / "fused" / "losses.jsonl")) == 6


# --- The page -----------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_are_taken(repository):
    page = (repository / "docs" / "training.md").read_text()
    commands = re.findall(
        r"^.*python examples/train\.py(.*)$", "".join(re.findall(r"```sh\n(.*?)```", page, re.S)), re.M
    )
    commands += [shlex.split(words)[0] for words in re.findall(r"make train ARGS=(.*)", page)]
    assert len(commands) >= 8
    for command in commands:
        options.parser().parse_args(shlex.split(command))


def test_the_page_names_all_files(repository):
    page = (repository / "docs" / "training.md").read_text()
    files = {path.name for path in (repository / "examples" / "gpt").glob("*.py")} - {"__init__.py"}
    assert files == set(re.findall(r"`(\w+\.py)`", page.split("## Your own model")[1].split("A block is")[0]))


# --- What is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--heads 3 --features 33 --tensor 2", "--heads 3 is not divisible by --tensor 2 devices: choose --heads 4,"),
        ("--features 30", "--features 30 are not divisible by --heads 4: choose --features 32, say"),
        ("--hidden 65 --tensor 2", "--hidden 65 is not divisible by --tensor 2 devices: choose --hidden 66, say"),
        ("--sequence 33 --tensor 2", "--sequence 33 is not divisible by --tensor 2 devices: choose --sequence 34, say"),
        ("--features 36 --fsdp 8", "--features 36 is not divisible by --fsdp 8 devices: choose --features 40, say"),
        ("--tensor 3", "the vocabulary of 256 bytes is not divisible by --tensor 3: choose a power of two"),
        ("--batch 9 --data 2", "--batch 9 is not divisible by --data 2 × --fsdp 1 × --accumulate 1 = 2: choose"),
        ("--batch 8 --data 2 --accumulate 3", "--accumulate 3 = 6: choose --batch 12, say"),
        ("--warmup 13", "--warmup 13 is longer than --steps 12"),
        ("--data 4 --tensor 4", "--data 4 × --fsdp 1 × --tensor 4 asks for 16 devices, and there are 8: lower one"),
        ("--compare --tensor 2", "--implementation xla contradicts it: leave one of them out"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(tmp_path, arguments, message):
    with pytest.raises(Refused) as refused:
        told(tmp_path, arguments)
    assert message in str(refused.value)


def test_a_comparison_that_cannot_be(tmp_path):
    with pytest.raises(Refused, match="sums over the devices of --tensor, and that is 1: choose 2 or more"):
        told(tmp_path, "--compare", compared=True)
    with pytest.raises(Refused, match="split in another way as well, and there --batch 9 is not divisible by --data 2"):
        told(tmp_path, "--compare --batch 9 --tensor 2", compared=True)


def test_processes_without_work_are_refused():
    assert devices.fit(None, None, None, devices=4, processes=4) == Axes(1, 1, 4)
    assert devices.fit(2, None, None, devices=4, processes=4) == Axes(2, 1, 2)
    assert devices.fit(None, 2, 2, devices=8, processes=1) == Axes(2, 2, 2)
    assert devices.fit(None, None, None, devices=16, processes=16) == Axes(2, 1, 8)
    # 256 bytes cannot be split among 3 or 6 devices.
    assert devices.fit(None, None, None, devices=6, processes=1) == Axes(3, 1, 2)
    with pytest.raises(Refused, match="makes a mesh of 2 devices, and the 4 processes have 4"):
        devices.fit(1, 1, 2, devices=4, processes=4)
    with pytest.raises(Refused, match="start more than 4 processes"):
        devices.fit(1, 1, 8, devices=4, processes=4)


def test_a_text_that_is_too_short(tmp_path):
    chosen = told(tmp_path)
    options.check_text(chosen, 33)
    with pytest.raises(Refused, match="the text has 32 bytes, and --sequence 32 takes 33"):
        options.check_text(chosen, 32)


def test_a_folder_that_cannot_be_made(tmp_path):
    """For example the default folder, which the command line does not check."""
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"cannot write to .*file/train: .*: name another folder by --out"):  # noqa: SIM117
        with losses.locked(tmp_path / "file" / "train"):
            pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "argument --steps: must be a whole number, at least 1, got '0'"),
        ("--learning-rate nan", "argument --learning-rate: must be a finite number of any size above 0, got 'nan'"),
        ("--dtype int8", "argument --dtype: must be one of bfloat16, float32, got 'int8'"),
        ("--text /nowhere/text", "argument --text: cannot read '/nowhere/text'"),
        ("--out /proc/nope", "argument --out: cannot write to '/proc/nope'"),
    ],
)  # fmt: skip
def test_options_that_are_wrong_in_themselves(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        options.parser().parse_args(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
