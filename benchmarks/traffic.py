"""Bytes that attention moves through HBM: the closed forms of the literature, and beside them what
the hardware counted.

Per head, N tokens, head size d, 16 bits: standard attention writes and reads the scores S and the
probabilities P, 4·N² elements, besides Q, K, V and O, 4·N·d; a fused kernel moves only the latter
(arXiv 2205.14135). So traffic differs by a factor of 1 + N/d and memory by 1 + N/(4d). Nsight
Compute (`ncu`) reads the counters of a child process (`benchmarks.counted`). Each case begins with
a cache that holds nothing of it, and counts up to the last write-back.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import machine, write_json
from longctx.config.fields import key
from longctx.tables import grid

BYTES = 2  # of a 16-bit element
TILE = 128  # queries, and keys, of the literature's tile
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
FLUSH = "flush_l2"  # the kernel that ends every case, see benchmarks.counted
# Heads are left out of a long row until its scores are no more, so that naive attention fits
MOST_SCORES = 2**31


@dataclass(frozen=True)
class Options:
    """What to count."""

    lengths: tuple[int, ...] = key((4096, 16384), "tokens in a row")
    backends: tuple[str, ...] = key(
        ("naive", "sdpa", "flash"), "attention backends; BACKEND:KERNEL picks its kernel option"
    )
    heads: int = key(32, "query heads; fewer where naive attention would not fit")
    head_size: int = key(128, "channels of a head")
    mask: str = key("causal", "of the rows", choices=("causal", "full"))
    ncu: str = key("ncu", "Nsight Compute's command")
    out: str = key("results/traffic", "writes .json")


def closed_forms(length: int, head_size: int, heads: int) -> dict[str, float]:
    """Bytes and ratios of the literature for one row of `length` tokens in `heads` heads, 16 bits
    an element.
    """
    N, d = length, head_size
    scores, rows = N * N * BYTES * heads, 4 * N * d * BYTES * heads
    return {
        "score_matrix_gib": scores / 2**30,
        "standard_gb": (4 * scores + rows) / 1e9,
        "fused_gb": rows / 1e9,
        "traffic_ratio": 1 + N / d,
        "memory_ratio": 1 + N / (4 * d),
    }


def shared_memory(head_size: int) -> int:
    """Bytes of the literature's tile: Q, K, V and the scores in 16 bits, the running maximum and
    sum in fp32.
    """
    return (3 * TILE * head_size + TILE * TILE) * BYTES + 2 * TILE * 4


def run(options: Options, command: str) -> None:
    """Print the closed forms, count, print and write `out`.json; ValueError where the counters
    cannot be read.
    """
    forms = [
        {"tokens": n, **closed_forms(n, options.head_size, options.heads)} for n in options.lengths
    ]
    show_forms(options, forms)
    ncu = shutil.which(options.ncu)
    if ncu is None:
        raise ValueError(
            f"ncu={options.ncu}: not found; the bytes really moved are read by NVIDIA Nsight "
            "Compute, give its path by ncu="
        )
    check(options)
    counted = count(options, ncu)
    rows = with_ratios(counted["rows"])
    shown = (
        "tokens",
        "heads",
        "backend",
        "kernel",
        "direction",
        "read_gb",
        "write_gb",
        "moved_gb",
        "ratio",
    )
    grid("HBM bytes really moved (ratio: to the least of this length and direction)", shown, rows)
    grid("Shared memory of our kernels", ("kernel", "shared_kib", "warps"), counted["shared"])
    result = {
        "command": command,
        **machine(),
        "options": asdict(options),
        "closed_forms": forms,
        "literature_shared_bytes": shared_memory(options.head_size),
        "rows": rows,
        "shared": counted["shared"],
    }
    write_json(Path(f"{options.out}.json"), result)
    print(f"wrote {options.out}.json")


def show_forms(options: Options, forms: list[dict[str, Any]]) -> None:
    """The literature's table."""
    columns = (
        "tokens",
        "score_matrix_gib",
        "standard_gb",
        "fused_gb",
        "traffic_ratio",
        "memory_ratio",
    )
    grid(f"Closed forms, {options.heads} heads of {options.head_size}, 16 bits", columns, forms)
    shared = shared_memory(options.head_size) / 1024
    tile = f"a {TILE} × {TILE} tile at head size {options.head_size}"
    print(f"shared memory of {tile}: {shared:.0f} KiB\n")


def check(options: Options) -> None:
    """Raise ValueError where there is no GPU, or a backend cannot run on it."""
    import torch

    from longctx import attention

    if not torch.cuda.is_available():
        raise ValueError("traffic: counts what GPU kernels move, and there is no CUDA GPU here")
    for word in options.backends:
        backend, _, kernel = word.partition(":")
        chosen = {"kernel": kernel} if kernel else {}
        attention.check(
            backend, device="cuda", dtype=torch.bfloat16, head_dim=options.head_size, options=chosen
        )


def cases(options: Options) -> list[dict[str, Any]]:
    """One per length and backend, with the heads that it is counted with."""
    return [
        {
            "tokens": n,
            "heads": max(1, min(options.heads, MOST_SCORES // n**2)),
            "head_size": options.head_size,
            "mask": options.mask,
            "backend": backend,
        }
        for n in options.lengths
        for backend in options.backends
    ]


def count(options: Options, ncu: str) -> dict[str, Any]:
    """Rows of bytes per case and direction, and our kernels' shared memory; ValueError in words
    where ncu could not.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer, log = Path(scratch, "answer.json"), Path(scratch, "ncu.csv")
        child = [
            sys.executable,
            "-m",
            "benchmarks.counted",
            json.dumps(cases(options)),
            str(answer),
        ]
        flags = [
            "--clock-control",
            "none",
            "--cache-control",
            "none",
            "--profile-from-start",
            "off",
        ]
        flags += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        process = subprocess.run(
            [ncu, *flags, "--metrics", ",".join(METRICS), *child], capture_output=True, text=True
        )
        text = log.read_text() if log.exists() else ""
        if process.returncode or not answer.exists():
            raise ValueError(problem("\n".join((text, process.stdout, process.stderr))))
        counted = json.loads(answer.read_text())
    windows = list(split(kernels(text)))
    if len(windows) != len(counted["windows"]) or not windows:
        raise ValueError(
            f"ncu reported {len(windows)} of {len(counted['windows'])} cases: {problem(text)}"
        )
    return {"rows": list(rows_of(windows, counted["windows"])), "shared": counted["shared"]}


def problem(output: str) -> str:
    """Why ncu, or the child under it, failed, from everything that was printed."""
    if "ERR_NVGPUCTRPERM" in output:
        return (
            "the driver lets only administrators read the hardware counters (ERR_NVGPUCTRPERM): "
            "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or ["ncu printed nothing"]
    return f"the bytes could not be counted: {errors[-1]}"


def kernels(text: str) -> Iterable[tuple[str, float, float]]:
    """(name, bytes read, bytes written) of each kernel, in order, from ncu's log; ValueError where
    a counter is none.
    """
    table = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if not table:
        return
    header, units = table[0], table[1]
    name, columns = header.index("Kernel Name"), [header.index(metric) for metric in METRICS]
    for row in table[2:]:
        try:
            read, written = (float(row[i].replace(",", "")) * UNITS[units[i]] for i in columns)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"the hardware counters could not be read: ncu gave {error} for {row[name]}"
            ) from None
        yield row[name], read, written


def split(measured: Iterable[tuple[str, float, float]]) -> Iterable[list[tuple[str, float, float]]]:
    """The kernels of each case, the flush that ends it among them."""
    window: list[tuple[str, float, float]] = []
    for kernel in measured:
        window.append(kernel)
        if FLUSH in kernel[0]:
            yield window
            window = []


def rows_of(
    windows: list[list[tuple[str, float, float]]], names: list[dict[str, Any]]
) -> Iterable[dict[str, Any]]:
    """GB read and written by each case. The first window is a flush alone: what it costs is taken
    from the others.
    """
    empty_read, empty_write = windows[0][0][1:]
    for window, name in zip(windows[1:], names[1:], strict=True):
        read = max(0.0, sum(kernel[1] for kernel in window) - empty_read)
        written = max(0.0, sum(kernel[2] for kernel in window) - empty_write)
        gb = {"read_gb": read / 1e9, "write_gb": written / 1e9, "moved_gb": (read + written) / 1e9}
        yield name | gb | {"kernels": [kernel[0] for kernel in window[:-1]]}


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row with its bytes as a multiple of the least among the backends of its length and
    direction.
    """
    least: dict[tuple[int, str], float] = {}
    for row in rows:
        key = row["tokens"], row["direction"]
        least[key] = min(least.get(key, row["moved_gb"]), row["moved_gb"])
    return [
        row | {"ratio": row["moved_gb"] / max(least[row["tokens"], row["direction"]], 1e-12)}
        for row in rows
    ]
