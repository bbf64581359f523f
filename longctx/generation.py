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
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longctx import files, hub_snapshot, plugins, untrusted
from longctx.attention.description import AttentionConfig
from longctx.config import presets
from longctx.config.eval_config import ChatConfig, EvalConfig, GenerateConfig, SampleConfig
from longctx.config.fields import refuse
from longctx.data import DataConfig, Tokenizer
from longctx.data.chat import Template
from longctx.data.sources.compressed import opened
from longctx.data.sources.text import rows_of_lines
from longctx.evaluation.load import build_model, open_model
from longctx.model import GPT
from longctx.model.decoder import Sampler, continuations, decoder_of
from longctx.parallel import devices
from longctx.spec.step import precision_of
from longctx.tables import console

BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
say = partial(console(stderr=True).print, soft_wrap=True)  # for lines that are no text of the model
WINDOW = 16  # tokens that are decoded again with each new one: a character has 4 bytes at most


def load(
    checkpoint: str | Path,
    device: str = "auto",
    precision: str = "auto",
    attention: str | None = None,
) -> tuple[GPT, Tokenizer]:
    """Load the model and tokenizer of a run, a checkpoint, a Hugging Face folder or a Hub model.

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
    row = {"prompt" if isinstance(prompt, str) else "messages": prompt}
    (completion,) = begun([("prompt", row)], tokenizer)
    for _ in continued(config, model, [completion], [0]):
        pass
    return completion.text


def run(config: GenerateConfig) -> int:
    """Generate as `config` says, print each text, and return the exit code.

    Raises ValueError or OSError, one line, for whatever is wrong with the request.
    """
    engine = Engine(config)
    texts = begun(rows_of(config), engine.tokenizer)

    def answer_all() -> None:
        if config.out:
            config.out.write_bytes(b"")
        for first in range(0, len(texts), config.batch_size):
            engine.answer(texts, range(len(texts))[first : first + config.batch_size], config.out)

    return engine.run(answer_all)


def chat(config: ChatConfig) -> int:
    """Answer each line of stdin after all messages before it, until its end; return the exit code.

    The template writes the whole conversation before each answer, and the model reads it anew: the
    template may write earlier answers differently once others follow, so a cache of keys and values
    could be wrong. Raises ValueError or OSError, one line, if the model cannot chat.
    """
    engine = Engine(config)
    template = Template(engine.trained.folder, today=datetime.now())

    def talk() -> None:
        messages = [] if config.system is None else [{"role": "system", "content": config.system}]
        for line in read_lines():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                (text,) = begun([("chat", {"messages": asked})], engine.tokenizer, template)
            # Such as a special token: only this message is lost
            except ValueError as error:
                say(f"error: {error}")
                continue
            engine.answer([text], [0])
            config.seed += 1  # else each answer draws the same random numbers
            answer = text.text
            # The next prompt would be refused with a special token in it
            for token in template.special:
                answer = answer.replace(token, "")
            messages = [*asked, {"role": "assistant", "content": answer}]

    return engine.run(talk)


def read_lines() -> Iterator[str]:
    """Yield the lines of stdin that are not empty; a terminal shows when it waits for one."""
    mark = "> " if sys.stdin.isatty() else ""
    write(mark)
    for line in sys.stdin:
        if line.strip():
            yield line.strip()
        write(mark)


class Engine:
    """The model of a command that generates text, and the tokens and seconds so far."""

    model: GPT

    def __init__(self, config: SampleConfig) -> None:
        self.config = config
        self.device = devices.this_machine().device_for(config.device, config.precision)
        precision = precision_of(config.precision, self.device)
        self.dtype = devices.dtype_of(precision)  # of matrices
        self.trained = open_model(config.checkpoint)
        self.tokenizer = self.trained.tokenizer
        named = AttentionConfig(**presets.read("attention", x)) if (x := config.attention) else None
        self.attention = plugins.attention_of(self.trained.run, self.trained.file, named)
        self.trained.model.prove(self.device, precision, self.trained.seq_len)
        asked = EvalConfig(attention=self.attention, precision=precision)
        devices.check_attention(asked, self.trained.model, self.device)
        self.tokens, self.seconds = 0, 0.0  # of new tokens, prompts read

    def run(self, task: Callable[[], None]) -> int:
        """Read the weights, call `task`, print the speed; return 0, or 1 if memory runs out."""
        try:
            with devices.within_memory(self.device):
                self.load()
                task()
        except (RuntimeError, MemoryError) as error:
            if not devices.is_out_of_memory(error):
                raise
            when = "" if hasattr(self, "model") else " while the model loads"
            changes = "batch_size, max_new_tokens or model, precision=bf16 or attention=flash"
            say(f"error: out of memory{when}; give a smaller {changes}")
            return 1
        speed = f"{self.tokens / max(self.seconds, 1e-9):,.1f} tokens/s"
        say(f"generation {self.tokens:,} tokens in {self.seconds:.2f} s ({speed})")
        return 0

    def load(self) -> None:
        """Read the weights."""
        self.model = build_model(self.trained.file, self.attention, self.device, self.dtype)
        exact = self.model.exact
        for name, module in self.model.named_modules():  # norms compute in fp32, and stay in it
            if isinstance(module, nn.Linear | nn.Embedding) and f"{name}.weight" not in exact:
                module.to(self.dtype)

    def answer(self, texts: list[Completion], numbers: Sequence[int], out: Any = None) -> None:
        """Continue the `texts` with these `numbers` together.

        Prints each as soon as all before it are printed, after the last line of its prompt. A text
        that is done is a line of the file `out`.
        """
        length = max(len(text.ids) for text in texts) + self.config.max_new_tokens
        if length > self.trained.seq_len and 0 in numbers:  # once, of all prompts
            known = f"the model knows sequences of {self.trained.seq_len:,}"
            say(f"prompt and new tokens make up to {length:,} tokens; {known}")
        batch = [texts[number] for number in numbers]
        began = time.perf_counter()
        steps = continued(self.config, self.model, batch, numbers)
        next(steps)  # notes of the decoder, and errors, are no part of a text
        for number, text in zip(numbers, batch, strict=True):
            heading = "" if len(texts) == 1 else f"\n── {number + 1} of {len(texts)} ──\n"
            write(heading + text.before.rpartition("\n")[2] + text.text)
            while not text.is_done:
                printed = len(text.text)
                next(steps, None)
                write(text.text[printed:])
            write("\n")
            row = {"prompt": text.shown, "text": text.text, "new_tokens": text.tokens}
            if out:  # closed after each line: a full disk is found then too, and named
                with untrusted.named(f"out={out}", errors=(OSError,)), open(out, "ab") as file:
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.tokens += sum(text.tokens for text in batch)
        self.seconds += time.perf_counter() - began


def rows_of(config: GenerateConfig) -> list[tuple[str, Any]]:
    """Return a row for each prompt, with its origin for messages; ValueError for a file without."""
    rows: list[tuple[str, Any]] = [("prompt", {"prompt": config.prompt or ""})]
    if config.prompts is not None:
        with opened(file := config.prompts) as stream:
            rows = [x[1:] for x in rows_of_lines(file.name, file, stream, DataConfig())]
        refuse((not rows, f"prompts={file}: no prompt in it"))
    for _, row in rows:
        if config.chat and not isinstance(row.get("messages"), list):
            row["messages"] = [{"role": "user", "content": row.get("prompt")}]
    return rows


def begun(
    rows: Iterable[tuple[str, Any]], tokenizer: Tokenizer, template: Template | None = None
) -> list[Completion]:
    """Return what continues the text or the chat of each row. The chat template is the one next to
    the tokenizer, unless it is given. ValueError names the origin of a row that has neither.
    """
    texts = []
    for origin, row in rows:
        text, chat = row.get("prompt"), row.get("messages")
        if isinstance(chat, list):
            assert tokenizer.folder is not None, "a chat needs a tokenizer of longctx.load"
            template = template or Template(tokenizer.folder, today=datetime.now())
            question, before = template.prompt(origin, row)
            texts.append(Completion(tokenizer, tokenizer.encode_question(question), chat, before))
        elif isinstance(text, str):
            texts.append(Completion(tokenizer, tokenizer.encode_prompt(text), text, text))
        else:
            raise ValueError(f"{origin}: needs a text in 'prompt', or a list in 'messages'")
    return texts


def continued(
    config: SampleConfig, model: GPT, batch: list[Completion], numbers: Sequence[int]
) -> Iterator[None]:
    """Continue the texts of `batch`, which have these `numbers`, by a token in each step."""
    ids, ends = [text.ids for text in batch], batch[0].tokenizer.end_tokens
    decoder = decoder_of(model, len(ids), max(map(len, ids)) + config.max_new_tokens)
    sampler = Sampler(numbers, config.temperature, config.top_k, config.top_p, config.seed)
    problem = f"{config.checkpoint or 'model'}: it gives NaN, no text; give an earlier checkpoint"

    def choose(logits: Tensor) -> Tensor:
        refuse((not batch[0].tokens and logits.isnan().any(), problem))  # once: a GPU waits for it
        return sampler(logits[:, : batch[0].tokenizer.vocab_size])

    for tokens in continuations(decoder, ids, config.max_new_tokens, choose, ends):
        for text, token in zip(batch, tokens, strict=True):
            if token is not None:
                text.add(token, is_end=token in ends)
        yield
    for text in batch:
        text.end()


class Completion:
    """A prompt and the text after it, without the token that ends it. It has whole characters only,
    which may be of several tokens.

    ids: the tokens of the prompt. shown: its text, or the messages of its chat.
    before: the text that it continues; an answer in a chat begins its own. SentencePiece's decoders
    drop the space of a first word, so the end of that text is decoded with the first tokens.
    """

    def __init__(self, tokenizer: Tokenizer, ids: list[int], shown: Any, before: str = "") -> None:
        self.tokenizer, self.ids, self.shown, self.before = tokenizer, ids, shown, before
        self.text = ""  # which no later token changes
        self.tokens = 0
        self.is_done = False
        self._ids = tokenizer.encode(before[-WINDOW:])
        self._in_text = len(self._ids)  # tokens whose text is in `before` or `text`
        self._context = 0  # tokens before the ones decoded: a first token may lose its space

    def add(self, token: int, is_end: bool = False) -> None:
        """Take the next token, which may be the end of the text."""
        self.tokens += 1
        if is_end:
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


def write(text: str) -> None:
    """Print text at once: as it is, on a terminal without control characters."""
    print(files.printable(text, "\n\t") if sys.stdout.isatty() else text, end="", flush=True)
