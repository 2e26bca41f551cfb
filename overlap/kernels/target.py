"""What a kernel is compiled for: the kind of device, its number of cores (SMs) and its shared memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from overlap import emulation

HOPPER_SMEM_BYTES = 232448
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")
BLACKWELL_NAMES = ("B100", "B200", "B300", "GB200", "GB300")


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: "gpu", "cpu" (the kernels run emulated there) or another one.
      kind: the device's name, as the framework gives it.
      num_cores: streaming multiprocessors; emulated ones on a CPU.
      smem_limit_bytes: the most shared memory that one CTA can have.
    """

    platform: str
    kind: str
    num_cores: int
    smem_limit_bytes: int = HOPPER_SMEM_BYTES

    @property
    def is_hopper(self) -> bool:
        """Whether the Hopper kernels run here: on a Hopper GPU, or emulated on a CPU."""
        return self.platform == "cpu" or any(name in self.kind for name in HOPPER_NAMES)

    @property
    def is_blackwell(self) -> bool:
        """Whether this is a Blackwell GPU of the data-centre kind."""
        return any(name in self.kind for name in BLACKWELL_NAMES)


def current_target(mesh: Any = None) -> Target:
    """The device that the code being traced is for: that of the enclosing mesh, else the default device.

    A CPU device has as many cores as the emulator says.

    Args:
      mesh: the mesh whose devices are meant, instead of the enclosing one.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.abstract_mesh
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_device
    if device is not None:
        platform, kind, cores = device.platform, device.device_kind, device.num_cores
    else:
        default = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(default, str):
            default = jax.devices(default)[0]
        platform, kind, cores = default.platform, default.device_kind, getattr(default, "core_count", None)
    if platform == "cpu":
        return Target(platform, kind, emulation.core_count())
    if platform == "gpu" and not cores:
        raise RuntimeError(
            f"the device {kind!r} does not say how many cores it has: is the CUDA plugin of jax current?"
        )
    return Target(platform, kind, cores or 1)
