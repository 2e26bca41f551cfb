"""Describes what is measured and where: the commit, GPUs, driver, versions, clocks. No setting is changed.

A measurement can be repeated only if its code can be found again. So the harness refuses a tree that differs from its
commit. In a copy of the tree without the history, the user names the commit. It is recorded as unverified, with a hash
of the copy's overlap/, computed as Git does. A test compares this hash with the commit's.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping

import jax
import jaxlib.version

from overlap.cli.arguments import WrongArguments

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
UNVERIFIED = "unverified: not in a repository here"
# The folders that must not differ from the commit. Results may differ, since each measurement writes some.
_CODE = ("overlap", "mosaic_emulator", "lessons", "benchmarks", ":(exclude)benchmarks/results")

HOPPER_PEAK_TFLOPS = 989.4
BLACKWELL_PEAK_TFLOPS = 2250.0
_NVLINK_VARIABLES = ("XLA_FLAGS", "NCCL_NVLS_ENABLE", "CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def describe(devices: int, code: Mapping[str, str]) -> dict[str, str]:
    """Returns the facts about a run, by name, in the order to print them.

    Args:
      devices: how many devices are used.
      code: the commit and the command, see `code_facts`.
    """
    layout = "one process" if jax.process_count() == 1 else f"{jax.process_count()} processes"
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


# --- The commit -------------------------------------------------------------------------------------------------------


def code_facts(named: str | None, root: pathlib.Path = REPOSITORY, *, dry_run: bool = False) -> dict[str, str]:
    """Returns the commit whose code is in `root`, a hash of overlap/ there, and the command line, by name.

    The names are "commit", "code" and "command". A dry run has no "code". `named` is a commit; None: HEAD.

    Raises:
      WrongArguments: the code differs from the commit, or no history here has it and `named` is no full hash.
    """
    called = {"command": shlex.join(["python", *sys.orig_argv[1:]])}
    if dry_run:
        return {"commit": "none: a dry run measures nothing", **called}
    code = {"code": f"overlap {tree_hash(root / 'overlap')[:12]}"}
    top = git(root, "rev-parse", "--show-toplevel")
    is_root = top is not None and pathlib.Path(top).resolve() == root.resolve()
    name = f"{named or 'HEAD'}^{{commit}}"
    commit = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", name) if is_root else None
    if commit is None:
        if re.fullmatch(r"[0-9a-f]{40}", named or "") is None:
            raise WrongArguments(
                f"nothing was measured: the history in {root} has no commit {named or 'HEAD'}: add --commit with all "
                "40 digits, as `git rev-parse HEAD` says where the tree was copied from"
            )
        return {"commit": f"{(named or '')[:12]} ({UNVERIFIED})", **code, **called}
    differing = git(root, "diff", "--name-only", commit, "--", *_CODE)
    new = git(root, "ls-files", "--others", "--exclude-standard", "--", *_CODE)
    if changed := sorted({*(differing or "").splitlines(), *(new or "").splitlines()}):
        raise WrongArguments(
            f"nothing was measured: the code differs from commit {commit[:12]} in {', '.join(changed[:5])}: commit "
            "that first, then measure"
        )
    return {"commit": commit[:12], **code, **called}


def git(root: pathlib.Path, *arguments: str) -> str | None:
    """Runs a git command in `root`. Returns its output; None if the command fails or git is not installed."""
    line = ["git", "-c", f"safe.directory={root}", *arguments]
    try:
        done = subprocess.run(line, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def tree_hash(folder: pathlib.Path) -> str:
    """Computes the hash that Git gives this folder (`git rev-parse COMMIT:FOLDER`). Python's caches are left out."""
    entries = []
    for path in folder.iterdir():
        if path.name == "__pycache__":
            continue
        # Git sorts folders as if their names ended in a slash.
        if path.is_dir():
            entries.append((path.name.encode() + b"/", b"40000", tree_hash(path)))
        else:
            mode = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            entries.append((path.name.encode(), mode, _object_hash(b"blob", path.read_bytes())))
    listed = (mode + b" " + name.rstrip(b"/") + b"\0" + bytes.fromhex(digest) for name, mode, digest in sorted(entries))
    return _object_hash(b"tree", b"".join(listed))


def _object_hash(kind: bytes, data: bytes) -> str:
    return hashlib.sha1(kind + b" " + str(len(data)).encode() + b"\0" + data, usedforsecurity=False).hexdigest()
