"""benchmarks.host_time: the steps of XLA's runtime that a profile of calls has."""

import jax
import jax.numpy as jnp

from benchmarks.host_time import dispatch_us, steps_us


def test_steps_are_counted_per_call_and_thread() -> None:
    square, x = jax.jit(lambda x: x @ x), jnp.ones((64, 64))
    assert dispatch_us(lambda: square(x), 5) > 0
    once, twice = (steps_us(call, 20) for call in (lambda: square(x), lambda: square(square(x))))
    [call] = [name for name in once if name.startswith("PjitFunction")]  # Runs in the calling thread.
    assert once[call][0] > 0 and twice[call][1] == 2 * once[call][1] and once[call][1] in (1, 2)
    assert not any(name.startswith(("$", "[")) for name in once)
