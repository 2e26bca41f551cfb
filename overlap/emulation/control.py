"""Control flow, calls, scopes, and what a thread asks about itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .clocks import Knowledge, covers
from .errors import ProtocolError
from .memory import Buffer, Cells, poison
from .program import Decoder, handles
from .sync import MBarrier, Meeting, Semaphore


@handles("jit", "pjit", "closed_call", "core_call", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call",
         "custom_vmap_call", "custom_lin", "remat2")
def _call(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if key in eqn.params:
            return d.inline(eqn.params[key], ins)
    raise NotImplementedError(f"the call {eqn.primitive.name} is not emulated")


@handles("cond")
def _cond(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    index, *operands = ins
    branches = eqn.params["branches"]
    outs = [d.new() for _ in eqn.outvars]
    targets: list[int] = []
    last = len(branches) - 1

    def run(thread: Any) -> None:
        thread.pc = targets[min(max(int(thread.env[index]), 0), last)]

    d.emit(run, eqn, "branch")
    ends = []
    for branch in branches:
        targets.append(d.here)
        d.move(d.inline(branch, operands), outs, eqn)
        ends.append(d.jump(eqn))
    for end in ends:
        end(d.here)
    return outs


@handles("while")
def _while(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    carry = [d.new() for _ in ins[nc + nb :]]
    d.move(ins[nc + nb :], carry, eqn)
    start = d.here
    (test,) = d.inline(p["cond_jaxpr"], [*ins[:nc], *carry])
    target = [0]

    def run(thread: Any) -> None:
        if not thread.env[test]:
            thread.pc = target[0]

    d.emit(run, eqn, "test")
    d.move(d.inline(p["body_jaxpr"], [*ins[nc : nc + nb], *carry]), carry, eqn)
    d.jump(eqn)(start)
    target[0] = d.here
    return carry


@handles("scan")
def _scan(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    p = eqn.params
    if "num_consts" in p:
        nconsts, ncarry = p["num_consts"], p["num_carry"]
    else:
        groups = p["ft_in"].unflatten()
        nconsts, ncarry = len(groups[0]), len(groups[1])
    length, reverse = p["length"], p["reverse"]
    consts, init, xs = ins[:nconsts], ins[nconsts : nconsts + ncarry], ins[nconsts + ncarry :]
    carry = [d.new() for _ in init]
    d.move(init, carry, eqn)
    counter = d.new()
    rows = [d.new() for _ in xs]
    ys = [d.new() for _ in eqn.outvars[ncarry:]]
    y_avals = [v.aval for v in eqn.outvars[ncarry:]]
    x_plain = [np.dtype(v.aval.dtype).kind in "iub" and v.aval.ndim == 1 for v in eqn.invars[nconsts + ncarry :]]

    def begin(thread: Any) -> None:
        thread.env[counter] = 0
        for y, aval in zip(ys, y_avals):
            thread.env[y] = np.zeros(aval.shape, aval.dtype)

    d.emit(begin, eqn, "begin")
    start = d.here
    target = [0]

    def test(thread: Any) -> None:
        env = thread.env
        i = env[counter]
        if i >= length:
            thread.pc = target[0]
            return
        for row, x, plain in zip(rows, xs, x_plain):
            value = env[x][length - 1 - i if reverse else i]
            env[row] = value.item() if plain else value

    d.emit(test, eqn, "test")
    outs = d.inline(p["jaxpr"], [*consts, *carry, *rows])

    def collect(thread: Any) -> None:
        env = thread.env
        i = env[counter]
        env[counter] = i + 1
        for y, out in zip(ys, outs[ncarry:]):
            env[y][length - 1 - i if reverse else i] = env[out]

    d.emit(collect, eqn, "next")
    d.move(outs[:ncarry], carry, eqn)
    d.jump(eqn)(start)
    target[0] = d.here
    return [*carry, *ys]


@handles("axis_index")
def _axis_index(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    name = eqn.params["axis_name"]
    out = d.new()

    def run(thread: Any) -> None:
        try:
            thread.env[out] = thread.axes[name]
        except KeyError:
            raise ProtocolError(f"axis_index of {name!r}: the kernel has the axes {list(thread.axes)}") from None

    d.emit(run, eqn)
    return [out]


@handles("program_id")
def _program_id(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    axis, out, names = eqn.params["axis"], d.new(), d.program.axis_names

    def run(thread: Any) -> None:
        thread.env[out] = thread.axes[names[axis]]

    d.emit(run, eqn)
    return [out]


@handles("num_programs")
def _num_programs(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    return [d.new(d.program.axis_sizes[eqn.params["axis"]])]


# ---- warps -----------------------------------------------------------------------------------------------------------


@handles("mpmd_map", "core_map")
def _warp_map(d: Decoder, eqn: Any, ins: list[int]) -> list[int]:
    meshes = eqn.params.get("meshes") or (eqn.params["mesh"],)
    jaxprs = eqn.params.get("jaxprs") or (eqn.params["jaxpr"],)
    if len(meshes) != 1 or type(meshes[0]).__name__ != "WarpMesh":
        raise NotImplementedError(f"inside a kernel only a map over warps is emulated, got {meshes}")
    ((axis, warps),) = meshes[0].shape.items()
    meeting = d.new()
    after = [0]

    def fork(thread: Any) -> None:
        meet = Meeting(warps)
        thread.env[meeting] = meet
        for warp in range(warps):
            child = type(thread)(thread.machine, thread.cta, thread.warpgroup, warp, list(thread.env), thread.pc)
            child.knowledge.join(thread.knowledge)
            child.axes = {**thread.axes, axis: warp}
            child.waits = dict(thread.waits)
            child.parent = thread
            thread.machine.start(child)
        thread.children = thread.machine.threads[-warps:]
        thread.tick()
        thread.pc = after[0]

    d.emit(fork, eqn, "warp_map", visible=True)
    jaxpr = jaxprs[0]
    constants = ins if getattr(jaxpr, "jaxpr", jaxpr).constvars else None
    d.inline(jaxpr, [] if constants else ins, constants)

    def end(thread: Any) -> bool:
        thread.machine.leave(thread)
        thread.env[meeting].arrive(thread.knowledge)
        return True

    d.emit(end, eqn, "end of warp_map", visible=True)
    after[0] = d.here

    def join(thread: Any) -> bool | None:
        meet = thread.env[meeting]
        if meet.generation == 0:
            return thread.block(meet, lambda: f"waits for its warps, {meet.arrived} of {warps} have ended")
        thread.knowledge.join(meet.latest)
        for key in {k for c in thread.children for k in c.waits}:
            counts = {c.waits.get(key, 0) for c in thread.children}
            # Warps that waited differently often leave the warpgroup without a common phase: -1 marks that.
            thread.waits[key] = counts.pop() if len(counts) == 1 else -1
        for child in thread.children:
            thread.groups += child.groups + ([child.open_stores] if child.open_stores else [])
        return None

    d.emit(join, eqn, "end of warp_map", visible=True)
    return []


# ---- scopes ----------------------------------------------------------------------------------------------------------


def _allocate(thread: Any, aval: Any, name: str, key: Any, collective: bool) -> Any:
    """What a scoped reference of type `aval` is bound to."""
    machine, dtype = thread.machine, aval.dtype
    kind = str(getattr(dtype, "name", dtype))
    cta = thread.cta
    shape = tuple(aval.shape)
    if "semaphore" in kind:
        return _semaphores(machine, thread.device, (key, cta.index, None if collective else str(thread)), shape,
                           name, f" of CTA {cta.index}")
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


def _semaphores(machine: Any, device: int, key: Any, shape: tuple[int, ...], name: str,
                owner: str = "") -> Cells:
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
            row = [Buffer(f"global {position}", "gmem", poison(shape, aval.dtype), i) for i in range(len(machine.coordinates))]
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
            for slot, aval, name in zip(slots, avals, names):
                thread.env[slot] = _allocate(thread, aval, name, key, d.program.num_threads is None)
            return None
        # The hardware synchronises the block here, before the memory may be given out again.
        meeting = cta.meeting
        if thread.arrivals.get(meeting) is None:
            thread.arrivals[meeting] = meeting.arrive(thread.knowledge)
        if meeting.generation <= thread.arrivals[meeting]:
            return thread.block(
                meeting, lambda: f"waits for the threads of its CTA to enter run_scoped, {meeting.arrived} of {meeting.expected}"
            )
        del thread.arrivals[meeting]
        thread.knowledge.join(meeting.latest)
        visit = thread.visits[key] = thread.visits.get(key, 0) + 1
        scope = cta.scopes.get((key, visit))
        if scope is None:
            made = [_allocate(thread, aval, name, (key, visit), True) for aval, name in zip(avals, names)]
            scope = cta.scopes[(key, visit)] = [made, meeting.expected, Knowledge()]
        for slot, value in zip(slots, scope[0]):
            thread.env[slot] = value
        thread.env[visit_slot] = visit
        return None

    d.emit(enter, eqn, "run_scoped", visible=collective)
    results = d.inline(jaxpr, slots, ins)

    def leave(thread: Any) -> None:
        if collective:
            where = (key, thread.env[visit_slot])
            scope = thread.cta.scopes[where]
            scope[1] -= 1
            scope[2].join(thread.knowledge)
            if scope[1]:
                return
            made, knowledge = scope[0], scope[2]
            del thread.cta.scopes[where]
        else:
            made, knowledge = [thread.env[s] for s in slots], thread.knowledge
        if thread.machine.detector is None:
            return
        for value in made:
            for access in value.async_uses.values() if isinstance(value, Buffer) and value.space == "smem" else ():
                if not covers(knowledge.seen, access.component, access.time):
                    thread.machine.fault(
                        ("freed", access.instruction.index),
                        ProtocolError(
                            f"shared memory freed too early: {access} may still be in flight when {thread.cta} leaves the scope "
                            f"of {value.name}; nothing in the CTA waits for it"
                        ),
                        thread,
                    )

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
                made.space = "regs" if math.prod(aval.shape) and made.space == "smem" else made.space

    d.emit(enter, eqn, "run_state")
    d.inline(jaxpr, slots)
    outs = [d.new() for _ in eqn.outvars]

    def leave(thread: Any) -> None:
        for slot, out in zip(slots, outs):
            value = thread.env[slot]
            thread.env[out] = np.array(value.data) if isinstance(value, Buffer) else value

    d.emit(leave, eqn, "end of run_state")
    return outs

