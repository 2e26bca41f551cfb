"""The devices of a run, GPUs or CPU devices in one process or several, and their mesh."""

from __future__ import annotations

import dataclasses
import os

import jax
from jax.sharding import AxisType, Mesh

import overlap
from overlap.cli.devices import why_no_gpu

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
# The batch is split along these axes.
BATCH_AXES = (DATA, FSDP)
# A process without GPUs makes one CPU device per device of the mesh, at most this many. Further ones would only wait
# for each other.
_MOST_CPU_DEVICES = 64
_EMULATION_THREADS = 8
# The sizes of the tensor axis that are chosen by default: at most the GPUs of one host, since the devices along this
# axis communicate in every product; and powers of two, which usually divide the heads.
_TENSOR = (1, 2, 4, 8)


class Refused(Exception):
    """The arguments contradict each other, or do not fit this machine. The message is one line; exit status 2."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """The number of devices along each axis of the mesh."""

    data: int
    fsdp: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return f"--data {self.data} × --fsdp {self.fsdp} × --tensor {self.tensor}"

    def mesh(self) -> Mesh:
        """The mesh. Consecutive devices are neighbours along `tensor`; devices that are left over are not used."""
        devices = jax.devices()[: self.devices]
        return jax.make_mesh(
            (self.data, self.fsdp, self.tensor), (DATA, FSDP, TENSOR), (AxisType.Auto,) * 3, devices=devices
        )


def start(data: int | None, fsdp: int | None, tensor: int | None, *, emulate: bool = False) -> Axes:
    """Joins the job of a launcher, if there is one, and returns the mesh's axes. Call it before devices are used.

    Args:
      data, fsdp, tensor: the number of devices along each axis; None: choose. Chosen are: one along fsdp; on GPUs as
        many along tensor as there are, up to 8, and the rest along data; on CPU devices two along data and two along
        tensor.
      emulate: whether CPU devices will run fused kernels.

    Raises:
      Refused: there are fewer devices, or processes of the job would have no work.
    """
    without_gpus = why_no_gpu()
    if without_gpus:
        jax.config.update("jax_platforms", "cpu")
    overlap.initialize()  # One process per device under mpirun, srun or torchrun. In a single process it does nothing.
    if without_gpus and not jax.distributed.is_initialized():
        axes = Axes(data or 2, fsdp or 1, tensor or 2)
        if axes.devices > _MOST_CPU_DEVICES:
            raise Refused(
                f"{axes} asks for {axes.devices} devices, and one process makes at most {_MOST_CPU_DEVICES} CPU "
                "devices: lower one of them"
            )
        jax.config.update("jax_num_cpu_devices", axes.devices)
        if emulate:
            # XLA's thread pool has a thread for each core, or as many as NPROC says. A thread inside an emulated kernel
            # waits for the other devices, which need threads of their own to reach that kernel.
            os.environ.setdefault("NPROC", str(_EMULATION_THREADS * axes.devices))
        return axes
    return fit(data, fsdp, tensor, devices=jax.device_count(), processes=jax.process_count())


def fit(data: int | None, fsdp: int | None, tensor: int | None, *, devices: int, processes: int) -> Axes:
    """The axes for `devices` devices in `processes` processes. Other arguments and errors are as in `start`."""
    asked = Axes(data or 1, fsdp or 1, tensor or 1)
    if asked.devices > devices:
        more = f"start more than {processes} processes" if processes > 1 else "use a machine with more"
        raise Refused(
            f"{asked} asks for {asked.devices} devices, and there are {devices}: lower one of them, or {more}"
        )
    rest = devices // asked.devices
    if tensor is None:
        tensor = max(number for number in _TENSOR if rest % number == 0)
        rest //= tensor
    axes = Axes(data or rest, asked.fsdp, tensor)
    if processes > 1 and axes.devices != devices:
        raise Refused(
            f"{axes} makes a mesh of {axes.devices} devices, and the {processes} processes have {devices}: each has to "
            "take part, so choose axes whose product is that, or start fewer processes"
        )
    return axes
