"""Questions to the NVIDIA driver and NCCL about this machine, through ctypes, without starting a JAX backend."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Sequence

NCCL_SONAME = "libnccl.so.2"
# The first NCCL with ncclGetPeerDevicePointer, which XLA calls for its peers' addresses.
NCCL_WITH_PEER_POINTERS = (2, 30)
# With one process per GPU: 2.30.7 and 2.31.2 take address space for each program with a fused kernel, until there is
# none left (https://github.com/NVIDIA/nccl/issues/2331). 2.32.3 maps memory once, however many programs ask for it.
NCCL_OF_PROCESSES = (2, 32, 3)
# CUdevice_attribute, and flags of cuMemHostRegister, in cuda.h.
_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR = 75, 76
_POINTER_DEVICE_ORDINAL = 9  # CUpointer_attribute
_HOST_POINTER_FOR_REGISTERED_MEMORY = 91
_PORTABLE = 1
_MAPPED = 2


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU that a CUDA program sees in this process; CUDA_VISIBLE_DEVICES is respected."""

    name: str
    compute_capability: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class NcclLibrary:
    """The NCCL that XLA would use.

    Attributes:
      version: (major, minor, patch).
      path: the file.
      copies: every libnccl file that is mapped into this process. More than one often causes odd failures.
    """

    version: tuple[int, int, int]
    path: str
    copies: tuple[str, ...]

    def __str__(self) -> str:
        return f"NCCL {'.'.join(map(str, self.version))} at {self.path}"


@functools.cache
def _driver() -> ctypes.CDLL | None:
    """The driver library, initialized; None if there is no usable driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return library if library.cuInit(0) == 0 else None


def visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process can use, in CUDA's order; empty without a driver.

    This initializes the driver. A later change of CUDA_VISIBLE_DEVICES has no effect on this process.
    """
    driver = _driver()
    if driver is None:
        return ()
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    gpus = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        name = ctypes.create_string_buffer(128)
        major, minor = ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device)
        gpus.append(Gpu(name.value.decode(errors="replace"), (major.value, minor.value)))
    return tuple(gpus)


def share_host_memory(address: int, length: int, gpus: Sequence[int]) -> bool:
    """Registers a piece of this process's memory, so that kernels can write to it at its host address.

    Args:
      address: of the first byte.
      length: in bytes.
      gpus: ordinals of the GPUs of this process that will write there. Their contexts must be in use already.

    Returns:
      Whether the memory could be registered.
    """
    driver = _driver()
    sharable = ctypes.c_int()
    if driver is None:
        return False
    for ordinal in gpus:
        driver.cuDeviceGetAttribute(ctypes.byref(sharable), _HOST_POINTER_FOR_REGISTERED_MEMORY, ordinal)
        if not sharable.value:
            return False
    context = ctypes.c_void_p()
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpus[0]) or driver.cuCtxPushCurrent_v2(context):
        return False
    done = driver.cuMemHostRegister_v2(ctypes.c_void_p(address), ctypes.c_size_t(length), _PORTABLE | _MAPPED) == 0
    driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    return done


def gpu_of(pointer: int) -> int | None:
    """The ordinal of the GPU in whose memory an address lies; None if it lies in no GPU's memory."""
    driver = _driver()
    ordinal = ctypes.c_int()
    if driver is None or driver.cuPointerGetAttribute(
        ctypes.byref(ordinal), _POINTER_DEVICE_ORDINAL, ctypes.c_uint64(pointer)
    ):
        return None
    return ordinal.value


def pairs_without_peer_access() -> list[tuple[int, int]]:
    """The pairs (reader, owner) of visible GPUs without peer access. Fused kernels need peer access in every pair."""
    driver = _driver()
    count = len(visible_gpus())
    pairs = []
    for reader in range(count):
        for owner in range(count):
            can = ctypes.c_int()
            if reader != owner and driver is not None:
                driver.cuDeviceCanAccessPeer(ctypes.byref(can), reader, owner)
                if not can.value:
                    pairs.append((reader, owner))
    return pairs


def driver_version() -> str | None:
    """The version of the NVIDIA kernel driver, such as "580.65.06", or None."""
    try:
        return pathlib.Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return None


def jax_plugin() -> str | None:
    """The name of jax's installed CUDA plugin, such as "xla_cuda13"; None if jax runs on the CPU alone."""
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            if importlib.util.find_spec(f"jax_plugins.{name}") is not None:
                return name
        except ModuleNotFoundError:
            return None
    return None


def nccl() -> NcclLibrary | None:
    """The NCCL that XLA would use in this process, or None if there is none.

    XLA opens NCCL by its short name. So a copy that is loaded already (by LD_PRELOAD or PyTorch) comes first, then the
    pip wheel, which jax's plugin loads, then the dynamic loader's search path. This function follows the same rules, so
    it asks the library that XLA would use. If a library of that name is not NCCL, the answer is None, since XLA would
    open that library as well.
    """
    for name, mode in _nccl_candidates():
        try:
            library = ctypes.CDLL(name, mode=mode)
        except OSError:
            continue
        code = ctypes.c_int()
        with contextlib.suppress(AttributeError):  # A library of that name that is not NCCL.
            if library.ncclGetVersion(ctypes.byref(code)) == 0 and code.value > 0:
                copies = mapped_nccl_copies()
                return NcclLibrary(_decode_version(code.value), copies[0] if len(copies) == 1 else name, copies)
        if name == NCCL_SONAME:
            return None
    return None


def mapped_nccl_copies() -> tuple[str, ...]:
    """The libnccl files that are mapped into this process."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    return tuple(sorted(set(re.findall(r"(/\S*libnccl\.so[^\s]*)", maps))))


def _nccl_candidates() -> list[tuple[str, int]]:
    """Pairs (name, mode of dlopen), in the order in which XLA would find the libraries."""
    candidates = [(NCCL_SONAME, os.RTLD_NOLOAD | os.RTLD_NOW)]
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        spec = None
    for folder in (spec.submodule_search_locations if spec else None) or ():
        candidates.append((str(pathlib.Path(folder) / "lib" / NCCL_SONAME), os.RTLD_NOW))
    candidates.append((NCCL_SONAME, os.RTLD_NOW))
    return candidates


def _decode_version(code: int) -> tuple[int, int, int]:
    """NCCL's version code as a tuple. 23007 is 2.30.7; versions before 2.9 have codes such as 2708 for 2.7.8."""
    if code < 10000:
        return code // 1000, code // 100 % 10, code % 100
    return code // 10000, code // 100 % 100, code % 100
