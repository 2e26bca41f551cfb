"""examples/train.py: it learns, a stopped run resumes with the same losses, and invalid options are refused."""

from __future__ import annotations

import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import TINY, environment, told  # First: it puts examples/ on the path.

import gpt  # isort: skip
import train  # isort: skip
from overlap.cli.arguments import WrongArguments  # isort: skip

MESH = "--data 2 --tensor 2"


@pytest.fixture(scope="module")
def text():
    return train.stories(1 << 20, 0)


def call_at(patched: pytest.MonkeyPatch, at: int, function: Callable[[], object]) -> None:
    """Calls a function while a step is being prepared."""
    batch = train.batch

    def calling(text, options, step):
        if step == at:
            function()
        return batch(text, options, step)

    patched.setattr(train, "batch", calling)


def losses_of(steps: list[train.Step]) -> list[float]:
    return [step["loss"] for step in steps]


# --- The text ---------------------------------------------------------------------------------------------------------


def test_the_sums_of_the_text_are_right(text):
    sums = re.findall(r"has (\d+) \w+ and gives (\d+) to \w+\. Now \w+ has (\d+) ", bytes(text).decode())
    assert len(sums) > 1000 and all(int(before) - int(given) == int(after) for before, given, after in sums)


def test_batches_depend_on_seed_and_step_alone(text, tmp_path):
    options = told(tmp_path, f"{MESH} --batch 4 --sequence 16 --seed 3")
    batch = train.batch(text, options, 7)
    assert batch.shape == (4, 17)
    assert np.array_equal(batch, train.batch(text, options, 7))
    assert not np.array_equal(batch, train.batch(text, options, 8))
    options.seed = 4
    assert not np.array_equal(batch, train.batch(text, options, 7))


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Runs that differ only in their folder share a compiled program: most of their time is compilation."""
    made: dict[str, gpt.Program] = {}

    def shared(chosen):
        key = str(sorted((name, str(value)) for name, value in vars(chosen).items() if name != "out"))
        return made[key] if key in made else made.setdefault(key, gpt.Program(chosen))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train, "Program", shared)
        yield


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, text):
    """A run that was not stopped, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return train.train(told(folder, MESH), text), folder


def test_the_loss_falls_and_the_step_is_compiled_once(whole_run):
    steps, folder = whole_run
    first, *_, last = losses_of(steps)
    assert len(steps) == 12 and steps == train.read(folder / "losses.jsonl")
    assert abs(first - math.log(256)) < 1.5  # No loss is known yet.
    assert last < first - 1.5
    assert train.Program(told(folder, MESH))._step._cache_size() == 1


# The test of another mesh below uses the first case's program, and checks the same about it.
@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--data 2 --fsdp 2 --tensor 2 --remat", "--data 1 --tensor 4", "--fsdp 8"])
def test_mesh_and_memory_change_nothing_but_rounding(tmp_path, text, whole_run, arguments):
    spread = train.train(told(tmp_path, arguments), text)
    np.testing.assert_allclose(losses_of(spread), losses_of(whole_run[0]), rtol=1e-4)


@pytest.mark.one_jax
def test_weights_and_moments_are_sharded(tmp_path):
    state = gpt.Program(told(tmp_path, "--data 2 --fsdp 2 --tensor 2")).first()
    up = state["params"]["blocks"][0]["mlp"]["up"]["kernel"][...]
    assert up.addressable_shards[0].data.shape == (32 // 2, 64 // 2)
    large = [leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.shape == up.shape]
    assert large and all(leaf.sharding.is_equivalent_to(up.sharding, 2) for leaf in large)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.one_jax
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, text, monkeypatch):
    """The checkpoints saved before are finite, and nothing is saved after."""
    step, calls = gpt.Program.step, []

    def diverging(self, state, tokens, *, stop):
        state, metrics = step(self, state, tokens, stop=stop)
        calls.append(metrics)
        return state, metrics | {"gradient_norm": jnp.inf} if len(calls) == 6 else metrics

    monkeypatch.setattr(gpt.Program, "step", diverging)
    with pytest.raises(train.Diverged, match=r"step 6 has loss .* gradient norm inf. The last checkpoint is of step 4"):
        train.train(told(tmp_path, MESH), text)
    assert [step["step"] for step in train.read(tmp_path / "losses.jsonl")] == [1, 2, 3, 4, 5]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


# --- Stopped and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_a_stopped_run_goes_on_with_the_same_losses(tmp_path, text, whole_run, monkeypatch):
    """The signal comes while step 6 is prepared. Step 7 tells all processes, and its state is saved."""
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        call_at(patched, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(train.Stopped) as stopped:
            train.train(told(tmp_path, MESH), text)
    assert stopped.value.args == (7, 128 + signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 8')  # As if the process had been killed while it wrote.
    assert len(train.read(tmp_path / "losses.jsonl")) == 7
    assert losses_of(train.train(told(tmp_path, MESH), text)) == losses_of(whole_run[0])


def test_a_run_goes_on_on_another_mesh(tmp_path, text, whole_run, capfd):
    steps, folder = whole_run
    shutil.copytree(folder, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "12")
    moved = train.train(told(tmp_path / "moved", "--data 1 --fsdp 2 --tensor 2 --accumulate 2"), text)
    assert "goes on after step 8" in capfd.readouterr().err
    assert losses_of(moved[:8]) == losses_of(steps[:8])
    np.testing.assert_allclose(losses_of(moved), losses_of(steps), rtol=1e-4)


def test_a_run_that_is_done_says_so_and_another_model_is_refused(text, whole_run, capfd):
    _, folder = whole_run
    train.train(told(folder, MESH), text)
    assert "all steps are done after step 12" in capfd.readouterr().err
    with pytest.raises(WrongArguments, match="another model"):
        train.train(told(folder, f"{MESH} --features 64"), text)


def start(repository: pathlib.Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "examples/train.py", *TINY.split(), *arguments]
    return subprocess.Popen(command, env=environment(repository) | variables, cwd=repository, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.mark.one_jax
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_the_command_goes_on_with_the_same_losses(number, repository, tmp_path, whole_run):
    """SIGKILL comes while a checkpoint is half written."""
    arguments, out = (*MESH.split(), "--out", str(tmp_path / "run")), tmp_path / "run" / "checkpoints"
    # The second process uses the first one's compilation cache.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with start(repository, *arguments, **cache) as process:
        while not any("4" in path.name for path in out.glob("*")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.002)
        process.send_signal(number)
        _, error = process.communicate()
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 128 + signal.SIGUSR1
        assert "which is saved. The same command goes on" in error
    with start(repository, *arguments, **cache) as process:
        output, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert losses_of(train.read(tmp_path / "run" / "losses.jsonl")) == losses_of(whole_run[0])
    assert re.search(r"Loss \d\.\d+ at step 1, \d\.\d+ at step 12. Plot: ", output)
    assert (tmp_path / "run" / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.one_jax
def test_two_processes_of_mpirun(repository, tmp_path, whole_run):
    """Each process has one device. They resume from a checkpoint of one process with four devices."""
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside Python (extra `mpi`)")
    steps, folder = whole_run
    shutil.copytree(folder, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "12")
    command = [repository / "launch" / "mpirun.sh", "-np", "2", "--", sys.executable, "examples/train.py"]
    command += [*TINY.split(), "--out", tmp_path / "moved"]
    left_out = ("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC")
    kept = {name: value for name, value in environment(repository).items() if not name.startswith(left_out)}
    process = subprocess.run(command, env=kept | {"MPIRUN": str(mpirun)}, cwd=repository, stdin=subprocess.DEVNULL,
                             timeout=200, capture_output=True, text=True, check=False)  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert "1 data × 1 fsdp × 2 tensor" in process.stderr
    assert process.stderr.count("goes on after step 8") == 1  # Only one process prints.
    moved = train.read(tmp_path / "moved" / "losses.jsonl")
    np.testing.assert_allclose(losses_of(moved), losses_of(steps), rtol=1e-4)


# --- Fused and XLA compared -------------------------------------------------------------------------------------------


def drifting(scale: float, seed: int) -> list[train.Step]:
    noise = np.random.default_rng(seed).normal(scale=scale, size=50)
    return [{"step": n + 1, "loss": 5.0 - 0.05 * n + float(noise[n]), "seconds": None} for n in range(50)]


@pytest.mark.parametrize(("fused_scale", "status"), [(1e-3, 0), (2e-2, 1)])
def test_the_comparison_tells_rounding_from_error(tmp_path, text, monkeypatch, capsys, fused_scale, status):
    """Within rounding the fused run passes; beyond it, as with a wrong gradient, it fails."""
    made = {"xla": drifting(0, 0), "xla-other-order": drifting(1e-3, 1), "fused": drifting(fused_scale, 2)}
    chosen = {}

    def run(options, text):
        chosen[options.out.name] = options.implementation, options.data, options.tensor
        return made[options.out.name]

    monkeypatch.setattr(train, "train", run)
    assert train.compare(told(tmp_path, "--data 2 --tensor 4 --compare"), text) == status
    assert ("NOT within" in capsys.readouterr().out) == bool(status)
    assert chosen == {"xla": ("xla", 2, 4), "xla-other-order": ("xla", 4, 2), "fused": ("fused", 2, 4)}
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_with_emulated_kernels(repository, tmp_path):
    command = [sys.executable, "examples/train.py", "--compare", "--steps", "6", "--data", "1", "--out", str(tmp_path)]
    process = subprocess.run(command, env=environment(repository), cwd=repository, stdin=subprocess.DEVNULL,
                             timeout=280, capture_output=True, text=True, check=False)  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert "The fused curve is within 3 times the distance that another order of summation makes." in process.stdout


# --- Options ----------------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_are_taken_and_it_names_all_files(repository):
    page = (repository / "docs" / "training.md").read_text()
    shell = "".join(re.findall(r"```sh\n(.*?)```", page, re.S))
    commands = re.findall(r"^.*python examples/train\.py(.*)$", shell, re.M)
    commands += [shlex.split(words)[0] for words in re.findall(r"make train ARGS=(.*)", page)]
    assert len(commands) >= 8
    for command in commands:
        train.parser().parse_args(shlex.split(command))
    assert {"train.py", "gpt.py"} <= set(re.findall(r"(\w+\.py)`", page.split("## Your own model")[1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--features 30", "--features 30 is not divisible by --heads 4: choose --features 32, say"),
        ("--hidden 65 --tensor 2", "--hidden 65 is not divisible by --tensor 2: choose --hidden 66, say"),
        ("--batch 8 --data 2 --accumulate 3", "--accumulate 3: choose --batch 12, say"),
        ("--data 4 --tensor 4", "--data 4 × --fsdp 1 × --tensor 4 asks for 16 devices, and there are 8"),
        ("--compare --tensor 2 --implementation xla", "--compare takes --tensor 2 or more, and no --implementation"),
        ("--compare --tensor 1 --data 8", "--compare takes --tensor 2 or more"),
    ],
)
def test_arguments_that_do_not_go_together(tmp_path, arguments, message):
    with pytest.raises(WrongArguments) as refused:
        told(tmp_path, arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "devices", "mesh"),
    [("", 4, (1, 1, 4)), ("--data 2", 4, (2, 1, 2)), ("--fsdp 2 --tensor 2", 8, (2, 2, 2)), ("", 16, (2, 1, 8))],
)
def test_axes_that_are_not_given_are_chosen(tmp_path, arguments, devices, mesh):
    heads = "--heads 8 --features 32 --batch 16 " + arguments
    chosen = told(tmp_path, heads, devices=devices)
    assert (chosen.data, chosen.fsdp, chosen.tensor) == mesh
