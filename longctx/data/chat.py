"""Conversations as text, by the chat template of a tokenizer's folder, and the assistant's spans.

A template is a program of others: it runs in jinja2's immutable sandbox, set up as transformers
does, in this process and without a time limit. While it writes, two reports tell the texts apart:
`{% generation %} … {% endgeneration %}` marks the assistant's text, and the loop over the messages
reports each message that it begins with. Both cost one rendering.

Generation marks in the template decide. Without them, an answer is the text of the assistant's
message after the template's own prompt, with the token that ends the turn. A template may write an
answer differently once other messages follow: Qwen3 leaves out thinking. Then only the last turn is
written as the model will be asked for it, and by default no other is learned.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from longctx import untrusted
from longctx.config.fields import refuse
from longctx.data.cache import fingerprint
from longctx.data.documents import Document, NamedRows, Span
from longctx.data.messages import Message, Row, as_templates_expect, is_learned, read

_VERSION = 8  # raised when the same conversation would become another document
# Training always writes this day, so that the same conversation is always the same text. Llama's
# templates write it by themselves.
_DAY = datetime(2024, 7, 26)
_END = "<|the text ends here|>"
_MARK_IT = "put {% generation %} and {% endgeneration %} around it"


class Rendered(NamedTuple):
    """A conversation as text, and the text of each message by its number.

    marked: the spans in generation marks, with the message of each. turns: the span of every
    message that the template loops over, in the order of the text; empty if the template only looks
    at the message.
    """

    text: str
    marked: list[tuple[int, Span]]
    turns: dict[int, Span]

    def turn(self, number: int) -> str:
        """Return the text of a message."""
        first, end = self.turns.get(number, (0, 0))
        return self.text[first:end]


class _Tracker(Extension):
    """Receives the reports of a rendering; `written` characters precede the next ones."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.has_marks = False
        self.loops = 0  # that report
        self.begin([])

    def begin(self, messages: Sequence[Any]) -> None:
        """Forget the rendering before, and follow one of `messages`."""
        self.numbers = {id(message): number for number, message in enumerate(messages)}
        self.written = 0
        self.marked: list[tuple[int, Span]] = []
        self.number = -1  # of the message that is written
        self.begun: dict[int, int] = {}  # number of a message → position of its text
        self.ended = 0  # position of the end of the last loop over messages
        self.loop = 0  # the number of that loop

    def turns(self) -> dict[int, Span]:
        """Return the span of each message. The last one takes the text after the loop, such as a
        token that ends the text; unless nothing is written in the loop, which then only checks.
        """
        order = sorted(self.begun, key=lambda number: (self.begun[number], number))
        starts = [self.begun[number] for number in order]
        spans = list(zip(starts, [*starts[1:], self.ended], strict=True)) if starts else []
        if spans and spans[-1][0] < spans[-1][1]:
            spans[-1] = (spans[-1][0], self.written)
        return dict(zip(order, spans, strict=True))

    def parse(self, parser: Any) -> nodes.Node:
        """Compile a generation mark, as jinja2 asks an extension to."""
        self.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        """Take the text between two generation marks."""
        text = str(caller())
        self.marked.append((self.number, (self.written, self.written + len(text))))
        return text

    def report_turns(self, tree: nodes.Node) -> None:
        """Let outermost loops in `tree` call `reach` for each message, and `leave` at their end."""
        # A loop inside of another one looks at messages (gpt-oss searches the later ones); the
        # template writes the message of the outer loop.
        for name, field in tree.iter_fields():
            if not isinstance(field, list):
                continue
            reported = []
            for child in field:
                reported.append(child)
                if isinstance(child, nodes.For) and isinstance(child.target, nodes.Name):
                    message = nodes.Name(child.target.name, "load")
                    self.loops += 1
                    loop = nodes.Const(self.loops)
                    child.body.insert(0, self._statement("reach", loop, message, line=child.lineno))
                    reported.append(self._statement("leave", loop, line=child.lineno))
                elif isinstance(child, nodes.Node):
                    self.report_turns(child)
            setattr(tree, name, reported)

    def reach(self, loop: int, message: Any) -> None:
        """Note that the text of `message` begins, if it is one of the messages."""
        # Of several loops over it the last counts, since the first ones check or search
        number = self.numbers.get(id(message))
        if number is not None:
            self.begun[number] = self.written
            self.loop, self.number = loop, number

    def leave(self, loop: int) -> None:
        """Note that a loop over messages has ended. A macro in it may have loops of its own."""
        if loop == self.loop:
            self.ended = self.written

    def _statement(self, method: str, *arguments: nodes.Expr, line: int) -> nodes.Node:
        statement = nodes.ExprStmt(self.call_method(method, list(arguments)))
        return statement.set_lineno(line).set_environment(self.environment)


def _to_json(value: Any, **options: Any) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter writes."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class Template:
    """The chat template in a tokenizer's folder; ValueError, one line, if it has none.

    learned: the turns that are learned, as `data.turns` says. today: the day that it may write.
    """

    def __init__(self, folder: str | Path, learned: str = "auto", today: datetime = _DAY) -> None:
        self.folder = Path(folder).expanduser()
        self.learned = learned
        settings = untrusted.read_settings(self.folder / "tokenizer_config.json")
        source = _source(self.folder, settings)
        self.tokens = tokens_in(settings)
        self.values: dict[str, Any] = {}  # of the row that is written, such as enable_thinking
        # By the first, DeepSeek's tell calls of tools from answers; they join JSON text to others
        self.traits = ("message['content'] is none" in source, "['arguments'] +" in source)
        self._compile(source, today)
        is_told_twice = learned != "auto" and self.tracker.has_marks
        problem = f"the generation marks in the template of {self.folder} say what is learned"
        refuse((is_told_twice, f"data.turns={learned}: {problem}; leave data.turns out"))
        file = self.folder / "tokenizer.json"
        added = untrusted.read_settings(file, untrusted.TOKENIZER_SIZE).get("added_tokens", [])
        self.special = [token["content"] for token in added if token.get("special")]
        self.fingerprint = fingerprint([_VERSION, learned, source, self.tokens])

    def _compile(self, source: str, today: datetime) -> None:
        # As transformers (utils/chat_template_utils.py): other white space would be other tokens.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Tracker]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": today.strftime}
        tracker = environment.extensions[_Tracker.identifier]
        assert isinstance(tracker, _Tracker)
        self.tracker = tracker
        problem = "its chat template is not one ({})"
        with untrusted.named(self.folder, problem, (jinja2.TemplateError, RecursionError)):
            tree = environment.parse(source)
            tracker.report_turns(tree)
            code = environment.compile(tree)
        # As Environment.from_string does with a source
        shared = environment.make_globals(None)
        self.template = environment.template_class.from_code(environment, code, shared)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False
    ) -> Rendered:
        """Write `messages`; with `prompt` up to the text of the assistant's next message.

        Raises ValueError, one line, for whatever the template raises.
        """
        messages = [as_templates_expect(message, *self.traits) for message in messages]
        tracker = self.tracker
        tracker.begin(messages)
        blocks = []
        # An untrusted program can raise anything.
        problem = "does not take it ({})"
        with untrusted.named(f"the chat template of {self.folder}", problem, (Exception,)):
            given = {"messages": messages, "tools": tools or None, "documents": None}
            given["add_generation_prompt"] = prompt
            for block in self.template.generate(self.tokens | self.values | given):
                blocks.append(block)
                tracker.written += len(block)
        return Rendered("".join(blocks), tracker.marked, tracker.turns())

    def conversations(self, rows: NamedRows) -> Iterator[Document]:
        """Write the conversation of each row as text, with the assistant's spans.

        Raises ValueError, which begins with the location, if a row is no conversation, or if the
        assistant's part cannot be told apart.
        """
        for name, location, row in rows:
            with untrusted.named(location):
                messages, tools = self._read(row)
                problem = "no message of the assistant to learn; leave it out"
                refuse((not any(map(is_learned, messages)), problem))
                yield self._write(name, messages, tools)

    def answered(
        self, name: str, prompt: Sequence[Message], completion: Sequence[Message], tools: Any = None
    ) -> Document:
        """Write a conversation in two parts, and learn the completion alone.

        It begins at the end of what its prompt, as the model is given it, and the whole share. Of
        several messages in it the assistant's are learned. Raises ValueError, one line.
        """
        messages, tools = self._read({"messages": [*prompt, *completion], "tools": tools})
        question = self.render(messages[: len(prompt)], tools, prompt=True).text
        whole = self.render(messages, tools)
        if self.tracker.has_marks:
            text, spans = whole.text, self._marked(whole, messages)
        else:
            text, spans = self._after(question, whole, messages, len(prompt))
        start = _before_spaces(text, len(_shared(question, text)))
        spans = [(max(first, start), end) for first, end in spans if end > start]
        refuse((not spans, "the completion has no text of the assistant's"))
        return Document(name, text, spans)

    def prompt(self, location: str, row: Row) -> tuple[str, str]:
        """Write the conversation of a row as `question` does, with what its answer begins with."""
        with untrusted.named(location):
            return self.question(*self._read(row))

    def question(self, messages: Sequence[Message], tools: Any = None) -> tuple[str, str]:
        """Write `messages` up to the text of the assistant's next one. If the assistant's is the
        last, write them up to the end of its text, which is returned too.
        """
        *others, last = messages
        if last["role"] != "assistant" or last.get("tool_calls"):
            return self.render(messages, tools, prompt=True).text, ""
        # The next word's token holds the space before it. Templates take off spaces, and no mark
        begun = (last["content"] or "").rstrip(" ")
        whole = self.render([*others, {**last, "content": begun + _END}], tools).text
        text, mark, _ = whole.rpartition(_END)
        problem = f"the chat template of {self.folder} changes the assistant's last message"
        refuse((not mark or begun.strip() not in text, f"{problem}, to be continued; leave it out"))
        return text, begun

    def _read(self, row: Row) -> tuple[list[Message], Any]:
        """Return messages and tools of `row`, without special tokens in them, and let the template
        have its chat_template_kwargs.
        """
        messages, tools = read(row)
        self.values = row.get("chat_template_kwargs") or {}
        refuse((not isinstance(self.values, dict), "'chat_template_kwargs' must be an object"))
        parts = [(f"message {number}", message) for number, message in enumerate(messages, 1)]
        for part, content in (*parts, ("tools", tools), ("chat_template_kwargs", self.values)):
            # A Hub data set has dates, which JSON does not know.
            text = json.dumps(content, ensure_ascii=False, default=str)
            # As text of a user it would end the turn, and open one of the assistant's.
            for token in self.special:
                refuse((token in text, f"{part} contains the special token {token}; take it out"))
        return messages, tools

    def _write(self, name: str, messages: Sequence[Message], tools: Any) -> Document:
        whole = self.render(messages, tools)
        answers = _learned(messages)
        shortened = False
        if self.tracker.has_marks:
            text, spans = whole.text, self._marked(whole, messages)
        elif self.learned == "all" or (
            self.learned == "auto" and self._keeps_turns(messages, tools, whole)
        ):
            text, spans = whole.text, self._spans(whole, messages)
        else:
            messages = messages[: answers[-1] + 1]
            asked = _asked(messages)
            question = self.render(messages[:asked], tools, prompt=True).text
            text, spans = self._after(question, self.render(messages, tools), messages, asked)
            shortened = self.learned == "auto" and len(spans) < len(answers)
        spans = [(first, end) for first, end in spans if first < end]
        refuse((not spans, "the chat template writes nothing of the assistant's; leave it out"))
        return Document(name, text, spans, shortened)

    def _after(
        self, prompt: str, whole: Rendered, messages: Sequence[Message], asked: int
    ) -> tuple[str, list[Span]]:
        """Return the prompt of `asked` messages as the model will be given it, then the text of the
        messages after it in `whole`, and the spans of the answers there, which are learned.
        """
        # The prompt may differ from the same part of the whole: Mistral Nemo writes the system
        # message in prompts alone.
        # The messages after the prompt keep their spans, moved by what the prompt has more or less.
        before = prompt.removesuffix(self._openings[0])
        later = [first for number, (first, _) in whole.turns.items() if number >= asked]
        start = min(later, default=0)
        moved = len(before) - start
        spans = self._spans(whole, messages, asked)
        spans = [(first + moved, end + moved) for first, end in spans]
        return before + whole.text[start:], spans

    def _keeps_turns(self, messages: Sequence[Message], tools: Any, whole: Rendered) -> bool:
        """Return True if `whole` has every answer as the model is asked for it and writes it."""
        # Compares the prompts of the first and the last answer, and each turn with the same turn
        # alone. A rendering for each prompt would take time that is quadratic in the turns.
        answers = _numbers(messages, "assistant")
        # Mistral Nemo writes the system message before the last question only.
        for count in {answers[0], _asked(messages)} - {0}:
            prompt = self.render(messages[:count], tools, prompt=True)
            if not whole.text.startswith(prompt.text):
                return False
        # Qwen3 leaves out the thinking of a turn once another one follows.
        for first, end in pairwise(_numbers(messages, "user")):
            backwards = range(end - 1, first, -1)
            last = next((n for n in backwards if messages[n]["role"] == "assistant"), None)
            if last is not None:
                alone = self.render(messages[first : last + 1])
                if not alone.turn(last - first).startswith(whole.turn(last)):
                    return False
        return True

    def _marked(self, rendered: Rendered, messages: Sequence[Message]) -> list[Span]:
        """Return the spans in generation marks, without messages that are not learned."""
        excluded = set(_numbers(messages, "assistant")) - set(_learned(messages))
        problem = "the chat template does not show whose its generation marks are"
        refuse((not excluded <= rendered.turns.keys(), f"{problem}; leave out train and weight"))
        return [span for owner, span in rendered.marked if owner not in excluded]

    def _spans(self, rendered: Rendered, messages: Sequence[Message], asked: int = 0) -> list[Span]:
        """Return the spans of the learned messages from number `asked` on, without the text that
        opens them, but with its last spaces: the token of a first word holds such a space, so the
        model writes it.
        """
        spans = []
        openings = self._openings
        # Gemma 4 writes them into the assistant's message before them.
        hidden = any(not rendered.turn(number) for number in _numbers(messages, "tool"))
        problem = "the chat template writes results of tools among the assistant's text"
        refuse((hidden, f"{problem}; {_MARK_IT}"))
        for number in _learned(messages):
            if number >= asked and number in rendered.turns:
                first, end = rendered.turns[number]
                text = rendered.text[first:end]
                opening = next(filter(text.startswith, openings), "")
                # Begin-of-text, or a system message of the template's own, may precede the opening
                # of a first message. A later one without opening continues the assistant's text.
                if not opening and not any(map(rendered.turn, range(number))):
                    inside = next((part for part in openings if part and part in text), "")
                    opening = text[: text.find(inside) + len(inside)]
                spans.append((_before_spaces(rendered.text, first + len(opening)), end))
        return spans

    @cached_property
    def _openings(self) -> list[str]:
        """Return the text between a question and the model's text: in a prompt, and before answers
        at the end, with thinking, and before another question. The prompt may have more of it, such
        as the mark at which thinking begins, or the empty thinking of Qwen 3.5.
        """
        question, answer = {"role": "user", "content": "0"}, {"role": "assistant", "content": "0"}
        prompt = self.render([question], prompt=True).text
        openings = []
        for answers in ([answer], [{**answer, "thinking": "0"}], [answer, question]):
            whole = self.render([question, *answers])
            first, end = whole.turns.get(1, (0, 0))
            is_hidden = first == end or not prompt.startswith(whole.text[:first])
            problem = f"the chat template of {self.folder} does not show the assistant's text"
            refuse((is_hidden, f"{problem}; {_MARK_IT}"))
            openings += [prompt[first:], _shared(prompt[first:], whole.text[first:end])]
        return sorted(openings, key=len, reverse=True)


def _shared(first: str, second: str) -> str:
    """Return the characters with which both texts begin."""
    return os.path.commonprefix([first, second])  # noqa: RUF071


def _before_spaces(text: str, end: int) -> int:
    """Return the position before the spaces that end at `end`."""
    while text[end - 1 : end] == " ":
        end -= 1
    return end


def _numbers(messages: Sequence[Message], role: str) -> list[int]:
    """Return the numbers of the messages of `role`."""
    return [number for number, message in enumerate(messages) if message["role"] == role]


def _learned(messages: Sequence[Message]) -> list[int]:
    """Return the numbers of the messages that are learned."""
    return [number for number, message in enumerate(messages) if is_learned(message)]


def _asked(messages: Sequence[Message]) -> int:
    """Return how many messages the last turn answers: up to the user's last one before an answer,
    or without one of the user, up to the first answer.
    """
    answers = _numbers(messages, "assistant")
    questions = _numbers(messages, "user")
    return max((number + 1 for number in questions if number < answers[-1]), default=answers[0])


def template_in(settings: Mapping[str, Any]) -> str | None:
    """Return the chat template in a tokenizer_config.json, of several the default, or None."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry for entry in template if isinstance(entry, dict)}
        template = named.get("default", {}).get("template")
    return template if isinstance(template, str) else None


def tokens_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a template may write, from a tokenizer_config.json; "" if missing."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        tokens[name] = token if isinstance(token, str) else ""
    return tokens


def has_template(folder: Path) -> bool:
    """Return True if the folder of a tokenizer has a chat template."""
    settings = untrusted.read_settings(folder / "tokenizer_config.json")
    return os.path.lexists(folder / "chat_template.jinja") or template_in(settings) is not None


def _source(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if os.path.lexists(file):
        return untrusted.read_text(file, within=folder)
    template = template_in(settings)
    problem = "no chat template, which conversations need; put a chat_template.jinja there"
    refuse((template is None, f"{folder}: {problem}, or train with data.tokenizer=FOLDER of one"))
    return template or ""
