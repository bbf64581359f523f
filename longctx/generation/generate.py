"""`longctx generate`: prompts in, text out, as it comes.

Text goes to stdout, everything that is said about it to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from longctx import attention, files
from longctx.config import presets
from longctx.config.generate_config import GenerateConfig
from longctx.config.model_config import AttentionConfig, GPTConfig
from longctx.data import Tokenizer
from longctx.data.tokenizer import read_json
from longctx.distributed.devices import choose_device, this_machine
from longctx.evaluation.subject import open_run
from longctx.evaluation.weights import build_model
from longctx.generation.prompts import Prompt, read_prompts
from longctx.generation.text_stream import TextStream
from longctx.model import GPT, huggingface
from longctx.model.decoder import Decoder, continuations
from longctx.model.kv_cache import KVCache
from longctx.model.sampling import Sampler
from longctx.planner.hardware import GIB
from longctx.planner.workload import PRECISION
from longctx.runs import run_folder


class Opened(NamedTuple):
    """A trained model, and what belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    folder: Path  # which has the tokenizer and the chat template
    seq_len: int | None  # tokens per sequence that it was trained at, or is made for


class Speed(NamedTuple):
    """Tokens and seconds of the prompts, to the first new token, and of the new ones after it."""

    prompt: int = 0
    prompt_seconds: float = 0.0
    new: int = 0
    new_seconds: float = 0.0

    def __str__(self) -> str:
        parts = [_rate("prompt", self.prompt, self.prompt_seconds)]
        parts += [_rate("generation", self.new, self.new_seconds)] if self.new else []
        return "   ".join(parts)


def generate(config: GenerateConfig) -> int:
    """Generate as `config` says and return the exit code.

    Raises ValueError or OSError, one line, for whatever is wrong with the request.
    """
    device = choose_device(config, this_machine())
    opened = open_model(config, device)
    prompts = read_prompts(config, opened.tokenizer, opened.folder)
    most = max(len(prompt.ids) for prompt in prompts) + config.max_new_tokens
    if opened.seq_len is not None and most > opened.seq_len:
        say(
            f"prompt and new tokens make up to {most:,} tokens; the model knows sequences of "
            f"{opened.seq_len:,}"
        )
    ends, speed = end_tokens(opened), Speed()
    rows: list[dict[str, Any]] = []
    try:
        for first in range(0, len(prompts), config.batch_size):
            numbers = list(range(len(prompts)))[first : first + config.batch_size]
            texts, speed = write_batch(config, opened, prompts, numbers, ends, speed)
            rows += texts
    except torch.OutOfMemoryError:
        cache = KVCache.bytes_of(opened.model.config, 1, most, opened.model.embed.weight.dtype)
        say(
            f"error: out of GPU memory; keys and values of a prompt take {cache / GIB:.1f} GiB: "
            "give a smaller batch_size or max_new_tokens, or shorter prompts"
        )
        return 1
    if config.out is not None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        files.write_text(Path(config.out), "".join(lines))
    say(str(speed))
    return 0


def open_model(config: GenerateConfig, device: str) -> Opened:
    """The model of `config` on `device`; its matrices are in the precision asked for."""
    path = Path(config.checkpoint)
    precision = PRECISION[device] if config.precision == "auto" else config.precision
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    chosen = AttentionConfig(**presets.read("attention", config.attention))
    if run_folder.is_hugging_face(path):
        file = folder = path
        shape = huggingface.read_config(path)
        seq_len, head_size = shape.context, shape.head_size
    else:
        file, folder, run = open_run(path)
        seq_len, head_size = run["seq_len"], GPTConfig.of_saved(run["model"]).head_size
    tokenizer = Tokenizer.load(folder)
    attention.check(
        chosen.backend, device=device, dtype=dtype, head_dim=head_size, options=chosen.options
    )
    model = build_model(file, chosen, device, dtype)
    for module in model.modules():
        if isinstance(
            module, nn.Linear | nn.Embedding
        ):  # norms stay in fp32, which they compute in
            module.to(dtype)
    return Opened(model, tokenizer, folder, seq_len)


def end_tokens(opened: Opened) -> set[int]:
    """The tokens that end a text: the tokenizer's own, and those of generation_config.json, which
    chat models have.
    """
    ends = {opened.tokenizer.eos_id}
    for name in ("generation_config.json", "config.json"):
        stated = read_json(opened.folder / name).get("eos_token_id")
        ends |= {x for x in (stated if isinstance(stated, list) else [stated]) if type(x) is int}
    return ends


def write_batch(
    config: GenerateConfig,
    opened: Opened,
    prompts: list[Prompt],
    numbers: list[int],
    ends: set[int],
    speed: Speed,
) -> tuple[list[dict[str, Any]], Speed]:
    """Continue the prompts with these `numbers` together, and print each text as soon as those
    before it are; returns them, and `speed` with theirs.
    """
    texts = [prompts[number] for number in numbers]
    longest = max(len(text.ids) for text in texts)
    decoder = Decoder(opened.model, len(texts), longest + config.max_new_tokens, config.decode)
    sampler = Sampler(numbers, config.temperature, config.top_k, config.top_p, config.seed)
    ids = [text.ids for text in texts]
    rows: list[list[int]] = [[] for _ in texts]
    streams = [TextStream(opened.tokenizer, ends) for _ in texts]
    show = Screen(prompts, numbers, streams)
    began = time.perf_counter()
    first = began
    for new in continuations(decoder, ids, config.max_new_tokens, sampler, ends):
        if not rows[0]:
            first = time.perf_counter()
        for row, stream, token in zip(rows, streams, new, strict=True):
            if token is not None:
                row.append(token)
                stream.add(token)
        show.more([token is not None and token not in ends for token in new])
    show.more([False] * len(texts))
    speed = Speed(
        speed.prompt + sum(map(len, ids)),
        speed.prompt_seconds + first - began,
        speed.new + sum(map(len, rows)) - len(rows),
        speed.new_seconds + time.perf_counter() - first,
    )
    written = zip(texts, rows, streams, strict=True)
    return [
        {"prompt": text.shown, "text": stream.text, "new_tokens": len(row)}
        for text, row, stream in written
    ], speed


class Screen:
    """Prints texts in their order: the first one that goes on is shown as it grows."""

    def __init__(
        self, prompts: list[Prompt], numbers: list[int], streams: list[TextStream]
    ) -> None:
        self.prompts, self.numbers, self.streams = prompts, numbers, streams
        self.at, self.shown = 0, -1  # the text that is printed, and its characters so far

    def more(self, going: list[bool]) -> None:
        """Print what is new, where text n goes on if going[n]."""
        while self.at < len(self.streams):
            goes_on = going[self.at]
            text = self.streams[self.at].text if goes_on else self.streams[self.at].whole()
            if self.shown < 0:
                write(heading(self.prompts, self.numbers[self.at]))
                self.shown = 0
            write(text[self.shown :])
            self.shown = len(text)
            if goes_on:
                return
            write("\n")
            self.at, self.shown = self.at + 1, -1


def heading(prompts: list[Prompt], number: int) -> str:
    """What a text begins with: its number where there are several, and its prompt's last line."""
    shown = prompts[number].shown
    last = shown.rpartition("\n")[2] if isinstance(shown, str) else ""
    return last if len(prompts) == 1 else f"\n── {number + 1} of {len(prompts)} ──\n{last}"


def write(text: str) -> None:
    """Print text at once: as it is, on a terminal without what would control it."""
    if sys.stdout.isatty():
        text = "".join(x if x in "\n\t" else files.printable(x) for x in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def say(line: str) -> None:
    """Print what is not text of the model."""
    print(line, file=sys.stderr, flush=True)


def _rate(name: str, tokens: int, seconds: float) -> str:
    return (
        f"{name} {tokens:,} tokens in {seconds:.2f} s ({tokens / max(seconds, 1e-9):,.1f} tokens/s)"
    )
