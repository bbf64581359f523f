"""`longctx generate`: prompts in, text out, as it comes.

Text goes to stdout, everything that is said about it to stderr, so that a pipe gets the text alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import NamedTuple

import torch
from torch import nn

from longctx import attention, files
from longctx.attention.description import AttentionConfig
from longctx.config import presets
from longctx.config.generate_config import GenerateConfig
from longctx.evaluation.load import TrainedModel, build_model, open_model
from longctx.generation.answer_file import AnswerFile
from longctx.generation.prompts import Prompt, read_prompts
from longctx.generation.text_stream import TextStream
from longctx.model import GPT
from longctx.model.decoder import Decoder, continuations
from longctx.model.kv_cache import KVCache
from longctx.model.sampling import Sampler
from longctx.parallel.devices import (
    choose_device,
    dtype_of,
    is_out_of_memory,
    this_machine,
    within_memory,
)
from longctx.planner.hardware import GIB
from longctx.planner.workload import precision_of


class ModelSource(NamedTuple):
    """A trained model, no weight of which is read yet, and how it is to compute."""

    subject: TrainedModel
    attention: AttentionConfig
    dtype: torch.dtype  # of its matrices


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
    source = find_source(config, device)
    known = source.subject.seq_len
    prompts = read_prompts(config, source.subject.tokenizer, source.subject.folder)
    most = max(len(prompt.ids) for prompt in prompts) + config.max_new_tokens
    if most > known:
        say(
            f"prompt and new tokens make up to {most:,} tokens; the model knows sequences of "
            f"{known:,}"
        )
    model: GPT | None = None
    speed = Speed()
    try:
        with within_memory(device), closing(AnswerFile(config.out)) as answers:
            model = load_model(source, device)
            for first in range(0, len(prompts), config.batch_size):
                numbers = list(range(len(prompts)))[first : first + config.batch_size]
                speed = write_batch(config, model, source, prompts, numbers, answers, speed)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows = 0 if model is None else min(config.batch_size, len(prompts))
        say(f"error: {too_little_memory(source, rows, most, device)}")
        return 1
    say(str(speed))
    return 0


def find_source(config: GenerateConfig, device: str) -> ModelSource:
    """The model of `config`, of which no weight is read yet; its tokenizer is."""
    dtype = dtype_of(precision_of(config.precision, device))
    chosen = AttentionConfig(**presets.read("attention", config.attention))
    subject = open_model(config.checkpoint)
    required = subject.model.block(0).attention.required()
    options = chosen.options
    attention.check(chosen.backend, device=device, dtype=dtype, options=options, **required)
    return ModelSource(subject, chosen, dtype)


def load_model(source: ModelSource, device: str) -> GPT:
    """The model on `device`; its matrices are in the precision asked for."""
    model = build_model(source.subject.file, source.attention, device, source.dtype)
    for module in model.modules():  # norms stay in fp32, which they compute in
        if isinstance(module, nn.Linear | nn.Embedding):
            module.to(source.dtype)
    return model


def too_little_memory(source: ModelSource, rows: int, most: int, device: str) -> str:
    """What did not fit: the weights, or, beside them, a batch of `rows` texts of up to `most`
    tokens each; rows=0: no batch yet.
    """
    machine = this_machine()
    there = machine.host_memory if device == "cpu" or machine.gpu is None else machine.gpu.memory
    kind = "memory" if device == "cpu" else "GPU memory"
    weights = source.subject.model.parameters() * source.dtype.itemsize
    change = ["precision=bf16"] if source.dtype == torch.float32 else []
    if not rows:
        return (
            f"out of {kind} while the model loads: its weights take {weights / GIB:.1f} GiB, and "
            f"there are {there / GIB:.1f}; give {' or '.join([*change, 'a smaller model'])}"
        )
    cache = KVCache.bytes_of(source.subject.model, rows, most, source.dtype)
    change += ["attention=flash"] if source.attention.description.score_bytes is not None else []
    change += [f"batch_size={rows // 2}"] if rows > 1 else []
    change += ["a smaller max_new_tokens", "shorter prompts"]
    return (
        f"out of {kind}: weights take {weights / GIB:.1f} GiB, keys and values of {rows} "
        f"text{'s' if rows > 1 else ''} of up to {most:,} tokens {cache / GIB:.1f}, and there are "
        f"{there / GIB:.1f}; give {', '.join(change[:-1])} or {change[-1]}"
    )


def write_batch(
    config: GenerateConfig,
    model: GPT,
    source: ModelSource,
    prompts: list[Prompt],
    numbers: list[int],
    answers: AnswerFile,
    speed: Speed,
) -> Speed:
    """Continue the prompts with these `numbers` together; print each text as soon as those before
    it are, and write it to `answers` when it is done. Returns `speed` with theirs.
    """
    texts, ends = [prompts[number] for number in numbers], source.subject.end_tokens
    longest = max(len(text.ids) for text in texts)
    decoder = Decoder(model, len(texts), longest + config.max_new_tokens, config.decode)
    sampler = Sampler(numbers, config.temperature, config.top_k, config.top_p, config.seed)
    ids = [text.ids for text in texts]
    rows: list[list[int]] = [[] for _ in texts]
    streams = [TextStream(source.subject.tokenizer, ends) for _ in texts]

    def done(n: int) -> None:
        text = {"prompt": texts[n].shown, "text": streams[n].text, "new_tokens": len(rows[n])}
        answers.add(text)

    show = Screen(prompts, numbers, streams, done)
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
    return Speed(
        speed.prompt + sum(map(len, ids)),
        speed.prompt_seconds + first - began,
        speed.new + sum(map(len, rows)) - len(rows),
        speed.new_seconds + time.perf_counter() - first,
    )


class Screen:
    """Prints texts in their order: the first one that goes on is shown as it grows. `done` is
    called with the place of each that is whole.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        numbers: list[int],
        streams: list[TextStream],
        done: Callable[[int], None],
    ) -> None:
        self.prompts, self.numbers, self.streams, self.done = prompts, numbers, streams, done
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
            self.done(self.at)
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
