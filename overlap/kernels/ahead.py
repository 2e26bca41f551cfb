"""Assembles kernels in a thread while the rest of their program is still being lowered.

Mosaic GPU assembles a kernel when XLA compiles the program (0.2 to 0.6 s each, one after the other), and keeps it for
the process by the hash of its text. Lowering is Python on one core, so until then the other cores are idle. Here each
kernel that has been lowered becomes a program of its own, which a thread compiles. XLA then finds the kernel when it
compiles the whole program. If not, e.g. because compiling failed here, XLA assembles the kernel, as it would without
this module.

One thread, because Mosaic GPU's and XLA's compilers wait for each other's options (measured with jax 0.11.2 and
0.12.0.1: two threads with two kernels each take 0.8 to 1 of the time of one thread, but a thread beside Python costs
nothing). It takes the latest kernel first, since XLA begins with the first ones. This module holds no lock, so two
threads that lower at once may start two threads here, or assemble a kernel twice. That costs time only.

Only kernels that a GPU of this process will run are assembled: the program of another machine is compiled there. A
program that is lowered, and not compiled, or that jax's persistent cache has, makes work in vain. In jax's logs each
kernel is a program of its own, `overlap_assembly`.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from overlap import _compat

# jax.Device, which type checkers take for a variable.
type Device = Any

_logger = logging.getLogger("overlap")
# Kernels to be assembled: the device, and the hash and the text of the kernel.
_waiting: collections.deque[tuple[Device, bytes, bytes]] = collections.deque()
_begun: set[bytes] = set()
_worker: threading.Thread | None = None


@contextlib.contextmanager
def assembling(context: Any) -> Iterator[None]:
    """A context in which kernels are lowered, which are then assembled in a thread.

    Args:
      context: jax's context of a module (`ModuleContext`).
    """
    device = _device(context)
    if device is None:
        yield
        return
    texts = _compat.known_kernels()
    before = set(texts)
    yield
    new = texts.keys() - before - _begun
    _begun.update(new)
    _waiting.extend((device, kernel_hash, texts[kernel_hash]) for kernel_hash in new)
    _start()


def _device(context: Any) -> Device | None:
    """Returns a GPU of this process that will run the program; None if there is none, or if it is not known."""
    if "cuda" not in context.platforms or not _compat.backends_are_initialized() or jax.default_backend() != "gpu":
        return None
    here = jax.local_devices()
    mesh = getattr(context.axis_context, "mesh", None)
    devices = tuple(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else ()
    devices = getattr(context.axis_context, "device_assignment", None) or devices
    if not devices:  # jax does not say on which device a program of one device will run.
        return here[0] if getattr(context.axis_context, "num_devices", None) == 1 else None
    return next((device for device in devices if device in here), None)


def _start() -> None:
    """Starts the thread, unless it runs or has nothing to do.

    If the thread ends just now, its last kernel waits for the next call: a loss of time, but of nothing else.
    """
    global _worker
    if _waiting and (_worker is None or not _worker.is_alive()):
        _worker = threading.Thread(target=_work, name="overlap-assembly")
        with contextlib.suppress(RuntimeError):  # Python is ending.
            _worker.start()


def _work() -> None:
    # The thread is no daemon: Python must not end within a compiler. It waits for at most one kernel.
    while threading.main_thread().is_alive():
        try:
            kernel = _waiting.pop()
        except IndexError:
            return
        try:
            _assemble(*kernel)
        except Exception as error:
            _logger.debug("a kernel was not assembled ahead: %s", error)


def _assemble(device: Device, kernel_hash: bytes, text: bytes) -> None:
    """Compiles a program of one kernel, which nobody runs: so it has neither the kernel's operands nor its results."""

    def overlap_assembly() -> jax.Array:
        call = jax.ffi.ffi_call("mosaic_gpu_v2", jax.ShapeDtypeStruct((), jnp.int32))
        return call(
            kernel_hash=kernel_hash,
            module=text,
            use_custom_barrier=False,
            skip_device_barrier=True,
            uses_xla_collective_metadata=False,
        )

    jax.jit(overlap_assembly, out_shardings=jax.sharding.SingleDeviceSharding(device)).lower().compile()
