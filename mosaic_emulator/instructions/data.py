"""Handlers of a thread's own loads, stores and atomic operations, of accumulators and of wgmma."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ..execution.machine import Thread
from ..execution.operations import REDUCTIONS
from ..execution.program import Decoder, handles
from ..foundations import arithmetic
from ..foundations.equations import Equation
from ..foundations.errors import ProtocolError

_GENERIC_LOAD, _GENERIC_STORE = "load", "store"


def _finish(value: np.ndarray, plain: bool) -> np.ndarray | int | float:
    return value.item() if plain else value


@handles("get", "load")
def _get(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    ref, *leaves = ins
    (path,) = d.paths(leaves, eqn.params["tree"])
    out, aval = d.new(), eqn.outvars[0].aval
    plain = arithmetic.is_plain(aval)
    # Rows that nobody has written hold NaN. So reading them is no fault: if they are used, the result has NaN.
    by_rows = len(aval.shape) > 1 and jnp.issubdtype(aval.dtype, jnp.floating)

    @d.instruction(eqn, "load", visible=True)
    def run(thread: Thread) -> None:
        view = path.resolve(thread, thread.env[ref])
        thread.access(view, _GENERIC_LOAD, write=False, by_rows=by_rows and view.buffer.space == "smem")
        thread.env[out] = _finish(view.read().reshape(aval.shape), plain)

    return [out]


def _store(d: Decoder, eqn: Equation, ref: int, value: int, leaves: list[int], *, read: bool) -> list[int]:
    (path,) = d.paths(leaves, eqn.params["tree"])
    out = d.new()
    plain = bool(eqn.outvars) and arithmetic.is_plain(eqn.outvars[0].aval)

    @d.instruction(eqn, "store", visible=True)
    def run(thread: Thread) -> None:
        env = thread.env
        view = path.resolve(thread, env[ref])
        new = env[value]
        if view.buffer.space == "gmem" and view.buffer.device != thread.device and not path.is_remote:
            raise ProtocolError(f"{view} belongs to another device")
        if read:
            thread.access(view, _GENERIC_LOAD, write=False)
            env[out] = _finish(view.read(), plain)
        thread.access(view, _GENERIC_STORE, write=True)
        view.write(np.asarray(new))

    return [out]


@handles("swap")
def _swap(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    # `ref[...] = x` is a swap whose result nobody uses. Such a swap reads nothing.
    return _store(d, eqn, ins[0], ins[1], ins[2:], read=d.is_used(eqn.outvars[0]))


@handles("store")
def _plain_store(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    return _store(d, eqn, ins[0], ins[1], ins[2:], read=False)[: len(eqn.outvars)]


@handles("mgpu_atomic_store")
def _atomic(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    ref, transforms, value, *_ = d.unflatten_entries(eqn.params["args_tree"], ins)
    path = d.path(transforms)
    name = eqn.params["atomic_type"].value

    @d.instruction(eqn, "atomic", visible=True)
    def run(thread: Thread) -> None:
        view = path.resolve(thread, thread.env[ref])
        thread.access(view, f"atomic {name}", write=True, atomic=True)
        old = view.read()
        view.write(REDUCTIONS[name](old, np.asarray(thread.env[value], old.dtype)))

    return [d.new() for _ in eqn.outvars]


# ---- accumulators and wgmma ------------------------------------------------------------------------------------------


@handles("wgmma_ref")
def _wgmma(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    acc, a, b, *leaves = ins
    acc_path, a_path, b_path = d.paths(leaves, *(eqn.params[f"{x}_transforms_tree"] for x in ("acc", "a", "b")))
    a_in_registers = not hasattr(eqn.invars[1].aval, "inner_aval")

    @d.instruction(eqn, "wgmma", visible=True)
    def run(thread: Thread) -> None:
        env = thread.env
        target, right = acc_path.resolve(thread, env[acc]), b_path.resolve(thread, env[b])
        left = env[a] if a_in_registers else a_path.resolve(thread, env[a])
        thread.machine.engine.wgmma(thread, target, left, right)

    return [d.new() for _ in eqn.outvars]


@handles("wgmma_wait")
def _wgmma_wait(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    n = eqn.params["n"]
    d.emit(lambda thread: thread.machine.engine.wait_wgmma(thread, n), eqn, visible=True)


@handles("wgmma_accumulator_deref")
def _accumulator_load(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    (acc,) = ins
    wait_n, out = eqn.params.get("wait_n", 0), d.new()

    @d.instruction(eqn, "accumulator load", visible=True)
    def run(thread: Thread) -> None:
        buffer = thread.env[acc]
        if wait_n is not None:
            thread.machine.engine.wait_wgmma(thread, wait_n)
        flying = [op for op in thread.wgmmas if op.accumulator.buffer is buffer]
        if flying:
            raise ProtocolError(
                f"the accumulator {buffer.name} is read while {len(flying)} wgmma operations on it are in flight, "
                f"the oldest from {flying[0].instruction.source}: expected wgmma_wait(0) before, or wait_n=0"
            )
        thread.env[out] = np.array(buffer.data)

    return [out]


@handles("wgmma_accumulator_store")
def _accumulator_store(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    acc, value = ins

    @d.instruction(eqn, "accumulator store", visible=True)
    def run(thread: Thread) -> None:
        buffer = thread.env[acc]
        if any(op.accumulator.buffer is buffer for op in thread.wgmmas):
            raise ProtocolError(f"the accumulator {buffer.name} is stored to while a wgmma on it is in flight")
        buffer.data[...] = thread.env[value]

    return [d.new() for _ in eqn.outvars]


# ---- without effect --------------------------------------------------------------------------------------------------


@handles("set_max_registers", "print_layout", "async_prefetch", "debug_print", "debug_callback")
@handles("griddepcontrol_wait", "griddepcontrol_launch_dependents")
def _nothing(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    return [d.new() for _ in eqn.outvars]


@handles("layout_cast")
def _same(d: Decoder, eqn: Equation, ins: list[int]) -> list[int]:
    return ins[:1]


@handles("delay")
def _delay(d: Decoder, eqn: Equation, ins: list[int]) -> None:
    @d.instruction(eqn, visible=True)
    def run(thread: Thread) -> None:
        thread.polled = True
