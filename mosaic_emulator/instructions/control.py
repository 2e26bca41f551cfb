"""Handlers of the primitives for control flow, calls, maps over warps, and a thread's indices along axes."""

from __future__ import annotations

import numpy as np

from ..execution.machine import Thread
from ..execution.program import Decoder, handles
from ..foundations.equations import Equation, open_jaxpr
from ..foundations.errors import ProtocolError
from ..state.sync import Meeting


@handles("jit", "closed_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call")
def _call(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr", "call"):
        if key in eqn.params:
            return d.inline(eqn.params[key], ins)
    raise NotImplementedError(f"the call {eqn.primitive.name} is not emulated")


@handles("cond")
def _cond(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    index, *operands = ins
    branches = eqn.params["branches"]
    outs = [d.new() for _ in eqn.outvars]
    targets: list[int] = []
    last = len(branches) - 1

    @d.instruction(eqn, "branch")
    def run(thread: Thread) -> None:
        thread.pc = targets[min(max(int(thread.env[index]), 0), last)]

    ends = []
    for branch in branches:
        targets.append(d.here)
        d.move(d.inline(branch, operands), outs, eqn)
        ends.append(d.jump(eqn))
    for end in ends:
        end(d.here)
    return outs


@handles("while")
def _while(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    carry = [d.new() for _ in ins[nc + nb :]]
    d.move(ins[nc + nb :], carry, eqn)
    start = d.here
    (test,) = d.inline(p["cond_jaxpr"], [*ins[:nc], *carry])
    target = [0]

    @d.instruction(eqn, "test")
    def run(thread: Thread) -> None:
        if not thread.env[test]:
            thread.pc = target[0]

    d.move(d.inline(p["body_jaxpr"], [*ins[nc : nc + nb], *carry]), carry, eqn)
    d.jump(eqn)(start)
    target[0] = d.here
    return carry


@handles("scan")
def _scan(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
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

    @d.instruction(eqn, "begin")
    def begin(thread: Thread) -> None:
        thread.env[counter] = 0
        for y, aval in zip(ys, y_avals):
            thread.env[y] = np.zeros(aval.shape, aval.dtype)

    start = d.here
    target = [0]

    @d.instruction(eqn, "test")
    def test(thread: Thread) -> None:
        env = thread.env
        i = env[counter]
        if i >= length:
            thread.pc = target[0]
            return
        for row, x, plain in zip(rows, xs, x_plain):
            value = env[x][length - 1 - i if reverse else i]
            env[row] = value.item() if plain else value

    outs = d.inline(p["jaxpr"], [*consts, *carry, *rows])

    @d.instruction(eqn, "next")
    def collect(thread: Thread) -> None:
        env = thread.env
        i = env[counter]
        env[counter] = i + 1
        for y, out in zip(ys, outs[ncarry:]):
            env[y][length - 1 - i if reverse else i] = env[out]

    d.move(outs[:ncarry], carry, eqn)
    d.jump(eqn)(start)
    target[0] = d.here
    return [*carry, *ys]


@handles("axis_index")
def _axis_index(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    name, is_warp = eqn.params["axis_name"], eqn.params["axis_name"] in d.warp_axes
    out = d.new()

    @d.instruction(eqn)
    def run(thread: Thread) -> None:
        # A name is looked up in the order of Mosaic GPU: the axis of the warps, the axes of the mesh, the axes
        # of the kernel.
        mesh = thread.mesh
        if name in mesh.shape and not is_warp:
            thread.env[out] = mesh.place(thread.device)[list(mesh.shape).index(name)]
        elif name in thread.axes:
            thread.env[out] = thread.axes[name]
        else:
            available = [*mesh.shape, *(axis for axis in thread.axes if axis not in mesh.shape)]
            raise ProtocolError(f"axis_index of {name!r}: the kernel has the axes {available}")

    return [out]


@handles("program_id")
def _program_id(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    axis, out, names = eqn.params["axis"], d.new(), d.program.axis_names

    @d.instruction(eqn)
    def run(thread: Thread) -> None:
        thread.env[out] = thread.axes[names[axis]]

    return [out]


# ---- warps -----------------------------------------------------------------------------------------------------------


@handles("mpmd_map")
def _warp_map(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    meshes, jaxprs = eqn.params["meshes"], eqn.params["jaxprs"]
    if len(meshes) != 1 or type(meshes[0]).__name__ != "WarpMesh":
        kinds = [type(mesh).__name__ for mesh in meshes]
        raise NotImplementedError(f"inside a kernel only a map over warps is emulated, got a map over {kinds}")
    ((axis, warps),) = meshes[0].shape.items()
    meeting = d.new()
    after = [0]

    @d.instruction(eqn, "warp_map", visible=True)
    def fork(thread: Thread) -> None:
        meet = Meeting(warps)
        thread.env[meeting] = meet
        earlier = thread.children or [None] * warps
        thread.children = []
        for warp, before in enumerate(earlier):
            env = list(thread.env)
            child = type(thread)(thread.machine, thread.cta, (thread.warpgroup, warp), env, thread.pc, before)
            child.knowledge.join(thread.knowledge)
            thread.children.append(child)
            child.axes = {**thread.axes, axis: warp}
            # Each CUDA thread counts its own waits, so a warp continues with its counts from earlier maps.
            child.waits = {b: n[warp] if isinstance(n, tuple) else n for b, n in thread.waits.items()}
            thread.machine.start(child)
        thread.tick()
        thread.pc = after[0]

    jaxpr = jaxprs[0]
    constants = ins if open_jaxpr(jaxpr).constvars else None
    d.warp_axes.append(axis)
    d.inline(jaxpr, [] if constants else ins, constants)
    d.warp_axes.pop()

    @d.instruction(eqn, "end of warp_map", visible=True)
    def end(thread: Thread) -> bool:
        thread.machine.leave(thread)
        thread.env[meeting].arrive(thread.knowledge)
        return True

    after[0] = d.here

    @d.instruction(eqn, "end of warp_map", visible=True)
    def join(thread: Thread) -> bool | None:
        meet = thread.env[meeting]
        if meet.generation == 0:
            return thread.block(meet, lambda: f"waits for its warps, {meet.arrived} of {warps} have ended")
        thread.knowledge.join(meet.latest)
        # How often the warpgroup has waited for each barrier: a number if its warps agree, else a number for each warp.
        for barrier in {b: None for child in thread.children for b in child.waits}:
            counts = tuple(child.waits.get(barrier, 0) for child in thread.children)
            thread.waits[barrier] = counts[0] if len(set(counts)) == 1 else counts
        for child in thread.children:
            thread.groups += child.groups + ([child.open_stores] if child.open_stores else [])
        return None
