"""Conversations as text, by the chat template of the tokenizer's own folder, and the spans of the
assistant in it.

Generation marks in the template decide. Without them, an answer is the text of the assistant's
message after the template's own prompt, with the token that ends the turn. A
template may write an answer differently once other messages follow: Qwen3 leaves out thinking. Then
only the last turn stands as it will be asked for, and by default no other is learned.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from longctx import untrusted
from longctx.config.data_config import DataConfig
from longctx.data.corpus import Document
from longctx.data.rendering import Rendered, Renderer, Span
from longctx.data.tokenizer import read_json

_VERSION = 2  # raised when the same conversation would become other text or spans
# Of training, so that the same conversation is always the same text: the day that Llama's templates
# write if they are told none.
_DAY = datetime(2024, 7, 26)

Message = dict[str, Any]


class Conversation(Document):
    """A conversation as a document: its text, and `spans`, the parts that are to be learned.

    shortened: only its last turn is learned, since the template rewrites the turns before.
    """

    spans: Sequence[Span]
    shortened: bool

    def __new__(
        cls, name: str, text: str, spans: Sequence[Span], shortened: bool = False
    ) -> Conversation:
        conversation = super().__new__(cls, name, text)
        conversation.spans = spans
        conversation.shortened = shortened
        return conversation


class Template:
    """The chat template in a tokenizer's folder; ValueError, one line, if it has none.

    learned: the turns that are learned, as `data.turns` says.
    """

    def __init__(self, folder: str | Path, learned: str = "auto", today: datetime = _DAY) -> None:
        self.folder = Path(folder).expanduser()
        self.learned = learned
        settings = read_json(self.folder / "tokenizer_config.json")
        source = _source(self.folder, settings)
        tokens = tokens_in(settings)
        self.renderer = Renderer(self.folder, source, tokens, today)
        if learned != "auto" and self.renderer.has_marks:
            raise ValueError(
                f"data.turns={learned}: the generation marks in the chat template of {self.folder} "
                "say what is learned; leave data.turns out, or take the marks out"
            )
        described = read_json(self.folder / "tokenizer.json", untrusted.TOKENIZER_SIZE).get(
            "added_tokens", []
        )
        self.special = [token["content"] for token in described if token.get("special")]
        digest = hashlib.sha256(json.dumps([_VERSION, learned, source, tokens]).encode())
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
        return cls(place if place.is_dir() else place.parent, config.turns)

    def conversations(
        self, rows: Iterable[tuple[str, str, Mapping[str, Any]]]
    ) -> Iterator[Conversation]:
        """Write row["messages"] of each (name, place, row) as text, with the assistant's spans.

        Raises ValueError, naming the place and the message, if it is no conversation, or if the
        assistant's part cannot be told apart.
        """
        for name, place, row in rows:
            messages = self._checked(place, row)
            if all(message["role"] != "assistant" for message in messages):
                raise ValueError(
                    f"{place}: no message of the assistant, so nothing to learn; leave it out"
                )
            try:
                yield self._write(name, messages, row.get("tools"))
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error

    def prompt(self, place: str, row: Mapping[str, Any]) -> str:
        """Write row["messages"] up to where the assistant's next message begins."""
        messages = self._checked(place, row)
        try:
            return self.renderer.render(messages, row.get("tools"), prompt=True).text
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def _checked(self, place: str, row: Mapping[str, Any]) -> list[Message]:
        """Return the messages of `row`, after a look at what a template would take as it is."""
        messages = row.get("messages")
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
        self._refuse_special(place, "tools", row.get("tools"))
        return messages

    def _refuse_special(self, place: str, what: str, content: Any) -> None:
        try:
            text = json.dumps(content, ensure_ascii=False)
        except (TypeError, ValueError) as error:  # dates, numbers of thousands of digits
            raise ValueError(f"{place}: {what} is not plain text and numbers ({error})") from error
        for token in self.special:
            if token in text:
                raise ValueError(f"{place}: {what} contains the special token {token}; take it out")

    def _write(self, name: str, messages: Sequence[Message], tools: Any) -> Conversation:
        whole = self.renderer.render(messages, tools)
        shortened = False
        if self.renderer.has_marks:
            text, spans = whole.text, whole.marked
        elif self.learned == "all" or (
            self.learned == "auto" and self._keeps_turns(messages, tools, whole)
        ):
            text, spans = whole.text, self._spans(whole, _answers(messages))
        else:
            text, spans = self._last_turn(messages[: _answers(messages)[-1] + 1], tools)
            shortened = self.learned == "auto" and len(spans) < len(_answers(messages))
        spans = [(first, end) for first, end in spans if first < end]
        if not spans:
            raise ValueError("the chat template writes nothing of the assistant's; leave it out")
        return Conversation(name, text, spans, shortened)

    def _last_turn(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[Span]]:
        """Write the prompt of the last turn as the model will be given it, then the text of the
        messages after it, whose answers are learned.

        The prompt may differ from the same part of the whole: Mistral Nemo writes the system
        message in prompts alone.
        """
        asked = _asked(messages)
        whole = self.renderer.render(messages, tools)
        prompt = self.renderer.render(messages[:asked], tools, prompt=True).text
        before = prompt.removesuffix(self._openings[0])
        start = min((first for n, (first, _) in whole.turns.items() if n >= asked), default=0)
        moved = len(before) - start
        spans = self._spans(whole, [n for n in _answers(messages) if n >= asked])
        return before + whole.text[start:], [(first + moved, end + moved) for first, end in spans]

    def _keeps_turns(self, messages: Sequence[Message], tools: Any, whole: Rendered) -> bool:
        """Return True if `whole` has every answer as the model is asked for it and writes it.

        Compares the prompts of the first and the last answer, and each turn with the same turn
        alone. A rendering for each prompt would take time that is quadratic in the turns.
        """
        answers = _answers(messages)
        for count in {answers[0], _asked(messages)} - {0}:
            prompt = self.renderer.render(messages[:count], tools, prompt=True)
            if not whole.text.startswith(prompt.text):
                return False
        for first, end in pairwise(_questions(messages)):
            last = max(
                (n for n in range(first, end) if messages[n]["role"] == "assistant"), default=None
            )
            if last is not None:
                alone = self.renderer.render(messages[first : last + 1])
                if not _turn(alone, last - first).startswith(_turn(whole, last)):
                    return False
        return True

    def _spans(self, rendered: Rendered, answers: Iterable[int]) -> list[Span]:
        """Return the spans of `answers` without the text that opens them."""
        spans = []
        openings = (*self._openings, "")
        for first, end in (rendered.turns[n] for n in answers if n in rendered.turns):
            text = rendered.text[first:end]
            opening = next(prefix for prefix in openings if text.startswith(prefix))
            spans.append((first + len(opening), end))
        return spans

    @cached_property
    def _openings(self) -> tuple[str, str]:
        """What a template writes between a question and the model's text: in a prompt, and before
        an answer. The prompt may have more of it, such as the mark at which thinking begins.
        """
        question, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}
        prompt = self.renderer.render([question], prompt=True).text
        both = self.renderer.render([question, answer])
        first, end = both.turns.get(1, (0, 0))
        if first == end or not prompt.startswith(both.text[:first]):
            raise ValueError(
                f"the chat template of {self.folder} does not show which text is the assistant's; "
                "put {% generation %} and {% endgeneration %} around it"
            )
        opening = prompt[first:]
        shared = os.path.commonprefix([opening, both.text[first:end]])  # noqa: RUF071 (characters)
        return opening, shared


def _answers(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "assistant"]


def _questions(messages: Sequence[Message]) -> list[int]:
    return [n for n, message in enumerate(messages) if message["role"] == "user"]


def _asked(messages: Sequence[Message]) -> int:
    """Return how many messages the last turn answers: up to the user's last one before an answer,
    or without one of the user, up to the first answer.
    """
    answers = _answers(messages)
    return max((n + 1 for n in _questions(messages) if n < answers[-1]), default=answers[0])


def _turn(rendered: Rendered, number: int) -> str:
    first, end = rendered.turns.get(number, (0, 0))
    return rendered.text[first:end]


def template_in(settings: Mapping[str, Any]) -> str | None:
    """Return the chat template in a tokenizer_config.json, of several the default, or None."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry for entry in template if isinstance(entry, dict)}
        template = named.get("default", {}).get("template")
    return template if isinstance(template, str) else None


def tokens_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a template may write, from a tokenizer_config.json; "" if missing."""
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
