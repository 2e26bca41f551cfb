"""Lets a trained model write text."""

from __future__ import annotations

import numpy as np

from gpt import corpus
from gpt.training import Program, State

_PROMPT_BYTES = 24


def write(program: Program, state: State, text: np.ndarray, *, size: int) -> tuple[str, str]:
    """Returns the beginning of the training text, and `size` bytes with which the model continues it.

    Each byte is the most likely one. All processes of a job call this function. Nothing is cached between bytes: the
    whole window is computed for each of them.
    """
    axes, sequence = program.options.axes, program.options.sizes.sequence
    prompt = text[: min(_PROMPT_BYTES, sequence)].astype(np.int32)
    tokens = prompt.tolist()
    for _ in range(size):
        window = np.zeros(sequence, np.int32)
        seen = tokens[-sequence:]
        window[: len(seen)] = seen
        # The batch must have a row for each device along its axes.
        rows = np.broadcast_to(window, (axes.data * axes.fsdp, sequence))
        tokens.append(int(np.argmax(np.asarray(program.logits(state, rows)[0, len(seen) - 1]))))
    return corpus.as_text(prompt), corpus.as_text(tokens[len(prompt) :])
