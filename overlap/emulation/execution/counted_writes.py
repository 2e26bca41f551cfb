"""Writes to shared memory that land later, and whose bytes a barrier of the same CTA then counts.

Used for `async_store_smem` and for cluster launch control. The loads of TMA are in `engines`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..foundations.clocks import Knowledge
from ..state.memory import View
from ..state.sync import MBarrier
from .engines import Arrival, Engine, Issued, Issuer


def counted_write(
    engine: Engine,
    thread: Issuer,
    target: View,
    barrier: MBarrier,
    value: Callable[[], np.ndarray],
    what: str,
    *,
    nbytes: int,
    atomic: bool = False,
    asynchronous: bool = True,
    on_landing: Callable[[], None] = lambda: None,
) -> Arrival:
    """Makes a write to the shared memory of a CTA. The write lands later, and `barrier` then counts its bytes.

    The write is checked for races here. The caller makes the barrier expect the bytes, and passes the returned
    operation to `Engine.fly`.

    Args:
        engine: the launch's engine.
        thread: the issuer, of the same CTA as `target` or of another CTA of the cluster.
        target: the memory that is written.
        barrier: the barrier in the CTA of `target` that counts the bytes.
        value: returns what is written. It is called when the write lands.
        what: names the write in messages.
        nbytes: the bytes that the barrier counts.
        atomic: whether the write is an atomic operation. Atomic operations need no order among each other.
        asynchronous: whether the write goes through the asynchronous proxy.
        on_landing: is called when the write has landed.
    """
    knowledge = thread.knowledge.copy()
    component, time = thread.pool.take(knowledge.seen)
    knowledge.note(component, time)
    op = Issued(thread, thread.instruction, knowledge, component, time)
    engine.record(op, target, what, component, time, write=True, atomic=atomic, asynchronous=asynchronous)
    if barrier.cta is not thread.cta:  # Another CTA learns of this write, but not of earlier actions of the issuer.
        knowledge = Knowledge()
        knowledge.note(component, time)

    def complete() -> None:
        target.write(value())
        on_landing()
        barrier.landed(nbytes, knowledge)

    return Arrival(thread, barrier, complete)
