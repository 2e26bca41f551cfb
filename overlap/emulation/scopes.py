"""Memory that a kernel asks for: scoped, global, or as the state of a computation."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import Buffer, Cells, poison
from .program import Decoder, handles
from .sync import MBarrier, Semaphore


def _allocate(thread: Any, aval: Any, name: str, key: Any, collective: bool) -> Any:
    """What a scoped reference of type `aval` is bound to."""
    machine, dtype = thread.machine, aval.dtype
    kind = str(getattr(dtype, "name", dtype))
    cta = thread.cta
    shape = tuple(aval.shape)
    if "semaphore" in kind:
        return _semaphores(
            machine,
            thread.device,
            (key, cta.index, None if collective else str(thread)),
            shape,
            name,
            f" of CTA {cta.index}",
        )
    if hasattr(dtype, "num_arrivals"):
        if hasattr(dtype, "collective_axes"):
            raise NotImplementedError(f"{name}: cluster barriers are not emulated")
        cells = np.empty(shape, object)
        for index in np.ndindex(*shape):
            label = f"barrier {name}" + (f"[{', '.join(map(str, index))}]" if index else "")
            cells[index] = MBarrier(label, dtype.num_arrivals, cta)
        return Cells(name, cells, thread.device)
    space = str(getattr(aval.memory_space, "value", aval.memory_space))
    if space == "tmem":
        raise NotImplementedError(f"{name}: tensor memory is not emulated")
    if space == "regs":
        return Buffer(name, "regs", np.zeros(shape, dtype), thread.device, cta)
    if space == "gmem":
        return Buffer(name, "gmem", poison(shape, dtype), thread.device, cta)
    return Buffer(name, "smem", poison(shape, dtype), thread.device, cta)


def _semaphores(machine: Any, device: int, key: Any, shape: tuple[int, ...], name: str, owner: str = "") -> Cells:
    """The semaphores with this key, the same array on every device (addressable from all of them)."""
    peers = machine.globals.get(key)
    if peers is None:
        peers = []
        for peer in range(len(machine.coordinates)):
            cells = np.empty(shape, object)
            for index in np.ndindex(*shape):
                label = f"{name}[{', '.join(map(str, index))}]" if index else name
                cells[index] = Semaphore(label + owner, peer)
                machine.semaphores.append(cells[index])
            peers.append(Cells(name, cells, peer))
        for cells in peers:
            cells.peers = peers
        machine.globals[key] = peers
    return peers[device]


@handles("get_global")
def _get_global(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    aval, out, key = eqn.params["what"], d.new(), ("global", d.here)
    position = sum(i.name == "get_global" for i in d.program.instructions)

    def run(thread: Any) -> None:
        machine, shape = thread.machine, tuple(aval.shape)
        if "semaphore" in str(getattr(aval.dtype, "name", aval.dtype)):
            name = "semaphore" if position == 0 else f"semaphore#{position}"
            thread.env[out] = _semaphores(machine, thread.device, key, shape, name)
            return
        if key not in machine.globals:
            row = [
                Buffer(f"global {position}", "gmem", poison(shape, aval.dtype), i)
                for i in range(len(machine.coordinates))
            ]
            for buffer in row:
                buffer.peers = row
            machine.globals[key] = row
        thread.env[out] = machine.globals[key][thread.device]

    d.emit(run, eqn, "get_global")
    return [out]


@handles("run_scoped")
def _run_scoped(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    jaxpr = eqn.params["jaxpr"]
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    axes = eqn.params["collective_axes"]
    axes = axes if isinstance(axes, tuple) else (axes,)
    collective = bool(axes) and d.program.num_threads is not None
    avals = [v.aval for v in inner.invars]
    debug = getattr(inner, "debug_info", None)
    names = list(getattr(debug, "arg_names", None) or ())
    names = [n if n else f"scratch {i}" for i, n in enumerate(names)]
    if len(names) != len(avals):
        names = [f"scratch {i}" for i in range(len(avals))]
    slots = [d.new() for _ in avals]
    visit_slot = d.new()
    key = d.here

    def enter(thread: Any) -> bool | None:
        cta = thread.cta
        if not collective:
            if cta.freed and d.program.num_threads is None:
                cta.reuse(thread.knowledge, thread)
            for slot, aval, name in zip(slots, avals, names):
                thread.env[slot] = _allocate(thread, aval, name, key, d.program.num_threads is None)
            return None
        # The hardware synchronises the block here, before the memory may be given out again.
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
            made = [_allocate(thread, aval, name, (key, visit), True) for aval, name in zip(avals, names)]
            scope = cta.scopes[(key, visit)] = [made, meeting.expected]
        for slot, value in zip(slots, scope[0]):
            thread.env[slot] = value
        thread.env[visit_slot] = visit
        return None

    d.emit(enter, eqn, "run_scoped", visible=collective)
    results = d.inline(jaxpr, slots, ins)

    def leave(thread: Any) -> None:
        cta = thread.cta
        if collective:
            where = (key, thread.env[visit_slot])
            scope = cta.scopes[where]
            scope[1] -= 1
            if scope[1]:
                return
            del cta.scopes[where]
            made = scope[0]
        else:
            made = [thread.env[s] for s in slots]
        # The memory is given out again at the next allocation, or to another CTA when this one ends: not before.
        cta.freed += [value for value in made if isinstance(value, Buffer) and value.space == "smem"]

    d.emit(leave, eqn, "end of run_scoped", visible=collective)
    return results


@handles("run_state")
def _run_state(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    jaxpr = eqn.params["jaxpr"]
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    avals = [v.aval for v in inner.invars]
    names = [f"state {i}" for i in range(len(avals))]
    given = iter(ins)
    initial = [next(given) if is_set else None for is_set in eqn.params["is_initialized"]]
    slots = [d.new() for _ in avals]
    key = d.here

    def enter(thread: Any) -> None:
        env = thread.env
        for slot, aval, name, source in zip(slots, avals, names, initial):
            if not hasattr(aval, "inner_aval"):
                env[slot] = env[source]
                continue
            env[slot] = made = _allocate(thread, aval, name, key, False)
            if source is not None:
                if isinstance(env[source], (Buffer, Cells)):
                    env[slot] = env[source]
                else:
                    made.data[...] = env[source]
            if isinstance(made, Buffer):
                made.space = "regs"  # the state of one thread

    d.emit(enter, eqn, "run_state")
    d.inline(jaxpr, slots)
    outs = [d.new() for _ in eqn.outvars]

    accumulates = any("Accumulator" in type(a).__name__ for a in avals)

    def leave(thread: Any) -> None:
        if accumulates:  # the framework waits before it takes the value out of an accumulator
            thread.machine.engine.wait_wgmma(thread, 0)
        for slot, out in zip(slots, outs):
            value = thread.env[slot]
            thread.env[out] = np.array(value.data) if isinstance(value, Buffer) else value

    d.emit(leave, eqn, "end of run_state", visible=accumulates)
    return outs
