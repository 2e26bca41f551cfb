"""What a trained model writes."""

from __future__ import annotations

import numpy as np

from gpt import corpus
from gpt.training import Program, State

_PROMPT_BYTES = 24


def write(program: Program, state: State, text: np.ndarray, *, size: int) -> tuple[str, str]:
    """Returns the beginning of the text that was learned, and `size` bytes as the model goes on, each the likeliest.

    All processes of a job call it. Nothing is cached from one byte to the next: the whole window is computed for each.
    """
    axes, sequence = program.options.axes, program.options.sizes.sequence
    prompt = text[: min(_PROMPT_BYTES, sequence)].astype(np.int32)
    tokens = prompt.tolist()
    for _ in range(size):
        window = np.zeros(sequence, np.int32)
        seen = tokens[-sequence:]
        window[: len(seen)] = seen
        # One row for each device that shares a batch.
        rows = np.broadcast_to(window, (axes.data * axes.fsdp, sequence))
        tokens.append(int(np.argmax(np.asarray(program.logits(state, rows)[0, len(seen) - 1]))))
    return corpus.as_text(prompt), corpus.as_text(tokens[len(prompt) :])
