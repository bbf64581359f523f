"""Conversations as text, by the chat template of the tokenizer's own folder, and which parts of it
are the assistant's: what the template adds after its own prompt for a message, the token that ends
the turn included.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.data.corpus import Document
from longctx.data.rendering import Renderer, Request, Span
from longctx.data.tokenizer import read_json


class Conversation(Document):
    """A conversation as a document: its text, and `spans`, the parts that are to be learned."""

    spans: Sequence[Span]

    def __new__(cls, name: str, text: str, spans: Sequence[Span]) -> Conversation:
        conversation = super().__new__(cls, name, text)
        conversation.spans = spans
        return conversation


class Template:
    """The chat template in a tokenizer's folder; ValueError, one line, if it has none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        settings = read_json(self.folder / "tokenizer_config.json")
        source = _source(self.folder, settings)
        tokens = tokens_in(settings)
        self.renderer = Renderer(self.folder, source, tokens)
        described = read_json(self.folder / "tokenizer.json", untrusted.TOKENIZER_SIZE).get(
            "added_tokens", []
        )
        self.special = [token["content"] for token in described if token.get("special")]
        digest = hashlib.sha256(json.dumps([source, tokens]).encode())
        self.fingerprint = digest.hexdigest()[:32]

    @classmethod
    def of(cls, config: DataConfig) -> Template:
        """Read the chat template in the folder of `config.tokenizer`."""
        if config.tokenizer is None:
            raise ValueError(
                "data.chat=true: needs a tokenizer with a chat template; "
                "give its folder with data.tokenizer=, or init="
            )
        place = Path(config.tokenizer).expanduser()
        return cls(place if place.is_dir() else place.parent)

    def conversations(
        self, rows: Iterable[tuple[str, str, Mapping[str, Any]]]
    ) -> Iterator[Conversation]:
        """Write row["messages"] of each (name, place, row) as text, with the assistant's spans.

        Raises ValueError, naming the place and the message, where it is no conversation or where
        the assistant's part cannot be told apart.
        """
        requests = (self._request(name, place, row) for name, place, row in rows)
        for written in self.renderer.write(requests):
            yield Conversation(*written)

    def _request(self, name: str, place: str, row: Mapping[str, Any]) -> Request:
        tools = row.get("tools")
        messages = self._checked(place, row.get("messages"))
        self._refuse_special(place, "tools", tools)
        if all(message["role"] != "assistant" for message in messages):
            raise ValueError(
                f"{place}: no message of the assistant, so nothing to learn; leave it out"
            )
        return Request.of(name, place, messages, tools)

    def _checked(self, place: str, messages: Any) -> list[dict[str, Any]]:
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"{place}: 'messages' must be a list of messages, found {json.dumps(messages)[:60]}"
            )
        for n, message in enumerate(messages, start=1):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(f"{place}: message {n} must be an object with a role")
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise ValueError(f"{place}: message {n} must have its text in 'content'")
            self._refuse_special(place, f"message {n}", message)
        return messages

    def _refuse_special(self, place: str, what: str, content: Any) -> None:
        try:
            text = json.dumps(content, ensure_ascii=False)
        except (TypeError, ValueError) as error:  # dates, numbers of thousands of digits
            raise ValueError(f"{place}: {what} is not plain text and numbers ({error})") from error
        for token in self.special:
            if token in text:
                raise ValueError(f"{place}: {what} contains the special token {token}; take it out")


def template_in(settings: Mapping[str, Any]) -> str | None:
    """The chat template in a tokenizer_config.json, of several the default; None without one."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [one for one in template if isinstance(one, dict)]
        template = next(
            (one.get("template") for one in named if one.get("name") == "default"), None
        )
    return template if isinstance(template, str) else None


def tokens_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """The tokens in a tokenizer_config.json that a template may write, "" for those it lacks."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return {name: _text(settings.get(name)) for name in names}


def _source(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        return untrusted.read_text(file, within=folder)
    template = template_in(settings)
    if template is None:
        raise ValueError(
            f"{folder}: no chat template, which conversations need; give the folder of a tokenizer "
            "that has one (data.tokenizer= where you train)"
        )
    return template


def _text(token: Any) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
