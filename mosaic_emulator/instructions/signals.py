"""Handlers of primitives on mbarriers of a CTA or cluster, and on semaphores of this device or of peers."""

from __future__ import annotations

from ..execution.machine import Thread
from ..execution.program import Decoder, handles, predicate_of
from ..execution.references import RefPath
from ..foundations.equations import Equation, JaxObject, Scalar, value_of
from ..foundations.errors import ProtocolError
from ..state.memory import Allocation
from ..state.sync import MBarrier

_SCOPED = " (a semaphore in scratch_types is one CTA's own; pl.get_global gives one to all)"

# ---- mbarriers -------------------------------------------------------------------------------------------------------


@handles("barrier_arrive")
def _arrive(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    ins, predicate = predicate_of(d, ins, eqn.params.get("has_user_predicate", False))
    barrier, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["transforms_treedef"])

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        if predicate(thread.env):
            _arrive_at(thread, path.resolve(thread, thread.env[barrier]))


def _arrive_at(thread: Thread, barrier: MBarrier) -> None:
    """Arrives on a barrier. An arrival on a cluster barrier counts on its twins in other CTAs too (`reached`)."""
    for reached in barrier.reached:
        if reached.cta is not thread.cta:
            reached.cta.note_use(thread, f"an arrival on {reached.name}", thread.component, thread.time)
        reached.arrive(thread.knowledge)
    thread.tick()


def _try_wait(thread: Thread, barrier: MBarrier) -> bool:
    waits = thread.waits.get(barrier, 0)
    if isinstance(waits, tuple):
        raise ProtocolError(
            f"{barrier.name} of {barrier.cta}: the warps of this warpgroup have waited for it differently often "
            f"({waits}), so that they disagree about its phase: the warpgroup as a whole cannot wait for it"
        )
    if not barrier.passed(waits):
        return False
    thread.knowledge.join(barrier.phases[waits], orders_tensor_core=barrier.orders_tensor_core)
    thread.waits[barrier] = waits + 1
    return True


def _blocked_on(thread: Thread, barrier: MBarrier) -> bool:
    def why() -> str:
        return (
            f"waits for phase {thread.waits.get(barrier, 0)} of {barrier.name}, got {barrier.arrived} of "
            f"{barrier.arrivals} arrivals and {barrier.bytes} bytes outstanding in phase {barrier.phase}"
        )

    return thread.block(barrier, why)


@handles("barrier_wait")
def _wait(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    barrier, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["transforms_treedef"])

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> bool | None:
        where = path.resolve(thread, thread.env[barrier])
        if _try_wait(thread, where):
            thread.machine.run.wait_event(thread, where.name)
            return None
        return _blocked_on(thread, where)


@handles("barrier_arrive_and_wait")
def _arrive_and_wait(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    barrier, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["transforms_treedef"])

    @d.instruction(eqn, "barrier_arrive", visible=True)
    def arrive(thread: Thread) -> None:
        _arrive_at(thread, path.resolve(thread, thread.env[barrier]))

    _wait(d, eqn, ins)


@handles("barrier_test")
def _test(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    barrier, *leaves = ins
    (path,), out = d.paths(leaves, eqn.params["transforms_treedef"]), d.new()

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        where = path.resolve(thread, thread.env[barrier])
        waits = thread.waits.get(where, 0)  # A test is no wait: the thread's number of waits stays the same.
        done = not isinstance(waits, tuple) and where.passed(waits)
        if done:
            thread.knowledge.join(where.phases[waits], orders_tensor_core=where.orders_tensor_core)
        else:
            thread.polled = True
        thread.env[out] = done

    return [out]


# ---- semaphores ------------------------------------------------------------------------------------------------------


def _on_device(
    thread: Thread, base: Allocation, device_id: JaxObject, id_type: JaxObject, scope: str = "sys"
) -> Allocation:
    """Returns the array of semaphores `base` on the device that a signal is for; `device_id` None: on its own."""
    if device_id is None:
        return base
    if scope == "gpu":
        raise ProtocolError("a signal at memory scope 'gpu' stays on its device: use 'sys' with a device_id")
    return base.on(thread.machine.mesh.logical_device(thread.device, device_id, id_type, thread.env))


def signal_device(thread: Thread, base: Allocation, path: RefPath, count: int, scope: str) -> None:
    """Signals the semaphore at `path` in the array `base`, which may be another device's.

    The caller must call `Thread.tick` after that.
    """
    machine = thread.machine
    semaphore = path.resolve(thread, base)
    machine.check_present(thread, semaphore.device, f"signals {semaphore.name}", asynchronous=False)
    if count < 0:
        raise NotImplementedError(f"a signal of {count}: negative counts are not emulated")
    event = (thread.component, thread.time)
    semaphore.signal(count, thread.knowledge.seen, thread.device, event, scope)
    if semaphore.device != thread.device:
        semaphore.expect_seen((thread, *event, thread.instruction))
    machine.run.count("signals")
    machine.run.event(thread, "signal", semaphore.name, semaphore.name, semaphore.device)


@handles("semaphore_signal")
def _signal(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    p = eqn.params
    ref, transforms, count, device_id, core = d.unflatten_entries(p["args_tree"], ins)
    if core is not None:
        raise NotImplementedError("core_index has no meaning on a GPU")
    path, amount = d.path(transforms), d.leaf(count)
    if not isinstance(amount, int):
        raise NotImplementedError(
            "a signal's increment must be a constant, since Mosaic GPU compiles no other: signal by 1, and count what "
            "the waiter waits for in such signals"
        )
    device_id = d.leaves(device_id)
    id_type, scope = p.get("device_id_type"), p.get("memory_scope", "sys")

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        signal_device(thread, _on_device(thread, thread.env[ref], device_id, id_type, scope), path, amount, scope)
        thread.tick()


@handles("semaphore_signal_parallel")
def _signal_parallel(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    # The signals are separate instructions, in the order given, so other threads may run between them.
    refs, transforms, counts, device_ids = d.unflatten_entries(eqn.params["args_tree"], ins)
    for ref, steps, count, device_id in zip(refs, transforms, counts, device_ids):
        path, amount, target = d.path(steps), d.leaf(count), d.leaves(device_id)

        def run(
            thread: Thread, ref: int = ref, path: RefPath = path, amount: Scalar = amount, target: JaxObject = target
        ) -> None:
            base = _on_device(thread, thread.env[ref], target, None)
            signal_device(thread, base, path, int(value_of(amount, thread.env)), "sys")
            thread.tick()

        d.emit(run, eqn, visible=True)


@handles("semaphore_wait")
def _semaphore_wait(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    ref, transforms, count, decrement = d.unflatten_entries(eqn.params["args_tree"], ins)
    path, amount, take = d.path(transforms), d.leaf(count), d.leaf(decrement)
    if path.is_remote:
        raise NotImplementedError("a remote semaphore cannot be waited for")
    scope = eqn.params.get("memory_scope", "sys")

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> bool | None:
        env = thread.env
        semaphore = path.resolve(thread, env[ref])
        wanted = int(value_of(amount, env))
        by = (thread.component, thread.time)
        found = semaphore.acquire(wanted, thread.knowledge, decrement=bool(value_of(take, env)), scope=scope, by=by)
        if found is not None:
            thread.orders.saw(thread, semaphore, found)
            thread.orders.acquire(thread.knowledge, scope)  # A wait ends with an acquire fence.
            thread.machine.run.wait_event(thread, semaphore.name)
            return None
        return thread.block(
            semaphore,
            lambda: (
                f"waits for {semaphore.name} of device {semaphore.device} to reach {wanted}, got {semaphore.value}"
                + (_SCOPED if " of CTA " in semaphore.name else "")
            ),
        )


@handles("semaphore_read")
def _semaphore_read(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    ref, transforms = d.unflatten_entries(eqn.params["args_tree"], ins)
    path, out = d.path(transforms), d.new()

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        # The read is relaxed, so it orders nothing.
        thread.env[out] = path.resolve(thread, thread.env[ref]).value
        thread.polled = True

    return [out]
