"""Conversations as text, by the chat template of the tokenizer's own folder, and which parts of it
are the assistant's.

A template is a program that came with a model: it runs in jinja2's immutable sandbox, on plain
data, and without the date (templates that ask for one have a default), so that the same
conversation is always the same tokens. The assistant's part of a message is what the template adds
after its own prompt for it, the token that ends the turn included.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.data import trial
from longctx.data.corpus import Document
from longctx.data.tokenizer import read_json

Span = tuple[int, int]  # characters first .. end - 1


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
        self.tokens = {
            f"{kind}_token": _text(settings.get(f"{kind}_token"))
            for kind in ("bos", "eos", "pad", "unk")
        }
        trial.check("template", self.folder, {"source": source, "tokens": self.tokens})
        try:
            self.template = compiled(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"{self.folder}: its chat template is not one ({error})") from error
        described = read_json(self.folder / "tokenizer.json", untrusted.TOKENIZER_SIZE).get(
            "added_tokens", []
        )
        self.special = [token["content"] for token in described if token.get("special")]
        digest = hashlib.sha256(json.dumps([source, self.tokens]).encode())
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

    def render(self, name: str, place: str, row: Mapping[str, Any]) -> Conversation:
        """Write the conversation row["messages"] as text, with the assistant's spans of it.

        Raises ValueError, naming `place` and the message, if it is no conversation or if the
        assistant's part cannot be told apart.
        """
        tools = row.get("tools")
        messages = self._checked(place, row.get("messages"))
        self._refuse_special(place, "tools", tools)
        text = self._rendered(place, messages, tools)
        spans: list[Span] = []
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._rendered(place, messages[:n], tools, prompt=True)
            upto = self._rendered(place, messages[: n + 1], tools)
            if not (text.startswith(upto) and upto.startswith(before)):
                raise ValueError(
                    f"{place}: message {n + 1} is written differently by the chat template when "
                    "others follow it or when it is asked for, so the assistant's text cannot be "
                    "told apart; use another template"
                )
            spans.append((len(before), len(upto)))
        if not spans:
            raise ValueError(
                f"{place}: no message of the assistant, so nothing to learn; leave it out"
            )
        return Conversation(name, text, spans)

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
        for token in self.special:
            if token in json.dumps(content, ensure_ascii=False):
                raise ValueError(f"{place}: {what} contains the special token {token}; take it out")

    def _rendered(self, place: str, messages: Any, tools: Any, prompt: bool = False) -> str:
        data = json.loads(json.dumps({"messages": messages, "tools": tools or None}))
        try:
            return self.template.render(
                **data, add_generation_prompt=prompt, documents=None, **self.tokens
            )
        except Exception as error:  # somebody else's program: it can raise anything
            raise ValueError(f"{place}: the chat template does not take it ({error})") from error


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}, which other tools use: renders what stands inside."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def compiled(source: str) -> jinja2.Template:
    """The chat template that `source` is; jinja2.TemplateError if it is none."""
    return _environment().from_string(source)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _source(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        return untrusted.read_text(file, within=folder)
    template = settings.get("chat_template")
    if isinstance(template, list):  # of named ones
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"data.chat=true: {folder} has no chat template; "
            "give a tokenizer's folder that has one with data.tokenizer="
        )
    return template


def _text(token: Any) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""
