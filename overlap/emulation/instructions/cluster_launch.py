"""Cluster launch control: a running cluster cancels a cluster that is not launched yet, and takes over its work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..execution.machine import Thread
from ..execution.operations import CountedWrite
from ..execution.program import Decoder, handles
from ..foundations.equations import Equation

_RESPONSE_BYTES = 16
_UNDEFINED = -(1 << 31)  # the index that a query returns if no cluster was cancelled


class _Request:
    """A request to cancel the next cluster. All CTAs of the requesting cluster get the same answer."""

    def __init__(self, thread: Thread):
        self._machine, self._device = thread.machine, thread.device
        self._answer: np.ndarray | None = None

    def answer(self) -> np.ndarray:
        """Returns (whether a cluster was cancelled, the number of its first CTA, 0, 0). The first call cancels it."""
        if self._answer is None:
            place = self._machine.cancel(self._device)
            number = -1 if place is None else [cta.coordinates for cta in self._machine.ctas[self._device]].index(place)
            self._answer = np.array([place is not None, number, 0, 0], np.int32)
        return self._answer


@handles("try_cluster_cancel")
def _try_cancel(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    p = eqn.params
    result, barrier, *leaves = ins
    result_path, barrier_path = d.paths(leaves, p["result_transforms_tree"], p["barrier_transforms_tree"])
    thread_axis = d.program.axis_names[-1] if d.program.num_threads is not None else None
    axes = p["collective_axes"]
    cluster_axes = [axis for axis in axes if axis != thread_axis]
    d.program.cancels_clusters = True

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        env, cta, engine = thread.env, thread.cta, thread.machine.engine
        where = barrier_path.resolve(thread, env[barrier])
        is_first = thread_axis not in axes or thread.warpgroup == 0
        if is_first:
            where.expect(_RESPONSE_BYTES)
        where.arrive(thread.knowledge)
        if is_first and (cta.cluster is None or cta.cluster.along(cta, cluster_axes)[0] is cta):
            request = _Request(thread)
            for each in (cta,) if cta.cluster is None else cta.cluster.ctas:
                target = result_path.resolve_in(each, thread, env[result])
                landing = barrier_path.resolve_in(each, thread, env[barrier])
                answer = lambda target=target: request.answer().view(target.array.dtype)  # noqa: E731
                # The answer may reach different CTAs at different times.
                op = CountedWrite(thread, target, landing, answer, _RESPONSE_BYTES)
                engine.record(op, target, "cluster launch control, write", write=True)
                engine.fly(op)
        thread.tick()


@handles("query_cluster_cancel")
def _query(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    result, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["transforms_tree"])
    outs = [d.new() for _ in eqn.outvars]
    places: Sequence[int] = [d.program.axis_names.index(name) for name in eqn.params["grid_names"]]

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        view = path.resolve(thread, thread.env[result])
        thread.access(view, "load", write=False)
        cancelled, number, _, _ = view.read().reshape(-1).view(np.int32).tolist()
        coordinates = thread.machine.ctas[thread.device][number].coordinates if cancelled == 1 else ()
        for out, place in zip(outs, places):
            thread.env[out] = coordinates[place] if coordinates else _UNDEFINED
        thread.env[outs[-1]] = cancelled == 1

    return outs
