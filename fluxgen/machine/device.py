"""What the driver reports of this machine's GPUs, through libcuda: no Torch, no CUDA context."""

from __future__ import annotations

import ctypes as ct
from dataclasses import dataclass
from pathlib import Path

from fluxgen.core.errors import ToolchainError
from fluxgen.core.topology import GPUS, Gpu, normalise_name

SYSFS = Path("/sys/bus/pci/devices")

# CUdevice_attribute values (cuda.h).
_ATTRIBUTES = {
    "sm_count": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "cc_major": 75,
    "cc_minor": 76,
    "smem_bytes": 97,
}


@dataclass(frozen=True)
class Device:
    """One visible GPU.

    Attributes:
        name: as the driver reports it. gpu: its properties, the preset's where it is known.
        driver: CUDA version of the driver, e.g. ``13.0``. address: on PCI, e.g. ``0000:3b:00.0``,
            empty if the driver keeps it. numa: the socket (NUMA node) that it hangs from, as the
            kernel knows it.
    """

    name: str
    gpu: Gpu
    driver: str
    address: str = ""
    numa: int = 0


def devices(library: str = "libcuda.so.1", sysfs: Path = SYSFS) -> tuple[Device, ...]:
    """The visible GPUs, in the driver's order.

    Raises:
        ToolchainError: no driver, or the driver refuses to start; says which.
    """
    try:
        cuda = ct.CDLL(library)
    except OSError:
        raise ToolchainError(
            f"no NVIDIA driver: {library} cannot be loaded. Install the driver, or name the target "
            "with --target instead of auto"
        ) from None
    status = cuda.cuInit(0)
    if status:
        raise ToolchainError(f"the NVIDIA driver does not start: cuInit returned {status}")
    version, count = ct.c_int(), ct.c_int()
    cuda.cuDriverGetVersion(ct.byref(version))
    cuda.cuDeviceGetCount(ct.byref(count))
    driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return tuple(_describe(cuda, index, driver, sysfs) for index in range(count.value))


def _address(cuda: ct.CDLL, handle: ct.c_int) -> str:
    text = ct.create_string_buffer(32)
    if cuda.cuDeviceGetPCIBusId(text, 32, handle):
        return ""
    return text.value.decode("ascii", "replace").lower()


def _numa(address: str, sysfs: Path) -> int:
    """The NUMA node of a GPU; 0 where the kernel does not say."""
    try:
        return max(0, int((sysfs / address / "numa_node").read_text("ascii")))
    except (OSError, ValueError):
        return 0


def _describe(cuda: ct.CDLL, index: int, driver: str, sysfs: Path) -> Device:
    handle = ct.c_int()
    cuda.cuDeviceGet(ct.byref(handle), index)
    text = ct.create_string_buffer(256)
    cuda.cuDeviceGetName(text, 256, handle)
    total = ct.c_size_t()
    cuda.cuDeviceTotalMem_v2(ct.byref(total), handle)
    found = {}
    for name, attribute in _ATTRIBUTES.items():
        value = ct.c_int()
        cuda.cuDeviceGetAttribute(ct.byref(value), attribute, handle)
        found[name] = value.value
    address = _address(cuda, handle)
    numa = _numa(address, sysfs)
    device_name = text.value.decode("utf-8", "replace")
    slug = normalise_name(device_name)
    preset = GPUS.get(slug)
    # A name is no identity: a partition or a cut-down part carries its parent's.
    if (
        preset is not None
        and preset.sm_count == found["sm_count"]
        and preset.cc == found["cc_major"] * 10 + found["cc_minor"]
    ):
        return Device(device_name, preset, driver, address, numa)
    gpu = Gpu.from_properties(
        name=f"{slug}-{found['sm_count']}sm" if preset else slug,
        cc=(found["cc_major"], found["cc_minor"]),
        sm_count=found["sm_count"],
        clock_mhz=max(1, found["clock_khz"] // 1000),
        smem_kb=max(1, found["smem_bytes"] // 1024),
        mem_gb=round(total.value / 1e9, 1),
        mem_gbs=round(2e3 * found["memory_clock_khz"] * found["bus_bits"] / 8 / 1e9, 1),
        l2_mb=round(found["l2_bytes"] / 1e6, 1),
        nvlink_gbs=preset.nvlink_gbs if preset else 0.0,
    )
    return Device(device_name, gpu, driver, address, numa)
