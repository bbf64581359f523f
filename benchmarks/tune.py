"""Measure launch configs on the GPU at hand and write the table of the best ones.

Candidates must compile, fit, pass the exact self-test, and then win against the config in use by
GAIN, timed in turn with it. The portable kernels' candidates are tiles, warps and stages; a Hopper
module's are its CONFIGS with one switch turned, or one ring a stage shorter or longer, and then
those of the winner. Training reads the table and never times anything; see launch.py for where it
looks.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.timing import medians
from longctx import files
from longctx.config.fields import Group, key
from longctx.kernels import flash_op, launch, machine, selftest
from longctx.kernels.attention import Intervals, Saved, Scores, hopper_size
from longctx.kernels.attention.launch import Launch

SIZES = (1, 2**24)  # of tokens and of a head
GAIN = 1.02
FINALISTS = 4
HANGS = 180  # seconds after which a candidate is taken for one that never ends


@dataclass
class Options(Group):
    """Which launch configurations to measure."""

    kernels: tuple[str, ...] = key(
        ("portable", "hopper"), "hopper: where it runs", choices=("portable", "hopper")
    )
    head_sizes: tuple[int, ...] = key(
        (64, 128), "head sizes; a table serves up to the next power of two", between=(16, 512)
    )
    lengths: tuple[int, ...] = key(
        (4096, 16384),
        "tokens; each also serves shorter sequences, down to its geometric mean with the next",
        between=SIZES,
    )
    dtype: str = key("bf16", "bf16 | fp16; the table serves both", choices=("bf16", "fp16"))
    channels: int = key(2048, "query heads × head size", between=SIZES)
    row_tokens: int = key(16384, "tokens of a measured call, one sequence at least", between=SIZES)
    out: str = key("", "the table; empty: ~/.config/longctx/launch.json, where training looks")


def run(options: Options, command: str) -> None:
    """Measure and write the table; ValueError if there is no GPU or a value makes no sense."""
    if len({launch.padded(d) for d in options.head_sizes}) < len(options.head_sizes):
        sizes = ",".join(map(str, options.head_sizes))
        raise ValueError(f"head_sizes={sizes}: give one of those up to the same power of two")
    out = Path(options.out) if options.out else launch.measured_file()
    if out is None:
        raise ValueError("out=: LONGCTX_LAUNCH is empty, so training looks nowhere; name a file")
    if not torch.cuda.is_available():
        raise ValueError("tune measures GPU kernels and there is no CUDA GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    out.parent.mkdir(parents=True, exist_ok=True)
    before, looked_up = read(out), out == launch.measured_file()
    if looked_up and not out.exists():
        os.environ["LONGCTX_LAUNCH"] = ""  # else the lookup would refuse a file still to come
    best: dict[str, Any] = {}
    lengths = sorted(options.lengths)
    for head_dim, length in itertools.product(options.head_sizes, lengths):
        tensors = inputs(options, head_dim, length, device)
        if "portable" in options.kernels:
            for kernel in launch.PORTABLE:
                config = list(best_portable(kernel, tensors))
                by_length = best.setdefault(kernel, {}).setdefault(launch.padded(head_dim), {})
                add(by_length, length, lengths, config)
        hopper = "hopper" in options.kernels and length == lengths[-1]
        if hopper and flash_op.runs("triton-hopper", device, tensors["q"].dtype, head_dim):
            for kernel in launch.HOPPER:
                if (chosen := best_hopper(kernel, tensors)) is not None:
                    size = str(hopper_size(head_dim))
                    best.setdefault(kernel, {})[size] = {"0": list(chosen)}
    gpu = torch.cuda.get_device_name(device)
    about = {"date": date.today().isoformat(), "command": command} | machine(device)
    write(out, before, gpu, best, about)
    how = "" if looked_up else f" with LONGCTX_LAUNCH={out}"
    print(f"wrote {out}; training on this GPU uses it{how}")


def inputs(options: Options, head_dim: int, length: int, device: torch.device) -> dict[str, Any]:
    """Return the arguments of both passes for causal sequences of `length` tokens, by name."""
    B, H = max(1, options.row_tokens // length), max(1, options.channels // head_dim)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]
    q, k, v, do = (
        torch.randn(B, length, H, head_dim, device=device, dtype=dtype) for _ in range(4)
    )
    i = torch.arange(length, dtype=torch.int32, device=device)[None]
    intervals = Intervals(torch.zeros_like(i), i, i, torch.full_like(i, length - 1), starts=i)
    forward = flash_op.kernels("triton-portable", device).forward
    out, lse = forward(q, k, v, intervals, Scores(head_dim**-0.5))
    return {"q": q, "do": do, "saved": Saved(q, k, v, out, lse), "intervals": intervals}


def call(part: str, implementation: str, x: dict[str, Any]) -> Callable[[], Any]:
    """Return the forward or backward of `implementation` on what `inputs` made."""
    saved, scores = x["saved"], Scores(x["q"].shape[3] ** -0.5)
    kernels = flash_op.kernels(implementation, x["q"].device)
    if part == "forward":
        return functools.partial(kernels.forward, *saved[:3], x["intervals"], scores)
    return functools.partial(kernels.backward, x["do"], None, saved, x["intervals"], scores)


def in_place(table: dict[Any, Any], name: Any, config: Any) -> Any:
    """Put `config` into `table` while a kernel is tried."""
    return patch.dict(table, {name: config})


def best_portable(kernel: str, x: dict[str, Any]) -> Launch:
    """Return the fastest config of a portable kernel; the one in use, if none beats it."""
    now = launch.launch_config(kernel, x["q"], x["q"].shape[1])
    part, candidates = launch.PORTABLE[kernel], portable_candidates(kernel)
    using = functools.partial(in_place, launch.on_trial, kernel)
    best: Launch = race(kernel, candidates, now, using, part, "triton-portable", x)
    return best


def portable_candidates(kernel: str) -> list[Launch]:
    """Return tiles of the sizes that pay, with as many warps as their products can feed."""
    candidates = []
    for BM, BN, warps, stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        own = BN if kernel == "dkv" else BM  # rows of the accumulators
        if own // warps >= 8 and not (BM * BN >= 128 * 128 and warps == 4):
            candidates.append(Launch(BM, BN, warps, stages))
    return candidates


def best_hopper(kernel: str, x: dict[str, Any]) -> Any:
    """Return the fastest config of a Hopper module for the head size of x; None if it has none."""
    module = importlib.import_module(f"longctx.kernels.attention.{kernel}")
    size, configs = hopper_size(x["q"].shape[3]), getattr(module, "CONFIGS", {})
    if size not in configs:
        return None
    launch.configure(module, kernel, x["q"].device)
    now, part = configs[size], launch.HOPPER[kernel]
    using = functools.partial(in_place, configs, size)
    seen = {now}
    while candidates := [config for config in variations(now) if config not in seen]:
        seen.update(candidates)
        now = race(kernel, candidates, now, using, part, "triton-hopper", x)
    return now


def variations(config: Any) -> Iterator[Any]:
    """Yield the config with one switch turned, or one number of stages one less or one more."""
    for name, value in config._asdict().items():
        if isinstance(value, bool):
            yield config._replace(**{name: not value})
        elif "stages" in name:
            yield from (config._replace(**{name: n}) for n in (value - 1, value + 1) if n >= 2)


def race(
    kernel: str,
    candidates: Iterable[Any],
    now: Any,
    using: Callable[[Any], Any],
    part: str,
    implementation: str,
    x: dict[str, Any],
) -> Any:
    """Return the fastest of `candidates` and `now`, which stays unless one beats it by GAIN; print
    it.
    """
    title = f"{kernel}, head size {x['q'].shape[3]}, {x['q'].shape[1]:,} tokens"
    timed: dict[Any, float] = {}
    tried = list(dict.fromkeys([now, *candidates]))
    for config in tried:
        with using(config), watched():
            problem = refuses(part, implementation, x["q"])
            if problem is None:
                timed[config] = medians({config: call(part, implementation, x)}, 5, 0.2)[config]
            elif config == now:
                raise ValueError(f"{title}: {config} is in use, and cannot be measured: {problem}")
    finalists = sorted(timed, key=timed.__getitem__)[:FINALISTS]

    def within(config: Any) -> None:
        with using(config):
            call(part, implementation, x)()

    calls = {one: functools.partial(within, one) for one in dict.fromkeys([now, *finalists])}
    final = medians(calls, 40, 3.0)
    best = min(final, key=final.__getitem__)
    chosen = best if final[best] * GAIN <= final[now] else now
    gain = f"{final[now] / final[chosen]:.2f} × as fast as {now}"
    print(f"{title}: {chosen}, {final[chosen]:.3f} ms, {gain} ({len(timed)} of {len(tried)} run)")
    return chosen


def refuses(part: str, implementation: str, q: Tensor) -> str | None:
    """Return why the config on trial cannot be used: it does not compile or fit, or is wrong."""
    try:
        kernel = getattr(flash_op.kernels(implementation, q.device), part)
        return selftest.check(part, kernel, q.device, q.dtype, q.shape[3], copies=selftest.COPIES)
    except Exception as error:  # Triton has many kinds for what does not fit
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


@contextmanager
def watched() -> Iterator[None]:
    """End the process, with its stack, if a kernel never ends: nothing else can stop one."""
    faulthandler.dump_traceback_later(HANGS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def add(rows: dict[str, Any], length: int, lengths: list[int], config: list[int]) -> None:
    """Enter a config: it serves from halfway to the length below, that of the shortest from 0."""
    start = round(math.sqrt(lengths[lengths.index(length) - 1] * length)) if rows else 0
    if not rows or list(rows.values())[-1] != config:
        rows[str(start)] = config


def read(path: Path) -> dict[str, Any]:
    """Return the tables of a file, by GPU; none if there is no file."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    if not isinstance(tables, dict):
        raise ValueError(f"out={path}: not a table of launch configs; choose another file")
    return tables


def write(
    path: Path, before: dict[str, Any], gpu: str, best: dict[str, Any], about: dict[str, str]
) -> None:
    """Add the best configs for `gpu` to the file, atomically.

    Other GPUs, kernels and head sizes in it stay.
    """
    table = {kernel: dict(sizes) for kernel, sizes in before.get(gpu, {}).items()}
    table.pop("measured", None)
    for kernel, sizes in best.items():
        table[kernel] = table.get(kernel, {}) | sizes
    files.write_text(path, json.dumps(before | {gpu: {"measured": about} | table}, indent=1) + "\n")
