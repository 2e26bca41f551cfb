"""Handlers of primitives that allocate: `run_scoped`, `get_global` and `run_state`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable

import numpy as np

from ..execution.machine import Machine, Thread
from ..execution.program import Decoder, handles
from ..foundations.equations import Equation, JaxObject, argument_names, is_semaphore, open_jaxpr, space_of
from ..foundations.errors import ProtocolError
from ..state.clusters import Cta, cluster_arrivals
from ..state.memory import Allocation, Buffer, Cells, poison
from ..state.sync import MBarrier, Semaphore
from . import tensor_memory

SemaphoreAt = Callable[[int], Semaphore]  # gives the semaphore at a place of an array


def _allocate(
    machine: Machine, cta: Cta, aval: JaxObject, name: str, key: Hashable, thread: Thread | None = None
) -> Buffer | Cells:
    """Allocates the buffer, barriers or semaphores for a scoped reference of type `aval`.

    They belong to the whole CTA, or to one `thread` of it.
    """
    dtype, device = aval.dtype, cta.device
    shape = tuple(aval.shape)
    if is_semaphore(aval):

        def at(peer: int) -> SemaphoreAt:
            own = [Semaphore(f"{_label(name, index)} of CTA {cta.index}", peer) for index in np.ndindex(*shape)]
            machine.private += own
            return own.__getitem__

        return _semaphores(machine, device, (key, cta.index, thread and str(thread)), shape, name, at)
    if hasattr(dtype, "num_arrivals"):
        return _barriers(cta, dtype, name, shape, thread)
    space = space_of(aval)
    if space == "regs":
        return Buffer(name, "regs", np.zeros(shape, dtype), device, cta)
    space = space if space in ("gmem", "tmem") else "smem"
    return Buffer(name, space, poison(shape, dtype), device, cta)


def _barriers(cta: Cta, dtype: JaxObject, name: str, shape: tuple[int, ...], thread: Thread | None) -> Cells:
    axes = getattr(dtype, "collective_axes", None)
    groups = tuple(group if isinstance(group, tuple) else (group,) for group in axes or ())
    if groups and (cta.cluster is None or thread is not None):
        raise ProtocolError(f"the cluster barrier {name} needs a kernel with clusters, and a scope of all its threads")
    arrivals = dtype.num_arrivals * (cluster_arrivals(cta.cluster.axes, groups) if cta.cluster and groups else 1)
    barriers = []
    for index in np.ndindex(*shape):
        label = _label(f"{'cluster ' if groups else ''}barrier {name}", index)
        barriers.append(barrier := MBarrier(label, arrivals, cta))
        barrier.collective, barrier.leader_tracked = groups, getattr(dtype, "leader_tracked", False)
        barrier.orders_tensor_core = getattr(dtype, "orders_tensor_core", False)
    return Cells(name, shape, barriers.__getitem__, cta.device)


def _allocate_all(thread: Thread, avals: list[JaxObject], names: list[str], key: int, visit: int) -> list[Allocation]:
    """Makes the allocations of a scope that all threads of a CTA share and enter for the `visit`-th time."""

    def allocate(cta: Cta) -> list[Allocation]:
        return [_allocate(thread.machine, cta, aval, name, (key, visit)) for aval, name in zip(avals, names)]

    cluster = thread.cta.cluster
    return allocate(thread.cta) if cluster is None else cluster.enter(thread.cta, key, visit, allocate)


def _semaphores(
    machine: Machine, device: int, key: Hashable, shape: tuple[int, ...], name: str, at: Callable[[int], SemaphoreAt]
) -> Cells:
    """Returns an array of semaphores on `device`, which can be reached from all devices.

    The first call with a `key` makes such an array on every device; `at(device)` returns what gives its semaphores.
    """
    peers = machine.flag_arrays.setdefault(key, {})
    for peer in machine.mesh.devices if not peers else ():
        peers[peer] = Cells(name, shape, at(peer), peer, peers)
    return peers[device]


def _label(name: str, index: tuple[int, ...]) -> str:
    return f"{name}[{', '.join(map(str, index))}]" if index else name


@handles("get_global")
def _get_global(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    aval, out, key = eqn.params["what"], d.new(), ("global", d.here)
    position = sum(i.name == "get_global" for i in d.program.instructions)
    name, first = "semaphore" if position == 0 else f"semaphore#{position}", len(d.program.words)
    if is_semaphore(aval):
        d.program.words += [_label(name, index) for index in np.ndindex(*aval.shape)]

    @d.instruction(eqn, "get_global")
    def run(thread: Thread) -> None:
        machine, shape = thread.machine, tuple(aval.shape)
        if is_semaphore(aval):
            at = lambda device: functools.partial(machine.word, device, first)  # noqa: E731
            thread.env[out] = _semaphores(machine, thread.device, key, shape, name, at)
            return
        if key not in machine.globals:
            row = machine.globals[key] = {
                device: Buffer(f"global {position}", "gmem", poison(shape, aval.dtype), device)
                for device in machine.mesh.devices
            }
            for buffer in row.values():
                buffer.peers = row
        thread.env[out] = machine.globals[key][thread.device]

    return [out]


@handles("run_scoped")
def _run_scoped(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    jaxpr = eqn.params["jaxpr"]
    inner = open_jaxpr(jaxpr)
    axes = eqn.params["collective_axes"]
    axes = axes if isinstance(axes, tuple) else (axes,)
    collective = bool(axes) and d.program.num_threads is not None
    avals = [v.aval for v in inner.invars]
    names = argument_names(inner)
    entries = [d.new() for _ in avals]
    visit_entry = d.new()
    key = d.here
    columns = tensor_memory.columns(avals)
    d.program.uses_tensor_memory |= columns > 0
    d.program.ends_by_cluster |= any(tensor_memory.is_collective(aval) for aval in avals)

    @d.instruction(eqn, "run_scoped", visible=collective)
    def enter(thread: Thread) -> bool | None:
        cta = thread.cta
        if not collective:
            tensor_memory.occupy(cta, columns)
            if cta.freed and d.program.num_threads is None:
                cta.reuse(thread.knowledge, thread)
            if d.program.num_threads is None and thread.warp is None:
                visit = thread.visits[key] = thread.visits.get(key, 0) + 1
                made = _allocate_all(thread, avals, names, key, visit)
            else:
                made = [_allocate(thread.machine, cta, aval, name, key, thread) for aval, name in zip(avals, names)]
            for entry, value in zip(entries, made):
                thread.env[entry] = value
            return None
        # The hardware synchronises the CTA's threads here, before the scope gets memory that an earlier scope has used.
        meeting = cta.meeting
        if thread.arrivals.get(meeting) is None:
            thread.arrivals[meeting] = meeting.arrive(thread.knowledge)
            thread.tick()
        if meeting.generation <= thread.arrivals[meeting]:
            return thread.block(
                meeting,
                lambda: (
                    f"waits for the threads of its CTA to enter run_scoped, {meeting.arrived} of {meeting.expected}"
                ),
            )
        del thread.arrivals[meeting]
        thread.knowledge.join(meeting.latest)
        if cta.freed:
            cta.reuse(meeting.latest, thread)
        visit = thread.visits[key] = thread.visits.get(key, 0) + 1
        scope = cta.scopes.get((key, visit))
        if scope is None:
            tensor_memory.occupy(cta, columns)
            made = _allocate_all(thread, avals, names, key, visit)
            scope = cta.scopes[(key, visit)] = (made, meeting.expected)
        for entry, value in zip(entries, scope[0]):
            thread.env[entry] = value
        thread.env[visit_entry] = visit
        return None

    results = d.inline(jaxpr, entries, ins)

    @d.instruction(eqn, "end of run_scoped", visible=collective)
    def leave(thread: Thread) -> None:
        cta = thread.cta
        if collective:
            where = (key, thread.env[visit_entry])
            made, inside = cta.scopes[where]
            if inside > 1:
                cta.scopes[where] = (made, inside - 1)
                return
            del cta.scopes[where]
        else:
            made = [thread.env[s] for s in entries]
        cta.tensor_columns -= columns
        # The memory is reused by the next scope of this CTA, or by another CTA when this one ends. `Cta.reuse` then
        # checks that no operation still uses the memory.
        cta.freed += [value for value in made if isinstance(value, Buffer) and value.space in ("smem", "tmem")]

    return results


@handles("run_state")
def _run_state(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    jaxpr = eqn.params["jaxpr"]
    inner = open_jaxpr(jaxpr)
    avals = [v.aval for v in inner.invars]
    names = [f"state {i}" for i in range(len(avals))]
    given = iter(ins)
    initial = [next(given) if is_set else None for is_set in eqn.params["is_initialized"]]
    entries = [d.new() for _ in avals]
    key = d.here

    @d.instruction(eqn, "run_state")
    def enter(thread: Thread) -> None:
        env = thread.env
        for entry, aval, name, source in zip(entries, avals, names, initial):
            if source is not None and not hasattr(aval, "inner_aval"):
                env[entry] = env[source]
                continue
            env[entry] = made = _allocate(thread.machine, thread.cta, aval, name, key, thread)
            if isinstance(made, Buffer):
                made.space = "regs"  # The state belongs to one thread.
            if source is not None and isinstance(env[source], (Buffer, Cells)):
                env[entry] = env[source]
            elif source is not None and isinstance(made, Buffer):
                made.data[...] = env[source]

    d.inline(jaxpr, entries)
    outs = [d.new() for _ in eqn.outvars]

    accumulates = any("Accumulator" in type(a).__name__ for a in avals)

    @d.instruction(eqn, "end of run_state", visible=accumulates)
    def leave(thread: Thread) -> None:
        if accumulates:  # Pallas waits for all wgmmas before it reads the value of an accumulator.
            thread.machine.engine.wait_wgmma(thread, 0)
        for entry, out in zip(entries, outs):
            value = thread.env[entry]
            thread.env[out] = np.array(value.data) if isinstance(value, Buffer) else value

    return outs
