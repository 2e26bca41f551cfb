"""Parses what Mosaic GPU prints while it assembles a kernel: ptxas's figures, and the launch in the host code."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import jax

_IGNORED, _SPILLED = "'setmaxnreg' ignored", "Registers are spilled to local memory"
_ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_REMARK = re.compile(r"\(C\d+\)|[Ww]arning|Potential Performance Loss")
_HOST_FUNCTION = re.compile(r"^define .*@(?P<name>\w+?)_mosaic_gpu\(", re.MULTILINE)
# Matches the launch in the host code. With jax 0.11 the host code launches the kernel; with jax 0.12 the host code
# only describes the launch.
_LAUNCH = re.compile(
    r"call \w+ @mosaic_gpu_(?:launch_kernel|build_kernel_spec)\(ptr [^,]+, (?P<sizes>(?:i32 \d+, ){10})"
)


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """Resources of one assembled Mosaic kernel.

    `shared_memory_bytes` is the dynamic amount asked for at launch; `static_shared_memory_bytes` is what ptxas adds.
    `warnings` holds ptxas's remarks, such as serialized wgmma instructions or an ignored setmaxnreg.
    """

    name: str
    architecture: str
    registers: int
    stack_frame_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    barriers: int
    static_shared_memory_bytes: int
    shared_memory_bytes: int | None = None
    grid: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> KernelReport:
        """Rebuilds a report from `dataclasses.asdict` after a round trip through JSON, which makes tuples lists."""
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        return cls(**values)

    @property
    def ignores_setmaxnreg(self) -> bool:
        """Whether all threads keep the registers that they were launched with.

        jax 0.12 assembles kernels with nvJitLink as relocatable code (though it never links them), and ptxas then
        ignores `setmaxnreg`. The tests can only check that hardly anything spills.
        """
        return jax.__version_info__ >= (0, 12) and any(_IGNORED in warning for warning in self.warnings)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The warnings that fail a test. Spills are counted separately."""
        known = (_IGNORED, _SPILLED) if self.ignores_setmaxnreg else ()
        return tuple(warning for warning in self.warnings if not any(text in warning for text in known))

    @property
    def spills(self) -> int:
        """Bytes of spill loads plus bytes of spill stores."""
        return self.spill_store_bytes + self.spill_load_bytes


def parse_reports(text: str) -> list[KernelReport]:
    """Parses the output of MOSAIC_GPU_DUMP_PTXAS and MOSAIC_GPU_DUMP_HOST_LLVM."""
    launches = _parse_launches(text)
    chunks = re.split(r"(?=ptxas info\s*:\s*Compiling entry function)", text)
    reports = []
    for before, chunk in itertools.pairwise(chunks):
        entry, spills, used = _ENTRY.search(chunk), _SPILLS.search(chunk), _USED.search(chunk)
        if entry is None or spills is None or used is None:
            raise RuntimeError(f"ptxas printed something this parser does not know:\n{chunk[:2000]}")
        name = entry["name"].removesuffix("_kernel").removesuffix("_mosaic_gpu")
        static_smem = _STATIC_SMEM.search(chunk)
        remarks = [line.strip() for line in (before + chunk).splitlines() if "ptxas" in line and _REMARK.search(line)]
        reports.append(
            KernelReport(
                name=name,
                architecture=entry["architecture"],
                registers=int(used[1]),
                stack_frame_bytes=int(spills[1]),
                spill_store_bytes=int(spills[2]),
                spill_load_bytes=int(spills[3]),
                barriers=int(used[2] or 0),
                static_shared_memory_bytes=int(static_smem[1]) if static_smem else 0,
                warnings=tuple(dict.fromkeys(remarks)),
                **launches.get(name, {}),
            )
        )
    return reports


def _parse_launches(text: str) -> dict[str, dict[str, Any]]:
    launches = {}
    functions = list(_HOST_FUNCTION.finditer(text))
    for function in functions:
        launch = _LAUNCH.search(text, function.end())
        if launch is not None:
            sizes = [int(size) for size in re.findall(r"i32 (\d+)", launch["sizes"])]
            grid, cluster, threads, smem = sizes[:3], sizes[3:6], sizes[6:9], sizes[9]
            launches[function["name"]] = {
                "grid": tuple(grid),
                "cluster": tuple(cluster),
                "threads": tuple(threads),
                "shared_memory_bytes": smem,
            }
    return launches


# Each section of the output begins with one of these lines and ends where the next section begins.
_SECTIONS = {"ptx": "// Generated by LLVM NVPTX", "ptxas": "ptxas ", "sass": "//----", "host_llvm": "; ModuleID"}


def dumped_code(text: str, kind: str) -> str:
    """Returns the output of MOSAIC_GPU_DUMP_PTX (`kind` "ptx") or MOSAIC_GPU_DUMP_SASS (`kind` "sass")."""
    current, kept = None, []
    for line in text.splitlines():
        current = next((name for name, start in _SECTIONS.items() if line.startswith(start)), current)
        if current == kind:
            kept.append(line)
    return "\n".join(kept) + "\n"
