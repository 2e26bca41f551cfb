"""Measures a whole function by kernels, plainly by XLA, and as the tuned choice has it.

Times of single products do not say which is faster in a step: there XLA starts collectives beside other products.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from overlap.choice.choose import Session
from overlap.choice.problem import Problem
from overlap.choice.session import session

_ROUNDS = 5
# The choice is kept unless another way is faster by this factor: less is noise.
_LEAST_GAIN = 1.01


def can_run(args: Any) -> bool:
    """Whether the arguments of a function hold arrays, and not types alone."""
    return not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(args))


def times_ms(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], problems: Iterable[Problem], chosen: Session
) -> dict[str, float]:
    """Returns the milliseconds of `fn(*args, **kwargs)` with all products by kernels, by XLA, and by the choice.

    The three are measured in turns, and the medians count. A function that cannot run in one of these ways, for want of
    memory for example, has no time there. Arguments that `fn` donates are copied before each call.

    Args:
      fn: the function. It is jitted unless it is already.
      args, kwargs: its arguments.
      problems: the problems of all products in it.
      chosen: the session with the configurations and times of the problems.
    """
    run = fn if hasattr(fn, "lower") else jax.jit(fn)
    ways: dict[str, Session] = {
        "": chosen,
        "fused": Session(chosen.configs, chosen.measured, verdicts=dict.fromkeys(problems, "fused")),
        "xla": Session(chosen.configs, chosen.measured, verdicts=dict.fromkeys(problems, "xla")),
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    # The first round compiles, and is not counted.
    for number in range(1 + _ROUNDS):
        for way in tuple(samples):
            try:
                with session(ways[way]):
                    ms = _call_ms(run, args, kwargs)
            except (jax.errors.JaxRuntimeError, NotImplementedError):
                del samples[way]
                continue
            if number:
                samples[way].append(ms)
    return {way: statistics.median(found) for way, found in samples.items()}


def _call_ms(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    # A function may donate its arguments, which are then gone.
    args, kwargs = jax.block_until_ready(jax.tree.map(_copy, (args, kwargs)))
    start = time.perf_counter()
    jax.block_until_ready(run(*args, **kwargs))
    return 1e3 * (time.perf_counter() - start)


def _copy(leaf: Any) -> Any:
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def faster(ms: dict[str, float]) -> str:
    """Returns the fastest way; "" where the choice is about as fast."""
    best = min(ms, key=lambda way: ms[way], default="")
    return "" if "" in ms and ms[""] < _LEAST_GAIN * ms[best] else best
