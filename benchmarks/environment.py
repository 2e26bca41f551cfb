"""Describes where and with what a benchmark runs: GPUs, driver, versions, clocks. No setting is changed."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Mapping

import jax
import jaxlib.version

HOPPER_PEAK_TFLOPS = 989.4
BLACKWELL_PEAK_TFLOPS = 2250.0
_NVLINK_VARIABLES = ("XLA_FLAGS", "NCCL_NVLS_ENABLE", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def describe(layout: str, devices: int, code: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts about a run, by name, in the order to print them.

    Args:
      layout: how many processes, in words.
      devices: how many devices are used.
      code: the commit and the command, see `command.code_facts`.
    """
    kinds = sorted({device.device_kind for device in jax.devices()})
    facts = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **code,
        "devices": f"{devices} of {jax.device_count()} x {', '.join(kinds)} ({layout})",
        "jax": f"jax {jax.__version__}, jaxlib {jaxlib.version.__version__}, python {platform.python_version()}",
    }
    if jax.default_backend() == "gpu":
        facts["driver"] = ", ".join(sorted(set(_nvidia_smi("driver_version")))) or "unknown"
        facts["cuda"] = _cuda_version()
        facts["nccl"] = _nccl_version()
        facts["power limit"] = ", ".join(sorted(set(_nvidia_smi("power.limit")))) or "unknown"
        facts["clocks"] = clocks() or "unknown"
    facts |= {name: value for name in _NVLINK_VARIABLES if (value := os.environ.get(name))}
    return facts


def peak_tflops(kind: str, operand_bits: int = 16) -> float | None:
    """Returns the data sheet's dense TFLOP/s of an SXM module for 16-bit or 8-bit floats; None for unknown devices."""
    known = (HOPPER_PEAK_TFLOPS, ("H100", "H200", "H800", "GH200")), (BLACKWELL_PEAK_TFLOPS, ("B200",))
    peak = next((peak for peak, names in known if any(name in kind for name in names)), None)
    return None if peak is None else peak * 16 / operand_bits


def clocks() -> str:
    """Reads each GPU's SM clock, power, temperature and throttle reasons, such as `1665 MHz 690 W 61 C SwPowerCap`."""
    fields = ("clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
    lines = []
    for line in _nvidia_smi(*fields):
        clock, power, temperature, reasons = (*(part.strip() for part in line.split(",")), "", "", "", "")[:4]
        lines.append(f"{clock} {power} {temperature} C {_throttle_reasons(reasons)}".strip())
    return "; ".join(lines)


def _throttle_reasons(mask: str) -> str:
    # The bits of nvmlClocksEventReasons that slow down a busy GPU.
    names = {0x4: "SwPowerCap", 0x8: "HwSlowdown", 0x20: "SwThermal", 0x40: "HwThermal", 0x80: "HwPowerBrake"}
    try:
        bits = int(mask, 16)
    except ValueError:
        return ""
    return "+".join(name for bit, name in names.items() if bits & bit)


def _nvidia_smi(*fields: str) -> list[str]:
    return _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cuda_version() -> str:
    with contextlib.suppress(Exception):
        # For example "PJRT C API\ncuda 13000".
        return jax.devices()[0].client.platform_version.replace("\n", " ")
    return "unknown"


def _nccl_version() -> str:
    with contextlib.suppress(Exception):
        from overlap.distributed import nccl_version

        if version := nccl_version():
            return ".".join(map(str, version))
    return "unknown"
