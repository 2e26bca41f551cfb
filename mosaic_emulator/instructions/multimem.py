"""Handlers of NVLink multicast (`multimem`): one access that reaches the same memory of all devices of a mesh.

On the hardware, a thread uses an address that stands for the memory of all devices, and the NVLink switch makes the
access on each. Here the thread itself accesses the buffer of each device, through the generic proxy. So the usual rules
hold for races, for peers that have not begun or have ended the launch, and for memory that nobody has written. A signal
to all devices is emulated as one signal to each device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..execution.machine import Thread
from ..execution.operations import REDUCTIONS
from ..execution.program import Decoder, handles
from ..execution.references import RefPath
from ..foundations import arithmetic
from ..foundations.equations import AxisName, Equation
from ..state.memory import Buffer, View
from .signals import signal_device


def _views(thread: Thread, path: RefPath, buffer: Buffer, axes: AxisName | Sequence[AxisName]) -> list[View]:
    """Returns for each device the view that the reference stands for there."""
    return [path.resolve(thread, buffer.on(device)) for device in thread.machine.mesh.multicast_devices(axes)]


@handles("multimem_store")
def _store(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    value, ref, *leaves = ins
    (path,), axes = d.paths(leaves, eqn.params["transforms_tree"]), eqn.params["collective_axes"]

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        new = np.asarray(thread.env[value])
        for view in _views(thread, path, thread.env[ref], axes):
            thread.access(view, "multimem store", write=True)
            view.write(new)


@handles("multimem_load_reduce")
def _load_reduce(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    ref, *leaves = ins
    axes, name = eqn.params["collective_axes"], eqn.params["reduction_op"]
    (path,) = d.paths(leaves, eqn.params["tree"])
    out, aval = d.new(), eqn.outvars[0].aval
    function, plain = REDUCTIONS.get(name), arithmetic.is_plain(aval)
    if function is None:
        raise NotImplementedError(
            f"multimem_load_reduce: reduction_op must be one of {tuple(REDUCTIONS)}, got {name!r}"
        )
    is_integer = np.dtype(aval.dtype).kind in "iub"

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        # The switch adds values of fewer than 32 bits in f32, in an unknown order. The emulator adds in device order.
        total = None
        for view in _views(thread, path, thread.env[ref], axes):
            thread.access(view, "multimem load", write=False)
            part = view.read() if is_integer else view.read().astype(np.float32)
            with np.errstate(all="ignore"):
                total = part if total is None else function(total, part)
        value = np.asarray(total).astype(aval.dtype).reshape(aval.shape)
        thread.env[out] = value.item() if plain else value

    return [out]


@handles("semaphore_signal_multicast")
def _signal(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    ref, transforms, count = d.unflatten_entries(eqn.params["args_tree"], ins)
    path, amount, axes = d.path(transforms), d.leaf(count), eqn.params["collective_axes"]
    if not isinstance(amount, int):
        raise NotImplementedError("the value of semaphore_signal_multicast must be a constant, as Mosaic GPU needs it")

    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        for device in thread.machine.mesh.multicast_devices(axes):
            signal_device(thread, thread.env[ref].on(device), path, amount, "sys")
        thread.tick()
