"""Trains a small GPT made of overlap's layers, and continues where it was stopped. docs/training.md is the guide.

    make train                                          on the visible GPUs, else on 4 CPU devices
    python examples/train.py --tensor 4 --data 2        on 8 GPUs
    launch/mpirun.sh -np 4 -- python examples/train.py  one process per device
    python examples/train.py --compare                  fused against XLA: the losses, and how far rounding alone leads

The modules are in examples/gpt/.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time

import jax
import numpy as np
from gpt import compare, corpus, curves, devices, options, run
from gpt.checkpoints import NotSaved
from gpt.devices import Refused
from gpt.options import Options
from gpt.run import Diverged
from gpt.stopping import Stopped
from jax.experimental import multihost_utils

from overlap.cli import ending

# The first process prints why a job is refused. The others wait this long before they end, since a launcher ends the
# job when any process has ended.
_TIME_TO_SAY_S = 1.0


def main() -> int:
    """Returns the exit status: 0 done; 1 diverged, apart or not saved; 2 refused; 130, 138, 143 stopped by a signal."""
    given = options.parser().parse_args()
    try:
        emulate = given.compare or given.implementation == "fused"
        axes = devices.start(given.data, given.fsdp, given.tensor, emulate=emulate)
        chosen = options.complete(given, axes, gpus=jax.default_backend() == "gpu", processes=jax.process_count())
        text = _text(given, chosen)
        options.check_text(chosen, text.size)
        status = _compare(chosen, text) if given.compare else _train(chosen, text)
    except (Refused, Diverged, NotSaved) as reason:
        _say(f"train: {reason}")
        return 2 if isinstance(reason, Refused) else 1
    except Stopped as stopped:
        again = shlex.join(sys.argv[1:])
        _say(
            f"train: stopped after step {stopped.step}, which is saved. The same command goes on from there: "
            f"python examples/train.py {again}".rstrip()
        )
        return stopped.status
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("trained")  # All processes end together.
    return status


def _text(given: argparse.Namespace, chosen: Options) -> np.ndarray:
    if given.text:
        return corpus.read(given.text)
    return corpus.stories(chosen.text_mb << 20, chosen.training.seed)


def _train(chosen: Options, text: np.ndarray) -> int:
    start = time.perf_counter()
    result = run.train(chosen, text, title="train")
    if jax.process_index() == 0:
        plot = chosen.out / "losses.png"
        curves.draw({"loss": result.steps}, plot, title=_title(chosen))
        first, last = result.steps[0], result.steps[-1]
        print(
            f"Loss {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}; "
            f"{time.perf_counter() - start:.0f} s. Plot: {plot}"
        )
    return 0


def _compare(chosen: Options, text: np.ndarray) -> int:
    result = compare.compare(chosen, text)
    if result is None:  # The first process prints the comparison.
        return 0
    plot = chosen.out / "losses.png"
    curves.draw(result.runs, plot, title=_title(chosen))
    print("\n".join(result.lines()))
    print(f"Plot: {plot}")
    return 0 if result.agree else 1


def _title(chosen: Options) -> str:
    sizes = chosen.sizes
    return (
        f"{sizes.layers} layers of {sizes.features} features, {chosen.training.batch} sequences of {sizes.sequence} "
        f"bytes, {chosen.training.dtype}, {jax.device_count()} {jax.devices()[0].device_kind} devices"
    )


def _say(text: str) -> None:
    if jax.distributed.is_initialized() and jax.process_index() > 0:
        time.sleep(_TIME_TO_SAY_S)
    else:
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(ending.run(main))
