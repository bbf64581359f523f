"""Chat templates: jinja2 in its immutable sandbox, set up as transformers sets it up.

A template is a program that writes a conversation. While it writes, two reports tell which text is
whose: `{% generation %} … {% endgeneration %}` marks the assistant's text, and the loop over the
messages reports each message that it begins with. Both cost one rendering. A rendering runs in this
process without a time limit, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Span = tuple[int, int]  # characters first .. end - 1


class Rendered(NamedTuple):
    """A conversation as text, and the text of each message by its number.

    marked: spans in generation marks. turns: span of every message that the template loops over, in
    the order of the text. The span of a message that the template only looks at is empty.
    """

    text: str
    marked: list[Span]
    turns: dict[int, Span]


class Renderer:
    """Writes conversations by the chat template `source` of `folder`, on the day `today`."""

    def __init__(
        self, folder: Path, source: str, tokens: Mapping[str, str], today: datetime
    ) -> None:
        self.folder = folder
        self.tokens = tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Tracker]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = today.strftime
        tracker = environment.extensions[_Tracker.identifier]
        assert isinstance(tracker, _Tracker)
        self.tracker = tracker
        try:
            tree = environment.parse(source)
            tracker.report_turns(tree)
            code = environment.compile(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"{folder}: its chat template is not one ({_short(error)})") from error
        # Kept by its arguments, as Environment.from_string does with a source
        shared = environment.make_globals(None)
        self.template = environment.template_class.from_code(environment, code, shared)

    @property
    def has_marks(self) -> bool:
        """True if the template marks the assistant's text itself."""
        return self.tracker.has_marks

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, prompt: bool = False
    ) -> Rendered:
        """Write `messages`; with `prompt` up to the text of the assistant's next message.

        Raises ValueError, one line, for whatever the template raises.
        """
        messages = [_as_templates_expect(message) for message in messages]
        tracker = self.tracker
        tracker.begin(messages)
        blocks = []
        try:
            for block in self.template.generate(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=prompt,
                **self.tokens,
            ):
                blocks.append(block)
                tracker.written += len(block)
        except Exception as error:  # somebody else's program: it can raise anything
            raise ValueError(
                f"the chat template of {self.folder} does not take it ({_short(error)})"
            ) from error
        return Rendered("".join(blocks), tracker.marked, tracker.turns())


class _Tracker(Extension):
    """Receives the reports of a rendering: `written` characters stand before what comes next."""

    tags = {"generation"}

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.has_marks = False
        self.begin([])

    def begin(self, messages: Sequence[Any]) -> None:
        """Forget the rendering before, and follow one of `messages`."""
        self.numbers = {id(message): number for number, message in enumerate(messages)}
        self.written = 0
        self.marked: list[Span] = []
        self.begun: dict[int, int] = {}  # number of a message → where its text begins
        self.ended = 0  # where the last loop over them ended
        self.inside = False  # the loop that runs is over messages

    def turns(self) -> dict[int, Span]:
        """Return the span of each message. The last one takes what follows the loop, such as a
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
        self.marked.append((self.written, self.written + len(text)))
        return text

    def report_turns(self, tree: nodes.Node) -> None:
        """Let every outermost loop in `tree` call `reach` for each message, and `leave` at its end.

        A loop inside of another one looks at messages (gpt-oss searches the later ones), and the
        message of the outer loop is the one that is written.
        """
        for name, field in tree.iter_fields():
            if not isinstance(field, list):
                continue
            reported = []
            for child in field:
                reported.append(child)
                if isinstance(child, nodes.For) and isinstance(child.target, nodes.Name):
                    variable = nodes.Name(child.target.name, "load")
                    child.body.insert(0, self._statement("reach", variable, line=child.lineno))
                    reported.append(self._statement("leave", line=child.lineno))
                elif isinstance(child, nodes.Node):
                    self.report_turns(child)
            setattr(tree, name, reported)

    def reach(self, message: Any) -> None:
        """Note that the text of `message` begins, if it is one of the messages.

        Of several loops over it the last counts, since the first ones check or search.
        """
        number = self.numbers.get(id(message))
        self.inside = number is not None
        if number is not None:
            self.begun[number] = self.written

    def leave(self) -> None:
        """Note that a loop has ended; one over something else does not count."""
        if self.inside:
            self.ended, self.inside = self.written, False

    def _statement(self, method: str, *arguments: nodes.Expr, line: int) -> nodes.Node:
        statement = nodes.ExprStmt(self.call_method(method, list(arguments)))
        return statement.set_lineno(line).set_environment(self.environment)


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a message as transformers passes it on: without keys that hold null, which
    templates would write as "None", and with its thinking under both names that templates read.

    A copy, since reports name a message by its identity.
    """
    held = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    thinking = next((held[name] for name in names if name in held), None)
    if thinking is None:
        return held
    return {"thinking": thinking, **held, "reasoning_content": thinking}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes for HTML that jinja2's own filter writes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _short(error: Exception) -> str:
    """Return the text of an error on one line of bounded length."""
    text = " ".join(str(error)[:2000].split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:300]}..."
