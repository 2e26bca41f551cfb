"""Describes the device that a kernel is compiled for: its kind, its number of SMs and its shared memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Literal

import jax

from overlap import _settings, emulation

# The largest shared memory of a CTA in bytes, the same on Hopper and Blackwell.
SMEM_BYTES = 232448
HOPPER_NAMES = ("H100", "H200", "H800", "H20", "GH200")
BLACKWELL_NAMES = ("B100", "B200", "B300", "GB200", "GB300")


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: "gpu", "cpu" (the kernels run emulated there) or another one.
      kind: the device's name, jax's `device_kind`.
      num_cores: number of streaming multiprocessors; on a CPU, of emulated ones.
      smem_limit_bytes: the most shared memory that one CTA can have.
    """

    platform: str
    kind: str
    num_cores: int
    smem_limit_bytes: int = SMEM_BYTES

    @property
    def is_hopper(self) -> bool:
        """Whether the Hopper kernels run here: on a Hopper GPU, or emulated on a CPU."""
        return any(name in self.kind for name in HOPPER_NAMES) or (self.platform == "cpu" and not self.is_blackwell)

    @property
    def is_blackwell(self) -> bool:
        """Whether the Blackwell kernels run here: on a data-centre Blackwell GPU, or emulated on a CPU."""
        return any(name in self.kind for name in BLACKWELL_NAMES)


# Suffixes of the kind of a CPU device, for the architecture that is emulated on it.
_EMULATED_KINDS = {"hopper": "", "blackwell": " as NVIDIA B200"}
# Part of the cache key of `jax.jit`, since the kernels of the architectures differ.
_emulated = jax.make_user_context(None)


@contextlib.contextmanager
def emulating(architecture: Literal["hopper", "blackwell"]) -> Iterator[None]:
    """Opens a context in which CPU devices emulate the kernels of an architecture; overrides $OVERLAP_EMULATED_GPU.

    Raises:
      ValueError: `architecture` is neither "hopper" nor "blackwell".
    """
    if architecture not in _EMULATED_KINDS:
        raise ValueError(f"`architecture` must be {' or '.join(_EMULATED_KINDS)}, got {architecture!r}")
    with _emulated(architecture):
        yield


def current_target(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None) -> Target:
    """Returns the device that the code being traced will run on: one of the enclosing mesh, else the default device.

    A CPU device has as many SMs as the emulator says, and stands for the GPU that $OVERLAP_EMULATED_GPU names.

    Args:
      mesh: the mesh whose device to take, instead of the enclosing mesh.

    Raises:
      RuntimeError: a GPU does not say how many SMs it has.
    """
    if isinstance(mesh, jax.sharding.Mesh):
        mesh = mesh.abstract_mesh
    device = (mesh or jax.sharding.get_abstract_mesh()).abstract_device
    if device is not None:
        platform = device.platform
        kind = device.device_kind
        cores = device.num_cores
    else:
        default = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(default, str):
            default = jax.devices(default)[0]
        platform = default.platform
        kind = default.device_kind
        cores = getattr(default, "core_count", None)
    if platform == "cpu":
        stands_for = _EMULATED_KINDS[_emulated.value or _settings.emulated_gpu()]
        return Target(platform, kind + stands_for, emulation.core_count())
    if platform == "gpu" and not cores:
        raise RuntimeError(
            f"the device {kind!r} does not say how many cores it has: is the CUDA plugin of jax current?"
        )
    return Target(platform, kind, cores or 1)
