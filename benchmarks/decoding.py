"""Text after long prompts: the time to the first new token next to a plain forward, and the time of
each further one next to what the memory allows.

The model is that of train.py's keys, with random weights; prompts are random tokens, decoding is
greedy. Each new token has to read every weight once (one row of the embedding) and the keys and
values of all tokens before it, or of a window: `bytes_of_token`. Divided by the bandwidth of the
GPU that is the least time a token can take.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.points import this_gpu, training_run
from benchmarks.report import machine, write_json
from benchmarks.timing import medians
from benchmarks.words import check_unused
from longctx.config.fields import Group, key
from longctx.spec.model_config import GPTConfig
from longctx.tables import grid

if TYPE_CHECKING:
    from longctx.training.run import Run

TAKES_TRAINING_KEYS = True
TAKEN = {"seq_len": "use prompts=", "batch_size": "use rows=", "devices": "one is measured"}
SHOWN = ("prompt", "attention", "forward_ms", "first_token_ms", "first_over_forward")
SHOWN += ("ms_per_token", "tokens_per_second", "gb_per_token", "of_bandwidth", "failed")


@dataclass(frozen=True)
class Options(Group):
    """What to measure; keys of train.py may follow, such as model=1b."""

    prompts: tuple[int, ...] = key((1024, 16384, 131072), "tokens of a prompt")
    new: int = key(64, "tokens that are generated after the first", between=(1, 10**6))
    rows: int = key(1, "prompts at a time", between=(1, 10**6))
    repeats: int = key(3, "of each measurement, after one that warms up; the median counts")
    out: str = key("results/decoding", "writes .json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure after every prompt, print, write `out`.json."""
    import torch

    check_unused(overrides, TAKEN)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    training = training_run([*overrides, f"seq_len={max(options.prompts)}"], device)
    rows: list[dict[str, Any]] = []
    result = {"command": command, **machine(), "options": asdict(options), "results": rows}
    result["parameters"] = training.workload.model.parameters()
    for prompt in options.prompts:
        row: dict[str, Any] = {"prompt": prompt, "rows": options.rows}
        try:
            row |= measure(training, prompt, options)
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        rows.append(row)
        print(row, flush=True)
        write_json(Path(f"{options.out}.json"), result)
    grid("The first new token, and each further one", SHOWN, rows)
    print(f"wrote {options.out}.json")


def measure(run: Run, prompt: int, options: Options) -> dict[str, Any]:
    """Return milliseconds of a forward, of the first token, and from one token to the next."""
    import torch

    from longctx.model import GPT
    from longctx.model.decoder import Decoder, continuations
    from longctx.parallel.devices import dtype_of

    work, dtype = run.workload, dtype_of(run.workload.precision)
    with torch.device(work.device):
        model = GPT(work.model, work.attention).eval()
    model.cast(dtype)
    model.embed.to(dtype)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    shape = options.rows, prompt
    tokens = torch.randint(work.model.vocab_size or 1, shape, generator=generator).to(work.device)
    decoder = Decoder(model, options.rows, prompt + options.new)
    last = torch.full((options.rows, 1), prompt - 1, device=work.device)

    def each() -> float:
        found = continuations(decoder, tokens.tolist(), 1 + options.new, lambda x: x.argmax(-1))
        arrived = [time.perf_counter() for _ in found]
        return 1000 * (arrived[-1] - arrived[0]) / options.new

    with torch.no_grad():
        forward = medians({0: lambda: model(tokens, at=last)}, options.repeats)[0]
    first = medians({0: lambda: decoder.prefill(tokens.tolist()).argmax(-1)}, options.repeats)[0]
    ms = median([each() for _ in range(1 + options.repeats)][1:])
    length, gpu = prompt + options.new // 2, this_gpu()
    least = bytes_of_token(work.model, options.rows, length, dtype.itemsize)
    return {
        "attention": work.attention.backend,
        "forward_ms": forward,
        "first_token_ms": first,
        "first_over_forward": first / forward,
        "ms_per_token": ms,
        "tokens_per_second": 1000 * options.rows / ms,
        "gb_per_token": least / 1e9,
        "of_bandwidth": gpu and 1000 * least / ms / gpu.bandwidth,
    }


def bytes_of_token(config: GPTConfig, rows: int, length: int, itemsize: int) -> int:
    """Return the bytes that one more token of each of `rows` texts of `length` tokens reads:
    weights, keys and values.
    """
    weights = config.parameters()
    if not config.tied:
        weights -= (config.vocab_size or 0) * config.channels
    windows = (config.window_of(n) for n in range(config.layers))
    visible = sum(length if window is None else min(window, length) for window in windows)
    return itemsize * (weights + 2 * rows * visible * config.kv_heads * config.head_size)
