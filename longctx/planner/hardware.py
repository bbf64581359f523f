"""GPUs by name: peak, bandwidth, memory and links; and the GPU and memory of this machine. No
torch.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
# torch's name of the device, the most specific first → dense bf16 FLOP/s, bytes per second of HBM,
# and bytes per second sent to other GPUs of its machine, by NVLink if it has that, else by PCI
# Express; from NVIDIA's data sheets
CHIPS = {
    "H200 NVL": (835e12, 4.8e12, 450e9),
    "H200": (989e12, 4.8e12, 450e9),
    "GH200": (989e12, 4.0e12, 450e9),
    "H100 NVL": (835e12, 3.9e12, 300e9),
    "H100 PCIe": (756e12, 2.0e12, 64e9),
    "H100": (989e12, 3.35e12, 450e9),
    "B200": (2250e12, 8.0e12, 900e9),
    "A100": (312e12, 2.0e12, 300e9),
    "L40S": (362e12, 0.864e12, 32e9),
    "L4": (121e12, 0.3e12, 32e9),
}
SLOWEST = min(link for _, _, link in CHIPS.values())
REACHED = 3.5 / 4.5  # of the link; measured on two H200
NETWORK = 5e10  # bytes per second from a GPU to other machines: 400 Gbit/s for each, assumed
HOPPERS = {"H100", "H200", "GH200", "H800", "H20"}
NO_GPU = "device=cuda: torch finds no GPU here; use device=cpu, or device=auto for what there is"
NO_LONGEST = "seq_len=max: finds what fits a GPU, and this run is on a CPU; give a number of tokens"
CONTROL = Path("/dev/nvidiactl")  # NVIDIA's driver on Linux has it
ASSUMED = "NVIDIA H200", 139.8  # GiB; for a machine without a GPU, if none is named
ASSUMED_HOST = 128 * GIB  # for each GPU of a machine that is not here; eight have 1 to 2 TiB
# A run is refused if its predicted memory is so many times the available memory. On GPUs
# predictions are within a tenth for training, and rougher for evaluation; on a CPU naive attention
# took 6.1 GiB of 8.4 predicted.
CLEARLY = {"cuda": 1.3, "cpu": 2.0}


@dataclass(frozen=True)
class Chip:
    """A GPU and its links; `flops` and `bandwidth` are None if its name is not known."""

    name: str
    memory: float  # bytes
    flops: float | None
    bandwidth: float | None
    link: float  # bytes per second to GPUs of the same machine
    network: float = NETWORK  # and to those of others

    @property
    def hopper(self) -> bool:
        """Return True for a Hopper, for which flash has kernels of its own."""
        return not HOPPERS.isdisjoint(self.name.upper().replace("-", " ").split())

    @property
    def fp8(self) -> bool:
        """Return True if it has FP8 matrix products, as far as its name tells."""
        return not is_named(self.name, "A100")

    @property
    def usable(self) -> float:
        """Return the bytes left for tensors by CUDA's context, libraries and gaps."""
        return 0.985 * self.memory - 0.8 * GIB


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as far as its decisions depend on it."""

    gpus: int  # that torch can use
    gpu: Chip | None  # the first of them, or this process's own
    bf16: bool  # whether that GPU computes in bf16
    host_memory: float  # bytes
    fp8: bool = False  # whether that GPU has FP8 matrix products


def without_fp8(device: str) -> str:
    """Return the message for FP8 products on a `device` without them."""
    return (
        f"precision=fp8: {device} has no FP8 matrix products, which take an NVIDIA "
        "GPU of compute capability 8.9 or more, such as an H100; use precision=auto"
    )


def chip(name: str, memory: float) -> Chip:
    """Return the chip that torch calls `name`, with so many bytes of memory."""
    figures = (CHIPS[of] for of in CHIPS if is_named(name, of))
    flops, bandwidth, link = next(figures, (None, None, SLOWEST))
    if is_named(name, "MIG"):  # a part of the chip
        flops = bandwidth = None
    return Chip(name, memory, flops, bandwidth, REACHED * link)


def is_named(name: str, of: str) -> bool:
    """Return True if every word of `of` is one of `name`."""
    return set(of.upper().split()) <= set(name.upper().replace("-", " ").split())


def here() -> Chip | None:
    """Return the first GPU of this machine, as CUDA's driver describes it, if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    if driver.cuDeviceGetName(name, 256, device) or driver.cuDeviceTotalMem_v2(
        ctypes.byref(size), device
    ):
        return None
    return chip(name.value.decode(), float(size.value))


def may_be_here() -> bool:
    """Return True if CUDA may find a GPU.

    The driver is asked only if its device file is missing: asking starts an idle GPU, and
    takes seconds.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return (CONTROL.exists() and not hidden) or here() is not None


def start_gpu(number: int) -> None:
    """Start GPU `number` of this machine and make torch's context on it, in the background.

    CUDA's driver does that without Python, so torch is imported meanwhile.
    """
    if not CONTROL.exists():
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does, before the context

    def start() -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        with suppress(OSError):
            driver = ctypes.CDLL("libcuda.so.1")  # releases the interpreter in every call
            if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), number):
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    # no daemon: a process that ends meanwhile waits, since a driver half started can crash its exit
    threading.Thread(target=start, name="start GPU").start()


def cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_memory() -> float:
    """Return the bytes of memory of this machine, or of its control group, without swap."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                limit = min(limit, int(file.read()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return float(limit)


def available_memory() -> float:
    """Return the bytes that a process could still take without swapping, in its control group."""
    available = host_memory()
    with suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        (kib,) = (line.split()[1] for line in file if line.startswith("MemAvailable:"))
        available = min(available, 1024.0 * int(kib))
    for group, limit, used, cache in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        with suppress(OSError, ValueError):
            files = {file: (Path(group) / file).read_text() for file in (limit, used)}
            stat = (Path(group) / "memory.stat").read_text().splitlines()
            freed = sum(int(line.split()[1]) for line in stat if line.split()[0] == cache)
            available = min(available, int(files[limit]) - int(files[used]) + freed)
    return available
