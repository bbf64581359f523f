"""GPUs by name, from cards.toml, and the GPU and memory of this machine. Torch-free."""

from __future__ import annotations

import ctypes
import functools
import os
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

GIB = 2**30
OTHERS = ("MIG", "LAPTOP", "MOBILE", "MAX")  # parts of a chip, and slower ones with its name
SLOWEST = 32e9  # link of an unknown GPU: PCI Express 4
REACHED = 3.5 / 4.5  # of the link; measured on two H200
NETWORK = 5e10  # bytes per second from a GPU to other machines: 400 Gbit/s for each, assumed
ASSUMED = "NVIDIA H200", 139.8  # GiB; for a machine without a GPU, if none is named
ASSUMED_HOST = 128 * GIB  # for each GPU of a machine that is not here; eight have 1 to 2 TiB
OWN_GROUPS = Path("/proc/self/cgroup")  # a line number:controllers:path for each of this process
# Control groups, version 2 and 1, by their controller: the folder of all groups, the files of a
# group's limit and of the memory used, and the key of cached files in memory.stat
V1 = "/sys/fs/cgroup/memory"
CONTROL_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    "memory": (V1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
COPY_SHARE = 0.5  # of free host memory: limit of the copy from which a checkpoint is written


@dataclass(frozen=True)
class Chip:
    """A GPU and its links; `flops` and `bandwidth` are None if its name is not known."""

    name: str
    memory: float  # bytes
    flops: float | None  # dense bf16 products with fp32 sums, per second
    bandwidth: float | None  # bytes per second of its memory
    link: float  # bytes per second to GPUs of the same machine
    network: float = NETWORK  # and to those of others
    # "hopper"; "ampere" for its mma.sync instructions and those of Ada and GeForce; or "other"
    generation: str = "other"
    fp8: bool = True  # torch has FP8 matrix products for it, on NVIDIA from sm_89
    bf16: bool = True  # as torch finds it

    @property
    def usable(self) -> float:
        """Return the bytes left for tensors by CUDA's context, libraries and gaps."""
        return 0.985 * self.memory - 0.8 * GIB

    def check(self, precision: str) -> None:
        """Raise ValueError if this device cannot compute in precision=."""
        if not self.bf16 and precision in ("auto", "bf16"):
            raise ValueError(f"precision=bf16: {self.name} has no bf16; use precision=fp32")
        if not self.fp8 and precision == "fp8":
            remedy = "use precision=auto, or compute capability 8.9 or more, such as an H100's"
            raise ValueError(f"precision=fp8: {self.name} has no FP8 matrix products; {remedy}")


CPU = Chip("a CPU", 0.0, None, None, 0.0, fp8=False)


@functools.cache
def cards() -> dict[str, Chip]:
    """Return words of a device's name → the chip, the most specific name first."""
    rows = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
    return {
        name: Chip("", row.pop("gib") * GIB, link=REACHED * row.pop("link"), **row)
        for name, row in rows.items()
    }


@dataclass(frozen=True)
class Machine:
    """The machine of a run, as far as its decisions depend on it."""

    gpus: int  # that torch can use
    gpu: Chip | None  # the first of them, or this process's own
    host_memory: float  # bytes

    def device_for(self, device: str, precision: str) -> str:
        """Return "cuda" or "cpu" for device= and precision=; ValueError if it cannot compute so."""
        if device == "cuda" and self.gpu is None:
            raise ValueError("device=cuda: torch finds no GPU here; use device=cpu or device=auto")
        gpu = None if device == "cpu" else self.gpu
        (gpu or CPU).check(precision)
        return "cuda" if gpu else "cpu"


def chip(name: str, memory: float | None = None) -> Chip:
    """Return the chip that torch or a user calls `name`; no `memory`: its own, 0 if unknown."""
    unknown = Chip("", 0.0, None, None, REACHED * SLOWEST)
    known = next((card for of, card in cards().items() if is_named(name, of)), unknown)
    if any(is_named(name, word) for word in OTHERS):
        known = replace(known, flops=None, bandwidth=None)
    return replace(known, name=name, memory=known.memory if memory is None else memory)


def is_named(name: str, of: str) -> bool:
    """Return True if `name` has every word of `of`, or is `of` without spaces, or without RTX."""
    words, wanted = (set(text.upper().replace("-", " ").split()) for text in (name, of))
    joined, given = (text.upper().replace(" ", "") for text in (of, name))
    return wanted <= words or given in (joined, joined.removeprefix("RTX"))


def here() -> Chip | None:
    """Return the first GPU of this machine, as CUDA's driver describes it, if there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    # the driver's own calls: torch would take seconds to import
    has_failed = (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, 256, device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    )
    return None if has_failed else chip(name.value.decode(), float(size.value))


def host_memory() -> float:
    """Return the bytes of memory of this machine, or of its control group, without swap."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(min([memory, *(limit for limit, _ in control_groups())]))


def available_memory() -> float:
    """Return the bytes that a process could still take without swapping, in its control group."""
    # a container's limit may be below the machine's free memory
    possible = [host_memory(), *(left for _, left in control_groups())]
    with suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as file:
        kib = next(line.split()[1] for line in file if line.startswith("MemAvailable:"))
        possible.append(1024.0 * int(kib))
    return min(possible)


def control_groups() -> list[tuple[int, int]]:
    """Return the memory limits of the control groups of this process, and the rest of each. Groups
    around a group limit it, too: a container is the outermost of its own, a job of SLURM deeper.
    """
    own: dict[str, str] = {}
    with suppress(OSError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            own |= dict.fromkeys(controllers.split(","), path)
    found = []
    for controller, (root, limit, used, cache) in CONTROL_GROUPS.items():
        group = Path(root, own.get(controller, "/").strip("/"))
        for folder in (group, *group.parents):
            # No such group, or "max"; folders around the outermost group have no such files
            with suppress(OSError, ValueError):
                total, taken = (int((folder / name).read_text()) for name in (limit, used))
                lines = (folder / "memory.stat").read_text().splitlines()
                # The kernel gives up cached files before it refuses memory
                cached = int(dict(map(str.split, lines)).get(cache, 0))
                found.append((total, total - taken + cached))
    return found
