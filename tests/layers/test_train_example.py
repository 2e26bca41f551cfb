"""examples/train.py: it learns, a killed or stopped run goes on with the same losses, wrong options are refused."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
for package in ("flax", "optax", "orbax.checkpoint"):
    pytest.importorskip(package, reason=f"{package} is not installed (extra `examples`)")

import gpt  # noqa: E402  # isort: skip
import train  # noqa: E402  # isort: skip
from overlap.cli.arguments import WrongArguments  # noqa: E402  # isort: skip

MESH = "--data 1 --fsdp 2 --tensor 2 --accumulate 2"
TINY = (
    "--layers 1 --features 32 --heads 4 --hidden 64 --sequence 32 --batch 8 --learning-rate 1e-2 --steps 12 --warmup 2 "
    "--dtype float32 --checkpoint-every 4"
)


def told(out: pathlib.Path, arguments: str = "", *, devices: int = 8) -> argparse.Namespace:
    """Parses the options of a tiny model, followed by further arguments."""
    given = train.parser().parse_args([*TINY.split(), "--out", str(out), *arguments.split()])
    train.complete(given, devices=devices, gpus=False)
    return given


def losses_of(steps: list[train.Step]) -> list[float]:
    return [step["loss"] for step in steps]


@pytest.fixture(scope="module")
def text():
    return train.stories(1 << 20, 0)


# --- Training ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def compiled_once():
    """Runs that differ only in their folder share a program."""
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


def test_the_loss_falls_and_the_step_is_compiled_once(whole_run, text, capfd):
    steps, folder = whole_run
    first, *_, last = losses_of(steps)
    assert len(steps) == 12 and steps == train.read(folder / "losses.jsonl")
    assert abs(first - math.log(256)) < 1.5  # No loss is known yet.
    assert last < first - 1.5
    assert train.Program(told(folder, MESH))._step._cache_size() == 1
    sizes = folder / "model.json"  # Runs from before there were experts say nothing of them.
    sizes.write_text(
        json.dumps({name: size for name, size in json.loads(sizes.read_text()).items() if name != "experts"})
    )
    train.train(told(folder, MESH), text)
    assert "all steps are done after step 12" in capfd.readouterr().err
    with pytest.raises(WrongArguments, match="another model"):
        train.train(told(folder, f"{MESH} --features 64"), text)


def test_a_step_is_that_of_one_device_without_overlap(whole_run):
    """Loss and gradient of the first step; weights and moments are sharded along two axes, in float32."""
    steps, folder = whole_run
    options = told(folder, MESH)
    program = train.Program(options)
    alone = gpt.Program(told(folder, "--data 1 --tensor 1 --implementation plain"))
    state, tokens = program.first(), train.batch(train.stories(1 << 20, 0), options, 1)
    params = jax.tree.map(np.asarray, state["params"])
    with jax.set_mesh(alone._mesh):
        loss, gradient = jax.jit(jax.value_and_grad(alone._loss))(params, tokens)
    norm = math.sqrt(sum(float((np.asarray(leaf) ** 2).sum()) for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose((steps[0]["loss"], steps[0]["gradient_norm"]), (loss, norm), rtol=1e-4)
    up = state["params"]["blocks"][0]["mlp"]["up"]["kernel"][...]
    assert up.addressable_shards[0].data.shape == (32 // 2, 64 // 2)
    large = [leaf for leaf in jax.tree.leaves(state["optimizer"]) if leaf.shape == up.shape]
    assert large and all(leaf.sharding.is_equivalent_to(up.sharding, 2) for leaf in large)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(state["params"]))


@pytest.mark.slow
def test_a_model_of_experts_learns(tmp_path, text):
    steps = train.train(told(tmp_path, "--data 1 --fsdp 2 --tensor 2 --experts 4 --remat"), text)
    assert losses_of(steps)[-1] < losses_of(steps)[0] - 1.5


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["--data 2 --fsdp 2 --tensor 2 --remat", "--fsdp 8"])
def test_a_run_goes_on_on_another_mesh(tmp_path, text, whole_run, capfd, arguments):
    """Mesh and memory change nothing but rounding."""
    shutil.copytree(whole_run[1], tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved" / "checkpoints" / "12")
    moved = train.train(told(tmp_path / "moved", arguments), text)
    assert "goes on after step 8" in capfd.readouterr().err
    assert losses_of(moved[:8]) == losses_of(whole_run[0][:8])
    np.testing.assert_allclose(losses_of(moved), losses_of(whole_run[0]), rtol=1e-4)


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


def run_command(monkeypatch: pytest.MonkeyPatch, out: pathlib.Path) -> int:
    """Runs the command in this process, which has its devices already."""
    monkeypatch.setattr(sys, "argv", ["train.py", *TINY.split(), *MESH.split(), "--out", str(out)])
    monkeypatch.setattr(train, "start", lambda options: train.complete(options, devices=8, gpus=False))
    return train.main()


@pytest.mark.one_jax
def test_a_stopped_run_goes_on_with_the_same_losses(tmp_path, whole_run, monkeypatch, capfd):
    """The signal comes while step 6 is prepared. Step 7 tells all processes, and its state is saved."""
    handler, batch = signal.getsignal(signal.SIGUSR1), train.batch

    def signalled(text, options, step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGUSR1)
        return batch(text, options, step)

    with monkeypatch.context() as patched:
        patched.setattr(train, "batch", signalled)
        assert run_command(monkeypatch, tmp_path) == 128 + signal.SIGUSR1
    assert "stopped after step 7, which is saved. The same command goes on" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGUSR1) is handler
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 8')  # As if the process had been killed while it wrote.
    assert len(train.read(tmp_path / "losses.jsonl")) == 7
    assert run_command(monkeypatch, tmp_path) == 0
    assert losses_of(train.read(tmp_path / "losses.jsonl")) == losses_of(whole_run[0])


@pytest.mark.slow
@pytest.mark.one_jax
def test_a_process_that_was_killed_goes_on_with_the_same_losses(repository, tmp_path, whole_run, monkeypatch, capfd):
    """SIGKILL comes while a checkpoint is half written."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(repository)}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "COLUMNS": "200"}
    command = [sys.executable, "examples/train.py", *TINY.split(), *MESH.split(), "--out", str(tmp_path / "run")]
    pipes: dict = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=repository, **pipes) as process:
        while not any("4" in path.name for path in (tmp_path / "run" / "checkpoints").glob("*")):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.002)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert run_command(monkeypatch, tmp_path / "run") == 0
    assert losses_of(train.read(tmp_path / "run" / "losses.jsonl")) == losses_of(whole_run[0])
    assert re.search(r"Loss \d\.\d+ at step 1, \d\.\d+ at step 12. Plot: ", capfd.readouterr().out)
    assert (tmp_path / "run" / "losses.png").read_bytes().startswith(b"\x89PNG")


# --- Compared with plain JAX ------------------------------------------------------------------------------------------


def drifting(scale: float, seed: int) -> list[train.Step]:
    noise = np.random.default_rng(seed).normal(scale=scale, size=50)
    return [{"step": n + 1, "loss": 5.0 - 0.05 * n + float(noise[n]), "seconds": None} for n in range(50)]


@pytest.mark.parametrize(
    ("mesh", "other"), [((2, 1, 4), (4, 1, 2)), ((1, 4, 1), (1, 2, 2)), ((1, 2, 3), (3, 2, 1))], ids=str
)
def test_the_comparison_tells_rounding_from_error(tmp_path, monkeypatch, capsys, mesh, other):
    """Within rounding the runs by overlap pass; beyond it, as with a wrong gradient, either fails."""
    for fused_scale, chosen_scale in ((1e-3, 1e-3), (2e-2, 1e-3), (1e-3, 2e-2)):
        made = {"plain": drifting(0, 0), "plain-other-order": drifting(1e-3, 1), "fused": drifting(fused_scale, 2),
                "chosen": drifting(chosen_scale, 3)}  # fmt: skip
        told_to = {}

        def run(options, text, made=made, told_to=told_to):
            told_to[options.out.name] = options.implementation, (options.data, options.fsdp, options.tensor)
            return made[options.out.name]

        monkeypatch.setattr(train, "train", run)
        sizes = "--heads 12 --features 48 --hidden 96 --sequence 48 --batch 12"
        axes = "--data {} --fsdp {} --tensor {}".format(*mesh)
        status = train.compare(told(tmp_path, f"{sizes} {axes} --compare"), np.zeros(1, np.uint8))
        assert status == int(max(fused_scale, chosen_scale) > 1e-2)
        assert ("NOT within" in capsys.readouterr().out) == bool(status)
        assert told_to == {
            "plain": ("plain", mesh), "plain-other-order": ("plain", other), "fused": ("fused", mesh),
            "chosen": ("auto", mesh),
        }  # fmt: skip
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


# --- Options ----------------------------------------------------------------------------------------------------------


def test_arguments_that_do_not_go_together_and_axes_that_are_chosen(tmp_path):
    for arguments, message in (
        ("--features 30", "--features 30 is not divisible by --heads 4: choose --features 32, say"),
        ("--hidden 65 --tensor 2", "--hidden 65 is not divisible by --tensor 2: choose --hidden 66, say"),
        ("--batch 8 --data 2 --accumulate 3", "--accumulate 3: choose --batch 12, say"),
        ("--data 4 --tensor 4", "--data 4 × --fsdp 1 × --tensor 4 asks for 16 devices, and there are 8"),
        ("--compare --tensor 2 --implementation xla", "--compare takes --tensor or --fsdp 2 or more, and no --impl"),
        ("--experts 6 --tensor 4", "--experts 6 is not divisible by --tensor 4: choose --experts 8, say"),
        ("--experts 2 --fsdp 4 --hidden 66 --tensor 2", "--hidden 66 is not divisible by --fsdp 4: choose --hidden 68"),
        (
            "--vocabulary 300 --tensor 2 --implementation plain",
            "is not divisible by 8 × --tensor 2: choose --vocabulary 304",
        ),
        ("--vocabulary 255", "--vocabulary 255 is less than the 256 bytes of a text: leave it out"),
        ("--compare --tensor 1 --data 8", "--compare takes --tensor or --fsdp 2 or more"),
    ):
        with pytest.raises(WrongArguments) as refused:
            told(tmp_path, arguments)
        assert message in str(refused.value)
    for arguments, devices, mesh in (
        ("", 4, (1, 1, 4)), ("--data 2", 4, (2, 1, 2)), ("--fsdp 2 --tensor 2", 8, (2, 2, 2)), ("", 16, (2, 1, 8)),
    ):  # fmt: skip
        chosen = told(tmp_path, f"--heads 8 --features 32 --batch 16 {arguments}", devices=devices)
        assert (chosen.data, chosen.fsdp, chosen.tensor) == mesh
