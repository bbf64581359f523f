"""Prompts in, text out: `load` and `generate` in Python, `longctx generate` and `chat` to type.

The commands print text as it comes, to stdout; everything else goes to stderr, so that a pipe gets
the text alone. A prompt is tokenized as training tokenizes a document: after its begin-of-text
token if the tokenizer has one, and never turned into special tokens. The chat template of the
model's folder writes a chat, with the beginning of the assistant's next message.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from torch import nn

from longctx import files, hub_snapshot, plugins, untrusted
from longctx.attention import check
from longctx.attention.description import AttentionConfig
from longctx.config import presets
from longctx.config.sample_config import ChatConfig, GenerateConfig, SampleConfig
from longctx.data import Tokenizer
from longctx.data.chat import Template
from longctx.evaluation.load import build_model, open_model
from longctx.model import GPT
from longctx.model.decoder import Sampler, continuations, decoder_of
from longctx.parallel.devices import dtype_of, is_out_of_memory, this_machine, within_memory
from longctx.spec.step import precision_of

PROMPTS_SIZE = 1 << 30  # bytes of a file of prompts
BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
WINDOW = 16  # tokens that are decoded again with each new one: a character has 4 bytes at most


class TokenizedPrompt(NamedTuple):
    """The tokens of a prompt, and its text or the messages of its chat."""

    ids: list[int]
    shown: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """Return the text that a completion continues; an answer in a chat begins its own."""
        return self.shown if isinstance(self.shown, str) else ""


def load(
    checkpoint: str | Path,
    device: str = "auto",
    precision: str = "auto",
    attention: str | None = None,
) -> tuple[GPT, Tokenizer]:
    """Load the model and the tokenizer of a run, a checkpoint, a Hugging Face folder, or a model of
    the Hub.

    The arguments are those of `longctx generate`. The model is in eval mode and its parameters need
    no gradients. Raises ValueError or OSError, one line, if it cannot be read or run so.
    """
    checkpoint = hub_snapshot.pinned(str(Path(checkpoint).expanduser()), "checkpoint")
    config = SampleConfig(checkpoint, device=device, precision=precision, attention=attention)
    config.validate()
    engine = Engine(config)
    engine.load()
    return engine.model, engine.tokenizer


def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str | list[dict[str, Any]],
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 1,
) -> str:
    """Return the text with which the model continues `prompt`, or answers the messages of a chat.

    The arguments are those of `longctx generate`. Raises ValueError for values out of range, or for
    a chat without a chat template next to the tokenizer.
    """
    config = SampleConfig("", max_new_tokens, temperature, top_k, top_p, seed)
    config.validate()
    is_chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not (isinstance(prompt, str) or is_chat):
        raise ValueError("prompt must be a text, or a list of messages; several need a call each")
    shown = {"messages": prompt} if is_chat else prompt
    (tokenized,) = tokenize([("prompt", shown)], tokenizer)
    completion = Completion(tokenizer, tokenizer.end_tokens, tokenized.text)
    for _ in continued(config, model, [tokenized.ids], [0], [completion]):
        pass
    return completion.text


def run(config: GenerateConfig) -> int:
    """Generate as `config` says, print each text, and return the exit code.

    Raises ValueError or OSError, one line, for whatever is wrong with the request.
    """
    engine = Engine(config)
    prompts = read_prompts(config, engine.tokenizer)
    engine.warn_of_length(max(len(prompt.ids) for prompt in prompts))
    with engine.within_memory():
        engine.load()
        with open(config.out, "w", encoding="utf-8") if config.out else nullcontext() as file:
            for first in range(0, len(prompts), config.batch_size):
                numbers = range(len(prompts))[first : first + config.batch_size]
                engine.write_batch(prompts, numbers, file)
    return engine.exit_code


def chat(config: ChatConfig) -> int:
    """Answer the lines of stdin until its end, each after all messages before it; return the exit
    code.

    The template writes the whole conversation before each answer, and the model reads it anew: the
    template may write earlier answers differently once others follow, so a cache of keys and values
    could be wrong. Raises ValueError or OSError, one line, if the model cannot chat.
    """
    engine = Engine(config)
    template = Template(engine.trained.folder, today=datetime.now())
    system = [{"role": "system", "content": config.system}]
    messages: list[dict[str, Any]] = [] if config.system is None else system
    with engine.within_memory():
        engine.load()
        while (line := read_line()) is not None:
            asked = [*messages, {"role": "user", "content": line}]
            try:
                text = template.prompt("chat", {"messages": asked})
            # Such as a special token: only this message is lost
            except ValueError as error:
                say(f"error: {error}")
                continue
            prompt = TokenizedPrompt(engine.tokenizer.encode_question(text), asked)
            engine.warn_of_length(len(prompt.ids))
            (answer,) = engine.write_batch([prompt], [0])
            config.seed += 1  # else each answer draws the same random numbers
            # The next prompt would be refused with a special token in it
            for token in template.special:
                answer = answer.replace(token, "")
            messages = [*asked, {"role": "assistant", "content": answer}]
    return engine.exit_code


def read_line() -> str | None:
    """Return the next line of stdin that is not empty; None at its end."""
    while True:
        if sys.stdin.isatty():
            write("> ")
        line = sys.stdin.readline()
        if not line or line.strip():
            return line.strip() or None


class Engine:
    """The model of a command that generates text, and the tokens and seconds so far."""

    model: GPT

    def __init__(self, config: SampleConfig) -> None:
        self.config = config
        self.device = this_machine().device_for(config.device, config.precision)
        self.dtype = dtype_of(precision_of(config.precision, self.device))  # of matrices
        self.trained = open_model(config.checkpoint)
        asked = None
        if config.attention is not None:
            asked = AttentionConfig(**presets.read("attention", config.attention))
        self.attention = plugins.attention_of(self.trained.run, self.trained.file, asked)
        precision = precision_of(config.precision, self.device)
        self.trained.model.prove(self.device, precision, self.trained.seq_len)
        check(
            self.attention.backend,
            device=self.device,
            dtype=self.dtype,
            options=self.attention.options,
            **self.trained.model.block(0).attention.required(trains=False),
        )
        self.tokenizer = self.trained.tokenizer
        self.tokens, self.seconds = 0, 0.0  # of new tokens, prompts read
        self.exit_code = 0
        self.sequences = 0  # of the latest batch, 0 before the first

    @contextmanager
    def within_memory(self) -> Iterator[None]:
        """Print the speed at the end of the block; one line and exit code 1 if memory runs out."""
        try:
            with within_memory(self.device):
                yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            when = "" if self.sequences else " while the model loads"
            changes = "batch_size, max_new_tokens or model, precision=bf16 or attention=flash"
            say(f"error: out of memory{when}; give a smaller {changes}")
            self.exit_code = 1
        else:
            speed = f"{self.tokens / max(self.seconds, 1e-9):,.1f} tokens/s"
            say(f"generation {self.tokens:,} tokens in {self.seconds:.2f} s ({speed})")

    def load(self) -> None:
        """Read the weights."""
        self.model = build_model(self.trained.file, self.attention, self.device, self.dtype)
        for name, module in self.model.named_modules():  # norms compute in fp32, and stay in it
            is_exact = f"{name}.weight" in self.model.exact
            if isinstance(module, nn.Linear | nn.Embedding) and not is_exact:
                module.to(self.dtype)

    def warn_of_length(self, tokens: int) -> None:
        """Print a line if `tokens` of a prompt and new ones are more than the model knows."""
        length, known = tokens + self.config.max_new_tokens, self.trained.seq_len
        if length > known:
            say(
                f"prompt and new tokens make up to {length:,} tokens; the model knows sequences of "
                f"{known:,}"
            )

    def write_batch(
        self, prompts: list[TokenizedPrompt], numbers: Sequence[int], file: TextIO | None = None
    ) -> list[str]:
        """Continue the prompts with these `numbers` together and return the texts.

        Prints each text as soon as all before it are printed, and writes it to `file` when it is
        done.
        """
        ids = [prompts[number].ids for number in numbers]
        self.sequences = len(ids)
        completions = [
            Completion(self.tokenizer, self.tokenizer.end_tokens, prompts[number].text)
            for number in numbers
        ]
        screen = shown(prompts, numbers, completions, file)
        began = time.perf_counter()
        for _ in continued(self.config, self.model, ids, numbers, completions):
            next(screen, None)
        self.tokens += sum(completion.tokens for completion in completions)
        self.seconds += time.perf_counter() - began
        return [completion.text for completion in completions]


def read_prompts(config: GenerateConfig, tokenizer: Tokenizer) -> list[TokenizedPrompt]:
    """Return the prompts of `config`; ValueError names the file and line that has no prompt."""
    prompts = list(_texts_and_chats(config))
    if not prompts:
        raise ValueError(f"prompts={config.prompts}: no prompt in it")
    if config.chat:
        for index, (origin, prompt) in enumerate(prompts):
            if isinstance(prompt, str):
                prompts[index] = origin, {"messages": [{"role": "user", "content": prompt}]}
    return tokenize(prompts, tokenizer)


def tokenize(
    texts_and_chats: Sequence[tuple[str, Any]], tokenizer: Tokenizer
) -> list[TokenizedPrompt]:
    """Return the prompts for texts and chats, each with its origin for messages; the chat template
    is the one next to the tokenizer.
    """
    template = None
    if any(isinstance(prompt, dict) for _, prompt in texts_and_chats):
        assert tokenizer.folder is not None, "a chat needs a tokenizer of longctx.load"
        template = Template(tokenizer.folder, today=datetime.now())
    prompts = []
    for origin, prompt in texts_and_chats:
        if template is None or isinstance(prompt, str):
            prompts.append(TokenizedPrompt(tokenizer.encode_prompt(prompt), prompt))
        else:
            ids = tokenizer.encode_question(template.prompt(origin, prompt))
            prompts.append(TokenizedPrompt(ids, prompt["messages"]))
    return prompts


def _texts_and_chats(config: GenerateConfig) -> Iterator[tuple[str, Any]]:
    """Yield for each prompt its origin, for messages, and its text or its chat."""
    if config.prompts is None:
        yield "prompt", config.prompt or ""
        return
    file = Path(config.prompts)
    # Editors on Windows write a byte-order mark
    text = untrusted.read_text(file, PROMPTS_SIZE).removeprefix("\ufeff")
    # splitlines would also break at U+2028, which a string of JSON may hold
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        origin = f"{file}:{number}"
        with untrusted.named(origin, "not JSON ({})", (ValueError, RecursionError)):
            row = json.loads(line)
        if isinstance(row, dict) and isinstance(row.get("messages"), list):
            yield origin, row
        elif isinstance(row, dict) and isinstance(row.get("prompt"), str):
            yield origin, row["prompt"]
        else:
            raise ValueError(f"{origin}: needs a text in 'prompt', or a list in 'messages'")


def continued(
    config: SampleConfig,
    model: GPT,
    ids: list[list[int]],
    numbers: Sequence[int],
    completions: list[Completion],
) -> Iterator[None]:
    """Extend `completions` by the tokens after the prompts `ids`, and yield after each step and
    once all have ended.
    """
    decoder = decoder_of(model, len(ids), max(map(len, ids)) + config.max_new_tokens)
    sampler = Sampler(numbers, config.temperature, config.top_k, config.top_p, config.seed)
    ends = completions[0].ends
    for tokens in continuations(decoder, ids, config.max_new_tokens, sampler, ends):
        for completion, token in zip(completions, tokens, strict=True):
            if token is not None:
                completion.add(token)
        yield
    for completion in completions:
        completion.end()
    yield


class Completion:
    """The text after one prompt, without the token of `ends` that ends it. It has whole characters
    only, which may be of several tokens.

    before: the text that it continues. SentencePiece's decoders drop the space of a first word, so
    the end of that text is decoded with the first tokens.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Collection[int] = (), before: str = "") -> None:
        self.tokenizer, self.ends = tokenizer, ends
        self.text = ""  # which no later token changes
        self.tokens = 0
        self.is_done = False
        self._ids = tokenizer.encode(before[-WINDOW:])
        self._in_text = len(self._ids)  # tokens whose text is in `before` or `text`
        self._context = 0  # tokens before the ones decoded: a first token may lose its space

    def add(self, token: int) -> None:
        """Take the next token."""
        self.tokens += 1
        if token in self.ends:
            return self.end()
        self._ids.append(token)
        new = self._decode_new()
        is_whole = not new.endswith(BROKEN) or len(self._ids) - self._in_text >= WINDOW
        if new and is_whole:
            self.text += new
            self._context, self._in_text = self._in_text, len(self._ids)

    def end(self) -> None:
        """End the text, with the bytes at its end that are no character."""
        if not self.is_done:
            self.text += self._decode_new()
            self.is_done = True

    def _decode_new(self) -> str:
        known = self.tokenizer.decode(self._ids[self._context : self._in_text])
        return self.tokenizer.decode(self._ids[self._context :])[len(known) :]


def shown(
    prompts: list[TokenizedPrompt],
    numbers: Sequence[int],
    completions: list[Completion],
    file: TextIO | None,
) -> Iterator[None]:
    """Print `completions` in their order, after the last lines of their prompts; each `next` prints
    the new text. A completion that is done is a line of `file`.
    """
    for number, completion in zip(numbers, completions, strict=True):
        prompt = prompts[number]
        heading = "" if len(prompts) == 1 else f"\n── {number + 1} of {len(prompts)} ──\n"
        write(heading + prompt.text.rpartition("\n")[2])
        printed = 0
        while not completion.is_done:
            write(completion.text[printed:])
            printed = len(completion.text)
            yield
        write(completion.text[printed:] + "\n")
        row = {"prompt": prompt.shown, "text": completion.text, "new_tokens": completion.tokens}
        if file is not None:
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def write(text: str) -> None:
    """Print text at once: as it is, on a terminal without control characters."""
    if sys.stdout.isatty():
        text = "".join(x if x in "\n\t" else files.printable(x) for x in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def say(line: str) -> None:
    """Print a line that is no text of the model."""
    print(files.printable(line), file=sys.stderr, flush=True)
