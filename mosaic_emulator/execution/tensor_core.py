"""The tensor core of a CTA, or of a pair of CTAs (Blackwell): issues `tcgen05` operations and computes their results.

`tensor_queue` says when they complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..foundations.arithmetic import matmul
from ..state.memory import View
from ..state.sync import MBarrier
from .machine import Thread
from .operations import Arrival


class Operands(NamedTuple):
    """The memory that an mma reads and writes in one CTA; the scales are None unless the mma is block-scaled."""

    accumulator: View
    a: View
    b: View
    a_scale: View | None = None
    b_scale: View | None = None


def multiply(thread: Thread, ctas: Sequence[Operands], *, accumulate: bool) -> None:
    """Issues an mma of one CTA, or of a pair of CTAs.

    In a pair, each CTA has half of the rows of `a` and of the accumulator, and half of the columns of `b`.
    """
    engine, queue = thread.machine.engine, thread.tensor.queue
    op = queue.issue(thread, "an mma", collective=len(ctas) > 1)

    def record(view: View, what: str, *, write: bool = False, by_rows: bool = False) -> None:
        engine.record(op, view, f"tcgen05 mma, {what}", write=write, by_rows=by_rows)

    for own in ctas:
        record(own.a, "left operand", by_rows=True)
        record(own.b, "right operand")
        if own.a_scale is not None and own.b_scale is not None:
            record(own.a_scale, "left scales")
            record(own.b_scale, "right scales")
        # An accumulating mma also reads the accumulator. The check of the write finds all races of that read. So the
        # read is recorded only if a part of the accumulator has not been written.
        if accumulate and thread.machine.detector is not None and not own.accumulator.cells()[0].all():
            record(own.accumulator, "accumulator (accumulate=True)")
        record(own.accumulator, "accumulator", write=True)
    thread.tick()
    run = thread.machine.run
    run.count("mmas")
    event = run.event(thread, "mma", ctas[0].a, ctas[0].accumulator, None)

    def compute() -> None:
        _multiply(ctas, accumulate=accumulate)
        run.event_end(event)

    queue.append(compute, at_once=engine.completes_at_once())


def _multiply(ctas: Sequence[Operands], *, accumulate: bool) -> None:
    first = ctas[0]
    is_integer = first.accumulator.array.dtype.kind in "iu"
    wide = np.float64 if is_integer else np.float32  # f64 is exact for sums of products of 8-bit integers.
    with np.errstate(all="ignore"):
        right = [own.b.read().astype(wide) for own in ctas]
        b = right[0] if len(right) == 1 else np.concatenate(right, axis=1)
        for own in ctas:
            a = own.a.read().astype(wide)
            scaled = b
            if own.a_scale is not None and own.b_scale is not None:
                a = a * _per_element(own.a_scale.read(), a.shape[0], a.shape[1])
                scales = own.b_scale.read()
                scaled = b * _per_element(_of_columns(scales, a.shape[0], b.shape[1]), b.shape[1], b.shape[0]).T
            product = matmul(a, np.ascontiguousarray(scaled))
            view = own.accumulator
            if accumulate:
                product += view.read().astype(wide)
            view.write(product.astype(np.int64).astype(view.array.dtype) if is_integer else product)


def _per_element(scales: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Returns the scale of each element, from `scales`, which has one scale for each block of `k`."""
    return np.repeat(scales[:rows].astype(np.float32), k // scales.shape[1], axis=1)


def _of_columns(scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Returns the scales of the right operand's columns.

    With 64 rows in each CTA of a pair, the scales of the two halves of the columns lie 128 rows apart.
    """
    half = columns // 2
    return scales if rows != 64 else np.concatenate([scales[:half], scales[128 : 128 + half]])


def copy(thread: Thread, pairs: Sequence[tuple[View, View]], convert: Callable[[np.ndarray], np.ndarray]) -> None:
    """Issues a copy from shared to tensor memory, in each CTA that takes part."""
    engine, queue = thread.machine.engine, thread.tensor.queue
    op = queue.issue(thread, "a copy to tensor memory", collective=len(pairs) > 1)
    for source, target in pairs:
        engine.record(op, source, "tcgen05 copy, read", write=False)
        engine.record(op, target, "tcgen05 copy, write", write=True)
    thread.tick()

    def move() -> None:
        for source, target in pairs:
            target.write(convert(source.read()))

    queue.append(move, at_once=engine.completes_at_once())


def commit(thread: Thread, barriers: Sequence[MBarrier]) -> None:
    """Issues a commit: it arrives on these barriers when all operations that `thread` has issued are complete."""
    queue, engine = thread.tensor.queue, thread.machine.engine
    queue.check("a commit", collective=len(barriers) > 1)
    until, knowledge = queue.time, queue.knowledge
    for barrier in barriers:
        if barrier.cta is not thread.cta and knowledge is not None:
            barrier.cta.note_use(thread, f"an arrival on {barrier.name}", queue.component, until)

        def complete(barrier: MBarrier = barrier) -> None:
            queue.run_until(until)
            barrier.arrive(knowledge)

        engine.fly(Arrival(thread, barrier, complete))
    thread.tick()
