"""Prompts: what is to be continued, as text and as tokens.

A text is tokenized as training tokenizes a document: after its begin-of-text token where the
tokenizer has one, and never turning into special tokens. A chat is written by the chat template of
the model's folder, with what the template puts before the assistant's next message.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from longctx import untrusted
from longctx.config.command_config import GenerateConfig
from longctx.data import Tokenizer
from longctx.data.chat import Template

LARGEST = 1 << 30  # bytes of a file of prompts


class Prompt(NamedTuple):
    """The tokens of a prompt, and what is shown and written of it."""

    ids: list[int]
    shown: str | list[dict[str, Any]]  # the text, or the messages of a chat


def read_prompts(config: GenerateConfig, tokenizer: Tokenizer, folder: Path) -> list[Prompt]:
    """The prompts of `config`; the chat template is the one in `folder`.

    Raises ValueError naming the file and the line of what is no prompt.
    """
    rows = list(_rows(config))
    if not rows:
        raise ValueError(f"prompts={config.prompts}: no prompt in it")
    chats = any(isinstance(row, dict) for _, row in rows) or config.chat
    template = Template(folder, today=datetime.now()) if chats else None
    prompts = []
    for place, row in rows:
        if config.chat and isinstance(row, str):
            row = {"messages": [{"role": "user", "content": row}]}
        if isinstance(row, str):
            prompts.append(Prompt(tokenizer.encode_prompt(row), row))
        else:
            assert template is not None
            ids, _ = tokenizer.encode_conversation(template.prompt(place, row), [])
            prompts.append(Prompt(ids.tolist(), row["messages"]))
    return prompts


def _rows(config: GenerateConfig) -> Iterator[tuple[str, Any]]:
    """Where each prompt stands, and the prompt: text, or messages."""
    if config.prompts is None:
        yield "prompt", config.prompt or ""
        return
    file = Path(config.prompts)
    text = untrusted.read_text(file, LARGEST)
    if file.suffix == ".txt":
        yield str(file), text.removesuffix("\n")
        return
    # Not splitlines, which also breaks at U+2028 and its like, which JSON may hold.
    for n, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{file}:{n}", _row(f"{file}:{n}", line)


def _row(place: str, line: str) -> Any:
    """The prompt, text or messages, that a line of JSON holds."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: not JSON ({error})") from error
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return row
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return row["prompt"]
    raise ValueError(f"{place}: needs a text in 'prompt', or a list in 'messages'")
