"""Makes kernels reach the emulator, by a lowering for CPU devices of the primitive that `plgpu.kernel` binds.

Each device's program calls back to the host once per launch. The callbacks of all devices of the mesh meet. The last
one to arrive emulates the launch on all devices; then each callback returns the outputs of its device.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Sequence
from typing import SupportsInt

import jax
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core as jex_core
from jax.interpreters import mlir

from ..execution.program import Launch, Program
from ..foundations import interrupt
from ..foundations.equations import AxisName, JaxObject
from ..foundations.errors import EmulationError, NotEmulatedError, cannot_run
from ..instructions.decode import decode
from ..state import runs
from ..state.memory import poison
from .sequence import World

# How long the other devices wait for devices that do not reach a launch: until a warning, until an error.
_REPORT_AFTER_S, _MEETING_TIMEOUT_S = 30.0, 600.0
_logger = logging.getLogger(__name__)
_enable_lock = threading.Lock()
_enabled = False
_one_at_a_time = threading.Lock()  # held by the launch that runs: devices may reach independent kernels at once


def _kernel_primitive() -> jex_core.Primitive:
    """Finds the primitive behind `plgpu.kernel`, which has no public name, by tracing a trivial kernel."""
    kernel = plgpu.kernel(lambda out: None, out_type=jax.ShapeDtypeStruct((1,), np.float32))

    def search(jaxpr: jex_core.Jaxpr) -> jex_core.Primitive | None:
        for eqn in jaxpr.eqns:
            if "meshes" in eqn.params and "jaxprs" in eqn.params:
                return eqn.primitive
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns") and (found := search(inner)) is not None:
                    return found
        return None

    primitive = search(jax.make_jaxpr(kernel)().jaxpr)
    if primitive is None:
        raise NotImplementedError(f"plgpu.kernel of jax {jax.__version__} binds no primitive that the emulator knows")
    return primitive


def enable() -> None:
    """Registers the emulator, so that Mosaic GPU kernels run on CPU devices.

    `emulate` calls this function. Further calls change nothing.
    """
    global _enabled
    with _enable_lock:
        if not _enabled:
            primitive = _kernel_primitive()
            mlir.register_lowering(primitive, functools.partial(_lower, primitive), platform="cpu")
            threading.Thread(target=runs.run_fence_at_exit, name="overlap-emulation-end").start()
            _enabled = True
    interrupt.install()  # At each call, since only the main thread can install it.


def _threads_of_xla(devices: int) -> int:
    """How many threads XLA has for the CPU devices of this process: NPROC, or one for each core or device."""
    nproc = os.environ.get("NPROC", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(int(nproc) if nproc.isdecimal() else cores, devices)


class _Meeting:
    """The state of one launch from the arrival of its first device until the launch has ended."""

    def __init__(self, count: int):
        self.inputs: dict[int, list[np.ndarray]] = {}
        self.missing = count
        self.is_reported = False
        self.interrupts = interrupt.count()
        self.done = threading.Event()
        self.outputs: list[list[np.ndarray]] = []
        self.error: BaseException | None = None


class _Launcher:
    """Runs the launches of one kernel in one compiled program. Each device calls it once per launch."""

    def __init__(self, program: Program, mesh_shape: dict[AxisName, int], name: str):
        self._program, self._mesh_shape, self._name = program, mesh_shape, name
        self._stop = interrupt.stop_event()
        self._devices = math.prod(mesh_shape.values())
        self._lock = threading.Lock()
        self._open: list[_Meeting] = []

    def __call__(self, device: SupportsInt, *inputs: npt.ArrayLike) -> list[np.ndarray]:
        device = int(device)
        values = [np.asarray(x) for x in inputs]
        with self._lock:
            # A device reaches its launches in order, so it joins the first meeting that it has not joined yet.
            meeting = next((m for m in self._open if device not in m.inputs), None)
            if meeting is None:
                meeting = _Meeting(self._devices)
                self._open.append(meeting)
            meeting.inputs[device] = values
            meeting.missing -= 1
            if meeting.missing == 0:
                self._open.remove(meeting)
            must_run = meeting.missing == 0 and not meeting.done.is_set()
        if must_run:
            try:
                with _one_at_a_time:
                    self._emulate(meeting)
            finally:
                meeting.done.set()
        else:
            self._wait(meeting)
        if meeting.error is not None:
            raise meeting.error
        return meeting.outputs[device]

    def _wait(self, meeting: _Meeting) -> None:
        """Waits until the launch has ended. Logs which devices are missing if that takes long, and at last gives up."""
        if meeting.done.wait(_REPORT_AFTER_S):
            return
        with self._lock:
            reports, meeting.is_reported = meeting.missing > 0 and not meeting.is_reported, True
        if reports:
            _logger.warning("%s", self._who_is_missing(meeting, _REPORT_AFTER_S))
        if not meeting.done.wait(_MEETING_TIMEOUT_S - _REPORT_AFTER_S):
            with self._lock:
                if meeting.missing and not meeting.done.is_set():
                    self._give_up(meeting)
            meeting.done.wait()  # All devices have come. The launch itself has another limit, `step_limit`.

    def _who_is_missing(self, meeting: _Meeting, seconds: float) -> str:
        missing = sorted(set(range(self._devices)) - meeting.inputs.keys())
        count = jax.local_device_count("cpu")
        return (
            f"kernel {self._name!r}: after {seconds:g} s devices {missing} of {self._devices} have not reached it, and "
            "the others wait for them. Either the program does not run it on all devices of its mesh, or XLA has no "
            f"thread left to bring them there: it has {_threads_of_xla(count)} threads for {count} devices, and each "
            f"device that waits keeps one. Expected: all devices of the mesh run the kernel; and NPROC={8 * count} in "
            "the environment before Python starts, or fewer devices"
        )

    def _emulate(self, meeting: _Meeting) -> None:
        run, in_context = runs.current_run()
        interrupts = run.interrupts if in_context else meeting.interrupts
        try:
            repetition = run.repetition(self)
            inputs = [meeting.inputs[device] for device in range(self._devices)]
            world, laps = World(run.settings, run, self._name, repetition), run.settings.laps
            launch = Launch(self._program, self._name, self._mesh_shape, tuple(range(self._devices)), inputs, [])
            for lap in range(laps):
                world.add(launch, is_real=lap == laps - 1)
            simulation = world.simulation
            run.begin(lambda: simulation.now)
            stops = lambda: self._must_stop or interrupt.stopped(interrupts)  # noqa: E731
            outputs = world.machines[-1].outputs(ended=world.execute(stops))
            run.steps += simulation.now
            errors = simulation.errors
            if in_context:
                run.warnings += simulation.warnings
                if run.settings.keep:
                    devices = self._program.device_ids
                    run.launches.append(dataclasses.replace(launch, devices=devices, outputs=outputs))
        except KeyboardInterrupt:
            # Another handler than the emulator's may have raised the exception.
            if not (self._must_stop or interrupt.stopped(interrupts)):
                interrupt.defer()
            # With an error, the main thread would see the error before its KeyboardInterrupt. So there is none then.
            silent = in_context or interrupt.pending() or self._must_stop
            errors = [] if silent else [EmulationError(f"kernel {self._name!r}: ended by Ctrl-C")]
            outputs = self._no_outputs()
        except BaseException as bug:
            error = EmulationError(f"kernel {self._name!r}: {cannot_run(bug)}")
            error.__cause__ = bug
            errors = [error]
            outputs = self._no_outputs()
        meeting.outputs = outputs
        if in_context:
            run.errors += errors
        elif errors:
            meeting.error = errors[0]

    def _give_up(self, meeting: _Meeting) -> None:
        """Ends a launch that some devices have not reached, with an error."""
        meeting.outputs = self._no_outputs()
        error = EmulationError(f"{self._who_is_missing(meeting, _MEETING_TIMEOUT_S)}. Given up")
        run, in_context = runs.current_run()
        if in_context:
            run.errors.append(error)
        else:
            meeting.error = error
        meeting.done.set()

    @property
    def _must_stop(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def _no_outputs(self) -> list[list[np.ndarray]]:
        return [[poison(a.shape, a.dtype) for a in self._program.out_avals] for _ in range(self._devices)]


_names = itertools.count()


def _lower(
    primitive: jex_core.Primitive, ctx: mlir.LoweringRuleContext, *args: JaxObject, **params: JaxObject
) -> JaxObject:
    """Lowers one kernel for CPU devices to a callback per device.

    A kernel that asks for JAX's own interpreter is lowered as jax does without the emulator, whose rule for CPU devices
    hides jax's rule for all platforms. There is no public way to get the hidden rule: `_lowerings` is the only private
    name of jax in the emulator (docs/private_names.md).
    """
    if params.get("interpret"):
        rule = getattr(getattr(mlir, "_lowerings", {}).get(primitive), "rule", None)
        if rule is None:  # This version of jax keeps its rules elsewhere.
            raise NotImplementedError(
                f"interpret={params['interpret']}: jax {jax.__version__} cannot run its own interpreter in a process "
                "that uses the emulator. Expected: interpret=False, or another process"
            )
        return rule(ctx, *args, **params)
    name = params.get("name") or f"kernel {next(_names)}"
    axis_context = ctx.module_context.axis_context
    mesh = getattr(axis_context, "mesh", None)
    manual = getattr(axis_context, "manual_axes", frozenset())
    sizes = {} if mesh is None or not hasattr(axis_context, "manual_axes") else dict(mesh.shape)
    if left := [axis for axis in sizes if axis not in manual]:
        raise NotEmulatedError(
            f"kernel {name!r}: it is inside a jax.shard_map that leaves the axes {left} of the mesh {sizes} "
            "to XLA's partitioner, which cannot split a kernel: leave `axis_names` of `jax.shard_map` out, or call "
            "the kernel inside a second `jax.shard_map` over the axes that are left"
        )
    axes = {axis: size for axis, size in mesh.shape.items() if axis in manual} if mesh is not None else {}
    # An abstract mesh names no devices. The kernel then runs on the devices of this process, which is the only one.
    devices = np.ravel(mesh.devices) if isinstance(mesh, jax.sharding.Mesh) else jax.devices() if mesh else ()
    if any(d.process_index != jax.process_index() for d in devices):
        raise NotImplementedError(f"kernel {name!r}: a mesh of several processes is not emulated")
    count = math.prod(axes.values())
    ids = range(count) if mesh is None else (device.id for device in devices)
    try:
        program = decode(params, ctx.avals_in, tuple(ids))
    except NotImplementedError as reason:
        raise NotEmulatedError(f"kernel {name!r}: {reason}") from reason
    if 0 in program.grid:
        sizes = dict(zip(program.axis_names, program.grid))
        raise ValueError(f"kernel {name!r}: a grid of no CTAs, got {sizes} (a cluster needs as many `cores` as CTAs)")
    launcher = _Launcher(program, axes, name)
    results = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_out)

    def call(*operands: jax.Array) -> Sequence[jax.Array]:
        device = 0
        for axis, size in axes.items():
            device = device * size + lax.axis_index(axis)
        return io_callback(launcher, results, np.int32(0) + device, *operands)

    return mlir.lower_fun(call, multiple_results=True)(ctx, *args)
