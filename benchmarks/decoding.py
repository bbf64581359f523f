"""Text after long prompts: the time to the first new token beside a plain forward, and the time of
each further one beside what the memory allows, for longctx and transformers' `generate`.

The model is that of train.py's keys, with random weights; prompts are random tokens, decoding is
greedy, all in one process. Each new token has to read every weight once (one row of the embedding)
and the keys and values of all tokens before it, or of a window: `bytes`. Divided by the bandwidth
of the GPU that is the least time a token can take. transformers runs with its cache and the fastest
attention that is installed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.points import this_gpu, training_run
from benchmarks.report import machine, write_json
from benchmarks.words import check_unused
from longctx.attention.description import AttentionConfig
from longctx.config.fields import key
from longctx.spec.model_config import GPTConfig
from longctx.tables import grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from longctx.model import GPT

TAKES_TRAINING_KEYS = True
PEERS = ("longctx", "transformers")
TAKEN = {"seq_len": "use prompts=", "batch_size": "use rows=", "devices": "one is measured"}
SHOWN = ("prompt", "peer", "attention", "forward_ms", "first_token_ms", "first_over_forward")
SHOWN += ("ms_per_token", "tokens_per_second", "gb_per_token", "of_bandwidth", "failed")


@dataclass(frozen=True)
class Options:
    """Whom to measure, and where; keys of train.py may follow, such as model=1b."""

    peers: tuple[str, ...] = key(PEERS, "longctx | transformers", choices=PEERS)
    prompts: tuple[int, ...] = key((1024, 16384, 131072), "tokens of a prompt")
    new: int = key(64, "tokens that are generated after the first", between=(1, 10**6))
    rows: int = key(1, "prompts at a time", between=(1, 10**6))
    repeats: int = key(3, "of each measurement, after one that warms up; the median counts")
    out: str = key("results/decoding", "writes .json")


def run(options: Options, command: str, overrides: list[str]) -> None:
    """Measure every peer after every prompt, print, write `out`.json."""
    import torch

    from longctx.parallel.devices import dtype_of

    check_unused(overrides, TAKEN)
    device, gpu = "cuda" if torch.cuda.is_available() else "cpu", this_gpu()
    work = training_run([*overrides, f"seq_len={max(options.prompts)}"], device).workload
    dtype = dtype_of(work.precision)
    rows: list[dict[str, Any]] = []
    result = {"command": command, **machine(), "options": asdict(options), "results": rows}
    result |= {"parameters": work.model.parameters(), "precision": work.precision}
    for prompt, peer in itertools.product(options.prompts, options.peers):
        print(f"{prompt:,} tokens, {peer}:", end=" ", flush=True)
        row: dict[str, Any] = {"prompt": prompt, "rows": options.rows, "peer": peer}
        try:
            case = Case(work.model, work.attention, prompt, options, device, dtype)
            measured = Ours(case) if peer == "longctx" else Transformers(case)
            row |= measure(measured, options.repeats, device)
            seconds = row["ms_per_token"] / 1000
            length = prompt + options.new // 2
            least = bytes_of_token(work.model, options.rows, length, dtype.itemsize)
            row |= {"tokens_per_second": options.rows / seconds, "gb_per_token": least / 1e9}
            row |= {"gb_per_second": least / seconds / 1e9}
            row["of_bandwidth"] = gpu and least / seconds / gpu.bandwidth
        except torch.OutOfMemoryError:
            row["failed"] = "out of memory"
        measured = None  # its weights go before the next ones come
        rows.append(row)
        write_json(Path(f"{options.out}.json"), result)
        print(row.get("failed") or f"{row['tokens_per_second']:,.1f} tokens/s", flush=True)
    grid("The first new token, and each further one", SHOWN, rows)
    print(f"wrote {options.out}.json")


class Case(NamedTuple):
    """What every peer is measured on: a model, prompts of one length, and a device."""

    config: GPTConfig
    attention: AttentionConfig
    prompt: int
    options: Options
    device: str
    dtype: torch.dtype

    def random_tokens(self) -> Tensor:
        """Return (rows, prompt) int64, the same for every peer."""
        import torch

        generator = torch.Generator().manual_seed(0)
        shape = (self.options.rows, self.prompt)
        tokens = torch.randint(self.config.vocab_size or 1, shape, generator=generator)
        return tokens.to(self.device)


class Ours:
    """The decoder of `longctx generate`."""

    def __init__(self, case: Case) -> None:
        import torch

        from longctx.model import GPT
        from longctx.model.decoder import Decoder

        with torch.device(case.device):
            self.model: GPT = GPT(case.config, case.attention).eval()
        self.model.cast(case.dtype)
        self.model.embed.to(case.dtype)
        self.model.requires_grad_(False)
        self.attention, self.new = case.attention.backend, case.options.new
        self.tokens = case.random_tokens()
        self.decoder = Decoder(self.model, case.options.rows, case.prompt + case.options.new)

    def forward(self) -> Tensor:
        """Logits after the prompts, without a cache."""
        import torch

        last = torch.full((len(self.tokens), 1), self.tokens.shape[1] - 1)
        with torch.no_grad():
            return self.model(self.tokens, at=last.to(self.tokens.device))

    def first(self) -> Tensor:
        """The first new token."""
        return self.decoder.prefill(self.tokens.tolist()).argmax(-1)

    def all(self) -> list[float]:
        """When each of the first new token and `new` more could be read, in seconds."""
        from longctx.model.decoder import continuations

        tokens = continuations(
            self.decoder, self.tokens.tolist(), 1 + self.new, lambda x: x.argmax(-1)
        )
        return [time.perf_counter() for _ in tokens]


class Transformers:
    """transformers' class for the model, and its `generate`."""

    def __init__(self, case: Case) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from longctx.model.export import architecture

        fast = case.device == "cuda" and find_spec("flash_attn") is not None
        self.attention = "flash_attention_2" if fast else "sdpa"
        described = AutoConfig.for_model(
            **architecture(case.config, case.prompt + case.options.new + 1)
        )
        with torch.device(case.device):
            self.model: Any = AutoModelForCausalLM.from_config(
                described, dtype=case.dtype, attn_implementation=self.attention
            ).eval()
        self.new = case.options.new
        self.tokens = case.random_tokens()

    def forward(self) -> Tensor:
        """Logits after the prompts, without a cache."""
        import torch

        with torch.no_grad():
            logits: Tensor = self.model(self.tokens, use_cache=False, logits_to_keep=1).logits
        return logits

    def first(self) -> list[float]:
        """When the first new token could be read, in seconds."""
        return self._generated(1)

    def all(self) -> list[float]:
        """When each of the first new token and `new` more could be read, in seconds."""
        return self._generated(1 + self.new)

    def _generated(self, count: int) -> list[float]:
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        arrivals = Arrivals()
        self.model.generate(self.tokens, max_new_tokens=count, streamer=arrivals, **settings)
        assert len(arrivals.times) == 1 + count
        return arrivals.times[1:]


class Arrivals:
    """When transformers' `generate` hands over the prompts, then each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Note the time; `tokens` are on the CPU."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """There are no more."""


def measure(peer: Ours | Transformers, repeats: int, device: str) -> dict[str, Any]:
    """Return milliseconds of a forward, of the first token, and from one token to the next."""
    import torch

    def timed(function: Callable[[], Any]) -> float:
        laps = []
        for _ in range(1 + repeats):  # the first warms up
            began = time.perf_counter()
            function()
            if device == "cuda":
                torch.cuda.synchronize()
            laps.append(1000 * (time.perf_counter() - began))
        return median(laps[1:])

    forward, first = timed(peer.forward), timed(peer.first)
    times = [peer.all() for _ in range(1 + repeats)][1:]
    each = median(1000 * (row[-1] - row[0]) / peer.new for row in times)
    row = {"attention": peer.attention, "forward_ms": forward, "first_token_ms": first}
    return row | {"first_over_forward": first / forward, "ms_per_token": each}


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
