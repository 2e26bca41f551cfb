"""Tensor memory (Blackwell): how much a CTA may allocate, and handlers of loads and stores by its warpgroups.

A load returns its value at once, but for race detection the read is under way until `wait_load_tmem`. A store is
complete only after `commit_tmem`. Both waits cover the operations that the calling thread itself has issued.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ..execution.machine import Thread
from ..execution.operations import Issued
from ..execution.program import Decoder, handles
from ..execution.transforms import LANES, bits_of
from ..foundations.equations import Equation, JaxObject, space_of
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta
from ..state.memory import View

_COLUMNS = 512
_ALIGNMENT = 4  # An allocation begins at a multiple of this number of columns.


def columns(avals: Sequence[JaxObject]) -> int:
    """How many columns of tensor memory the allocations of a scope take together."""
    total = 0
    for aval in avals:
        if hasattr(aval, "memory_space") and space_of(aval) == "tmem":
            *batch, rows, minor = aval.shape
            count = aval.layout.cols_in_shape((rows, math.prod(batch) * minor), bits_of(aval.dtype))
            total += -(-count // _ALIGNMENT) * _ALIGNMENT
    return total


def is_collective(aval: JaxObject) -> bool:
    """Whether the type `aval` is of an allocation of tensor memory for a pair of CTAs."""
    ref = getattr(aval, "ref", aval)
    return str(getattr(ref, "memory_space", None)) == "tmem" and bool(ref.collective)


def occupy(cta: Cta, count: int) -> None:
    """Notes that a scope of `cta` begins to use `count` columns of tensor memory.

    Raises:
        ProtocolError: the scopes of the CTA together use more columns than there are.
    """
    cta.tensor_columns += count
    if count and cta.tensor_columns > _COLUMNS:
        raise ProtocolError(
            f"{cta} uses {cta.tensor_columns} columns of tensor memory, {count} of them in this scope: there are "
            f"{_COLUMNS} columns, of {LANES} lanes of 32 bits"
        )


def _record(thread: Thread, view: View, what: str, *, write: bool) -> tuple[int, int]:
    """Checks an access that `thread` issues now and waits for later; returns its component and time."""
    if thread.warp is not None:
        raise ProtocolError(f"a {what} by one warp: only whole warpgroups access tensor memory, outside of warp_map")
    component, time = thread.pool.take(thread.knowledge.seen)
    op = Issued(thread, thread.instruction, thread.knowledge, component, time)
    thread.machine.engine.record(op, view, what, write=write)
    return component, time


_REDUCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "max": lambda x: x.max(axis=-1),
    "min": lambda x: x.min(axis=-1),
    "absmax": lambda x: np.abs(x).max(axis=-1),
    "absmin": lambda x: np.abs(x).min(axis=-1),
}


@handles("async_load")
def _load(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    ref, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["tree"])
    reduction = eqn.params.get("reduce")
    outs = [d.new() for _ in eqn.outvars]
    shape = eqn.outvars[0].aval.shape

    @d.instruction(eqn, "async_load_tmem", visible=True)
    def run(thread: Thread) -> None:
        view = path.resolve(thread, thread.env[ref])
        thread.tensor.loads.append(_record(thread, view, "tensor memory load", write=False))
        thread.env[outs[0]] = value = view.read().reshape(shape)
        if reduction is not None:
            thread.env[outs[1]] = _REDUCTIONS[reduction](value)

    return outs


@handles("wait_load_tmem")
def _wait_load(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        for component, time in thread.tensor.loads:
            thread.knowledge.note(component, time)
        thread.tensor.loads.clear()


@handles("async_store_tmem")
def _store(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    ref, value, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["tree"])

    @d.instruction(eqn, "async_store_tmem", visible=True)
    def run(thread: Thread) -> None:
        view, new = path.resolve(thread, thread.env[ref]), np.asarray(thread.env[value])
        event = _record(thread, view, "tensor memory store", write=True)
        is_early = thread.machine.engine.mode == "eager"
        if is_early:
            view.write(new)
        thread.tensor.stores.append((event, None if is_early else view, new))


@handles("commit_tmem")
def _commit(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        for (component, time), view, value in thread.tensor.stores:
            if view is not None:  # None: the store itself has written the value.
                view.write(value)
            thread.knowledge.note(component, time)
        thread.tensor.stores.clear()
