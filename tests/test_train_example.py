"""examples/train.py: it learns, a stopped run resumes with the same losses, and invalid options are refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import resource
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
from train_cases import TINY, environment, losses_of, told  # First: it puts examples/ on the path.

import train  # isort: skip
from gpt import corpus, devices, losses, options, run, training  # isort: skip
from gpt.checkpoints import Checkpoints, NotSaved  # isort: skip
from gpt.devices import Refused  # isort: skip
from gpt.losses import Step  # isort: skip
from gpt.stopping import Stopped  # isort: skip


@pytest.fixture(scope="module")
def text():
    return corpus.stories(1 << 20, 0)


def call_at(patched: pytest.MonkeyPatch, at: int, function: Callable[[], object]) -> None:
    """Calls a function while a step is being prepared."""
    batch = corpus.batch

    def calling(text, seed, step, **sizes):
        if step == at:
            function()
        return batch(text, seed, step, **sizes)

    patched.setattr(corpus, "batch", calling)


def signal_at(patched: pytest.MonkeyPatch, at: int, number: signal.Signals) -> None:
    """Sends this process a signal while a step is being prepared."""
    call_at(patched, at, lambda: os.kill(os.getpid(), number))


# --- The text ---------------------------------------------------------------------------------------------------------


def test_the_stories_are_the_same_everywhere(text):
    assert (
        hashlib.sha256(text.tobytes()).hexdigest() == "7e1280d3b3902314b1ee0119421a49d3bcd9106514865bd10d5a58a9fa87dd2b"
    )
    assert not np.array_equal(text, corpus.stories(1 << 20, 1))


@pytest.mark.one_jax
def test_the_stories_count_correctly(text):
    number = {word: value for value, word in enumerate(corpus._NUMBERS)}
    whole = bytes(text).decode()
    gifts = re.findall(r"has (\w+) \w+\. .*? gives (\w+) \w+ to \w+\. Now \w+ has (\w+) ", whole)
    finds = re.findall(r"There \w+ (\w+) \w+ in the .*? finds (\w+) \w+ more\. Together that makes (\w+) ", whole)
    assert len(gifts) > 1000 and len(finds) > 1000
    assert all(number[before] - number[given] == number[after] for before, given, after in gifts)
    assert all(number[before] + number[found] == number[after] for before, found, after in finds)


def test_batches_depend_on_seed_and_step_alone(text):
    batch = corpus.batch(text, 3, 7, size=4, sequence=16)
    assert batch.shape == (4, 17)
    assert np.array_equal(batch, corpus.batch(text, 3, 7, size=4, sequence=16))
    for seed, step in ((3, 8), (4, 7)):
        assert not np.array_equal(batch, corpus.batch(text, seed, step, size=4, sequence=16))
    whole = text.tobytes()
    assert all(bytes(row.astype(np.uint8)) in whole for row in batch)


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Runs that differ only in their folder share a compiled program: most of their time is compilation."""
    made: dict[options.Options, run.Program] = {}

    def program(chosen: options.Options) -> run.Program:
        key = dataclasses.replace(chosen, out=pathlib.Path())
        return made[key] if key in made else made.setdefault(key, training.Program(chosen))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "Program", program)
        yield


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, text):
    """A run that was not stopped, and its folder."""
    folder = tmp_path_factory.mktemp("whole")
    return run.train(told(folder, "--data 2 --tensor 2"), text, title="whole"), folder


def test_the_loss_falls(whole_run):
    first, *_, last = losses_of(whole_run[0].steps)
    assert len(whole_run[0].steps) == 12
    assert abs(first - math.log(256)) < 1.5  # No loss is known yet.
    assert last < first - 1.5


def test_the_step_is_compiled_once(whole_run):
    assert whole_run[0].program._step._cache_size() == 1


def test_the_file_holds_the_losses(whole_run):
    result, folder = whole_run
    lines = (folder / "losses.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == losses_of(result.steps)


# The test of another mesh below uses the first case's program, and checks the same about it.
@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        "--fsdp 2 --tensor 2 --accumulate 2",
        "--data 2 --fsdp 2 --tensor 2 --remat",
        "--tensor 4",
        "--fsdp 8",
    ],
)
def test_mesh_and_memory_change_nothing_but_rounding(tmp_path, text, whole_run, monkeypatch, arguments):
    expected = losses_of(whole_run[0].steps)
    spread = told(tmp_path / "spread", arguments)
    np.testing.assert_allclose(losses_of(run.train(spread, text, title="spread").steps), expected, rtol=1e-4)
    # Different batches change the losses by more than rounding.
    batch = corpus.batch
    monkeypatch.setattr(corpus, "batch", lambda text, seed, step, **sizes: batch(text, seed + 1, step, **sizes))
    other = run.train(told(tmp_path / "other", "--data 2 --tensor 2"), text, title="other")
    assert np.abs(np.divide(losses_of(other.steps), expected) - 1).max() > 1e-3


@pytest.mark.one_jax
def test_weights_and_moments_are_sharded(tmp_path):
    program = training.Program(told(tmp_path, "--data 2 --fsdp 2 --tensor 2"))
    state = program.first_state()
    up = state["params"]["blocks"][0]["mlp"]["up"]["kernel"][...]
    assert up.addressable_shards[0].data.shape == (32 // 2, 64 // 2)
    large = [leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.shape == up.shape]
    assert large and all(leaf.sharding.is_equivalent_to(up.sharding, 2) for leaf in large if leaf.shape == (32, 64))
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.one_jax
def test_a_loss_that_is_no_number_ends_the_run(tmp_path, text, monkeypatch):
    """The checkpoints saved before are finite, and nothing is saved after."""
    step = training.Program.step

    def diverging(self, state, tokens, *, stop):
        state, metrics = step(self, state, tokens, stop=stop)
        diverging.calls += 1
        return state, metrics | {"gradient_norm": jnp.inf} if diverging.calls == 6 else metrics

    diverging.calls = 0
    monkeypatch.setattr(training.Program, "step", diverging)
    with pytest.raises(
        run.Diverged, match=r"step 6 has loss .* gradient norm inf. The last checkpoint is of step 4: go on"
    ):
        run.train(told(tmp_path, "--data 2 --tensor 2"), text, title="wild")
    assert [step.step for step in losses.read(tmp_path / "losses.jsonl")] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4"]


@pytest.mark.one_jax
def test_a_checkpoint_that_cannot_be_written_ends_the_run(tmp_path, text):
    """The second checkpoint fails; the first stays."""
    full = told(tmp_path, "--data 2 --tensor 2")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    with pytest.MonkeyPatch.context() as patched:
        call_at(patched, 6, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1])))
        try:
            with pytest.raises(NotSaved, match=r"\(File too large\). The last one is of step 4: make room"):
                run.train(full, text, title="full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()] == ["4"]


# --- Stopped and resumed ----------------------------------------------------------------------------------------------


@pytest.mark.one_jax
def test_a_stopped_run_goes_on_with_the_same_losses(tmp_path, text, whole_run, monkeypatch):
    """The signal comes while step 6 is prepared. Step 7 tells all processes, and its state is saved."""
    again = told(tmp_path, "--data 2 --tensor 2")
    handler = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        signal_at(patched, 6, signal.SIGTERM)
        with pytest.raises(Stopped) as stopped:
            run.train(again, text, title="stopped")
    assert (stopped.value.step, stopped.value.status) == (7, 128 + signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert len(losses.read(tmp_path / "losses.jsonl")) == 7
    resumed = run.train(again, text, title="resumed")
    assert losses_of(resumed.steps) == losses_of(whole_run[0].steps)


def test_a_run_goes_on_on_another_mesh(tmp_path, text, whole_run, capfd):
    result, folder = whole_run
    shutil.copytree(folder, tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "12")
    moved = told(tmp_path / "moved", "--fsdp 2 --tensor 2 --accumulate 2")
    steps = run.train(moved, text, title="moved").steps
    assert "goes on after step 8" in capfd.readouterr().err
    assert losses_of(steps[:8]) == losses_of(result.steps[:8])
    np.testing.assert_allclose(losses_of(steps), losses_of(result.steps), rtol=1e-4)


def test_what_has_changed_is_said(whole_run):
    _, folder = whole_run
    checkpoints = Checkpoints(folder / "checkpoints", told(folder, "--steps 20 --seed 1"))
    assert checkpoints.check() == ["--steps 12 before, 20 now", "--seed 0 before, 1 now"]
    checkpoints.close()


def test_steps_after_the_checkpoint_are_computed_again(tmp_path):
    path = tmp_path / "losses.jsonl"
    file = losses.LossFile(path, last_step=0)
    for number in range(1, 8):
        file.add(Step(number, 1.0 / number, 0.1, None))
    file.close()
    path.write_text(path.read_text()[:-9])  # The process was killed while it wrote.
    assert [step.step for step in losses.read(path)] == list(range(1, 7))
    losses.LossFile(path, last_step=4).close()
    assert losses.read(path) == [Step(number, 1.0 / number, 0.1, None) for number in range(1, 5)]


def test_another_models_checkpoints_are_refused(text, whole_run):
    _, folder = whole_run
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(Refused, match="--features 32 before, 64 now"):
        run.train(told(folder, "--features 64"), text, title="other")
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_two_runs_in_one_folder_are_refused(tmp_path, text):
    with losses.locked(tmp_path), pytest.raises(Refused, match="another run is writing to"):
        run.train(told(tmp_path), text, title="second")


# --- As a command -----------------------------------------------------------------------------------------------------


def start(repository: pathlib.Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "examples/train.py", *TINY.split(), *arguments]
    return subprocess.Popen(command, env=environment(repository) | variables, cwd=repository, text=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip


@pytest.fixture
def main(monkeypatch):
    """Runs the command in this process, which has its devices already; returns the exit status."""

    def started(data, fsdp, tensor, *, emulate):
        return devices.fit(data or 2, fsdp, tensor or 2, devices=8, processes=1)

    def call(out: pathlib.Path, arguments: str = "") -> int:
        monkeypatch.setattr(sys, "argv", ["examples/train.py", *TINY.split(), "--out", str(out), *arguments.split()])
        return train.main()

    monkeypatch.setattr(devices, "start", started)
    return call


@pytest.mark.one_jax
def test_the_exit_status_of_a_stopped_run(tmp_path, main, monkeypatch, capfd):
    with monkeypatch.context() as patched:
        signal_at(patched, 6, signal.SIGUSR1)
        assert main(tmp_path) == 128 + signal.SIGUSR1
    again = shlex.join(sys.argv[1:])
    assert capfd.readouterr().err.endswith(
        "train: stopped after step 7, which is saved. The same command goes on from there: "
        f"python examples/train.py {again}\n"
    )
    assert not (tmp_path / "losses.png").exists()


@pytest.mark.slow
def test_the_last_lines(tmp_path, main, whole_run, monkeypatch, capfd):
    with monkeypatch.context() as patched:
        signal_at(patched, 6, signal.SIGUSR1)
        assert main(tmp_path) == 128 + signal.SIGUSR1
    assert main(tmp_path) == 0
    said = capfd.readouterr()
    assert "goes on after step 7" in said.err
    first, *_, last = losses_of(whole_run[0].steps)
    assert f"Loss {first:.4f} at step 1, {last:.4f} at step 12; " in said.out
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert main(tmp_path) == 0
    assert "all 12 steps are done already" in capfd.readouterr().err
    assert main(tmp_path, "--features 64") == 2
    assert "holds checkpoints of another model (--features 32 before, 64 now)" in capfd.readouterr().err


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 100) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until, "it does not come to the place where it is to be stopped"
        time.sleep(0.002)


@pytest.mark.one_jax
def test_a_killed_run_goes_on_with_the_same_losses(repository, tmp_path, whole_run):
    """The kill comes while a checkpoint is half written."""
    steps, out = ("--data", "2", "--tensor", "2", "--out", str(tmp_path / "run")), tmp_path / "run" / "checkpoints"
    # The second process uses the first one's compilation cache.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def half_written() -> bool:
        return any("8" in path.name and "tmp" in path.name for path in out.glob("*"))

    with start(repository, *steps, **cache) as process:
        wait_for(half_written, process)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "run" / "losses.png").exists()

    with start(repository, *steps, **cache) as process:
        output, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert "goes on after step 4" in error or "goes on after step 8" in error
    assert losses_of(losses.read(tmp_path / "run" / "losses.jsonl")) == losses_of(whole_run[0].steps)
    assert "Plot: " in output


@pytest.mark.slow
@pytest.mark.one_jax
def test_two_processes_of_mpirun(repository, tmp_path, whole_run):
    """Each process has one device. They resume from a checkpoint of one process with four devices."""
    mpirun = pathlib.Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside Python (extra `mpi`)")
    result, folder = whole_run
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
    steps = losses.read(tmp_path / "moved" / "losses.jsonl")
    np.testing.assert_allclose(losses_of(steps), losses_of(result.steps), rtol=1e-4)
