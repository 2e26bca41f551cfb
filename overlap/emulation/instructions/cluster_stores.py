"""Handler of `async_store_smem`: a warpgroup stores registers to the shared memory of a CTA of its cluster.

On the hardware (PTX `st.async`, `red.async`), the threads of the warpgroup first arrive on the barrier of the
destination and make it expect the bytes. The stores then land one by one, and the barrier counts their bytes. Here all
stores of one call land together. The stores go through the generic proxy. The arrival has release semantics at cluster
scope: a thread that waits for the barrier learns what the sender has done before the call.
"""

from __future__ import annotations

import numpy as np

from ..execution.machine import Thread
from ..execution.operations import REDUCTIONS, CountedWrite
from ..execution.program import Decoder, handles
from ..foundations.environment import value_of
from ..foundations.equations import AxisName, Equation
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta
from .transfers import check_counts_copies

_WARPGROUP = 128  # CUDA threads


@handles("async_store_smem")
def _async_store(d: Decoder, eqn: Equation, ins: list[int]) -> None:
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
        engine.record(op, target, what, write=True, atomic=atomic is not None, asynchronous=False)
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
