"""Handlers of TMA copies between global and shared memory, and of the waits for them."""

from __future__ import annotations

from collections.abc import Callable

import jax

from ..execution.machine import Thread
from ..execution.operations import REDUCTIONS, Landing
from ..execution.program import Decoder, handles, predicate_of
from ..foundations.equations import AxisName, Equation
from ..foundations.errors import ProtocolError
from ..state import multicast
from ..state.clusters import Cta
from ..state.memory import View
from ..state.sync import MBarrier

# Two faults of code that jax before 0.12 compiles: A copy whose predicate is false still arrives on its barrier. And
# every CUDA thread arrives for a copy, even on a barrier that orders the tensor core, which expects one arrival.
_ARRIVES_WITHOUT_COPY = _ARRIVES_FROM_EACH_THREAD = jax.__version_info__ < (0, 12)

# The named scope of loads of which each row affects only the same row of a result (`Access.by_rows`).
BY_ROWS = "rows_apart"


def _check_shapes(src: View, dst: View) -> None:
    a, b = src.requested or src.shape, dst.requested or dst.shape
    if [n for n in a if n != 1] != [n for n in b if n != 1]:
        raise ProtocolError(f"a copy from {src} of shape {a} to {dst} of shape {b}: the shapes must be equal")


def check_counts_copies(barrier: MBarrier) -> None:
    """Checks that compiled code arrives on `barrier` for a copy as often as the barrier expects."""
    if _ARRIVES_FROM_EACH_THREAD and barrier.orders_tensor_core:
        raise ProtocolError(
            f"a copy is counted on {barrier.name}, which orders the tensor core: before jax 0.12 a compiled copy "
            "arrives 128 times there, and the barrier expects one arrival. Expected: for copies, a barrier without "
            "orders_tensor_core"
        )


@handles("copy_gmem_to_smem")
def _load(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    p = eqn.params
    axes = tuple(p.get("collective_axes") or ())
    tracking = p.get("leader_tracked") if axes else None
    if not p.get("has_barrier", True):
        raise NotImplementedError("copies without a barrier (cp.async, before Hopper) are not emulated")
    ins, predicate = predicate_of(d, ins, p["has_user_predicate"])
    src, dst, barrier, *leaves = ins
    trees = [p[f"{x}_transforms_treedef"] for x in ("src", "dst", "barrier")]
    src_path, dst_path, barrier_path = d.paths(leaves, *trees)
    mode = getattr(p.get("oob_mode"), "name", "ZEROS")
    src_path.clip = mode != "PROMISE_IN_BOUNDS"
    by_rows = BY_ROWS in str(eqn.source_info.name_stack)

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        env = thread.env

        def barrier_in(cta: Cta) -> MBarrier:
            return barrier_path.resolve_in(cta, thread, env[barrier])

        counting = barrier_in(thread.cta) if tracking is None else _leader(thread, axes, barrier_in)
        is_counted_here = counting.cta is thread.cta
        check_counts_copies(counting)
        if not predicate(env):
            if is_counted_here and _ARRIVES_WITHOUT_COPY:
                counting.arrive(thread.knowledge)
            thread.tick()
            return
        source, target = src_path.resolve(thread, env[src]), dst_path.resolve(thread, env[dst])
        nbytes = target.array.nbytes
        cluster = thread.cta.cluster
        if tracking is not None and cluster is not None:
            ctas = cluster.along(thread.cta, axes)
            nbytes *= len(ctas)  # The leader's barrier counts the bytes of all CTAs.
            if hasattr(tracking, "axis"):
                source = multicast.slab(source, tracking.axis, len(ctas), ctas.index(thread.cta))
        _check_shapes(source, target)
        if axes and not hasattr(tracking, "axis"):
            landings = _multicast(
                thread,
                axes,
                target,
                counting,
                lambda cta: (
                    dst_path.resolve_in(cta, thread, env[dst]),
                    barrier_in(cta) if tracking is None else counting,
                ),
            )
        else:
            landings = [Landing(target, counting)]
        here = counting if is_counted_here else None
        thread.machine.engine.load(thread, source, landings, here, nbytes, mode == "UNDEFINED", by_rows)


def _leader(thread: Thread, axes: tuple[AxisName, ...], barrier_in: Callable[[Cta], MBarrier]) -> MBarrier:
    """Returns the barrier of the first CTA along `axes` (the leader), which counts the copy for all CTAs."""
    cluster = thread.cta.cluster
    if cluster is None:
        raise ProtocolError(f"a copy that is tracked along {axes} in a kernel without clusters")
    return barrier_in(cluster.along(thread.cta, axes)[0])


def _multicast(
    thread: Thread,
    axes: tuple[AxisName, ...],
    target: View,
    where: MBarrier,
    at: Callable[[Cta], tuple[View, MBarrier]],
) -> list[Landing]:
    """Returns the places to which this CTA's part of a multicast copy is written: one in each CTA along `axes`."""
    cluster = thread.cta.cluster
    if cluster is None:
        raise ProtocolError(f"a copy to {target} along {axes} in a kernel without clusters")
    ctas = cluster.along(thread.cta, axes)
    if len(ctas) == 1:
        return [Landing(target, where)]
    part = multicast.share(target, target.shape, len(ctas), ctas.index(thread.cta))
    return [Landing(multicast.part_of(view, part), barrier, part, target.shape) for view, barrier in map(at, ctas)]


@handles("copy_smem_to_gmem")
def _store(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    p = eqn.params
    ins, predicate = predicate_of(d, ins, p["has_user_predicate"])
    src, dst, *leaves = ins
    n = p["src_transforms_treedef"].num_leaves
    src_path = d.path(d.unflatten(p["src_transforms_treedef"], leaves[:n]))
    dst_path = d.path(d.unflatten(p["dst_transforms_treedef"], leaves[n:]), clip=True, multicast=True)
    reduction, commit = p["reduction_op"], p["commit_group"]
    if reduction not in (None, *REDUCTIONS):
        raise NotImplementedError(f"the TMA reduction {reduction!r} is not emulated: {tuple(REDUCTIONS)} are")

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        env = thread.env
        engine = thread.machine.engine
        if not predicate(env):
            if commit:
                engine.commit(thread)
            return
        if dst_path.multicast is None:
            targets = [dst_path.resolve(thread, env[dst])]
        else:  # The NVLink switch writes one copy on all devices. It is emulated as one operation for each device.
            devices = thread.machine.mesh.multicast_devices(dst_path.multicast)
            targets = [dst_path.resolve(thread, env[dst].on(device)) for device in devices]
        source, target = src_path.resolve(thread, env[src]), targets[0]
        _check_shapes(source, target)
        if target.requested is not None and len(target.requested) == 1 and target.buffer.data.ndim > 1:
            # The hardware copies a contiguous range of memory, and clips it only at the end of the whole array.
            raise ProtocolError(
                f"a copy of {target.requested[0]} elements to {target} goes beyond the end of a row: it is one piece "
                "of memory, so it overwrites what lies behind that row"
            )
        for target in targets:
            engine.store(thread, source, target, reduction)
        if commit:
            engine.commit(thread)


@handles("commit_group")
def _commit_group(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    d.emit(lambda thread: thread.machine.engine.commit(thread), eqn)


@handles("wait_smem_to_gmem")
def _wait(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    n, read_only = eqn.params["n"], eqn.params["wait_read_only"]
    d.emit(lambda thread: thread.machine.engine.wait_stores(thread, n, read_only), eqn, visible=True)


@handles("commit_smem")
def _commit_smem(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    d.emit(lambda thread: thread.knowledge.fence_smem(), eqn, visible=True)
