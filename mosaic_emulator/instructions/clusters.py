"""Handlers of what only clusters have: stores to the shared memory of another CTA, and cluster launch control.

With cluster launch control, a running cluster cancels a cluster that is not launched yet, and takes over its work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..execution.machine import Thread
from ..execution.operations import REDUCTIONS, CountedWrite
from ..execution.program import Decoder, handles
from ..foundations.equations import AxisName, Equation, value_of
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta
from .transfers import check_counts_copies

_WARPGROUP = 128  # CUDA threads
_RESPONSE_BYTES = 16
_UNDEFINED = -(1 << 31)  # the index that a query returns if no cluster was cancelled


@handles("async_store_smem")
def _async_store(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    """A warpgroup stores registers to the shared memory of a CTA of its cluster.

    On the hardware (PTX `st.async`, `red.async`), the threads of the warpgroup first arrive on the barrier of the
    destination and make it expect the bytes. The stores then land one by one, and the barrier counts their bytes. Here
    all stores of one call land together. The stores go through the generic proxy. The arrival has release semantics at
    cluster scope: a thread that waits for the barrier learns what the sender has done before the call.
    """
    p = eqn.params
    value, ref, barrier, index, *leaves = ins
    path, barrier_path = d.paths(leaves, p["ref_transforms_treedef"], p["barrier_transforms_treedef"])
    place, axis, atomic = d.leaf(index), p["cluster_dim"], p["atomic"]
    aval = eqn.invars[0].aval
    dtype = np.dtype(aval.dtype)
    nbytes = aval.size * dtype.itemsize
    if path.names_a_cta or barrier_path.names_a_cta:
        raise NotImplementedError("async_store_smem to a cluster_ref. Expected: this CTA's reference, and cluster_idx")
    if getattr(eqn.invars[2].aval.dtype, "collective_axes", None) is not None:
        raise NotImplementedError(
            "async_store_smem with a ClusterBarrier, which Mosaic GPU does not compile. Expected: a Barrier, which "
            "gets one arrival for each store to its CTA"
        )
    if d.warp_axes:
        raise NotImplementedError("async_store_smem in one warp, which Mosaic GPU does not compile")
    if nbytes % _WARPGROUP:
        raise NotImplementedError(
            f"async_store_smem of {nbytes} bytes: Mosaic GPU needs a multiple of {_WARPGROUP} bytes, the same number "
            "from each thread of the warpgroup"
        )
    if atomic is not None and dtype not in (np.int32, np.uint32):
        raise NotImplementedError(
            f"async_store_smem with atomic={atomic!r} of {dtype}: Mosaic GPU compiles atomic asynchronous stores "
            "of 32-bit integers only"
        )
    what = "async store" if atomic is None else f"async store, atomic {atomic}"

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        env, engine = thread.env, thread.machine.engine
        cta = _destination(thread, axis, int(value_of(place, env)))
        target = path.resolve_in(cta, thread, env[ref])
        counting = barrier_path.resolve_in(cta, thread, env[barrier])
        check_counts_copies(counting)
        new, record = np.array(env[value]), thread.machine.run
        landing = lambda: new if atomic is None else REDUCTIONS[atomic](target.read(), new)  # noqa: E731
        op = CountedWrite(thread, target, counting, landing, nbytes)
        op.asynchronous = False
        engine.record(op, target, what, write=True, atomic=atomic is not None)
        op.event = record.event(thread, "copy", "registers", target, thread.device)
        record.count("copies", nbytes)
        if cta is not thread.cta:
            cta.note_use(thread, f"{what}, arrival on {counting.name}", thread.component, thread.time)
        counting.expect(nbytes)
        counting.arrive(thread.knowledge)
        thread.tick()
        engine.fly(op)


def _destination(thread: Thread, axis: AxisName, index: int) -> Cta:
    """Returns the CTA with this index along a cluster axis, and with the indices of `thread` along the others."""
    cluster = thread.cta.cluster
    if cluster is None:
        raise ProtocolError(f"async_store_smem to {axis!r} = {index} in a kernel without clusters")
    if axis not in cluster.axes:
        raise ProtocolError(f"async_store_smem: {axis!r} is no axis of the cluster: it has {list(cluster.axes)}")
    return cluster.at(thread.cta, {axis: index})


# ---- cluster launch control ------------------------------------------------------------------------------------------


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
