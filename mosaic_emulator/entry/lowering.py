"""Makes kernels reach the emulator, by a lowering for CPU devices of the primitive that `plgpu.kernel` binds.

Each device's program calls back to the host twice per launch: once with its inputs, and, when XLA has gathered from all
devices of the mesh that they came, for its outputs. The first of these second calls emulates the launch on all devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import threading
import time
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

# After this time the log names the devices that have not come to a launch. XLA ends the process after 40 s.
_REPORT_AFTER_S = 30.0
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
            threading.Thread(target=runs.run_fence_at_exit, args=[_report], name="mosaic-emulator-end").start()
            _enabled = True
    interrupt.install()  # At each call, since only the main thread can install it.


@dataclasses.dataclass
class _Arrival:
    """A device that has reached a launch."""

    kernel: str
    devices: int  # in the mesh
    device: int
    inputs: list[np.ndarray]
    time: float
    is_reported: bool = False


_tickets = itertools.count()
_arrivals: dict[int, _Arrival] = {}  # by ticket
_arrivals_lock = threading.Lock()


def _report() -> None:
    """Logs which devices have not come to a launch to which others came long ago."""
    with _arrivals_lock:
        arrivals = list(_arrivals.values())
    for arrival in arrivals:
        if arrival.is_reported or time.monotonic() - arrival.time < _REPORT_AFTER_S:
            continue
        there = [other for other in arrivals if other.kernel == arrival.kernel]
        missing = sorted(set(range(arrival.devices)) - {other.device for other in there})
        if not missing:  # They wait for a launch that runs.
            continue
        for other in there:
            other.is_reported = True
        _logger.warning(
            "kernel %r: after %g s devices %s of %d have not reached it, and the others wait for them. XLA ends the "
            "process when they have waited 40 s (--xla_cpu_collective_call_terminate_timeout_seconds in XLA_FLAGS). "
            "Expected: all devices of the mesh run the kernel, and reach it at about the same time",
            *(arrival.kernel, _REPORT_AFTER_S, missing, arrival.devices),
        )


class _Meeting:
    """A launch that all devices have reached, until each has its outputs."""

    def __init__(self, inputs: list[list[np.ndarray]]):
        self.inputs = inputs
        self.missing = len(inputs)  # devices that have not fetched their outputs
        self.interrupts = interrupt.count()
        self.done = threading.Event()
        self.outputs: list[list[np.ndarray]] = []
        self.error: BaseException | None = None


class _Launcher:
    """Runs the launches of one kernel in one compiled program. Each device calls `arrive` and `run` once per launch.

    Between them XLA gathers what `arrive` returned. So no callback waits for another device to come: a device whose
    thread waited in one kernel would not get to another kernel, where the others may be.
    """

    def __init__(self, program: Program, mesh_shape: dict[AxisName, int], name: str):
        self._program, self._mesh_shape, self._name = program, mesh_shape, name
        self._stop = interrupt.stop_event()
        self._devices = math.prod(mesh_shape.values())
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}

    def arrive(self, device: SupportsInt, *inputs: npt.ArrayLike) -> np.ndarray:
        """Takes a device's inputs, and returns the ticket for them. XLA reuses their memory after the call."""
        arrival = _Arrival(self._name, self._devices, int(device), [np.array(x) for x in inputs], time.monotonic())
        ticket = next(_tickets) % 2**31
        with _arrivals_lock:
            _arrivals[ticket] = arrival
        return np.full(1, ticket, np.int32)

    def run(self, device: SupportsInt, tickets: npt.ArrayLike) -> list[np.ndarray]:
        """Returns the device's outputs of the launch to which the devices, in order, came with `tickets`."""
        key = tuple(np.asarray(tickets).tolist())
        with self._lock:
            meeting = self._meetings.get(key)
            if must_run := meeting is None:
                with _arrivals_lock:
                    inputs = [_arrivals.pop(ticket).inputs for ticket in key]
                meeting = self._meetings[key] = _Meeting(inputs)
            meeting.missing -= 1
            if not meeting.missing:
                del self._meetings[key]
        if must_run:
            try:
                with _one_at_a_time:
                    self._emulate(meeting)
            finally:
                meeting.done.set()
        meeting.done.wait()  # The launch has a limit, `step_limit`.
        if meeting.error is not None:
            raise meeting.error
        return meeting.outputs[int(device)]

    def _emulate(self, meeting: _Meeting) -> None:
        run, in_context = runs.current_run()
        interrupts = run.interrupts if in_context else meeting.interrupts
        try:
            repetition = run.repetition(self)
            world, laps = World(run.settings, run, self._name, repetition), run.settings.laps
            devices = tuple(range(self._devices))
            launch = Launch(self._program, self._name, self._mesh_shape, devices, meeting.inputs, [])
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
                    ids = self._program.device_ids
                    run.launches.append(dataclasses.replace(launch, devices=ids, outputs=outputs))
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
        device = np.int32(0)
        for axis, size in axes.items():
            device = device * size + lax.axis_index(axis)
        ticket = io_callback(launcher.arrive, jax.ShapeDtypeStruct((1,), np.int32), device, *operands)
        # With jax_remove_size_one_mesh_axis_from_type, types know no axes of one device.
        several = tuple(axis for axis, size in axes.items() if size > 1)
        tickets = lax.all_gather(ticket, several, tiled=True) if several else ticket
        return io_callback(launcher.run, results, device, tickets)

    return mlir.lower_fun(call, multiple_results=True)(ctx, *args)
