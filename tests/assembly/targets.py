"""The GPUs for which `tests.assembly.assembly` compiles without having one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


@dataclasses.dataclass(frozen=True)
class Target:
    """The data-sheet figures of one GPU that the compiler asks for."""

    name: str
    compute_capability: tuple[int, int]
    core_count: int
    memory_bytes: int
    memory_bytes_per_s: int
    l2_bytes: int
    clock_ghz: float
    shared_memory_per_block_optin: int = 232448

    @property
    def architecture(self) -> str:
        """Returns the architecture for which ptxas assembles."""
        return "sm_{}{}a".format(*self.compute_capability)

    def text(self) -> str:
        """Returns the figures in the text form of XLA's GpuTargetConfigProto."""
        major, minor = self.compute_capability
        return f"""
            gpu_device_info {{
              name: "{self.name}"  device_vendor: "NVIDIA Corporation"
              cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES }}
              core_count: {self.core_count}  fpus_per_core: 128  clock_rate_ghz: {self.clock_ghz}
              threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
              registers_per_block_limit: 65536  registers_per_core_limit: 65536
              shared_memory_per_block: 49152  shared_memory_per_core: 233472
              shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              device_memory_size: {self.memory_bytes}  memory_bandwidth: {self.memory_bytes_per_s}
              l2_cache_size: {self.l2_bytes}
              driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"
              dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.name}"
        """


TARGETS = {
    "h200": Target("NVIDIA H200", (9, 0), 132, 141 * 2**30, 4_800_000_000_000, 50 * 2**20, 1.98),
    "b200": Target("NVIDIA B200", (10, 0), 148, 178 * 2**30, 7_700_000_000_000, 126 * 2**20, 1.965),
    # The compiler's target is sm_103a. That a B300 has as many cores as a B200 is an assumption.
    "b300": Target("NVIDIA B300", (10, 3), 148, 268 * 2**30, 8_000_000_000_000, 126 * 2**20, 1.92),
}


@functools.cache
def topology(target: str = "h200", devices: int = 1, hosts: int = 1) -> tuple[Any, ...]:
    """Returns compile-only devices in the order of their ids: `hosts` hosts of `devices` GPUs each."""
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="cuda", target_config=TARGETS[target].text(), topology=f"1x{hosts}x{devices}"
    )
    return tuple(description.devices)
